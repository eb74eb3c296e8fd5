"""An update of a random policy of Qwen2.5-3B's shape, alone on one device (`python bench/update.py`); JSON last.

A step is the paper's: two mini-batches, log-probs of pi_old, the reference, recomputed activations. A group of 5 has
a prompt of 300 tokens, a trajectory 2 to 8 turns of 40 to 120 sampled tokens with an observation of 500 between them:
2,700 tokens on average, 400 of them sampled. Weights are drawn on the device; the engine's log-probs are those of the
policy. A smaller card gets fewer layers. Without a GPU the model is a toy, which only tests the script.

tokens/s  all tokens of the trajectories / seconds of the update
MFU       (3 + reference + pi_old) F / (seconds x the card's dense bf16 FLOP/s). A forward pass is
          F = 2 N T + 2 H V A + 2 L H S, for T tokens, A of them sampled, and S, the sum of squared lengths (causal),
          each group's prompt once; N parameters in the matrices of the L blocks, H wide, and V tokens in the
          vocabulary. A backward pass is 2 F. Recomputation does not count
peak      of the allocator, beside the estimate of training/fit.py without an engine
gather    all weights, one whole tensor at a time: what a sync streams into the engine
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))  # ahead of bench/, where `kernels` is another file
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from config import Config  # noqa: E402
from extras.speed import CARDS  # noqa: E402
from grpo import Learner, micro_batches, minibatches, prefix_of  # noqa: E402
from models.flash import OWN, choose  # noqa: E402
from models.model import blocks, shard, skeleton, weights  # noqa: E402
from plumbing.faults import Fault, one_line  # noqa: E402
from tasks import Question, Trajectory  # noqa: E402
from training.fit import KNOWN, RESERVE, estimate  # noqa: E402
from training.ranks import Ranks  # noqa: E402

PEAK = {"H20": 148.0, "B200": 2250.0, "L40S": 362.0}  # dense bf16 TFLOP/s, beside those of --dry_run
PEAK |= {name.upper(): card.flops / 1e12 for name, card in CARDS.items()}
TOY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1000, tie_word_embeddings=True,
)  # fmt: skip


def local(tensor):
    """Returns the rank's share of a tensor, which is the whole: there is one rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(config, device, dtype, compute=None):
    """Returns a sharded model with random weights, the same at every call: matrices N(0, 0.02), norms 1, biases 0."""
    model = shard(skeleton(config, dtype), device, compute=compute)
    torch.manual_seed(0)
    rotary = model.base_model.rotary_emb
    tables = dict(type(rotary)(config).named_buffers())
    with torch.no_grad():
        for name, p in model.named_parameters():
            local(p).normal_(std=0.02) if p.ndim == 2 else local(p).fill_(float("norm" in name))
        for name, table in rotary.named_buffers():
            table.copy_(tables[name])
    return model


def frozen_copy(model, config, device, dtype):
    """Returns the model as a reference, in its own shares of `dtype`."""
    copy = shard(skeleton(config, dtype), device, frozen=True)
    pairs = [*zip(copy.parameters(), model.parameters(), strict=True)]
    pairs += zip(copy.buffers(), model.buffers(), strict=True)
    with torch.no_grad():
        for mine, theirs in pairs:
            local(mine).copy_(local(theirs))
    return copy


