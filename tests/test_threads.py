"""How many threads a run takes, by whether its cores are idle."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import asdict

import psutil
import pytest

from config import ABOUT, parse_flags
from plumbing import threads


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As a program starts: nothing measured, nothing set."""
    monkeypatch.setattr(
        threads, "count_idle_cores", functools.cache(threads.count_idle_cores.__wrapped__)
    )
    monkeypatch.setattr(threads, "_chosen", "")
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "0")  # so that what the test leaves there goes
        monkeypatch.delenv(name)


def cores(monkeypatch, *busy):
    """As many cores, each busy for so many per cent of the time that is measured."""
    monkeypatch.setattr(
        psutil, "cpu_percent", lambda interval, percpu: list(busy) if interval and percpu else None
    )
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: len(busy))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(busy))), raising=False)


@pytest.mark.parametrize(
    ("busy", "most", "number"),
    [((2, 9), 0, 2), ((97, 99), 2, 1), ((1,) * 16, 2, 2), ((1,) * 15 + (80,), 0, 15)],
)
def test_a_thread_per_idle_core(monkeypatch, busy, most, number):
    cores(monkeypatch, *busy)
    assert threads.choose_threads(most) == number


@pytest.mark.parametrize(("busy", "spin"), [((2, 9), "10000"), ((97, 9), "1000")])
def test_a_run_keeps_to_what_the_user_says_and_waits_longer_for_threads_on_idle_cores(
    monkeypatch, busy, spin
):
    cores(monkeypatch, *busy)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.choose_threads(1) == parse_flags([]).threads == 2
    assert os.environ["GOMP_SPINCOUNT"] == spin


def test_a_resumed_run_keeps_its_number(monkeypatch, tmp_path):
    cores(monkeypatch, 2, 2)
    cfg = parse_flags([])
    (tmp_path / "config.json").write_text(json.dumps(asdict(cfg) | ABOUT))
    threads.count_idle_cores.cache_clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores(monkeypatch, 99, 99)
    assert (cfg.threads, parse_flags([]).threads) == (2, 1)
    assert parse_flags(["--out", str(tmp_path), "--resume"]).threads == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"  # for torch, which is imported later


@pytest.mark.slow
def test_a_thread_that_computes_alone_leaves_the_others_theirs():
    """In a process of its own, which begins with two threads."""
    code = """
import threading, torch
from plumbing.threads import compute_alone
def look():
    compute_alone()
    found.append(torch.get_num_threads())
found = [torch.get_num_threads()]
thread = threading.Thread(target=look)
thread.start()
thread.join()
other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
other.start()
other.join()
print(*found, torch.get_num_threads())
"""
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "1", "2", "2"], done.stderr
