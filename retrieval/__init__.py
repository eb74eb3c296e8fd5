"""What `retrieval_server.py` is made of: passages on disk, encoders, indexes, and how an index is built."""
