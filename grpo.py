"""Trajectories -> new policy: advantages, the token-level loss, the update (§2.2, Eq. 2 and 3)."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import GRPOKnobs
from kernels import clipped_surrogate, eq2
from models.model import defer_sync, is_adapter, named_weights, reshard, without_adapters
from models.packing import micro_batches, pack, to_device
from plumbing.faults import EngineFault
from plumbing.files import Row
from plumbing.threads import compute_alone
from tasks import Trajectory

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Batch = list[Trajectory]
TokenStats = dict[str, Tensor]  # of a micro-batch's action tokens, (N,) each
# A model with fewer parameters gains little from several threads in one operation: each gets a
# micro-batch.
SMALL = 10**7
MAX_GRAD_NORM = 1.0  # CHOICE-17
MAX_SKIPPED = 5  # optimizer steps in a row without a finite gradient, after which a run stops
# what kernels.grpo_head is told, by name: arrays (N,) over action tokens, numbers, or None
LossInputs = dict[str, Any]
# what is added up over the action tokens of a mini-batch: the loss, and stats of `Learner.loss`
SUMS = ("loss", "kl", "entropy", "clipped", "gap")


def group_advantages(r: Array) -> Array:
    """Returns A-hat (G,) of a group's rewards (G,): their distance to the mean in units of the
    standard deviation."""
    A: Array = (r - r.mean()) / (r.std(ddof=1) + 1e-6)  # Eq.3 CHOICE-19
    return A


def minibatches(taus: Batch, cfg: GRPOKnobs) -> list[Batch]:
    """Returns the trajectories of a step in their order, cut into parts of `cfg.mini_batch`, one
    for each optimizer update. A part may cut a group; the last may be smaller."""
    n = cfg.mini_batch  # trajectories, where cfg.batch counts questions: CHOICE-10
    return [taus[k : k + n] for k in range(0, len(taus), n)]


def lr_at(t: int, cfg: GRPOKnobs) -> float:
    """Returns the rate of step t in 1..T: a linear rise over `warmup` of T, then a cosine to 0 at T
    + 1 (App. B)."""
    rise = max(1, round(cfg.warmup * cfg.T))
    if t <= rise:
        return cfg.lr * t / rise
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (t - rise) / (cfg.T - rise + 1)))  # CHOICE-17


class Learner:
    """The policy with its optimizer; `reference` is its frozen first version, pi_ref of Eq. 2.

    With LoRA pi_ref is the policy with its adapters off, and no other model is needed.

    A model that `training.shards.shard` has cut over the ranks is trained by all ranks together: each
    calls `update` with the same trajectories and computes its share of the micro-batches. The
    result equals that of one process.

    A subclass trains towards another objective with its own `set_advantages`, `make_loss_inputs` or
    `surrogate`.
    """

    surrogate: Callable[..., Tensor] = staticmethod(clipped_surrogate)
    # mean nats per token, engine to trainer
    MAX_GAP: ClassVar[dict[str, float]] = {"float32": 1e-3, "bfloat16": 0.1}

    def __init__(self, model: Any, reference: Any, cfg: GRPOKnobs, max_gap: float = math.inf):
        """`max_gap`: mean nats per token by which engine and trainer may differ."""
        self.model, self.cfg, self.max_gap = model, cfg, max_gap
        # what rank 0 remembers from step to step, in subclasses too: plain data
        self.remembered: dict[str, Any] = {}
        first = next(model.parameters())
        self.device = first.device
        self.sharded = isinstance(first, DTensor)
        self.rank: int = dist.get_rank() if self.sharded else 0
        self.size: int = dist.get_world_size() if self.sharded else 1
        self.reference = None
        if cfg.beta:
            self.reference = model if cfg.lora_rank else reference.requires_grad_(False).eval()
        small = sum(p.numel() for p in model.parameters()) < SMALL
        # with LoRA the reference switches adapters off, for all threads at once
        shareable = small and not self.sharded and not cfg.lora_rank
        self.threads = torch.get_num_threads() if shareable else 1
        self.optimizer = torch.optim.AdamW(  # CHOICE-17
            [p for p in model.parameters() if p.requires_grad],
            lr=cfg.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
            fused=True,
        )

    def set_advantages(self, taus: Sequence[Trajectory]) -> None:
        """Sets A-hat of a step's trajectories from their rewards, on rank 0. One that is alone in
        its group has 0."""
        groups: dict[int, Batch] = {}
        for tau in taus:
            groups.setdefault(tau.group, []).append(tau)
        for group in groups.values():
            A = np.zeros(1)
            if len(group) > 1:
                A = group_advantages(np.array([tau.reward for tau in group]))
            for tau, a in zip(group, A.tolist(), strict=True):
                tau.advantage = a

    def make_loss_inputs(self, minibatch: Batch, old: Array | None) -> LossInputs:
        """Returns what Eq. 2 needs to know of the N action tokens of a mini-batch, by the names of
        `grpo_head`.

        `old` (2, N): their log-probs and entropies under pi_old; None where that is the policy in
        training, so that rho = 1.
        """
        counts = np.array([sum(tau.mask) for tau in minibatch], int)
        # 1/|tau|, then the mean
        weight = 1 / (np.maximum(1, counts) * len(minibatch))  # Eq.2 CHOICE-9
        return {
            "adv": np.repeat([tau.advantage for tau in minibatch], counts),
            "token_weight": np.repeat(weight, counts),
            "old_logp": None if old is None else old[0],
            "eps_low": self.cfg.eps,
            "eps_high": self.cfg.eps,
        }

    def take_share(self, minibatch: Batch) -> Iterator[tuple[Batch, Indices]]:
        """Yields this rank's micro-batches of a mini-batch, each with the indices of its action
        tokens among the N; `models.model.probe` says what the row of one may hold."""
        # of the N action tokens trajectory k has those from starts[k] to starts[k + 1]
        starts = np.cumsum([0, *(sum(tau.mask) for tau in minibatch)])
        # tokens; a limit of 1 leaves each trajectory alone
        most = 1 if self.model.row_kind == "single" else self.cfg.micro_tokens
        if self.model.row_kind != "shared":
            # a prompt of no tokens is shared by none
            minibatch = [replace(tau, prompt_tokens=0) for tau in minibatch]
        batches = micro_batches(minibatch, most, self.size)  # CHOICE-37
        for batch in batches[self.rank :: self.size]:
            indices = [np.arange(starts[k], starts[k + 1]) for k in batch]
            # a batch that only keeps the ranks in step is empty
            yield [minibatch[k] for k in batch], np.concatenate(indices or [np.arange(0)])

    def update(self, t: int, minibatches: list[Batch]) -> Row:
        """Takes one optimizer step per mini-batch; returns the metrics of step t.

        All ranks skip one whose loss or gradient is not finite. "skipped_updates" counts these and
        the other metrics leave them out; remembered["skipped"] is how many there have been in a row.

        Raises EngineFault, before any weight changes, if in the first mini-batch the log-probs of
        engine and trainer differ by more than `max_gap` on average.
        """
        lr = lr_at(t, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Of each mini-batch under pi_old, by the trainer: the engine's tau.logps only measure the gap.
        # None: at the first the policy still is pi_old.
        old_scores = [None, *map(self.score_tokens, minibatches[1:])]
        total = dict.fromkeys((*SUMS, "tokens"), 0.0)
        norms = []
        self.model.train()
        for k, minibatch in enumerate(minibatches):
            sums = self.backward(minibatch, old_scores[k])

            # Before the first step engine and trainer have the same weights. `not <=` holds for
            # NaN, too; a loss that is not finite is the trainer's own fault.
            gap = sums["gap"] / max(1, sums["tokens"])
            if k == 0 and math.isfinite(sums["loss"]) and not gap <= self.max_gap:
                self.optimizer.zero_grad(set_to_none=True)
                raise EngineFault(
                    f"log-probs of engine and trainer differ by {gap:.3f} nats per token"
                )

            norm = self.step(sums["loss"])
            if norm is None:
                self.remembered["skipped"] = self.remembered.get("skipped", 0) + 1
                continue
            self.remembered.pop("skipped", None)
            norms.append(norm)
            for name in total:
                total[name] += sums[name]
        if self.reference is not None:
            reshard(self.reference)  # no backward pass has freed what FSDP gathered

        metrics = {"lr": lr, "skipped_updates": len(minibatches) - len(norms)}
        if not norms:
            return metrics
        tokens = max(1, total["tokens"])
        if self.reference is not None:
            metrics["kl"] = total["kl"] / tokens
        return metrics | {
            "loss": total["loss"] / len(norms),
            "entropy": total["entropy"] / tokens,  # only measured, no part of the loss: CHOICE-32
            "clip_fraction": total["clipped"] / tokens,
            # mean |trainer - engine| of the sampled tokens' log-probs
            "logp_gap": total["gap"] / tokens,
            "grad_norm": sum(norms) / len(norms),
        }

    def backward(self, minibatch: Batch, old: Array | None) -> Row:
        """Adds the gradients of this rank's micro-batches to those of the parameters. The loss of a
        mini-batch has one denominator: it depends neither on how it is cut into micro-batches nor
        on the number of ranks.

        Returns the sums of SUMS over its action tokens, on all ranks, and how many "tokens" these
        are.

        CPU threads share the micro-batches of a small model. The gradients are added in the same
        order, so that the sum does not depend on how many threads there are.
        """
        inputs = self.make_loss_inputs(minibatch, old)
        trained = self.optimizer.param_groups[0]["params"]
        mine = list(self.take_share(minibatch))
        total = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)

        def compute(k: int) -> tuple[TokenStats, Sequence[Tensor | None]]:
            """Returns the statistics and the gradients of micro-batch k; none where `loss.backward`
            has added them already."""
            batch, indices = mine[k]
            if self.sharded and self.cfg.gather == 1:
                # each rank sums its gradients, and the last pass sums over the ranks
                defer_sync(self.model, k + 1 < len(mine))
            loss, stats = self.loss(batch, indices, inputs)
            stats["loss"] = loss.detach()
            if self.threads > 1:
                return stats, torch.autograd.grad(loss, trained, allow_unused=True)
            loss.backward()
            return stats, ()

        # several threads compute micro-batches, one core each; this one adds them up in order
        with ThreadPoolExecutor(self.threads, initializer=compute_alone) as pool:
            map_batches = pool.map if self.threads > 1 else map
            for stats, gradients in map_batches(compute, range(len(mine))):
                # none where `loss.backward` has added them
                for p, gradient in zip(trained, gradients, strict=False):
                    if p.grad is None:
                        p.grad = gradient
                    elif gradient is not None:
                        p.grad += gradient
                total += torch.stack([stats[name].sum().double() for name in SUMS])
        if self.sharded:
            dist.all_reduce(total)
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        sums["tokens"] = sum(sum(tau.mask) for tau in minibatch)
        return sums

    def step(self, loss: float) -> float | None:
        """Takes one optimizer step on the clipped gradients; returns their norm before clipping;
        None: it was skipped."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        if self.sharded:
            norm = norm.full_tensor()  # the same on all ranks
        size = float(norm.item())
        finite = math.isfinite(size) and math.isfinite(loss)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return size if finite else None

    @torch.no_grad()
    def score_tokens(self, minibatch: Batch) -> Array:
        """Returns log-probs and entropies (2, N) of a mini-batch's action tokens under the present
        policy.

        Every rank scores its share and gets the others' from them: `make_loss_inputs` sees the whole
        mini-batch.
        """
        N = sum(sum(tau.mask) for tau in minibatch)
        scores = torch.zeros(2, N, dtype=torch.float64, device=self.device)
        for batch, indices in self.take_share(minibatch):
            packed = pack(batch, self.device)
            # without the loss's inputs it returns log-probs and entropies
            both = torch.stack(self.model.forward_packed(*packed, self.cfg.temperature))
            scores[:, to_device(torch.from_numpy(indices), self.device)] = both.double()
        if self.sharded:
            dist.all_reduce(scores)  # adds the ranks' tokens to zeros
        out: Array = scores.cpu().numpy()
        return out

    def loss(
        self, batch: Batch, indices: Indices | slice, inputs: LossInputs
    ) -> tuple[Tensor, TokenStats]:
        """Returns (loss, stats) of a micro-batch; `indices`: where its N action tokens stand in the
        arrays of `inputs`.

        Besides what `grpo_head` returns, stats have "old_logp" (N,), log-probs under pi_old, and
        "gap" (N,), their distance to the engine's.
        """
        packed = pack(batch, self.device)
        temperature = self.cfg.temperature
        # of each array the entries of these tokens, on the device
        inputs = dict(inputs)
        for name, x in inputs.items():
            if isinstance(x, np.ndarray):
                inputs[name] = to_device(torch.from_numpy(x[indices]), self.device)

        # log-probs under pi_ref, then the loss
        ref_logp = None
        if self.reference is not None:
            with torch.no_grad(), without_adapters(self.reference):
                ref_logp, _ = self.reference.forward_packed(*packed, temperature)
        objective = None  # the kernels' own Eq. 2, with `clipped_surrogate`
        if self.surrogate is not clipped_surrogate:
            objective = partial(eq2, surrogate=self.surrogate)
        loss, stats = self.model.forward_packed(
            *packed,
            temperature,
            objective=objective,
            ref_logp=ref_logp,
            beta=self.cfg.beta,
            **inputs,
        )

        # the engine's log-probs of the same tokens
        logps = list[float]()
        for tau in batch:
            logps += compress(tau.logps, tau.mask)
        engine_logp = to_device(torch.tensor(logps, dtype=torch.float32), self.device)
        # without pi_old's log-probs the policy in training still is pi_old
        old = stats["logp"]
        if inputs["old_logp"] is not None:
            old = inputs["old_logp"].to(old.dtype)
        return loss, stats | {"old_logp": old, "gap": (old - engine_logp).abs()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns trained weights and AdamW's moments by name; what is written into these tensors
        is restored."""
        reshard(self.model)
        state = {}
        for name, p in named_weights(self.model):
            if self.cfg.lora_rank and not is_adapter(name):
                continue
            state[f"model.{name}"] = p.detach()
            if not p.requires_grad:
                continue
            # AdamW has no state for a parameter that never had a gradient, such as an expert that
            # no token was sent to. A new process cannot know which these were: all get one.
            if p not in self.optimizer.state:
                self.optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
            for moment, x in self.optimizer.state[p].items():
                state[f"optimizer.{name}.{moment}"] = x
        return state
