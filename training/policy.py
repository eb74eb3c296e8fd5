"""The policy in training, on all ranks: rank 0 calls a method of `Policy`, and every rank's `Worker` does its part."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError

from config import Config
from engines import Engine
from engines.torch_engine import TorchEngine
from grpo import MAX_SKIPPED, Learner, minibatches
from models import lora
from models.flash import choose
from models.layers import fuse
from models.model import dither, empty, export, fill, load_config, load_model, load_tokenizer, shard, skeleton, weights
from plumbing import stop
from plumbing.faults import CheckpointFault, DiskFault, EngineFault, Fault, Outage
from rollout import play, rollout, spread
from tasks import Job, Task, Trajectory, load_task, rng_of
from training import checkpoint
from training.ranks import Ranks

S = ParamSpec("S")
R = TypeVar("R")

# After these all ranks can still work together.
PASSED_ON = (Outage, CheckpointFault, stop.Stopped)

UPDATE = "--recompute 1, a smaller --micro_tokens, --offload_reference or more GPUs"  # what saves memory in it
ROLLOUT = "a smaller --vllm_memory, or --max_rows of the torch engine"


class Policy:
    """pi_theta: what Algorithm 1 does with it, and what a run needs besides. Made on rank 0 alone."""

    def __init__(self, cfg: Config, ranks: Ranks, engine: str, task: Task, learner: type[Learner] = Learner):
        self.cfg, self.ranks = cfg, ranks
        self.t = 0  # the last step whose update has begun
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by what they were spent on
        self.in_step = True  # whether all ranks wait for the next call
        self.progress: Callable[[str, int, int], None] = lambda purpose, done, total: None  # told of rollouts under way
        if ranks.size > 1:
            ranks.broadcast((cfg, engine, task.address()))
        self.worker = Worker(cfg, ranks, engine, task, learner)

    @property
    def learner(self) -> Learner:
        """Rank 0's, which knows the rule of the update (Eq. 2 and 3)."""
        return self.worker.learner

    def rollout(self, t: int, purpose: str, jobs: Sequence[Job], temperature: float | None = None) -> list[Trajectory]:
        """Returns a trajectory for each job, in their order; `purpose` tells the random draws of one step apart."""
        began = time.perf_counter()
        seed = int(rng_of(self.cfg.seed, t, purpose).integers(2**31))
        temperature = self.cfg.temperature if temperature is None else temperature
        size, total = self.ranks.size, len(jobs)  # this rank speaks for the others
        self.worker.progress = lambda done: self.progress(purpose, min(done * size, total), total)
        whole = None if purpose != "evaluate" else frozenset(spread(len(jobs), 24))
        shares = self.on_all_ranks(Worker.rollout, list(jobs), temperature, seed, whole)
        numbered = sorted((pair for share in shares for pair in share), key=lambda pair: pair[0])
        self.seconds[purpose.split()[0]] += time.perf_counter() - began
        return [tau for _, tau in numbered]

    def update(self, t: int, taus: Sequence[Trajectory]) -> dict[str, float]:
        """Takes step t of GRPO on the rewarded trajectories (Eq. 2); returns the metrics of the whole batch.

        `tokens` of a sample of the trajectories, some 10 in whole groups, then holds what the update saw of them.
        Raises Fault when MAX_SKIPPED optimizer steps in a row had no finite gradient.
        """
        began, self.t = time.perf_counter(), t
        groups = list(dict.fromkeys(tau.group for tau in taus))
        watched = {groups[k] for k in spread(len(groups), math.ceil(10 / self.cfg.G))}
        sent = list(taus)
        for tau in taus:
            tau.watched = tau.group in watched
        if self.ranks.size > 1:  # the other ranks do not need the texts
            sent = [replace(tau, turns=[], response="", state=None) for tau in taus]
        answers = self.on_all_ranks(Worker.update, t, sent)
        for _, noted in answers:
            for k, tokens in noted.items():
                taus[k].tokens = tokens
        self.seconds["update"] += time.perf_counter() - began
        if (n := self.learner.memory.get("skipped", 0)) >= MAX_SKIPPED:
            raise Fault(
                f"\nstep {t}: loss or gradient were not finite in {n} optimizer steps in a row, all of them skipped;"
                " start a new run with a lower --lr, or look at the rewards of this one (trajectories/)"
            )
        return answers[0][0]

    def save(self, path: Path) -> Callable[[], dict[str, str]]:
        """Begins to write weights and optimizer, as they are now, into a directory, for any number of ranks to load.

        Returns what waits until all ranks have written and returns the digests of the files; it raises DiskFault. With
        --async_save 0 call it before anything else: what is written is no copy then.
        """
        self.on_all_ranks(Worker.save, path.absolute())
        return self.worker.written.result

    def damage(self, path: Path) -> list[str]:
        """Returns what is wrong with the files of a checkpoint; [] if they are as they were written."""
        return [fault for share in self.on_all_ranks(Worker.damage, path.absolute()) for fault in share]

    def load(self, path: Path, t: int) -> None:
        """Restores what `save` wrote after step t."""
        self.on_all_ranks(Worker.load, path.absolute())
        self.t = t

    def export(self, path: Path) -> None:
        """Writes a plain Hugging Face directory."""
        self.on_all_ranks(Worker.export, path.absolute())

    def reset(self) -> None:
        """Restores the first policy, for evaluation alone: the optimizer keeps its moments."""
        self.on_all_ranks(Worker.reset)

    def faults(self) -> int:
        """Returns how many requests to tools have failed on all ranks."""
        return sum(self.on_all_ranks(Worker.faults))

    def on_all_ranks(self, method: Callable[Concatenate[Worker, S], R], *args: S.args, **kwargs: S.kwargs) -> list[R]:
        """Returns method(worker, *args) of every rank, by rank; raises a rank's fault once all have finished."""
        if self.ranks.size == 1:
            return [within_memory(method, self.worker, *args, **kwargs)]
        self.in_step = False
        self.ranks.broadcast((method, args, kwargs))
        answers = self.ranks.gather(attempt(method, self.worker, *args, **kwargs))
        self.in_step = True
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        """Ends all ranks, unless one is inside a collective: then torchrun ends them."""
        if self.in_step:
            if self.ranks.size > 1:
                self.ranks.broadcast(None)
            self.worker.close()
            del self.worker
            self.ranks.leave()


