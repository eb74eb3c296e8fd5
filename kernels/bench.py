"""The GRPO head, timed next to torch, Liger, TRL, QuACK and CCE.

    python -m kernels.bench --shapes 2048x151936 --peers ours Liger torch

Run it in the folder that holds kernels/; it needs torch, on a GPU triton.

Head: loss and gradients, with respect to hidden states (N, H) and weight (V, H), of Eq. 2 (eps 0.2,
no KL), averaged over the unmasked tokens. Without a GPU small shapes only test the script.

A peer that is installed is measured as its users get it and, after a comma, at the best setting
that we know:

Liger fused            LigerFusedLinearGRPOLoss, compiled; a sequence is a chunk, or all 8 are one
TRL                    ChunkedLogProbFunction with its trainer's tiles of the vocabulary, or one tile; then Eq. 2
QuACK                  linear_cross_entropy_func, all logits, then Eq. 2; or chunked_linear_cross_entropy,
                       which gives no token's loss: cross-entropy alone
CCE                    linear_cross_entropy of cut-cross-entropy, at its best as it comes; then Eq. 2
torch                  float32 logits; or F.linear_cross_entropy, or that in chunks; then Eq. 2

ms       one call, median; after a row that was not run stands why
x ours   time relative to the first line
TFLOP/s  three products of 2 n H V / time, for n unmasked tokens: work on masked ones does not count
GB       peak memory beyond the inputs, results included
error    largest relative error of loss, dX and dW against float64, at a small shape
"""

import argparse
import itertools
import json
import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from kernels.head import clipped_surrogate, grpo_head, token_logprobs

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
# the tokens are 8 sequences: Liger takes an advantage a sequence
EPS, CHUNK, SEQUENCES = 0.2, 4096, 8


def make_batch(N, H, V, masked):
    """Returns N tokens with peaked logits, N(0, 3), a share `masked` of them masked."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        X, W = (torch.randn(n, H, dtype=DTYPE) for n in (N, V))
        W *= 3 / H**0.5
        y = torch.randint(V, (N,))
        # rho = 0.67, 0.92, 1.08 or 1.5, away from the edges of the clip, where rounding would
        # decide about gradients
        log_rho = torch.tensor([-0.4, -0.08, 0.08, 0.4])[torch.randint(4, (N,))]
        mask = torch.rand(N).argsort() >= int(N * masked)
        adv = torch.tensor([1.5, -0.5]).repeat(SEQUENCES // 2)
    old = token_logprobs(X, W, y)[0] - log_rho
    tokens = dict(
        targets=y,
        adv=adv.repeat_interleave(N // SEQUENCES),
        token_weight=mask / mask.sum(),
        old_logp=old,
    )
    kept = {name: x[mask] for name, x in tokens.items()}
    X, W = X.requires_grad_(), W.requires_grad_()
    return SimpleNamespace(hidden=X, weight=W, mask=mask, sequence_adv=adv, **tokens, kept=kept)


def ours(b):
    """Drops masked rows, as training does."""
    return grpo_head(b.hidden[b.mask], b.weight, **b.kept)[0]


def unmasked(b):
    """Returns the hidden states that count, the weight and their targets."""
    return b.hidden[b.mask], b.weight, b.kept["targets"]


def plain_logp(b):
    z = F.linear(b.hidden, b.weight)  # (N, V)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return (z.gather(1, b.targets[:, None])[:, 0] - z.logsumexp(1))[b.mask]


def torch_logp(b, options=None):
    return -F.linear_cross_entropy(*unmasked(b), reduction="none", options=options and options())


def trl_logp(b, one_tile=False):
    """The vocabulary is cut into tiles as TRL's trainer does, or not at all. It multiplies four
    times."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    X, W, y = unmasked(b)
    words = len(W) if one_tile else _CHUNKED_LOGPROB_CHUNK_SIZE
    return ChunkedLogProbFunction.apply(X, W, None, y, 1.0, words, None, 1.0, ("entropy",))[0]


def quack_logp(b):
    from quack.linear_cross_entropy import linear_cross_entropy_func

    X, W, y = unmasked(b)
    return -linear_cross_entropy_func(X, W, None, y, reduction="none")


def quack_chunked(b):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss = chunked_linear_cross_entropy(*unmasked(b), reduction="sum")
    torch.autograd.grad(loss, (b.hidden, b.weight))
    return ()


def cce_logp(b):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(*unmasked(b), reduction="none")


def sequences(b):
    """Returns hidden states, targets, mask and log-probs under the old policy, a row a sequence."""
    return (
        x.view(SEQUENCES, -1, *x.shape[1:])
        for x in (b.hidden, b.targets, b.mask.long(), b.old_logp)
    )


def liger_fused(b, **settings):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        epsilon_low=EPS,
        epsilon_high=EPS,
        use_ref_model=False,
        loss_type="bnpo",
        **settings,
    )
    X, y, mask, old = sequences(b)
    return loss(X, b.weight, y, mask, b.sequence_adv, old_per_token_logps=old)[0]


def bare_products(b):
    """Computes the products of forward and backward for the unmasked rows, without accumulating
    them."""
    with torch.no_grad():
        for x in b.hidden[b.mask].split(CHUNK):
            z = x @ b.weight.T
            z @ b.weight, z.T @ x
    return ()


