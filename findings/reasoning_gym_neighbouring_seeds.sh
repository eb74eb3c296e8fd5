#!/bin/bash
# reasoning-gym 0.1.25: item i of a dataset is drawn with the seed plus i, so that seeds 0 and 1 give one sequence,
# moved by one. A test set made with the next seed is the training set, and a run that adds 1 to the seed at every epoch
# meets one new question each time: memory passes for skill. Seeds must be further apart than a dataset is long.
# score_answer pays a wrong answer for what it contains: where 7 is right, 17, 70 and -7 get 0.5, and 8 gets 0.
#
# Seen on 2026-11-28, Python 3.11, Linux:
#     questions of seed 1 that seed 0 has, too: chain_sum 99, gcd 99, knights_knaves 99, spell_backward 99 of 100
#     rewards where 7 is right: 7 1.0, 17 0.5, 70 0.5, -7 0.5, 8 0.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile reasoning-gym==0.1.25
venv/bin/python -W ignore - <<'EOF'
from importlib.metadata import version

import reasoning_gym

print("reasoning-gym", version("reasoning-gym"))


def questions(task, seed):
    return {item["question"] for item in reasoning_gym.create_dataset(task, seed=seed, size=100)}


for task in ("chain_sum", "gcd", "knights_knaves", "spell_backward"):
    shared = len(questions(task, 0) & questions(task, 1))
    print(task, "questions of both seeds:", shared)
    assert shared == 99
    assert len(questions(task, 0) & questions(task, 1000)) < 10

task = reasoning_gym.create_dataset("chain_sum", seed=0, size=1)
entry = task[0] | {"answer": "7"}
rewards = {answer: task.score_answer(answer, entry) for answer in ("7", "17", "70", "-7", "8")}
print("where 7 is right:", rewards)
assert rewards == {"7": 1.0, "17": 0.5, "70": 0.5, "-7": 0.5, "8": 0.0}
EOF