class Worker:
    """What `Policy` calls, on every rank at the same time and with the same arguments."""

    def __init__(self, cfg: Config, ranks: Ranks, engine: str, task: Task, learner: type[Learner] = Learner):
        self.cfg, self.ranks, self.task = cfg, ranks, task
        self.progress: Callable[[int], None] = lambda done: None  # told how many trajectories of a rollout have ended
        ends = task.format.stop(task)
        self.config, self.tokenizer = load_config(cfg.model), load_tokenizer(cfg.model, ends)
        source = self.first_policy()
        compute = getattr(torch, ranks.dtype)
        self.layers = ""  # which layers are fused; nothing to say on a CPU
        self.attention = choose(self.config) if ranks.device == "cuda" else ""
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
        # Does the engine sample from the trainer's own model? With LoRA it would merge its weights for every token.
        self.shared = engine == "torch" and not ranks.grouped and not cfg.lora_rank
        self.synced = self.shared  # the engine has the policy's present weights
        self.engine: Engine
        if engine == "vllm":
            self.engine = self.vllm(ends, ranks.dtype)
        elif self.shared:
            self.engine = TorchEngine(model, self.tokenizer, ends, cfg.max_rows)
        else:
            whole = fill(empty(self.config, compute, ranks.device), source)
            self.engine = TorchEngine(whole, self.tokenizer, ends, cfg.max_rows)
        if cfg.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.learner = learner(model, reference, cfg, max_gap=learner.MAX_GAP[ranks.dtype])
        self.writer = ranks.thread()  # of checkpoints
        self.written: Future[dict[str, str]]  # the last one

    def fused(self, model: Any) -> Any:
        """Returns `model`, on a GPU with fused layers: for updates alone, whose batches are one row."""
        if self.ranks.device == "cuda":
            self.layers = fuse(model) if self.cfg.fused_layers else "none (--fused_layers 0)"
        return model

    def vllm(self, ends: tuple[str, ...], dtype: str) -> Engine:
        cfg, max_len = self.cfg, self.cfg.max_prompt + self.cfg.max_response
        if cfg.vllm != "colocate":
            from engines.vllm_server import VllmServer

            return VllmServer(cfg.vllm, self.tokenizer, ends, model=cfg.model, max_len=max_len)
        from engines.vllm_engine import VllmEngine

        return VllmEngine(
            cfg.model, self.tokenizer, ends, max_len=max_len, dtype=dtype, memory=cfg.vllm_memory,
            seed=cfg.seed + self.ranks.rank,
        )  # fmt: skip

    def adapted(self, model: Any) -> Any:
        """Returns the model with the adapters of a run with LoRA; otherwise as it is."""
        return lora.add(model, self.cfg.lora_rank, self.cfg.lora_alpha, self.cfg.seed)

    def first_policy(self) -> Any:
        """Returns the policy from before training on rank 0, whole and on the CPU; None on the other ranks."""
        if self.ranks.rank:
            return None
        model = load_model(self.cfg.model)
        if self.ranks.dtype == "bfloat16" and not self.cfg.lora_rank:  # frozen weights take no steps
            dither(model, self.cfg.seed)  # CHOICE-33
        return self.adapted(model)

    def parameters(self, trained: bool = False) -> int:
        """Returns how many parameters the policy has, adapters included; `trained`: how many of them are trained."""
        return sum(p.numel() for p in self.learner.model.parameters() if p.requires_grad or not trained)

    def rollout(
        self, jobs: list[Job], temperature: float, seed: int, whole: frozenset[int] | None
    ) -> list[tuple[int, Trajectory]]:
        """Returns (place in `jobs`, trajectory) of this rank's share: whole groups, which compute their prompt once.

        Ranks take groups as they get free, unless the engine's samples depend on which rows it plays together.
        Other ranks send rank 0 no tokens of the groups that are not in `whole` (None: of all groups): an evaluation may
        have thousands of questions.
        """
        rank, size = self.ranks.rank, self.ranks.size
        self.sync()
        if self.engine.lockstep or size == 1:
            number = {group: k for k, group in enumerate(dict.fromkeys(job.group for job in jobs))}
            mine = [k for k, job in enumerate(jobs) if number[job.group] % size == rank]
            with stop.may_stop():
                found = rollout(
                    self.engine, self.tokenizer, self.task, [jobs[k] for k in mine], self.cfg, temperature=temperature,
                    seed=seed + rank, progress=self.progress,
                )  # fmt: skip
            taus = dict(zip(mine, found, strict=True))
        else:
            deal = self.ranks.deal([job.group for job in jobs])
            with stop.may_stop():
                taus = play(
                    self.engine, self.tokenizer, self.task, jobs, self.cfg, deal, temperature, seed, self.progress
                )
        if size > 1 and whole is not None:
            taus = {k: tau if tau.group in whole else tau.outcome() for k, tau in taus.items()}
        return list(taus.items())

    def sync(self) -> None:
        """Gives the engine the policy's present weights, unless it has them."""
        if not self.synced:
            self.engine.load(weights(self.learner.model))
            self.synced = True

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
        return sum(tool.faults for tool in self.task.tools)

    def save(self, path: Path) -> None:
        """Begins to write trained weights and optimizer, every rank its shares; any number of ranks can load them.

        They are copied to the CPU's memory while vLLM sleeps, whose room a state dict takes, and written in a thread.
        """
        if self.synced and self.cfg.vllm == "colocate":
            with contextlib.suppress(Exception):  # an engine that died does not cost the checkpoint
                self.engine.sleep()
            self.synced = self.shared
        state = self.learner.state_dict()
        state = checkpoint.stage(state) if self.cfg.async_save else state
        self.written = self.writer.submit(write, state, path, self.ranks)

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
            export(self.config, self.learner.model, self.tokenizer, to, getattr(torch, self.ranks.dtype))
        except (OSError, SafetensorError) as e:
            raise DiskFault(f"cannot write {path} ({getattr(e, 'strerror', None) or e})") from None

    def reset(self) -> None:
        """Restores the weights from before training; the optimizer keeps its moments."""
        fill(self.learner.model, self.first_policy())
        self.synced = self.shared

    def close(self) -> None:
        self.writer.shutdown()
        self.engine.close()


