"""The turns of one batch of rows that threads fetch from a server, a request a turn."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from engines import FinishedTurn


class RemoteTurns:
    """Starts turns in a pool's threads and yields them as they finish; what an abandoned batch
    still gets is lost."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool, self.running = pool, set[Future[FinishedTurn]]()

    def start(self, fetch: Callable[..., FinishedTurn], *args: Any) -> None:
        self.running.add(self.pool.submit(fetch, *args))

    def finished(self) -> Iterator[FinishedTurn]:
        """Yields the turns that have finished, waiting up to 5 ms for the first; raises what
        prevented one."""
        ended, self.running = wait(self.running, 0.005, FIRST_COMPLETED)
        for turn in ended:
            yield turn.result()
