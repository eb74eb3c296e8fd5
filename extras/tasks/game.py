"""Games: a task whose moves are the calls of one tool, and change the state of an episode."""

from __future__ import annotations

from abc import abstractmethod

from config import Config
from tasks import Task, Trajectory
from tasks.tools import WORDS, Function


class Game(Task):
    """A subclass has `questions`, `reset`, `step` and `reward`; the words of its moves are a
    tool's.

    `reset(question)` returns the state with which an episode begins. It is `tau.state`, plain data.
    """

    tag, noun, argument, plural, result_tag = "move", "a move", "move", "moves", "reply"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.tools = [Move(self)]

    @abstractmethod
    def step(self, tau: Trajectory, move: str) -> str:
        """Plays a move: changes `tau.state`, and returns what the policy reads. An exception
        becomes a reply.

        Set `tau.stop` to "over" to end the episode.
        """


class Move(Function):
    """A move of a game as the call of a tool, and in an episode, `tau`, the next one of it."""

    def __init__(self, game: Game, tau: Trajectory | None = None):
        self.game, self.tau = game, tau
        for word in WORDS:
            setattr(self, word, getattr(game, word))

    def bind(self, tau: Trajectory) -> Move:
        return Move(self.game, tau)

    def run(self, argument: str) -> str:
        assert self.tau
        return self.game.step(self.tau, argument)
