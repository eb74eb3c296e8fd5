"""The paper's claims, each with the comparison in the world that could contradict it, and its verdict."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from evaluation.statistics import between_seeds, over_seeds

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]  # arm -> its rows, by seed
Measure = Callable[[Row], float]


def em(row: Row) -> float:
    return float(row["em"])


def searches(row: Row) -> float:
    return float(row["searches"])


def reward(row: Row) -> float:
    """Returns the mean reward of the last ten steps' rollouts."""
    return float(np.mean(row["curves"]["reward"][-10:]))


def roughness(row: Row) -> float:
    """Returns the standard deviation of the reward's change from step to step."""
    return float(np.std(np.diff(row["curves"]["reward"]), ddof=1)) if len(row["curves"]["reward"]) > 2 else 0.0


def growth(name: str) -> Measure:
    """Returns the measure of how much a curve grows: its last ten steps over its first ten."""

    def measure(row: Row) -> float:
        curve = row["curves"][name]
        return float(np.mean(curve[-10:]) / max(1e-9, np.mean(curve[:10])))

    return measure


class Claim(NamedTuple):
    """`a` has more of `measure` than each of `b`; "" for b: than `floor`."""

    where: str
    says: str
    a: str
    b: tuple[str, ...]
    measure: Measure = em
    floor: float = 0.0
    unit: str = "EM"


CLAIMS = [
    Claim("Table 1", "INSPO has a higher EM than Search-R1", "inspo", ("static",)),
    Claim(
        "Table 1", "INSPO has a higher EM than every other method", "inspo",
        ("direct", "sft", "grpo", "ircot", "rag", "sft_reject", "search_o1", "static"),
    ),
    Claim("Fig. 2a", "INSPO converges to a higher reward", "inspo", ("static",), reward, unit="reward"),
    Claim("Fig. 2b", "INSPO searches more often", "inspo", ("static",), searches, unit="searches"),
    Claim("Fig. 2c", "INSPO's prompts get longer", "inspo", (), growth("prompt_tokens"), 1.0, "x the first ten"),
    Claim("Fig. 2d", "INSPO's responses get longer", "inspo", (), growth("response_tokens"), 1.0, "x the first ten"),
    Claim("Fig. 3", "online evolution beats optimising the instruction before RL", "inspo", ("before",)),
    Claim("Fig. 3", "online evolution beats optimising the instruction after RL", "inspo", ("after",)),
    Claim("Fig. 3", "optimising before RL brings (subtle) gains over Search-R1", "before", ("static",)),
    Claim("Fig. 3", "optimising after RL degrades Search-R1's policy", "static", ("after",)),
    Claim("Fig. 3", "reflection beats paraphrasing", "inspo", ("paraphrase",)),
    Claim("Fig. 3", "reflection beats the history of scores", "inspo", ("history",)),
    Claim("Fig. 3", "pruning and expanding beats a constant population", "unverified", ("constant",)),
    Claim("Fig. 3", "verification adds to pruning and expanding", "inspo", ("unverified",)),
    Claim("Fig. 6a", "one parent beats two and three", "inspo", ("parents-2", "parents-3")),
    Claim("Fig. 6a", "two parents beat Search-R1", "parents-2", ("static",)),
    Claim("Fig. 6a", "three parents beat Search-R1", "parents-3", ("static",)),
    Claim("Fig. 6b", "a low tau_s makes the reward rough", "tau-0.05", ("inspo", "tau-1.0"), roughness, unit="sd"),
]  # fmt: skip


def verdict(claim: Claim, rows: Rows) -> tuple[str, str]:
    """Returns (verdict, why): by Welch's t test over seeds at 5 %, against the strongest of the others.

    An arm without a seed of its own (no training) has one value, which every seed meets.
    """
    missing = [arm for arm in (claim.a, *claim.b) if not rows.get(arm)]
    if missing:
        return "not run yet", f"no row of {', '.join(missing)}"
    a = [claim.measure(row) for row in rows[claim.a]]
    if not claim.b:
        found = over_seeds([x - claim.floor for x in a])
        low, high, told = found.low, found.high, f"{np.mean(a):.2f} {claim.unit}"
        return _said(low, high, f"{told}, 95 % {low + claim.floor:.2f} to {high + claim.floor:.2f}", None)
    others = {arm: [claim.measure(row) for row in rows[arm]] for arm in claim.b}
    strongest = max(others, key=lambda arm: float(np.mean(others[arm])))
    b = others[strongest]
    if len(b) == 1 and strongest in ("direct", "ircot", "rag", "search_o1"):
        found, visible = over_seeds([x - b[0] for x in a]), None
    else:
        difference = between_seeds(a, b)
        found, visible = difference.interval, difference.visible
    told = f"{np.mean(a):.3f} against {np.mean(b):.3f} of {strongest}"
    told += f": {found.mean:+.3f} {claim.unit}, 95 % {found.low:+.3f} to {found.high:+.3f}"
    return _said(found.low, found.high, told, visible)


def _said(low: float, high: float, told: str, visible: float | None) -> tuple[str, str]:
    if not np.isfinite(low):
        return "cannot be told", f"{told.partition(', 95')[0]}: these seeds give no interval"
    if low > 0:
        return "reproduces", told
    if high < 0:
        return "the opposite holds", told
    least = f"; a difference of {visible:.3f} would have shown" if visible else ""
    return "cannot be told", told + least