def draw(rng, n, vocab, shrink):
    """Returns n trajectories in groups of 5 without log-probs; `shrink` divides all lengths."""
    question, taus = Question("q", "Who?", ("x",), ""), []
    for k in range(n):
        if k % 5 == 0:
            prompt = [rng.randrange(vocab) for _ in range(300 // shrink)]
        turns = rng.randint(2, 8)
        mask = [0] * (300 // shrink)
        for turn in range(turns):
            mask += [1] * (rng.randint(40, 120) // shrink) + [0] * (500 // shrink * (turn < turns - 1))
        ids = prompt + [rng.randrange(vocab) for _ in mask[len(prompt) :]]
        tau = Trajectory(0, question, k // 5, ids, len(prompt), mask, [0.0] * len(mask))
        tau.advantage = rng.uniform(-1, 1)
        taus.append(tau)
    return taus


def forward_flops(model, taus):
    """Returns F of the docstring."""
    config = model.config
    n = sum(p.numel() for block in blocks(model) for p in block.parameters() if p.ndim == 2)
    prompts = [len(prefix_of(tau)) for tau in taus]
    again = [p for k, p in enumerate(prompts) if k and taus[k].group == taus[k - 1].group]  # computed already
    pairs = sum(len(tau.ids) ** 2 for tau in taus) - sum(p**2 for p in again)
    head = config.vocab_size * config.hidden_size * sum(sum(tau.mask) for tau in taus)
    tokens = sum(len(tau.ids) for tau in taus) - sum(again)
    return 2 * (n * tokens + head + config.num_hidden_layers * config.hidden_size * pairs)


def peak_of(name):
    """Returns the TFLOP/s of a card; 0 where only its SXM sister is known."""
    words = name.replace("-", " ").split()
    return 0 if {"PCIe", "NVL"} & {*words} else next((v for k, v in PEAK.items() if k in words), 0)


def fitting(cfg, cuda):
    """Returns the config of a model that fits, and its estimated bytes of an update without an engine."""
    from transformers import Qwen2Config

    shape = dict(KNOWN["Qwen/Qwen2.5-3B"] if cuda else TOY)
    usable = (1 - RESERVE) * torch.cuda.get_device_properties(0).total_memory if cuda else float("inf")
    while True:
        config = Qwen2Config(**shape)
        parts = estimate(cfg, config, "vllm", 1, 1e3).parts
        need = sum(part.update for part in parts if not part.name.startswith("vLLM"))
        if need <= usable:
            return config, need
        if shape["num_hidden_layers"] == 1:
            raise Fault(f"even one layer needs {need / 1e9:.0f} GB: lower --micro_tokens")
        shape["num_hidden_layers"] //= 2


def measure(args: argparse.Namespace) -> dict:
    """Returns the figures; prints a line for each step. Needs a process group."""
    cuda = args.device == "cuda"
    micro = args.micro_tokens or (Config.micro_tokens if cuda else 800)
    cfg = Config(micro_tokens=micro, mini=args.trajectories // 10, T=args.steps + 1)
    config, estimated = fitting(cfg, cuda)
    dtype = "bfloat16" if cuda else "float32"
    compute = getattr(torch, dtype)
    model = build(config, args.device, torch.float32, compute)
    reference = frozen_copy(model, config, args.device, compute)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = Learner(model, reference, cfg, max_gap=Learner.MAX_GAP[dtype])

    def timed(work):
        """Returns the work's result and its seconds."""
        synchronize = torch.cuda.synchronize if cuda else lambda: None
        synchronize()
        start = time.perf_counter()
        result = work()
        synchronize()
        return result, time.perf_counter() - start

    def set_logps(taus):
        """Gives trajectories the policy's own log-probs, as an exact engine would."""
        for places in micro_batches(taus, micro):
            batch = [taus[k] for k in places]
            found = iter(learner.logprobs(batch).tolist())
            for tau in batch:
                tau.logps = [next(found) if m else 0.0 for m in tau.mask]

    name = torch.cuda.get_device_name() if cuda else "cpu"
    peak = args.peak or peak_of(name)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}, torch {torch.__version__}: {config.num_hidden_layers} layers, {parameters / 1e6:,.0f}M parameters, "
          f"at most {micro:,} tokens a forward pass, {peak or 'unknown'} TFLOP/s", flush=True)  # fmt: skip
    rng, rows = random.Random(0), []
    for t in range(1, args.steps + 2):
        taus = draw(rng, args.trajectories, config.vocab_size, 1 if cuda else 20)
        _, forward_s = timed(partial(set_logps, taus))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        parts = minibatches(taus, cfg)
        update, seconds = timed(partial(learner.update, t, parts))
        tokens, sampled = sum(len(tau.ids) for tau in taus), sum(sum(tau.mask) for tau in taus)
        passes = 3 + bool(cfg.beta) + (len(parts) > 1)
        row = {"t": t, "tokens": tokens, "sampled": sampled, "update_s": seconds}
        row |= {"tokens_per_s": tokens / seconds, "forward_tokens_per_s": tokens / forward_s}
        row["tflops"] = passes * forward_flops(model, taus) / seconds / 1e12
        if peak:
            row["mfu"] = row["tflops"] / peak
        if cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        row |= {name: update[name] for name in ("logp_gap", "kl", "grad_norm")}
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        if not 0 < row["grad_norm"] < float("inf"):
            raise Fault(f"the gradient's norm is {row['grad_norm']}")
        rows.append(row)
    if cuda:  # how often torch says that the host waits for the card
        set_logps(taus)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            learner.update(args.steps + 2, parts)
        torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchroniz" in str(warning.message) for warning in said)
    attention = choose(config) if cuda else OWN
    own = [row["update_s"] for row in rows[1:]]
    for t in range(args.steps + 3, args.steps + 5) if not attention.startswith(OWN) else ():
        set_logps(taus)
        _, flash_s = timed(partial(learner.update, t, parts))  # the first one compiles
    sent, gather_s = timed(lambda: sum(w.to(compute).nbytes for _, w in weights(model)))
    found = {"device": name, "layers": config.num_hidden_layers, "parameters": parameters}
    for key in ("tokens_per_s", "forward_tokens_per_s", "tflops", "mfu"):
        if key in rows[0]:
            found[key] = statistics.median(row[key] for row in rows[1:])
    for key in ("peak_gb", "reserved_gb", "logp_gap"):
        if key in rows[0]:
            found[key] = max(row[key] for row in rows)
    found["attention"] = attention
    if cuda:
        found["waits"] = waits / sum(len(micro_batches(part, micro)) for part in parts)
    if not attention.startswith(OWN):
        found["flash_over_own"] = flash_s / statistics.median(own)
    found |= {"estimate_gb": estimated / 1e9, "gather_s": gather_s, "gather_gb": sent / 1e9}
    print(f"gather {found['gather_gb']:.3g} GB in {gather_s:.3g} s; estimated peak {found['estimate_gb']:.3g} GB")
    return found | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--trajectories", type=int, default=50, help="a step, a multiple of 10")
    parser.add_argument("--micro_tokens", type=int, default=0, help="tokens a forward pass (the paper's setting)")
    parser.add_argument("--peak", type=float, default=0.0, help="the card's dense bf16 TFLOP/s, if it is not known")
    args = parser.parse_args()
    if args.steps < 1 or args.trajectories < 10 or args.trajectories % 10:
        parser.error("--steps: at least 1; --trajectories: a multiple of 10")

    ranks = Ranks(args.device, patience=5)
    if not ranks.grouped:  # the toy is sharded, too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = measure(args)
    if ranks.grouped:
        ranks.leave()
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
