"""Run by torchrun: `Policy.update` on given trajectories, by all ranks; writes what it computes.

    torchrun --nproc_per_node=2 tests/ranks_policy.py TRAJECTORIES OUT

Takes one update on TRAJECTORIES, a pickle of (Config, trajectories). OUT gets metrics.json,
`policy/` and, of a reset whose model is gone, the fault.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from plumbing.faults import Fault
from tasks.task import load_task
from training.policy import Policy, follow
from training.ranks import Ranks


def main() -> None:
    taus_path, out = map(Path, sys.argv[1:])
    cfg, taus = pickle.loads(taus_path.read_bytes())
    ranks = Ranks("cpu", cfg.patience)
    task = load_task(cfg)
    if ranks.rank:
        return follow(ranks, task)
    ranks.broadcast((cfg, task.address()))
    policy = Policy(cfg, ranks, task)
    (out / "metrics.json").write_text(json.dumps(policy.update(1, taus)))
    policy.export(out / "policy")
    policy.cfg = replace(cfg, model="/no/such")
    try:
        policy.reset()
    except Fault as e:
        (out / "fault").write_text(str(e))
    policy.close()


if __name__ == "__main__":
    main()
