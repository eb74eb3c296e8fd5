"""The GRPO head against a literal Eq. 2: float64, autograd, the whole logits matrix in memory.

So are other surrogates, each a few lines of torch between two passes. Every test runs with
rows_torch on the CPU, where Eq. 2 is torch, and with the Triton kernels: on a GPU if
there is one, otherwise in Triton's interpreter.
"""

import json
import math
import os
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.head
from kernels import eq2 as lines_of_eq2
from kernels import grpo_head, rows_torch, token_logprobs

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.fixture(params=["torch", "triton"], autouse=True)
def rows(request, monkeypatch):
    """The module that processes rows of logits: `head` chooses it by device, this fixture for every
    test."""
    from kernels import rows_triton

    if request.param == "torch":
        monkeypatch.setattr(kernels.head, "_rows", lambda device: rows_torch)
        return rows_torch
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels.head, "_rows", lambda device: rows_triton)
    for function in (grpo_head, token_logprobs):
        if torch.cuda.is_available():
            monkeypatch.setattr(sys.modules[__name__], function.__name__, there_and_back(function))
    return rows_triton


def there_and_back(function):
    """Returns the function with arguments and results on the CPU that runs on the GPU."""

    def call(*args, **kw):
        args = [v.cuda() for v in args]
        results = function(
            *args, **{k: v.cuda() if torch.is_tensor(v) else v for k, v in kw.items()}
        )
        first, second = results
        second = (
            {k: v.cpu() for k, v in second.items()} if isinstance(second, dict) else second.cpu()
        )
        return first.cpu(), second

    return call


def clip(rho, adv, eps_low, eps_high, **_):
    return torch.minimum(rho * adv, rho.clamp(1 - eps_low, 1 + eps_high) * adv)


def dual_clip(rho, adv, eps_low, eps_high, delta, **_):
    return torch.minimum(
        torch.minimum(rho, delta) * adv, rho.clamp(1 - eps_low, 1 + eps_high) * adv
    )


def cispo(rho, logp, adv, eps_high, **_):
    return torch.minimum(rho, 1 + eps_high).detach() * adv * logp


def sapo(rho, adv, eps_low, eps_high, **_):
    tau = torch.where(adv > 0, eps_high, eps_low)
    return 4 / tau * torch.sigmoid(tau * (rho - 1)) * adv


def dppo(rho, logp, old, adv, eps_low, eps_high, **_):
    moved = logp.exp() - old.exp()
    return torch.where(
        ((adv > 0) & (moved > eps_high)) | ((adv < 0) & (-moved > eps_low)), 0, rho * adv
    )


def quadratic(rho, adv, eps_low, eps_high, **_):
    return rho * adv - torch.where(rho > 1, eps_high, eps_low) * (rho - 1) ** 2


def reinforce(logp, adv, **_):
    return adv * logp


def entropy_bonus(entropy, entropy_coef, **tokens):
    return clip(**tokens) + entropy_coef * entropy


SURROGATES = {
    f.__name__: f for f in (clip, dual_clip, cispo, sapo, dppo, quadratic, reinforce, entropy_bonus)
}


def head(*args, kind=None, **kw):
    """grpo_head with the surrogate of this name; None: Eq. 2, by the kernels in one launch."""
    if kind is not None:
        kw["objective"] = partial(lines_of_eq2, surrogate=SURROGATES[kind])
    return grpo_head(*args, **kw)


def eq2(
    hidden,
    weight,
    targets,
    *,
    adv,
    token_weight,
    old_logp=None,
    ref_logp=None,
    temperature=1.0,
    eps_low=0.2,
    eps_high=0.2,
    beta=0.0,
    kind=None,
    delta=math.inf,
    entropy_coef=0.0,
):
    """Returns the loss and the extras of `head` in float64, for autograd to differentiate."""

    def f64(v):
        return None if v is None else torch.as_tensor(v).double()

    hidden, weight, adv, w = map(f64, (hidden, weight, adv, token_weight))
    old, ref = f64(old_logp), f64(ref_logp)
    logp_all = torch.log_softmax(hidden @ weight.T / temperature, dim=1)  # (N, V)
    logp = logp_all[torch.arange(len(targets)), targets]
    low, high = 1 - f64(eps_low), 1 + f64(eps_high)
    rho = torch.exp(logp - (logp.detach() if old is None else old))
    if kind in (None, "clip", "dual_clip", "entropy_bonus"):
        first = torch.where(adv < 0, rho.clamp(max=delta), rho)
        surrogate = torch.min(first * adv, torch.minimum(torch.maximum(rho, low), high) * adv)
        clipped = ((adv > 0) & (rho > high)) | ((adv < 0) & ((rho < low) | (rho > delta)))
    elif kind == "cispo":
        surrogate = torch.minimum(rho, high).detach() * adv * logp
        clipped = torch.zeros(len(adv), dtype=torch.bool)
    else:
        surrogate, clipped = other(kind, logp, old, rho, adv, f64(eps_low), f64(eps_high))
    kl = torch.zeros_like(logp) if ref is None else torch.exp(ref - logp) - (ref - logp) - 1
    entropy = -(logp_all.exp() * logp_all).sum(1)
    loss = -(w * (surrogate - beta * kl + entropy_coef * entropy)).sum()
    return loss, {"logp": logp, "entropy": entropy, "kl": kl, "clipped": clipped}


