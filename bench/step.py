"""One training step of the embedded default, part by part (`make bench-step`); JSON last.

The update is also predicted with the formulas of `--dry_run`, from the rates that this CPU reaches in products of the
model's shapes, in attention and in copying. Prediction and update take turns; both are in CPU seconds, which other
programs on the machine disturb less, and their medians are compared.

Rollouts use the world's best instruction, under which they are longest, and a real search server.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from models.model import blocks  # noqa: E402
from plumbing.faults import one_line  # noqa: E402
from training.speed import Assumed, Card, Lengths, shape_of, update_flops, update_seconds  # noqa: E402

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


def card_here(model: Any, tokens: int, lengths: Lengths) -> Card:
    """Returns what this CPU reaches in float32 at a micro-batch's own shapes.

    FLOP/s are those of all products and attentions of a forward and a backward pass, one after another; bytes/s those
    of a copy in memory. Seconds are the CPU's.
    """
    import torch
    import torch.nn.functional as F

    config, shape = model.config, shape_of(model.config, torch.float32)
    n, seconds = lengths.total, 0.0
    scored, rows = tokens * lengths.sampled // n, tokens // n
    head = model.get_output_embeddings().weight
    for weight in [p.detach() for block in blocks(model) for p in block.parameters() if p.ndim == 2] + [head.detach()]:
        count = scored if len(weight) == shape.vocabulary else tokens
        x, g = torch.randn(count, weight.shape[1]), torch.randn(count, weight.shape[0])
        for product in (lambda x=x, w=weight: x @ w.T, lambda g=g, w=weight: g @ w, lambda g=g, x=x: g.T @ x):
            seconds += timed(product)
    dim = shape.width // config.num_hidden_layers // config.num_attention_heads
    q, k, v = torch.randn(3, 1, config.num_attention_heads, n, dim, requires_grad=True)

    def attention() -> None:
        for _ in range(rows * config.num_hidden_layers):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    seconds += timed(attention)
    flops = update_flops(shape, tokens, scored, rows * n * n / 2, recompute=0)
    a, b = torch.randn(2, 1 << 24)  # 64 MB each: more than a core's own caches
    return Card(flops / seconds, 2 * a.nbytes / timed(lambda: b.copy_(a)), math.inf, 0.0)


def timed(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call, after one that is not counted."""
    work()
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    parser.add_argument("--micro_tokens", type=int, nargs="*", default=[], help="of the update (the preset's)")
    args = parser.parse_args()

    import torch

    from config import PRESETS, Config
    from engines.torch_engine import TorchEngine
    from grpo import Learner, micro_batches
    from models.model import load_policy
    from plumbing.servers import Child
    from rollout import rollout
    from tasks import Job, reward
    from tasks.search_qa import SearchQA
    from tasks.tools import stop_strings

    cfg = Config(**PRESETS["world"])
    task = SearchQA(cfg)
    questions = task.questions("train")[: cfg.batch]
    model, tokenizer = load_policy(cfg.model, "cpu")
    reference, _ = load_policy(cfg.model, "cpu")
    jobs = [Job(None, BEST, q, k) for k, q in enumerate(questions) for _ in range(cfg.G)]
    found: dict = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with tempfile.TemporaryDirectory() as tmp, Child(serve, f"{tmp}/log") as server:
        task.connect(server.url)
        engine = TorchEngine(model, tokenizer, stop_strings(task.tools), cfg.max_rows)
        times = []
        for k in range(args.repeat + 1):
            start = time.monotonic()
            taus = rollout(engine, tokenizer, task, jobs, cfg, temperature=1.0, seed=k)
            times.append(time.monotonic() - start)
        found["rollout_s"] = round(statistics.median(times[1:]), 3)
        found |= {"trajectories": len(taus), "searches": sum(t.served("search") for t in taus) / len(taus)}
        found["tokens_per_trajectory"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
        reward(task, taus)
        tokens = sum(len(tau.ids) for tau in taus)
        mean, sampled = round(tokens / len(taus)), round(sum(sum(tau.mask) for tau in taus) / len(taus))
        prompt = round(sum(tau.prompt_tokens for tau in taus) / len(taus))
        lengths = Lengths("measured", prompt, mean - prompt - sampled, sampled, row=0, longest=0, searches=0, rounds=0)
        shape, rates = shape_of(model.config, torch.float32), Assumed(flops=1, bandwidth=1, link=1)
        for micro in args.micro_tokens or [cfg.micro_tokens]:
            trained = replace(cfg, lr=0.0, micro_tokens=micro)
            learner, rows = Learner(model, reference, trained), []
            learner.set_advantages(taus)
            for _ in range(args.repeat + 1):
                card = card_here(model, tokens // len(micro_batches(taus, micro)), lengths)
                predicted = sum(update_seconds(trained, shape, card, 1, lengths, rates).values())
                start = time.monotonic(), time.process_time()
                learner.update(1, [taus])
                rows.append((time.monotonic() - start[0], time.process_time() - start[1], predicted))
            wall, cpu, predicted = (statistics.median(column) for column in zip(*rows[1:], strict=True))
            found[f"update_s micro_tokens={micro}"] = round(wall, 3)
            found[f"measured_cpu_s micro_tokens={micro}"] = round(cpu, 3)
            found[f"predicted_cpu_s micro_tokens={micro}"] = round(predicted, 3)
            found[f"measured / predicted micro_tokens={micro}"] = round(cpu / predicted, 2)
        found["start_to_end_of_first_step_s"] = round(first_step(f"{tmp}/run"), 2)
    for name, value in found.items():
        print(f"{name:42} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
