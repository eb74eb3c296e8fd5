"""What many threads ask, answered together: a batch forms while the one before is answered."""

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any


class Batches:
    """One thread gives `answer` the keys that have queued up, `most` at once and each a single time.

    A batch that is not full leaves after `wait` seconds, in which others may join it. What `answer`
    raises is raised for its whole batch; later ones are answered all the same.
    """

    def __init__(
        self, answer: Callable[[list[Any]], Mapping[Any, Any]], most: int, wait: float = 0.0
    ):
        self.answer, self.most, self.wait = answer, most, wait
        self.waiting: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._send_batches, daemon=True).start()

    def submit(self, key: Any) -> Future[Any]:
        """Returns the Future of an answer; it cannot be cancelled."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.waiting.put((key, future))
        return future

    def _send_batches(self) -> None:
        while True:
            batch = [self.waiting.get()]
            end = monotonic() + self.wait
            with suppress(queue.Empty):
                while len(batch) < self.most:
                    batch.append(self.waiting.get(timeout=max(0.0, end - monotonic())))
            try:
                answers = self.answer(list(dict.fromkeys(key for key, _ in batch)))
                results = [answers[key] for key, _ in batch]
            # raised by the futures, in the caller's thread; Rust's panics (tokenizers) are no Exception
            except BaseException as e:
                for _, future in batch:
                    future.set_exception(e)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)
