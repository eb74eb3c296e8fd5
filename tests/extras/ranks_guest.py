"""Run by torchrun: tests/ranks_learner.py with a guest's learner, named first as module:Class."""

import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import ranks_learner  # noqa: E402

if __name__ == "__main__":
    module, _, name = sys.argv.pop(1).partition(":")
    ranks_learner.Learner = getattr(importlib.import_module(module), name)
    ranks_learner.main()
