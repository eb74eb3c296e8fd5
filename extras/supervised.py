"""Supervised fine-tuning, for the SFT rows of Table 1 and for a cold start, with the training code
of everything else.

A demonstration is a trajectory with advantage 1. Its policy gradient at ratio 1 is the gradient of
its tokens' log-likelihood, so one mini-batch a step, no KL and the token mean make GRPO's update a
supervised one. The constants of Search-R1's SFT rows (axolotl) are not published: T, lr, batch and
the schedule are those of this project's flags.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from config import Config
from extras.prompts import wording
from grpo import Array, Learner, LossInputs
from inspo import Evolution
from log import Log
from plumbing.chat import turn_ends
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from population import Instruction
from run import Checkpoints, Run
from tasks import Job, Question, Task, Trajectory
from tasks.task import draw_questions, rng_of, set_rewards
from tasks.tools import encode
from training.policy import Policy, of_rank_0, on_all_ranks

# in a run: the file that it learns from, the rows held out, their log-prob
DEMONSTRATIONS = "demonstrations.json"
HELD_OUT = 64  # demonstrations at most that are never trained on


class Demonstrated(Learner):
    """Averages over the tokens of a mini-batch. Demonstrations were not sampled: their log-probs
    prove nothing."""

    MAX_GAP: ClassVar[dict[str, float]] = dict.fromkeys(Learner.MAX_GAP, math.inf)

    def make_loss_inputs(self, minibatch: list[Trajectory], old: Array | None) -> LossInputs:
        inputs = super().make_loss_inputs(minibatch, old)
        n = len(inputs["token_weight"])
        return inputs | {"token_weight": np.full(n, 1 / max(1, n))}


def supervised(
    cfg: Config,
    task: Task,
    policy: Policy,
    evolution: Evolution,
    checkpoints: Checkpoints,
    log: Log,
) -> tuple[Policy, Instruction]:
    """Trains `policy` on the questions of its task; returns it with the instruction of all
    demonstrations.

    Without tools these are the gold answers; else the policy's own correct rollouts of G a question
    (rejection sampling, as in Search-R1). Raises Fault if it has none. The signature is `inspo`'s.
    """
    examples = (
        own_successes(policy, evolution)
        if task.tools
        else gold_answers(task, policy, evolution.D.values())
    )
    return imitate(examples, policy, evolution, checkpoints)


def imitate(
    examples: list[Trajectory], policy: Policy, evolution: Evolution, checkpoints: Checkpoints
) -> tuple[Policy, Instruction]:
    """Trains `policy` on demonstrations, `batch` a step for T steps; returns it with the first
    instruction."""
    cfg, P, log = evolution.cfg, evolution.P, evolution.log
    start = checkpoints.restore()
    if not P.family:
        evolution.fill_population()
        log.write_start(policy.evaluate(0, P.best(), "test"))
        checkpoints.end_step(0)
    for t in range(start, cfg.T + 1):
        taus = draw_questions(dict(enumerate(examples)), cfg.batch, cfg.seed, t)
        update = policy.update(t, taus)
        if "logp_gap" in update:  # not where every optimizer step was skipped
            # No engine sampled a demonstration: the "gap" to log-probs of 0 is the trainer's
            # log-prob itself.
            update["logp"] = -update["logp_gap"]
            update = {name: x for name, x in update.items() if "logp_gap" not in name}
        log.add_update(update | {"time/update": policy.seconds["update"]}, P)
        evaluated = cfg.eval_every > 0 and t % cfg.eval_every == 0
        if evaluated:
            with log.timing("evaluate"):
                for split in ("valid", "test") if t < cfg.T else ("valid",):
                    log.add_evaluation(split, policy.evaluate(t, P.best(), split))
        log.end_step(t)
        checkpoints.end_step(t, evaluated)
    return policy, P.best()


def gold_answers(task: Task, policy: Policy, D: Iterable[Question]) -> list[Trajectory]:
    """Demonstrates each question's first gold answer, in the words that the instruction asks
    for."""
    tokenizer, target = policy.tokenizer, wording(task.cfg.model).target
    examples = []
    for k, q in enumerate(D):
        ids = task.make_format(tokenizer).encode_prompt(task.instruction, q)
        tau = demonstration(q, k, ids, [0] * len(ids), len(ids), q.golds[0])
        tau.response = target.format(answer=q.golds[0])
        written = [*encode(tokenizer, tau.response), turn_ends(tokenizer)[0]]
        tau.act(written, [0.0] * len(written))
        examples.append(tau)
    return examples


def own_successes(policy: Policy, evolution: Evolution) -> list[Trajectory]:
    """Collects the first policy's correct rollouts of G a question, of as many questions as the
    steps can show.

    A resumed run finds them in successes.jsonl: its policy is no longer the first.
    """
    cfg, task, D, log = evolution.cfg, evolution.task, evolution.D, evolution.log
    kept = read_jsonl(log.run.path / "successes.jsonl")
    if not kept:
        some = list(D.values())[: cfg.T * cfg.batch]
        jobs = [Job(0, task.instruction, q, k) for k, q in enumerate(some) for _ in range(cfg.G)]
        taus = policy.rollout(0, "reject", jobs)
        set_rewards(task, taus)
        right = [tau for tau in taus if not tau.failed]
        log.print(f"rejection sampling: {len(right):,} of {len(taus):,} rollouts are right")
        if not right:
            raise Fault(
                "no rollout of the first policy is right, so there is nothing to learn from; start from another"
            )
        kept = [
            {
                "q": tau.question.id,
                "ids": tau.ids,
                "mask": tau.mask,
                "prompt": tau.prompt_tokens,
                "said": tau.prediction,
            }
            for tau in right
        ]
        log.run.write("successes.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
    return [
        demonstration(D[row["q"]], k, row["ids"], row["mask"], row["prompt"], row["said"])
        for k, row in enumerate(kept)
    ]


def demonstration(
    q: Question, k: int, ids: list[int], mask: list[int], prompt_tokens: int, answer: str | None
) -> Trajectory:
    """Makes the k-th trajectory to imitate."""
    tau = Trajectory(0, q, k, ids, prompt_tokens, mask, [0.0] * len(ids))
    tau.prediction, tau.stop, tau.reward, tau.advantage = answer, "answer", 1.0, 1.0
    return tau


@on_all_ranks(of_rank_0)
def mean_logp(policy: Policy, taus: list[Trajectory]) -> float:
    """Averages the log-probability of the demonstrations' learned tokens under the present policy,
    in nats."""
    policy.sleep()  # as for an update
    return float(policy.learner.score_tokens(taus)[0].mean())


# ---- the cold start (extras/cold_start.py)


def learn(
    demos: dict[int, Trajectory],
    cfg: Any,
    task: Task,
    policy: Policy,
    evolution: Evolution,
    checkpoints: Checkpoints,
    log: Log,
) -> tuple[Policy, Instruction]:
    """Trains `policy` on the demonstrations of a ColdStartConfig, and measures those held out
    before and after."""
    aside = hold_out(list(demos), cfg.seed)
    digest = hashlib.sha256(Path(cfg.demos).read_bytes()).hexdigest()
    about = {"file": cfg.demos, "digest": digest, "held_out": aside}
    remember(log.run, about)
    learned, unseen = (
        [tau for line, tau in demos.items() if line not in set(aside)],
        [demos[line] for line in aside],
    )
    n = len(learned)
    answered = sum(tau.stop == "answer" for tau in learned)
    calls = sum(tau.served(tool.tag) for tau in learned for tool in task.tools)
    log.print(
        f"{n:,} demonstrations to learn, {len(aside)} held out: {answered / n:.0%} answer,"
        f" {calls / n:.1f} calls and {sum(sum(tau.mask) for tau in learned) / n:.0f} learned tokens each"
    )
    # of the first policy: no checkpoint is loaded yet
    before = mean_logp(policy, unseen) if unseen else 0.0
    trained = imitate(learned, policy, evolution, checkpoints)
    if unseen:
        after = mean_logp(policy, unseen)
        log.run.write(DEMONSTRATIONS, json.dumps(about | {"log_prob": [before, after]}, indent=1))
        log.print(
            f"log-prob of a token of the held-out demonstrations: {before:.3f} before, {after:.3f} after"
        )
    return trained


def hold_out(lines: Sequence[int], seed: int) -> list[int]:
    """Draws a tenth of the lines, HELD_OUT at most: these are never trained on."""
    order = rng_of(seed, 0, "demonstrations").permutation(len(lines))
    return sorted(lines[k] for k in order[: min(HELD_OUT, len(lines) // 10)])


def remember(run: Run, about: dict[str, Any]) -> None:
    """Writes what is learned into a run; Fault if a resumed one has learned from other rows."""
    file = run.path / DEMONSTRATIONS
    if file.is_file() and json.loads(file.read_bytes())["digest"] != about["digest"]:
        raise Fault(
            f"--demos {about['file']} has changed since this run began: restore it, or start a new run"
        )
    run.write(DEMONSTRATIONS, json.dumps(about, indent=1))
