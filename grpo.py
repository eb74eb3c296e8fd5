"""Trajectories -> new policy: packing by length, the masked token-level loss, the update (§2.2, Eq. 2)."""

import heapq
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from config import Config
from faults import EngineFault
from objectives import Batch, Plan, objective_of
from rollout import Trajectory
from training import lora
from training.model import score

Scores = npt.NDArray[np.float64]  # (2, N)
Rows = npt.NDArray[np.int64]


def minibatches(taus: list[Trajectory], cfg: Config) -> list[list[Trajectory]]:
    """Returns the trajectories of a step in parts, one for each optimizer update: `cfg.mini` questions each."""
    n = cfg.mini * cfg.G  # CHOICE-10
    return [taus[k : k + n] for k in range(0, len(taus), n)]


def micro_batches(taus: list[Trajectory], micro_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Returns the places of the trajectories, in batches of at most `micro_tokens` (a longer one is alone) and of
    nearly equal size.

    Their number is a multiple of `ranks`, since all ranks must work in step; some may then be empty.
    """
    longest_first = sorted(range(len(taus)), key=lambda place: -len(taus[place].ids))
    n = min(len(taus), math.ceil(sum(len(tau.ids) for tau in taus) / micro_tokens))
    while True:
        n = math.ceil(n / ranks) * ranks
        fill = [(0, k) for k in range(n)]  # a heap: the emptiest batch is first
        batches: list[list[int]] = [[] for _ in range(n)]
        for place in longest_first:
            tokens, k = heapq.heappop(fill)
            batches[k].append(place)
            heapq.heappush(fill, (tokens + len(taus[place].ids), k))
        if all(tokens <= micro_tokens or len(batches[k]) == 1 for tokens, k in fill):
            return batches
        n += 1


def rows_of(lengths: list[int], places: list[int]) -> Rows:
    """Returns the rows of some trajectories' tokens among those of all, whose numbers of tokens are `lengths`."""
    ends = np.cumsum(lengths, dtype=int)
    return np.concatenate([np.arange(ends[k] - lengths[k], ends[k]) for k in places] or [np.arange(0)])


def lr_at(t: int, cfg: Config) -> float:
    """Returns the learning rate of step t in 1..T: a linear rise over `warmup` of T, then a cosine to 0 (App. B)."""
    rise = max(1, round(cfg.warmup * cfg.T))
    if t <= rise:
        return cfg.lr * t / rise
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (t - rise) / (cfg.T - rise + 1)))


def note_tokens(batch: list[Trajectory], plan: Plan, extras: dict[str, torch.Tensor]) -> None:
    """Sets `tokens` of the watched trajectories of a micro-batch: what the update saw of each action token.

    logp: under pi_old; ratio: rho of Eq. 3; entropy (nats), kl and clipped (0 or 1) as the loss had them.
    """
    if not any(tau.watched for tau in batch):
        return
    now = extras["logp"].detach().double().cpu()
    old, compared = (now if x is None else torch.from_numpy(x) for x in (plan.pi_old, plan.old_logp))
    seen = {"logp": old, "ratio": (now - compared).exp(), **{k: extras[k] for k in ("entropy", "kl", "clipped")}}
    counts = [sum(tau.mask) for tau in batch]
    columns = {name: values.detach().float().split(counts) for name, values in seen.items()}
    for k, tau in enumerate(batch):
        if tau.watched:
            tau.tokens = {name: parts[k].tolist() for name, parts in columns.items()}


