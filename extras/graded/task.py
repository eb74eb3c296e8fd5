"""The task: fill in forms. `--task extras.graded.task:Graded --train WORLD.json`; World.write writes such a file."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from config import Config
from extras.graded.form import EMPTY, START, World, part, random_form
from plumbing.faults import Fault
from tasks import Question, Task, Trajectory, rng_of

SIZES = {"train": 480, "valid": 48, "test": 96}


class Graded(Task):
    """Forms are the same in every world; what they pay is the world's, which --train names."""

    tools = ()
    instruction: ClassVar[str] = START

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if not cfg.train:
            raise Fault("--train is missing: the file of a world, as extras.campaigns.graded writes it")
        self.world = World.read(Path(cfg.train))

    @cache  # noqa: B019 (a run has one task)
    def questions(self, split: str) -> list[Question]:
        rng, out = rng_of(0, 0, f"graded {split}"), []
        for k in range(SIZES[split]):
            form = random_form(rng)
            out.append(Question(f"{split}-{k}", " ".join(part(*line) for line in form), data=form))
        return out

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [self.world.reward(tau.question.data, written(tau)) for tau in taus]

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        """Reward; the share of right marks among those written, 0 if there are none; lines filled in."""
        marks = written(tau)
        filled = [(x, mark) for (_, x), mark in zip(tau.question.data, marks, strict=False) if mark != EMPTY]
        skill = sum(mark == self.world.right(x) for x, mark in filled) / max(1, len(filled))
        return {"reward": tau.reward, "skill": skill, "filled": float(len(filled))}

    def shown(self, tau: Trajectory) -> str:
        """Returns the form with what was written and what each line paid: what an LLM would be shown of a failure."""
        form, marks = tau.question.data, written(tau)
        points = self.world.points(form, marks)
        lines = [
            f"f{line:02d} {'empty' if mark == EMPTY else 'filled'} {pays:+.2f}"
            for (line, _), mark, pays in zip(form, marks, points, strict=False)
        ]
        return f"{super().shown(tau)}\nPaid: {'; '.join(lines)}"


def written(tau: Trajectory) -> list[str]:
    """Returns what the policy wrote, a mark a line."""
    return (tau.prediction or "").split()
