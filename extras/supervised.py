"""Supervised fine-tuning, for the two SFT rows of Table 1, with the training code of everything else.

A demonstration is a trajectory with advantage 1. Its policy gradient at ratio 1 is the gradient of its tokens'
log-likelihood, so one mini-batch a step, no KL and the token mean make GRPO's update a supervised one. The constants
of Search-R1's SFT rows (axolotl) are not published: T, lr, batch and the schedule are those of this project's flags.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from config import Config, first_instruction
from tasks.questions import Question, draw, em
from extras.prompts import wording
from plumbing.faults import Fault
from population import Instruction, Population, ReplayBuffer
from rollout import Job, Trajectory, encode, prompt_ids

if TYPE_CHECKING:
    from journal.log import Log
    from reflect import Optimizer
    from training.policy import Policy


def supervised(
    cfg: Config, policy: Policy, optimizer: Optimizer | None, D: dict[str, Question], log: Log
) -> tuple[Policy, Instruction]:
    """Trains `policy` on demonstrations, `batch` a step for T steps; returns it with the instruction of all of them.

    With --tools none these are the gold answers; else the policy's own correct rollouts of G a question (rejection
    sampling, as in Search-R1). Raises Fault if it has none. The signature is `inspo`'s.
    """
    instruction = first_instruction(cfg)
    examples = gold_answers(cfg, policy, D, instruction) if cfg.tools == "none" else own_successes(cfg, policy, D, log)
    restored = log.restore(Population(cfg.tau_s, cfg.window))
    P, B = restored or (Population(cfg.tau_s, cfg.window), ReplayBuffer(cfg.buffer))
    if not restored:
        P.join(instruction, None, 0)
        log.started(P)
    for t in log.steps(P, B):
        taus = draw(dict(enumerate(examples)), cfg.batch, cfg.seed, t)
        update = policy.update(t, taus)
        P.attribute(taus)
        log.step(t, taus, P, update)
    return policy, P.best()


def gold_answers(cfg: Config, policy: Policy, D: dict[str, Question], instruction: str) -> list[Trajectory]:
    """Returns a demonstration of each question's first gold answer, in the words that the instruction asks for."""
    tokenizer, target = policy.worker.tokenizer, wording(cfg.model).target
    examples = []
    for k, q in enumerate(D.values()):
        tau = Trajectory(0, q, k, [], 0)
        tau.observe(prompt_ids(tokenizer, instruction, q.text))
        tau.prompt_tokens = len(tau.ids)
        tau.response = target.format(answer=q.golds[0])
        ids = [*encode(tokenizer, tau.response), tokenizer.eos_token_id]
        tau.act(ids, [0.0] * len(ids))
        tau.prediction, tau.stop, tau.reward, tau.advantage = q.golds[0], "answer", 1.0, 1.0
        examples.append(tau)
    return examples


def own_successes(cfg: Config, policy: Policy, D: dict[str, Question], log: Log) -> list[Trajectory]:
    """Returns the first policy's correct rollouts of G a question, of as many questions as the steps can show.

    A resumed run finds them in successes.jsonl: its policy is no longer the first.
    """
    questions = {q.id: q for q in D.values()}
    kept = log.run.rows("successes")
    if not kept:
        asked = list(D.values())[: cfg.T * cfg.batch]
        jobs = [Job(0, first_instruction(cfg), q, k) for k, q in enumerate(asked) for _ in range(cfg.G)]
        taus = policy.rollout(0, "reject", jobs)
        right = [tau for tau in taus if em(tau.prediction, tau.question.golds)]
        log.note(f"rejection sampling: {len(right):,} of {len(taus):,} rollouts are right")
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
    examples = []
    for k, row in enumerate(kept):
        tau = Trajectory(0, questions[row["q"]], k, row["ids"], row["prompt"], row["mask"], [0.0] * len(row["ids"]))
        tau.prediction, tau.stop, tau.reward, tau.advantage = row["said"], "answer", 1.0, 1.0
        examples.append(tau)
    return examples
