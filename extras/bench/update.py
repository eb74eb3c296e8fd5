"""An update of a random policy of Qwen2.5-3B's shape on one device; JSON last.

    python -m extras.bench.update                     # whole updates
    python -m extras.bench.update --micro 1024 4096 16384 32768 [--shape smollm2-135m]

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

With --micro single micro-batches are measured, of trajectories of 5 turns: 300 tokens of prompt, 5
times 120 sampled, 4 times 500 read; or 5 shorter ones, where fewer would fit. Each size is measured
with activations kept and recomputed, with --gather 1 (in the middle of an update; last_ms is its
end) and 0, without FSDP in the dtype of the products, and without shared prompts. A measurement
that fails says so in its row.

enqueue   ms of the host for a micro-batch: reference, forward, backward; the device was idle
wall      ms a micro-batch, of several without a wait between them
busy      ms in which the device computes; the kinds of its kernels add up to more where they overlap
launches  kernels and copies
waits     times that the host waits for the device, and where
ops       operations that torch dispatches for a micro-batch, and autograd's nodes, by layers
"""

import argparse
import cProfile
import gc
import itertools
import json
import pstats
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen2Config

from config import Config
from engines.choose import dtype_of
from extras.bench.harness import parser_of, timed
from grpo import Learner, minibatches
from models.layers import fuse
from models.model import empty, forward_packed, hold, shard, skeleton, weights
from models.packing import micro_batches
from plumbing.faults import Fault, one_line
from tasks import Question, Trajectory
from training.duration import find_peak
from training.fit import KNOWN, RESERVE, estimate
from training.ranks import Ranks

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
    "qwen2.5-3b": lambda: Qwen2Config(**KNOWN["Qwen/Qwen2.5-3B"]),
    "smollm2-135m": lambda: LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    ),
    "toy": lambda: Qwen2Config(**TOY),
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
WAITS = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"


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
    peak = find_peak(name) or float("inf")
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


def draw_row(tokens: int, shared: bool, vocab: int) -> list[Trajectory]:
    """Returns trajectories of at most this many tokens, in groups of 5: whole ones, or 5 shorter
    ones."""
    n = max(5, tokens // WHOLE)
    prompt, turn, read = (max(1, int(x * min(1, tokens / n / WHOLE))) for x in (PROMPT, TURN, READ))
    rng, taus = random.Random(0), []
    for k in range(n):
        if k % 5 == 0 or not shared:
            first = [rng.randrange(vocab) for _ in range(prompt)]
        tau = Trajectory(
            0,
            Question("q", "Who?", ("x",), ""),
            k // 5,
            list(first),
            prompt,
            [0] * prompt,
            [0.0] * prompt,
        )
        for turn_ in range(TURNS):
            tau.act([rng.randrange(vocab) for _ in range(turn)], [-1.0] * turn)
            if turn_ < TURNS - 1:
                tau.observe([rng.randrange(vocab) for _ in range(read)])
        tau.advantage = rng.uniform(-1, 1)
        taus.append(tau)
    return taus


def compute_gradients(learner: Learner, taus: list[Trajectory]) -> None:
    """Enqueues one micro-batch: what Learner.update does with it."""
    loss, _ = learner.loss(taus, learner.terms(taus, None))
    loss.backward()


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words.split()):
            return kind
    return "other"


def read_profile(work: Callable[[], Any]) -> dict:
    """Returns what the device did: busy ms, kernels, ms by kind, the longest kernels; and the ms
    that the host waited."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        wait(work)
    kinds, names, waited, spans = Counter(), Counter(), 0, []
    for event in prof.profiler.kineto_results.events():
        name, ns = event.name(), event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            kinds[kind_of(name)] += ns
            names[name[:90]] += ns
            spans.append((event.start_ns(), event.start_ns() + ns))
        elif name in WAITS:
            waited += ns
    busy, end = 0, 0
    for start, stop in sorted(spans):
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    ms = lambda counts, n=None: {name: ns / 1e6 for name, ns in counts.most_common(n)}  # noqa: E731
    return {
        "busy_ms": busy / 1e6,
        "launches": len(spans),
        "waited_ms": waited / 1e6,  # with one wait at the end, which is ours
        "kinds_ms": ms(kinds),
        "kernels_ms": ms(names, 12),
    }


def count_waits(work: Callable[[], Any]) -> dict:
    """Returns how often the host waits for the device, and where."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{w.filename.rpartition('/')[2]}:{w.lineno}"
        for w in seen
        if "synchroniz" in str(w.message)
    )
    return {"waits": sum(places.values()), "waits_at": dict(places.most_common())}


