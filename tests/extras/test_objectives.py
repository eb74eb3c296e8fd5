"""Every objective against its paper's formula: float64, plain loops, gradients by autograd.

`FORMULAS` says what each objective is, from a list of trajectories as dicts; it uses nothing of
objectives.py or variants.py. What is compared is dL/dlogp of every token, by kernels/head.py on our
side, 25 tokens at a time.
"""

import copy
import math
import pickle
import random
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_algorithm import Exam, questions
from test_grpo import G, batch_of, clip, error, gradient, gradients, logprobs, settings_of
from test_inspo import SMALL, metrics

from config import PRESETS
from extras import objectives, refill
from extras.batch import turn_lengths
from extras.objectives import OBJECTIVES, ObjectiveConfig, ObjectiveLearner
from extras.refill import Refilling
from grpo import minibatches
from kernels import eq2, grpo_head
from models.model import load_model
from population import Population
from tasks import Question, Trajectory, Turn
from tasks.search_qa import SearchQA

LIMIT = 10  # tokens that a trajectory may sample
GROUPS = [  # instruction, question, rewards
    (0, "q0", [1, 0, 0, 1]), (0, "q1", [1, 1, 1]), (1, "q2", [1]), (1, "q0", [0, 1, 1, 1]), (1, "q3", [0, 0, 0, 0]),
    (0, "q4", [0, 0, 1, 0, 1]), (2, "q5", [0, 1]), (0, "q6", [1, 0, 0]), (0, "q7", [0, 1, 0]), (0, "q8", [0, 0, 1]),
]  # fmt: skip


def drawn(seed=0):
    """Returns trajectories as dicts: ties, one alone in its group, equal rewards, an empty turn, no
    tokens at all."""
    dice, out = random.Random(seed), []
    for group, (instruction, question, rewards) in enumerate(GROUPS):
        for r in rewards:
            turns = []
            for _ in range(dice.randint(1, 4)):
                found = dice.random() < 0.4
                result = ["the gold passage"] if found else [dice.choice(["one", "another"])]
                turns.append(dict(n=dice.randint(1, 3), result=result, found=found, called=True))
            turns[-1] |= dict(result=None, found=False, called=False)  # it answers
            answer = "gold" if r else dice.choice(["wrong", "The wrong!", "odd", None])
            row = dict(group=group, instruction=instruction, q=question, r=float(r), turns=turns)
            out.append(row | dict(answer=answer))
    out[9]["turns"] = []  # its prompt was too long
    for k, row in enumerate(out):
        row["k"], row["L"] = k, sum(turn["n"] for turn in row["turns"])
    return out


def trajectories(rows, columns):
    """Returns the rows as Trajectory objects, their engine's log-probs from `columns`."""
    out = []
    for row in rows:
        tau = Trajectory(
            row["instruction"], Question(row["q"], "Who?", ("gold",)), row["group"], [], 2
        )
        tau.observe([1, 2])
        for k, turn in enumerate(row["turns"]):
            at = [n for j, n in zip(row["turn_of"], row["tokens"], strict=True) if j == k]
            tau.act([3] * turn["n"], columns["engine"][at].tolist())
            tau.observe([4, 4])
            tau.turns.append(Turn("", "search" if turn["called"] else "", "", turn["result"]))
        tau.reward, tau.prediction, tau.failed = row["r"], row["answer"], row["r"] < 1
        out.append(tau)
    return out


class Case:
    """A mini-batch: `rows`, and the tokens' columns; `logp` is the policy in training, to
    differentiate by."""

    def __init__(self, first=False, seed=0, memory=None, rows=None):
        self.rows = drawn(seed) if rows is None else rows
        self.remembered = {} if memory is None else memory
        N = sum(row["L"] for row in self.rows)
        g = np.random.default_rng(seed)
        old = -3 * g.random(N) - 0.02
        now = np.minimum(old + 0.3 * g.standard_normal(N), -0.01)
        self.first, now = first, old.copy() if first else now
        self.columns = dict(old=old, now=now, engine=old + 0.3 * g.standard_normal(N))
        self.logp = torch.tensor(now, requires_grad=True)
        self.at = self.logp.unbind()
        for row, end in zip(
            self.rows, np.cumsum([row["L"] for row in self.rows]).tolist(), strict=True
        ):
            row["tokens"] = list(range(end - row["L"], end))
            row["turn_of"] = [k for k, turn in enumerate(row["turns"]) for _ in range(turn["n"])]

    def rho(self, token, to="old"):
        return torch.exp(self.at[token] - float(self.columns[to][token]))

    def groups(self, key="group"):
        found = {}
        for row in self.rows:
            found.setdefault(row[key], []).append(row)
        return list(found.values())


