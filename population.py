"""The population of instructions: weights, selection, pruning (§3.1, Eq. 4 and 6); the replay
buffer (§3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from config import Config
from plumbing.files import Row
from tasks import Job, Question, Trajectory

Array = npt.NDArray[np.float64]


def mean(rewards: Sequence[float]) -> float:
    """Returns the mean reward; 0 if there is none."""
    return sum(rewards) / max(1, len(rewards))


@dataclass
class Instruction:
    """One instruction I_j with its place in the family tree."""

    id: int
    text: str
    parent: int | None = None  # id of the instruction it revises
    born: int = 0  # step at which it joined
    verified: float | None = None  # its mean reward on D_B when it joined
    left: int | None = None  # step at which it was pruned or replaced
    # not of trajectories: r_bar of the last `window` steps in which it was drawn
    rewards: list[float] = field(default_factory=list)

    @property
    def w(self) -> float:
        """Importance weight: the moving average of r_bar; 0 before the first reward."""
        return mean(self.rewards)


class Population:
    """The active instructions P with their weights W, and every instruction that was ever in P
    (`family`)."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.family: list[Instruction] = []  # by id
        self.ids: list[int] = []  # the active ones: parents first, then in order of joining

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def active(self) -> list[Instruction]:
        return [self.family[j] for j in self.ids]

    def join(
        self, text: str, parent: int | None, t: int, verified: float | None = None
    ) -> Instruction:
        """Adds an instruction with weight 0 and returns it."""
        I = Instruction(len(self.family), text, parent, t, verified)
        self.family.append(I)
        self.ids.append(I.id)
        return I

    def probabilities(self) -> Array:
        """Returns p(. | W; P), (|P|,), in the order of `active`."""
        z = np.array([I.w for I in self.active]) / self.cfg.tau_s
        # less the maximum: the same quotient, and exp cannot overflow
        z = np.exp(z - z.max())
        p: Array = z / z.sum()  # Eq.4
        return p

    def sample(self, rng: np.random.Generator, n: int) -> list[Instruction]:
        """Returns an instruction for each of `n` questions, I ~ p(. | W; P)."""
        active = self.active
        drawn = rng.choice(len(active), size=n, p=self.probabilities())
        return [active[k] for k in drawn]

    def draw_jobs(
        self, rng: np.random.Generator, questions: Sequence[Question], G: int
    ) -> list[Job]:
        """Returns G jobs for each question, a group of Eq. 3, all under one instruction that is
        drawn for it."""
        jobs = []
        instructions = self.sample(rng, len(questions))
        for group, q in enumerate(questions):
            I = instructions[group]
            jobs += [Job(I.id, I.text, q, group)] * G
        return jobs

    def update_weights(self, taus: Iterable[Trajectory]) -> None:
        """Credits each sampled instruction with the mean reward of its trajectories in this step."""  # CHOICE-8
        for j, r_bar in mean_rewards(taus).items():
            I = self.family[j]
            I.rewards = [*I.rewards, r_bar][-self.cfg.window :]  # Eq.6 CHOICE-18

    def ranked(self) -> list[Instruction]:
        """Returns the active instructions, the highest weight first; ties keep the parents first."""
        return sorted(self.active, key=lambda I: -I.w)

    def prune(self, ranked: Sequence[Instruction], N_parent: int, t: int) -> Sequence[Instruction]:
        """Drops the bottom floor(|P|/2) of `ranked`, keeping at least N_parent; returns the dropped
        ones."""
        kept = max(N_parent, len(ranked) - len(ranked) // 2)  # CHOICE-3
        return self._drop(ranked[kept:], t)

    def choose_joining(self, tested: Sequence[RatedCandidate], n: int) -> list[RatedCandidate]:
        """Returns which of a round's candidates, best first, join: at most `n`, with --gate 1 none
        below its parent."""
        # without the gate all pass
        return [c for c in tested if c.r >= c.r_parent or not self.cfg.gate][:n]  # CHOICE-12

    def replace_by(
        self, parents: Sequence[Instruction], new: Sequence[RatedCandidate], t: int
    ) -> None:
        """Replaces P by the parents, with weight 0, and the new ones. Without new ones P and W
        stay."""
        if not new:  # CHOICE-26
            return
        self._drop([I for I in self.active if I not in parents], t)
        self.ids = [I.id for I in parents]  # those that were left, now by rank
        for I in parents:
            I.rewards = []  # the W <- 0 of line 17, only now: CHOICE-26
        for c in new:
            self.join(c.text, c.parent, t, c.r)

    def _drop(self, dropped: Sequence[Instruction], t: int) -> Sequence[Instruction]:
        for I in dropped:
            I.left = t
            self.ids.remove(I.id)
        return dropped

    def best(self) -> Instruction:
        """Returns argmax w; right after an evolution, with all weights 0, that is the first
        parent."""
        return self.ranked()[0]

    def state_dict(self) -> Row:
        return {"family": [asdict(I) for I in self.family], "active": list(self.ids)}

    def load_state_dict(self, state: Row) -> None:
        self.family = [Instruction(**I) for I in state["family"]]
        self.ids = list(state["active"])


def mean_rewards(taus: Iterable[Trajectory | Experience]) -> dict[int, float]:
    """Returns r_bar by instruction id, over all trajectories of that instruction."""
    rewards: dict[int, list[float]] = {}
    for tau in taus:
        if tau.instruction_id is not None:
            rewards.setdefault(tau.instruction_id, []).append(tau.reward)
    return {j: mean(r) for j, r in rewards.items()}


@dataclass
class RatedCandidate:
    """An I_new of line 20 after line 21, whether it joins or not: the rewards (|D_B|,) of it and of
    its parent, on the same questions of D_B."""

    text: str
    parent: int  # id of the instruction it revises
    rewards: list[float]
    parent_rewards: list[float]

    @property
    def r(self) -> float:
        """Its mean reward; 0 where nothing was asked."""
        return mean(self.rewards)

    @property
    def r_parent(self) -> float:
        return mean(self.parent_rewards)


@dataclass(frozen=True)
class Experience:
    """One tuple (I, q, tau, r) in the buffer; tau as the text that the optimizer reads."""

    t: int
    instruction_id: int
    question_id: str
    text: str  # question and response
    golds: tuple[str, ...]
    reward: float
    failed: bool


class ReplayBuffer:
    """B: the last `capacity` trajectories (§3.2)."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.items: list[Experience] = []

    def add(self, t: int, taus: Iterable[Trajectory], texts: Iterable[str]) -> None:
        """Adds the trajectories of step t, as these texts tell them; the oldest leave."""
        for tau, text in zip(taus, texts, strict=True):
            q = tau.question
            assert tau.instruction_id is not None
            self.items.append(
                Experience(t, tau.instruction_id, q.id, text, q.golds, tau.reward, tau.failed)
            )
        self.items = self.items[-self.capacity :]  # CHOICE-29

    def choose_failures(self, rng: np.random.Generator, n: int, parent: int) -> list[Experience]:
        """Returns up to `n` failures, one per question, for the optimizer to learn from.

        Those under the parent, which the optimizer is asked to revise, come before all others;
        then the latest step comes first, and within a step the lowest reward.
        """  # CHOICE-14
        order = rng.permutation(len(self.items))  # ties stand in a random order
        failed = [self.items[k] for k in order if self.items[k].failed]
        # False, for the parent's own, sorts before True
        failed.sort(key=lambda e: (e.instruction_id != parent, -e.t, e.reward))
        first: dict[str, Experience] = {}  # question id -> the first in this order
        for e in failed:
            first.setdefault(e.question_id, e)
        return list(first.values())[:n]

    def choose_question_ids(
        self, rng: np.random.Generator, n: int, shown: Iterable[Experience]
    ) -> list[str]:
        """Returns the ids of up to `n` questions for D_B, latest step first, none of them `shown`."""  # CHOICE-7
        excluded = {e.question_id for e in shown}
        # latest step first, within a step in a random order: `sort` keeps the order of ties
        items = [self.items[k] for k in rng.permutation(len(self.items))]
        items.sort(key=lambda e: -e.t)
        ids = dict.fromkeys(e.question_id for e in items)  # each once, in this order
        return [id for id in ids if id not in excluded][:n]

    def state_dict(self) -> Row:
        return {"items": [vars(e) for e in self.items]}  # not copied: they are frozen

    def load_state_dict(self, state: Row) -> None:
        self.items = [Experience(**item) for item in state["items"]]
