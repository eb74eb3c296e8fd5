"""E-SPL (arXiv 2602.14697): the best prompt of every batch mutates, nothing is verified, TrueSkill
rates.

    python extras/espl.py --crossover 0.2      # and the flags of inspo.py

Read: the paper and the authors' code (LunjunZhang/E-SPL, MIT, 2026-02-25), of which no line is
copied. Policy, world, optimizer, ledger, resume and report are those of INSPO. docs/selection.md
lists what is restated and what deviates.
"""

if not __package__:
    import root  # noqa: F401
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import trueskill
from pydantic import Field
from pydantic.dataclasses import dataclass

import inspo
from config import Config, Natural
from extras.objectives import ObjectiveConfig, ObjectiveLearner
from inspo import Evolution
from plumbing.faults import OptimizerDown
from population import Array, Experience, Instruction, Population, mean_rewards
from reflect import PROMPT_BUDGET, fold_words, format_examples, shorten
from tasks import Job, Question, Trajectory
from tasks.task import rng_of
from training.policy import Policy

RECENT, TIE = 5, 0.01  # programs to draw from; difference of mean rewards that is a draw
SKILL = trueskill.TrueSkill(mu=25, sigma=25 / 3, beta=25 / 6, tau=25 / 300, draw_probability=0.1)
GROWTH = 1.0  # sigma that a child adds
NEVER = 1_000_000  # more steps than any run has
PRESET: dict[str, Any] = dict(N_P=100, K_e=1, T_e=NEVER, K_p=NEVER, D_B=0, objective="espl")

# Prompts in words of our own; an example has the form of App. E's.
MUTATION = """An agent works by this instruction:

<ins_0>
{instruction}
</ins_0>

It tried the questions below several times each, and was sometimes right and sometimes wrong. Here are a right and a
wrong attempt at each:

{attempts}

What did the right attempts do that the wrong ones left out? Change the instruction in at most two places so that it
says so: fix a sentence or add one, of at most 32 words, that holds for other questions too.
{one}"""

CROSSOVER = """An agent was tried under two instructions on the same questions. The first did better on the whole:

<ins_0>
{instruction}
</ins_0>

It alone was right on:
{first}

The other one:

<other>
{other}
</other>

It alone was right on:
{second}

What does each of them do for its own questions? Write one instruction that keeps what the first does well and takes
over from the other what the first lacks.
{one}"""

ONE = """Keep every XML tag <...> of the instruction, each with its </...>, and name no question or answer of these.
Put the new instruction into <ins_1>...</ins_1>."""


@dataclass(frozen=True)
class ESPLConfig(ObjectiveConfig):
    """E-SPL (docs/selection.md)"""

    mode: Literal["espl"] = "espl"  # type: ignore[assignment]
    """espl"""
    rivals: Natural = 3
    """programs that play the same problems: the newest and some of the latest; 0: all"""
    crossover: Annotated[float, Field(ge=0, le=1)] = 0.0
    """probability of a child of two parents in a step"""

    def find_fault(self) -> str:
        if self.rivals == 1:
            return "--rivals 1: one program alone has no rival; give 2 or more, or 0 for all"
        return check_buffer(self, "E-SPL")


def check_buffer(cfg: Config, name: str) -> str:
    """Says what is wrong with --buffer for a method of this name, which reads all that a step has
    played."""
    step = cfg.batch * cfg.G
    return f"--buffer {cfg.buffer}: {name} learns from whole steps of {step} trajectories" * (
        cfg.buffer < step
    )


