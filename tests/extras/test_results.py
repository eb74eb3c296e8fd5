"""docs/results/README.md and the README say what the rows say; where the rows are from."""

import json
import subprocess
from functools import cache

import numpy as np
import pytest

from config import HERE
from extras.campaign import CAMPAIGNS, table
from extras.compare import compare_seeds
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


def test_the_published_averages_are_the_means_of_their_rows():
    published = json.loads((FOLDER / "published.json").read_text())["paper"]
    for size in ("qwen2.5-3b", "qwen2.5-7b"):
        for method, row in published[size].items():
            # as it stands in the paper
            wrong = 0.0131 if (size, method) == ("qwen2.5-7b", "ircot") else 0.0
            assert abs(np.mean(row[:-1]) - row[-1]) == pytest.approx(wrong, abs=0.0006), method


# ---- provenance


def git(*argv):
    return subprocess.run(["git", *argv], cwd=HERE, capture_output=True, text=True).stdout.split()


@cache
def history():
    """The commits up to here; none where not all of them are known."""
    return (
        git("rev-list", "HEAD") if git("rev-parse", "--is-shallow-repository") == ["false"] else []
    )


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_s_commit_is_in_the_history_or_the_row_says_that_it_is_not(path):
    if not history():
        pytest.skip("no whole history here")
    rows = [row for row in read_jsonl(path) if not row.get("commit_lost")]
    for commit in {row["commit"] for row in rows} | {"45ad404"}:
        assert any(known.startswith(commit) for known in history()), commit


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_of_a_run_names_its_machine_and_any_other_its_source(path):
    assert all(row.get("source") or row["machine"] for row in read_jsonl(path))
