"""Questions, and what becomes of them: a job for each rollout, its turns, its trajectory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plumbing.files import Row

RECORDED = (
    "instruction group stop reward failed advantage credit prediction invalid prompt_tokens response"
).split()


@dataclass(frozen=True)
class Question:
    """What an episode starts from. `golds`: answers that are right, which the optimizer may see and
    must not give away.

    A task that needs more keeps it in `data`, plain data that can be sent between processes.
    """

    id: str
    text: str
    golds: tuple[str, ...] = ()
    source: str = "data"  # names its data set: metrics are shown for each
    data: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # in a table ids may be numbers, and lists arrays
        object.__setattr__(self, "id", str(self.id))
        golds = self.golds.tolist() if hasattr(self.golds, "tolist") else self.golds
        if golds is None or isinstance(golds, list):
            object.__setattr__(self, "golds", tuple(golds or ()))


@dataclass(frozen=True)
class Job:
    """One rollout to play: a question asked under an instruction."""

    instruction: int | None  # its id in the population; None for a text that is in none
    text: str  # the instruction itself
    question: Question
    group: int  # trajectories of one group are compared (Eq. 3)


@dataclass
class Turn:
    """One action a_k and its observation o_k, as text."""

    text: str
    tool: str = ""  # tag of the tool it called; "" if it called none
    argument: str = ""
    # None if nothing was returned: a call in the last turn is not served
    result: list[str] | None = None


@dataclass
class Trajectory:
    """One rollout tau = (I, q, a_0, o_0, ..., a_k) (§2.1). The lists ids, mask and logps have one
    length."""

    instruction: int | None  # its id in the population; None for a text that is in none
    question: Question
    group: int
    ids: list[int]  # prompt, actions and observations
    prompt_tokens: int
    # I_{i,t} of Eq. 2: 1 on the tokens that the policy sampled
    mask: list[int] = field(default_factory=list)
    # the engine's log-probabilities; 0 where mask is 0
    logps: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)  # how many tokens each turn sampled
    turns: list[Turn] = field(default_factory=list)
    # Why it ended: "answer", "over" (the task ended it), "turns" (none left), "length" (context
    # full), "refused" (by the server of a model that is evaluated).
    stop: str = ""
    response: str = ""  # everything after the prompt
    prediction: str | None = None
    state: Any = None  # the episode's, for the task alone; in the end plain data
    reward: float = 0.0  # r(tau)
    failed: bool = False  # as the task defines it
    advantage: float = 0.0  # A-hat
    # A-hat of each turn, where a learner tells turns apart
    credit: list[float] = field(default_factory=list)

    def act(self, ids: list[int], logps: list[float]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps += logps
        self.turn_tokens.append(len(ids))

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def served(self, tool: str) -> int:
        """Returns how many calls of this tool were answered."""
        return sum(turn.tool == tool and turn.result is not None for turn in self.turns)

    @property
    def invalid(self) -> int:
        """Turns that neither called a tool nor answered."""
        without_call = sum(not turn.tool for turn in self.turns)
        return without_call - (self.stop == "answer")

    def drop_tokens(self) -> Trajectory:
        """Returns a copy without tokens, which is enough for rewards and metrics."""
        return replace(self, ids=[], mask=[], logps=[], turn_tokens=[])

    def record(self) -> Row:
        """Returns a row for `trajectories/`: everything but the token arrays."""
        q = self.question
        return {
            "question": q.id,
            "question_text": q.text,
            "source": q.source,
            "golds": q.golds,
            **{name: getattr(self, name) for name in RECORDED},
            "action_tokens": sum(self.mask),
            "tokens": len(self.ids),
            "turns": [asdict(turn) for turn in self.turns],
        }
