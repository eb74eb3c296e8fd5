"""The turns of one batch of rows that threads fetch from a server, a request a turn."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engines import FinishedTurn


class RemoteTurns:
    """Starts turns in a pool's threads and yields them as they finish; what an abandoned batch
    still gets is lost."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool, self.running = pool, 0
        self.ended: queue.SimpleQueue[Future[FinishedTurn]] = queue.SimpleQueue()

    def start(self, fetch: Callable[..., FinishedTurn], *args: Any) -> None:
        self.pool.submit(fetch, *args).add_done_callback(self.ended.put)
        self.running += 1

    def finished(self) -> Iterator[FinishedTurn]:
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
