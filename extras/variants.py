"""The published variants of GRPO, stage by stage: functions of a `Batch` that `objectives.OBJECTIVES` composes.

A docstring has the paper, the formula with its constants, and what differs from it here. r is the reward, A the
advantage, L the action tokens of a trajectory, p a token's probability, H its entropy, rho = p / p_old.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from extras.objectives import Batch

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
SMALL = 1e-6  # beside a standard deviation in a denominator, as in Eq. 3


def groups(number: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Returns the places of each group's members."""
    return [np.flatnonzero(number == k) for k in range(number.max(initial=-1) + 1)]


def scaled(x: Array) -> Array:
    """Returns x in units of its standard deviation."""
    return x / (x.std(ddof=1) + SMALL) if len(x) > 1 else x


def normal(x: Array) -> Array:
    """Returns (x - mean) / (std + 1e-6), as in Eq. 3."""
    return scaled(x - x.mean())


# ---- reward: (n,)


def overlong(b: Batch) -> Array:
    """DAPO (2503.14476, Eq. 13): the reward falls by up to 1 over the last `cache` tokens of what may be sampled.

    cache: a fifth of the limit, as 4,096 of 20,480. Counted are action tokens, not observations.
    """
    cache = b.limit / 5
    return b.reward + np.clip((b.limit - cache - b.length) / max(1, cache), -1, 0)


def majority(b: Batch) -> Array:
    """EMPO (2504.05812): the share of the group that gives the same answer; 0 if all agree or none do.

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
    """HAPO (2505.11225): r + c, c = cos(pi L / 2h) for L <= 2h, else -1; max(-.7, c) if correct, else min(0, c).

    h: the fewest tokens with which the question has been answered correctly in earlier steps; before that c = 0.
    """
    shortest, out = b.memory.setdefault("shortest", {}), b.reward.copy()
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
    """HBPO (2507.15844): correct answers get min(4 cos(pi L / 2M) - |budget - L| / M, 4 cos(pi budget / 2M)).

    M: the limit on sampled tokens. Our reading: there is no budget in a prompt here; the instruction acts as one, and
    its budget is the mean length of its trajectories in the step.
    """
    M, budget = max(1, b.limit), b.mean(b.length, b.instruction)
    own = 4 * np.cos(np.pi * b.length / (2 * M)) - np.abs(budget - b.length) / M
    return np.where(b.correct, np.minimum(own, 4 * np.cos(np.pi * budget / (2 * M))), 0)


# ---- advantage: (n,)


def centred(b: Batch) -> Array:
    """Dr. GRPO (2503.20783, Eq. 4): r - mean, without the standard deviation that favours one-sided questions."""
    return b.each(lambda r: r - r.mean(), b.reward, b.group)


def leave_one_out(b: Batch) -> Array:
    """RLOO (2402.14740): r minus the mean of the others, which is (r - mean) G / (G - 1)."""
    return b.each(lambda r: (r - r.mean()) * len(r) / (len(r) - 1), b.reward, b.group)


def over_mean(b: Batch) -> Array:
    """MaxRL (2602.02710): (r - mean) / mean; 0 where no reward is. In expectation the gradient of log E[r]."""
    return b.each(lambda r: (r - r.mean()) / (r.mean() or 1), b.reward, b.group)


def whitened(b: Batch) -> Array:
    """REINFORCE++ with a baseline (2501.03262): r - mean of the group, whitened over the step's action tokens.

    As in verl, the step's mean and variance (unbiased, plus 1e-8) weigh a trajectory by its tokens.
    """
    A, L = centred(b), b.length
    N = L.sum()
    mean = (L * A).sum() / max(1, N)
    variance = (L * (A - mean) ** 2).sum() / max(1, N - 1)
    return (A - mean) / np.sqrt(variance + 1e-8)


def beta_tracker(b: Batch) -> Array:
    """Single-stream SPO (2509.13232): r - v whitened over the step, v = alpha / (alpha + beta) of the question.

    Starts at .5 / .5; after a visit alpha <- .9 alpha + sum r, beta <- .9 beta + sum (1 - r). The authors have a decay
    of .875 to .96 by how far the policy has moved, which takes a pass over a stored response; one response a question;
    and draw questions by sqrt(v (1 - v)). Centred per instruction, since v belongs to the question alone.
    """
    table = b.memory.setdefault("beta", {})
    v = np.array([(ab := table.get(tau.question.id, [0.5, 0.5]))[0] / sum(ab) for tau in b.taus])
    for rows in groups(b.question):
        r, q = b.reward[rows], b.taus[rows[0]].question.id
        alpha, beta = table.get(q, [0.5, 0.5])
        table[q] = [0.9 * alpha + float(r.sum()), 0.9 * beta + float((1 - r).sum())]
    return scaled(b.per_instruction(b.reward - v))


def consistency(b: Batch) -> Array:
    """COPO (2508.04138): w A_local + (1 - w) A_global, w = sigmoid(20 (H - 1.5)), H the entropy of the group's answers.

    A_global: the group's mean reward over its deviation among the step's groups, centred per instruction instead of
    over all of them.
    """
    local, means, H = b.each(normal, b.reward, b.group), b.mean(b.reward, b.group), np.zeros(b.n)
    for rows in groups(b.group):
        share = np.unique(b.answer[rows], return_counts=True)[1] / len(rows)
        H[rows] = -(share * np.log(share)).sum()
    one = [rows[0] for rows in groups(b.group)]
    spread = means[one].std(ddof=1) if len(one) > 1 else 0.0
    overall = b.per_instruction(means / (spread + SMALL))
    w = 1 / (1 + np.exp(-20 * (H - 1.5)))
    return w * local + (1 - w) * overall


def bundle_scores(b: Batch) -> Array:
    """Returns RiskPO's score: the sum of the i-th rewards of 5 groups of one instruction; fewer are scaled to 5."""
    s, by_instruction = np.zeros(b.n), dict[int, list[npt.NDArray[np.int64]]]()
    for rows in sorted(groups(b.group), key=lambda rows: b.taus[rows[0]].group):
        by_instruction.setdefault(int(b.instruction[rows[0]]), []).append(rows)
    for found in by_instruction.values():
        for bundle in [found[k : k + 5] for k in range(0, len(found), 5)]:
            for i in range(max(map(len, bundle))):
                ith = [rows[i] for rows in bundle if i < len(rows)]
                s[ith] = 5 * b.reward[ith].mean()
    return s


