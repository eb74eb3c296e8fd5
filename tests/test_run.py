"""A run's directory: what is written is whole or not there, what came after a checkpoint goes, one
process writes."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic.dataclasses import dataclass

from config import Config, parse_flags, read_config
from plumbing.faults import CheckpointFault, DiskFault, Fault, Outage
from population import Population, ReplayBuffer
from run import LOGS, Checkpoints, Run, open_run, read_state, step_of, with_absolute_paths
from training.policy import Policy
from training.ranks import Ranks


class Fixed:
    """A policy of four tensors, which are t; its checkpoint is written once `wait` has returned."""

    ranks_ready, synced, shared = True, False, True
    sleep, load = Policy.sleep, Policy.load

    def __init__(self):
        self.t = 0
        self.wait = lambda: None
        self.seconds = {}
        self.ranks = Ranks("cpu", 1)
        self.tensors = {"model.w": torch.zeros(64, 64), "model.b": torch.zeros(3)}
        self.tensors |= {"optimizer.w.exp_avg": torch.zeros(64, 64)}
        self.tensors |= {"optimizer.w.step": torch.tensor(0.0)}
        self.learner = SimpleNamespace(
            remembered={}, model=torch.nn.Linear(1, 1), state_dict=lambda: self.tensors
        )

    def train(self, t: int) -> None:
        self.t = t
        for x in self.tensors.values():
            x.fill_(t)

    def save(self, path):
        Policy.save(self, path)
        wait, written = self.wait, self.written
        self.written = SimpleNamespace(result=lambda: (written.result(), wait()))


def checkpoints_of(run: Run) -> Checkpoints:
    cfg = Config(keep=3, save_every=10**6, T=10**6, K_e=10**6)
    return Checkpoints(cfg, run, Fixed(), Population(Config()), ReplayBuffer(9))


def begin(run: Run, t: int, wait=lambda: None, before: Checkpoints | None = None) -> Checkpoints:
    """Begins to save step t; `before`: with the checkpoints of the steps before."""
    checkpoints = before or checkpoints_of(run)
    checkpoints.policy.train(t)
    checkpoints.policy.wait = wait
    checkpoints.end_step(t)
    checkpoints.save()
    return checkpoints


def save(run: Run, t: int) -> Path:
    begin(run, t).wait()
    return run.checkpoints()[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a run with checkpoints of the steps 3, 6 and 9."""
    run = Run.open(Config(out=str(tmp_path_factory.mktemp("made") / "r"), keep=3))
    for t in range(10):
        run.append("metrics", {"t": t})
        if t in (3, 6, 9):
            save(run, t)
    run.close()
    return run.path


def reopen(path: Path) -> Run:
    return Run.open(dataclasses.replace(read_config(path), out=str(path), resume=True))


@pytest.fixture
def run(made, tmp_path):
    run = reopen(shutil.copytree(made, tmp_path / "r"))
    yield run
    run.close()


def restored(run: Run) -> int:
    """Returns the step after which the run would go on, with the weights of that step."""
    checkpoints = checkpoints_of(run)
    t = checkpoints.restore() - 1
    assert all((x == max(t, 0)).all() for x in checkpoints.policy.tensors.values())
    assert checkpoints.policy.t == t
    return t


# ---- what is restored


def test_what_came_after_a_checkpoint_is_dropped_and_the_rest_is_restored(run):
    first = checkpoints_of(run)
    first.P.join("first", None, 0)
    first.policy.learner.remembered = {"seen": [1]}
    begin(run, 12, before=first).wait()
    names = [
        f"{kind}-{t:06d}{end}" for t in (12, 13) for kind, end in (("step", ""), ("verify", "-0"))
    ]
    for name in (*names, "test-trained_policy-I_star"):
        run.write_trajectories(name, [{}])
    for name in LOGS:
        for t in (12, 13, 14):
            run.append(name, {"t": t})
    (run.path / "checkpoints/.step-000015.tmp").mkdir()
    with open(run.path / "population.jsonl", "a", encoding="utf-8") as f:
        f.write('{"t": 15, "ev')  # a kill has cut it
    second = checkpoints_of(run)
    assert second.restore() == 13
    assert [I.text for I in second.P.family] == ["first"]
    assert second.policy.learner.remembered == {"seen": [1]}
    for name in LOGS:
        assert run.rows(name)[-1] == {"t": 12}
        assert (run.path / f"{name}.jsonl").read_text().endswith('{"t": 12}\n')
    found = {path.name.partition(".")[0] for path in (run.path / "trajectories").iterdir()}
    assert found == {*names[:2], "test-trained_policy-I_star"}
    assert not list(run.path.rglob("*.tmp"))


