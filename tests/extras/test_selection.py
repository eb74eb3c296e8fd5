"""Rules of choosing (extras/selection.py): who joins by which gate, who draws a rollout's
instruction."""

import math

import numpy as np
import pytest
from scipy import stats
from test_algorithm import Evolved, questions

from config import PRESETS, validate
from extras.selection import (
    ByQuestion,
    Fill,
    LowerBound,
    SelectionConfig,
    lower_bound,
    population_of,
)
from population import Candidate


def test_by_question_every_rollout_of_a_group_draws_its_instruction():
    P, D = ByQuestion(SelectionConfig()), list(questions("q", 4).values())
    for k, w in enumerate((0.1, 0.3, 0.2)):
        P.join(f"I{k}", None, 0).rewards = [w]
    jobs = P.draw_jobs(np.random.default_rng(3), D, 5)
    assert [(job.group, job.question) for job in jobs] == [
        (k, q) for k, q in enumerate(D) for _ in range(5)
    ]
    drawn = np.random.default_rng(3).choice(3, size=20, p=P.probabilities()).tolist()
    assert [(job.instruction, job.text) for job in jobs] == [(j, f"I{j}") for j in drawn]


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
    P, paper = (
        population_of(SelectionConfig(**knobs))
        for knobs in (dict(gate="lower_bound", groups="question"), {})
    )
    assert isinstance(P, LowerBound) and isinstance(P, ByQuestion)
    assert not isinstance(paper, (Fill, LowerBound, ByQuestion))


@pytest.mark.parametrize(
    "flags, says",
    [
        (dict(gate="upper"), "--gate upper: choose paper, lower_bound or fill"),
        (dict(groups="pairs"), "--groups pairs: choose pair or question"),
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
