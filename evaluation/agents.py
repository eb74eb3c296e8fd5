"""What plays: a run, a Hugging Face model or a chat endpoint becomes an agent of its task."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from config import PRESETS, Config, TaskKnobs, check_settings, evolves, out_of_range, read_config
from engines import Engine
from plumbing.faults import Fault
from plumbing.hub import check_model
from plumbing.outside import clean, without_secrets
from plumbing.servers import Servers
from plumbing.trust import check_origin
from rollout import rollout
from tasks import Job, Question, Task, Trajectory
from tasks.search_qa import SearchQA
from tasks.task import (
    choose_instruction,
    compute_metrics,
    import_named,
    load_task,
    read_instruction,
    set_rewards,
)

# Flags of inspo.py that matter here; a run's own values are the defaults. The second half changes
# no result.
PLAYED = (
    "task", "reward", "tools", "format", "test", "topk", "max_turns", "max_response", "max_observation", "max_prompt",
)  # fmt: skip
SERVED = ("retriever", "corpus", "engine", "device", "vllm_memory")


@dataclass(frozen=True)
class Subject:
    """A model, with the configuration of its run or preset."""

    name: str
    weights: str  # directory, hub id or URL
    cfg: Config
    I_star: str = ""  # "" if it has none
    run: Path | None = None  # whose config.json it is

    def configure(self, given: Mapping[str, Any], names: Collection[str], **knobs: Any) -> Config:
        """Applies the flags of these names that were given, then `knobs`. Raises Fault if they
        cannot be."""
        flags = {name: given[name] for name in names if given.get(name) is not None}
        if self.run:
            check_origin(self.run, {name: getattr(self.cfg, name) for name in names}, flags)
        cfg = replace(self.cfg, **flags | knobs)
        fault = out_of_range(cfg, flags) or TaskKnobs.find_fault(cfg)
        if fault:
            raise Fault(fault)
        return cfg


def find_subject(what: str) -> Subject:
    """Finds what a command line names; Fault for a run that has not finished.

    `what`: directory of a run, or of a checkpoint that export.py put there; a preset (world);
    another Hugging Face directory or id; or the URL of a server.
    """
    # an endpoint, or a preset
    if "://" in what:
        name = without_secrets(what).split("//")[1].split("/")[0].replace(":", "-")
        return Subject(name, what, Config())
    if what in PRESETS:
        return Subject(what, PRESETS[what]["model"], Config(**PRESETS[what]))
    # a model of the hub, or a directory
    path = Path(what)
    if not path.is_dir():
        try:
            check_model(what)
        except Fault as e:
            raise Fault(f"{what} is no directory; as a model of the hub: {e}") from None
    file = path / "I_star.txt"
    I_star = file.read_text("utf-8").strip() if file.is_file() else ""
    # of a run?
    run = path if (path / "checkpoints").is_dir() else path.parent
    if not ((run / "checkpoints").is_dir() and (run / "config.json").is_file()):
        return Subject(path.resolve().name, what, Config(model=what), I_star)
    weights = path / "policy" if run == path else path
    if run == path and not (I_star and weights.is_dir()):
        gone = "policy/" if I_star else "I_star.txt"
        raise Fault(
            f"{what} has no {gone}, so it has not finished: wait, resume it, or give a directory "
            f"that `python export.py {what}` has written"
        )
    return Subject(path.resolve().name, str(weights), read_config(run), I_star, run=run)


@dataclass
class Agent(contextlib.AbstractContextManager["Agent"]):
    """A model that plays a task under an instruction.

    `tools`: where it searches, in a line; `seed`: of its samples; `progress` is told how many
    episodes have ended.
    """

    engine: Engine
    tokenizer: Any
    task: Task
    instruction: str
    temperature: float
    seed: int
    close: Callable[[], None] = lambda: None
    tools: str = ""
    progress: Callable[[int], Any] = lambda ended: None

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def held_out(self) -> list[Question]:
        """The held-out questions; none where their file is gone, since others can be asked."""
        with contextlib.suppress(Fault):
            return self.task.questions("test")
        return []

    def find_question(self, text: str) -> Question:
        """Returns the held-out question of this id or text, or a new one; Fault if the task's are
        more than text."""
        text = clean(text.strip())  # the shell's bytes may not be text
        if not text:
            raise Fault("the question is empty")
        question, searches = text, isinstance(self.task, SearchQA)
        if searches and not text.endswith("?"):
            question += "?"
        for q in self.held_out:
            if text in (q.id, q.text) or question == q.text:
                return q
        # rows of search QA are for --reward alone
        if not searches and any(q.data is not None for q in self.held_out):
            example = self.held_out[0].id
            raise Fault(
                f"a question of {self.task.cfg.task} is more than its text: give the id of one, such as {example}"
            )
        return Question("asked", question, source="asked")

    def ask(self, text: str) -> Trajectory:
        """Plays a held-out question, of this id or text, or a new one; its `prediction` is the
        answer. Raises Fault."""
        [tau] = self.play([self.find_question(text)])
        return tau

    def score(self, taus: list[Trajectory]) -> list[dict[str, float]]:
        """Sets the rewards of finished trajectories; returns the task's metrics of each."""
        set_rewards(self.task, taus)
        return compute_metrics(self.task, taus)

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        """Plays each question once, as in training."""
        jobs = [Job(None, self.instruction, q, k) for k, q in enumerate(questions)]
        return rollout(
            self.engine,
            self.tokenizer,
            self.task,
            jobs,
            self.task.cfg,
            temperature=self.temperature,
            seed=self.seed,
            progress=self.progress,
        )


