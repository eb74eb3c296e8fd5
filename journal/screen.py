"""What a run shows while it runs: lines, and on a terminal a progress bar below them."""

import sys
import time

from tqdm import tqdm

from plumbing.outside import printable
from plumbing.status import status

QUIET = 30.0  # seconds after which a run without a terminal prints how far it is


class Screen:
    """The run's standard output."""

    def __init__(self, T: int):
        status("")
        self.T, self.printed = T, time.perf_counter()
        # None: no bar without a terminal. Twice a second at most: other programs need the cores.
        self.bar = tqdm(
            total=T, unit="step", file=sys.stdout, disable=None, mininterval=0.5, miniters=0
        )

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        self.bar.close()

    def note(self, text: str) -> None:
        """Prints a text, on a terminal above the bar."""
        with tqdm.external_write_mode(file=sys.stdout):
            print(printable(text), flush=True)

    def rollouts(self, purpose: str, done: int, total: int) -> None:
        """Shows how far rollouts are: at the bar, or without a terminal in a line now and then."""
        text = f"{purpose.split()[0]} {done}/{total}"
        self.bar.set_postfix_str("" if done == total else text, refresh=False)
        self.bar.update(0)
        if self.bar.disable and time.perf_counter() > self.printed + QUIET:
            self.note(text)
            self.printed = time.perf_counter()

    def step(self, t: int, text: str) -> None:
        """Shows that step t has been taken, and every twentieth of a run its metrics."""
        self.bar.update(t - self.bar.n)
        if t % max(1, self.T // 20) == 0:
            self.note(f"step {t:3d}  {text}")
            self.printed = time.perf_counter()
