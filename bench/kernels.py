"""The GRPO head beside its peers: time, memory, errors (`python bench/kernels.py`, on a GPU); JSON last.

Each computes the gradients, with respect to hidden states (N, H) and weight (V, H), of the clipped loss with old
log-probs (eps 0.2, no KL), a mean over the unmasked tokens. Every round gives each of them the same fresh batch; times
are medians over the rounds. The same rounds time the three bare matrix products that every implementation needs.

ms       one call, forward and backward; the first call of a round is not timed (it compiles and fills the allocator)
x ours   time relative to ours, with the same N and masked share
TFLOP/s  6 n H V / time (2 n H V forward only) for n unmasked tokens: work on masked ones does not count
peak GB  peak memory beyond the inputs, gradients included
error    largest relative error of loss, dX and dW (forward only: of logp) against float64, at a small shape
"""

import argparse
import gc
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))  # ahead of bench/, where `kernels` is this file

from peers import CHUNK, DEVICE, NEED_CUDA, RUNS, SEQUENCES, TRITON_PEERS, eager, eager_forward, make_batch, ours  # noqa: E402

from kernels import token_logprobs  # noqa: E402

TARGET = {"tokens": 16384, "H": 2048, "V": 151936}  # the case of the summary


def reason(e: Exception) -> str:
    """Returns in a word or two why a figure is missing; prints the whole message on stderr."""
    print(f"{type(e).__name__}: {e}", file=sys.stderr)
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    return "not installed" if isinstance(e, ImportError) else type(e).__name__


def check(runs, notes) -> dict:
    """Returns {run: relative errors against float64 autograd, half the rows masked}; adds failures to `notes`."""
    b, errors = make_batch(64, 256, 5000, 0.5, seed=0), {}
    wide = {name: getattr(b, name).detach().double().requires_grad_() for name in ("hidden", "weight")}
    exact = SimpleNamespace(**vars(b) | wide)
    want = {3: eager(exact), 1: eager_forward(exact)}
    for name in [name for name in runs if name not in notes]:
        products, run = runs[name]
        try:
            errors[name] = [((x - y).norm() / y.norm()).item() for x, y in zip(run(b), want[products], strict=False)]
        except Exception as e:
            notes[name] = reason(e)
    return errors


def measure(runs, N, H, V, masked, rounds, errors, notes) -> list[dict]:
    """Runs each of `runs` once per round, except those in `notes`; prints and returns the rows of the table."""
    notes, found, rows = dict(notes), {name: [] for name in runs}, []
    for k in range(rounds):
        b = make_batch(N, H, V, masked, seed=k)
        for name in [name for name in runs if name not in notes]:
            try:
                found[name].append(timed(runs[name][1], b))
            except Exception as e:
                notes[name] = reason(e)
            if name in notes:
                gc.collect()  # free what the exception's frames hold
    ms = {name: statistics.median(x["ms"] for x in found[name]) for name in runs if name not in notes}
    for name, (products, _) in runs.items():
        row = {"name": name, "tokens": N, "H": H, "V": V, "masked": masked, "note": notes.get(name)}
        if name in ms:
            base = next(base for base in runs if runs[base][0] == products)
            row |= found[name][-1] | {"ms": ms[name], "ratio": ms[name] / ms.get(base, float("nan"))}
            row["tflops"] = 2 * products * (N - int(N * masked)) * H * V / ms[name] / 1e9
            cells = f"{row['ms']:10.2f} {row['ratio']:8.2f} {row['tflops']:9.3g}"
            cells += f"{row['peak_gb']:9.2f}" if "peak_gb" in row else f"{'-':>9}"
            cells += f"{torch.tensor(errors[name]).max():10.1e}" if errors.get(name) else f"{'-':>10}"  # keeps nan
        rows.append(row)
        print(f"{name:24} {N:7} {masked:7.0%} {cells if name in ms else row['note']:>10}", flush=True)
    return rows


def timed(run, b=None) -> dict:
    """Returns the ms of a run and its peak GB above the memory before: in total, and without what it returns."""
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # the previous run's blocks have other sizes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    returned = sum(x.nbytes for x in run(b))  # the first call
    synchronize()
    peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else None
    start = time.perf_counter()  # the host's clock will do: a launch takes hundredths of a millisecond
    results = run(b)
    synchronize()
    found = {"ms": (time.perf_counter() - start) * 1000}
    del results  # freeing takes time
    return found if peak is None else found | {"peak_gb": peak / 1e9, "workspace_gb": (peak - returned) / 1e9}


