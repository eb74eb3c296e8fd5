"""What a run comes to: the sentence, the table and the speed at its end."""

from collections.abc import Mapping, Sequence
from statistics import median

from plumbing.files import Row

START = "first policy, first instruction"
TRAINED = "trained policy, first instruction"
WON = "trained policy, I_star"
TABLE = (WON, TRAINED, START, "first policy, I_star")
SHARES = {"em": "EM", "f1": "F1"}  # metrics that lie between 0 and 1, as they are shown

SPEEDS = ("sampled_per_s", "trained_per_s", "mfu")  # columns of time/


def count_calls(row: Row, tools: Sequence[str]) -> Row:
    """Returns the calls of each tool, or their sum where there are more than three, for which a
    line has no room."""
    if len(tools) > 3:
        return {"tool calls": sum(row[tool] for tool in tools)}
    return {tool: row[tool] for tool in tools}


def trace_lineage(parents: Mapping[int, int | None], id: int) -> list[int]:
    """Returns the ids from the first instruction to `id`; `parents`: of each instruction."""
    line: list[int] = []
    at: int | None = id
    while at is not None:
        line.insert(0, at)
        at = parents.get(at)
    return line


def count_seconds(steps: Sequence[Row]) -> Row:
    """Returns the seconds of all steps by phase: what is waited for alone is no part of what
    surrounds it."""
    names = ("rollout", "tools", "reward", "update", "verify", "evolve", "evaluate")
    phases = {name: sum(row.get(f"time/{name}", 0.0) for row in steps) for name in names}
    phases["rollout"] -= phases["tools"]  # in which every trajectory waited for a tool
    phases["evolve"] -= phases["verify"]  # the rest are the optimizer's calls
    return phases


def measure_speed(steps: Sequence[Row]) -> Row:
    """Returns the speeds of the middle step, by the keys of SPEEDS that were measured."""
    columns = {
        name: [row[f"time/{name}"] for row in steps if f"time/{name}" in row] for name in SPEEDS
    }
    return {name: median(column) for name, column in columns.items() if column}


def final_table(summary: Row) -> list[str]:
    """Returns the lines of the held-out questions' table: metrics and calls, policy by
    instruction."""
    # a column for each metric and each tool
    tools, columns = summary["tools"], {name: 3 for name in summary["metrics"]}
    rows = {name: row | count_calls(row, tools) for name, row in summary["held_out"].items()}
    for name in count_calls(summary["start"], tools):
        columns[name] = 2
    lines = ["  ".join([" " * 33, *(f"{label(name):>9}" for name in columns)])]
    for name, row in rows.items():
        cells = [f"{row[column]:9.{digits}f}" for column, digits in columns.items()]
        lines.append("  ".join([f"{name:33}", *cells]))
    return lines


def tabulate(summary: Row) -> str:
    """Returns the last screen of a run: metrics, the winning instruction, its cost."""
    lines = ["", "held-out questions, greedy", *final_table(summary)]
    line = " -> ".join(f"#{j}" for j in summary["generations"])
    lines += ["", f"best instruction, I_star ({line}):", summary["I_star"], ""]
    cost = summary["ledger"]
    if cost["optimizer_calls"]:
        lines.append(
            f"cost: {many(cost['optimizer_calls'], 'optimizer call')} ({cost['optimizer_tokens']:,} tokens, "
            f"{cost['optimizer_seconds']:.1f} s); {many(cost['verification_rollouts'], 'verification rollout')} on "
            f"{cost['training_rollouts']:,} of training: {100 * summary['overhead_inference']:.1f} % "
            "(the paper: 1.4-7 %)"
        )
    return "\n".join(lines)


def label(metric: str) -> str:
    """Returns a metric's name as it is shown."""
    return SHARES.get(metric, metric)


def many(n: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
