"""pi_theta on all ranks: rank 0 runs Algorithm 1, and every rank runs what it calls that is marked
`@on_all_ranks`."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from config import Config
from engines import Engine
from engines.choose import choose_engine, device_of, dtype_of
from engines.torch_engine import TorchEngine
from grpo import MAX_SKIPPED, Learner, minibatches
from models.model import empty, export, fill, load_config, load_model, load_tokenizer, weights
from plumbing import stop
from plumbing.faults import CheckpointFault, DiskFault, Diverged, Fault, first_line
from plumbing.files import Row
from population import Instruction
from rollout import rollout
from tasks import Job, Task, Trajectory
from tasks.task import STORED, import_named, rng_of, set_rewards, space_evenly, take_subset
from training.ranks import Ranks

S = ParamSpec("S")
A = TypeVar("A")
R = TypeVar("R")

CPU_TOKENS = 1024  # of a micro-batch on a CPU, unless --micro_tokens says otherwise
FILES = 7  # of a rank's share in a checkpoint: safetensors makes a file's bytes in memory
# what a row of its training holds, of a model that has more than attention
ROWS = {
    "shared": "",
    "whole": "; prompts are not shared: it has layers that are no attention",
    "single": "; one trajectory a row: its layers cannot be told where a sequence begins",
}
# one process saves checkpoints without a group
warnings.filterwarnings("ignore", "torch.distributed is disabled")
# what saves GPU memory
SMALLER = "--recompute 1, --gather 0, a smaller --micro_tokens or --vllm_memory, or more GPUs"


def on_all_ranks(
    merge: Callable[[list[A]], R],
) -> Callable[[Callable[Concatenate[Policy, S], A]], Callable[Concatenate[Policy, S], R]]:
    """Marks a method, or a module's function of a Policy, that every rank runs when rank 0 calls
    it.

    All have the same arguments. Rank 0 gets what `merge` makes of the answers, which stand in the
    order of the ranks. A fault on any rank is raised on rank 0 once all have finished; a GPU whose
    memory is too small ends the run with a line that says what helps.
    """

    def mark(method: Callable[Concatenate[Policy, S], A]) -> Callable[Concatenate[Policy, S], R]:
        @functools.wraps(method)
        def run(self: Policy, /, *args: S.args, **kwargs: S.kwargs) -> R:
            began = time.perf_counter()
            # False while several ranks are in this call: one may hang, and `close` must not wait for it
            self.ranks_ready = self.ranks.size == 1
            # the others come here by `follow`, which unpickles this wrapper by its name
            if self.ranks.rank == 0:
                self.ranks.broadcast((run, args, kwargs))
            answer: A | BaseException
            try:
                answer = method(self, *args, **kwargs)
            except torch.OutOfMemoryError as e:
                # the other ranks may be inside a collective: nobody waits for them
                reason = str(e).partition(". ")[0]
                raise Fault(
                    f"\n{method.__name__}: {reason}; resume with {SMALLER} (docs/gpus.md)"
                ) from None
            except (Fault, stop.Stopped) as e:  # after it all ranks can still work together
                answer = e
            answers = self.ranks.gather(answer)  # [answer] of a single rank; [] on ranks but 0
            self.ranks_ready = True
            self.seconds[method.__name__] = time.perf_counter() - began
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            return merge(answers) if answers else None  # type: ignore[return-value]

        return run

    return mark


def of_rank_0(answers: list[A]) -> A:
    return answers[0]


def in_order(shares: list[dict[int, A]]) -> list[A]:
    """Returns the values of all ranks in the order of their keys: 0, 1, ..., of which each rank has
    some."""
    values = {k: x for share in shares for k, x in share.items()}
    return [values[k] for k in range(len(values))]


def load_tensors(state: dict[str, torch.Tensor], path: Path, alone: bool) -> None:
    """Fills tensors by their names from the files of a checkpoint; raises CheckpointFault."""
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    except (Exception, CheckpointException) as e:  # torch's is no Exception
        raise CheckpointFault(f"{path} cannot be loaded ({reason(e)})") from None


def reason(e: BaseException) -> str:
    """Returns an exception in a few words: of a CheckpointException, the first failure's."""
    if isinstance(e, CheckpointException):
        e = next(iter(e.failures.values()))[0]
    if isinstance(e, OSError) and e.strerror:
        return e.strerror
    return f"{type(e).__name__}: {first_line(e)}"[:200]