class Operations(TorchDispatchMode):
    """Counts what torch dispatches, by name; those of a DTensor when they reach its shares."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func is not torch.ops.prim.device.default:  # fake tensors ask for it
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_nodes(loss: torch.Tensor) -> int:
    """Returns the nodes of autograd's graph; recomputed ones are not in it."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node and node not in seen:
            seen.add(node)
            left += [parent for parent, _ in node.next_functions]
    return len(seen)


def count_operations(learner: Learner, taus: list[Trajectory]) -> dict:
    """Returns the operations of a micro-batch and its nodes, per layer, head and all."""
    with Operations() as mode, torch.autograd.set_multithreading_enabled(False):
        loss, _ = learner.loss(taus, learner.terms(taus, None))
        nodes = count_nodes(loss)
        loss.backward()
    layers = learner.model.config.num_hidden_layers
    return {"ops": sum(mode.counts.values()) / layers, "nodes": nodes / layers}


def time_host(work: Callable[[], Any]) -> dict:
    wait(lambda: None)
    _, enqueued = timed(work)
    return {"enqueue_ms": 1e3 * enqueued}


def time_all(work: Callable[[], Any], tokens: int) -> dict:
    n = 2 if tokens > 10000 else 4
    _, seconds = timed(lambda: wait(lambda: [work() for _ in range(n)]))
    return {"wall_ms": 1e3 * seconds / n, "tokens_per_s": tokens * n / seconds}


def profile_host(work: Callable[[], Any]) -> list[str]:
    """Returns the functions in which the host spends most time of its own: ms, calls, name. Before
    them the ms of Python's garbage collection."""
    profiler, moments = cProfile.Profile(), list[float]()
    gc.callbacks.append(note := lambda *_: moments.append(time.perf_counter()))
    with torch.autograd.set_multithreading_enabled(False):
        profiler.runcall(work)
    gc.callbacks.remove(note)
    collected = sum(moments[1::2]) - sum(moments[::2])
    stats = pstats.Stats(profiler).stats.items()
    rows = sorted(((own, calls, place) for place, (_, calls, own, *_) in stats), reverse=True)
    return [f"{1e3 * collected:8.2f} ms {len(moments) // 2:6} garbage collections"] + [
        f"{1e3 * own:8.2f} ms {calls:6} {file.rpartition('/')[2]}:{line} {name}"
        for own, calls, (file, line, name) in rows[:40]
    ]


def attempt(row: dict, measurements: dict[str, Callable[[], dict]]) -> None:
    """Adds what the measurements return to the row; the first line of what they raise, instead."""
    for name, take in measurements.items():
        try:
            row |= take()
        except Exception as e:
            row.setdefault("faults", {})[name] = f"{type(e).__name__}: {str(e)[:160]}"
            if isinstance(e, torch.OutOfMemoryError):
                break


def show(row: dict) -> None:
    """Prints a row of the table."""
    numbers = [
        f"{row[name]:10.1f}" if name in row else f"{'-':>10}"
        for name in ("enqueue_ms", "wall_ms", "busy_ms")
    ]
    counts = [f"{row.get(name, '-'):>9}" for name in ("launches", "waits")]
    counts += [f"{row[name]:6.0f}" if name in row else f"{'-':>6}" for name in ("ops", "nodes")]
    speed = f"{row.get('tokens_per_s', 0):10.0f} {row.get('peak_gb', 0):7.1f}"
    total = sum(row.get("kinds_ms", {}).values())
    kinds = [f"{kind} {ms / total:.0%}" for kind, ms in row.get("kinds_ms", {}).items()]
    faults = [f"{name}: {text}" for name, text in row.get("faults", {}).items()]
    print(f"{row['name']:34}", *numbers, *counts, speed, " ", ", ".join(kinds + faults), flush=True)


