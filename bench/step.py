"""One training step, of the embedded default or of --model, part by part (`make bench-step`); JSON last.

CPU seconds are there too: other programs on the machine disturb them less.

Rollouts use the world's best instruction, under which they are longest, and a real search server. In bfloat16 they
begin with the engine's copy of the weights, as after an update.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from config import PRESETS, Config, parse  # noqa: E402
from plumbing.faults import one_line  # noqa: E402

BEST = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, answer in <answer> "
    "</answer>. Search one entity at a time. State the fact found after each search. Answer with the exact name only. "
    "Keep searching until the last fact is found."
)


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say whose steps are measured."""
    parser.add_argument("--model", default="world", help="a preset (world, smollm2-135m), or a folder with --preset")
    parser.add_argument("--preset", help="the preset whose other flags the model of a folder takes")
    parser.add_argument("--dtype", help="float32 or bfloat16; without it, as a run chooses")


def config(args: argparse.Namespace, **changes: Any) -> Config:
    """Returns the preset's Config, changed; its learning rate is 0: all steps start from the same policy."""
    given = {name: getattr(args, name) for name in ("model", "preset", "dtype")}
    flags = [x for name, value in given.items() if value for x in (f"--{name}", value)]
    return parse(flags, mode="static", lr=0.0, **changes)


def first_step(out: str) -> float:
    """Returns the seconds from `python inspo.py` to the end of its first step, imports and servers included."""
    subprocess.run([sys.executable, "inspo.py", "--out", out, "--T", "1", "--eval_n", "1"], cwd=HERE, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    row = json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1])
    return row["time/total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_policy(parser)
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    parser.add_argument("--micro_tokens", type=int, nargs="*", default=[], help="of the update (the preset's)")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat: at least 1")

    import torch

    from engines.choose import dtype_of
    from plumbing.servers import Child
    from tasks import Job, reward
    from tasks.search_qa import SearchQA
    from training.policy import Policy
    from training.ranks import Ranks

    cfg = config(args)
    task, ranks = SearchQA(cfg), Ranks("cpu", cfg.patience, dtype_of(cfg, "cpu"))
    questions = task.questions("train")[: cfg.batch]
    jobs = [Job(None, BEST, q, k) for k, q in enumerate(questions) for _ in range(cfg.G)]
    found: dict = {"model": cfg.model, "dtype": ranks.dtype, "threads": torch.get_num_threads()}
    found["torch"] = torch.__version__
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with contextlib.ExitStack() as stack:
        tmp = stack.enter_context(tempfile.TemporaryDirectory())
        task.connect(stack.enter_context(Child(serve, f"{tmp}/log")).url)
        policy = stack.enter_context(contextlib.closing(Policy(cfg, ranks, "torch", task)))
        times = []
        for k in range(args.repeat + 1):
            policy.worker.synced = policy.worker.shared  # as after an update
            start = time.monotonic(), time.process_time()
            taus = policy.rollout(k, "rollout", jobs)
            times.append((time.monotonic() - start[0], time.process_time() - start[1]))
        wall, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
        found |= {"rollout_s": round(wall, 3), "rollout_cpu_s": round(cpu, 3)}
        found |= {"trajectories": len(taus), "searches": sum(t.served("search") for t in taus) / len(taus)}
        found["tokens_per_trajectory"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
        reward(task, taus)
        policy.learner.set_advantages(taus)
        for micro in args.micro_tokens or [cfg.micro_tokens]:
            policy.learner.cfg, rows = replace(cfg, micro_tokens=micro), []
            for _ in range(args.repeat + 1):
                start = time.monotonic(), time.process_time()
                policy.update(1, taus)
                rows.append((time.monotonic() - start[0], time.process_time() - start[1]))
            wall, cpu = (statistics.median(column) for column in zip(*rows[1:], strict=True))
            found[f"update_s micro_tokens={micro}"] = round(wall, 3)
            found[f"measured_cpu_s micro_tokens={micro}"] = round(cpu, 3)
        if cfg.model == PRESETS["world"]["model"]:
            found["start_to_end_of_first_step_s"] = round(first_step(f"{tmp}/run"), 2)
    for name, value in found.items():
        print(f"{name:42} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