def risk(b: Batch) -> Array:
    """RiskPO (2510.00911): mixed value at risk of the scores s of bundles, over the deviation of the step's scores.

    R = ((s - q_lo)+ - (s - q_hi)+ + q_lo - q_hi) / .6, A = (R - 1.5 (q_lo - s)+ / .2) / 2.5. q_lo and q_hi follow the
    quantiles .2 and .8, q += .1 (a - share of s < q), from the first step's own; the authors track 19. Centred per
    instruction.
    """
    s = bundle_scores(b)
    if not b.n:
        return s
    q = b.memory.setdefault("quantiles", np.quantile(s, [0.2, 0.8]).tolist())
    lo, hi = q
    q[:] = [x + 0.1 * (a - float((s < x).mean())) for x, a in zip(q, (0.2, 0.8), strict=True)]
    R = (np.maximum(0, s - lo) - np.maximum(0, s - hi) + lo - hi) / 0.6
    A = (R - 1.5 * np.maximum(0, lo - s) / 0.2) / 2.5
    return b.per_instruction(A / (s.std(ddof=1) + SMALL) if b.n > 1 else A)


def adora(b: Batch) -> Array:
    """ADORA (its code, ShadeCloak/ADORA): A of GRPO x .1 unless the longest correct answer is longer than the mean
    wrong one, truncated ones left out. Without a correct or a wrong one A is 0 anyway.
    """
    A, weight = b.each(normal, b.reward, b.group), np.full(b.n, 0.1)
    for rows in groups(b.group):
        right = b.length[rows][b.correct[rows]]
        wrong = b.length[rows][~b.correct[rows] & ~b.truncated[rows]]
        if len(right) and len(wrong) and right.max() > wrong.mean():
            weight[rows] = 1.0
    return weight * A


