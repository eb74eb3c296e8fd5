"""A class in TRL's `environment_factory` convention as a task: `--task module:Class`.

An object of the class is one episode. `reset(**row)` begins it and may return a text that follows
the prompt; its other public methods, typed and documented, are the tools; `get_reward()`, or else
the attribute `reward`, scores it. Each may be `async`. Texts may be content blocks. Of several
classes, `task_of({"name": Class, ...})`, the row's `environment` names one.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from config import PRESETS, Config
from extras.plugs.rewards import wait_for
from plumbing.faults import Fault, first_line
from plumbing.outside import without_secrets
from tasks import Message, Question, Task, Trajectory
from tasks.functions import TypedFunction
from tasks.search_qa import look_up, read_rows
from tasks.tools import Failure, Tool

NO_TOOLS = ("reset", "get_reward", "close")  # public methods that the policy cannot call
# where `reset` owns the data
SEEDS = {"train": range(1000), "valid": range(0), "test": range(10**6, 10**6 + 100)}


class Block(TypedDict):
    type: Literal["text"]
    text: str


class Asked(TypedDict):
    role: Literal["system", "user"]
    content: str | list[Block]


TEXT, PROMPT = (
    TypeAdapter[str | list[Block]](str | list[Block]),
    TypeAdapter[str | list[Asked]](str | list[Asked]),
)


class Method(TypedFunction):
    """A method of an environment, and in an episode that of its own object."""

    run_async = staticmethod(wait_for)  # in the loop of `reset`, which may have opened its client

    def bind(self, tau: Trajectory) -> Method:
        bound = copy.copy(self)
        bound.tau = tau
        bound.function = getattr(tau.state, self.name, _refuse)
        return bound

    def write_result(self, result: Any) -> str:
        try:
            # strict: else it reads iterators, also one without an end
            return _text(TEXT.validate_python(result, strict=True))
        except ValidationError:
            return str(result)

    def explain(self, kind: str, why: str) -> str:
        return str({"error": why})


def _refuse(**arguments: Any) -> None:
    raise LookupError("no such tool")


class EnvironmentTask(Task):
    """Plays `environment`; the rows of --train, --valid and --test are what `reset` gets.

    A row has `prompt`, a text or messages, or `question`. `reset` must return the same text for the
    same row: the trajectories of a group are compared, and a resumed run repeats its steps. Without
    files a `reset` that takes a `seed`, or nothing, owns its data: it gets the seeds of SEEDS, one
    for a group.
    """

    environments: ClassVar[dict[str, type[Any]]]  # by name; a single one has none, ""
    unmade: ClassVar[str] = "it cannot be made"
    instruction: str = "Do what is asked with the tools that you have. When it is done, write <answer> done </answer>."

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        where = without_secrets(f"--task {cfg.task}")
        self.idle = list[Any]()  # those that wait for an episode
        self.offered = dict[type[Any], list[Tool]]()
        try:
            for kind in self.environments.values():
                self.idle.append(kind())
                self.offered[kind] = [*self.offer(self.idle[-1])]
        except Fault:
            raise
        except Exception as e:
            raise Fault(f"{where}: {self.unmade} ({first_line(e)})") from e
        if not all(self.offered.values()):
            raise Fault(
                f"{where}: it has no method to call; a tool is a public, typed, documented method"
            )
        self.tools = sum(self.offered.values(), [])
        self.opening: dict[str, str] = {}  # what `reset` returned for a row
        weakref.finalize(self, close, self.idle)  # at the end of the program, too

    def offer(self, episode: Any) -> Sequence[Tool]:
        """Returns the tools of an environment: its methods."""
        names = [
            name
            for name, _ in inspect.getmembers(type(episode), inspect.isroutine)
            if name not in NO_TOOLS and not name.startswith("_")
        ]
        methods = {name: getattr(episode, name) for name in names}
        return [
            Method(m, f"--task {self.cfg.task}: its method {name}")
            for name, m in methods.items()
            if inspect.ismethod(m)
        ]

    def kind_of(self, question: Question) -> type[Any]:
        """Returns the class that plays a question."""
        return self.environments.get("") or self.environments[question.data["environment"]]

    def questions(self, split: str) -> list[Question]:
        """Returns the rows of a split. Raises Fault if a file is missing or a row has nothing to
        ask."""
        file = getattr(self.cfg, split)
        if file in [preset.get(split) for preset in PRESETS.values()]:
            file = ""  # those are search QA's
        single = self.environments.get("")
        takes = inspect.signature(single.reset).parameters if single else {}
        named = {name for name, p in takes.items() if p.kind is not p.VAR_KEYWORD} - {"self"}
        if not file and (named == {"seed"} or len(takes) == 1):
            rows: list[Any] = [{"seed": seed} if named else {} for seed in SEEDS[split]]
            return [Question(f"{split}-{k}", "", (), "seeds", row) for k, row in enumerate(rows)]
        if not file and split == "valid":
            return []
        if not file:
            raise Fault(f"--{split} is missing: give a .jsonl or .parquet file of rows for reset()")

        # what is asked, and of which environment
        try:
            rows = list(read_rows(file))
        except Fault as e:
            raise Fault(f"--{split} {e}") from None
        questions = []
        for line, row in rows:
            text = _asked(row)
            if not isinstance(row, dict) or (single and not text):
                raise Fault(
                    f"--{split} {file}:{line}: nothing is asked that is text; fill `prompt` (a text, or messages of the"
                    " system and the user) or `question`"
                )
            if not single and row.get("environment") not in self.environments:
                names = ", ".join(self.environments)
                raise Fault(f"--{split} {file}:{line}: its `environment` is none of {names}")
            id = look_up(row, "id", default=f"{split}-{line}")
            questions.append(Question(id, text, (), Path(file).stem, row))
        return questions

    def prompt(self, instruction: str, question: Question) -> list[Message]:
        """Returns one message: the instruction, the row's text and that of `reset`."""
        if repr(question.data) not in self.opening:
            self.idle.append(self.reset(copy.deepcopy(question)))
        parts = (instruction, question.text + self.opening[repr(question.data)])
        content = "\n\n".join(filter(None, parts))
        return [{"role": "user", "content": f"{content}\n"}]

    def reset(self, question: Question) -> Any:
        """Returns an environment in which the question's row has begun. Raises Fault if it cannot
        be played."""
        kind, row, asked = self.kind_of(question), dict(question.data), repr(question.data)
        if "" not in self.environments:  # as in TRL it is not passed on
            del row["environment"]
        fitting = [k for k, episode in enumerate(self.idle) if type(episode) is kind]
        episode = self.idle.pop(fitting[-1]) if fitting else kind()
        where = f"--task {self.cfg.task}: reset()"
        try:
            inspect.signature(episode.reset).bind(**row)
        except TypeError as e:
            raise Fault(f"{where} does not take the row of question {question.id} ({e})") from None
        try:
            opening = _text(TEXT.validate_python(wait_for(episode.reset(**row)) or ""))
        except ValidationError:
            raise Fault(
                f"{where} of question {question.id} does not return a text, text blocks or None"
            ) from None
        if opening != self.opening.setdefault(asked, opening):
            raise Fault(
                f"{where} returned two texts for question {question.id}; it must depend on the row alone"
            )
        return episode

    def finish(self, tau: Trajectory) -> None:
        episode = tau.state
        score = getattr(episode, "get_reward", lambda: getattr(episode, "reward", None))
        tau.state = wait_for(score())
        # a call that took too long may still change it
        if any(isinstance(turn.result, Failure) for turn in tau.turns):
            close([episode])
        else:
            self.idle.append(episode)

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        """Returns what each episode said when it ended. Raises Fault if one said nothing."""
        if any(tau.state is None for tau in taus):
            raise Fault(
                f"--task {self.cfg.task}: no reward; define get_reward(), set self.reward, or give --reward"
            )
        return [tau.state for tau in taus]


