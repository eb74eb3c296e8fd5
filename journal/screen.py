"""What a run shows while it runs: lines, and on a terminal a progress bar below them."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from plumbing.outside import printable
from plumbing.status import status

QUIET = 30.0  # seconds after which a run without a terminal prints how far it is


class Screen:
    """The run's standard output."""

    def __init__(self, T: int, console: Console | None = None):
        """`console`: standard output, unless given."""
        console = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self.T, self.printed, self.terminal = T, time.perf_counter(), console.is_terminal
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(30), TimeElapsedColumn(), TimeRemainingColumn()
        # Twice a second at most: other programs need the cores.
        self.bar = Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=2)
        self.task = self.bar.add_task("", total=T)

    def start(self) -> None:
        """Draws the bar, if this is a terminal."""
        status("")
        if self.terminal:
            self.bar.start()

    def close(self) -> None:
        """Leaves the last state of the bar on the terminal."""
        if self.terminal:
            self.bar.stop()

    def note(self, text: str) -> None:
        """Prints a text, on a terminal above the bar."""
        if self.terminal:
            self.bar.console.print(Text(printable(text)), soft_wrap=True)
        else:
            print(printable(text), flush=True)

    def rollouts(self, purpose: str, done: int, total: int) -> None:
        """Shows how far rollouts are: at the bar, or without a terminal in a line now and then."""
        text = f"{purpose.split()[0]} {done}/{total}"
        self.bar.update(self.task, description="" if done == total else text)
        if not self.terminal and time.perf_counter() > self.printed + QUIET:
            self.note(text)
            self.printed = time.perf_counter()

    def step(self, t: int, text: str) -> None:
        """Shows that step t has been taken, and every twentieth of a run its metrics."""
        self.bar.update(self.task, completed=t)
        if t % max(1, self.T // 20) == 0:
            self.note(f"step {t:3d}  {text}")
            self.printed = time.perf_counter()
