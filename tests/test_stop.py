"""A signal ends a run in one line, resumably, whatever it is doing; nothing is saved half done."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_inspo import ENV, ROOT, SMALL, finish, metrics, popen, read_jsonl, run_here, start

import reflect
from journal.directory import RunDirectory
from journal.screen import Screen
from plumbing import stop
from training.policy import Policy
from training.ranks import Ranks


def mapped(process, library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def has_child(process) -> bool:
    return bool(
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    )


MOMENTS = {  # when it is signalled -> how the moment is known
    "importing numpy": lambda process: mapped(process, "numpy"),
    "importing torch": lambda process: mapped(process, "libtorch_cpu"),
    "starting a server": has_child,
}


@pytest.mark.parametrize(
    "moment", ["importing numpy", *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS)]
)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_at_the_start_is_one_line_and_leaves_nothing(tmp_path, moment, number):
    process = start("--out", tmp_path / "r", *SMALL)
    while not MOMENTS[moment](process):
        time.sleep(0.002)
    time.sleep(0.1)
    process.send_signal(number)
    code, stdout, stderr = finish(process)
    assert (code, stdout, stderr) == (1, "", f"stopped by {number.name}\n") and not (
        tmp_path / "r"
    ).exists()


PROGRAMS = {
    "labs": ["-m", "labs", "1", "--solution"], "model": ["-m", "extras.real.model", "OUT"],
    "report": ["report.py", "OUT"], "server": ["-m", "retrieval.server", "--corpus", "world/files/corpus.jsonl"],
    "hotpot": ["extras/hotpot.py", "OUT"], "export": ["export.py", "OUT"], "evaluate": ["evaluate.py", "OUT"],
    "compare": ["evaluate.py", "--compare", "OUT", "OUT"], "ask": ["ask.py", "why?", "--run", "OUT"],
    "index": ["-m", "retrieval.build", "--corpus", "OUT", "--encoder", "bm25", "--index", "OUT"],
    "campaign": ["-m", "extras.campaign", "real", "--runs", "OUT"],
    "world": ["-m", "extras.world.warm_start", "--out", "OUT"],
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_ctrl_c_is_one_line_in_programs_that_are_still_importing(tmp_path, program):
    argv = [str(tmp_path / "out") if arg == "OUT" else arg for arg in PROGRAMS[program]]
    process = popen([sys.executable, "-X", "importtime", *argv], ENV)
    for line in process.stderr:
        # before it, in which a signal is a traceback
        assert line.split()[-1].partition(".")[0] not in ("numpy", "torch", "pydantic", "hashlib")
        if line.endswith("plumbing.stop\n"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read().splitlines()  # with what has been read ahead
    lines = [line for line in rest if not line.startswith("import time:")]
    assert lines == ["stopped by SIGINT"] and process.wait(100) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.4])  # its servers are closed; Python exits
def test_a_run_that_has_shown_its_result_ends_well_whatever_comes(tmp_path, seconds):
    process = start("--out", tmp_path / "r", *SMALL)
    for line in process.stdout:
        if line.startswith("see it: "):
            break
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert (code, stdout) == (0, "") and "stopped" not in stderr


def test_without_a_terminal_rollouts_are_a_line_now_and_then(capsys):
    screen = Screen(9)
    screen.printed -= 31
    for done in (1, 2, 300):
        screen.show_rollouts("verify 1", done, 300)
    assert capsys.readouterr().out == "verify 1/300\n"


def test_a_signal_that_the_shell_ignores_stays_ignored():
    code = "import signal; from plumbing import stop\nwith stop.listening():\n"
    code += "    print([signal.getsignal(n).__class__.__name__ for n in stop.SIGNALS])"
    command = ["nohup", sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )
    assert done.stdout == "['function', 'function', 'Handlers']\n"  # SIGHUP is nohup's


@pytest.fixture
def listening():
    with stop.listening():
        yield


def test_a_request_waits_until_it_is_granted_where_the_run_may_stop(listening, capfd):
    reached = []
    # under torchrun a signal comes twice
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    reached.append("update")
    with pytest.raises(stop.Stopped, match="stopped by SIGTERM"), stop.may_stop():
        reached.append("rollout")
    assert (
        reached == ["update"] and capfd.readouterr().err.count("SIGTERM: stopping as soon as") == 1
    )


def test_where_it_may_a_request_ends_a_wait_at_once(listening):
    began = time.time()
    sender = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -HUP {os.getpid()}"])
    with pytest.raises(stop.Stopped, match="stopped by SIGHUP"), stop.may_stop():
        time.sleep(100)
    assert time.time() - began < 60 and sender.wait(60) == 0


def test_an_exit_in_a_task_s_code_does_not_end_a_run_as_if_it_had_succeeded():
    ranks = Ranks("cpu", 1)
    for raised, passed in (SystemExit(0), RuntimeError), (stop.Stopped("x"), stop.Stopped):
        with pytest.raises(passed), ranks.fail_at_once():
            raise raised


WORKER = """
import multiprocessing, time
from plumbing import stop

