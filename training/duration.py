"""How long does a step take on a GPU? Computed from shapes and from rates that one H200 measured
(docs/gpus.md); whoever prints it says so."""

import math
from typing import Any

from config import Config
from models.model import blocks, skeleton

FLOPS = {
    "h100": 989e12,
    "h200": 989e12,
    "a100": 312e12,
    "rtx4090": 165e12,
}  # data sheets: dense bf16
BYTES = {"h100": 3.35e12, "h200": 4.8e12}  # data sheets: bytes a second to and from memory
REACHED = 0.70  # share of FLOPS that the passes of an update reach
HOST = 6.5e-3  # seconds of Python a layer and micro-batch
ROW = 110e-6  # seconds of Python and sampling a token that vLLM generates
PROMPT = 300  # tokens of an instruction and a question, assumed


def flops_of(card: str) -> float:
    """Returns the FLOP/s of a card from its name, as torch or --dry_run has it; an A100's if it is
    none of these."""
    name = card.lower().replace(" ", "")
    return next((flops for known, flops in FLOPS.items() if known in name), FLOPS["a100"])


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
    passes = (
        3 - bool(cfg.lora_rank) + bool(cfg.recompute) + bool(cfg.beta) + 1 - cfg.mini / cfg.batch
    )
    tokens = cfg.mini * cfg.G * sum(trajectory(cfg)) / gpus
    micro_batches = math.ceil(tokens / cfg.micro_tokens)
    weights = sum(p.numel() for p in model.parameters())
    card = 2 * passes * weights * tokens / micro_batches / (REACHED * flops)
    host = HOST * len(blocks(model))
    return cfg.batch / cfg.mini * micro_batches * max(card, host)


def rollout_seconds(cfg: Config, model: Any, gpus: int, card: str) -> float:
    """Returns the seconds of a step's rollouts with vLLM on every GPU: what is read at the speed of
    the products, what is sampled at that of the memory and of Python."""
    rows, (sampled, read) = math.ceil(cfg.batch / gpus) * cfg.G, trajectory(cfg)
    weights = sum(p.numel() for p in model.parameters())
    reading = 2 * weights * rows * read / (REACHED * FLOPS[card])
    return reading + 2 * weights * sampled / BYTES[card] + ROW * rows * sampled


def describe_time(cfg: Config, config: Any, gpus: int, card: str) -> str:
    """Returns a step's seconds and a run's hours in words, with what was assumed."""
    if card not in BYTES:
        return f"Times are computed for {' and '.join(BYTES)} alone."
    model, (sampled, read) = skeleton(config), trajectory(cfg)
    update = update_seconds(cfg, model, gpus, FLOPS[card])
    rollout = rollout_seconds(cfg, model, gpus, card)
    return (
        f"A step takes {rollout:.0f} s of rollouts and {update:.0f} s of update, {cfg.T} steps"
        f" {cfg.T * (rollout + update) / 3600:.1f} hours; evaluation and evolution come on top.\n"
        f"Computed from rates of one H200 (docs/gpus.md); assumed: every trajectory samples {sampled:,} tokens and"
        f" reads {read:,}."
    )
