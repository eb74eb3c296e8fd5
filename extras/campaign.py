"""Whose gain is it? INSPO and its controls, several seeds each: rows, a table, a figure.

    make default                                   # the embedded world: 15 runs of about 4 minutes on one thread
    make default ARGS="--seeds 0 --runs runs/controls --results runs/controls"        # one seed of it
    python -m extras.campaign real                 # the real model: 12 runs of 20 to 40 minutes, after `make real`
    python -m extras.campaign staged               # evolving along with training, or between: 10 runs of 4 minutes

A finished run leaves a row in rows/NAME.jsonl of --results and is not repeated; a stopped one is
resumed. Runs that are reported have seeds that nothing was tuned on; docs/results/README.md says
what they show.
"""

import plumbing  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import HERE
from extras.bench.harness import parser_of, train_command
from extras.compare import adjust_p_values, compare_seeds, estimate_over_seeds, format_table
from plumbing.faults import Fault, one_line
from plumbing.files import read_jsonl

Row = dict[str, Any]


class Campaign(NamedTuple):
    arms: dict[str, tuple[str, str]]  # name -> what it is, the flags that make it so
    seeds: Sequence[int]
    flags: str  # of every run
    threads: int  # of a run; two threads are kept busy
    figure: str = ""
    program: str = "inspo.py"


TOGETHER, FROZEN = (
    ("instruction and policy evolve together", ""),
    ("evolution, the policy frozen", "--lr 0"),
)
CAMPAIGNS = {
    "default": Campaign(
        {
            "inspo": TOGETHER,
            "static": ("one instruction, the policy trains", "--mode static"),
            "frozen": FROZEN,
        },
        range(5),
        "--eval_every 20",
        1,
        "learning.png",
    ),
    "real": Campaign(
        {
            "inspo": TOGETHER,
            # as many trajectories as inspo has with those of verification
            "static": ("one instruction, the policy trains", "--mode static --T 19"),
            "frozen": FROZEN,
            "guessing": ("the optimizer proposes at random", "--optimizer_model guessing"),
        },
        (1, 2, 3),
        "--preset smollm2-135m --model runs/real/cold/policy",
        2,
        "real.png",
    ),
    "staged": Campaign(
        {
            "inspo": TOGETHER,
            "staged": (
                "train, evolve with the policy frozen, train",
                "--parts extras.staged:Staged,extras.staged:Late --T_e 60",
            ),
        },
        range(20, 25),
        "--eval_every 20 --T 80 --batch 24 --mini_batch 120 --max_response 48",
        1,
        program="extras/fork.py",
    ),
}
COLORS = {"inspo": "C0", "static": "C3", "frozen": "C2", "guessing": "C7"}


def play(campaign: Campaign, arm: str, seed: int, extra: str, runs: Path) -> Row:
    """Runs an arm with a seed, or resumes it, and returns its row; `extra` flags are added to the
    campaign's."""
    out, flags = runs / f"{arm}-seed{seed}", flags_of(campaign, arm, extra)
    runs.mkdir(parents=True, exist_ok=True)
    if not (out / "summary.json").exists():
        argv = [*campaign.flags.split(), *flags.split(), "--seed", str(seed)]
        command = train_command(out, 1, argv, campaign.program)
        env = os.environ | {"OMP_NUM_THREADS": str(campaign.threads)}
        with open(f"{out}.log", "a", encoding="utf-8") as log:
            code = subprocess.call(command, cwd=HERE, env=env, stdout=log, stderr=log)
        if code:
            raise Fault(f"{arm}, seed {seed}: {campaign.program} ended with {code}; see {out}.log")
    return {"arm": arm, "seed": seed, "flags": flags, **row_of(out)}


def flags_of(campaign: Campaign, arm: str, extra: str) -> str:
    return f"{extra} {campaign.arms[arm][1]}".strip()


def row_of(out: Path) -> Row:
    """Reads what a finished run leaves: enough for table and figure.

    `evals`: [step, EM under the best instruction].
    """
    summary = json.loads((out / "summary.json").read_bytes())
    steps = [row for row in read_jsonl(out / "metrics.jsonl") if row["t"]]
    held = {name: round(means["em"], 4) for name, means in summary["held_out"].items()}
    evals = [[row["t"], row["test/em"]] for row in steps if "test/em" in row]
    return {
        "commit": summary["commit"],
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round(summary["seconds"] / 60, 1),
        "questions": summary["questions"],
        "em": summary["end"]["em"],
        "searches": round(summary["end"]["searches"], 3),
        "I_star": summary["I_star"],
        "held_out": held,
        "trajectories": summary["training_rollouts"] + summary["verification_rollouts"],
        "evals": [[0, summary["start"]["em"]], *evals, [summary["steps"], summary["end"]["em"]]],
        "curves": {name: [round(row[name], 3) for row in steps] for name in ("reward", "searches")},
    }


def machine() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text("utf-8")) if info.exists() else None
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()}"


