"""A signal ends a run in one line, resumably, whatever it is doing; nothing is saved half done."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
from test_inspo import ENV, ROOT, SMALL, metrics, read_jsonl, run_here

import reflect
from plumbing import stop
from run import Run, step_of
from training.policy import Policy


@pytest.fixture
def listening():
    with stop.listening():
        yield


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_request_waits_until_it_is_granted_where_the_run_may_stop(listening, capfd, number):
    reached = []
    # under torchrun a signal comes twice
    for _ in range(2):
        os.kill(os.getpid(), number)
    reached.append("update")
    with pytest.raises(stop.Stopped, match=f"stopped by {number.name}"), stop.may_stop():
        reached.append("rollout")
    assert reached == ["update"] and capfd.readouterr().err.count(number.name) == 1


def test_where_it_may_a_request_ends_a_wait_at_once(listening):
    began = time.time()
    sender = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -USR1 {os.getpid()}"])
    with pytest.raises(stop.Stopped, match="stopped by SIGUSR1"), stop.may_stop():
        time.sleep(100)
    assert time.time() - began < 60 and sender.wait(60) == 0


TWICE = """
import os, signal, time
from plumbing import stop
with stop.listening():
    for seconds in (0.2, 1.2):
        os.kill(os.getpid(), signal.SIGTERM)
        print("goes on", flush=True)
        time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never")
"""


def test_a_second_signal_ends_the_process_wherever_it_is():
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "goes on\n" * 2)


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
# the call in which a signal comes, which, and the step of the newest checkpoint then
CASES = {
    "rollout": (Policy, "rollout", 1, purposes("3 rollout"), signal.SIGINT, 2),
    # The update is finished; the evolution of step 3 cannot be saved.
    "update": (Policy, "update", 3, ANY, signal.SIGTERM, 2),
    "last update": (Policy, "update", 4, ANY, signal.SIGTERM, 2),  # its evaluation is not made
    "verify": (Policy, "rollout", 1, purposes("3 verify 0", "3 verify 1"), signal.SIGUSR1, 2),
    "evaluate": (Policy, "rollout", 1, purposes("2 evaluate"), signal.SIGINT, None),
    "optimizer": (reflect.Optimizer, "ask", 2, ANY, signal.SIGTERM, 2),
    "save": (Policy, "save", 1, lambda policy, path: "000004" in path.name, signal.SIGUSR1, 4),
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
    assert max(map(step_of, Run(out).checkpoints()), default=None) == saved
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
