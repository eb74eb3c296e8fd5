"""Trajectories -> new policy: group advantages, packing by length, the masked token-level loss (§2.2, Eq. 2 and 3)."""

import math
from collections.abc import Iterator

import torch

from kernels import grpo_head, token_logprobs
from rollout import Trajectory


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


def micro_batches(trajectories: list[Trajectory], micro_tokens: int) -> Iterator[list[Trajectory]]:
    """Trajectories of like length together, at most `micro_tokens` a batch, padding counted."""
    batch: list[Trajectory] = []
    for tau in sorted(trajectories, key=lambda tau: len(tau.ids)):
        if batch and len(tau.ids) * (len(batch) + 1) > micro_tokens:
            yield batch
            batch = []
        batch.append(tau)
    if batch:
        yield batch


def lr_at(t: int, lr: float, T: int, warmup: float) -> float:
    """Learning rate of step t in 1..T: linear rise over the first `warmup` of T, then cosine to 0 (App. B)."""
    rise = max(1, round(warmup * T))
    if t <= rise:
        return lr * t / rise
    return lr * 0.5 * (1 + math.cos(math.pi * (t - rise) / (T - rise + 1)))


class Learner:
    """The policy with its optimizer; `reference` is its frozen first version, pi_ref of Eq. 2."""

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
    ):
        self.model, self.schedule = model, (lr, T, warmup)
        self.eps, self.beta, self.temperature = eps, beta, temperature
        self.loss_agg, self.micro_tokens = loss_agg, micro_tokens
        self.device = next(model.parameters()).device
        self.reference = reference.requires_grad_(False).eval() if beta else None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01, fused=True)

    def update(self, t: int, minibatches: list[list[Trajectory]], A: dict[int, float]) -> dict[str, float]:
        """One optimizer update for each mini-batch; returns the step's metrics.

        The loss has one denominator a mini-batch, so it does not depend on how that is cut into micro-batches.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(t, *self.schedule)
        # pi_old is the policy before the step's first update; with a single update that is the policy itself.
        old = {} if len(minibatches) == 1 else self.old_logprobs([tau for part in minibatches for tau in part])
        total: dict[str, float] = dict.fromkeys(("loss", "kl", "entropy", "clipped", "gap"), 0.0)
        tokens, norm = 0, 0.0
        self.model.train()
        for part in minibatches:
            actions = sum(sum(tau.mask) for tau in part)
            for batch in micro_batches(part, self.micro_tokens):
                loss, extras, sampled = self.loss(batch, A, old, len(part), actions)
                loss.backward()
                total["loss"] += loss.item() / len(minibatches)
                for name in ("kl", "entropy", "clipped"):
                    total[name] += extras[name].float().sum().item()
                before = torch.cat([old[id(tau)] for tau in batch]) if old else extras["logp"]
                total["gap"] += (before - sampled).abs().sum().item()
                tokens += len(sampled)
            norm += torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item() / len(minibatches)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        tokens = max(1, tokens)
        return {
            "loss": total["loss"],
            "kl": total["kl"] / tokens,
            "entropy": total["entropy"] / tokens,
            "clip_fraction": total["clipped"] / tokens,
            "logp_gap": total["gap"] / tokens,  # mean |trainer - engine| of the sampled tokens' log-probs
            "grad_norm": norm,
            "lr": lr_at(t, *self.schedule),
        }

    def loss(self, batch: list[Trajectory], A, old, n_trajectories: int, n_actions: int):
        """(loss, extras, engine log-probs) of a micro-batch of a mini-batch with these totals."""
        ids, mask = self.tensors(batch)
        counts = mask.sum(1)  # (B,) action tokens
        rows = torch.repeat_interleave(torch.arange(len(batch), device=self.device), counts)  # (N,)
        adv = torch.tensor([A[id(tau)] for tau in batch], device=self.device)[rows]
        if self.loss_agg == "trajectory":  # Eq.2: tokens of a trajectory, then the group, then the mini-batch. CHOICE-9
            w = 1.0 / (counts[rows] * n_trajectories)
        else:
            w = torch.full_like(adv, 1.0 / max(1, n_actions))
        targets = ids[:, 1:][mask]
        ref_logp = None
        if self.reference is not None:
            with torch.no_grad():
                hidden = self.hidden(self.reference, ids, mask)
                ref_logp, _ = token_logprobs(hidden, head_weight(self.reference), targets, self.temperature)
        hidden = self.hidden(self.model, ids, mask)
        loss, extras = grpo_head(
            hidden, head_weight(self.model), targets, adv=adv, w=w, ref_logp=ref_logp, beta=self.beta,
            old_logp=torch.cat([old[id(tau)] for tau in batch]) if old else None,
            eps_low=self.eps, eps_high=self.eps, temperature=self.temperature,
        )  # fmt: skip
        sampled = [lp for tau in batch for lp, m in zip(tau.logps, tau.mask, strict=True) if m]
        return loss, extras, torch.tensor(sampled, device=self.device)

    @torch.no_grad()
    def old_logprobs(self, trajectories: list[Trajectory]) -> dict[int, torch.Tensor]:
        """id(trajectory) -> log-probs of its action tokens under the present policy, (actions,)."""
        out = {}
        for batch in micro_batches(trajectories, self.micro_tokens):
            ids, mask = self.tensors(batch)
            hidden = self.hidden(self.model, ids, mask)
            logp, _ = token_logprobs(hidden, head_weight(self.model), ids[:, 1:][mask], self.temperature)
            out |= zip(map(id, batch), logp.split(mask.sum(1).tolist()), strict=True)
        return out

    def tensors(self, batch: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (B, L) padded on the right, and the mask of the tokens that are predicted, (B, L-1)."""
        width = max(len(tau.ids) for tau in batch)
        ids = torch.tensor([tau.ids + [0] * (width - len(tau.ids)) for tau in batch], device=self.device)
        mask = torch.tensor([tau.mask + [0] * (width - len(tau.mask)) for tau in batch], device=self.device)
        return ids, mask[:, 1:].bool()

    def hidden(self, model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states (N, H) from which the N action tokens were predicted.

        The attention is causal and the padding on the right, so no real token sees it and no mask is needed.
        """
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask]
        return hidden.bfloat16() if cuda else hidden  # autocast leaves the last norm in float32

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def head_weight(model) -> torch.Tensor:
    """The (V, H) matrix from hidden states to logits."""
    return model.get_output_embeddings().weight