def other(kind, logp, old, rho, adv, low, high):
    """Returns the surrogate of the later kinds and what they drop, token by token."""
    low, high = (v.expand(len(adv)) for v in (low, high))
    terms, dropped = [], []
    for n in range(len(adv)):
        A, drop = adv[n], False
        if kind == "sapo":
            tau = high[n] if A > 0 else low[n]
            term = A * (4 / tau) / (1 + torch.exp(-tau * (rho[n] - 1)))
        elif kind == "dppo":
            p, p_old = torch.exp(logp[n]), torch.exp((logp if old is None else old)[n])
            drop = bool(p - p_old > high[n]) if A > 0 else A < 0 and bool(p_old - p > low[n])
            term = 0 * logp[n] if drop else rho[n] * A
        elif kind == "quadratic":
            term = rho[n] * A - (high[n] if rho[n] > 1 else low[n]) * (rho[n] - 1) ** 2
        elif kind == "reinforce":
            term = A * logp[n]
        terms.append(term)
        dropped.append(bool(drop))
    return torch.stack(terms), torch.tensor(dropped)


def differentiate(function, hidden, weight, targets, **kw):
    """Returns {loss, dX, dW, logp, entropy, kl, clipped} of head, grpo_head or eq2."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss, extras = function(hidden, weight, targets, **kw)
    dX, dW = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss, "dX": dX, "dW": dW} | extras


def error(got, want):
    """Returns the relative error in the Frobenius norm; the absolute one if `want` is 0."""
    return ((got.double() - want.double()).norm() / (want.double().norm() or 1)).item()


def same(got, want, atol=1e-5, rtol=1e-5):
    return torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol)


def check(hidden, weight, targets, chunk=4096, **kw):
    """Asserts that head equals eq2, logp to 1e-5 and gradients to 1e-5 of their norm; returns its
    results."""
    got = differentiate(head, hidden, weight, targets, chunk=chunk, **kw)
    want = differentiate(eq2, hidden.double(), weight.double(), targets, **kw)
    for k in ("logp", "entropy", "kl", "clipped"):
        assert got[k].shape == targets.shape and not got[k].requires_grad
    assert same(got["logp"], want["logp"], rtol=0)
    assert same(got["entropy"], want["entropy"])
    assert same(got["kl"], want["kl"], rtol=1e-4)
    assert torch.equal(got["clipped"], want["clipped"])
    assert same(got["loss"], want["loss"])
    assert error(got["dX"], want["dX"]) < 1e-5 and error(got["dW"], want["dW"]) < 1e-5
    return got


def batch(N=13, H=16, V=1187, dtype=torch.float32, seed=0):
    """Returns arguments with peaked logits, N(0, 3), and those of per_token."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=dtype) for n in (N, V))
    weight *= 3 / H**0.5
    targets = torch.randint(V, (N,), generator=g)
    return (hidden, weight, targets), per_token(hidden, weight, targets, g)


def per_token(hidden, weight, targets, g):
    """Returns advantages of both signs and zero, rho between about 0.4 and 2.5, arbitrary
    weights."""
    N, dtype = len(targets), hidden.dtype
    adv = torch.randn(N, generator=g, dtype=dtype)
    adv[1::5] = 0
    logp = token_logprobs(hidden, weight, targets)[0]
    old, ref = (logp + 0.4 * torch.randn(N, generator=g, dtype=dtype) for _ in range(2))
    w = torch.rand(N, generator=g, dtype=dtype) / max(N, 1)
    return {"adv": adv, "token_weight": w, "old_logp": old, "ref_logp": ref}


# ---- the loss and its gradient


