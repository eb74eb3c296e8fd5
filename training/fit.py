"""Will it fit? Estimates the memory of one GPU, part by part, from shapes alone, without weights or
a GPU.

A rollout needs the engine's weights and KV cache besides the trainer's state. An update needs
activations and gradients besides that state, while vLLM sleeps. The larger of the two has to fit.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from config import Config
from engines.vllm_engine import MAX_BATCHED_TOKENS, MAX_SEQS
from models import lora
from models.layers import fuse_shapes
from models.model import blocks, load_config, skeleton

# share of a GPU that shapes cannot predict: CUDA context, NCCL buffers, fragmentation
RESERVE = 0.06
GRAPHS = 30e6  # bytes of vLLM's CUDA graphs, a layer: an allowance
# float32 matrices (rows, V) of vLLM's V1 sampler: logits, log-probs, probabilities, noise; V2 makes
# fewer
SAMPLER = 4
SURE = 0.9  # share of what is usable up to which an estimate decides alone: it has been 7 % off
# tokens of a micro-batch that is worth the smaller size if its activations are then kept
KEPT = 8192
CHUNK = 4096  # rows of logits that kernels/head.py allocates at a time
KNOWN = {  # the presets' models, so that estimating needs no hub
    "Qwen/Qwen2.5-0.5B": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-1.5B": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-3B": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-7B": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ),
}  # fmt: skip


def shapes(model: str) -> Any:
    """Returns a Hugging Face config with the shapes of a model."""
    if model not in KNOWN:
        return load_config(model)
    from transformers import Qwen2Config

    return Qwen2Config(**KNOWN[model])


@dataclass
class Part:
    """One part of a GPU's memory."""

    name: str
    update: float  # bytes at the peak of the update
    rollout: float  # bytes during a rollout
    cure: str = ""  # a setting that shrinks it


@dataclass
class Fit:
    """The estimate for one setting."""

    title: str  # model and GPUs
    usable: float  # bytes
    parts: list[Part]
    notes: list[str]
    kv_tokens: float = 0.0  # room in vLLM's KV cache
    starved: str = ""  # why vLLM's share is too small, if the sum fits

    @property
    def update(self) -> float:
        return sum(part.update for part in self.parts)

    @property
    def rollout(self) -> float:
        return sum(part.rollout for part in self.parts)

    def table(self) -> str:
        """Returns parts, sums and notes as text of at most 100 columns."""

        def row(name: str, *columns: float) -> str:
            return f"{name:<72}" + "".join(
                f"{x / 1e9:10.1f}" if x else f"{'-':>10}" for x in columns
            )

        lines = [f"{self.title}: GB on each GPU, computed from shapes", ""]
        lines += [f"{'part':<72}{'update':>10}{'rollout':>10}"]
        lines += [
            row(part.name, part.update, part.rollout)
            for part in self.parts
            if part.update or part.rollout
        ]
        lines += ["-" * 92, row("sum", self.update, self.rollout)]
        lines += [
            row(
                f"usable (all but {RESERVE:.0%}: CUDA, NCCL, fragmentation)",
                self.usable,
                self.usable,
            ),
            "",
        ]
        lines += self.notes
        if not self.fault():
            lines.append(
                f"It fits, with {(self.usable - max(self.update, self.rollout)) / 1e9:.1f} GB to spare."
            )
        return "\n".join(lines)

    def fault(self) -> str:
        """Returns one line with the reason why it does not fit and what to change; "" if it
        fits."""
        phase = max("update", "rollout", key=lambda phase: getattr(self, phase))
        need = getattr(self, phase)
        if need <= self.usable:
            return self.starved
        parts = sorted(
            ((getattr(part, phase), part) for part in self.parts), key=lambda pair: -pair[0]
        )
        largest = ", ".join(f"{part.name} {size / 1e9:.1f}" for size, part in parts[:3])
        cures = dict.fromkeys(part.cure for size, part in parts if part.cure and size > need / 20)
        return (
            f"{self.title} do not fit: the {phase} needs {need / 1e9:.1f} GB on each,"
            f" {self.usable / 1e9:.1f} are usable; largest: {largest}; try {', '.join(cures)}"
        )


