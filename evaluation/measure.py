"""Measure an agent on its task: the questions that its run holds out, the paper's benchmarks, a file; compare agents.

    python evaluate.py runs/NAME                                               # a run under its I_star
    python evaluate.py Qwen/Qwen2.5-3B --data nq hotpotqa --retriever http://127.0.0.1:8000
    python evaluate.py http://127.0.0.1:8001/v1 --data my.jsonl --corpus passages.jsonl
    python evaluate.py --compare runs/evaluation/A runs/evaluation/B           # seeds of one arm: A0,A1,A2 B0,B1,B2

WHAT is a run, one of its checkpoints, a Hugging Face directory or id, a preset, or the URL of an OpenAI-compatible chat
endpoint (OPENAI_API_KEY). Greedy unless --temperature says otherwise. --out gets summary.json, table.md and
results.jsonl, a line a question; the same command again continues where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
from tqdm import tqdm

from config import Config, RolloutKnobs, TaskKnobs, out_of_range
from evaluation.agents import METHODS, Agent, Method, agent, instruction_of, method_of, subject
from evaluation.benchmarks import SIZES, load, size_note
from evaluation.compare import compare
from evaluation.statistics import Interval, interval, macro
from journal.directory import RunDirectory, read_jsonl
from journal.summary import label
from plumbing.faults import Fault, Outage, one_line
from plumbing.outside import decoded
from tasks import Question, Task, Trajectory, load_task, measure, reward, rng_of, subset
from tasks.questions import normalize
from tasks.search_qa import SearchQA

CHUNK = 256  # questions that are played together; a run that was stopped repeats at most so many
SPLITS = ("test", "valid", "train")
# Flags of inspo.py that matter here; a run's own values are the defaults. The second half changes no result.
PLAYED = ("task", "test", "topk", "max_turns", "max_response", "max_observation", "max_prompt")
SERVED = ("retriever", "corpus", "search_retries", "max_rows", "engine", "device", "vllm_memory")
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


def play(
    player: Agent, method: Method, name: str, questions: list[Question], samples: int, done: Sequence[Row],
    keep: Callable[[list[str], list[Row]], None], bar: tqdm[Any],
) -> None:  # fmt: skip
    """Plays the questions of one set, `samples` times each, without those `done`; `keep` gets a chunk's rows.

    A chunk is played whole with a seed of its own, so that an evaluation that was stopped ends as any other.
    """
    known = {(row["chunk"], row["sample"]) for row in done if row["data"] == name}
    for sample in range(samples):
        for chunk, first in enumerate(range(0, len(questions), CHUNK)):
            some = questions[first : first + CHUNK]
            if (chunk, sample) not in known:
                seed = int(rng_of(player.seed, chunk, f"{name} {sample}").integers(2**31))
                taus = method.play(dataclasses.replace(player, seed=seed), some)
                reward(player.task, taus)
                metrics = measure(player.task, taus)
                rows = [row_of(player.task, tau, found) for tau, found in zip(taus, metrics, strict=True)]
                keep(list(metrics[0]), [{"data": name, "chunk": chunk, "sample": sample} | row for row in rows])
            bar.update(len(some))


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
    out[f"{main}_answered"] = sum(row[main] for row in answered) / max(1, len(answered))
    hops = sorted({row["hops"] for row in rows} - {0})
    strata = {str(h): by_question([row for row in rows if row["hops"] == h], main) for h in hops}
    return out | ({f"{main}_by_hops": {h: interval(x)._asdict() for h, x in strata.items()}} if strata else {})


def table(
    parts: dict[str, Row], average: Interval, metrics: Sequence[str], tools: Sequence[str], notes: Sequence[str]
) -> str:
    """Returns the Markdown table of an evaluation; the first metric is the main one."""
    (main, *others), recall = metrics, any("gold_recall" in part for part in parts.values())
    shown = label(main)
    hops = sorted({h for part in parts.values() for h in part.get(f"{main}_by_hops", {})})
    done = "answered" if recall else "finished"  # what a tool ends has no answer
    head = ["", "questions", f"{shown}, 95 %", *map(label, others), done, f"{shown} of {done}", *tools]
    head += ["gold recall"] * recall + ["sampled tokens"] + [f"{shown}, {h} hop{'s' * (h != '1')}" for h in hops]
    lines = [head]
    for name, part in parts.items():
        row = [name, f"{part['questions']:,}", f"{Interval(**part[main])}"]
        row += [f"{part[key]['mean']:.3f}" for key in others]
        row += [f"{part['answered']:.3f}", f"{part[f'{main}_answered']:.3f}", *(f"{part[key]:.2f}" for key in tools)]
        row += [f"{part['gold_recall']:.3f}"] if recall else []  # of search QA alone
        row += [f"{part['sampled_tokens']:.0f}"]
        by_hops = {h: Interval(**x) for h, x in part.get(f"{main}_by_hops", {}).items()}
        lines.append(row + [f"{by_hops[h]}" if h in by_hops else "" for h in hops])
    if len(parts) > 1:
        lines.append(["average", f"{average.n:,}", f"{average}"] + [""] * (len(head) - 3))
    out = [f"| {' | '.join(row)} |" for row in lines]
    return "\n".join([out[0], "|---" * len(head) + "|", *out[1:], *[f"\n{note}." for note in notes]]) + "\n"


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
        flags = {key: value for key in (*PLAYED, *SERVED) if (value := getattr(args, key)) is not None}
        cfg = dataclasses.replace(chosen.cfg, **flags | dict(method.knobs))
        if fault := out_of_range(cfg, flags) or RolloutKnobs.check(cfg) or TaskKnobs.check(cfg):
            raise Fault(fault)
        task = load_task(cfg)
        if not isinstance(task, method.task):
            raise Fault(f"--method {name} cannot play {task.cfg.task}: it is for {method.task.__name__}")
        instruction = instruction_of(chosen, task, method, args.instruction)
        questions, notes = asked(task, args)
        out = Path(args.out or f"runs/evaluation/{chosen.name}-{name}")
        setting = {
            "what": args.what, "method": name, "data": args.data, "n": args.n, "seed": args.seed,
            "temperature": args.temperature, "samples": args.samples, "instruction": args.instruction,
        } | {key: flags[key] for key in PLAYED if key in flags}  # fmt: skip
        done, metrics = resume(out, setting, {title: len(some) for title, some in questions.items()})
        total = args.samples * sum(map(len, questions.values()))
        played = len(done)

        def keep(names: list[str], rows: list[Row]) -> None:
            nonlocal played
            if metrics and names != metrics:
                was, now = ", ".join(metrics), ", ".join(names)
                raise Fault(f"--task {task.cfg.task}: its metrics were {was}, now {now}; return the same ones for all")
            if not metrics:
                metrics.extend(names)
                RunDirectory(out).write("summary.json", json.dumps({"setting": setting, "metrics": metrics}, indent=1))
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            played += len(rows)

        if played < total:
            try:
                player = agent(
                    chosen, task, instruction, args.temperature, args.seed, stop=method.stop(task),
                    served=args.served_model,
                )  # fmt: skip
                with player as one, open(out / "results.jsonl", "a") as file:
                    print(one.tools or f"task: {task.cfg.task}", flush=True)
                    with tqdm(total=total, unit="question", dynamic_ncols=True, disable=None) as bar:
                        for title, some in questions.items():
                            bar.set_description(title)
                            play(one, method, title, some, args.samples, done, keep, bar)
            except (Outage, stop.Stopped) as e:
                raise Fault(f"{e}; {played} of {total} are kept in {out}: the same command continues there") from None
    rows, tools = read_jsonl(out / "results.jsonl"), [tool.plural for tool in tools_of(task)]
    parts = {title: summarize([row for row in rows if row["data"] == title], metrics, tools) for title in questions}
    average = macro({title: Interval(**part[metrics[0]]) for title, part in parts.items()})
    summary = {
        "setting": setting, "metrics": metrics, "tools": tools, "benchmarks": parts, "average": average._asdict(),
        "notes": notes,
    }  # fmt: skip
    files = RunDirectory(out)
    files.write("summary.json", json.dumps(summary, indent=1))
    files.write("table.md", text := table(parts, average, metrics, tools, notes))
    print(f"\n{chosen.name}, {name}:\n\n{text}\n{out}: summary.json, table.md, results.jsonl")
    return summary


def resume(out: Path, setting: Row, sizes: dict[str, int]) -> tuple[list[Row], list[str]]:
    """Returns the rows of an evaluation that was stopped, whole chunks only, and the names of its metrics.

    `sizes`: questions of each set. Raises Fault if its setting differs.
    """
    out.mkdir(parents=True, exist_ok=True)
    files, metrics, rows = RunDirectory(out), list[str](), list[Row]()
    if (out / "summary.json").exists():
        try:
            summary = decoded((out / "summary.json").read_text())
            theirs, metrics = dict(summary["setting"]), list(summary.get("metrics", []))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Fault(f"{out / 'summary.json'} is no evaluation's, or damaged: choose another --out") from None
        if metrics and theirs != setting:
            key = next(k for k in sorted({*theirs, *setting}) if theirs.get(k) != setting.get(k))
            was, now = theirs.get(key), setting.get(key)
            raise Fault(f"{out} was started with {key} {was!r}, not {now!r}: choose another --out")
        rows = read_jsonl(out / "results.jsonl")
        if rows and not metrics:
            raise Fault(f"{out} is an evaluation by an earlier version: choose another --out")
    if not metrics:
        files.write("summary.json", json.dumps({"setting": setting}, indent=1))
    chunks = Counter((row["data"], row["chunk"], row["sample"]) for row in rows)
    whole = {key for key, n in chunks.items() if n == min(CHUNK, sizes[key[0]] - key[1] * CHUNK)}
    rows = [row for row in rows if (row["data"], row["chunk"], row["sample"]) in whole]
    files.write("results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return rows, metrics


def main(
    argv: list[str] | None = None, methods: Mapping[str, Method] = METHODS, program: str = "evaluate.py",
    about: str | None = __doc__,
) -> None:  # fmt: skip
    """Runs the command line. `methods`: what --method may name; `program` and `about` are whose help it is."""
    parser = argparse.ArgumentParser(
        program, usage="%(prog)s WHAT [--flag value ...]", description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", nargs="?", metavar="WHAT")
    parser.add_argument("--method", choices=methods, help="how it plays; default: as it was trained, or search_r1")
    parser.add_argument(
        "--data", nargs="+", default=["test"],
        help=f"test (the task's own held-out questions), valid, train; of search QA: world, {', '.join(SIZES)}, files",
    )  # fmt: skip
    parser.add_argument("--data_dir", default="data", help="folder of the benchmarks' files")
    parser.add_argument("--hub", action="store_true", help="download what the folder lacks")
    parser.add_argument("--skip_bad", action="store_true", help="leave out rows without a question or a gold answer")
    parser.add_argument("--n", type=int, default=0, help="questions of a set, a fixed sample by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--samples", type=int, default=1, help="rollouts a question")
    parser.add_argument(
        "--instruction", default="", help="file; default: I_star for inspo, else the run's first one or the task's"
    )
    parser.add_argument("--served_model", default="", help="model of a URL; default: the only one that it serves")
    parser.add_argument("--out", help="directory to write; default: runs/evaluation/NAME-METHOD")
    parser.add_argument("--compare", nargs="+", metavar="DIR", help="evaluations; seeds of one arm with commas")
    knobs = {f.name: f for f in dataclasses.fields(Config)}
    for name in (*PLAYED, *SERVED):
        parser.add_argument(f"--{name}", type=knobs[name].type, help=knobs[name].metadata["doc"].replace("%", "%%"))
    args = parser.parse_args(argv)
    if bool(args.what) == bool(args.compare):
        parser.error("give WHAT to evaluate, or --compare with two evaluations or more")
    if args.samples < 1 or args.n < 0 or args.temperature < 0 or args.seed < 0:
        parser.error("--samples must be at least 1; --n, --temperature and --seed must not be negative")
    if args.samples > 1 and not args.temperature:
        parser.error(f"--samples {args.samples}: greedy samples are all the same; give --temperature")
    with one_line(program), stop.listening():
        if args.compare:
            print(compare(args.compare))
        else:
            evaluate(args, methods)


if __name__ == "__main__":
    main()