def stubborn(started):
    while True:
        try:
            started.set()
            time.sleep(60)
        except BaseException:  # as code that a model wrote may
            pass

context = multiprocessing.get_context("fork")
started = context.Event()
with stop.listening(), stop.may_stop():
    worker = context.Process(target=stubborn, args=[started], daemon=True)
    worker.start()
    started.wait()
    worker.terminate()
    worker.join(60)
    print(worker.exitcode)
    worker.kill()
"""


def test_a_worker_that_a_reward_forks_can_be_terminated():
    program = [sys.executable, "-c", WORKER]
    assert subprocess.check_output(program, cwd=ROOT, env=ENV, timeout=180) == b"-15\n"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_request_inside_a_del_is_granted_a_moment_later(listening):
    class Closes:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # in which a moment passes

    began = time.time()
    with pytest.raises(stop.Stopped, match="stopped by SIGINT"), stop.may_stop():
        Closes()
        time.sleep(100)
    assert time.time() - began < 60


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_request_inside_a_del_waits_where_an_update_has_begun_meanwhile(listening, monkeypatch):
    class Closes:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    armed = []  # no alarm comes before this test sends it, however busy the machine is
    monkeypatch.setattr(signal, "setitimer", lambda *alarm: armed.append(alarm))
    with stop.may_stop():
        Closes()
    assert len(armed) == 1
    os.kill(os.getpid(), signal.SIGALRM)
    with pytest.raises(stop.Stopped, match="stopped by SIGINT"), stop.may_stop():
        pass


# ---- at every moment of a step, by the parts of a run themselves


def signal_in(monkeypatch, owner, name: str, n: int, when, number: int) -> None:
    """Sends this process a signal in the n-th of those calls of a method of Policy or of the
    optimizer."""
    inner, calls = getattr(owner, name), itertools.count(1)

    def method(*args, **kwargs):
        if when(*args, **kwargs) and next(calls) == n:
            os.kill(os.getpid(), number)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


SHORT = [*SMALL, "--T", "4", "--T_e", "4", "--save_every", "4", "--eval_every", "2"]


def purposes(*wanted: str):
    return lambda policy, t, purpose, *a, **k: (t, purpose) in [(int(w[0]), w[2:]) for w in wanted]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    code, _, stderr = run_here("--out", out, *SHORT)
    assert code == 0, (code, stderr)
    return out


ANY = lambda *args, **kwargs: True  # noqa: E731
# the call in which a signal comes, which, and the checkpoint that the run leaves; has its step
# ended?
CASES = {
    "rollout": (Policy, "rollout", 1, purposes("3 rollout"), signal.SIGINT, (2, True)),
    # The update is finished; the evolution of step 3 waits.
    "update": (Policy, "update", 3, ANY, signal.SIGTERM, (3, False)),
    "verify": (
        Policy,
        "rollout",
        1,
        purposes("3 verify 0", "3 verify 1"),
        signal.SIGHUP,
        (3, False),
    ),
    "evaluate": (Policy, "rollout", 1, purposes("2 evaluate"), signal.SIGINT, (2, False)),
    "optimizer": (reflect.Optimizer, "ask", 2, ANY, signal.SIGTERM, (3, False)),
    "save": (
        Policy,
        "save",
        1,
        lambda policy, path: "000004" in path.name,
        signal.SIGHUP,
        (4, True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", CASES)
def test_a_signal_at_any_moment_is_resumed_to_the_bit(whole, tmp_path, moment):
    out, (*call, number, saved) = tmp_path / "r", CASES[moment]
    with pytest.MonkeyPatch.context() as patch:
        signal_in(patch, *call, number)
        said, _, stderr = run_here("--out", out, *SHORT)
    lines = str(said).strip().splitlines()
    assert lines[0] == f"stopped by {number.name}" and len(lines) == 2 and "--resume" in lines[1], (
        said,
        stderr,
    )
    mark = RunDirectory(out).load_mark(RunDirectory(out).checkpoints()[-1])
    assert (mark["t"], mark["ended"]) == saved
    code, _, stderr = run_here("--out", out, "--resume")
    assert code == 0, (code, stderr)
    assert metrics(out) == metrics(whole)
    for name in ("population.jsonl", "I_star.txt", "policy/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    rows = [
        [r for r in read_jsonl(path / "reflections.jsonl") if "call" not in r]
        for path in (out, whole)
    ]
    assert rows[0] == rows[1]


HURRIED = """
import contextlib, io, os, sys
import engines, inspo
for flags in (["--help"], ["--tracker", "wandb"], ["--out", "/nowhere", "--resume"], ["--out", sys.argv[1]]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        inspo.main(flags)
print({"torch", "scipy.stats"} & set(sys.modules))
"""


def test_bad_flags_do_not_wait_for_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", HURRIED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"
    assert done.stderr.count("inspo.py: ") == 3 and "holds a run already" in done.stderr
