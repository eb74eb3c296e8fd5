"""models/linear.py: products by oneDNN against float64, and a policy with them against one
without."""

import copy

import pytest
import torch
from torch import nn

from config import PRESETS
from models import linear as module
from models import lora, packing
from models.linear import ROWS, Linear, linear, prefer_onednn, speed_up
from models.model import load_config, load_model, skeleton
from models.packing import pack
from tasks import Question, Trajectory


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def onednn(request, monkeypatch):
    """Whether float32 rows go to oneDNN, whatever this machine's CPU."""
    prefer(request.param, monkeypatch)
    return request.param


def prefer(it: bool, monkeypatch):
    if it and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    for where in (module, packing):
        monkeypatch.setattr(where, "prefer_onednn", lambda: it)


@pytest.mark.parametrize(
    "shape", [(1, ROWS, 24), (1, 3 * ROWS, 24), (1, 7, 24), (2, ROWS, 24), (9, 24)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_equal_those_in_float64(onednn, shape, bias):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 40, bias=bias))
    wide = copy.deepcopy(layer).double()
    speed_up(layer)
    assert type(layer[0]) is Linear
    x = torch.randn(shape, requires_grad=True)
    of_wide = x.detach().double().requires_grad_()
    out, want = layer(x), wide(of_wide)
    by_onednn = out.grad_fn.name() == "ProductBackward"
    assert by_onednn == (onednn and shape[0] == 1 and shape[-2] % ROWS == 0)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    dy = torch.randn_like(out)
    out.backward(dy)
    want.backward(dy.double())
    pairs = [(x, of_wide), *zip(layer.parameters(), wide.parameters(), strict=True)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-4, rtol=1e-5)


def test_weights_that_are_frozen_get_no_gradient(monkeypatch):
    prefer(True, monkeypatch)
    W, x = torch.randn(8, 16), torch.randn(1, ROWS, 16, requires_grad=True)
    linear(x, W).sum().backward()
    assert x.grad is not None and W.grad is None
    assert linear(x.bfloat16(), W.bfloat16()).grad_fn.name() != "ProductBackward"


def test_a_row_is_filled_up_where_onednn_computes_and_scores_stay(monkeypatch):
    path = PRESETS["world"]["model"]
    model = load_model(path)
    for each in model, skeleton(load_config(path)):  # training alone, then sharded
        assert {type(part) for part in each.modules() if isinstance(part, nn.Linear)} == {Linear}
    taus = []
    for k in range(5):  # two groups
        tau = Trajectory(0, Question("q", "Who?", ("x",), ""), k // 3, [], 70)
        tau.observe(
            torch.randint(600, (70,), generator=torch.Generator().manual_seed(k // 3)).tolist()
        )
        tau.act(torch.randint(600, (30 + k,)).tolist(), [-1.0] * (30 + k))
        taus.append(tau)
    scores, gradients, tokens = [], [], []
    for it in (False, True):
        prefer(it, monkeypatch)
        ids, packing_, places, targets = pack(taus, torch.device("cpu"))
        tokens.append(len(ids))
        assert len(packing_.positions) == len(ids) == sum(packing_.lengths)
        logp, entropy = model.forward_packed(ids, packing_, places, targets, 1.0)
        scores.append(torch.stack([logp, entropy]))
        model.zero_grad()
        hidden = model.base_model(
            input_ids=ids[None],
            position_ids=packing_.positions[None],
            use_cache=False,
            packing=packing_,
        ).last_hidden_state[0, places]
        hidden.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert tokens[0] % ROWS and tokens[1] == tokens[0] + -tokens[0] % ROWS
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    for without, by_onednn in zip(*gradients, strict=True):
        torch.testing.assert_close(by_onednn, without, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("cpu", "built", "preferred"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, False, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, True, False),
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True}, True, False),
        ({}, True, False),
    ],
)
def test_onednn_is_preferred_on_amd_with_avx512(cpu, built, preferred, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: built)
    prefer_onednn.cache_clear()
    assert prefer_onednn() == preferred
    prefer_onednn.cache_clear()


def test_a_layer_with_adapters_is_multiplied_by_onednn_too(monkeypatch):
    prefer(True, monkeypatch)
    asked = []

    def multiply(*args):
        asked.append(args[0].shape)
        return by_onednn(*args)

    by_onednn = module.multiply
    monkeypatch.setattr(module, "multiply", multiply)
    torch.manual_seed(0)
    shapes = (1, ROWS, 24), (40, 24), (40,), (4, 24), (40, 4)
    x, W, bias, A, B = map(torch.randn, shapes)
    trained = [tensor.requires_grad_() for tensor in (x, A, B)]
    wide = [tensor.detach().double().requires_grad_() for tensor in trained]
    out = lora.Product.apply(x, W, bias, A, B, 0.5, torch.zeros(64, dtype=torch.int32))
    want = wide[0] @ (W.double() + 0.5 * wide[2] @ wide[1]).T + bias
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-5)
    dy = torch.randn_like(out)
    out.backward(dy)
    want.backward(dy.double())
    assert asked == [x.shape, dy.shape]
    for mine, theirs in zip(trained, wide, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-3, rtol=1e-4)
