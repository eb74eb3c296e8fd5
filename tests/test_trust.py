"""A run directory from somebody else starts nothing: no command, no module, no connection."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from config import ABOUT, parse_flags
from plumbing.faults import Fault
from plumbing.trust import check_origin, is_ours, remember_run

ROOT = Path(__file__).parent.parent
# module -> its command line for a run; every program that reads a config.json to play or to train
PROGRAMS = {
    "inspo": ["--resume", "--out", "RUN"],
    "ask": ["a question?", "--run", "RUN"],
    "evaluate": ["RUN", "--n", "1"],
    "extras.table1": ["RUN", "--n", "1"],
    "extras.collect": ["RUN", "--out", "demos.jsonl"],
}
# knob -> a value that would leave a trace, in a run directory that lies in the working directory
HOSTILE = {
    "task": "helper:Task",
    "tools": "search,mcp:touch ran",
    "reward": "runs.stranger.helper:score",
    "retriever": "http://127.0.0.1:9",
}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A working directory with a module in it, and a run that was not started here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "runs/stranger"
    for folder in ("checkpoints", "trajectories", "policy"):
        (run / folder).mkdir(parents=True)
    for folder in (tmp_path, run):
        (folder / "helper.py").write_text("import pathlib; pathlib.Path('ran').touch()\n")
    (run / "I_star.txt").write_text("Answer.\n")
    (run / "policy" / "config.json").write_text("{}")
    (run / "config.json").write_text(json.dumps(asdict(parse_flags([])) | ABOUT))
    return run


def change(run, **knobs):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | knobs))


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_stranger_s_config_names_is_refused(
    stranger, tmp_path, monkeypatch, capsys, program
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    change(stranger, **HOSTILE)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(program).main(
            [flag.replace("RUN", str(stranger)) for flag in PROGRAMS[program]]
        )
    message = capsys.readouterr().err.strip() or str(end.value)
    assert end.value.code and "\n" not in message
    assert all(f"--{knob}" in message and value in message for knob, value in HOSTILE.items())
    assert not (tmp_path / "ran").exists()


def test_a_run_that_was_started_here_needs_no_flag_until_its_config_is_changed(stranger):
    change(stranger, tools="search,mcp:touch ran")
    settings = json.loads((stranger / "config.json").read_text())
    with pytest.raises(Fault):
        check_origin(stranger, settings, given=())
    remember_run(stranger)
    check_origin(stranger, settings, given=())
    change(stranger, tools="search,mcp:touch other")
    with pytest.raises(Fault):
        check_origin(stranger, json.loads((stranger / "config.json").read_text()), given=())


@pytest.mark.parametrize(
    ("knob", "value", "ours"),
    [
        ("task", "tasks.search_qa:SearchQA", True),
        ("task", "runs.stranger.helper:Task", False),
        ("task", "os:system", False),
        ("tools", "search", True),
        ("tools", "tasks:imported", False),
        ("tools", "mcp:true", False),
        ("parts", "my_fork:Margin", False),
        ("engine", "os:system", False),
        ("retriever", "http://127.0.0.1:8000", False),
    ],
)
def test_what_is_the_project_s_own(knob, value, ours):
    assert is_ours(knob, value) == ours
