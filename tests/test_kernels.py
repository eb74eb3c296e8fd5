"""The GRPO head against a literal Eq. 2: float64, autograd, the whole logits matrix in memory.

So are other surrogates, each a few lines of torch between two passes. Every test runs with
rows_torch on the CPU, where Eq. 2 is torch, and with the Triton kernels: on a GPU if
there is one, otherwise in Triton's interpreter.
"""

import math
import sys
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
        monkeypatch.setattr(kernels.head, "_choose_backend", lambda device: rows_torch)
        return rows_torch
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels.head, "_choose_backend", lambda device: rows_triton)
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


def entropy_bonus(entropy, entropy_coef, **tokens):
    return clip(**tokens) + entropy_coef * entropy


SURROGATES = {f.__name__: f for f in (clip, entropy_bonus)}
# Eq. 2 in one launch, and in two passes, which test_settings has, too
KINDS = [None, pytest.param("clip", marks=pytest.mark.slow)]


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
    surrogate = torch.min(rho * adv, torch.minimum(torch.maximum(rho, low), high) * adv)
    clipped = ((adv > 0) & (rho > high)) | ((adv < 0) & (rho < low))
    kl = torch.zeros_like(logp) if ref is None else torch.exp(ref - logp) - (ref - logp) - 1
    entropy = -(logp_all.exp() * logp_all).sum(1)
    loss = -(w * (surrogate - beta * kl + entropy_coef * entropy)).sum()
    return loss, {"logp": logp, "entropy": entropy, "kl": kl, "clipped": clipped}


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


ROWS = 7  # few: the interpreter takes milliseconds each


def batch(N=ROWS, H=16, V=1187, dtype=torch.float32, seed=0):
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


EPS = torch.linspace(0.05, 0.5, ROWS)


