"""Trajectories -> new policy: group advantages, packing by length, the masked token-level loss (§2.2, Eq. 2 and 3)."""

import heapq
import math

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from rollout import EngineFault, Trajectory
from training.model import score


def advantages(trajectories: list[Trajectory]) -> dict[int, float]:
    """id(trajectory) -> A-hat: its reward against its group's mean, in units of the group's (unbiased) std."""
    groups: dict[int, list[Trajectory]] = {}
    for tau in trajectories:
        groups.setdefault(tau.group, []).append(tau)
    A = {}
    for members in groups.values():
        r = torch.tensor([tau.reward for tau in members], dtype=torch.float64)
        for tau, a in zip(members, (r - r.mean()) / (r.std() + 1e-6), strict=True):  # Eq.3
            A[id(tau)] = a.item()
    return A


def micro_batches(trajectories: list[Trajectory], micro_tokens: int, ranks: int = 1) -> list[list[Trajectory]]:
    """Trajectories in batches of at most `micro_tokens` (a longer one is alone) and of nearly equal size.

    Their number is a multiple of `ranks`, as all ranks must work in step; some may be empty then.
    """
    longest_first = sorted(trajectories, key=lambda tau: -len(tau.ids))
    n = min(len(trajectories), math.ceil(sum(len(tau.ids) for tau in trajectories) / micro_tokens))
    while True:
        n = math.ceil(n / ranks) * ranks
        fill = [(0, k) for k in range(n)]  # a heap: the emptiest batch is first
        batches: list[list[Trajectory]] = [[] for _ in range(n)]
        for tau in longest_first:
            tokens, k = heapq.heappop(fill)
            batches[k].append(tau)
            heapq.heappush(fill, (tokens + len(tau.ids), k))
        if all(tokens <= micro_tokens or len(batches[k]) == 1 for tokens, k in fill):
            return batches
        n += 1


def lr_at(t: int, lr: float, T: int, warmup: float) -> float:
    """Learning rate of step t in 1..T: linear rise over the first `warmup` of T, then cosine to 0 (App. B)."""
    rise = max(1, round(warmup * T))
    if t <= rise:
        return lr * t / rise
    return lr * 0.5 * (1 + math.cos(math.pi * (t - rise) / (T - rise + 1)))


