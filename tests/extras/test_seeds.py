"""What few seeds can tell, against binomial sums and played experiments; where the rows of results/ are from."""

import math
import subprocess
from itertools import product

import numpy as np
import pytest
from scipy import stats

from config import HERE
from extras.campaigns.seeds import fisher, seeds_by_mean, seeds_by_share, share, two_valued
from journal.directory import read_jsonl

ROWS = sorted((HERE / "results").glob("*.jsonl"))


def tail(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@pytest.mark.parametrize("k, n", [(0, 5), (3, 5), (5, 5), (3, 7), (1, 5)])
def test_the_interval_s_ends_are_where_the_binomial_tails_are_2_5_percent(k, n):
    found = share([0.9] * k + [0.2] * (n - k))
    assert (found.k, found.n) == (k, n)
    assert found.low == 0 if k == 0 else tail(k, n, found.low) == pytest.approx(0.025)
    assert found.high == 1 if k == n else 1 - tail(k + 1, n, found.high) == pytest.approx(0.025)


def test_an_arm_is_two_valued_where_some_of_its_runs_got_there():
    assert two_valued([0.2, 0.9]) and not two_valued([0.2, 0.3]) and not two_valued([0.8, 0.9])
    assert not two_valued([0.48, 0.5, 0.55])  # one cloud, which 0.5 happens to cut


def test_fisher_by_hand():
    p = fisher(share([0.9] * 3 + [0.2] * 2), share([0.2] * 5))  # of C(10, 3) = 120 deals, 2 x C(5, 3) = 20 are as far
    assert p == pytest.approx(20 / 120)


@pytest.mark.parametrize("p, q", [(0.6, 0.0), (1.0, 0.6), (0.9, 0.4)])
def test_so_many_seeds_tell_two_shares_in_four_of_five_played_experiments_and_one_fewer_does_not(p, q):
    rng, n = np.random.default_rng(1), seeds_by_share(p, q)

    def power(n):
        told = {(i, j): stats.fisher_exact([[i, n - i], [j, n - j]])[1] < 0.05
                for i, j in product(range(n + 1), repeat=2)}  # fmt: skip
        played = zip(rng.binomial(n, p, 20_000), rng.binomial(n, q, 20_000), strict=True)
        return np.mean([told[int(i), int(j)] for i, j in played])

    assert power(n) > 0.79 and power(n - 1) < 0.81


@pytest.mark.parametrize("d, a, b", [(0.1, 0.1, 0.1), (0.035, 0.062, 0.014), (1.0, 1.0, 0.3)])
def test_so_many_seeds_tell_two_means_in_four_of_five_played_experiments_and_one_fewer_does_not(d, a, b):
    rng, n = np.random.default_rng(2), seeds_by_mean(d, a, b)

    def power(n):
        x, y = rng.normal(d, a, (20_000, n)), rng.normal(0, b, (20_000, n))
        return np.mean(stats.ttest_ind(x, y, axis=1, equal_var=False).pvalue < 0.05)

    assert power(n) > 0.78 and power(n - 1) < 0.82


def test_against_a_number_it_is_the_test_of_one_sample():
    rng, n = np.random.default_rng(3), seeds_by_mean(0.5, 1.0, 0.0)
    found = stats.ttest_1samp(rng.normal(0.5, 1.0, (20_000, n)), 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_where_no_number_of_seeds_would_do_none_is_named():
    assert seeds_by_mean(0.0, 0.1, 0.1) is None and seeds_by_share(0.5, 0.5) is None
    assert seeds_by_mean(0.001, 0.06, 0.05) is None and seeds_by_mean(0.1, 0.0, 0.0) is None


def git(*argv):
    return subprocess.run(["git", *argv], cwd=HERE, capture_output=True, text=True)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_s_commit_is_in_the_history_or_the_row_says_that_it_is_not(path):
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.returncode or shallow.stdout.strip() != "false":
        pytest.skip("no whole history here")
    for commit in {row["commit"] for row in read_jsonl(path) if not row.get("commit_lost")}:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_of_a_run_names_its_machine_and_sampler_and_any_other_its_source(path):
    for row in read_jsonl(path):
        assert row.get("source") or (row["machine"] and (row.get("sampler") or "policy" in row))
