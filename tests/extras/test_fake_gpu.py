"""The CUDA path without a card: whole presets on fake CUDA tensors (tests/fake_cuda), at full
size."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from transformers import Qwen2Config

from extras.fit import KNOWN

HERE = Path(__file__).parent.parent
SYNCS = 3  # times that the host waits for the card in a micro-batch, at most
PRESETS = {  # GPUs, their compute capability, flags
    "0.5B": (1, "8.9", "--model", "qwen2.5-0.5b"),
    "0.5B, 3 layers": (1, "7.5", "--model", "SHORT", "--preset", "qwen2.5-0.5b"),
    "1.5B LoRA": (1, "8.9", "--model", "qwen2.5-1.5b", "--lora_rank", "32"),
    "3B": (8, "9.0", "--model", "qwen2.5-3b"),
    "7B": (8, "9.0", "--model", "qwen2.5-7b"),
}
MODERN = "vllm", "bfloat16", "_varlen_attn"  # engine, dtype, attention
OLD = "torch", "float32", "_scaled_dot_product_efficient_attention"
pytestmark = [
    pytest.mark.fake,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="this torch has CUDA itself: make gpu"
    ),
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    lib = cpp_extension.library_paths()[0]
    command = [
        "g++",
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        HERE / "fake_cuda" / "guard.cpp",
        "-o",
        library,
    ]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    subprocess.run([*command, f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"], check=True)
    return library


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_builds_resumes_updates_and_saves_on_the_card(preset, guard, tmp_path):
    Qwen2Config(**KNOWN["Qwen/Qwen2.5-0.5B"] | {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    ranks, capability, *flags = (str(x).replace("SHORT", str(tmp_path)) for x in PRESETS[preset])
    command = [
        sys.executable,
        str(HERE / "fake_cuda" / "run.py"),
        str(guard),
        ranks,
        capability,
        *flags,
    ]
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])

    # Nothing falls back to the CPU, where a few numbers of each token are read.
    assert found["devices"] == ["cuda"]
    assert {key.split()[0] for key in found["products"]} == {"cuda"}
    assert found["bytes to the CPU a token"] < 64

    engine, dtype, kernel = OLD if capability == "7.5" else MODERN
    products = found["products"]
    assert products[f"cuda torch.{dtype}"] > 0.999 * sum(products.values()), products
    assert (found["trained"], found["optimizer"], found["frozen"]) == (
        ["float32"],
        ["float32"],
        [dtype],
    )
    assert (found["engine"], found["attention"]) == (engine, [kernel, f"{kernel}_backward"])

    syncs = Counter()
    for phase, _, _, n in found["syncs"]:
        syncs[phase] += n
    for phase in ("update", "score"):
        assert syncs[phase] / found["batches"][phase] <= SYNCS, found["syncs"]

    peaks = {phase: n for phase, n in found["peak"].items() if phase != "build"}
    assert max(peaks.values()) == pytest.approx(found["estimate"], rel=0.1), peaks
