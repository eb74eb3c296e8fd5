"""The task: what is asked, what the policy can call, how it is scored. `--task module:Class` names
one.

A task is a subclass of `Task` in a file of its own; `tasks/search_qa.py`, the default, is one.
Nothing else knows what the policy is trained for: rollouts, rewards, failures and metrics all come
from here.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
import os
import sys
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from config import PRESETS, Config
from plumbing.faults import Fault, first_line, together
from plumbing.outside import JOINERS, printable, without_secrets
from plumbing.stop import may_stop
from tasks.formats import Tags
from tasks.tools import Tool, check_words

T = TypeVar("T")
Message = dict[str, str]  # {"role": "system" or "user", "content": ...}
LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"  # besides the usual one
FORMATS = {  # --format
    "tags": "tasks.formats:Tags",
    "hermes": "extras.plugs.hermes:Hermes",
    "hermes_tools": "extras.plugs.hermes:HermesTools",
}
# What else is imported by name alone, by the runs that ask for it: module:function.
PLUGS = {
    "function": "tasks.functions:load_tools",  # --tools module:function
    "mcp": "extras.plugs.mcp:tools_of",  # --tools mcp:...
    # --task module:Class, a class as TRL has them
    "environment": "extras.plugs.environment:task_of",
    "openenv": "extras.plugs.openenv:task_of",  # --task openenv:URL
    "reward": "extras.plugs.rewards:rewarded",  # --reward
}


@dataclass(frozen=True)
class Question:
    """What an episode starts from. `golds`: answers that are right, which the optimizer may see and
    must not give away.

    A task that needs more keeps it in `data`, plain data that can be sent between processes.
    """

    id: str
    text: str
    golds: tuple[str, ...] = ()
    source: str = "data"  # names its data set: metrics are shown for each
    data: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", str(self.id))  # a table's may be a number
        if self.golds is None or isinstance(self.golds, list):
            object.__setattr__(self, "golds", tuple(self.golds or ()))


@dataclass(frozen=True)
class Job:
    """One rollout to play: a question asked under an instruction."""

    instruction: int | None  # its id in the population; None for a text that is in none
    text: str  # the instruction itself
    question: Question
    group: int  # the draw it belongs to; trajectories of one group are compared (Eq. 3)


@dataclass
class Turn:
    """One action a_k and its observation o_k, as text."""

    text: str
    tool: str = ""  # tag of the tool it called; "" if it called none
    argument: str = ""
    # None if nothing was returned: a call in the last turn is not served
    result: list[str] | None = None


@dataclass
class Trajectory:
    """One rollout tau = (I, q, a_0, o_0, ..., a_k) (§2.1). The lists ids, mask and logps have one
    length."""

    instruction: int | None  # its id in the population; None for a text that is in none
    question: Question
    group: int
    ids: list[int]  # prompt, actions and observations
    prompt_tokens: int
    # I_{i,t} of Eq. 2: 1 on the tokens that the policy sampled
    mask: list[int] = field(default_factory=list)
    # the engine's log-probabilities; 0 where mask is 0
    logps: list[float] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)  # how many tokens each turn sampled
    turns: list[Turn] = field(default_factory=list)
    # Why it ended: "answer", "over" (the task ended it), "turns" (none left), "length" (context
    # full) "refused" (by the server of a model that is evaluated).
    stop: str = ""
    response: str = ""  # everything after the prompt
    prediction: str | None = None
    state: Any = None  # the episode's, for the task alone; in the end plain data
    reward: float = 0.0  # r(tau)
    failed: bool = False  # as the task defines it
    advantage: float = 0.0  # A-hat
    # A-hat of each turn, where a learner tells turns apart
    credit: list[float] = field(default_factory=list)
    watched: bool = False  # the update notes what it sees of its action tokens
    # that, by name: see grpo.note_tokens
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def act(self, ids: list[int], logps: list[float]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps += logps
        self.acted.append(len(ids))

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def served(self, tool: str) -> int:
        """Returns how many calls of this tool were answered."""
        return sum(turn.tool == tool and turn.result is not None for turn in self.turns)

    @property
    def invalid(self) -> int:
        """Turns that neither called a tool nor answered."""
        return sum(not turn.tool for turn in self.turns) - (self.stop == "answer")

    def outcome(self) -> Trajectory:
        """Returns a copy for rewards and metrics alone: without tokens."""
        return replace(self, ids=[], mask=[], logps=[], acted=[])

    def record(self) -> dict[str, Any]:
        """Returns a row for `trajectories/`: everything but the token arrays."""
        return {
            "instruction": self.instruction,
            "question": self.question.id,
            "question_text": self.question.text,
            "source": self.question.source,
            "group": self.group,
            "stop": self.stop,
            "reward": self.reward,
            "failed": self.failed,
            "advantage": self.advantage,
            "credit": self.credit,
            "prediction": self.prediction,
            "golds": self.question.golds,
            "invalid": self.invalid,
            "prompt_tokens": self.prompt_tokens,
            "action_tokens": sum(self.mask),
            "tokens": len(self.ids),
            "turns": [asdict(turn) for turn in self.turns],
            "response": self.response,
        }


class Task(ABC):
    """A subclass says what is asked (`questions`), what can be called (`tools`) and how it is
    scored (`reward`).

    Every rank makes one from the configuration. Rank 0 alone reads questions, starts servers,
    rewards and measures.
    """

    # what the policy can call: tags, stop strings and messages derive from them
    tools: Sequence[Tool] = ()
    instruction: str = "Answer inside <answer> and </answer>."  # without --instruction
    # the lowest that a right answer earns: below it a trajectory has failed
    best_reward: ClassVar[float] = 1.0
    at_once: int = sys.maxsize  # episodes that can be played together

    waited = 0.0  # seconds in which all trajectories waited for tools

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @property
    def format(self) -> type[Tags]:
        """How calls, answers and results are written (--format)."""
        name = self.cfg.format
        form: type[Tags] = load(f"--format {name}", FORMATS.get(name, name), "class")
        if not issubclass(form, Tags):
            raise Fault(f"--format {name}: it does not extend tasks.formats.Tags")
        return form

    def check(self) -> None:
        """Raises Fault if something that `start` will need is missing; on rank 0, before anything
        is loaded."""

    def start(self, serve: Callable[..., str]) -> str:
        """Starts what the tools need, on rank 0; returns lines for the log: by default which
        functions there are.

        Raises Fault. `serve(*argv)` runs a Python program of this project as a server for as long
        as the run, and returns its URL. It sees no keys: plumbing/servers.py says what it gets of
        the environment.
        """
        names = [tool.tag for tool in self.tools if tool.usage()]
        return (
            f"tools: {', '.join(names[:8])}{', ...' * (len(names) > 8)} ({len(names)})"
            if names
            else ""
        )

    def address(self) -> Any:
        """Returns what `connect` needs on other ranks, after `start`."""

    def connect(self, address: Any) -> None:
        """Connects another rank's tools to what rank 0 has started."""

    @abstractmethod
    def questions(self, split: str) -> list[Question]:
        """Returns the questions of "train", "valid" (they choose the best checkpoint; may be none)
        or "test"."""

    def prompt(self, instruction: str, question: Question) -> list[Message]:
        """Returns the conversation that the policy continues: one message with instruction and
        question (App. F)."""
        content = f"{instruction}\n\nQuestion: {question.text}\n"  # CHOICE-31
        return [{"role": "user", "content": content}]

    def reset(self, question: Question) -> Any:
        """Returns the state with which an episode begins: `tau.state`, which tools may read and
        change."""

    def finish(self, tau: Trajectory) -> None:
        """Ends an episode: `tau.state` must be plain data from here on, since it is sent between
        processes."""

    @abstractmethod
    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        """Returns r(tau) of each, finite numbers (§2.1).

        Raises Outage, which names who does not answer, if they cannot be had now: the run stops and
        can be resumed.
        """

    def failed(self, tau: Trajectory) -> bool:
        """Returns whether a rewarded trajectory is a failure to learn from (§3.2)."""
        return tau.reward < self.best_reward

    def shown(self, tau: Trajectory) -> str:
        """Returns a failure as the optimizer reads it (App. E); right answers, if there are any,
        follow it there."""
        return f"Question: {tau.question.text}\n{tau.response.strip()}"

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        """Returns what is measured of a rewarded trajectory, under the same names for each.

        The first one chooses the best checkpoint and is what a run's last sentence is about.
        """
        return {"reward": tau.reward}


