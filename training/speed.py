"""How long will a step take? Computes its seconds, part by part, from shapes, a card's data sheet and assumptions.

Nothing here is measured on a GPU. Training is products of matrices, at a share of the card's FLOP/s, and between them
operations that read and write activations, at a share of its bandwidth; FSDP2's traffic runs beside both. Decoding
takes the longer of its arithmetic and its reading. The policy is dense, and its attention has no window.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import Config, evolves
from engines.vllm_engine import MAX_SEQS
from models import lora
from models.layers import fuse_shapes
from models.model import blocks, skeleton
from tasks import Trajectory
from training.fit import kv_bytes


@dataclass(frozen=True)
class Card:
    """A GPU's data sheet."""

    flops: float  # bf16 FLOP/s of dense matrices, float32 sums
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s to the other GPUs of its node, one way
    host: float  # bytes/s to and from the CPU's memory, one way
    memory: float  # GB (1e9 bytes)
    name: str  # by the driver


CARDS = {  # NVIDIA's data sheets; where those give FLOP/s with sparsity (H100, H200), half of them
    # "H100 Tensor Core GPU", SXM: 1,979 TFLOPS, NVLink 900 GB/s both ways, PCIe 5.0 x16
    "h100": Card(989.5e12, 3.35e12, 450e9, 64e9, 80, "NVIDIA H100 80GB HBM3"),
    # "H200 Tensor Core GPU", SXM: likewise
    "h200": Card(989.5e12, 4.8e12, 450e9, 64e9, 141, "NVIDIA H200"),
    # "A100 Tensor Core GPU", 80 GB SXM: NVLink 600 GB/s both ways, PCIe 4.0 x16
    "a100": Card(312e12, 2.039e12, 300e9, 32e9, 80, "NVIDIA A100-SXM4-80GB"),
    # "NVIDIA Ada GPU Architecture", appendix A; PCIe 4.0 x16
    "rtx4090": Card(165.2e12, 1.008e12, 32e9, 32e9, 24, "NVIDIA GeForce RTX 4090"),
}


CHECKPOINTS = "checkpoints, spread over the steps"


@dataclass(frozen=True)
class Assumed:
    """What a data sheet does not say. The shares are of the card's figures."""

    flops: float = 0.45  # share of FLOP/s in products of matrices and attention
    bandwidth: float = 0.6  # share of memory bandwidth
    link: float = 0.6  # share of the link's
    host: float = 45e-6  # seconds of vLLM's Python a row and token step (measured: LOG.md)
    python: float = 3e-7  # seconds of rank 0's Python a token: packing, what ranks tell each other, logs (measured)
    disk: float = 1.5e9  # bytes/s of a checkpoint, of all ranks together
    digest: float = 4e9  # bytes/s of a rank's checksums (measured)
    staged: float = 4e9  # bytes/s from a GPU to the CPU's memory where that is not pinned
    search: float = 0.2  # seconds of a search, whatever the load


@dataclass(frozen=True)
class Shape:
    """What a policy's seconds depend on."""

    parameters: int
    matrices: int  # weights of the blocks' matrices
    head: int  # weights of the head; the embedding's too if tied
    vocabulary: int
    width: int  # layers x query heads x their dimension
    kv: int  # bytes of one token's keys and values
    adapters: int  # weights of LoRA's matrices, which are among the blocks'; 0 without
    forward: float  # bytes a token that a forward pass of the blocks moves between the products
    backward: float  # the same of their backward pass

    @property
    def trained(self) -> int:
        """Weights that get a gradient and go to vLLM."""
        return self.adapters or self.parameters


def shape_of(config: Any, dtype: torch.dtype = torch.bfloat16, fused: int = 0, rank: int = 0) -> Shape:
    """Returns the Shape of a Hugging Face config, trained in `dtype`, with Liger's layers if `fused`, and with LoRA
    adapters of this rank."""
    model, text = skeleton(config, dtype), config.get_text_config()
    if fused:
        fuse_shapes(model)
    parameters = sum(p.numel() for p in model.parameters())
    lora.add(model, rank, rank, dtype=dtype)
    forward, backward = moved(model, rank)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        parameters=parameters,
        matrices=sum(p.numel() for block in blocks(model) for p in block.parameters() if p.ndim == 2),
        head=model.get_output_embeddings().weight.numel(),
        vocabulary=len(model.get_output_embeddings().weight),
        width=text.num_hidden_layers * text.num_attention_heads * dim,
        kv=kv_bytes(config),
        forward=forward,
        backward=backward,
        adapters=sum(p.numel() for name, p in model.named_parameters() if lora.is_adapter(name)),
    )


