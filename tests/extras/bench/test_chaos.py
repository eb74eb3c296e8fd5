"""A small seed of `make chaos`: real runs that are killed, stopped and starved, and resumed."""

import json
import subprocess
import sys

import pytest
from test_inspo import ENV, ROOT

from extras.bench.chaos import MOMENTS

DISTURBED = ["SIGHUP", "SIGKILL of one rank", "search server killed"]


@pytest.mark.parametrize(
    "flags, moments",
    [
        pytest.param(
            ["--runs", "3", "--ranks", "2", "--seed", "1", "--only", *DISTURBED],
            1,
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            ["--runs", "2", "--ranks", "1", "--only", "SIGKILL of all", "SIGTERM"],
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_happens_to_a_run_it_resumes_to_the_bit(flags, moments):
    """`make chaos` takes all moments."""
    command = [sys.executable, "-m", "extras.bench.chaos", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) == int(flags[1]) and not any(row["fault"] for row in rows)
    assert len({row["moment"] for row in rows} & set(MOMENTS)) >= moments


def test_the_files_show_what_a_run_does(tmp_path):
    def shown():
        return [name for name, condition in MOMENTS.items() if condition(tmp_path)]

    assert shown() == []
    (tmp_path / "config.json").write_text("{}")
    # the first population's
    (tmp_path / "reflections.jsonl").write_text('{"t": 0, "accepted": [0]}\n')
    assert shown() == ["start"]
    (tmp_path / "metrics.jsonl").write_text('{"t": 0}\n')
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    assert shown() == ["start", "step"]
    (tmp_path / "checkpoints/.step-000002.tmp").mkdir()
    assert shown() == ["start", "step", "checkpoint"]
    (tmp_path / "reflections.jsonl").write_text('{"t": 0}\n{"t": 3, "call": {}}\n')
    (tmp_path / "I_star.txt").touch()
    assert shown() == ["start", "step", "evolution", "checkpoint", "end"]
