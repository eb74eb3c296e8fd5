"""A program's flags from dataclasses of knobs: their parser and help, which values a knob takes."""

import argparse
import dataclasses
import math
import operator
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from plumbing.faults import tell_torchrun
from plumbing.stop import leads
from plumbing.trust import ROOT

SIDES = {"above": operator.gt, "at least": operator.ge, "below": operator.lt}  # of a bound


def knob(
    default: Any,
    doc: str,
    *,
    least: float = 0,
    above: float = -math.inf,
    below: float = math.inf,
    of: tuple[Any, ...] = (),
    more: bool = False,
) -> Any:
    """Returns a field with its choices (`of`) or bounds: only a choice is negative. `more` puts it
    on the second page of --help."""
    bounds = {"at least": least, "above": above, "below": below}
    return dataclasses.field(
        default=default, metadata={"doc": doc, "of": of, "more": more} | bounds
    )


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if not leads():  # under torchrun one process speaks for all,
            # and has to get its word in: torchrun ends the others as soon as one has failed
            time.sleep(30)
            self.exit(2)
        text = f"{self.prog}: {message} ({self.prog} --help lists the flags)"
        tell_torchrun(text)
        self.exit(2, f"{text}\n")


def switch(text: str) -> bool:
    """Reads the value of a flag that may also stand alone."""
    return bool(("0", "1").index(text))


def add_flags(parser: Parser, kind: type, shown: Mapping[str, Any], everything: bool) -> None:
    """Adds the flags of a dataclass's fields, a group for each class that it is made of.

    The help has those that most runs need, or `everything`. `shown`: defaults that it names in
    place of the fields' own.
    """
    # a knob that a subclass defines anew stays in its first place
    left = {f.name: f for f in dataclasses.fields(kind)}
    for concern in reversed(kind.__mro__):
        own = [left.pop(name) for name in vars(concern).get("__annotations__", ()) if name in left]
        if own:
            group = parser.add_argument_group((concern.__doc__ or "").splitlines()[0])
        for f in own:
            flag: dict[str, Any] = {
                "nargs": "?",
                "const": True,
                "type": switch,
                "metavar": "0 or 1",
            }
            if f.type is not bool:
                flag = {"type": f.type, "metavar": getattr(f.type, "__name__", "")}
            text = argparse.SUPPRESS
            if everything or not f.metadata["more"]:
                text = describe(f, shown.get(f.name, f.default)).replace("%", "%%")
            group.add_argument(f"--{f.name}", help=text, **flag)


def describe(f: dataclasses.Field[Any], default: Any) -> str:
    """Returns a flag's line in --help, with its default and, where that is another, the field's
    own."""
    doc: str = f.metadata["doc"]
    if f.name == "model" or isinstance(default, bool) or default == "":
        return doc
    ours = str(default).startswith(str(ROOT))
    shown = os.path.relpath(default, ROOT) if ours else default
    paper = f"; {f.default}" if f.default not in (default, "") else ""
    return f"{doc} [{shown}{paper}]"


def out_of_range(cfg: Any, names: Iterable[str]) -> str:
    """Returns which of these knobs has a value that it cannot have; "" if none has."""
    knobs = {f.name: f.metadata for f in dataclasses.fields(cfg)}
    for name in names:
        value, limits, of = getattr(cfg, name), knobs[name], knobs[name]["of"]
        if of and value not in of:
            return f"--{name} {value}: choose {' or '.join(str(x) for x in of if x != '')}"
        if of or isinstance(value, str):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            return f"--{name} {value}: must be a finite number"
        for side, holds in SIDES.items():
            if not holds(value, limits[side]):
                return f"--{name} {value}: must be {side} {limits[side]}"
    return ""