def table(campaign: Campaign, rows: Sequence[Row]) -> str:
    """Lists the arms, a line for each; intervals are over seeds, by Student's t, differences by
    Welch's; both are cut at the bounds of EM.

    "would have shown": the true difference that the test finds at 5 % in 80 % of the cases.
    """
    em = {
        arm: x for arm in campaign.arms if (x := [row["em"] for row in rows if row["arm"] == arm])
    }
    less = {
        arm: compare_seeds(em["inspo"], x)
        for arm, x in em.items()
        if arm != "inspo" and "inspo" in em
    }
    p = adjust_p_values(less)
    return format_table(
        [
            {
                "": f"{arm}: {campaign.arms[arm][0]}",
                "EM, by seed": ", ".join(f"{y:.2f}" for y in x),
                "mean, 95 %": f"{estimate_over_seeds(x).within(0, 1):.2f}",
                "inspo less this, 95 %": f"{less[arm].interval.within(-1, 1):+.2f}"
                if arm in less
                else "",
                "p (Holm)": f"{p[arm]:.2g}" if arm in p else "",
                "would have shown": f"{less[arm].visible:.2f}" if arm in p else "",
                "searches": f"{np.mean([row['searches'] for row in rows if row['arm'] == arm]):.1f}",
            }
            for arm, x in em.items()
        ]
    )


def smooth(y: Sequence[float]) -> list[tuple[int, float]]:
    """Averages the last 5 values at each step: (step, mean)."""
    return [(k, float(np.mean(y[max(0, k - 5) : k]))) for k in range(1, len(y) + 1)]


def draw(campaign: Campaign, rows: Sequence[Row], path: Path) -> None:
    """Draws every run as a thin line, the mean of an arm as a thick one; EM only if it was measured
    on the way."""
    from matplotlib.figure import Figure

    panels = {
        "reward of a step's rollouts\n(temperature 1, mean of 5 steps)": lambda row: smooth(
            row["curves"]["reward"]
        ),
        "searches a question\n(mean of 5 steps)": lambda row: smooth(row["curves"]["searches"]),
    }
    if any(len(row.get("evals", ())) > 2 for row in rows):
        title = "held-out exact match, greedy,\nunder the run's best instruction"
        panels[title] = lambda row: [(t, em) for t, em, *_ in row["evals"]]
    figure = Figure((3.3 * len(panels), 3.3))
    axes = figure.subplots(1, len(panels))
    for ax, (title, points) in zip(axes, panels.items(), strict=True):
        ax.spines[["top", "right"]].set_visible(False)
        for arm, (what, _) in campaign.arms.items():
            runs = [points(row) for row in rows if row["arm"] == arm]
            for run in runs:
                ax.plot(*zip(*run, strict=True), color=COLORS[arm], lw=1, alpha=0.35)
            if runs:
                mean = np.mean(runs, axis=0)
                ax.plot(mean[:, 0], mean[:, 1], color=COLORS[arm], lw=2.2, label=f"{arm}: {what}")
        ax.set_title(title, fontsize=9, loc="left")
        ax.set(xlabel="step t", ylim=(0, 1 if "searches" not in title else None))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", ncol=2, frameon=False, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras.campaign")
    parser.add_argument("name", choices=CAMPAIGNS)
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the reported ones")
    parser.add_argument(
        "--extra", default="", help="flags of inspo.py for every run, in one string"
    )
    parser.add_argument(
        "--runs", type=Path, help="where the runs' directories go; default: runs/NAME"
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "docs" / "results", help="where rows and figure go"
    )
    args = parser.parse_args(argv)
    campaign, path = CAMPAIGNS[args.name], args.results / "rows" / f"{args.name}.jsonl"
    if unknown := set(args.arms or ()) - set(campaign.arms):
        parser.error(f"--arms {unknown.pop()}: choose from {', '.join(campaign.arms)}")
    runs = (args.runs or HERE / "runs" / args.name).absolute()
    failed: list[Fault] = []
    with one_line("extras.campaign"):
        path.parent.mkdir(parents=True, exist_ok=True)
        done = {(row["arm"], row["seed"]): row for row in read_jsonl(path)}
        todo = [
            (arm, seed)
            for seed in args.seeds or campaign.seeds
            for arm in args.arms or campaign.arms
        ]
        for arm, seed in done.keys() & set(todo):
            if done[arm, seed]["flags"] != flags_of(campaign, arm, args.extra):
                raise Fault(
                    f"{path} has {arm}, seed {seed}, with other flags: choose another --results"
                )
        with ThreadPoolExecutor(2 // campaign.threads) as pool:
            started = [
                pool.submit(play, campaign, *job, args.extra, runs)
                for job in todo
                if job not in done
            ]
            for future in as_completed(started):
                try:
                    row = future.result()
                except Fault as e:
                    failed.append(e)
                    print(e, flush=True)
                    continue
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['arm']}, seed {row['seed']}: EM {row['em']:.2f}", flush=True)
        if rows := sorted(read_jsonl(path), key=lambda row: row["seed"]):
            print(f"\n{table(campaign, rows)}\n{path}")
            if campaign.figure:
                draw(campaign, rows, args.results / campaign.figure)
                print(args.results / campaign.figure)
        if failed:
            raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    main()
