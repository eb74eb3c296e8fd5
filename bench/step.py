"""One training step of the embedded default, part by part (`make bench-step`); JSON last.

Rollouts use the world's best instruction, under which they are longest, and a real search server.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from faults import one_line  # noqa: E402

BEST = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, answer in <answer> "
    "</answer>. Search one entity at a time. State the fact found after each search. Answer with the exact name only. "
    "Keep searching until the last fact is found."
)


def first_step(out: str) -> float:
    """Returns the seconds from `python inspo.py` to the end of its first step, imports and servers included."""
    subprocess.run([sys.executable, "inspo.py", "--out", out, "--T", "1", "--eval_n", "1"], cwd=HERE, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    row = json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1])
    return row["time/total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    parser.add_argument("--micro_tokens", type=int, nargs="*", default=[], help="of the update (the preset's)")
    args = parser.parse_args()

    import torch

    from config import PRESETS, Config
    from data import em, load_questions
    from engines.torch_engine import TorchEngine
    from grpo import Learner
    from harness.servers import Child
    from objectives import set_advantages
    from rollout import Job, rollout
    from tools import Search, stop_strings
    from training.model import load_policy

    cfg = Config(**PRESETS["world"])
    questions = load_questions(cfg.train)[: cfg.batch]
    model, tokenizer = load_policy(cfg.model, "cpu")
    reference, _ = load_policy(cfg.model, "cpu")
    jobs = [Job(0, BEST, q, k) for k, q in enumerate(questions) for _ in range(cfg.G)]
    found: dict = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with tempfile.TemporaryDirectory() as tmp, Child(serve, f"{tmp}/log") as server:
        search = Search(server.url, cfg.topk)
        engine = TorchEngine(model, tokenizer, stop_strings([search]), cfg.max_rows)
        times = []
        for k in range(args.repeat + 1):
            start = time.time()
            taus = rollout(engine, tokenizer, [search], jobs, cfg, temperature=1.0, seed=k)
            times.append(time.time() - start)
        found["rollout_s"] = round(statistics.median(times[1:]), 3)
        found |= {"trajectories": len(taus), "searches": sum(t.served("search") for t in taus) / len(taus)}
        found["tokens_per_trajectory"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
        for tau in taus:
            tau.reward = em(tau.prediction, tau.question.golds)
        set_advantages(taus)
        for micro in args.micro_tokens or [cfg.micro_tokens]:
            learner = Learner(model, reference, replace(cfg, lr=0.0, micro_tokens=micro))
            times = []
            for _ in range(args.repeat + 1):
                start = time.time()
                learner.update(1, [taus])
                times.append(time.time() - start)
            found[f"update_s micro_tokens={micro}"] = round(statistics.median(times[1:]), 3)
        found["start_to_end_of_first_step_s"] = round(first_step(f"{tmp}/run"), 2)
    for name, value in found.items():
        print(f"{name:32} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
