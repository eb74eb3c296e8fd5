"""A run's directory: what is written is whole or not there; what was damaged is noticed; one
process writes."""

import contextlib
import dataclasses
import errno
import gzip
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from config import Config, knob, parse_flags, read_config
from evaluation.checkpoints import export_checkpoint
from journal.checkpoints import Checkpoints
from journal.directory import LOGS, RunDirectory, step_of, with_absolute_paths
from plumbing import checkpoint
from plumbing.faults import CheckpointFault, DiskFault, Fault, Outage
from plumbing.files import new_directory, read_jsonl
from population import Population, ReplayBuffer
from training.policy import Policy
from training.ranks import Ranks

STATE = {"population": {}, "ended": True}


def tensors(value: float) -> dict:
    """Two tensors and, as an optimizer has, something that is no tensor."""
    optimizer = {"m": torch.full((64, 64), value), "lr": value, "betas": (0.9, 0.999)}
    return {
        "model": {"w": torch.full((64, 64), value), "b": torch.zeros(3)},
        "optimizer": optimizer,
    }


class Fixed:
    """A policy of two tensors: what `save` writes is t, once `wait` has returned."""

    in_step, synced = True, False
    sleep, save = Policy.sleep, Policy.save

    def __init__(self):
        self.t, self.wait, self.seconds, self.writer = 0, lambda: None, {}, ThreadPoolExecutor(1)
        self.ranks = Ranks("cpu", 1)
        state = lambda: tensors(float(self.t))  # noqa: E731
        self.learner = SimpleNamespace(remembered={}, model=torch.nn.Linear(1, 1), state_dict=state)

    def write_share(self, state, path):
        self.wait()
        return Policy.write_share(self, state, path)


def checkpoints_of(run: RunDirectory) -> Checkpoints:
    log = SimpleNamespace(row={}, cfg=Config(keep=3), print=print)
    return Checkpoints(run, Fixed(), Population(Config()), ReplayBuffer(9), log)


def begin(
    run: RunDirectory, t: int, wait=lambda: None, ended=True, before: Checkpoints | None = None
) -> Checkpoints:
    """Begins to save step t; `before`: with the checkpoints of the steps before."""
    checkpoints = before or checkpoints_of(run)
    checkpoints.policy.t, checkpoints.policy.wait = t, wait
    checkpoints.mark(t, ended)
    checkpoints.save()
    return checkpoints


