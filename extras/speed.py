"""How long will a step take? `--dry_run` prints it, computed from shapes, a card's data sheet and assumed shares of it.

Nothing here is measured on a GPU. Training is products of matrices, at a share of the card's FLOP/s, and between them
operations that read and write activations, at a share of its bandwidth; FSDP2's traffic overlaps with both. Decoding
takes the longer of its arithmetic and its reading. The policy is dense, and its attention has no window.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from config import Config, evolves
from engines.vllm_engine import MAX_SEQS
from models import lora
from models.model import blocks, skeleton
from training.fit import activations, kv_bytes, parameters


@dataclass(frozen=True)
class Card:
    """What a GPU reaches, or by its data sheet could."""

    flops: float  # bf16 FLOP/s of dense matrices, float32 sums
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s to the other GPUs of its node, one way


CARDS = {  # NVIDIA's data sheets; where those give FLOP/s with sparsity (H100, H200), half of them
    "h100": Card(989.5e12, 3.35e12, 450e9),  # "H100 Tensor Core GPU", SXM: 1,979 TFLOPS, NVLink 900 GB/s both ways
    "h200": Card(989.5e12, 4.8e12, 450e9),  # "H200 Tensor Core GPU", SXM: likewise
    "a100": Card(312e12, 2.039e12, 300e9),  # "A100 Tensor Core GPU", 80 GB SXM: NVLink 600 GB/s both ways
    "rtx4090": Card(165.2e12, 1.008e12, 32e9),  # "NVIDIA Ada GPU Architecture", appendix A; PCIe 4.0 x16
}
REACHED = Card(0.45, 0.6, 0.6)  # assumed shares of those figures
HOST = 45e-6  # seconds of vLLM's Python a row and token (measured: LOG.md)
SEARCH = 0.2  # seconds of a search, whatever the load
# Bytes that forward and backward pass move between the products for a byte that they keep: with torch's layers, and
# with Liger's. Counted on Qwen2's shapes, where they do not depend on the size.
MOVED = (2.5, 5.4), (1.2, 2.2)
TOKENS = 1024  # of the micro-batch of which that is computed


@dataclass(frozen=True)
class Shape:
    """What a policy's seconds depend on."""

    parameters: int
    trained: int  # weights that get a gradient
    matrices: int  # weights of the blocks' matrices
    head: int  # weights of the head; the embedding's too if tied
    vocabulary: int
    width: int  # layers x query heads x their dimension
    kv: int  # bytes of one token's keys and values
    forward: float  # bytes a token that a forward pass of the blocks moves between the products
    backward: float  # the same of their backward pass


def shape_of(config: Any, fused: int = 1, rank: int = 0) -> Shape:
    """Reads the Shape of a Hugging Face config; `fused`: with Liger's layers, `rank`: of LoRA's adapters."""
    model, text = skeleton(config, torch.bfloat16), config.get_text_config()
    matrices = sum(p.numel() for block in blocks(model) for p in block.parameters() if p.ndim == 2)
    lora.add(model, rank, rank)
    head = model.get_output_embeddings().weight
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept, _ = activations(skeleton(config, torch.bfloat16), TOKENS, recompute=0, fused=fused)
    forward, backward = (times * kept / TOKENS for times in MOVED[bool(fused)])
    return Shape(
        parameters(model), trained, matrices, head.numel(), len(head), text.num_hidden_layers
        * text.num_attention_heads * dim, kv_bytes(config), forward, backward,
    )  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """A mean trajectory in tokens."""

    title: str
    prompt: int  # the same for a whole group
    observed: int
    sampled: int
    longest: int  # sampled by the step's longest trajectory
    searches: int  # of the longest trajectory
    rounds: int  # of an evolution

    @property
    def total(self) -> int:
        return self.prompt + self.observed + self.sampled

    @property
    def context(self) -> float:
        """Mean tokens before a sampled or an observed one."""
        return self.prompt + (self.observed + self.sampled) / 2


