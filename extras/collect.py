"""Demonstrations for a cold start, out of trajectories whose reward says that they are good (docs/cold_start.md).

    python extras/collect.py runs/NAME --out demos.jsonl        # those of a training run
    python extras/collect.py http://127.0.0.1:8001/v1 --train train.jsonl --corpus passages.jsonl --out demos.jsonl

WHAT is a run, whose training rollouts are read, or what evaluate.py can play: the URL of an OpenAI-compatible chat
endpoint (OPENAI_API_KEY), a preset, a Hugging Face directory or id, which is asked the training questions, once each.
A row is added to --out for each question and instruction that has none there: the same command again continues.
"""

from __future__ import annotations

if not __package__:
    import root  # noqa: F401
from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import Config, read_config
from engines.chat_engine import Words
from evaluation.agents import Method, agent, instruction_of, subject
from extras.cold_start import conversation, stored, until_it_ends
from plumbing.faults import Fault, Outage, one_line
from plumbing.outside import as_data, control
from plumbing.trust import check_origin
from tasks import Question, Task, load_task, reward, rng_of, subset
from tasks.questions import json_lines

CHUNK = 64  # questions that are played together; one that was stopped repeats at most so many
KNOBS = ("task", "reward", "train", "corpus", "retriever", "topk", "tools", "max_turns", "max_response",
         "max_observation", "max_prompt", "engine", "device", "max_rows")  # fmt: skip
NAMING = ("task", "reward", "tools", "retriever")  # what a run of somebody else's may not choose
Row = dict[str, Any]


class Demos:
    """The rows of --out, and why trajectories were left out."""

    def __init__(self, path: Path, least: float | None):
        self.path, self.least, self.left_out = path, least, Counter[str]()
        self.rows = [row for _, row in json_lines(path)] if path.is_file() else list[Any]()
        self.known = {(row.get("instruction"), row.get("id")) for row in self.rows if isinstance(row, dict)}

    def add(self, task: Task, instruction: str, q: Question, played: Row) -> None:
        """Adds a played trajectory (Trajectory.record) unless there is a reason not to."""
        least = task.best_reward if self.least is None else self.least
        row = row_of(task, instruction, q, played)
        if (instruction, q.id) in self.known:
            self.left_out["have a row there already"] += 1
        elif played["reward"] < least:
            self.left_out[f"have a reward below {least:g}"] += 1
        elif played["invalid"] or played["stop"] not in ("answer", "over") or not possible(row, task):
            self.left_out["have a turn that neither calls nor answers, or do not end"] += 1
        else:
            self.rows.append(row)
            self.known.add((instruction, q.id))

    def write(self) -> None:
        from journal.directory import RunDirectory  # with torch, which takes seconds to import

        if not self.rows:
            return
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        RunDirectory(self.path.parent).write(self.path.name, text)


def row_of(task: Task, instruction: str, q: Question, played: Row) -> Row:
    """Returns the conversation of a trajectory: its prompt, its turns as far as they count, and what was shown."""
    # Control tokens are the business of whoever reads the row.
    form, words, tags = task.format, Words(), task.format.words(task.tools)
    asked = dataclasses.replace(q, text=as_data(q.text, control(words, tags)))
    messages = form.messages(task, instruction, asked)
    tools = {tool.tag: tool for tool in task.tools}
    for turn in played["turns"]:
        messages.append({"role": "assistant", "content": until_it_ends(turn["text"], task)})
        if turn["result"] is not None:
            tool = tools[turn["tool"]]
            pattern = control(words, (*form.results([tool]), *tags))
            shown = tool.show([as_data(text, pattern) for text in turn["result"]])
            if form.stop(task):  # calls and results are in tags
                shown = f"<{tool.result_tag}>{shown}</{tool.result_tag}>"
            messages.append({"role": "tool", "content": shown})
    about = {"id": q.id, "instruction": instruction, "data_source": q.source, "reward": played["reward"]}
    return about | {"messages": messages}


def possible(row: Row, task: Task) -> bool:
    """Returns whether a rollout could have this row: an endpoint may write on behind its call."""
    try:
        _, turns = conversation(row, task)
    except ValueError:
        return False
    return turns[-1].result is not None or not turns[-1].tool


