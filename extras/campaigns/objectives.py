"""Every objective on the embedded world, under one good instruction and with evolution: rows, table, picture.

    make bench-objectives                                                     # all, 3 seeds, 101 minutes of 2 cores
    python -m extras.campaigns.objectives --objectives grpo gspo --seeds 0    # some of them
    python -m extras.campaigns.objectives --report                            # table and picture of the rows there are

Within a mode every run plays the same number of trajectories; `static` trains under one good instruction, for under the
world's first one there is little to learn. A run's row is appended to results/objectives.jsonl when it ends, and runs
that have one are not repeated. A step has several mini-batches, or most objectives would be GRPO: where the policy has
not moved since it sampled, every ratio is 1.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

from config import HERE
from evaluation.statistics import Difference, adjusted, against, interval, over_seeds
from extras.campaigns.arms import canary, clock, collect, cpu_seconds, launch, origin, publish
from extras.campaigns.figures import plt, save
from extras.objectives import OBJECTIVES
from journal.directory import read_jsonl
from plumbing.faults import Fault, one_line

Cell = tuple[str, str]  # mode, objective
SIZES = "--batch 24 --mini 8 --K_p 3 --K_e 6 --T_e 18 --D_B 24 --eval_n 96 --save_every 1000 --keep 1"
MODES = {"static": "--mode static --T 10", "inspo": "--mode inspo --T 20"}  # static needs no evolution: half the steps
TITLES = {"static": "static, under one good instruction", "inspo": "inspo"}
ENDS = ("em", "searches", "reward", "entropy", "answered", "largest_grad_norm")  # by which two runs are told apart
LAST = 5  # steps over which entropy and answered are averaged
HONEST = (
    "A world of 0.6M parameters and a few dozen steps: it shows whether an objective learns or collapses here, and what"
    " it costs. It cannot tell which is better on a real model: constants are the papers', for models and"
    " steps a thousand times larger, no learning rate was tuned, and intervals of three seeds are wide."
)


def mean_and_half(em: list[float], questions: int) -> tuple[float, float]:
    """Returns the mean over seeds and half its 95 % interval; of a single run over its questions."""
    hits = round(em[0] * questions)
    found = over_seeds(em) if len(em) > 1 else interval([1.0] * hits + [0.0] * (questions - hits))
    return found.mean, (found.high - found.low) / 2


def run(objective: str, mode: str, seed: int, args: argparse.Namespace) -> dict:
    """Returns the row of a run of extras/objectives.py, whose directory is removed."""
    out = args.runs / f"{objective}-{mode}-seed{seed}"
    shutil.rmtree(out, ignore_errors=True)
    flags = f"{args.sizes} {MODES[mode]} --objective {objective} --seed {seed}".split() + ["--out", str(out)]
    flags += ["--instruction", str(canary(args.runs))] if mode == "static" else []
    launch(f"{objective}, {mode}, seed {seed}", ["extras/objectives.py", *flags], out)
    summary = json.loads((out / "summary.json").read_text())
    end = summary["end"]
    steps = [row for row in read_jsonl(out / "metrics.jsonl") if "reward" in row]
    taken = [row for row in steps if "grad_norm" in row]  # not skipped for a gradient that is not finite
    last = {name: float(np.mean([row[name] for row in taken[-LAST:]])) for name in ("reward", "entropy", "answered")}
    shutil.rmtree(out)
    return {
        "objective": objective, "mode": mode, "seed": seed, "sizes": args.sizes, "em": end["em"],
        "em_start": summary["start"]["em"], "searches": end["searches"], "questions": summary["questions"],
        **{name: round(x, 4) for name, x in last.items()},
        "largest_grad_norm": round(max(row["grad_norm"] for row in taken), 3),
        "trajectories": summary["ledger"]["training_rollouts"], "seconds": summary["seconds"],
        "cpu_seconds": cpu_seconds(out), **origin(summary),
    }  # fmt: skip


def cells(rows: list[dict]) -> dict[Cell, list[dict]]:
    """Returns the rows by mode and objective, in the order of OBJECTIVES."""
    of: dict[Cell, list[dict]] = {}
    for row in sorted(rows, key=lambda row: list(OBJECTIVES).index(row["objective"])):
        of.setdefault((row["mode"], row["objective"]), []).append(row)
    return of


def told_apart(found: dict[Cell, Difference], holm: dict[Cell, float]) -> str:
    """Returns a sentence: which objectives differ from grpo when all of them are compared at once."""
    names = [
        f"`{name}` ({mode}, {found[mode, name].interval.mean:+.2f})" for mode, name in holm if holm[mode, name] < 0.05
    ]
    if not names:
        seen = np.median([found[cell].visible for cell in holm])
        return (
            f"Of {len(found)} differences from `grpo` none is told from chance (Holm's p below 0.05). Alone, too,"
            f" the median test misses a true difference of {seen:.2f} at least once in five."
        )
    verb = "has" if len(names) == 1 else "have"
    return f"Of {len(found)} differences from `grpo` {len(names)} {verb} Holm's p below 0.05: {', '.join(names)}."


def no_different(of: dict[Cell, list[dict]]) -> str:
    """Returns a sentence: which objectives' runs are grpo's to the digit, so that their rows say nothing of them."""
    ends = {cell: {(row["seed"], *(row[key] for key in ENDS)) for row in mine} for cell, mine in of.items()}
    told = []
    for mode in MODES:
        grpo = ends.get((mode, "grpo"), set())
        same = [f"`{name}`" for (m, name), mine in ends.items() if m == mode and name != "grpo" and mine <= grpo]
        told += [f"in {mode} {', '.join(same)}"] if same else []
    return f"What sets these apart did not occur, and their runs are `grpo`'s: {'; '.join(told)}." if told else ""


def table(rows: list[dict]) -> str:
    """Returns the rows as Markdown, a line an objective: EM over seeds, its difference from grpo, what it cost."""
    sizes = {row["sizes"] for row in rows}
    of = cells(rows)
    found = against("grpo", {cell: [row["em"] for row in mine] for cell, mine in of.items()})
    holm, (unit, seconds) = adjusted(found), clock(rows)
    text = [
        "# Objectives on the embedded world", "", HONEST, "",
        f"`make bench-objectives` (`{'`, `'.join(sorted(sizes))}`). EM: held-out, greedy, after the last step, under"
        " the run's best instruction, mean ± half of the 95 % interval (Student's t over seeds). Difference:"
        " from `grpo`, by Welch's t; Holm's p is over all objectives and both modes. Entropy (nats) and answered: the"
        f" rollouts of the last {LAST} steps. Gradient: its largest norm, before it is clipped.", "",
    ]  # fmt: skip
    for said in (told_apart(found, holm) if holm else "", no_different(of)):
        text += [said, ""] if said else []
    for mode in MODES:
        some = [row for row in rows if row["mode"] == mode]
        if not some:
            continue
        start = np.mean([row["em_start"] for row in some])
        n = " and ".join(sorted({f"{row['trajectories']:,}" for row in some}))
        text += [f"## {TITLES[mode]}, from {start:.2f}; {n} trajectories", ""]
        costs = f"searches | entropy | answered | gradient | {unit}seconds"
        text += [f"| | seeds | EM | difference, 95 % | Holm's p | {costs} |"]
        text += ["|---" * 10 + "|"]
        for name in OBJECTIVES:
            if mine := of.get((mode, name)):
                mean, half = mean_and_half([row["em"] for row in mine], mine[0]["questions"])
                line = [name, str(len(mine)), f"{mean:.2f} ± {half:.2f}"]
                told = (mode, name) in holm
                line += [f"{found[mode, name].interval:+}", f"{holm[mode, name]:.2f}"] if told else ["", ""]
                line += [f"{np.mean([row[key] for row in mine]):.2f}" for key in ("searches", "entropy", "answered")]
                line.append(f"{max(row['largest_grad_norm'] for row in mine):.2f}")
                text.append(f"| {' | '.join(line)} | {np.mean([seconds(row) for row in mine]):.0f} |")
        text.append("")
    return "\n".join(text)


def draw(rows: list[dict], path: Path) -> None:
    """Draws EM of every objective: seeds as dots, mean and 95 % interval as a bar, one panel a mode."""
    names = [name for name in OBJECTIVES if any(row["objective"] == name for row in rows)]
    fig, axes = plt.subplots(1, len(MODES), figsize=(10, 1 + 0.22 * len(names)), sharey=True)
    for ax, mode in zip(axes, MODES, strict=True):
        for y, name in enumerate(names):
            em = [row["em"] for row in rows if row["objective"] == name and row["mode"] == mode]
            if em:
                mean, half = mean_and_half(em, rows[0]["questions"])
                ax.errorbar(mean, y, xerr=half, fmt="|", color="C3" if name == "grpo" else "C0", capsize=2)
                ax.plot(em, [y] * len(em), ".", color="0.4", ms=4)
        ax.set(
            title=TITLES[mode], xlabel="held-out exact match", xlim=(0, 1), yticks=range(len(names)), yticklabels=names
        )
        ax.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    save(fig, None, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES, metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--sizes", default=SIZES, help="flags that all runs share")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "bench-objectives", help="where runs work")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where rows, table and picture go")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "objectives.jsonl"
    key = ("objective", "mode", "seed", "sizes")
    there = {tuple(row[k] for k in key) for row in read_jsonl(path)}
    # Seed by seed, so that what an interruption leaves is a whole comparison.
    wanted = [(o, m, s) for s in args.seeds for o in args.objectives for m in args.modes]
    wanted = [] if args.report else [w for w in wanted if (*w, args.sizes) not in there]

    def says(row: dict) -> str:
        name = f"{row['objective']:20}{row['mode']:8}seed {row['seed']}"
        return f"{name}  EM {row['em']:.3f}  {row['seconds']:.0f} s"

    failed = collect(wanted, lambda job: run(*job, args), path, args.jobs, says)
    if rows := read_jsonl(path):
        draw(rows, args.out / "objectives.png")
        publish(table(rows), args.out / "objectives.md")
        print(json.dumps(rows))
    if failed:
        raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    with one_line("extras.campaigns.objectives"):
        main()
