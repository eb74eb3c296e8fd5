"""The GRPO head in plain torch: vocabulary projection, Eq. 2 and their gradient in one pass over rows.

A vocabulary has up to 152,000 entries, so the logits of a batch are its largest matrix by far. Here they live
one chunk of rows at a time, and the pass that reads the loss off a chunk takes its gradient as well.
"""

import math

import torch


def grpo_head(hidden, weight, targets, *, adv, w, old_logp=None, ref_logp=None, temperature=1.0,
              eps_low=0.2, eps_high=0.2, delta=math.inf, beta=0.0, kind="clip", grad_weight=None, chunk=4096):
    """GRPO loss of N action tokens, its gradient already taken (Eq. 2 of the paper, with the rho of Eq. 3).

    With z = hidden @ weight.T / T, logp = log softmax(z)[y] and rho = exp(logp - old), the loss is

        L = -sum_n w * (S - beta * KL),    S = min(rho * adv, clip(rho, 1 - eps_low, 1 + eps_high) * adv)

    Its gradient needs no second look at the logits:
      1. L depends on z only through logp:                dL/dz = dL/dlogp * (onehot(y) - softmax(z))
      2. drho/dlogp = rho, so where min takes rho * adv:  dS/dlogp = rho * adv, and 0 where the clip holds
      3. KL = exp(d) - d - 1 with d = ref - logp (k3):    dKL/dlogp = 1 - exp(d)
      4. one number a token is therefore enough:          c = -dL/dlogp = w * (dS/dlogp - beta * dKL/dlogp)
      5. with q = softmax(z) - onehot(y), dL/dz = c * q:  dX = c/T * (q @ weight),  dW = q.T @ (c/T * hidden)
    c scales rows, so it goes onto the (n, H) side of both products, H being the shorter one.

    hidden (N, H), weight (V, H), targets (N,) int64. float64 is computed in float64, all else in float32.
    adv, w, old_logp, ref_logp: (N,); eps_low, eps_high: scalars or (N,). No gradient flows into these.
    w: mask / normaliser * importance weight, so any averaging scheme. Cheaper than w = 0: leave out the row.
    old_logp: None is the on-policy step, rho = 1 with the gradient of rho. ref_logp: None is no KL.
    delta: caps the first rho of the min too, which bounds S where adv < 0. Choose it above 1 + eps_high.
    kind: "clip" is the above; "cispo" has S = min(rho, 1 + eps_high) * adv * logp, all but logp a constant,
        so that every token keeps a gradient (eps_low and delta play no part).
    grad_weight: (V, H), float32 or wider; backward adds dW to it and leaves the gradient of weight alone.
    chunk: rows at a time; the memory is two matrices (chunk, V).

    Returns L, a scalar, and a dict of detached (N,) tensors: logp, entropy (nats), kl, clipped (bool).
    Raises ValueError for an unknown kind, and for beta without ref_logp.
    """
    if kind not in ("clip", "cispo"):
        raise ValueError(f'kind must be "clip" or "cispo", not {kind!r}')
    if beta and ref_logp is None:
        raise ValueError(f"beta = {beta} needs ref_logp")
    need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    need_dX = need_grad and hidden.requires_grad
    need_dW = need_grad and (weight.requires_grad or grad_weight is not None)

    # Autocast would take the products in bf16: logp would be off by up to 0.1, half of eps.
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        N, like = len(hidden), {"dtype": _dtype(hidden), "device": hidden.device}
        inputs = dict(adv=adv, w=w, old=old_logp, ref=ref_logp, eps_low=eps_low, eps_high=eps_high)
        inputs = {k: torch.as_tensor(v, **like).expand(N) for k, v in inputs.items() if v is not None}
        W = weight.to(like["dtype"])
        dX = torch.empty(hidden.shape, **like) if need_dX else None  # (N, H)
        dW = torch.zeros(weight.shape, **like) if need_dW else None  # (V, H)
        J, logp, entropy, kl = torch.empty(4, N, **like)
        clipped = torch.empty(N, dtype=torch.bool, device=hidden.device)
        for rows, p, logp_n, entropy_n in _chunks(hidden, W, targets, temperature, chunk):
            logp[rows], entropy[rows] = logp_n, entropy_n
            J[rows], c, kl[rows], clipped[rows] = _objective(
                logp_n, delta=delta, beta=beta, kind=kind, **{k: v[rows] for k, v in inputs.items()})
            if need_grad:
                q = p  # in place: p is not needed again
                q[torch.arange(len(q), device=q.device), targets[rows]] -= 1
                c = (c / temperature)[:, None]
            if need_dX:
                dX[rows] = c * (q @ W)
            if need_dW:
                dW.addmm_(q.T, c * hidden[rows])
        loss = (-J).sum()  # over all N at once, so that chunk does not change the order of the sum
    if need_grad:
        loss = _Attach.apply(loss, hidden, weight, dX, dW, grad_weight)
    return loss, {"logp": logp, "entropy": entropy, "kl": kl, "clipped": clipped}