EPS = torch.linspace(0.05, 0.5, 13)
SETTINGS = {
    "plain": {},
    "no reference": {"ref_logp": None},
    "beta": {"beta": 0.04},
    "temperature": {"temperature": 0.7, "beta": 0.04},
    "two eps": {"eps_low": 0.1, "eps_high": 0.28},
    "eps per token": {"eps_low": EPS, "eps_high": EPS.flip(0)},
    "one eps per token": {"eps_low": EPS},
    "on-policy": {"old_logp": None},
    "clip in two passes": {"kind": "clip", "beta": 0.04},
    "on-policy clip in two passes": {"kind": "clip", "old_logp": None},
    "dual clip": {"kind": "dual_clip", "delta": 1.5, "beta": 0.04},
    "cispo": {"kind": "cispo"},
    "cispo, all": {"kind": "cispo", "eps_high": EPS, "temperature": 1.3, "beta": 0.04},
    "on-policy cispo": {"kind": "cispo", "old_logp": None},
    "sapo": {"kind": "sapo", "eps_low": 1.05, "eps_high": 1.0},
    "sapo, all": {
        "kind": "sapo",
        "eps_low": 4 * EPS,
        "eps_high": 5 * EPS.flip(0),
        "temperature": 0.9,
        "beta": 0.04,
    },
    "on-policy sapo": {"kind": "sapo", "eps_low": 1.05, "eps_high": 1.0, "old_logp": None},
    "dppo": {"kind": "dppo", "eps_low": 1e-6, "eps_high": 1e-6, "beta": 0.04},
    "dppo, eps per token": {
        "kind": "dppo",
        "eps_low": EPS / 1e4,
        "eps_high": EPS.flip(0) / 1e4,
        "temperature": 0.7,
    },
    "on-policy dppo": {"kind": "dppo", "old_logp": None},
    "quadratic": {"kind": "quadratic", "eps_low": 0.04, "eps_high": 0.04},
    "quadratic, all": {
        "kind": "quadratic",
        "eps_low": EPS,
        "eps_high": EPS.flip(0),
        "temperature": 0.7,
        "beta": 0.04,
    },
    "on-policy quadratic": {
        "kind": "quadratic",
        "eps_low": 0.04,
        "eps_high": 0.04,
        "old_logp": None,
    },
    "reinforce": {"kind": "reinforce"},
    "reinforce, all": {"kind": "reinforce", "temperature": 0.7, "beta": 0.04},
    "entropy": {"kind": "entropy_bonus", "entropy_coef": 0.01, "beta": 0.04},
    "entropy, warm": {
        "kind": "entropy_bonus",
        "entropy_coef": -0.3,
        "temperature": 1.7,
        "old_logp": None,
    },
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("chunk", [pytest.param(10, marks=pytest.mark.slow), 4096])
def test_settings(setting, chunk):
    args, kw = batch()
    kw |= setting
    got = check(*args, chunk=chunk, **kw)
    cuts = kw.get("kind") not in ("cispo", "sapo", "quadratic", "reinforce")
    assert got["clipped"].any() == (cuts and kw["old_logp"] is not None)


SHAPES = [
    (1, 16, 1187),
    (3, 32, 151_936),
    (2, 32, 152_064),
    (65, 64, 1187),
    (5, 3, 2),
    (2, 4, 4096),
    (2, 4, 4097),
]


@pytest.mark.parametrize("N, H, V", SHAPES)
def test_shapes(N, H, V):
    args, kw = batch(N, H, V)
    check(*args, beta=0.04, **kw)


@pytest.mark.parametrize("kind", [None, "clip", "entropy_bonus"])
@pytest.mark.parametrize("logits", ["negative", "+-60", "-60 but one"])
def test_logits(logits, kind):
    """With hidden = identity, weight.T is the matrix of logits."""
    g = torch.Generator().manual_seed(1)
    z = 60 * (2 * torch.rand(13, 1187, generator=g) - 1)
    if logits == "negative":
        z = -1 - 20 * torch.rand(13, 1187, generator=g)
    elif logits == "-60 but one":  # a certain token: logp = 0, and a rare one: logp = -120
        z.fill_(-60)[:, 7] = 60
    targets = torch.randint(1187, (13,), generator=g)
    targets[:4] = z.argmax(1)[:4]
    args = torch.eye(13), z.T.contiguous(), targets
    kw = (
        per_token(*args, g)
        | {"kind": kind}
        | ({"entropy_coef": 0.01} if kind == "entropy_bonus" else {})
    )
    check(*args, beta=0.04, **kw)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("old", ["given", None])
def test_eq2_token_by_token(old, beta, rows):
    """In Python's floats, on both sides of both clip edges, near the reference and far from it, for
    adv of each sign.

    Where adv is 0 the gradient is the KL's alone, and must not cancel next to the reference.
    """
    ratios, distances = (
        (0.5, 0.899, 0.901, 1, 1.279, 1.281, 2),
        (-3, -0.11, -0.09, -1e-3, 0, 1e-4, 0.09, 0.11, 2),
    )
    grid = torch.cartesian_prod(*map(torch.tensor, (ratios, distances, (1.5, 0.0, -0.75)))).float()
    # in the slow interpreter every ratio and every distance with every adv
    rho, d, adv = grid[:: 1 if rows is rows_torch else 4].T
    N, low, high = len(rho), 0.1, 0.28
    p = torch.linspace(0.05, 0.9, N)
    args = torch.stack([p, 1 - p], 1).log(), torch.eye(2), torch.zeros(N, dtype=torch.long)
    logp = token_logprobs(*args)[0]
    kw = {"adv": adv, "token_weight": torch.linspace(0.01, 0.02, N), "ref_logp": logp + d}
    kw["old_logp"] = logp - rho.log() if old else None
    got = differentiate(grpo_head, *args, **kw, eps_low=low, eps_high=high, beta=beta)

    loss, expected = 0.0, []
    for n in range(N):
        A, w, ref, now = (float(x[n]) for x in (adv, kw["token_weight"], kw["ref_logp"], logp))
        ratio = math.exp(now - float(kw["old_logp"][n])) if old else 1.0
        clipped = ratio > 1 + high if A > 0 else A < 0 and ratio < 1 - low
        kl = math.expm1(ref - now) - (ref - now)
        loss -= w * (min(ratio * A, min(max(ratio, 1 - low), 1 + high) * A) - beta * kl)
        c = w * ((0 if clipped else ratio * A) + beta * math.expm1(ref - now))
        expected.append((kl, clipped, -c * (1 - math.exp(now)), c * (1 - math.exp(now))))
    kl, clipped, *dz = torch.tensor(expected, dtype=torch.float64).T
    assert same(got["loss"], torch.tensor(loss)) and torch.equal(got["clipped"], clipped.bool())
    assert clipped.any() == bool(old)
    assert same(got["dX"], torch.stack(dz, 1), atol=1e-14)
    # in float32 it cancels
    assert same(got["kl"], kl, atol=1e-14, rtol=1e-2 if rows is rows_torch else 1e-5)


def test_both_sides_of_the_clip():
    """Gradient where rho * adv is the smaller one: below 1 + eps for adv > 0, above 1 - eps for adv
    < 0."""
    rho = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9, 2.1])
    free = {1.0: rho < 1.2, 0.0: rho > 0, -1.0: (rho > 0.8) & (rho < 2)}  # delta = 2
    (hidden, weight, targets), _ = batch(N=24)
    old = token_logprobs(hidden, weight, targets)[0] - rho.repeat(3).log()
    adv = torch.tensor(list(free)).repeat_interleave(8)
    got = check(
        hidden,
        weight,
        targets,
        adv=adv,
        token_weight=torch.ones(24),
        old_logp=old,
        kind="dual_clip",
        delta=2.0,
    )
    assert torch.equal(~got["clipped"], torch.cat(list(free.values())))
    # elsewhere exactly zero
    assert torch.equal(got["dX"].abs().sum(1) > 0, ~got["clipped"] & (adv != 0))


