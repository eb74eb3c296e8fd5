"""Whose gain is it? INSPO and its controls on the embedded world: table, picture, JSON last.

    make controls          # one seed of inspo, static and frozen, to the end
    make bench-learn       # five seeds of every arm

Runs inspo.py itself for every arm and seed. Finished runs are not repeated.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402

from config import PRESETS  # noqa: E402
from faults import Fault, one_line  # noqa: E402
from harness.directory import read_jsonl  # noqa: E402
from world.clauses import BEST, write  # noqa: E402

ARMS = {  # name -> (what it is, flags); {arm} is the directory of that arm's run with the same seed
    "inspo": ("instruction and policy evolve together", ""),
    "static": ("Search-R1's way: one instruction", "--mode static"),
    "frozen": ("evolution, the policy frozen", "--lr 0"),
    "evolve-train": (
        "evolution first, then training under the winner",
        "--mode static --instruction {frozen}/I_star.txt",
    ),
    "train-evolve": ("training first, then evolution", "--lr 0 {world} --model {static}/policy"),
    "half": ("inspo, evolution ends at half its time", "--T_e {half_T_e}"),
    "guessing": ("inspo, the optimizer proposes at random", "--optimizer_model guessing"),
}
COLORS = {"inspo": "C0", "static": "C3", "frozen": "C2"}


def needs(arm: str) -> list[str]:
    """Returns the arms that this one builds on."""
    return [other for other in ARMS if f"{{{other}}}" in ARMS[arm][1]]


def flags_of(arm: str, built_on: dict[str, str]) -> list[str]:
    """Returns an arm's flags; `built_on`: directories of the runs that it needs, by arm."""
    world = " ".join(f"--{name} {value}" for name, value in PRESETS["world"].items() if name not in ("model", "lr"))
    return ARMS[arm][1].format(**built_on, world=world, half_T_e=PRESETS["world"]["T_e"] // 2).split()


def run(arm: str, seed: int, args: argparse.Namespace) -> Path:
    """Runs an arm, and first those that it builds on, unless they are there; returns its directory."""
    out = args.out / f"{arm}-seed{seed}"
    if (out / "summary.json").exists():
        return out
    argv = flags_of(arm, {other: str(run(other, seed, args)) for other in needs(arm)})
    argv += ["--seed", str(seed), "--eval_every", str(args.every), "--canary", str(args.canary), "--out", str(out)]
    argv += ["--lr", args.static_lr] if "--mode" in argv and args.static_lr else []
    argv += ["--resume"] if (out / "config.json").exists() else []
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.jobs))}
    with open(f"{out}.log", "w") as log:
        done = subprocess.run([sys.executable, "inspo.py", *argv], cwd=HERE, env=env, stdout=log, stderr=log)
    if done.returncode:
        raise Fault(f"{arm}, seed {seed}: inspo.py ended with {done.returncode}; see {out}.log")
    return out


