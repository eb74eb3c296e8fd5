"""Checkpoints of a run as plain Hugging Face directories."""

from pathlib import Path

import torch

from config import Config, read_config
from journal.card import make_card
from journal.directory import RunDirectory, step_of
from models import lora
from models.model import empty, export, fill, load_config, load_model, load_tokenizer
from plumbing import checkpoint
from plumbing.faults import CheckpointFault, Fault
from plumbing.files import new_directory, write_file
from population import Population


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
    run = RunDirectory(path)
    chosen = choose_checkpoint(run, step, best)
    out = out or path / chosen.name
    if out.exists():
        raise Fault(f"{out} exists already; remove it, or choose another with --out")
    wrong = checkpoint.damage(chosen)
    if wrong:
        raise CheckpointFault(f"{chosen} is damaged ({wrong[0]}): choose another with --step")

    # the weights that it holds, in a model of that shape
    P = Population(cfg)
    P.load_state_dict(run.load_mark(chosen)["population"])
    I = P.best()
    config, computed = load_config(cfg.model), getattr(torch, cfg.dtype)
    model = empty(config, computed if cfg.lora_rank else torch.float32, "cpu")
    stored = model.state_dict()
    if cfg.lora_rank:  # its checkpoints lack the weights that did not change
        fill(model, load_model(cfg.model, cfg.longest))
        lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
        both = model.state_dict()
        stored = {name: value for name, value in both.items() if lora.is_adapter(name)}
    checkpoint.load({"model": stored}, chosen, alone=True)

    # what is written
    library = "peft" if adapters else "transformers"
    card = make_card(run, cfg, step_of(chosen), I.text, library)
    with new_directory(out) as new:
        if adapters:
            lora.export(model, cfg.lora_alpha, cfg.model, new)
            rounded = f"dithered by a generator of seed {cfg.seed}" if cfg.dither else "rounded"
            card += lora.LOSS.format(rounded=rounded)
        else:
            export(config, model, load_tokenizer(cfg.model), new, computed)
        write_file(new / "I_star.txt", I.text + "\n")
        write_file(new / "README.md", card)
    return out, step_of(chosen), I.id


def choose_checkpoint(run: RunDirectory, step: int | None, best: bool) -> Path:
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