def load_task(cfg: Config, given: Any = None) -> Task:
    """Returns the task that --task, --tools and --reward name. Raises Fault, or what the task's own
    code raises.

    `given`: from Python, a class in place of that name, or a task, of which it returns a copy.
    """
    where = f"--task {cfg.task}"
    kind = given if isinstance(given, type) else type(given)
    if given is None or kind is str:
        room, _, name = cfg.task.partition(":")
        server = room == "openenv"
        kind = (
            load(where, PLUGS[room], "function")(name) if server else load(where, cfg.task, "class")
        )
    if not issubclass(kind, Task):
        if not hasattr(kind, "reset"):
            raise Fault(
                f"{where}: it neither extends tasks.Task nor has a reset(), as TRL's environments do"
            )
        kind = load(where, PLUGS["environment"], "function")(kind)
    if cfg.reward:
        kind = load(f"--reward {cfg.reward}", PLUGS["reward"], "function")(kind, cfg.reward)
    specs = [spec for spec in cfg.tools.split(",") if ":" in spec]
    if specs:  # the task gets those that have no module
        cfg = replace(
            cfg, tools=",".join(spec for spec in cfg.tools.split(",") if ":" not in spec) or "none"
        )
    task: Task
    if isinstance(given, Task):
        task = copy.copy(given)
        task.__class__, task.cfg = kind, cfg  # `kind` may have the reward of --reward
    else:
        task = kind(cfg)
    questions = task.questions  # asked once a split: it may draw them
    task.questions = cache(lambda split: list(questions(split) or ()))  # type: ignore[method-assign]
    for spec in specs:
        load_tools = load(
            "--tools", PLUGS["mcp" if spec.startswith("mcp:") else "function"], "function"
        )
        fitting, faults = list[Tool](), list[Fault]()
        for tool in load_tools(spec.removeprefix("mcp:").strip(), f"--tools {spec}"):
            try:
                if isinstance(tool, Fault):  # a server has it, and no policy could call it
                    raise tool
                check_words(
                    without_secrets(f"--tools {spec}"), [*task.tools, *fitting, tool], COLUMNS
                )
                fitting.append(tool)
            except Fault as e:
                faults.append(e)
        if not fitting:
            raise faults[0]
        for fault in faults if os.environ.get("RANK", "0") == "0" else ():
            print(printable(f"note: {fault}; it is left out"), flush=True)
        task.tools = [*task.tools, *fitting]
    check_words(where, task.tools, COLUMNS)
    return task


