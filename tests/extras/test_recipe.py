"""The recipe of Table 1 in small, whole; its table against means and intervals worked out by hand."""

import importlib
import math
from argparse import Namespace

import numpy as np
import pytest
from test_compare import cells_of, evaluation

from config import WORLD, parse_flags
from extras import published, recipe
from extras.compare import Interval
from extras.real.__main__ import play
from plumbing.faults import Fault
from plumbing.files import read_jsonl

SMALL = "--T 4 --batch 4 --G 2 --mini_batch 8 --K_p 1 --K_e 2 --T_e 4 --D_B 4 --eval_n 12 --save_every 1"


@pytest.mark.slow
def test_the_recipe_in_small(tmp_path, monkeypatch, capsys):
    """Its commands, in this process but for the index: torch is imported once."""
    played = []

    def play_here(part):
        played.append(part.what)
        program, *flags = part.argv
        if program == "retrieval_server.py":
            return play(part)
        return importlib.import_module(program.removesuffix(".py")).main(flags)

    monkeypatch.setattr(recipe, "play", play_here)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join((WORLD / "test.jsonl").read_text().splitlines(True)[:12]))
    argv = [*SMALL.split(), "--seeds", "0", "--data", str(asked), "--out", str(tmp_path)]
    recipe.main(argv)
    said = capsys.readouterr().out
    table = cells_of(said[said.rindex("\n| EM") :])
    for arm in ("static", "inspo"):
        rows = read_jsonl(tmp_path / f"{arm}-0" / "metrics.jsonl")
        best = max((row for row in rows if "valid/em" in row), key=lambda row: row["valid/em"])
        assert f"{arm}-0/best: the policy after step {best['t']}, " in said
        for t in ("0", "1"):
            rows = read_jsonl(tmp_path / "evaluation" / f"{arm}-0-t{t}" / "results.jsonl")
            [shown] = [row for row in table if (row["EM"], row["temperature"]) == (arm, t)]
            assert (
                len(rows) == 12 and shown["asked"] == f"{np.mean([row['em'] for row in rows]):.3f}"
            )
    recipe.main(argv)
    assert len(played) == 1 + 2 * 4 and said.endswith(capsys.readouterr().out)


def test_on_eight_gpus_torchrun_trains(tmp_path):
    args = Namespace(seeds=["3"], ranks=8, data=["nq"], out=tmp_path)
    train = recipe.list_parts(args, ["--model", "qwen2.5-7b"], "http://a:1")[4].argv
    assert "--nproc_per_node=8" in train
    cfg = parse_flags([*train[4:], "--optimizer_model", "gpt-5"])
    assert (cfg.mode, cfg.seed) == ("inspo", 3)


def folder_of(path, right, temperatures=(0.0, 1.0)):
    """Writes evaluations of 20 questions each of two sets; `right`: by arm those answered, by seed."""
    for arm, seeds in right.items():
        for seed, n in enumerate(seeds):
            for t in temperatures:
                values = [1] * n + [0] * (20 - n)
                out = path / f"{arm}-{seed}-t{t:g}"
                evaluation(out, setting={"temperature": t}, nq=values, popqa=values)
    return path


def test_the_table_has_published_rows_and_intervals_over_seeds(tmp_path):
    folder = folder_of(tmp_path, {"static": (4, 5, 6), "inspo": (5, 7, 6)})
    text = published.make_table(folder, "qwen2.5-3b")
    rows = {(row["EM"], row["temperature"]): row for row in cells_of(text)}
    [stated] = [row for (what, _), row in rows.items() if what == "inspo, published"]
    assert (stated["nq"], stated["popqa"], stated["average"]) == ("0.437", "0.431", "0.382")
    half = 4.3026527 * 0.05 / math.sqrt(3)  # Student's t, 2 degrees of freedom
    assert rows["static", "1"]["average"] == f"0.250 [{0.25 - half:.3f}, {0.25 + half:.3f}]"
    half = 2.7764451 * 0.05 * math.sqrt(2 / 3)  # 4 of them
    shown = f"+0.050 [{0.05 - half:+.3f}, {0.05 + half:+.3f}]"
    assert rows["inspo less static", "0"]["average"] == shown
    assert text.count("the published gain, +0.060, is undecided") == 2


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (0.01, 0.07, "reproduced"),
        (0.01, 0.05, "partly"),
        (-0.03, 0.02, "not"),
        (-0.01, 0.04, "und"),
    ],
)
def test_the_verdict_is_the_page_s_rule(low, high, verdict):
    assert published.judge(Interval(0, low, high, 0), 0.06).startswith(verdict)


def test_a_folder_that_lacks_something_is_one_line(tmp_path):
    with pytest.raises(Fault, match="no evaluation ARM-SEED"):
        published.make_table(tmp_path)
    folder_of(tmp_path, {"static": (4, 5), "inspo": (5,)})
    with pytest.raises(Fault, match=r"inspo at temperature 1 lacks seed 1"):
        published.make_table(tmp_path)
