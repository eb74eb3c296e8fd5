"""`--reward`: functions that score in place of the task, `a:f` or a weighted sum, `a:f,0.2*b:g`.

The parameters of a function tell its form; each may be `async`:

    f(taus) -> a number for each, or None where it does not apply        ours
    f(completions, **columns) -> the same                                TRL's
    f(data_source, solution_str, ground_truth, extra_info) -> a number,
        or a dictionary with `score`                                     verl's
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from statistics import fmean
from threading import Thread
from typing import Any, NamedTuple

from plumbing.faults import Fault
from tasks import Question, Task, Trajectory
from tasks.search_qa import look_up
from tasks.task import import_named, read_rewards

Columns = dict[str, Any]
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# what TRL's trainer gives besides the columns; the last two fill tables that are not kept here
TRL = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
# of all of a user's coroutines, whose clients and locks belong to the loop that first used them
LOOP: asyncio.AbstractEventLoop


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # of a coroutine: only its caller gets it
            loop.run_forever()


def start_loop() -> None:
    """Starts LOOP; a fork has none of the threads."""
    global LOOP
    LOOP = asyncio.new_event_loop()
    Thread(target=run_loop, args=[LOOP], daemon=True).start()


start_loop()
os.register_at_fork(after_in_child=start_loop)


class Score(NamedTuple):
    """A function of --reward; `needs` are the columns that it cannot be called without."""

    item: str
    weight: float
    function: Callable[..., Any]
    form: str
    needs: Sequence[str] = ()

    def call(self, arguments: Columns) -> Any:
        """Calls the function with those arguments that it takes."""
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: x for name, x in arguments.items() if name in parameters}
        return self.function(**arguments)


def read_score(item: str) -> Score:
    """Returns what an item of --reward names. Raises Fault if it is no function of a known form."""
    factor, _, spec = item.replace(" ", "").rpartition("*")
    where = f"--reward {item}"
    weight = math.nan
    with suppress(ValueError):
        weight = float(factor or 1)
    if not math.isfinite(weight):
        raise Fault(f"{where}: {factor} is not a finite number; write 0.5*module:function")
    function = import_named(where, spec, "function")
    parameters = inspect.signature(function).parameters
    needs = [
        name for name, p in parameters.items() if p.default is p.empty and p.kind not in UNNAMED
    ]
    others = [name for name in needs if name not in TRL]
    if "solution_str" in parameters and {*needs} <= {*VERL}:
        return Score(item, weight, function, "verl's")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or {*TRL} & {*parameters}:
        return Score(item, weight, function, "TRL's, on messages", others)
    if len(needs) == 1 and parameters[needs[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return Score(item, weight, function, "ours")
    raise Fault(
        f"{where}: {inspect.signature(function)} has no known form; write f(taus), TRL's"
        f" f(completions, **columns) or verl's f({', '.join(VERL)})"
    )


class Rewarded(Task):
    """What --reward changes of a task."""

    scores: Sequence[Score]
    keeps_rows = True  # of the files, by search QA: their columns
    apart: Sequence[Trajectory] = ()  # those to which no function applied

    def start(self, serve: Callable[..., str]) -> str:
        forms = [f"{score.item} ({score.form})" for score in self.scores]
        return f"{super().start(serve)}\nreward: {' + '.join(forms)}".strip()

    def load(self, path: str) -> list[Question]:
        return self.with_columns(path, super().load(path))  # type: ignore[misc]  # search QA's

    def questions(self, split: str) -> list[Question]:
        return self.with_columns(split, super().questions(split))  # type: ignore[safe-super]

    def with_columns(self, where: str, asked: Sequence[Question] | None) -> list[Question]:
        """Returns the questions; Fault if one lacks a column that a function needs."""
        asked = list(asked or ())
        for score in self.scores:
            for q in asked if score.needs else ():
                if missing := {*score.needs} - {*(columns := columns_of(q))}:
                    raise Fault(
                        f"--reward {score.item}: it takes {', '.join(missing)}, and {where} question"
                        f" {q.id} has {', '.join(columns)}; add what is missing"
                    )
        return asked

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        """Returns the weighted sum of what applies. Raises Fault if a function does not score each.

        A trajectory to which nothing applies has the mean of its group's others, or else of all: it
        moves neither the policy nor its instruction's weight, and is no failure.
        """
        sums = [list[float]() for _ in taus]
        for score in self.scores:
            where = f"--reward {score.item}: the reward"
            part = read_rewards(where, self.call(score, taus), taus, optional=True)
            for terms, r in zip(sums, part, strict=True):
                terms += [] if r is None else [score.weight * r]

        rewards, groups = list(map(sum, sums)), defaultdict[int, list[float]](list)
        self.apart = [tau for tau, terms in zip(taus, sums, strict=True) if not terms]
        if self.apart:
            print(f"note: no reward applies to {len(self.apart)} of {len(taus)} trajectories")
        for tau, terms, r in zip(taus, sums, rewards, strict=True):
            groups[tau.group] += [r] if terms else []
        every = sum(groups.values(), []) or [0.0]
        return [
            r if terms else fmean(groups[tau.group] or every)
            for tau, terms, r in zip(taus, sums, rewards, strict=True)
        ]

    def failed(self, tau: Trajectory) -> bool:
        return not any(tau is other for other in self.apart) and super().failed(tau)

    def call(self, score: Score, taus: Sequence[Trajectory]) -> Any:
        """Returns what a function says of each trajectory."""
        if score.form == "ours":
            return wait_for(score.function(list(taus)))
        if score.form == "TRL's, on messages":
            return wait_for(score.call(self.completed(taus)))
        results = [score.call(self.solved(tau)) for tau in taus]
        if results and inspect.isawaitable(results[0]):
            results = wait_for(gather(results))
        return [r.get("score", r) if isinstance(r, dict) else r for r in results]

    # ---- a trajectory as TRL and verl have it

    @cached_property
    def tokenizer(self) -> Any:
        from models.model import load_tokenizer  # here: torch takes seconds to import

        return load_tokenizer(self.cfg.model)

    def plain(self, text: str) -> str:
        """Returns a text without the policy's special tokens."""
        return re.sub("|".join(map(re.escape, self.tokenizer.all_special_tokens)), "", text)

    def completed(self, taus: Sequence[Trajectory]) -> Columns:
        """Returns TRL's arguments: the columns of the rows, and a message for each turn and result.

        An evaluation drops the ids of most trajectories, whose text is then encoded again.
        """
        # copies, which functions may change
        rows = [copy.deepcopy(columns_of(tau.question)) for tau in taus]
        names = dict.fromkeys(name for row in rows for name in row)
        encode: Any = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        ignore: Any = lambda *_: None  # noqa: E731
        return {
            **{name: [row.get(name) for row in rows] for name in names},
            "prompts": [[{"role": "user", "content": tau.question.text}] for tau in taus],
            "completions": [self.messages(tau) for tau in taus],
            "completion_ids": [
                tau.ids[tau.prompt_tokens :] or encode(tau.response) for tau in taus
            ],
            "log_extra": ignore,
            "log_metric": ignore,
        }

    def messages(self, tau: Trajectory) -> list[Columns]:
        tools, messages = {tool.tag: tool for tool in self.tools}, list[Columns]()
        for turn in tau.turns:
            messages.append({"role": "assistant", "content": self.plain(turn.text)})
            if tool := tools.get(turn.tool):
                call = {"name": turn.tool, "arguments": arguments_of(turn.argument, tool.argument)}
                messages[-1]["tool_calls"] = [{"type": "function", "function": call}]
                if turn.result is not None:
                    result = {"role": "tool", "name": turn.tool, "content": tool.show(turn.result)}
                    messages.append(result)
        return messages

    def solved(self, tau: Trajectory) -> Columns:
        """Returns verl's arguments: the text of all that follows the prompt, results too."""
        row = copy.deepcopy(columns_of(tau.question))
        results = sum(turn.result is not None for turn in tau.turns)
        truth = look_up(row, "reward_model", "ground_truth", default=row["golden_answers"])
        info = {**(row.get("extra_info") or {}), "num_turns": 1 + len(tau.turns) + results}
        values = row["data_source"], self.plain(tau.response), truth, info
        return dict(zip(VERL, values, strict=True))


