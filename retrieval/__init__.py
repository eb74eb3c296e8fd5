"""The parts of `retrieval_server.py`: passages on disk, encoders, indexes and their build."""
