"""What a small policy can follow, and what clauses are worth before and after training: the pilot of the graded world.

    python -m extras.campaigns.graded_pilot follow --sizes 96x3 64x2    # warm starts, watched as they learn
    python -m extras.campaigns.graded_pilot worth --worlds 1 2          # every clause, first and trained policy
    python -m extras.campaigns.graded_pilot habit --worlds 1 2          # train under bad clauses, then take them away
    python -m extras.campaigns.graded_pilot report                      # results/graded_pilot.md

Rows go to results/graded_pilot.jsonl; worlds of a pilot are below 200. Runs of the campaign's arms in these worlds are
`python -m extras.campaigns.graded --worlds 1 2 3 --name graded_pilot_runs`; the page reads them for variances and
power.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from config import HERE
from extras.campaigns.arms import begun, launch, origin
from extras.campaigns.graded import COMMON, DRIFTS, FIRST, WORLDS, Row, gains, play, slopes, worlds_for
from extras.graded.form import OPTIONAL, RULES, START, WORDINGS, World, mark
from extras.graded.warm_start import POLICY, build_tokenizer, demo, save, train
from journal.directory import read_jsonl
from plumbing.faults import one_line

RUNS = HERE / "runs" / "graded-pilot"
EVERY = 4800  # demonstrations between two looks
HABITS = ("wrong rule", "stunting", "harmful", "")  # the role of the clauses that a policy trains under; "": none


@torch.no_grad()
def follow(model: Any, tokenizer: Any, n: int = 512, seed: int = 9) -> dict[str, float]:
    """Returns, by clause, how much likelier what it asks for is with it than without, in demonstrations never seen.

    Of a line's clause that is filling it in, or leaving it empty; of a rule's, following that rule on a filled line.
    """
    rng, vocab = np.random.default_rng(seed), tokenizer.get_vocab()
    with_, without = ({c: list[float]() for c in WORDINGS} for _ in range(2))
    for _ in range(n):
        words, question, marks = demo(rng)
        head = ["<|user|>", *words, "Question:", *question.split(), "<|assistant|>", "<answer>"]
        ids = torch.tensor([[vocab[w] for w in [*head, *marks]]])
        p = model(ids).logits[0, len(head) - 1 : -1].softmax(-1)
        said = {c for c, other in WORDINGS.items() if c in words or other in words}
        for k, word in enumerate(question.split()):
            line, x = int(word[1:3]), int(word[4:])
            clause = f"{'fill' if line in OPTIONAL else 'leave'}{line:02d}"
            empty = float(p[k, vocab["_"]])
            asked = 1 - empty if line in OPTIONAL else empty
            (with_ if clause in said else without)[clause].append(asked)
            if marks[k] != "_":
                for rule in range(RULES):
                    right = float(p[k, vocab[mark(x, rule)]])
                    (with_ if f"rule{rule}" in said else without)[f"rule{rule}"].append(right)
    return {c: round(float(np.mean(with_[c]) - np.mean(without[c])), 3) for c in WORDINGS if with_[c] and without[c]}


def following(size: str, demos: int, keep: Path | None) -> list[Row]:
    """Trains a policy of this size, "WIDTHxLAYERS", and keeps it, if asked; returns a row of every look at it."""
    width, layers = map(int, size.split("x"))
    rows, began = list[Row](), time.process_time()

    def watch(model: Any, seen: int) -> None:
        spent = time.process_time() - began - sum(row["looking"] for row in rows)
        begin = time.process_time()
        gains_ = follow(model.eval(), tokenizer)
        model.train()
        n = sum(p.numel() for p in model.parameters())
        row = {"kind": "follow", "size": size, "parameters": n, "demos": seen, "cpu_seconds": round(spent, 1)}
        rows.append(row | {"gains": gains_, "looking": time.process_time() - begin, **origin()})

    tokenizer = build_tokenizer()
    model, _ = train(demos, 0, width=width, layers=layers, every=EVERY // 64, watch=watch)
    if keep:
        save(model, tokenizer, keep)
    return [{k: v for k, v in row.items() if k != "looking"} for row in rows]


def static(seed: int, drift: float, name: str, text: str, steps: int) -> Path:
    """Returns the directory of a run that trains under one instruction."""
    world = World.of(seed, drift).write(RUNS / f"world-{seed}-{drift:g}.json")
    out = RUNS / f"static-{seed}-{drift:g}-{name or 'none'}".replace(" ", "-")
    said = out.with_suffix(".txt")
    said.write_text(text + "\n")
    argv = ["inspo.py", *COMMON.split(), "--T", str(steps), "--model", str(POLICY), "--train", str(world)]
    argv = begun(out, [*argv, "--mode", "static", "--instruction", str(said), "--seed", str(seed), "--out", str(out)])
    if not (out / "summary.json").exists():
        launch(f"static, world {seed}", argv, out)
    return out


def worth(seed: int, drift: float, steps: int) -> list[Row]:
    """Returns a row of every clause: what it adds to the first instruction, for the first and a trained policy."""
    world, out = World.of(seed, drift), static(seed, drift, "", START, steps)
    texts = [START, *(f"{START} {clause}" for clause in world.inventory)]
    rows = []
    for name, policy in (("first", POLICY), ("trained", out / "policy")):
        (base, skill), *others = play(policy, RUNS / f"world-{seed}-{drift:g}.json", texts)
        for clause, (reward, _) in zip(world.inventory, others, strict=True):
            row = {"kind": "worth", "world": seed, "drift": drift, "policy": name, "skill": round(skill, 3)}
            rows.append(
                row | {"clause": clause, "role": world.role(clause), "gain": round(reward - base, 4), **origin()}
            )
    return rows


def habit(seed: int, drift: float, steps: int) -> list[Row]:
    """Returns a row of each kind of bad clause: how a policy that trained under it does when it is gone."""
    world, rows = World.of(seed, drift), []
    for role in HABITS:
        some = [c for c in world.inventory if role and world.role(c) == role][: 1 if role == "wrong rule" else None]
        out = static(seed, drift, role, " ".join([START, *some]), steps)
        ((reward, skill),) = play(out / "policy", RUNS / f"world-{seed}-{drift:g}.json", [START])
        rows.append({"kind": "habit", "world": seed, "drift": drift, "under": some, "role": role or "none",
                     "steps": steps, "reward": round(reward, 4), "skill": round(skill, 3), **origin()})  # fmt: skip
    return rows


def page(rows: Sequence[Row], runs: Sequence[Row]) -> str:
    """Returns graded_pilot.md."""
    of = lambda kind: [row for row in rows if row["kind"] == kind]  # noqa: E731
    text = ["# Pilot of the graded world", "", "`python -m extras.campaigns.graded_pilot` (its docstring has the four"
            " parts), rows in graded_pilot.jsonl, written from them. Worlds of a pilot are below 200."]  # fmt: skip
    if of("follow"):
        text += [
            "", "## What a policy follows", "", "How much likelier what a clause asks for is with it than without, of"
            f" {len(WORDINGS)} clauses, in demonstrations that the warm start has not shown:", "",
            "| size | parameters | demonstrations | CPU seconds | followed (above 0.5) | median | lowest |",
            "|---" * 7 + "|",
        ]  # fmt: skip
        for row in of("follow"):
            x = list(row["gains"].values())
            cells = [row["size"], f"{row['parameters'] / 1e6:.2f}M", f"{row['demos']:,}", f"{row['cpu_seconds']:.0f}"]
            cells += [f"{sum(g > 0.5 for g in x)} of {len(x)}", f"{np.median(x):.2f}", f"{min(x):.2f}"]
            text.append(f"| {' | '.join(cells)} |")
    if of("worth"):
        heads = [(d, p) for d in sorted({row["drift"] for row in of("worth")}) for p in ("first", "trained")]
        text += ["", "## What a clause is worth", "", "Reward with it minus reward without, beside the first"
                 " instruction alone, sampled; means over clauses and worlds (of how many). A point of a line is 0.05.",
                 "", f"| role | {' | '.join(f'd {d:g}, {p}' for d, p in heads)} |",
                 "|---" * (len(heads) + 1) + "|"]  # fmt: skip
        for role in dict.fromkeys(row["role"] for row in of("worth")):
            cells = []
            for d, p in heads:
                x = [r["gain"] for r in of("worth") if (r["role"], r["drift"], r["policy"]) == (role, d, p)]
                cells.append(f"{np.mean(x):+.3f} ({len(x)})" if x else "")
            text.append(f"| {role} | {' | '.join(cells)} |")
        skills = {(r["policy"], r["world"], r["drift"]): r["skill"] for r in of("worth")}
        for name in ("first", "trained"):
            x = [s for (p, _, _), s in skills.items() if p == name]
            text.append(f"\nSkill of the {name} policy, the share of right units: {np.mean(x):.2f} ({len(x)} runs).")
    if of("habit"):
        text += ["", "## What stays of a bad clause", "", "Reward and skill under the first instruction alone, after"
                 f" training under it with these clauses beside it ({of('habit')[0]['steps']} steps):", "",
                 "| clauses | reward, by run | skill |", "|---" * 3 + "|"]  # fmt: skip
        for role in dict.fromkeys(row["role"] for row in of("habit")):
            x = [row for row in of("habit") if row["role"] == role]
            cells = [", ".join(f"{row[name]:.2f}" for row in x) for name in ("reward", "skill")]
            text.append(f"| {role} | {' | '.join(cells)} |")
    if runs:
        text += ["", "## Runs of the arms, and power", "", f"{len(runs)} runs in worlds"
                 f" {', '.join(str(w) for w in sorted({r['world'] for r in runs}))} (graded_pilot_runs.jsonl)."
                 " Online's gain, paired by world, at equal rollouts; sd over worlds; how many worlds tell it at 80 %"
                 f" (the plan registers {WORLDS}, from {FIRST} on):", "",
                 "| over | what | mean | sd | worlds | would tell |", "|---" * 6 + "|"]  # fmt: skip
        for arm in [a for a in dict.fromkeys(r["arm"] for r in runs) if a != "online"]:
            cells = {f"d = {d:g}": list(gains(runs, arm, d).values()) for d in DRIFTS} | {"slope": slopes(runs, arm)}
            for what, x in cells.items():
                if x:
                    sd = float(np.std(x, ddof=1)) if len(x) > 1 else None  # of one world there is none
                    n = None if sd is None else worlds_for(float(np.mean(x)), sd)
                    spread = "" if sd is None else f"{sd:.3f}"
                    text.append(f"| {arm} | {what} | {np.mean(x):+.3f} | {spread} | {len(x)} | {n or ''} |")
        spent = [row["cpu_seconds"] for row in runs]
        text.append(f"\nA run takes {np.mean(spent):.0f} CPU seconds ({min(spent):.0f} to {max(spent):.0f}).")
    return "\n".join([*text, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["follow", "worth", "habit", "report"])
    parser.add_argument("--sizes", nargs="+", default=["96x3", "64x2"])
    parser.add_argument("--demos", type=int, default=28_800)
    parser.add_argument("--keep", type=Path, help="of follow: the directory in which the policy is saved")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--drifts", type=float, nargs="+", default=list(DRIFTS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    path = args.results / "graded_pilot.jsonl"
    if args.part == "follow":
        made = (row for size in args.sizes for row in following(size, args.demos, args.keep))
    else:
        one = {"worth": worth, "habit": habit, "report": lambda *_: []}[args.part]
        made = (row for w in args.worlds for d in args.drifts for row in one(w, d, args.steps))
    for row in made:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    (args.results / "graded_pilot.md").write_text(
        page(read_jsonl(path), read_jsonl(args.results / "graded_pilot_runs.jsonl"))
    )
    print(f"{args.results / 'graded_pilot.md'} has the page")


if __name__ == "__main__":
    with one_line("extras.campaigns.graded_pilot"):
        main()