@torch.no_grad()
def token_logprobs(hidden, weight, targets, temperature=1.0, chunk=4096):
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and its entropy (nats).

    hidden (N, H), weight (V, H), targets (N,) int64 -> (N,), (N,). No gradient; grpo_head's precision.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        W = weight.to(_dtype(hidden))
        logp, entropy = torch.empty(2, len(hidden), dtype=W.dtype, device=hidden.device)
        for rows, _, logp_n, entropy_n in _chunks(hidden, W, targets, temperature, chunk):
            logp[rows], entropy[rows] = logp_n, entropy_n
    return logp, entropy


def _dtype(hidden):
    return torch.promote_types(hidden.dtype, torch.float32)


def _chunks(hidden, W, targets, temperature, chunk):
    """Yield for each chunk of n rows: their slice, softmax (n, V), logp (n,), entropy (n,)."""
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        x = hidden[rows].to(W.dtype) / temperature  # (n, H): cheaper here than on the logits
        z = x @ W.T  # (n, V), the logits
        z -= z.amax(1, keepdim=True)  # the same softmax, and exp cannot overflow
        p = z.exp()
        total = p.sum(1, keepdim=True)  # adds pairwise: 10 times as exact as log_softmax at V = 152,000
        p /= total
        log_total = total[:, 0].log()
        logp = z.gather(1, targets[rows, None])[:, 0] - log_total
        yield rows, p, logp, log_total - z.mul_(p).sum(1)


def _objective(logp, *, adv, w, eps_low, eps_high, delta, beta, kind, old=None, ref=None):
    """A chunk's w * (S - beta * KL), its derivative by logp, KL, and whether the clip held: (n,) each."""
    rho = torch.ones_like(logp) if old is None else torch.exp(logp - old)  # Eq.3
    if kind == "clip":
        clip = rho.clamp(min=1 - eps_low).clamp(max=1 + eps_high)
        S = torch.minimum(rho.clamp(max=delta) * adv, clip * adv)  # Eq.2
        clipped = S != rho * adv  # at a tie, above all rho = 1, the gradient is the unclipped one
        dS = torch.where(clipped, 0, rho * adv)
    else:
        clipped = rho > 1 + eps_high
        dS = rho.clamp(max=1 + eps_high) * adv
        S = dS * logp
    kl = torch.zeros_like(logp)
    if ref is not None:
        d = ref - logp
        e = torch.expm1(d)  # accurate near d = 0, where exp(d) - 1 cancels
        kl = e - d
        if beta:  # with beta = 0 the KL is only reported, and may be infinite
            S, dS = S - beta * kl, dS + beta * e
    return w * S, w * dS, kl, clipped


class _Attach(torch.autograd.Function):
    """Gives a finished loss the gradients that were computed along with it: backward only scales them."""

    @staticmethod
    def forward(ctx, loss, hidden, weight, dX, dW, grad_weight):
        ctx.save_for_backward(dX, dW)
        ctx.grad_weight, ctx.dtypes = grad_weight, (hidden.dtype, weight.dtype)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        dX, dW = ctx.saved_tensors
        if dX is not None:
            dX = (scale * dX).to(ctx.dtypes[0])
        if ctx.grad_weight is not None:
            ctx.grad_weight.addcmul_(scale, dW)
            dW = None
        elif dW is not None:
            dW = (scale * dW).to(ctx.dtypes[1])
        return None, dX, dW, None, None, None
