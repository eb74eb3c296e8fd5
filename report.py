"""What a run shows: a step's metrics, the two pictures of a run directory, the table at the end."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import em, f1
from harness.directory import read_jsonl
from population import Instruction, Population, mean_rewards
from rollout import Trajectory
from tools import Tool

Row = dict[str, Any]


def step_metrics(taus: Sequence[Trajectory], P: Population, G: int, tools: Sequence[Tool]) -> Row:
    """Returns what the rollouts of a step show, by the names in metrics.jsonl and in the tracker.

    `w`, `p` and `best` include this step's rewards: the weights by which P is ranked.
    """
    n = len(taus)
    groups = [taus[k : k + G] for k in range(0, n, G)]
    best = P.best()
    exact = [em(tau.prediction, tau.question.golds) for tau in taus]
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


def draw(path: Path) -> list[str]:
    """Writes reward.png and population.png and returns their names; [] without matplotlib or without a step."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row for row in read_jsonl(path / "metrics.jsonl") if "reward" in row]
    events = read_jsonl(path / "population.jsonl")
    if not steps:
        return []
    return [_reward(plt, path / "reward.png", steps, events), _population(plt, path / "population.png", steps, events)]


def _reward(plt: Any, path: Path, steps: list[Row], events: list[Row]) -> str:
    t = [row["t"] for row in steps]
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2, 1))
    top.plot(t, [row["reward"] for row in steps], color="C0", lw=1.8, label="mean reward of a step's rollouts")
    top.plot(t, [row["w_best"] for row in steps], color="C1", lw=1.2, label="best importance weight w")
    for step in {event["t"] for event in events if event["event"] == "evolve"}:
        top.axvline(step, color="0.8", lw=0.8, zorder=0)
    top.plot([], [], color="0.8", lw=0.8, label="evolution: all w restart at 0 after it")
    top.set(ylim=(0, 1.02), ylabel="reward")
    top.legend(loc="upper left", frameon=False, fontsize=9)
    bottom.plot(t, [row["searches"] for row in steps], color="C2", lw=1.8)
    bottom.set(ylabel="searches a question", xlabel="step t", ylim=(0, None))
    return _save(plt, fig, path)


def _population(plt: Any, path: Path, steps: list[Row], events: list[Row]) -> str:
    """Draws every instruction as a bar over its steps in P, coloured by w and joined to its parent."""
    span: dict[int, list[int]] = {}
    parent: dict[int, int | None] = {}
    for event in events:
        for I in event["P"]:
            parent[I["id"]] = I["parent"]
            span.setdefault(I["id"], [I["born"], I["born"]])
    w: dict[int, list[tuple[int, float]]] = {}
    for row in steps:
        for j, value in row["w"].items():
            w.setdefault(int(j), []).append((row["t"], value))
            span.setdefault(int(j), [row["t"], row["t"]])[1] = row["t"]
    fig, ax = plt.subplots(figsize=(8, 0.5 + 0.17 * max(12, len(span))))
    for j, (born, _) in span.items():
        for t, value in w.get(j, []):
            ax.hlines(j, t - 0.5, t + 0.5, colors=plt.cm.viridis(value), lw=5)
        if parent.get(j) is not None and born > 0:
            ax.plot([born, born], [parent[j], j], color="0.75", lw=0.7, zorder=0)
    ax.set(xlabel="step t", ylabel="instruction #", xlim=(-0.5, steps[-1]["t"] + 1))
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.invert_yaxis()
    fig.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 1), "viridis"), ax=ax, label="importance weight w", pad=0.02)
    return _save(plt, fig, path)


def _save(plt: Any, fig: Any, path: Path) -> str:
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)
    return path.name


def lineage(P: Population, I: Instruction) -> list[int]:
    """Returns the ids from the first instruction to I."""
    line = [I.id]
    while (parent := P.family[line[0]].parent) is not None:
        line.insert(0, parent)
    return line


def conclusion(em: dict[str, float], n: int) -> str:
    """Returns whose gain it is in one sentence: the policy's, the instruction's, or only the pair's.

    `em`: row of the final table -> exact match on `n` questions. A gain below two standard errors counts as none.
    """
    start, trained = em["first policy, first instruction"], em["trained policy, first instruction"]
    end = em.get("trained policy, I_star", trained)
    gain, noise = end - start, 2 * math.sqrt((end * (1 - end) + start * (1 - start)) / n)
    if abs(gain) <= noise:
        return f"EM {gain:+.2f}: nothing gained that {n} questions could show (two standard errors are {noise:.2f})."
    if "trained policy, I_star" not in em:
        return f"EM {gain:+.2f} under the first instruction, by training alone."
    if gain < 0:
        return f"EM {gain:+.2f}: the run has done harm."
    by_policy, by_instruction = trained - start, em["first policy, I_star"] - start
    text = f"EM {gain:+.2f}; the policy alone has {by_policy:+.2f}, the instruction alone {by_instruction:+.2f}: "
    if by_policy + by_instruction <= 0.6 * gain:
        return text + "the pair is worth more than its parts."
    if by_instruction >= 0.8 * gain:
        return text + "a search over instructions would have been enough."
    return text + ("training would have been enough." if by_policy >= 0.8 * gain else "the parts add up.")


def ending(summary: Row, rows: dict[str, Row], pictures: list[str], path: Path) -> str:
    """Returns the last screen of a run: EM by source, the winning instruction, its cost, where the files are."""
    sources = sorted({k for row in rows.values() for k in row if k.startswith("em/")})
    width = max(map(len, rows)) + 2
    head = f"{'':{width}}{'EM':>7}" + "".join(f"{k[3:]:>{max(9, len(k) - 1)}}" for k in sources) + f"{'searches':>10}"
    lines = ["", "held-out questions, greedy", head]
    for name, row in rows.items():
        cells = "".join(f"{row[k]:>{max(9, len(k) - 1)}.3f}" for k in sources)
        lines.append(f"{name:{width}}{row['em']:>7.3f}{cells}{row['searches']:>10.2f}")
    lines += ["", conclusion({name: row["em"] for name, row in rows.items()}, summary["questions"])]
    cost = summary["ledger"]
    lines += ["", f"I_star ({' -> '.join(f'#{j}' for j in summary['generations'])}):", summary["I_star"], ""]
    lines += [
        f"cost: {cost['optimizer_calls']} optimizer calls ({cost['optimizer_tokens']} tokens, "
        f"{cost['optimizer_seconds']:.1f} s); {cost['verification_rollouts']} verification rollouts on "
        f"{cost['training_rollouts']} of training: {100 * summary['overhead_inference']:.1f} % (the paper: 1.4-7 %)",
        f"{summary['steps']} steps in {summary['seconds']:.0f} s. {path}: summary.json, I_star.txt, policy/, "
        + ", ".join([*pictures, "metrics.jsonl, population.jsonl, reflections.jsonl"]),
    ]
    return "\n".join(lines)
