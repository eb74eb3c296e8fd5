"""Makes the task that the flags name: its class, reward, tools and first instruction."""

import copy
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from config import PRESETS, Config
from plumbing.faults import Fault, together
from plumbing.outside import JOINERS, printable, without_secrets
from plumbing.stop import leads
from tasks.plugs import find_plug, import_named
from tasks.task import Task
from tasks.tools import Tool, check_words
from tasks.trajectories import Question


def load_task(cfg: Config, given: Any = None) -> Task:
    """Returns the task that --task, --tools and --reward name. Raises Fault, or what the task's own
    code raises.

    `given`: from Python, a class in place of that name, or a task, of which it returns a copy.
    """
    where = f"--task {cfg.task}"
    # the class, with the reward of --reward
    kind = given if isinstance(given, type) else type(given)
    if given is None or kind is str:
        word, _, rest = cfg.task.partition(":")
        plug = find_plug(f"--task {word}")
        kind = plug(rest) if plug else import_named(where, cfg.task, "class")
    if not issubclass(kind, Task):
        plug = find_plug("--task")  # for classes of another convention
        if not plug:
            raise Fault(f"{where}: it does not extend tasks.Task")
        kind = plug(kind, where)
    if cfg.reward:
        plug = find_plug("--reward")
        if not plug:
            raise Fault(
                f"--reward {cfg.reward}: it needs a plug-in that is not here; take the whole project"
            )
        kind = plug(kind, cfg.reward)

    # The task itself gets those of --tools that have no module.
    words = cfg.tools.split(",")
    specs = [word for word in words if ":" in word]
    others = [word for word in words if ":" not in word]
    cfg = replace(cfg, tools=",".join(others) or "none")

    # an object of it, which reads its questions once
    if kind.__abstractmethods__:
        raise Fault(f"{where}: it does not define {', '.join(sorted(kind.__abstractmethods__))}")
    task: Task
    if isinstance(given, Task):
        task = copy.copy(given)
        task.__class__, task.cfg = kind, cfg  # `kind` may have the reward of --reward
    else:
        task = kind(cfg)
    questions = task.questions  # asked once a split: it may draw them
    task.questions = cache(lambda split: list(questions(split) or ()))  # type: ignore[method-assign]
    for spec in specs:
        add_tools(task, spec)
    check_words(where, task.tools)
    return task


def add_tools(task: Task, spec: str) -> None:
    """Adds the tools that a part of --tools names, module:function or those of a plug-in. Raises
    Fault if none fits."""
    where, (word, _, rest) = f"--tools {spec}", spec.partition(":")
    plug = find_plug(f"--tools {word}")
    if plug:
        found = plug(rest.strip(), where)
    else:
        as_tool = import_named(where, "tasks.functions:TypedFunction", "class")
        found = [as_tool(import_named(where, spec, "function"), where)]
    task.tools = [*task.tools, *choose_fitting(where, task.tools, found)]


def choose_fitting(where: str, others: Sequence[Tool], found: Sequence[Tool | Fault]) -> list[Tool]:
    """Returns the tools that the policy can call beside others, and tells which are left out; a
    Fault is one of a server that cannot be offered. Raises Fault if none fits."""
    fitting: list[Tool] = []
    faults = []
    for tool in found:
        try:
            if isinstance(tool, Fault):
                raise tool
            check_words(without_secrets(where), [*others, *fitting, tool])
            fitting.append(tool)
        except Fault as e:
            faults.append(e)
    if not fitting:
        raise faults[0]
    if leads():
        for fault in faults:
            print(printable(f"note: {fault}; it is left out"), flush=True)
    return fitting


def choose_instruction(task: Task) -> str:
    """Returns the instruction with which a run begins: that of --instruction, else the task's.
    Raises Fault.

    Where --instruction is only a preset's, it is for search QA that has none of its own.
    """
    text, file = task.instruction, task.cfg.instruction
    author = next(kind for kind in type(task).__mro__ if "instruction" in vars(kind))
    own = author.__module__ != "tasks.search_qa" or "instruction" in vars(task)
    if file and not (own and file in [preset.get("instruction") for preset in PRESETS.values()]):
        text = read_instruction(file)
    return task.make_format().adapt_instruction(text)


def read_instruction(path: str) -> str:
    """Returns the instruction in a file; Fault if it is empty, or holds what no revision of it may
    hold.

    A byte order mark, invisible format characters and other line ends are taken out: an editor puts
    them there.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, ValueError) as e:
        raise Fault(f"--instruction {path}: cannot be read as UTF-8 ({e})") from None
    text = "\n".join(text.splitlines())
    text = "".join(c for c in text if unicodedata.category(c) != "Cf" or c in JOINERS).strip()
    if not text:
        raise Fault(f"--instruction {path}: the file is empty")
    for c in text:
        if printable(c) != c:
            raise Fault(f"--instruction {path}: it holds the control character {c!r}; take it out")
    return text


def check_questions(task: Task) -> None:
    """Raises Fault unless there is something to train and to test on, and every question has an id
    of its own."""
    together(*(partial(_check_split, task, split) for split in ("train", "valid", "test")))


def _check_split(task: Task, split: str) -> None:
    questions = task.questions(split)
    for q in questions:
        known = isinstance(q, Question) and isinstance(q.golds, tuple)
        if not known or not all(isinstance(text, str) for text in (q.text, *q.golds)):
            raise Fault(
                f"--task {task.cfg.task}: of {split} it has {q!r:.99}; return Question(id, text, [gold, ...])"
            )
    if not questions and split != "valid":
        raise Fault(
            f"--task {task.cfg.task}: there are no questions to {split} on; return at least one"
        )
    for id, n in Counter(q.id for q in questions).items():
        if n > 1:
            raise Fault(
                f"--task {task.cfg.task}: several {split} questions have the id {id!r}; make it unique"
            )