def typical(cfg: Config) -> Lengths:
    """Assumes 2 searches, turns of 150 tokens, a prompt of 400, full observations, one trajectory twice as long."""
    turns = min(2, cfg.max_turns) + 1
    sampled, limit = turns * min(150, cfg.max_response), (cfg.max_turns + 1) * cfg.max_response
    prompt, observed = min(400, cfg.max_prompt), (turns - 1) * cfg.max_observation
    return Lengths("typical", prompt, observed, sampled, min(2 * sampled, limit), cfg.max_turns, 1)


def upper_bound(cfg: Config) -> Lengths:
    """Takes the lengths that the flags allow: no trajectory is longer, and no two share a prompt."""
    row = cfg.max_prompt + cfg.max_response
    sampled = min((cfg.max_turns + 1) * cfg.max_response, row)
    return Lengths("upper bound", 0, row + cfg.max_observation - sampled, sampled, sampled, cfg.max_turns, cfg.rounds)


def update_seconds(cfg: Config, shape: Shape, card: Card, gpus: int, lengths: Lengths) -> dict[str, float]:
    """Returns the seconds of `Learner.update` by part, on cards that reach what `card` says.

    A group's prompt is computed once. With LoRA the adapters alone get a gradient. The attention's backward pass has
    five products, its forward pass two.
    """
    taus, again = cfg.batch * cfg.G, cfg.batch * (cfg.G - 1)
    tokens, scored = taus * lengths.total - again * lengths.prompt, taus * lengths.sampled
    pairs = taus * lengths.total**2 / 2 - again * lengths.prompt**2 / 2
    updates = cfg.batch // cfg.mini
    batches = updates * math.ceil(math.ceil(tokens / updates / cfg.micro_tokens) / gpus)  # of one rank
    products, share = 2 * shape.matrices * tokens + 2 * shape.head * scored, shape.trained / shape.parameters

    def part(flops: float, moved: float, sent: float) -> float:
        """Computing, or FSDP2's traffic, `sent` bytes a parameter and micro-batch, which overlaps with it."""
        other = (gpus - 1) / gpus * shape.parameters / card.link  # to receive a byte of each from the other ranks
        return max((flops / card.flops + moved / card.bandwidth) / gpus, batches * sent * other)

    forward, passes = products + 4 * shape.width * pairs, 1 + bool(cfg.recompute)
    score = part(forward, shape.forward * tokens + 2 * 4 * shape.vocabulary * scored, 2)  # logits: written and read
    update = part(
        forward + products * (1 + share) + 10 * shape.width * pairs
        + (passes - 1) * (2 * shape.matrices * tokens + 4 * shape.width * pairs),
        # of the head also dL/dz, in bf16, which is written, and read for dX and dW
        (passes * shape.forward + shape.backward) * tokens + (2 * 4 + 3 * 2) * shape.vocabulary * scored,
        2 + 2 + 4 * share,  # bf16 weights for both passes; float32 gradients
    )  # fmt: skip
    return {
        # The first mini-batch's are those of its own forward pass.
        "old log-probs": score * (updates - 1) / updates,
        "reference": score if cfg.beta else 0.0,
        "update": update,
        # Norm and clipping read the gradient twice and write it once; AdamW reads 4 float32 numbers and writes 3.
        "optimizer": updates * (3 + 7) * 4 * shape.trained / gpus / card.bandwidth,
    }


