"""docs/results/README.md and the README say what the rows say; where the rows are from."""

import json
import subprocess

import numpy as np
import pytest
from scipy import stats

from config import HERE
from extras.campaign import CAMPAIGNS, table
from extras.compare import compare_seeds, estimate_over_seeds
from plumbing.files import read_jsonl

FOLDER = HERE / "docs" / "results" / "rows"
ROWS = sorted(FOLDER.glob("*.jsonl"))
PAGE = " ".join((HERE / "docs" / "results" / "README.md").read_text().split())


def rows(name, **which):
    return [
        row
        for row in read_jsonl(FOLDER / f"{name}.jsonl")
        if all(row[k] == v for k, v in which.items())
    ]


def em(name, arm):
    return [row["em"] for row in rows(name, arm=arm) if row["seed"] < 5]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_tables_are_those_of_the_rows(name):
    lines = table(CAMPAIGNS[name], rows(name)).splitlines()
    assert set(lines) <= set((HERE / "docs" / "results" / "README.md").read_text().splitlines())
    if name == "default":
        readme = (HERE / "README.md").read_text()
        for line in lines[2:]:
            arm, seeds, mean, *_, searches = (cell.strip() for cell in line.strip("|").split("|"))
            assert f"| {arm} | {seeds} | {mean} | {searches} |" in readme


def test_what_the_page_says_of_the_world_before_it_was_closed():
    before = {
        arm: [r["em"] for r in rows("second_hand", arm=arm, world="open")]
        for arm in ("inspo", "static")
    }
    fresh = {
        arm: [r["em"] for r in rows("paper", arm=arm) if 5 <= r["seed"] < 10] for arm in before
    }
    assert f"({', '.join(f'{x:.2f}' for x in before['static'])})" in PAGE
    gains = [np.mean(some["inspo"]) - np.mean(some["static"]) for some in (before, fresh)]
    assert f"gain over it was {gains[0]:+.2f} before, {gains[1]:+.2f} afterwards" in PAGE


def test_what_the_page_says_of_the_paper_s_claims():
    means = {
        arm: float(np.mean(em("paper", arm))) for arm in ("inspo", "static", "after", "around")
    }
    assert f"({means['inspo']:.2f}, {means['after']:.2f})" in PAGE
    assert f"({means['static']:.2f} to {means['after']:.2f})" in PAGE
    assert f"ends at {means['around']:.2f}, inspo at {means['inspo']:.2f}" in PAGE
    assert sum(x > 0.5 for x in em("paper", "before")) == 3 and min(em("paper", "inspo")) > 0.5
    canary = [
        [r["held_out"]["trained policy, canary"] for r in rows("paper", arm=arm) if r["seed"] < 5]
        for arm in ("inspo", "static")
    ]
    found = compare_seeds(*canary).interval
    assert (
        f"have {np.mean(canary[0]):.2f} and static's {np.mean(canary[1]):.2f} ({found:+.2f})"
        in PAGE
    )


def gain(rival, drifts, at_equal_rollouts=False):
    """Online's gain over a rival by world, the mean over drifts."""
    of = {(r["arm"], r["world"], r["drift"]): r for r in rows("graded")}
    out = []
    for world in sorted({world for arm, world, _ in of if arm == rival}):
        gains = []
        for d in drifts:
            online, other = of["online", world, d], of[rival, world, d]
            at = [[e[k] for e in other["evals"]] for k in (3, 1)]
            reward = np.interp(online["rollouts"], *at) if at_equal_rollouts else other["reward"]
            gains.append(online["reward"] - reward)
        out.append(float(np.mean(gains)))
    return estimate_over_seeds(out)


def test_what_the_page_says_of_the_graded_world():
    assert len(rows("graded")) == 312
    assert f"ends {gain('before', [1.0], True).mean:.2f} above evolving before" in PAGE
    after = [f"{gain('after', [d]).mean:+.2f}" for d in (0.0, 0.5, 1.0)]
    assert f"by {after[0]}, {after[1]} and {after[2]} at d" in PAGE
    everywhere, ends = (0.0, 0.5, 1.0), (0.0, 1.0)
    verified, paired = gain("unverified", everywhere, True), gain("paired", ends, True)
    assert f"Verification ({verified:+.2f})" in PAGE
    assert f"paired ranking ({-paired.mean:+.2f} [{-paired.high:+.2f}, {-paired.low:+.2f}])" in PAGE
    assert f"blind edits ({gain('blind', everywhere, True).mean:+.2f})" in PAGE
    own = gain("fst-own", ends, True)
    assert f"is {own.mean:.2f} [{own.low:.2f}, {own.high:.2f}] behind" in PAGE
    half = [
        (x.high - x.low) / 2 for x in (gain("before", [0.0], True), gain("before", [0.5], True))
    ]
    assert f"have -0.01 ± {half[0]:.2f} and +0.12 ± {half[1]:.2f}" in PAGE


