"""What plays: a run, a checkpoint, a Hugging Face model or a chat endpoint becomes an agent of its task."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import PRESETS, Config, RolloutKnobs, TaskKnobs, evolves, out_of_range, read_config, read_instruction
from engines import Engine
from plumbing.faults import CheckpointFault, Fault
from plumbing.outside import without_secrets
from plumbing.servers import Servers
from plumbing.trust import check_origin
from rollout import rollout
from tasks import Job, Question, Task, Trajectory, first_instruction

# Flags of inspo.py that matter here; a run's own values are the defaults. The second half changes no result.
PLAYED = (
    "task", "reward", "tools", "format", "test", "topk", "max_turns", "max_response", "max_observation", "max_prompt",
)  # fmt: skip
SERVED = ("retriever", "corpus", "search_retries", "max_rows", "engine", "device", "vllm_memory")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, with the configuration of its run or preset. `I_star`: "" if it has none."""

    name: str
    weights: str  # directory, hub id or URL
    cfg: Config
    I_star: str = ""
    run: Path | None = None  # whose config.json it is

    def configured(self, given: object, names: Collection[str], **knobs: Any) -> Config:
        """Returns the configuration with the flags of these names that were given, and with `knobs`; Fault if it cannot
        be."""
        flags = {name: value for name in names if (value := getattr(given, name)) is not None}
        if self.run:
            check_origin(self.run, {name: getattr(self.cfg, name) for name in names}, flags)
        cfg = dataclasses.replace(self.cfg, **flags | knobs)
        if fault := out_of_range(cfg, flags) or RolloutKnobs.check(cfg) or TaskKnobs.check(cfg):
            raise Fault(fault)
        return cfg


@contextlib.contextmanager
def subject(what: str) -> Iterator[Subject]:
    """Yields what a command line names; a checkpoint's weights are written to a temporary directory meanwhile.

    `what`: directory of a run, one of its checkpoints, a preset (world), a Hugging Face directory or id, or a URL.
    Raises Fault for a run that has not finished.
    """
    from journal.directory import RunDirectory, step_of  # with torch, which takes seconds to import

    path = Path(what)
    if what.startswith(("http://", "https://")):
        yield Subject(without_secrets(what).split("//")[1].split("/")[0].replace(":", "-"), what, Config())
    elif what in PRESETS:
        cfg = Config(**PRESETS[what])
        yield Subject(what, cfg.model, cfg)
    elif path.parent.name == "checkpoints" and path.is_dir():
        run = path.parents[1]
        cfg = read_config(run)
        with tempfile.TemporaryDirectory() as folder:
            to = _export(run, cfg.model, step_of(path), Path(folder) / path.name)
            yield Subject(f"{run.name}-{path.name}", str(to), cfg, _I_star(to), run)
    elif (path / "checkpoints").is_dir():
        cfg = read_config(path)
        if not _I_star(path):
            saved = RunDirectory(path).checkpoints()
            other = f"take {saved[-1]}" if saved else "there is no checkpoint yet"
            raise Fault(f"{path} has no I_star.txt, so it has not finished: resume it, or {other}")
        yield Subject(path.resolve().name, str(path / "policy"), cfg, _I_star(path), path)
    else:
        yield Subject(path.resolve().name, what, Config(model=what), _I_star(path))


def _I_star(path: Path) -> str:
    file = path / "I_star.txt"
    return file.read_text().strip() if file.is_file() else ""


def _export(run: Path, model: str, step: int, to: Path) -> Path:
    """Writes a checkpoint of a run of `model` to a Hugging Face directory; Fault if the two do not fit."""
    from journal.export import export_checkpoint

    try:
        export_checkpoint(run, step, to=to)
    except (CheckpointFault, ValueError, RuntimeError) as e:  # torch's, about shapes and names
        raise Fault(
            f"{run}: the checkpoint of step {step} does not fit {model}: it is of another model or tokenizer ({e})"
        ) from None
    return to


@dataclasses.dataclass
class Agent:
    """A model that plays a task under an instruction.

    `tools`: where it searches, in a line; `seed`: of its samples; `progress` is told how many episodes have ended.
    """

    engine: Engine
    tokenizer: Any
    task: Task
    instruction: str
    temperature: float
    seed: int
    tools: str = ""
    progress: Callable[[int], None] = lambda ended: None

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        """Returns a trajectory for each question, played as in training."""
        jobs = [Job(None, self.instruction, q, k) for k, q in enumerate(questions)]
        return rollout(
            self.engine, self.tokenizer, self.task, jobs, self.task.cfg, temperature=self.temperature, seed=self.seed,
            progress=self.progress,
        )  # fmt: skip


