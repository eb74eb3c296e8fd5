"""The model card of an exported policy, as the Hugging Face hub shows it: what was trained, under
which instruction, with what result."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from config import ABOUT, PRESETS, Config, preset_of
from journal.summary import final_table
from plumbing.files import Row, read_jsonl
from plumbing.hub import out_of_reach
from plumbing.outside import without_secrets
from run import Run
from tasks.sampling import space_evenly

POINTS = 12  # of the curve, at most


def make_card(run: Run, cfg: Config, step: int, instruction: str, library: str) -> str:
    """Returns the README.md of the policy after a step, with the base model's license."""
    from huggingface_hub import ModelCardData  # here: few runs are exported

    file = run.path / "summary.json"
    summary: Row = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    base = cfg.model if not Path(cfg.model).exists() else None
    about = ModelCardData(
        base_model=base,
        library_name=library,
        **license_of(cfg.model),
        model_name=run.path.name,
        pipeline_tag="text-generation",
        tags=["inspo", "grpo", "reinforcement-learning"],
    )
    table = final_table(summary) if summary else ["the run has not ended"]
    return f"""---
{about.to_yaml()}
---

# {run.path.name}

{base or Path(cfg.model).name} after step {step} of {cfg.T} of INSPO ([arXiv 2512.01945](https://arxiv.org/abs/2512.01945)):
reinforcement learning of an agent whose instruction evolves with its policy.

## Instruction

It was trained to act under this one, `I_star.txt`:

```text
{instruction}
```

## Held-out questions at the end of the run, greedy

```text
{chr(10).join(table)}
```

## Curve

{chr(10).join(tabulate_curve(read_jsonl(run.path / "metrics.jsonl")))}

## Command

```sh
{write_command(run.config)}
```

Commit {run.config["commit"]}.
"""


def license_of(model: str) -> Row:
    """Returns what the card of a model, in its folder or on the hub, says of its license; nothing
    where it cannot be read."""
    from huggingface_hub import ModelCard

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


def tabulate_curve(rows: list[Row]) -> Iterator[str]:
    """Yields a table of the reward and the first metric on held-out questions, by step."""
    first = next((row["metrics"][0] for row in rows if "metrics" in row), "score")
    names = ("t", "reward", f"test/{first}", f"valid/{first}")
    yield f"| step | reward | {first}, test | {first}, validation |"
    yield "|---" * len(names) + "|"
    measured = {k for k, row in enumerate(rows) if names[2] in row or names[3] in row}
    for k in sorted(measured | set(space_evenly(len(rows), POINTS))):
        cells = [f"{rows[k][name]:.4g}" if name in rows[k] else "" for name in names]
        yield f"| {' | '.join(cells)} |"


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
