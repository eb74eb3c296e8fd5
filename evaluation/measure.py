"""One evaluation: questions are played, rows kept, figures and a table made of them."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from evaluation.agents import (
    PLAYED,
    SERVED,
    Agent,
    Method,
    find_subject,
    infer_method,
    instruction_of,
    open_agent,
)
from evaluation.benchmarks import load_benchmark
from evaluation.statistics import Interval, average_intervals, estimate_mean
from plumbing.faults import Fault
from plumbing.files import Row, writing
from plumbing.outside import finite, without_secrets
from plumbing.versions import commit
from run import Run
from tasks import Question, Task, Trajectory
from tasks.search_qa import SearchQA, holds_gold
from tasks.task import load_task, rng_of, take_subset

# questions that are played together
CHUNK = 256
SPLITS = ("test", "valid", "train")
SHARES = {"em": "EM", "f1": "F1"}  # metrics that lie between 0 and 1, as they are shown


def evaluate(args: argparse.Namespace, methods: Mapping[str, Method]) -> None:
    """Evaluates as the flags say, writes --out and prints its table."""
    # who plays which questions
    chosen = find_subject(args.what)
    name = args.method or infer_method(chosen, methods)
    method = methods[name]
    task = load_task(chosen.configure(vars(args), (*PLAYED, *SERVED), **method.knobs))
    if not isinstance(task, method.task):
        raise Fault(
            f"--method {name} cannot play {task.cfg.task}: it is for {method.task.__name__}"
        )
    instruction = instruction_of(chosen, task, method, args.instruction)
    questions = collect_questions(task, args)
    task.check()
    setting = {
        "model": without_secrets(args.what),
        **{key: getattr(args, key) for key in ("data", "n", "seed", "temperature")},
        "method": name,
        **{key: getattr(task.cfg, key) for key in PLAYED},
        "commit": commit(),
    }

    # what is played, and its figures
    data = [] if args.data == ["test"] else list(questions)
    out = Path(args.out or "runs/evaluation/" + "-".join([chosen.name, name, *data]))
    for file in ("config.json", "summary.json"):
        if (out / file).exists():
            raise Fault(f"{out} has a {file} already: remove it, or choose another --out")
    with contextlib.closing(Run(out)) as files:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        files.lock()
        with open_agent(chosen, task, instruction, args.temperature, method=method) as agent:
            metrics, rows = play(files, args.seed, agent, method, questions)
        tools = [tool.plural for tool in list_counted_tools(task)]
        summary = summarize_sets(setting, metrics, tools, rows)
        table = tabulate(summary)
        files.write("summary.json", json.dumps(finite(summary), indent=1))
        files.write("table.md", table)

    print(f"\n{chosen.name}, {name}:\n\n{table}")
    refused = sum(row["stop"] == "refused" for row in rows)
    if refused:
        print(f"the server refused {refused} of {len(rows)} conversations, which count as wrong")
    print(f"{out}: summary.json, table.md, results.jsonl")


def collect_questions(task: Task, args: argparse.Namespace) -> dict[str, list[Question]]:
    """The questions of --data by the names of their sets. Raises Fault."""
    questions = {}
    for name in args.data:
        if name in SPLITS:
            every = task.questions(name)
        elif isinstance(task, SearchQA):
            every = load_benchmark(name, task.load)
        else:
            raise Fault(
                f"--data {name}: {task.cfg.task} asks its own questions: give {', '.join(SPLITS)}, or --test"
            )
        title = Path(name).stem if name.endswith((".jsonl", ".parquet")) else name
        if title in questions:
            raise Fault(
                f"--data {name}: there is a {title} already; give each once, and files different names"
            )
        if not every:
            raise Fault(f"--data {name}: {task.cfg.task} has no such questions")
        questions[title] = take_subset(every, args.n, args.seed)
    return questions


# ---- playing


def play(
    files: Run, seed: int, player: Agent, method: Method, questions: Mapping[str, list[Question]]
) -> tuple[list[str], list[Row]]:
    """Plays all questions, writes their rows to results.jsonl; returns the names of the metrics and
    the rows."""
    print(player.tools or f"task: {player.task.cfg.task}", flush=True)
    files.write("results.jsonl", "")
    metrics, rows = list[str](), list[Row]()
    seconds = 0.1 if sys.stderr.isatty() else 30
    total = sum(map(len, questions.values()))
    with tqdm(total=total, unit="question", mininterval=seconds) as bar:

        def show(ended: int) -> None:
            bar.update(len(rows) + ended - bar.n)

        player.progress = show

        # a chunk is played, scored and written
        for title, every in questions.items():
            bar.set_description(title, refresh=False)
            for first in range(0, len(every), CHUNK):
                chunk = first // CHUNK
                player.seed = int(rng_of(seed, chunk, f"{title} 0").integers(2**31))
                taus = method.play(player, every[first : first + CHUNK])
                measured = player.score(taus)
                metrics = list(measured[0])
                for tau, values in zip(taus, measured, strict=True):
                    rows.append({"data": title} | make_row(player.task, tau, values))
                    files.append("results", rows[-1])
    return metrics, rows


def make_row(task: Task, tau: Trajectory, metrics: Mapping[str, float]) -> Row:
    """Makes a line of results.jsonl. `gold_recall`: whether a gold answer stands in some passage
    that was retrieved."""
    q = tau.question
    row: Row = {
        "answered": float(tau.stop == "over" or (tau.stop == "answer" and bool((tau.prediction or "").strip()))),
        "sampled_tokens": sum(tau.mask), "stop": tau.stop, "prediction": tau.prediction, "golds": list(q.golds),
    }  # fmt: skip
    row |= {tool.plural: tau.served(tool.tag) for tool in list_counted_tools(task)}
    if isinstance(task, SearchQA):
        found = [text for turn in tau.turns for text in turn.result or []]
        row["gold_recall"] = float(holds_gold(found, q.golds))
    clash = sorted(metrics.keys() & {"id", "data", "questions", "gold_recall", *row})
    if clash:
        raise Fault(
            f"--task {task.cfg.task}: evaluate.py has a figure called {clash[0]}: give the metric another name"
        )
    return {"id": q.id, "reward": tau.reward, **metrics, **row}


def list_counted_tools(task: Task) -> Sequence[Any]:
    """The tools whose calls are counted: of search QA the search even for a method that does not
    use it."""
    return task.tools or ([task.search] if isinstance(task, SearchQA) else [])


# ---- figures


def summarize_sets(setting: Row, metrics: list[str], tools: list[str], rows: Sequence[Row]) -> Row:
    """The figures of all rows, by the sets of questions and on average: metrics with 95 % intervals
    over questions, and the means of what explains them. The first metric is the main one."""
    parts = {}
    for title in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == title]
        part: Row = {"questions": len(own)}
        for name in metrics:
            most = 1.0 if name in SHARES else math.inf
            part[name] = estimate_mean([row[name] for row in own]).within(1 - most, most)._asdict()
        for name in ("answered", *tools, "sampled_tokens", "gold_recall"):
            if name in own[0]:  # the last one is search QA's
                part[name] = fmean(row[name] for row in own)
        parts[title] = part
    average = average_intervals([Interval(**part[metrics[0]]) for part in parts.values()])
    return {
        "setting": setting,
        "metrics": metrics,
        "tools": tools,
        "benchmarks": parts,
        "average": average._asdict(),
    }


def tabulate(summary: Row) -> str:
    """The Markdown table of an evaluation."""
    main, *others = summary["metrics"]
    head = f"{label(main)}, 95 %"
    rows = []
    for title, part in summary["benchmarks"].items():
        recall = "gold_recall" in part
        row = {"": title, "questions": f"{part['questions']:,}", head: f"{Interval(**part[main])}"}
        row |= {label(key): f"{part[key]['mean']:.3f}" for key in others}
        # what a tool ends is over
        row["answered" if recall else "finished"] = f"{part['answered']:.3f}"
        row |= {key: f"{x:.2f}" for key, x in count_calls(part, summary["tools"]).items()}
        if recall:
            row["gold recall"] = f"{part['gold_recall']:.3f}"
        row["sampled tokens"] = f"{part['sampled_tokens']:.0f}"
        rows.append(row)
    if len(rows) > 1:
        average = Interval(**summary["average"])
        rows.append({"": "average", "questions": f"{average.n:,}", head: f"{average}"})
    return format_table(rows)


def count_calls(row: Row, tools: Sequence[str]) -> Row:
    """Returns the calls of each tool, or their sum where there are more than three, for which a
    line has no room."""
    if len(tools) > 3:
        return {"tool calls": sum(row[tool] for tool in tools)}
    return {tool: row[tool] for tool in tools}


def label(metric: str) -> str:
    """Returns a metric's name as it is shown."""
    return SHARES.get(metric, metric)


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows, each a cell by its heading."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in cells]
    lines.insert(1, "|---" * len(heads) + "|\n")
    return "".join(lines)
