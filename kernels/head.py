"""The GRPO head: vocabulary projection, Eq. 2 and their gradient in one pass over the action
tokens.

A vocabulary has up to 152,000 entries, so the logits of a batch are by far its largest matrix. Here
they exist one chunk of rows at a time, and the pass that reads the loss off a chunk also writes its
gradient: three matrix products in all, the minimum, and nothing is computed twice.

With x = z / T of the logits z = hidden @ weight.T, p = softmax(x), logp = log p[y], rho = exp(logp -
old), H = -sum_j p[j] log p[j], and w = token_weight:

    L = -sum_n J,    J = w * (S - beta * KL),    S = min(rho * adv, clip(rho, 1 - eps_low, 1 + eps_high) * adv)

The gradient needs no second look at the logits:
  1. J depends on x only through logp:                dlogp/dx[j] = 1[j = y] - p[j]
  2. drho/dlogp = rho, so where min takes rho * adv:  dS/dlogp = rho * adv, and 0 where the clip holds
  3. KL = exp(d) - d - 1 with d = ref - logp (k3):    dKL/dlogp = 1 - exp(d)
  4. so one number per token suffices:                c = dJ/dlogp = w * (dS/dlogp - beta * dKL/dlogp)
  5. another J may depend on H, which adds a second:  dH/dx[j] = -p[j] * (log p[j] + H),  a = dJ/dH
  6. together, with the 1/T of x:                     dL/dz[j] = (p[j] * (c + a * (log p[j] + H)) - c 1[j = y]) / T
  7. and from the dz (n, V) of a chunk:               dX = dz @ weight,  dW = dz.T @ hidden
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def grpo_head(
    hidden,
    weight,
    targets,
    *,
    adv,
    token_weight,
    objective=None,
    old_logp=None,
    ref_logp=None,
    temperature=1.0,
    eps_low=0.2,
    eps_high=0.2,
    beta=0.0,
    chunk=4096,
    **extra,
):
    """Returns the GRPO loss of N action tokens, its gradient already computed (Eq. 2, with the rho
    of Eq. 3).

    hidden (N, D), weight (V, D), targets (N,) int64. On a GPU, bf16 hidden states are multiplied in
    bf16 by the weight in bf16, accumulated in float32, and dL/dz is rounded to bf16. Everything
    else is float32, or float64 for float64 inputs (whose rows a GPU processes in float32). Inside
    FSDP2, cast nothing but hidden (MixedPrecisionPolicy(cast_forward_inputs=False)): bf16 is too
    coarse for log-probs.

    adv, token_weight, old_logp, ref_logp: (N,); eps_low, eps_high: scalars or (N,). No gradient
    flows into these.
    token_weight: mask / normalizer, times any other weight. Leaving out a token is cheaper than 0.
    objective: another J / w in torch, see `_two_passes`; None: Eq. 2's, on CUDA in one launch.
    old_logp: None is the on-policy step, rho = 1 with the gradient of rho. ref_logp: None means no
    KL. Both are kept within 40 of logp, so that the squares of their ratios are finite.
    extra: what else the objective reads, scalars or (N,).
    chunk: tokens at a time; takes the memory of one float32 matrix (chunk, V) on a GPU, of two
    elsewhere. Small chunks are slow: each reads weight and dW again.

    Returns L, a scalar, and detached (N,) tensors: logp, entropy (nats), kl, clipped (adv is not 0
    and yet S is flat).
    """
    if beta and ref_logp is None:
        raise ValueError(f"beta = {beta} needs ref_logp")
    if extra and objective is None:
        raise TypeError(f"Eq. 2 does not read {', '.join(extra)}: give an objective")

    # the function from a chunk's logits to its J and dL/dz, and the columns that it reads
    loss_rows = partial(
        _choose_loss_rows(hidden.device, objective), temperature=temperature, beta=beta
    )
    columns = extra | dict(adv=adv, token_weight=token_weight, eps_low=eps_low, eps_high=eps_high)
    columns |= dict(old=old_logp, ref=ref_logp)
    need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)

    # Under autocast the products would be bf16, and logp off by up to 0.1, half of eps.
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        loss, dX, dW, stats = _run_chunks(
            hidden, weight, targets, loss_rows, columns, need_grad, chunk
        )
    return _Attach.apply(loss, hidden, weight, dX, dW), stats


def _run_chunks(hidden, weight, targets, loss_rows, columns, need_grad, chunk):
    """Returns L, its gradients dX (N, D) and dW (V, D), None where nobody needs them, and the (N,)
    tensors of `grpo_head` by name."""
    N = len(hidden)
    like = {"dtype": _at_least_float32(hidden.dtype), "device": hidden.device}
    columns = {name: _as_column(x, N, like) for name, x in columns.items() if x is not None}
    W = weight.to(_dtype_of_factors(hidden))
    need_dW = need_grad and weight.requires_grad
    grad_dtype = W.dtype if need_grad else None
    dX = torch.empty(hidden.shape, **like) if need_grad else None
    dW = None
    J, logp, entropy, kl = torch.empty(4, N, **like)
    clipped = torch.empty(N, dtype=torch.bool, device=hidden.device)
    # rows: the slice of a chunk's n tokens; h (n, D): their hidden states; z (n, V): their logits
    for rows, h, z in _chunks(hidden, W, chunk):
        # J of these tokens, and dz = dL/dz (n, V), which takes the place of z
        terms = {name: column[rows] for name, column in columns.items()}
        J[rows], logp[rows], entropy[rows], kl[rows], clipped[rows], dz = loss_rows(
            z, targets[rows], grad_dtype, **terms
        )

        # step 7: dX has a row for each token, dW is a sum over all chunks
        if need_grad:
            dX[rows] = _product_over_vocabulary(dz, W)
        if need_dW:
            dW = _product(dz.T, h) if dW is None else _add_product(dW, dz.T, h)
        del z, dz  # before the next chunk allocates its logits
    if need_dW and dW is None:  # no tokens
        dW = torch.zeros(weight.shape, **like)
    # over all N at once, so that the order of summation does not depend on chunk
    loss = (-J).sum()
    return loss, dX, dW, {"logp": logp, "entropy": entropy, "kl": kl, "clipped": clipped}


def _choose_loss_rows(device, objective):
    backend = _choose_backend(device)
    if objective is None and hasattr(backend, "loss_rows"):
        return backend.loss_rows
    return partial(_two_passes, backend, objective or eq2)


def _two_passes(
    backend, objective, z, targets, grad_dtype, *, temperature, old=None, ref=None, **terms
):
    """Returns what `loss_rows` does, for any J / w: a pass for log-probs and entropies, autograd, a
    pass for dL/dz.

    objective(logp=, entropy=, old=, ref=, adv=, token_weight=, eps_low=, ..., beta=) -> J / w, S,
    KL, (n,) each, of n tokens. Only logp and entropy have a gradient. A chunk may begin or end
    anywhere: what couples tokens comes as a column.
    """
    w = terms["token_weight"]
    logp, entropy, kept = backend.logp_rows(z, targets, temperature)
    # logp has no gradient here, logp_n below has: with old None rho is 1, with the gradient of logp_n
    least = logp - 40
    most = logp + 40
    old = logp if old is None else old.clamp(least, most)
    ref = logp if ref is None else ref.clamp(least, most)
    with torch.enable_grad():
        logp_n = logp.detach().requires_grad_()
        H_n = entropy.detach().requires_grad_()
        J_w, S, kl = objective(logp=logp_n, entropy=H_n, old=old, ref=ref, **terms)
        # a token's J depends on its own logp and H alone: gradients of sums are those of each
        (dS,) = torch.autograd.grad(S.sum(), logp_n, retain_graph=True, materialize_grads=True)
        # c / w and a / w of steps 4 and 5
        c, a = torch.autograd.grad(J_w.sum(), (logp_n, H_n), allow_unused=True)
    clipped = (dS == 0) & (terms["adv"] != 0)
    dz = None
    if grad_dtype is not None:
        # an objective that does not read the entropy has no a
        a = None if a is None else w * a
        dz = backend.grad_rows(kept, targets, logp, entropy, w * c, a, temperature, grad_dtype)
    return w * J_w.detach(), logp, entropy, kl.detach(), clipped, dz


def clipped_surrogate(
    rho: Tensor, adv: Tensor, eps_low: Tensor, eps_high: Tensor, **_: Tensor
) -> Tensor:
    """Returns S of Eq. 2, (n,), of n tokens."""
    clip = torch.clamp(rho, 1 - eps_low, 1 + eps_high)
    return torch.minimum(rho * adv, clip * adv)


def eq2(
    logp: Tensor,
    old: Tensor,
    ref: Tensor,
    beta: float,
    surrogate: Callable[..., Tensor] = clipped_surrogate,
    **tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns J / w, S and KL of n tokens, (n,) each, of Eq. 2 or with another surrogate.

    rows_triton.py computes Eq. 2 in one launch instead.
    """
    rho = torch.exp(logp - old)  # Eq.3
    S = surrogate(rho=rho, logp=logp, old=old, **tokens)
    kl = k3.apply(ref - logp)  # CHOICE-23
    return S - beta * kl, S, kl  # Eq.2


