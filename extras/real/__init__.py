"""A real language model and real facts: what a run on them starts from. Nothing in the core needs
it."""
