"""What a step and a run come to: the metrics of a step, the table at the end."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from population import Population, mean_rewards
from tasks import Task, Trajectory
from tasks.metrics import average_by_source, compute_metrics
from tasks.tools import Failure, Tool

Row = dict[str, Any]
LINE = {  # column of metrics.jsonl -> how a line shows it
    "reward": "reward {:.2f}", "logp": "log-prob {:.3f}", "kl": "KL {:.4f}", "P": "|P| {}", "w_best": "best w {:.2f}",
}  # fmt: skip
SHARES = {"em": "EM", "f1": "F1"}  # metrics that lie between 0 and 1, as they are shown
SIGNS = 6  # questions that must change, all one way, before a sign test at 5 % tells it from chance


def step_metrics(task: Task, taus: Sequence[Trajectory], G: int, names: Sequence[str] = ()) -> Row:
    """Returns what the rollouts of a step show, by the names in metrics.jsonl and in the
    tracker."""
    n = len(taus)
    groups = [taus[k : k + G] for k in range(0, n, G)]
    return {
        **average_by_source(taus, [{"reward": tau.reward} for tau in taus]),
        **average_by_source(taus, compute_metrics(task, taus, names)),
        **{tool.plural: sum(tau.served(tool.tag) for tau in taus) / n for tool in task.tools},
        **{name: x for tool in task.tools for name, x in count_useless(taus, tool).items()},
        "answered": sum(tau.stop == "answer" for tau in taus) / n,
        "failed": sum(tau.failed for tau in taus) / n,
        "valid_actions": 1
        - sum(tau.invalid for tau in taus) / max(1, sum(len(tau.turns) for tau in taus)),
        "prompt_tokens": sum(tau.prompt_tokens for tau in taus) / n,
        "response_tokens": sum(sum(tau.mask) for tau in taus) / n,
        "context_tokens": sum(len(tau.ids) for tau in taus) / n,
        "zero_variance_groups": sum(len({tau.reward for tau in g}) == 1 for g in groups)
        / len(groups),
        "n": {str(j): n for j, n in sorted(Counter(tau.instruction for tau in taus).items())},
        "r_bar": {str(j): round(r, 4) for j, r in sorted(mean_rewards(taus).items())},
    }


def weights(P: Population) -> Row:
    """Returns the weights of a population, and by which instruction it would be evaluated, for
    metrics.jsonl."""
    best = P.best()
    return {
        "P": len(P),
        "best": best.id,
        "w_best": best.w,
        "w": {str(I.id): round(I.w, 4) for I in P.active},
        "p": {
            str(I.id): round(float(p), 4) for I, p in zip(P.active, P.probabilities(), strict=True)
        },
    }


def count_useless(taus: Sequence[Trajectory], tool: Tool) -> Row:
    """Returns the shares of a tool's results that hold nothing, and that say why a call failed, if
    one did."""
    turns = [turn for tau in taus for turn in tau.turns if turn.tool == tool.tag]
    results = [turn.result for turn in turns if turn.result is not None]
    failed = sum(isinstance(result, Failure) for result in results)
    if not results:
        return {}
    empty = {f"{tool.plural}/empty": sum(not any(result) for result in results) / len(results)}
    return empty | ({f"{tool.plural}/failed": failed / len(results)} if failed else {})


def line(row: Row, tools: Sequence[str]) -> str:
    """Returns a step's row of metrics.jsonl in a line; `tools`: the columns that count their
    calls."""
    reward, *others = LINE.items()
    # no tool is called where demonstrations train
    calls = count_calls(row, [tool for tool in tools if tool in row])
    shown = dict([reward, *((name, f"{name} {{:.2f}}") for name in calls), *others])
    return "  ".join(
        form.format(x) for name, form in shown.items() if (x := (row | calls).get(name)) is not None
    )


def count_calls(row: Row, tools: Sequence[str]) -> dict[str, float]:
    """Returns the calls of each tool, or their sum where there are more than three, for which a
    line has no room."""
    if len(tools) > 3:
        return {"tool calls": sum(row[tool] for tool in tools)}
    return {tool: row[tool] for tool in tools}


def added_sentences(text: str, parent: str, width: int = 90) -> str:
    """Returns the sentences of an instruction that its parent does not have, on one line."""
    sentences = [x for x in re.split(r"(?<=[.!?])\s+", text) if x not in parent]
    # the sentence about tags comes last
    added = " ".join(sorted(sentences, key=lambda x: "<" in x))
    return (added if len(added) <= width else added[: width - 5] + "[...]").replace(
        "\n", " "
    ) or "(other order)"


def lineage(parents: Mapping[int, int | None], id: int) -> list[int]:
    """Returns the ids from the first instruction to `id`; `parents`: of each instruction."""
    line = [id]
    while (parent := parents.get(line[0])) is not None:
        line.insert(0, parent)
    return line


def conclusion(means: dict[str, float], n: int, metric: str, spread: dict[str, float]) -> str:
    """Returns whose gain it is in one sentence: the policy's, the instruction's, or only the
    pair's.

    `means`: row of the final table -> mean of the metric over `n` questions; `spread`: its standard
    deviation over them. A gain below two standard errors, or of too few questions, counts as none.
    """
    first, policy = "first policy, first instruction", "trained policy, first instruction"
    end = "trained policy, I_star" if "trained policy, I_star" in means else policy
    gain, noise = (
        means[end] - means[first],
        2 * math.hypot(spread[end], spread[first]) / math.sqrt(n),
    )
    gained = f"{label(metric)} {gain:+.2f}"
    if noise and abs(gain) <= noise:
        return f"{gained}: nothing gained that {n} questions could show (two standard errors are {noise:.2f})."
    right_or_wrong = all(
        math.isclose(spread[x] ** 2, means[x] * (1 - means[x]), abs_tol=1e-9) for x in (first, end)
    )
    if n < SIGNS or (right_or_wrong and round(abs(gain) * n) < SIGNS):
        asked = many(n, "question")
        return f"{gained}: nothing gained that {asked} could show (a sign test takes {SIGNS} that change)."
    if end == policy:
        return f"{gained} under the first instruction."
    if gain < 0:
        return f"{gained}: the run has done harm."
    by_policy, by_instruction = (
        means[policy] - means[first],
        means["first policy, I_star"] - means[first],
    )
    text = f"{gained}; the policy alone has {by_policy:+.2f}, the instruction alone {by_instruction:+.2f}: "
    if by_policy + by_instruction <= 0.6 * gain:
        return text + "the pair is worth more than its parts."
    if by_instruction >= 0.8 * gain:
        return text + "a search over instructions would have been enough."
    return text + (
        "training would have been enough." if by_policy >= 0.8 * gain else "the parts add up."
    )


def ending(summary: Row, path: Path) -> str:
    """Returns the last screen of a run: metrics, the winning instruction, its cost, where the files
    are."""
    calls = {name: count_calls(row, summary["tools"]) for name, row in summary["held_out"].items()}
    rows: dict[str, Row] = {name: row | calls[name] for name, row in summary["held_out"].items()}
    digits = dict.fromkeys(summary["metrics"], 3) | {
        name: 2 for some in calls.values() for name in some
    }
    lines = [
        "",
        "held-out questions, greedy",
        "  ".join([" " * 33, *(f"{label(k):>9}" for k in digits)]),
    ]
    lines += [
        "  ".join([f"{name:33}", *(f"{row[k]:9.{n}f}" for k, n in digits.items())])
        for name, row in rows.items()
    ]
    lines += ["(by source in summary.json)", "", summary["conclusion"]]
    cost = summary["ledger"]
    line = " -> ".join(f"#{j}" for j in summary["generations"])
    lines += ["", f"best instruction, I_star ({line}):", summary["I_star"], ""]
    if cost["optimizer_calls"]:
        lines += [
            f"cost: {many(cost['optimizer_calls'], 'optimizer call')} ({cost['optimizer_tokens']:,} tokens, "
            f"{cost['optimizer_seconds']:.1f} s); {many(cost['verification_rollouts'], 'verification rollout')} on "
            f"{cost['training_rollouts']:,} of training: {100 * summary['overhead_inference']:.1f} % "
            "(the paper: 1.4-7 %)"
        ]
    lines += [
        f"{many(summary['steps'], 'step')} in {summary['seconds']:.0f} s. {path}: summary.json, I_star.txt, policy/, "
        "metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/"
    ]
    return "\n".join(lines)


def label(metric: str) -> str:
    """Returns a metric's name as it is shown."""
    return SHARES.get(metric, metric)


def many(n: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