def gradients(b, peer):
    """Returns the loss, dX and dW of a peer, which returns its loss or the log-probs of the
    unmasked tokens."""
    loss = peer(b)
    if loss.ndim:
        rho = torch.exp(loss - b.kept["old_logp"])
        S = clipped_surrogate(rho, b.kept["adv"], EPS, EPS)
        loss = -(b.kept["token_weight"] * S).sum()
    return loss.detach(), *torch.autograd.grad(loss, (b.hidden, b.weight))


PEERS = {
    "ours": ours,
    "Liger fused": liger_fused,  # compiled, a sequence at a time
    "Liger fused, one chunk": partial(liger_fused, chunk_size=SEQUENCES),
    "TRL": trl_logp,
    "TRL, one tile": partial(trl_logp, one_tile=True),
    "QuACK": quack_logp,
    "CCE": cce_logp,
    "torch": plain_logp,
    "torch linear_cross_entropy": torch_logp,
    "torch linear_cross_entropy, chunked": partial(
        torch_logp, options=torch.nn.LinearCrossEntropyOptions
    ),
}


def runs_of(b):
    """Returns {name: function}, which returns (loss, dX, dW), or nothing where that is not Eq. 2's."""
    runs = {name: partial(gradients, b, peer) for name, peer in PEERS.items()}
    runs["QuACK, chunked cross-entropy"] = partial(quack_chunked, b)
    runs["three bare products"] = partial(bare_products, b)
    return runs


def check(peers):
    """Returns {name: largest error against float64 autograd}, half of the tokens masked; nan for
    what has none."""
    b = make_batch(64, 256, 5000, 0.5)
    exact = SimpleNamespace(**vars(b))
    exact.hidden, exact.weight = (
        x.detach().double().requires_grad_() for x in (b.hidden, b.weight)
    )
    wanted = gradients(exact, plain_logp)
    errors = {}
    for name, run in runs_of(b).items():
        if name.startswith(peers):
            results, errors[name] = attempt(run)[0], math.nan
            ratios = [(x - y).norm() / y.norm() for x, y in zip(results, wanted, strict=False)]
            if ratios:
                errors[name] = torch.stack(ratios).max().item()  # nan, if one is
    return errors


def attempt(run):
    """Returns the results of a run, none if it fails, and why it failed."""
    try:
        return run(), ""
    except Exception as e:  # a peer can raise anything
        return (), f"not run here: {type(e).__name__}: {e}".partition("\n")[0]


def measure(run, seconds):
    """Returns the median ms of a run, and its peak GB, which is 0 without a GPU."""
    timer = Timer("run()", globals={"run": run})
    ms = timer.blocked_autorange(min_run_time=seconds).median * 1000
    if not CUDA:
        return ms, 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return ms, (torch.cuda.max_memory_allocated() - before) / 1e9


def time_shape(N, H, V, masked, errors, seconds):
    """Prints and returns a row for each run with an error, at N tokens, `masked` percent of them
    masked."""
    title = f"{N} tokens, {masked:g} % masked, H x V = {H}x{V}"
    print(f"\n{title:46} ms  x ours  TFLOP/s      GB    error")
    rows = []
    for name, run in runs_of(make_batch(N, H, V, masked / 100)).items():
        if name not in errors:
            continue
        measured, note = attempt(partial(measure, run, seconds))
        ms, gb = measured or (math.nan, math.nan)
        row = dict(name=name, tokens=N, H=H, V=V, masked=masked, ms=ms)
        rows.append(row)
        row["ratio"] = ms / rows[0]["ms"]
        row["tflops"] = 6 * (N - int(N * masked / 100)) * H * V / ms / 1e9
        row |= dict(peak_gb=gb, error=errors[name], note=note)
        line = "{name:36} {ms:12.2f} {ratio:7.2f} {tflops:8.3g} {peak_gb:7.2f} {error:8.1e}  {note}"
        print(line.format(**row), flush=True)
    return rows


def HxV(text):
    """Reads the width of hidden states and the size of a vocabulary."""
    H, V = map(int, text.split("x"))
    return H, V


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    counts = [2048, 8192, 16384, 32768] if CUDA else [64, 256]
    add("--tokens", type=int, nargs="+", default=counts, help="multiples of 8")
    shapes = [(2048, 151936), (3584, 152064)] if CUDA else [(64, 4096)]
    add("--shapes", type=HxV, nargs="+", metavar="HxV", default=shapes)
    add("--masked", type=float, nargs="+", default=[0, 50], help="percent of the tokens")
    add("--seconds", type=float, default=1.0, help="of each measurement, at least")
    add(
        "--peers",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="only these: how their names in the table begin",
    )
    add("--json", action="store_true", help="print the rows as JSON, too, in the last line")
    args = parser.parse_args()

    # errors at a small shape
    device = "no GPU: this tests the script, its times say nothing"
    if CUDA:
        device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}")
    rows, errors = [], check(tuple(args.peers))
    if not errors:
        parser.error(f"--peers: no name begins so; there are {', '.join(PEERS)}")

    for (H, V), masked, N in itertools.product(args.shapes, args.masked, args.tokens):
        rows += time_shape(N, H, V, masked, errors, args.seconds)
    if args.json:
        print(json.dumps({"device": device, "rows": rows}))


if __name__ == "__main__":
    main()