def columns_of(q: Question) -> Columns:
    """Returns what every question has, and the columns of its file or environment."""
    own = {"question": q.text, "golden_answers": list(q.golds), "data_source": q.source, "id": q.id}
    row = own | q.data if isinstance(q.data, dict) else own
    return {name: x for name, x in row.items() if name not in ("prompt", "completion")}


def arguments_of(text: str, name: str) -> Columns:
    """Returns the arguments of a call: the JSON object that it wrote, or else its text by name."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = text
    return arguments if isinstance(arguments, dict) else {name: text}


async def gather(results: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*results)


def rewarded(kind: type[Task], spec: str) -> type[Task]:
    """Returns the task with the reward of --reward; the first `passing_reward` that one of its
    functions has replaces the task's. Raises Fault."""
    scores = [read_score(item.strip()) for item in spec.split(",")]
    functions = [score.function for score in scores]
    marked = [f.passing_reward for f in functions if hasattr(f, "passing_reward")]
    least = [*marked, kind.passing_reward][0]
    own = {"scores": scores, "passing_reward": least, "__module__": kind.__module__}
    return type(kind.__name__, (Rewarded, kind), own)


def wait_for(result: Any) -> Any:
    """Returns the result of a user's function, `async` or not."""
    if not inspect.iscoroutine(result):
        return result
    work = asyncio.run_coroutine_threadsafe(result, LOOP)
    try:
        return work.result()
    finally:
        work.cancel()  # when this thread is asked to stop
