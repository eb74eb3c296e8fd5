"""One rank's part of a run: its rollouts, its micro-batches, its shares of policy, optimizer and reference."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError

import stop
from config import Config
from engines import Engine
from engines.torch_engine import TorchEngine
from faults import CheckpointFault, DiskFault, EngineFault, ToolDown
from grpo import Learner, minibatches
from rollout import Job, Trajectory, play, rollout
from tools import Search, Tool, make_tools, stop_strings
from training import checkpoint, lora
from training.layers import fuse
from training.model import empty, export, fill, load_config, load_model, load_tokenizer, shard, skeleton, weights
from training.ranks import Ranks

S = ParamSpec("S")
R = TypeVar("R")

MAX_LOGP_GAP = {"cpu": 1e-3, "cuda": 0.1}  # mean nat a token between engine and trainer: fp32, bf16
# After these all ranks can still work together.
PASSED_ON = (ToolDown, EngineFault, DiskFault, CheckpointFault, stop.Stopped)


def choose_engine(cfg: Config, device: str) -> tuple[str, str]:
    """Returns ("vllm" or "torch", why)."""
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
    """What `training.policy.Policy` calls, on every rank at the same time and with the same arguments."""

    def __init__(self, cfg: Config, ranks: Ranks, engine: str, tools: Sequence[Tool]):
        self.cfg, self.ranks, self.tools = cfg, ranks, tools
        self.progress: Callable[[int], None] = lambda done: None  # told how many trajectories of a rollout have ended
        stop = stop_strings(tools)
        self.config, self.tokenizer = load_config(cfg.model), load_tokenizer(cfg.model, stop)
        source = self.first_policy()
        compute = torch.bfloat16 if ranks.device == "cuda" else torch.float32
        self.layers = ""  # which layers are fused; nothing to say on a CPU
        if ranks.grouped:
            kept = compute if cfg.lora_rank else torch.float32  # frozen weights take no small steps
            trained = self.fused(self.adapted(skeleton(self.config, kept)))
            model = fill(shard(trained, ranks.device, compute=compute), source)
        else:
            model = source
        reference, apart = None, cfg.beta and not cfg.lora_rank  # with LoRA it is the policy without its adapters
        if apart and ranks.grouped:
            shares = self.fused(skeleton(self.config, compute))
            shares = shard(shares, ranks.device, frozen=True, offload=cfg.offload_reference)
            reference = fill(shares, source)
        elif apart:
            reference = copy.deepcopy(source)
        self.shared = engine == "torch" and not ranks.grouped  # the engine samples from the trainer's own model
        self.synced = self.shared  # the engine has the policy's present weights
        self.engine: Engine
        if engine == "vllm":
            self.engine = self.vllm(stop, str(compute).removeprefix("torch."))
        elif self.shared:
            self.engine = TorchEngine(model, self.tokenizer, stop, cfg.max_rows)
        else:
            whole = fill(empty(self.config, compute, ranks.device), source)
            self.engine = TorchEngine(whole, self.tokenizer, stop, cfg.max_rows)
        if cfg.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        gap = math.inf if cfg.mode == "supervised" else MAX_LOGP_GAP[ranks.device]  # demonstrations have no log-probs
        self.learner = Learner(model, reference, cfg, max_gap=gap)

    def fused(self, model: Any) -> Any:
        """Returns `model`, on a GPU with fused layers: for updates alone, whose batches are one row."""
        if self.ranks.device == "cuda":
            self.layers = fuse(model) if self.cfg.fused_layers else "none (--fused_layers 0)"
        return model

    def vllm(self, stop: tuple[str, ...], dtype: str) -> Engine:
        cfg, max_len = self.cfg, self.cfg.max_prompt + self.cfg.max_response
        if cfg.vllm != "colocate":
            from engines.vllm_server import VllmServer

            return VllmServer(cfg.vllm, self.tokenizer, stop, model=cfg.model, max_len=max_len)
        from engines.vllm_engine import VllmEngine

        return VllmEngine(
            cfg.model, self.tokenizer, stop, max_len=max_len, dtype=dtype, memory=cfg.vllm_memory,
            seed=cfg.seed + self.ranks.rank,
        )  # fmt: skip

    def adapted(self, model: Any) -> Any:
        """Returns the model with the adapters of a run with LoRA; otherwise as it is."""
        return lora.add(model, self.cfg.lora_rank, self.cfg.lora_alpha, self.cfg.seed)

    def first_policy(self) -> Any:
        """Returns the policy from before training on rank 0, whole and on the CPU; None on the other ranks."""
        return self.adapted(load_model(self.cfg.model)) if self.ranks.rank == 0 else None

    def parameters(self, trained: bool = False) -> int:
        """Returns how many parameters the policy has, adapters included; `trained`: how many of them are trained."""
        return sum(p.numel() for p in self.learner.model.parameters() if p.requires_grad or not trained)

    def rollout(
        self, jobs: list[Job], temperature: float, seed: int, whole: frozenset[int] | None
    ) -> list[tuple[int, Trajectory]]:
        """Returns (place in `jobs`, trajectory) of this rank's share: whole groups, which compute their prompt once.

        Ranks take groups as they get free, unless the engine's samples depend on which rows it plays together.
        Other ranks send rank 0 neither tokens nor texts of the groups that are not in `whole` (None: of all groups):
        an evaluation may have thousands of questions.
        """
        rank, size = self.ranks.rank, self.ranks.size
        if not self.synced:
            self.engine.load(weights(self.learner.model))
            self.synced = True
        if self.engine.lockstep or size == 1:
            number = {group: k for k, group in enumerate(dict.fromkeys(job.group for job in jobs))}
            mine = [k for k, job in enumerate(jobs) if number[job.group] % size == rank]
            with stop.may_stop():
                found = rollout(
                    self.engine, self.tokenizer, self.tools, [jobs[k] for k in mine], self.cfg, temperature=temperature,
                    seed=seed + rank, progress=self.progress,
                )  # fmt: skip
            taus = dict(zip(mine, found, strict=True))
        else:
            deal = self.ranks.deal([job.group for job in jobs])
            with stop.may_stop():
                taus = play(
                    self.engine, self.tokenizer, self.tools, jobs, self.cfg, deal, temperature, seed, self.progress
                )
        if size > 1 and whole is not None:
            taus = {k: tau if tau.group in whole else tau.outcome() for k, tau in taus.items()}
        return list(taus.items())

    def update(self, t: int, taus: list[Trajectory]) -> tuple[dict[str, float], dict[int, dict[str, list[float]]]]:
        """Calls `Learner.update` with the engine asleep; returns its metrics, and by place in `taus` the tokens that
        this rank has noted."""
        self.engine.sleep()
        self.synced = self.shared
        try:
            metrics = self.learner.update(t, minibatches(taus, self.cfg))
            return metrics, {k: tau.tokens for k, tau in enumerate(taus) if tau.tokens}
        except EngineFault as e:
            raise EngineFault(f"{e} ({self.engine.unproven} of its weights were sent without proof)") from None

    def faults(self) -> int:
        return sum(tool.faults for tool in self.tools)

    def save(self, path: Path) -> dict[str, str]:
        """Writes trained weights and optimizer, every rank its shares; any number of ranks can load them.

        Returns the digests of the files of this rank.
        """
        return checkpoint.save(self.learner.state_dict(), path, self.ranks.rank, alone=not self.ranks.grouped)

    def damage(self, path: Path) -> list[str]:
        """Returns what is wrong with this rank's share of a checkpoint's files."""
        return checkpoint.damage(path, self.ranks.rank, self.ranks.size)

    def load(self, path: Path) -> None:
        state = self.learner.state_dict()
        checkpoint.load(state, path, alone=not self.ranks.grouped)
        self.learner.load_state_dict(state)
        self.synced = self.shared

    def export(self, path: Path) -> None:
        """Writes a plain Hugging Face directory from rank 0."""
        to = path if self.ranks.rank == 0 else None
        try:
            export(self.config, weights(self.learner.model), self.tokenizer, to)
        except (OSError, SafetensorError) as e:
            raise DiskFault(f"cannot write {path} ({getattr(e, 'strerror', None) or e})") from None

    def reset(self) -> None:
        """Restores the weights from before training; the optimizer keeps its moments."""
        fill(self.learner.model, self.first_policy())
        self.synced = self.shared

    def close(self) -> None:
        self.engine.close()


def worker_loop(cfg: Config, ranks: Ranks) -> None:
    """Serves a rank other than 0: makes its worker when rank 0 makes its own, then runs the calls it hears."""
    if not (start := ranks.broadcast()):
        return
    engine, url = start
    worker = Worker(cfg, ranks, engine, make_tools(cfg, Search(url, cfg.topk, retries=cfg.search_retries)))
    with stop.hold():
        while call := ranks.broadcast():
            method, args, kwargs = call
            ranks.gather(attempt(method, worker, *args, **kwargs))
    worker.close()
    del worker
    ranks.leave()


def attempt(
    method: Callable[Concatenate[Worker, S], R], worker: Worker, *args: S.args, **kwargs: S.kwargs
) -> R | BaseException:
    """Returns method(worker, ...), or the fault that it raised where all ranks can continue after it."""
    try:
        return method(worker, *args, **kwargs)
    except PASSED_ON as e:
        return e
