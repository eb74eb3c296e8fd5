"""The task: what a subclass says and may say, the questions that a step asks, and what becomes of
them; how the flags name a task, its reward, tools and first instruction.

Nothing else knows what the policy is trained for: rollouts, rewards, failures and metrics all come
from here.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from config import HERE, PRESETS, Config
from plumbing.faults import Fault, first_line
from plumbing.files import Row
from plumbing.stop import may_stop
from tasks.tools import COLUMNS, Failure, Tags, Tool, check_words

RECORDED = "group stop reward failed advantage prediction invalid prompt_tokens response".split()


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
        # in a table ids may be numbers, and golds a text, a list or an array
        object.__setattr__(self, "id", str(self.id))
        golds = [self.golds] if isinstance(self.golds, str) else self.golds
        object.__setattr__(self, "golds", tuple(golds))


@dataclass(frozen=True)
class Job:
    """One rollout to play: a question asked under an instruction."""

    instruction_id: int | None  # in the population; None for one that is in none
    instruction: str
    question: Question
    group: int  # trajectories of one group are compared (Eq. 3)


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

    instruction_id: int | None  # in the population; None for one that is in none
    question: Question
    group: int
    ids: list[int]  # prompt, actions and observations
    prompt_tokens: int
    # I_{i,t} of Eq. 2: 1 on the tokens that the policy sampled
    mask: list[int] = field(default_factory=list)
    # the engine's log-probabilities; 0 where mask is 0
    logps: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # Why it ended: "answer", "over" (the task ended it), "turns" (none left), "length" (context
    # full), "refused" (by the server of a model that is evaluated).
    stop: str = ""
    response: str = ""  # everything after the prompt
    prediction: str | None = None
    state: Any = None  # the episode's, for the task alone; in the end plain data
    reward: float = 0.0  # r(tau)
    failed: bool = False  # as the task defines it
    advantage: float = 0.0  # A-hat

    def act(self, ids: list[int], logps: list[float]) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps += logps

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def served(self, tool: str) -> int:
        """Returns how many calls of this tool were answered."""
        return sum(turn.tool == tool and turn.result is not None for turn in self.turns)

    @property
    def invalid(self) -> int:
        """How many turns neither called a tool nor answered."""
        # the turn that answers has no tool either
        without_call = sum(not turn.tool for turn in self.turns)
        return without_call - (self.stop == "answer")

    def drop_tokens(self) -> Trajectory:
        """Returns a copy without tokens, which is enough for rewards and metrics."""
        return replace(self, ids=[], mask=[], logps=[])

    def record(self) -> Row:
        """Returns a row for `trajectories/`: everything but the token arrays."""
        q = self.question
        return {
            "question": q.id,
            "question_text": q.text,
            "source": q.source,
            "golds": q.golds,
            "instruction": self.instruction_id,
            **{name: getattr(self, name) for name in RECORDED},
            "action_tokens": sum(self.mask),
            "turns": [asdict(turn) for turn in self.turns],
        }


# ---- which questions are asked: the same for the same seed


STORED = 24  # questions of an evaluation or a verification whose trajectories a run stores


def space_evenly(n: int, k: int) -> list[int]:
    """Returns at most k of the places 0..n-1, evenly spaced: always the same sample."""
    k = min(n, k)
    return [j * n // k for j in range(k)]


def rng_of(seed: int, t: int, purpose: str) -> np.random.Generator:
    """Returns a generator that depends on (seed, step, purpose) alone: there is no state to
    save."""
    return np.random.default_rng([seed, t, zlib.crc32(purpose.encode())])


def draw_questions(D: Mapping[Any, Any], n: int, seed: int, t: int) -> list[Any]:
    """Returns the `n` questions of step t: epochs over D, each in its own order."""
    questions = list(D.values())
    drawn = list[Any]()
    epoch, place = divmod((t - 1) * n, len(questions))
    while len(drawn) < n:
        order = rng_of(seed, epoch, "epoch").permutation(len(questions))
        # from `place` on, as many as are missing
        drawn += [questions[k] for k in order[place : place + n - len(drawn)]]
        epoch += 1
        place = 0
    return drawn


def take_subset(questions: list[Question], n: int, seed: int = 0) -> list[Question]:
    """Returns `n` of the questions in their order, the same ones for a seed, each source in its
    share; 0: all."""
    if not 0 < n < len(questions):
        return questions
    order = rng_of(seed, 0, "subset").permutation(len(questions))
    sources = np.array([q.source for q in questions])[order]
    # Interleave the sources: the k-th question of a source with m has the place (k + 1/2) / m.
    place = np.empty(len(questions))
    for source in np.unique(sources):
        own = order[sources == source]
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
    return [questions[k] for k in sorted(place.argsort(kind="stable")[:n])]


# ---- code that a flag names: `module:name`, or a plug-in, which is known by a word


def import_named(where: str, spec: str, kind: str) -> Any:
    """Returns the "class" or "function" of "module:name"; the working directory is searched last.
    Raises Fault."""
    module, _, name = spec.partition(":")
    if not module or not name or "/" in module or module.endswith(".py"):
        raise Fault(f"{where}: give it as module:name, for a {kind} in module.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target = getattr(importlib.import_module(module), name, None)
    except ImportError as e:
        own = Path.cwd() / f"{e.name}.py"
        remedy = "run in the directory that it is in, and install what it imports"
        if own.is_file():
            remedy = f"rename {own}: inspo has a module of that name"
        raise Fault(f"{where}: {module} cannot be imported ({first_line(e)}); {remedy}") from None
    if not callable(target) or isinstance(target, type) != (kind == "class"):
        raise Fault(f"{where}: {name} is not a {kind} in {module}; give the module that it is in")
    return target


def find_plug(word: str) -> Any:
    """Returns the plug-in that a flag's word asks for ("--format hermes"); None if there is none.

    A folder `plugs` in any folder of this project lists what it has in PLUGS.
    """
    for path in HERE.glob("*/plugs/__init__.py"):
        plugs = importlib.import_module(f"{path.parent.parent.name}.plugs").PLUGS
        if word in plugs:
            module, _, name = plugs[word].partition(":")
            return getattr(importlib.import_module(module), name)
    return None


# ---- the task


Message = dict[str, str]  # {"role": "system" or "user", "content": ...}


class Task(ABC):
    """A subclass says what is asked (`questions`), what can be called (`tools`) and how it is
    scored (`reward`).

    Every rank makes one from the configuration. Rank 0 alone reads questions, starts servers,
    rewards and measures.
    """

    # what the policy can call: tags, stop strings and messages derive from them
    tools: Sequence[Tool] = ()
    instruction: str = "Answer inside <answer> and </answer>."  # without --instruction
    takes_preset = False  # whether a preset's instruction replaces it, as search QA's
    # the lowest that a right answer earns: below it a trajectory has failed
    passing_reward: ClassVar[float] = 1.0
    at_once: int = sys.maxsize  # episodes that can be played together

    waited = 0.0  # seconds in which all trajectories waited for tools

    def __init__(self, cfg: Config = Config()):  # noqa: B008 (it is frozen)
        self.cfg = cfg

    def make_format(self, tokenizer: Any = None) -> Tags:
        """Returns how calls, answers and results are written (--format); what reads or writes ids
        needs the policy's tokenizer. Raises Fault."""
        name = self.cfg.format
        kind = Tags
        if name != "tags":
            flag = f"--format {name}"
            kind = find_plug(flag) or import_named(flag, name, "class")
        return kind(self, tokenizer)

    def check(self) -> None:
        """Raises Fault if something that `start` will need is missing; on rank 0, before anything
        is loaded."""

    def start(self, serve: Callable[..., str]) -> str:
        """Starts what the tools need, on rank 0; returns lines for the log: by default which
        functions there are.

        Raises Fault. `serve(*argv)` runs a Python program of this project as a server for as long
        as the run, and returns its URL.
        """
        names = [tool.tag for tool in self.tools if tool.usage()]
        return f"tools: {', '.join(names)}" if names else ""

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
        return tau.reward < self.passing_reward

    def show(self, tau: Trajectory) -> str:
        """Returns a trajectory as the optimizer reads it (App. E); right answers, if there are any,
        follow it there."""
        return f"Question: {tau.question.text}\n{tau.response.strip()}"

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        """Returns what is measured of a rewarded trajectory, under the same names for each.

        The first one chooses the best checkpoint and is what a run's last sentence is about.
        """
        return {"reward": tau.reward}


