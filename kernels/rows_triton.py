"""Rows of logits -> loss and gradient in one launch: the kernel of the GRPO head.

One program per row. It reads the row twice: first for log-probability and entropy; these determine the one or two
numbers that the gradient needs, and the second time it writes dL/dz over the row. Symbols and steps are those of
`head.grpo_head`; `rows_torch.py` does the same in torch.
"""

import math

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # logits that a program holds in registers, 16 per thread
SQUARED = tl.constexpr(math.exp(40))  # the largest rho whose square fits float32, with room for a factor
LOW = tl.constexpr(-1e30)  # a finite -inf, so that LOW - LOW is 0 and not NaN
TOKENS = ["ADV", "W", "OLD", "REF", "EPS_LOW", "EPS_HIGH", "J", "LOGP", "ENTROPY", "KL", "CLIPPED"]


@triton.jit(do_not_specialize_on_alignment=TOKENS)  # chunks start anywhere in these; do not recompile for each
def rows_kernel(
    Z,  # (n, V) logits, any float
    Y,  # (n,) int64
    DZ,  # (n, V), rows dz_stride apart, in Z's memory (see _over); None: no gradient
    ADV, W, OLD, REF, EPS_LOW, EPS_HIGH,  # (n,) float32; ADV None: no loss; OLD None: rho = 1; REF None: no KL
    J, LOGP, ENTROPY, KL, CLIPPED,  # (n,) results
    V, dz_stride, inv_t, delta, beta, entropy_coef,
    KIND: tl.constexpr, WITH_KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * V passes 2^31 at row 14,135
    cols = tl.arange(0, BLOCK)

    # First pass, each lane for itself: m = max x, s = sum exp(x - m), t = sum exp(x - m) * (x - m)
    m = tl.full((BLOCK,), LOW, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        j = start + cols
        x = tl.load(Z + row * V + j, mask=j < V, other=0.0).to(tl.float32) * inv_t
        x = tl.where(j < V, x, LOW)
        top = tl.maximum(m, x)
        old_scale, e = tl.exp(m - top), tl.exp(x - top)
        t = old_scale * (t + s * (m - top)) + e * (x - top)
        s = old_scale * s + e
        m = top
    # Combine the lanes. A lane without logits has m = LOW, and so the scale exp(LOW - M) = 0.
    M = tl.max(m, 0)
    scale = tl.exp(m - M)
    total = tl.sum(scale * s, 0)
    log_total = tl.log(total)
    entropy = log_total - tl.sum(scale * (t + s * (m - M)), 0) / total
    y = tl.load(Y + row)
    z_y = tl.load(Z + row * V + y, mask=(y >= 0) & (y < V), other=float("nan"))  # no such token: NaN
    logp = (z_y.to(tl.float32) * inv_t - M) - log_total
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)

    if ADV is not None:
        adv, w = tl.load(ADV + row), tl.load(W + row)
        high = 1.0 + tl.load(EPS_HIGH + row)
        rho = 1.0 + 0.0 * adv
        if OLD is not None:
            rho = tl.exp(tl.clamp(logp - tl.load(OLD + row), -80.0, 80.0))  # Eq.3; finite
        if KIND == "cispo":
            clipped = rho > high
            dS = tl.minimum(rho, high) * adv
            S = dS * logp
        elif KIND == "sapo":
            tau = tl.where(adv > 0.0, tl.load(EPS_HIGH + row), tl.load(EPS_LOW + row))
            gate = tl.sigmoid(tau * (rho - 1.0))
            S = 4.0 / tau * gate * adv
            dS = 4.0 * gate * tl.sigmoid(tau * (1.0 - rho)) * rho * adv
            clipped = adv != adv
        elif KIND == "dppo":
            moved = 0.0 * adv
            if OLD is not None:
                moved = tl.exp(logp) - tl.exp(tl.load(OLD + row))
            rising = (adv > 0.0) & (moved > tl.load(EPS_HIGH + row))
            clipped = rising | ((adv < 0.0) & (-moved > tl.load(EPS_LOW + row)))
            dS = tl.where(clipped, 0.0, rho * adv)
            S = dS
        elif KIND == "quadratic":
            rho = tl.minimum(rho, SQUARED)
            penalty = tl.where(rho > 1.0, tl.load(EPS_HIGH + row), tl.load(EPS_LOW + row))
            S = rho * adv - penalty * (rho - 1.0) * (rho - 1.0)
            dS = rho * (adv - 2.0 * penalty * (rho - 1.0))
            clipped = adv != adv
        elif KIND == "reinforce":
            S = adv * logp
            dS = adv
            clipped = adv != adv
        else:
            clip = tl.minimum(tl.maximum(rho, 1.0 - tl.load(EPS_LOW + row)), high)
            S = tl.minimum(tl.minimum(rho, delta) * adv, clip * adv)  # Eq.2
            clipped = S != rho * adv  # at a tie, in particular rho = 1, the gradient is the unclipped one
            dS = tl.where(clipped, 0.0, rho * adv)
        kl = 0.0 * adv
        if REF is not None:
            d = tl.clamp(tl.load(REF + row) - logp, -80.0, 80.0)
            series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))  # near 0 exp(d) - d - 1 cancels
            kl = tl.where(tl.abs(d) < 0.1, series, tl.exp(d) - d - 1.0)
            if WITH_KL:  # with beta = 0 the KL is only reported, and may be infinite
                S -= beta * kl
                dS += beta * (kl + d)
        tl.store(J + row, w * (S + entropy_coef * entropy) + 0.0 * logp)  # min and max would hide a NaN
        tl.store(KL + row, kl)
        tl.store(CLIPPED + row, clipped)

        if DZ is not None:  # second pass
            c, a = w * dS * inv_t, w * entropy_coef * inv_t
            for start in range(0, V, BLOCK):
                j = start + cols
                x = tl.load(Z + row * V + j, mask=j < V, other=0.0).to(tl.float32) * inv_t
                log_p = (x - M) - log_total
                dz = tl.exp(log_p) * (c + a * (log_p + entropy)) - tl.where(j == y, c, 0.0)
                tl.debug_barrier()  # bf16 overwrites block j / 2: every thread must have read its logits by now
                tl.store(DZ + row * dz_stride + j, dz.to(DZ.dtype.element_ty), mask=j < V)


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
    """Returns the same as rows_torch.loss_rows; dL/dz overwrites z (n, V)."""
    n = len(z)
    J, logp, entropy, kl = torch.empty(4, n, device=z.device)
    clipped = torch.empty(n, dtype=torch.bool, device=z.device)
    dz = None if grad_dtype is None else _over(z, grad_dtype)
    tokens = [v if v is None else v.contiguous() for v in (adv, w, old, ref, eps_low, eps_high)]
    rows_kernel[(n,)](
        z, targets.contiguous(), dz, *tokens, J, logp, entropy, kl, clipped,
        z.shape[1], 0 if dz is None else dz.stride(0),
        1 / float(temperature), float(delta), float(beta), float(entropy_coef),
        KIND=kind, WITH_KL=beta != 0, BLOCK=_block(z), num_warps=WARPS,
    )  # fmt: skip
    return J, logp, entropy, kl, clipped, dz