class Method(NamedTuple):
    """What --method names. The defaults are the task's own loop, under a run's first instruction."""

    play: Callable[[Agent, Sequence[Question]], list[Trajectory]] = Agent.play
    I_star: bool = False  # whether it plays under the run's best instruction
    trained: Callable[[Config], bool] = lambda cfg: False  # whether a run of this configuration trained for it
    knobs: Mapping[str, Any] = {}  # of the configuration, that it changes
    stop: Callable[[Task], tuple[str, ...]] = lambda task: task.format.stop(task)  # what ends a turn
    task: type[Any] = Task  # what it can play


METHODS = {"search_r1": Method(), "inspo": Method(I_star=True)}


def method_of(chosen: Subject, methods: Mapping[str, Method]) -> str:
    """Returns the name of the method that a model was trained for."""
    found = (name for name, method in methods.items() if method.trained(chosen.cfg))
    return next(found, "inspo" if chosen.I_star and evolves(chosen.cfg) else "search_r1")


def instruction_of(chosen: Subject, task: Task, method: Method, file: str = "") -> str:
    """Returns the instruction to play under: that in `file`, I_star, or the first one of the run or the task."""
    if file:
        return read_instruction("instruction", file)
    if method.I_star and not chosen.I_star:
        raise Fault(f"{chosen.name} has no I_star.txt to play under; give an instruction with --instruction")
    return chosen.I_star if method.I_star else first_instruction(task)


@contextlib.contextmanager
def agent(
    chosen: Subject, task: Task, instruction: str, temperature: float, seed: int, *,
    stop: tuple[str, ...] | None = None, served: str = "",
) -> Iterator[Agent]:  # fmt: skip
    """Yields the agent that plays a task; closes its engine and its tools' servers.

    `stop`: what ends its turns, by default what the task's tools need; `served`: the model to ask at a URL. Raises
    Fault where something is missing.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        task.check()
        tools = task.start(stack.enter_context(Servers(f"{folder}/log")))
        ends = task.format.stop(task) if stop is None else stop
        engine, tokenizer = _engine(chosen.weights, task.cfg, ends, served)
        stack.callback(engine.close)
        yield Agent(engine, tokenizer, task, instruction, temperature, seed, tools)


def _engine(model: str, cfg: Config, stop: tuple[str, ...], served: str) -> tuple[Engine, Any]:
    """Returns (engine, tokenizer) of a directory, a hub id or a URL."""
    if model.startswith(("http://", "https://")):
        from engines.chat_engine import ChatEngine, Words

        if cfg.format != "tags":
            raise Fault(f"--format {cfg.format}: a chat endpoint renders its own template; give the model's directory")
        words = Words()
        return ChatEngine(model, served, words, stop, api_key=os.environ.get("OPENAI_API_KEY", "")), words
    import torch

    from engines.choose import choose_engine, device_of
    from engines.torch_engine import TorchEngine
    from models.model import load_model, load_tokenizer, weights

    device = device_of(cfg)
    try:
        tokenizer, loaded = load_tokenizer(model, stop), load_model(model)
    except Fault as e:
        raise Fault(str(e).removeprefix("--model ")) from None
    rows = loaded.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise Fault(f"{model}: its tokenizer has {len(tokenizer)} tokens and its model {rows}: use the model's own")
    # Merged adapters need float32.
    dtype = "bfloat16" if device == "cuda" and not cfg.lora_rank else "float32"
    if choose_engine(cfg, device)[0] == "torch":
        return TorchEngine(loaded.to(device, getattr(torch, dtype)), tokenizer, stop, cfg.max_rows), tokenizer
    from engines.vllm_engine import VllmEngine

    engine = VllmEngine(
        model, tokenizer, stop, max_len=cfg.max_prompt + cfg.max_response, memory=cfg.vllm_memory, seed=cfg.seed,
        dtype=dtype,
    )  # fmt: skip
    engine.load(weights(loaded))
    return engine, tokenizer
