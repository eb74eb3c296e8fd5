"""The paper's claims, each with the comparison in the world that it is about, and what these rows can say of it.

A verdict is one of three. *Measured here*: it could have come out otherwise, and a test tells. *True by construction*:
the world, or an arm, allows no other outcome, so that it is no evidence. *Cannot be told*: how many seeds would tell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from evaluation.statistics import between_seeds, over_seeds
from extras.campaigns.seeds import MOST, fisher, seeds_by_mean, seeds_by_share, share, two_valued

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


def found(row: Row) -> float:
    """Returns the tokens of a question's context beyond its prompt, sampled or returned by tools; last ten steps."""
    context, prompt = row["curves"]["context_tokens"], row["curves"]["prompt_tokens"]
    return float(np.mean(context[-10:]) - np.mean(prompt[-10:]))


def sampled(row: Row) -> float:
    """Returns the tokens that the policy samples for a question; the last ten steps."""
    return float(np.mean(row["curves"]["response_tokens"][-10:]))


def growth(name: str) -> Measure:
    """Returns the measure of how much a curve grows: its last ten steps over its first ten."""

    def measure(row: Row) -> float:
        curve = row["curves"][name]
        return float(np.mean(curve[-10:]) / max(1e-9, np.mean(curve[:10])))

    return measure


MEASURED, GIVEN, UNTOLD, ABSENT = "measured here", "true by construction", "cannot be told", "not run yet"
UNTRAINED = ("direct", "ircot", "rag", "search_o1")  # no training, no seeds: one value, which every seed meets
CLOSED = (
    "static cannot get far beyond 0.20: its first policy starts a search for one entity with probability 2e-6, and the"
    " world was closed to it"
)
REWORDS = "without failures the scripted optimizer rewords what it is given: no candidate of this arm has a new clause"
ODDS = (
    "the scripted optimizer sets the odds: the clause that decides this world comes as often as failures name it,"
    " without failures by luck, with probability 0.025 a candidate"
)


class Claim(NamedTuple):
    """`a` has more of `measure` than each of `b`; no b: than `floor`."""

    where: str
    says: str
    a: str
    b: tuple[str, ...]
    measure: Measure = em
    floor: float = 0.0
    unit: str = "EM"
    given: str = ""  # why it could not come out otherwise
    curve: str = "reward"  # a curve that the measure needs
    instead: tuple[Measure, str] | None = None  # what rows without that curve have, and what it is


class Verdict(NamedTuple):
    kind: str  # MEASURED, GIVEN, UNTOLD or ABSENT
    result: str  # of those measured: "reproduces" or "the opposite holds"
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.result}" if self.result else self.kind


CLAIMS = [
    Claim(
        "Table 1", "INSPO has a higher EM than Search-R1 and every other method", "inspo",
        ("static", "direct", "sft", "grpo", "ircot", "rag", "sft_reject", "search_o1"),
        given=f"{CLOSED}; nor do the others change the instruction",
    ),
    Claim("Fig. 2a", "INSPO converges to a higher reward", "inspo", ("static",), reward, unit="reward", given=CLOSED),
    Claim("Fig. 2b", "INSPO searches more often", "inspo", ("static",), searches, unit="searches", given=CLOSED),
    Claim("Fig. 2c", "INSPO's prompts get longer", "inspo", (), growth("prompt_tokens"), 1.0, "x the first ten"),
    Claim(
        "Fig. 2d", "INSPO's responses, with what the searches return, get longer than Search-R1's",
        "inspo", ("static",), found, unit="tokens", curve="context_tokens", instead=(sampled, "sampled tokens"),
        given=f"{CLOSED}; and what a second search returns is context",
    ),
    Claim("Fig. 3", "online evolution beats optimising the instruction before RL", "inspo", ("before",)),
    Claim("Fig. 3", "online evolution beats optimising the instruction after RL", "inspo", ("after",)),
    Claim("Fig. 3", "optimising before RL brings (subtle) gains over Search-R1", "before", ("static",)),
    Claim("Fig. 3", "optimising after RL degrades Search-R1's policy", "static", ("after",)),
    Claim("Fig. 3", "reflection beats paraphrasing", "inspo", ("paraphrase",), given=REWORDS),
    Claim("Fig. 3", "reflection beats the history of scores", "inspo", ("history",), given=REWORDS),
    Claim(
        "Fig. 3", "pruning and expanding beats a constant population", "unverified", ("constant",),
        given="a constant population is wordings of the first instruction, with its one clause",
    ),
    Claim("Fig. 3", "reflection beats paraphrasing, fair proposers", "fair", ("fair-paraphrase",), given=ODDS),
    Claim("Fig. 3", "reflection beats the history of scores, fair proposers", "fair", ("fair-history",), given=ODDS),
    Claim("Fig. 3", "evolving beats a constant population, fair proposers", "fair", ("fair-constant",), given=ODDS),
    Claim("Fig. 3", "pruning adds to expanding", "inspo", ("unpruned",)),
    Claim("Fig. 3", "verification adds to pruning and expanding", "inspo", ("unverified",)),
    Claim("Fig. 6a", "one parent beats two and three", "inspo", ("parents-2", "parents-3")),
    Claim("Fig. 6a", "two parents beat Search-R1", "parents-2", ("static",)),
    Claim("Fig. 6a", "three parents beat Search-R1", "parents-3", ("static",), given=CLOSED),
    Claim("Fig. 6b", "a low tau_s makes the reward rough", "tau-0.05", ("inspo", "tau-1.0"), roughness, unit="sd"),
]  # fmt: skip