def logp_rows(z, targets, temperature):
    """Returns log p[y] and the entropy, (n,) each, of the logits z (n, V)."""
    logp, entropy = torch.empty(2, len(z), device=z.device)
    absent = dict.fromkeys(("DZ", "ADV", "W", "OLD", "REF", "EPS_LOW", "EPS_HIGH", "J", "KL", "CLIPPED"))
    rows_kernel[(len(z),)](
        z, targets.contiguous(), **absent, LOGP=logp, ENTROPY=entropy,
        V=z.shape[1], dz_stride=0, inv_t=1 / float(temperature), delta=0.0, beta=0.0, entropy_coef=0.0,
        KIND="clip", WITH_KL=False, BLOCK=_block(z), num_warps=WARPS,
    )  # fmt: skip
    return logp, entropy


def _over(z, dtype):
    """Returns (n, V) of a dtype in the memory of z, row over row: bf16 fills the first half of a row of float32.

    Block k of dL/dz then ends at byte 2 (k + 1) BLOCK of its row, and block k + 1 of the logits starts at byte
    4 (k + 1) BLOCK: a write never hits unread logits once all threads have read block k.
    """
    return z if dtype == z.dtype else z.view(dtype)[:, : z.shape[1]]


def _block(z) -> int:
    assert z.is_contiguous()
    return min(BLOCK, triton.next_power_of_2(z.shape[1]))
