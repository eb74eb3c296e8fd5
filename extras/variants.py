"""The published variants of GRPO, stage by stage: functions of a `Batch` that
`objectives.OBJECTIVES` composes.

A docstring has the paper, the formula with its constants, and what differs from it here. r is the
reward, A the advantage, L the action tokens of a trajectory, p a token's probability, H its
entropy, rho = p / p_old.
"""

import math

import numpy as np
import torch
from torch import Tensor

from extras.batch import SMALL, Array, Batch, Ints, Mask, groups
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


def shorter_than_before(b: Batch) -> Array:
    """HAPO (2505.11225): r + c, c = cos(pi L / 2h) for L <= 2h, else -1; max(-.7, c) if correct,
    else min(0, c).

    h: the fewest tokens with which the question has been answered correctly in earlier steps;
    before that c = 0.
    """
    shortest, out = b.remembered.setdefault("shortest", {}), b.reward.copy()
    before = dict(shortest)
    for k, tau in enumerate(b.taus):
        q, L = tau.question.id, int(b.length[k])
        if h := before.get(q):
            c = math.cos(math.pi * L / (2 * h)) if L <= 2 * h else -1.0
            out[k] += max(-0.7, c) if b.correct[k] else min(0.0, c)
        if b.correct[k]:
            shortest[q] = min(L, shortest.get(q, L))
    return out


def budgeted(b: Batch) -> Array:
    """HBPO (2507.15844): correct answers get min(4 cos(pi L / 2M) - |budget - L| / M, 4 cos(pi
    budget / 2M)).

    M: the limit on sampled tokens. Our reading: there is no budget in a prompt here; the
    instruction acts as one, and its budget is the mean length of its trajectories in the step.
    """
    M, budget = max(1, b.limit), b.mean(b.length, b.instruction)
    own = 4 * np.cos(np.pi * b.length / (2 * M)) - np.abs(budget - b.length) / M
    return np.where(b.correct, np.minimum(own, 4 * np.cos(np.pi * budget / (2 * M))), 0)


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


def consistency(b: Batch) -> Array:
    """COPO (2508.04138): w A_local + (1 - w) A_global, w = sigmoid(20 (H - 1.5)), H the entropy of
    the group's answers.

    A_global: the group's mean reward over its deviation among the step's groups, centred per
    instruction instead of over all of them.
    """
    local, means, H = b.grpo, b.mean(b.reward, b.group), np.zeros(b.n)
    for rows in groups(b.group):
        share = np.unique(b.answer[rows], return_counts=True)[1] / len(rows)
        H[rows] = -(share * np.log(share)).sum()
    one = [rows[0] for rows in groups(b.group)]
    spread = means[one].std(ddof=1) if len(one) > 1 else 0.0
    overall = b.per_instruction(means / (spread + SMALL))
    w = 1 / (1 + np.exp(-20 * (H - 1.5)))
    return w * local + (1 - w) * overall


def bundle_scores(b: Batch) -> Array:
    """Returns RiskPO's score: the sum of the i-th rewards of 5 groups of one instruction; fewer are
    scaled to 5."""
    s, by_instruction = np.zeros(b.n), dict[int, list[Ints]]()
    for rows in sorted(groups(b.group), key=lambda rows: b.taus[rows[0]].group):
        by_instruction.setdefault(int(b.instruction[rows[0]]), []).append(rows)
    for own in by_instruction.values():
        for bundle in [own[k : k + 5] for k in range(0, len(own), 5)]:
            for i in range(max(map(len, bundle))):
                ith = [rows[i] for rows in bundle if i < len(rows)]
                s[ith] = 5 * b.reward[ith].mean()
    return s


def risk(b: Batch) -> Array:
    """RiskPO (2510.00911): mixed value at risk of the scores s of bundles, over the deviation of
    the step's scores.

    R = ((s - q_lo)+ - (s - q_hi)+ + q_lo - q_hi) / .6, A = (R - 1.5 (q_lo - s)+ / .2) / 2.5. q_lo
    and q_hi follow the quantiles .2 and .8, q += .1 (a - share of s < q), from the first step's
    own; the authors track 19. Centred per instruction.
    """
    s = bundle_scores(b)
    if not b.n:
        return s
    q = b.remembered.setdefault("quantiles", np.quantile(s, [0.2, 0.8]).tolist())
    lo, hi = q
    q[:] = [x + 0.1 * (a - float((s < x).mean())) for x, a in zip(q, (0.2, 0.8), strict=True)]
    R = (np.maximum(0, s - lo) - np.maximum(0, s - hi) + lo - hi) / 0.6
    A = (R - 1.5 * np.maximum(0, lo - s) / 0.2) / 2.5
    return b.per_instruction(A / (s.std(ddof=1) + SMALL) if b.n > 1 else A)


