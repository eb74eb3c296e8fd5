"""`make gpu` without a GPU: what it counts, how it reports faults, and two of its parts on toy
shapes."""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from extras.bench import gpu

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "extras.bench.gpu"]


@pytest.mark.slow
def test_micro_batches_are_measured_one_at_a_time():
    command = [sys.executable, "-m", "extras.bench.update", "--micro", "100", "300"]
    command += ["--shape", "toy", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert not [row for row in rows if "fault" in row]
    ways = {(row["way"], row["recompute"], row["shared"]) for row in rows}
    assert len(ways) == 7 and len(rows) == 14
    assert all(0 < row["wall_ms"] for row in rows)


RESULT = "import json; print(json.dumps({'line': '7 ms', 'missed': %s}))"


@pytest.mark.parametrize(
    "code, needs, cards, status, line",
    [
        ("raise SystemExit(3)", 2, 1, "SKIP", "it takes 2 cards; here is 1"),
        ("raise SystemExit('no luck')", 2, 2, "FAIL", "no luck"), (RESULT % [], 1, 0, "PASS", "7 ms"),
        (RESULT % ["the goal"], 1, 0, "FAIL", "missed: the goal: 7 ms"),
        ("import time; print('step 1', flush=True); time.sleep(60)", 1, 0, "FAIL", "not done after 1 s; last: step 1"),
    ],
)  # fmt: skip
def test_a_part_passes_fails_or_is_skipped(tmp_path, code, needs, cards, status, line):
    part = gpu.Part("x", 5, "json", f"-c {shlex.quote(code)}", toy="--toy", cards=needs)
    limit = 1 if "sleep" in code else 50
    row = gpu.attempt(part, cards, limit, tmp_path, dict(os.environ))
    assert (row["status"], row["line"]) == (status, line) and row["seconds"] < 50


OURS = {"note": "", "ms": 50.0, "peak_gb": 4.0, "error": 1e-3}
LIGER = {"note": "", "ms": 60.0, "ratio": 1.2, "peak_gb": 4.0}


@pytest.mark.parametrize(
    "ours, liger, line, missed",
    [
        ({}, {}, "Liger fused takes 1.20 of that time and 4.00 GB", []),
        ({}, {"ms": 45.0, "ratio": 0.9}, "", ["as fast as Liger"]),
        ({"error": 0.03}, {"note": "not installed"}, "", ["errors below 0.02"]),
    ],
)  # fmt: skip
def test_a_missed_goal_of_the_head_is_named(ours, liger, line, missed):
    rows = [{"name": "ours"} | OURS | ours, {"name": "Liger fused"} | LIGER | liger]
    found = gpu.read_head(
        "table\n" + json.dumps({"rows": [row | {"masked": 0} for row in rows]}) + "\n", True
    )
    assert found["missed"] == missed and found["line"].endswith(line)


@pytest.mark.slow
def test_what_comes_next_on_a_card_runs_on_toys(tmp_path):
    flags = ["--device", "cpu", "--out", tmp_path, "--only", "cold", "static", "peers", "update"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*COMMAND, *flags, "--minutes", "6"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    found = {part["name"]: part["status"] for part in parts}
    assert found == dict.fromkeys(("cold", "static", "update", "peers"), "PASS"), done.stdout
    assert parts[1]["figures"]["first_step_s"] < parts[1]["figures"]["seconds"]
    assert gpu.attempt(gpu.PARTS[0], 0, 0, tmp_path, env)["line"] == "no time is left"


@pytest.mark.slow
def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path):
    (tmp_path / "bm25s.py").write_text("raise ImportError('this one is broken')")
    flags = ["--device", "cpu", "--out", tmp_path / "out", "--only", "world", "update", "vllm"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 1 and not done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "out" / "gpu.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["update", "world", "vllm"]
    assert parts["world"]["status"] == "FAIL" and "this one is broken" in parts["world"]["line"]
    assert parts["update"]["status"] == "PASS" and parts["update"]["figures"]["tokens_per_s"] > 0
    assert parts["vllm"]["status"] in ("SKIP", "FAIL")  # installed, it fails as the world does


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed")
def test_the_part_of_make_gpu_beside_trl_takes_the_same_update_on_a_toy(tmp_path):
    """The gradient's norm is the same to float32's rounding and TRL's 1e-4 in the advantages."""
    flags = ["--device", "cpu", "--only", "peer", "--out", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [peer] = json.loads(done.stdout.splitlines()[-1])["parts"]
    x = peer["figures"]
    assert peer["status"] == "PASS" and x["ours_tokens_per_s"] > 0
    assert x["ratio"] == pytest.approx(x["ours_tokens_per_s"] / x["trl_tokens_per_s"])
    assert x["ours_grad_norm"] == pytest.approx(x["trl_grad_norm"], rel=1e-3)
