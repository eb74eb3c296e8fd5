"""What a run writes and prints: columns of a step by hand, lines without and on a terminal, and what
trackers are told, also of a run that is resumed."""

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import pytest
from test_resume import Calls, play

from config import Config
from log import START, Log
from plumbing import stop
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from population import Population
from tasks import Question, Trajectory, Turn

ROOT = Path(__file__).parent.parent


def log_of(**knobs) -> Log:
    """A log whose rows are kept in `run.kept`."""
    tool = SimpleNamespace(tag="search", plural="searches")
    task = SimpleNamespace(tools=[tool], cfg=Config(), metrics=lambda tau: {"em": tau.reward})
    run = SimpleNamespace(
        kept=[],
        rows=lambda name: [],
        append=lambda name, row: run.kept.append((name, row)),
        write_trajectories=lambda name, rows: run.kept.append((name, rows)),
    )
    return Log(Config(**knobs), run, task, 0.0)


def test_the_columns_of_a_step_by_hand():
    log, P = log_of(G=2), Population(Config())
    for rewards in ([0.5], [1.0]):
        P.join("Search.", None, 0).rewards = rewards
    taus = []
    for k, (reward, source) in enumerate([(1.0, "a"), (1.0, "a"), (0.0, "b"), (1.0, "b")]):
        tau = Trajectory(k // 2, Question(f"q{k}", "?", ("x",), source), k // 2, [1] * 5, 2)
        tau.mask, tau.reward, tau.stop = [0, 0, 1, 0, 1], reward, "answer" if k else "turns"
        tau.turns = [Turn("", "search", "", [] if k else ["found"]), Turn("so")]
        taus.append(tau)
    log.metrics = ["em"]
    log.add_rollouts(1, taus)
    log.add_update({"loss": 0.25}, P)
    log.end_step(1)
    [(file, kept), (name, row)] = json.loads(json.dumps(log.run.kept))
    assert (file, name, len(kept)) == ("step-000001", "metrics", 4)
    wanted = {
        "t": 1, "reward": 0.75, "reward/a": 1.0, "reward/b": 0.5, "em": 0.75, "em/a": 1.0, "em/b": 0.5,
        "searches": 1.0, "answered": 0.75, "valid_actions": 7 / 8,
        "prompt_tokens": 2, "response_tokens": 2, "context_tokens": 5, "zero_variance_groups": 0.5,
        "n": {"0": 2, "1": 2}, "loss": 0.25, "best": 1, "w_best": 1.0, "w": {"0": 0.5, "1": 1.0},
    }  # fmt: skip
    assert wanted.items() <= row.items()
    assert set(row) - set(wanted) == {"p", "time/total"} and row["p"]["1"] > row["p"]["0"] > 0
    assert sum(row["p"].values()) == pytest.approx(1, abs=1e-4)


def test_what_stayed_empty_is_counted(tmp_path):
    log, P = log_of(N_P=4, T=7), Population(Config())
    sizes = [0, 1, 1, 3, 1, 1, 2, 1]
    rows = {
        "metrics": [{"t": t, "w": {str(j): 0.5 for j in range(n)}} for t, n in enumerate(sizes)],
        "population": [
            {"t": 3, "event": "evolve", "P": [1, 2]},
            {"t": 5, "event": "evolve", "P": [1, 2, 3]},
            {"t": 6, "event": "prune", "P": []},
        ],
        "reflections": [],
    }
    log.run.rows, log.run.write, log.run.path = rows.__getitem__, lambda *file: None, tmp_path
    log.run.config = {"commit": "abc"}
    log.held_out, log.metrics, log.questions = {START: {"em": 0.5, "searches": 1.0}}, ["em"], 1
    summary = log.finish(P, P.join("Search.", None, 0))
    assert summary["empty_places"] == 2 + 1
    assert summary["steps_of_one"] == 4  # not step 7: no evolution follows


@pytest.mark.parametrize("seconds, told", [(4.0, False), (200.0, True)])
def test_a_step_that_will_take_long_is_announced_with_what_would_be_faster(capsys, seconds, told):
    """By the seconds of two rollouts, of which a step has ten, and its update."""
    log = log_of(batch=5, G=2, T=30)
    log.write_start([Trajectory(0, Question("q", "?", ("x",)), 0, [1], 1)] * 2, seconds)
    out = capsys.readouterr().out
    assert ("33 minutes, all 30 16.7 hours" in out and "--batch" in out) is told


def test_after_a_minute_without_a_line_there_is_one(capsys, monkeypatch):
    log, now = log_of(), time.perf_counter()
    for seconds, lines in ((50, 0), (70, 1), (120, 0), (140, 1)):
        monkeypatch.setattr("log.perf_counter", lambda s=seconds: now + s)
        log.show_progress("rollout", seconds, 150)
        assert capsys.readouterr().out == f"rollout {seconds}/150\n" * lines


def test_without_a_terminal_lines_are_plain(capsys):
    log = log_of()
    log.metrics = ["em"]
    log.print("a note\x1b[2J")
    for t in (1, 2):
        log.show_progress("verify 0", 7, 9)
        log.row = {"reward": 0.25, "searches": 1.5, "kl": 0.01, "entropy": float("nan"), "n": {}}
        log.row["skipped_updates"] = t - 1
        log.end_step(t)
    note, *steps = capsys.readouterr().out.splitlines()
    assert note == "a note\\x1b[2J" and len(steps) == 2
    for t, line in enumerate(steps, 1):
        assert line.startswith(f"step {t:3d}  ")
        assert "reward 0.25  kl 0.01  searches 1.5" in line and "entropy" not in line
        assert ("skipped_updates 1" in line) == ("skipped" in line) == (t == 2)


def test_on_a_terminal_a_bar_is_drawn_below_the_lines_and_left_standing(monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        log = log_of(T=3)
        log.metrics = ["em"]
        log.print("Name [bold]one[/bold] entity.\x1b[2J")
        for t in (1, 2, 3):
            log.show_progress("verify 0", 7, 9)
            log.row = {"reward": 0.5}
            log.end_step(t)
        log.bar.close()
        out = os.read(ours, 65536).decode()
    os.close(ours)
    assert "Name [bold]one[/bold] entity.\\x1b[2J" in out and "step   3  reward 0.5" in out
    assert "3/3" in out.splitlines()[-1]


# ---- trackers


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch):
    """A tracker's name and a module in its place, which notes its calls."""
    api = Mock(spec=["init", "log"])
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
    which = {"wandb": {"id": id, "dir": out}, "trackio": {}}[name]
    began = call(project="inspo", name=f"r-{id}", resume="allow", config=ANY, **which)
    assert api.init.call_args_list == [began] * 3
    rows = [(logged.kwargs["step"], logged.args[0]) for logged in api.log.call_args_list]
    numbers = {t: row for t, row in rows if "loss" in row}
    for row in read_jsonl(out / "metrics.jsonl")[1:]:
        mine = {k: v for k, v in row.items() if type(v) in (int, float)}
        assert numbers[row["t"]] == mine | {f"w/{j}": w for j, w in row["w"].items()}
    texts = {t: row["instructions"] for t, row in rows if "instructions" in row}
    for event in read_jsonl(out / "population.jsonl"):
        if event["event"] == "evolve":  # the last of a step
            assert all(I["text"] in texts[event["t"]] for I in event["P"])
    last = {k: v for _, row in rows for k, v in row.items() if k == "I_star" or "final/" in k}
    summary = json.loads((out / "summary.json").read_text())
    wanted = {f"final/{k}": v for k, v in summary["end"].items()}
    assert last == wanted | {"I_star": summary["I_star"]}


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
