"""Two tasks that are not the paper's: they show what the seam (tasks/__init__.py, docs/tasks.md)
can carry."""