class Learner:
    """The policy with its optimizer; `reference` is its frozen first version, pi_ref of Eq. 2.

    Models that `policy.shard` has cut over ranks are trained by all ranks together: each calls `update` with the same
    trajectories and computes its share of the micro-batches. The result is that of one process.
    """

    def __init__(
        self,
        model,
        reference,
        *,
        lr: float,
        T: int,
        warmup: float,
        eps: float,
        beta: float,
        temperature: float,
        loss_agg: str,
        micro_tokens: int,
        tis: float = 0.0,
        max_gap: float = math.inf,
    ):
        self.model, self.schedule = model, (lr, T, warmup)
        self.eps, self.beta, self.temperature = eps, beta, temperature
        self.loss_agg, self.micro_tokens, self.tis, self.max_gap = loss_agg, micro_tokens, tis, max_gap
        first = next(model.parameters())
        self.device, self.sharded = first.device, isinstance(first, DTensor)
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if self.sharded else (0, 1)
        self.reference = reference.requires_grad_(False).eval() if beta else None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01, fused=True)

    def update(self, t: int, minibatches: list[list[Trajectory]], A: dict[int, float]) -> dict[str, float]:
        """One optimizer update for each mini-batch; returns the step's metrics.

        The loss has one denominator a mini-batch, so it does not depend on how that is cut into micro-batches, nor on
        the number of ranks. Raises EngineFault, before anything is changed, where the log-probs that the engine gave
        the sampled tokens are on average further than `max_gap` from the trainer's.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(t, *self.schedule)
        shares = [micro_batches(part, self.micro_tokens, self.ranks)[self.rank :: self.ranks] for part in minibatches]
        # pi_old is the policy before the step's first update; with a single update that is the policy itself.
        old = {} if len(minibatches) == 1 and not self.tis else self.old_logprobs(sum(shares, []))
        total = dict.fromkeys(("loss", "kl", "entropy", "clipped", "gap", "tokens"), 0.0)
        norm = 0.0
        self.model.train()
        for k, (part, share) in enumerate(zip(minibatches, shares, strict=True)):
            actions = sum(sum(tau.mask) for tau in part)
            for batch in share:
                loss, extras = self.loss(batch, A, old, len(part), actions)
                loss.backward()
                total["loss"] += loss.item() / len(minibatches)
                for name in ("kl", "entropy", "clipped", "gap"):
                    total[name] += extras[name].float().sum().item()
                total["tokens"] += len(extras["logp"])
            if k == 0:
                self.refuse_a_stale_engine(total)
            norm += self.step() / len(minibatches)
        total = self.sum_over_ranks(total)
        tokens = max(1, total["tokens"])
        return {
            "loss": total["loss"],
            "kl": total["kl"] / tokens,
            "entropy": total["entropy"] / tokens,
            "clip_fraction": total["clipped"] / tokens,
            "logp_gap": total["gap"] / tokens,  # mean |trainer - engine| of the sampled tokens' log-probs
            "grad_norm": norm,
            "lr": lr_at(t, *self.schedule),
        }

    def step(self) -> float:
        """One step of the optimizer on gradients of norm 1 at most; their norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (norm.full_tensor() if self.sharded else norm).item()

    def refuse_a_stale_engine(self, total: dict[str, float]) -> None:
        total = self.sum_over_ranks(total)
        gap = total["gap"] / max(1, total["tokens"])
        if not gap <= self.max_gap:  # nan, too
            self.optimizer.zero_grad(set_to_none=True)
            raise EngineFault(f"log-probs of engine and trainer differ by {gap:.3f} nat a token")

    def sum_over_ranks(self, total: dict[str, float]) -> dict[str, float]:
        if not self.sharded:
            return total
        values = torch.tensor(list(total.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(total, values.tolist(), strict=True))

    def loss(self, batch: list[Trajectory], A, old, n_trajectories: int, n_actions: int):
        """(loss, extras) of a micro-batch of a mini-batch with these totals; "gap", (N,): |pi_old - engine|."""
        packed = self.pack(batch)
        counts = torch.tensor([sum(tau.mask) for tau in batch], dtype=torch.long, device=self.device)  # (B,)
        tau_of = torch.repeat_interleave(torch.arange(len(batch), device=self.device), counts)  # (N,)
        adv = torch.tensor([A[id(tau)] for tau in batch], device=self.device)[tau_of]
        if self.loss_agg == "trajectory":  # Eq.2: tokens of a trajectory, then the group, then the mini-batch. CHOICE-9
            w = 1.0 / (counts[tau_of] * n_trajectories)
        else:
            w = torch.full_like(adv, 1.0 / max(1, n_actions))
        sampled = [lp for tau in batch for lp, m in zip(tau.logps, tau.mask, strict=True) if m]
        sampled = torch.tensor(sampled, device=self.device)  # (N,)
        old_logp = torch.cat([old[id(tau)] for tau in batch]) if old and batch else None
        if self.tis and batch:
            w = w * (old_logp - sampled).exp().clamp(max=self.tis)
        ref_logp = None
        if self.reference is not None:
            with torch.no_grad():
                ref_logp, _ = score(self.reference, *packed, self.temperature)
        loss, extras = score(
            self.model, *packed, self.temperature, adv=adv, w=w, ref_logp=ref_logp, beta=self.beta, old_logp=old_logp,
            eps_low=self.eps, eps_high=self.eps,
        )  # fmt: skip
        gap = (extras["logp"] if old_logp is None else old_logp) - sampled
        return loss, extras | {"gap": gap.abs()}

    @torch.no_grad()
    def old_logprobs(self, batches: list[list[Trajectory]]) -> dict[int, torch.Tensor]:
        """id(trajectory) -> log-probs of its action tokens under the present policy, (actions,)."""
        out = {}
        for batch in batches:
            logp, _ = score(self.model, *self.pack(batch), self.temperature)
            out |= zip(map(id, batch), logp.split([sum(tau.mask) for tau in batch]), strict=True)
        return out

    def pack(self, batch: list[Trajectory]):
        """ids (T,) one trajectory after another, their lengths, and of the N action tokens: where predicted, which."""
        ids = torch.tensor([i for tau in batch for i in tau.ids] or [0], device=self.device)
        mask = torch.tensor([m for tau in batch for m in [*tau.mask[1:], 0]] or [0], device=self.device)
        rows = mask.nonzero()[:, 0]
        return ids, [len(tau.ids) for tau in batch] or [1], rows, ids[rows + 1]

    def state_dict(self) -> dict:
        """Weights and optimizer by the parameters' names, for torch.distributed.checkpoint: a rank has its shares."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
