"""Rules of choosing (extras/selection.py): who joins by which gate, who draws a rollout's
instruction."""

import numpy as np
import pytest
from scipy import stats
from test_algorithm import Evolved, questions

from config import PRESETS, build, validate
from extras.selection import ByQuestion, LowerBound, SelectionConfig, lower_bound, population_of
from plumbing.faults import Fault
from population import RatedCandidate


def test_by_question_every_rollout_of_a_group_draws_its_instruction():
    P, D = ByQuestion(SelectionConfig()), list(questions("q", 4).values())
    for k, w in enumerate((0.1, 0.3, 0.2)):
        P.join(f"I{k}", None, 0).rewards = [w]
    jobs = P.draw_jobs(np.random.default_rng(3), D, 5)
    assert [(job.group, job.question) for job in jobs] == [
        (k, q) for k, q in enumerate(D) for _ in range(5)
    ]
    drawn = np.random.default_rng(3).choice(3, size=20, p=P.probabilities()).tolist()
    assert [(job.instruction_id, job.instruction) for job in jobs] == [(j, f"I{j}") for j in drawn]


# ---- who joins


def test_the_lower_bound_by_hand():
    """d = 1/4 with sd 1/2 over 4 questions: .25 - .978 x .25 = .0054 is above -.01; +1 and -1 alone
    are not."""
    r_parent, t = [0.0, 1.0, 0.0, 1.0], stats.t.ppf(0.8, 3)
    assert lower_bound([1.0, 1.0, 0.0, 1.0], r_parent) == pytest.approx(0.75 - t * 0.25)
    P = LowerBound(SelectionConfig())
    near = [
        ([1.0, 1.0, 0.0, 1.0], r_parent), ([1.0, 0.0, 0.0, 1.0], r_parent),
        ([0.5] * 9, [0.5] * 9), ([0.495] * 9, [0.5] * 9), ([0.48] * 9, [0.5] * 9),
    ]  # fmt: skip
    near = [RatedCandidate(str(k), 0, *pair) for k, pair in enumerate(near)]
    assert [c.text for c in P.choose_joining(near, 9)] == ["0", "2", "3"] and [
        c.text for c in P.choose_joining(near, 2)
    ] == ["0", "2"]


def evolved(right, *replies, **knobs):
    """Returns an evolution of one instruction, "old", under the lower bound."""
    e = Evolved(
        {"old": 0.5},
        right,
        *replies,
        population=population_of,
        config=SelectionConfig,
        lower_bound=True,
        **knobs,
    )
    return e.joined[0], e.texts


def test_who_joins_an_evolution_is_at_most_a_hundredth_below_the_parent_for_certain():
    right = dict(old=5, above=10, equal=5, near=4)
    found = evolved(right, ["near", "equal", "above"], N_P=4)
    assert found == (["above", "equal"], ["old", "above", "equal"])


# ---- the rules together


def test_rules_combine():
    P, paper = (
        population_of(SelectionConfig(**knobs))
        for knobs in (dict(lower_bound=True, groups="question"), {})
    )
    assert isinstance(P, LowerBound) and isinstance(P, ByQuestion)
    assert not isinstance(paper, (LowerBound, ByQuestion))


@pytest.mark.parametrize(
    "flags, says",
    [
        (dict(lower_bound=True, mode="static"), "--lower_bound: --mode static"),
        (
            dict(objective="consistent"),
            "--objective consistent: compares a question's instructions",
        ),
        (dict(lower_bound=True, D_B=1), "--D_B 1: --lower_bound needs at least 2"),
    ],
)
def test_an_impossible_rule_is_one_line(flags, says):
    with pytest.raises(Fault, match=says):
        validate(build(SelectionConfig, PRESETS["world"] | flags))
