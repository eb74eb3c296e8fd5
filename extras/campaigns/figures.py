"""The figures of results/: the paper's Fig. 2, 3, 5 and 6 with the world's runs, drawn from the committed rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from extras.campaigns.arms import ARMS  # noqa: E402
from extras.campaigns.seeds import share  # noqa: E402

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]
COLORS = {"inspo": "C0", "static": "C3", "frozen": "C2"}
PANELS = {
    "reward": "(a) reward of a step's rollouts", "searches": "(b) searches a question",
    "prompt_tokens": "(c) prompt, tokens", "response_tokens": "(d) sampled tokens a question",
}  # fmt: skip


def draw(rows: Rows, folder: Path) -> list[str]:
    """Writes the figures for which there are rows; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    pair = [arm for arm in COLORS if rows.get(arm)]
    if {"inspo", "static"} <= {*pair}:
        fig, axes = plt.subplots(1, 4, figsize=(14, 3.2))
        for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
            for arm in ("inspo", "static"):
                seeds_of(ax, [smooth(row["curves"][name]) for row in rows[arm]], COLORS[arm], arm)
            ax.set(title=title, xlabel="step t")
        made.append(save(fig, axes[0], folder / "fig2.png"))
    order = ("static", "before", "after", "paraphrase", "history", "constant", "unverified", "inspo")
    ablations = [arm for arm in order if rows.get(arm)]
    if len(ablations) > 2:
        fig, ax = plt.subplots(figsize=(7.5, 4.6))
        for arm in ablations:
            em = [row["em"] for row in rows[arm]]
            ax.plot(em, [f"{ARMS[arm].what}\n{share(em)} above 0.5"] * len(em), "o", color="C0", alpha=0.5)
        ax.margins(y=0.08)
        ax.grid(axis="y", alpha=0.3)
        ax.set(xlabel="held-out exact match after training, a dot a seed", xlim=(0, 1.02))
        made.append(save(fig, None, folder / "fig3.png"))
    if pair:
        fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
        for ax, column, title in (
            (axes[0], 1, "held-out EM, greedy"),
            (axes[1], 2, "under one good fixed instruction"),
        ):
            for arm in pair:
                points = [evals_of(row, column) for row in rows[arm]]
                if points[0]:
                    steps = [t for t, _ in points[0]]
                    seeds_of(ax, [[em for _, em in seed] for seed in points], COLORS[arm], arm, steps)
            ax.set(title=title, xlabel="step t", ylim=(0, 1.02))
        made.append(save(fig, axes[0], folder / "fig5.png"))
    sweeps = {"(a) N_parent": {"inspo": "1", "parents-2": "2", "parents-3": "3", "static": "Search-R1"},
              "(b) tau_s": {"tau-0.05": "0.05", "inspo": "0.2", "tau-1.0": "1.0", "static": "Search-R1"}}  # fmt: skip
    if all(any(rows.get(arm) for arm in arms if arm not in ("inspo", "static")) for arms in sweeps.values()):
        fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
        for ax, (title, arms) in zip(axes, sweeps.items(), strict=True):
            for k, arm in enumerate(arm for arm in arms if rows.get(arm)):
                color = COLORS["static"] if arm == "static" else f"C{(0, 1, 4)[k % 3]}"
                seeds_of(ax, [smooth(row["curves"]["reward"]) for row in rows[arm]], color, arms[arm])
            ax.set(title=title, xlabel="step t", ylabel="reward")
            ax.legend(frameon=False, fontsize=8)
        made.append(save(fig, None, folder / "fig6.png"))
    return made


def learning(rows: Rows, path: Path) -> str:
    """Draws INSPO and its two controls, every seed as a thin line and their mean; returns the file's name."""
    fig, axes = plt.subplots(1, 4, figsize=(13, 3.3))
    panels: list[tuple[str, Callable[[Row], list[tuple[int, float]]]]] = [
        ("reward of a step's rollouts\n(temperature 1, mean of 5 steps)", lambda row: steps_of(row, "reward")),
        ("searches a question\n(mean of 5 steps)", lambda row: steps_of(row, "searches")),
        ("held-out exact match, greedy,\nunder the run's best instruction", lambda row: evals_of(row, 1)),
        ("the same policies under one good\ninstruction, never the run's own", lambda row: evals_of(row, 2)),
    ]
    for ax, (title, points) in zip(axes, panels, strict=True):
        for arm in [arm for arm in COLORS if rows.get(arm)]:
            color, seeds = COLORS[arm], [points(row) for row in rows[arm] if points(row)]
            for seed in seeds:
                ax.plot(*zip(*seed, strict=True), color=color, lw=1, alpha=0.35)
            steps = sorted(set.intersection(*({t for t, _ in seed} for seed in seeds))) if seeds else []
            means = [np.mean([dict(seed)[t] for seed in seeds]) for t in steps]
            ax.plot(steps, means, color=color, lw=2.2, label=f"{arm}: {ARMS[arm].what}")
        ax.set_title(title, fontsize=9, loc="left")
        ax.set(xlabel="step t", xlim=(0, None))
        ax.grid(axis="y", alpha=0.3)
        if "searches" not in title:
            ax.set_ylim(0, 1)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=3, frameon=False, fontsize=8)
    return save(fig, None, path, bottom=0.08)


def steps_of(row: Row, name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of a run's curve, each the mean of 5 steps."""
    return list(enumerate(smooth(row["curves"][name]), 1))


def evals_of(row: Row, column: int) -> list[tuple[int, float]]:
    """Returns (step, EM) of a run's evaluations: 1 under its best instruction, 2 under the canary, if played."""
    return [(e[0], e[column]) for e in row["evals"] if e[column] is not None]


def smooth(y: Sequence[float], n: int = 5) -> list[float]:
    """Returns the mean of the last `n` values at each step."""
    return [float(np.mean(y[max(0, k - n + 1) : k + 1])) for k in range(len(y))]


def seeds_of(ax: Any, curves: Sequence[Sequence[float]], color: str, label: str, steps: Sequence[int] = ()) -> None:
    """Draws every seed's curve as a thin line, and their mean: seeds of an arm may end in two places."""
    n = min(map(len, curves))
    x = steps[:n] if len(steps) else range(1, n + 1)
    for curve in curves:
        ax.plot(x, curve[:n], color=color, lw=0.8, alpha=0.35)
    ax.plot(x, np.mean([curve[:n] for curve in curves], axis=0), color=color, lw=2, label=label)


def save(fig: Any, legend: Any, path: Path, bottom: float = 0.0) -> str:
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        legend.legend(frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, bottom, 1, 1))
    fig.savefig(path, dpi=130)
    plt.close(fig)
    return path.name
