"""Trackers: what wandb, trackio and tensorboard are told, and that a resumed run goes on where it
was."""

import json
import sys
from unittest.mock import ANY, Mock, call

import pytest
from journal.track import Tracker
from test_resume import Calls, no_page, play

from plumbing import stop
from plumbing.faults import Fault
from plumbing.files import read_jsonl

assert no_page  # a fixture


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch):
    """A tracker's name and a module in its place, which notes its calls."""
    api = Mock(spec=["init", "log", "Table"])
    api.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, request.param, api)
    return request.param, api


def test_a_tracker_has_every_number_and_instruction_in_one_run_however_often_it_is_resumed(
    tracker, tmp_path
):
    name, api = tracker
    out = tmp_path / "r"
    for n in (16, 17):
        with pytest.raises(Fault, match="--resume"):
            play(out, Calls(n, stop.Stopped("stopped")), tracker=name)
    play(out, Calls(), tracker=name)
    id = json.loads((out / "config.json").read_text())["id"]
    which = {"wandb": {"id": id, "name": "r", "dir": out}, "trackio": {"name": f"r-{id}"}}[name]
    assert (
        api.init.call_args_list == [call(project="inspo", resume="allow", config=ANY, **which)] * 3
    )
    rows = [(logged.kwargs["step"], logged.args[0]) for logged in api.log.call_args_list]
    numbers = {t: row for t, row in rows if "loss" in row}
    for row in read_jsonl(out / "metrics.jsonl")[1:]:
        mine = {k: v for k, v in row.items() if type(v) in (int, float) and k != "t"}
        assert numbers[row["t"]] == mine | {f"w/{j}": w for j, w in row["w"].items()}
    texts = {t: row["instructions"] for t, row in rows if "instructions" in row}
    events = [e for e in read_jsonl(out / "population.jsonl") if e["event"] != "prune"]
    assert set(texts) == {e["t"] for e in events}
    for event in events:
        [text] = texts[event["t"]]
        assert text["step"] == event["t"] and all(I["text"] in text["text"] for I in event["P"])
    [[best]] = [row["I_star"] for _, row in rows if "I_star" in row]
    assert best["text"] == (out / "I_star.txt").read_text().strip()
    final = {k: v for _, row in rows for k, v in row.items() if k.startswith("final/")}
    held_out = json.loads((out / "summary.json").read_text())["held_out"]
    assert final == {
        f"final/{name}/{k}": v for name, row in held_out.items() for k, v in row.items()
    }


def test_tensorboard_has_numbers_and_texts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module := Mock())
    Tracker("tensorboard", tmp_path, "id", {}).log({"loss": 0.5, "instructions": "Think."}, 3)
    module.SummaryWriter.assert_called_once_with(tmp_path / "tensorboard", purge_step=3)
    writer = module.SummaryWriter.return_value
    assert writer.mock_calls == [
        call.add_scalar("loss", 0.5, 3),
        call.add_text("instructions", "Think.", 3),
    ]


def test_a_tracker_that_fails_ends_no_run(tracker, tmp_path, capsys):
    name, api = tracker
    api.init.side_effect = RuntimeError("api_key not configured\nwandb login")
    with pytest.raises(
        Fault, match=rf"^--tracker {name} does not start \(api_key not configured\)"
    ):
        play(tmp_path / "r", Calls(), tracker=name)
    assert not (tmp_path / "r").exists()
    api.init.side_effect = None
    api.log.side_effect = [None, None, BrokenPipeError("its service has died")]
    play(tmp_path / "r", Calls(), tracker=name)
    assert api.log.call_count == 3 and (tmp_path / "r" / "summary.json").is_file()
    assert capsys.readouterr().out.count("its service has died") == 1
