"""One evaluation: questions are played, rows kept, figures and a table made of them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.agents import PLAYED, SERVED, Agent, Method, agent, instruction_of, method_of, subject
from evaluation.benchmarks import load, size_note
from evaluation.identity import identity
from evaluation.statistics import Interval, interval, macro
from journal.directory import RunDirectory, read_jsonl, writing
from journal.summary import label
from plumbing import stop
from plumbing.faults import Fault, Outage
from plumbing.outside import decoded, without_secrets
from tasks import Question, Task, Trajectory, load_task, measure, reward, rng_of, subset
from tasks.questions import normalize
from tasks.search_qa import SearchQA

CHUNK = 256  # questions that are played together; a run that was stopped repeats at most so many
QUIET = 30.0  # seconds between two lines of progress where there is no terminal
SPLITS = ("test", "valid", "train")
IDENTITY = {"questions": "other questions", "instruction": "another instruction", "model": "another model",
            "passages": "other passages to search"}  # fmt: skip
Row = dict[str, Any]


def row_of(task: Task, tau: Trajectory, metrics: Mapping[str, float]) -> Row:
    """Returns a line of results.jsonl. `gold_found`: a gold answer stands in some passage that was retrieved."""
    q = tau.question
    row: Row = {
        "answered": float(tau.stop == "over" or (tau.stop == "answer" and bool((tau.prediction or "").strip()))),
        "hops": q.hops, "prompt_tokens": tau.prompt_tokens, "sampled_tokens": sum(tau.mask), "tokens": len(tau.ids),
        "stop": tau.stop, "prediction": tau.prediction, "golds": list(q.golds),
    }  # fmt: skip
    row |= {tool.plural: tau.served(tool.tag) for tool in tools_of(task)}
    if isinstance(task, SearchQA):
        passages = f" {normalize(' '.join(text for turn in tau.turns for text in turn.result or []))} "
        row["gold_found"] = float(any(f" {normalize(g)} " in passages for g in q.golds))
    if clash := sorted(metrics.keys() & {"id", "data", "chunk", "sample", "questions", "gold_recall", *row}):
        raise Fault(f"--task {task.cfg.task}: evaluate.py has a figure called {clash[0]}: give the metric another name")
    return {"id": q.id, "reward": tau.reward, **metrics, **row}


def tools_of(task: Task) -> Sequence[Any]:
    """Returns the tools whose calls are counted: of search QA the search even for a method that does not use it."""
    return task.tools or ([task.search] if isinstance(task, SearchQA) else [])


class Progress(tqdm):  # type: ignore[type-arg]
    """tqdm's bar on a terminal, a line now and then elsewhere; both on standard error."""

    def __init__(self, total: int, played: int):
        seconds = 0.1 if sys.stderr.isatty() else QUIET
        super().__init__(
            total=total, initial=played, unit="question", dynamic_ncols=True, mininterval=seconds, maxinterval=seconds,
            delay=0 if sys.stderr.isatty() else QUIET,
        )  # fmt: skip

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.fp.isatty():
            super().display(msg, pos)
        else:
            print(str(self), file=self.fp, flush=True)

    def reach(self, n: int) -> None:
        """Shows that n questions are played. Raises Stopped where a request to stop has come."""
        stop.check()
        self.update(n - self.n)


def play(
    player: Agent, method: Method, name: str, questions: list[Question], samples: int, done: Sequence[Row],
    keep: Callable[[Task, list[str], list[Row]], None], bar: Progress,
) -> None:  # fmt: skip
    """Plays the questions of one set, `samples` times each, without those `done`; `keep` gets a chunk's rows.

    A chunk is played whole with a seed of its own, so that an evaluation that was stopped ends as any other.
    """
    known = {(row["chunk"], row["sample"]) for row in done if row["data"] == name}
    bar.set_description(name, refresh=False)
    for sample in range(samples):
        for chunk, first in enumerate(range(0, len(questions), CHUNK)):
            some = questions[first : first + CHUNK]
            if (chunk, sample) in known:
                continue
            played, seed = int(bar.n), int(rng_of(player.seed, chunk, f"{name} {sample}").integers(2**31))
            progress = lambda ended, played=played: bar.reach(played + ended)  # noqa: E731
            taus = method.play(dataclasses.replace(player, seed=seed, progress=progress), some)
            reward(player.task, taus)
            metrics = measure(player.task, taus)
            rows = [row_of(player.task, tau, found) for tau, found in zip(taus, metrics, strict=True)]
            keep(
                player.task, list(metrics[0]), [{"data": name, "chunk": chunk, "sample": sample} | row for row in rows]
            )
            bar.reach(played + len(some))


