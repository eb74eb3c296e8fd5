"""The pages of two campaigns, objectives and rivals, from rows made by hand; the budgets of the latter's arms."""

import math

import numpy as np
import pytest
from scipy import stats

from extras.campaigns import objectives, rivals


def row(objective, mode, seed, em):
    start, n, sizes = {"static": (0.2, 1200), "inspo": (0.02, 2400)}[mode] + ("--batch 2",)
    return {
        "objective": objective, "mode": mode, "seed": seed, "sizes": sizes, "em": em, "em_start": start,
        "questions": 96, "trajectories": n, "searches": 1 + seed,
        "entropy": 0.25, "answered": 1.0, "seconds": 40.0 + seed,
        "reward": em, "largest_grad_norm": 0.5,
    }  # fmt: skip


def test_objectives_are_compared_with_grpo_and_the_page_says_how_many_differ_when_all_are_compared_at_once():
    em = {
        ("grpo", "static"): (0.2, 0.3, 0.4), ("dr_grpo", "static"): (0.5, 0.6, 0.7),
        ("grpo", "inspo"): (0.1, 0.2, 0.6), ("dr_grpo", "inspo"): (0.6, 0.1, 0.2),
    }  # fmt: skip
    page = objectives.table([row(o, mode, s, x) for (o, mode), seeds in em.items() for s, x in enumerate(seeds)])
    # By hand: both variances .01, se sqrt(.02 / 3), t = 3.67 with 4 degrees of freedom, p = .0213, doubled by Holm.
    half = 2.7764 * math.sqrt(0.02 / 3)
    assert f"| dr_grpo | 3 | 0.60 ± 0.25 | +0.300 [{0.3 - half:+.3f}, {0.3 + half:+.3f}] | 0.04 | 2.00 |" in page
    assert "| 0.04 |" in page and "| grpo | 3 | 0.30 ± 0.25 |  |  | 2.00 | 0.25 | 1.00 | 0.50 | 41 |" in page
    assert "Of 2 differences from `grpo` 1 has Holm's p below 0.05: `dr_grpo` (static, +0.30)." in page
    static, inspo = "## static, under one good instruction, from 0.20; 1,200", "## inspo, from 0.02; 2,400"
    assert page.index(static) < page.index(inspo)


def test_where_nothing_differs_the_page_says_what_could_have_been_seen():
    page = objectives.table([row(o, "static", s, x) for o in ("grpo", "spo") for s, x in enumerate((0.2, 0.3, 0.4))])
    assert "Of 1 differences from `grpo` none is told from chance" in page
    assert "misses a true difference of 0.31 at least once in five" in page
    draws = np.random.default_rng(0).normal([[0.0], [0.31]], 0.1, (20_000, 2, 3))  # the same test, played
    found = stats.ttest_ind(draws[:, 0], draws[:, 1], axis=1, equal_var=True).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)  # with 4 degrees of freedom; Welch's has fewer: 0.70


def test_an_objective_whose_runs_are_grpo_s_is_named():
    rows = [row(o, m, s, 0.2 + 0.1 * s) for o in ("grpo", "spo", "tis") for m in ("static", "inspo") for s in (0, 1)]
    [tis] = [r for r in rows if (r["objective"], r["mode"], r["seed"]) == ("tis", "inspo", 1)]
    tis["entropy"] = 0.26
    assert "their runs are `grpo`'s: in static `spo`, `tis`; in inspo `spo`." in objectives.table(rows)
    fewer = [r for r in rows if (r["objective"], r["seed"]) != ("spo", 1)]  # grpo may have other seeds besides
    assert "their runs are `grpo`'s: in static `spo`, `tis`; in inspo `spo`." in objectives.table(fewer)
    assert "`spo`" not in objectives.table([r for r in rows if (r["objective"], r["seed"]) != ("grpo", 1)])
    only = [r for r in rows if r["objective"] != "spo" and r["mode"] == "inspo"]
    assert "their runs are" not in objectives.table(only)


def test_a_single_seed_has_no_test_and_its_interval_is_of_its_questions():
    page = objectives.table([row(o, "static", 0, 0.5) for o in ("grpo", "spo")])
    assert "Of " not in page and "| spo | 1 | 0.50 ± 0.10 |  |  |" in page  # Wilson's interval of 48 in 96


@pytest.mark.parametrize(
    "arm, T, training, verified",
    [  # batch 24, G 5: 120 trajectories a step
        ("paper", 80, 80 * 120, 3 * 7 * 48),  # at 10, 20, 30: a parent and 6 candidates on D_B
        ("paired", 80, 80 * 120, 3 * 7 * 48),
        ("espl", 88, 88 * 120, 0),
        ("fst", 67, 67 * 120, 11 * (4 * 24 + 4 * 24 + 2 * 4 * 4)),  # 4 prompts and 4 revisions, 4 questions twice each
        ("bound", 71, 71 * 120, 3 * 7 * 48 * 2),
    ],
)
def test_no_rival_is_given_more_trajectories_than_the_paper_s_rule_and_none_could_have_had_a_step_more(
    arm, T, training, verified
):
    sizes, budget = rivals.SIZES[24], 80 * 120 + 3 * 7 * 48
    assert rivals.steps_of(arm, sizes) == T
    cfg = rivals.config_of(arm, sizes)
    assert rivals.spent(cfg, T) == training + verified <= budget < rivals.spent(cfg, T + 1)


