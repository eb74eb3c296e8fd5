"""Rows of logits -> loss and gradient in plain torch: what rows_triton.py computes, for every device."""

import math

import torch

SQUARED = math.exp(40)  # the largest rho whose square fits float32, with room for a factor


def loss_rows(
    z,
    targets,
    grad_dtype,
    *,
    adv,
    w,
    eps_low,
    eps_high,
    temperature,
    delta,
    beta,
    entropy_coef,
    kind,
    old=None,
    ref=None,
):
    """Computes the loss of n tokens and its gradient with respect to their logits z (n, V); overwrites z.

    Returns J = w * (S - beta * KL + entropy_coef * H), logp, H, KL and whether the token is clipped, (n,) each; and
    dL/dz (n, V) of L = -sum J in grad_dtype, or None without one. Symbols and steps are those of `head.grpo_head`.
    """
    e, u, total, logp, entropy = _softmax(z, targets, temperature)
    rho = torch.ones_like(logp) if old is None else torch.exp((logp - old).clamp(-80, 80))  # Eq.3; finite
    if kind == "clip":
        clip = rho.clamp(min=1 - eps_low).clamp(max=1 + eps_high)
        S = torch.minimum(rho.clamp(max=delta) * adv, clip * adv)  # Eq.2
        clipped = S != rho * adv  # at a tie, in particular rho = 1, the gradient is the unclipped one
        dS = torch.where(clipped, 0, rho * adv)
    elif kind == "cispo":
        clipped = rho > 1 + eps_high
        dS = rho.clamp(max=1 + eps_high) * adv
        S = dS * logp
    elif kind == "sapo":
        tau = torch.where(adv > 0, eps_high, eps_low)
        x = tau * (rho - 1)
        S = 4 / tau * torch.sigmoid(x) * adv
        dS = 4 * torch.sigmoid(x) * torch.sigmoid(-x) * rho * adv
        clipped = torch.zeros_like(rho, dtype=torch.bool)
    elif kind == "dppo":
        moved = torch.zeros_like(logp) if old is None else logp.exp() - old.exp()
        clipped = ((adv > 0) & (moved > eps_high)) | ((adv < 0) & (-moved > eps_low))
        S = dS = torch.where(clipped, 0, rho * adv)
    elif kind == "quadratic":
        rho = rho.clamp(max=SQUARED)
        far, penalty = rho - 1, torch.where(rho > 1, eps_high, eps_low)
        S, dS = rho * adv - penalty * far * far, rho * (adv - 2 * penalty * far)
        clipped = torch.zeros_like(rho, dtype=torch.bool)
    else:  # reinforce
        S, dS, clipped = adv * logp, adv, torch.zeros_like(rho, dtype=torch.bool)
    kl = torch.zeros_like(logp)
    if ref is not None:
        d = (ref - logp).clamp(-80, 80)
        e_d = torch.expm1(d)  # accurate near d = 0, where exp(d) - 1 cancels
        kl = e_d - d
        if beta:  # with beta = 0 the KL is only reported, and may be infinite
            S, dS = S - beta * kl, dS + beta * e_d
    if entropy_coef:
        S = S + entropy_coef * entropy
    dz = None
    if grad_dtype is not None:
        c = w * dS / temperature
        scale = c
        if entropy_coef:  # p * (log p + H) = (u - e * (log total - H)) / total
            a = w * entropy_coef / temperature
            scale = c - a * (total.log() - entropy)
        dz = e.mul_((scale / total)[:, None])  # in place: e is no longer needed
        if entropy_coef:
            dz += u.mul_((a / total)[:, None])
        dz[torch.arange(len(dz), device=dz.device), targets] -= c
        dz = dz.to(grad_dtype)
    return w * S, logp, entropy, kl, clipped, dz


def logp_rows(z, targets, temperature):
    """Returns log p[y] and the entropy, (n,) each, of the logits z (n, V); overwrites z."""
    return _softmax(z, targets, temperature)[3:]


def _softmax(z, targets, temperature):
    """Returns e = exp(x) and u = e * x (n, V), sum e, logp, entropy (n,), where x = z / T - max; u overwrites z."""
    if temperature != 1:
        z /= temperature
    z -= z.amax(1, keepdim=True)  # the same softmax, and exp cannot overflow
    e = z.exp()
    total = e.sum(1)  # pairwise summation: 10 times as exact as log_softmax at V = 152,000
    logp = z.gather(1, targets[:, None])[:, 0] - total.log()
    u = z.mul_(e)
    return e, u, total, logp, total.log() - u.sum(1) / total
