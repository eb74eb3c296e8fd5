"""One training step, of the embedded default or of --model: seconds of rollouts and update; JSON last.

    OMP_NUM_THREADS=1 python -m extras.bench.step

Rollouts use the world's best instruction, under which they are longest, and a real search server. CPU seconds are less
disturbed by other programs than the clock's. For the world also the time from `python inspo.py` to the end of its
first step.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from config import PRESETS
from extras.bench.harness import ROOT, Player, add_policy, config_of, parser_of, timed
from plumbing.faults import one_line
from plumbing.servers import Child


def first_step() -> float:
    """Returns the seconds from `python inspo.py` to the end of its first step, imports and servers included."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "inspo.py", "--out", f"{out}/run", "--T", "1", "--eval_n", "1"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return json.loads(Path(out, "run", "metrics.jsonl").read_text().splitlines()[-1])["time/total"]


def main() -> None:
    parser = parser_of(__doc__)
    add_policy(parser)
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat: at least 1")
    import torch

    cfg = config_of(args)
    rows = []
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "server.log")
        server = stack.enter_context(Child([str(ROOT / "retrieval_server.py"), "--corpus", cfg.corpus], log))
        player = stack.enter_context(contextlib.closing(Player(cfg, server=server.url)))
        for t in range(args.repeat + 1):
            taus, *rollout = timed(lambda t=t: player.rollout(t))
            rows.append([*rollout, *timed(lambda t=t, taus=taus: player.update(t, taus))[1:]])
    seconds = [statistics.median(column) for column in zip(*rows[1:], strict=True)]  # the first warms up
    result = {"model": cfg.model, "dtype": player.dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}
    names = ("rollout_s", "rollout_cpu_s", "update_s", "update_cpu_s")
    result |= {name: round(value, 3) for name, value in zip(names, seconds, strict=True)}
    result |= {"trajectories": len(taus), "searches": sum(tau.served("search") for tau in taus) / len(taus)}
    result["tokens_per_trajectory"] = round(sum(len(tau.ids) for tau in taus) / len(taus), 1)
    if cfg.model == PRESETS["world"]["model"]:
        result["start_to_end_of_first_step_s"] = round(first_step(), 2)
    for name, value in result.items():
        print(f"{name:30} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    with one_line():
        main()
