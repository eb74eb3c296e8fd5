"""Trackers: what wandb, trackio and tensorboard are told, and that a resumed run goes on where it
was."""

import json
import sys
from unittest.mock import ANY, Mock, call

import pytest
from test_resume import Calls, no_page, play

from journal.track import Tracker
from plumbing import stop
from plumbing.faults import Fault
from plumbing.files import read_jsonl

assert no_page  # a fixture


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch):
    """A tracker's name and a module in its place, which notes its calls."""
    api = Mock(spec=["init", "log"])
    monkeypatch.setitem(sys.modules, request.param, api)
    return request.param, api


def test_a_tracker_has_every_number_in_one_run_however_often_it_is_resumed(tracker, tmp_path):
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
    final = {k: v for _, row in rows for k, v in row.items() if k.startswith("final/")}
    held_out = json.loads((out / "summary.json").read_text())["held_out"]
    assert final == {
        f"final/{name}/{k}": v for name, row in held_out.items() for k, v in row.items()
    }


def test_tensorboard_has_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module := Mock())
    Tracker("tensorboard", tmp_path, "id", {}, print).log({"loss": 0.5}, 3)
    module.SummaryWriter.assert_called_once_with(tmp_path / "tensorboard")
    module.SummaryWriter.return_value.add_scalar.assert_called_once_with("loss", 0.5, 3)


def test_a_tracker_that_fails_ends_no_run(tracker, tmp_path, capsys):
    name, api = tracker
    api.log.side_effect = [None, None, BrokenPipeError("its service has died")]
    play(tmp_path / "r", Calls(), tracker=name)
    assert api.log.call_count == 3 and (tmp_path / "r" / "summary.json").is_file()
    assert capsys.readouterr().out.count("its service has died") == 1
