"""Measure an agent on the paper's benchmarks, on the world, or on a file of yours; compare what was measured.

    python evaluate.py runs/NAME --data world                                  # a run under its I_star
    python evaluate.py Qwen/Qwen2.5-3B-Instruct --method rag --data nq hotpotqa --retriever http://127.0.0.1:8000
    python evaluate.py http://127.0.0.1:8001/v1 --method search_o1 --data my.jsonl --corpus passages.jsonl
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from extras.baselines import METHODS, Agent
from config import Config
from tasks.questions import Question, em, f1, normalize, rng, subset
from evaluation.benchmarks import SIZES, load, size_note
from evaluation.compare import compare
from evaluation.models import agent, subject
from evaluation.statistics import Interval, interval, macro
from plumbing.faults import Fault, one_line
from journal.directory import RunDirectory, read_jsonl
from plumbing.outside import decoded
from rollout import Trajectory

CHUNK = 256  # questions that are played together; a run that was stopped repeats at most so many
ROLLOUT = (  # flags of inspo.py that matter here; a run's own values are the defaults
    "retriever", "corpus", "max_turns", "max_response", "max_observation", "max_prompt", "topk", "max_rows", "engine",
    "device", "vllm_memory", "search_retries",
)  # fmt: skip
Row = dict[str, Any]


def measure(tau: Trajectory) -> Row:
    """Returns a line of results.jsonl. `gold_found`: a gold answer stands in some passage that was retrieved."""
    q = tau.question
    passages = f" {normalize(' '.join(text for turn in tau.turns for text in turn.result or []))} "
    return {
        "id": q.id, "em": em(tau.prediction, q.golds), "f1": round(f1(tau.prediction, q.golds), 4),
        "answered": float(tau.stop == "answer" and bool((tau.prediction or "").strip())),
        "searches": tau.served("search"), "gold_found": float(any(f" {normalize(g)} " in passages for g in q.golds)),
        "hops": q.hops, "prompt_tokens": tau.prompt_tokens, "sampled_tokens": sum(tau.mask), "tokens": len(tau.ids),
        "stop": tau.stop, "prediction": tau.prediction, "golds": list(q.golds),
    }  # fmt: skip


def play(
    player: Agent, method: Callable[[Agent, list[Question]], list[Trajectory]], name: str, questions: list[Question],
    samples: int, done: Sequence[Row], keep: Callable[[list[Row]], None], bar: tqdm[Any],
) -> None:  # fmt: skip
    """Plays the questions of one benchmark, `samples` times each, without those `done`; `keep` gets a chunk's rows.

    A chunk is played whole with a seed of its own, so that an evaluation that was stopped ends as any other.
    """
    known = {(row["chunk"], row["sample"]) for row in done if row["data"] == name}
    for sample in range(samples):
        for chunk, first in enumerate(range(0, len(questions), CHUNK)):
            some = questions[first : first + CHUNK]
            if (chunk, sample) not in known:
                seed = int(rng(player.seed, chunk, f"{name} {sample}").integers(2**31))
                taus = method(dataclasses.replace(player, seed=seed), some)
                keep([{"data": name, "chunk": chunk, "sample": sample} | measure(tau) for tau in taus])
            bar.update(len(some))


def by_question(rows: Sequence[Row], key: str) -> list[float]:
    """Returns the mean over a question's samples, in the order of the questions."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["id"], []).append(float(row[key]))
    return [sum(x) / len(x) for x in values.values()]