def load_first_policy(cfg: Config, ranks: Ranks) -> Any:
    """Returns the policy before training, whole and on the CPU, on rank 0; None on the others."""
    if ranks.rank:
        return None
    model = load_model(cfg.model, cfg.longest)
    if cfg.lora_rank:
        from models import lora

        lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed, cfg.dither)
    return model


def make_engine(policy: Policy, first: Any) -> Engine:
    """Returns the engine that the configuration names. Torch's samples from the model in training,
    or from a whole copy of it on every rank: FSDP cuts the model that it trains, and a model with
    LoRA would merge its weights for every token."""
    cfg, ranks, model = policy.cfg, policy.ranks, policy.learner.model
    if cfg.engine == "vllm":
        from engines.vllm_engine import VllmEngine  # here: most runs have another

        return VllmEngine(
            cfg.model,
            policy.tokenizer,
            policy.stop_strings,
            max_len=cfg.longest,
            dtype=ranks.dtype,
            memory=cfg.vllm_memory,
            rows=math.ceil(max(cfg.batch * cfg.G, cfg.eval_n) / ranks.size),
        )
    if cfg.engine != "torch":
        kind = import_named(f"--engine {cfg.engine}", cfg.engine, "class")
        engine: Engine = kind(cfg, policy.tokenizer, policy.stop_strings)
        return engine
    if ranks.grouped or cfg.lora_rank:
        whole = empty(load_config(cfg.model), getattr(torch, ranks.dtype), ranks.device)
        model = fill(whole, first)
    return TorchEngine(model, policy.tokenizer, policy.stop_strings)


def choose_for_machine(cfg: Config, task: Task) -> tuple[Config, Config, Ranks]:
    """Joins the ranks; returns the configuration to record, with its precision, the same with what
    this machine decides, and the ranks. Raises Fault where the flags ask for what is not there, or
    the first instruction leaves no room for a turn."""
    if torch.get_num_threads() != cfg.threads:  # it was imported before the run was configured
        torch.set_num_threads(cfg.threads)
    device, fitted = device_of(cfg), cfg
    if stop.leads():
        # a resumed run and an export take the run's precision, on any machine
        cfg = replace(cfg, dtype=dtype_of(cfg, device))
        on_cpu = device == "cpu"
        fitted = replace(
            cfg,
            engine=choose_engine(cfg, device),
            recompute=cfg.recompute if cfg.recompute >= 0 else int(not on_cpu),
        )
        if on_cpu and cfg.micro_tokens == Config.micro_tokens:
            fitted = replace(fitted, micro_tokens=CPU_TOKENS)
        load_config(cfg.model, cfg.longest)
        tokenizer = load_tokenizer(cfg.model)
        form = task.make_format(tokenizer)
        for tag in form.stop_strings():
            if tag not in tokenizer.decode(tokenizer(tag)["input_ids"]):
                raise Fault(
                    f"--model {cfg.model}: its tokenizer cannot write {tag}: choose another"
                )
        questions = task.questions("train")[:64]
        shortest = min(len(form.encode_prompt(task.instruction, q)) for q in questions)
        if shortest > cfg.max_prompt:
            raise Fault(
                f"--max_prompt {cfg.max_prompt}: the first instruction and a question are {shortest} tokens at least,"
                " so no turn could start; raise it"
            )
    return cfg, fitted, Ranks(device, cfg.patience, cfg.dtype)


