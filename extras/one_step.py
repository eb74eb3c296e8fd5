"""Writes docs/one_step.md: one question through one step of Algorithm 1, with the numbers of a real run.

    python extras/one_step.py                # or --out PAGE

The run is inspo.py's own, watched from outside. Every number that the page computes by hand is asserted to equal the
run's, and its lines of code are read from the source: where one of them changes, the page changes or this fails.
"""

if not __package__:
    import root  # noqa: F401
import argparse
import ast
import contextlib
import copy
import dataclasses
import inspect
import io
import itertools
import math
import re
import statistics
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tasks
from config import HERE, parse
from grpo import Learner, group_advantages, lr_at, minibatches
from inspo import inspo, train
from kernels import rows_torch
from models.model import score
from population import Instruction, Population, mean_rewards
from rollout import prompt_ids
from tasks.questions import em, normalize
from tasks.search_qa import SearchQA

STEP = 5  # the first one that ends in a pruning
RUN = "--batch 24 --mini 12 --seed 5"
SHOWN = 6  # tokens of the update
ALSO = "--device cpu --engine torch --eval_n 1"  # does not change what the step computes


class Call(NamedTuple):
    """A call that the run made in step STEP."""

    args: tuple
    result: Any
    P: Population  # a copy, from before the call


def watch(policy, P: Population, log) -> dict[str, list[Call]]:
    """Returns a dictionary that will hold the calls of step STEP by method."""
    seen: dict[str, list[Call]] = defaultdict(list)

    def spy(owner, name: str) -> None:
        method = getattr(owner, name)

        def call(*args, **kwargs):
            before = copy.deepcopy(P)
            result = method(*args, **kwargs)
            if log.t == STEP:
                seen[f"{type(owner).__name__}.{name}"].append(Call(args, result, before))
            return result

        setattr(owner, name, call)

    for owner, names in ((policy, "rollout update"), (policy.learner, "loss step"), (log, "step pruned")):
        for name in names.split():
            spy(owner, name)
    return seen


# ---- the parts of a page


def code(function, *marks: str) -> str:
    """Returns the statements of a function that hold the marks, under the names of file and function."""
    source = textwrap.dedent(inspect.getsource(function))
    lines, nodes = source.splitlines(), list(ast.walk(ast.parse(source)))
    shown = []
    for mark in marks:
        hits = [k for k, line in enumerate(lines, 1) if re.search(re.escape(mark) + r"(?!\d)", line)]
        assert len(hits) == 1, f"{function.__qualname__}: {len(hits)} lines with {mark!r}"
        around = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno <= hits[0] <= node.end_lineno]
        statement = max(around, key=lambda node: node.lineno)
        end = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
        shown += lines[statement.lineno - 1 : end]
    path = Path(inspect.getsourcefile(function)).relative_to(HERE)
    statements = re.sub(r"(?<=\S) {3,}#", "  #", textwrap.dedent("\n".join(shown)))
    return f"# {path}, {function.__qualname__}\n{statements}"


def python(*parts: str) -> str:
    return "```python\n" + "\n\n".join(parts) + "\n```"


def block(*parts: str) -> str:
    return "```\n" + "\n\n".join(parts) + "\n```"


def table(head: str, rows: list) -> str:
    names = head.split(" | ")
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [names, ["---:"] * len(names), *rows])


def num(x: float, digits: int = 4) -> str:
    return f"{round(x, digits) + 0:.{digits}f}"  # + 0: no "-0.0000"


def minus(a: float, b: float) -> str:
    return f"{num(a)} - {num(b)}" if b >= 0 else f"{num(a)} + {num(-b)}"


def history(I: Instruction) -> str:
    return " ".join(num(r, 3) for r in I.rewards)


def fill(text: str, width: int = 96) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False)


def item(k: int, text: str) -> str:
    return textwrap.fill(f"{k}  {text}", 96, subsequent_indent="   ", break_on_hyphens=False)


# ---- the page