def by_question(rows: Sequence[Row], key: str) -> list[float]:
    """Returns the mean over a question's samples, in the order of the questions."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["id"], []).append(float(row[key]))
    return [sum(x) / len(x) for x in values.values()]


def summarize(rows: Sequence[Row], metrics: Sequence[str], tools: Sequence[str]) -> Row:
    """Returns a set's figures: the metrics with 95 % intervals over questions, and the means of what explains them.

    `gold_recall` is the share of questions of which some retrieved passage holds a gold answer.
    """
    main, answered = metrics[0], [row for row in rows if row["answered"]]
    out: Row = {"questions": len({row["id"] for row in rows})}
    out |= {key: interval(by_question(rows, key))._asdict() for key in metrics}
    for key in ("answered", *tools, "prompt_tokens", "sampled_tokens", "tokens"):
        out[key] = sum(row[key] for row in rows) / len(rows)
    if "gold_found" in rows[0]:
        out["gold_recall"] = sum(row["gold_found"] for row in rows) / len(rows)
    out[f"{main}_answered"] = sum(row[main] for row in answered) / len(answered) if answered else None
    hops = sorted({row["hops"] for row in rows} - {0})
    strata = {str(h): by_question([row for row in rows if row["hops"] == h], main) for h in hops}
    return out | ({f"{main}_by_hops": {h: interval(x)._asdict() for h, x in strata.items()}} if strata else {})


def summary_of(files: RunDirectory, setting: Row, metrics: list[str], tools: list[str], notes: list[str]) -> Row:
    """Returns the figures of all rows, by the sets of questions and on average; the first metric is the main one."""
    rows = read_jsonl(files.path / "results.jsonl")
    parts = {name: summarize([row for row in rows if row["data"] == name], metrics, tools)
             for name in setting["questions"]}  # fmt: skip
    average = macro({name: Interval(**part[metrics[0]]) for name, part in parts.items()})
    return {
        "setting": setting, "metrics": metrics, "tools": tools, "benchmarks": parts, "average": average._asdict(),
        "notes": notes,
    }  # fmt: skip


def table(summary: Row) -> str:
    """Returns the Markdown table of an evaluation."""
    parts, tools, average = summary["benchmarks"], summary["tools"], Interval(**summary["average"])
    (main, *others), recall = summary["metrics"], any("gold_recall" in part for part in parts.values())
    shown = label(main)
    hops = sorted({h for part in parts.values() for h in part.get(f"{main}_by_hops", {})})
    done = "answered" if recall else "finished"  # what a tool ends has no answer
    head = ["", "questions", f"{shown}, 95 %", *map(label, others), done, f"{shown} of {done}", *tools]
    head += ["gold recall"] * recall + ["sampled tokens"] + [f"{shown}, {h} hop{'s' * (h != '1')}" for h in hops]
    lines = [head]
    for name, part in parts.items():
        row = [name, f"{part['questions']:,}", f"{Interval(**part[main])}"]
        row += [f"{part[key]['mean']:.3f}" for key in others]
        of_done = part[f"{main}_answered"]
        row += [f"{part['answered']:.3f}", "" if of_done is None else f"{of_done:.3f}"]
        row += [f"{part[key]:.2f}" for key in tools]
        row += [f"{part['gold_recall']:.3f}"] if recall else []  # of search QA alone
        row += [f"{part['sampled_tokens']:.0f}"]
        by_hops = {h: Interval(**x) for h, x in part.get(f"{main}_by_hops", {}).items()}
        lines.append(row + [f"{by_hops[h]}" if h in by_hops else "" for h in hops])
    if len(parts) > 1:
        lines.append(["average", f"{average.n:,}", f"{average}"] + [""] * (len(head) - 3))
    out = [f"| {' | '.join(row)} |" for row in lines]
    return "\n".join([out[0], "|---" * len(head) + "|", *out[1:], *[f"\n{note}." for note in summary["notes"]]]) + "\n"


def asked(task: Task, args: argparse.Namespace) -> tuple[dict[str, list[Question]], list[str]]:
    """Returns the questions of --data by the names of their sets, and what to note below the table."""
    questions: dict[str, list[Question]] = {}
    notes, skipped = list[str](), list[str]()
    for name in args.data:
        if name in SPLITS:
            found = task.questions(name)
        elif isinstance(task, SearchQA):
            found = load(name, Path(args.data_dir), args.hub, skipped.append if args.skip_bad else None)
            notes += [note] if (note := size_note(name, len(found))) else []
        else:
            raise Fault(f"--data {name}: {task.cfg.task} asks its own questions: give {', '.join(SPLITS)}, or --test")
        title = Path(name).stem if name.endswith((".jsonl", ".parquet")) else name
        if title in questions:
            raise Fault(f"--data {name}: there is a {title} already; give each once, and files different names")
        if not found:
            raise Fault(f"--data {name}: {task.cfg.task} has no such questions")
        if len({q.id for q in found}) < len(found):
            raise Fault(f"--data {name}: some questions of {task.cfg.task} share an id; make the ids unique")
        questions[title] = subset(found, args.n, args.seed)
    for line in skipped:
        print(f"skipped {line}")
    notes += [f"{len(skipped)} rows without a question or a gold answer were skipped"] if skipped else []
    return questions, notes


def evaluate(args: argparse.Namespace, methods: Mapping[str, Method]) -> Row:
    """Evaluates as the flags say and writes --out; returns what summary.json holds."""
    with subject(args.what) as chosen:
        name = args.method or method_of(chosen, methods)
        method = methods[name]
        cfg = chosen.configured(args, (*PLAYED, *SERVED), **method.knobs)
        task = load_task(cfg)
        if not isinstance(task, method.task):
            raise Fault(f"--method {name} cannot play {task.cfg.task}: it is for {method.task.__name__}")
        instruction = instruction_of(chosen, task, method, args.instruction)
        questions, notes = asked(task, args)
        task.check()
        setting = {key: getattr(args, key) for key in ("data", "n", "seed", "temperature", "samples")}
        setting["what"] = without_secrets(args.what) if "://" in args.what else args.what
        setting |= {"method": name} | {key: getattr(cfg, key) for key in (*PLAYED, "tools") if key != "test"}
        setting |= identity(chosen, task, instruction, questions, args.served_model)
        player = agent(
            chosen, task, instruction, args.temperature, args.seed, stop=method.stop(task), served=args.served_model
        )
        out = Path(args.out or f"runs/evaluation/{chosen.name}-{name}")
        with contextlib.closing(RunDirectory(out)) as files:
            with writing(out):
                out.mkdir(parents=True, exist_ok=True)
            files.lock()
            metrics = complete(files, setting, player, method, questions, args.samples)
            summary = summary_of(files, setting, metrics, [tool.plural for tool in tools_of(task)], notes)
            finite = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # JSON has no infinity
            files.write("summary.json", json.dumps(finite, indent=1))
            files.write("table.md", text := table(summary))
        print(f"\n{chosen.name}, {name}:\n\n{text}\n{out}: summary.json, table.md, results.jsonl")
        return summary


def complete(
    files: RunDirectory, setting: Row, player: AbstractContextManager[Agent], method: Method,
    questions: Mapping[str, list[Question]], samples: int,
) -> list[str]:  # fmt: skip
    """Plays what results.jsonl lacks of the questions, `samples` times each; returns the names of the metrics.

    Raises Fault, which says how to continue, where it is stopped.
    """
    done, metrics = resume(files, setting, {title: len(some) for title, some in questions.items()})
    total, played, path = samples * sum(map(len, questions.values())), len(done), files.path / "results.jsonl"
    if done:
        print(f"{played} of {total} rows are from an earlier call; remove {files.path} to play them again", flush=True)

    def keep(task: Task, names: list[str], rows: list[Row]) -> None:
        nonlocal played
        if metrics and names != metrics:
            was, now = ", ".join(metrics), ", ".join(names)
            raise Fault(f"--task {task.cfg.task}: its metrics were {was}, now {now}; return the same ones for all")
        if not metrics:
            metrics.extend(names)
            files.write("summary.json", json.dumps({"setting": setting, "metrics": metrics}, indent=1))
        with writing(path), open(path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        played += len(rows)

    if played < total:
        try:
            with player as one:
                print(one.tools or f"task: {one.task.cfg.task}", flush=True)
                with Progress(total, played) as bar:
                    for title, some in questions.items():
                        play(one, method, title, some, samples, done, keep, bar)
        except (Outage, stop.Stopped) as e:
            kept = f"{played} of {total} are kept in {files.path}: the same command continues there"
            raise Fault(f"{e}; {kept}") from None
    return metrics


def resume(files: RunDirectory, setting: Row, sizes: dict[str, int]) -> tuple[list[Row], list[str]]:
    """Returns the rows of an evaluation that was stopped, whole chunks only, and the names of its metrics.

    `sizes`: questions of each set. Raises Fault if its setting differs.
    """
    out, metrics, rows = files.path, list[str](), list[Row]()
    if (out / "summary.json").exists():
        try:
            summary = decoded((out / "summary.json").read_text())
            theirs, metrics = dict(summary["setting"]), list(summary.get("metrics", []))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Fault(f"{out / 'summary.json'} is no evaluation's, or damaged: choose another --out") from None
        rows = [row for row in read_jsonl(out / "results.jsonl") if {"data", "chunk", "sample"} <= row.keys()]
        if rows and not (metrics and setting.keys() <= theirs.keys()):
            raise Fault(f"{out} is an evaluation by an earlier version: choose another --out")
        if metrics and (key := next((key for key in setting if theirs[key] != setting[key]), "")):
            was, now = json.dumps(theirs[key]), json.dumps(setting[key])
            unlike = IDENTITY.get(key, f"{key} {was}, not {now}")
            raise Fault(f"{out} was started with {unlike}: choose another --out")
    if not metrics:
        files.write("summary.json", json.dumps({"setting": setting}, indent=1))
    chunks = Counter((row["data"], row["chunk"], row["sample"]) for row in rows)
    whole = {key for key, n in chunks.items() if n == min(CHUNK, sizes[key[0]] - key[1] * CHUNK)}
    rows = [row for row in rows if (row["data"], row["chunk"], row["sample"]) in whole]
    files.write("results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return rows, metrics
