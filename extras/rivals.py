"""INSPO's nearest relatives, which train prompts and weights together as well: `--mode espl` and `--mode fst`.

Each is a population, what it does after a step, and a function of the signature of `inspo`. Policy, world, optimizer,
ledger, resume and report are those of INSPO. docs/selection.md lists what is restated and what deviates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import trueskill

from config import Config, first_instruction
from tasks.questions import Question, draw, rng
from plumbing.faults import OptimizerDown
from inspo import ask, jobs_of, reward, verify
from extras.objectives import objective_of, set_advantages
from population import Array, Experience, Instruction, Population, ReplayBuffer
from reflect import Optimizer, crossover_prompt, feedback_prompt, mutation_prompt, normalized
from rollout import Job, Trajectory

if TYPE_CHECKING:
    from journal.log import Log
    from training.policy import Policy

Q = TypeVar("Q")
Evolve = Callable[..., None]
RECENT, TIE = 5, 0.01  # E-SPL: programs to draw from; difference of mean rewards that is a draw
SKILL = trueskill.TrueSkill(mu=25, sigma=25 / 3, beta=25 / 6, tau=25 / 300, draw_probability=0.1)
GROWTH = 1.0  # E-SPL: sigma that a child adds


def alternate(
    cfg: Config, P: Population, evolve: Evolve, policy: Policy, optimizer: Optimizer | None, D: dict[str, Question],
    log: Log,
) -> tuple[Policy, Instruction]:  # fmt: skip
    """Trains `policy` while `evolve` changes P, empty before, every K_e steps; returns it with the best instruction."""
    B = ReplayBuffer(cfg.buffer)
    if restored := log.restore(P):
        P, B = restored
    else:
        P.join(first_instruction(cfg), None, 0)
        log.started(P)
    if log.phase == "evolve" and optimizer:  # the run was stopped inside this evolution: repeat it from its start
        evolve(cfg, log.t, P, B, policy, optimizer, D, log)
    for t in log.steps(P, B):
        questions = draw(D, cfg.batch, cfg.seed, t)
        n = cfg.G if cfg.groups == "question" else 1
        taus = policy.rollout(t, "rollout", jobs_of(P.draw(rng(cfg.seed, t, "instructions"), questions, n), n, cfg.G))
        for tau in taus:
            tau.reward = reward(tau)
        set_advantages(taus, objective_of(cfg), policy.memory)
        update = policy.update(t, taus)
        P.attribute(taus)
        log.step(t, taus, P, update)
        B.add(t, taus)
        if t % cfg.K_e == 0 and t < min(cfg.T, cfg.T_e) and optimizer:  # after the last step nobody would play it
            evolve(cfg, t, P, B, policy, optimizer, D, log)
    return policy, P.best()


# ---- E-SPL


def espl(
    cfg: Config, policy: Policy, optimizer: Optimizer | None, D: dict[str, Question], log: Log
) -> tuple[Policy, Instruction]:
    """E-SPL (2602.14697): the batch's best program mutates after every step, nothing is verified, TrueSkill rates.

    The advantage is r - mean within a program and problem (--objective espl). The newest program is the result.
    """
    return alternate(cfg, Pool(cfg.tau_s, cfg.window, cfg.rivals), offspring, policy, optimizer, D, log)


class Pool(Population):
    """A queue of programs: the newest and some of the latest play the same problems, and TrueSkill rates them by it.

    `rating` is (mu, sigma). Weights stay what they are elsewhere, and nobody is drawn by them.
    """

    def __init__(self, tau_s: float, window: int, rivals: int):
        super().__init__(tau_s, window)
        self.rivals = rivals

    def join(self, text: str, parent: int | None, t: int, verified: float | None = None) -> Instruction:
        I = super().join(text, parent, t, verified)
        I.rating = [SKILL.mu, SKILL.sigma]
        return I

    def draw(self, rng: np.random.Generator, questions: Sequence[Q], n: int = 1) -> list[tuple[Q, Instruction]]:
        """Returns as many pairs as there are questions, of the first of them: all under the same programs."""
        recent = self.active[-RECENT:]
        k = min(self.rivals or RECENT, len(recent))
        others: list[int] = rng.choice(len(recent) - 1, k - 1, replace=False).tolist() if k > 1 else []
        programs = [recent[-1], *(recent[j] for j in sorted(others))]
        return [(q, I) for q in questions for I in programs][: len(questions)]

    def probabilities(self) -> Array:
        """Returns the share of the problems that each active program can expect."""
        m = min(RECENT, len(self.ids))
        k = min(self.rivals or RECENT, m)
        p = np.zeros(len(self.ids))
        p[-m:] = (k - 1) / k / max(1, m - 1)
        p[-1] = 1 / k
        return p

    def attribute(self, taus: Iterable[Trajectory]) -> None:
        """Credits every program with its mean reward, and rates them by the problems that all of them played."""
        taus = list(taus)
        super().attribute(taus)
        played = by_program(taus)
        common = set.intersection(*(set(problems) for problems in played.values()))
        if len(played) > 1 and common:
            self.rate({j: mean(r for q in common for r in problems[q]) for j, problems in played.items()})

    def rate(self, scores: dict[int, float]) -> None:
        """Updates the ratings by the scores of one batch; neighbours at most TIE apart are a draw."""
        order = sorted(scores, key=lambda j: -scores[j])
        ranks = [0]
        for j, after in zip(order, order[1:], strict=False):
            ranks.append(ranks[-1] + (scores[j] - scores[after] > TIE))
        before = [(SKILL.create_rating(*self.rating(j)),) for j in order]
        for j, (rating,) in zip(order, SKILL.rate(before, ranks), strict=True):
            self.family[j].rating = [rating.mu, rating.sigma]

    def rating(self, j: int) -> tuple[float, float]:
        """Returns (mu, sigma)."""
        mu, sigma = self.family[j].rating or (SKILL.mu, SKILL.sigma)
        return mu, sigma

    def ranked(self) -> list[Instruction]:
        """Returns the active programs by falling mu."""
        return sorted(self.active, key=lambda I: -self.rating(I.id)[0])

    def best(self) -> Instruction:
        """Returns the newest program, which is what E-SPL evaluates."""
        return self.active[-1]

    def bear(self, text: str, parents: Sequence[int], t: int) -> Instruction:
        """Adds a child of one or two parents with the rating that follows from theirs.

        mu: theirs, weighted by precision; sigma^2 = 1 / (sum of precisions) + GROWTH^2, which for one is its own + 1.
        """
        precision = [self.rating(j)[1] ** -2 for j in parents]
        mu = sum(p * self.rating(j)[0] for p, j in zip(precision, parents, strict=True)) / sum(precision)
        child = self.join(text, parents[0], t)
        child.other = parents[1] if len(parents) > 1 else None
        child.rating = [mu, math.sqrt(1 / sum(precision) + GROWTH**2)]
        return child

    def forget(self, size: int, t: int) -> None:
        """Drops the oldest programs beyond `size`."""
        self._drop(self.active[: max(0, len(self.ids) - size)], t)


def offspring(
    cfg: Config, t: int, P: Pool, B: ReplayBuffer, policy: Policy, optimizer: Optimizer, D: dict[str, Question],
    log: Log,
) -> None:  # fmt: skip
    """Adds a mutation of the step's best program, and with probability --crossover its child with another one."""
    step = [e for e in B.items if e.t == t]
    played = by_program(step)
    best = max(played, key=lambda j: (mean(r for rewards in played[j].values() for r in rewards), j))
    used = {normalized(I.text) for I in P.active}
    children: list[tuple[str, list[int]]] = []
    shortfall = log.limit(0)
    try:
        if not shortfall and rng(cfg.seed, t, "crossover").random() < cfg.crossover and (found := mate(played, best)):
            other, wins = found
            texts = [[D[q].text for q in wins[j]] for j in (best, other)]
            prompt = crossover_prompt(P.family[best].text, P.family[other].text, *texts)
            golds = [gold for j in (best, other) for q in wins[j] for gold in D[q].golds]
            new = ask(cfg, t, 0, prompt, 1, P.family[best], golds, used, optimizer, log)
            children += [(text, [best, other]) for text in new]
        tried = mixed([e for e in step if e.instruction == best])[: cfg.failures]
        shortfall = shortfall or ("" if tried else f"no question that #{best} got both right and wrong")
        if not shortfall:
            prompt = mutation_prompt(
                P.family[best].text, [(a.text, b.text, b.golds) for a, b in tried], cfg.prompt_budget
            )
            golds = [gold for _, e in tried for gold in e.golds]
            new = ask(cfg, t, 1, prompt, 1, P.family[best], golds, used, optimizer, log)
            children += [(text, [best]) for text in new]
    except OptimizerDown as e:
        shortfall = f"the optimizer gave no reply ({e})"
    joined = [P.bear(text, parents, t) for text, parents in children]
    P.forget(cfg.N_P, t)
    says = f"{len(joined)} joined" if joined else f"nobody joined: {shortfall or 'no well-formed candidate'}"
    mu, sigma = P.rating(best)
    log.joined(t, P, f"best #{best} (rated {mu:.1f} ± {2 * sigma:.1f}); {says}", joined)


