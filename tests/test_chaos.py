"""A small seed of `make chaos`: real runs that are killed, stopped and starved, and resumed."""

import json
import subprocess
import sys

import pytest
from test_inspo import ENV, ROOT

MARKS = {1: pytest.mark.slow, 2: pytest.mark.ranks}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=mark) for n, mark in MARKS.items()])
def test_whatever_happens_to_a_run_it_resumes_to_the_bit(ranks, tmp_path):
    log = tmp_path / "rows.jsonl"
    flags = ["--runs", 3, "--ranks", ranks, "--seed", 1, "--log", log]
    command = [sys.executable, "bench/chaos.py", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 3 and not any(row["fault"] for row in rows)
