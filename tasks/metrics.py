"""Rewards and metrics of trajectories, by the task, and their means."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from statistics import fmean
from typing import Any

from plumbing.faults import Fault
from plumbing.stop import may_stop
from tasks.task import Task
from tasks.tools import COLUMNS, Failure, Tool
from tasks.trajectories import Trajectory, Turn


def set_rewards(task: Task, taus: Sequence[Trajectory]) -> None:
    """Sets `reward` and `failed` of the trajectories; raises Fault unless the task returns a
    number for each. A task is not asked about none."""
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
    unordered = Mapping, Set, bytes, bytearray
    returned: Any = f"{rewards!r:.80}"
    if isinstance(rewards, Collection) and not isinstance(rewards, unordered):
        returned = len(rewards)
    if returned != len(taus):
        raise Fault(
            f"{where} returned {returned} for {len(taus)} trajectories; return a list with a number for each"
        )
    read = []
    for tau, r in zip(taus, rewards, strict=True):
        absent = optional and r is None
        if not absent and not is_finite(r):
            raise Fault(
                f"{where} of question {tau.question.id} is {r!r:.80}; return a finite number"
            )
        read.append(None if absent else float(r))
    return read


def compute_metrics(
    task: Task, taus: Sequence[Trajectory], names: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Returns the metrics of rewarded trajectories; Fault if their names differ, or one is no
    number."""
    rows = [task.metrics(tau) for tau in taus]
    if not rows:
        return []
    first: Any = names or rows[0]
    for tau, row in zip(taus, rows, strict=True):
        where = f"--task {task.cfg.task}: its metrics of question {tau.question.id}"
        named = isinstance(row, Mapping) and row and list(row) == list(first)
        if not named or not all(map(is_finite, row.values())):
            raise Fault(
                f"{where} are {row}, the first {first}; return finite numbers of the same names for all"
            )

    # the first part counts: `time/total` and `searches/empty` are a run's own columns
    taken = COLUMNS | {tool.plural for tool in task.tools}
    for name in first:
        if name.partition("/")[0] in taken:
            raise Fault(
                f"--task {task.cfg.task}: its metric {name}: that is measured in every run; give it another name"
            )
    return [{name: float(x) for name, x in row.items()} for row in rows]


def is_finite(x: Any) -> bool:
    try:
        return math.isfinite(x)
    except (TypeError, ValueError, OverflowError):
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


def count_useless(turns: Sequence[Turn], tool: Tool) -> dict[str, float]:
    """Returns the shares of a tool's results that hold nothing, and that say why a call failed, if
    one did."""
    mine = [turn for turn in turns if turn.tool == tool.tag]
    results = [turn.result for turn in mine if turn.result is not None]
    if not results:
        return {}
    failed = fmean(isinstance(result, Failure) for result in results)
    row = {f"{tool.plural}/empty": fmean(not any(result) for result in results)}
    return row | ({f"{tool.plural}/failed": failed} if failed else {})
