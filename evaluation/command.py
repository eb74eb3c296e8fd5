"""Measure an agent on its task: the questions that its run holds out, the paper's benchmarks, a
file; compare agents.

    python evaluate.py runs/NAME                                               # a run under its I_star
    python evaluate.py Qwen/Qwen2.5-3B --data nq hotpotqa --retriever http://127.0.0.1:8000
    python evaluate.py --compare runs/evaluation/A runs/evaluation/B           # seeds of one arm: A0,A1,A2 B0,B1,B2

WHAT is a run, a checkpoint that export.py wrote, a Hugging Face directory or id, a preset, or the
URL of a server whose engine --engine names (docs/gpus.md). Greedy unless --temperature says
otherwise. --out, a new folder, gets summary.json, table.md and results.jsonl, one line per
question. Options that a model at a URL refuses (temperature, stop, seed, max_tokens) are left out,
and named; a conversation that its server refuses counts as wrong, with "length" or "refused" as its
`stop`. Benchmarks come from the Hugging Face hub, once.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from config import Config
from evaluation.agents import METHODS, PLAYED, SERVED, Method
from evaluation.benchmarks import BENCHMARKS
from plumbing import stop
from plumbing.faults import one_line
from plumbing.threads import choose_threads, use_threads

# default and help of the flags of whoever plays, of the default's type
PLAYER: dict[str, tuple[Any, str]] = {
    "seed": (0, "of what is sampled"),
    "temperature": (0.0, "0 is greedy"),
    "instruction": ("", "file; default: I_star for inspo, else the run's first one or the task's"),
}


def add_player_flags(
    parser: argparse.ArgumentParser, knobs: Sequence[str], ways: Iterable[str] = PLAYER
) -> None:
    """Adds how an agent plays, all of PLAYER or these `ways`, and these fields of Config."""
    for name in ways:
        default, text = PLAYER[name]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    fields = {f.name: f for f in dataclasses.fields(Config)}
    group = parser.add_argument_group("settings, by default those of the run or preset")
    for name in knobs:
        text = fields[name].metadata["doc"].replace("%", "%%")
        group.add_argument(f"--{name}", type=fields[name].type, help=text)


def parse_player_flags(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> argparse.Namespace:
    """Returns the flags; what is wrong with the numbers among them ends the program."""
    args = parser.parse_args(argv)
    for name in ("seed", "temperature", "n"):
        x = getattr(args, name, 0)
        if not 0 <= x < math.inf:
            parser.error(f"--{name} {x}: give a number, finite and at least 0")
    return args


def main(
    argv: list[str] | None = None,
    methods: Mapping[str, Method] = METHODS,
    program: str = "evaluate.py",
    about: str | None = __doc__,
) -> None:
    """Runs the command line. `methods`: what --method may name; `program` and `about` are whose
    help it is."""
    parser = argparse.ArgumentParser(
        program,
        usage="%(prog)s WHAT [--flag value ...]",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # what, how, and what it is asked
    add = parser.add_argument
    add("what", nargs="?", metavar="WHAT")
    add("--method", choices=methods, help="how it plays; default: as it was trained, or search_r1")
    sets = f"test (the task's own held-out questions), valid, train; search QA: world, {', '.join(BENCHMARKS)}, files"
    add("--data", nargs="+", default=["test"], help=sets)
    add("--n", type=int, default=0, help="questions of a set, a fixed sample by --seed; 0: all")
    add("--out", help="default: runs/evaluation/NAME-METHOD, with the names of --data")
    add(
        "--compare", nargs="+", metavar="DIR", help="evaluations; seeds of one arm joined by commas"
    )
    add_player_flags(parser, (*PLAYED, *SERVED))
    args = parse_player_flags(parser, argv)
    if bool(args.what) == bool(args.compare):
        parser.error("give WHAT to evaluate, or --compare with two evaluations or more")

    use_threads(choose_threads())  # before torch
    # Here: torch and scipy take seconds. And before `listening`: an import may swallow what a request
    # to stop raises.
    from evaluation.compare import compare
    from evaluation.measure import evaluate

    with one_line(program), stop.listening(), stop.may_stop():
        if args.compare:
            print(compare(args.compare))
        else:
            evaluate(args, methods)
