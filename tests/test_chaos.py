"""A small seed of `make chaos`: real runs that are killed, stopped and starved, and resumed."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from test_inspo import ENV, ROOT

from bench.chaos import PHASES, phase
from config import Config

DISTURBED = ["SIGHUP", "SIGKILL of one rank", "search server killed"]
MARKS = {1: pytest.mark.slow, 2: pytest.mark.ranks}


def rows_of(tmp_path, *flags):
    log = tmp_path / "rows.jsonl"
    command = [sys.executable, "bench/chaos.py", "--log", str(log), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=mark) for n, mark in MARKS.items()])
def test_whatever_happens_to_a_run_it_resumes_to_the_bit(ranks, tmp_path):
    rows = rows_of(tmp_path, "--runs", 3, "--ranks", ranks, "--seed", 1, "--only", *DISTURBED)
    assert len(rows) == 3 and not any(row["fault"] for row in rows)


@pytest.mark.slow
def test_from_any_phase_a_run_resumes_to_the_bit(tmp_path):
    flags = ["--runs", len(PHASES), "--ranks", 1, "--only", "SIGKILL of all", "SIGTERM"]
    rows = rows_of(tmp_path, *flags)
    assert {row["phase"] for row in rows} == set(PHASES) and not any(row["fault"] for row in rows)


def test_a_phase_is_told_by_the_files(tmp_path):
    """Of a run that evolves at step 3 and evaluates at step 2, in the order in which its files grow."""
    seen = [phase(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(asdict(Config(K_e=3, T_e=4, eval_every=2, T=4))))
    for folder in ("checkpoints/.step-000002.tmp", "trajectories"):
        (tmp_path / folder).mkdir(parents=True)
    grown = [
        (".", {}), ("metrics", {"t": 0}), ("step", 1), ("metrics", {"t": 1}), ("step", 2), ("metrics", {"t": 2}),
        ("step", 3), ("reflections", {"t": 3, "call": {}}), ("reflections", {"t": 3, "accepted": [0]}),
        ("reflections", {"t": 3, "verified": []}), ("population", {"t": 3, "event": "evolve"}), ("metrics", {"t": 3}),
        ("step", 4), ("metrics", {"t": 4}), ("I_star.txt", ""), ("summary.json", "{}"),
    ]  # fmt: skip
    seen.append(phase(tmp_path))
    (tmp_path / "checkpoints" / ".step-000002.tmp").rmdir()
    (tmp_path / "reflections.jsonl").write_text('{"t": 0, "accepted": [0]}\n')
    for name, content in grown:
        if name == "step":
            (tmp_path / "trajectories" / f"step-{content:06d}.jsonl.gz").touch()
        elif isinstance(content, dict) and content:
            with open(tmp_path / f"{name}.jsonl", "a") as f:
                f.write(json.dumps(content) + "\n")
        elif content != {}:
            (tmp_path / name).write_text(content)
        if seen[-1] != phase(tmp_path):
            seen.append(phase(tmp_path))
    before, evolution = ["", "checkpoint", "start", "first step"], ["reflection", "verification", "reflection"]
    assert seen == [*before, "step", "evaluation", "step", *evolution, "step", "end", ""]
