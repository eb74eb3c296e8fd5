"""The campaigns: their arms are real configurations, rows are read off real runs, tables follow
from rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import stats

from config import HERE, Config, parse_flags
from extras import campaign
from extras.campaign import CAMPAIGNS, table
from extras.fork import ForkConfig
from plumbing.files import read_jsonl

SIZES = "--T 4 --batch 2 --G 2 --K_p 1 --K_e 2 --T_e 4 --D_B 4 --eval_n 4 --rounds 1 --save_every 4"
SIZES += " --eval_every 2"


def config(name, arm, extra=""):
    kind = ForkConfig if CAMPAIGNS[name].program == "extras/fork.py" else Config
    return parse_flags(
        f"{CAMPAIGNS[name].flags} {extra} {CAMPAIGNS[name].arms[arm][1]}".split(), kind
    )


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_every_arm_is_a_configuration_and_its_own_flags_win(name):
    arms = {arm: config(name, arm, "--lr 0.5 --T 4") for arm in CAMPAIGNS[name].arms}
    assert {arm for arm, cfg in arms.items() if cfg.mode == "static"} == {"static"} & set(arms)
    assert {arm: cfg.lr for arm, cfg in arms.items()} == {
        arm: 0 if arm == "frozen" else 0.5 for arm in arms
    }
    assert arms["inspo"].T == 4


@pytest.mark.slow
def test_a_finished_run_leaves_a_row_and_is_not_run_again(tmp_path):
    command = [sys.executable, "-m", "extras.campaign", "default", "--seeds", "0", "--extra", SIZES]
    command += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    said, again = (
        subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    rows = read_jsonl(tmp_path / "rows" / "default.jsonl")
    # not six: the second time ran nothing
    assert sorted(row["arm"] for row in rows) == ["frozen", "inspo", "static"]
    assert said.endswith(again)
    for row in rows:
        run = tmp_path / "runs" / f"{row['arm']}-seed0"
        summary = json.loads((run / "summary.json").read_text())
        assert (row["em"], row["searches"]) == (summary["end"]["em"], summary["end"]["searches"])
        assert row["commit"] == summary["commit"] and row["I_star"] == summary["I_star"]
        played = summary["training_rollouts"], summary["verification_rollouts"]
        assert row["trajectories"] == sum(played)
        assert [e[0] for e in row["evals"]] == [0, 2, 4] and len(row["curves"]["reward"]) == 4
    assert (tmp_path / "learning.png").stat().st_size > 20000


def test_a_failed_run_is_named_resumed_and_does_not_keep_others_from_their_rows(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def call(argv, **kw):
        asked.append(argv[1:])
        out = Path(argv[argv.index("--out") + 1])
        out.mkdir(exist_ok=True)
        (out / "config.json").touch()
        return int("static" in out.name)

    monkeypatch.setattr(campaign.subprocess, "call", call)
    monkeypatch.setattr(
        campaign,
        "row_of",
        lambda out: {"em": 0.5, "searches": 1.0, "curves": {"reward": [0, 1], "searches": [1, 1]}},
    )
    args = ["real", "--seeds", "1", "--arms", "inspo", "static", "--runs", str(tmp_path / "runs"),
            "--results", str(tmp_path)]  # fmt: skip
    for resumed in (False, True):
        with pytest.raises(
            SystemExit,
            match=r"1 runs failed, the first: static, seed 1: .* ended with 1; see .*\.log",
        ):
            campaign.main(args)
        assert ("--resume" in asked[-1]) == resumed and "static" in asked[-1]
    assert [row["arm"] for row in read_jsonl(tmp_path / "rows" / "real.jsonl")] == [
        "inspo"
    ] and len(asked) == 3


def test_the_table_compares_inspo_with_each_arm():
    em = {"inspo": (0.9, 0.8, 0.85), "static": (0.3, 0.5, 0.6), "guessing": (0.9, 0.7, 0.8)}
    rows = [
        {"arm": arm, "seed": k, "em": x, "searches": 1.5}
        for arm, xs in em.items()
        for k, x in enumerate(xs)
    ]
    _, _, inspo, static, guessing = table(CAMPAIGNS["real"], rows).splitlines()
    test = stats.ttest_ind(em["inspo"], em["static"], equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert "| 0.90, 0.80, 0.85 | 0.85 [0.73, 0.97] |" in inspo  # t 4.303, se .0289
    assert f"| {0.85 - 1.4 / 3:+.2f} [{low:+.2f}, {high:+.2f}] | {2 * test.pvalue:.2g} |" in static
    assert f"{stats.ttest_ind(em['inspo'], em['guessing'], equal_var=False).pvalue:.2g}" in guessing