def read(run: Path, given: dict[str, Any], demos: Demos) -> None:
    """Adds a run's training rollouts, the latest first; `given` replaces knobs of its own. Raises Fault."""
    from journal.directory import read_jsonl

    cfg: Config = read_config(run)
    check_origin(run, vars(cfg), given)
    task = load_task(dataclasses.replace(cfg, **given))
    questions = {q.id: q for q in task.questions("train")}
    texts = {I["id"]: I["text"] for event in read_jsonl(run / "population.jsonl") for I in event["P"]}
    files = sorted((run / "trajectories").glob("step-*.jsonl.gz"), reverse=True)
    if not files:
        raise Fault(f"{run} has no training rollouts in trajectories/: give another run, or what can be played")
    for file in files:
        for played in stored(run, file.name.removesuffix(".jsonl.gz")):
            if played["question"] not in questions:
                raise Fault(f"{file}: question {played['question']} is not in --train of {run}: restore that file")
            demos.add(task, texts[played["instruction"]], questions[played["question"]], played)
    demos.write()


def play(args: argparse.Namespace, demos: Demos) -> None:
    """Adds what WHAT plays of the training questions. Raises Fault."""
    with subject(args.what) as chosen:
        task = load_task(cfg := chosen.configured(args, KNOBS))
        instruction = instruction_of(chosen, task, Method(), args.instruction)
        asked = subset(task.questions("train"), args.n, args.seed)
        left = [q for q in asked if (instruction, q.id) not in demos.known]
        try:
            with agent(chosen, task, instruction, args.temperature, args.seed, served=args.served_model) as player:
                print(player.tools or f"task: {cfg.task}", flush=True)
                for first in range(0, len(left), CHUNK):
                    some = left[first : first + CHUNK]
                    seed = int(rng_of(args.seed, len(demos.rows), some[0].id).integers(2**31))
                    taus = dataclasses.replace(player, seed=seed).play(some)
                    reward(task, taus)
                    for tau in taus:
                        demos.add(task, instruction, tau.question, tau.record())
                    demos.write()
                    print(f"{first + len(some):,} of {len(left):,} questions: {len(demos.rows):,} rows", flush=True)
        except (Outage, stop.Stopped) as e:
            raise Fault(f"{e}; {len(demos.rows)} rows are in {demos.path}: the same command continues there") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "extras/collect.py", usage="%(prog)s WHAT --out FILE [--flag value ...]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("what", metavar="WHAT")
    parser.add_argument("--out", required=True, type=Path, help="file of demonstrations, .jsonl; rows are added")
    parser.add_argument("--least", type=float, help="lowest reward of what is kept; default: the task's best")
    parser.add_argument("--n", type=int, default=0, help="questions to play, a fixed sample by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; above, failures are worth a retry")
    parser.add_argument("--instruction", default="", help="file; default: the task's first one")
    parser.add_argument("--served_model", default="", help="model of a URL; default: the only one that it serves")
    knobs = {f.name: f for f in dataclasses.fields(Config)}
    for name in KNOBS:
        parser.add_argument(f"--{name}", type=knobs[name].type, help=knobs[name].metadata["doc"].replace("%", "%%"))
    args = parser.parse_args(argv)
    if args.n < 0 or args.temperature < 0 or args.seed < 0:
        parser.error("--n, --temperature and --seed must not be negative")
    with one_line("extras/collect.py"), stop.listening(), stop.may_stop():
        demos = Demos(args.out, args.least)
        before = len(demos.rows)
        if (Path(args.what) / "trajectories").is_dir():
            unused = [name for name in vars(args) if name not in ("what", "out", "least", *NAMING)]
            if given := [name for name in unused if getattr(args, name) != parser.get_default(name)]:
                raise Fault(f"--{given[0]}: {args.what} is a run, whose rollouts are read, not played; leave it out")
            read(Path(args.what), {name: value for name in NAMING if (value := getattr(args, name))}, demos)
        else:
            play(args, demos)
        why = [f"{n:,} trajectories {reason}" for reason, n in demos.left_out.items()]
        if not demos.rows:
            raise Fault(f"nothing to demonstrate: {'; '.join(why)}; try another --least, --instruction or model")
        print("\n".join([f"{args.out}: {len(demos.rows):,} rows, {len(demos.rows) - before:,} of them new", *why]))


if __name__ == "__main__":
    main()