def early_search(b: Batch) -> Array:
    """ASPO (2508.19201): correct trajectories that used a tool get A + clip(-2 (p - mean p) / mean L, -+.7 |A|).

    p: tokens up to the end of the first turn whose call was served; means over those trajectories of the group.
    """
    A, ends = b.each(normal, b.reward, b.group), np.cumsum(b.acted, 1)
    used: Mask = b.called.max(1, initial=0) > 0
    for rows in groups(b.group):
        rows = rows[used[rows] & b.correct[rows]]
        if len(rows):
            p = ends[rows, b.called[rows].argmax(1)]
            bound = 0.7 * np.abs(A[rows])
            A[rows] += np.clip(-2 * (p - p.mean()) / max(1, b.length[rows].mean()), -bound, bound)
    return A


def over_paraphrases(b: Batch) -> Array:
    """Information-consistent GRPO (2512.12858): a group is all paraphrases of a prompt: here, a question under all of
    its instructions. Our reading: rewards as they are, without the paper's entropy-based ones.

    What an instruction is worth enters A on purpose, since its wording should not matter.
    """
    return b.each(normal, b.reward, b.question)


def token_weighted(b: Batch) -> Array:
    """HAPO (2509.16591): Eq. 3 with mean and deviation over the group's tokens, so that long ones weigh more."""
    A = np.zeros(b.n)
    for rows in groups(b.group):
        r, L = b.reward[rows], b.length[rows] / max(1, b.length[rows].sum())
        mean = (L * r).sum()
        A[rows] = (r - mean) / (np.sqrt((L * (r - mean) ** 2).sum()) + SMALL)
    return A


def across_budgets(b: Batch) -> Array:
    """HBPO: A within the group, plus the group's mean reward minus 4 cos(pi budget / 2M), centred per instruction.

    The last term belongs to a budget, so to an instruction, and is centred away. The authors' code adds both twice.
    """
    return b.each(normal, b.reward, b.group) + b.per_instruction(b.mean(b.reward, b.group))


# ---- credit of the turns: (n, K)


def first_result(b: Batch, A: Array) -> Array:
    """MT-GRPO (2505.11821): A + A_turn up to the first result, A after it; A + A_turn everywhere without a result.

    A_turn: Eq. 3 for the reward of the first result, 1 if it holds a gold answer.
    """
    turn = np.arange(b.called.shape[1])
    first = np.where(b.called > 0, turn, len(turn)).min(1, initial=len(turn))  # beyond the last where there is none
    reward = ((turn == first[:, None]) & (b.found > 0)).sum(1).astype(float)
    before = turn <= first[:, None]
    return A[:, None] + before * b.each(normal, reward, b.group)[:, None]


def returns(reward: Array, gamma: float) -> Array:
    """Returns the discounted sum of the rewards (n, K) from each turn on."""
    out, rest = np.zeros(reward.shape), np.zeros(len(reward))
    for k in reversed(range(reward.shape[1])):
        rest = out[:, k] = reward[:, k] + gamma * rest
    return out


def at_the_end(b: Batch, exists: Mask) -> Array:
    """Returns the reward in each trajectory's last turn, 0 elsewhere (n, K)."""
    last = exists.sum(1) - 1
    return (np.arange(exists.shape[1]) == last[:, None]) * b.reward[:, None]


def by_cell(x: Array, number: npt.NDArray[np.int64], b: Batch) -> Array:
    """Returns Eq. 3 for the entries of x (n, K) that share a number; 0 where it is below 0."""
    out, rows = np.zeros(x.shape), number >= 0
    out[rows] = b.each(normal, x[rows], number[rows])
    return out


def anchored(b: Batch, A: Array) -> Array:
    """GiGPO (2505.10978): A + Eq. 3 for the discounted returns (gamma .95) of the group's turns in the same state.

    A state is what the turn answers to: the prompt, or the passages it was given last, equal to the letter.
    """
    return A[:, None] + by_cell(returns(at_the_end(b, b.state >= 0), 0.95), b.state, b)


