"""How many threads a run takes, by whether its cores are idle."""

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from config import ABOUT, parse
from plumbing import threads

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As a program starts: nothing measured, nothing set."""
    threads.count_idle_cores.cache_clear()
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    yield
    threads.count_idle_cores.cache_clear()


def cores(monkeypatch, *busy):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: list(busy))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: len(busy))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(busy))), raising=False)


def burn(barrier):
    barrier.wait()
    while True:
        pass


def test_where_every_core_is_busy_there_is_one_thread():
    n = os.cpu_count()
    barrier = multiprocessing.Barrier(n + 1)
    burning = [multiprocessing.Process(target=burn, args=(barrier,), daemon=True) for _ in range(n)]
    for process in burning:
        process.start()
    barrier.wait()
    assert threads.choose_threads() == 1
    for process in burning:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("busy", "most", "number"),
    [((2, 9), 0, 2), ((2, 9), 2, 2), ((97, 9), 2, 1), ((97, 99), 2, 1), ((1,) * 16, 2, 2), ((1,) * 15 + (80,), 0, 15)],
)
def test_a_thread_per_idle_core(monkeypatch, busy, most, number):
    cores(monkeypatch, *busy)
    assert threads.choose_threads(most) == number


def test_a_run_keeps_to_what_the_user_says(monkeypatch):
    cores(monkeypatch, 2, 2, 2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose_threads(2) == 3
    assert parse([]).threads == 3


@pytest.mark.parametrize(("busy", "spin"), [((2, 9), "10000"), ((97, 9), "1000")])
def test_threads_wait_longer_for_each_other_where_cores_are_idle(monkeypatch, busy, spin):
    cores(monkeypatch, *busy)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    parse([])
    assert os.environ["GOMP_SPINCOUNT"] == spin


def test_a_resumed_run_keeps_its_number(monkeypatch, tmp_path):
    cores(monkeypatch, 2, 2)
    cfg = parse([])
    (tmp_path / "config.json").write_text(json.dumps(asdict(cfg) | ABOUT))
    threads.count_idle_cores.cache_clear()
    cores(monkeypatch, 99, 99)
    assert (cfg.threads, parse([]).threads) == (2, 1)
    assert parse(["--out", str(tmp_path), "--resume"]).threads == 2


def test_torch_computes_with_the_number_that_the_run_has(tmp_path):
    code = "import inspo, torch; inspo.main(); print('threads', torch.get_num_threads())"
    flags = ["--T", "1", "--batch", "2", "--mini", "2", "--eval_n", "2", "--out", tmp_path / "r"]
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "threads 2" in done.stdout, done.stderr
    assert '"threads": 2' in (tmp_path / "r/config.json").read_text()
