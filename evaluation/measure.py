"""One evaluation: questions are played, rows kept, figures and a table made of them."""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from evaluation.agents import (
    PLAYED,
    SERVED,
    Agent,
    Method,
    agent,
    instruction_of,
    method_of,
    subject,
)
from evaluation.benchmarks import load
from evaluation.statistics import Interval, interval, macro
from journal.directory import RunDirectory
from journal.record import describe, describe_model, differences
from journal.summary import SHARES, count_calls, label
from plumbing import stop
from plumbing.faults import Fault, Outage
from plumbing.files import read_jsonl, writing
from plumbing.outside import decoded, finite, without_secrets
from plumbing.versions import commit
from tasks import Question, Task, Trajectory
from tasks.loading import load_task
from tasks.metrics import compute_metrics, set_rewards
from tasks.questions import holds_gold
from tasks.sampling import rng_of, take_subset
from tasks.search_qa import SearchQA

# questions that are played together; an evaluation that was stopped repeats at most so many
CHUNK = 256
SPLITS = ("test", "valid", "train")
Row = dict[str, Any]
Chunk = tuple[str, int, list[Question]]  # name of the set, number of the chunk in it, its questions


def evaluate(args: argparse.Namespace, methods: Mapping[str, Method]) -> Row:
    """Evaluates as the flags say and writes --out; returns what summary.json holds."""
    chosen = subject(args.what, args.served_model)
    name = args.method or method_of(chosen, methods)
    method = methods[name]
    task = load_task(chosen.configured(vars(args), (*PLAYED, *SERVED), **method.knobs))
    if not isinstance(task, method.task):
        raise Fault(
            f"--method {name} cannot play {task.cfg.task}: it is for {method.task.__name__}"
        )
    instruction = instruction_of(chosen, task, method, args.instruction)
    questions = collect_questions(task, args)
    task.check()
    setting = {
        "what": without_secrets(args.what),
        **{key: getattr(args, key) for key in ("data", "n", "seed", "temperature")},
        "method": name,
        **{key: getattr(task.cfg, key) for key in PLAYED},
        "commit": commit(),
        "content": describe(
            task,
            questions,
            instruction,
            f"{chosen.served} {describe_model(chosen.weights)}".strip(),
        ),
    }
    load_player = partial(
        agent, chosen, task, instruction, args.temperature, args.seed, method.stop(task)
    )
    out = Path(args.out or f"runs/evaluation/{chosen.name}-{name}")
    with contextlib.closing(RunDirectory(out)) as files:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        files.lock()
        rows, metrics, since = read_earlier(files, setting)
        left = cut_chunks(rows, questions)
        files.write("results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        if rows:
            total = sum(map(len, questions.values()))
            earlier = f"{len(rows)} of {total} rows are from an earlier call"
            # code that it does not use may have changed: the reader decides
            if since != setting["commit"]:
                earlier += f" (commit {since}, not {setting['commit']})"
            setting["commit"] = since
            print(f"{earlier}; remove {out} to play them again", flush=True)
        if left:
            metrics = play(files, setting, load_player, method, left, rows)
        summary = summary_of(setting, metrics, [tool.plural for tool in tools_of(task)], rows)
        files.write("summary.json", json.dumps(finite(summary), indent=1))
        files.write("table.md", text := tabulate(summary))
    refused = sum(row["stop"] == "refused" for row in rows)
    note = f"the server refused {refused} of {len(rows)} conversations, which count as wrong\n" * (
        refused > 0
    )
    print(f"\n{chosen.name}, {name}:\n\n{text}\n{note}{out}: summary.json, table.md, results.jsonl")
    return summary


def collect_questions(task: Task, args: argparse.Namespace) -> dict[str, list[Question]]:
    """The questions of --data by the names of their sets. Raises Fault."""
    questions: dict[str, list[Question]] = {}
    for name in args.data:
        if name not in SPLITS and not isinstance(task, SearchQA):
            raise Fault(
                f"--data {name}: {task.cfg.task} asks its own questions: give {', '.join(SPLITS)}, or --test"
            )
        every = task.questions(name) if name in SPLITS else load(name, Path(args.data_dir))
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


def read_earlier(files: RunDirectory, setting: Row) -> tuple[list[Row], list[str], str]:
    """Reads the rows of an earlier call, the names of its metrics and its commit.

    Fault if it differs from this one in anything but the commit.
    """
    path = files.path / "summary.json"
    if not path.exists():
        return [], [], ""
    try:
        summary = decoded(path.read_bytes())
        since, metrics = summary["setting"]["commit"], summary["metrics"]
        unlike = list(differences(summary["setting"], setting, ("commit",)).values())
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Fault(f"{path} is no evaluation's, or damaged: choose another --out") from None
    if unlike:
        raise Fault(f"{files.path} was started with {unlike[0]}: choose another --out")
    return read_jsonl(files.path / "results.jsonl"), metrics, since


def cut_chunks(rows: list[Row], questions: Mapping[str, list[Question]]) -> list[Chunk]:
    """Cuts `rows` after the last chunk that is whole; returns the chunks left to play."""
    chunks, end = list[Chunk](), 0
    for title, some in questions.items():
        for number, first in enumerate(range(0, len(some), CHUNK)):
            chunk = some[first : first + CHUNK]
            ids = [(title, q.id) for q in chunk]
            if (
                chunks
                or [(row.get("data"), row.get("id")) for row in rows[end : end + len(chunk)]] != ids
            ):
                chunks.append((title, number, chunk))
            else:
                end += len(chunk)
    del rows[end:]
    return chunks


def play(
    files: RunDirectory,
    setting: Row,
    load_player: Callable[[], Agent],
    method: Method,
    chunks: Sequence[Chunk],
    rows: list[Row],
) -> list[str]:
    """Plays chunks and adds their rows to `rows` and results.jsonl; returns the names of the
    metrics.

    Where it is stopped, raises a Fault that says how to continue.
    """
    total = len(rows) + sum(len(some) for _, _, some in chunks)
    seconds = 0.1 if sys.stderr.isatty() else 30
    try:
        with (
            load_player() as player,
            tqdm(total=total, initial=len(rows), unit="question", mininterval=seconds) as bar,
        ):
            print(player.tools or f"task: {player.task.cfg.task}", flush=True)
            for title, number, some in chunks:
                bar.set_description(title, refresh=False)
                seed = int(rng_of(setting["seed"], number, f"{title} 0").integers(2**31))
                progress = lambda ended, start=bar.n: bar.update(start + ended - bar.n)  # noqa: E731
                taus = method.play(dataclasses.replace(player, seed=seed, progress=progress), some)
                set_rewards(player.task, taus)
                measured = compute_metrics(player.task, taus)
                metrics = list(measured[0])
                files.write(
                    "summary.json", json.dumps({"setting": setting, "metrics": metrics}, indent=1)
                )
                for tau, values in zip(taus, measured, strict=True):
                    rows.append({"data": title} | row_of(player.task, tau, values))
                    files.append("results", rows[-1])
    except (Outage, stop.Stopped) as e:
        kept = f"{len(rows)} of {total} rows are kept in {files.path}"
        raise Fault(f"{e}; {kept}: the same command continues there") from None
    return metrics


def row_of(task: Task, tau: Trajectory, metrics: Mapping[str, float]) -> Row:
    """Makes a line of results.jsonl. `gold_found`: a gold answer stands in some passage that was
    retrieved."""
    q = tau.question
    row: Row = {
        "answered": float(tau.stop == "over" or (tau.stop == "answer" and bool((tau.prediction or "").strip()))),
        "prompt_tokens": tau.prompt_tokens, "sampled_tokens": sum(tau.mask), "tokens": len(tau.ids),
        "stop": tau.stop, "prediction": tau.prediction, "golds": list(q.golds),
    }  # fmt: skip
    row |= {tool.plural: tau.served(tool.tag) for tool in tools_of(task)}
    if isinstance(task, SearchQA):
        row["gold_found"] = float(
            holds_gold((text for turn in tau.turns for text in turn.result or []), q.golds)
        )
    if clash := sorted(metrics.keys() & {"id", "data", "questions", "gold_recall", *row}):
        raise Fault(
            f"--task {task.cfg.task}: evaluate.py has a figure called {clash[0]}: give the metric another name"
        )
    return {"id": q.id, "reward": tau.reward, **metrics, **row}


def tools_of(task: Task) -> Sequence[Any]:
    """The tools whose calls are counted: of search QA the search even for a method that does not
    use it."""
    return task.tools or ([task.search] if isinstance(task, SearchQA) else [])


# ---- figures


def summary_of(setting: Row, metrics: list[str], tools: list[str], rows: Sequence[Row]) -> Row:
    """The figures of all rows, by the sets of questions and on average; the first metric is the
    main one."""
    titles = dict.fromkeys(row["data"] for row in rows)
    parts = {
        title: summarize([row for row in rows if row["data"] == title], metrics, tools)
        for title in titles
    }
    average = macro([Interval(**part[metrics[0]]) for part in parts.values()])
    return {
        "setting": setting,
        "metrics": metrics,
        "tools": tools,
        "benchmarks": parts,
        "average": average._asdict(),
    }


def summarize(rows: Sequence[Row], metrics: Sequence[str], tools: Sequence[str]) -> Row:
    """A set's metrics with 95 % intervals over questions, and the means of what explains them.

    `gold_recall` is the share of questions of which some retrieved passage holds a gold answer.
    """
    out: Row = {"questions": len(rows)}
    for name in metrics:
        most = 1.0 if name in SHARES else math.inf
        out[name] = interval([row[name] for row in rows]).within(1 - most, most)._asdict()
    for name in ("answered", *tools, "prompt_tokens", "sampled_tokens", "tokens"):
        out[name] = fmean(row[name] for row in rows)
    if "gold_found" in rows[0]:
        out["gold_recall"] = fmean(row["gold_found"] for row in rows)
    return out


def tabulate(summary: Row) -> str:
    """The Markdown table of an evaluation."""
    (main, *others), cells = summary["metrics"], dict[str, dict[str, str]]()
    head = f"{label(main)}, 95 %"
    for title, part in summary["benchmarks"].items():
        recall = "gold_recall" in part
        cells[title] = {
            "": title,
            "questions": f"{part['questions']:,}",
            head: f"{Interval(**part[main])}",
        }
        cells[title] |= {label(key): f"{part[key]['mean']:.3f}" for key in others}
        # what a tool ends is over
        cells[title] |= {"answered" if recall else "finished": f"{part['answered']:.3f}"}
        cells[title] |= {key: f"{x:.2f}" for key, x in count_calls(part, summary["tools"]).items()}
        cells[title] |= {"gold recall": f"{part['gold_recall']:.3f}"} if recall else {}
        cells[title] |= {"sampled tokens": f"{part['sampled_tokens']:.0f}"}
    if len(cells) > 1:
        average = summary["average"]
        cells["average"] = {
            "": "average",
            "questions": f"{average['n']:,}",
            head: f"{Interval(**average)}",
        }
    return markdown(list(cells.values()))


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows, each a cell by its heading."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, *([row.get(head, "") for head in heads] for row in rows)]
    out = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([out[0], "|---" * len(heads) + "|", *out[1:]]) + "\n"
