"""An update of a random policy of Qwen2.5-3B's shape on one device; JSON last.

    python -m extras.bench.update                     # whole updates
    python -m extras.bench.update --micro 1024 4096 16384 32768 [--shape smollm2-135m]

A step is two mini-batches: log-probs of pi_old, the reference, recomputed activations.
A group of 5 has a prompt of 300 tokens, a trajectory 2 to 8 turns of 40 to 120 sampled tokens with
an observation of 500 between them: 2,700 tokens on average, 400 of them sampled. Weights are drawn
on the device. A smaller card gets fewer layers. Without a GPU the model is a toy, which only tests
the script.

tokens/s  all tokens of the trajectories / seconds of the update
MFU       6 FLOPs a parameter and token, as others count: forward and backward, without attention or recomputing
peak      of the allocator, with the estimate of extras/fit.py without an engine

With --micro single micro-batches are measured, of trajectories of 5 turns: 300 tokens of prompt, 5
times 120 sampled, 4 times 500 read; or 5 shorter ones, where fewer would fit. Each size is measured
with activations kept and recomputed, with --gather 1 (in the middle of an update; last_ms is its
end) and 0, without FSDP in the dtype of the products, and without shared prompts. A row that fails
says so.

enqueue   ms of the host for a micro-batch: reference, forward, backward; the device was idle
wall      ms a micro-batch, of several without a wait between them
busy      ms in which the device computes; the kinds of its kernels add up to more where they overlap
launches  kernels and copies
"""

import argparse
import gc
import itertools
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen2Config, Qwen3_5TextConfig

from config import Config
from engines.choose import dtype_of
from extras.bench.harness import parser_of, timed
from extras.fit import KNOWN, RESERVE, estimate, find_peak
from grpo import Learner, minibatches
from kernels import flash
from models.model import defer_sync, empty, forward_packed, skeleton
from plumbing.faults import Fault, first_line, one_line
from tasks import Question, Trajectory
from training.ranks import Ranks
from training.shards import fuse, shard

TOY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    tie_word_embeddings=True,
)
SHAPES = {
    "qwen2.5-3b": Qwen2Config(**KNOWN["Qwen/Qwen2.5-3B"]),
    "smollm2-135m": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    ),
    "qwen3.5": Qwen3_5TextConfig(  # of 0.8B parameters
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "toy": Qwen2Config(**TOY),
}  # fmt: skip
PROMPT, TURN, READ, TURNS = 300, 120, 500, 5  # tokens of a trajectory
WHOLE = PROMPT + TURNS * TURN + (TURNS - 1) * READ
KINDS = {  # words in the names of kernels, in the order in which they are looked for
    "head": "loss_kernel logp_kernel grad_kernel",
    "attention": "flash fmha attention",
    "liger": "_rms swiglu _rope triton",
    "products": "gemm cutlass nvjet xmma cublas splitk gemv",
    "optimizer": "adam multi_tensor lpnorm",
    "FSDP": "nccl chunk_cat split_with_sizes",
    "copies": "memcpy memset copy cat split",
    "elementwise": "elementwise reduce",
}


def randomize(model, seed: int) -> None:
    """Draws all weights, the same for a seed: matrices N(0, 0.02), norms 1, biases 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            share = p.to_local() if isinstance(p, DTensor) else p  # the whole: there is one rank
            share.normal_(std=0.02) if p.ndim == 2 else share.fill_(float("norm" in name))


def build(config, device, dtype, whole=False, **how):
    """Returns a sharded model, or a whole one, with random weights, the same at every call, its
    layers fused on a GPU as a run's are."""
    model = empty(config, dtype, device) if whole else skeleton(config, dtype)
    if device == "cuda":
        fuse(model)
    if whole:
        model.forward_packed = MethodType(forward_packed, model)
    else:
        model = shard(model, device, **how)
    randomize(model, 0)
    rotary = model.base_model.rotary_emb
    tables = dict(type(rotary)(config).named_buffers())
    for name, table in rotary.named_buffers():
        table.copy_(tables[name])
    return model


def begin_ranks(device: str) -> Ranks:
    """Returns the ranks of this process alone, in a process group: the toy is sharded, too."""
    ranks = Ranks(device, patience=5)
    if not ranks.grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ranks


def build_learner(
    config: Any, device: str, cfg: Config, way: str = "", recompute: bool = True
) -> Learner:
    """Returns the learner of a random policy: as a run has it, its weights "gathered" for a whole
    update or not, or "without FSDP" and with weights in the dtype of the products."""
    compute = getattr(torch, cfg.dtype)
    if way == "without FSDP":
        model = build(config, device, compute, whole=True)
    else:
        model = build(config, device, torch.float32, compute=compute, gather=way == "gathered")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Learner(model, build(config, device, compute, frozen=True), cfg)