class Method(NamedTuple):
    """What --method names. The defaults are the task's own loop, under a run's first
    instruction."""

    play: Callable[[Agent, Sequence[Question]], list[Trajectory]] = Agent.play
    I_star: bool = False  # whether it plays under the run's best instruction
    # whether a run of this configuration trained for it
    trained: Callable[[Config], bool] = lambda cfg: False
    knobs: Mapping[str, Any] = {}  # of the configuration, that it changes
    # what ends a turn, by default what the task's tools need
    stop: Callable[[Task], tuple[str, ...]] = lambda task: task.make_format().stop_strings()
    task: type[Any] = Task  # what it can play


METHODS = {"search_r1": Method(), "inspo": Method(I_star=True)}


def infer_method(chosen: Subject, methods: Mapping[str, Method]) -> str:
    """The name of the method that a model was trained for."""
    trained = (name for name, method in methods.items() if method.trained(chosen.cfg))
    return next(trained, "inspo" if chosen.I_star and evolves(chosen.cfg) else "search_r1")


def instruction_of(chosen: Subject, task: Task, method: Method, file: str = "") -> str:
    """The instruction to play under: that in `file`, I_star, or the first one of the run or the
    task."""
    if file:
        return read_instruction(file)
    if method.I_star and not chosen.I_star:
        raise Fault(
            f"{chosen.name} has no I_star.txt to play under; give an instruction with --instruction"
        )
    return chosen.I_star if method.I_star else choose_instruction(task)


def load_agent(path: str | Path, temperature: float = 0.0, seed: int = 0, **settings: Any) -> Agent:
    """Returns the agent of a finished run, or of a checkpoint that export.py has written, under its
    best instruction.

    `settings`: those in which it differs from the run, as `inspo.train` takes them. Raises Fault.
    Close the agent, or use it in a `with`.
    """
    chosen = find_subject(str(path))
    if not chosen.I_star:
        raise Fault(f"{path} holds no finished run (no I_star.txt)")
    knobs = {"engine": "torch"} | check_settings(Config, settings)
    cfg = chosen.configure(knobs, {*PLAYED, *SERVED, *knobs})
    task = load_task(cfg, settings.get("task"))
    return open_agent(chosen, task, chosen.I_star, temperature, seed)


def open_agent(
    chosen: Subject,
    task: Task,
    instruction: str,
    temperature: float,
    seed: int = 0,
    method: Method = METHODS["search_r1"],
) -> Agent:
    """Returns the agent that plays a task; `close` ends its engine and its tools' servers.

    `method`: says what ends its turns. Raises Fault where something is missing.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        task.check()
        tools = task.start(stack.enter_context(Servers(f"{folder}/log")))
        open_engine = open_endpoint if "://" in chosen.weights else open_model
        engine, tokenizer = open_engine(chosen, task.cfg, method.stop(task))
        stack.callback(engine.close)
        return Agent(
            engine, tokenizer, task, instruction, temperature, seed, stack.pop_all().close, tools
        )


def open_endpoint(chosen: Subject, cfg: Config, stop: tuple[str, ...]) -> tuple[Any, Any]:
    """Opens the server at a URL by the engine that --engine names, which has its tokenizer."""
    if ":" not in cfg.engine:
        raise Fault(
            f"{without_secrets(chosen.weights)}: name its engine, --engine module:Class (docs/gpus.md)"
        )
    kind = import_named(f"--engine {cfg.engine}", cfg.engine, "class")
    engine = kind(replace(cfg, model=chosen.weights), None, stop)
    return engine, engine.tokenizer


def open_model(chosen: Subject, cfg: Config, stop: tuple[str, ...]) -> tuple[Engine, Any]:
    """Loads a directory or a hub id into the engine that training would choose; with its
    tokenizer."""
    import torch

    from engines.choose import choose_engine, device_of, explain_too_old
    from engines.torch_engine import TorchEngine
    from models.model import empty, fill, load_config, load_policy, weights

    path, device = chosen.weights, device_of(cfg)
    model, tokenizer = load_policy(path, stop, cfg.longest)

    # in the precision and the engine that training would choose
    wide = device == "cpu" or cfg.dtype == "float32" or explain_too_old(device)
    dtype = "float32" if wide else "bfloat16"
    if choose_engine(cfg, device) == "torch":
        if not wide:  # `to` would also round what positions are computed with
            model = fill(empty(load_config(path), torch.bfloat16, device), model)
        return TorchEngine(model.to(device), tokenizer, stop), tokenizer
    from engines.vllm_engine import VllmEngine

    engine = VllmEngine(
        path, tokenizer, stop, max_len=cfg.longest, memory=cfg.vllm_memory, dtype=dtype
    )
    engine.load(weights(model))
    return engine, tokenizer