def summarize(rows: Sequence[Row]) -> Row:
    """Returns a benchmark's figures: EM and F1 with 95 % intervals over questions, and the means of what explains them.

    `gold_recall` is the share of questions of which some retrieved passage holds a gold answer.
    """
    answered = [row for row in rows if row["answered"]]
    out: Row = {"questions": len({row["id"] for row in rows})}
    out |= {key: interval(by_question(rows, key))._asdict() for key in ("em", "f1")}
    for key in ("answered", "searches", "prompt_tokens", "sampled_tokens", "tokens"):
        out[key] = sum(row[key] for row in rows) / len(rows)
    out["gold_recall"] = sum(row["gold_found"] for row in rows) / len(rows)
    out["em_answered"] = sum(row["em"] for row in answered) / max(1, len(answered))
    hops = sorted({row["hops"] for row in rows} - {0})
    strata = {str(h): by_question([row for row in rows if row["hops"] == h], "em") for h in hops}
    out["em_by_hops"] = {h: interval(x)._asdict() for h, x in strata.items()}
    return out


def table(parts: dict[str, Row], average: Interval, notes: Sequence[str]) -> str:
    """Returns the Markdown table of an evaluation."""
    hops = sorted({h for part in parts.values() for h in part["em_by_hops"]})
    head = ["", "questions", "EM, 95 %", "F1", "answered", "EM of answered", "searches", "gold recall"]
    head += ["sampled tokens"]
    lines = [head + [f"EM, {h} hop{'s' * (h != '1')}" for h in hops]]
    for name, part in parts.items():
        row = [name, f"{part['questions']:,}", str(Interval(**part["em"])), f"{part['f1']['mean']:.3f}"]
        row += [f"{part[key]:.3f}" for key in ("answered", "em_answered")] + [f"{part['searches']:.2f}"]
        row += [f"{part['gold_recall']:.3f}", f"{part['sampled_tokens']:.0f}"]
        by_hops = {h: Interval(**x) for h, x in part["em_by_hops"].items()}
        lines.append(row + [str(by_hops[h]) if h in by_hops else "" for h in hops])
    if len(parts) > 1:
        lines.append(["average", f"{average.n:,}", str(average)] + [""] * (len(lines[0]) - 3))
    out = [f"| {' | '.join(row)} |" for row in lines]
    return "\n".join([out[0], "|---" * len(lines[0]) + "|", *out[1:], *[f"\n{note}." for note in notes]]) + "\n"


def evaluate(args: argparse.Namespace) -> Row:
    """Evaluates as the flags say and writes --out; returns what summary.json holds."""
    notes: list[str] = []
    skipped: list[str] = []
    folder = Path(args.data_dir)
    questions: dict[str, list[Question]] = {}
    for name in args.data:
        found = load(name, folder, args.hub, skipped.append if args.skip_bad else None)
        notes += [note] if (note := size_note(name, len(found))) else []
        label = Path(name).stem if name.endswith((".jsonl", ".parquet")) else name
        if label in questions:
            raise Fault(f"--data {name}: there is a {label} already; give each once, and files different names")
        questions[label] = subset(found, args.n, args.seed)
    for line in skipped:
        print(f"skipped {line}")
    with subject(args.what) as chosen:
        method = args.method or chosen.method
        out = Path(args.out or f"runs/evaluation/{chosen.name}-{method}")
        setting = {
            "what": args.what, "method": method, "data": args.data, "n": args.n, "seed": args.seed,
            "temperature": args.temperature, "samples": args.samples, "instruction": args.instruction or "",
        }  # fmt: skip
        setting |= {name: value for name in ROLLOUT[2:7] if (value := getattr(args, name)) is not None}
        done = resume(out, setting, {name: len(some) for name, some in questions.items()})
        total = args.samples * sum(map(len, questions.values()))
        if len(done) < total:
            with agent(chosen, method, args) as player, open(out / "results.jsonl", "a") as file:

                def keep(rows: list[Row]) -> None:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                    file.flush()

                with tqdm(total=total, unit="question", dynamic_ncols=True, disable=None) as bar:
                    for name, some in questions.items():
                        bar.set_description(name)
                        play(player, METHODS[method].play, name, some, args.samples, done, keep, bar)
    rows = read_jsonl(out / "results.jsonl")
    parts = {name: summarize([row for row in rows if row["data"] == name]) for name in questions}
    average = macro({name: Interval(**part["em"]) for name, part in parts.items()})
    notes += [f"{len(skipped)} rows without a question or a gold answer were skipped"] if skipped else []
    found_all = {"setting": setting, "benchmarks": parts, "average": average._asdict(), "notes": notes}
    files = RunDirectory(out)
    files.write("summary.json", json.dumps(found_all, indent=1))
    files.write("table.md", text := table(parts, average, notes))
    print(f"\n{chosen.name}, {method}:\n\n{text}\n{out}: summary.json, table.md, results.jsonl")
    return found_all