class Learner:
    """The policy with its optimizer; `reference` is its frozen first version, pi_ref of Eq. 2.

    With LoRA pi_ref is the policy with its adapters off, and no other model is needed.

    A model that `training.model.shard` has cut over the ranks is trained by all ranks together: each calls `update`
    with the same trajectories and computes its share of the micro-batches. The result equals that of one process.
    """

    def __init__(self, model: Any, reference: Any, cfg: Config, max_gap: float = math.inf):
        """`max_gap`: mean nat a token by which engine and trainer may differ."""
        self.model, self.cfg, self.max_gap = model, cfg, max_gap
        self.objective = objective_of(cfg)
        first = next(model.parameters())
        self.device, self.sharded = first.device, isinstance(first, DTensor)
        self.rank: int = dist.get_rank() if self.sharded else 0
        self.ranks: int = dist.get_world_size() if self.sharded else 1
        self.reference = None
        if cfg.beta:
            self.reference = model if cfg.lora_rank else reference.requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(  # CHOICE-17
            [p for p in model.parameters() if p.requires_grad], lr=cfg.lr, betas=(cfg.adam_beta1, cfg.adam_beta2),
            eps=cfg.adam_eps, weight_decay=cfg.weight_decay, fused=True,
        )  # fmt: skip

    def update(self, t: int, minibatches: list[list[Trajectory]]) -> dict[str, float]:
        """Takes one optimizer step a mini-batch; returns the metrics of step t.

        A mini-batch has one denominator, so its loss depends neither on how it is cut into micro-batches nor on the
        number of ranks. Raises EngineFault, before anything is changed, if the engine's log-probs of the sampled
        tokens are on average further than `max_gap` from the trainer's.
        """
        lr = lr_at(t, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        shares = [
            micro_batches(part, self.cfg.micro_tokens, self.ranks)[self.rank :: self.ranks] for part in minibatches
        ]
        # pi_old is the policy before the step's first update: for the first mini-batch the policy in training itself.
        olds = [
            self.score(part, share) if k > 0 or "old" in self.objective.reads else None
            for k, (part, share) in enumerate(zip(minibatches, shares, strict=True))
        ]
        total = dict.fromkeys(("loss", "kl", "entropy", "clipped", "gap", "tokens"), 0.0)
        norm = 0.0
        self.model.train()
        for k, (part, share, old) in enumerate(zip(minibatches, shares, olds, strict=True)):
            now = None
            if "now" in self.objective.reads:
                now = self.score(part, share) if k > 0 else old
            plan, lengths = self.plan(part, old, now), [sum(tau.mask) for tau in part]
            for batch in share:
                taus, rows = [part[place] for place in batch], plan.rows(rows_of(lengths, batch))
                loss, extras = self.loss(taus, rows)
                loss.backward()
                note_tokens(taus, rows, extras)
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
            "lr": lr,
        }

    def step(self) -> float:
        """Takes one optimizer step on the clipped gradients; returns their norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float((norm.full_tensor() if self.sharded else norm).item())

    def refuse_a_stale_engine(self, total: dict[str, float]) -> None:
        total = self.sum_over_ranks(total)
        gap = total["gap"] / max(1, total["tokens"])
        if not gap <= self.max_gap:  # NaN too
            self.optimizer.zero_grad(set_to_none=True)
            raise EngineFault(f"log-probs of engine and trainer differ by {gap:.3f} nat a token")

    def sum_over_ranks(self, total: dict[str, float]) -> dict[str, float]:
        if not self.sharded:
            return total
        values = torch.tensor(list(total.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(total, values.tolist(), strict=True))

    def score(self, part: list[Trajectory], share: list[list[int]]) -> Scores:
        """Returns log-probs and entropies (2, N) of a mini-batch's action tokens under the present policy.

        Every rank scores its share and gets the others' from them: an objective sees the whole mini-batch.
        """
        lengths = [sum(tau.mask) for tau in part]
        found = torch.zeros(2, sum(lengths), dtype=torch.float64, device=self.device)
        for batch in share:
            found[:, rows_of(lengths, batch)] = torch.stack(self.scores([part[place] for place in batch])).double()
        if self.sharded:
            dist.all_reduce(found)  # adds the ranks' tokens to zeros
        out: Scores = found.cpu().numpy()
        return out

    def plan(self, part: list[Trajectory], old: Scores | None = None, now: Scores | None = None) -> Plan:
        """Returns what the head takes for a mini-batch's tokens, all of them; `old`, `now`: what `score` returned."""
        columns = dict(old=None if old is None else old[0], entropy=None if old is None else old[1])
        batch = Batch(part, self.objective.limit, **columns, now=None if now is None else now[0])
        return self.objective.plan(batch)

    def loss(self, batch: list[Trajectory], plan: Plan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns (loss, extras) of a micro-batch, whose N action tokens have a row each in `plan`.

        extras["gap"] (N,): the distance of pi_old's log-probs to the engine's.
        """
        packed = self.pack(batch)
        arrays = {
            name: torch.from_numpy(x).to(self.device) if isinstance(x, np.ndarray) else x
            for name, x in vars(plan).items()
        }
        pi_old = arrays.pop("pi_old")
        sampled = torch.tensor(
            [lp for tau in batch for lp, m in zip(tau.logps, tau.mask, strict=True) if m], device=self.device
        )  # (N,)
        ref_logp = None  # the head averages the k3 estimate of the KL as it does the surrogate
        if self.reference is not None:  # CHOICE-23
            with torch.no_grad(), lora.off(self.reference):
                ref_logp, _ = score(self.reference, *packed, self.cfg.temperature)
        loss, extras = score(
            self.model, *packed, self.cfg.temperature, ref_logp=ref_logp, beta=self.cfg.beta, **arrays
        )  # Eq.2
        gap = (extras["logp"] if pi_old is None else pi_old.to(extras["logp"].dtype)) - sampled
        return loss, extras | {"gap": gap.abs()}

    @torch.no_grad()
    def scores(self, batch: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probs and entropies (N,) of the batch's action tokens under the present policy."""
        logp, entropy = score(self.model, *self.pack(batch), self.cfg.temperature)
        return logp, entropy

    def logprobs(self, batch: list[Trajectory]) -> torch.Tensor:
        """Returns the log-probs (N,) of the batch's action tokens under the present policy."""
        return self.scores(batch)[0]

    def pack(self, batch: list[Trajectory]) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
        """Returns ids (T,), one trajectory after another, their lengths, and for the N action tokens the positions
        that predict them (N,) and their ids (N,)."""
        ids = torch.tensor([i for tau in batch for i in tau.ids] or [0], device=self.device)
        mask = torch.tensor([m for tau in batch for m in [*tau.mask[1:], 0]] or [0], device=self.device)
        rows = mask.nonzero()[:, 0]
        return ids, [len(tau.ids) for tau in batch] or [1], rows, ids[rows + 1]

    def state_dict(self) -> dict[str, Any]:
        """Returns trained weights and optimizer by the parameters' names, for torch.distributed.checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if self.cfg.lora_rank:
            model = {name: p for name, p in model.items() if lora.is_adapter(name)}
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=not self.cfg.lora_rank),  # frozen weights are not in it
        )  # fmt: skip
