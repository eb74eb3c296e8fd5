"""Will a run fit, and how long will it take? Computed from shapes, without weights or a GPU.

    python -m extras.fit --model qwen2.5-3b 8xh100          # flags of inspo.py, then the GPUs

The GPUs are 8xh100, h200, a100 or rtx4090, or named by their memory, as 2x48gb. Prints the memory
of each part, the hours, and the command of a run that fits. A rollout needs the engine's weights
and KV cache besides the trainer's state; an update needs activations and gradients besides that
state, while vLLM sleeps. The larger of the two has to fit.
"""

import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from config import Config, parse_flags
from engines.torch_engine import TorchEngine
from engines.vllm_engine import MAX_BATCHED_TOKENS, MAX_SEQS
from models import lora
from models.model import is_adapter, load_config, skeleton
from plumbing.faults import Fault, one_line
from training.shards import FUSED, blocks

# GB (1e9 bytes) of GPUs, and TFLOP/s of their dense products in bfloat16 (NVIDIA's data sheets)
CARDS = {"h100": (80, 989), "h200": (141, 989), "a100": (80, 312), "rtx4090": (24, 165)}
OTHERS = {"h100pcie": 756, "b200": 2250, "l40s": 362}  # TFLOP/s of more
# share of a GPU that shapes cannot predict: CUDA context, NCCL buffers, fragmentation
RESERVE = 0.06
SURE = 0.9  # share of what is usable up to which an estimate decides: it has been 7 % off
GRAPHS = 30e6  # bytes of vLLM's CUDA graphs, a layer: an allowance
# float32 matrices (rows, V) of vLLM's sampler: logits, log-probs, probabilities, noise
SAMPLER = 4
CHUNK = 4096  # rows of logits that kernels/head.py allocates at a time
# share of a card's FLOP/s that forward and backward passes reach, attention included; then seconds of
# Python a layer and micro-batch: the reference, forward, backward; and where all weights are
# gathered, with activations kept and recomputed: measured on one H200 (docs/gpus.md)
REACHED, HOST, HOST_GATHERED = 0.54, 12e-3, (5.3e-3, 9.3e-3)
ROW = 60e-6  # seconds a token that vLLM generates, with some 160 rows at once
PROMPT = 300  # tokens of an instruction and a question, assumed
NIGHT = 10  # hours
SHAPES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
MODELS = {  # of the presets, so that estimating needs no hub
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
KNOWN: dict[str, Any] = {name: dict(zip(SHAPES, MODELS[name], strict=True)) for name in MODELS}


def shapes(model: str) -> Any:
    """Returns a Hugging Face config with the shapes of a model."""
    if model not in KNOWN:
        return load_config(model)
    from transformers import Qwen2Config

    return Qwen2Config(**KNOWN[model])


class Place(NamedTuple):
    """What is to be trained, and on what."""

    config: Any  # Hugging Face's, of the model
    engine: str
    gpus: int
    gpu_mem: float  # GB (1e9 bytes) of each


def read_cards(text: str) -> tuple[int, str, int]:
    """Returns the number of GPUs, their name and their GB. Raises Fault."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]+\d+|([1-9]\d*)gb)", text.lower())
    if match is None or not (match[3] or match[2] in CARDS):
        raise Fault(
            f"{text}: say last how many of which GPUs, as 8xh100 ({', '.join(CARDS)}), or of which memory, as 1x48gb"
        )
    return int(match[1] or 1), match[2], int(match[3] or CARDS[match[2]][0])


def find_peak(card: str) -> float | None:
    """Returns the FLOP/s, dense bfloat16, of a card by its name, as torch or a user has it."""
    peaks = OTHERS | {name: tflops for name, (_, tflops) in CARDS.items()}
    for name, tflops in peaks.items():
        if name in card.lower().replace(" ", ""):
            return tflops * 1e12
    return None


def parameters(model: Any) -> int:
    """Returns the policy's parameters; a tied head is the embedding and counts once, adapters do
    not count."""
    return sum(p.numel() for name, p in model.named_parameters() if not is_adapter(name))


# ---- memory


@dataclass
class Part:
    """One part of a GPU's memory."""

    name: str
    update: float  # bytes at the peak of the update
    rollout: float  # bytes during a rollout


@dataclass
class Fit:
    """The estimate for one setting."""

    title: str  # model and GPUs
    usable: float  # bytes
    parts: list[Part]
    notes: list[str]
    starved: str = ""  # why vLLM's share is too small, if the sum fits

    @property
    def update(self) -> float:
        return sum(part.update for part in self.parts)

    @property
    def rollout(self) -> float:
        return sum(part.rollout for part in self.parts)

    def table(self) -> str:
        """Returns parts, sums and notes as text of at most 100 columns."""
        lines = [f"{self.title}: GB on each GPU, computed from shapes", ""]
        lines.append(f"{'part':<72}{'update':>10}{'rollout':>10}")
        rest = f"usable (all but {RESERVE:.0%}: CUDA, NCCL, fragmentation)"
        sums = [Part("sum", self.update, self.rollout), Part(rest, self.usable, self.usable)]
        for part in self.parts + sums:
            if part.update or part.rollout:
                lines.append(f"{part.name:<72}{part.update / 1e9:10.1f}{part.rollout / 1e9:10.1f}")
        return "\n".join([*lines, "", *self.notes])

    def fault(self) -> str:
        """Returns one line with the reason why it does not fit; "" if it fits."""
        need = max(self.update, self.rollout)
        if need <= self.usable:
            return self.starved
        phase = "update" if need == self.update else "rollout"
        sizes = sorted(((getattr(part, phase), part.name) for part in self.parts), reverse=True)
        largest = ", ".join(f"{name} {size / 1e9:.1f}" for size, name in sizes[:3])
        return (
            f"{self.title} do not fit: the {phase} needs {need / 1e9:.1f} GB on each,"
            f" {self.usable / 1e9:.1f} are usable; largest: {largest}"
        )


def estimate(cfg: Config, config: Any, engine: str, gpus: int, gpu_mem: float) -> Fit:
    """Returns the memory of each of `gpus` GPUs of `gpu_mem` GB (1e9 bytes), for a model with this
    config; `engine`: "torch", "vllm", or any other that needs nothing there."""
    cfg = replace(cfg, dtype=cfg.dtype or "bfloat16")
    model = lora.add(skeleton(config, getattr(torch, cfg.dtype)), cfg.lora_rank, cfg.lora_alpha)
    moment, working = of_update(cfg, model, gpus)
    method = ", LoRA," if cfg.lora_rank else ""
    title = f"{parameters(model) / 1e6:,.0f}M parameters{method} on {gpus} x {gpu_mem:.0f} GB"
    note = f"The update is largest in {moment}."
    fit = Fit(title, (1 - RESERVE) * gpu_mem * 1e9, [*of_state(cfg, model, gpus), *working], [note])
    if cfg.gather == 1:
        fit.parts.append(of_gathering(cfg, model, gpus))
    if engine == "torch":
        fit.parts += of_torch_engine(cfg, model)
    elif engine == "vllm":
        add_vllm(fit, cfg, model, gpus, cfg.vllm_memory * gpu_mem * 1e9)
    return fit


def of_state(cfg: Config, model: Any, gpus: int) -> list[Part]:
    """Returns what a rank holds all the time; FSDP2 pads dim 0 of what it cuts."""
    count = {True: 0, False: 0}  # trained, frozen
    for p in model.parameters():
        count[p.requires_grad] += math.ceil(len(p) / gpus) * p[0].numel()
    size, share = model.dtype.itemsize, count[True]
    frozen, trained = size * count[False], "adapters" if cfg.lora_rank else "policy"
    parts = [
        Part(f"policy (frozen, {cfg.dtype} shards)", frozen, frozen),
        Part(f"{trained} (float32 shards)", 4 * share, 4 * share),
        Part("moments of AdamW (float32 shards)", 8 * share, 8 * share),
        Part("gradients (float32 shards)", 4 * share, 0),
    ]
    if cfg.beta and not cfg.lora_rank:
        parts.append(Part(f"reference ({cfg.dtype} shards)", size * share, size * share))
    return parts


def of_update(cfg: Config, model: Any, gpus: int) -> tuple[str, list[Part]]:
    """Returns when the update needs most, and what it needs then."""
    # A turn may start at max_prompt and be followed by its observation. A trajectory longer than
    # micro_tokens is packed alone.
    tokens = max(cfg.micro_tokens, cfg.longest + cfg.max_observation)
    kept, in_block = activations(model.to(model.dtype), tokens, cfg.recompute, cfg.fused_layers)

    # Parameters of a block, of the root (embedding, last norm and head) and of the head, and how
    # many of them have a gradient.
    V, H = model.get_output_embeddings().weight.shape
    root = model.num_parameters()
    block, d_block = 0, 0
    for each in blocks(model):
        size = sum(p.numel() for p in each.parameters())
        root, block = root - size, max(block, size)
        d_block = max(d_block, sum(p.numel() for p in each.parameters() if p.requires_grad))
    d_root, d_head = (0, 0) if cfg.lora_rank else (root, V * H)

    # Candidates for the peak, in bytes. FSDP2 reduces in float32; it has one block prefetched and
    # one still in reduction. The reference runs earlier and needs less.
    size = model.dtype.itemsize
    states, reduced = (size + 4) * tokens * H, size + 4 + 4 / gpus
    logits = 4 * min(CHUNK, tokens) * V
    moments = {  # gathered weights, gradients being reduced, activations kept, those of one block, the head
        "the forward pass of the head": (size * (root + block), 0, kept, 0, logits + 4 * d_head + states),
        "the backward pass of the head": (size * (root + block), 0, kept, 0, (4 + size) * d_head + states),
        "the backward pass of a block": (
            size * (root + 2 * block), size * d_head + reduced * d_block, kept, in_block, 0,
        ),
        "the end, when the gradients of embedding and head are reduced": (0, reduced * d_root, 0, 0, 0),
    }  # fmt: skip
    peak = max(moments, key=lambda name: sum(moments[name]))
    names = (
        f"policy (embedding, head and two blocks, gathered in {cfg.dtype})",
        "gradients being reduced",
        f"activations kept of {tokens:,} tokens",
        "activations and their gradients in one block",
        "the head's logits and gradients",
    )
    return peak, [Part(name, need, 0) for name, need in zip(names, moments[peak], strict=True)]


def of_gathering(cfg: Config, model: Any, gpus: int) -> Part:
    """Returns what --gather 1 adds: the weights that are not gathered anyway, those of the reference
    and whole gradients, where these are not shares of one rank."""
    per_block = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    gathered = sum(per_block) - 2 * max(per_block)
    if cfg.beta and not cfg.lora_rank and gpus > 1:
        gathered += parameters(model)
    trained = model.num_parameters(only_trainable=True)
    size = model.dtype.itemsize * gathered + 4 * trained * (gpus > 1)
    return Part("all weights gathered, gradients not yet reduced (--gather)", size, 0)


def of_torch_engine(cfg: Config, model: Any) -> list[Part]:
    # Remaining rows are copied before the old cache is freed. A logit's probability is summed in
    # float64, out of place.
    size = model.dtype.itemsize
    cache = 2 * kv_bytes(model.config, size) * cfg.longest
    logits, served = 21 * len(model.get_output_embeddings().weight), size * parameters(model)
    rows = TorchEngine.max_rows
    return [
        Part("torch engine (weights)", served, served),
        Part(f"torch engine (KV cache of {rows} rows, twice)", 0, cache * rows),
        Part("torch engine (logits)", 0, logits * rows),
    ]


def add_vllm(fit: Fit, cfg: Config, model: Any, gpus: int, share: float) -> None:
    """Adds vLLM in this process with a `share` of the GPU, in bytes.

    It measures its own peak at its start and gives the KV cache what is left of its share, all of
    which has to be free then: policy and reference are there already, moments are not.
    """
    V, H = model.get_output_embeddings().weight.shape
    widest = max(len(p) for block in blocks(model) for p in block.parameters() if p.ndim == 2)
    size = model.dtype.itemsize
    served, graphs = size * parameters(model), GRAPHS * len(blocks(model))
    # residual, hidden states, gate and up, their product
    work = max(size * (2 * H + 3 * widest) * MAX_BATCHED_TOKENS, SAMPLER * 4 * V * MAX_SEQS)
    room = max(0, share - served - work - graphs)
    fit.parts += [
        Part("vLLM (weights)", 0, served),
        Part("vLLM (activations, or the sampler's logits)", 0, work),
        Part("vLLM (KV cache)", 0, room),
        Part("vLLM (CUDA graphs, an allowance; also while asleep)", graphs, graphs),
    ]
    kv, row = kv_bytes(model.config, size), cfg.longest  # the longest row
    if room < kv * row:
        fit.starved = (
            f"{fit.title} do not fit: the {share / 1e9:.1f} GB of vLLM have no room for its weights"
            f" ({served / 1e9:.1f}), activations and CUDA graphs ({(work + graphs) / 1e9:.1f}) and one context of"
            f" {row:,} tokens"
        )
    mine = math.ceil(cfg.batch / gpus) * cfg.G  # a rank plays whole groups
    at_once = min(mine, MAX_SEQS, int(room / kv / row))
    fit.notes.append(
        f"vLLM runs {at_once:,} of a rank's {mine:,} trajectories at once, however long they are."
    )


def activations(model: Any, tokens: int, recompute: int, fused: int) -> tuple[float, float]:
    """Returns two numbers of bytes: what the forward pass keeps, and what a block's backward pass
    needs besides.

    Runs the model on the meta device and adds up the tensors that autograd would save, less what
    Liger's layers spare.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("shapes", attention_of_shapes)
    model.set_attn_implementation("shapes")
    config, size = model.config.get_text_config(), model.dtype.itemsize
    fused = fused and type(model).__name__.removesuffix("ForCausalLM") in FUSED
    swiglu = fused and getattr(config, "hidden_act", "") == "silu"
    weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved = {}  # storage, or a module that saves less -> bytes
    ends = [0]  # bytes saved up to the end of each block

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return t

    def watch(module: Any, _: Any, out: Any) -> None:
        name = type(module).__name__
        if fused and name.endswith("RMSNorm"):
            # a float32 copy; where the norm is frozen, its input instead
            saved[module] = -(4 if module.weight.requires_grad else 4 - size) * out.numel()
        elif swiglu and name.endswith("MLP"):
            saved[module] = -size * tokens * config.intermediate_size  # silu's output
        elif module in units:
            ends.append(sum(saved.values()))

    units = list(blocks(model))
    for module in model.modules():
        module.register_forward_hook(watch)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.train().base_model(input_ids=ids, position_ids=ids, use_cache=False)
    total, of_block = sum(saved.values()), max(b - a for a, b in zip(ends, ends[1:], strict=False))
    # Of the block's output and of, say, gate and up projection; Liger's go where gate and up are,
    # from their product's.
    stream = size * tokens * config.hidden_size
    gradients = stream + (1 if swiglu else 2) * max(saved.values())
    if recompute:
        return len(units) * stream + total - ends[-1], of_block + gradients
    return total, gradients


def attention_of_shapes(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> Any:
    """Returns the shapes of models.packing.packed_attention on a GPU; SDPA on meta would save
    matrices (T, T)."""
    if q.dtype == torch.float32:  # as there, for a kernel that takes no fewer heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return torch.cat([out], dim=2).transpose(1, 2), None


def kv_bytes(config: Any, size: int = 2) -> Any:
    """Returns the bytes of one token's keys and values, of `size` bytes each."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * size * config.num_hidden_layers * heads * dim


# ---- time


def trajectory(cfg: Config) -> tuple[int, int]:
    """Returns the tokens that a trajectory samples and those that it reads, as assumed: all turns
    are played, each a quarter of --max_response long, each observation as long as it can be."""
    calls = 0 if cfg.tools == "none" else cfg.max_turns
    return (calls + 1) * cfg.max_response // 4, PROMPT + calls * cfg.max_observation


def update_seconds(cfg: Config, model: Any, gpus: int, flops: float) -> float:
    """Returns the seconds of a step's update: of each micro-batch the larger of what card and host
    need."""
    # Passes over all weights: forward, backward (two, of which frozen weights need one), recomputed
    # activations, the reference, pi_old of all mini-batches but the first.
    updates = cfg.batch * cfg.G / cfg.mini_batch
    passes = 4 - bool(cfg.lora_rank) + bool(cfg.recompute) + bool(cfg.beta) - 1 / updates
    tokens = cfg.mini_batch * sum(trajectory(cfg)) / gpus
    micro_batches = math.ceil(tokens / cfg.micro_tokens)
    card = 2 * passes * model.num_parameters() * tokens / micro_batches / (REACHED * flops)
    host = len(blocks(model)) * (HOST_GATHERED[cfg.recompute > 0] if cfg.gather == 1 else HOST)
    return updates * micro_batches * max(card, host)


def rollout_seconds(cfg: Config, model: Any, gpus: int, flops: float) -> float:
    """Returns the seconds of a step's rollouts with vLLM on every GPU."""
    rows, (sampled, read) = math.ceil(cfg.batch / gpus) * cfg.G, trajectory(cfg)
    return rows * (2 * model.num_parameters() * read / (REACHED * flops) + ROW * sampled)


def hours(cfg: Config, model: Any, gpus: int, flops: float) -> float:
    """Returns the hours of all steps, without evaluation and evolution."""
    seconds = [f(cfg, model, gpus, flops) for f in (rollout_seconds, update_seconds)]
    return cfg.T * sum(seconds) / 3600


# ---- the command


def find_fit(cfg: Config, place: Place) -> tuple[Config, Fit]:
    """Returns the first setting that fits, and its estimate: activations are rather kept than
    recomputed, if need be in smaller micro-batches; weights are rather gathered once an update;
    vLLM's share is lowered where it has to be; adapters are the last resort. Raises Fault."""
    kept = [(0, gather, n) for n in range(3) for gather in (1, 0) if cfg.micro_tokens >> n >= 8192]
    recomputed = [(1, gather, n) for n in range(4) for gather in (1, 0)]
    first = None
    ranks = (cfg.lora_rank,) if cfg.lora_rank else (0, 32)
    for rank, (recompute, gather, n) in itertools.product(ranks, [*kept, *recomputed]):
        tried = replace(
            cfg,
            lora_rank=rank,
            recompute=recompute,
            gather=gather,
            micro_tokens=cfg.micro_tokens >> n,
        )
        fit = estimate(tried, *place)
        first = first or fit
        sure = recompute and not gather or fit.update < SURE * fit.usable
        if not sure or fit.update > fit.usable:
            continue
        if fit.fault() and place.engine == "vllm":
            others = sum(part.rollout for part in fit.parts if not part.name.startswith("vLLM"))
            share = math.floor(20 * (fit.usable - others) / place.gpu_mem / 1e9) / 20
            tried = replace(tried, vllm_memory=max(0.05, share))
            fit = estimate(tried, *place)
        if not fit.fault():
            return tried, fit
    assert first
    raise Fault(f"{first.fault()}; take more GPUs, or a smaller model")


def describe_flags(cfg: Config, given: Config) -> str:
    """Returns the flags in which a configuration differs from the one that was given."""
    pairs = [(f.name, getattr(cfg, f.name)) for f in fields(cfg)]
    return "".join(f" --{name} {x}" for name, x in pairs if x != getattr(given, name))


def smaller(cfg: Config) -> Iterator[Config]:
    """Yields smaller runs: fewer questions a step, as many updates, fewer steps."""
    for halvings, T in itertools.product(range(5), (300, 200, 100)):
        if cfg.batch >> halvings and T <= cfg.T:
            mini_batch = max(1, cfg.mini_batch >> halvings)
            yield replace(cfg, batch=cfg.batch >> halvings, mini_batch=mini_batch, T=T)


def main(argv: list[str] | None = None) -> None:
    *flags, cards = (sys.argv[1:] if argv is None else argv) or ["?"]
    if cards == "--help":
        parse_flags([cards])
    gpus, card, memory = read_cards(cards)
    cfg = parse_flags(flags)
    place = Place(shapes(cfg.model), "torch" if cfg.engine == "torch" else "vllm", gpus, memory)
    fitted, fit = find_fit(cfg, place)
    spare = fit.usable - max(fit.update, fit.rollout)
    print(f"{fit.table()}\nIt fits, with {spare / 1e9:.1f} GB to spare:\n")

    start = f"torchrun --nproc_per_node={gpus}" if gpus > 1 else "python"
    command = " ".join([start, "inspo.py", *flags])
    model, flops = skeleton(place.config), find_peak(card) or 0
    added = describe_flags(fitted, cfg)
    if flops:
        whole = hours(fitted, model, gpus, flops)
        print(f"{whole:6.1f} hours  {command}{added}")
        runs = [(hours(run, model, gpus, flops), run) for run in smaller(fitted)]
        runs = [(h, run) for h, run in runs if h <= NIGHT < whole]
        for h, run in sorted(runs, key=lambda pair: -pair[0])[:2]:
            print(f"{h:6.1f} hours  {command}{describe_flags(run, cfg)}")
        sampled, read = trajectory(cfg)
        print(
            "\nHours are without evaluation and evolution: computed, from rates that one H200 measured"
            f" (docs/gpus.md).\nAssumed: a trajectory samples {sampled:,} tokens and reads {read:,}."
        )
    else:
        print(f"{command}{added}")
    trained = lora.add(model, fitted.lora_rank, fitted.lora_alpha)
    size = 12 * trained.num_parameters(only_trainable=True) / 1e9
    print(f"A checkpoint takes {size:.1f} GB of disk, and of the CPUs' memory while it is written.")


if __name__ == "__main__":
    with one_line():
        main()
