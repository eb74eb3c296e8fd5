"""Which rule of choosing instructions wins? Algorithm 1, its paired variant, E-SPL and FST in the world: rows, table.

    make bench-selection                                                   # 4 arms, batch 24 and 96, 5 seeds (hours)
    python -m extras.campaigns.rivals --arms paper paired --seeds 0 1      # some of them
    python -m extras.campaigns.rivals --report                             # the table of the rows there are

Every run gets the same policy, data and optimizer, and at a batch size the same budget of trajectories: those of
`paper` with all that its verifications can take. An arm's T is the largest with which its own training and all that its
verifications can take stay within that budget; the table has what was really played. A run's row is appended to
results/selection.jsonl when it ends and is not repeated; a run that was stopped is resumed.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from config import HERE, Config, parse
from evaluation.statistics import adjusted, against, over_seeds
from extras import espl, fst
from extras.campaigns.arms import begun, clock, collect, cpu_seconds, launch, origin, publish, rollouts
from extras.campaigns.figures import plt, save
from extras.selection import SelectionConfig
from journal.directory import read_jsonl
from plumbing.faults import Fault, one_line

Row = dict[str, Any]
Cell = tuple[int, str]  # batch size, arm
ARMS = {  # program and flags
    "paper": "inspo.py",
    "paired": "extras/selection.py --rank paired",
    "espl": "extras/espl.py --crossover 0.2",
    "fst": "extras/fst.py --D_B 24",
    "bound": "extras/selection.py --rank paired --gate lower_bound --gate_samples 2",  # not among the default's
}
KINDS: dict[str, tuple[type[Config], Row]] = {  # program -> its configuration, and what it changes of every preset
    "inspo.py": (Config, {}), "extras/selection.py": (SelectionConfig, {}),
    "extras/espl.py": (espl.ESPLConfig, espl.PRESET), "extras/fst.py": (fst.FSTConfig, fst.PRESET),
}  # fmt: skip
SIZES = {24: "--batch 24 --mini 24 --T 80", 96: "--batch 96 --mini 96 --T 40"}
HONEST = (
    "A world of 0.6M parameters, built so that it takes an instruction and a policy, whose instructions differ by tens"
    " of EM: rules that tell small differences apart gain least here. No learning rate was tuned for any arm."
)


def config_of(arm: str, sizes: str) -> Config:
    """Returns the configuration of an arm's runs."""
    program, *flags = ARMS[arm].split()
    kind, preset = KINDS[program]
    return parse([*sizes.split(), *flags], kind, **preset)


def verification(cfg: Config, T: int) -> int:
    """Returns the most rollouts that the evolutions of T steps can take."""
    evolutions = sum(t % cfg.K_e == 0 and t < cfg.T_e for t in range(1, T + 1))
    if cfg.mode == "espl":
        return 0
    once = (1 + cfg.N_P - cfg.N_parent) * cfg.D_B * cfg.rounds
    if cfg.mode == "fst":
        evolutions = (T - 1) // cfg.K_e
        once = (cfg.N_P + cfg.rounds) * cfg.D_B + 2 * cfg.rounds * cfg.failures
    return evolutions * once * cfg.gate_samples


def spent(cfg: Config, T: int) -> int:
    """Returns the most trajectories that T steps can take."""
    return T * cfg.batch * cfg.G + verification(cfg, T)


def steps_of(arm: str, sizes: str) -> int:
    """Returns the T of an arm: the largest that stays within what the paper's takes at these sizes."""
    paper, cfg = config_of("paper", sizes), config_of(arm, sizes)
    budget = spent(paper, paper.T)
    return max(T for T in range(1, 4 * paper.T) if spent(cfg, T) <= budget)


def run(arm: str, batch: int, seed: int, args: argparse.Namespace) -> Row:
    """Returns the row of a run; it resumes what is there, and removes it in the end."""
    out = args.runs / f"{arm}-{batch}-seed{seed}"
    sizes = f"{SIZES[batch]} {args.extra}".strip()
    T = steps_of(arm, sizes)
    program, *flags = ARMS[arm].split()
    argv = [program, *sizes.split(), *flags, "--T", str(T), "--seed", str(seed), "--eval_every", str(args.every)]
    argv = begun(out, [*argv, "--out", str(out)])
    if not (out / "summary.json").exists():
        launch(f"{arm}, batch {batch}, seed {seed}", argv, out)
    row = row_of(out) | {"arm": arm, "batch": batch, "seed": seed, "sizes": sizes, "T": T}
    shutil.rmtree(out)
    return row