@pytest.mark.parametrize("kind", [None, "clip"])
@pytest.mark.parametrize("eps", [0.2, 0.0])
def test_a_tie_keeps_the_whole_gradient(eps, kind):
    """On-policy, rho = 1: both terms of min are equal and the gradient is adv * dlogp, even with
    eps = 0."""
    args, kw = batch()
    kw |= {"eps_low": eps, "eps_high": eps, "kind": kind}
    implied = differentiate(head, *args, **kw | {"old_logp": None})
    given = differentiate(head, *args, **kw | {"old_logp": token_logprobs(*args)[0]})
    # on a GPU another compilation makes the log-probs
    equal = same if torch.cuda.is_available() else torch.equal
    assert all(equal(implied[k], given[k]) for k in implied)
    assert not implied["clipped"].any()

    hidden, weight = (v.double().requires_grad_() for v in args[:2])
    logp = torch.log_softmax(hidden @ weight.T, 1)[torch.arange(13), args[2]]
    dX, dW = torch.autograd.grad(-(kw["token_weight"] * kw["adv"] * logp).sum(), (hidden, weight))
    assert error(implied["dX"], dX) < 1e-5 and error(implied["dW"], dW) < 1e-5


def test_delta_bounds_a_negative_advantage():
    args, kw = batch()
    # rho about e^40
    kw |= {"adv": -torch.ones(13), "token_weight": torch.ones(13), "old_logp": kw["old_logp"] - 40}
    assert differentiate(grpo_head, *args, **kw)["loss"] > 1e15
    bounded = check(*args, kind="dual_clip", delta=4.0, **kw)
    assert same(bounded["loss"], torch.tensor(13 * 4.0)) and not bounded["dX"].any()


