"""`make gpu` without a GPU: what it counts, how it reports faults, and two of its parts on toy shapes."""

import json
import os
import random
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from extras.bench import gpu, update

ROOT = Path(__file__).parents[3]


def test_trajectories_are_as_long_as_the_docstring_says():
    taus = update.draw(random.Random(0), 1000, 99, 1)
    assert sum(len(tau.ids) for tau in taus) / 1000 == pytest.approx(2700, rel=0.05)
    assert sum(sum(tau.mask) for tau in taus) / 1000 == pytest.approx(400, rel=0.05)
    assert all(len(tau.ids) == len(tau.mask) == len(tau.logps) for tau in taus)


def test_the_parts_take_at_most_22_minutes():
    limits = {part.name: part.limit for part in gpu.PARTS}
    assert sum(limits.values()) <= 1320
    assert sorted(name for names in gpu.STAGES.values() for name in names) == sorted(limits)
    for names in gpu.STAGES.values():
        assert sum(limits[name] for name in names) <= 540


def test_a_part_for_two_cards_is_skipped_where_there_is_one(tmp_path):
    part = gpu.Part("two", 1, "json", "-c 'raise SystemExit(3)'", cards=2)
    row = gpu.attempt(part, 1, 5, tmp_path, {})
    assert row["status"] == "SKIP" and "2 cards" in row["line"]
    assert gpu.attempt(part, 2, 5, tmp_path, {})["status"] == "FAIL"


def test_what_is_missing_is_named_with_its_pin():
    assert gpu.missing("torch json") == ""
    assert gpu.missing("torch no_such_module") == "'no_such_module'"
    if not gpu.importlib.util.find_spec("vllm"):
        assert gpu.missing("vllm").startswith("'vllm==")


