"""From nothing to a trained, real language model: fetch it, show it the tags, train it with INSPO, measure it.

    make real                                   # python -m extras.real: into runs/real
    make real ARGS=--hub                        # the original weights, where the Hugging Face hub can be reached
    OPENAI_BASE_URL=... make real ARGS="--optimizer_model NAME"      # a language model reflects, not a script

A part is a command that could be typed. It is skipped when what it leaves behind is there, and goes on where it was
stopped: the same command again finishes the rest.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from config import HERE, PRESETS, SMOLLM
from extras.real.pace import NAME, Pace, pace
from journal.directory import writing
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.outside import decoded

DEMOS, STEPS = 1024, 60  # of the cold start
COLD = "after the cold start"


class Part(NamedTuple):
    """A command, what is there when it is done, and its work in thousands of tokens; rounded from runs (LOG.md)."""

    what: str
    argv: list[str]  # without python
    leaves: Path
    learned: float = 0  # forward and backward, of the policy and the reference
    sampled: float = 0  # generated, the reading of prompts and results included


def parts(out: Path, hub: bool, optimizer: str, seed: int) -> list[Part]:
    """Returns what is to be done, in order."""
    cold, run = out / "cold", out / "inspo"
    asked = [str(PRESETS[NAME]["eval_n"]), "--out"]

    def measured(what: str, which: str, argv: list[str]) -> Part:
        folder = out / f"evaluation/{which}"
        return Part(what, ["extras/table1.py", *argv, "--n", *asked, str(folder)], folder / "table.md", sampled=3)

    return [
        Part(
            "the model", ["-m", "extras.real.model", str(SMOLLM), *(["--hub"] if hub else [])], SMOLLM / "source.json",
        ),
        Part(
            "its demonstrations",
            ["-m", "extras.real.demos", "--n", str(DEMOS), "--seed", str(seed), "--out", str(out / "demos.jsonl")],
            out / "demos.jsonl",
        ),
        Part(
            "the cold start",
            [
                "extras/cold_start.py", "--demos", str(out / "demos.jsonl"), "--model", NAME, "--T", str(STEPS),
                "--eval_n", "24", "--seed", str(seed), "--out", str(cold),
            ],
            cold / "cold_start.md", learned=180, sampled=6,
        ),
        Part(
            "INSPO",
            [
                "inspo.py", "--preset", NAME, "--model", str(cold / "policy"), "--optimizer_model", optimizer,
                "--seed", str(seed), "--out", str(run),
            ],
            run / "summary.json", learned=150, sampled=45,
        ),
        measured("closed book, as it comes", "direct", [NAME, "--method", "direct"]),
        measured("one search with the question, as it comes", "rag", [NAME, "--method", "rag"]),
        measured("closed book, trained", "trained-direct", [str(run), "--method", "direct"]),
    ]  # fmt: skip


def plan(todo: list[Part], here: Pace) -> str:
    """Returns how long each part will take, in words."""
    minutes = [1000 * (part.learned * here.learning + part.sampled * here.sampling) / 60 for part in todo]
    lines = [
        f"{part.what:44} {f'about {x:.0f} minutes' if x >= 1 else 'less than a minute'}"
        for part, x in zip(todo, minutes, strict=True)
    ]
    lines.append(f"{'in all, with this machine to itself':44} about {sum(minutes):.0f} minutes")
    speed = f"{1 / here.learning:,.0f} tokens/s learned, {1 / here.sampling:,.0f} sampled"
    return "\n".join([*lines, f"measured here: {here.dtype}, {here.threads} threads, {speed}"])


def remember(out: Path, setting: dict[str, Any]) -> None:
    """Notes how `out` is made; raises Fault if what is there was made otherwise."""
    note = out / "setting.json"
    theirs = decoded(note.read_text()) if note.exists() else setting
    if differs := [name for name in setting if theirs.get(name) != setting[name]]:
        was, now = (x.get(differs[0]) for x in (theirs, setting))
        raise Fault(f"{out} was begun with --{differs[0]} {was}, not {now}: choose another --out")
    with writing(note):
        out.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(setting))


def play(part: Part) -> None:
    """Runs a part, or resumes it; raises Fault if it fails."""
    begun = part.argv[0] in ("extras/cold_start.py", "inspo.py") and Path(part.argv[-1], "config.json").exists()
    argv = [*part.argv, *(["--resume"] if begun else [])]
    print(f"\n{part.what}\n$ python {' '.join(argv)}", flush=True)
    part.leaves.parent.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen([sys.executable, *argv], cwd=HERE)
    try:
        code = child.wait()
    except BaseException:  # asked to stop: so is the part, which saves what it has
        child.terminate()
        child.wait()
        raise
    if code or not part.leaves.exists():
        raise Fault(f"{part.what}: {argv[0]} ended with {code}; what is done is kept, the same command goes on there")


def table(out: Path) -> str:
    """Returns the Markdown table of what was measured."""
    cold, run = (decoded((out / name / "summary.json").read_text()) for name in ("cold", "inspo"))
    rows = {what: evaluated(out, which) for what, which in [
        ("closed book (`direct`)", "direct"), ("one search with the question (`rag`)", "rag")
    ]}  # fmt: skip
    held = cold["held_out"]["first policy, first instruction"]
    rows["the agent's loop, first instruction"] = (cold["questions"], held["em"], held["searches"])
    rows = {f"as it comes, {what}": row for what, row in rows.items()}
    for name, held in sorted(run["held_out"].items()):  # the first policy's come first
        rows[name.replace("first policy", COLD).replace("trained policy", "trained by INSPO")] = (
            run["questions"], held["em"], held["searches"],
        )  # fmt: skip
    rows["trained by INSPO, closed book (`direct`)"] = evaluated(out, "trained-direct")
    lines = [f"| {what} | {em:.2f} | {searches:.2f} | {n:,} |" for what, (n, em, searches) in rows.items()]
    head = "| held-out questions, greedy | EM | searches | questions |\n|---|---|---|---|"
    return "\n".join([head, *lines])


def evaluated(out: Path, which: str) -> tuple[int, float, float]:
    """Returns (questions, EM, searches) of an evaluation."""
    summary = decoded((out / "evaluation" / which / "summary.json").read_text())
    (row,) = summary["benchmarks"].values()
    return row["questions"], row["em"]["mean"], row["searches"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "extras.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--hub", action="store_true", help="fetch the original weights from the Hugging Face hub")
    parser.add_argument("--optimizer_model", default="scripted", help="model name at OPENAI_BASE_URL, or scripted")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out = args.out.absolute()
    with one_line("extras.real"), stop.listening(), stop.may_stop():
        remember(out, {name: getattr(args, name) for name in ("optimizer_model", "seed")})
        model, *rest = parts(out, args.hub, args.optimizer_model, args.seed)
        if not model.leaves.exists():
            play(model)
        todo = [part for part in rest if not part.leaves.exists()]
        if todo:
            print(f"SmolLM2-135M-Instruct on real facts, into {args.out}", flush=True)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:  # whose memory is free afterwards
                here = apart.submit(pace).result()
            print(f"\n{plan(todo, here)}", flush=True)
        for part in todo:
            play(part)
        found = table(out)
        with writing(out / "real.md"):
            (out / "real.md").write_text(found + "\n")
        print(f"\n{found}\n\nthe run's page is {args.out}/inspo/report.html; python ask.py {args.out}/inspo asks it")


if __name__ == "__main__":
    main()