def ours(name, case):
    """Returns (dL/dlogp (N,), the trajectories, what the head is given) of an objective, by a
    learner without a model.

    `case.passes` counts its scoring passes.
    """
    learner, taus = object.__new__(ObjectiveLearner), trajectories(case.rows, case.columns)
    learner.cfg = ObjectiveConfig(objective=name, max_turns=4, max_response=LIMIT // 5)
    learner.remembered, case.passes = case.remembered, 0

    def score(part):
        case.passes += 1
        return np.array([case.columns["now"], np.zeros(len(case.logp))])

    learner.score_tokens = score
    learner.set_advantages(taus)
    old = np.array([case.columns["old"], np.zeros(len(case.logp))])
    terms = learner.make_loss_inputs(taus, None if case.first else old)
    return through_the_head(terms, OBJECTIVES[name].surrogate, case.columns["now"]), taus, terms


def through_the_head(terms, surrogate, now):
    """Returns dL/dlogp of tokens with these log-probs, by the head: two logits a token, log p and
    log(1 - p)."""
    logp = torch.tensor(now)
    z = torch.stack([logp, torch.log1p(-logp.exp())], 1).requires_grad_()
    targets, tokens = torch.zeros(len(now), dtype=torch.long), {}
    for name, x in terms.items():
        tokens[name] = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    lines = partial(eq2, surrogate=surrogate)
    loss, _ = grpo_head(
        z, torch.eye(2, dtype=torch.float64), targets, objective=lines, chunk=25, **tokens
    )
    loss.backward()
    return z.grad[:, 0] / (1 - logp.exp())


# ---- the formulas


def mean(x):
    return sum(x) / len(x)


def std(x):
    return math.sqrt(sum((a - mean(x)) ** 2 for a in x) / (len(x) - 1))


def eq3(x):
    return [(a - mean(x)) / (std(x) + 1e-6) for a in x] if len(x) > 1 else [0.0] * len(x)


def compare(case, f=eq3, key="group", of="r"):
    """Returns A by trajectory: f of the values of each group."""
    A = {}
    for members in case.groups(key):
        values = f([row[of] for row in members]) if len(members) > 1 else [0.0] * len(members)
        A |= {row["k"]: a for row, a in zip(members, values, strict=True)}
    return A


def mixed(case):
    """The rows of groups with both right and wrong answers."""
    return [
        row
        for members in case.groups()
        if 0 < sum(x["r"] for x in members) < len(members)
        for row in members
    ]


def clipped(rho, A, low=0.2, high=0.2, cap=math.inf):
    """Returns Eq. 2's min for one token; `cap` bounds the first rho, the dual clip."""
    return torch.minimum(rho.clamp(max=cap) * A, rho.clamp(1 - low, 1 + high) * A)


def by_trajectory(case, term, rows=None):
    """Returns the loss: minus the mean over trajectories of the mean of a term (row, place, token)
    over its tokens."""
    rows = case.rows if rows is None else rows
    return -sum(
        term(row, k, n) / row["L"] / len(rows) for row in rows for k, n in enumerate(row["tokens"])
    )


def by_token(case, term, rows=None):
    """The same, the mean over all tokens."""
    terms = [
        term(row, k, n)
        for row in (case.rows if rows is None else rows)
        for k, n in enumerate(row["tokens"])
    ]
    return -sum(terms) / len(terms)


def plain(case, A, low=0.2, high=0.2, average=by_trajectory, rows=None):
    return average(case, lambda row, _, n: clipped(case.rho(n), A[row["k"]], low, high), rows)


def turnwise(case, A, **kw):
    """`A`: by (trajectory, turn)."""
    return by_trajectory(
        case, lambda row, k, n: clipped(case.rho(n), A[row["k"], row["turn_of"][k]], **kw)
    )


def others(x):
    return [a - (sum(x) - a) / (len(x) - 1) for a in x]


def over_mean(x):
    return [(a - mean(x)) / mean(x) if mean(x) else 0.0 for a in x]


def minus_mean(x):
    return [a - mean(x) for a in x]


def centred_by_instruction(case, A):
    for members in case.groups("instruction"):
        m = mean([A[row["k"]] for row in members])
        for row in members:
            A[row["k"]] -= m
    return A


def grpo(case):
    return plain(case, compare(case))


def dr_grpo(case):
    A = compare(case, minus_mean)
    return by_trajectory(
        case, lambda row, _, n: clipped(case.rho(n), A[row["k"]]) * row["L"] / LIMIT
    )


def dapo(case):
    for row in case.rows:
        over = row["L"] - (LIMIT - LIMIT / 5)
        row["shaped"] = row["r"] + (0 if over <= 0 else -min(1, over / (LIMIT / 5)))
    return plain(case, compare(case, of="shaped"), 0.2, 0.28, by_token, mixed(case))


def loop(case):
    A = compare(case, others)
    return plain(
        case,
        A,
        0.1,
        0.1,
        rows=[row for row in case.rows if abs(A[row["k"]]) >= 0.01 or not row["tokens"]],
    )


def reinforce_baseline(case):
    A = compare(case, minus_mean)
    tokens = [A[row["k"]] for row in case.rows for _ in row["tokens"]]
    m = mean(tokens)
    variance = sum((a - m) ** 2 for a in tokens) / (len(tokens) - 1)
    return plain(case, {k: (a - m) / math.sqrt(variance + 1e-8) for k, a in A.items()})


def spo(case):
    table, A = case.remembered.setdefault("reference", {}), {}
    for members in case.groups("q"):
        r = [row["r"] for row in members]
        a, b = table.get(members[0]["q"], (0.5, 0.5))
        A |= {row["k"]: row["r"] - a / (a + b) for row in members}
        table[members[0]["q"]] = 0.9 * a + sum(r), 0.9 * b + len(r) - sum(r)
    A = centred_by_instruction(case, A)
    s = std(list(A.values()))
    return plain(case, {k: a / (s + 1e-6) for k, a in A.items()}, 0.2, 0.28)


def sequence_ratio(case, tokens):
    return torch.exp(sum(case.at[n] - float(case.columns["old"][n]) for n in tokens) / len(tokens))


def gspo(case):
    A, rows = compare(case), [row for row in case.rows if row["tokens"]]
    terms = [clipped(sequence_ratio(case, row["tokens"]), A[row["k"]], 3e-4, 4e-4) for row in rows]
    return -sum(terms) / len(case.rows)


def cispo(case, cap=1.28):
    A = compare(case)
    return by_token(
        case, lambda row, _, n: case.rho(n).detach().clamp(max=cap) * A[row["k"]] * case.at[n]
    )


def sapo(case):
    A = compare(case)

    def term(row, _, n):
        tau = 1.0 if A[row["k"]] > 0 else 1.05
        return A[row["k"]] * 4 / tau / (1 + torch.exp(-tau * (case.rho(n) - 1)))

    return by_trajectory(case, term)


def dppo(case):
    A = compare(case)

    def term(row, _, n):
        a, rise = A[row["k"]], case.at[n].exp().item() - math.exp(case.columns["engine"][n])
        dropped = (a > 0 and rise > 0.2) or (a < 0 and rise < -0.2)
        return case.rho(n, "engine") * a * (not dropped)

    return by_token(case, term)


def vespo(case):
    A = compare(case)

    def term(row, _, n):
        k, l = (2, 3) if A[row["k"]] >= 0 else (3, 2)
        # never near +-20 here
        log_W = sum(case.at[m].item() - case.columns["old"][m] for m in row["tokens"])
        return math.exp(l + k * log_W - l * math.exp(log_W)) * A[row["k"]] * case.at[n]

    return by_token(case, term)


def tis(case):
    A, old, engine = compare(case), case.columns["old"], case.columns["engine"]
    w = [min(math.exp(a - b), 2.0) for a, b in zip(old, engine, strict=True)]
    return by_trajectory(case, lambda row, _, n: w[n] * clipped(case.rho(n), A[row["k"]]))


def r2vpo(case):
    A = compare(case)
    return by_trajectory(
        case, lambda row, _, n: case.rho(n) * A[row["k"]] - 0.04 * (case.rho(n) - 1) ** 2
    )


def normalized_answer(row):
    return {"The wrong!": "wrong"}.get(row["answer"], row["answer"])


def first_call(row):
    return next((k for k, turn in enumerate(row["turns"]) if turn["called"]), None)


def aspo(case):
    A = compare(case)
    for members in case.groups():
        used = [row for row in members if row["r"] and first_call(row) is not None]
        p = {
            row["k"]: sum(turn["n"] for turn in row["turns"][: first_call(row) + 1]) for row in used
        }
        for row in used:
            change = -2 * (p[row["k"]] - mean(list(p.values()))) / mean([x["L"] for x in used])
            bound = 0.7 * abs(A[row["k"]])
            A[row["k"]] += max(-bound, min(bound, change))
    return plain(case, A)


def empo(case):
    for members in case.groups():
        answers = [normalized_answer(row) for row in members]
        given = [x for x in answers if x]
        share = [given.count(x) / len(given) for x in set(given)]
        H = -sum(s * math.log(s) for s in share)
        dispersed = len(set(given)) == len(members)  # H = ln G
        for row, x in zip(members, answers, strict=True):
            row["shaped"] = (
                answers.count(x) / len(answers) if x and H > 0 and not dispersed else 0.0
            )
    return plain(case, compare(case, of="shaped"))


def mt_grpo(case):
    both = {}
    for row in case.rows:
        first = first_call(row)
        row["turn reward"] = float(first is not None and row["turns"][first]["found"])
    A, A_turn = compare(case), compare(case, of="turn reward")
    for row in case.rows:
        for k in range(len(row["turns"])):
            both[row["k"], k] = A[row["k"]] + A_turn[row["k"]] * (
                first_call(row) is None or k <= first_call(row)
            )
    return turnwise(case, both)


def cells(case, value, key):
    """Returns Eq. 3 of value(row, turn) among the turns with the same key(row, turn)."""
    found = {}
    for row in case.rows:
        for k in range(len(row["turns"])):
            found.setdefault(key(row, k), []).append((row["k"], k, value(row, k)))
    out = {}
    for members in found.values():
        for (i, k, _), a in zip(members, eq3([x for *_, x in members]), strict=True):
            out[i, k] = a
    return out


def discounted(row, k):
    return 0.95 ** (len(row["turns"]) - 1 - k) * row["r"]


def gigpo(case):
    A = compare(case)

    def state(row, k):
        return row["group"], "start" if k == 0 else tuple(row["turns"][k - 1]["result"])

    steps = cells(case, discounted, state)
    return turnwise(case, {(i, k): A[i] + a for (i, k), a in steps.items()})


def espl(case):
    A = compare(case, minus_mean)
    return by_token(case, lambda row, _, n: case.rho(n, "engine") * A[row["k"]], mixed(case))


FORMULAS = {
    "grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "rloo": lambda case: plain(case, compare(case, others)),
    "loop": loop, "maxrl": lambda case: plain(case, compare(case, over_mean)),
    "reinforce_baseline": reinforce_baseline, "spo": spo, "gspo": gspo, "cispo": cispo,
    "cispo_cap": lambda case: cispo(case, 5.0), "sapo": sapo, "dppo": dppo, "vespo": vespo, "tis": tis, "r2vpo": r2vpo,
    "aspo": aspo,
    "consistent": lambda case: plain(case, compare(case, key="q")), "empo": empo,
    "mt_grpo": mt_grpo, "gigpo": gigpo, "espl": espl,
}  # fmt: skip


def reference(name, case):
    return torch.autograd.grad(FORMULAS[name](case), case.logp)[0]


# scoring passes over a step's first mini-batch, and over a later one, where pi_old is known
PASSES = {
    "gspo": (0, 1), "vespo": (0, 1), "tis": (1, 0),
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["first mini-batch", "later mini-batch"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_the_formula_s_and_only_what_couples_tokens_costs_a_pass_over_them(
    name, first
):
    """Over two steps where something is remembered from the first."""
    mine, theirs = {}, {}
    for step in (1, 3) if name == "spo" else (3,):
        case = Case(first, step, mine)
        got, want = ours(name, case)[0], reference(name, Case(first, step, theirs))
        assert want.norm() > 1e-3 and error(got, want) < 1e-9, step
        assert case.passes == PASSES.get(name, (0, 0))[not first]


TRL = {  # flags of its GRPOConfig; the rest is its default
    "grpo": dict(loss_type="grpo"),
    "dr_grpo": dict(loss_type="dr_grpo", max_completion_length=LIMIT),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "gspo": dict(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "cispo_cap": dict(loss_type="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="sapo"),
    "vespo": dict(loss_type="vespo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL)
def test_trl_computes_the_same_gradient(name, tmp_path):
    """A GRPOTrainer whose model is asked for nothing but log-probs, which are the case's;
    advantages are ours."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    case = Case(rows=[row for row in drawn(3) if row["L"]], seed=3)
    got, taus, terms = ours(name, case)
    mask = (
        torch.arange(max(row["L"] for row in case.rows))
        < torch.tensor([row["L"] for row in case.rows])[:, None]
    )
    logp, old, kept = torch.full(mask.shape, -1.0), torch.full(mask.shape, -1.0), mask.clone()
    logp[mask], old[mask] = (
        torch.tensor(case.columns[x], dtype=torch.float32) for x in ("now", "old")
    )
    kept[mask] = torch.tensor(terms["token_weight"] != 0)
    flags = dict(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", beta=0.0)
    trainer = trl.GRPOTrainer(
        PRESETS["world"]["model"],
        lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**flags | TRL[name]),
        train_dataset=Dataset.from_list([{"prompt": "Who?"}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    logp.requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logp,
        torch.zeros_like(logp),
        None,
    )
    batch = {"prompt_ids": torch.zeros(len(taus), 1), "prompt_mask": torch.ones(len(taus), 1)}
    batch |= {
        "completion_ids": torch.zeros(mask.shape),
        "completion_mask": kept.float(),
        "old_per_token_logps": old,
    }
    batch |= {"advantages": torch.tensor([tau.advantage for tau in taus], dtype=torch.float32)}
    trainer.compute_loss(
        trainer.model.train(), batch | {"num_items_in_batch": kept.sum()}
    ).backward()
    assert error(got, logp.grad[mask].double()) < 1e-4


# ---- what holds for all of them


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batches_that_teach_nothing_are_survived(name):
    """No trajectory, none with a token, one alone, all wrong, all right: everything stays
    finite."""
    rows = drawn()
    for row in rows[4:7]:
        row["r"] = 1.0
    empty = [rows[9], rows[9] | {"group": 99}]
    for some in ([], empty, rows[7:8], rows[4:7], [row for row in rows if row["group"] == 4]):
        for first in (True, False):
            got, taus, terms = ours(name, Case(first, rows=copy.deepcopy(some)))
            assert (
                torch.isfinite(got).all()
                and np.isfinite(terms["adv"]).all()
                and np.isfinite(terms["token_weight"]).all()
            )
            assert all(math.isfinite(tau.advantage) for tau in taus)
            # what instructions are credited with
            assert [tau.reward for tau in taus] == [row["r"] for row in some]


# ---- the flags, the learner


@pytest.fixture(scope="module")
def model(world):
    """The world's policy in float64, so that what differs is the mathematics."""
    return copy.deepcopy(world[0]).double()


def learner_of(model, name, kind=ObjectiveLearner, **settings):
    cfg = vars(settings_of(**dict(beta=0.0, lr=1e-4) | settings))
    return kind(copy.deepcopy(model), None, ObjectiveConfig(**cfg, objective=name))


@pytest.mark.parametrize("name", ["gspo", "tis"])
def test_an_objective_that_looks_at_the_whole_mini_batch_does_not_depend_on_micro_batches(
    model, name
):
    taus = batch_of(4)
    for tau in taus[::2]:
        tau.instruction_id = 1
        tau.credit = [tau.advantage + k for k in range(len(turn_lengths(tau)))]
    for tau in taus[1::2]:
        tau.credit = [tau.advantage] * len(turn_lengths(tau))
    parts = [taus[: 2 * G], taus[2 * G :]]
    (one, metrics, _), (other, also, _) = (
        gradients(learner_of(model, name, micro_tokens=micro_tokens), parts)
        for micro_tokens in (100, 10**6)
    )
    assert all(error(a, b) < 1e-4 and b.norm() > 0 for a, b in zip(one, other, strict=True))
    assert metrics == pytest.approx(also, rel=1e-3)


def test_a_group_that_a_mini_batch_cuts_is_still_compared_as_a_whole(model):
    """DAPO's mini-batches of 4, of groups of 3: what is left of some has only right or wrong
    answers."""
    taus = batch_of(5)
    for k, tau in enumerate(taus):
        tau.failed = k in (0, 3, 7, 8, 9, 10, 11)  # the fourth group as a whole, of the fifth none
    right = {g: sum(not tau.failed for tau in taus if tau.group == g) for g in range(5)}
    learner = learner_of(model, "dapo", mini_batch=4, lr=1e-3)
    # the last mini-batch has nothing to learn from
    parts = minibatches(taus, learner.cfg)[:3]
    with torch.no_grad():
        old = {id(tau): logprobs(learner.model, tau) for tau in taus}

    def expected(k):
        surrogates = []
        for tau in parts[k]:
            if 0 < right[tau.group] < G:
                rho = torch.exp(logprobs(learner.model, tau) - old[id(tau)])
                surrogates.append(clipped(rho, tau.advantage, 0.2, 0.28))
        return gradient(-torch.cat(surrogates).mean(), learner.model)

    got, _, want = gradients(learner, parts, expected)
    assert len(got) == len(parts)
    assert all(error(a, clip(b)) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.ranks
def test_an_objective_sees_the_whole_mini_batch_on_every_rank(tiny_path, tmp_path):
    """GSPO needs a ratio a sequence, from several passes."""
    from test_ranks import CFG, Update, same, together, weights_of

    cfg, taus = ObjectiveConfig(**vars(CFG), objective="gspo"), batch_of(7, seed=3)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
        tau.advantage *= 3
    parts = minibatches(taus, cfg)
    (tmp_path / "b.pkl").write_bytes(pickle.dumps((cfg, parts)))
    whole = load_model(tiny_path)
    first, learner = weights_of(whole), ObjectiveLearner(whole, copy.deepcopy(whole), cfg)
    one = Update([learner.update(t, parts) for t in (1, 2)], weights_of(whole), first)
    guest = ["tests/extras/ranks_guest.py", "extras.objectives:ObjectiveLearner"]
    found = together(2, tiny_path, tmp_path, guest, whole=tmp_path / "b.pkl")
    same(*found["whole"], one, 5e-5)


@pytest.mark.slow
def test_what_an_objective_remembers_is_resumed(tmp_path):
    """A run that lost all after step 3 ends as one that lost nothing."""
    flags = [*SMALL, "--objective", "spo", "--T", "6", "--keep", "9"]
    objectives.main([*flags, "--out", str(tmp_path / "whole")])
    out = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(out / "checkpoints" / "step-000006")
    objectives.main([*flags, "--out", str(out), "--resume"])
    assert metrics(out) == metrics(tmp_path / "whole")
    weights = [
        (tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("whole", "resumed")
    ]
    assert weights[0] == weights[1]


# ---- dynamic sampling


@pytest.mark.parametrize("mixed, draws, kept", [(4, 1, 4), (2, 2, 4), (1, 4, 4), (0, 4, 0)])
def test_a_step_draws_until_its_groups_are_mixed_and_updates_on_these(mixed, draws, kept):
    """Of 4 groups of 2 the first `mixed` of every draw have a right and a wrong answer, the others
    two right ones."""
    D = {q.id: q for q in questions("q", 9).values()}
    cfg = ObjectiveConfig(batch=4, G=2)
    P, played, updated = Population(cfg), [], []
    P.join("I", None, 0)

    def rollout(t, purpose, jobs):
        answers = [k % 8 % 2 and k % 8 < 2 * mixed for k in range(len(jobs))]
        played.append([
            Trajectory(0, job.question, job.group, [], 0, prediction=None if wrong else job.question.golds[0])
            for job, wrong in zip(jobs, answers, strict=True)
        ])  # fmt: skip
        return list(played[-1])

    policy = SimpleNamespace(rollout=rollout, update=lambda t, taus: updated.extend(taus))
    evolution = SimpleNamespace(D=D, P=P)
    refilling = Refilling(cfg, Exam(cfg, D), policy, evolution)
    jobs = P.draw_jobs(np.random.default_rng(0), list(D.values())[:4], 2)
    taus = refilling.rollout(3, "rollout", jobs)
    assert taus == sum(played, []) and len(played) == draws
    assert [tau.group for tau in taus] == [k for k in range(4 * draws) for _ in range(2)]
    refilling.update(3, taus)
    whole = [sum(tau.failed for tau in updated[k : k + 2]) for k in range(0, 8, 2)]
    assert len(updated) == 8 and whole == [1] * kept + [0] * (4 - kept)
    assert refilling.rollout(3, "verify 0", jobs) == played[draws] and len(played) == draws + 1


@pytest.mark.slow
def test_a_whole_run_scores_every_rollout_once(tmp_path, monkeypatch):
    scored, reward = [], SearchQA.reward
    monkeypatch.setattr(
        SearchQA, "reward", lambda task, taus: scored.extend(taus) or reward(task, taus)
    )
    refill.main(["--out", str(tmp_path / "r"), "--objective", "dapo", *SMALL])
    assert metrics(tmp_path / "r") and len(scored) == len(set(map(id, scored)))
