"""Passes over rows of logits in plain torch: what rows_triton.py computes, for every device."""

import torch


def loss_rows(z, targets, grad_dtype, *, adv, w, eps_low, eps_high, temperature, beta, old=None, ref=None):
    """Computes Eq. 2 of n tokens and its gradient with respect to their logits z (n, V); overwrites z.

    Returns J = w * (S - beta * KL), logp, entropy, KL and whether the token is clipped, (n,) each; and dL/dz (n, V) of
    L = -sum J in grad_dtype, or None without one. Symbols and steps are those of `head.grpo_head`.
    """
    e, total, logp = _softmax(z, targets, temperature)
    entropy = total.log() - z.mul_(e).sum(1) / total
    rho = torch.ones_like(logp) if old is None else torch.exp((logp - old).clamp(-80, 80))  # Eq.3; finite
    clip = rho.clamp(min=1 - eps_low).clamp(max=1 + eps_high)
    S = torch.minimum(rho * adv, clip * adv)  # Eq.2
    clipped = S != rho * adv  # at a tie, in particular rho = 1, the gradient is the unclipped one
    J, kl, c = penalize(S, torch.where(clipped, 0, rho * adv), logp, ref, w, beta)
    dz = None
    if grad_dtype is not None:
        c = c / temperature
        dz = e.mul_((c / total)[:, None])  # in place: e is no longer needed
        dz[torch.arange(len(dz), device=dz.device), targets] -= c
        dz = dz.to(grad_dtype)
    return J, logp, entropy, kl, clipped, dz


def penalize(S, dS, logp, ref, w, beta):
    """Returns J = w * (S - beta * KL), the KL and c = dJ/dlogp, (n,) each, given dS = dS/dlogp; ref None: KL = 0."""
    if ref is None:
        return w * S, torch.zeros_like(logp), w * dS
    d = (ref - logp).clamp(-80, 80)
    e_d = torch.expm1(d)  # accurate near d = 0, where exp(d) - 1 cancels
    kl = e_d - d
    if beta:  # with beta = 0 the KL is only reported, and may be infinite
        S, dS = S - beta * kl, dS + beta * e_d
    return w * S, kl, w * dS


def logp_rows(z, targets, temperature):
    """Returns log p[y] and the entropy, (n,) each, of logits z (n, V), in which it leaves x = z / T - max."""
    e, total, logp = _softmax(z, targets, temperature)
    return logp, total.log() - e.mul_(z).sum(1) / total


def grad_rows(z, targets, logp, entropy, c, a, temperature, grad_dtype):
    """Returns dL/dz (n, V) of L = -sum J in grad_dtype, given c = dJ/dlogp and a = dJ/dentropy, (n,).

    z, logp and entropy are what `logp_rows` has left and returned; z is overwritten.
    """
    e = z.exp()
    total = e.sum(1)
    c, a = c / temperature, a / temperature
    # p * (c + a * (log p + H)) = (e * (c - a * (log total - H)) + a * e * x) / total
    dz = z.mul_(e).mul_((a / total)[:, None])
    dz += e.mul_(((c - a * (total.log() - entropy)) / total)[:, None])
    dz[torch.arange(len(dz), device=dz.device), targets] -= c
    return dz.to(grad_dtype)


def _softmax(z, targets, temperature):
    """Returns e = exp(x) (n, V), sum e and logp (n,), where x = z / T - max overwrites z."""
    if temperature != 1:
        z /= temperature
    z -= z.amax(1, keepdim=True)  # the same softmax, and exp cannot overflow
    e = z.exp()
    total = e.sum(1)  # pairwise summation: 10 times as exact as log_softmax at V = 152,000
    return e, total, z.gather(1, targets[:, None])[:, 0] - total.log()
