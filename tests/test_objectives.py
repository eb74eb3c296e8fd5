"""The advantages of Eq. 3, by hand."""

import math

import numpy as np
import pytest

from data import Question
from objectives import group_advantages, set_advantages
from rollout import Trajectory

QUESTION = Question("q", "Who?", ("x",), "s")


def rewarded(*groups):
    """Returns the trajectories of groups 0, 1, ... with these rewards."""
    return [Trajectory(0, QUESTION, k, [1], 1, reward=r) for k, rewards in enumerate(groups) for r in rewards]


def advantages(taus):
    set_advantages(taus)
    return [tau.advantage for tau in taus]


def test_advantages_by_hand():
    std = math.sqrt((2 * 0.6**2 + 3 * 0.4**2) / 4)  # mean 0.4, unbiased
    want = [0.6 / std, -0.4 / std, -0.4 / std, -0.4 / std, 0.6 / std]
    want += [-0.5 / math.sqrt(0.5), 0.5 / math.sqrt(0.5)]
    want += [1, 0, -1]  # mean 0.25, std 0.25
    assert advantages(rewarded([1, 0, 0, 0, 1], [0, 1], [0.5, 0.25, 0.0])) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("rewards", [[0] * 5, [1] * 5, [0.1] * 7])
def test_a_group_without_variance_has_advantage_0(rewards):
    taus = rewarded(rewards)
    for tau in taus:
        tau.advantage = 5.0  # of an earlier step: it is overwritten
    assert advantages(taus) == pytest.approx([0] * len(rewards), abs=1e-9)


def test_groups_are_told_apart_by_their_number_alone():
    """Not by their question, their instruction or their place in the list."""
    taus = rewarded([1, 1], [1, 0])
    set_advantages([taus[k] for k in (2, 0, 3, 1)])
    assert [tau.advantage for tau in taus] == pytest.approx([0, 0, 0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_an_advantage_is_a_float_whatever_the_rewards_are():
    assert {type(a) for a in advantages(rewarded([1, 0], [0.5, np.float64(0.25)]))} == {float}


def test_advantages_of_an_array_depend_on_the_differences_alone():
    r = np.array([1.0, 0.0, 0.0])
    assert group_advantages(r + 5) == pytest.approx(group_advantages(r))
    assert group_advantages(100 * r) == pytest.approx(group_advantages(r), rel=1e-4)  # in units of their deviation
    assert group_advantages(r[::-1]) == pytest.approx(group_advantages(r)[::-1])
    assert group_advantages(r).sum() == pytest.approx(0, abs=1e-9)


def test_a_difference_as_small_as_epsilon_counts_less():
    """Rewards 0 and 2e-6: distance 1e-6, unbiased deviation 1e-6 * sqrt(2), and 1e-6 is added to it."""
    assert group_advantages(np.array([2e-6, 0.0])) == pytest.approx([1 / (2**0.5 + 1), -1 / (2**0.5 + 1)])
