"""What a run's directory says, finished or not: its files, curves, costs, and which instruction leads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from plumbing.faults import Fault
from plumbing.files import Row, read_jsonl
from plumbing.outside import finite

# Settings by which runs of one group may differ: where they run, and their seed.
APART = {
    "id", "out", "seed", "resume", "device", "tracker", "retriever", "train", "valid", "test", "corpus",
    "instruction", "model",
}  # fmt: skip


@dataclass
class Run:
    """What a run has written so far."""

    path: Path
    config: Row
    steps: list[Row]  # of metrics.jsonl
    events: list[Row]  # of population.jsonl
    reflections: list[Row]
    summary: Row  # {} unless the run has finished

    @property
    def metrics(self) -> list[str]:
        """The task's metrics, the main one first."""
        return self.steps[0]["metrics"] if self.steps else []

    @property
    def tools(self) -> list[str]:
        """The names under which calls of tools are counted, a trajectory."""
        return self.steps[0]["tools"] if self.steps else []


def read_run(path: Path) -> Run:
    """Reads what is there; Fault if the directory holds no run that has begun."""
    files = [path / "config.json", path / "metrics.jsonl"]
    for file in files:
        if not file.is_file():
            raise Fault(f"{path} holds no run that has begun: {file.name} is not in it")
    config = json.loads(files[0].read_text("utf-8"))
    end = path / "summary.json"
    summary = json.loads(end.read_text("utf-8")) if end.is_file() else {}
    return Run(
        path,
        config,
        steps=read_jsonl(path / "metrics.jsonl"),
        events=read_jsonl(path / "population.jsonl"),
        reflections=read_jsonl(path / "reflections.jsonl"),
        summary=summary,
    )


def read_column(rows: Sequence[Row], name: str) -> list[float]:
    """Returns the finite numbers of a column."""
    values = [finite(row.get(name)) for row in rows]
    return [x for x in values if isinstance(x, (int, float))]


def collect_curves(run: Run) -> Row:
    """Returns {"t": [...], "series": {name: [...]}} with None where a step has no such number.

    The scores at the run's end, which are in summary.json alone, are those of the last step.
    """
    series = {}
    for name in sorted({name for row in run.steps for name in row} - {"t"}):
        if read_column(run.steps, name):
            series[name] = [finite(row.get(name)) for row in run.steps]
    for name, value in run.summary.get("end", {}).items():
        if f"test/{name}" in series:
            series[f"test/{name}"][-1] = value
    return {"t": [row["t"] for row in run.steps], "series": series}


def group_runs(runs: list[Run]) -> list[Row]:
    """Returns [{"label", "runs", "unlike"}]: runs that differ by their seed are one group; `runs`
    are places in the list, `unlike` names the settings that tell a group from the first run."""
    groups: list[Row] = []
    for k, run in enumerate(runs):
        first = runs[0].config
        names = sorted((first.keys() | run.config.keys()) - APART)
        unlike = [name for name in names if first.get(name) != run.config.get(name)]
        settings = [run.config.get(name) for name in unlike]
        for group in groups:
            if (group["unlike"], group["settings"]) == (unlike, settings):
                group["runs"].append(k)
                break
        else:
            groups.append({"runs": [k], "unlike": unlike, "settings": settings})
    for group in groups:
        n, name = len(group["runs"]), runs[group["runs"][0]].path.resolve().name
        group["label"] = name + (f" ({n} seeds)" if n > 1 else "")
    return groups


def describe_gain(run: Run) -> Row:
    """What was gained: the final table, or for an unfinished run its rewards."""
    rewards = read_column(run.steps, "reward")
    few = max(1, min(5, len(rewards) // 2))
    return {
        "table": run.summary.get("held_out", {}),
        "questions": run.summary.get("questions"),
        "few": few,
        "rewards": [fmean(rewards[:few]), fmean(rewards[-few:])] if rewards else None,
    }


def describe_winner(run: Run, tree: Row) -> Row | None:
    """The winning instruction, or the one that leads now, and what speaks for it; None without
    any."""
    by_id = {I["id"]: I for I in tree["instructions"]}
    weighed = [row for row in run.steps if row.get("w")]
    last = weighed[-1] if weighed else {"w": {}, "best": min(by_id, default=None)}
    id = run.summary.get("generations", [last["best"]])[-1]
    if id not in by_id:
        return None
    lineage = [id]
    while by_id[lineage[0]]["parents"]:
        lineage.insert(0, by_id[lineage[0]]["parents"][0])
    others = [[w, j] for j, w in last["w"].items() if j != str(id)]
    return {
        "id": id,
        "lineage": lineage,
        "w": last["w"].get(str(id)),
        "second": max(others, default=None),  # weight and id
    }


def sum_costs(run: Run) -> Row:
    """What the run has spent: calls and tokens, rollouts, seconds by phase, and how fast it was."""
    calls = [row["call"] for row in run.reflections if "call" in row]
    total = run.summary.get("seconds") or max(read_column(run.steps, "time/total"), default=0.0)
    phases = count_seconds(run.steps)
    phases["other"] = max(0.0, total - sum(phases.values()))
    rollouts, tool_calls = 0, 0.0
    for row in run.steps:
        n = sum(row.get("n", {}).values())
        rollouts += n
        tool_calls += n * sum(row.get(tool, 0.0) for tool in run.tools)
    return {
        "optimizer": run.config.get("optimizer_model"),
        "optimizer_calls": len(calls),
        "optimizer_seconds": sum(read_column(calls, "seconds")),
        "prompt_tokens": sum(read_column(calls, "prompt_tokens")),
        "completion_tokens": sum(read_column(calls, "completion_tokens")),
        "training_rollouts": rollouts,
        "verification_rollouts": sum(read_column(run.reflections, "rollouts")),
        "tool_calls": round(tool_calls),
        "seconds": total,
        "phases": phases,
        "speed": measure_speed(run.steps),
    }


def count_seconds(steps: Sequence[Row]) -> Row:
    """Returns the seconds of all steps by phase: what is waited for alone is no part of what
    surrounds it."""
    names = ("rollout", "tools", "reward", "update", "verify", "evolve", "evaluate")
    phases = {name: sum(read_column(steps, f"time/{name}")) for name in names}
    phases["rollout"] -= phases["tools"]  # in which every trajectory waited for a tool
    phases["evolve"] -= phases["verify"]  # the rest are the optimizer's calls
    return phases


def measure_speed(steps: Sequence[Row]) -> Row:
    """Returns the speeds of the middle step, those that were measured."""
    speeds = {}
    for name in ("sampled_per_s", "trained_per_s", "mfu"):
        column = read_column(steps, f"time/{name}")
        if column:
            speeds[name] = median(column)
    return speeds