def row_of(out: Path) -> Row:
    """Returns what a finished run leaves. `evals`: [step, held-out EM, trajectories so far, verification's too]."""
    summary = json.loads((out / "summary.json").read_text())
    steps = [row for row in read_jsonl(out / "metrics.jsonl") if "reward" in row]
    start, end, ledger = summary["start"]["em"], summary["end"]["em"], summary["ledger"]
    played = rollouts(out, summary)
    evals = [[0, round(start, 4), 0]]
    evals += [[row["t"], round(row["test/em"], 4), played(row["t"])] for row in steps if "test/em" in row]
    evals.append([summary["steps"], round(end, 4), played(summary["steps"])])
    events = read_jsonl(out / "population.jsonl")
    return {
        "em": end, "em_start": start, "questions": summary["questions"], "evals": evals,
        "training": ledger["training_rollouts"], "verification": ledger["verification_rollouts"],
        "calls": ledger["optimizer_calls"], "evolutions": ledger["evolutions"] - ledger["evolutions_in_vain"],
        "prunings": sum(e["event"] == "prune" for e in events),
        "undecided": sum(len(e.get("undecided", [])) for e in events if e["event"] == "prune"),
        "seconds": summary["seconds"], "cpu_seconds": cpu_seconds(out), **origin(summary),
    }  # fmt: skip


def reached(evals: list[list[float]], em: float, column: int) -> float | None:
    """Returns at which step (column 0) or trajectory (2) of its evaluations a run first had this EM; None: never."""
    for before, after in zip(evals, evals[1:], strict=False):
        if after[1] >= em > before[1]:
            share = (em - before[1]) / (after[1] - before[1])
            return before[column] + share * (after[column] - before[column])
    return None if evals[0][1] < em else 0.0


def table(rows: list[Row], target: float) -> str:
    """Returns the page: an arm a line, by batch; intervals over seeds, Holm's p against `paper` over all of them."""
    cells = sorted({(row["batch"], row["arm"]) for row in rows}, key=lambda x: (x[0], list(ARMS).index(x[1])))
    of = {cell: [row for row in rows if (row["batch"], row["arm"]) == cell] for cell in cells}
    em = {cell: [row["em"] for row in of[cell]] for cell in cells}
    steps, price = (
        {cell: [x for row in of[cell] if (x := reached(row["evals"], target, column)) is not None] for cell in cells}
        for column in (0, 2)
    )
    # Of an arm that does not always get there, the runs that do would flatter it: it is not compared.
    always = {cell: x for cell, x in price.items() if len(x) == len(of[cell])}
    found = {("em", *cell): x for cell, x in against("paper", em).items()}
    found |= {("price", *cell): x for cell, x in against("paper", always).items()}
    holm, (unit, seconds) = adjusted(found), clock(rows)

    def differs(name: str, cell: Cell, style: str) -> list[str]:
        key = (name, *cell)
        return [f"{found[key].interval:{style}}", f"{holm[key]:.3f}"] if key in holm else ["", ""]

    compared = (
        f"; differences from `paper` by Welch's t, with Holm's p over all {len(holm)} of this page,"
        f" {sum(p < 0.05 for p in holm.values()) or 'none'} of which are below 0.05"
    )
    text = [
        "# Rules of choosing instructions in the world", "", HONEST, "",
        "`make bench-selection`, rows in selection.jsonl. Means over seeds with the 95 % interval of Student's t"
        f"{compared if holm else ''}.", "",
        "EM: held-out, greedy, after the last step, under the run's own I_star.", "",
        "| batch | arm | seeds | T | EM | difference | Holm's p | trajectories | of them verification | calls |"
        f" undecided a pruning | {unit}minutes |", "|---" * 12 + "|",
    ]  # fmt: skip
    for cell in cells:
        mine = of[cell]
        line = [str(cell[0]), cell[1], str(len(mine)), " ".join(map(str, sorted({row["T"] for row in mine})))]
        line += [f"{over_seeds(em[cell])}", *differs("em", cell, "+")]
        total = [row["training"] + row["verification"] for row in mine]
        line += [f"{np.mean(total):,.0f}", f"{100 * sum(row['verification'] for row in mine) / sum(total):.0f} %"]
        line.append(f"{np.mean([row['calls'] for row in mine]):.0f}")
        prunings = sum(row["prunings"] for row in mine)
        line.append(f"{sum(row['undecided'] for row in mine) / prunings:.1f}" if prunings else "")
        line.append(f"{np.mean([seconds(row) for row in mine]) / 60:.1f}")
        text.append(f"| {' | '.join(line)} |")
    text += [
        "", f"To EM {target:g}, of the runs that get there; read between evaluations, verification counted.", "",
        "| batch | arm | get there | steps | trajectories | difference | Holm's p |", "|---" * 7 + "|",
    ]  # fmt: skip
    for cell in cells:
        line = [str(cell[0]), cell[1], f"{len(price[cell])} of {len(of[cell])}"]
        line += [f"{over_seeds(x):,.0f}" if x else "" for x in (steps[cell], price[cell])]
        text.append(f"| {' | '.join([*line, *differs('price', cell, '+,.0f')])} |")
    return "\n".join([*text, ""])


