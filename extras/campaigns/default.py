"""The embedded default beside its two controls, as the README shows it: a table and the figure of learning.

    make default                              # seeds 0 to 4, 15 runs: results/default.md and learning.png
    make controls                             # one seed, into runs/controls: whose gain is it?
    python -m extras.campaigns.default --seeds 0 --extra "--T 2" --runs /tmp/runs --results /tmp/results

A finished run leaves a row in default.jsonl and is not run again; a run that was stopped is resumed.
"""

import argparse
from pathlib import Path

import numpy as np

from config import HERE, PRESETS, Config
from evaluation.statistics import between_seeds, over_seeds
from extras.campaigns.arms import ARMS, Campaign
from extras.campaigns.claims import Rows, reward
from extras.campaigns.paper import SEEDS, complete, line_of, read
from extras.campaigns.seeds import share, two_valued
from page.read import many
from plumbing.faults import Fault, one_line

CONTROLS = ("inspo", "static", "frozen")


def table(rows: Rows) -> list[str]:
    """Returns a line for each arm; intervals are over seeds, by Student's t, differences by Welch's."""
    heads = "EM, by seed | above 0.5 | mean, 95 % | difference from inspo, 95 % | searches | reward | verification"
    heads += " | CPU minutes"
    lines = [f"| | {heads} |", "|---" * 9 + "|"]
    inspo = [row["em"] for row in rows.get("inspo", ())]
    for arm in [arm for arm in CONTROLS if rows.get(arm)]:
        mine = rows[arm]
        em = [row["em"] for row in mine]
        alike = arm == "inspo" or not inspo or two_valued(em) or two_valued(inspo)
        difference = "" if alike else f"{between_seeds(em, inspo).interval:+}"
        seconds = [row["cpu_seconds"] for row in mine if row["cpu_seconds"] is not None]
        cells = [f"{arm}: {ARMS[arm].what}", ", ".join(f"{x:.2f}" for x in em), f"{share(em)}"]
        cells += ["" if two_valued(em) else f"{over_seeds(em)}", difference]
        cells += [f"{np.mean([row['searches'] for row in mine]):.2f}", f"{np.mean([reward(row) for row in mine]):.2f}"]
        cells.append(f"{100 * np.mean([row['overhead'] for row in mine]):.0f} %")
        cells.append(f"{np.mean(seconds) / 60:.1f}" if seconds else "not counted")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(rows: Rows) -> str:
    """Returns default.md."""
    every = [row for mine in rows.values() for row in mine]
    steps, start = every[0]["evals"][-1][0], np.mean([row["evals"][0][1] for row in every])
    unlike = " ".join(sorted({row["flags"] for row in rows.get("inspo", every)}))
    rounds = PRESETS["world"]["rounds"]
    text = [
        "# The embedded default", "",
        f"`python inspo.py{' ' * bool(unlike)}{unlike}` and its two controls, written by `make default` from"
        f" default.jsonl: {len(every)} runs, commit {', '.join(sorted({row['commit'] for row in every}))}, on"
        f" {'; '.join(sorted({row['machine'] for row in every}))}, one thread each.", "",
        *table(rows), "",
        f"An evolution takes {many(rounds, 'round')} of generate and verify here, with the preset of the"
        f" world, and up to {Config.rounds} in the paper (App. C). A candidate that is below its parent on D_B does not"
        " join.", "",
        f"EM: of the policy after {steps} steps under the run's best instruction, greedy, on"
        f" {every[0]['questions']} held-out questions; the first policy has {start:.2f} under the first instruction."
        " Reward: of the last ten steps' rollouts, at temperature 1. Verification: its rollouts as a share of those of"
        " training. The world is [built so that it takes both](../world/README.md), a policy and an instruction: this"
        " shows the mechanism and is no evidence for the paper's claims on real models.", "",
        "![reward, searches and held-out exact match by step](learning.png)",
    ]  # fmt: skip
    return "\n".join(text) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--every", type=int, default=20, help="steps between held-out evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--extra", default="", help="flags of inspo.py for every run, in one string")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "default", help="where the runs' directories go")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows, table and figure go")
    args = parser.parse_args(argv)
    campaign = Campaign(args.runs, args.results / "default.jsonl", args.every, args.extra)
    with one_line("extras.campaigns.default"):
        failed = complete(campaign, list(CONTROLS), args.seeds, args.jobs)
        if rows := read(campaign.rows):
            from extras.campaigns.figures import learning  # matplotlib takes a while

            (args.results / "default.md").write_text(page(rows))
            learning(rows, args.results / "learning.png")
            for arm in rows:
                print(line_of(arm, rows[arm]))
            print(f"{args.results / 'default.md'} has the table, learning.png the figure")
        if args.results == HERE / "results":
            from extras.campaigns import readme

            readme.main()
        if failed:
            raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    main()
