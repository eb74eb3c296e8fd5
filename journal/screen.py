"""What a run shows while it runs: a live view if standard output is a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from journal.summary import added_sentences
from plumbing.outside import printable
from population import Instruction, Population

QUIET = 30.0  # seconds after which a run without a terminal prints how far it is
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {  # name in metrics.jsonl -> label; those that a run measures are shown
    "reward": "reward", "w_best": "best w", "answered": "answered", "entropy": "entropy",
    "kl": "KL", "response_tokens": "response", "zero_variance_groups": "groups alike",
}  # fmt: skip
LINE = {  # the same -> how a line shows it
    "reward": "reward {:.2f}", "logp": "log-prob {:.3f}", "kl": "KL {:.4f}", "P": "|P| {}", "w_best": "best w {:.2f}",
}  # fmt: skip


class Screen:
    """The run's standard output. In a terminal the last lines are a live view; notes scroll away above it."""

    def __init__(self, T: int, measured: Sequence[str] = (), console: Console | None = None):
        """`measured`: names in the steps' rows that are shown besides; `console`: standard output, unless given."""
        self.curve_names = CURVES | {name: name for name in measured}
        self.measured = measured
        self.T, self.t, self.began, self.first = T, 0, time.perf_counter(), 0
        self.rows: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.P: Population | None = None
        self.console = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self.doing, self.printed = "", time.perf_counter()  # rollouts under way; when a line was printed
        self.live: Live | None = None
        if self.console.is_terminal:
            self.live = Live(console=self.console, get_renderable=self.view, refresh_per_second=1, transient=False)

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the last state of the view on the terminal and stops drawing."""
        if self.live:
            self.live.stop()

    def resumed(self, t: int) -> None:
        self.t = self.first = t

    def note(self, text: str) -> None:
        """Prints a text, in a terminal above the live view."""
        if self.live:
            self.console.print(Text(printable(text)), soft_wrap=True)
        else:
            print(printable(text), flush=True)

    def event(self, t: int, event: str, P: Population, text: str) -> None:
        """Shows what happened to the population."""
        self.P = P
        line = f"step {t:3d}  {event:6s}  {text}"
        if self.live:
            self.events = [*self.events, printable(line)][-3:]
            self.live.refresh()
        else:
            self.note(line)

    def rollouts(self, t: int, text: str, over: bool) -> None:
        """Shows how far rollouts are: in the live view, or without a terminal in a line now and then."""
        self.doing = "" if over else text
        if not self.live and time.perf_counter() > self.printed + QUIET:
            print(f"step {t:3d}  {text}", flush=True)
            self.printed = time.perf_counter()

    def step(self, t: int, row: dict[str, Any], P: Population, seconds: float) -> None:
        """Shows a step's metrics: in a terminal always, otherwise now and then."""
        self.t, self.P, self.rows = t, P, [*self.rows, row]
        if self.live:
            self.live.refresh()
        elif t % max(1, self.T // 20) == 0:
            first, *rest = LINE.items()
            shown = dict([first, *((name, f"{name} {{:.2f}}") for name in self.measured), *rest])
            now = row | {"P": len(P)}  # those who were pruned after the row was measured have left
            parts = [form.format(now[name]) for name, form in shown.items() if name in row]
            print("  ".join([f"step {t:3d}", *parts, f"{seconds:.1f} s/step"]), flush=True)
            self.printed = time.perf_counter()

    # ---- the live view

    def view(self) -> RenderableType:
        parts: list[RenderableType] = [self.progress()]
        if self.rows:
            parts += [Text(), self.curves()]
        if self.P:
            parts += [Text(), population(self.P)]
        if self.events:
            parts += [Text()]
            parts += [Text(line, style="dim" if k + 1 < len(self.events) else "", no_wrap=True, overflow="ellipsis")
                      for k, event in enumerate(self.events) for line in event.splitlines()]  # fmt: skip
        return Group(*parts)

    def progress(self) -> RenderableType:
        done = self.t - self.first
        pace = (time.perf_counter() - self.began) / done if done else 0.0
        left = f"{pace:.1f} s/step, {clock(pace * (self.T - self.t))} left" if done else "the first step"
        line = Table.grid(padding=(0, 2))
        bar, spent = ProgressBar(self.T, self.t, width=30), clock(time.perf_counter() - self.began)
        line.add_row(Text(f"step {self.t} of {self.T}"), bar, Text(left), Text(spent, "dim"), Text(self.doing, "dim"))
        return line

    def curves(self) -> RenderableType:
        """Returns a table of small curves, two in a row where there is room."""
        wide = self.console.width >= 96
        width = min(40, (self.console.width - (52 if wide else 26)) // (2 if wide else 1))
        table = Table.grid(padding=(0, 2))
        cells: list[Text] = []
        for name, label in self.curve_names.items():
            if values := [x for row in self.rows if math.isfinite(x := row.get(name, math.nan))]:
                curve = Text(sparkline(values, max(8, width)), "cyan")
                cells += [Text(label), curve, Text(f"{values[-1]:.3g}", justify="right")]
        for k in range(0, len(cells), 6 if wide else 3):
            table.add_row(*cells[k : k + (6 if wide else 3)])
        return table


def population(P: Population) -> RenderableType:
    """Returns the active instructions by falling weight, with what they say beyond their parents."""
    table = Table.grid(padding=(0, 2))
    p = dict(zip((I.id for I in P.active), P.probabilities(), strict=True))
    for I in P.ranked()[:7]:
        bar = Text("█" * min(20, round(10 * I.w)) or "▏", "green")
        table.add_row(
            Text(f"#{I.id}", justify="right"), bar, Text(f"w {I.w:.2f}"), Text(f"p {p[I.id]:.2f}", "dim"),
            Text(news(I, P), "dim", no_wrap=True, overflow="ellipsis"),
        )  # fmt: skip
    return table


def news(I: Instruction, P: Population) -> str:
    parent = P.family[I.parent].text if I.parent is not None else ""
    return printable(added_sentences(I.text, parent) if parent else I.text).replace("\n", " ")


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the values as blocks from the lowest to the highest, each column the mean of its share of them."""
    n = min(width, len(values))
    edges = [k * len(values) // n for k in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((x - low) * scale)] for x in means)


def clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}" if minutes >= 60 else f"{minutes}:{s:02d}"
