"""What a run comes to: the sentence, the table and the speed at its end."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from plumbing.files import Row

START = "first policy, first instruction"
TRAINED = "trained policy, first instruction"
WON = "trained policy, I_star"
TABLE = (WON, TRAINED, START, "first policy, I_star")
SHARES = {"em": "EM", "f1": "F1"}  # metrics that lie between 0 and 1, as they are shown
SIGNS = 6  # questions that must change, all one way, before a sign test at 5 % tells it from chance

SPEEDS = {  # column of time/ -> how it is said
    "sampled_per_s": "{:,.0f} tokens/s sampled",
    "trained_per_s": "{:,.0f} tokens/s of updates",
    "mfu": "MFU {:.2f} (6 FLOPs a parameter and token, attention apart)",
}


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


def conclude(means: Row, n: int, metric: str, spread: Row) -> str:
    """Returns whose gain it is in one sentence: the policy's, the instruction's, or only the
    pair's.

    `means`: row of the final table -> mean of the metric over `n` questions; `spread`: its standard
    deviation over them. A gain below two standard errors, or of too few questions, counts as none.
    """
    end = WON if WON in means else TRAINED
    gain = means[end] - means[START]
    gained, asked = f"{label(metric)} {gain:+.2f}", many(n, "question")

    # is it more than chance?
    noise = 2 * math.hypot(spread[end], spread[START]) / math.sqrt(n)
    if noise and abs(gain) <= noise:
        return f"{gained}: nothing gained that {asked} could show (two standard errors are {noise:.2f})."
    right_or_wrong = all(
        math.isclose(spread[x] ** 2, means[x] * (1 - means[x]), abs_tol=1e-9) for x in (START, end)
    )
    if n < SIGNS or (right_or_wrong and round(abs(gain) * n) < SIGNS):
        shown = f"nothing gained that {asked} could show"
        if right_or_wrong and means[end] == 1:
            shown = f"{asked} and all solved, but no gain is shown"
        return f"{gained}: {shown} (a sign test takes {SIGNS} that change)."

    # whose is it?
    if end == TRAINED:
        return f"{gained} under the first instruction."
    if gain < 0:
        return f"{gained}: the run has done harm."
    by_policy = means[TRAINED] - means[START]
    by_instruction = means["first policy, I_star"] - means[START]
    if by_policy + by_instruction <= 0.6 * gain:
        whose = "the pair is worth more than its parts"
    elif by_instruction >= 0.8 * gain:
        whose = "a search over instructions would have been enough"
    elif by_policy >= 0.8 * gain:
        whose = "training would have been enough"
    else:
        whose = "the parts add up"
    alone = f"the policy alone has {by_policy:+.2f}, the instruction alone {by_instruction:+.2f}"
    return f"{gained}; {alone}: {whose}."


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


def tell_vain(summary: Row) -> str:
    """Returns a sentence if instructions should have changed, and did not."""
    if summary.get("evolved") is not False or summary["mode"] == "static":
        return ""
    n = summary["ledger"]["evolutions"]
    changed = f"{many(n, 'evolution')} changed no instruction" if n else "no evolution took place"
    return f"{changed}: this is no result of --mode {summary['mode']} (evolved: false in summary.json)."


def tell_speed(steps: Sequence[Row]) -> str:
    """Returns tokens a second and where the steps' time went, in a line."""
    speed, phases = measure_speed(steps), count_seconds(steps)
    said = [form.format(speed[name]) for name, form in SPEEDS.items() if name in speed]
    total = sum(phases.values())
    shares = [f"{name} {x / total:.0%}" for name, x in phases.items() if x > 0.005 * total]
    return f"speed: {', '.join(said)}; of a step's time {', '.join(shares)}"


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
    lines += ["", summary["conclusion"], ""]
    lines += [f"best instruction, I_star ({line}):", summary["I_star"], ""]
    cost = summary["ledger"]
    if cost["optimizer_calls"]:
        lines.append(
            f"cost: {many(cost['optimizer_calls'], 'optimizer call')} ({cost['optimizer_tokens']:,} tokens, "
            f"{cost['optimizer_seconds']:.1f} s); {many(cost['verification_rollouts'], 'verification rollout')} on "
            f"{cost['training_rollouts']:,} of training: {100 * summary['overhead_inference']:.1f} % "
            "(the paper: 1.4-7 %)"
        )
    if cost["evolutions"]:
        lines.append(
            f"P: {many(cost['empty_places'], 'place')} stayed empty in {many(cost['evolutions'], 'evolution')}; "
            f"one instruction alone in {cost['steps_of_one']} of the {cost['steps_until_last']} steps until the last"
        )
    return "\n".join(lines)


def label(metric: str) -> str:
    """Returns a metric's name as it is shown."""
    return SHARES.get(metric, metric)


def many(n: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
