"""Turn a checkpoint of a run into a plain Hugging Face directory, with its best instruction beside the weights.

python export.py runs/NAME                  # the newest checkpoint
python export.py runs/NAME --step 100       # or --best: the best on the validation questions
python export.py runs/NAME --adapters       # of a run with --lora_rank: the adapters alone, for peft and vLLM
vllm serve runs/NAME/step-000100            # the directory loads in vLLM and in transformers
"""

import argparse
from pathlib import Path

from plumbing import stop
from config import read_config
from plumbing.faults import Fault, one_line
from population import Population


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--best", action="store_true", help="the one with the best score on the validation questions")
    parser.add_argument("--adapters", action="store_true", help="LoRA's adapters alone, not merged into the weights")
    parser.add_argument("--to", type=Path, help="directory to write; default: runs/NAME/step-N")
    args = parser.parse_args(argv)
    with one_line("export.py"), stop.listening():
        export_checkpoint(args.run, args.step, args.best, args.adapters, args.to)


def export_checkpoint(path: Path, step: int | None, best: bool, adapters: bool, to: Path | None) -> None:
    """Writes the chosen checkpoint of the run at `path` to the directory `to`: its weights, or its adapters alone."""
    cfg = read_config(path)
    if adapters and not cfg.lora_rank:
        raise Fault(f"--adapters: {path} has none, it trained all weights (--lora_rank 0)")
    import torch

    from journal.directory import RunDirectory, step_of
    from training import checkpoint
    from models import lora
    from models.model import empty, export, load_config, load_model, load_tokenizer, weights

    run = RunDirectory(path)
    saved = run.checkpoints()
    if best:
        saved = [chosen] if (chosen := run.best()) else []
    elif step is not None:
        saved = [x for x in saved if step_of(x) == step]
    if not saved:
        steps = ", ".join(str(step_of(x)) for x in run.checkpoints()) or "none"
        asked = " that was evaluated" if best else "" if step is None else f" of step {step}"
        remedy = "; choose one with --step, or train with --eval_every and --save_every" if best else ""
        raise Fault(f"{path} has no checkpoint{asked}; it has: {steps}{remedy}")
    to = to or path / saved[-1].name
    if to.exists():
        raise Fault(f"{to} exists already; remove it, or choose another with --to")
    if wrong := checkpoint.damage(saved[-1]):
        raise Fault(f"{saved[-1]} is damaged ({wrong[0]}): choose another with --step")
    state = checkpoint.load_state(saved[-1])
    config = load_config(cfg.model)
    merge = cfg.lora_rank and not adapters  # such a checkpoint lacks the weights that did not change
    model = load_model(cfg.model) if merge else empty(config, torch.float32, "cpu")
    lora.add(model, cfg.lora_rank, cfg.lora_alpha)
    tensors = {"model": {k: v for k, v in model.state_dict().items() if lora.is_adapter(k) or not cfg.lora_rank}}
    checkpoint.load(tensors, saved[-1], alone=True)
    if adapters:
        lora.export(model, cfg.model, to)
    else:
        export(config, weights(model), load_tokenizer(cfg.model), to)
    P = Population(cfg.tau_s, cfg.window)
    P.load_state_dict(state["population"])
    (to / "I_star.txt").write_text(P.best().text + "\n")
    print(f"{to}: the policy after step {step_of(saved[-1])}, and I_star.txt: instruction #{P.best().id}")


if __name__ == "__main__":
    main()