Played = dict[int, dict[str, list[float]]]  # rewards by instruction and question


def by_program(rows: Iterable[Trajectory | Experience]) -> Played:
    """Returns the rewards of a step."""
    found: Played = {}
    for row in rows:
        q = row.question if isinstance(row.question, str) else row.question.id
        found.setdefault(row.instruction, {}).setdefault(q, []).append(row.reward)
    return found


def mate(played: Played, best: int) -> tuple[int, dict[int, list[str]]] | None:
    """Returns (the program to cross the best one with, the questions that each program alone won).

    The one with most such questions; None unless both have some.
    """
    wins: dict[int, list[str]] = {j: [] for j in played}
    for q in set.intersection(*(set(problems) for problems in played.values())):
        scores = {j: mean(problems[q]) for j, problems in played.items()}
        winners = [j for j, r in scores.items() if max(scores.values()) - r < TIE]
        if len(winners) == 1:
            wins[winners[0]].append(q)
    wins = {j: sorted(questions) for j, questions in wins.items()}  # a set has no order to resume
    other = max((j for j in wins if j != best), key=lambda j: (len(wins[j]), j), default=best)
    return (other, wins) if other != best and wins[other] and wins[best] else None


def mixed(played: Sequence[Experience]) -> list[tuple[Experience, Experience]]:
    """Returns (a right attempt, a wrong one) of each question that was answered both ways, in the order of the step."""
    right = {e.question: e for e in reversed(played) if e.reward == 1}
    wrong = {e.question: e for e in reversed(played) if e.reward < 1}
    return [(right[q], wrong[q]) for q in dict.fromkeys(e.question for e in played) if q in right and q in wrong]