def draw(rows: list[Row], path: Path) -> None:
    """Draws EM by trajectories, a panel a batch size: seeds as thin lines, their mean."""
    batches = sorted({row["batch"] for row in rows})
    fig, axes = plt.subplots(1, len(batches), figsize=(5 * len(batches), 3.4), sharey=True, squeeze=False)
    for ax, batch in zip(axes[0], batches, strict=True):
        for k, arm in enumerate(ARMS):
            curves = [np.array(row["evals"]) for row in rows if (row["batch"], row["arm"]) == (batch, arm)]
            for curve in curves:
                ax.plot(curve[:, 2] / 1000, curve[:, 1], color=f"C{k}", lw=0.8, alpha=0.35)
            if curves:  # an arm's evaluations are at the same steps
                mean = np.mean(curves, 0)
                ax.plot(mean[:, 2] / 1000, mean[:, 1], color=f"C{k}", lw=2, label=arm)
        ax.set(title=f"batch {batch}", xlabel="trajectories, verification included, thousands", ylim=(0, 1))
        ax.grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("held-out EM, greedy")
    save(fig, axes[0, -1], path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [arm for arm in ARMS if arm != "bound"]
    parser.add_argument("--arms", nargs="+", default=default, choices=ARMS, metavar="ARM")
    parser.add_argument("--batches", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--every", type=int, default=10, help="steps between held-out evaluations")
    parser.add_argument("--extra", default="", help="flags for every run, in one string")
    parser.add_argument("--target", type=float, default=0.5, help="EM whose price the table has")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "bench-selection", help="where runs work")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows and table go")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    args.runs.mkdir(parents=True, exist_ok=True)
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / "selection.jsonl"
    there = {(row["arm"], row["batch"], row["seed"], row["sizes"]) for row in read_jsonl(path)}
    # Seed by seed, so that what an interruption leaves is a whole comparison.
    wanted = [(arm, batch, seed) for seed in args.seeds for batch in args.batches for arm in args.arms]
    wanted = [w for w in wanted if (*w, f"{SIZES[w[1]]} {args.extra}".strip()) not in there and not args.report]

    def says(row: Row) -> str:
        return f"{row['arm']:8}batch {row['batch']:3d}  seed {row['seed']}  EM {row['em']:.3f}  {row['seconds']:.0f} s"

    failed = collect(wanted, lambda job: run(*job, args), path, args.jobs, says)
    if rows := read_jsonl(path):
        draw(rows, args.results / "selection.png")
        publish(table(rows, args.target), args.results / "selection.md")
    if failed:
        raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    with one_line("extras.campaigns.rivals"):
        main()