class Step:
    """What the page looks at: a question of the second mini-batch, where pi is no longer pi_old, with mixed rewards."""

    def __init__(self, cfg, task, policy, seen: dict[str, list[Call]]):
        self.cfg, self.task, self.seen = cfg, task, seen
        self.learner, self.tokenizer = policy.learner, policy.worker.tokenizer
        rolled = seen["Policy.rollout"][0]
        self.taus, self.before = rolled.result, rolled.P
        self.after, self.pruned = seen["Log.step"][0].P, seen["Log.pruned"][0].P
        self.groups = [list(group) for _, group in itertools.groupby(self.taus, key=lambda tau: tau.group)]
        self.group = next(g for g in self.groups[cfg.mini :] if len({tau.reward for tau in g}) > 1)
        self.k = max(range(cfg.G), key=lambda k: self.group[k].reward)  # the trajectory that is shown whole
        self.tau = self.group[self.k]
        self.I = self.before.family[self.tau.instruction]


def title(s: Step) -> str:
    return f"""# One question through one step of Algorithm 1

This page follows the question

> {s.tau.question.text}

through step {STEP} of `python inspo.py {RUN}` (the embedded world, on a CPU). The numbers
are the run's, each beside the code that computed it. What is computed by hand was checked against the run when this
page was written, by `make one-step`."""


def selection(s: Step) -> str:
    exps = [math.exp(I.w / s.cfg.tau_s) for I in s.before.active]
    p = [e / sum(exps) for e in exps]
    assert max(abs(s.before.probabilities() - p)) < 1e-9
    rows = [
        (f"**{I.id}**" if I is s.I else I.id, history(I), num(I.w), num(e), num(p_I))
        for I, e, p_I in zip(s.before.active, exps, p, strict=True)
    ]
    lines = python(
        code(inspo, "questions = draw", "Alg.1 L5"),
        code(Population.draw, "drawn = ", "return"),
        code(Population.sample, "return"),
        code(Population.probabilities, "self.tau_s", "z.max", "Eq.4"),
    )
    return f"""## 1. An instruction is drawn (L5, Eq. 4)

{lines}

An instruction's weight w is its mean reward in recent steps (section 6), and p is the softmax of w / tau_s, here with
tau_s = {s.cfg.tau_s}. Every question of the step draws an instruction; ours drew **number {s.I.id}**.

{table("instruction | rewards so far | w | exp(w / tau_s) | p", rows)}

The fourth column adds up to {num(sum(exps))}; divided by that it is p.

<details><summary>The instructions</summary>

{block(*(item(I.id, I.text) for I in s.before.active))}

</details>"""


def sampling(s: Step) -> str:
    tau = s.tau
    prompt = tau.ids[: tau.prompt_tokens]
    assert prompt == prompt_ids(s.tokenizer, s.task, s.I.text, tau.question)
    turn = next(turn for turn in tau.turns if turn.result)
    columns = [f"{'tokens':8}{'sampled: mask 1':48}given: mask 0"]
    for mask, run in itertools.groupby(zip(tau.mask, tau.ids, strict=True), key=lambda pair: pair[0]):
        ids = [i for _, i in run]
        for row, line in enumerate(fill(s.tokenizer.decode(ids), 46).splitlines()):
            columns.append(f"{'' if row else len(ids):<8}{'' if mask else ' ' * 48}{line}")
    lines = python(code(inspo, "Alg.1 L6"), code(tasks.Task.prompt, "content = ", "return"))
    masks = python(code(tasks.Trajectory.act, "self.mask"), code(tasks.Trajectory.observe, "self.mask"))
    return f"""## 2. {s.cfg.G} trajectories are sampled (L6)

{lines}

The prompt is the chat template around instruction and question. (The world's tokenizer knows lower case only.)

{block(fill(s.tokenizer.decode(prompt)))}

The policy continued it {s.cfg.G} times, at temperature {s.cfg.temperature:g}:

{block(*(item(k, x.response) for k, x in enumerate(s.group)))}

A closing tag ends a turn. What stands in `<search>` is the query, and the passages that it finds follow as an
observation. Trajectory {s.k} searched for "{turn.argument}" and got

{block("~".join(item(k, " ".join(text.split())) for k, text in enumerate(turn.result, 1)).replace("~", chr(10)))}

The policy learns from the tokens that it sampled and not from those that it was given. The mask tells them apart. Here
is trajectory {s.k} again: {len(tau.ids)} tokens, {sum(tau.mask)} of them in the loss.

{masks}

{block(chr(10).join(columns))}"""


