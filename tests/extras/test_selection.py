"""Rules of choosing (extras/selection.py): least squares, balance, error rates, power; who joins by
which gate."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats
from test_algorithm import Evolved, questions, restored, run

from config import PRESETS, validate
from extras.selection import (
    ALPHA,
    Fill,
    LowerBound,
    Paired,
    SelectionConfig,
    lower_bound,
    population_of,
)
from population import Candidate
from tasks import Question, Trajectory

PAIRS = {n: np.array(list(itertools.combinations(range(n), 2))) for n in range(2, 8)}


def of(n, kind=Paired):
    """Returns a population of n instructions."""
    P = kind(SelectionConfig())
    for k in range(n):
        P.join(f"I{k}", None, 0)
    return P


def learned(n, members, r):
    """Returns a population of n instructions that has compared them by these questions."""
    P = of(n)
    P.learn(members, r)
    P.weigh()
    return P


def lstsq(members, r, n):
    """Returns (effects, their covariance, level) by dummy variables: one a question, one an
    instruction but the first.

    members, r: lists of a question's instructions and rewards. Effects are centred over the n
    instructions.
    """
    rows = [
        (q, j, x)
        for q, (js, xs) in enumerate(zip(members, r, strict=True))
        for j, x in zip(js, xs, strict=True)
    ]
    X = np.zeros((len(rows), len(members) + n - 1))
    for row, (q, j, _) in enumerate(rows):
        X[row, q] = 1
        if j:
            X[row, len(members) + j - 1] = 1
    y = np.array([x for *_, x in rows])
    beta, residual, rank, _ = np.linalg.lstsq(X, y, rcond=None)
    rss = float(((y - X @ beta) ** 2).sum())
    cov = np.linalg.inv(X.T @ X) * rss / (len(y) - rank)
    C = np.eye(n)[:, 1:] - 1 / n  # from effects against the first to effects against the mean
    a = C @ beta[len(members) :]
    level = float(np.mean([x - a[j] for _, j, x in rows]))
    return a, C @ cov[len(members) :, len(members) :] @ C.T, level


# ---- least squares


def test_effects_errors_and_weights_are_those_of_an_independent_solver():
    rng = np.random.default_rng(0)
    # questions under 1 to 4 of 5 instructions
    members = [list(rng.permutation(5)[: 1 + k % 4]) for k in range(60)]
    r = [list(rng.random(len(js)) + 0.1 * np.array(js)) for js in members]
    P = learned(5, members, r)
    a, cov, level = lstsq(members, r, 5)
    for leader in range(5):
        distance, se = P.design.fit().behind(leader)
        var = cov.diagonal() + cov[leader, leader] - 2 * cov[leader]
        assert distance == pytest.approx(a[leader] - a, abs=1e-10) and se == pytest.approx(
            np.sqrt(var), abs=1e-7
        )
    assert [I.w for I in P.active] == pytest.approx(level + a, abs=1e-10)
    assert P.best().id == a.argmax() == P.ranked()[0].id
    P.ids = [4, 1, 2]  # two have left, and weights do not change
    P.weigh()
    assert [I.w for I in P.active] == pytest.approx(level + a[P.ids], abs=1e-10)


def test_trajectories_are_read_as_groups_of_a_question_and_instruction():
    P, q = of(2), [Question(x, "Who?", ("x",), "s") for x in "ab"]
    # by question and instruction
    rewards = {(0, 0): (1, 0), (0, 1): (0, 0), (1, 0): (1, 1), (1, 1): (1, 0)}
    P.update_weights(
        Trajectory(j, q[k], 0, [], 0, reward=r) for (k, j), rs in rewards.items() for r in rs
    )
    assert P.design.fit().behind(0)[0] == pytest.approx([0, 0.5]) and P.design.fit().df == 1


# ---- the draw


def test_a_batch_has_as_many_groups_as_the_paper_s_and_its_pairs_are_balanced():
    """7 instructions, 25 groups a step: two of them share each of 12 questions, and one has the
    last alone."""
    P, rng, asked = of(7), np.random.default_rng(0), list(questions("q", 60).values())
    for _ in range(12):
        jobs = P.draw_jobs(rng, asked[:25], 3)
        assert [job.group for job in jobs] == [k // 3 for k in range(75)]
        drawn = [(job.question, job.instruction) for job in jobs]
        assert drawn == [x for x in drawn[::3] for _ in range(3)]  # three of each group
        # a question's stand together
        assert [q for q, _ in drawn[::3]] == [asked[k // 2] for k in range(25)]
        pairs = [[j for _, j in drawn[k : k + 6 : 3]] for k in range(0, 75, 6)]
        assert [len(set(pair)) for pair in pairs] == [2] * 12 + [1]
        P.learn(pairs, [[0.0] * len(pair) for pair in pairs])
    shared = P.design.drawn()
    assert np.ptp(shared[np.triu_indices(7, 1)]) <= 2 and np.ptp(shared.diagonal()) <= 2
    assert shared.trace() == 12 * 25 and P.probabilities() == pytest.approx([1 / 7] * 7)


def ids_of(P, seed, asked):
    return [
        job.instruction
        for job in P.draw_jobs(np.random.default_rng(seed), list(questions("q", asked).values()), 1)
    ]


def test_any_pair_may_come_first_but_for_one_that_has_met_and_who_is_alone_gets_every_question():
    assert len({tuple(sorted(ids_of(of(5), seed, 8)[:2])) for seed in range(150)}) == 10
    met = [[a, b] for a in (0, 1) for b in (2, 3)] * 5 + [[2, 3]] + [[4, k] for k in range(4)]
    P = learned(5, met, [[0.0, 0.0]] * len(met))
    # though 4 has had fewer questions
    assert all({0, 1} == set(ids_of(P, seed, 2)) for seed in range(5))
    assert ids_of(of(1), 0, 3) == [0, 0, 0]


# ---- pruning


def generation(true, look, rng, looks=3, difficulty=0.6):
    """Plays a generation with these effects; returns (P, ids dropped at each of its prunings).

    `look`: questions between two prunings. A question's probability of success is Beta with mean
    .35, and `difficulty` is the share of a reward's variance that it explains; 5 rollouts a group.
    """
    P, n = of(len(true)), len(true)
    k = 1 / difficulty - 1
    dropped = []
    for at in range(1, looks + 1):
        if len(P) > 1:
            pairs = np.array(P.ids)[PAIRS[len(P)]]
            members = pairs[
                rng.permutation(len(pairs) * (look // len(pairs) + 1))[:look] % len(pairs)
            ]
            p = np.clip(rng.beta(0.35 * k, 0.65 * k, (look, 1)) + np.asarray(true)[members], 0, 1)
            P.learn(members.tolist(), (rng.binomial(5, p) / 5).tolist())
            P.weigh()
        dropped.append([I.id for I in P.prune(P.ranked(), 1, at)])
    assert len(P) + sum(map(len, dropped)) == n
    return P, dropped


@pytest.mark.parametrize("n", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_a_generation_of_equals_loses_anyone_in_at_most_alpha_of_the_cases(n):
    """7 of them with 3 prunings. Were alpha shared over the leader's 6 rivals alone, it would be
    more than half."""
    rng = np.random.default_rng(0)
    wrong = sum(any(sum(generation([0.0] * 7, 24, rng)[1], [])) for _ in range(n)) / n
    assert 0.01 < wrong <= ALPHA


def test_at_most_half_leave_at_once_the_last_ones_and_N_parent_stay():
    # all are behind the first for certain
    r = (1 - PAIRS[7] / 10) + 0.001 * np.sin(PAIRS[7] + np.arange(21)[:, None])
    for N_parent, *leaving in ((1, [4, 5, 6], [2, 3]), (5, [5, 6], [])):
        P = learned(7, PAIRS[7].tolist(), r.tolist())
        for t, ids in enumerate(leaving, 5):
            assert [I.id for I in P.prune(P.ranked(), N_parent, t)] == ids
            assert all(P.family[j].left == t for j in ids)


def test_without_noise_or_without_a_link_nobody_leaves_by_chance():
    P = of(3)
    assert P.prune(P.ranked(), 1, 5) == []  # no question yet
    P = learned(3, [[0, 1]] * 20, [[0.5, 0.5]] * 20)
    assert P.prune(P.ranked(), 1, 5) == [] and P.family[2].w == 0
    r = [[1.0, 0.9 + k % 2 / 100] for k in range(20)] + [[0.2, 0.1]] * 20
    P = learned(4, [[0, 1]] * 20 + [[2, 3]] * 20, r)  # two pairs that never met
    assert np.isinf(P.design.fit().behind(0)[1]).tolist() == [False, False, True, True]
    # each part on its own level
    assert [I.w for I in P.active] == pytest.approx([1, 0.905, 0.2, 0.1], abs=0.005)
    assert [I.id for I in P.prune(P.ranked(), 1, 5)] == [1]


def test_the_later_prunings_of_a_generation_ask_for_more():
    """The k-th spends alpha / (k (k + 1)) over n (n - 1) ordered pairs."""
    P = learned(2, [[0, 1]] * 12, [[0.1 + d, 0.1 - d] for d in np.linspace(-0.1, 0.25, 12)])
    distance, se = P.design.fit().behind(0)
    assert ALPHA / 12 < stats.t.sf(distance[1] / se[1], P.design.fit().df) < ALPHA / 4
    for P.looks, ids in ((1, []), (0, [1])):
        assert [I.id for I in P.prune(P.ranked(), 1, 5)] == ids


def test_the_comparison_begins_anew_with_a_generation():
    P, _ = generation([0.3, 0, 0], 40, np.random.default_rng(0), looks=1)
    # nobody new: it goes on
    assert P.replace_by(P.ranked()[:1], [], 15) == [] and P.design and P.looks == 1
    assert [
        I.id for I in P.replace_by(P.ranked()[:1], [Candidate("new", 0, [1.0], [0.0])], 15)
    ] == [3]
    assert (P.design, P.looks, P.family[0].rewards) == (None, 0, [])
    ids_of(P, 0, 4)
    assert P.design.ids == [0, 3]


def test_a_paired_population_restored_from_json_continues_identically():
    P, _ = generation([0.2, 0.1, 0, 0, 0], 30, np.random.default_rng(0), looks=2)
    Q = of(0)
    Q.load_state_dict(json.loads(json.dumps(P.state_dict())))
    assert Q.state_dict() == P.state_dict() and Q.family == P.family and Q.looks == 2
    for X in (P, Q):
        X.learn(
            X.blocks(np.random.default_rng(1), 40), np.linspace(0, 1, 40).reshape(20, 2).tolist()
        )
        X.weigh()
        X.prune(X.ranked(), 1, 15)
    assert Q.state_dict() == P.state_dict()
    Q.load_state_dict(json.loads(json.dumps(of(3).state_dict())))
    assert Q.design is None and Q.ids == [0, 1, 2]


def test_algorithm_1_runs_with_pairs_in_place_of_the_paper_s_draw():
    right = {"I0": 6, "I1": 0, "I2": 3, "new": 6}
    common = dict(
        restored=(of(3), restored()[1]), T=4, K_p=2, K_e=4, T_e=9, batch=6, G=2, N_P=3, D_B=2
    )
    _, policy, log, _ = run(
        right, ["new"], population=population_of, config=SelectionConfig, rank="paired", **common
    )
    for _, purpose, jobs, _ in policy.rollouts[:4]:
        assert purpose == "rollout" and [job.group for job in jobs] == [k // 2 for k in range(12)]
        asked = [
            {job.instruction for job in jobs if job.question == q}
            for q in {job.question for job in jobs}
        ]
        assert [len(ids) for ids in asked] == [2, 2, 2]
    assert log.of("evolve") and log.of("prune") and log.P.family[0].left is None


# ---- who joins


def test_the_lower_bound_by_hand():
    """d = 1/4 with sd 1/2 over 4 questions: .25 - .978 x .25 = .0054 is above -.01; +1 and -1 alone
    are not."""
    r_parent, t = [0.0, 1.0, 0.0, 1.0], stats.t.ppf(0.8, 3)
    assert lower_bound([1.0, 1.0, 0.0, 1.0], r_parent) == pytest.approx(0.75 - t * 0.25)
    assert lower_bound([1.0, 0.0, 0.0, 1.0], r_parent) == pytest.approx(
        0.5 - t * math.sqrt(2 / 3) / 2
    )
    P = LowerBound(SelectionConfig())
    near = [
        ([1.0, 1.0, 0.0, 1.0], r_parent), ([1.0, 0.0, 0.0, 1.0], r_parent),
        ([0.5] * 9, [0.5] * 9), ([0.495] * 9, [0.5] * 9), ([0.48] * 9, [0.5] * 9),
    ]  # fmt: skip
    near = [Candidate(str(k), 0, *pair) for k, pair in enumerate(near)]
    assert [c.text for c in P.select_top(near, 9)] == ["0", "2", "3"] and [
        c.text for c in P.select_top(near, 2)
    ] == ["0", "2"]


def evolved(gate, right, *replies, **knobs):
    """Returns an evolution of one instruction, "old", under this gate."""
    e = Evolved(
        {"old": 0.5},
        right,
        *replies,
        population=population_of,
        config=SelectionConfig,
        gate=gate,
        **knobs,
    )
    return e.joined[0], e.texts


@pytest.mark.parametrize("gate, right, replies, knobs, joined, texts", [
    # at most .01 below the parent for certain
    ("lower_bound", dict(above=10, equal=5, near=4), ["near equal above"], {}, "above equal", "old above equal"),
    # places left go to candidates below their parent, of any round, and to a good one beyond top_n
    # first
    ("fill", dict(good=6, near=4, far=3), ["far good", "near"], dict(N_P=3), "good", "old good near"),
    ("fill", dict(near=4, far=3), ["near", "far"], dict(N_P=3), "", "old near far"),
    ("fill", dict(a=8, b=7, c=4), ["c b a"], dict(top_n=1, rounds=1), "a", "old a b c"),
    # but to none that is significantly worse: 4 lost of 4 is no proof at 5 %, 5 of 5 is
    ("fill", dict(old=9, four=5, five=4), ["five four"], {}, "", "old four"),
    ("fill", dict(old=9, five=4), ["five"], {}, "", "old"),
])  # fmt: skip
def test_who_joins_an_evolution_by_the_gate(gate, right, replies, knobs, joined, texts):
    found = evolved(gate, dict(old=5) | right, *map(str.split, replies), **dict(N_P=4) | knobs)
    assert found == (joined.split(), texts.split())


def test_the_smallest_loss_against_its_own_parent_fills_a_place_first():
    """Parents differ in how much they know: raw rewards of different rounds do not compare."""
    P = Fill(SelectionConfig(N_P=4))
    parents = [P.join(text, None, 0) for text in ("strong", "weak")]
    right = {"x": (5, 8), "y": (2, 3), "z": (1, 3)}  # of 10 questions, and its parent's
    for text, known in right.items():
        assert (
            P.select_top([Candidate(text, 0, *([1.0] * n + [0.0] * (10 - n) for n in known))], 2)
            == []
        )
    assert [I.text for I in P.replace_by(parents, [], 9)] == ["y", "z"]
    assert P.replace_by(parents, [], 20) == []  # those of an earlier evolution are forgotten


# ---- the rules together


def test_rules_combine():
    """Paired with Fill: the draw and the fresh comparison of the one, the filled places of the
    other."""
    P = population_of(SelectionConfig(rank="paired", gate="fill", N_P=2))
    old = P.join("old", None, 0)
    P.learn([[0]] * 2, [[0.5]] * 2)
    assert P.select_top([Candidate("near", 0, [0.0, 1.0], [1.0, 1.0])], 1) == []
    assert [I.text for I in P.replace_by([old], [], 9)] == ["near"] and P.design is None
    P, paper = (
        population_of(SelectionConfig(**knobs))
        for knobs in (dict(gate="lower_bound", rank="paired"), {})
    )
    assert isinstance(P, LowerBound) and isinstance(P, Paired)
    assert not isinstance(paper, (Paired, Fill, LowerBound))


@pytest.mark.parametrize(
    "flags, says",
    [
        (dict(rank="best"), "--rank best: choose paper or paired"),
        (dict(gate="upper"), "--gate upper: choose paper, lower_bound or fill"),
        (dict(rank="paired", mode="static"), "--rank paired: --mode static"),
        (dict(gate="fill", mode="static"), "--gate fill: --mode static"),
        (
            dict(objective="consistent"),
            "--objective consistent: compares a question's instructions",
        ),
        (dict(gate="lower_bound", D_B=1), "--D_B 1: --gate lower_bound needs at least 2"),
    ],
)
def test_an_impossible_rule_is_one_line(flags, says):
    assert validate(SelectionConfig(**PRESETS["world"] | flags)).startswith(says)
