"""Run by torchrun: `Policy.update` on given trajectories, by all ranks; writes what it computes.

    torchrun --nproc_per_node=2 tests/ranks_policy.py TRAJECTORIES OUT

Takes one update on TRAJECTORIES, a pickle of (Config, trajectories). OUT gets metrics.json,
`policy/`, and the fault of a checkpoint for which rank 1's disk has no room.
"""

import json
import pickle
import resource
import signal
import sys
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from tasks.task import load_task
from training.policy import Policy, follow, reason
from training.ranks import Ranks


def main() -> None:
    taus_path, out = map(Path, sys.argv[1:])
    cfg, taus = pickle.loads(taus_path.read_bytes())
    ranks = Ranks("cpu", cfg.patience)
    task = load_task(cfg)
    if ranks.rank:
        if ranks.rank == 1:  # a disk on which no file has more than 4 KiB
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return follow(ranks, task)
    ranks.broadcast((cfg, task.address()))
    policy = Policy(cfg, ranks, task)
    (out / "metrics.json").write_text(json.dumps(policy.update(1, taus)))
    policy.export(out / "policy")
    policy.save(out / "checkpoint")
    try:
        policy.written.result()
    except CheckpointException as e:
        (out / "full").write_text(reason(e))
    policy.close()


if __name__ == "__main__":
    main()
