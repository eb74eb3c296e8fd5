"""How often rules err (extras/campaigns/errors.py), on populations whose errors can be computed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

import inspo
from config import PRESETS
from extras import espl
from extras.campaigns.errors import choosing_errors, front_errors, joining_errors
from extras.espl import ESPLConfig
from extras.selection import LowerBound, Paired, SelectionConfig

CFG = SelectionConfig(**PRESETS["world"] | {"N_P": 4, "tau_s": 1e6})  # draws instructions evenly
ESPL = ESPLConfig(**PRESETS["world"])
PAPER = inspo.population_of


def chosen(R, batch, trials, margin, rule=PAPER, cfg=CFG):
    return choosing_errors(rule, R, batch, cfg, np.random.default_rng(0), trials, margin)



def population(*means, questions=50, rollouts=4):
    """Rewards of instructions that answer these shares of the questions, always the same ones."""
    return np.stack([np.tile((np.arange(questions) < m * questions)[:, None], rollouts) * 1.0 for m in means])


def test_without_noise_the_worse_half_is_pruned():
    found = chosen(population(1.0, 0.0, 1.0, 0.0), 64, 50, 0.02)
    assert found == (0.0, 0.0, 0.0, 0.0, 2.0)


def test_by_chance_alone_half_of_the_pairs_are_wrong():
    """Rewards drawn from one distribution, but two instructions luckier on the large set than the others by a hair."""
    R = np.random.default_rng(1).random((4, 4000, 1)) < 0.5
    R = R - R.mean((1, 2), keepdims=True) + np.array([0.501, 0.5, 0.501, 0.5])[:, None, None]
    found = chosen(R, 4, 250, 0.0005)
    assert found.wrong == pytest.approx(0.5, abs=0.06) and found.misranked == pytest.approx(0.5, abs=0.06)
    assert found.lost == found.missed == 0.0  # two are equally good: neither is clearly the best


def test_by_chance_alone_e_spl_ranks_half_of_the_pairs_wrong_and_misses_the_best_four_times_in_five():
    R = np.random.default_rng(1).random((7, 4000, 1)) < 0.5
    means = np.array([0.5, 0.5, 0.502, 0.5, 0.5, 0.9, 0.9])  # the last two never play: its latest 5 do
    R = R - R.mean((1, 2), keepdims=True) + means[:, None, None]
    found = chosen(R, 24, 400, 0.001, espl.population_of, ESPL)
    assert found.misranked == pytest.approx(0.5, abs=0.06) and found.missed == pytest.approx(0.8, abs=0.06)
    assert (found.wrong, found.lost, found.pruned) == (0.0, 0.0, 0.0)  # nobody is pruned
    clear = population(0.2, 0.4, 0.6, 0.8, 1.0)
    assert chosen(clear, 300, 20, 0.02, espl.population_of, replace(ESPL, K_p=20)).missed == 0.0


def test_a_larger_batch_errs_less():
    R = (np.random.default_rng(2).random((4, 400, 4)) < np.array([0.5, 0.4, 0.3, 0.2])[:, None, None]) * 1.0
    small, middle, large = (chosen(R, n, 80, 0.02) for n in (4, 24, 200))
    assert small.wrong > middle.wrong > large.wrong and small.misranked > middle.misranked > large.misranked
    assert small.lost > large.lost and small.missed > large.missed and large.wrong < 0.05


def test_differences_within_the_margin_are_no_errors():
    R = population(0.50, 0.51, 0.50, 0.51, questions=100)
    assert chosen(R, 4, 100, 0.02)[:4] == (0.0, 0.0, 0.0, 0.0)


def test_the_gate_s_errors_are_those_of_the_binomial():
    """The parent answers all of its questions; the revision each with 0.9: it joins only if it answers all n too."""
    parent = np.ones((1000, 1))
    child = (np.random.default_rng(3).permutation(1000) < 900)[:, None] * 1.0
    n = 8
    exact = math.comb(900, n) / math.comb(1000, n)  # drawn without replacement
    found = joining_errors(PAPER, parent, child, n, np.random.default_rng(0), 3000, CFG)
    assert found == pytest.approx(exact, abs=0.03)
    better = joining_errors(PAPER, child, parent, n, np.random.default_rng(0), 200, CFG)
    assert better == 0.0  # a better one always joins here


def test_the_paired_rule_prunes_less_and_errs_less():
    rng = np.random.default_rng(2)
    hard = rng.random((1, 400, 1))  # questions that differ far more than the instructions do
    R = (rng.random((4, 400, 4)) < hard + np.array([0.08, 0.04, 0.0, -0.04])[:, None, None]) * 1.0
    paper, paired = (chosen(R, 24, 500, 0.02, rule) for rule in (PAPER, Paired))
    assert paper.pruned == 2.0 and paired.pruned < 1.0
    assert paired.lost < paper.lost and paired.wrong < paper.wrong
    assert paired.misranked < paper.misranked


def test_a_round_of_gepa_errs_as_can_be_computed():
    """A revision that is right wherever its parent is wrong, and the reverse, joins: each wins on D_B."""
    right = np.arange(200) < 120
    parent, other = right[:, None] * 1.0, ~right[:, None] * 1.0
    rng = np.random.default_rng(0)
    assert front_errors(parent, other, 24, rng, 100, CFG) == 1.0  # worse, and joins
    assert front_errors(other, parent, 24, rng, 100, CFG) == 0.0  # better, and joins
    assert front_errors(parent, parent * 0, 24, rng, 100, CFG) == 0.0  # never more right than its parent
    # It is right on 5 of the parent's 10 failures and nowhere else: it passes on the 3 shown unless all three are of
    # the other 5, C(5, 3) / C(10, 3) = 1 in 12; on D_B, the other 197 questions, it wins 2 to 4 where its parent fails.
    parent, child = (np.arange(200) >= 10)[:, None] * 1.0, (np.arange(200) < 5)[:, None] * 1.0
    found = front_errors(parent, child, 200, rng, 3000, replace(CFG, failures=3))
    assert found == pytest.approx(11 / 12, abs=0.02)


def test_more_rollouts_and_a_lower_bound_keep_more_of_the_worse_out():
    rng = np.random.default_rng(4)
    p = rng.random((300, 1))
    parent, child = ((rng.random((300, 8)) < p + shift) * 1.0 for shift in (0.0, -0.05))
    rates = [
        joining_errors(rule, parent, child, 48, np.random.default_rng(0), 300, replace(CFG, gate_samples=samples))
        for rule, samples in ((PAPER, 1), (PAPER, 4), (LowerBound, 1))
    ]
    assert rates[0] > rates[1] and rates[0] > rates[2]