class Moved(TorchDispatchMode):
    """Adds up the bytes that operations read and write, except views and products of matrices.

    Products with an adapter of this rank count: they are so thin that the memory's bandwidth decides.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.bytes, self.rank = 0.0, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        alias = [value.alias_info for value in func._schema.returns]
        view = any(info is not None and not info.is_write for info in alias)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        thin = self.rank and "mm" in func.__name__ and any(self.rank in t.shape for t in tensors)
        if thin or (not view and not re.search("mm|empty|embedding|alias|_unsafe_view", func.__name__)):
            for t in tensors:  # an expanded one is read once
                self.bytes += min(t.nbytes, t.untyped_storage().nbytes())
        return out


class NoAttention(torch.autograd.Function):
    """The shapes of an attention that moves nothing: `width` counts it as products."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        return query.new_empty(query.transpose(1, 2).shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


def moved(model: Any, rank: int = 0) -> tuple[float, float]:
    """Returns the bytes a token that forward and backward pass of a meta model's blocks move between its products,
    and in those of adapters of this rank."""
    from transformers import AttentionInterface

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        return NoAttention.apply(query, key, value), None

    AttentionInterface.register("nothing", attention)
    model.set_attn_implementation("nothing")
    tokens = 1024
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with Moved(rank) as forward:
        hidden = model.train().base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    with Moved(rank) as backward:
        hidden.backward(torch.empty_like(hidden))
    return forward.bytes / tokens, backward.bytes / tokens


@dataclass(frozen=True)
class Lengths:
    """A mean trajectory in tokens, and how many rounds an evolution takes."""

    title: str
    prompt: int  # the same for a whole group
    observed: int
    sampled: int
    row: int  # in vLLM's cache at the end: an observation after which no turn starts is not
    longest: int  # sampled by the step's longest trajectory
    searches: int  # of the longest trajectory
    rounds: int

    @property
    def total(self) -> int:
        return self.prompt + self.observed + self.sampled

    @property
    def context(self) -> float:
        """Mean tokens before a sampled or an observed one."""
        return self.prompt + (self.observed + self.sampled) / 2


def typical(cfg: Config) -> Lengths:
    """Returns assumed lengths: 2 searches, turns of 150 tokens, a prompt of 400, full observations."""
    turns = min(2, cfg.max_turns) + 1
    sampled, limit = turns * min(150, cfg.max_response), (cfg.max_turns + 1) * cfg.max_response
    prompt, observed = min(400, cfg.max_prompt), (turns - 1) * cfg.max_observation
    return Lengths(
        "typical", prompt, observed, sampled, row=prompt + observed + sampled, longest=min(2 * sampled, limit),
        searches=cfg.max_turns, rounds=1,
    )  # fmt: skip


def most(cfg: Config) -> Lengths:
    """Returns the lengths that the flags allow: no trajectory is longer, and no two share a prompt."""
    row = cfg.max_prompt + cfg.max_response
    sampled = min((cfg.max_turns + 1) * cfg.max_response, row)
    return Lengths(
        "upper bound", prompt=0, observed=row + cfg.max_observation - sampled, sampled=sampled, row=row,
        longest=sampled, searches=cfg.max_turns, rounds=cfg.rounds,
    )  # fmt: skip


# --- operations and bytes -----------------------------------------------------------------------------------------


def forward_flops(shape: Shape, tokens: float, scored: float, pairs: float) -> float:
    """Returns the FLOPs of a forward pass: `scored` tokens pass the head, `pairs` of tokens the attention."""
    return 2 * shape.matrices * tokens + 2 * shape.head * scored + 4 * shape.width * pairs