@pytest.mark.parametrize(
    "log, line",
    [
        ("Traceback\n[rank0]: ValueError: x\n[W] destroy_process_group\n", "[rank0]: ValueError: x"),
        ("a\ntorch.OutOfMemoryError: CUDA out of memory\n\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("E   ValueError: x\nValueError: y\n2 failed, 3 passed in 1s\n", "2 failed, 3 passed in 1s"),
        ("step 1\nthe search server does not answer\n", "the search server does not answer"),
        ("", "it printed nothing"),
    ],
)
def test_the_line_of_a_failed_part_is_its_error(log, line):
    assert gpu.error_line(log) == line


def head_log(ours: dict, liger: dict, error: float = 1e-3) -> str:
    rows = [
        {"masked": 0, "note": "", "name": "ours", "error": error} | ours,
        {"masked": 0, "note": "", "name": "Liger fused"} | liger,
    ]
    return "table\n" + json.dumps({"rows": rows}) + "\n"


def test_a_missed_goal_is_named():
    ours = {"ms": 50.0, "peak_gb": 4.0}
    good = gpu.read_head(head_log(ours, {"ms": 60.0, "ratio": 1.2, "peak_gb": 4.0}), True)
    assert "1.20 of that time" in good["line"] and not good["missed"]
    assert gpu.read_head(head_log(ours, {"note": "not installed"}), True)["line"].endswith("not installed")
    for liger, missed in (
        ({"ms": 45.0, "ratio": 0.9, "peak_gb": 4.0}, "as fast as Liger"),
        ({"ms": 60.0, "ratio": 1.2, "peak_gb": 3.9}, "no more memory than Liger"),
    ):
        assert gpu.read_head(head_log(ours, liger), True)["missed"] == [missed]
    assert gpu.read_head(head_log(ours, {"note": "not installed"}, error=0.03), True)["missed"] == ["errors below 0.02"]
    assert gpu.read_head("it died\n", True)["missed"] and gpu.read_tests("no tests ran\n", True)["missed"]
    assert not update.find_missed({"peak_gb": 80.0, "estimate_gb": 71.0})
    assert "15 %" in update.find_missed({"peak_gb": 80.0, "estimate_gb": 69.0})[0]


def test_the_line_of_a_script_has_its_numbers():
    log = 'a step\n{"tokens_per_s": 12345.6, "mfu": 0.4, "gpu": "none", "rows": [1], "missed": []}\n'
    assert gpu.last_json(log, True)["line"] == "tokens_per_s 1.23e+04, mfu 0.4"
    assert gpu.last_json(log, True)["gpu"] == "none" and gpu.last_json("it died", True)["missed"] == ["result"]


def test_a_part_is_a_row_of_the_table_of_reported_runs():
    machine = {"card": "T4", "cards": 1, "driver": "580", "torch": "2.13.0", "vllm": "not installed", "commit": "ab1+"}
    row = gpu.report(machine, {"name": "world", "seconds": 90.0, "status": "PASS", "line": "0.1 | 2"})
    assert row == "| 1 x T4 | 580 | torch 2.13.0, vllm not installed | ab1+ | world | 1.5 | PASS: 0.1 / 2 | @you |"
    header = next(line for line in (ROOT / "docs" / "gpus.md").read_text().splitlines() if line.startswith("| card |"))
    assert header.count("|") == row.count("|")


def test_a_part_that_misses_a_goal_fails(tmp_path):
    for missed, status in (([], "PASS"), (["the goal"], "FAIL")):
        code = f"import json; print(json.dumps({{'line': '7 ms', 'missed': {missed}}}))"
        part = gpu.Part("x", 20, "json", "-c", shlex.quote(code))
        row = gpu.attempt(part, 0, 20, tmp_path, dict(os.environ))
        assert row["status"] == status and "7 ms" in row["line"] and ("the goal" in row["line"]) == bool(missed)


def test_a_part_that_takes_too_long_is_ended_and_reported(tmp_path):
    code = "import time; print('step 1', flush=True); time.sleep(60)"
    row = gpu.attempt(gpu.Part("x", 5, "json", "-c", shlex.quote(code)), 0, 5, tmp_path, dict(os.environ))
    assert row["status"] == "FAIL" and row["line"] == "not done after 5 s; last: step 1" and row["seconds"] < 30


def test_a_vllm_that_keeps_its_memory_asleep_misses_the_goal():
    from extras.bench import colocated

    for (awake, asleep, again), missed in (
        ((61.0, 1.4, 61.0), []), ((61.0, 7.0, 61.0), ["more than 1 GB above the estimate asleep"]),
        ((61.0, 1.4, 67.0), ["more than 10 % above the estimate awake"]),
        ((67.0, 1.4, 61.0), ["more than 10 % above the estimate awake"]),
    ):  # fmt: skip
        x = {"awake_gb": awake, "asleep_gb": asleep, "awake_again_gb": again}
        assert colocated.find_missed(x | {"estimate_awake_gb": 60.0, "estimate_asleep_gb": 1.1}) == missed


@pytest.mark.slow
def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path):
    (tmp_path / "cachetools.py").write_text("raise ImportError('this one is broken')")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "extras.bench.gpu", "--device", "cpu", "--out", out]
    command += ["--only", "world", "update", "vllm"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((out / "gpu.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["update", "world", "vllm"]
    assert parts["world"]["status"] == "FAIL" and "this one is broken" in parts["world"]["line"]
    assert parts["update"]["status"] == "PASS" and parts["update"]["figures"]["tokens_per_s"] > 0
    assert parts["vllm"]["status"] in ("SKIP", "FAIL")  # installed, it fails as the world does
    for part in parts.values():
        [line] = [line for line in lines if line.startswith(f"{part['status']} {part['name']} ")]
        assert part["line"] in line and (part["log"] in line if part["status"] == "FAIL" else True)
        assert part["status"] == "SKIP" or Path(part["log"]).is_file()
    assert found["machine"]["torch"] == torch.__version__ and torch.__version__ in lines[0]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: make test-vllm")
def test_the_part_of_make_gpu_with_vllm_alone_runs_on_a_toy(tmp_path):
    """vLLM beside the trainer's weights."""
    command = [sys.executable, "-m", "extras.bench.gpu", "--device", "cpu", "--only", "beside", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    [beside] = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert beside["status"] == "PASS" and beside["figures"]["unproven"] == 0
