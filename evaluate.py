"""Measures an agent on its task, the paper's benchmarks or a file, and compares what was measured.

evaluation/ does it: python evaluate.py --help
"""

from plumbing import stop  # noqa: F401  isort: skip  (first: from here on a Ctrl-C is one line)
from evaluation.command import main

if __name__ == "__main__":
    main()