class k3(torch.autograd.Function):
    """exp(d) - d - 1, the estimate k3 of a KL, and its gradient exp(d) - 1: exact near d = 0, where
    both cancel."""

    @staticmethod
    def forward(ctx, d):
        rise = torch.expm1(d)
        ctx.save_for_backward(rise)
        return rise - d

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@torch.no_grad()
def token_logprobs(hidden, weight, targets, temperature=1.0, chunk=4096):
    """Returns log p of each target and the entropy in nats, for p = softmax(hidden @ weight.T /
    temperature).

    hidden (N, D), weight (V, D), targets (N,) int64 -> (N,), (N,). No gradient; precision as in
    grpo_head.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logp_rows = _choose_backend(hidden.device).logp_rows
        W = weight.to(_dtype_of_factors(hidden))
        logp, entropy = torch.empty(
            2, len(hidden), dtype=_at_least_float32(hidden.dtype), device=hidden.device
        )
        for rows, _, z in _chunks(hidden, W, chunk):
            logp[rows], entropy[rows] = logp_rows(z, targets[rows], temperature)[:2]
            del z  # before the next chunk allocates its logits
    return logp, entropy


@torch.no_grad()
def head_logits(hidden, weight):
    """Returns hidden @ weight.T (N, V) with the precision of grpo_head: in float32 even where its
    factors are bf16."""
    W = weight.to(_dtype_of_factors(hidden))
    return _product(hidden.to(W.dtype), W.T)


def _choose_backend(device):
    """Returns the module whose functions pass over rows of logits on this device."""
    if device.type == "cuda":
        from kernels import rows_triton as backend  # here: machines without CUDA may lack Triton
    else:
        from kernels import rows_torch as backend
    return backend


def _as_column(value, N, like):
    """Returns a scalar or an (N,) tensor as an (N,) tensor; filling one with a scalar does not wait
    for the GPU."""
    return value.to(**like).expand(N) if torch.is_tensor(value) else torch.full((N,), value, **like)


def _at_least_float32(dtype):
    return torch.promote_types(dtype, torch.float32)


def _dtype_of_factors(hidden):
    """Returns the dtype to multiply in. CUDA multiplies bf16 into float32; float16 cannot represent
    dL/dz."""
    in_bf16 = hidden.is_cuda and hidden.dtype == torch.bfloat16
    return hidden.dtype if in_bf16 else _at_least_float32(hidden.dtype)


def _chunks(hidden, W, chunk):
    """Yields the slice, the hidden states (n, D) and the logits (n, V) of each chunk of n rows."""
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        h = hidden[rows].to(W.dtype)
        yield rows, h, _product(h, W.T)


def _product(a, b):
    """Returns a @ b in float32, or float64."""
    return (
        a @ b if a.dtype == _at_least_float32(a.dtype) else torch.mm(a, b, out_dtype=torch.float32)
    )


def _product_over_vocabulary(dz, W, block=16384):
    """Returns dz @ W (n, D). Summed in blocks: for a few rows MKL adds up 152,064 terms in float32,
    one by one."""
    if dz.is_cuda or W.shape[0] <= block:
        return _product(dz, W)
    return sum(_product(d, w) for d, w in zip(dz.split(block, 1), W.split(block), strict=True))


def _add_product(total, a, b):
    """Returns total += a @ b, accumulated in float32, or float64: a bf16 sum of many chunks
    drifts."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _Attach(torch.autograd.Function):
    """Attaches precomputed gradients to a loss; backward only scales them."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, dX, dW):
        ctx.save_for_backward(dX, dW)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        dX, dW = ctx.saved_tensors
        dX = (scale * dX).to(ctx.dtypes[0])
        # directly in its dtype: a second (V, D) in float32 would be the peak of memory
        if dW is not None:
            scaled = torch.empty(dW.shape, dtype=ctx.dtypes[1], device=dW.device)
            dW = torch.mul(dW, scale, out=scaled)
        return None, dX, dW, None, None
