"""Passes over rows of logits in plain torch: what rows_triton.py does in two launches, for every device."""

import torch


def logp_rows(z, targets, temperature):
    """Returns log p[y] and the entropy, (n,) each, of logits z (n, V), and what `grad_rows` reads;
    overwrites z."""
    if temperature != 1:
        z /= temperature
    z -= z.amax(1, keepdim=True)  # x: the same softmax, and exp cannot overflow
    e = z.exp()
    total = e.sum(1)  # pairwise summation: 10 times as accurate as log_softmax at V = 152,000
    logp = z.gather(1, targets[:, None])[:, 0] - total.log()
    ex = z.mul_(e)  # e * x, in the memory of z
    return logp, total.log() - ex.sum(1) / total, (ex, e, total)


def grad_rows(kept, targets, logp, entropy, c, a, temperature, grad_dtype):
    """Returns dL/dz (n, V) of L = -sum J in grad_dtype, given c = dJ/dlogp and a = dJ/dentropy,
    (n,).

    `kept`, logp and entropy are what `logp_rows` returned; `kept` is overwritten. a: None means 0.
    """
    ex, e, total = kept  # with x = z / T - max
    factor = c = c / temperature
    if a is not None:
        # p * (c + a * (log p + H)) = (e * (c - a * (log total - H)) + a * e * x) / total
        a = a / temperature
        factor = c - a * (total.log() - entropy)
    dz = e.mul_((factor / total)[:, None])
    if a is not None:
        dz += ex.mul_((a / total)[:, None])
    dz[torch.arange(len(dz), device=dz.device), targets] -= c
    return dz.to(grad_dtype)