class Pool(Population):
    """A queue of programs: the newest and some of the latest play the same problems, and TrueSkill
    rates them by it.

    Weights are what they are elsewhere, but no program is drawn by them.
    """

    cfg: ESPLConfig

    def __init__(self, cfg: ESPLConfig):
        super().__init__(cfg)
        self.ratings: list[tuple[float, float]] = []  # mu and sigma, by id

    def join(
        self, text: str, parent: int | None, t: int, verified: float | None = None
    ) -> Instruction:
        self.ratings.append((SKILL.mu, SKILL.sigma))
        return super().join(text, parent, t, verified)

    def draw_jobs(
        self, rng: np.random.Generator, questions: Sequence[Question], G: int
    ) -> list[Job]:
        """Makes as many groups as there are questions, of the first of them: all under the same
        programs."""
        recent = self.active[-RECENT:]
        k = min(self.cfg.rivals or RECENT, len(recent))
        others: list[int] = (
            rng.choice(len(recent) - 1, k - 1, replace=False).tolist() if k > 1 else []
        )
        programs = [recent[-1], *(recent[j] for j in sorted(others))]
        played = [(q, I) for q in questions for I in programs][: len(questions)]
        return [
            Job(I.id, I.text, q, group) for group, (q, I) in enumerate(played) for _ in range(G)
        ]

    def probabilities(self) -> Array:
        """Returns the share of the problems that each active program can expect."""
        m = min(RECENT, len(self.ids))
        k = min(self.cfg.rivals or RECENT, m)
        p = np.zeros(len(self.ids))
        p[-m:] = (k - 1) / k / max(1, m - 1)
        p[-1] = 1 / k
        return p

    def update_weights(self, taus: Iterable[Trajectory]) -> None:
        """Credits every program with its mean reward, and rates them by the problems that all of
        them played."""
        taus = list(taus)
        super().update_weights(taus)
        common = played_by_all((tau.instruction_id, tau.question.id) for tau in taus)
        self.rate(mean_rewards(tau for tau in taus if tau.question.id in common))

    def rate(self, means: dict[int, float]) -> None:
        """Updates the ratings by the mean rewards of one batch; neighbours at most TIE apart are a
        draw."""
        if len(means) < 2:
            return
        order = sorted(means, key=lambda j: -means[j])
        ranks = [0]
        for j, after in zip(order, order[1:], strict=False):
            ranks.append(ranks[-1] + (means[j] - means[after] > TIE))
        before = [(SKILL.create_rating(*self.ratings[j]),) for j in order]
        for j, (rating,) in zip(order, SKILL.rate(before, ranks), strict=True):
            self.ratings[j] = rating.mu, rating.sigma

    def ranked(self) -> list[Instruction]:
        """Returns the active programs by falling mu."""
        return sorted(self.active, key=lambda I: -self.ratings[I.id][0])

    def best(self) -> Instruction:
        """Returns the newest program, which is what E-SPL evaluates."""
        return self.active[-1]

    def bear(self, text: str, parents: Sequence[int], t: int) -> Instruction:
        """Adds a child of one or two parents with the rating that follows from theirs.

        mu: theirs, weighted by precision; sigma^2 = 1 / (sum of precisions) + GROWTH^2, which for
        one is its own + 1.
        """
        precision = [self.ratings[j][1] ** -2 for j in parents]
        mu = sum(p * self.ratings[j][0] for p, j in zip(precision, parents, strict=True)) / sum(
            precision
        )
        child = self.join(text, parents[0], t)
        self.ratings[child.id] = mu, math.sqrt(1 / sum(precision) + GROWTH**2)
        return child

    def forget(self, size: int, t: int) -> None:
        """Drops the oldest programs beyond `size`."""
        self._drop(self.active[: max(0, len(self.ids) - size)], t)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ratings": self.ratings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.ratings = [(mu, sigma) for mu, sigma in state["ratings"]]


class FromOne(Evolution):
    """Begins with the first instruction, without paraphrases of it."""

    def fill_population(self) -> None:
        self.P.join(self.task.instruction, None, 0)
        self.log.write_event(0, "start", self.P)