def save(run: RunDirectory, t: int, ended=True) -> Path:
    begin(run, t, ended=ended).wait()
    return run.checkpoints()[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a run with checkpoints of the steps 3, 6 and 9."""
    run = RunDirectory.open(Config(out=str(tmp_path_factory.mktemp("made") / "r"), keep=3))
    for t in range(10):
        run.append("metrics", {"t": t})
        if t in (3, 6, 9):
            save(run, t)
    run.close()
    return run.path


def reopen(path: Path) -> RunDirectory:
    return RunDirectory.open(dataclasses.replace(read_config(path), out=str(path), resume=True))


@pytest.fixture
def run(made, tmp_path):
    run = reopen(shutil.copytree(made, tmp_path / "r"))
    yield run
    run.close()


def rewind(run: RunDirectory) -> tuple[int, list[str]]:
    """Returns the step from which the run would resume, and what it said."""
    notes: list[str] = []
    _, state = run.rewind(notes.append)
    return state["t"], notes


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_over(run):
    shutil.rmtree(run.path / "checkpoints")
    notes = list[str]()
    assert run.rewind(notes.append) is None and not run.rows("metrics")
    assert len(notes) == 1 and "starts over" in notes[0]
    assert run.rewind(notes.append) is None and len(notes) == 1  # a new one has nothing to lose


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def empty_directory(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


def leave_out(path: Path) -> None:
    digests = json.loads(path.read_text(encoding="utf-8"))
    del digests["state.pt"]
    path.write_text(json.dumps(digests), encoding="utf-8")


def name_a_file_elsewhere(path: Path) -> None:
    file = "../step-000006/state.pt"
    more = {file: checkpoint.digest(path.parent / file)}
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | more), encoding="utf-8"
    )


NAMES, HARMS = ("state.pt", "__0_0.distcp", ".metadata", "digests.json"), (cut, flip, Path.unlink)
LISTS = (empty_directory, leave_out, name_a_file_elsewhere)


@pytest.mark.parametrize(
    "name, harm", [*itertools.product(NAMES, HARMS), *itertools.product(["digests.json"], LISTS)]
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(run, name, harm):
    harm(run.checkpoints()[-1] / name)
    t, notes = rewind(run)
    assert (
        t == 6
        and len(notes) == 1
        and notes[0].startswith("note: checkpoint step-000009 is damaged (")
    )
    assert name in notes[0] or name == "digests.json"  # a digest that was flipped accuses its file
    assert (
        "digests.json is missing" in notes[0]
        or harm not in (Path.unlink, empty_directory)
        or name != "digests.json"
    )
    assert [row["t"] for row in run.rows("metrics")] == list(range(7))
    # 9 can be written again
    assert [path.name for path in run.checkpoints()] == ["step-000003", "step-000006"]
    save(run, 9)
    assert rewind(run)[0] == 9


def test_of_several_ranks_each_finds_the_damage_of_its_share(run):
    newest = run.checkpoints()[-1]
    for name in ("state.pt", ".metadata", "__0_0.distcp"):
        flip(newest / name)
    found = [checkpoint.damage(newest, rank, 2) for rank in range(2)]
    assert all(found) and sorted(sum(found, [])) == checkpoint.damage(newest)


def test_if_all_checkpoints_are_damaged_nothing_is_touched(run):
    before = (run.path / "metrics.jsonl").read_bytes()
    for path in run.checkpoints():
        flip(path / "state.pt")
    with pytest.raises(
        Fault, match=r"no checkpoint of .* is whole \(step-000009: state.pt is damaged; .*remove"
    ):
        rewind(run)
    assert len(run.checkpoints()) == 3 and (run.path / "metrics.jsonl").read_bytes() == before


def test_a_foreign_directory_is_no_checkpoint_and_pushes_none_out(run):
    foreign = ["step-000006-backup", "step-000099.old", "step-x", "damaged-step-000011", "step-12"]
    for name in foreign:
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / "step-000100").write_text("a file")
    save(run, 10)
    assert [path.name for path in run.checkpoints()] == [f"step-{t:06d}" for t in (6, 9, 10)]
    assert rewind(run)[0] == 10 and all(
        (run.path / "checkpoints" / name).is_dir() for name in foreign
    )


def test_a_step_that_has_not_ended_is_replaced_by_the_one_that_has_and_its_rows_are_written_again(
    run,
):
    rewind(run)
    run.append("population", {"t": 10, "event": "prune"})
    assert save(run, 10, ended=False).name == "step-000010"
    for name in ("metrics", "population", "reflections"):
        run.append(name, {"t": 10})
    run.append("reflections", {"t": 10, "call": {}})
    rewind(run)
    last = {name: run.rows(name)[-1] for name in ("metrics", "population", "reflections")}
    assert last == {
        "metrics": {"t": 9},
        "population": {"t": 10, "event": "prune"},
        "reflections": {"t": 10, "call": {}},
    }
    run.append("metrics", {"t": 10})
    save(run, 10)
    # none is pushed out
    assert [path.name for path in run.checkpoints()] == [f"step-{t:06d}" for t in (6, 9, 10)]
    assert run.load_mark(run.checkpoints()[-1])["ended"] and not list(run.path.rglob("*.tmp"))
    rewind(run)
    assert run.rows("metrics")[-1] == {"t": 10} and run.rows("reflections") == [
        {"t": 10, "call": {}}
    ]


@pytest.mark.parametrize("harm", ["{", "", "{}\n{}\n[]"], ids=repr)
def test_no_row_of_a_step_is_there_twice_though_lines_before_it_were_damaged(run, harm):
    """The step died after its mark, and dies again before another one: its evolution is played a
    third time."""
    rewind(run)
    run.append("population", {"t": 9, "event": "evolve"})
    run.append("population", {"t": 10, "event": "prune"})
    save(run, 10, ended=False)
    for _ in range(2):
        run.append("population", {"t": 10, "event": "evolve"})
        run.append("metrics", {"t": 10})
        for name in ("population", "metrics"):
            path = run.path / f"{name}.jsonl"
            path.write_text(path.read_text().replace('{"t": 9', harm + '{"t": "9"', 1))
        rewind(run)
        assert run.rows("population") == [{"t": 10, "event": "prune"}]
        assert [row["t"] for row in run.rows("metrics")] == list(range(9))


@pytest.mark.parametrize("harm", ["{", "\x00" * 8, "", '{"t": "4"}', "[4]"])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_row_that_was_lost_is_counted(run, harm, place):
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    lines[place] = harm
    # of a step after it
    (run.path / "metrics.jsonl").write_text("\n".join([*lines, '{"t": 10}', ""]))
    t, notes = rewind(run)
    assert t == 9 and len(notes) == 1 and f"1 lines of {run.path}/metrics.jsonl" in notes[0]
    assert [row["t"] for row in run.rows("metrics")] == [t for t in range(10) if t != place]


@pytest.mark.parametrize("text, lost", [("{\n" * 3, 10), ('{"t": 0}\n{"t', 9), (None, 10)])
def test_a_log_of_which_little_or_nothing_is_left_is_told(run, text, lost):
    metrics, population = (run.path / f"{name}.jsonl" for name in ("metrics", "population"))
    metrics.write_text(text) if text else metrics.unlink()
    population.write_text("{\n" * 3)
    t, notes = rewind(run)
    assert t == 9 and len(notes) == 2
    assert f"{lost} lines of {metrics}" in notes[0] and f"3 lines of {population}" in notes[1]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_whose_end_is_cut_is_told(run, name):
    rewind(run)
    run.append(name, {"t": 10, "event": "evolve"})
    save(run, 10)
    cut(path := run.path / f"{name}.jsonl")
    t, notes = rewind(run)
    assert t == 10 and len(notes) == 1 and f"1 lines of {path}" in notes[0]


def test_a_log_that_cannot_be_read_is_named(run):
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").mkdir()
    with pytest.raises(Fault, match="cannot read .*metrics.jsonl .*: move it away"):
        rewind(run)


@pytest.mark.parametrize(
    "line",
    [
        '{"t": 5, "rew',
        "[1, 2]",
        '"x"',
        "7",
        '{"u": 1}',
        '{"t": "5"}',
        '{"t": true}',
        "\x00\xff",
        "[" * 100_000,
    ],
)
def test_a_foreign_line_in_a_log_is_left_out(run, line):
    path = run.path / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_bytes("\n".join([*rows[:4], line, *rows[4:]]).encode("latin1") + b"\n")
    t, notes = rewind(run)
    assert t == 9 and len(notes) == 1
    assert [row["t"] for row in read_jsonl(path)] == list(range(10))
    with open(path, "a", encoding="utf-8") as f:
        f.write(line[: len(line) // 2])  # a kill has cut the last one
    assert rewind(run) == (9, [])


@pytest.mark.parametrize(
    "content", ["", '{"T": 3', "[]", "7", {"T": "3"}, {"T": True}, "\xff", {"lr": None}], ids=str
)
def test_a_damaged_config_is_one_line(run, content):
    path = run.path / "config.json"
    content = (
        content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content)
    )
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(Fault, match=r"config.json is damaged \(.*: restore it") as e:
        read_config(run.path)
    assert "\n" not in str(e.value)


@dataclasses.dataclass(frozen=True)
class Guest(Config):
    """another program"""

    own: int = knob(3, "a knob of its own")


@pytest.mark.parametrize("first, second", [(Guest, Config), (Config, Guest)])
def test_a_run_is_resumed_by_the_program_that_started_it_alone(tmp_path, first, second):
    out = str(tmp_path / "r")
    RunDirectory.open(first(out=out)).close()
    RunDirectory.open(first(out=out, resume=True)).close()
    programs = {Config: "inspo.py", Guest: "tests/test_directory.py"}
    with pytest.raises(
        Fault, match=f"r was started by {programs[first]}, not {programs[second]}"
    ) as e:
        RunDirectory.open(second(out=out, resume=True))
    assert "\n" not in str(e.value)
    if second is Config:
        assert read_config(tmp_path / "r").out == out  # others than programs that train may read it


# knobs of 2026-11-22
OLDER = {"rank": "reward", "gate": "not_worse", "groups": "", "objective": "grpo"}


@pytest.mark.parametrize("changed, knob", [
    ({"T": None}, "T"), ({"task": None}, "task"), ({"newer": 3}, "newer"),
    ({"lora_rank": 8, "dither": None}, "dither"),  # its adapters are laid out as peft's
    (OLDER | {"task": None, "program": None, "commit": None, "id": None}, "rank"),
])  # fmt: skip
def test_a_config_of_another_version_is_one_line_that_names_a_knob(run, changed, knob):
    path = run.path / "config.json"
    found = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    commit = "unknown" if "commit" in changed else found["commit"]
    for resume in (False, True):
        with pytest.raises(
            Fault, match=f"another version of inspo.py .commit {re.escape(commit)}; .* --{knob}"
        ) as e:
            read_config(run.path, resume=resume)
        assert "\n" not in str(e.value) and "damaged" not in str(e.value)


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = RunDirectory.open(Config(out=str(tmp_path / "other")))
    other.close()
    shutil.copytree(run.checkpoints()[-1], other.path / "checkpoints" / "step-000009")
    with pytest.raises(Fault, match=f"step-000009 is of the run {run.id}, not of {other.id}") as e:
        rewind(other)
    assert run.id and run.id != other.id and "\n" not in str(e.value)
    with pytest.raises(Fault, match=f"is of the run {run.id}, not of {other.id}"):
        export_checkpoint(other.path, tmp_path / "to")
    shutil.copytree(run.path, tmp_path / "copy")  # of the whole run, with whose it is
    assert rewind(RunDirectory(tmp_path / "copy"))[0] == 9


def test_of_a_link_to_a_directory_the_link_alone_is_removed(run, tmp_path):
    """A checkpoint that somebody moved to a larger disk; where a policy, or a damaged checkpoint,
    is to be written."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for path in run.checkpoints()[:2]:
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    save(run, 10)  # keeps three
    assert [path.name for path in run.checkpoints()] == [f"step-{t:06d}" for t in (6, 9, 10)]
    links = {
        "policy": elsewhere / "step-000003",
        "checkpoints/damaged-step-000010": elsewhere / "step-000003",
    }
    links["checkpoints/.step-000012.tmp"] = elsewhere / "nowhere"
    for name, to in links.items():
        (run.path / name).symlink_to(to)
    with new_directory(run.path / "policy") as path:
        (path / "weights").write_text("x")
    flip(run.checkpoints()[-1] / "state.pt")
    assert rewind(run)[0] == 9 and not (run.path / "policy").is_symlink()
    run.close()
    reopen(run.path).close()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["step-000003", "step-000006"]
    assert len(list((elsewhere / "step-000003").iterdir())) == 4


def test_the_best_checkpoint_is_that_of_the_task_s_first_metric(run):
    rows = {0: {"metrics": ["mark", "em"]}, 3: {"valid/mark": -2.0, "valid/em": 0.1, "test/mark": 0.0},
            6: {"valid/mark": -1.0, "valid/em": 0.0, "test/mark": -9.0}, 9: {"valid/em": 0.9}}  # fmt: skip
    run.write(
        "metrics.jsonl", "".join(json.dumps({"t": t} | row) + "\n" for t, row in rows.items())
    )
    assert run.best().name == "step-000006"
    for t in (10, 11, 12):
        save(run, t)
    # it is kept
    assert [path.name for path in run.checkpoints()] == [f"step-{t:06d}" for t in (6, 10, 11, 12)]


# ---- no code from a checkpoint


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def with_digests(path: Path) -> None:
    """Makes the digests right, as somebody who means harm would."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != checkpoint.DIGESTS]
    digests = {str(file.relative_to(path)): checkpoint.digest(file) for file in files}
    (path / checkpoint.DIGESTS).write_text(json.dumps(digests))


@pytest.mark.parametrize(
    "place", [".metadata", "inside .metadata", "state.pt", "a value", "torch itself"]
)
def test_a_pickle_in_a_checkpoint_runs_nothing(run, tmp_path, place, caplog):
    path, touched = run.checkpoints()[-1], tmp_path / "touched"
    bomb = Bomb(touched)
    if place == ".metadata":
        (path / ".metadata").write_bytes(pickle.dumps(bomb))
    elif place == "inside .metadata":
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data["x"] = bomb
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    elif place == "torch itself":  # torch.save(1, touched)
        (path / ".metadata").write_bytes(b"ctorch\nsave\n(I1\nV%b\ntR." % bytes(touched))
    elif place == "state.pt":
        torch.save(STATE | {"t": 9, "x": bomb}, path / "state.pt")
    else:
        state = tensors(9.0)
        state["optimizer"]["lr"] = bomb
        dcp.save(state, checkpoint_id=path, no_dist=True)
    with_digests(path)
    assert checkpoint.damage(path) == []
    with pytest.raises(CheckpointFault) as e:
        run.load_mark(path)
        checkpoint.load(tensors(0.0), path, alone=True)
    assert not touched.exists() and "\n" not in str(e.value)
    shown = [row for row in caplog.records if not row.name.startswith("c10d-NullHandler")]
    assert not [row for row in shown if row.levelname in ("WARNING", "ERROR")]  # torch's


# ---- the disk


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 KiB."""
    (path := tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run_and_goes_with_the_next(run):
    """As on NFS, while somebody reads it."""
    (held := run.path / "checkpoints/step-000003/held").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", held]).returncode:
        pytest.skip("mounting a tmpfs takes root")
    run.append("metrics", {"t": 10})
    try:
        save(run, 10)
        assert held.is_dir() and rewind(run) == (10, [])
    finally:
        subprocess.run(["umount", "-l", held], check=True)
    save(run, 11)
    assert [step_of(path) for path in run.checkpoints()] == [9, 10, 11]


def test_every_trajectory_is_a_line(run):
    run.write_trajectories("step-000001", [{"x": 1}, {"x": "a\nb"}])
    run.write_trajectories("step-000002", [])
    (path,) = (run.path / "trajectories").iterdir()
    with gzip.open(path, "rt") as f:
        assert [json.loads(line) for line in f] == [{"x": 1}, {"x": "a\nb"}]


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(small_disk):
    run = RunDirectory.open(Config(out=str(small_disk / "r"), keep=3))
    run.append("metrics", {"t": 0})
    save(run, 3)
    (small_disk / "filler").write_bytes(bytes(170_000))
    with pytest.raises(DiskFault, match="cannot write .*step-000006") as e:
        before = None
        for t in range(6, 60, 3):
            before = begin(run, t, before=before)  # a fault is that of the one before
    assert "\n" not in str(e.value)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000003"]
    assert rewind(run)[0] == 3
    with pytest.raises(DiskFault, match="metrics.jsonl .No space left on device"):
        for _ in range(1000):
            run.append("metrics", {"t": 1, "x": "x" * 1000})
    with pytest.raises(DiskFault, match="I_star.txt .No space left on device"):
        run.write("I_star.txt", "x" * 100_000)
    with pytest.raises(DiskFault, match="step-000001.jsonl.gz"):
        run.write_trajectories("step-000001", [{"x": os.urandom(50_000).hex()}])
    assert not list(run.path.rglob("*.tmp"))
    (small_disk / "filler").unlink()
    assert rewind(run)[0] == 3 and save(run, 6).name == "step-000006"
    run.close()


# ---- beside training


def test_a_checkpoint_is_there_once_it_is_whole_and_holds_what_was_there_at_its_mark(run):
    go, checkpoints = threading.Event(), checkpoints_of(run)
    checkpoints.P.join("first", None, 0)
    checkpoints.policy.learner.remembered = {"seen": [1]}
    begin(run, 12, go.wait, before=checkpoints)
    checkpoints.P.join("second", None, 13)  # the next step goes on
    checkpoints.policy.learner.remembered["seen"].append(2)
    run.append("metrics", {"t": 13})
    assert rewind(run)[0] == 9 and [
        path.name for path in (run.path / "checkpoints").glob(".*")
    ] == [".step-000012.tmp"]
    go.set()
    begin(run, 15, before=checkpoints)  # one at a time: it waits
    state = run.load_mark(run.path / "checkpoints/step-000012")
    assert [I["text"] for I in state["population"]["family"]] == ["first"] and state["memory"] == {
        "seen": [1]
    }
    checkpoints.wait()
    assert rewind(run)[0] == 15 and [step_of(path) for path in run.checkpoints()] == [9, 12, 15]


def test_a_mark_is_saved_once_and_not_after_the_weights_have_moved(run):
    checkpoints, times = begin(run, 12), []
    checkpoints.policy.wait = lambda: times.append(checkpoints.policy.t)
    checkpoints.save()  # it is on disk
    checkpoints.mark(12, ended=True)
    # an update has begun; reset; the ranks have lost contact
    for t, in_step in ((13, True), (-1, True), (12, False)):
        checkpoints.policy.t, checkpoints.policy.in_step = t, in_step
        checkpoints.save()
    checkpoints.wait()
    assert not times
    checkpoints.policy.in_step = True
    checkpoints.save()
    checkpoints.wait()
    assert times == [12]


@contextlib.contextmanager
def forked(play):
    """Calls play(ready) in another process, which is killed in the end; goes on once that has
    called ready()."""
    reading, writing = os.pipe()
    other = os.fork()
    if not other:
        _held = play(lambda: os.write(writing, b"x"))  # with its lock
        signal.pause()
    try:
        assert os.read(reading, 1)
        yield
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(run):
    run.close()

    def play(ready):
        other = reopen(run.path)

        def hang():
            (other.path / "checkpoints/.step-000012.tmp/__0_0.distcp").write_text("half")
            ready()
            signal.pause()

        return other, begin(other, 12, hang)

    with forked(play):
        pass
    assert list(run.path.rglob("*.tmp"))
    run = reopen(run.path)
    assert not list(run.path.rglob("*.tmp")) and rewind(run) == (9, [])
    run.close()


def test_a_fault_of_the_thread_is_raised_by_the_next_step_and_comes_second_to_another(
    run, monkeypatch
):

    def fails():
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = begin(run, 12, fails)
    with pytest.raises(DiskFault, match="cannot write .*step-000012 .No space left"):
        while True:
            checkpoints.mark(13)
    cfg = dataclasses.replace(read_config(run.path), out=str(run.path), resume=True)
    run.close()
    for wait, saved in ((fails, 9), (lambda: time.sleep(0.2), 12)):
        text = f"\nanother\nresume from step {saved} with"
        with (
            pytest.raises(Fault, match=text),
            RunDirectory.opened(cfg) as run,
            begin(run, 12, wait).save_on_failure(),
        ):
            raise Outage("another")
        assert rewind(run)[0] == saved  # whatever ended the run, it was waited for


@pytest.mark.parametrize("late", ["save", "write_share"])
def test_a_directory_that_save_leaves_half_done_is_removed(run, late):
    checkpoints = checkpoints_of(run)

    def fails(*args):
        (args[-1] / "half").write_text("x")
        raise OSError(errno.EIO, "Input/output error")

    setattr(checkpoints.policy, late, fails)
    with pytest.raises(DiskFault, match="Input/output error"):
        begin(run, 12, before=checkpoints).wait()
    assert not list(run.path.rglob("*.tmp")) and len(run.checkpoints()) == 3


# ---- two at once


def test_runs_of_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20261122-101112")
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDirectory.open(Config()), range(8)))
    names = {run.path.name for run in runs}
    assert names == {
        "20261122-101112-world-inspo",
        *(f"20261122-101112-world-inspo-{k}" for k in range(2, 9)),
    }
    for run in runs:
        run.close()


