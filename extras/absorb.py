"""Absorbing an instruction: the policy learns to do untold what it does when told (after OPCD, arXiv 2602.12275).

    python extras/absorb.py --model runs/NAME/policy --teacher runs/NAME/I_star.txt     # and the flags of inspo.py

Every step plays questions under the first instruction. Each sampled token is then scored twice: by the policy in
training, as it was sampled, and by the teacher, behind a prompt that holds its instruction. The difference of the two
log probabilities is the token's advantage, in Eq. 2's place for it: in expectation over what the policy samples that is
the gradient of the reverse KL divergence to the prompted policy, token by token, the teacher held still. No reward
takes part; it is measured.

The teacher is the policy as it was at the start, pi_ref. With `--teacher_weights step` it moves with the policy, and
the two can agree on what neither did: in the graded world (docs/graded.md) on empty forms. From the papers'
descriptions, without their code.
"""

if not __package__:
    import root  # noqa: F401
from plumbing import stop  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from config import Config, knob, parse, read_instruction
from extras.alternate import alternate
from grpo import Array, Learner, Terms, micro_batches
from inspo import train
from journal.log import Log
from models import lora
from models.model import load_tokenizer
from population import Instruction, Population
from reflect import Optimizer
from rollout import prompt_ids
from tasks import Task, Trajectory, load_task
from tasks.tools import stop_strings
from training.policy import Policy


@dataclass(frozen=True)
class AbsorbConfig(Config):
    """absorbing an instruction"""

    PROGRAM: ClassVar[str] = "extras/absorb.py"
    FIXED: ClassVar[tuple[str, ...]] = ("absorb",)
    mode: str = knob("absorb", "absorb", of=("absorb",), more=True)
    teacher: str = knob("", "file with the instruction to absorb")
    teacher_weights: str = knob("start", "whose weights the teacher has: the first policy's, or this step's",
                                of=("start", "step"))  # fmt: skip

    def check(self) -> str:
        if self.teacher_weights == "start" and not self.beta:
            return "--beta 0 keeps no first policy to teach: give a --beta above 0, or --teacher_weights step"
        if not self.teacher:
            return "--teacher is missing: give the file of the instruction to absorb, such as a run's I_star.txt"
        if not self.dry_run and not Path(self.teacher).is_file():
            return f"--teacher {self.teacher}: no such file"
        return ""


class AbsorbLearner(Learner):
    """Its advantages are those of tokens: log pi(y | teacher's instruction) - log pi(y | first instruction)."""

    cfg: AbsorbConfig

    @cached_property
    def prompts(self) -> tuple[Any, Task, str]:
        task = load_task(self.cfg)
        tokenizer = load_tokenizer(self.cfg.model, stop_strings(task.tools))
        return tokenizer, task, read_instruction("teacher", self.cfg.teacher)

    def told(self, tau: Trajectory) -> Trajectory:
        """Returns the trajectory as if it had been sampled under the teacher's instruction."""
        tokenizer, task, instruction = self.prompts
        n, prompt = tau.prompt_tokens, prompt_ids(tokenizer, task, instruction, tau.question)
        zeros = [0] * len(prompt)
        return replace(
            tau, ids=prompt + tau.ids[n:], prompt_tokens=len(prompt), mask=zeros + tau.mask[n:],
            logps=[0.0] * len(prompt) + tau.logps[n:],
        )  # fmt: skip

    def set_advantages(self, taus: Sequence[Trajectory]) -> None:
        """Nothing: rewards teach nothing here."""

    def terms(self, part: list[Trajectory], share: list[list[int]], k: int, old: Array | None) -> Terms:
        teacher = [self.told(tau) for tau in part]
        lots = micro_batches(teacher, self.cfg.micro_tokens, self.ranks)[self.rank :: self.ranks]
        now = self.score(part, share) if old is None else old
        return super().terms(part, share, k, old) | {"adv": self.taught(teacher, lots)[0] - now[0]}

    def taught(self, part: list[Trajectory], share: list[list[int]]) -> Array:
        """Returns what `score` does, by the teacher's weights."""
        if self.cfg.teacher_weights == "step":
            return self.score(part, share)
        policy, self.model = self.model, self.reference
        try:
            with lora.off(self.reference):
                return self.score(part, share)
        finally:
            self.model = policy


def absorb(
    cfg: AbsorbConfig, task: Task, policy: Policy, optimizer: Optimizer | None, P: Population, log: Log
) -> tuple[Policy, Instruction]:
    """Trains `policy` under the first instruction towards itself under the teacher's; returns it with the first one."""
    return alternate(cfg, task, policy, None, P, log, lambda *_: None)


def main(argv: list[str] | None = None) -> None:
    train(parse(argv, AbsorbConfig, N_P=1, N_parent=1, T_e=0), absorb, learner=AbsorbLearner)


if __name__ == "__main__":
    main()
