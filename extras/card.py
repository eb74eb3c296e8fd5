"""The model card of an exported policy, as the Hugging Face hub shows it: the instruction that it
was trained under, the result, the command.

    python export.py runs/NAME --out policy
    python -m extras.card runs/NAME policy      # writes policy/README.md
"""

import argparse
import contextlib
import json
import shlex
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from config import ABOUT, PRESETS, Config, preset_of, read_config
from log import tabulate
from plumbing.faults import one_line
from plumbing.files import Row, write_file
from plumbing.hub import out_of_reach
from plumbing.outside import without_secrets


def make_card(run: Path, policy: Path) -> str:
    """Returns the README.md of a run's policy, with the base model's license."""
    cfg: Config = read_config(run)
    record = json.loads((run / "config.json").read_text("utf-8"))
    file = run / "summary.json"
    table = ["the run has not ended"]
    if file.is_file():
        table = tabulate(json.loads(file.read_text("utf-8")))
    about = ModelCardData(
        base_model=None if Path(cfg.model).exists() else cfg.model,
        library_name="transformers",
        **find_license(cfg.model),
        model_name=run.name,
        pipeline_tag="text-generation",
        tags=["inspo", "grpo", "reinforcement-learning"],
    )
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {run.name}",
        "Trained by INSPO ([arXiv 2512.01945](https://arxiv.org/abs/2512.01945)), under this instruction:",
        f"```text\n{(policy / 'I_star.txt').read_text('utf-8')}```",
        "```text\n" + "\n".join(table) + "\n```",
        f"```sh\n{write_command(record)}\n```",
        f"Commit {record['commit']}.\n",
    ]
    return "\n\n".join(parts)


def find_license(model: str) -> Row:
    """Returns what the card of a model, in its folder or on the hub, says of its license; nothing
    where it cannot be read."""
    file = Path(model, "README.md")
    if not file.exists() and (Path(model).exists() or out_of_reach()):
        return {}
    with contextlib.suppress(Exception):  # no card, or no metadata in it
        said = ModelCard.load(file if file.exists() else model).data.to_dict()
        fields = {name: said[name] for name in said if name.startswith("license")}
        if "://" not in fields.get("license_link", "://"):  # a file beside that card
            del fields["license_link"]
        return fields
    return {}


def write_command(record: Row) -> str:
    """Returns the command of a run by its config.json: what its preset does not say, of files
    their names."""
    name = preset_of(record["model"])
    preset = Config(**PRESETS.get(name, {}) | {"model": record["model"]})
    words = ["python", record["program"], "--model", name if name in PRESETS else record["model"]]
    for knob, value in record.items():
        known = value == getattr(preset, knob, None) or knob in ("out", "resume", "model", *ABOUT)
        if not known:
            text = without_secrets(str(value))
            words += [f"--{knob}", Path(text).name if text.startswith("/") else text]
    return shlex.join(words)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m extras.card", description="Writes a model card.")
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("policy", type=Path, help="what export.py has written of it")
    args = parser.parse_args(argv)
    with one_line("card"):
        write_file(args.policy / "README.md", make_card(args.run, args.policy))


if __name__ == "__main__":
    main()