def rewards(s: Step) -> str:
    golds = s.tau.question.golds
    words = [normalize(tau.prediction or "") for tau in s.group]
    assert all(tau.reward == (w in map(normalize, golds)) for tau, w in zip(s.group, words, strict=True))
    rows = [(k, tau.prediction, words[k], f"{tau.reward:g}") for k, tau in enumerate(s.group)]
    lines = python(
        code(inspo, "Alg.1 L7"), code(SearchQA.reward, "Eq.1"), code(em, "golds}"), code(normalize, "text = ", "return")
    )
    return f"""## 3. The answers are compared with the gold answer (L7)

{lines}

The gold answer is "{golds[0]}", normalized "{normalize(golds[0])}": in lower case, without punctuation, articles
and extra spaces. Only exactly these words are worth 1.

{table("trajectory | prediction | normalized | reward", rows)}"""


def advantages(s: Step) -> str:
    r = [tau.reward for tau in s.group]
    mean, std = statistics.mean(r), statistics.stdev(r)
    A = [(x - mean) / (std + 1e-6) for x in r]
    assert all(math.isclose(a, tau.advantage, rel_tol=1e-9) for a, tau in zip(A, s.group, strict=True))
    rows = [(k, f"{r[k]:g}", num(A[k]), num(tau.advantage)) for k, tau in enumerate(s.group)]
    sums = " + ".join(f"{x:g}" for x in r), " + ".join(f"({x:g} - {mean:g})^2" for x in r)
    hand = f"""mean = ({sums[0]}) / {len(r)} = {num(mean)}
std  = sqrt(({sums[1]}) / {len(r) - 1}) = {num(std)}
A    = (reward - {num(mean)}) / ({num(std)} + 0.000001)"""
    equal = sum(len({tau.reward for tau in group}) == 1 for group in s.groups)
    return f"""## 4. The rewards of the group become advantages (Eq. 3)

{python(code(inspo, "set_advantages"), code(group_advantages, "Eq.3"))}

{block(hand)}

{table("trajectory | reward | A by hand | A of the run", rows)}

The advantages of a group add up to 0. If all its rewards are equal they are all 0, and it teaches nothing: so it was
with {equal} of the {len(s.groups)} groups of this step."""


def by_hand(s: Step, call: Call) -> dict[int, torch.Tensor]:
    """Returns Eq. 2 by hand for a micro-batch: for each trajectory, by its id(), a tensor (n, 8) of n sampled tokens.

    Columns: log-probs of the engine, pi_old, pi and pi_ref; rho, KL, S, term of the loss. Asserts that
    `Learner.loss` had the same numbers.
    """
    (batch, terms), (loss, extras) = call.args, call.result
    old, n_trajectories = terms["old_logp"], s.cfg.mini * s.cfg.G
    lengths = [sum(tau.mask) for tau in batch]
    engine = torch.tensor([lp for tau in batch for lp, m in zip(tau.logps, tau.mask, strict=True) if m])
    ref = score(s.learner.reference, *s.learner.pack(batch), s.cfg.temperature)[0].double()
    new = extras["logp"].double()
    old = new if old is None else torch.from_numpy(old)  # the first mini-batch's pi_old is pi
    A = torch.tensor([tau.advantage for tau in batch]).double().repeat_interleave(torch.tensor(lengths))
    w = 1 / (torch.tensor([n for n in lengths for _ in range(n)]) * n_trajectories)
    rho, d = torch.exp(new - old), ref - new
    S = torch.minimum(rho * A, rho.clamp(1 - s.cfg.eps, 1 + s.cfg.eps) * A)
    kl = torch.exp(d) - d - 1
    term = -w * (S - s.cfg.beta * kl)
    for mine, theirs in ((kl, extras["kl"]), ((old - engine).abs(), extras["gap"]), (term.sum(), loss.detach())):
        torch.testing.assert_close(mine, theirs.double(), rtol=1e-4, atol=1e-7)
    assert (old - engine).abs().max() < 1e-4
    parts = torch.stack([engine, old, new, ref, rho, kl, S, term], 1).split(lengths)
    return {id(tau): part for tau, part in zip(batch, parts, strict=True)}