def test_a_run_without_a_checkpoint_starts_over(run):
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "checkpoints").mkdir()
    run.write_trajectories("step-000001", [{}])
    assert checkpoints_of(run).restore() == 1
    assert not run.rows("metrics") and not list((run.path / "trajectories").iterdir())


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


HARMS = {
    "a share is lost": lambda path: min(path.glob("*.safetensors")).unlink(),
    "a share is cut": lambda path: os.truncate(min(path.glob("*.safetensors")), 99),
    "state.pt is lost": lambda path: (path / "state.pt").unlink(),
    "state.pt is cut": lambda path: os.truncate(path / "state.pt", 99),
    "state.pt would run code": lambda path: torch.save(
        read_state(path) | {"memory": Bomb(path / "ran")}, path / "state.pt"
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_is_not_whole_is_one_line_and_runs_nothing(run, harm):
    newest = run.checkpoints()[-1]
    HARMS[harm](newest)
    with pytest.raises(CheckpointFault, match="step-000009") as e:
        checkpoints_of(run).restore()
    assert "\n" not in str(e.value) and not (newest / "ran").exists()
    assert len(run.rows("metrics")) == 10
    shutil.rmtree(newest)  # the one before is still there
    assert restored(run) == 6


@pytest.mark.parametrize("changed", [{"T": "many"}, {"T": 0}, {"lr": None}], ids=str)
def test_a_config_with_an_impossible_value_is_one_line(run, changed):
    path = run.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(Fault, match=f"^{path}: --{[*changed][0]} ") as e:
        read_config(run.path)
    assert "\n" not in str(e.value)


@dataclass(frozen=True)
class Guest(Config):
    """another program"""

    own: int = 3
    """a knob of its own"""


def test_a_run_is_resumed_by_the_program_that_started_it_alone(tmp_path):
    out = str(tmp_path / "r")
    Run.open(Guest(out=out)).close()
    Run.open(Guest(out=out, resume=True)).close()
    with pytest.raises(Fault, match="r was started by tests/test_run.py, not inspo.py"):
        Run.open(Config(out=out, resume=True))
    assert read_config(tmp_path / "r").out == out  # others than programs that train may read it


def test_a_config_of_another_version_is_one_line_that_names_a_knob(run):
    path = run.path / "config.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"newer": 3}))
    with pytest.raises(Fault, match="another version of inspo.py .*newer"):
        read_config(run.path, resume=True)


def test_the_best_checkpoint_is_that_of_the_task_s_first_metric_on_valid(run):
    rows = {
        0: {"metrics": ["mark", "em"]},
        3: {"valid/mark": -2.0, "valid/em": 0.1, "test/mark": 0.0},
        6: {"valid/mark": -1.0, "valid/em": 0.0, "test/mark": -9.0},
        9: {"valid/em": 0.9},
    }
    lines = [json.dumps({"t": t} | row) + "\n" for t, row in rows.items()]
    run.write("metrics.jsonl", "".join(lines))
    assert run.best().name == "step-000006"
    for t in (10, 11, 12):
        save(run, t)
    assert [step_of(path) for path in run.checkpoints()] == [6, 10, 11, 12]  # it is kept


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


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(small_disk):
    run = Run.open(Config(out=str(small_disk / "r"), keep=3))
    run.append("metrics", {"t": 0})
    save(run, 3)
    (small_disk / "filler").write_bytes(bytes(170_000))
    with pytest.raises(DiskFault, match="cannot write .*step-000006") as e:
        before = None
        for t in range(6, 60, 3):
            before = begin(run, t, before=before)  # a fault is that of the one before
    assert "\n" not in str(e.value)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000003"]
    assert restored(run) == 3
    with pytest.raises(DiskFault, match="metrics.jsonl .No space left on device"):
        for _ in range(1000):
            run.append("metrics", {"t": 1, "x": "x" * 1000})
    with pytest.raises(DiskFault, match="I_star.txt .No space left on device"):
        run.write("I_star.txt", "x" * 100_000)
    with pytest.raises(DiskFault, match="step-000001.jsonl.gz"):
        run.write_trajectories("step-000001", [{"x": os.urandom(50_000).hex()}])
    assert not list(run.path.rglob("*.tmp"))
    (small_disk / "filler").unlink()
    assert restored(run) == 3 and save(run, 6).name == "step-000006"
    run.close()


# ---- beside training


def test_a_checkpoint_is_there_once_it_is_whole_and_holds_what_was_there_at_its_step(run):
    go, checkpoints = threading.Event(), checkpoints_of(run)
    checkpoints.P.join("first", None, 0)
    checkpoints.policy.learner.remembered = {"seen": [1]}
    begin(run, 12, go.wait, before=checkpoints)
    checkpoints.P.join("second", None, 13)  # the next step goes on
    checkpoints.policy.learner.remembered["seen"].append(2)
    checkpoints.policy.train(13)
    assert [step_of(path) for path in run.checkpoints()] == [3, 6, 9]
    assert [path.name for path in (run.path / "checkpoints").glob(".*")] == [".step-000012.tmp"]
    go.set()
    begin(run, 15, before=checkpoints)  # one at a time: it waits
    state = read_state(run.path / "checkpoints/step-000012")
    assert [I["text"] for I in state["population"]["family"]] == ["first"]
    assert state["memory"] == {"seen": [1]}
    checkpoints.wait()
    assert [step_of(path) for path in run.checkpoints()] == [9, 12, 15]
    shutil.rmtree(run.checkpoints()[-1])
    assert restored(run) == 12


def test_a_step_is_saved_once_and_not_after_the_weights_have_moved(run):
    checkpoints, times = begin(run, 12), []
    checkpoints.policy.wait = lambda: times.append(checkpoints.policy.t)
    checkpoints.save()  # it is on disk
    checkpoints.policy.train(13)
    checkpoints.end_step(13)
    # an update has begun; reset; the ranks have lost contact
    for t, ranks_ready in ((14, True), (-1, True), (13, False)):
        checkpoints.policy.t, checkpoints.policy.ranks_ready = t, ranks_ready
        checkpoints.save()
    checkpoints.wait()
    assert not times
    checkpoints.policy.ranks_ready = True
    checkpoints.save()
    checkpoints.wait()
    assert times == [13]


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
            ready()
            signal.pause()

        return other, begin(other, 12, hang)

    with forked(play):
        pass
    assert list(run.path.rglob("*.tmp"))
    run = reopen(run.path)
    assert restored(run) == 9 and not list(run.path.rglob("*.tmp"))
    run.close()


def test_a_fault_of_the_thread_is_raised_by_the_next_step_and_comes_second_to_another(run):
    def fails():
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = begin(run, 12, fails)
    with pytest.raises(DiskFault, match="cannot write .*step-000012 .No space left"):
        while True:
            checkpoints.end_step(13)
    assert not list(run.path.rglob("*.tmp")) and len(run.checkpoints()) == 3
    cfg = dataclasses.replace(read_config(run.path), out=str(run.path), resume=True)
    run.close()
    for wait, saved in ((fails, 9), (lambda: time.sleep(0.2), 12)):
        text = f"\nanother\nresume from step {saved} with"
        with (
            pytest.raises(Fault, match=text),
            open_run(cfg) as run,
            begin(run, 12, wait).save_on_failure(),
        ):
            raise Outage("another")
        assert restored(run) == saved  # whatever ended the run, it was waited for


# ---- two at once


def test_a_new_run_replaces_nothing_of_somebody_s(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(Fault, match="is not empty: choose another --out"):
        Run.open(Config(out=str(tmp_path)))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    cfg = Config(out=str(tmp_path / "r"))
    for _ in range(2):
        with pytest.raises(Fault, match="no passages$"), open_run(cfg) as run:
            run.write("demonstrations.json", "{}")
            raise Fault("no passages")
        assert not run.path.exists()


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
    (tmp_path / "q.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    cfg = Config(train="q.jsonl", model="model", out="r", mode="static")
    found = with_absolute_paths(cfg)
    assert found["train"] == str(tmp_path / "q.jsonl") and found["model"] == str(tmp_path / "model")
    assert found["valid"] == ""
    assert with_absolute_paths(Config(model="Qwen/Qwen2.5-3B"))["model"] == "Qwen/Qwen2.5-3B"
    Run.open(cfg).close()
    flags = ["--out", str(tmp_path / "r"), "--resume"]
    monkeypatch.chdir("/")
    resumed = parse_flags(flags)  # no other flag is needed
    assert (
        resumed.train == str(tmp_path / "q.jsonl") and resumed.mode == "static" and resumed.resume
    )
    assert parse_flags([*flags, "--device", "cpu"]).device == "cpu"
    Run.open(resumed).close()
    for flag, value, was in ("lr", "0.5", "5e-07"), ("dither", "0", "1"), ("lora_rank", "2", "0"):
        with pytest.raises(Fault, match=f"was started with --{flag} {was}, not {value}"):
            Run.open(parse_flags([*flags, f"--{flag}", value]))
