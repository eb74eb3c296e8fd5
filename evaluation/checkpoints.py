"""Checkpoints of a run as plain Hugging Face directories."""

from pathlib import Path

import torch

from config import Config, read_config
from models import lora
from models.model import empty, export, fill, load_config, load_model, load_tokenizer, named_weights
from plumbing.faults import Fault
from plumbing.files import new_directory, write_file
from population import Population
from run import Run, read_state, step_of
from training.policy import load_tensors


def export_checkpoint(
    path: Path,
    out: Path | None = None,
    step: int | None = None,
    best: bool = False,
    adapters: bool = False,
) -> tuple[Path, int, int]:
    """Writes a checkpoint of the run at `path`, its weights or its `adapters` alone, to the
    directory `out`.

    It is the newest one, that of `step`, or the `best` on the validation questions. Returns the
    directory, the step, and the id of the instruction in I_star.txt.
    """
    # which checkpoint, and where to
    cfg: Config = read_config(path)
    if adapters and not cfg.lora_rank:
        raise Fault(f"--adapters: {path} has none, it trained all weights (--lora_rank 0)")
    run = Run(path)
    chosen = choose_checkpoint(run, step, best)
    out = out or path / chosen.name
    if out.exists():
        raise Fault(f"{out} exists already; remove it, or choose another with --out")

    # the weights that it holds, in a model of that shape
    P = Population(cfg)
    P.load_state_dict(read_state(chosen)["population"])
    I = P.best()
    config, computed = load_config(cfg.model), getattr(torch, cfg.dtype)
    model = empty(config, computed if cfg.lora_rank else torch.float32, "cpu")
    if cfg.lora_rank:  # its checkpoints lack the weights that did not change
        fill(model, load_model(cfg.model, cfg.longest))
        lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
    stored = {}
    for name, tensor in named_weights(model):
        if not cfg.lora_rank or lora.is_adapter(name):
            stored[f"model.{name}"] = tensor.detach()
    load_tensors(stored, chosen, alone=True)

    # what is written
    with new_directory(out) as new:
        if adapters:
            lora.export(model, cfg.lora_alpha, cfg.model, new)
            rounded = f"dithered by a generator of seed {cfg.seed}" if cfg.dither else "rounded"
            write_file(new / "README.md", lora.LOSS.format(rounded=rounded))
        else:
            export(config, model, load_tokenizer(cfg.model), new, computed)
        write_file(new / "I_star.txt", I.text + "\n")
    return out, step_of(chosen), I.id


def choose_checkpoint(run: Run, step: int | None, best: bool) -> Path:
    """Returns the checkpoint that was asked for; a Fault lists those that there are."""
    steps = {step_of(path): path for path in run.checkpoints()}
    if best:
        chosen, such = (
            run.best(),
            " that was evaluated on --valid (--eval_every N evaluates in training)",
        )
    elif step is not None:
        chosen, such = steps.get(step), f" of step {step}"
    else:
        chosen, such = steps.get(max(steps, default=0)), ""
    if not chosen:
        there = ", ".join(map(str, steps)) or "none"
        raise Fault(f"{run.path} has no checkpoint{such}; it has: {there}")
    return chosen
