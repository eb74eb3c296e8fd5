"""Turn a checkpoint of a run into a plain Hugging Face directory, with its best instruction beside
the weights.

python export.py runs/NAME                  # the newest checkpoint
python export.py runs/NAME --step 100       # or --best: the best on the validation questions
python export.py runs/NAME --adapters       # of a run with --lora_rank: the adapters alone, for peft and vLLM
vllm serve runs/NAME/step-000100            # the directory loads in vLLM and in transformers

For a run with --lora_rank the weights are those that the policy computed with, adapters merged
(models/lora.py).
"""

from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
from pathlib import Path

import torch

from config import Config, read_config
from journal.directory import RunDirectory, step_of
from models import lora
from models.model import empty, export, load_config, load_model, load_tokenizer
from plumbing.faults import CheckpointFault, Fault, one_line
from plumbing.files import write_file
from population import Population
from training import checkpoint


def export_checkpoint(
    path: Path,
    step: int | None = None,
    best: bool = False,
    adapters: bool = False,
    to: Path | None = None,
) -> tuple[Path, int, int]:
    """Writes a checkpoint of the run at `path`, its weights or its `adapters` alone, to the
    directory `to`.

    It is the newest one, that of `step`, or the `best` on the validation questions. Returns the
    directory, the step, and the id of the instruction in I_star.txt.
    """
    cfg: Config = read_config(path)
    if adapters and not cfg.lora_rank:
        raise Fault(f"--adapters: {path} has none, it trained all weights (--lora_rank 0)")
    run = RunDirectory(path)
    chosen = choose(run, step, best)
    to = to or path / chosen.name
    if to.exists():
        raise Fault(f"{to} exists already; remove it, or choose another with --to")
    P = Population(cfg.tau_s, cfg.window)
    try:
        if wrong := checkpoint.damage(chosen):
            raise CheckpointFault(f"{chosen} is damaged ({wrong[0]}): choose another with --step")
        P.load_state_dict(run.load_state(chosen)["population"])
        config, computed = load_config(cfg.model), getattr(torch, cfg.dtype)
        model = empty(config, torch.float32, "cpu")
        if cfg.lora_rank:  # its checkpoints lack the weights that did not change
            model = load_model(cfg.model, cfg.max_prompt + cfg.max_response).to(computed)
            lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
        tensors = {
            "model": {
                k: v
                for k, v in model.state_dict().items()
                if lora.is_adapter(k) or not cfg.lora_rank
            }
        }
        checkpoint.load(tensors, chosen, alone=True)
    except CheckpointFault:
        if chosen.exists():
            raise
        raise Fault(
            f"{chosen} has been replaced by newer ones, as the run goes on: export again"
        ) from None
    with run.directory(str(to.absolute())) as new:
        if adapters:
            lora.export(model, cfg.lora_alpha, cfg.seed, cfg.model, new)
        else:
            export(config, model, load_tokenizer(cfg.model), new, computed)
        write_file(new / "I_star.txt", P.best().text + "\n")
    return to, step_of(chosen), P.best().id


def choose(run: RunDirectory, step: int | None, best: bool) -> Path:
    """Returns the checkpoint that was asked for; a Fault lists those that there are."""
    steps = {step_of(path): path for path in run.checkpoints()}
    chosen = run.best() if best else steps.get(max(steps, default=0) if step is None else step)
    if not chosen:
        such = " that was evaluated" if best else "" if step is None else f" of step {step}"
        raise Fault(
            f"{run.path} has no checkpoint{such}; it has: {', '.join(map(str, steps)) or 'none'}"
        )
    return chosen


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument(
        "--best",
        action="store_true",
        help="the best on the validation questions, by the first metric",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="LoRA's adapters alone, not merged into the weights"
    )
    parser.add_argument("--to", type=Path, help="directory to write; default: runs/NAME/step-N")
    args = parser.parse_args(argv)
    with one_line("export.py"), stop.listening(), stop.may_stop():
        to, step, I = export_checkpoint(args.run, args.step, args.best, args.adapters, args.to)
        print(f"{to}: the policy after step {step}, and I_star.txt: instruction #{I}")


if __name__ == "__main__":
    main()