@pytest.mark.parametrize("kind", [None, *SURROGATES])
@pytest.mark.parametrize("adv", [0.0, 1.0, -1.0])
def test_far_from_old_and_reference_all_stays_finite(adv, kind):
    """Log-ratios are kept within +-40, as some surrogates square rho; with w = 0 all is 0."""
    args, kw = batch(N=6)
    kw |= {"kind": kind} | {
        "dual_clip": {"delta": 3.0},
        "entropy_bonus": {"entropy_coef": 0.1},
    }.get(kind, {})
    logp = token_logprobs(*args)[0]
    far = torch.tensor([math.inf, 1000, 200, -200, -1000, -math.inf])
    for w in (torch.ones(6), torch.zeros(6)):
        kw |= {
            "adv": torch.full((6,), adv),
            "token_weight": w,
            "old_logp": logp + far,
            "ref_logp": logp + far.roll(1),
        }
        got = differentiate(head, *args, **kw, beta=0.04)
        assert all(v.isfinite().all() for v in got.values())
        assert w.any() or not (got["loss"] or got["dX"].any() or got["dW"].any())


@pytest.mark.parametrize("kind", [None, "clip"])
def test_nan_propagates(kind):
    (hidden, weight, targets), kw = batch(N=5)
    hidden[2] = math.nan
    got = differentiate(head, hidden, weight, targets, beta=0.04, kind=kind, **kw)
    assert got["loss"].isnan() and got["dX"][2].isnan().all() and got["dX"][3].isfinite().all()
    assert got["logp"].isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("kind", [None, "clip"])
@pytest.mark.parametrize("target", [-100, 1187])
def test_a_target_that_is_no_token_is_an_error_or_nan(rows, target, kind):
    """The kernel returns NaN: checking for an error would make the host wait for the GPU."""
    (hidden, weight, targets), kw = batch(N=5)
    targets[3] = target
    if rows is rows_torch:
        with pytest.raises((IndexError, RuntimeError)):
            head(hidden, weight, targets, kind=kind, **kw)
    else:
        loss, extras = head(hidden, weight, targets, kind=kind, **kw)
        assert loss.isnan() and extras["logp"].isnan().tolist() == [
            False,
            False,
            False,
            True,
            False,
        ]


def test_w_holds_the_averages_of_eq2():
    """Eq. 2 trajectory by trajectory, observations left out, is one call with w = mask / (G *
    sum(mask))."""
    args, kw = batch()
    mask = torch.rand(13, generator=torch.Generator().manual_seed(2)) < 0.7
    G, lengths = 3, [6, 3, 4]
    logp = torch.log_softmax(args[0].double() @ args[1].double().T, 1)[torch.arange(13), args[2]]
    J, w = 0.0, []
    for tau in torch.arange(13).split(lengths):
        total = 0.0
        for t in tau[mask[tau]]:
            rho = math.exp(logp[t] - kw["old_logp"][t])
            d = (kw["ref_logp"][t] - logp[t]).item()
            A = kw["adv"][t].item()
            total += min(rho * A, min(max(rho, 0.8), 1.2) * A) - 0.001 * (math.exp(d) - d - 1)
        J += total / mask[tau].sum().item() / G
        w.append(mask[tau] / mask[tau].sum() / G)
    loss, _ = grpo_head(*args, **kw | {"token_weight": torch.cat(w), "beta": 0.001})
    assert same(loss, torch.tensor(-J))


@pytest.mark.parametrize(
    "more", [{}, {"kind": "entropy_bonus", "entropy_coef": 0.2}], ids=["fused", "two passes"]
)
def test_gradcheck(rows, more):
    if rows is not rows_torch:
        pytest.skip("the kernel computes in float32")
    (hidden, weight, targets), kw = batch(N=7, H=3, V=11, dtype=torch.float64)
    for tensor in (hidden, weight):
        tensor.requires_grad_()

    def loss(hidden, weight):
        return head(hidden, weight, targets, temperature=0.8, beta=0.3, chunk=3, **kw, **more)[0]

    assert loss(hidden, weight).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, (hidden, weight))


# ---- chunks


@pytest.mark.parametrize("kind", [None, "clip"])
def test_chunk_does_not_matter(kind):
    args, kw = batch()
    kw |= {"beta": 0.04, "kind": kind}
    whole, scores = differentiate(head, *args, **kw), token_logprobs(*args)
    for chunk in (1, 5, 12, 13, 14):
        cut = differentiate(head, *args, chunk=chunk, **kw)
        assert error(cut["dX"], whole["dX"]) < 2e-6 and error(cut["dW"], whole["dW"]) < 2e-6
        for k in ("loss", "logp", "entropy", "kl", "clipped"):
            assert same(cut[k], whole[k], atol=1e-6)
        for a, b in zip(scores, token_logprobs(*args, chunk=chunk), strict=True):
            assert same(b, a, atol=1e-6)