def estimate(cfg: Config, config: Any, engine: str, gpus: int, gpu_mem: float) -> Fit:
    """Returns the memory of each of `gpus` GPUs of `gpu_mem` GB (1e9 bytes), for a model with this
    config."""
    cfg = replace(cfg, dtype=cfg.dtype or "bfloat16")
    model = lora.add(skeleton(config, getattr(torch, cfg.dtype)), cfg.lora_rank, cfg.lora_alpha)
    moment, working = of_update(cfg, model, gpus)
    title = f"{parameters(model) / 1e6:,.0f}M parameters{', LoRA,' * bool(cfg.lora_rank)} on {gpus} x {gpu_mem:.0f} GB"
    note = f"The update is largest in {moment}."
    fit = Fit(title, (1 - RESERVE) * gpu_mem * 1e9, [*of_state(cfg, model, gpus), *working], [note])
    if cfg.gather == 1:
        fit.parts.append(of_gathering(cfg, model, gpus))
    if engine == "torch":
        fit.parts += of_torch_engine(cfg, model)
    elif cfg.vllm == "colocate":
        add_vllm(fit, cfg, model, gpus, cfg.vllm_memory * gpu_mem * 1e9)
    return fit


def parameters(model: Any) -> int:
    """Returns the policy's parameters; a tied head is the embedding and counts once, adapters do
    not count."""
    return sum(p.numel() for name, p in model.named_parameters() if not lora.is_adapter(name))


