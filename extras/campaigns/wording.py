"""Does training under a population make a policy robust to wording? Three arms of the default world, and a table.

    make wording                              # what results/wording_plan.md registers: 15 runs, resumable
    python -m extras.campaigns.wording --report                           # writes the page, runs nothing

`one` trains under one good instruction, `many` under a population of its wordings, with the same clauses in words that
the warm start has taught, `inspo` as ever. Then each policy plays instructions that nobody has trained under: the good
one in words that neither the warm start nor `one` nor `many` has ever read, other runs' winners, losers, none.
"""

import argparse
import itertools
import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from config import HERE, PRESETS
from evaluation.statistics import Difference, between_seeds, holm, over_seeds
from extras.campaigns.arms import Campaign, Row, begun, collect, cpu_seconds, launch, origin
from extras.campaigns.player import player
from journal.directory import read_jsonl
from page.read import many
from plumbing.faults import Fault, one_line
from tasks.questions import load_questions
from world.clauses import BEST, CLAUSES, FRAMES, START, write

ARMS = {
    "one": ("one good instruction", "--mode static --instruction {good}"),
    "many": ("a population of its wordings, never pruned", "--instruction {good} --K_p 1000000 --T_e 0"),
    "inspo": ("the first instruction, which evolves", ""),
}
FIRST, SEEDS = 200, 5  # the plan's seeds are 200 and the next ones
NEW = [sentence for clause in sorted(BEST) for sentence in CLAUSES[clause].unseen]  # of the good clauses, not taught
QUESTIONS, TEXTS = 50, 16  # held-out questions under each instruction; instructions of a kind, if not all there are


def good(seed: int) -> str:
    """Returns the instruction of `one` and the first of `many`: the good clauses in one taught wording each."""
    return write(random.Random(seed), sorted(BEST), frame=FRAMES[0])


def kinds(winners: list[str]) -> dict[str, list[str]]:
    """Returns instructions by kind; they are the same for every policy. `winners`: I_star of other runs."""
    rng = random.Random(0)
    loser = sorted(BEST - {"cont"} | {"early"})
    return {
        "good, taught wordings": [write(rng, sorted(BEST)) for _ in range(TEXTS)],
        "good, new wordings": new_wordings(rng),
        "other runs' winners": winners,
        "losers": [write(rng, loser) for _ in range(TEXTS)],
        "first": [START],
        "none": [""],
    }


def new_wordings(rng: random.Random) -> list[str]:
    """Returns the good instruction in every combination of new wordings, in random frames and orders."""
    texts = []
    for sentences in itertools.product(*(CLAUSES[clause].unseen for clause in sorted(BEST))):
        order = rng.sample(sentences, len(sentences))
        order.insert(rng.choice([0, len(order)]), rng.choice(FRAMES))
        texts.append(" ".join(order))
    return texts


def met(texts: Collection[str]) -> int:
    """Returns how many of the new wordings of the good clauses stand in these instructions."""
    return sum(any(wording in text for text in texts) for wording in NEW)


def run(arm: str, seed: int, runs: Path, extra: str, winners: list[str]) -> Row:
    """Trains an arm, or resumes it; returns its row: exact match of its policy by kind of instruction, greedy."""
    told = runs / f"good-{seed}.txt"
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_text(good(seed) + "\n")
    out = runs / f"{arm}-seed{seed}"
    flags = ARMS[arm][1].format(good=told)
    argv = begun(out, ["inspo.py", *extra.split(), *flags.split(), "--seed", str(seed), "--out", str(out)])
    if not (out / "summary.json").exists():
        launch(f"{arm}, seed {seed}", argv, out)
    summary = json.loads((out / "summary.json").read_text())
    under = {ins["text"] for row in read_jsonl(out / "population.jsonl") for ins in row["P"]}
    test = load_questions(PRESETS["world"]["test"])[:QUESTIONS]
    em = {}
    with player(str(out / "policy")) as play:
        for kind, texts in {"its own": [summary["I_star"]], **kinds(winners)}.items():
            em[kind] = [round(float(play([text] * len(test), test, 0.0).mean()), 4) for text in texts]
    return {
        "arm": arm, "seed": seed, "flags": extra, **origin(summary), "cpu_seconds": cpu_seconds(out),
        "I_star": summary["I_star"], "instructions": len(under), "met": met(under), "em": em,
    }  # fmt: skip


def mean(row: Row, kind: str) -> float:
    """Returns exact match of a row's policy, the mean over the instructions of a kind."""
    return float(np.mean(row["em"][kind]))


def under_new(rows: Sequence[Row], arm: str, having: str = "", without: Collection[str] = ()) -> list[float]:
    """Returns exact match of an arm's policies under the good instruction in new wordings, by seed.

    `having`, `without`: sentences that these instructions have, and have not; [] if there are none.
    """
    texts = kinds([])["good, new wordings"]
    k = [i for i, text in enumerate(texts) if having in text and not any(sentence in text for sentence in without)]
    mine = [row for row in rows if row["arm"] == arm] if k else []
    return [float(np.mean([row["em"]["good, new wordings"][i] for i in k])) for row in mine]


