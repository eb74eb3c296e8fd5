"""Demonstrations for a cold start, taken from trajectories with a good reward (docs/cold_start.md).

    python extras/collect.py runs/NAME --out demos.jsonl        # those of a training run
    python extras/collect.py http://127.0.0.1:8001/v1 --engine extras.engines.chat:ChatEngine --train train.jsonl \\
        --corpus passages.jsonl --out demos.jsonl

WHAT is a run, whose training rollouts are read, or what evaluate.py can play: the URL of an
OpenAI-compatible chat endpoint (OPENAI_API_KEY), a preset, a Hugging Face directory or id; it is
asked each training question once. A row is added to --out for each question and instruction that
has none there: the same command again continues, and with a --temperature tries failures again.
"""

if not __package__:
    import root  # noqa: F401
import argparse
import contextlib
import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from config import Config, check_settings, read_config
from evaluate import KNOBS, Agent, add_player_flags, read_player_flags
from extras.bench.harness import parser_of
from extras.cold_start import conversation, cut_at_stop
from extras.engines.chat import Words
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.files import read_jsonl
from plumbing.outside import escape_markup, match_markup
from plumbing.trust import check_origin
from tasks import Question, Task
from tasks.search_qa import read_json_lines
from tasks.task import load_task, rng_of, take_subset

CHUNK = 64  # questions that are played together
OWN = (*KNOBS, "train")  # settings that may be given anew
Row = dict[str, Any]
# with its instruction, and what Trajectory.record says of it
Played = tuple[Task, str, Question, Row]


def row_of(task: Task, instruction: str, q: Question, played: Row) -> Row:
    """Writes a trajectory as a conversation: its prompt, its turns as far as they count, and what
    was shown."""
    # Control tokens are handled where the row is read.
    form, words = task.make_format(), Words()
    tags = form.reserved_tags()
    messages = form.messages(
        instruction, dataclasses.replace(q, text=escape_markup(q.text, match_markup(words, tags)))
    )
    tools = {tool.tag: tool for tool in task.tools}
    for turn in played["turns"]:
        messages.append({"role": "assistant", "content": cut_at_stop(turn["text"], task)})
        if turn["result"] is not None:
            tool = tools[turn["tool"]]
            pattern = match_markup(words, tags)
            shown = tool.show([escape_markup(text, pattern) for text in turn["result"]])
            if form.stop_strings():  # calls and results are in tags
                shown = f"<{tool.result_tag}>{shown}</{tool.result_tag}>"
            messages.append({"role": "tool", "content": shown})
    about = {
        "id": q.id,
        "instruction": instruction,
        "data_source": q.source,
        "reward": played["reward"],
    }
    return about | {"messages": messages}


def possible(row: Row, task: Task) -> bool:
    """Whether a rollout could have this row: an endpoint may continue after its call."""
    with contextlib.suppress(ValueError):
        _, turns = conversation(row, task)
        return turns[-1].result is not None or not turns[-1].tool
    return False


def read(run: Path, settings: Row) -> Iterator[Played]:
    """Yields a run's training rollouts, the latest first."""
    cfg: Config = read_config(run)
    check_origin(run, {name: getattr(cfg, name) for name in OWN}, settings)
    given = check_settings(Config, {name: x for name, x in settings.items() if name in OWN})
    task = load_task(dataclasses.replace(cfg, **given))
    questions = {q.id: q for q in task.questions("train")}
    texts = {
        I["id"]: I["text"] for event in read_jsonl(run / "population.jsonl") for I in event["P"]
    }
    for path in sorted((run / "trajectories").glob("step-*.jsonl.gz"), reverse=True):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for played in map(json.loads, file):
                yield task, texts[played["instruction"]], questions[played["question"]], played


def play(args: argparse.Namespace, done: set[tuple[str, str]]) -> Iterator[Played]:
    """Yields what WHAT plays of the training questions, without those that are `done` under its
    instruction."""
    with Agent(args.what, **read_player_flags(args, OWN)) as agent:
        print(agent.start(), flush=True)
        task, instruction = agent.task, agent.instruction
        every = take_subset(task.questions("train"), args.n, args.seed)
        left = [q for q in every if (instruction, q.id) not in done]
        for first in range(0, len(left), CHUNK):
            chunk = left[first : first + CHUNK]
            agent.seed = int(rng_of(args.seed, len(done), chunk[0].id).integers(2**31))
            taus = agent.play(chunk)
            agent.score(taus)
            yield from ((task, instruction, tau.question, tau.record()) for tau in taus)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras/collect.py")
    parser.usage = "%(prog)s WHAT --out FILE [--flag value ...]"
    parser.add_argument("what", metavar="WHAT")
    parser.add_argument(
        "--out", required=True, type=Path, help="file of demonstrations, .jsonl; rows are added"
    )
    parser.add_argument(
        "--least",
        type=float,
        help="lowest reward of what is kept; default: the task's passing_reward",
    )
    parser.add_argument(
        "--n", type=int, default=0, help="questions to play, a fixed sample by --seed; 0: all"
    )
    add_player_flags(parser, OWN)
    args = parser.parse_args(argv)
    with one_line("extras/collect.py"), stop.listening(), stop.may_stop():
        # before anything is played, and perhaps paid for
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise Fault(f"--out {args.out}: name a file in a directory that is there")
        rows: Any = read_json_lines(args.out) if args.out.is_file() else ()
        done = {(row["instruction"], row["id"]) for _, row in rows}
        is_run = (Path(args.what) / "trajectories").is_dir()
        new = left_out = 0
        source = read(Path(args.what), read_player_flags(args, OWN)) if is_run else play(args, done)
        for task, instruction, q, played in source:
            row = row_of(task, instruction, q, played)
            good = played["reward"] >= (task.passing_reward if args.least is None else args.least)
            whole = (
                played["stop"] in ("answer", "over")
                and not played["invalid"]
                and possible(row, task)
            )
            if (instruction, q.id) in done or not good or not whole:
                left_out += 1
                continue
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            done.add((instruction, q.id))
            new += 1
        if not done:
            raise Fault(
                f"nothing to demonstrate in {left_out:,} trajectories; try another --least, or another model"
            )
        print(
            f"{args.out}: {len(done):,} rows, {new:,} of them new; {left_out:,} trajectories left out"
        )


if __name__ == "__main__":
    main()