def adora(b: Batch) -> Array:
    """ADORA (its code, ShadeCloak/ADORA): A of GRPO x .1 unless the longest correct answer is
    longer than the mean wrong one, truncated ones left out. Without a correct or a wrong one A is 0
    anyway.
    """
    A, weight = b.grpo, np.full(b.n, 0.1)
    for rows in groups(b.group):
        right = b.length[rows][b.correct[rows]]
        wrong = b.length[rows][~b.correct[rows] & ~b.truncated[rows]]
        if len(right) and len(wrong) and right.max() > wrong.mean():
            weight[rows] = 1.0
    return weight * A


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


def token_weighted(b: Batch) -> Array:
    """HAPO (2509.16591): Eq. 3 with mean and deviation over the group's tokens, so that long ones
    weigh more."""
    A = np.zeros(b.n)
    for rows in groups(b.group):
        r, L = b.reward[rows], b.length[rows] / max(1, b.length[rows].sum())
        mean = (L * r).sum()
        A[rows] = (r - mean) / (np.sqrt((L * (r - mean) ** 2).sum()) + SMALL)
    return A


def across_budgets(b: Batch) -> Array:
    """HBPO: A within the group, plus the group's mean reward minus 4 cos(pi budget / 2M), centred
    per instruction.

    The last term belongs to a budget, so to an instruction, and is centred away. The authors' code
    adds both twice.
    """
    return b.grpo + b.per_instruction(b.mean(b.reward, b.group))


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


def returns(reward: Array) -> Array:
    """Returns the discounted sum of the rewards (n, K) from each turn on, with gamma .95."""
    out, rest = np.zeros(reward.shape), np.zeros(len(reward))
    for k in reversed(range(reward.shape[1])):
        rest = out[:, k] = reward[:, k] + 0.95 * rest
    return out


def at_the_end(b: Batch) -> Array:
    """Returns the reward in each trajectory's last turn, 0 elsewhere (n, K)."""
    last = (b.state >= 0).sum(1) - 1
    return (np.arange(b.state.shape[1]) == last[:, None]) * b.reward[:, None]


def by_cell(x: Array, number: Ints, b: Batch) -> Array:
    """Returns Eq. 3 for the entries of x (n, K) that share a number; 0 where it is below 0."""
    out, rows = np.zeros(x.shape), number >= 0
    out[rows] = b.each(group_advantages, x[rows], number[rows])
    return out


def anchored(b: Batch, A: Array) -> Array:
    """GiGPO (2505.10978): A + Eq. 3 for the discounted returns (gamma .95) of the group's turns in
    the same state.

    A state is what the turn answers to: the prompt, or the passages it was given last, equal to the
    letter.
    """
    return A[:, None] + by_cell(returns(at_the_end(b)), b.state, b)


def discounted(b: Batch, A: Array) -> Array:
    """EAPO (IterResearch, 2511.07327): a turn is a sample of its own with the reward gamma^(T - t)
    R, and Eq. 3 compares all turns of a group. gamma .95 is ours: the paper's was not found. The
    context is not cut into rounds.
    """
    return by_cell(returns(at_the_end(b)), np.where(b.state >= 0, b.group[:, None], -1), b)


def stage_returns(b: Batch, A: Array) -> Array:
    """SS-GRPO (RubricEM, 2605.10899): G_k = sum_{j >= k} lambda_kj R_j, and Eq. 3 for each stage in
    the group.

    Our reading: a stage is a turn; R_j is 1 where a result holds a gold answer, and at the end the
    trajectory's reward (the paper has a judge); lambda_kj = .95^(j - k) (not found).
    """
    K = b.state.shape[1]
    stage = np.where(b.state >= 0, b.group[:, None] * K + np.arange(K), -1)
    return by_cell(returns(b.found + at_the_end(b)), stage, b)


# ---- selection: (N,)


def mixed_groups(b: Batch) -> Mask:
    """DAPO (Eq. 11): only groups with both right and wrong answers. The authors sample more until
    the batch is full."""
    return ((b.share_correct > 0) & (b.share_correct < 1))[b.tau]


def not_small(b: Batch) -> Mask:
    """LOOP (2502.01600): only where |A| >= .01."""
    return np.abs(b.A) >= 0.01


def diverse(b: Batch) -> Mask:
    """D3S (2509.22115): the half of the mini-batch's trajectories with the largest variance of A,
    and of their tokens the half with the largest |A| H. Our reading: the paper's shares, which grow
    with the steps, were not found.
    """
    A = b.advantage
    up, n, spread = np.sort(A), (b.n + 1) // 2, -1.0
    chosen = np.zeros(b.n, bool)
    for k in range(n + 1 if n else 0):  # the k lowest and the n - k highest, with all ties
        low, high = up[:k], up[b.n - n + k :]
        if (var := np.r_[low, high].var()) > spread:
            spread, chosen = var, (A <= low.max(initial=-np.inf)) | (A >= high.min(initial=np.inf))
    chosen = chosen[b.tau]
    score = np.abs(b.A) * b.pi_old[1]
    return chosen & (score >= np.median(score[chosen])) if chosen.any() else chosen


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