def mean(x: Iterable[float]) -> float:
    values = list(x)
    return sum(values) / len(values)


# ---- FST


def fst(
    cfg: Config, policy: Policy, optimizer: Optimizer | None, D: dict[str, Question], log: Log
) -> tuple[Policy, Instruction]:
    """FST (2605.12484): a round of GEPA every K_e steps; a question's rollouts are spread over the prompts it keeps.

    They are one group (--groups question), and the loss is CISPO (--objective cispo_cap). The result is the prompt of
    greatest weight.
    """
    return alternate(cfg, Front(cfg.tau_s, cfg.window), gepa, policy, optimizer, D, log)


class Front(Population):
    """The prompts of a Pareto front. All of them take turns on every question."""

    def draw(self, rng: np.random.Generator, questions: Sequence[Q], n: int = 1) -> list[tuple[Q, Instruction]]:
        """Returns `n` pairs for each question: its rollouts go round the prompts, from a random one."""
        active, first = self.active, rng.integers(len(self.ids), size=len(questions))
        return [(q, active[(k + g) % len(active)]) for q, k in zip(questions, first, strict=True) for g in range(n)]

    def probabilities(self) -> Array:
        """Returns the share of the rollouts of each active prompt."""
        return np.full(len(self.ids), 1 / len(self.ids))

    def keep(self, kept: Sequence[int], t: int) -> None:
        """Drops everyone else."""
        self._drop([I for I in self.active if I.id not in kept], t)