def test_one_ratio_for_a_sequence_that_straddles_chunks():
    """GSPO: min(s A, clip(s) A) with s = exp(mean log rho). Its mean comes as a column, from a pass
    before."""
    (hidden, weight, targets), kw = batch()
    lengths = torch.tensor([6, 3, 4])
    of = torch.arange(3).repeat_interleave(lengths)
    kw |= {
        "adv": torch.tensor([1.0, -2.0, 0.5])[of],
        "ref_logp": None,
        "eps_low": 0.1,
        "eps_high": 0.1,
    }

    def means(x):
        return torch.zeros(3, dtype=x.dtype).index_add(0, of, x)[of] / lengths[of]

    def gspo(logp, log_s, adv, eps_low, eps_high, **_):
        s = torch.exp(log_s + logp - logp.detach())
        return torch.minimum(s * adv, s.clamp(1 - eps_low, 1 + eps_high) * adv)

    def exact(hidden, weight, targets, *, adv, token_weight, old_logp, **_):
        logp = torch.log_softmax(hidden @ weight.T, 1)[torch.arange(13), targets]
        s = means(logp - old_logp.double()).exp()
        return -(token_weight * torch.minimum(s * adv, s.clamp(0.9, 1.1) * adv)).sum(), {}

    kw["token_weight"] = (0.1 * torch.tensor([1.0, 2.0, 3.0]))[of]  # one for a sequence, as in GSPO
    log_s = means(token_logprobs(hidden, weight, targets)[0] - kw["old_logp"])
    assert ((log_s.exp() - 1).abs() > 0.1).any() and ((log_s.exp() - 1).abs() < 0.1).any()
    want = differentiate(exact, hidden.double(), weight.double(), targets, **kw)
    for chunk in (4096, 4, 1):  # 4: cuts inside the first and the last sequence
        lines = partial(lines_of_eq2, surrogate=gspo)
        got = differentiate(
            grpo_head, hidden, weight, targets, objective=lines, log_s=log_s, chunk=chunk, **kw
        )
        assert same(got["loss"], want["loss"])
        assert error(got["dX"], want["dX"]) < 1e-5 and error(got["dW"], want["dW"]) < 1e-5


def test_two_micro_batches_make_one():
    args, kw = batch()
    whole = differentiate(grpo_head, *args, **kw)
    weight, total, dX = args[1].clone().requires_grad_(), 0.0, []
    for rows in (slice(0, 5), slice(5, 13)):
        hidden = args[0][rows].clone().requires_grad_()
        loss, _ = grpo_head(hidden, weight, args[2][rows], **{k: v[rows] for k, v in kw.items()})
        loss.backward()
        total, dX = total + loss.detach(), dX + [hidden.grad]
    assert same(total, whole["loss"])
    assert error(torch.cat(dX), whole["dX"]) < 1e-6 and error(weight.grad, whole["dW"]) < 1e-6


def test_masked_rows_might_as_well_be_absent():
    (hidden, weight, targets), kw = batch()
    mask = torch.arange(13) % 3 > 0
    masked = differentiate(
        grpo_head, hidden, weight, targets, **kw | {"token_weight": kw["token_weight"] * mask}
    )
    kept = {k: v[mask] for k, v in kw.items()}
    compact = differentiate(grpo_head, hidden[mask], weight, targets[mask], **kept)
    assert same(masked["loss"], compact["loss"])
    assert not masked["dX"][~mask].any() and error(masked["dX"][mask], compact["dX"]) < 1e-6
    assert error(masked["dW"], compact["dW"]) < 1e-6


@pytest.mark.parametrize("kind", [None, "clip"])
def test_no_rows(kind):
    args, kw = batch(N=0)
    got = differentiate(head, *args, kind=kind, **kw)
    assert got["loss"] == 0 and not got["dW"].any() and got["dX"].shape == (0, 16)
    assert all(got[k].shape == (0,) for k in ("logp", "entropy", "kl", "clipped"))
    assert [v.shape for v in token_logprobs(*args)] == [(0,), (0,)]


@pytest.mark.parametrize("kind", [None, "clip"])
def test_repeats_bit_for_bit(kind):
    args, kw = batch(N=49, H=64)
    a, b = (differentiate(head, *args, beta=0.04, chunk=20, kind=kind, **kw) for _ in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)


# ---- the gradient's destination


def test_backward_scales():
    (hidden, weight, targets), kw = batch()
    once = differentiate(grpo_head, hidden, weight, targets, **kw)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    (3 * grpo_head(hidden, weight, targets, **kw)[0] / 7).backward()
    assert (
        error(hidden.grad, once["dX"] * 3 / 7) < 1e-6
        and error(weight.grad, once["dW"] * 3 / 7) < 1e-6
    )


