"""The published variants of GRPO, stage by stage: functions of a `Batch` that
`objectives.OBJECTIVES` composes.

A docstring has the paper, the formula with its constants, and what differs from it here. r is the
reward, A the advantage, L the action tokens of a trajectory, p a token's probability, H its
entropy, rho = p / p_old.
"""

import numpy as np
import torch
from torch import Tensor

from extras.batch import SMALL, Array, Batch, Mask, groups
from grpo import group_advantages
from kernels import clipped_surrogate

Columns = dict[str, Array]


# ---- reward: (n,)


def overlong(b: Batch) -> Array:
    """DAPO (2503.14476, Eq. 13): the reward falls by up to 1 over the last `cache` tokens of what
    may be sampled.

    cache: a fifth of the limit, as 4,096 of 20,480. Counted are action tokens, not observations.
    """
    cache = b.limit / 5
    return b.reward + np.clip((b.limit - cache - b.length) / max(1, cache), -1, 0)


def majority(b: Batch) -> Array:
    """EMPO (2504.05812): the share of the group that gives the same answer; 0 if all agree or none
    do.

    Needs no gold answer. Answers are equal if exact match says so, not by a model's judgment.
    """
    out = np.zeros(b.n)
    for rows in groups(b.group):
        labels = b.answer[rows]
        clusters = set(labels[labels >= 0])
        if 1 < len(clusters) < len(rows):
            out[rows] = [(labels == label).mean() if label >= 0 else 0 for label in labels]
    return out


# ---- advantage: (n,)


def centred(b: Batch) -> Array:
    """Dr. GRPO (2503.20783, Eq. 4): r - mean, without the standard deviation that favours one-sided
    questions."""
    return b.each(lambda r: r - r.mean(), b.reward, b.group)


def leave_one_out(b: Batch) -> Array:
    """RLOO (2402.14740): r minus the mean of the others, which is (r - mean) G / (G - 1)."""
    return b.each(lambda r: (r - r.mean()) * len(r) / (len(r) - 1), b.reward, b.group)


def over_mean(b: Batch) -> Array:
    """MaxRL (2602.02710): (r - mean) / mean; 0 where all rewards are 0. In expectation the gradient
    of log E[r]."""
    return b.each(lambda r: (r - r.mean()) / (r.mean() or 1), b.reward, b.group)


def whitened(b: Batch) -> Array:
    """REINFORCE++ with a baseline (2501.03262): r - mean of the group, whitened over the step's
    action tokens.

    As in verl, the step's mean and variance (unbiased, plus 1e-8) weigh a trajectory by its tokens.
    """
    A, L = centred(b), b.length
    N = L.sum()
    mean = (L * A).sum() / max(1, N)
    variance = (L * (A - mean) ** 2).sum() / max(1, N - 1)
    return (A - mean) / np.sqrt(variance + 1e-8)


def beta_tracker(b: Batch) -> Array:
    """Single-stream SPO (2509.13232): r - v whitened over the step, v = alpha / (alpha + beta) of
    the question.

    Starts at .5 / .5; after a visit alpha <- .9 alpha + sum r, beta <- .9 beta + sum (1 - r). The
    authors have a decay of .875 to .96 by how far the policy has moved, which takes a pass over a
    stored response; one response a question; and draw questions by sqrt(v (1 - v)). Centred per
    instruction, since v belongs to the question alone.
    """
    table = b.remembered.setdefault("beta", {})
    counts = [table.get(tau.question.id, [0.5, 0.5]) for tau in b.taus]
    v = np.array([alpha / (alpha + beta) for alpha, beta in counts])
    for rows in groups(b.question):
        r, q = b.reward[rows], b.taus[rows[0]].question.id
        alpha, beta = table.get(q, [0.5, 0.5])
        table[q] = [0.9 * alpha + float(r.sum()), 0.9 * beta + float((1 - r).sum())]
    A = b.per_instruction(b.reward - v)
    return A / (A.std(ddof=1) + SMALL) if b.n > 1 else A


