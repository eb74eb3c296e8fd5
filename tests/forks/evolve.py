"""Run in a copy of the project: one evolution after a failed step, without a policy; prints what the optimizer read.

python evolve.py [flags of inspo.py]
"""

import json
import sys
from types import SimpleNamespace

import inspo
from config import parse
from plumbing.faults import OptimizerDown
from tasks import Question, Trajectory, load_task

read = []


def ask(prompt, when):
    read.append(prompt)
    raise OptimizerDown("it has said enough")


cfg = parse(sys.argv[1:])
log = SimpleNamespace(evolved=lambda *_: None)
evolution = inspo.Evolution(cfg, load_task(cfg), SimpleNamespace(ask=ask), inspo.population_of(cfg), log)
evolution.P.join("I search once.", None, 0).rewards = [0.25]
evolution.D = {k: Question(k, f"Who is {k}?", ("x",), "s") for k in "abcdefgh"}
taus = [Trajectory(0, q, 0, [], 0, response="<answer> y </answer>", failed=True) for q in evolution.D.values()]
evolution.B.add(1, taus, evolution.task.shown)
evolution.evolve(1, None)
[prompt] = read
print(json.dumps(prompt))