def discounted(b: Batch, A: Array) -> Array:
    """EAPO (IterResearch, 2511.07327): a turn is a sample of its own with the reward gamma^(T - t) R, and Eq. 3
    compares all turns of a group. gamma .95 is ours: the paper's was not found. The context is not cut into rounds.
    """
    exists = b.state >= 0
    return by_cell(returns(at_the_end(b, exists), 0.95), np.where(exists, b.group[:, None], -1), b)


def stage_returns(b: Batch, A: Array) -> Array:
    """SS-GRPO (RubricEM, 2605.10899): G_k = sum_{j >= k} lambda_kj R_j, and Eq. 3 for each stage in the group.

    Our reading: a stage is a turn; R_j is 1 where a result holds a gold answer, and at the end the trajectory's reward
    (the paper has a judge); lambda_kj = .95^(j - k) (not found).
    """
    exists, K = b.state >= 0, b.state.shape[1]
    stage = np.where(exists, b.group[:, None] * K + np.arange(K), -1)
    return by_cell(returns(b.found + at_the_end(b, exists), 0.95), stage, b)


# ---- selection: (N,)


def mixed_groups(b: Batch) -> Mask:
    """DAPO (Eq. 11): only groups with both right and wrong answers. The authors sample more until the batch is full."""
    share = b.mean(b.correct, b.group)
    return ((share > 0) & (share < 1))[b.tau]


def not_small(b: Batch) -> Mask:
    """LOOP (2502.01600): only where |A| >= .01."""
    return np.abs(b.A) >= 0.01


def diverse(b: Batch) -> Mask:
    """D3S (2509.22115): the half of the mini-batch's trajectories with the largest variance of A, and of their tokens
    the half with the largest |A| H. Our reading: the paper's shares, which grow with the steps, were not found.
    """
    A = np.array([tau.advantage for tau in b.taus])
    up, n, spread = np.sort(A), (b.n + 1) // 2, -1.0
    chosen = np.zeros(b.n, bool)
    for k in range(n + 1 if n else 0):  # the k lowest and the n - k highest; whoever ties with one of them comes along
        low, high = up[:k], up[b.n - n + k :]
        if (found := np.r_[low, high].var()) > spread:
            spread, chosen = found, (A <= low.max(initial=-np.inf)) | (A >= high.min(initial=np.inf))
    chosen = chosen[b.tau]
    score = np.abs(b.A) * (np.ones(len(b.tau)) if b.entropy is None else b.entropy)
    return chosen & (score >= np.median(score[chosen])) if chosen.any() else chosen


# ---- weights: (N,)


def longest_mean(b: Batch, keep: Mask) -> Array:
    """Dr. GRPO: 1 / (trajectories x the most tokens one may have), so that length does not scale a token."""
    return keep / max(1, b.n * b.limit)


def turn_mean(b: Batch, keep: Mask) -> Array:
    """The average over a turn's tokens, a trajectory's turns, the mini-batch."""
    turns = (b.acted > 0).sum(1)
    return keep / (b.acted.ravel()[b.turn] * turns[b.tau] * b.n)


# ---- tokens: the advantage (N,), given w


def heterogeneity(b: Batch) -> Array:
    """HAPO: h in [-1, 1], log H minus its .8 quantile in units of its deviation, each sign by its largest size.

    H is pi_old's, so that no pass is added; the sampling temperature stays one. The authors' code divides the negative
    side by its minimum, which makes it positive: its branch for low entropy never acts. Here the size is taken.
    """
    assert b.entropy is not None
    x = np.log(np.maximum(b.entropy, 1e-8))
    h = (x - np.quantile(x, 0.8)) / (x.std() + SMALL) if len(x) else x
    top, bottom = float(h.max(initial=0)), -float(h.min(initial=0))
    return np.where(h > 0, h / (top or 1), h / (bottom or 1))


def entropy_scaled(b: Batch, w: Array) -> Array:
    """HAPO: A (1 + h) for h > 0 where rho is outside (1 - eps_low / 2, 1 + eps_high / 2), for h <= 0 inside it."""
    assert b.now is not None and b.old is not None
    h, rho = heterogeneity(b), np.exp(b.now - b.old)
    inside = (rho > 0.9) & (rho < 1.14)
    return b.A * np.where((h > 0) != inside, 1 + h, 1)


