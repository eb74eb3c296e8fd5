"""What engines have in common whose turns come from servers: threads fetch them, a request a turn."""

import queue
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engines import FinishedTurn, Turns


class RemoteEngine:
    """Starts turns in a pool's threads and yields them as they finish; what an abandoned batch
    still gets is lost."""

    max_rows = sys.maxsize
    lockstep = False

    def __init__(self, threads: int):
        self.pool = ThreadPoolExecutor(threads)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """As Engine; samples depend only on `seed` and contexts, as far as the server heeds seeds."""
        self.seed, self.running = seed, 0
        self.ended: queue.SimpleQueue[Future[FinishedTurn]] = queue.SimpleQueue()

    def start(self, fetch: Callable[..., FinishedTurn], *args: Any) -> None:
        self.pool.submit(fetch, *args).add_done_callback(self.ended.put)
        self.running += 1

    def finished(self) -> Turns:
        """Yields the turns that have finished, waiting up to 5 ms for the first; raises what
        prevented one."""
        wait = 0.005
        while self.running:
            try:
                turn = self.ended.get(timeout=wait)
            except queue.Empty:
                return
            self.running, wait = self.running - 1, 0
            yield turn.result()

    def sleep(self) -> None:
        """Does nothing: the servers have their own devices."""

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
