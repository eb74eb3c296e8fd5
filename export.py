"""Turn a checkpoint of a run into a plain Hugging Face directory, with its best instruction beside
the weights.

python export.py runs/NAME                  # the newest checkpoint
python export.py runs/NAME --step 100       # or --best: the best on the validation questions
vllm serve runs/NAME/step-000100            # the directory loads in vLLM and in transformers
hf upload OWNER/NAME runs/NAME/step-000100

For a run with --lora_rank the weights are those that the policy computed with, adapters merged
(models/lora.py).
"""

import argparse
from pathlib import Path
from typing import Any

from config import Config, read_config
from models.model import is_adapter
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.files import new_directory, write_file


def export_checkpoint(
    path: Path, out: Path | None = None, step: int | None = None, best: bool = False
) -> tuple[Path, int, int]:
    """Writes a checkpoint of the run at `path` to the directory `out`.

    It is the newest one, that of `step`, or the `best` on the validation questions. Returns the
    directory, the step, and the id of the instruction in I_star.txt.
    """
    # here: torch takes seconds to import
    import torch

    from models import lora
    from models import model as models
    from population import Population
    from run import Run, read_state, step_of
    from training.policy import load_tensors

    # which checkpoint, and where to
    cfg: Config = read_config(path)
    chosen = choose_checkpoint(Run(path), step, best)
    out = out or path / chosen.name
    if out.exists():
        raise Fault(f"{out} exists already; remove it, or choose another with --out")

    # the weights that it holds, in a model of that shape
    P = Population(cfg)
    P.load_state_dict(read_state(chosen)["population"])
    I = P.best()
    config, computed = models.load_config(cfg.model), getattr(torch, cfg.dtype)
    model = models.empty(config, computed if cfg.lora_rank else torch.float32, "cpu")
    if cfg.lora_rank:  # its checkpoints lack the weights that did not change
        models.fill(model, models.load_model(cfg.model, cfg.longest))
        lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
    stored = {}
    for name, tensor in models.named_weights(model):
        if not cfg.lora_rank or is_adapter(name):
            stored[f"model.{name}"] = tensor.detach()
    load_tensors(stored, chosen, alone=True)

    # what is written
    with new_directory(out) as new:
        models.export(config, model, models.load_tokenizer(cfg.model), new, computed)
        write_file(new / "I_star.txt", I.text + "\n")
    return out, step_of(chosen), I.id


def choose_checkpoint(run: Any, step: int | None, best: bool) -> Path:
    """Returns the checkpoint that was asked for; a Fault lists those that there are."""
    from run import step_of

    steps = {step_of(path): path for path in run.checkpoints()}
    chosen = run.best() if best else steps.get(max(steps, default=0) if step is None else step)
    if not chosen:
        there = ", ".join(map(str, steps)) or "none"
        raise Fault(
            f"{run.path} has no such checkpoint; it has: {there} (--eval_every N finds the best on --valid)"
        )
    return chosen


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    which.add_argument(
        "--best",
        action="store_true",
        help="the best on the validation questions, by the first metric",
    )
    parser.add_argument("--out", type=Path, help="directory to write; default: runs/NAME/step-N")
    args = parser.parse_args(argv)
    with one_line("export.py"), stop.listening(), stop.may_stop():
        out, step, I = export_checkpoint(args.run, args.out, args.step, args.best)
        print(f"{out}: the policy after step {step}, and I_star.txt: instruction #{I}")


if __name__ == "__main__":
    main()
