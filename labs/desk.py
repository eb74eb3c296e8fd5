"""What the labs share: predictions, verdicts on blanks, what waits for them, and how a lab is run
without a browser."""

import importlib
import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import marimo as mo
import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NUMBERS = range(1, 9)


class Nothing(Exception):
    """A reader's function returned None, as an unfilled blank does."""


@dataclass(frozen=True)
class Verdict:
    """What a check says of the function that fills a blank; "" if it is right."""

    blank: str
    says: str

    @property
    def right(self) -> bool:
        return not self.says

    @property
    def text(self) -> str:
        return f"`{self.blank}`: {self.says or 'right.'}"


def verdict(check: Callable[[Callable], str], f: Callable, *before: Verdict) -> Verdict:
    """Checks the reader's function and shows the verdict below the cell; an exception and None are
    a sentence too.

    `before`: blanks that this one builds on, and which have to be right first.
    """
    result = Verdict(check.__name__.removeprefix("check_"), examine(check, f, *before))
    mo.output.append(mo.callout(mo.md(result.text), kind="success" if result.right else "warn"))
    return result


def say(text: str) -> None:
    """Shows the next part of the text below a verdict."""
    mo.output.append(mo.md(text))


def examine(check: Callable[[Callable], str], f: Callable, *before: Verdict) -> str:
    if missing := [v.blank for v in before if not v.right]:
        return f"it builds on `{missing[0]}`, which comes first."

    def call(*args: Any) -> Any:
        if (out := f(*args)) is None:
            raise Nothing
        return out

    try:
        return check(call)
    except Nothing:
        return "it returns nothing yet. Fill in the blank, and mind the `return`."
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        line = f" in `{at.line}`" if at.line else ""
        return f"it raises {type(e).__name__}: {e}{line}."


def judge(case: str, got: Any, want: Any, *mistakes: tuple[Any, str]) -> str:
    """Returns "" if a result is the right one, else the sentence of the mistake, (its result,
    sentence), that gives it.

    A result that no mistake explains is printed next to the right one; `case` says of which
    arguments it is.
    """
    for result, says in (
        (want, ""),
        *mistakes,
        (np.negative(want), f"{case} it has the wrong sign."),
    ):
        if np.shape(got) == np.shape(result) and np.allclose(
            got, result, atol=1e-5, equal_nan=True
        ):
            return says
    return f"{case} it returns {np.round(got, 3)}, not {np.round(want, 3)}."


def need(what: str, *verdicts: Verdict) -> None:
    """Ends the cell with one line unless all of the blanks are right."""
    missing = [f"`{v.blank}`" for v in verdicts if not v.right]
    verb = "is" if len(missing) == 1 else "are"
    mo.stop(bool(missing), mo.md(f"*{what} comes when {' and '.join(missing)} {verb} right.*"))


def compare(what: str, predicted: float | None, was: float, form: str = ".2f") -> mo.Html:
    """Returns what the reader predicted next to what the run gave; without a prediction it
    withholds the latter."""
    if predicted is None:
        return mo.callout(
            mo.md(f"**{what}**: write your `predicted` down at the top; the answer appears then.")
        )
    return mo.callout(
        mo.md(f"**{what}**: you said {predicted:{form}}, it was **{was:{form}}**."), kind="info"
    )


def list_found(found: dict[str, float], *predicted: float | None) -> mo.Html:
    """Returns what a run gave, a line for each number; nothing while a prediction is missing."""
    return mo.md(
        ""
        if None in predicted
        else "\n".join(f"- {name}: {value:.3g}" for name, value in found.items())
    )


def conclude(
    what: str,
    predicted: float | None,
    found: dict[str, float],
    name: str,
    *notes: str,
    form: str = ".2f",
) -> mo.Html:
    """Returns the end of a run: the number of this name next to the prediction, all that it gave,
    and notes on it."""
    parts = (
        compare(what, predicted, found[name], form),
        list_found(found, predicted),
        *map(mo.md, notes),
    )
    return mo.vstack(parts)


def draw(xlabel: str, ylabel: str, *series: tuple[Any, ...], **axes: Any) -> Any:
    """Returns a figure of lines, (label, x, y) or with a format of matplotlib's after them."""
    figure, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for label, x, y, *form in series:
        ax.plot(x, y, *form, label=label)
    ax.set(xlabel=xlabel, ylabel=ylabel, **axes)
    ax.legend(frameon=False)
    plt.close(figure)  # the notebook shows what a cell returns; nothing else keeps it
    return figure


def lab(which: int | str) -> ModuleType:
    """Returns a lab by its number, or a reader's copy of one by its file."""
    if isinstance(which, int):
        return importlib.import_module(f"labs.lab{which}")
    spec = importlib.util.spec_from_file_location(Path(which).stem, which)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solution(number: int) -> dict[str, Any]:
    """Returns what fills the blanks and the predictions of a lab, by name."""
    module = importlib.import_module(f"labs.solutions.lab{number}")
    return {name: getattr(module, name) for name in module.__all__}


def run(which: int | str, filled: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs a lab with `filled` in place of the functions and values of these names; returns all
    that it defined.

    Among that are its Verdicts, and, if it came to its end, `found`, the numbers of the run.
    """
    return dict(lab(which).app.run(defs=filled)[1])


def verdicts(defined: dict[str, Any]) -> list[Verdict]:
    return [value for value in defined.values() if isinstance(value, Verdict)]
