"""Run in a copy of the project: one evolution after a failed step, without a policy; prints what the optimizer read.

python evolve.py [flags of inspo.py]
"""

import json
import sys
from types import SimpleNamespace

import inspo
from config import parse
from plumbing.faults import OptimizerDown
from population import Population, ReplayBuffer
from tasks import Question, Trajectory, load_task

read = []


def ask(prompt, when):
    read.append(prompt)
    raise OptimizerDown("it has said enough")


cfg = parse(sys.argv[1:])
P, B = Population(cfg.tau_s, cfg.window), ReplayBuffer(cfg.buffer)
P.join("I search once.", None, 0).rewards = [0.25]
D = {k: Question(k, f"Who is {k}?", ("x",), "s") for k in "abcdefgh"}
task = load_task(cfg)
taus = [Trajectory(0, q, 0, [], 0, response="<answer> y </answer>", failed=True) for q in D.values()]
B.add(1, taus, task.shown)
log = SimpleNamespace(evolved=lambda *_: None, limit=lambda rollouts: "")
inspo.evolve(cfg, 1, P, B, task, None, SimpleNamespace(ask=ask), D, log)
[prompt] = read
print(json.dumps(prompt))
