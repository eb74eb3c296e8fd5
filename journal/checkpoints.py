"""What a checkpoint holds, and when one is written: the policy's weights and a mark, which is all
else that a resumed run needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from journal.directory import RunDirectory
from plumbing import checkpoint
from plumbing.faults import DiskFault
from plumbing.files import Row, new_directory, remove
from population import Instruction, Population, ReplayBuffer
from training.policy import Policy


class Checkpoints:
    def __init__(self, run: RunDirectory, policy: Policy, P: Population, B: ReplayBuffer, log: Any):
        self.run, self.policy, self.P, self.B, self.log = run, policy, P, B, log
        self.last: Row = {"t": 0}  # the last mark
        # the mark of the newest checkpoint; before there is one, nothing is to be saved
        self.saved = self.last
        self.saving: Future[None] = Future()  # of the newest checkpoint
        self.saving.set_result(None)

    def restore(self) -> tuple[int, int]:
        """Restores a run that is resumed; returns the step to play, and the last step that has been
        trained; (1, 0) of a new run.

        They are equal if the checkpoint was taken before its step's evolution and evaluation.
        """
        resumed = self.run.rewind(self.log.print, self.policy.find_damage)
        if not resumed:
            return 1, 0
        path, mark = resumed
        t, ended = mark["t"], mark["ended"]
        self.P.load_state_dict(mark["population"])
        self.B.load_state_dict(mark["buffer"])
        self.policy.learner.remembered = mark["memory"]
        self.log.row = mark["row"]
        self.log.print(f"resumed {'after' if ended else 'inside'} step {t}")
        self.policy.load(path.absolute(), t)
        self.last = self.saved = mark
        return (t + 1 if ended else t), t

    def mark(self, t: int, ended: bool = False) -> None:
        """Keeps a copy of the run's state: step t has been trained, and unless it has `ended`,
        evolution and evaluation follow.

        Raises the DiskFault of a checkpoint that could not be written.
        """
        if self.saving.done():
            self.wait()
        changing = {
            "population": self.P.state_dict(),
            "memory": self.policy.learner.remembered,
            "row": self.log.row,
        }
        place = {"run": self.run.id, "t": t, "ended": ended, "rows": dict(self.run.written)}
        self.last = copy.deepcopy(changing) | place | {"buffer": self.B.state_dict()}

    def end_step(self, t: int, evaluated: bool = False) -> None:
        """Marks that step t has ended; saves it every --save_every steps, where it was evaluated,
        and in the end."""
        self.mark(t, ended=True)
        if evaluated or (t and t % self.log.cfg.save_every == 0) or t == self.log.cfg.T:
            self.save()

    def save(self) -> None:
        """Begins to write the last mark with the weights, unless it is on disk or an update has
        begun since.

        A thread goes on with it: `wait` waits. Until then a kill leaves the checkpoint before.
        Nothing is saved once the ranks have lost contact.
        """
        mark, policy = self.last, self.policy
        if mark is self.saved or mark["t"] != policy.t or not policy.in_step:
            return
        self.wait()
        with ExitStack() as stack:
            name = f"checkpoints/step-{mark['t']:06d}"
            path = stack.enter_context(new_directory(self.run.path / name))
            policy.save(path)
            # the thread completes the new directory, or removes it
            self.saving = policy.writer.submit(self._complete, stack.pop_all(), path, mark)
        self.saved = mark

    def _complete(self, stack: ExitStack, path: Path, mark: Row) -> None:
        """Adds the mark to weights that have been written, and removes the checkpoints that this
        one replaces."""
        with stack:
            checkpoint.complete(path, mark, self.policy.written.result())
        best = self.run.best()
        for old in self.run.checkpoints()[: -self.log.cfg.keep]:
            if old != best:
                # fails on NFS while somebody reads it: the next save tries again
                with suppress(DiskFault):
                    remove(old)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is there; raises the DiskFault that
        prevented it."""
        self.saving.result()

    @contextmanager
    def save_on_failure(self) -> Iterator[None]:
        """Saves the last mark where a run is stopped inside, or fails, and waits until it is
        written."""
        try:
            yield
        except BaseException as e:
            with suppress(Exception):  # what ended the run comes first
                if not isinstance(e, DiskFault):  # a checkpoint would not fit either
                    self.save()
                self.wait()
            raise

    def export(self, I_star: Instruction) -> None:
        """Writes the result of a run: I_star.txt, and the policy as a plain Hugging Face
        directory."""
        self.wait()
        self.run.write("I_star.txt", I_star.text + "\n")
        with new_directory(self.run.path / "policy") as path:
            self.policy.export(path)