# ---- rewards and metrics


def set_rewards(task: Task, taus: Sequence[Trajectory]) -> None:
    """Sets `reward` and `failed` of the trajectories; raises Fault unless the task returns a
    number for each. A task never gets an empty list."""
    if not taus:
        return
    with may_stop():  # a judge may take minutes
        rewards = task.reward(list(taus))  # a copy, which it may sort or filter

    rewards = read_rewards(f"--task {task.cfg.task}: its reward", rewards, taus)
    for tau, r in zip(taus, rewards, strict=True):
        tau.reward = r
        tau.failed = bool(task.failed(tau))


def read_rewards(
    where: str, rewards: Any, taus: Sequence[Trajectory], optional: bool = False
) -> list[Any]:
    """Returns what a reward has returned as a list of floats, one for each trajectory; `optional`:
    or None. Raises Fault, which begins with `where`."""
    if hasattr(rewards, "tolist"):  # numpy's, torch's, pandas'
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != len(taus):
        raise Fault(
            f"{where} returned {rewards!r:.80} for {len(taus)} trajectories; return a list with a number for each"
        )
    read = list[Any]()
    for tau, r in zip(taus, rewards, strict=True):
        if optional and r is None:
            read.append(None)
        elif is_finite(r):
            read.append(float(r))
        else:
            raise Fault(
                f"{where} of question {tau.question.id} is {r!r:.80}; return a finite number"
            )
    return read


