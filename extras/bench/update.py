"""An update of a random policy of Qwen2.5-3B's shape on one device; JSON last.

    python -m extras.bench.update

A step is the paper's: two mini-batches, log-probs of pi_old, the reference, recomputed activations.
A group of 5 has a prompt of 300 tokens, a trajectory 2 to 8 turns of 40 to 120 sampled tokens with
an observation of 500 between them: 2,700 tokens on average, 400 of them sampled. Weights are drawn
on the device; the engine's log-probs are those of the policy. A smaller card gets fewer layers.
Without a GPU the model is a toy, which only tests the script.

tokens/s  all tokens of the trajectories / seconds of the update
MFU       6 FLOPs a parameter and token, as others count: forward and backward, without attention or recomputing;
          mfu8 counts the reference's pass, too
peak      of the allocator, with the estimate of training/fit.py without an engine
gather    all weights, one whole tensor at a time: what a sync streams into the engine
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

from config import Config
from engines.choose import dtype_of
from extras.bench.harness import parser_of, timed
from grpo import Learner, minibatches
from models.layers import fuse
from models.model import shard, skeleton, weights
from models.packing import micro_batches
from plumbing.faults import Fault, one_line
from tasks import Question, Trajectory
from training.fit import KNOWN, RESERVE, estimate
from training.ranks import Ranks

# dense bf16 FLOP/s, NVIDIA's data sheets
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "4090": 165e12}
TOY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    tie_word_embeddings=True,
)


def randomize(model, seed: int) -> None:
    """Draws all weights, the same for a seed: matrices N(0, 0.02), norms 1, biases 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            share = p.to_local() if isinstance(p, DTensor) else p  # the whole: there is one rank
            share.normal_(std=0.02) if p.ndim == 2 else share.fill_(float("norm" in name))


def build(config, device, dtype, **how):
    """Returns a sharded model with random weights, the same at every call, its layers fused on a
    GPU as a run's are."""
    model = skeleton(config, dtype)
    if device == "cuda":
        fuse(model)
    model = shard(model, device, **how)
    randomize(model, 0)
    rotary = model.base_model.rotary_emb
    tables = dict(type(rotary)(config).named_buffers())
    for name, table in rotary.named_buffers():
        table.copy_(tables[name])
    return model


def draw(rng, n, vocab, shrink):
    """Returns n trajectories in groups of 5 without log-probs; `shrink` divides all lengths."""
    question, taus = Question("q", "Who?", ("x",), ""), []
    for k in range(n):
        if k % 5 == 0:
            prompt = [rng.randrange(vocab) for _ in range(300 // shrink)]
        turns = rng.randint(2, 8)
        mask = [0] * (300 // shrink)
        for turn in range(turns):
            mask += [1] * (rng.randint(40, 120) // shrink) + [0] * (
                500 // shrink * (turn < turns - 1)
            )
        ids = prompt + [rng.randrange(vocab) for _ in mask[len(prompt) :]]
        tau = Trajectory(0, question, k // 5, ids, len(prompt), mask, [0.0] * len(mask))
        tau.advantage = rng.uniform(-1, 1)
        taus.append(tau)
    return taus


def fit_layers(cfg, shape, margin=1.0):
    """Returns the config of a model that fits this GPU, if there is one, and its estimated bytes of
    an update without an engine; with a `margin`, so many times as many bytes have to fit."""
    shape, usable = dict(shape), float("inf")
    if torch.cuda.is_available():
        usable = (1 - RESERVE) * torch.cuda.get_device_properties(0).total_memory
    while True:
        config = Qwen2Config(**shape)
        parts = estimate(cfg, config, "vllm", 1, 1e3).parts
        need = sum(part.update for part in parts if not part.name.startswith("vLLM"))
        if margin * need <= usable or config.num_hidden_layers == 1:
            return config, need
        shape["num_hidden_layers"] //= 2


def find_missed(x: dict) -> list[str]:
    """Names the goals that the figures miss."""
    return ["more than 15 % above the estimate of memory"] * (
        x["peak_gb"] > 1.15 * x["estimate_gb"]
    )


def wait(work: Callable[[], Any]) -> Any:
    """Returns what the work gave, once the device has done it."""
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def measure(args: argparse.Namespace) -> dict:
    """Returns the figures; prints a line for each step. Needs a process group."""
    cuda = args.device == "cuda"
    micro, dtype = (Config.micro_tokens, dtype_of(Config(), "cuda")) if cuda else (800, "float32")
    cfg = Config(dtype=dtype, micro_tokens=micro, mini=args.trajectories // 10, T=args.steps + 1)
    config, estimated = fit_layers(cfg, KNOWN["Qwen/Qwen2.5-3B"] if cuda else TOY)
    compute = getattr(torch, dtype)
    model = build(config, args.device, torch.float32, compute=compute)
    reference = build(config, args.device, compute, frozen=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(model, reference, cfg, max_gap=Learner.MAX_GAP[dtype])
    name = torch.cuda.get_device_name() if cuda else args.device
    peak = next((flops for key, flops in PEAK.items() if key in name), float("inf"))
    parameters = sum(p.numel() for p in model.parameters())
    rng, rows = random.Random(0), []
    for t in range(1, args.steps + 2):
        taus = draw(rng, args.trajectories, config.vocab_size, 1 if cuda else 20)
        # the policy's own log-probs, as an exact engine would give them
        for places in micro_batches(taus, micro):
            batch = [taus[k] for k in places]
            logps = iter(learner.score(batch)[0].tolist())
            for tau in batch:
                tau.logps = [next(logps) if m else 0.0 for m in tau.mask]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        parts = minibatches(taus, cfg)
        update, seconds = timed(lambda t=t, parts=parts: wait(lambda: learner.update(t, parts)))
        speed = sum(len(tau.ids) for tau in taus) / seconds
        row = {
            "t": t,
            "update_s": seconds,
            "tokens_per_s": speed,
            "mfu": 6 * parameters * speed / peak,
            "mfu8": 8 * parameters * speed / peak,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        } | {name: update[name] for name in ("logp_gap", "kl", "grad_norm")}
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        if not 0 < row["grad_norm"] < float("inf"):
            raise Fault(f"the gradient's norm is {row['grad_norm']}")
        rows.append(row)
    _, gather_s = timed(lambda: wait(lambda: sum(w.to(compute).nbytes for _, w in weights(model))))
    x = {"layers": config.num_hidden_layers, "parameters": parameters}
    x |= {
        key: statistics.median(row[key] for row in rows[1:])
        for key in ("tokens_per_s", "mfu", "mfu8")
    }
    x |= {key: max(row[key] for row in rows) for key in ("peak_gb", "logp_gap")}
    x |= {"estimate_gb": estimated / 1e9, "gather_s": gather_s, "rows": rows}
    return x | {"missed": find_missed(x)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--trajectories", type=int, default=50, help="a step, a multiple of 10")
    args = parser.parse_args()
    ranks = Ranks(args.device, patience=5)
    if not ranks.grouped:  # the toy is sharded, too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = measure(args)
    if ranks.grouped:
        ranks.leave()
    print(json.dumps(x))


if __name__ == "__main__":
    with one_line():
        main()
