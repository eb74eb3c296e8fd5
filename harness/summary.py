"""What a step and a run come to: the metrics of a step, the table at the end."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import em, f1
from page.verdict import conclusion
from population import Instruction, Population, mean_rewards
from rollout import Trajectory
from tools import Tool

Row = dict[str, Any]


def step_metrics(taus: Sequence[Trajectory], P: Population, G: int, tools: Sequence[Tool]) -> Row:
    """Returns what the rollouts of a step show, by the names in metrics.jsonl and in the tracker.

    `w`, `p` and `best` include this step's rewards: the weights by which P is ranked. `rating`, with --rank paired and
    --mode espl: estimate and standard error.
    """
    n = len(taus)
    groups = [taus[k : k + G] for k in range(0, n, G)]
    best = P.best()
    exact = [em(tau.prediction, tau.question.golds) for tau in taus]
    ratings = {str(I.id): [round(x, 4) for x in I.rating] for I in P.active if I.rating}
    return {
        "reward": sum(tau.reward for tau in taus) / n,
        **by_source("reward", taus, [tau.reward for tau in taus]),
        "em": sum(exact) / n,
        **by_source("em", taus, exact),
        "f1": sum(f1(tau.prediction, tau.question.golds) for tau in taus) / n,
        **{tool.plural: sum(tau.served(tool.tag) for tau in taus) / n for tool in tools},
        "answered": sum(tau.stop == "answer" for tau in taus) / n,
        "valid_actions": 1 - sum(tau.invalid for tau in taus) / max(1, sum(len(tau.turns) for tau in taus)),
        "prompt_tokens": sum(tau.prompt_tokens for tau in taus) / n,
        "response_tokens": sum(sum(tau.mask) for tau in taus) / n,
        "context_tokens": sum(len(tau.ids) for tau in taus) / n,
        "zero_variance_groups": sum(len({tau.reward for tau in g}) == 1 for g in groups) / len(groups),
        "P": len(P),
        "best": best.id,
        "w_best": best.w,
        "w": {str(I.id): round(I.w, 4) for I in P.active},
        "p": {str(I.id): round(float(p), 4) for I, p in zip(P.active, P.probabilities(), strict=True)},
        **({"rating": ratings} if ratings else {}),
        "n": {str(j): n for j, n in sorted(Counter(tau.instruction for tau in taus).items())},
        "r_bar": {str(j): round(r, 4) for j, r in sorted(mean_rewards(taus).items())},
    }


def by_source(name: str, taus: Sequence[Trajectory], values: Sequence[float]) -> dict[str, float]:
    """Returns the mean of `values`, one of each trajectory, over each source of questions, as `name/source`."""
    found: dict[str, list[float]] = {}
    for tau, value in zip(taus, values, strict=True):
        found.setdefault(f"{name}/{tau.question.source}", []).append(value)
    return {key: sum(x) / len(x) for key, x in sorted(found.items())}


def added_sentences(text: str, parent: str, width: int = 90) -> str:
    """Returns the sentences of an instruction that its parent does not have, on one line."""
    sentences = [x for x in re.split(r"(?<=[.!?])\s+", text) if x not in parent]
    added = " ".join(sorted(sentences, key=lambda x: "<" in x))  # the sentence about tags comes last
    return (added if len(added) <= width else added[: width - 5] + "[...]").replace("\n", " ") or "(other order)"


def lineage(P: Population, I: Instruction) -> list[int]:
    """Returns the ids from the first instruction to I."""
    line = [I.id]
    while (parent := P.family[line[0]].parent) is not None:
        line.insert(0, parent)
    return line


def ending(summary: Row, rows: dict[str, Row], path: Path) -> str:
    """Returns the last screen of a run: EM by source, the winning instruction, its cost, where the files are."""
    sources = sorted({k for row in rows.values() for k in row if k.startswith("em/")})
    width = max(map(len, rows)) + 2
    head = f"{'':{width}}{'EM':>7}" + "".join(f"{k[3:]:>{max(9, len(k) - 1)}}" for k in sources) + f"{'searches':>10}"
    lines = ["", "held-out questions, greedy", head]
    for name, row in rows.items():
        cells = "".join(f"{row[k]:>{max(9, len(k) - 1)}.3f}" for k in sources)
        lines.append(f"{name:{width}}{row['em']:>7.3f}{cells}{row.get('searches', 0):>10.2f}")
    lines += ["", conclusion({name: row["em"] for name, row in rows.items()}, summary["questions"])]
    cost = summary["ledger"]
    lines += ["", f"I_star ({' -> '.join(f'#{j}' for j in summary['generations'])}):", summary["I_star"], ""]
    lines += [
        f"cost: {cost['optimizer_calls']} optimizer calls ({cost['optimizer_tokens']} tokens, "
        f"{cost['optimizer_seconds']:.1f} s); {cost['verification_rollouts']} verification rollouts on "
        f"{cost['training_rollouts']} of training: {100 * summary['overhead_inference']:.1f} % (the paper: 1.4-7 %)",
        f"{summary['steps']} steps in {summary['seconds']:.0f} s. {path}: summary.json, I_star.txt, policy/, "
        "metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/",
    ]
    return "\n".join(lines)
