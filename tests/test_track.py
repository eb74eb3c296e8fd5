"""Trackers: what wandb, trackio and tensorboard are told, and that a resumed run goes on where it was."""

import json
import sys

import pytest
from test_resume import Calls, no_page, play

from journal.track import Tracker
from plumbing import stop
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from tasks import Question, Trajectory

assert no_page  # a fixture
MODULE = """
import json, pathlib
LOG = pathlib.Path(__file__).with_name("log.jsonl")
def note(**row):
    with LOG.open("a") as f: f.write(json.dumps(row) + "\\n")
def init(INIT): note(init={k: str(v) for k, v in locals().items()})
def log(row, step): note(step=step, row={k: v.rows if isinstance(v, Table) else v for k, v in row.items()})
class Table:
    def __init__(self, columns, data): self.rows = [dict(zip(columns, x)) for x in data]
"""
TRACE = "class Trace(dict):\n    def __init__(self, messages, metadata): super().__init__(m=messages, about=metadata)\n"
INIT = {"wandb": "project, name, id, dir, config, resume", "trackio": "project, name, config, resume"}


@pytest.fixture(params=INIT)
def tracker(request, tmp_path, monkeypatch):
    """Returns the name of a module with a tracker's interface, and a function to what it was called with."""
    (tmp_path / "fake").mkdir()
    text = MODULE.replace("INIT", INIT[request.param]) + TRACE * (request.param == "trackio")
    (tmp_path / "fake" / f"{request.param}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield request.param, lambda: read_jsonl(tmp_path / "fake" / "log.jsonl")
    sys.modules.pop(request.param, None)


def test_a_tracker_has_every_number_and_instruction_in_one_run_however_often_it_is_resumed(tracker, tmp_path):
    name, calls = tracker
    out = tmp_path / "r"
    for n in (16, 17):
        with pytest.raises(Fault, match="--resume"):
            play(out, Calls(n, stop.Stopped("stopped")), tracker=name)
    play(out, Calls(), tracker=name)
    told = calls()
    inits = [row["init"] for row in told if "init" in row]
    id = json.loads((out / "config.json").read_text())["id"]
    which = {"wandb": {"id": id, "name": "r", "dir": str(out)}, "trackio": {"name": f"r-{id}"}}[name]
    expected = which | {"project": "inspo", "resume": "allow"}
    assert [{k: v for k, v in init.items() if k != "config"} for init in inits] == [expected] * 3
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


def test_trackio_has_the_watched_trajectories_as_traces(tracker, tmp_path):
    name, calls = tracker
    taus = [Trajectory(3, Question("q1", "Who?", ("y",)), 5, [], 0, response=f"{k} y", prediction="y") for k in (0, 1)]
    taus[1].tokens = {"logp": [-0.5]}
    Tracker(name, tmp_path, "id", {}).trajectories(taus, 7)
    logged = [row for row in calls() if "row" in row]
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "1 y"}]
    about = json.loads(json.dumps(taus[1].record()))
    assert logged == [{"step": 7, "row": {"trajectory": {"m": chat, "about": about}}}] * (name == "trackio")


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