def measurements_of(learner: Learner, row: dict, vocab: int) -> dict[str, Callable[[], dict]]:
    """Returns what is measured of the micro-batch that a row describes."""
    taus = draw_row(row["micro"], bool(row["shared"]), vocab)
    tokens = sum(len(tau.ids) for tau in taus)
    row |= {"trajectories": len(taus), "tokens": tokens}
    gathered = row["way"] == "gathered"
    work = lambda: compute_gradients(learner, taus)  # noqa: E731

    def warm() -> dict:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if gathered:
            hold(learner.model, True)
        wait(work)
        wait(work)
        return {}

    def reduce() -> dict:
        hold(learner.model, False)
        _, seconds = timed(lambda: wait(work))
        return {"last_ms": 1e3 * seconds}

    found: dict[str, Callable[[], dict]] = {"first": warm}
    found["enqueue"] = lambda: time_host(work)
    found["wall"] = lambda: time_all(work, tokens)
    found["operations"] = lambda: count_operations(learner, taus)
    if torch.cuda.is_available():
        found["peak"] = lambda: {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        found["waits"] = lambda: count_waits(work)
        found["profile"] = lambda: read_profile(work)
    if row["host"]:
        found["host"] = lambda: {"host": profile_host(work)}
    if gathered:
        found["last"] = reduce
    if row["step"]:
        found["step"] = lambda: time_step(learner, work)
    return found


def time_step(learner: Learner, work: Callable[[], Any]) -> dict:
    """Returns the ms of the second step of the optimizer, which has its moments then."""
    for _ in range(2):
        wait(work)
        _, seconds = timed(lambda: wait(lambda: learner.step(0.0)))
    return {"step_ms": 1e3 * seconds}


def build_learner(config: Any, device: str, way: str) -> Learner:
    """Returns the learner of a random policy: as a run has it, or without FSDP and with weights in
    the dtype of the products."""
    dtype = dtype_of(Config(), "cuda") if device == "cuda" else "float32"
    compute = getattr(torch, dtype)
    if way == "without FSDP":
        model = build(config, device, compute, whole=True)
    else:
        how = {"compute": compute, "gather": way == "gathered"}
        model = build(config, device, torch.float32, **how)
    reference = build(config, device, compute, frozen=True)
    return Learner(model, reference, Config(dtype=dtype, T=10), max_gap=1e9)


def sweep(args: argparse.Namespace) -> dict:
    """Returns the rows of single micro-batches; prints each. Needs a process group."""
    cuda, began, config = args.device == "cuda", time.perf_counter(), SHAPES[args.shape]()
    card = torch.cuda.get_device_name() if cuda else args.device
    print(f"{card}, torch {torch.__version__}, {args.shape}")
    titles = f"{'enqueue_ms':>10} {'wall_ms':>10} {'busy_ms':>10}  launches     waits    ops  nodes"
    print(f"{'':34} {titles}   tokens/s      GB", flush=True)
    cells = [  # way, recomputed, shared prompts
        *(("gathered", 0, 1), ("", 0, 1), ("without FSDP", 0, 1), ("gathered", 1, 1), ("", 1, 1)),
        *(("gathered", 0, 0), ("gathered", 1, 0)),
    ]
    rows, learner, built = list[dict](), None, ""
    for (way, recompute, shared), n in itertools.product(cells, args.micro):
        words = str(n), "recomputed" if recompute else "kept", "" if shared else "unshared", way
        row = {"name": " ".join(filter(None, words)), "micro": n, "way": way}
        first = n == args.micro[0] and not recompute and bool(shared)
        row |= {"recompute": recompute, "shared": shared, "host": first, "step": False}
        row["step"] = first and way != "without FSDP"
        rows.append(row)
        if time.perf_counter() - began > args.seconds:
            row["faults"] = {"time": f"more than {args.seconds:.0f} s had passed"}
            show(row)
            continue
        if learner is None or built != way:
            learner = None
            gc.collect()  # a sharded model refers to itself
            learner, built = build_learner(config, args.device, way), way
        if recompute:
            learner.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            learner.model.gradient_checkpointing_disable()
        attempt(row, measurements_of(learner, row, config.vocab_size))
        learner.optimizer.zero_grad(set_to_none=True)
        if "faults" in row:  # an exception leaves FSDP in the middle of a pass
            learner = None
        show(row)
    for row in rows:
        if isinstance(row["host"], list):
            print(f"\n{row['name']}: the host's own time, by functions", *row["host"], sep="\n")
    return {"card": card, "shape": args.shape, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--trajectories", type=int, default=50, help="a step, a multiple of 10")
    parser.add_argument(
        "--micro", type=int, nargs="+", help="tokens of the micro-batches to measure"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen2.5-3b", help="of the policy, with --micro"
    )
    parser.add_argument("--seconds", type=float, default=110, help="after which --micro skips")
    args = parser.parse_args()
    ranks = Ranks(args.device, patience=5)
    if not ranks.grouped:  # the toy is sharded, too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = sweep(args) if args.micro else measure(args)
    if ranks.grouped:
        ranks.leave()
    print(json.dumps(x))


if __name__ == "__main__":
    with one_line():
        main()
