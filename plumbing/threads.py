"""How many CPU threads torch computes with: as many as cores are idle when a run starts (measured
in docs/LOG.md)."""

import contextlib
import ctypes
import functools
import os

import psutil

_chosen = ""  # what a run of this process has put into OMP_NUM_THREADS, where the user had not


@functools.cache
def count_idle_cores() -> int:
    """Physical cores open to this process that were less than half busy for a quarter of a second;
    at least 1."""
    busy: list[float] = psutil.cpu_percent(0.25, percpu=True)
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(busy))
    idle = sum(busy[core] < 50 for core in mine)
    return max(1, min(idle, psutil.cpu_count(logical=False) or idle))


def choose_threads(most: int = 0) -> int:
    """OMP_NUM_THREADS, where it is set; otherwise one thread per idle core, at most `most` (0: no
    limit)."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given != _chosen and given.isdigit() and int(given):
        return int(given)
    idle = count_idle_cores()
    return min(idle, most or idle)


def use_threads(threads: int) -> None:
    """Makes torch compute with this many threads. Call it before torch is imported.

    Not by `torch.set_num_threads`: that lets MKL start a team within each of torch's threads, so
    that attention on two is slower than on one. On idle cores a long wait for each other makes two
    threads a third faster; where other programs want the cores it costs them and this one dearly.
    """
    global _chosen
    if os.environ.get("OMP_NUM_THREADS") != str(threads):
        os.environ["OMP_NUM_THREADS"] = _chosen = str(threads)
    if threads > 1:
        os.environ.setdefault(
            "GOMP_SPINCOUNT", "10000" if count_idle_cores() >= threads else "1000"
        )


def compute_alone() -> None:
    """Makes torch compute with one thread where the calling thread asks it to.

    Here torch.set_num_threads would do to all threads what `use_threads` avoids.
    """
    with contextlib.suppress(AttributeError):  # a torch that is built without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)