def compute_metrics(
    task: Task, taus: Sequence[Trajectory], names: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Returns the metrics of rewarded trajectories; Fault if their names differ, or one is no
    number."""
    rows = [task.metrics(tau) for tau in taus]
    for tau, row in zip(taus, rows, strict=True):
        names = names or list(row)
        if list(row) != list(names) or not all(map(is_finite, row.values())):
            raise Fault(
                f"--task {task.cfg.task}: its metrics of question {tau.question.id} are {row}; return finite numbers"
                f" for all, named {', '.join(names)}"
            )

    # the first part counts: `time/total` and `searches/failed` are a run's own columns
    taken = COLUMNS | {tool.plural for tool in task.tools}
    for name in names:
        if name.partition("/")[0] in taken:
            raise Fault(
                f"--task {task.cfg.task}: its metric {name}: that is measured in every run; give it another name"
            )
    return [{name: float(x) for name, x in row.items()} for row in rows]


def is_finite(x: Any) -> bool:
    try:
        return math.isfinite(x)
    except (TypeError, ValueError):
        return False


def average_by_source(
    taus: Iterable[Trajectory], rows: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the means of metrics, a row for each trajectory, as `name`, and of each source as
    `name/source`."""
    columns = defaultdict[str, list[float]](list)
    for tau, row in zip(taus, rows, strict=True):
        for name, x in row.items():
            columns[name].append(x)
            columns[f"{name}/{tau.question.source}"].append(x)
    return {name: sum(x) / len(x) for name, x in sorted(columns.items())}


def rate_failures(turns: Sequence[Turn], tool: Tool) -> dict[str, float]:
    """Returns the share of a tool's results that say why a call failed, if one did."""
    results = [turn.result for turn in turns if turn.tool == tool.tag and turn.result is not None]
    failed = sum(isinstance(result, Failure) for result in results)
    return {f"{tool.plural}/failed": failed / len(results)} if failed else {}


# ---- the task that the flags name


def load_task(cfg: Config, given: Any = None) -> Task:
    """Returns the task that --task, --tools and --reward name. Raises Fault, or what the task's own
    code raises.

    `given`: from Python, a class in place of that name, or a task, of which it returns a copy.
    """
    where = f"--task {cfg.task}"
    if given is None or isinstance(given, str):
        word, _, rest = cfg.task.partition(":")
        plug = find_plug(f"--task {word}")
        given = plug(rest) if plug else import_named(where, cfg.task, "class")

    # its class, with the reward of --reward
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Task):
        kind = find_plug("--task")(kind, where)  # a class of another convention
    if cfg.reward:
        kind = find_plug("--reward")(kind, cfg.reward)

    # The task itself gets those of --tools that are neither a module's nor a plug-in's.
    words = [word.strip() for word in cfg.tools.split(",")]
    specs = [word for word in words if ":" in word or find_plug(f"--tools {word}")]
    own = [word for word in words if word not in specs]
    cfg = replace(cfg, tools=",".join(own) or "none")

    # an object of it, which reads its questions once
    if isinstance(given, Task):
        task = copy.copy(given)
        task.__class__ = kind  # which may have the reward of --reward
        task.cfg = cfg
    else:
        task = kind(cfg)
    questions = task.questions  # asked once a split: it may draw them
    task.questions = cache(lambda split: list(questions(split) or ()))  # type: ignore[method-assign]

    # functions, and the tools of plug-ins
    for spec in specs:
        flag, (word, _, rest) = f"--tools {spec}", spec.partition(":")
        plug = find_plug(f"--tools {word}")
        if plug:
            found = plug(rest, flag, task.tools)
        else:
            as_tool = import_named(flag, "tasks.functions:TypedFunction", "class")
            found = [as_tool(import_named(flag, spec, "function"), flag)]
        task.tools = [*task.tools, *found]
    check_words(where, task.tools)
    return task


def choose_instruction(task: Task) -> str:
    """Returns the instruction with which a run begins: that of --instruction, else the task's.
    Raises Fault."""
    text = task.instruction
    file = task.cfg.instruction
    presets = [preset.get("instruction") for preset in PRESETS.values()]
    if file and (task.takes_preset or file not in presets):
        text = read_instruction(file)
    return task.make_format().adapt_instruction(text)


def read_instruction(path: str) -> str:
    """Returns the instruction in a file; Fault if it is empty."""
    try:
        text = Path(path).read_text("utf-8-sig").strip()
    except (OSError, ValueError) as e:
        raise Fault(f"--instruction {path}: cannot be read as UTF-8 ({e})") from None
    if not text:
        raise Fault(f"--instruction {path}: the file is empty")
    return text


def check_questions(task: Task) -> None:
    """Raises Fault unless there is something to train and to test on, and every question has an id
    of its own."""
    for split in ("train", "valid", "test"):
        where = f"--task {task.cfg.task}: of {split}"
        questions = task.questions(split)
        for q in questions:
            if not all(isinstance(gold, str) for gold in q.golds):
                raise Fault(
                    f"{where} question {q.id} has the golds {q.golds}; give a list of texts"
                )
        if not questions and split != "valid":
            raise Fault(f"{where} there are no questions; return at least one")
        for id, n in Counter(q.id for q in questions).items():
            if n > 1:
                raise Fault(f"{where} {n} questions have the id {id!r}; make it unique")