def early_search(b: Batch) -> Array:
    """ASPO (2508.19201): correct trajectories that used a tool get A + clip(-2 (p - mean p) / mean
    L, -+.7 |A|).

    p: tokens up to the end of the first turn whose call was served; means over those trajectories
    of the group.
    """
    A, ends = b.grpo, np.cumsum(b.acted, 1)
    used: Mask = b.called.max(1, initial=0) > 0
    for rows in groups(b.group):
        rows = rows[used[rows] & b.correct[rows]]
        if len(rows):
            p = ends[rows, b.called[rows].argmax(1)]
            bound = 0.7 * np.abs(A[rows])
            A[rows] += np.clip(-2 * (p - p.mean()) / max(1, b.length[rows].mean()), -bound, bound)
    return A


def over_paraphrases(b: Batch) -> Array:
    """Information-consistent GRPO (2512.12858): a group is all paraphrases of a prompt: here, a
    question under all of its instructions. Our reading: rewards as they are, without the paper's
    entropy-based ones.

    What an instruction is worth enters A on purpose, since its wording should not matter.
    """
    return b.each(group_advantages, b.reward, b.question)


# ---- credit of the turns: (n, K)


def first_result(b: Batch, A: Array) -> Array:
    """MT-GRPO (2505.11821): A + A_turn up to the first result, A after it; A + A_turn everywhere
    without a result.

    A_turn: Eq. 3 for the reward of the first result, 1 if it holds a gold answer.
    """
    turn = np.arange(b.called.shape[1])
    # beyond the last where there is none
    first = np.where(b.called > 0, turn, len(turn)).min(1, initial=len(turn))
    reward = ((turn == first[:, None]) & (b.found > 0)).sum(1).astype(float)
    before = turn <= first[:, None]
    return A[:, None] + before * b.each(group_advantages, reward, b.group)[:, None]


def anchored(b: Batch, A: Array) -> Array:
    """GiGPO (2505.10978): A + Eq. 3 for the discounted returns (gamma .95) of the group's turns in
    the same state.

    A state is what the turn answers to: the prompt, or the passages it was given last, equal to the
    letter.
    """
    turn, played = np.arange(b.state.shape[1]), b.state >= 0
    to_the_end = played.sum(1)[:, None] - 1 - turn
    step = np.zeros(b.state.shape)
    step[played] = b.each(
        group_advantages, (b.reward[:, None] * 0.95**to_the_end)[played], b.state[played]
    )
    return A[:, None] + step


# ---- selection: (N,)


def mixed_groups(b: Batch) -> Mask:
    """DAPO (Eq. 11): only groups with both right and wrong answers; extras/refill.py draws more of
    them."""
    return b.mixed[b.tau]


def not_small(b: Batch) -> Mask:
    """LOOP (2502.01600): only where |A| >= .01."""
    return np.abs(b.A) >= 0.01


# ---- weights: (N,)


def trajectory_mean(b: Batch, keep: Mask) -> Array:
    """Returns w (N,): the average over a trajectory's tokens, the group, the mini-batch (Eq. 2)."""
    counts = np.bincount(b.tau[keep], minlength=b.n)
    # a trajectory without any token still counts
    n = b.n - np.count_nonzero((counts == 0) & (b.length > 0))
    return np.where(keep, 1 / np.maximum(1, counts[b.tau] * n), 0)  # Eq.2 CHOICE-9


def token_mean(b: Batch, keep: Mask) -> Array:
    """Returns w (N,): the average over the mini-batch's tokens, verl's default."""
    w: Array = keep / max(1, int(np.count_nonzero(keep)))
    return w


def longest_mean(b: Batch, keep: Mask) -> Array:
    """Dr. GRPO: 1 / (trajectories x the most tokens one may have), so that length does not scale a
    token."""
    return keep / max(1, b.n * b.limit)