SETTINGS = {
    "plain": {},
    "no reference": {"ref_logp": None},
    "temperature": {"temperature": 0.7, "beta": 0.04},
    "eps per token": {"eps_low": EPS, "eps_high": EPS.flip(0)},
    "on-policy": {"old_logp": None},
    "clip in two passes": {"kind": "clip", "beta": 0.04},
    "on-policy clip in two passes": {"kind": "clip", "old_logp": None},
    "entropy": {"kind": "entropy_bonus", "entropy_coef": -0.3, "temperature": 1.7},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings(setting):
    args, kw = batch()
    kw |= setting
    got = check(*args, **kw)
    assert got["clipped"].any() == (kw["old_logp"] is not None)


@pytest.mark.parametrize("N, H, V", [(1, 16, 1187), (3, 32, 151_936), (5, 3, 2), (2, 4, 4097)])
def test_shapes(N, H, V):
    args, kw = batch(N, H, V)
    check(*args, beta=0.04, **kw)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logits", ["negative", "+-60", "-60 but one"])
def test_logits(logits, kind):
    """With hidden = identity, weight.T is the matrix of logits."""
    g = torch.Generator().manual_seed(1)
    z = 60 * (2 * torch.rand(ROWS, 1187, generator=g) - 1)
    if logits == "negative":
        z = -1 - 20 * torch.rand(ROWS, 1187, generator=g)
    elif logits == "-60 but one":  # a certain token: logp = 0, and a rare one: logp = -120
        z.fill_(-60)[:, 7] = 60
    targets = torch.randint(1187, (ROWS,), generator=g)
    targets[:4] = z.argmax(1)[:4]
    args = torch.eye(ROWS), z.T.contiguous(), targets
    check(*args, beta=0.04, kind=kind, **per_token(*args, g))


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_the_clip(kind):
    """Gradient where rho * adv is the smaller one: below 1 + eps for adv > 0, above 1 - eps for adv
    < 0."""
    rho = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21])
    free = {1.0: rho < 1.2, 0.0: rho > 0, -1.0: rho > 0.8}
    (hidden, weight, targets), _ = batch(N=18)
    old = token_logprobs(hidden, weight, targets)[0] - rho.repeat(3).log()
    adv = torch.tensor(list(free)).repeat_interleave(6)
    kw = {"adv": adv, "token_weight": torch.ones(18), "old_logp": old, "kind": kind}
    got = check(hidden, weight, targets, **kw)
    assert torch.equal(~got["clipped"], torch.cat(list(free.values())))
    # elsewhere exactly zero
    assert torch.equal(got["dX"].abs().sum(1) > 0, ~got["clipped"] & (adv != 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_keeps_the_whole_gradient(kind):
    """On-policy, rho = 1: both terms of min are equal and the gradient is adv * dlogp, even with
    eps = 0."""
    args, kw = batch()
    kw |= {"eps_low": 0.0, "eps_high": 0.0, "kind": kind, "old_logp": None}
    got = differentiate(head, *args, **kw)
    hidden, weight = (v.double().requires_grad_() for v in args[:2])
    logp = torch.log_softmax(hidden @ weight.T, 1)[torch.arange(ROWS), args[2]]
    dX, dW = torch.autograd.grad(-(kw["token_weight"] * kw["adv"] * logp).sum(), (hidden, weight))
    assert error(got["dX"], dX) < 1e-5 and error(got["dW"], dW) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adv", [0.0, 1.0, -1.0])
def test_far_from_old_and_reference_all_stays_finite(adv, kind):
    """Log-ratios are kept within +-40, as some surrogates square rho; with w = 0 all is 0."""
    args, kw = batch(N=6)
    kw |= {"kind": kind}
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


@pytest.mark.parametrize("kind", KINDS)
def test_nan_propagates(kind):
    (hidden, weight, targets), kw = batch(N=5)
    hidden[2] = math.nan
    got = differentiate(head, hidden, weight, targets, beta=0.04, kind=kind, **kw)
    assert got["loss"].isnan() and got["dX"][2].isnan().all() and got["dX"][3].isfinite().all()
    assert got["logp"].isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("target", [-100, 1187])
def test_a_target_that_is_no_token_is_an_error_or_nan(rows, target):
    """The kernel returns NaN: checking for an error would make the host wait for the GPU."""
    (hidden, weight, targets), kw = batch(N=5)
    targets[3] = target
    if rows is rows_torch:
        with pytest.raises((IndexError, RuntimeError)):
            head(hidden, weight, targets, **kw)
    else:
        loss, extras = head(hidden, weight, targets, **kw)
        assert loss.isnan() and extras["logp"].isnan().nonzero().tolist() == [[3]]


# ---- chunks


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_does_not_matter(kind):
    args, kw = batch()
    kw |= {"beta": 0.04, "kind": kind}
    whole, scores = differentiate(head, *args, **kw), token_logprobs(*args)
    for chunk in (1, 5):
        cut = differentiate(head, *args, chunk=chunk, **kw)
        assert error(cut["dX"], whole["dX"]) < 2e-6 and error(cut["dW"], whole["dW"]) < 2e-6
        for k in ("loss", "logp", "entropy", "kl", "clipped"):
            assert same(cut[k], whole[k], atol=1e-6)
        for a, b in zip(scores, token_logprobs(*args, chunk=chunk), strict=True):
            assert same(b, a, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kind):
    args, kw = batch(N=0)
    got = differentiate(head, *args, kind=kind, **kw)
    assert got["loss"] == 0 and not got["dW"].any() and got["dX"].shape == (0, 16)
    assert all(got[k].shape == (0,) for k in ("logp", "entropy", "kl", "clipped"))
    assert [v.shape for v in token_logprobs(*args)] == [(0,), (0,)]


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_bit_for_bit(kind):
    args, kw = batch(N=11, H=64)
    a, b = (differentiate(head, *args, beta=0.04, chunk=4, kind=kind, **kw) for _ in range(2))
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_matrix_is_never_whole(kind):
    args, kw = batch(N=9, H=2)
    with Watch() as seen:
        differentiate(head, *args, chunk=4, kind=kind, **kw)
    assert seen.largest == 4 * 1187 * 4


# ---- precision


def test_token_logprobs():
    (hidden, weight, targets), _ = batch(H=64)
    logp, entropy = token_logprobs(
        hidden.requires_grad_(), weight, targets, temperature=0.7, chunk=5
    )
    want = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, 1)
    assert logp.dtype == torch.float32 and not logp.requires_grad
    assert same(logp, want[torch.arange(ROWS), targets], rtol=0)
    assert same(entropy, -(want.exp() * want).sum(1))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    args, kw = batch()
    plain = differentiate(head, *args, kind=kind, **kw)
    with torch.autocast("cpu", torch.bfloat16):
        cast = differentiate(head, *args, kind=kind, **kw)
        logp, entropy = token_logprobs(*args)
    assert all(torch.equal(cast[k], plain[k]) for k in plain)
    assert torch.equal(logp, plain["logp"]) and torch.equal(entropy, plain["entropy"])


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_small_kl_and_its_gradient_keep_their_digits(rows):
    """exp(d) - d - 1 in float32 would be 0 or 6e-8 here; with adv = 0 the gradient is the KL's
    alone."""
    (hidden, weight, targets), kw = batch()
    hidden.requires_grad_()
    logp = token_logprobs(hidden, weight, targets)[0]
    ref = logp + torch.logspace(-5, -1.2, ROWS) * torch.tensor([1.0, -1.0]).repeat(ROWS)[:ROWS]
    kw |= {"ref_logp": ref, "beta": 0.1, "adv": torch.zeros(ROWS), "token_weight": torch.ones(ROWS)}
    loss, extras = grpo_head(hidden, weight, targets, **kw)
    d = ref.double() - logp.double()
    close = 1e-2 if rows is rows_torch else 1e-5
    assert torch.allclose(extras["kl"].double(), torch.expm1(d) - d, rtol=close, atol=1e-13)
    (dX,) = torch.autograd.grad(loss, hidden)
    p = torch.softmax(hidden.double() @ weight.double().T, 1)
    p[torch.arange(ROWS), targets] -= 1
    # dKL/dlogp = 1 - exp(d), and dlogp/dz = 1[y] - p
    want = (0.1 * torch.expm1(d))[:, None] * (p @ weight.double())
    assert ((dX - want).norm(dim=1) < 1e-2 * want.norm(dim=1)).all()


# ---- refusals


def test_refusals():
    args, kw = batch()
    with pytest.raises(TypeError, match="does not read delta"):
        grpo_head(*args, **kw, delta=3.0)
    with pytest.raises(ValueError, match="ref_logp"):
        grpo_head(*args, **kw | {"ref_logp": None}, beta=0.04)
