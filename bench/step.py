"""One training step of the embedded default, part by part (`make bench-step`); JSON last.

The rollouts are made under the world's best instruction, where they are longest; the search server is a real one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

BEST = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, answer in <answer> "
    "</answer>. Search one entity at a time. State the fact found after each search. Answer with the exact name only. "
    "Keep searching until the last fact is found."
)


def first_step(out: str) -> float:
    """Seconds from `python inspo.py` to the end of its first step, import and servers included."""
    subprocess.run([sys.executable, "inspo.py", "--out", out, "--T", "1", "--eval_n", "1"], cwd=HERE, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    row = json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1])
    return row["time/total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--micro_tokens", type=int, nargs="*", default=[])
    args = parser.parse_args()

    import torch

    from config import PRESETS, Config
    from data import em, load_questions
    from engines.torch_engine import TorchEngine
    from grpo import Learner, advantages
    from harness.servers import Child
    from rollout import STOP, Search, rollout
    from training.model import load_policy

    cfg = Config(**PRESETS["world"])
    questions = load_questions(cfg.train)[: cfg.batch]
    model, tokenizer = load_policy(cfg.model, "cpu")
    reference, _ = load_policy(cfg.model, "cpu")
    engine = TorchEngine(model, tokenizer, STOP, cfg.max_rows)
    jobs = [(0, BEST, q, k) for k, q in enumerate(questions) for _ in range(cfg.G)]
    found: dict = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with tempfile.TemporaryDirectory() as tmp, Child(serve, f"{tmp}/log") as server:
        search = Search(server.url, cfg.topk)
        roll = partial(rollout, engine, tokenizer, search, jobs, max_turns=cfg.max_turns, max_response=cfg.max_response,
                       max_observation=cfg.max_observation, max_prompt=cfg.max_prompt, temperature=1.0)  # fmt: skip
        times = []
        for k in range(args.repeat + 1):
            start = time.time()
            taus = roll(seed=k)
            times.append(time.time() - start)
        found["rollout_s"] = round(statistics.median(times[1:]), 3)
        found |= {"trajectories": len(taus), "searches": sum(t.served for t in taus) / len(taus)}
        found["tokens_per_trajectory"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
        for tau, (_, _, q, _) in zip(taus, jobs, strict=True):
            tau.reward = em(tau.prediction, q.golds)
        for micro in args.micro_tokens or [cfg.micro_tokens]:
            learner = Learner(model, reference, lr=0.0, T=cfg.T, warmup=cfg.warmup, eps=cfg.eps, beta=cfg.beta,
                              temperature=1.0, loss_agg=cfg.loss_agg, micro_tokens=micro)  # fmt: skip
            times = []
            for _ in range(args.repeat + 1):
                start = time.time()
                learner.update(1, [taus], advantages(taus))
                times.append(time.time() - start)
            found[f"update_s micro_tokens={micro}"] = round(statistics.median(times[1:]), 3)
        found["start_to_end_of_first_step_s"] = round(first_step(f"{tmp}/run"), 2)
    for name, value in found.items():
        print(f"{name:32} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
