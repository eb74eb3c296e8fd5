"""FST (arXiv 2605.12484): a round of GEPA every K_e steps; a question's rollouts are spread over
the prompts it keeps.

    python extras/fst.py      # and the flags of inspo.py

Read: the paper's abstract and its authors' post, not its code, which is on their site alone; GEPA
(gepa-ai/gepa, MIT) from its documentation. Policy, world, optimizer, ledger, resume and report are those of INSPO.
docs/selection.md lists what is restated and what deviates.
"""

if not __package__:
    import root  # noqa: F401
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic.dataclasses import dataclass

import inspo
from extras.espl import NEVER, FromOne, check_buffer
from extras.objectives import ObjectiveConfig, ObjectiveLearner
from plumbing.faults import OptimizerDown
from population import Array, Experience, Population, ReplayBuffer
from reflect import PROMPT_BUDGET, fold_words, format_examples
from tasks import Job, Question
from tasks.task import rng_of
from training.policy import Policy

PRESET: dict[str, Any] = dict(N_P=4, K_e=6, T_e=NEVER, K_p=NEVER, rounds=4, objective="cispo_cap")

# A prompt in words of our own; an example has the form of App. E's.
FEEDBACK = """I gave an agent this instruction:

<ins_0>
{instruction}
</ins_0>

These are attempts of its that went wrong, with the answers that were wanted:

{examples}

Work out what it did and what it should have done, and write a new instruction for the same task that tells it.
Keep every XML tag <...> of the instruction, each with its </...>, and name no question or answer of these.
Put the new instruction into <ins_1>...</ins_1>."""


@dataclass(frozen=True)
class FSTConfig(ObjectiveConfig):
    mode: Literal["fst"] = "fst"  # type: ignore[assignment]
    """fst"""

    def find_fault(self) -> str:
        if self.D_B < 1:
            return f"--D_B {self.D_B}: FST chooses prompts by what they win on D_B; 1 at least"
        return check_buffer(self, "FST")


class Front(Population):
    """The prompts of a Pareto front. All of them take turns on every question, whose rollouts are
    one group."""

    def draw_jobs(
        self, rng: np.random.Generator, questions: Sequence[Question], G: int
    ) -> list[Job]:
        """Makes G jobs for each question: its rollouts go round the prompts, from a random one."""
        active, first = self.active, rng.integers(len(self.ids), size=len(questions))
        drawn = [
            (q, [active[(k + g) % len(active)] for g in range(G)])
            for q, k in zip(questions, first, strict=True)
        ]
        return [
            Job(I.id, I.text, q, group) for group, (q, turns) in enumerate(drawn) for I in turns
        ]

    def probabilities(self) -> Array:
        """Returns the share of the rollouts of each active prompt."""
        return np.full(len(self.ids), 1 / len(self.ids))

    def keep(self, kept: Sequence[int], t: int) -> None:
        """Drops all others."""
        self._drop([I for I in self.active if I.id not in kept], t)


class GEPA(FromOne):
    """`rounds` revisions of prompts drawn by what they win, of which N_P stay.

    A revision passes if it has strictly more reward than its parent on the questions whose failures
    were shown.
    """

    P: Front

    def evolve(self, t: int, policy: Policy) -> None:
        cfg, P = self.cfg, self.P
        if t == cfg.T:  # no step would play what is new
            return
        rng = rng_of(cfg.seed, t, "gepa")
        D_B = [self.D[q] for q in self.B.choose_question_ids(rng, cfg.D_B, [])]
        # what the optimizer may see: no question on which prompts are chosen
        shown = ReplayBuffer(cfg.buffer)
        shown.items = [e for e in self.B.items if e.question_id not in {q.id for q in D_B}]
        prompts: list[Any] = [(I.id, I.text) for I in P.active]
        self.t, self.used = t, {fold_words(text) for _, text in prompts}
        r = self.rewards_on(policy, "verify front", prompts, D_B)  # (prompts, questions)
        wins, passed, shortfall = instance_wins(r), list[tuple[str, int]](), "none wins"
        for round in range(cfg.rounds):
            self.round = round
            I_parent = P.active[rng.choice(len(P), p=wins / wins.sum())]
            tau_fail = shown.choose_failures(rng, cfg.failures, I_parent.id)
            if not tau_fail:
                shortfall = "no failure to learn from that D_B does not have"
                break
            golds = [gold for e in tau_fail for gold in e.golds]
            prompt = feedback_prompt(I_parent.text, tau_fail, PROMPT_BUDGET)
            try:
                I_new = self.ask(I_parent, prompt, golds, 1)
            except OptimizerDown as e:
                shortfall = f"the optimizer gave no reply ({e})"
                break
            if I_new:
                batch = [self.D[e.question_id] for e in tau_fail]
                [c] = self.verify(policy, I_parent, I_new, batch)
                better = c.r > c.r_parent
                self.log.write_verification(t, round, batch, [c], [c] if better else [])
                passed += [(c.text, I_parent.id)] * better
        if passed:
            new: list[Any] = [(None, text) for text, _ in passed]
            r = np.concatenate([r, self.rewards_on(policy, "verify passed", new, D_B)])
        wins, means = instance_wins(r), r.mean(1)
        order = sorted(range(len(r)), key=lambda k: (-wins[k], -means[k]))[: cfg.N_P]
        kept = [P.ids[k] for k in order if k < len(prompts) and wins[k]]
        won = [
            (k, *passed[k - len(prompts)]) for k in sorted(order) if k >= len(prompts) and wins[k]
        ]
        if won:
            P.keep(kept, t)
        joined = [P.join(text, parent, t, float(means[k])) for k, text, parent in won]
        outcome = (
            f"{len(passed)} passed, {len(joined)} joined" if joined else f"none joined: {shortfall}"
        )
        outcome = f"front of {len(P)} on {len(D_B)} questions; {outcome}"
        self.log.write_event(t, "evolve", P, outcome)

    def rewards_on(
        self, policy: Policy, purpose: str, prompts: list[Any], D_B: list[Question]
    ) -> Array:
        """Plays D_B under each prompt, its id and its text; returns the rewards (prompts,
        questions)."""
        taus = self.play(policy, purpose, prompts, D_B)
        row = {
            "t": self.t,
            "scored": [text for _, text in prompts],
            "D_B": [q.id for q in D_B],
            "rollouts": len(taus),
        }
        self.log.run.append("reflections", row)
        return np.array([tau.reward for tau in taus], float).reshape(len(prompts), len(D_B))


def feedback_prompt(instruction: str, tau_fail: Sequence[Experience], budget: int) -> str:
    """Asks for one new instruction after failures."""
    shown = format_examples([(e.text, e.golds) for e in tau_fail], budget)
    return FEEDBACK.format(instruction=instruction, examples="\n".join(shown))


def instance_wins(r: Array) -> npt.NDArray[np.int64]:
    """Counts on how many questions each prompt is among the best, of rewards (prompts, questions);
    0: dominated.

    GEPA's rule: from the lowest mean upwards, a prompt is dropped if on every question that it
    wins, another remaining one wins too.
    """
    best = r == r.max(0)
    left = np.ones(len(r), bool)
    for k in np.argsort(r.mean(1), kind="stable"):
        others = best[left & (np.arange(len(r)) != k)]
        if len(others) and others[:, best[k]].any(0).all():
            left[k] = False
    return np.where(left, best.sum(1), 0)


def main(argv: list[str] | None = None) -> None:
    inspo.main(argv, FSTConfig, ObjectiveLearner, Front, GEPA, **PRESET)


if __name__ == "__main__":
    main()
