"""Measures an agent on its task, the paper's benchmarks or a file, and compares what was measured.

evaluation/ does it: python evaluate.py --help
"""

from evaluation.command import main

if __name__ == "__main__":
    main()