def of_state(cfg: Config, model: Any, gpus: int) -> list[Part]:
    """Returns what a rank holds all the time; FSDP2 pads dim 0 of what it cuts."""
    share, frozen = (
        sum(
            math.ceil(len(p) / gpus) * (p.numel() // len(p))
            for p in model.parameters()
            if p.requires_grad == trained
        )
        for trained in (True, False)
    )
    size = model.dtype.itemsize
    more, trained = "more GPUs", "adapters" if cfg.lora_rank else "policy"
    parts = [
        Part(f"policy (frozen, {cfg.dtype} shards)", size * frozen, size * frozen, more),
        Part(f"{trained} (float32 shards)", 4 * share, 4 * share, more),
        Part(
            "moments of AdamW (float32 shards)",
            8 * share,
            8 * share,
            more if cfg.lora_rank else "--lora_rank 32",
        ),
        Part("gradients (float32 shards)", 4 * share, 0, more),
    ]
    if cfg.beta and not cfg.lora_rank:
        reference = 0 if cfg.offload_reference else size * share
        parts.append(
            Part(f"reference ({cfg.dtype} shards)", reference, reference, "--offload_reference")
        )
    return parts


def of_update(cfg: Config, model: Any, gpus: int) -> tuple[str, list[Part]]:
    """Returns when the update needs most, and what it needs then."""
    # A turn may start at max_prompt and be followed by its observation. A trajectory longer than
    # micro_tokens is packed alone.
    longest = cfg.max_prompt + cfg.max_response + cfg.max_observation
    tokens = max(cfg.micro_tokens, longest)
    fewer = "a smaller --micro_tokens" if cfg.micro_tokens > longest else "a smaller --max_prompt"
    per_block = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    block, root = max(per_block), sum(p.numel() for p in model.parameters()) - sum(per_block)
    # Of a block, of the root (embedding, last norm and head) and of the head: what has a gradient,
    # with LoRA adapters.
    V, H = model.get_output_embeddings().weight.shape
    d_block = max(
        sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks(model)
    )
    d_root, d_head = (0, 0) if cfg.lora_rank else (root, V * H)
    kept, in_block = activations(model.to(model.dtype), tokens, cfg.recompute, cfg.fused_layers)

    # Candidates for the peak, with the bytes of: gathered weights, gradients being reduced,
    # activations, activations of one block, the head. bfloat16 has 2 bytes, float32 4. FSDP2
    # reduces in float32; it has one block prefetched and one still in reduction. The reference runs
    # earlier and needs less.
    size = model.dtype.itemsize
    moments = {
        "the forward pass of the head": (
            size * (root + block), 0, kept, 0, 4 * min(CHUNK, tokens) * V + 4 * d_head + (size + 4) * tokens * H,
        ),
        "the backward pass of the head": (
            size * (root + block), 0, kept, 0, (4 + size) * d_head + (size + 4) * tokens * H,
        ),
        "the backward pass of a block": (
            size * (root + 2 * block), size * d_head + (size + 4 + 4 / gpus) * d_block, kept, in_block, 0,
        ),
        "the end, when the gradients of embedding and head are reduced": (0, (size + 4 + 4 / gpus) * d_root, 0, 0, 0),
    }  # fmt: skip
    peak = max(moments, key=lambda name: sum(moments[name]))
    gathered, reduced, kept, in_block, head = moments[peak]
    return peak, [
        Part(f"policy (embedding, head and two blocks, gathered in {cfg.dtype})", gathered, 0),
        Part("gradients being reduced", reduced, 0),
        Part(
            f"activations kept of {tokens:,} tokens",
            kept,
            0,
            fewer if cfg.recompute else "--recompute 1",
        ),
        Part("activations and their gradients in one block", in_block, 0, fewer),
        Part("the head's logits and gradients", head, 0),
    ]


def of_gathering(cfg: Config, model: Any, gpus: int) -> Part:
    """Returns what --gather 1 adds: the weights that are not gathered anyway, those of the reference
    and whole gradients, where these are not shares of one rank."""
    per_block = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gathered = sum(per_block) - 2 * max(per_block)
    if cfg.beta and not cfg.lora_rank and (gpus > 1 or cfg.offload_reference):
        gathered += parameters(model)
    size = model.dtype.itemsize * gathered + 4 * trained * (gpus > 1)
    return Part("all weights gathered, gradients not yet reduced (--gather)", size, 0, "--gather 0")


def gather_with_room(
    cfg: Config, fit: Fit, config: Any, engine: str, gpus: int, gpu_mem: float
) -> tuple[Config, Fit]:
    """Returns `cfg` with --gather -1 decided, and its estimate; `fit` is that of a block at a
    time."""
    if cfg.gather < 0:
        kept = replace(cfg, gather=1)
        larger = estimate(kept, config, engine, gpus, gpu_mem)
        if larger.update < SURE * larger.usable:
            return kept, larger
    return replace(cfg, gather=max(cfg.gather, 0)), fit


def of_torch_engine(cfg: Config, model: Any) -> list[Part]:
    # Remaining rows are copied before the old cache is freed. A logit's probability is summed in
    # float64, out of place.
    size = model.dtype.itemsize
    cache = 2 * kv_bytes(model.config, size) * (cfg.max_prompt + cfg.max_response) * cfg.max_rows
    logits = 21 * len(model.get_output_embeddings().weight) * cfg.max_rows
    return [
        Part(
            "torch engine (weights)",
            size * parameters(model),
            size * parameters(model),
            "--engine vllm",
        ),
        Part(
            f"torch engine (KV cache of {cfg.max_rows} rows, twice)",
            0,
            cache,
            "a smaller --max_rows",
        ),
        Part("torch engine (logits)", 0, logits, "a smaller --max_rows"),
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
    work = max(
        # residual, hidden states, gate and up, their product
        size * (2 * H + 3 * widest) * MAX_BATCHED_TOKENS,
        SAMPLER * 4 * V * MAX_SEQS,
    )
    room = max(0, share - served - work - graphs)
    fit.parts += [
        Part("vLLM (weights)", 0, served, "a smaller --vllm_memory"),
        Part("vLLM (activations, or the sampler's logits)", 0, work),
        Part("vLLM (KV cache)", 0, room, "a smaller --vllm_memory"),
        Part("vLLM (CUDA graphs, an allowance; also while asleep)", graphs, graphs),
    ]
    kv, row = kv_bytes(model.config, size), cfg.max_prompt + cfg.max_response  # the longest row
    fit.kv_tokens = room / kv
    if room < kv * row:
        fit.starved = (
            f"{fit.title} do not fit: the {share / 1e9:.1f} GB of vLLM have no room for its weights"
            f" ({served / 1e9:.1f}), activations and CUDA graphs ({(work + graphs) / 1e9:.1f}) and one context of"
            f" {row:,} tokens; try a larger --vllm_memory"
        )
    mine = math.ceil(cfg.batch / gpus) * cfg.G  # a rank plays whole groups
    fit.notes.append(
        f"vLLM's cache has room for {fit.kv_tokens:,.0f} tokens of {kv / 1e3:.1f} kB; a rank's {mine:,} trajectories"
        f" can need {mine * row:,}.\n"
        f"{min(mine, MAX_SEQS, int(fit.kv_tokens / row)):,} of them run at once, however long they are."
    )


def with_room(
    cfg: Config, config: Any, engine: str, gpus: int, gpu_mem: float
) -> tuple[Config, Fit]:
    """Returns `cfg` with --recompute -1 decided, and its estimate: activations are kept where they
    fit.

    If need be in smaller micro-batches, down to KEPT tokens: their products still take longer than
    FSDP2's traffic.
    """
    tokens = cfg.micro_tokens
    while cfg.recompute < 0 and tokens >= KEPT:
        kept = replace(cfg, recompute=0, micro_tokens=tokens)
        fit = estimate(kept, config, engine, gpus, gpu_mem)
        if not fit.fault() and fit.update < SURE * fit.usable:
            return gather_with_room(kept, fit, config, engine, gpus, gpu_mem)
        tokens //= 2
    cfg = replace(cfg, recompute=abs(cfg.recompute))
    fit = estimate(cfg, config, engine, gpus, gpu_mem)
    return gather_with_room(cfg, fit, config, engine, gpus, gpu_mem)


def activations(model: Any, tokens: int, recompute: int, fused: int) -> tuple[float, float]:
    """Returns two numbers of bytes: what the forward pass keeps, and what a block's backward pass
    needs besides.

    Runs the model on the meta device, with the shapes of Liger's layers if `fused`, and adds up the
    tensors that autograd would save.
    """
    from transformers import AttentionInterface

    in_place = fused and "SwiGLU" in fuse_shapes(model)

    AttentionInterface.register("shapes", attention_of_shapes)
    model.set_attn_implementation("shapes")
    weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}  # storage -> bytes
    ends = [0]  # bytes saved up to the end of each block

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in weights:
            saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    for block in blocks(model):
        block.register_forward_hook(lambda *_: ends.append(sum(saved.values())))
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        stream = (
            model.train()
            .base_model(input_ids=ids, position_ids=ids, use_cache=False)
            .last_hidden_state
        )
    total, of_block = sum(saved.values()), max(b - a for a, b in zip(ends, ends[1:], strict=False))
    # Of the block's output and of, say, gate and up projection; Liger's go where gate and up are,
    # from their product's.
    gradients = stream.nbytes + (1 if in_place else 2) * max(saved.values())
    if recompute:
        return len(blocks(model)) * stream.nbytes + total - ends[-1], of_block + gradients
    return total, gradients


def attention_of_shapes(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the shapes of models.model.packed_attention on a GPU; SDPA on meta would save
    matrices (T, T)."""
    if query.dtype == torch.float32:  # as there, for a kernel that takes no fewer heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return torch.cat([out], dim=2).transpose(1, 2), None


def kv_bytes(config: Any, size: int = 2) -> int:
    """Returns the bytes of one token's keys and values, of `size` bytes each."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * size * config.num_hidden_layers * heads * dim)
