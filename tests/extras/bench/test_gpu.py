"""`make gpu` without a GPU: what it counts, how it reports faults, and two of its parts on toy
shapes."""

import json
import os
import random
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from extras.bench import gpu, trl, update

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "extras.bench.gpu"]


def test_trajectories_are_as_long_as_the_docstring_says():
    taus = update.draw(random.Random(0), 1000, 99, 1)
    assert sum(len(tau.ids) for tau in taus) / 1000 == pytest.approx(2700, rel=0.05)
    assert sum(sum(tau.mask) for tau in taus) / 1000 == pytest.approx(400, rel=0.05)
    assert all(len(tau.ids) == len(tau.mask) == len(tau.logps) for tau in taus)


def test_a_row_holds_whole_trajectories_or_five_shorter_ones():
    for tokens, n in (1000, 5), (8000, 5), (32768, 11):
        for shared in True, False:
            taus = update.draw_row(tokens, shared, 99)
            assert len(taus) == n
            assert 0.9 * tokens - 2900 * (n > 5) < sum(len(tau.ids) for tau in taus) <= tokens
            assert len({tuple(tau.ids[: tau.prompt_tokens]) for tau in taus}) == (
                -(-n // 5) if shared else n
            )
    whole = update.draw_row(32768, True, 99)[0]
    assert (whole.prompt_tokens, sum(whole.mask), len(whole.ids)) == (300, 600, 2900)


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


def test_the_parts_take_at_most_24_minutes():
    limits = {part.name: part.limit for part in gpu.PARTS}
    assert sum(limits.values()) <= 1440
    assert sorted(name for names in gpu.STAGES.values() for name in names) == sorted(limits)
    for names in gpu.STAGES.values():
        assert sum(limits[name] for name in names) <= 540


RESULT = "import json; print(json.dumps({'line': '7 ms', 'missed': %s}))"


@pytest.mark.parametrize(
    "code, needs, cards, status, line",
    [
        ("raise SystemExit(3)", 2, 1, "SKIP", "it takes 2 cards; here is 1"),
        ("raise SystemExit('no luck')", 2, 2, "FAIL", "no luck"), (RESULT % [], 1, 0, "PASS", "7 ms"),
        (RESULT % ["the goal"], 1, 0, "FAIL", "missed: the goal: 7 ms"),
        ("import time; print('step 1', flush=True); time.sleep(60)", 1, 0, "FAIL", "not done after 5 s; last: step 1"),
    ],
)  # fmt: skip
def test_a_part_passes_fails_or_is_skipped(tmp_path, code, needs, cards, status, line):
    part = gpu.Part("x", 5, "json", f"-c {shlex.quote(code)}", toy="--toy", cards=needs)
    limit = 5 if "sleep" in code else 50
    row = gpu.attempt(part, cards, limit, tmp_path, dict(os.environ))
    assert (row["status"], row["line"]) == (status, line) and row["seconds"] < 50


def test_a_part_without_its_package_is_skipped_and_names_it(tmp_path):
    part = gpu.Part("x", 5, "json no_such_module", "-c pass")
    row = gpu.attempt(part, 0, 5, tmp_path, {})
    assert row["status"] == "SKIP" and "without no_such_module:" in row["line"]


@pytest.mark.parametrize(
    "log, line",
    [
        (
            "Traceback\n[rank0]: ValueError: x\n[W] destroy_process_group\n",
            "[rank0]: ValueError: x",
        ),
        (
            "a\ntorch.OutOfMemoryError: CUDA out of memory\n\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "E   ValueError: x\nValueError: y\n2 failed, 3 passed in 1s\n",
            "2 failed, 3 passed in 1s",
        ),
        ("step 1\nthe search server does not answer\n", "the search server does not answer"),
        (
            "no search server\n[rank0]:[W1126 17:03:59.996 x.cpp:1] Warning: not destroyed\n",
            "no search server",
        ),
        ("", "it printed nothing"),
    ],
)
def test_the_line_of_a_failed_part_is_its_error(log, line):
    assert gpu.error_line(log) == line


OURS = {"note": "", "ms": 50.0, "peak_gb": 4.0, "error": 1e-3}
LIGER = {"note": "", "ms": 60.0, "ratio": 1.2, "peak_gb": 4.0}


@pytest.mark.parametrize(
    "ours, liger, line, missed",
    [
        ({}, {}, "Liger fused takes 1.20 of that time and 4.00 GB", []),
        ({}, {"note": "not installed"}, "not installed", []),
        ({}, {"ms": 45.0, "ratio": 0.9}, "", ["as fast as Liger"]),
        ({}, {"peak_gb": 3.9}, "", ["no more memory than Liger"]),
        ({"error": 0.03}, {"note": "not installed"}, "", ["errors below 0.02"]),
    ],
)  # fmt: skip
def test_a_missed_goal_of_the_head_is_named(ours, liger, line, missed):
    rows = [{"name": "ours"} | OURS | ours, {"name": "Liger fused"} | LIGER | liger]
    found = gpu.read_head(
        "table\n" + json.dumps({"rows": [row | {"masked": 0} for row in rows]}) + "\n", True
    )
    assert found["missed"] == missed and found["line"].endswith(line)


def test_a_part_without_a_result_and_too_much_memory_are_missed_goals():
    assert (
        gpu.read_head("it died\n", True)["missed"]
        and gpu.read_tests("no tests ran\n", True)["missed"]
    )
    assert not update.find_missed({"peak_gb": 80.0, "estimate_gb": 71.0})
    assert "15 %" in update.find_missed({"peak_gb": 80.0, "estimate_gb": 69.0})[0]


def test_the_line_of_a_script_has_its_numbers():
    log = (
        'a step\n{"tokens_per_s": 12345.6, "mfu": 0.4, "gpu": "none", "rows": [1], "missed": []}\n'
    )
    assert gpu.last_json(log, True)["line"] == "tokens_per_s 1.23e+04, mfu 0.4"
    assert gpu.last_json(log, True)["gpu"] == "none" and gpu.last_json("it died", True)[
        "missed"
    ] == ["result"]


def test_a_part_is_a_row_of_the_table_of_reported_runs():
    machine = {
        "card": "T4",
        "cards": 1,
        "driver": "580",
        "torch": "2.13.0",
        "vllm": "not installed",
        "commit": "ab1+",
    }
    row = gpu.report(
        machine, {"name": "world", "seconds": 90.0, "status": "PASS", "line": "0.1 | 2"}
    )
    assert (
        row
        == "| 1 x T4 | 580 | torch 2.13.0, vllm not installed | ab1+ | world | 1.5 | PASS: 0.1 / 2 | @you |"
    )


@pytest.mark.parametrize(
    "awake, asleep, again, missed",
    [
        (61.0, 1.4, 61.0, []), (61.0, 7.0, 61.0, ["more than 1 GB above the estimate asleep"]),
        (61.0, 1.4, 67.0, ["more than 10 % above the estimate awake"]),
        (67.0, 1.4, 61.0, ["more than 10 % above the estimate awake"]),
    ],
)  # fmt: skip
def test_a_vllm_that_keeps_its_memory_asleep_misses_the_goal(awake, asleep, again, missed):
    from extras.bench import colocated

    figures = {"awake_gb": awake, "asleep_gb": asleep, "awake_again_gb": again}
    assert (
        colocated.find_missed(figures | {"estimate_awake_gb": 60.0, "estimate_asleep_gb": 1.1})
        == missed
    )


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
    for part in parts.values():
        [line] = [
            x for x in done.stdout.splitlines() if x.startswith(f"{part['status']} {part['name']} ")
        ]
        assert part["line"] in line and (part["log"] in line if part["status"] == "FAIL" else True)
        assert part["status"] == "SKIP" or Path(part["log"]).is_file()
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: make test-vllm")
def test_the_part_of_make_gpu_with_vllm_alone_runs_on_a_toy(tmp_path):
    """vLLM beside the trainer's weights."""
    flags = ["--device", "cpu", "--only", "beside", "--out", tmp_path]
    done = subprocess.run([*COMMAND, *flags], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    [beside] = json.loads(done.stdout.splitlines()[-1])["parts"]
    assert beside["status"] == "PASS"


@pytest.mark.parametrize("gb, layers", [(141, 36), (80, 18), (24, 2)])
def test_an_h200_takes_the_whole_model_beside_trl_and_a_smaller_card_fewer_layers(
    gb, layers, monkeypatch
):
    card = SimpleNamespace(total_memory=gb * 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    config, _ = trl.choose_shape("Qwen/Qwen2.5-3B", steps=4, questions=4)
    assert config.num_hidden_layers == layers


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