def copy_speed() -> float:
    """Returns the GB/s of a device copy, counting bytes read and written."""
    source = torch.randn(2**28 if DEVICE == "cuda" else 2**25, device=DEVICE)
    copy = torch.empty_like(source)
    ms = statistics.median(timed(lambda _: (copy.copy_(source),))["ms"] for _ in range(11))
    return 2 * source.nbytes / ms / 1e6


@torch.no_grad()
def precision(H=2048, V=151936, rows=8, each=16) -> dict:
    """Returns |logp - float64| in nats, for bf16 inputs and `each` tokens drawn from the softmax of every row."""
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g, device=DEVICE, dtype=torch.bfloat16) for n in (rows, V))
    weight *= 3 / H**0.5
    blocks = weight.split(8192)  # a float64 copy of the whole takes 2.5 GB
    z64 = torch.cat([hidden.double() @ block.double().T for block in blocks], 1)
    z32 = torch.cat([hidden.float() @ block.float().T for block in blocks], 1)
    targets = torch.multinomial(z64.softmax(1), each, replacement=True, generator=g)  # (rows, each)
    want, *found = (z.gather(1, targets) - z.logsumexp(1, keepdim=True) for z in (z64, z32, z32.bfloat16().float()))
    ours, _ = token_logprobs(hidden.repeat_interleave(each, 0), weight, targets.flatten())
    errors = [(logp - want).abs() for logp in (*found, ours.view(rows, each))]
    names = ("fp32 logits", "bf16 logits", "ours")
    return {name: {"mean": e.mean().item(), "max": e.max().item()} for name, e in zip(names, errors, strict=True)}


def tuning_runs() -> dict:
    """Returns runs of ours by chunk size, and by block and warps of the Triton kernel."""
    runs = {f"chunk {chunk}": partial(ours, chunk=chunk) for chunk in (CHUNK, 1024, 2048, 8192)}

    def with_constants(b, **constants):
        with mock.patch.multiple("kernels.rows_triton", **constants):
            return ours(b)

    for block, warps in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        runs[f"BLOCK {block}, WARPS {warps}"] = partial(with_constants, BLOCK=block, WARPS=warps)
    return {name: (3, run) for name, run in runs.items()}


def summary(rows) -> dict:
    """Prints and returns the targets of the head beside the results."""
    at = {(row["name"], row["masked"]): row for row in rows if TARGET.items() <= row.items()}

    def get(name, key="ms", masked=0.0):
        return at.get((name, masked), {}).get(key, float("nan"))

    peer = min(TRITON_PEERS, key=lambda name: at.get((name, 0.0), {}).get("ms", float("inf")))
    lines = {
        "forward + backward, ms (<= 50)": get("ours"),
        "share of three bare GEMMs (>= 0.78)": get("three bare GEMMs") / get("ours"),
        "forward only, ms (<= 17)": get("ours, forward only"),
        "workspace, GB: the peak less the gradients (<= 4)": get("ours", "workspace_gb"),
        "half masked / unmasked (<= 0.55)": get("ours", masked=0.5) / get("ours"),
        "Liger fused / ours": get("Liger fused", "ratio"),
        "Liger fused, TF32 / ours": get("Liger fused, TF32", "ratio"),
        f"{peer} / ours (the faster of {' and '.join(TRITON_PEERS)})": get(peer, "ratio"),
    }
    print("\n{tokens} tokens, H = {H}, V = {V}, none masked; targets in brackets".format(**TARGET))
    for name, value in lines.items():
        print(f"{name:84} {value:.2f}")  # nan: not measured
    return {name: value for name, value in lines.items() if value == value}


