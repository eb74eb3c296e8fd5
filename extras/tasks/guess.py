"""A game that several turns decide: find a hidden number; every guess is answered with higher,
lower or right.

    python inspo.py --task extras.tasks.guess:Guess --model Qwen/Qwen2.5-0.5B-Instruct --optimizer_model ...

With 15 numbers and the 4 calls of --max_turns, halving the range always wins.
"""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from extras.tasks.game import Game
from tasks import Question, Trajectory
from tasks.task import rng_of

NUMBERS = 15  # that a question leaves open
LOWEST = range(1, 51)  # the first of them
# of the 750 questions
HELD_OUT = {"test": slice(0, 100), "valid": slice(100, 150), "train": slice(150, None)}
WORST = 10  # however far off, or never guessed at all


class Guess(Game):
    """r(tau) is 10 for the hidden number, otherwise minus the distance of the nearest guess, which
    is the state."""

    tag, noun, argument, plural, result_tag = "guess", "a guess", "number", "guesses", "reply"
    passing_reward: ClassVar[float] = 10.0
    instruction: str = (
        "Find the hidden number. Write a guess inside <guess> and </guess>, for example <guess> 8 </guess>. Between "
        "<reply> and </reply> you are told whether the hidden number is higher or lower, or that you are right. You "
        "have four guesses. To give up, write <answer> none </answer>."
    )

    @cache  # noqa: B019 (a run has one task)
    def questions(self, split: str) -> list[Question]:
        """Returns the same questions in every run: all pairs of a range and a hidden number in it,
        shuffled once."""
        pairs = [(low, low + k) for low in LOWEST for k in range(NUMBERS)]
        order = rng_of(0, 0, "guess").permutation(len(pairs))[HELD_OUT[split]]
        return [
            Question(
                f"{low}-{hidden}",
                f"Which number from {low} to {low + NUMBERS - 1} is hidden?",
                data=hidden,
            )
            for low, hidden in (pairs[k] for k in order)
        ]

    def reset(self, question: Question) -> int:
        return WORST

    def step(self, tau: Trajectory, move: str) -> str:
        above = tau.question.data - int(move)
        tau.state = min(tau.state, abs(above))
        if above:
            return "higher" if above > 0 else "lower"
        tau.stop = "over"
        return "right"

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [-float(tau.state) if tau.state else self.passing_reward for tau in taus]

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        return {"won": float(tau.state == 0), "missed_by": tau.state}

    def show(self, tau: Trajectory) -> str:
        return f"{super().show(tau)}\nThe hidden number was {tau.question.data}."