def test_every_arm_stays_within_the_paper_s_budget_and_a_step_more_would_not():
    sizes = rivals.SIZES[96]
    budget = rivals.spent(rivals.config_of("paper", sizes), 40)
    for arm in rivals.ARMS:
        T, cfg = rivals.steps_of(arm, sizes), rivals.config_of(arm, sizes)
        assert rivals.spent(cfg, T) <= budget < rivals.spent(cfg, T + 1)
        assert budget - rivals.spent(cfg, T) < 0.05 * budget


def test_when_an_em_was_reached_is_read_between_evaluations():
    evals = [[0, 0.1, 0], [10, 0.3, 1000], [20, 0.7, 3000], [30, 0.4, 4000]]
    assert rivals.reached(evals, 0.5, 0) == pytest.approx(15)
    assert rivals.reached(evals, 0.5, 2) == pytest.approx(2000)
    assert rivals.reached(evals, 0.05, 0) == 0 and rivals.reached(evals, 0.8, 0) is None
    assert rivals.reached([[0, 0.6, 0]], 0.5, 0) == 0


def rival(arm, seed, em, undecided=0):
    evals = [[0, 0.0, 0], [10, em, 1100]]
    return {
        "arm": arm, "batch": 24, "seed": seed, "T": 10, "em": em, "evals": evals, "training": 1000,
        "verification": 100, "calls": 3, "prunings": 2, "undecided": undecided, "seconds": 120.0,
    }  # fmt: skip


def test_the_rivals_page_has_a_line_an_arm_and_counts_verification(tmp_path):
    rows = [rival("paper", s, x) for s, x in enumerate((0.2, 0.3, 0.4))]
    rows += [rival("paired", s, x, 3) for s, x in enumerate((0.5, 0.6, 0.7))] + [rival("fst", 0, 0.4)]
    page = rivals.table(rows, 0.5)
    assert "| 24 | paper | 3 | 10 | 0.300 [0.052, 0.548] |  |  | 1,100 | 9 % | 3 | 0.0 | 2.0 |" in page
    assert "| 24 | paired | 3 | 10 | 0.600 [0.352, 0.848] | +0.300 [+0.073, +0.527] | 0.021 | 1,100 | 9 % |" in page
    assert "| 9 % | 3 | 1.5 | 2.0 |" in page
    assert "over all 1 of this page, 1 of which are below 0.05" in page
    assert "| 24 | fst | 1 | 10 | 0.400 |  |  | 1,100 |" in page
    paper, paired, fst = page.splitlines()[-3:]
    assert fst == "| 24 | fst | 0 of 1 |  |  |  |  |" and paper == "| 24 | paper | 0 of 3 |  |  |  |  |"
    # By hand: all, 5/6 and 5/7 of 1,100 have mean 934 and sd 157.9; half is 4.303 x 157.9 / sqrt(3) = 392.
    assert paired == "| 24 | paired | 3 of 3 | 8 [5, 12] | 934 [542, 1,326] |  |  |"
    rivals.draw(rows, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_what_an_em_costs_is_compared_only_with_an_arm_that_always_gets_there():
    em = {"paper": (0.5, 0.6, 0.7), "paired": (0.8, 0.9, 1.0), "espl": (0.4, 0.9, 1.0)}
    page = rivals.table([rival(arm, s, x) for arm in em for s, x in enumerate(em[arm])], 0.5)
    costs = {arm: [1100 * 0.5 / x for x in em[arm] if x >= 0.5] for arm in em}
    test = stats.ttest_ind(costs["paired"], costs["paper"], equal_var=False)
    low, high = test.confidence_interval(0.95)
    mean = np.mean(costs["paired"]) - np.mean(costs["paper"])
    paired, espl = page.splitlines()[-2:]
    p = 2 * test.pvalue  # the second smallest of three is doubled; paired's difference of EM is the smallest
    assert paired.endswith(f"| {mean:+,.0f} [{low:+,.0f}, {high:+,.0f}] | {p:.3f} |")
    assert espl.startswith("| 24 | espl | 2 of 3 | 5 ") and espl.endswith(" |  |  |")


def test_seconds_are_the_cpu_s_only_where_they_were_counted_of_every_run():
    rows = [row(o, "static", s, 0.5) | {"cpu_seconds": 7.0} for o in ("grpo", "spo") for s in (0, 1)]
    page = objectives.table(rows)
    assert "| CPU seconds |" in page and page.count("| 7 |") == 2
    rows[0]["cpu_seconds"] = None
    page = objectives.table(rows)
    assert "| seconds |" in page and "| 7 |" not in page and page.count("| 40 |") == 2
