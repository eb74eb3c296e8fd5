"""The adapters of a run with --lora_rank alone, as peft and vLLM load them on top of its model.

    python -m extras.adapters runs/NAME OUT      # those of the newest checkpoint

The README that it writes says what is lost that way.
"""

import argparse
import json
from pathlib import Path

from safetensors.torch import save_file

from config import Config, read_config
from export import choose_checkpoint
from models import lora, model
from models.model import is_adapter
from plumbing.faults import Fault, one_line
from plumbing.files import new_directory, write_file
from run import Run
from training.policy import load_tensors

NOTE = """\
peft and vLLM add the adapters' product to a layer's result in bfloat16, which loses most of a small update. Inspo's
export.py writes the merged weights, with which the policy computed.
"""


def write_adapters(run: Path, out: Path) -> None:
    """Writes the newest adapters of a run to the directory `out`. Raises Fault if it has none."""
    cfg: Config = read_config(run)
    if not cfg.lora_rank:
        raise Fault(f"{run} has no adapters: it trained all weights (--lora_rank 0)")
    policy = lora.add(model.load_model(cfg.model, cfg.longest), cfg.lora_rank, cfg.lora_alpha)
    named = dict(policy.named_parameters())
    adapters = {name: p.detach() for name, p in named.items() if is_adapter(name)}
    stored = {f"model.{name}": p for name, p in adapters.items()}
    load_tensors(stored, choose_checkpoint(Run(run), None, False), alone=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": cfg.lora_rank,
        "lora_alpha": cfg.lora_alpha,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "base_model_name_or_path": cfg.model,
    }
    with new_directory(out) as new:
        (new / "adapter_config.json").write_text(json.dumps(config, indent=1), "utf-8")
        tensors = {f"base_model.model.{name}.weight": p for name, p in adapters.items()}
        save_file(tensors, new / "adapter_model.safetensors")
        write_file(new / "README.md", NOTE)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="a new directory")
    args = parser.parse_args(argv)
    with one_line():
        write_adapters(args.run, args.out)


if __name__ == "__main__":
    main()