class Comparison(NamedTuple):
    sign: int  # 1: a has more, -1: less, 0: not told, each at 5 %
    p: float
    told: str
    seeds: str  # how many would tell, if these are the true figures; "" where one knows


def verdict(claim: Claim, rows: Rows) -> Verdict:
    """Returns what the rows say of a claim: against each rival, at 5 %; of many, the hardest to tell is named.

    Where an arm is two-valued, runs that got there are counted (Fisher's exact test); other values are compared by
    Welch's t. A claim that is true by construction is said to be so only if the rows agree.
    """
    arms = (claim.a, *claim.b)
    if missing := [arm for arm in arms if not rows.get(arm)]:
        return Verdict(ABSENT, "", f"no row of {', '.join(missing)}")
    if claim.instead and any(claim.curve not in row["curves"] for arm in arms for row in rows[arm]):
        measure, what = claim.instead
        told = "; ".join(compare(claim._replace(measure=measure, unit=what), rows, b).told for b in claim.b)
        return Verdict(UNTOLD, "", f"no number of these rows' seeds: they keep no {claim.curve}. Kept are {told}")
    found = [compare(claim, rows, b) for b in claim.b] or [against_floor(claim, rows)]
    found.sort(key=lambda x: (x.sign > 0, -x.p))  # those that speak against it, and those told least, come first
    why = "; ".join(x.told for x in (found if len(found) < 3 else found[:1]))
    if len(found) > 2:
        why = f"of {len(found)} rivals the hardest to tell: {why}"
    if all(x.sign > 0 for x in found):
        if not claim.given:
            return Verdict(MEASURED, "reproduces", why)
        there = ", ".join(f"{arm} {share([em(row) for row in rows[arm]])}" for arm in (claim.a, claim.b[0]))
        return Verdict(GIVEN, "", f"{claim.given}. Runs that got there: {there}. ({why})")
    if any(x.sign < 0 for x in found):
        return Verdict(MEASURED, "the opposite holds", why)
    seeds = "; ".join(x.seeds for x in found if x.seeds)
    return Verdict(UNTOLD, "", f"{why}. Seeds an arm that would tell, if these are the true figures: {seeds}")


def compare(claim: Claim, rows: Rows, rival: str) -> Comparison:
    """Returns how a claim's arm compares with one rival."""
    a, b = ([claim.measure(row) for row in rows[arm]] for arm in (claim.a, rival))
    if claim.measure is em and (two_valued(a) or two_valued(b)):
        mine, other = share(a), share(b)
        p = fisher(mine, other)
        x, y = mine.k / mine.n, other.k / other.n
        told = f"{mine} got there, of {rival} {other}: Fisher's p {p:.3f}"
        return Comparison(int(np.sign(x - y)) if p < 0.05 else 0, p, told, settled(x - y, seeds_by_share(x, y), rival))
    if rival in UNTRAINED:
        return _welch(claim, a, [x - b[0] for x in a], None, f"{np.mean(a):.3f} against {b[0]:.3f} of {rival}", rival)
    return _welch(claim, a, a, b, f"{np.mean(a):.3f} against {np.mean(b):.3f} of {rival}", rival)


def against_floor(claim: Claim, rows: Rows) -> Comparison:
    a = [claim.measure(row) for row in rows[claim.a]]
    told = f"{np.mean(a):.2f} {claim.unit}, which is {claim.floor:.2f}"
    return _welch(claim, a, [x - claim.floor for x in a], None, told, "")


def _welch(
    claim: Claim, a: Sequence[float], x: Sequence[float], y: Sequence[float] | None, told: str, rival: str
) -> Comparison:
    """Returns x - y by Welch's t, or x alone against 0."""
    if y is None:
        found, sd = over_seeds(x), 0.0
        p = float(stats.ttest_1samp(x, 0).pvalue) if found.se > 0 else math.nan
    else:
        difference = between_seeds(x, y)
        found, p, sd = difference.interval, difference.p, float(np.std(y, ddof=1)) if len(y) > 1 else 0.0
    if not np.isfinite(found.low) or not found.low < found.high:
        return Comparison(0, math.inf, told, "these give no interval")
    told += f": {found.mean:+.3f} {claim.unit}, 95 % {found.low:+.3f} to {found.high:+.3f}"
    sign = int(found.low > 0) - int(found.high < 0)
    seeds = settled(found.mean, seeds_by_mean(found.mean, float(np.std(a, ddof=1)), sd), rival)
    return Comparison(sign, p, told, "" if sign else seeds)


def settled(difference: float, seeds: int | None, rival: str) -> str:
    """Returns how many seeds an arm would tell a difference of this size in four of five cases."""
    against = f" against {rival}" if rival else ""
    if seeds is None:
        return f"no number up to {MOST:,}{against}"
    return f"{seeds}{against}{' (as the opposite)' if difference < 0 else ''}"