class Policy:
    """pi_theta: what Algorithm 1 does with it, and what a run needs besides. All ranks make one
    together.

    The learner trains its weights, and the engine samples with them: from the learner's own model,
    or from a copy that is brought up to date before it samples.
    """

    def __init__(self, cfg: Config, ranks: Ranks, task: Task, learner: type[Learner] | None = None):
        learner = learner or Learner
        self.cfg, self.ranks, self.task = cfg, ranks, task
        self.stop_strings = task.make_format().stop_strings()
        self.tokenizer = load_tokenizer(cfg.model)
        first = load_first_policy(cfg, ranks)
        model, reference = first, None
        if ranks.grouped:
            from training.shards import shard_models

            model, reference = shard_models(first, cfg, ranks)
        elif cfg.beta and not cfg.lora_rank:
            reference = copy.deepcopy(first)
        if cfg.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.learner = learner(model, reference, cfg, max_gap=learner.MAX_GAP[ranks.dtype])
        if first and first is not model:
            # a cycle: after vLLM's gc.freeze() the policy would stay for ever
            vars(first).pop("forward_packed", None)
        self.engine = make_engine(self, first)
        self.t = 0  # the last step whose update has begun; -1: the weights are those of no step
        self.seconds: dict[str, float] = {}  # of each method's last call, and "tools"
        self.ranks_ready = True  # whether all ranks wait in `follow` for the next call
        # called with purpose, ended and all trajectories of a rollout under way
        self.progress: Callable[[str, int, int], None] = lambda purpose, done, total: None
        self.written: Future[Any] = Future()  # the last checkpoint
        self.written.set_result(None)
        self.same_model = getattr(self.engine, "model", None) is model
        self.synced = self.same_model  # the engine has the policy's present weights
        self.sync()

    @on_all_ranks(in_order)
    def rollout(
        self, t: int, purpose: str, jobs: Sequence[Job], temperature: float | None = None
    ) -> dict[int, Trajectory]:
        """Plays this rank's share of the jobs; on rank 0 returns all trajectories, in the jobs' order.
        `purpose` tells the random draws of one step apart. Trajectories of an "evaluate" come back
        without tokens, except for a sample.

        A rank plays whole groups, which compute their prompt once.
        """
        self.sync()
        cfg, rank, size = self.cfg, self.ranks.rank, self.ranks.size
        temperature = cfg.temperature if temperature is None else temperature
        seed = int(rng_of(cfg.seed, t, purpose).integers(2**31))

        def show(done: int) -> None:
            # rank 0 shows its own count times the ranks, as if all were equally fast
            self.progress(purpose, min(done * size, len(jobs)), len(jobs))

        # the jobs of every size-th group
        groups = list(dict.fromkeys(job.group for job in jobs))
        own = set(groups[rank::size])
        mine = [k for k, job in enumerate(jobs) if job.group in own]
        waited = self.task.waited
        with stop.may_stop():
            played = rollout(
                self.engine,
                self.tokenizer,
                self.task,
                [jobs[k] for k in mine],
                cfg,
                temperature=temperature,
                seed=seed + rank,
                progress=show,
            )
        self.seconds["tools"] = self.task.waited - waited

        # an evaluation has thousands of trajectories, of which a sample is stored
        taus = dict(zip(mine, played, strict=True))
        if purpose == "evaluate":
            stored = space_evenly(len(jobs), STORED)
            for k, tau in taus.items():
                if k not in stored:
                    taus[k] = tau.drop_tokens()
        return taus

    def evaluate(self, t: int, I: Instruction, split: str) -> list[Trajectory]:
        """Plays and rewards the questions of "valid" or "test", --eval_n of them, greedily under an
        instruction."""
        questions = take_subset(self.task.questions(split), self.cfg.eval_n)  # CHOICE-11
        jobs = [Job(I.id, I.text, q, k) for k, q in enumerate(questions)]
        taus = self.rollout(t, "evaluate", jobs, temperature=0.0)
        set_rewards(self.task, taus)
        return taus

    @on_all_ranks(of_rank_0)
    def update(self, t: int, taus: Sequence[Trajectory]) -> Row:
        """Takes step t of GRPO on trajectories with their advantages (Eq. 2); returns the metrics of the
        whole batch.

        Raises Diverged when MAX_SKIPPED optimizer steps in a row had no finite gradient.
        """
        self.t = t
        self.sleep()
        metrics = self.learner.update(t, minibatches(list(taus), self.cfg))
        skipped = self.learner.remembered.get("skipped", 0)
        if skipped >= MAX_SKIPPED:
            raise Diverged(
                f"\nstep {t}: loss or gradient were not finite in {skipped} optimizer steps in a row, all of them"
                " skipped; start a new run with a lower --lr, or look at the rewards of this one (trajectories/)"
            )
        return metrics

    def measure_speed(self, taus: Sequence[Trajectory]) -> Row:
        """Returns columns about the speed of the step that was taken with these trajectories.

        Tokens are those that all ranks sampled per second of the rollouts, and those that they
        trained on (prompts and observations too) per second of the update; tools: seconds of the
        rollouts in which all of rank 0's trajectories waited for one. GB (1e9 bytes) are the most
        that rank 0 has taken so far: of its GPU, less what vLLM gives back asleep, or without one
        of its process. Columns of time/ are what a resumed run does not repeat.
        """
        rollout = self.seconds["rollout"]
        update = self.seconds["update"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS has bytes, Linux KiB
        peak *= 1 if sys.platform == "darwin" else 1024
        if self.ranks.device == "cuda":
            peak = torch.cuda.max_memory_allocated() - getattr(self.engine, "asleep", 0)
        return {
            "time/rollout": rollout,
            "time/tools": self.seconds["tools"],
            "time/update": update,
            "time/sampled_per_s": sum(sum(tau.mask) for tau in taus) / rollout,
            "time/trained_per_s": sum(len(tau.ids) for tau in taus) / update,
            "time/peak_gb": peak / 1e9,
        }

    def sync(self) -> None:
        """Gives the engine the policy's present weights, unless it has them."""
        if not self.synced:
            self.engine.load(weights(self.learner.model))
            self.synced = True

    def sleep(self) -> None:
        """Makes room for training: the engine's weights and cache wait until the next rollout."""
        if not self.synced:
            return  # it sleeps already
        self.synced = self.same_model  # the update outdates a copy, never the learner's own model
        self.engine.sleep()

    @on_all_ranks(of_rank_0)
    def save(self, path: Path) -> None:
        """Begins to write weights and optimizer, as they are now, into a directory, for any number
        of ranks to load; `written` ends once those of all ranks are.

        A thread writes a copy in the CPU's memory; where that has no room, training waits until all
        is written.
        """
        with contextlib.suppress(Exception):  # an engine that died does not cost the checkpoint
            self.sleep()  # a state dict takes its room

        # does this machine's share fit: weights and AdamW's two moments, in float32, and a file?
        trained = sum(p.numel() for p in self.learner.model.parameters() if p.requires_grad)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / self.ranks.size
        room = 0.8 * psutil.virtual_memory().available
        copied = self.ranks.broadcast(12 * trained * (1 + 1 / FILES) * here < room)

        state = self.learner.state_dict()
        files = {name: k % FILES + 1 for k, name in enumerate(state)}
        writer = HuggingFaceStorageWriter(str(path), files, save_distributed=True)
        writer.per_thread_copy_ahead = 0  # else its thread would take memory of the first GPU
        # a group of its own: the default one's collectives are those of training
        group = dict(process_group=self.ranks.saves, no_dist=not self.ranks.grouped)
        if copied:
            self.written = dcp.async_save(state, storage_writer=writer, **group)
            return
        self.written = Future()
        try:
            self.written.set_result(dcp.save(state, storage_writer=writer, **group))
        except CheckpointException as e:
            self.written.set_exception(e)

    @on_all_ranks(of_rank_0)
    def load(self, path: Path, t: int) -> None:
        """Restores what `save` wrote after step t. vLLM sleeps meanwhile: the optimizer's state
        takes its room."""
        self.sleep()
        load_tensors(self.learner.state_dict(), path, alone=not self.ranks.grouped)
        self.t = t

    @on_all_ranks(of_rank_0)
    def export(self, path: Path) -> None:
        """Writes a plain Hugging Face directory from rank 0."""
        config, to = load_config(self.cfg.model), path if self.ranks.rank == 0 else None
        try:
            export(config, self.learner.model, self.tokenizer, to, getattr(torch, self.ranks.dtype))
        except (OSError, SafetensorError) as e:
            raise DiskFault(f"cannot write {path} ({getattr(e, 'strerror', None) or e})") from None

    @on_all_ranks(of_rank_0)
    def reset(self) -> None:
        """Restores the first policy, for evaluation alone: the optimizer keeps its moments."""
        self.t = -1
        # what is computed is the same without dither
        fill(self.learner.model, load_first_policy(self.cfg, self.ranks))
        self.synced = self.same_model

    def describe(self) -> str:
        """Returns in words what is trained, and on what."""
        model, ranks = self.learner.model, self.ranks
        size = f"{model.num_parameters() / 1e6:,.2f}M parameters, {torch.get_num_threads()} threads"
        on = f"{ranks.size} x {ranks.device}, {ranks.dtype}, {self.cfg.engine} engine"
        return f"{size}, {on}{ROWS[model.row_kind]}"

    def close(self) -> None:
        """Ends all ranks, unless one is inside a collective: then torchrun ends them. A checkpoint that
        is being written is waited for."""
        wait([self.written])
        if self.ranks_ready:
            if self.ranks.rank == 0:
                self.ranks.broadcast(None)
            self.engine.close()
            del self.engine, self.learner
            self.ranks.leave()


def follow(ranks: Ranks, task: Task, learner: type[Learner] | None = None) -> None:
    """Does on another rank what rank 0 calls, until rank 0 closes its policy."""
    cfg, address = ranks.broadcast()
    task.connect(address)
    policy = Policy(cfg, ranks, task, learner)
    try:
        call = ranks.broadcast()
        while call:
            method, args, kwargs = call
            method(policy, *args, **kwargs)
            call = ranks.broadcast()
    finally:
        wait([policy.written])  # a fault costs no checkpoint that is being written
    policy.close()
