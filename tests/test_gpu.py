"""`make gpu` without a GPU: what it counts, how it reports faults, and two of its parts on toy shapes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import gpu, update
from grpo import Learner
from models.model import empty, score

ROOT = Path(__file__).parent.parent


def test_the_flops_of_a_forward_pass_are_those_that_torch_counts():
    """All but attention, of which torch counts the masked half, too, and on the CPU nothing."""
    from transformers import Qwen2Config

    config = Qwen2Config(**update.TOY)
    model = empty(config, torch.float32, "cpu")
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.01)
    taus = update.draw(random.Random(0), 3, config.vocab_size, 20)
    packed = Learner.pack(SimpleNamespace(device="cpu"), taus)  # the prompt of the three stands in it once
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        score(model, *packed, 1.0)
    products = {op.__name__.split(".")[0]: n for op, n in counter.get_flop_counts()["Global"].items()}
    want = products["mm"] + products.get("addmm", 0)
    pairs = sum(len(tau.ids) ** 2 for tau in taus) - 2 * 14**2  # 14 of 15 tokens: the last one is each one's own
    attention = 2 * 2 * pairs * 64 / 2 * 2  # QK' and PV, causal, 64 wide; two layers
    assert update.forward_flops(model, taus) == want + attention


def test_trajectories_are_as_long_as_the_docstring_says():
    taus = update.draw(random.Random(0), 1000, 99, 1)
    assert sum(len(tau.ids) for tau in taus) / 1000 == pytest.approx(2700, rel=0.05)
    assert sum(sum(tau.mask) for tau in taus) / 1000 == pytest.approx(400, rel=0.05)
    assert all(len(tau.ids) == len(tau.mask) == len(tau.logps) for tau in taus)


@pytest.mark.parametrize(
    "name, tflops",
    [("NVIDIA H200", 989.5), ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H20", 148)]
    + [("NVIDIA H100 PCIe", 0), ("NVIDIA H100 NVL", 0), ("NVIDIA GeForce RTX 4090", 0)],
)
def test_a_card_s_peak_is_known_or_0(name, tflops):
    assert update.peak_of(name) == tflops


def test_the_parts_take_at_most_22_minutes():
    assert sum(part.limit for part in gpu.PARTS) <= 1320


def test_a_part_for_two_cards_is_skipped_where_there_is_one(tmp_path):
    part = gpu.Part("two", 1, "json", ["-c", "raise SystemExit(3)"], [], gpu.read_tests, cards=2)
    row = gpu.attempt(part, 1, 5, tmp_path, {})
    assert row["status"] == "SKIP" and "2 cards" in row["line"]
    assert gpu.attempt(part, 2, 5, tmp_path, {})["status"] == "FAIL"


def test_what_is_missing_is_named_with_its_pin():
    assert gpu.missing("torch json") == ""
    assert gpu.missing("torch no_such_module") == "'no_such_module'"
    absent = {"vllm": "vllm==", "flash_attn": "flash_attn"}
    for name, start in absent.items():
        if not gpu.importlib.util.find_spec(name):
            assert gpu.missing(name).startswith(f"'{start}")


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


def head_log(ours: dict, liger: dict, worst: float = 1e-3) -> str:
    rows = [
        {"masked": 0, "note": "", "name": "ours", "error": worst} | ours,
        {"masked": 0, "note": "", "name": "Liger fused"} | liger,
    ]
    return "table\n" + json.dumps({"rows": rows}) + "\n"


def test_a_missed_goal_is_a_failure():
    ours = {"ms": 50.0, "peak_gb": 4.0}
    text, figures = gpu.read_head(head_log(ours, {"ms": 60.0, "ratio": 1.2, "peak_gb": 4.0}), True)
    assert "1.20 of that time" in text and figures["liger_over_ours"] == 1.2
    assert gpu.read_head(head_log(ours, {"note": "not installed"}), True)[0].endswith("not installed")
    for liger, says in (
        ({"ms": 45.0, "ratio": 0.9, "peak_gb": 4.0}, "slower"),
        ({"ms": 60.0, "ratio": 1.2, "peak_gb": 3.9}, "more memory"),
    ):
        with pytest.raises(gpu.Missed, match=says):
            gpu.read_head(head_log(ours, liger), True)
    with pytest.raises(gpu.Missed, match="errors"):
        gpu.read_head(head_log(ours, {"note": "not installed"}, worst=0.03), True)
    x = {"layers": 36, "tokens_per_s": 1e4, "tflops": 400, "mfu": 0.4, "gather_s": 1.0, "peak_gb": 80.0}
    x |= {"attention": "FA3", "flash_over_own": 0.9, "waits": 11.5}
    assert "MFU 40.0%" in gpu.read_update(json.dumps(x | {"estimate_gb": 71.0}), True)[0]
    with pytest.raises(gpu.Missed, match="15 %"):
        gpu.read_update(json.dumps(x | {"estimate_gb": 69.0}), True)


def beside_log(awake: float, asleep: float, again: float) -> str:
    x = {"parameters": 3e9, "sleep_s": 0.5, "wake_and_load_s": 1.5, "estimate_gb": {"awake": 60.0, "asleep": 1.1}}
    return json.dumps(x | {"vllm_gb": {"awake": awake, "asleep": asleep, "awake_again": again}})


def test_a_vllm_that_keeps_its_memory_asleep_is_a_failure():
    assert "asleep 1.4" in gpu.read_beside(beside_log(61.0, 1.4, 61.0), True)[0]
    for took, says in (((61.0, 7.0, 61.0), "asleep"), ((61.0, 1.4, 67.0), "awake"), ((67.0, 1.4, 61.0), "awake")):
        with pytest.raises(gpu.Missed, match=f"above the estimate {says}:"):
            gpu.read_beside(beside_log(*took), True)


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_next_one_runs(tmp_path):
    (tmp_path / "cachetools.py").write_text("raise ImportError('this one is broken')")
    out = tmp_path / "out"
    command = [sys.executable, "bench/gpu.py", "--device", "cpu", "--out", out, "--limit", "head=1", "update=600"]
    command += ["--only", "world", "update", "head", "vllm"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((out / "gpu.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["world", "update", "head", "vllm"]
    assert parts["world"]["status"] == "FAIL" and "this one is broken" in parts["world"]["line"]
    assert parts["update"]["status"] == "PASS" and parts["update"]["figures"]["tokens_per_s"] > 0
    assert parts["head"]["status"] == "FAIL" and parts["head"]["line"].startswith("not done after 1 s")
    assert parts["vllm"]["status"] in ("SKIP", "FAIL")  # installed, it fails as the world does
    for part in parts.values():
        [line] = [line for line in lines if line.startswith(f"{part['status']} {part['name']} ")]
        assert part["line"] in line and (part["log"] in line if part["status"] == "FAIL" else True)
        assert part["status"] == "SKIP" or Path(part["log"]).is_file()
    table = [line for line in lines if line.startswith("|")]
    assert (out / "gpu.md").read_text().splitlines() == table  # to paste
    assert len(table) == 3 + len(parts) and {line.replace("\\|", "").count("|") for line in table} == {4}
    assert found["machine"]["torch"] == torch.__version__ and torch.__version__ in table[2]
