"""What a run shows while it runs: its rows in lines, and on a terminal a progress bar below
them."""

import sys
from collections.abc import Sequence
from time import perf_counter

from tqdm import tqdm

from journal.summary import count_calls
from plumbing.files import Row
from plumbing.outside import printable

QUIET = 30.0  # seconds after which a run without a terminal prints how far it is


class Screen:
    """The run's standard output. `tools`: the columns that count their calls."""

    def __init__(self, T: int, tools: Sequence[str] = ()):
        self.T, self.tools, self.printed = T, tools, perf_counter()
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

    def show_rollouts(self, purpose: str, done: int, total: int) -> None:
        """Shows how far rollouts are: at the bar, or without a terminal in a line now and then."""
        text = f"{purpose.split()[0]} {done}/{total}"
        self.bar.set_postfix_str("" if done == total else text, refresh=False)
        self.bar.update(0)
        if self.bar.disable and perf_counter() > self.printed + QUIET:
            self.note(text)
            self.printed = perf_counter()

    def show_row(self, name: str, row: Row) -> None:
        """Shows what a row of `name`.jsonl says, if a person has to see it."""
        if name == "metrics":
            text = self._follow_step(row)
        elif name == "population":
            text = f"{row['event']:6s}  {row['text']}"
        else:
            text = ""
        if text:
            self.note(f"step {row['t']:3d}  {text}")

    def _follow_step(self, row: Row) -> str:
        """Moves the bar; returns a line every twentieth of a run."""
        self.bar.update(row["t"] - self.bar.n)
        if row.get("skipped_updates"):
            skipped = "optimizer steps skipped, as loss or gradient were not finite"
            self.note(f"step {row['t']:3d}  {skipped}: {row['skipped_updates']}")
        if row["t"] % max(1, self.T // 20):
            return ""
        self.printed = perf_counter()
        return tell_step(row, self.tools) if row["t"] else ""


def tell_step(row: Row, tools: Sequence[str]) -> str:
    """Returns a row of metrics.jsonl in a line."""
    # no tool is called where demonstrations train
    calls = count_calls(row, [tool for tool in tools if tool in row])
    forms = {"reward": "reward {:.2f}", **{name: f"{name} {{:.2f}}" for name in calls}}
    forms |= {"logp": "log-prob {:.3f}", "kl": "KL {:.4f}", "w_best": "best w {:.2f}"}
    known = row | calls
    said = [form.format(known[name]) for name, form in forms.items() if name in known]
    seconds = sum(row.get(f"time/{x}", 0.0) for x in ("rollout", "reward", "update", "evolve"))
    return "  ".join([*said, f"{seconds:.1f} s/step"])