@pytest.mark.parametrize("name", ["checkpoints", "trajectories"])
def test_a_file_in_the_place_of_a_folder_is_named(run, name):
    run.close()
    shutil.rmtree(run.path / name)
    (run.path / name).touch()
    with pytest.raises(DiskFault, match=f"cannot write {run.path}/{name} .File exists"):
        reopen(run.path)


@pytest.mark.parametrize("name", ["policy", "checkpoints", "metrics.jsonl", "I_star.txt"])
def test_a_new_run_replaces_nothing_of_somebody_s(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    with pytest.raises(
        Fault, match=f"has '{name}', which a run would replace: choose another --out"
    ):
        RunDirectory.open(Config(out=str(tmp_path)))
    assert [path.name for path in tmp_path.rglob("*")] == [name, "mine"]


def test_a_run_that_never_began_leaves_what_was_there_and_can_begin_there(tmp_path):
    (tmp_path / "notes.txt").touch()
    cfg = Config(out=str(tmp_path))
    with pytest.raises(Fault, match="no passages$"), RunDirectory.opened(cfg) as run:
        run.write("demonstrations.json", "{}")
        raise Fault("no passages")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    RunDirectory.open(cfg).close()


def test_a_run_in_use_cannot_be_resumed_until_its_process_is_gone(run):
    run.close()

    def play(ready):
        other = reopen(run.path)
        ready()
        return other

    with (
        forked(play),
        pytest.raises(Fault, match="another process writes to .*r: wait until it ends"),
    ):
        reopen(run.path)
    reopen(run.path).close()


# ---- from another directory


def test_config_json_holds_paths_that_are_valid_everywhere(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for name in ("q.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    cfg = Config(
        train="q.jsonl", test="q.jsonl", corpus="c.jsonl", model="model", out="r", mode="static"
    )
    found = with_absolute_paths(cfg)
    assert {found[k] for k in ("train", "test")} == {str(tmp_path / "q.jsonl")}
    assert found["model"] == str(tmp_path / "model") and found["valid"] == ""
    assert with_absolute_paths(Config(model="Qwen/Qwen2.5-3B"))["model"] == "Qwen/Qwen2.5-3B"
    RunDirectory.open(cfg).close()
    flags = ["--out", str(tmp_path / "r"), "--resume"]
    monkeypatch.chdir("/")
    resumed = parse_flags(flags)  # no other flag is needed
    assert (
        resumed.train == str(tmp_path / "q.jsonl") and resumed.mode == "static" and resumed.resume
    )
    assert parse_flags([*flags, "--device", "cpu"]).device == "cpu"
    RunDirectory.open(resumed).close()
    for flag, value, was in ("lr", "0.5", "5e-07"), ("dither", "0", "1"), ("lora_rank", "2", "0"):
        with pytest.raises(Fault, match=f"was started with --{flag} {was}, not {value}"):
            RunDirectory.open(parse_flags([*flags, f"--{flag}", value]))
