"""The population of instructions: weights, selection, pruning (§3.1, Eq. 4 and 6); the replay buffer (§3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rollout import Trajectory

Array = npt.NDArray[np.float64]
Q = TypeVar("Q")


@dataclass
class Instruction:
    """One instruction I_j with its place in the family tree."""

    id: int
    text: str
    parent: int | None = None  # id of the instruction it revises
    born: int = 0  # step at which it joined
    verified: float | None = None  # its mean reward on D_B when it joined
    left: int | None = None  # step at which it was pruned or replaced
    rewards: list[float] = field(default_factory=list)  # r_bar of the last `window` steps that sampled it
    other: int | None = None  # id of a second parent, of a crossover
    rating: list[float] | None = None  # (estimate, standard error) of rules that have one

    @property
    def w(self) -> float:
        """Importance weight: the moving average of r_bar; 0 before the first reward."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


class Population:
    """The active instructions P with their weights W, and every instruction that was ever in P (`family`)."""

    def __init__(self, tau_s: float, window: int):
        self.tau_s, self.window = tau_s, window
        self.family: list[Instruction] = []  # by id
        self.ids: list[int] = []  # the active ones: parents first, then in order of joining
        self.undecided: list[int] = []  # those that the last pruning kept because nothing could be said of them

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def active(self) -> list[Instruction]:
        return [self.family[j] for j in self.ids]

    def join(self, text: str, parent: int | None, t: int, verified: float | None = None) -> Instruction:
        """Adds an instruction with weight 0 and returns it."""
        I = Instruction(len(self.family), text, parent, t, verified)
        self.family.append(I)
        self.ids.append(I.id)
        return I

    def probabilities(self) -> Array:
        """Returns p(. | W; P), (|P|,), in the order of `active`."""
        z: Array = np.array([I.w for I in self.active]) / self.tau_s
        z = np.exp(z - z.max())
        p: Array = z / z.sum()  # Eq.4
        return p

    def sample(self, rng: np.random.Generator, n: int) -> list[Instruction]:
        """Returns an instruction for each of `n` questions, I ~ p(. | W; P)."""
        active = self.active
        return [active[k] for k in rng.choice(len(active), size=n, p=self.probabilities())]

    def draw(self, rng: np.random.Generator, questions: Sequence[Q], n: int = 1) -> list[tuple[Q, Instruction]]:
        """Returns `n` (question, instruction) pairs for each question."""
        return list(zip((q for q in questions for _ in range(n)), self.sample(rng, n * len(questions)), strict=True))

    def attribute(self, taus: Iterable[Trajectory]) -> None:
        """Credits every instruction with the mean reward of its trajectories in this step."""  # CHOICE-8
        for j, r_bar in mean_rewards(taus).items():
            I = self.family[j]
            I.rewards = [*I.rewards, r_bar][-self.window :]  # Eq.6 CHOICE-18

    def ranked(self) -> list[Instruction]:
        """Returns the active instructions by falling weight; ties keep the parents first."""
        return sorted(self.active, key=lambda I: -I.w)

    def prune(self, ranked: Sequence[Instruction], N_parent: int, t: int) -> list[Instruction]:
        """Drops the bottom floor(|P|/2) of `ranked`, never below N_parent; returns the dropped ones."""
        keep = max(N_parent, len(ranked) - len(ranked) // 2)  # CHOICE-3
        return self._drop(ranked[keep:], t)

    def succeed(self, parents: Sequence[Instruction], t: int) -> list[Instruction]:
        """Leaves the parents alone in P, with weight 0; returns the dropped ones (Alg.1 line 17)."""
        dropped = self._drop([I for I in self.active if I not in parents], t)
        self.ids = [I.id for I in parents]
        for I in parents:
            I.rewards = []
        return dropped

    def _drop(self, dropped: Sequence[Instruction], t: int) -> list[Instruction]:
        for I in dropped:
            I.left = t
            self.ids.remove(I.id)
        return list(dropped)

    def best(self) -> Instruction:
        """Returns argmax w; right after an evolution, with all weights 0, that is the first parent."""
        return self.ranked()[0]

    def state_dict(self) -> dict[str, Any]:
        return {"family": [asdict(I) for I in self.family], "active": list(self.ids)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.family = [Instruction(**row) for row in state["family"]]
        self.ids = list(state["active"])


def mean_rewards(taus: Iterable[Trajectory]) -> dict[int, float]:
    """Returns r_bar by instruction id, over all trajectories of that instruction."""
    rewards: dict[int, list[float]] = {}
    for tau in taus:
        rewards.setdefault(tau.instruction, []).append(tau.reward)
    return {j: sum(r) / len(r) for j, r in rewards.items()}


@dataclass(frozen=True)
class Candidate:
    """A revision of an instruction that was verified on D_B."""

    text: str
    parent: int  # id of the instruction it revises
    r: float  # its mean reward on D_B
    r_parent: float  # its parent's on the same questions
    bound: float  # what has to reach r_parent
    worse: bool  # too far below its parent to fill a place that is left


def significantly_worse(r: Sequence[float], r_parent: Sequence[float]) -> bool:
    """Returns whether r (n,) is below r_parent (n,) on the same n questions: exact sign test, one-sided, 5 %."""
    wins: int = sum(a > b for a, b in zip(r, r_parent, strict=True))
    losses = sum(a < b for a, b in zip(r, r_parent, strict=True))
    n = wins + losses  # ties say nothing
    p: float = sum(math.comb(n, k) for k in range(wins + 1)) / 2**n
    return p < 0.05


@dataclass(frozen=True)
class Experience:
    """One tuple (I, q, tau, r) in the buffer; tau as the text that the optimizer reads."""

    t: int
    instruction: int  # id
    question: str  # id
    text: str  # question and response
    golds: tuple[str, ...]
    reward: float


class ReplayBuffer:
    """B: the last `capacity` trajectories (§3.2)."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.items: list[Experience] = []

    def add(self, t: int, taus: Iterable[Trajectory]) -> None:
        """Adds the trajectories of step t; the oldest leave."""
        for tau in taus:
            q, text = tau.question, f"Question: {tau.question.text}\n{tau.response.strip()}"
            self.items.append(Experience(t, tau.instruction, q.id, text, q.golds, tau.reward))
        self.items = self.items[-self.capacity :]

    def failures(self, rng: np.random.Generator, n: int, parent: int) -> list[Experience]:
        """Returns up to `n` failures (reward < 1) of as many questions, for the optimizer to learn from.

        Those under the parent come first, since it is what the optimizer is asked to revise; within both halves the
        latest step and the lowest reward come first.
        """  # CHOICE-14
        order = rng.permutation(len(self.items))
        by_need = sorted((self.items[k] for k in order), key=lambda e: (e.instruction != parent, -e.t, e.reward))
        chosen: dict[str, Experience] = {}
        for e in by_need:
            if e.reward < 1 and len(chosen) < n:
                chosen.setdefault(e.question, e)
        return list(chosen.values())

    def questions(self, rng: np.random.Generator, n: int, shown: Iterable[Experience]) -> list[str]:
        """Returns the ids of up to `n` questions for D_B, latest step first, none of them `shown`."""  # CHOICE-7
        used = {e.question for e in shown}
        order = rng.permutation(len(self.items))
        latest = sorted((self.items[k] for k in order), key=lambda e: -e.t)
        return list(dict.fromkeys(e.question for e in latest if e.question not in used))[:n]

    def state_dict(self) -> dict[str, Any]:
        return {"items": [asdict(e) for e in self.items]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = [Experience(**(row | {"golds": tuple(row["golds"])})) for row in state["items"]]
