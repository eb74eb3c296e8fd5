"""`--tools search,calculator`: arithmetic, computed without `eval`."""

import re
from collections.abc import Sequence

import simpleeval

from tasks.tools import Function, Tool

simpleeval.MAX_POWER = 1000  # largest base and exponent, so that no calculation takes long


def tools_of(target: str, where: str, others: Sequence[Tool]) -> list[Tool]:
    """Returns the calculator."""
    return [Calculator()]


class Calculator(Function):
    """Arithmetic on numbers: `<calculate> 3 * (4 + 5) </calculate>` returns 27."""

    tag, noun, argument = "calculate", "a calculation", "expression"
    plural, result_tag = "calculations", "result"
    description = "Computes an arithmetic expression of numbers, such as 3 * (4 + 5)."

    def run(self, argument: str) -> str:
        if not re.fullmatch(r"[\d\s.+*/%()-]{1,200}", argument):
            raise ValueError(argument)
        # of several lines simpleeval would compute only the first
        one_line = " ".join(argument.split())
        x = simpleeval.SimpleEval(names={}, functions={}).eval(one_line)
        return str(x) if isinstance(x, int) else f"{float(x):.12g}"