def close(episodes: list[Any]) -> None:
    for episode in episodes:
        with suppress(Exception):  # it is no longer needed
            wait_for(getattr(episode, "close", lambda: None)())


def _asked(row: Any) -> str:
    """Returns the text of a row: its `prompt`, whose messages are joined, or its `question`; "" if
    neither is text."""
    try:
        prompt = PROMPT.validate_python(row.get("prompt") or row.get("question"))
    except (AttributeError, ValidationError):
        return ""
    if isinstance(prompt, str):
        return prompt.strip()
    return "\n\n".join(_text(message["content"]) for message in prompt).strip()


def _text(content: str | list[Block]) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def task_of(kind: type[Any] | dict[str, type[Any]], where: str = "task") -> type[EnvironmentTask]:
    """Returns the task of an environment; its `instruction` and `passing_reward`, if it has them,
    replace the task's. Raises Fault, which begins with `where`, for a class that is none."""
    if isinstance(kind, dict):
        first, *_ = (task_of(each, where) for each in kind.values())
        own = {"environments": kind, "__module__": first.__module__}
        return type("Environments", (first,), own)
    if not hasattr(kind, "reset"):
        raise Fault(
            f"{where}: it neither extends tasks.Task nor has a reset(), as TRL's environments do"
        )
    attributes: dict[str, Any] = {"environments": {"": kind}, "__module__": kind.__module__}
    for name in ("instruction", "passing_reward"):
        if hasattr(kind, name):
            attributes[name] = getattr(kind, name)
    return type(kind.__name__, (EnvironmentTask,), attributes)