def test_what_the_page_says_of_wordings_objectives_and_rules():
    under = {
        kind: [
            [float(np.mean(r["em"][kind])) for r in rows("wording", arm=arm)]
            for arm in ("one", "many")
        ]
        for kind in ("good, new wordings", "good, taught wordings", "losers")
    }
    new = under["good, new wordings"]
    found = compare_seeds(new[1], new[0])
    assert f"have {np.mean(new[0]):.2f}, under seven wordings of it {np.mean(new[1]):.2f}" in PAGE
    assert f"({found.interval:+.2f})" in PAGE and round(found.visible, 2) == 0.05
    early, taught = (
        " and ".join(f"{np.mean(x):.2f}" for x in under[k])
        for k in ("losers", "good, taught wordings")
    )
    assert f"they have {early} with it, {taught} without" in PAGE
    empo, grpo = (
        [r["em"] for r in rows("objectives", objective=o, mode="static")] for o in ("empo", "grpo")
    )
    assert f"({np.mean(empo) - np.mean(grpo):+.2f})" in PAGE and len(rows("objectives")) == 210
    for batch in (24, 96):
        arms = {
            arm: [r["em"] for r in rows("selection", arm=arm, batch=batch)]
            for arm in ("paper", "paired", "espl")
        }
        assert all(
            compare_seeds(x, arms["paper"]).p > 0.05 for arm, x in arms.items() if arm != "paper"
        )


def test_the_world_s_page_and_the_results_have_what_the_rows_of_the_gate_give():
    text = (HERE / "world" / "README.md").read_text()
    rates = {}
    for n in (12, 24, 48, 96):
        sides = {True: [], False: []}
        for row in rows("gate"):
            if abs(gained := row["reward"][1] - row["reward"][0]) >= 0.03:
                sides[gained > 0].append(row["joins"][str(n)])
        rates[n] = [f"{100 * x:.0f}" for x in (np.mean(sides[False]), 1 - np.mean(sides[True]))]
        assert n not in (12, 48) or " % and ".join(rates[n]) in PAGE
    assert "{} % of worse revisions join and {} % of better ones".format(*rates[48]) in " ".join(
        text.split()
    )
    log = " ".join((HERE / "docs" / "LOG.md").read_text().split())
    worse, lost = (", ".join(side) for side in zip(*rates.values(), strict=True))
    assert f"{worse} % of worse revisions join and {lost} % of better ones are rejected" in log


def test_the_published_averages_are_the_means_of_their_rows():
    published = json.loads((FOLDER / "published.json").read_text())["paper"]
    for size in ("qwen2.5-3b", "qwen2.5-7b"):
        for method, row in published[size].items():
            # as it stands in the paper
            wrong = 0.0131 if (size, method) == ("qwen2.5-7b", "ircot") else 0.0
            assert abs(np.mean(row[:-1]) - row[-1]) == pytest.approx(wrong, abs=0.0006), method


def test_the_real_model_s_p_is_the_policy_s_training():
    mine, frozen = ([r["em"] for r in rows("real", arm=arm)] for arm in ("inspo", "frozen"))
    p = 3 * stats.ttest_ind(mine, frozen, equal_var=False).pvalue  # Holm's, the smallest of three
    assert f"(p {p:.3f})" in PAGE


# ---- provenance


def git(*argv):
    return subprocess.run(["git", *argv], cwd=HERE, capture_output=True, text=True)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_s_commit_is_in_the_history_or_the_row_says_that_it_is_not(path):
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.returncode or shallow.stdout.strip() != "false":
        pytest.skip("no whole history here")
    for commit in {row["commit"] for row in read_jsonl(path) if not row.get("commit_lost")} | {
        "45ad404"
    }:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_of_a_run_names_its_machine_and_any_other_its_source(path):
    assert all(row.get("source") or row["machine"] for row in read_jsonl(path))