def curve(out: Path, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps of a run and a score at each: of every step, or of the evaluations, the last one included."""
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if name in row]
    t, y = [row["t"] for row in rows], [row[name] for row in rows]
    if "/" not in name:
        return t, [float(np.mean(y[max(0, k - 4) : k + 1])) for k in range(len(y))]
    end = json.loads((out / "summary.json").read_text())
    last = {"test/em": end["em_best"], "canary/em": end["held_out"]["trained policy, canary"]["em"]}
    return [*t, end["steps"]], [*y, last[name]]


def draw(runs: dict[str, list[Path]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "reward": "reward of a step's rollouts\n(temperature 1, mean of 5 steps)",
        "searches": "searches a question\n(mean of 5 steps)",
        "test/em": "held-out exact match, greedy,\nunder the run's best instruction",
        "canary/em": "the same policies under one good\ninstruction, never the run's own",
    }
    fig, axes = plt.subplots(1, len(panels), figsize=(13, 3.3))
    for ax, (name, title) in zip(axes, panels.items(), strict=True):
        for arm in [arm for arm in COLORS if arm in runs]:
            curves = [curve(out, name) for out in runs[arm]]
            for t, y in curves:
                ax.plot(t, y, color=COLORS[arm], lw=0.8, alpha=0.35)
            mean = np.mean([y for _, y in curves], axis=0)
            ax.plot(curves[0][0], mean, color=COLORS[arm], lw=2, label=f"{arm}: {ARMS[arm][0]}")
        ax.set_title(title, fontsize=9, loc="left")
        ax.set(xlabel="step t", ylim=(0.8, None) if name == "searches" else (0, 1.02))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    fig.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="lower center", ncols=3, fontsize=8)
    fig.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=130)


def interval(x: list[float], questions: int) -> tuple[float, float]:
    """Returns the mean over seeds and half its 95 % interval: Student's t, or the binomial's for a single run."""
    from scipy.stats import t

    mean, n = float(np.mean(x)), len(x)
    if n == 1:
        return mean, 1.96 * float(np.sqrt(mean * (1 - mean) / questions))
    return mean, float(t.ppf(0.975, n - 1) * np.std(x, ddof=1) / np.sqrt(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--static_lr", default="", help="the static arms' learning rate; empty: the default's")
    parser.add_argument("--every", type=int, default=20, help="steps between held-out evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; their seconds then say little")
    parser.add_argument("--out", type=Path, default=HERE / "runs" / "bench-learn")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.canary = args.out / "canary.txt"
    args.canary.write_text(write(random.Random(0), sorted(BEST)) + "\n")
    alone = [arm for arm in ARMS if not needs(arm)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for phase in (alone, [arm for arm in ARMS if arm not in alone]):  # some arms build on others
            pairs = [(arm, seed) for arm in phase if arm in args.arms for seed in args.seeds]
            list(pool.map(lambda pair: run(*pair, args), pairs))
    runs = {arm: [run(arm, seed, args) for seed in args.seeds] for arm in args.arms}
    if args.picture:
        draw(runs, args.picture)

    found = {}
    print("| | EM, by seed | mean | searches | T = 1, last 10 steps | verification | seconds |")
    print("|---|---|---|---|---|---|---|")
    for arm, outs in runs.items():
        ends = [json.loads((out / "summary.json").read_text()) for out in outs]
        em = [end["em_best"] for end in ends]
        mean, half = interval(em, ends[0]["questions"])
        rewards = [[row["reward"] for row in read_jsonl(out / "metrics.jsonl") if "reward" in row] for out in outs]
        sampled = float(np.mean([r[-10:] for r in rewards]))
        searches, seconds = (float(np.mean([end[key] for end in ends])) for key in ("searches_end", "seconds"))
        cost = float(np.mean([end["overhead_inference"] for end in ends]))
        print(
            f"| {arm}: {ARMS[arm][0]} | {', '.join(f'{x:.2f}' for x in em)} | {mean:.2f} ± {half:.2f} |"
            f" {searches:.2f} | {sampled:.2f} | {100 * cost:.0f} % | {seconds:.0f} |"
        )
        found[arm] = {"em": em, "mean": round(mean, 3), "half": round(half, 3), "sampled": round(sampled, 3)}
        found[arm] |= {"searches": searches, "verification": cost, "seconds": seconds}
        found[arm]["held_out"] = [{row: x["em"] for row, x in end["held_out"].items()} for end in ends]
    if {"inspo", "static", "frozen"} <= {*runs}:
        start = np.mean([row["first policy, first instruction"] for row in found["inspo"]["held_out"]])
        pair, policy, instruction = (found[arm]["mean"] - start for arm in ("inspo", "static", "frozen"))
        print(
            f"\nEM {start:.2f} at the start. Gains: {pair:+.2f} together, {policy:+.2f} by training alone,"
            f" {instruction:+.2f} by evolution alone: {(policy + instruction) / pair:.2f} of the pair's."
        )
    print(json.dumps(found))


if __name__ == "__main__":
    with one_line():
        main()
