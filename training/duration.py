"""How long does a step take on a GPU? Computed from shapes, and from rates that one H200 measured
(docs/gpus.md); whoever prints it says so."""

import math
from typing import Any

from config import CARDS, Config
from models.model import blocks, skeleton

# by a part of the card's name; the first that fits counts
TFLOPS = {"h100pcie": 756, "b200": 2250, "l40s": 362} | {name: x for name, (_, x) in CARDS.items()}
# share of a card's FLOP/s that forward and backward passes reach, attention included
REACHED = 0.54
# seconds of Python a layer and micro-batch: the reference, forward, backward
HOST = 12e-3
# the same where all weights are gathered, with activations kept and recomputed
HOST_GATHERED = 5.3e-3, 9.3e-3
ROW = 60e-6  # seconds a token that vLLM generates, with some 160 rows at once
PROMPT = 300  # tokens of an instruction and a question, assumed


def find_peak(card: str) -> float | None:
    """Returns the data sheet's FLOP/s, dense bfloat16, of a card by its name, as torch or --dry_run
    has it; None if it is not known."""
    for name, tflops in TFLOPS.items():
        if name in card.lower().replace(" ", ""):
            return tflops * 1e12
    return None


def flops_of(card: str) -> float:
    """Returns the FLOP/s of a card, an A100's if they are not known."""
    return find_peak(card) or TFLOPS["a100"] * 1e12


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


def describe_time(cfg: Config, config: Any, gpus: int, card: str) -> str:
    """Returns a step's seconds and a run's hours in words, with what was assumed."""
    if card not in CARDS:
        return f"How long a step takes is computed for {', '.join(CARDS)} alone."
    model, (sampled, read) = skeleton(config), trajectory(cfg)
    rollout = rollout_seconds(cfg, model, gpus, flops_of(card))
    update = update_seconds(cfg, model, gpus, flops_of(card))
    hours = cfg.T * (rollout + update) / 3600
    return (
        f"A step takes {rollout:.0f} s of rollouts and {update:.0f} s of update; {cfg.T} steps {hours:.1f} hours,"
        " without evaluation\nand evolution: computed, from rates that one H200 measured (docs/gpus.md). Assumed:"
        f" a trajectory\nsamples {sampled:,} tokens and reads {read:,}."
    )
