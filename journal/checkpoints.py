"""What a checkpoint holds, and when one is written: policy, population, buffer and the log's books."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from journal.directory import RunDirectory
from journal.log import Log
from plumbing.faults import DiskFault, Fault, Outage
from population import Instruction, Population, ReplayBuffer
from training.policy import Policy


class Checkpoints:
    def __init__(self, run: RunDirectory, policy: Policy, P: Population, B: ReplayBuffer, log: Log):
        self.run, self.policy, self.P, self.B, self.log = run, policy, P, B, log

    def restore(self) -> tuple[int, str]:
        """Restores a run that is resumed; returns the step to take, and where in it to start.

        (1, "") for a run that begins; (t, "evolve") or (t, "evaluate") for one that was stopped inside step t.
        """
        resumed = self.run.rewind(self.policy.damage, self.log.note)
        if not resumed:
            return 1, ""
        path, state = resumed
        self.P.load_state_dict(state["population"])
        self.B.load_state_dict(state["buffer"])
        self.policy.learner.memory = state["memory"]
        self.log.load_state_dict(state)
        t, phase = state["t"], state["phase"]
        self.policy.load(path.absolute(), t)
        return (t, phase) if phase else (t + 1, "")

    def save(self, t: int) -> None:
        """Begins to write the state after step t, or inside it, where the log says so."""
        phase = self.log.phase if t == self.log.t else ""
        state = {"population": self.P.state_dict(), "buffer": self.B.state_dict(), "memory": self.policy.learner.memory}
        self.run.checkpoint(t, self.policy.save, state | self.log.state_dict() | {"phase": phase})

    @contextlib.contextmanager
    def rescued(self) -> Iterator[None]:
        """Saves what a run has done if it is stopped inside, or fails: all but rollouts and evaluations under way.

        Nothing is saved after an update that failed, nor once the ranks have lost contact.
        """
        log = self.log
        try:
            yield
        except DiskFault:  # a checkpoint would not fit either
            raise
        except (Exception, SystemExit) as e:  # a request to stop is one, and a judge may exit
            rolling = log.phase == "rollout"  # else P is whole: an evolution changes it once all rollouts are done
            if not self.policy.in_step or (rolling and self.policy.t == log.t):
                raise
            if log.phase:
                self.save(log.t - rolling)
            if type(e) is Fault:  # of a judge or a task: once it is fixed, the run can go on
                raise Outage(*e.args) from None
            raise

    def export(self, I_star: Instruction) -> None:
        """Writes the result of a run: I_star.txt, and the policy as a plain Hugging Face directory."""
        self.run.settle()
        self.run.write("I_star.txt", I_star.text + "\n")
        with self.run.directory("policy") as path:
            self.policy.export(path)