def update(s: Step) -> str:
    cfg, metrics = s.cfg, s.seen["Policy.update"][0].result
    tokens = {k: part for call in s.seen["Learner.loss"] for k, part in by_hand(s, call).items()}
    losses = [sum(tokens[id(tau)][:, 7].sum().item() for tau in part) for part in minibatches(s.taus, cfg)]
    norms = [call.result for call in s.seen["Learner.step"]]
    lr = cfg.lr * STEP / (cfg.warmup * cfg.T)
    for name, mine in (("loss", statistics.mean(losses)), ("grad_norm", statistics.mean(norms)), ("lr", lr)):
        assert math.isclose(mine, metrics[name], rel_tol=1e-6, abs_tol=1e-7), name

    own, low, high = tokens[id(s.tau)], 1 - cfg.eps, 1 + cfg.eps
    texts = [s.tokenizer.decode([i]) for i, m in zip(s.tau.ids, s.tau.mask, strict=True) if m]
    later = s.learner.logprobs([s.tau]).tolist()
    moved = own[:, 4].log().abs().argsort(descending=True).tolist()
    rows = []
    for k in sorted(moved[:SHOWN]):
        *logps, rho, kl, _, term = own[k].tolist()
        outside = "no" if low <= rho <= high else "yes"
        rows.append((k, f"`{texts[k]}`", *map(num, [*logps, rho]), outside, num(kl, 5), num(term, 6), num(later[k])))
    engine, old, new, ref, rho, kl, S, term = own[moved[0]].tolist()
    n, N = len(own), cfg.mini * cfg.G
    hand = f"""rho  = exp({minus(new, old)}) = {num(rho)}
S    = min({num(rho)} A, {num(min(max(rho, low), high))} A) = {num(S)}
d    = {minus(ref, new)} = {num(ref - new)}
KL   = exp(d) - d - 1 = {num(kl, 5)}
w    = 1 / ({n} x {N}) = {num(1 / (n * N), 6)}
term = -w (S - {cfg.beta:g} KL) = {num(term, 6)}"""
    of_the_loss = python(
        code(Learner.terms, "tokens = ", "Eq.2"),
        code(rows_torch.loss_rows, "rho = torch.ones_like", 'if kind == "clip"', "clip = rho", "S = torch.minimum",
             "if ref is", "d = (ref", "e_d = torch", "kl = e_d", "if beta", "S - beta * kl", "return w"),
    )  # fmt: skip
    of_the_step = python(
        code(lr_at, "rise = ", "if t <= rise", "return cfg.lr * t"),
        code(Learner.step, "clip_grad_norm_", "self.optimizer.step"),
    )
    return f"""## 5. The policy is updated (L8, Eq. 2)

{python(code(inspo, "Alg.1 L8"), code(minibatches, "CHOICE-10", "return"))}

The {cfg.batch} questions of the step are {len(norms)} mini-batches of {cfg.mini}, with an optimizer step each. Ours is
in the second: the policy pi has moved since pi_old sampled the trajectory, and rho = pi / pi_old is no longer 1.

{of_the_loss}

These {SHOWN} of the {n} tokens of trajectory {s.k} (A = {num(s.tau.advantage)}) moved most. The four policies' columns
and the last one hold log-probabilities.

{table("token | text | engine | pi_old | pi | pi_ref | rho | outside | KL | term | pi later", rows)}

- *engine* is what the sampler reported, *pi_old* what the trainer computed before the first update. Both are the same
  policy and must agree; for all tokens of the step they do, to less than 0.0001.
- *pi_ref* is the policy before any training, *KL* the k3 estimate of the distance from it.
- *outside* tells whether rho is outside {low:g} to {high:g}. Then, if rho has moved in the direction that A asks for,
  the clip holds and the token has no gradient.
- *pi later* is after the second update, which this trajectory had a part in.

By hand, for token {moved[0]}, `{texts[moved[0]]}`, with {n} tokens in the trajectory and {N} trajectories in the
mini-batch:

{block(hand)}

The terms of a mini-batch add up to its loss: {" and ".join(num(x, 5) for x in losses)} in this step. Trajectory {s.k}
contributed {num(own[:, 7].sum().item(), 5)}. The loss is near 0 because advantages add up to 0; what moves the policy
is its gradient.

{of_the_step}

The norms of the gradients were {" and ".join(map(num, norms))} (clipped to {cfg.max_grad_norm:g}), the learning
rate {cfg.lr:g} x {STEP} / ({cfg.warmup:g} x {cfg.T}) = {metrics["lr"]:g}."""


