"""A checkpoint as a plain Hugging Face directory, with the best instruction beside the weights."""

from pathlib import Path

import torch

from config import Config, read_config
from journal.directory import RunDirectory, step_of
from models import lora
from models.model import empty, export, load_config, load_model, load_tokenizer
from plumbing.faults import Fault
from population import Population
from training import checkpoint


def export_checkpoint(
    path: Path, step: int | None = None, best: bool = False, adapters: bool = False, to: Path | None = None
) -> tuple[Path, int, int]:
    """Writes a checkpoint of the run at `path`, its weights or its `adapters` alone, to the directory `to`.

    It is the newest one, that of `step`, or the `best` on the validation questions. Returns the directory, the step,
    and the id of the instruction in I_star.txt.
    """
    cfg: Config = read_config(path)
    if adapters and not cfg.lora_rank:
        raise Fault(f"--adapters: {path} has none, it trained all weights (--lora_rank 0)")
    run = RunDirectory(path)
    chosen = choose(run, step, best)
    to = to or path / chosen.name
    if to.exists():
        raise Fault(f"{to} exists already; remove it, or choose another with --to")
    if wrong := checkpoint.damage(chosen):
        raise Fault(f"{chosen} is damaged ({wrong[0]}): choose another with --step")
    state = run.load_state(chosen)
    P = Population(cfg.tau_s, cfg.window)
    try:
        P.load_state_dict(state["population"])
    except (LookupError, TypeError, ValueError) as e:
        raise Fault(f"{chosen}/state.pt is of another program ({type(e).__name__}: {e})") from None
    config = load_config(cfg.model)
    computed = getattr(torch, cfg.dtype)
    model = empty(config, torch.float32, "cpu")
    if cfg.lora_rank:  # its checkpoints lack the weights that did not change
        model = lora.add(load_model(cfg.model).to(computed), cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
    tensors = {"model": {k: v for k, v in model.state_dict().items() if lora.is_adapter(k) or not cfg.lora_rank}}
    checkpoint.load(tensors, chosen, alone=True)
    if adapters:
        lora.export(model, cfg.lora_alpha, cfg.seed, cfg.model, to)
    else:
        export(config, model, load_tokenizer(cfg.model), to, computed)
    (to / "I_star.txt").write_text(P.best().text + "\n")
    return to, step_of(chosen), P.best().id


def choose(run: RunDirectory, step: int | None, best: bool) -> Path:
    """Returns the checkpoint that was asked for; a Fault lists those that there are."""
    saved = run.checkpoints()
    if best:
        found = [chosen] if (chosen := run.best()) else []
    else:
        found = [x for x in saved if step in (None, step_of(x))]
    if not found:
        steps = ", ".join(str(step_of(x)) for x in saved) or "none"
        asked = " that was evaluated" if best else "" if step is None else f" of step {step}"
        remedy = "; choose one with --step, or train with --eval_every and --save_every" if best else ""
        raise Fault(f"{run.path} has no checkpoint{asked}; it has: {steps}{remedy}")
    return found[-1]
