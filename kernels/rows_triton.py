"""Passes over rows of logits in Triton: the kernels of the GRPO head.

One program per row. `loss_rows` reads a row twice in one launch: first for log-probability and
entropy, which determine the one number that the gradient of Eq. 2 needs, then to write dL/dz over
it. `logp_rows` and `grad_rows` are its two halves, for everything else, as in `rows_torch.py`.
Symbols and steps are those of `head.grpo_head`.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8  # logits that a program holds in registers, 16 per thread
LOW = tl.constexpr(-1e30)  # a finite -inf, so that LOW - LOW is 0 and not NaN
# Pointers into columns, in which a chunk may start anywhere: no compilation for each alignment.
TOKENS = [
    "ADV",
    "TOKEN_WEIGHT",
    "OLD",
    "REF",
    "EPS_LOW",
    "EPS_HIGH",
    "J",
    "LOGP",
    "ENTROPY",
    "KL",
    "CLIPPED",
]


@triton.jit
def read_row(Z, Y, row, V, inv_t, BLOCK: tl.constexpr):
    """Returns y, log p[y], the entropy H, and M, log_total, with which log p[j] = (x[j] - M) -
    log_total.

    Z + row * V is the address of the row's first logit, and V the number of its logits: the loop
    reads BLOCK of them at a time, and the last block is masked where it goes beyond the row.
    """
    cols = tl.arange(0, BLOCK)
    # Each lane for itself: m = max x, s = sum exp(x - m), t = sum exp(x - m) * (x - m)
    m = tl.full((BLOCK,), LOW, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        j = start + cols
        x = tl.load(Z + row * V + j, mask=j < V, other=0.0).to(tl.float32) * inv_t
        x = tl.where(j < V, x, LOW)
        # The sums so far are brought from the old maximum to the new one, `top`: in t each x - m
        # becomes x - top, hence s * (m - top).
        top = tl.maximum(m, x)
        old_scale = tl.exp(m - top)
        e = tl.exp(x - top)
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
    # no such token: NaN
    z_y = tl.load(Z + row * V + y, mask=(y >= 0) & (y < V), other=float("nan"))
    logp = (z_y.to(tl.float32) * inv_t - M) - log_total
    return y, logp, entropy, M, log_total


@triton.jit
def write_row(Z, DZ, row, y, M, log_total, entropy, c, a, V, dz_stride, inv_t, BLOCK: tl.constexpr):
    """Writes dL/dz (step 6) over the row, a block at a time, for c and a that include its 1/T. Rows
    of DZ are dz_stride entries apart."""
    cols = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        j = start + cols
        x = tl.load(Z + row * V + j, mask=j < V, other=0.0).to(tl.float32) * inv_t
        log_p = (x - M) - log_total
        dz = tl.exp(log_p) * (c + a * (log_p + entropy)) - tl.where(j == y, c, 0.0)
        # a bf16 row takes half the bytes and overwrites earlier logits: all threads must have read theirs
        tl.debug_barrier()
        tl.store(DZ + row * dz_stride + j, dz.to(DZ.dtype.element_ty), mask=j < V)


@triton.jit(do_not_specialize_on_alignment=TOKENS)
def loss_kernel(
    # pointers in capitals, of which a program reads and writes entry or row `row`
    Z,  # (n, V) logits, any float
    Y,  # (n,) int64
    DZ,  # (n, V), rows dz_stride apart, in Z's memory (see _in_memory_of); None: no gradient
    ADV,
    TOKEN_WEIGHT,
    OLD,
    REF,
    EPS_LOW,
    EPS_HIGH,  # (n,) float32; OLD None: rho = 1; REF None: no KL
    J,
    LOGP,
    ENTROPY,
    KL,
    CLIPPED,  # (n,) results
    V,
    dz_stride,
    inv_t,
    beta,
    WITH_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * V passes 2^31 at row 14,135
    y, logp, entropy, M, log_total = read_row(Z, Y, row, V, inv_t, BLOCK)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)

    adv = tl.load(ADV + row)
    w = tl.load(TOKEN_WEIGHT + row)
    rho = 1.0 + 0.0 * adv
    if OLD is not None:
        rho = tl.exp(tl.clamp(logp - tl.load(OLD + row), -40.0, 40.0))  # Eq.3
    clip = tl.minimum(tl.maximum(rho, 1.0 - tl.load(EPS_LOW + row)), 1.0 + tl.load(EPS_HIGH + row))
    # J / w and its derivative by logp, which are S and dS until the KL is subtracted
    J_w = tl.minimum(rho * adv, clip * adv)  # Eq.2
    clipped = J_w != rho * adv  # at a tie, in particular rho = 1, the gradient is the unclipped one
    dJ_w = tl.where(clipped, 0.0, rho * adv)
    kl = 0.0 * adv
    if REF is not None:
        d = tl.clamp(tl.load(REF + row) - logp, -40.0, 40.0)
        # near 0 exp(d) - d - 1 cancels
        series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
        kl = tl.where(tl.abs(d) < 0.1, series, tl.exp(d) - d - 1.0)
        if WITH_KL:  # with beta = 0 the KL is only reported, and may be infinite
            J_w -= beta * kl
            dJ_w += beta * (kl + d)  # dKL/dlogp = 1 - exp(d) = -(kl + d)
    tl.store(J + row, w * J_w + 0.0 * logp)  # min and max would hide a NaN
    tl.store(KL + row, kl)
    tl.store(CLIPPED + row, clipped)
    if DZ is not None:
        write_row(
            Z, DZ, row, y, M, log_total, entropy, w * dJ_w * inv_t, 0.0, V, dz_stride, inv_t, BLOCK
        )


@triton.jit(do_not_specialize_on_alignment=["LOGP", "ENTROPY"])
def logp_kernel(Z, Y, LOGP, ENTROPY, V, inv_t, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, logp, entropy, _, _ = read_row(Z, Y, row, V, inv_t, BLOCK)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)


@triton.jit
def grad_kernel(Z, Y, DZ, LOGP, ENTROPY, C, A, V, dz_stride, inv_t, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(Y + row)
    z_y = tl.load(Z + row * V + y, mask=(y >= 0) & (y < V), other=float("nan"))
    # x[y] - log p[y] = M + log_total: taken as M, with log_total = 0 below
    M = z_y.to(tl.float32) * inv_t - tl.load(LOGP + row)
    c = tl.load(C + row) * inv_t
    a = tl.load(A + row) * inv_t
    write_row(Z, DZ, row, y, M, 0.0, tl.load(ENTROPY + row), c, a, V, dz_stride, inv_t, BLOCK)


def loss_rows(
    z,
    targets,
    grad_dtype,
    *,
    adv,
    token_weight,
    eps_low,
    eps_high,
    temperature,
    beta,
    old=None,
    ref=None,
):
    """Computes Eq. 2 of n tokens and its gradient with respect to their logits z (n, V), which
    dL/dz overwrites.

    Returns J = token_weight * (S - beta * KL), logp, entropy, KL and whether the token is clipped, (n,) each;
    and dL/dz (n, V) of L = -sum J in grad_dtype, or None without one.
    """
    n = len(z)
    J, logp, entropy, kl = torch.empty(4, n, device=z.device)
    clipped = torch.empty(n, dtype=torch.bool, device=z.device)
    dz = None if grad_dtype is None else _in_memory_of(z, grad_dtype)
    tokens = adv, token_weight, old, ref, eps_low, eps_high
    tokens = [x if x is None else x.contiguous() for x in tokens]
    loss_kernel[(n,)](
        z,
        targets.contiguous(),
        dz,
        *tokens,
        J,
        logp,
        entropy,
        kl,
        clipped,
        z.shape[1],
        0 if dz is None else dz.stride(0),
        1 / float(temperature),
        float(beta),
        WITH_KL=beta != 0,
        BLOCK=_block(z),
        num_warps=WARPS,
    )
    return J, logp, entropy, kl, clipped, dz


def logp_rows(z, targets, temperature):
    """Returns log p[y] and the entropy, (n,) each, of the logits z (n, V), and what `grad_rows`
    reads: z."""
    logp, entropy = torch.empty(2, len(z), device=z.device)
    inv_t = 1 / float(temperature)
    logp_kernel[(len(z),)](
        z, targets.contiguous(), logp, entropy, z.shape[1], inv_t, BLOCK=_block(z), num_warps=WARPS
    )
    return logp, entropy, z


def grad_rows(z, targets, logp, entropy, c, a, temperature, grad_dtype):
    """Returns the same as rows_torch.grad_rows; dL/dz overwrites z (n, V)."""
    dz = _in_memory_of(z, grad_dtype)
    a = torch.zeros_like(c) if a is None else a
    grad_kernel[(len(z),)](
        z,
        targets.contiguous(),
        dz,
        logp,
        entropy,
        c,
        a,
        z.shape[1],
        dz.stride(0),
        1 / float(temperature),
        BLOCK=_block(z),
        num_warps=WARPS,
    )
    return dz


def _in_memory_of(z, dtype):
    """Returns (n, V) of a dtype in the memory of z, row over row: bf16 fills the first half of a
    row of float32.

    In bf16 over float32 block k of dL/dz ends at byte 2 (k + 1) BLOCK of its row, and block k + 1 of the logits
    starts at byte 4 (k + 1) BLOCK: a write never hits unread logits once all threads have read
    block k.
    """
    return z if dtype == z.dtype else z.view(dtype)[:, : z.shape[1]]


def _block(z) -> int:
    assert z.is_contiguous()
    return min(BLOCK, triton.next_power_of_2(z.shape[1]))