def update_flops(shape: Shape, tokens: float, scored: float, pairs: float, recompute: int) -> float:
    """Returns the FLOPs of forward and backward pass; `recompute` adds a forward pass of the blocks.

    With LoRA the adapters alone get a gradient. The attention's backward pass has five products, its forward two.
    """
    again = forward_flops(shape, tokens, 0, pairs) if recompute else 0
    weights = shape.matrices * tokens + shape.head * scored
    trained = shape.adapters * tokens if shape.adapters else weights
    backward = 2 * weights + 2 * trained + 10 * shape.width * pairs
    return forward_flops(shape, tokens, scored, pairs) + backward + again


def forward_bytes(shape: Shape, tokens: float, scored: float) -> float:
    """Returns the bytes that a forward pass moves between its products; float32 logits are written and read."""
    return shape.forward * tokens + 2 * 4 * shape.vocabulary * scored


def update_bytes(shape: Shape, tokens: float, scored: float, recompute: int) -> float:
    """Returns the bytes that forward and backward pass move; dL/dz is written and read for dX and dW, in bf16."""
    passes = (1 + bool(recompute)) * shape.forward + shape.backward
    return passes * tokens + (2 * 4 + 3 * 2) * shape.vocabulary * scored


def decode_bytes(shape: Shape, rows: float, context: float) -> float:
    """Returns the bytes that sampling one token in each row reads: all weights, and each row's keys and values."""
    return 2 * (shape.matrices + shape.head) + rows * context * shape.kv


# --- seconds ------------------------------------------------------------------------------------------------------


def work(cfg: Config, lengths: Lengths) -> tuple[float, float, float]:
    """Returns the tokens of a step that are computed, those that are scored, and the pairs of attention.

    A group's prompt is computed once, and so is its attention.
    """
    taus, again = cfg.batch * cfg.G, cfg.batch * (cfg.G - 1)
    tokens = taus * lengths.total - again * lengths.prompt
    pairs = taus * lengths.total**2 / 2 - again * lengths.prompt**2 / 2
    return tokens, taus * lengths.sampled, pairs


def update_seconds(
    cfg: Config, shape: Shape, card: Card, gpus: int, lengths: Lengths, assumed: Assumed
) -> dict[str, float]:
    """Returns the seconds of Learner.update by part."""
    tokens, scored, pairs = work(cfg, lengths)
    updates = cfg.batch // cfg.mini
    batches = updates * math.ceil(math.ceil(tokens / updates / cfg.micro_tokens) / gpus)  # of one rank
    # Seconds in which a GPU receives the others' shares of a number that has one byte a parameter.
    other = (gpus - 1) / gpus * shape.parameters / (card.link * assumed.link)

    def part(flops: float, moved: float, sent: float) -> float:
        """Computing, or FSDP2's traffic, `sent` bytes a parameter and micro-batch, which runs beside it."""
        compute = flops / (card.flops * assumed.flops) + moved / (card.bandwidth * assumed.bandwidth)
        return max(compute / gpus, batches * sent * other)

    score = part(forward_flops(shape, tokens, scored, pairs), forward_bytes(shape, tokens, scored), 2)
    update = update_flops(shape, tokens, scored, pairs, cfg.recompute)
    sent = 2 + 2 + 4 * shape.trained / shape.parameters  # bf16 weights for both passes; float32 gradients
    return {
        # The first mini-batch's are those of its own forward pass.
        "old log-probs": score * (updates - 1) / updates,
        "reference": score if cfg.beta else 0.0,
        "update": part(update, update_bytes(shape, tokens, scored, cfg.recompute), sent),
        # Norm and clipping read the gradient twice and write it once; AdamW reads 4 float32 numbers and writes 3.
        "optimizer": updates * (3 + 7) * 4 * shape.trained / gpus / (card.bandwidth * assumed.bandwidth),
    }


def update_mfu(cfg: Config, shape: Shape, card: Card, lengths: Lengths, assumed: Assumed) -> float:
    """Returns the share of the card's FLOP/s that an update reaches on one GPU; recomputation counts as work."""
    flops = update_flops(shape, *work(cfg, lengths), cfg.recompute)
    return flops / card.flops / update_seconds(cfg, shape, card, 1, lengths, assumed)["update"]