def more_than_one(rows: Sequence[Row]) -> dict[str, Difference]:
    """Returns what an arm's policies have more under new wordings than those of `one`, by arm."""
    one = under_new(rows, "one")
    return {arm: between_seeds(new, one) for arm in ("many", "inspo") if one and (new := under_new(rows, arm))}


def unread(rows: Sequence[Row]) -> list[str]:
    """Returns the new sentences under which no policy has answered any question."""
    return [sentence for sentence in NEW if not any(any(under_new(rows, arm, sentence)) for arm in ARMS)]


def page(rows: Sequence[Row]) -> str:
    """Returns wording.md."""
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    names = list(rows[0]["em"])
    text = [
        "# Does a population make a policy robust to wording?", "",
        f"`make wording`, registered in [wording_plan.md](wording_plan.md), from wording.jsonl: {len(rows)} of"
        f" {SEEDS * len(ARMS)} runs are in{', and until all are this is a look' * (len(rows) < SEEDS * len(ARMS))}."
        f" Commit {', '.join(sorted({row['commit'] for row in rows}))}, on"
        f" {'; '.join(sorted({row['machine'] for row in rows}))}.", "",
        f"Exact match of the trained policy, greedy, on {QUESTIONS} held-out questions under each instruction of a"
        " kind; means over instructions and seeds, 95 % over seeds by Student's t. *New wordings*: words that the warm"
        f" start has not taught, of which a run has met as many as the last column says, of"
        f" {len(NEW)}.", "",
        f"| trained under | {' | '.join(names)} | taught less new | instructions | new wordings met |",
        "|---" * (len(names) + 4) + "|",
    ]  # fmt: skip
    for arm, mine in of.items():
        if mine:
            cells = [f"{over_seeds([mean(row, kind) for row in mine])}" for kind in names]
            costs = [mean(row, "good, taught wordings") - mean(row, "good, new wordings") for row in mine]
            cells += [f"{over_seeds(costs):+}"]
            cells += [f"{np.mean([row[name] for row in mine]):.1f}" for name in ("instructions", "met")]
            text.append(f"| {arm}: {ARMS[arm][0]} | {' | '.join(cells)} |")
    if told := more_than_one(rows):
        text += ["", "Under new wordings, more than `one`, by Welch's two-sided test over seeds, Holm's p over both:",
                 "", "| | by seed | of one | more, 95 % | p | Holm's p | would have shown |",
                 "|---" * 7 + "|"]  # fmt: skip
        for arm, p in zip(told, holm([found.p for found in told.values()]), strict=True):
            shown = [", ".join(f"{x:.2f}" for x in under_new(rows, name)) for name in (arm, "one")]
            numbers = [f"{x:.3f}" if np.isfinite(x) else "" for x in (told[arm].p, p, told[arm].visible)]
            text.append(f"| {arm} | {' | '.join(shown)} | {told[arm].interval:+} | {' | '.join(numbers)} |")
    there, lost = [arm for arm in ARMS if of[arm]], unread(rows)
    text += ["", f"What the plan did not ask: no policy understands {len(lost)} of the"
             f" {len(NEW)} new sentences{': ' * bool(lost)}{' '.join(lost)}"
             f"{'' if lost else '.'} Where none of those stands, by sentence:", "",
             f"| | {' | '.join(there)} |", "|---" * (1 + len(there)) + "|"]  # fmt: skip
    taught = [np.mean([mean(row, "good, taught wordings") for row in of[arm]]) for arm in there]
    text.append(f"| (taught wordings) | {' | '.join(f'{x:.2f}' for x in taught)} |")
    for sentence in NEW:
        em = [under_new(rows, arm, sentence, lost) for arm in there]
        if all(em):
            text.append(f"| {sentence} | {' | '.join(f'{np.mean(x):.2f}' for x in em)} |")
    return "\n".join([*text, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(FIRST, FIRST + SEEDS)))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--extra", default="", help="flags of inspo.py for every run, in one string")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "wording", help="where runs work")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows and page go")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    path, failed = args.results / "wording.jsonl", []
    with one_line("extras.campaigns.wording"):
        if not args.report:
            winners = [row["I_star"] for row in read_jsonl(HERE / "results" / "default.jsonl") if row["arm"] == "inspo"]
            campaign = Campaign(args.runs, path, extra=args.extra)
            left = [(arm, seed) for seed in args.seeds for arm in args.arms if not campaign.find(arm, seed)]
            args.results.mkdir(parents=True, exist_ok=True)
            runs = args.runs.resolve()
            failed = collect(
                left, lambda job: run(*job, runs, args.extra, winners), path, args.jobs,
                lambda row: f"{row['arm']:6}seed {row['seed']}  "
                + "  ".join(f"{kind} {np.mean(em):.2f}" for kind, em in row["em"].items()),
            )  # fmt: skip
        if rows := read_jsonl(path):
            path.with_suffix(".md").write_text(page(rows))
            print(f"{path.with_suffix('.md')} has the page, of {many(len(rows), 'run')}")
            if args.results == HERE / "results":
                from extras.campaigns import readme

                readme.main()
        if failed:
            raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    main()
