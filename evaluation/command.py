"""Measure an agent on its task: the questions that its run holds out, the paper's benchmarks, a
file; compare agents.

    python evaluate.py runs/NAME                                               # a run under its I_star
    python evaluate.py Qwen/Qwen2.5-3B --data nq hotpotqa --retriever http://127.0.0.1:8000
    python evaluate.py http://127.0.0.1:8001/v1 --data my.jsonl --corpus passages.jsonl
    python evaluate.py --compare runs/evaluation/A runs/evaluation/B           # seeds of one arm: A0,A1,A2 B0,B1,B2

WHAT is a run, a checkpoint that export.py wrote, a Hugging Face directory or id, a preset, or the
URL of an OpenAI-compatible chat endpoint (OPENAI_API_KEY). Greedy unless --temperature says
otherwise. --out gets summary.json, table.md and results.jsonl, a line a question; the same command
again continues where it was stopped, unless questions, gold answers, instruction, weights,
passages, or the code of task, reward and tools have changed since (a model behind a URL is known by
its name). Options that a model at a URL refuses (temperature, stop, seed, max_tokens) are left out,
and named; a conversation that its server refuses counts as wrong, with "length" or "refused" as its
`stop`. Benchmarks that --data_dir lacks come from the Hugging Face hub.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from config import Config
from evaluation.agents import METHODS, PLAYED, SERVED, Method
from evaluation.benchmarks import SIZES
from plumbing import stop
from plumbing.faults import one_line
from plumbing.threads import choose_threads, use_threads


def add_player_flags(parser: argparse.ArgumentParser, knobs: Sequence[str]) -> None:
    """Adds how an agent plays, and these fields of Config."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument(
        "--instruction",
        default="",
        help="file; default: I_star for inspo, else the run's first one or the task's",
    )
    parser.add_argument(
        "--served_model", default="", help="model of a URL; default: the only one that it serves"
    )
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name in knobs:
        doc = fields[name].metadata["doc"].replace("%", "%%")
        parser.add_argument(f"--{name}", type=fields[name].type, help=doc)


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
    parser.add_argument("what", nargs="?", metavar="WHAT")
    parser.add_argument(
        "--method", choices=methods, help="how it plays; default: as it was trained, or search_r1"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=["test"],
        help=f"test (the task's own held-out questions), valid, train; search QA: world, {', '.join(SIZES)}, files",
    )
    parser.add_argument("--data_dir", default="data", help="folder of the benchmarks' files")
    parser.add_argument(
        "--n", type=int, default=0, help="questions of a set, a fixed sample by --seed; 0: all"
    )
    parser.add_argument(
        "--out",
        help="directory to write; default: runs/evaluation/NAME-METHOD, with the names of --data",
    )
    parser.add_argument(
        "--compare", nargs="+", metavar="DIR", help="evaluations; seeds of one arm joined by commas"
    )
    add_player_flags(parser, (*PLAYED, *SERVED))
    args = parser.parse_args(argv)
    if bool(args.what) == bool(args.compare):
        parser.error("give WHAT to evaluate, or --compare with two evaluations or more")
    if args.n < 0 or args.temperature < 0 or args.seed < 0:
        parser.error("--n, --temperature and --seed must not be negative")
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