def card_here() -> Card | None:
    """Returns the data sheet of this process's GPU; None where there is none, or it is another than those of CARDS."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    name = torch.cuda.get_device_name()
    return next((card for card in CARDS.values() if card.name == name), None)


def reached(cfg: Config, shape: Shape, card: Card, gpus: int, taus: Sequence[Trajectory], seconds: float) -> float:
    """Returns the MFU of an update of these trajectories that took so long: the FLOPs that it cannot do without, as a
    share of what the GPUs could have done.

    A prompt that several trajectories have counts once; recomputation does not count.
    """
    prompts = {tuple(tau.ids[: tau.prompt_tokens]) for tau in taus}
    tokens = sum(map(len, prompts)) + sum(len(tau.ids) - tau.prompt_tokens for tau in taus)
    pairs = sum(len(p) ** 2 for p in prompts) / 2 + sum(len(tau.ids) ** 2 - tau.prompt_tokens**2 for tau in taus) / 2
    scored = sum(sum(tau.mask) for tau in taus)
    updates = cfg.batch // cfg.mini
    scores = (updates - 1) / updates + bool(cfg.beta)  # old log-probs, reference
    flops = update_flops(shape, tokens, scored, pairs, 0) + scores * forward_flops(shape, tokens, scored, pairs)
    return flops / (seconds * gpus * card.flops)


def rollout_seconds(
    shape: Shape, card: Card, gpus: int, kv_tokens: float, groups: int, G: int, lengths: Lengths, assumed: Assumed
) -> dict[str, float]:
    """Returns the seconds of playing `groups` of G trajectories with vLLM, whose cache has `kv_tokens`, by part.

    Every slot is refilled when a trajectory ends. In the tail, all others have ended, and a step costs what one row
    costs: until the longest trajectory ends, and for the share of the last wave that has no rows.
    """
    mine = math.ceil(groups / gpus) * G
    rows = max(1, min(mine, MAX_SEQS, int(kv_tokens / lengths.row)))

    def step(rows: float) -> float:
        memory = decode_bytes(shape, rows, lengths.context) / (card.bandwidth * assumed.bandwidth)
        compute = forward_flops(shape, rows, rows, rows * lengths.context) / (card.flops * assumed.flops)
        return max(memory, compute) + rows * assumed.host

    waves = mine / rows
    fresh = mine * lengths.observed
    once = mine / G * lengths.prompt
    pairs = fresh * lengths.context + once * lengths.prompt / 2
    return {
        "decode": waves * lengths.sampled * step(rows),
        "tail": (lengths.longest - lengths.sampled + (math.ceil(waves) - waves) * lengths.sampled) * step(1),
        "prefill": forward_flops(shape, fresh + once, 0, pairs) / (card.flops * assumed.flops),
        "searches": lengths.searches * assumed.search,  # of the longest trajectory; others decode meanwhile
    }


def sync_seconds(shape: Shape, card: Card, gpus: int, assumed: Assumed) -> float:
    """Returns the seconds of sending the policy, or its adapters, to vLLM: gathered in float32 by every GPU, cast and
    copied in bf16."""
    link = 4 * (gpus - 1) / gpus * shape.trained / (card.link * assumed.link)
    return link + (4 + 4 + 2 + 2 + 2) * shape.trained / (card.bandwidth * assumed.bandwidth)


def between_seconds(
    cfg: Config, shape: Shape, card: Card, gpus: int, lengths: Lengths, assumed: Assumed
) -> dict[str, float]:
    """Returns the seconds of a step between rollouts and update, while the GPUs wait, by part.

    Asleep, vLLM forgets weights that the next sync brings; with LoRA the frozen ones go to the CPU's memory and back.
    """
    frozen = 2 * shape.parameters if shape.adapters else 0
    return {
        "packing, messages between ranks, logs": cfg.batch * cfg.G * lengths.total * assumed.python,
        "vLLM's frozen weights to the CPU and back": 2 * frozen / (card.host * assumed.link),
        CHECKPOINTS: checkpoint_seconds(cfg, shape, gpus, assumed)[0] / saved_every(cfg),
    }


def saved_every(cfg: Config) -> int:
    """Returns the steps between checkpoints."""
    return min(cfg.save_every, cfg.eval_every or cfg.save_every)


def checkpoint_seconds(cfg: Config, shape: Shape, gpus: int, assumed: Assumed) -> tuple[float, float]:
    """Returns the seconds that training waits for a checkpoint, and those in which it is written beside training."""
    saved = 3 * 4 * shape.trained  # float32 weights and AdamW's two moments
    written = saved * (1 / assumed.disk + 1 / (gpus * assumed.digest))
    return (saved / (gpus * assumed.staged), written) if cfg.async_save else (written, 0.0)


def step_seconds(
    cfg: Config, shape: Shape, card: Card, gpus: int, kv_tokens: float, lengths: Lengths, assumed: Assumed
) -> dict[str, float]:
    """Returns the seconds of a training step by part; without vLLM in the process (`kv_tokens` 0), of its update."""
    parts: dict[str, float] = {}
    if kv_tokens:
        play = (shape, card, gpus, kv_tokens)
        parts |= {f"rollouts: {k}": v for k, v in rollout_seconds(*play, cfg.batch, cfg.G, lengths, assumed).items()}
    parts |= update_seconds(cfg, shape, card, gpus, lengths, assumed)
    between = between_seconds(cfg, shape, card, gpus, lengths, assumed)
    if not kv_tokens:
        between.pop("vLLM's frozen weights to the CPU and back")
    parts |= between
    if kv_tokens:
        parts["weights to vLLM"] = sync_seconds(shape, card, gpus, assumed)
        if evolves(cfg) and cfg.T_e > cfg.K_e:
            jobs = (1 + cfg.N_P - cfg.N_parent) * cfg.D_B  # the parent's and its revisions'
            once = sum(rollout_seconds(*play, jobs, 1, lengths, assumed).values())
            parts["verification before T_e, spread over K_e steps"] = lengths.rounds * once / cfg.K_e
    # The next one waits for a checkpoint that takes longer than the steps between them.
    beside = checkpoint_seconds(cfg, shape, gpus, assumed)[1] / saved_every(cfg)
    parts[CHECKPOINTS] += max(0.0, beside - sum(parts.values()))
    return parts


def table(cfg: Config, config: Any, kv_tokens: float) -> str:
    """Returns the seconds of a step on --gpus of --card as text of at most 100 columns."""
    shape, card, assumed = shape_of(config, fused=cfg.fused_layers, rank=cfg.lora_rank), CARDS[cfg.card], Assumed()
    columns = [typical(cfg), most(cfg)]
    mfu = update_mfu(cfg, shape, card, columns[0], assumed)
    found = [step_seconds(cfg, shape, card, cfg.gpus, kv_tokens, lengths, assumed) for lengths in columns]

    def row(name: str, *cells: str) -> str:
        return f"{name:<60}" + "".join(f"{cell:>16}" for cell in cells)

    title = f"{shape.parameters / 1e6:,.0f}M parameters on {cfg.gpus} x {cfg.card}: seconds of a step"
    lines = [f"{title}, computed, not measured", "", row("part", *(lengths.title for lengths in columns))]
    used = [name for name in found[0] if any(parts[name] for parts in found)]
    lines += [row(name, *(f"{parts[name]:.1f}" for parts in found)) for name in used]
    lines += ["-" * 92, row("sum", *(f"{sum(parts.values()):.1f}" for parts in found)), ""]
    for lengths in columns:
        lines.append(
            f"{lengths.title.capitalize()}: {lengths.total:,} tokens a trajectory, {lengths.sampled:,} of them sampled"
            f" (at most {lengths.longest:,})."
        )
    lines += [
        "Typical means: 2 searches, 3 turns of 150 tokens, a prompt of 400, full observations.",
        f"Assumed: {assumed.flops:.0%} of the FLOP/s in products (an MFU of {mfu:.0%} in the update),"
        f" {assumed.bandwidth:.0%} of the memory's",
        f"bandwidth, {assumed.link:.0%} of the link's; {assumed.host * 1e6:.0f} us of Python a token in vLLM;"
        f" {assumed.search} s a search;",
        f"{assumed.disk / 1e9:.1f} GB/s to the disk.",
    ]
    if not kv_tokens:
        lines.append("Rollouts are left out: only vLLM in the trainer's processes is modelled.")
    return "\n".join(lines)
