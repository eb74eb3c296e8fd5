"""One rank's share of a run: its rollouts, its micro-batches, its part of policy, optimizer and reference."""

import copy
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from config import Config
from engines.torch_engine import TorchEngine
from grpo import Learner
from rollout import STOP, EngineFault, Search, Trajectory, rollout
from training.model import empty, export, fill, load_config, load_model, load_tokenizer, shard, skeleton, weights
from training.ranks import Ranks

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a checkpoint by one process is what is meant
MAX_LOGP_GAP = {"cpu": 1e-3, "cuda": 0.1}  # mean nat a token between engine and trainer: fp32, bf16


def choose_engine(cfg: Config, device: str) -> tuple[str, str]:
    """("vllm" or "torch", why)."""
    if cfg.engine == "torch":
        return "torch", "as asked"
    if cfg.engine == "auto" and device == "cpu":
        return "torch", "no GPU"
    from engines.vllm_engine import check_vllm, vllm_installed

    if cfg.engine == "auto" and not vllm_installed():
        return "torch", "vllm is not installed"
    check_vllm()
    return "vllm", "as asked" if cfg.engine == "vllm" else "a GPU, and vllm is installed"


class Worker:
    """What `Team.ask` calls, on every rank at the same time and with the same arguments."""

    def __init__(self, cfg: Config, ranks: Ranks, engine: str):
        self.cfg, self.ranks = cfg, ranks
        self.config, self.tokenizer = load_config(cfg.model), load_tokenizer(cfg.model)
        source = load_model(cfg.model) if ranks.rank == 0 else None
        compute = torch.bfloat16 if ranks.device == "cuda" else torch.float32
        if ranks.grouped:
            model = fill(shard(skeleton(self.config), ranks.device, compute=compute), source)
        else:
            model = source
        reference = None
        if cfg.beta and ranks.grouped:
            shares = shard(skeleton(self.config, compute), ranks.device, frozen=True, offload=cfg.offload_reference)
            reference = fill(shares, source)
        elif cfg.beta:
            reference = copy.deepcopy(source)
        self.fresh = self.shared = False  # whether the engine has the policy as it is; whether it is the same model
        if engine == "vllm":
            self.engine = self.vllm(str(compute).removeprefix("torch."))
        elif ranks.grouped:
            whole = fill(empty(self.config, compute, ranks.device), source)
            self.engine = TorchEngine(whole, self.tokenizer, STOP, cfg.max_rows)
        else:
            self.fresh = self.shared = True
            self.engine = TorchEngine(model, self.tokenizer, STOP, cfg.max_rows)
        if cfg.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.learner = Learner(
            model, reference, lr=cfg.lr, T=cfg.T, warmup=cfg.warmup, eps=cfg.eps, beta=cfg.beta,
            temperature=cfg.temperature, loss_agg=cfg.loss_agg, micro_tokens=cfg.micro_tokens, tis=cfg.tis,
            max_gap=MAX_LOGP_GAP[ranks.device],
        )  # fmt: skip
        self.search: Search | None = None  # rank 0 is given one that restarts its server

    def vllm(self, dtype: str):
        cfg, max_len = self.cfg, self.cfg.max_prompt + self.cfg.max_response
        if cfg.vllm != "colocate":
            from engines.vllm_server import VllmServer

            return VllmServer(cfg.vllm, self.tokenizer, STOP, model=cfg.model, max_len=max_len)
        from engines.vllm_engine import VllmEngine

        return VllmEngine(
            cfg.model, self.tokenizer, STOP, max_len=max_len, dtype=dtype, memory=cfg.vllm_memory,
            seed=cfg.seed + self.ranks.rank,
        )  # fmt: skip

    def rollout(self, url: str, jobs: list, temperature: float, seed: int) -> list[tuple[int, Trajectory]]:
        """(place in `jobs`, trajectory) of this rank's share: whole groups, whose prompts are computed once."""
        cfg, rank = self.cfg, self.ranks.rank
        if not self.fresh:
            self.engine.load(weights(self.learner.model))
            self.fresh = True
        if self.search is None or (rank and sorted(self.search.urls) != sorted(url.split(","))):  # in any order
            self.search = Search(url, cfg.topk, retries=cfg.search_retries)
        number = {group: k for k, group in enumerate(dict.fromkeys(job[3] for job in jobs))}
        mine = [k for k, job in enumerate(jobs) if number[job[3]] % self.ranks.size == rank]
        taus = rollout(
            self.engine, self.tokenizer, self.search, [jobs[k] for k in mine], max_turns=cfg.max_turns,
            max_response=cfg.max_response, max_observation=cfg.max_observation, max_prompt=cfg.max_prompt,
            temperature=temperature, seed=seed + rank,
        )  # fmt: skip
        return list(zip(mine, taus, strict=True))

    def update(self, t: int, minibatches: list[list[Trajectory]], A: list[float]) -> dict[str, float]:
        """`Learner.update`; A in the order of the trajectories."""
        self.engine.sleep()
        self.fresh = self.shared
        taus = (tau for part in minibatches for tau in part)
        try:
            return self.learner.update(t, minibatches, {id(tau): a for tau, a in zip(taus, A, strict=True)})
        except EngineFault as e:
            raise EngineFault(f"{e} ({self.engine.unproven} of its weights were sent without proof)") from None

    def faults(self) -> int:
        return self.search.faults if self.search else 0

    def save(self, path: Path) -> None:
        """Weights and optimizer, every rank its shares; any number of ranks can load them."""
        dcp.save(self.learner.state_dict(), checkpoint_id=path, no_dist=not self.ranks.grouped)

    def load(self, path: Path) -> None:
        state = self.learner.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=not self.ranks.grouped)
        self.learner.load_state_dict(state)
        self.fresh = self.shared

    def export(self, path: Path) -> None:
        """A plain Hugging Face directory, written by rank 0."""
        own = path if self.ranks.rank == 0 else None
        export(self.config, weights(self.learner.model), self.tokenizer, own)

    def back_to_first_policy(self) -> None:
        """The policy is what it was before training; its optimizer is of no use any more."""
        fill(self.learner.model, load_model(self.cfg.model) if self.ranks.rank == 0 else None)
        self.fresh = self.shared

    def close(self) -> None:
        self.engine.close()