def test_tied_embeddings():
    """weight also produces the hidden states: both gradients add up."""
    (hidden, weight, targets), kw = batch()
    ids = targets.flip(0)

    def run(function, E):
        return function(torch.tanh(E[ids] + hidden.to(E.dtype)), E, targets, **kw)[0]

    E64, E = weight.double().requires_grad_(), weight.clone().requires_grad_()
    run(eq2, E64).backward()
    run(grpo_head, E).backward()
    assert error(E.grad, E64.grad) < 1e-5


class Watch(TorchDispatchMode):
    """Counts matrix products and records the bytes of the largest new tensor."""

    products = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.products += "mm" in func.__name__  # mm, addmm_
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.nbytes)
        return out


@pytest.mark.parametrize("kind", [None, "clip"])
def test_three_products_and_none_without_need(kind):
    (hidden, weight, targets), kw = batch()

    def products(dX, dW):
        X, W = hidden.detach().requires_grad_(dX), weight.detach().requires_grad_(dW)
        with Watch() as seen:
            loss, _ = head(X, W, targets, kind=kind, **kw)
            assert loss.requires_grad == (torch.is_grad_enabled() and (dX or dW))
            if loss.requires_grad:
                loss.backward()
        return seen.products

    assert products(True, True) == 3
    assert products(True, False) == 2  # a frozen head, as with LoRA
    assert products(False, False) == 1
    with torch.no_grad():
        assert products(True, True) == 1


@pytest.mark.parametrize("kind", [None, "clip"])
def test_the_logits_matrix_is_never_whole(kind):
    args, kw = batch(N=33, H=4)
    with Watch() as seen:
        differentiate(head, *args, chunk=8, kind=kind, **kw)
    assert seen.largest == 8 * 1187 * 4


