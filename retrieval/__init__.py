"""The search server (server.py), and its parts: passages on disk, encoders, indexes and their build."""
