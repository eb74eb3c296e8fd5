"""Trackers: what wandb and tensorboard are told, and that a resumed run goes on where it was."""

import json
import sys

import pytest
from test_resume import Calls, no_page, play

from plumbing import stop
from plumbing.faults import Fault
from plumbing.files import read_jsonl

assert no_page  # a fixture
WANDB = """
import json, pathlib
LOG = pathlib.Path(__file__).with_name("log.jsonl")
def note(**row):
    with LOG.open("a") as f: f.write(json.dumps(row) + "\\n")
def init(**kw): note(init={k: str(v) for k, v in kw.items()})
def log(row, step): note(step=step, row={k: v.rows if isinstance(v, Table) else v for k, v in row.items()})
class Table:
    def __init__(self, columns, data): self.rows = [dict(zip(columns, x)) for x in data]
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Returns a function to what a module with wandb's interface was called with."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "fake" / "log.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def test_wandb_has_every_number_and_instruction_under_one_id_however_often_a_run_is_resumed(wandb, tmp_path):
    out = tmp_path / "r"
    for n in (16, 17):
        with pytest.raises(Fault, match="--resume"):
            play(out, Calls(n, stop.Stopped("stopped")), tracker="wandb")
    play(out, Calls(), tracker="wandb")
    told = wandb()
    inits = [row["init"] for row in told if "init" in row]
    id = json.loads((out / "config.json").read_text())["id"]
    assert [(x["id"], x["resume"], x["name"]) for x in inits] == [(id, "allow", "r")] * 3
    numbers = {row["step"]: row["row"] for row in told if "loss" in row.get("row", {})}
    for row in read_jsonl(out / "metrics.jsonl")[1:]:
        mine = {k: v for k, v in row.items() if type(v) in (int, float) and k != "t"}
        assert numbers[row["t"]] == mine | {f"w/{j}": w for j, w in row["w"].items()}
    texts = {row["step"]: row["row"]["instructions"][0] for row in told if "instructions" in row.get("row", {})}
    events = [e for e in read_jsonl(out / "population.jsonl") if e["event"] != "prune"]
    assert set(texts) == {e["t"] for e in events}
    for event in events:
        assert texts[event["t"]]["step"] == event["t"]
        assert all(I["text"] in texts[event["t"]]["text"] for I in event["P"])
    [[best]] = [row["row"]["I_star"] for row in told if "I_star" in row.get("row", {})]
    assert best["text"] == (out / "I_star.txt").read_text().strip()
    final = {k: v for row in told for k, v in row.get("row", {}).items() if k.startswith("final/")}
    held_out = json.loads((out / "summary.json").read_text())["held_out"]
    assert final == {f"final/{name}/{k}": v for name, row in held_out.items() for k, v in row.items()}


def test_tensorboard_has_numbers_and_instructions(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "r"
    play(out, Calls(), tracker="tensorboard", T=3)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    losses = [(x.step, pytest.approx(x.value)) for x in events.Scalars("loss")]
    assert losses == [(row["t"], row["loss"]) for row in read_jsonl(out / "metrics.jsonl")[1:]]
    assert any(tag.startswith("instructions") for tag in events.Tags()["tensors"])
