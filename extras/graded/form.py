"""The form: its lines, the clauses of an instruction, and what a world pays for each line.

A question is a form of 25 lines, each with a number x from 0 to 3; the policy writes x in a unit, such as `3b`, or
leaves the line empty, `_`. It leaves the 13 optional lines empty and fills in the others, unless a clause tells it
otherwise, and it knows four units without knowing which one is right. That much the warm start has taught it. Which
unit is right, and which clause is worth what, is a matter of the world: random roles, drawn by its seed, which no
weight has seen.

The drift d, from 0 to 1: a late line pays (1 - d) + d (2c - 1) when it is filled in, c being 1 for the right unit and 0
for a wrong one; an early line pays 1 - d when it is left empty and d (2c - 1) when it is filled in. A policy of skill
s, the share of right marks, so gains (1 - d) + d (2s - 1) by a late clause and (1 - d) - d (2s - 1) by an early one.
With d = 0 no clause's worth depends on the skill.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from plumbing.faults import Fault

OPTIONAL, STANDARD = range(13), range(13, 25)  # lines that are left empty, and those filled in, unless told otherwise
LINES = len(OPTIONAL) + len(STANDARD)
X, RULES = 4, 4  # x is below X; rule k writes x in the k-th unit
EMPTY, UNITS = "_", "abcd"
ROLES = {  # how many lines of each kind a world has
    "optional": {"late": 4, "harmful": 3, "neutral": 2, "both": 2, "either": 2},
    "standard": {"early": 4, "base": 4, "idle": 4},
}
GROUND, PART = 0.2, 0.05  # reward of an empty form that pays nothing; of one point

# Two wordings of every clause. The optimizer writes the first; the second is for forms that no run has trained on.
WORDINGS = {f"fill{k:02d}": f"write{k:02d}" for k in OPTIONAL} | {f"leave{k:02d}": f"skip{k:02d}" for k in STANDARD}
WORDINGS |= {f"rule{k}": f"by{k}" for k in range(RULES)}
SAYS = {wording: clause for clause, other in WORDINGS.items() for wording in (clause, other)}
FILLERS = ("please", "fill", "in", "the", "form", "line", "by", "now", "carefully", "below")
START = "please fill in the form"


@dataclass(frozen=True)
class World:
    """What a form pays: `roles` (25) by line, the right rule, the drift."""

    seed: int
    drift: float
    rule: int
    roles: tuple[str, ...]

    @classmethod
    def of(cls, seed: int, drift: float) -> "World":
        """Returns the world of a seed: the same roles for every drift."""
        rng = np.random.default_rng([seed, 31])
        rule = int(rng.integers(RULES))
        roles: list[str] = []
        for counts in ROLES.values():
            some = [role for role, n in counts.items() for _ in range(n)]
            roles += [some[k] for k in rng.permutation(len(some))]
        return cls(seed, drift, rule, tuple(roles))

    @property
    def inventory(self) -> list[str]:
        """Returns the clauses that may be proposed: all but the one that gives the right rule away."""
        return [clause for clause in WORDINGS if clause != f"rule{self.rule}"]

    def role(self, clause: str) -> str:
        """Returns what a clause is in this world: the role of its line, "stunting" (a base line left empty: nothing to
        learn from) or "wrong rule"; "right rule" is never proposed."""
        if clause.startswith("rule"):
            return "right rule" if int(clause[4:]) == self.rule else "wrong rule"
        role = self.roles[int(clause[-2:])]
        return "stunting" if role == "base" else role

    def best(self, skill: float) -> list[str]:
        """Returns the clauses that pay at this skill, both of one pair and one of the other."""
        gain = {"late": (1 - self.drift) + self.drift * (2 * skill - 1)}
        gain["early"] = (1 - self.drift) - self.drift * (2 * skill - 1)
        some = [c for c in self.inventory if gain.get(self.role(c), 0) > 0 or self.role(c) == "both"]
        return [*some, next(c for c in self.inventory if self.role(c) == "either")]

    def points(self, form: Sequence[tuple[int, int]], written: Sequence[str]) -> list[float]:
        """Returns what each line pays, in the order of the form: pairs (line, x); `written` beside each.

        What is missing at the end counts as filled in, wrongly.
        """
        d = self.drift
        marks = [written[k] if k < len(written) else "" for k in range(len(form))]
        filled = {line: said != EMPTY for (line, _), said in zip(form, marks, strict=True)}
        out = []
        for (line, x), said in zip(form, marks, strict=True):
            role, right = self.roles[line], said == self.right(x)
            if role == "base":
                pays = float(right)
            elif role == "late":
                pays = (1 - d) + d * (2 * right - 1) if filled[line] else 0.0
            elif role == "early":
                pays = d * (2 * right - 1) if filled[line] else 1 - d
            elif role == "harmful":
                pays = -1.0 * filled[line]
            elif role in ("both", "either"):
                n = sum(filled[k] for k in filled if self.roles[k] == role)
                pays = {"both": (0.0, -0.5, 2.0), "either": (0.0, 1.0, 0.0)}[role][
                    n
                ] / 2  # half on each line of the pair
            else:
                pays = 0.0
            out.append(pays)
        return out

    def right(self, x: int) -> str:
        return mark(x, self.rule)

    def reward(self, form: Sequence[tuple[int, int]], written: Sequence[str]) -> float:
        return GROUND + PART * sum(self.points(form, written))

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "World":
        """Returns the world in a file; Fault if it holds none."""
        try:
            row = json.loads(path.read_text())
            return cls(int(row["seed"]), float(row["drift"]), int(row["rule"]), tuple(row["roles"]))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise Fault(f"{path} holds no world ({e}): World.of(seed, drift).write(path) writes one") from None


def clauses(instruction: str) -> list[str]:
    """Returns the clauses that an instruction has, in order of appearance, each once."""
    return list(dict.fromkeys(SAYS[word] for word in re.findall(r"\w+", instruction.lower()) if word in SAYS))


def part(line: int, x: int) -> str:
    """Returns a line as it stands in a question, one word."""
    return f"f{line:02d}x{x}"


def mark(x: int, rule: int) -> str:
    """Returns what is written for x by a rule, one word."""
    return f"{x}{UNITS[rule]}"


def form_of(text: str) -> list[tuple[int, int]]:
    return [(int(line), int(x)) for line, x in re.findall(r"f(\d\d)x(\d)", text)]


def random_form(rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(int(line), int(x)) for line, x in zip(rng.permutation(LINES), rng.integers(X, size=LINES), strict=True)]