def draw_tau(
    rng: random.Random, vocab: int, group: int, prompt: list[int], turns: Sequence[int], read: int
) -> Trajectory:
    """Returns a trajectory of random tokens: turns of these lengths, with `read` tokens between."""
    tau = Trajectory(0, Question("q", "Who?", ("x",), ""), group, [], len(prompt))
    tau.observe(prompt)
    for k, sampled in enumerate(turns):
        if k:
            tau.observe(draw_ids(rng, vocab, read))
        tau.act(draw_ids(rng, vocab, sampled), [-1.0] * sampled)
    tau.advantage = rng.uniform(-1, 1)
    return tau


def draw_ids(rng: random.Random, vocab: int, n: int) -> list[int]:
    return rng.choices(range(vocab), k=n)


def draw(rng: random.Random, n: int, vocab: int, shrink: int) -> list[Trajectory]:
    """Returns n trajectories in groups of 5; `shrink` divides all lengths."""
    taus = []
    for k in range(n):
        if k % 5 == 0:
            prompt = draw_ids(rng, vocab, PROMPT // shrink)
        turns = [rng.randint(40, 120) // shrink for _ in range(rng.randint(2, 8))]
        taus.append(draw_tau(rng, vocab, k // 5, prompt, turns, READ // shrink))
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


def wait(work: Callable[[], Any]) -> Any:
    """Returns what the work gave, once the device has done it."""
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def time_update(learner: Learner, t: int, taus: list[Trajectory]) -> tuple[dict, float]:
    """Returns what an update says, and its seconds."""
    parts = minibatches(taus, learner.cfg)
    return timed(lambda: wait(lambda: learner.update(t, parts)))


def show(**figures: float) -> None:
    print("  ".join(f"{name} {x:.4g}" for name, x in figures.items()), flush=True)


def measure(args: argparse.Namespace) -> dict:
    """Returns the figures; prints a line for each step. Needs a process group."""
    cuda = args.device == "cuda"
    micro, dtype = (Config.micro_tokens, dtype_of(Config(), "cuda")) if cuda else (800, "float32")
    cfg = Config(
        dtype=dtype, micro_tokens=micro, mini_batch=args.trajectories // 2, T=args.steps + 1
    )
    config, estimated = fit_layers(cfg, KNOWN["Qwen/Qwen2.5-3B"] if cuda else TOY)
    learner = build_learner(config, args.device, cfg)
    peak = find_peak(torch.cuda.get_device_name() if cuda else args.device) or float("inf")
    parameters = sum(p.numel() for p in learner.model.parameters())
    rng, rows = random.Random(0), []
    for t in range(1, args.steps + 2):
        taus = draw(rng, args.trajectories, config.vocab_size, 1 if cuda else 20)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        update, seconds = time_update(learner, t, taus)
        speed = sum(len(tau.ids) for tau in taus) / seconds
        row = {"t": t, "update_s": seconds, "tokens_per_s": speed}
        row["mfu"] = 6 * parameters * speed / peak
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row |= {name: update[name] for name in ("kl", "grad_norm")}
        show(**row)
        if not 0 < row["grad_norm"] < float("inf"):
            raise Fault(f"the gradient's norm is {row['grad_norm']}")
        rows.append(row)
    x = {"layers": config.num_hidden_layers, "parameters": parameters}
    x |= {key: statistics.median(row[key] for row in rows[1:]) for key in ("tokens_per_s", "mfu")}
    x |= {"peak_gb": max(row["peak_gb"] for row in rows), "estimate_gb": estimated / 1e9}
    x["rows"] = rows
    above = x["peak_gb"] > 1.15 * x["estimate_gb"]
    return x | {"missed": ["more than 15 % above the estimate of memory"] * above}


# ---- single micro-batches


def draw_row(tokens: int, shared: bool, vocab: int) -> list[Trajectory]:
    """Returns trajectories of at most this many tokens, in groups of 5: whole ones, or 5 shorter
    ones."""
    n = max(5, tokens // WHOLE)
    prompt, turn, read = (max(1, int(x * min(1, tokens / n / WHOLE))) for x in (PROMPT, TURN, READ))
    rng, taus = random.Random(0), []
    for k in range(n):
        if k % 5 == 0 or not shared:
            first = draw_ids(rng, vocab, prompt)
        taus.append(draw_tau(rng, vocab, k // 5, first, [turn] * TURNS, read))
    return taus


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words.split()):
            return kind
    return "other"


def read_profile(work: Callable[[], Any]) -> dict:
    """Returns what the device did: busy ms, kernels, ms by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        wait(work)
    kinds, spans = Counter(), []
    for event in prof.profiler.kineto_results.events():
        name, ms = event.name(), event.duration_ns() / 1e6
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            kinds[kind_of(name)] += ms
            spans.append((event.start_ns() / 1e6, event.end_ns() / 1e6))
    busy, last = 0, 0
    for start, end in sorted(spans):
        busy += max(0, end - max(start, last))
        last = max(last, end)
    return {"busy_ms": busy, "launches": len(spans), "kinds_ms": dict(kinds.most_common())}


def measure_row(learner: Learner, row: dict, vocab: int) -> None:
    """Adds to a row what is measured of the micro-batch that it describes."""
    cuda, gathered = torch.cuda.is_available(), row["way"] == "gathered"
    taus = draw_row(row["micro"], row["shared"], vocab)
    tokens = sum(len(tau.ids) for tau in taus)
    row |= {"trajectories": len(taus), "tokens": tokens}

    def work() -> None:  # what Learner.update does with a micro-batch
        loss, _ = learner.loss(taus, slice(None), learner.make_loss_inputs(taus, None))
        loss.backward()

    # warm up
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if gathered:
        defer_sync(learner.model, True)
    wait(work)
    wait(work)

    # time
    _, enqueued = timed(work)
    wait(lambda: None)
    n = 2 if tokens > 10000 else 4
    _, seconds = timed(lambda: wait(lambda: [work() for _ in range(n)]))
    row |= {"enqueue_ms": 1e3 * enqueued, "wall_ms": 1e3 * seconds / n}
    row["tokens_per_s"] = tokens * n / seconds

    # memory and kernels
    if cuda:
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row |= read_profile(work)

    # the end of an update, which also frees what was gathered
    if gathered:
        defer_sync(learner.model, False)
        _, seconds = timed(lambda: wait(work))
        row["last_ms"] = 1e3 * seconds


def sweep(args: argparse.Namespace) -> dict:
    """Returns the rows of single micro-batches; prints each. Needs a process group."""
    cuda, config = args.device == "cuda", SHAPES[args.shape]
    card = torch.cuda.get_device_name() if cuda else args.device
    cfg = Config(dtype=dtype_of(Config(), "cuda") if cuda else "float32", T=10)
    print(f"{card}, torch {torch.__version__}, {args.shape}", flush=True)
    cells = [  # way, recomputed, shared prompts
        *(("gathered", 0, 1), ("", 0, 1), ("without FSDP", 0, 1), ("gathered", 1, 1), ("", 1, 1)),
        *(("gathered", 0, 0), ("gathered", 1, 0)),
    ]
    rows, learner, built = list[dict](), None, None
    for (way, recompute, shared), n in itertools.product(cells, args.micro):
        row = {"micro": n, "way": way, "recompute": recompute, "shared": shared}
        rows.append(row)
        if learner is None or built != (way, recompute):
            learner, built = None, (way, recompute)
            gc.collect()  # a sharded model refers to itself
            learner = build_learner(config, args.device, cfg, *built)
        try:
            measure_row(learner, row, config.vocab_size)
            learner.optimizer.zero_grad(set_to_none=True)
        except Exception as e:  # it leaves FSDP in the middle of a pass
            row["fault"], learner = f"{type(e).__name__}: {first_line(e)}", None
        words = "recomputed" if recompute else "kept", "" if shared else "unshared", way
        print(n, *words, row.get("fault", ""), end="  ")
        figures = {name: x for name, x in row.items() if isinstance(x, float)}
        show(**figures, **row.get("kinds_ms", {}))
    return {"card": card, "shape": args.shape, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="steps timed, after a first one that is not"
    )
    parser.add_argument(
        "--trajectories", type=int, default=50, help="trajectories per step, a multiple of 10"
    )
    parser.add_argument(
        "--micro", type=int, nargs="+", help="tokens of the micro-batches to measure"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen2.5-3b", help="shape of the policy, with --micro"
    )
    parser.add_argument(
        "--attention", type=int, default=4, help="2: torch's, where flash-attn-4 is installed, too"
    )
    args = parser.parse_args()
    if args.attention == 2:
        flash.find_flash_attention_4 = lambda: None
    ranks = begin_ranks(args.device)
    x = sweep(args) if args.micro else measure(args)
    if ranks.grouped:
        ranks.leave()
    print(json.dumps(x))


if __name__ == "__main__":
    with one_line():
        main()
