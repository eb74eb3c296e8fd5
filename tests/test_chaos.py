"""A small seed of `make chaos`: real runs that are killed, stopped and starved, and resumed."""

import json
import subprocess
import sys

import pytest
from test_inspo import ENV, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_whatever_happens_to_a_run_it_resumes_to_the_bit(ranks, tmp_path):
    log = tmp_path / "rows.jsonl"
    flags = ["--runs", 5, "--ranks", ranks, "--seed", 1, "--log", log]
    command = [sys.executable, "bench/chaos.py", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 5 and not any(row["fault"] for row in rows)