class Alive(TorchDispatchMode):
    """Records the largest number of tensors of `nbytes`, by storage, that were alive at the same
    time."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.made, self.most = nbytes, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.nbytes == self.nbytes:
            self.made.append(weakref.ref(out))
        self.made = [ref for ref in self.made if ref() is not None]
        self.most = max(self.most, len({ref().untyped_storage().data_ptr() for ref in self.made}))
        return out


@pytest.mark.parametrize("kind", [None, "clip"])
def test_matrices_of_a_chunk_alive_at_once(rows, kind):
    """Two in torch; the kernels write dL/dz over the logits."""
    args, kw = batch(N=40, H=4)
    with Alive(8 * 1187 * 4) as seen:
        differentiate(head, *args, chunk=8, kind=kind, **kw)
    assert seen.most == (2 if rows is rows_torch else 1)
    with Alive(8 * 1187 * 4) as seen:
        token_logprobs(*args, chunk=8)
    assert 1 <= seen.most <= 2


@pytest.mark.parametrize("kind", [None, "clip"])
def test_extras_have_no_graph(kind):
    (hidden, weight, targets), kw = batch()
    kw = {k: v.requires_grad_() for k, v in kw.items()}
    loss, extras = head(hidden.requires_grad_(), weight, targets, kind=kind, **kw)
    loss.backward()
    assert all(v.grad is None for v in kw.values())
    assert not any(
        v.requires_grad for v in (*extras.values(), *token_logprobs(hidden, weight, targets))
    )


# ---- precision


def test_token_logprobs():
    (hidden, weight, targets), _ = batch(N=49, H=64)
    logp, entropy = token_logprobs(
        hidden.requires_grad_(), weight, targets, temperature=0.7, chunk=20
    )
    want = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, 1)
    assert logp.dtype == torch.float32 and not logp.requires_grad
    assert same(logp, want[torch.arange(49), targets], rtol=0)
    assert same(entropy, -(want.exp() * want).sum(1))


@pytest.mark.parametrize("kind", [None, "clip"])
def test_autocast_changes_nothing(kind):
    args, kw = batch()
    plain = differentiate(head, *args, kind=kind, **kw)
    with torch.autocast("cpu", torch.bfloat16):
        cast = differentiate(head, *args, kind=kind, **kw)
        logp, entropy = token_logprobs(*args)
    assert all(torch.equal(cast[k], plain[k]) for k in plain)
    assert torch.equal(logp, plain["logp"]) and torch.equal(entropy, plain["entropy"])


@pytest.mark.parametrize("kind", [None, "clip"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bf16_inputs_are_computed_in_float32(weight_dtype, kind, rows):
    """With bf16 hidden states, as under autocast, only the returned gradients are rounded; on a GPU
    the weight, too."""
    (hidden, weight, targets), kw = batch()
    hidden, weight = hidden.bfloat16(), weight.to(weight_dtype)
    got = differentiate(head, hidden, weight, targets, kind=kind, **kw)
    factor = (
        torch.bfloat16 if rows is not rows_torch and torch.cuda.is_available() else weight_dtype
    )
    want = differentiate(eq2, hidden.double(), weight.to(factor).double(), targets, **kw)
    assert got["loss"].dtype == torch.float32 and same(got["logp"], want["logp"], rtol=0)
    assert got["dX"].dtype == torch.bfloat16 and got["dW"].dtype == weight_dtype
    assert error(got["dX"], want["dX"]) < 5e-3 and error(got["dW"], want["dW"]) < 5e-3


def test_a_small_kl_keeps_its_digits(rows):
    """exp(d) - d - 1 in float32 would be 0 or 6e-8 here."""
    args, kw = batch(dtype=torch.float32)
    logp = token_logprobs(*args)[0]
    d = torch.logspace(-5, -1.2, 13) * torch.tensor([1.0, -1.0]).repeat(7)[:13]
    kl = grpo_head(*args, **kw | {"ref_logp": logp + d, "beta": 0.1})[1]["kl"]
    d = (logp + d).double() - logp.double()
    assert torch.allclose(
        kl.double(), torch.expm1(d) - d, rtol=1e-2 if rows is rows_torch else 1e-5, atol=1e-13
    )


# ---- refusals


def test_refusals():
    args, kw = batch()
    with pytest.raises(TypeError, match="does not read delta"):
        grpo_head(*args, **kw, delta=3.0)
    with pytest.raises(ValueError, match="ref_logp"):
        grpo_head(*args, **kw | {"ref_logp": None}, beta=0.04)


# ---- a peer, FSDP2


DUAL = {"kind": "dual_clip", "delta": 1.6}
LIGER = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "no KL": ({"beta": 0.0, "ref_logp": None}, {"beta": 0.0}),
    "token mean": ({}, {"loss_type": "bnpo"}),
    "two eps, delta": (
        {"eps_low": 0.1, "eps_high": 0.28} | DUAL,
        {"epsilon_low": 0.1, "epsilon_high": 0.28},
    ),
    "temperature": ({"temperature": 0.7}, {"temperature": 0.7}),
    # theirs is 1 + eps
    "cispo": ({"kind": "cispo", "eps_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
}


@pytest.mark.parametrize("ours, theirs", LIGER.values(), ids=LIGER)
def test_liger_gives_the_same(ours, theirs):
    """Liger computes (B, T) tokens, a third of them masked; grpo_head only the action tokens."""
    grpo_loss = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    B, T = 4, 9
    (hidden, weight, targets), kw = batch(N=B * T)
    g = torch.Generator().manual_seed(5)
    mask = (torch.rand(B, T, generator=g) < 0.7).float()
    adv = torch.randn(B, generator=g)
    ours = {"beta": 0.04} | ours
    theirs = {"beta": 0.04, "loss_type": "grpo"} | theirs
    share = 1 / mask.sum(1, keepdim=True) / B if theirs["loss_type"] == "grpo" else 1 / mask.sum()
    rows = mask.flatten().bool()
    kw |= {"adv": adv.repeat_interleave(T), "token_weight": (mask * share).flatten()}
    got = differentiate(
        head, hidden[rows], weight, targets[rows], **{k: v[rows] for k, v in kw.items()} | ours
    )

    liger = grpo_loss.LigerFusedLinearGRPOLoss(
        **theirs, delta=ours.get("delta"), use_ref_model=ours["beta"] > 0, compiled=False
    )
    X, W = hidden.reshape(B, T, -1).requires_grad_(), weight.clone().requires_grad_()
    ref = kw["ref_logp"].reshape(B, T) if ours["beta"] else None
    old = kw["old_logp"].reshape(B, T)
    loss, _ = liger(
        X, W, targets.reshape(B, T), mask, adv, ref_per_token_logps=ref, old_per_token_logps=old
    )
    loss.backward()
    assert same(got["loss"], loss, rtol=1e-4)
    assert (
        error(got["dX"], X.grad.reshape(B * T, -1)[rows]) < 1e-4 and error(got["dW"], W.grad) < 1e-4
    )


@pytest.mark.ranks
def test_inside_fsdp2(rows):
    """Two processes, with the head in the forward pass of a sharded module, equal one process."""
    if rows is not rows_torch:
        pytest.skip("the same for both")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "tests/fsdp_head.py",
        ],
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert all(errors[k] < 1e-5 for k in ("fp32 loss", "fp32 dW", "fp32 dX")), errors
    assert all(errors[k] < 5e-3 for k in ("bf16 loss", "bf16 dW", "bf16 dX")), errors
