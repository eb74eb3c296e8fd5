"""Eq. 3's advantages by hand, without a model (test_grpo.py has one)."""

import numpy as np
import pytest

from grpo import Learner, group_advantages
from tasks import Question, Trajectory

QUESTION = Question("q", "Who?")


def rewarded(*pairs):
    """Returns trajectories with these (group, reward)."""
    return [Trajectory(0, QUESTION, group, [], 0, reward=r) for group, r in pairs]


def advantages(*pairs):
    taus = rewarded(*pairs)
    object.__new__(Learner).set_advantages(taus)
    return [tau.advantage for tau in taus]


def test_an_advantage_is_the_distance_to_the_group_s_mean_in_units_of_its_spread():
    """Rewards 1, 0, 0, 0, 1: mean 0.4 and unbiased standard deviation sqrt(1.2 / 4)."""
    A = advantages(*[(3, r) for r in (1.0, 0.0, 0.0, 0.0, 1.0)])
    sd = 0.3**0.5
    assert A == pytest.approx(
        [0.6 / (sd + 1e-6) if k in (0, 4) else -0.4 / (sd + 1e-6) for k in range(5)], rel=1e-12
    )
    assert group_advantages(np.array([0.0, 1e-6])) == pytest.approx(
        [-0.5e-6 / (1e-6 / 2**0.5 + 1e-6), 0.2928932]
    )


def test_who_is_alone_or_like_the_others_stands_out_nowhere():
    assert advantages((0, 1.0), (1, 0.5), (1, 0.5), (2, 0.0)) == [0.0] * 4
    assert advantages() == []


def test_groups_may_come_in_any_order():
    pairs = [(7, 1.0), (2, 0.0), (7, 0.0), (5, 0.5), (2, 3.0), (7, 0.0), (2, 0.0)]
    got = advantages(*pairs)
    for group in (7, 2, 5):
        rewards = [r for g, r in pairs if g == group]
        alone = advantages(*[(0, r) for r in rewards])
        assert [a for a, (g, _) in zip(got, pairs, strict=True) if g == group] == alone
    assert got[0] > 0 > got[2] and got[4] > 0 > got[1] and got[3] == 0