# ---- clip bounds: (N,) below and above 1


def elastic(b: Batch) -> tuple[Array, Array]:
    """ETR (2601.03723): bounds that grow with |A| and with the variance p (1 - p) of the group.

    Our reading: .2 x |A| / mean |A| within [.5, 2] x 4 p (1 - p) within [.5, 1]; only the abstract
    was found.
    """
    p, size = b.share_correct[b.tau], np.abs(b.A)
    mean = float(size.sum()) / max(1, len(size)) or 1.0
    eps = 0.2 * np.clip(size / mean, 0.5, 2) * np.clip(4 * p * (1 - p), 0.5, 1)
    return eps, eps


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


def heterogeneity(b: Batch, w: Array) -> Columns:
    """HAPO: h in [-1, 1], log H minus its .8 quantile in units of its deviation, each sign by its
    largest size.

    H is pi_old's, so that no pass is added; the sampling temperature stays one. The authors' code
    divides the negative side by its minimum, which makes it positive: its branch for low entropy
    never acts. Here the size is taken.
    """
    x = np.log(np.maximum(b.pi_old[1], 1e-8))
    h = (x - np.quantile(x, 0.8)) / (x.std() + SMALL) if len(x) else x
    top, bottom = float(h.max(initial=0)), -float(h.min(initial=0))
    return {"h": np.where(h > 0, h / (top or 1), h / (bottom or 1))}


def by_context(b: Batch, w: Array) -> Columns:
    """ICPO: whether a context steers the trajectory. Our reading: an evolved instruction does, the
    first does not."""
    return {"steered": np.array([float(bool(tau.instruction)) for tau in b.taus])[b.tau]}


def fallen(b: Batch, w: Array) -> Columns:
    """LLDS: lambda = .1 / k / w for the tokens of the k trajectories with A >= 0 whose
    log-probability fell as a whole.

    The sum is over tokens and the mean over those k, whatever the average of the rest: so it is
    divided by w.
    """
    fell = np.bincount(b.tau, b.log_rho, b.n) < 0
    gated = fell & (b.advantage >= 0)
    return {
        "lam": np.where(
            gated[b.tau], 0.1 / max(1, int(np.count_nonzero(gated))) / np.maximum(w, 1e-12), 0
        )
    }


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


def hapo(rho: Tensor, adv: Tensor, h: Tensor, **_: Tensor) -> Tensor:
    """HAPO: Eq. 2 with A (1 + h), for h > 0 where rho is outside (1 - .2 / 2, 1 + .28 / 2), for h
    <= 0 inside it.

    Its bounds: .2 (1 - h) below for h <= 0, .28 (1 + h) above for h > 0.
    """
    inside = (rho > 0.9) & (rho < 1.14)
    A = adv * torch.where((h > 0) != inside, 1 + h, 1)
    return clipped_surrogate(rho, A, 0.2 * (1 - h.clamp(max=0)), 0.28 * (1 + h.clamp(min=0)))


def icpo(
    logp: Tensor,
    rho: Tensor,
    adv: Tensor,
    steered: Tensor,
    eps_low: Tensor,
    eps_high: Tensor,
    **_: Tensor,
) -> Tensor:
    """ICPO (2510.26519): A p / (p + .1) where a context steers, else Eq. 2 with a dual clip, at
    3."""
    p = logp.exp()
    dual = torch.minimum(rho.clamp(max=3) * adv, rho.clamp(1 - eps_low, 1 + eps_high) * adv)
    return torch.where(steered > 0, adv * p / (p + 0.1), dual)


def llds(
    logp: Tensor,
    rho: Tensor,
    old: Tensor,
    adv: Tensor,
    lam: Tensor,
    eps_low: Tensor,
    eps_high: Tensor,
    **_: Tensor,
) -> Tensor:
    """LLDS (2512.04220): Eq. 2 - lambda relu(log p_old - log p). Read in a third party's port, not
    in the paper."""
    return clipped_surrogate(rho, adv, eps_low, eps_high) - lam * torch.relu(old - logp)


def espl(logp: Tensor, engine: Tensor, adv: Tensor, **_: Tensor) -> Tensor:
    """E-SPL (2602.14697): rho A against the engine's policy, without a clip."""
    return ratio(logp, engine) * adv


def ratio(logp: Tensor, other: Tensor) -> Tensor:
    return torch.exp((logp - other).clamp(-40, 40))