def rollout_seconds(shape: Shape, card: Card, rows: int, groups: float, G: int, lengths: Lengths) -> dict[str, float]:
    """Returns the seconds in which one GPU's vLLM, which runs `rows` at once, plays `groups` of G trajectories.

    Every slot is refilled when a trajectory ends. In the tail, all others have ended, and a token costs what one row
    costs: until the longest trajectory ends, and for the share of the last wave that has no rows.
    """

    def step(rows: float) -> float:
        read = 2 * (shape.matrices + shape.head) + rows * lengths.context * shape.kv
        flops = rows * (2 * shape.matrices + 2 * shape.head + 4 * shape.width * lengths.context)
        return max(read / card.bandwidth, flops / card.flops) + rows * HOST

    rows = max(1, min(rows, math.ceil(groups * G)))
    waves = groups * G / rows
    fresh, once = groups * G * lengths.observed, groups * lengths.prompt
    pairs = fresh * lengths.context + once * lengths.prompt / 2
    return {
        "rollouts: decode": waves * lengths.sampled * step(rows),
        "rollouts: tail": (lengths.longest - lengths.sampled + (math.ceil(waves) - waves) * lengths.sampled) * step(1),
        "rollouts: prefill": (2 * shape.matrices * (fresh + once) + 4 * shape.width * pairs) / card.flops,
        "rollouts: searches": lengths.searches * SEARCH,  # of the longest trajectory; others decode meanwhile
    }


def step_seconds(cfg: Config, shape: Shape, card: Card, kv_tokens: float, lengths: Lengths) -> dict[str, float]:
    """Returns the seconds of a training step on --gpus by part; of its update alone without vLLM (`kv_tokens` 0)."""
    update = update_seconds(cfg, shape, card, cfg.gpus, lengths)
    if not kv_tokens:
        return update
    row = min(lengths.total, cfg.max_prompt + cfg.max_response)  # no turn follows a last observation past these
    rows = min(MAX_SEQS, int(kv_tokens / row))
    parts = rollout_seconds(shape, card, rows, math.ceil(cfg.batch / cfg.gpus), cfg.G, lengths) | update
    # Gathered in float32 (adapters, and bf16 weights below them, with LoRA), cast and copied in bf16.
    link = (4 if shape.trained == shape.parameters else 2) * (cfg.gpus - 1) / cfg.gpus * shape.parameters / card.link
    parts["weights to vLLM"] = link + (4 + 4 + 2 + 2 + 2) * shape.parameters / card.bandwidth
    if evolves(cfg) and cfg.T_e > cfg.K_e:
        jobs = (1 + cfg.N_P - cfg.N_parent) * cfg.D_B  # the parent's and its revisions'
        once = rollout_seconds(shape, card, rows, math.ceil(jobs / cfg.gpus), 1, lengths)
        parts["verification before T_e, spread over K_e steps"] = lengths.rounds * sum(once.values()) / cfg.K_e
    return parts


def table(cfg: Config, config: Any, kv_tokens: float) -> str:
    """Writes the seconds of a step on --gpus of --card as text of at most 100 columns."""
    shape, sheet = shape_of(config, cfg.fused_layers, cfg.lora_rank), CARDS[cfg.card]
    columns = typical(cfg), upper_bound(cfg)
    card = Card(sheet.flops * REACHED.flops, sheet.bandwidth * REACHED.bandwidth, sheet.link * REACHED.link)
    parts = [step_seconds(cfg, shape, card, kv_tokens, lengths) for lengths in columns]

    def row(name: str, *cells: str) -> str:
        return f"{name:<60}" + "".join(f"{cell:>16}" for cell in cells)

    title = f"{shape.parameters / 1e6:,.0f}M parameters on {cfg.gpus} x {cfg.card}: seconds of a step"
    lines = [f"{title}, computed, not measured", "", row("part", *(lengths.title for lengths in columns))]
    lines += [row(name, *(f"{part[name]:.1f}" for part in parts)) for name in parts[0] if any(x[name] for x in parts)]
    lines += ["-" * 92, row("sum", *(f"{sum(part.values()):.1f}" for part in parts)), ""]
    lines += [
        f"Typical: 2 searches, 3 turns of 150 tokens, a prompt of 400, full observations; {columns[0].total:,} tokens.",
        f"Assumed: {REACHED.flops:.0%} of the FLOP/s in products, {REACHED.bandwidth:.0%} of the memory's bandwidth and"
        " of the link's,",
        f"{HOST * 1e6:.0f} us of Python a token in vLLM, {SEARCH} s a search."
        + " Rollouts are left out: only vLLM is modelled." * (not kv_tokens),
    ]
    return "\n".join(lines)