def truncated(b: Batch, keep: Mask) -> Array:
    """Truncated importance sampling (verl): Eq. 2's average, weighted by min(pi_old / pi_engine,
    2)."""
    return trajectory_mean(b, keep) * np.exp(b.pi_old[0] - b.engine).clip(max=2)


# ---- columns: what couples the tokens that a surrogate sees a few at a time, (N,) each, given w


def per_sequence(b: Batch, w: Array) -> Columns:
    """GSPO (2507.18071, Eq. 5): log s, the mean log rho of the token's trajectory."""
    return {"log_s": b.mean(b.log_rho, b.tau)}


def whole_sequence(b: Batch, w: Array) -> Columns:
    """VESPO: log W, the sum of log rho over the token's trajectory, within +-20."""
    return {"log_W": np.bincount(b.tau, b.log_rho, b.n)[b.tau].clip(-20, 20)}


def to_engine(b: Batch, w: Array) -> Columns:
    """The engine's own log-probs, from which the tokens were sampled."""
    return {"engine": b.engine}


# ---- surrogates, as `clipped_surrogate` is that of Eq. 2; kernels/head.py keeps rho within
# e^+-40


def gspo(
    logp: Tensor, log_s: Tensor, adv: Tensor, eps_low: Tensor, eps_high: Tensor, **_: Tensor
) -> Tensor:
    """GSPO (Eq. 7 and 13): Eq. 2 with s, whose gradient each token has through itself."""
    return clipped_surrogate(torch.exp(log_s + logp - logp.detach()), adv, eps_low, eps_high)


def cispo(logp: Tensor, rho: Tensor, adv: Tensor, eps_high: Tensor, **_: Tensor) -> Tensor:
    """CISPO (2506.13585): min(rho, 1 + eps_high) A log p, not differentiated but for log p."""
    return torch.minimum(rho, 1 + eps_high).detach() * adv * logp


def sapo(rho: Tensor, adv: Tensor, **_: Tensor) -> Tensor:
    """SAPO (2511.20347): 4 / tau sigmoid(tau (rho - 1)) A, tau 1 for A > 0, else 1.05."""
    tau = torch.full_like(adv, 1.05).masked_fill(adv > 0, 1.0)
    return 4 / tau * torch.sigmoid(tau * (rho - 1)) * adv


def dppo(
    logp: Tensor, engine: Tensor, adv: Tensor, eps_low: Tensor, eps_high: Tensor, **_: Tensor
) -> Tensor:
    """DPPO (2602.04879): rho A against the engine's policy; 0 where p has moved by .2 in the
    direction of A."""
    moved = logp.exp() - engine.exp()
    dropped = ((adv > 0) & (moved > eps_high)) | ((adv < 0) & (-moved > eps_low))
    return torch.where(dropped, 0, ratio(logp, engine) * adv)


def vespo(logp: Tensor, log_W: Tensor, adv: Tensor, **_: Tensor) -> Tensor:
    """VESPO (2602.10693): phi(W) A log p, phi = exp(l + k log W - l W), not differentiated.

    k, l are 2, 3 where A >= 0, else 3, 2: the authors' code; their docstring has other numbers.
    """
    k, l = torch.where(adv >= 0, 2, 3), torch.where(adv >= 0, 3, 2)
    return torch.exp(l + k * log_W - l * torch.exp(log_W)) * adv * logp


def r2vpo(rho: Tensor, adv: Tensor, **_: Tensor) -> Tensor:
    """R2VPO (2601.03320): rho A - .04 (rho - 1)^2. The authors update the .04; their rule was not
    found."""
    return rho * adv - 0.04 * (rho - 1) ** 2


def espl(logp: Tensor, engine: Tensor, adv: Tensor, **_: Tensor) -> Tensor:
    """E-SPL (2602.14697): rho A against the engine's policy, without a clip."""
    return ratio(logp, engine) * adv


def ratio(logp: Tensor, other: Tensor) -> Tensor:
    return torch.exp((logp - other).clamp(-40, 40))