def variational(b: Batch, w: Array) -> Array:
    """VESPO (2602.10693): phi(W) A with W = exp(sum of log rho) and phi = exp(l + k log W - l W), not differentiated.

    k, l are 2, 3 where A >= 0, else 3, 2: the authors' code; their docstring has other numbers. log W within +-20.
    """
    if b.now is None or b.old is None:
        return b.A
    log_W = np.bincount(b.tau, b.now - b.old, b.n)[b.tau].clip(-20, 20)
    k, l = np.where(b.A >= 0, 2, 3), np.where(b.A >= 0, 3, 2)
    return b.A * np.exp(l + k * log_W - l * np.exp(log_W))


def imitated(b: Batch, w: Array) -> Array:
    """ICPO (2510.26519): A p / (p + .1) for trajectories steered by a context, the clipped ratio (dual, 3) for others.

    Our reading: steered are those under an evolved instruction, not the first. The gradient of p / (p + .1), which is
    .1 p / (p + .1)^2 that of log p, stands in the advantage.
    """
    assert b.now is not None
    p = np.exp(b.now)
    return b.A * np.where(steered(b), 0.1 * p / (p + 0.1) ** 2, 1)


def steered(b: Batch) -> Mask:
    return np.array([bool(tau.instruction) for tau in b.taus], bool)[b.tau]


def kept_likely(b: Batch, w: Array) -> Array:
    """LLDS (2512.04220): the loss + .1 sum of relu(log p_old - log p) over the tokens of trajectories with A >= 0 whose
    log-probability fell as a whole; the mean over those. Read in a third party's port, not in the paper.

    The gradient stands in the advantage, divided by the w and rho that the head multiplies it with.
    """
    if b.now is None or b.old is None:
        return b.A
    fell = np.bincount(b.tau, b.now - b.old, b.n) < 0
    gated = fell & (np.array([tau.advantage for tau in b.taus]) >= 0)
    active = gated[b.tau] & (b.now < b.old)
    push = 0.1 / max(1, int(np.count_nonzero(gated))) / (np.maximum(w, 1e-12) * np.exp(b.now - b.old))
    return b.A + np.where(active, push, 0)


# ---- clip bounds: (N,) below and above 1


def entropy_bounds(b: Batch) -> tuple[Array, Array]:
    """HAPO: .2 (1 - h) below for h <= 0, .28 (1 + h) above for h > 0."""
    h = heterogeneity(b)
    return 0.2 * (1 - np.minimum(h, 0)), 0.28 * (1 + np.maximum(h, 0))


def elastic(b: Batch) -> tuple[Array, Array]:
    """ETR (2601.03723): bounds that grow with |A| and with the variance p (1 - p) of the group.

    Our reading: .2 x |A| / mean |A| within [.5, 2] x 4 p (1 - p) within [.5, 1]; only the abstract was found.
    """
    p, size = b.mean(b.correct, b.group)[b.tau], np.abs(b.A)
    mean = float(size.sum()) / max(1, len(size)) or 1.0
    eps = 0.2 * np.clip(size / mean, 0.5, 2) * np.clip(4 * p * (1 - p), 0.5, 1)
    return eps, eps


# ---- ratio: the log-probs (N,) that rho compares with


def per_sequence(b: Batch) -> Array | None:
    """GSPO (2507.18071, Eq. 5 and 7): every token has the ratio exp(mean log rho) of its trajectory.

    rho is compared with now - mean(now - old), so that the head computes that ratio, its clip and the token's gradient.
    """
    if b.now is None or b.old is None:
        return b.old
    return b.now - b.mean(b.now - b.old, b.tau)


def per_turn(b: Batch) -> Array | None:
    """The same with the mean over the token's turn."""
    if b.now is None or b.old is None:
        return b.old
    return b.now - b.mean(b.now - b.old, b.turn)


def to_engine(b: Batch) -> Array:
    """DPPO (2602.04879): rho compares with the engine's own log-probs, from which the tokens were sampled."""
    return b.engine


def steered_on_policy(b: Batch) -> Array | None:
    """ICPO: no old policy for steered trajectories."""
    assert b.now is not None and b.old is not None
    return np.where(steered(b), b.now, b.old)
