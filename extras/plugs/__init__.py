"""Formats and tools that few runs need. The core has their names (tasks/__init__.py) and runs
without this folder."""