def write(state: dict[str, Any], path: Path, ranks: Ranks) -> dict[str, str]:
    """Writes the ranks' shares of their states, in a thread of each; returns the digests of all files on rank 0.

    Raises there what was raised on any rank.
    """
    answer: dict[str, str] | Exception
    try:
        answer = checkpoint.save(state, path, ranks.rank, alone=not ranks.grouped, group=ranks.saves)
    except Exception as e:  # rank 0 waits for an answer
        answer = e
    digests: dict[str, str] = {}
    for share in ranks.gather(answer, ranks.saves) if ranks.size > 1 else [answer]:
        if isinstance(share, Exception):
            raise share
        digests |= share
    return digests


def worker_loop(cfg: Config, ranks: Ranks, learner: type[Learner] = Learner) -> None:
    """Serves a rank other than 0: makes its worker when rank 0 makes its own, then runs the calls it hears."""
    if not (start := ranks.broadcast()):
        return
    cfg, engine, address = start  # rank 0 has decided what fits
    task = load_task(cfg)
    task.connect(address)
    with stop.may_stop():
        worker = Worker(cfg, ranks, engine, task, learner)
    try:
        while call := ranks.broadcast():
            method, args, kwargs = call
            ranks.gather(attempt(method, worker, *args, **kwargs))
    finally:
        worker.writer.shutdown()  # a fault costs no checkpoint that is being written
    worker.close()
    del worker
    ranks.leave()


def attempt(
    method: Callable[Concatenate[Worker, S], R], worker: Worker, *args: S.args, **kwargs: S.kwargs
) -> R | BaseException:
    """Returns method(worker, ...), or the fault that it raised where all ranks can continue after it."""
    try:
        return within_memory(method, worker, *args, **kwargs)
    except PASSED_ON as e:
        return e


def within_memory(method: Callable[Concatenate[Worker, S], R], worker: Worker, *args: S.args, **kwargs: S.kwargs) -> R:
    """Returns method(worker, ...); a Fault says what helps where a GPU's memory was too small for it."""
    try:
        return method(worker, *args, **kwargs)
    except torch.OutOfMemoryError as e:
        smaller = ROLLOUT if method.__name__ == "rollout" else UPDATE
        reason = str(e).partition(". ")[0]
        raise Fault(f"\n{method.__name__}: {reason}; resume with {smaller}, or look at --dry_run") from None
