"""One rank's part of a run: its rollouts, its micro-batches, its shares of policy, optimizer and reference."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed.checkpoint as dcp

from config import Config
from engines import Engine
from engines.torch_engine import TorchEngine
from faults import EngineFault, ToolDown
from grpo import Learner, minibatches
from rollout import Job, Trajectory, rollout
from tools import Search, Tool, make_tools, stop_strings
from training.model import empty, export, fill, load_config, load_model, load_tokenizer, shard, skeleton, weights
from training.ranks import Ranks

S = ParamSpec("S")
R = TypeVar("R")

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process saves checkpoints without a group
MAX_LOGP_GAP = {"cpu": 1e-3, "cuda": 0.1}  # mean nat a token between engine and trainer: fp32, bf16
PASSED_ON = (ToolDown, EngineFault)  # faults after which all ranks can still work together


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
        stop = stop_strings(tools)
        self.config, self.tokenizer = load_config(cfg.model), load_tokenizer(cfg.model, stop)
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
        self.learner = Learner(model, reference, cfg, max_gap=MAX_LOGP_GAP[ranks.device])

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

    def parameters(self) -> int:
        """Returns how many parameters the policy has."""
        return sum(p.numel() for p in self.learner.model.parameters())

    def rollout(self, jobs: list[Job], temperature: float, seed: int) -> list[tuple[int, Trajectory]]:
        """Returns (place in `jobs`, trajectory) of this rank's share: whole groups, which compute their prompt once."""
        rank, size = self.ranks.rank, self.ranks.size
        if not self.synced:
            self.engine.load(weights(self.learner.model))
            self.synced = True
        number = {group: k for k, group in enumerate(dict.fromkeys(job.group for job in jobs))}
        mine = [k for k, job in enumerate(jobs) if number[job.group] % size == rank]
        taus = rollout(
            self.engine, self.tokenizer, self.tools, [jobs[k] for k in mine], self.cfg, temperature=temperature,
            seed=seed + rank,
        )  # fmt: skip
        return list(zip(mine, taus, strict=True))

    def update(self, t: int, taus: list[Trajectory]) -> dict[str, float]:
        """`Learner.update`, with the engine asleep."""
        self.engine.sleep()
        self.synced = self.shared
        try:
            return self.learner.update(t, minibatches(taus, self.cfg))
        except EngineFault as e:
            raise EngineFault(f"{e} ({self.engine.unproven} of its weights were sent without proof)") from None

    def faults(self) -> int:
        return sum(tool.faults for tool in self.tools)

    def save(self, path: Path) -> None:
        """Writes weights and optimizer, every rank its shares; any number of ranks can load them."""
        dcp.save(self.learner.state_dict(), checkpoint_id=path, no_dist=not self.ranks.grouped)

    def load(self, path: Path) -> None:
        state = self.learner.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=not self.ranks.grouped)
        self.learner.load_state_dict(state)
        self.synced = self.shared

    def export(self, path: Path) -> None:
        """Writes a plain Hugging Face directory from rank 0."""
        to = path if self.ranks.rank == 0 else None
        export(self.config, weights(self.learner.model), self.tokenizer, to)

    def reset(self) -> None:
        """Restores the weights from before training; the optimizer keeps its moments."""
        fill(self.learner.model, load_model(self.cfg.model) if self.ranks.rank == 0 else None)
        self.synced = self.shared

    def close(self) -> None:
        self.engine.close()


def worker_loop(cfg: Config, ranks: Ranks) -> None:
    """Serves a rank other than 0: makes its worker when rank 0 makes its own, then runs the calls it hears."""
    if not (start := ranks.broadcast()):
        return
    engine, url = start
    worker = Worker(cfg, ranks, engine, make_tools(cfg, Search(url, cfg.topk, retries=cfg.search_retries)))
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