def draw(rows, out) -> None:
    """Draws time and memory against tokens, for the first shape and masked share."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    H, V, masked = first = tuple(rows[0][key] for key in ("H", "V", "masked"))
    rows = [row for row in rows if (row["H"], row["V"], row["masked"]) == first]
    tokens = sorted({row["tokens"] for row in rows})
    fig, panels = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for panel, key, label in zip(panels, ("ms", "peak_gb"), ("ms", "GB beyond the inputs"), strict=True):
        for name in RUNS:
            line = sorted((row["tokens"], row[key]) for row in rows if row["name"] == name and key in row)
            if line:
                dashes = "--" if "only" in name or "bare" in name else "-"
                panel.loglog(*zip(*line, strict=True), dashes, marker="o", lw=3 if name == "ours" else 1, label=name)
        if panel.lines:
            panel.set_xticks(tokens, labels=tokens)
            panel.set_xticks([], minor=True)
        else:
            panel.text(0.5, 0.5, "not measured on the CPU", ha="center", transform=panel.transAxes)
        panel.set(xlabel="tokens", ylabel=label)
    panels[0].legend(fontsize=8)
    fig.suptitle(f"GRPO head, H = {H}, V = {V}, {masked:.0%} of the tokens masked")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    print(f"\nfigure: {out}")


def main() -> None:
    cuda = DEVICE == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384, 32768] if cuda else [64, 256])
    parser.add_argument("--shapes", nargs="+", metavar="HxV",
                        default=["2048x151936", "3584x152064"] if cuda else ["64x4096"])  # fmt: skip
    parser.add_argument("--masked", type=float, nargs="+", default=[0, 50, 75], help="percent of the tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="+", default=[], choices=list(RUNS)[1:], help="implementations to leave out")
    parser.add_argument("--tune", action="store_true", help="also vary our chunk size, block and warps (CUDA)")
    parser.add_argument("--out", default=str(HERE / "runs/kernels.png"), help="the figure")
    args = parser.parse_args()
    if any(n % SEQUENCES for n in args.tokens):
        parser.error(f"--tokens: multiples of {SEQUENCES}")
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    torch._dynamo.config.recompile_limit = 64  # one compilation per shape; beyond the limit it runs uncompiled

    installed = {d.metadata["Name"].replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    found: dict = {"device": torch.cuda.get_device_name() if cuda else "cpu", "rounds": args.rounds}
    found["versions"] = {name: installed.get(name, "not installed") for name in packages}
    print(found["device"] + "".join(f", {name} {version}" for name, version in found["versions"].items()))
    if not cuda:
        print("No GPU here: these shapes only test the script, and their times say nothing about the kernel.")

    runs = {name: run for name, run in RUNS.items() if name not in args.skip}
    notes = {} if cuda else dict.fromkeys(NEED_CUDA, "needs CUDA")
    common = {"rounds": args.rounds, "errors": check(runs, notes), "notes": notes}
    header = f"{'':24} {'tokens':>7} {'masked':>7} {'ms':>10} {'x ours':>8} {'TFLOP/s':>9}{'peak GB':>9}{'error':>10}"
    found |= {"errors": common["errors"], "rows": [], "tune": []}
    for H, V in shapes:
        print(f"\nH = {H}, V = {V}\n{header}")
        for masked, N in itertools.product(args.masked, args.tokens):
            found["rows"] += measure(runs, N, H, V, masked / 100, **common)
    if args.tune and cuda:
        print(f"\nours by chunk, and by block and warps; H = {shapes[0][0]}, V = {shapes[0][1]}\n{header}")
        found["tune"] = measure(tuning_runs(), TARGET["tokens"], *shapes[0], 0.0, **common)
    elif args.tune:
        print("\n--tune needs CUDA")

    speeds = [row["tflops"] for row in found["rows"] if row["name"] == "three bare GEMMs" and not row["note"]]
    found["ceilings"] = {"gemm_tflops": max(speeds, default=0), "copy_gb_s": copy_speed()}
    print("\nceilings: GEMM {gemm_tflops:.4g} TFLOP/s, device copy {copy_gb_s:.4g} GB/s".format(**found["ceilings"]))
    found["precision"] = precision()
    print("\n|logp - float64|, nats, of bf16 inputs, H = 2048, V = 151936")
    for name, e in found["precision"].items():
        print(f"{name:24} mean {e['mean']:.1e}   max {e['max']:.1e}")
    if cuda:
        found["summary"] = summary(found["rows"])
    if args.out:
        draw(found["rows"], args.out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
