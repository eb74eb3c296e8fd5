"""Run by torchrun: tests/ranks_learner.py with the learner of extras/objectives.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import ranks_learner  # noqa: E402

from extras.objectives import ObjectiveLearner  # noqa: E402

if __name__ == "__main__":
    ranks_learner.Learner = ObjectiveLearner
    ranks_learner.main()