def gepa(
    cfg: Config, t: int, P: Front, B: ReplayBuffer, policy: Policy, optimizer: Optimizer, D: dict[str, Question],
    log: Log,
) -> None:  # fmt: skip
    """A round of GEPA: `rounds` revisions of prompts drawn by what they win; the N_P that win most are kept.

    A revision passes if it scores strictly more than its parent on the questions whose failures were shown.
    """
    dice = rng(cfg.seed, t, "gepa")
    D_B = [D[q] for q in B.questions(dice, cfg.D_B, [])]
    shown = ReplayBuffer(cfg.buffer)  # what the optimizer may see: no question that prompts are chosen by
    shown.items = [e for e in B.items if e.question not in {q.id for q in D_B}]
    most = (len(P) + cfg.rounds) * len(D_B) + 2 * cfg.rounds * cfg.failures
    if shortfall := log.limit(most * cfg.gate_samples):
        return log.joined(t, P, f"nobody joined: {shortfall}", [])
    texts = [I.text for I in P.active]
    scores = score(cfg, t, "verify front", policy, texts, D_B, log)  # (prompts, questions)
    wins, used, passed = instance_wins(scores), {normalized(text) for text in texts}, list[tuple[str, int]]()
    for round in range(cfg.rounds):
        I_parent = P.active[dice.choice(len(P), p=wins / wins.sum())]
        tau_fail = shown.failures(dice, cfg.failures, I_parent.id)
        if not tau_fail:
            shortfall = "no failure to learn from"
            break
        prompt = feedback_prompt(I_parent.text, [(e.text, e.golds) for e in tau_fail], cfg.prompt_budget)
        golds = [gold for e in tau_fail for gold in e.golds]
        try:
            I_new = ask(cfg, t, round, prompt, 1, I_parent, golds, used, optimizer, log)
        except OptimizerDown as e:
            shortfall = f"the optimizer gave no reply ({e})"
            break
        if I_new:
            batch = [D[e.question] for e in tau_fail]
            [c] = verify(cfg, t, round, policy, I_parent, I_new, batch, log)
            better = c.r > c.r_parent
            log.verified(t, round, I_parent, batch, [c], [c] if better else [])
            passed += [(c.text, I_parent.id)] * better
    if passed:
        more = score(cfg, t, "verify passed", policy, [text for text, _ in passed], D_B, log)
        scores = np.concatenate([scores, more])
    wins, means = instance_wins(scores), scores.mean(1)
    order = sorted(range(len(scores)), key=lambda k: (-wins[k], -means[k]))[: cfg.N_P]
    kept = [P.ids[k] for k in order if k < len(texts) and wins[k]]
    new = [(k, *passed[k - len(texts)]) for k in sorted(order) if k >= len(texts) and wins[k]]
    if new:
        P.keep(kept, t)
    joined = [P.join(text, parent, t, float(means[k])) for k, text, parent in new]
    says = f"{len(passed)} passed, {len(joined)} joined" if joined else f"nobody joined: {shortfall or 'none wins'}"
    log.joined(t, P, f"front of {len(P)} on {len(D_B)} questions; {says}", joined)


def score(
    cfg: Config, t: int, purpose: str, policy: Policy, texts: Sequence[str], D_B: Sequence[Question], log: Log
) -> Array:
    """Returns the mean rewards (prompts, questions) of the policy under each text."""
    m = cfg.gate_samples
    plays = [(k, text, q, k * len(D_B) + i) for k, text in enumerate(texts) for i, q in enumerate(D_B)]
    taus = policy.rollout(t, purpose, [Job(*play) for play in plays for _ in range(m)])
    log.scored(t, texts, D_B)
    scores: Array = np.array([reward(tau) for tau in taus]).reshape(len(texts), len(D_B), m).mean(2)
    return scores


def instance_wins(scores: Array) -> npt.NDArray[np.int64]:
    """Returns on how many questions each prompt is among the best, of scores (prompts, questions); 0: dominated.

    GEPA's rule: from the lowest mean upwards, a prompt goes if on every question that it wins another that is left
    wins too.
    """
    best = scores == scores.max(0)
    left = np.ones(len(scores), bool)
    for k in np.argsort(scores.mean(1), kind="stable"):
        others = best[left & (np.arange(len(scores)) != k)]
        if len(others) and others[:, best[k]].any(0).all():
            left[k] = False
    return np.where(left, best.sum(1), 0)
