"""Instructions, their importance weights and their pruning (§3.1, Eq. 4 and 6); the replay buffer (§3.2)."""

from dataclasses import asdict, dataclass, field

import numpy as np


@dataclass
class Instruction:
    """One candidate I_j with its place in the family tree."""

    id: int
    text: str
    parent: int | None = None  # id of the instruction it was made from
    born: int = 0  # step at which it joined
    verified: float | None = None  # its mean reward on D_B when it joined
    left: int | None = None  # step at which it was pruned or replaced
    rewards: list[float] = field(default_factory=list)  # r_bar of the last `window` steps that sampled it

    @property
    def w(self) -> float:
        """Importance weight: the moving average of r_bar over the window; 0 before the first reward."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


class Population:
    """The active instructions P with their weights, and everyone who ever was in it (`family`)."""

    def __init__(self, tau_s: float, window: int):
        self.tau_s, self.window = tau_s, window
        self.family: list[Instruction] = []  # by id
        self.active: list[int] = []  # ids, parents first, then in order of joining

    def __len__(self) -> int:
        return len(self.active)

    @property
    def P(self) -> list[Instruction]:
        return [self.family[j] for j in self.active]

    def join(self, text: str, parent: int | None, t: int, verified: float | None = None) -> Instruction:
        new = Instruction(len(self.family), text, parent, t, verified)
        self.family.append(new)
        self.active.append(new.id)
        return new

    def p(self) -> np.ndarray:
        """Selection probabilities over the active population, (|P|,)."""
        z = np.array([I.w for I in self.P]) / self.tau_s
        z = np.exp(z - z.max())
        return z / z.sum()  # Eq.4

    def sample(self, rng: np.random.Generator, n: int) -> list[Instruction]:
        """One instruction for each of `n` questions, I ~ p(. | W; P)."""
        return [self.P[k] for k in rng.choice(len(self), size=n, p=self.p())]

    def attribute(self, rewards: dict[int, list[float]]) -> None:
        """Credit a step's raw rewards, by instruction id; who was not sampled keeps its window."""  # CHOICE-8
        for j, r in rewards.items():
            I = self.family[j]
            I.rewards = [*I.rewards, sum(r) / len(r)][-self.window :]  # Eq.6

    def ranked(self) -> list[Instruction]:
        """The active instructions by falling weight; ties keep the parents first."""
        return sorted(self.P, key=lambda I: -I.w)

    def prune(self, N_parent: int, t: int) -> list[Instruction]:
        """Drop the bottom floor(|P|/2), never below N_parent; return who left."""  # CHOICE-3
        keep = max(N_parent, len(self) - len(self) // 2)
        gone = self.ranked()[keep:]
        self._remove(gone, t)
        return gone

    def succeed(self, parents: list[Instruction], t: int) -> list[Instruction]:
        """P becomes its parents alone with all weights 0; return who left (Alg.1 line 17)."""
        gone = [I for I in self.P if I not in parents]
        self._remove(gone, t)
        self.active = [I.id for I in parents]
        for I in parents:
            I.rewards = []
        return gone

    def _remove(self, gone: list[Instruction], t: int) -> None:
        for I in gone:
            I.left = t
            self.active.remove(I.id)

    def best(self) -> Instruction:
        """argmax w; right after an evolution all weights are 0 and it is the parent (Alg.1 line 26)."""
        return self.ranked()[0]

    def state_dict(self) -> dict:
        return {"family": [asdict(I) for I in self.family], "active": list(self.active)}

    def load_state_dict(self, state: dict) -> None:
        self.family = [Instruction(**row) for row in state["family"]]
        self.active = list(state["active"])


@dataclass(frozen=True)
class Experience:
    """One tuple (I, q, tau, r) of the buffer; tau as the text that the optimizer reads."""

    t: int
    instruction: int
    question: str  # id
    text: str  # question and response
    golds: tuple[str, ...]
    reward: float


class ReplayBuffer:
    """B: the last `capacity` trajectories, newest first where it matters (§3.2)."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.items: list[Experience] = []

    def add(self, items: list[Experience]) -> None:
        self.items = [*self.items, *items][-self.capacity :]

    def failures(self, rng: np.random.Generator, n: int) -> list[Experience]:
        """`n` trajectories of the lowest reward, of as many questions, from the latest step, earlier ones if short."""
        order = rng.permutation(len(self.items))
        by_need = sorted((self.items[k] for k in order), key=lambda e: (-e.t, e.reward))
        chosen: dict[str, Experience] = {}
        for e in by_need:
            if e.reward < 1 and len(chosen) < n:
                chosen.setdefault(e.question, e)
        return list(chosen.values())

    def questions(self, rng: np.random.Generator, n: int, shown: set[str]) -> list[str]:
        """Ids of at most `n` distinct questions for D_B, latest steps first, none of those `shown`."""  # CHOICE-7
        order = rng.permutation(len(self.items))
        latest = sorted((self.items[k] for k in order), key=lambda e: -e.t)
        return list(dict.fromkeys(e.question for e in latest if e.question not in shown))[:n]

    def state_dict(self) -> dict:
        return {"items": [asdict(e) for e in self.items]}

    def load_state_dict(self, state: dict) -> None:
        self.items = [Experience(**(row | {"golds": tuple(row["golds"])})) for row in state["items"]]
