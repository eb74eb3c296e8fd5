"""Turn a checkpoint of a run into a plain Hugging Face directory, with its best instruction beside the weights.

    python export.py runs/NAME                  # the newest checkpoint
    python export.py runs/NAME --step 100       # or --best: the best on the held-out questions
    vllm serve runs/NAME/step-000100            # what it writes loads in vLLM and in transformers
"""

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from config import Config
from harness.directory import Run
from population import Population
from training.model import empty, export, load_config, load_tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, help="which checkpoint; the newest without it")
    parser.add_argument("--best", action="store_true", help="the one with the best score on the held-out questions")
    parser.add_argument("--to", type=Path, help="directory to write; runs/NAME/step-N without it")
    args = parser.parse_args(argv)
    if not (args.run / "config.json").is_file():
        sys.exit(f"export.py: {args.run} holds no run (no config.json)")
    cfg = Config(**json.loads((args.run / "config.json").read_text()))
    run = Run(dataclasses.replace(cfg, out=str(args.run), resume=True), "")
    saved = run.checkpoints()
    if args.best:
        saved = [run.best()] if run.best() else []
    elif args.step is not None:
        saved = [path for path in saved if int(path.name[5:]) == args.step]
    if not saved:
        there = ", ".join(str(int(path.name[5:])) for path in run.checkpoints()) or "none"
        asked = "that was evaluated" if args.best else "" if args.step is None else f"of step {args.step}"
        sys.exit(f"export.py: {args.run} has no checkpoint {asked}; there are: {there}".replace("  ", " "))
    to = args.to or args.run / saved[-1].name
    if to.exists():
        sys.exit(f"export.py: {to} is there already; remove it, or choose another with --to")
    config = load_config(cfg.model)
    state = {"model": empty(config, torch.float32, "cpu").state_dict()}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.load(state, checkpoint_id=saved[-1], no_dist=True)
    export(config, state["model"].items(), load_tokenizer(cfg.model), to)
    P = Population(cfg.tau_s, cfg.window)
    P.load_state_dict(torch.load(saved[-1] / "state.pt", weights_only=True)["population"])
    (to / "I_star.txt").write_text(P.best().text + "\n")
    print(f"{to}: the policy after step {int(saved[-1].name[5:])}, and I_star.txt: instruction #{P.best().id}")


if __name__ == "__main__":
    main()
