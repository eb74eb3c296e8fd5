"""The Triton kernels of the GRPO head as compiled code and on a GPU, and the benchmark; test_kernels.py
has their results."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from test_kernels import SETTINGS, batch, differentiate, eq2, error, head, same

from kernels import bench

ROOT = Path(__file__).parent.parent
on_gpu = torch.cuda.is_available()


@pytest.fixture(scope="module")
def compiled():
    """Registers and memory accesses of every variant of the kernel on an A100 and on an H100 or
    H200."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": "."}
    script = [sys.executable, "tests/compile_kernel.py"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # a dozen variants of each kernel
def test_it_compiles_without_spills_and_moves_16_bytes_at_once(compiled):
    some = {(80, "log-probs"), (90, "loss and bf16 gradient"), (90, "bf16 gradient")}
    assert {(c["capability"], c["setting"]) for c in compiled} >= some
    for c in compiled:
        assert c["stack"] == 0 and c["local"] == 0, c  # registers that spill go to local memory
        assert 0 < c["registers"] <= 128, c
        if c["setting"] == "V = 1187":
            continue
        assert c["loads"] == ["v4.b32"] * (
            c["passes"] * (2 if "bf16 logits" in c["setting"] else 4)
        ), c
        assert len(c["stores"]) == (
            0 if not c["writes"] else 4 if "fp32 gradient" in c["setting"] else 2
        ), c
        assert set(c["stores"]) <= {"v4.b32"}, c
        # dL/dz overwrites the logits: all threads must have read a block before any of them writes
        assert not c["writes"] or re.search("(^|B)L+BS+$", c["steps"]), c


@pytest.mark.skipif(not on_gpu, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "dtype", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("N, H, V", [(37, 64, 1187), (130, 128, 151_936), (5, 128, 152_064)])
def test_on_the_gpu(setting, dtype, N, H, V):
    """float32 as on the CPU; bf16 logits to 2e-5, gradients to the rounding of dL/dz; bitwise
    repeatable."""
    (hidden, weight, targets), kw = batch(N, H, V)
    hidden, weight = hidden.to(dtype[0]), weight.to(dtype[1])
    kw |= {k: v[:1].expand(N) if torch.is_tensor(v) else v for k, v in setting.items()}
    # so it is multiplied
    want = differentiate(eq2, hidden.double(), weight.to(dtype[0]).double(), targets, **kw)
    args = [v.cuda() for v in (hidden, weight, targets)]
    kw = {k: v.cuda() if torch.is_tensor(v) else v for k, v in kw.items()}
    torch.cuda.set_sync_debug_mode("error")  # no step waits for the GPU
    try:
        got, again, cut = (differentiate(head, *args, **kw, chunk=c) for c in (4096, 4096, 50))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(got[k], again[k]) for k in got)
    bound = 3e-5 if dtype[0] == torch.float32 else 5e-3
    for one in (got, cut):
        one = {k: v.cpu() for k, v in one.items()}
        assert same(one["logp"], want["logp"], rtol=0, atol=2e-5) and same(
            one["loss"], want["loss"], rtol=1e-4
        )
        assert same(one["entropy"], want["entropy"], atol=2e-5) and torch.equal(
            one["clipped"], want["clipped"]
        )
        assert error(one["dX"], want["dX"]) < bound and error(one["dW"], want["dW"]) < bound


@pytest.mark.slow
def test_the_benchmark_runs_where_there_is_nothing_but_the_kernels(tmp_path):
    """A copied folder, with the peers that are installed: all of them agree with float64."""
    shutil.copytree(
        ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    flags = "--tokens 16 --shapes 32x512 --masked 50 --seconds 0.01 --json"
    command = [sys.executable, "-m", "kernels.bench", *flags.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 12
    for row in rows:
        if row["name"].startswith(("ours", "torch", "TRL", "Liger fused")):
            assert (
                row["error"] < (2e-2 if on_gpu else 1e-5) and row["ms"] > 0 and not row["note"]
            ), row
        assert row["note"] or row["ms"] > 0


def test_peers_that_take_cross_entropies_are_measured_where_they_are_installed(monkeypatch):
    """Stand-ins by the signatures of quack-kernels 0.6 and cut-cross-entropy 25.1."""

    def cross_entropy(x, weight, target, reduction):
        return F.cross_entropy(x @ weight.T, target, reduction=reduction)

    quack = SimpleNamespace(
        linear_cross_entropy_func=lambda x, W, bias, y, reduction: cross_entropy(
            x, W, y, reduction
        ),
        chunked_linear_cross_entropy=cross_entropy,
    )
    cce = SimpleNamespace(linear_cross_entropy=cross_entropy)
    for name, module in {
        "quack": quack,
        "quack.linear_cross_entropy": quack,
        "cut_cross_entropy": cce,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    errors = bench.check(("QuACK", "CCE"))
    # the chunked one has no losses per token to compare
    assert math.isnan(errors.pop("QuACK, chunked cross-entropy")) and len(errors) == 2
    assert max(errors.values()) < (2e-2 if on_gpu else 1e-5)


@pytest.mark.parametrize("flags", [["--shapes", "2048"], ["--peers", "nobody"]])
def test_what_the_benchmark_cannot_measure_is_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and "bench: error: " in capsys.readouterr().err.splitlines()[-1]
