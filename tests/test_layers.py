"""Fused layers: the families' values and gradients, which modules change, and what stays alone."""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from test_model import SHAPES, make_family

from config import Config
from models.model import forward_packed, load_model, skeleton
from models.packing import Packing
from training import shards
from training.shards import fuse

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytest.importorskip("liger_kernel")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [3, 1, 2]  # few: the interpreter takes milliseconds a token and layer
ALL = {"RMSNorm", "SwiGLU", "rotary embedding"}
SETTINGS = {
    "Mistral": {"sliding_window": 2},
    "Gemma3": {
        "sliding_window": 2,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.fixture(autouse=True)
def interpreter(request, monkeypatch):
    """Lets Triton's interpreter run Liger without a GPU: it neither converts floats nor knows
    libdevice."""
    if DEVICE == "cuda":
        if request.function is not test_fused_layers_compute_as_transformers_in_float64:
            pytest.skip(
                "its tensors are on the CPU, where Triton needs its interpreter, which is off"
            )
        return
    import liger_kernel.ops.rms_norm
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(arg):
        if not isinstance(arg, float):
            return convert(arg)
        return tl.tensor(
            interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32
        )

    def rsqrt(x):
        return tl.tensor(interpreter.TensorHandle(1 / np.sqrt(x.handle.data), x.dtype), x.type)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", rsqrt)


def logps_and_gradients(model):
    """Log-probs of packed sequences, and the loss's gradient of every parameter by its name."""
    n, g = sum(LENGTHS), torch.Generator().manual_seed(0)
    ids = torch.randint(5, 600, (n,), generator=g).to(DEVICE)
    ends = torch.tensor(LENGTHS).cumsum(0)
    where = torch.tensor([i for i in range(n) if i + 1 not in ends]).to(DEVICE)
    weights = {"adv": torch.randn(len(where), generator=g).to(DEVICE)}
    weights["token_weight"] = torch.rand(len(where), generator=g).to(DEVICE)
    packing = Packing(LENGTHS, device=DEVICE)
    loss, extras = forward_packed(model, ids, packing, where, ids[where + 1], 0.9, **weights)
    loss.backward()
    return extras["logp"], {name: p.grad for name, p in model.named_parameters()}


def error(a, b):
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def family(name, tiny_path, path):
    """A policy of this family whose norms' weights are not all alike."""
    settings = {"num_hidden_layers": 1} | SETTINGS.get(name, {})
    model = load_model(make_family(name.replace("Gemma3", "Gemma3Text"), settings, tiny_path, path))
    g = torch.Generator().manual_seed(2)
    for key, p in model.named_parameters():
        if "norm" in key:
            p.data += 0.3 * torch.randn(p.shape, generator=g)
    return model.train().to(DEVICE)


@pytest.mark.parametrize(
    "name, recompute",
    [
        ("Qwen2", True),
        *(pytest.param(x, False, marks=pytest.mark.slow) for x in ("Mistral", "Gemma3")),
    ],
)
def test_fused_layers_compute_as_transformers_in_float64(name, recompute, tiny_path, tmp_path):
    """As close to float64 as transformers' own layers in float32, with or without recomputed
    activations."""
    model = family(name, tiny_path, tmp_path / name)
    exact, fused = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert set(fuse(fused).removesuffix(" (Liger)").split(", ")) == (
        ALL - {"SwiGLU"} if name == "Gemma3" else ALL
    )
    if recompute:
        fused.gradient_checkpointing_enable({"use_reentrant": False})
    (logp, gradients), (want, wanted), (eager, rounded) = map(
        logps_and_gradients, (fused, exact, model)
    )
    assert error(logp, want) < 3 * error(eager, want) + 1e-6
    assert list(gradients) == list(wanted)
    for key in wanted:
        assert error(gradients[key], wanted[key]) < 3 * error(rounded[key], wanted[key]) + 1e-5, key


def test_adapters_on_the_projections_are_computed(tiny_path):
    """A hook on each projection, as an adapter has: fused layers call the module, not its
    weight."""
    model = load_model(tiny_path)
    fuse(model)
    called = []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        model.base_model(torch.tensor([[5, 6]]), use_cache=False, packing=Packing([2]))
    assert sorted(called) == sorted(
        name for name, _ in model.named_modules() if name.endswith("_proj")
    )


def test_other_models_of_the_process_stay_alone(tiny_path):
    fused, other = load_model(tiny_path), load_model(tiny_path)
    modeling = transformers.models.qwen2.modeling_qwen2
    before, names = dict(vars(modeling)), [name for name, _ in fused.named_parameters()]
    fuse(fused)
    assert vars(modeling) == before and not patched(other)
    assert [name for name, _ in fused.named_parameters()] == names
    assert len(patched(fused)) == 2 * 4 + 1  # two layers of two norms, and the last norm


def patched(model):
    return [module for module in model.modules() if "forward" in vars(module)]


def test_what_cannot_be_fused_stays_as_it_is(monkeypatch):
    gelu = skeleton(transformers.LlamaConfig(**SHAPES, hidden_act="gelu"))
    assert fuse(gelu) == "rotary embedding, RMSNorm (Liger)"
    assert not any(type(module).__name__ == "LlamaMLP" for module in patched(gelu))
    unknown, known = (
        skeleton(getattr(transformers, f"{name}Config")(**SHAPES))
        for name in ("Starcoder2", "Qwen2")
    )
    assert fuse(unknown).startswith("none (Starcoder2 is not among Qwen2, ")
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", None)
    assert fuse(known) == "none (liger-kernel is not installed)"
    assert not patched(unknown) and not patched(known)


@pytest.mark.parametrize(
    "device, flag, says, n",
    [
        ("cuda", 1, "rotary embedding, SwiGLU, RMSNorm (Liger)", 9),
        ("cuda", 0, "", 0),
        ("cpu", 1, "", 0),
    ],
)
def test_the_flag_and_the_device_decide(device, flag, says, n, tiny_path, monkeypatch, capsys):
    for name in ("shard", "fill"):
        monkeypatch.setattr(shards, name, lambda model, *args, **kwargs: model)
    monkeypatch.setattr(shards, "find_flash_attention_4", lambda: None)
    ranks = SimpleNamespace(device=device, dtype="bfloat16", rank=0)
    for model in shards.shard_models(None, Config(model=tiny_path, fused_layers=flag), ranks):
        assert len(patched(model)) == n
    told = f"fused layers: {says}; attention: torch's\n" if says else ""
    assert capsys.readouterr().out == told