def credit(s: Step) -> str:
    cfg, j = s.cfg, s.I.id
    own = [[tau.reward for tau in group] for group in s.groups if group[0].instruction == j]
    r_bar = statistics.mean(sum(own, []))
    window = [*s.I.rewards, r_bar][-cfg.window :]
    I, ranked = s.after.family[j], s.after.ranked()
    assert I.rewards == window and math.isclose(I.w, statistics.mean(window))
    keep = max(cfg.N_parent, len(ranked) - len(ranked) // 2)
    assert {x.id for x in ranked[:keep]} == set(s.pruned.ids) and STEP % cfg.K_p == 0 and STEP % cfg.K_e
    p = [dict(zip(P.ids, map(num, P.probabilities()), strict=True)) for P in (s.before, s.after, s.pruned)]
    rows = [
        (f"**{x.id}**" if x is I else x.id, history(x), num(s.before.family[x.id].w), num(x.w), p[0][x.id], p[1][x.id],
         p[2].get(x.id, "pruned"))
        for x in ranked
    ]  # fmt: skip
    lines = python(
        code(inspo, "Alg.1 L9", "Alg.1 L10", "Alg.1 L11", "Alg.1 L12"),
        code(mean_rewards, "return"),
        code(Population.attribute, "Eq.6"),
        code(Instruction.w.fget, "return"),
        code(Population.prune, "CHOICE-3"),
    )
    hand = f"""r_bar = ({" + ".join(f"{sum(x):g}" for x in own)}) / ({len(own)} x {cfg.G}) = {num(r_bar)}
w     = ({" + ".join(map(num, window))}) / {len(window)} = {num(I.w)}"""
    return f"""## 6. The instruction is credited (L9, Eq. 6), and half of them leave (L10 to L12)

{lines}

{len(own)} questions of the step drew instruction {j}. Its weight becomes its mean reward in the last {cfg.window} steps
that drew it:

{block(hand)}

All instructions by falling w. The first p is the one that section 1 drew from, the last one is the next step's:

{table("instruction | rewards so far | w before | w | p before | p | p next", rows)}

Step {STEP} is a multiple of K_p = {cfg.K_p} and {len(ranked)} are more than N_parent = {cfg.N_parent}, so the last
floor({len(ranked)} / 2) = {len(ranked) - keep} are pruned. It is no multiple of K_e = {cfg.K_e}, so nothing evolves
yet. The step's {len(s.taus)} trajectories go into the replay buffer (L15), where the optimizer will find the failures
among them at step {cfg.K_e}."""


def page(s: Step) -> str:
    return "\n\n".join(f(s) for f in (title, selection, sampling, rewards, advantages, update, credit)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "docs" / "one_step.md", help="the page to write")
    out = parser.parse_args().out

    def watched(cfg, task, policy, optimizer, P, log):
        seen = watch(policy, P, log)
        # The loop ends after STEP; the learning rate's schedule, which is the learner's, keeps the real T.
        result = inspo(dataclasses.replace(cfg, T=STEP), task, policy, optimizer, P, log)
        out.write_text(page(Step(cfg, task, policy, seen)))
        return result

    torch.set_num_threads(1)  # sums depend on the number of threads
    with tempfile.TemporaryDirectory() as folder:
        cfg = parse([*RUN.split(), *ALSO.split(), "--out", f"{folder}/run"])
        with contextlib.redirect_stdout(io.StringIO()):  # what the run prints ends with a directory that will be gone
            train(cfg, algorithm=watched)
    print(f"{out}: step {STEP} of python inspo.py {RUN}")


if __name__ == "__main__":
    main()