def load(where: str, spec: str, kind: str) -> Any:
    """Returns the "class" or "function" of "module:name"; the working directory is searched last.
    Raises Fault."""
    module, _, name = spec.partition(":")
    if not module or module.startswith(".") or not name:
        raise Fault(f"{where}: give it as module:name, for a {kind} in module.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target = getattr(importlib.import_module(module), name, None)
    except ImportError as e:
        remedy = "run in the directory that it is in"
        raise Fault(f"{where}: {module} cannot be imported ({first_line(e)}); {remedy}") from None
    if not callable(target) or isinstance(target, type) != (kind == "class"):
        remedy = "; give the module that it is in" * (module == "__main__")
        raise Fault(f"{where}: {name} is not a {kind} in {module}{remedy}")
    return target


def wait_for(result: Any) -> Any:
    """Returns the result of a user's function, `async` or not."""
    if not inspect.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    with ThreadPoolExecutor(1) as thread:  # in a notebook this one has a loop already
        return thread.submit(asyncio.run, result).result()


def choose_instruction(task: Task) -> str:
    """Returns the instruction with which a run begins: that of --instruction, else the task's.
    Raises Fault.

    A task with an instruction of its own keeps it where --instruction is only a preset's.
    """
    text, file = task.instruction, task.cfg.instruction
    author = next(
        kind for kind in type(task).__mro__ if "instruction" in vars(kind)
    ).__module__.partition(".")[0]
    own = author != "tasks" or "instruction" in vars(task)
    if file and not (own and file in [preset.get("instruction") for preset in PRESETS.values()]):
        text = read_instruction("instruction", file)
    return task.format.first(text, task)


def read_instruction(knob: str, path: str) -> str:
    """Returns the instruction in a file; Fault if it is empty, or holds what no revision of it may
    hold.

    A byte order mark, invisible format characters and other line ends are taken out: an editor puts
    them there.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, ValueError) as e:
        raise Fault(f"--{knob} {path}: cannot be read as UTF-8 ({e})") from None
    text = "".join("\n" if c in LINE_ENDS else c for c in text.replace("\r\n", "\n"))
    text = "".join(c for c in text if unicodedata.category(c) != "Cf" or c in JOINERS).strip()
    if not text:
        raise Fault(f"--{knob} {path}: the file is empty")
    if (shown := printable(text)) != text:
        k = next(k for k, (a, b) in enumerate(zip(text, shown, strict=False)) if a != b)
        raise Fault(f"--{knob} {path}: it holds the control character {text[k]!r}; take it out")
    return text


def check_questions(task: Task) -> None:
    """Raises Fault unless there is something to train and to test on, and every question has an id
    of its own."""
    together(*(partial(_check_split, task, split) for split in ("train", "valid", "test")))


def _check_split(task: Task, split: str) -> None:
    ids = Counter[str]()
    for q in task.questions(split):
        texts = (
            [q.text, *q.golds] if isinstance(q, Question) and isinstance(q.golds, tuple) else [None]
        )
        if not all(isinstance(text, str) for text in texts):
            raise Fault(
                f"--task {task.cfg.task}: of {split} it has {q!r:.99}; return Question(id, text, [gold, ...])"
            )
        ids[q.id] += 1
    if not ids and split != "valid":
        raise Fault(
            f"--task {task.cfg.task}: there are no questions to {split} on; return at least one"
        )
    if twice := [id for id, n in ids.items() if n > 1]:
        raise Fault(
            f"--task {task.cfg.task}: several {split} questions have the id {twice[0]!r}; make it unique"
        )


def reward(task: Task, taus: Sequence[Trajectory]) -> None:
    """Sets `reward` and `failed` of the trajectories; Fault if the task's rewards are not a number
    for each."""
    with may_stop():  # a judge may take minutes
        rewards = task.reward(list(taus))  # its own, to sort or filter
    where = (
        f"--reward {task.cfg.reward}: the reward"
        if task.cfg.reward
        else f"--task {task.cfg.task}: its reward"
    )
    if isinstance(rewards, (Mapping, Set, bytes, bytearray)):
        raise Fault(
            f"{where} returned a {type(rewards).__name__}; return a list of numbers, one for each trajectory"
        )
    count: Any = repr(rewards)
    with suppress(TypeError):  # a scalar, numpy's too
        count = len(rewards)
    if count != len(taus):
        raise Fault(
            f"{where} returned {count} for {len(taus)} trajectories; return a number for each"
        )
    for tau, r in zip(taus, rewards, strict=True):
        if not _finite(r):
            raise Fault(f"{where} of question {tau.question.id} is {r!r}; return a finite number")
        tau.reward = float(r)
        tau.failed = bool(task.failed(tau))


# Columns that metrics.jsonl has of every step: none of them can be a task's metric.
COLUMNS = set(
    "t metrics loss kl entropy clip_fraction logp logp_gap grad_norm lr skipped_updates candidates answered "
    "failed valid_actions prompt_tokens response_tokens context_tokens zero_variance_groups all_right_groups "
    "all_wrong_groups P best w_best w p n "
    "r_bar".split()
)


def measure(
    task: Task, taus: Sequence[Trajectory], names: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Returns the metrics of rewarded trajectories; Fault if their names differ, or one is no
    number."""
    rows = [task.metrics(tau) for tau in taus]
    taken = COLUMNS | {tool.plural for tool in task.tools}
    for tau, row in zip(taus, rows, strict=True):
        where = f"--task {task.cfg.task}: its metrics of question {tau.question.id}"
        first: Any = names or rows[0]
        if not row or list(row) != list(first) or not all(map(_finite, row.values())):
            raise Fault(
                f"{where} are {row}, the first {first}; return finite numbers of the same names for all"
            )
        if not taken.isdisjoint(row):
            raise Fault(
                f"{where}: {min(taken & row.keys())} is measured in every run; give it another name"
            )
    return [{name: float(x) for name, x in row.items()} for row in rows]


def _finite(x: Any) -> bool:
    try:
        return math.isfinite(x)
    except (TypeError, ValueError, OverflowError):
        return False


def rng_of(seed: int, t: int, purpose: str) -> np.random.Generator:
    """Returns a generator that depends on (seed, step, purpose) alone: there is no state to
    save."""
    return np.random.default_rng([seed, t, zlib.crc32(purpose.encode())])


def draw(D: Mapping[Any, T], n: int, seed: int, t: int) -> list[T]:
    """Returns the `n` questions of step t: epochs over D, each in its own order."""
    questions, out = list(D.values()), list[T]()
    first = (t - 1) * n
    for epoch in range(first // len(questions), (first + n - 1) // len(questions) + 1):
        order = rng_of(seed, epoch, "epoch").permutation(len(questions))
        begin, end = first - epoch * len(questions), first + n - epoch * len(questions)
        out += [questions[k] for k in order[max(0, begin) : end]]
    return out


def take_subset(questions: list[Question], n: int, seed: int = 0) -> list[Question]:
    """Returns `n` of the questions in their order, the same ones for a seed, each source in its
    share; 0: all."""
    if not 0 < n < len(questions):
        return questions
    order = rng_of(seed, 0, "subset").permutation(len(questions))
    sources = [questions[k].source for k in order]
    # Interleave the sources: the k-th question of a source with m has the place (k + 1/2) / m.
    size, seen, place = Counter(sources), Counter[str](), []
    for k, source in zip(order, sources, strict=True):
        place.append(((seen[source] + 0.5) / size[source], int(k)))
        seen[source] += 1
    return [questions[k] for k in sorted(k for _, k in sorted(place)[:n])]


def average_by_source(
    taus: Iterable[Trajectory], rows: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the means of metrics, a row for each trajectory, as `name`, and of each source as
    `name/source`."""
    columns: dict[str, list[float]] = {}
    for tau, row in zip(taus, rows, strict=True):
        for name, x in row.items():
            columns.setdefault(name, []).append(x)
            columns.setdefault(f"{name}/{tau.question.source}", []).append(x)
    return {name: sum(x) / len(x) for name, x in sorted(columns.items())}
