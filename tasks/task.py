"""The task: what a subclass says, and what it may say."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from config import Config
from plumbing.faults import Fault
from tasks.formats import Tags
from tasks.plugs import find_plug, import_named
from tasks.tools import Tool
from tasks.trajectories import Question, Trajectory

Message = dict[str, str]  # {"role": "system" or "user", "content": ...}


class Task(ABC):
    """A subclass says what is asked (`questions`), what can be called (`tools`) and how it is
    scored (`reward`).

    Every rank makes one from the configuration. Rank 0 alone reads questions, starts servers,
    rewards and measures.
    """

    # what the policy can call: tags, stop strings and messages derive from them
    tools: Sequence[Tool] = ()
    instruction: str = "Answer inside <answer> and </answer>."  # without --instruction
    # the lowest that a right answer earns: below it a trajectory has failed
    passing_reward: ClassVar[float] = 1.0
    at_once: int = sys.maxsize  # episodes that can be played together

    waited = 0.0  # seconds in which all trajectories waited for tools

    def __init__(self, cfg: Config = Config()):  # noqa: B008 (it is frozen)
        self.cfg = cfg

    def tools_of(self, question: Question) -> Sequence[Tool]:
        """Returns those of `tools` that a question's prompt shows."""
        return self.tools

    def make_format(self, tokenizer: Any = None) -> Tags:
        """Returns how calls, answers and results are written (--format); what reads or writes ids
        needs the policy's tokenizer. Raises Fault."""
        name, kind = self.cfg.format, Tags
        if name != "tags":
            flag = f"--format {name}"
            kind = find_plug(flag) or import_named(flag, name, "class")
            if not issubclass(kind, Tags):
                raise Fault(f"{flag}: it does not extend tasks.formats.Tags")
        return kind(self, tokenizer)

    def check(self) -> None:
        """Raises Fault if something that `start` will need is missing; on rank 0, before anything
        is loaded."""

    def start(self, serve: Callable[..., str]) -> str:
        """Starts what the tools need, on rank 0; returns lines for the log: by default which
        functions there are.

        Raises Fault. `serve(*argv)` runs a Python program of this project as a server for as long
        as the run, and returns its URL. It sees no keys: plumbing/servers.py says what it gets of
        the environment.
        """
        names = [tool.tag for tool in self.tools if tool.usage()]
        return f"tools: {', '.join(names)} ({len(names)})" if names else ""

    def address(self) -> Any:
        """Returns what `connect` needs on other ranks, after `start`."""

    def connect(self, address: Any) -> None:
        """Connects another rank's tools to what rank 0 has started."""

    @abstractmethod
    def questions(self, split: str) -> list[Question]:
        """Returns the questions of "train", "valid" (they choose the best checkpoint; may be none)
        or "test"."""

    def prompt(self, instruction: str, question: Question) -> list[Message]:
        """Returns the conversation that the policy continues: one message with instruction and
        question (App. F)."""
        content = f"{instruction}\n\nQuestion: {question.text}\n"  # CHOICE-31
        return [{"role": "user", "content": content}]

    def reset(self, question: Question) -> Any:
        """Returns the state with which an episode begins: `tau.state`, which tools may read and
        change."""

    def finish(self, tau: Trajectory) -> None:
        """Ends an episode: `tau.state` must be plain data from here on, since it is sent between
        processes."""

    @abstractmethod
    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        """Returns r(tau) of each, finite numbers (§2.1).

        Raises Outage, which names who does not answer, if they cannot be had now: the run stops and
        can be resumed.
        """

    def failed(self, tau: Trajectory) -> bool:
        """Returns whether a rewarded trajectory is a failure to learn from (§3.2)."""
        return tau.reward < self.passing_reward

    def show(self, tau: Trajectory) -> str:
        """Returns a trajectory as the optimizer reads it (App. E); right answers, if there are any,
        follow it there."""
        return f"Question: {tau.question.text}\n{tau.response.strip()}"

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        """Returns what is measured of a rewarded trajectory, under the same names for each.

        The first one chooses the best checkpoint and is what a run's last sentence is about.
        """
        return {"reward": tau.reward}