def resume(out: Path, setting: Row, sizes: dict[str, int]) -> list[Row]:
    """Returns the rows of an evaluation that was stopped, whole chunks only; Fault if its setting differs.

    `sizes`: questions of each benchmark.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / "summary.json").exists():
        try:
            theirs = dict(decoded((out / "summary.json").read_text())["setting"])
        except (ValueError, LookupError, TypeError):
            raise Fault(f"{out / 'summary.json'} is no evaluation's, or damaged: choose another --out") from None
        if theirs != setting:
            key = next(k for k in sorted({*theirs, *setting}) if theirs.get(k) != setting.get(k))
            was, now = theirs.get(key), setting.get(key)
            raise Fault(f"{out} was started with {key} {was!r}, not {now!r}: choose another --out")
    else:
        RunDirectory(out).write("summary.json", json.dumps({"setting": setting}, indent=1))
    rows = read_jsonl(out / "results.jsonl")
    chunks = Counter((row["data"], row["chunk"], row["sample"]) for row in rows)
    whole = {key for key, n in chunks.items() if n == min(CHUNK, sizes[key[0]] - key[1] * CHUNK)}
    rows = [row for row in rows if (row["data"], row["chunk"], row["sample"]) in whole]
    RunDirectory(out).write("results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", metavar="WHAT")
    parser.add_argument("--method", choices=METHODS, help="how it plays; default: as it was trained, or search_r1")
    parser.add_argument("--data", nargs="+", default=["world"], help=f"world, {', '.join(SIZES)}, or files")
    parser.add_argument("--data_dir", default="data", help="folder of the benchmarks' files")
    parser.add_argument("--hub", action="store_true", help="download what the folder lacks")
    parser.add_argument("--skip_bad", action="store_true", help="leave out rows without a question or a gold answer")
    parser.add_argument("--n", type=int, default=0, help="questions of a benchmark, a fixed sample by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--samples", type=int, default=1, help="rollouts a question")
    parser.add_argument(
        "--instruction", help="file; default: I_star for inspo, else the run's first one or Search-R1's"
    )
    parser.add_argument("--served_model", default="", help="model of a URL; default: the only one that it serves")
    parser.add_argument("--out", help="directory to write; default: runs/evaluation/NAME-METHOD")
    parser.add_argument("--compare", nargs="+", metavar="DIR", help="evaluations; seeds of one arm with commas")
    for f in dataclasses.fields(Config):
        if f.name in ROLLOUT:
            parser.add_argument(f"--{f.name}", type=f.type, help=f.metadata["doc"].replace("%", "%%"))
    args = parser.parse_args(argv)
    if bool(args.what) == bool(args.compare):
        parser.error("give WHAT to evaluate, or --compare with two evaluations or more")
    if args.samples < 1 or args.n < 0 or args.temperature < 0 or args.seed < 0:
        parser.error("--samples must be at least 1; --n, --temperature and --seed must not be negative")
    if args.samples > 1 and not args.temperature:
        parser.error(f"--samples {args.samples}: greedy samples are all the same; give --temperature")
    with one_line("evaluate.py"):
        if args.compare:
            print(compare(args.compare))
        else:
            evaluate(args)


if __name__ == "__main__":
    main()
