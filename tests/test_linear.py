"""models/linear.py: products by oneDNN against float64, and a policy with them against one
without."""

import copy

import pytest
import torch
from test_grpo import batch_of
from torch import nn

from config import PRESETS
from models import linear as module
from models import model as models
from models import packing
from models.linear import Linear
from models.model import hidden_states, load_config, load_model, skeleton, speed_up
from models.packing import ROW_MULTIPLE, pack, prefer_onednn


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def onednn(request, monkeypatch):
    """Whether float32 rows go to oneDNN, whatever this machine's CPU."""
    prefer(request.param, monkeypatch)
    return request.param


def prefer(it: bool, monkeypatch):
    for where in (models, module, packing):
        monkeypatch.setattr(where, "prefer_onednn", lambda: it)


@pytest.mark.parametrize(
    "shape", [(1, 3 * ROW_MULTIPLE, 24), (1, 7, 24), (2, ROW_MULTIPLE, 24), (9, 24)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_equal_those_in_float64(onednn, shape, bias):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 40, bias=bias))
    wide = copy.deepcopy(layer).double()
    speed_up(layer)
    assert (type(layer[0]) is Linear) == onednn
    x = torch.randn(shape, requires_grad=True)
    of_wide = x.detach().double().requires_grad_()
    out, want = layer(x), wide(of_wide)
    by_onednn = out.grad_fn.name() == "ProductBackward"
    assert by_onednn == (onednn and shape[0] == 1 and shape[-2] % ROW_MULTIPLE == 0)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    dy = torch.randn_like(out)
    out.backward(dy)
    want.backward(dy.double())
    pairs = [(x, of_wide), *zip(layer.parameters(), wide.parameters(), strict=True)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-4, rtol=1e-5)


def test_a_row_is_filled_up_where_onednn_computes_and_scores_stay(monkeypatch):
    path = PRESETS["world"]["model"]
    prefer(True, monkeypatch)
    model = load_model(path)
    for each in model, skeleton(load_config(path)):  # training alone, then sharded
        assert {type(part) for part in each.modules() if isinstance(part, nn.Linear)} == {Linear}
    taus = batch_of(2)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
    scores, gradients, tokens = [], [], []
    for it in (False, True):
        prefer(it, monkeypatch)
        ids, packing_, where, targets = pack(taus, torch.device("cpu"))
        tokens.append(len(ids))
        logp, entropy = model.forward_packed(ids, packing_, where, targets, 1.0)
        scores.append(torch.stack([logp, entropy]))
        model.zero_grad()
        hidden_states(model, ids, packing_)[where].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert tokens[0] % ROW_MULTIPLE and tokens[1] == tokens[0] + -tokens[0] % ROW_MULTIPLE
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    for without, by_onednn in zip(*gradients, strict=True):
        torch.testing.assert_close(by_onednn, without, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "name, avx512, preferred",
    [("AMD EPYC", True, True), ("AMD EPYC", False, False), ("Intel(R) Xeon(R)", True, False)],
)
def test_onednn_is_preferred_on_amd_with_avx512(name, avx512, preferred, monkeypatch):
    cpu = {"cpu_name": name, "avx512_f": avx512}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert prefer_onednn.__wrapped__() == preferred