class ESPL(FromOne):
    """After every step its best program mutates, and may be crossed with another."""

    cfg: ESPLConfig
    P: Pool

    def evolve(self, t: int, policy: Policy) -> None:
        """Adds a mutation of the step's best program, and with probability --crossover its child
        with another one."""
        cfg, P, D = self.cfg, self.P, self.D
        if t == cfg.T:  # no step would play what is new
            return
        step = [e for e in self.B.items if e.t == t]
        means = mean_rewards(step)
        best = max(means, key=lambda j: (means[j], j))
        self.t, self.used = t, {fold_words(I.text) for I in P.active}
        children: list[tuple[str, list[int]]] = []
        tried = mixed([e for e in step if e.instruction_id == best])[: cfg.failures]
        shortfall = (
            "no well-formed candidate"
            if tried
            else f"no question that #{best} got both right and wrong"
        )
        try:
            crossed = rng_of(cfg.seed, t, "crossover").random() < cfg.crossover
            if crossed and (pair := mate(step, best)):
                other, wins = pair
                texts = [[D[q].text for q in wins[j]] for j in (best, other)]
                prompt = crossover_prompt(P.family[best].text, P.family[other].text, *texts)
                golds = [gold for j in (best, other) for q in wins[j] for gold in D[q].golds]
                self.round = 0
                children += [
                    (text, [best, other]) for text in self.ask(P.family[best], prompt, golds, 1)
                ]
            if tried:
                prompt = mutation_prompt(P.family[best].text, tried, PROMPT_BUDGET)
                golds = [gold for _, e in tried for gold in e.golds]
                self.round = 1
                children += [(text, [best]) for text in self.ask(P.family[best], prompt, golds, 1)]
        except OptimizerDown as e:
            shortfall = f"the optimizer gave no reply ({e})"
        joined = [P.bear(text, parents, t) for text, parents in children]
        P.forget(cfg.N_P, t)
        mu, sigma = P.ratings[best]
        outcome = f"{len(joined)} joined" if joined else f"none joined: {shortfall}"
        outcome = f"best #{best} (rated {mu:.1f} ± {2 * sigma:.1f}); {outcome}"
        self.log.write_event(t, "evolve", P, outcome)


def mutation_prompt(
    instruction: str, tried: Sequence[tuple[Experience, Experience]], budget: int
) -> str:
    """Asks for a small change after questions `tried`: a right attempt and a wrong one at each."""
    half = budget // 2
    wrong = format_examples([(e.text, e.golds) for _, e in tried], half)
    right = [shorten(e.text, half // len(tried)) for e, _ in tried]
    attempts = [f"<right>\n{a}\n</right>\n{b}" for a, b in zip(right, wrong, strict=True)]
    return MUTATION.format(instruction=instruction, attempts="\n".join(attempts), one=ONE)


def crossover_prompt(
    instruction: str, other: str, first: Sequence[str], second: Sequence[str]
) -> str:
    """Asks for a child of two instructions, given the questions that only one of them got right."""
    won = {"first": "\n".join(first), "second": "\n".join(second)}
    return CROSSOVER.format(instruction=instruction, other=other, one=ONE, **won)


def played_by_all(plays: Iterable[tuple[int | None, str]]) -> set[str]:
    """Returns the problems that every program of these (program, problem) pairs has played."""
    problems: dict[int | None, set[str]] = {}
    for j, q in plays:
        problems.setdefault(j, set()).add(q)
    return set.intersection(*problems.values())


def mate(step: Sequence[Experience], best: int) -> tuple[int, dict[int, list[str]]] | None:
    """Returns (the program to cross the best one with, the questions that only one program won, by
    program).

    The one with most such questions; None unless both have some.
    """
    wins: dict[int, list[str]] = {e.instruction_id: [] for e in step}
    for q in sorted(played_by_all((e.instruction_id, e.question_id) for e in step)):
        means = mean_rewards(e for e in step if e.question_id == q)
        winners = [j for j, r in means.items() if max(means.values()) - r < TIE]
        if len(winners) == 1:
            wins[winners[0]].append(q)
    other = max((j for j in wins if j != best), key=lambda j: (len(wins[j]), j), default=best)
    return (other, wins) if other != best and wins[other] and wins[best] else None


def mixed(played: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
    """Returns (a right attempt, a wrong one) of each question that was answered both ways, in the
    order of the step."""
    right = {e.question_id: e for e in reversed(played) if not e.failed}
    wrong = {e.question_id: e for e in reversed(played) if e.failed}
    return [
        (right[q], wrong[q])
        for q in dict.fromkeys(e.question_id for e in played)
        if q in right and q in wrong
    ]


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, ESPLConfig, ObjectiveLearner, Pool, ESPL, **PRESET)


if __name__ == "__main__":
    main()
