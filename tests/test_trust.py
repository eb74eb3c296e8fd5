"""A run directory from somebody else starts nothing: no command, no module, no connection."""

import importlib
import json
import subprocess
import sys
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


def test_a_flag_that_is_given_again_is_followed(stranger, tmp_path):
    change(stranger, task="helper:Task", retriever="http://127.0.0.1:9")
    flags = [
        "inspo.py",
        "--resume",
        "--out",
        stranger,
        "--task",
        "helper:Task",
        "--retriever",
        "http://127.0.0.1:9",
    ]
    script, *flags = map(str, flags)
    done = subprocess.run(
        [sys.executable, ROOT / script, *flags], cwd=tmp_path, capture_output=True, text=True
    )
    assert (tmp_path / "ran").exists()  # and then the module turns out to hold no task
    assert "not started by you" not in done.stderr


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


def not_writable(monkeypatch, folder):
    (folder / "state").write_text("a file, where a folder is needed")


def nowhere(monkeypatch, folder):
    """As in a container whose user has no entry in /etc/passwd."""

    def no_entry(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.raises(RuntimeError):
        Path.home()


@pytest.mark.parametrize("home", [not_writable, nowhere])
def test_without_a_home_a_run_can_be_started_and_is_not_remembered(
    stranger, tmp_path, monkeypatch, home
):
    change(stranger, task="helper:Task")
    home(monkeypatch, tmp_path)
    remember_run(stranger)
    with pytest.raises(Fault):
        check_origin(stranger, json.loads((stranger / "config.json").read_text()), given=())


@pytest.mark.parametrize(
    ("knob", "value", "ours"),
    [
        ("task", "tasks.search_qa:SearchQA", True),
        ("task", "extras.tasks.judged:Judged", False),
        ("task", "runs.stranger.helper:Task", False),
        ("task", "os:system", False),
        ("tools", "search", True),
        ("tools", "os:system", False),
        ("tools", "tasks:imported", False),
        ("tools", "mcp:true", False),
        ("parts", "my_fork:Margin", False),
        ("engine", "vllm", True),
        ("engine", "os:system", False),
        ("retriever", "http://127.0.0.1:8000", False),
    ],
)
def test_what_is_the_project_s_own(knob, value, ours):
    assert is_ours(knob, value) == ours
