"""Measure an agent on its task: the questions that its run holds out, the paper's benchmarks, a file.

    python evaluate.py runs/NAME                                       # a run under its best instruction, I_star
    python evaluate.py Qwen/Qwen2.5-3B --data nq hotpotqa --retriever http://127.0.0.1:8000
    python evaluate.py world --data my.jsonl --corpus passages.jsonl

WHAT is a run, a checkpoint that export.py wrote, a Hugging Face directory or id, a preset, or the
URL of a server whose engine --engine names (docs/gpus.md). Greedy unless --temperature says
otherwise. --out, a new folder, gets summary.json, with 95 % intervals over questions, and
results.jsonl, one line per question. Benchmarks come from the Hugging Face hub, once.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from tqdm import tqdm

from config import PRESETS, Config, TaskKnobs, check_settings, out_of_range, read_config
from engines import Engine
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.files import Row, commit, write_file, writing
from plumbing.hub import check_model
from plumbing.outside import clean, finite, without_secrets
from plumbing.servers import Servers
from plumbing.threads import choose_threads, use_threads
from plumbing.trust import check_origin
from rollout import rollout
from tasks import Job, Question, Task, Trajectory
from tasks.search_qa import SearchQA, holds_gold
from tasks.task import (
    choose_instruction,
    compute_metrics,
    import_named,
    load_task,
    read_instruction,
    rng_of,
    set_rewards,
    take_subset,
)

# FlashRAG's data sets. The split that is evaluated, by Search-R1's rule: test if there is one.
HUB = "hf://datasets/RUC-NLPIR/FlashRAG_datasets"
BENCHMARKS = {
    "hotpotqa": "dev", "2wikimultihopqa": "dev", "musique": "dev",
    "bamboogle": "test", "nq": "test", "triviaqa": "test", "popqa": "test",
}  # fmt: skip
SPLITS = ("test", "valid", "train")
CHUNK = 256  # questions that are played together
# Flags of inspo.py that matter here; a run's own values are the defaults. SERVED change no result.
PLAYED = (
    "task", "reward", "tools", "format", "test", "topk", "max_turns", "max_response", "max_observation", "max_prompt",
)  # fmt: skip
SERVED = ("retriever", "corpus", "engine", "device", "vllm_memory")
KNOBS = (*PLAYED, *SERVED)


class Agent(contextlib.AbstractContextManager["Agent"]):
    """A model that plays a task under an instruction, as in training.

    `seed`: of its samples; `progress` is told how many episodes have ended. A subclass may play
    otherwise, with `knobs` of its own.
    """

    knobs: Mapping[str, Any] = {}
    where = ""  # it searches, in a line
    close: Callable[[], None] = staticmethod(lambda: None)
    progress: Callable[[int], Any] = staticmethod(lambda ended: None)

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        task: Task,
        instruction: str,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        self.engine, self.tokenizer, self.task = engine, tokenizer, task
        self.instruction, self.temperature, self.seed = instruction, temperature, seed

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def stop_strings(cls, task: Task) -> tuple[str, ...]:
        """What ends a turn."""
        return task.make_format().stop_strings()

    @functools.cached_property
    def held_out(self) -> list[Question]:
        """The held-out questions; none where their file is gone, since others can be asked."""
        with contextlib.suppress(Fault):
            return self.task.questions("test")
        return []

    def find_question(self, text: str) -> Question:
        """Returns the held-out question of this id or text, or a new one; Fault if the task's are
        more than text."""
        text = clean(text.strip())  # the shell's bytes may not be text
        if not text:
            raise Fault("the question is empty")
        question, searches = text, isinstance(self.task, SearchQA)
        if searches and not text.endswith("?"):
            question += "?"
        for q in self.held_out:
            if text in (q.id, q.text) or question == q.text:
                return q
        # rows of search QA are for --reward alone
        if not searches and any(q.data is not None for q in self.held_out):
            example = self.held_out[0].id
            raise Fault(
                f"a question of {self.task.cfg.task} is more than its text: give the id of one, such as {example}"
            )
        return Question("asked", question, source="asked")

    def ask(self, text: str) -> Trajectory:
        """Plays a held-out question, of this id or text, or a new one; its `prediction` is the
        answer. Raises Fault."""
        [tau] = self.play([self.find_question(text)])
        return tau

    def play(self, questions: Sequence[Question]) -> list[Trajectory]:
        """Plays each question once."""
        jobs = [Job(None, self.instruction, q, k) for k, q in enumerate(questions)]
        return rollout(
            self.engine,
            self.tokenizer,
            self.task,
            jobs,
            self.task.cfg,
            temperature=self.temperature,
            seed=self.seed,
            progress=self.progress,
        )

    def score(self, taus: list[Trajectory]) -> list[dict[str, float]]:
        """Sets the rewards of finished trajectories; returns the task's metrics of each."""
        set_rewards(self.task, taus)
        return compute_metrics(self.task, taus)


# ---- which agent


class Subject(NamedTuple):
    """A model, with the configuration of its run or preset."""

    name: str
    weights: str  # directory, hub id or URL
    cfg: Config
    I_star: str = ""  # "" if it has none
    run: Path | None = None  # whose config.json it is


def find_subject(what: str) -> Subject:
    """Finds what a command line names; Fault for a run that has not finished."""
    if "://" in what:
        name = without_secrets(what).split("//")[1].split("/")[0].replace(":", "-")
        return Subject(name, what, Config())
    if what in PRESETS:
        return Subject(what, PRESETS[what]["model"], Config(**PRESETS[what]))
    path = Path(what)
    if not path.is_dir():
        try:
            check_model(what)
        except Fault as e:
            raise Fault(f"{what} is no directory; as a model of the hub: {e}") from None
    file = path / "I_star.txt"
    I_star = file.read_text("utf-8").strip() if file.is_file() else ""
    # of a run, or of a checkpoint in it?
    run = path if (path / "checkpoints").is_dir() else path.parent
    if not ((run / "checkpoints").is_dir() and (run / "config.json").is_file()):
        return Subject(path.resolve().name, what, Config(model=what), I_star)
    weights = path / "policy" if run == path else path
    if not (I_star and weights.is_dir()):
        raise Fault(
            f"{what} has not finished: wait, resume it, or give a directory that `python export.py {what}` has written"
        )
    return Subject(path.resolve().name, str(weights), read_config(run), I_star, run)


def configure(what: str, kind: type["Agent"], settings: Row) -> tuple[Subject, Task]:
    """Returns what a command line names and its task, with these settings. Raises Fault."""
    found = find_subject(what)
    given = check_settings(Config, settings)
    if found.run:
        check_origin(found.run, {name: getattr(found.cfg, name) for name in KNOBS}, given)
    cfg = dataclasses.replace(found.cfg, **{**given, **kind.knobs})
    fault = out_of_range(cfg, given) or TaskKnobs.find_fault(cfg)
    if fault:
        raise Fault(fault)
    return found, load_task(cfg, settings.get("task"))


def open_agent(
    found: Subject, task: Task, kind: type[Agent], instruction: str, temperature: float, seed: int
) -> Agent:
    """Returns the agent that plays the task; `close` ends its engine and its tools' servers."""
    instruction = instruction or found.I_star or choose_instruction(task)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        task.check()
        where = task.start(stack.enter_context(Servers(f"{folder}/log")))
        engine, tokenizer = open_engine(found.weights, task.cfg, kind.stop_strings(task))
        stack.callback(engine.close)
        agent = kind(engine, tokenizer, task, instruction, temperature, seed)
        agent.where, agent.close = where, stack.pop_all().close  # type: ignore[method-assign]
    return agent


def load_agent(
    what: str | Path,
    kind: type[Agent] = Agent,
    instruction: str = "",
    temperature: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> Agent:
    """Returns the agent of a run, a checkpoint that export.py has written, a model or a preset.

    `instruction`: by default the run's best one, else the task's. `settings`: those in which it
    differs from the run, as `inspo.train` takes them. Raises Fault. Close the agent, or use it in a
    `with`.
    """
    found, task = configure(str(what), kind, {"engine": "torch"} | settings)
    return open_agent(found, task, kind, instruction, temperature, seed)


def open_engine(weights: str, cfg: Config, ends: tuple[str, ...]) -> tuple[Any, Any]:
    """Loads a model into the engine that training would choose; returns both, with its
    tokenizer."""
    if "://" in weights:
        if ":" not in cfg.engine:
            raise Fault(
                f"{without_secrets(weights)}: name its engine, --engine module:Class (docs/gpus.md)"
            )
        kind = import_named(f"--engine {cfg.engine}", cfg.engine, "class")
        engine = kind(dataclasses.replace(cfg, model=weights), None, ends)
        return engine, engine.tokenizer
    # here: torch takes seconds to import
    import torch

    from engines.choose import choose_engine, device_of, is_too_old
    from models.model import empty, fill, load_config, load_policy
    from models.model import weights as weights_of

    device = device_of(cfg)
    model, tokenizer = load_policy(weights, cfg.longest)
    wide = device == "cpu" or cfg.dtype == "float32" or is_too_old(device)
    if choose_engine(cfg, device) == "torch":
        from engines.torch_engine import TorchEngine

        if not wide:  # `to` would also round what positions are computed with
            model = fill(empty(load_config(weights), torch.bfloat16, device), model)
        return TorchEngine(model.to(device), tokenizer, ends), tokenizer
    from engines.vllm_engine import VllmEngine

    dtype = "float32" if wide else "bfloat16"
    engine = VllmEngine(
        weights, tokenizer, ends, max_len=cfg.longest, memory=cfg.vllm_memory, dtype=dtype
    )
    engine.load(weights_of(model))
    return engine, tokenizer


# ---- which questions


def collect_questions(
    task: Task, names: Sequence[str], n: int, seed: int
) -> dict[str, list[Question]]:
    """Returns the questions of --data by the names of their sets, at most n of each. Raises
    Fault."""
    sets = {}
    for name in names:
        if name in SPLITS:
            questions = task.questions(name)
        elif not isinstance(task, SearchQA):
            raise Fault(
                f"--data {name}: {task.cfg.task} asks its own questions: give {', '.join(SPLITS)}, or --test"
            )
        elif name in BENCHMARKS:
            rows = task.load(f"{HUB}/{name}/{BENCHMARKS[name]}.jsonl")
            questions = [dataclasses.replace(q, source=name) for q in rows]
        else:
            questions = task.load(PRESETS["world"]["test"] if name == "world" else name)
        if not questions:
            raise Fault(f"--data {name}: {task.cfg.task} has no such questions")
        title = Path(name).stem if name.endswith((".jsonl", ".parquet")) else name
        if title in sets:
            raise Fault(f"--data {name}: there is a {title} already; give files different names")
        sets[title] = take_subset(questions, n, seed)
    return sets


# ---- an evaluation


def evaluate(agent: Agent, sets: Mapping[str, list[Question]], out: Path, setting: Row) -> Row:
    """Plays all questions, `sets` by their names; writes results.jsonl and summary.json, which it
    returns."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    seconds = 0.1 if sys.stderr.isatty() else 30
    total = sum(map(len, sets.values()))
    with (
        open(out / "results.jsonl", "w", encoding="utf-8") as file,
        tqdm(total=total, unit="question", mininterval=seconds) as bar,
    ):
        agent.progress = lambda ended: bar.update(len(rows) + ended - bar.n)  # type: ignore[method-assign]
        for title, questions in sets.items():
            bar.set_description(title, refresh=False)
            for first in range(0, len(questions), CHUNK):
                draws = rng_of(setting["seed"], first // CHUNK, f"{title} 0")
                agent.seed = int(draws.integers(2**31))
                taus = agent.play(questions[first : first + CHUNK])
                measured = agent.score(taus)
                metrics = list(measured[0])
                rows += [
                    {"data": title} | make_row(agent.task, tau, values)
                    for tau, values in zip(taus, measured, strict=True)
                ]
                with writing(out):
                    file.writelines(json.dumps(row) + "\n" for row in rows[-len(taus) :])
                    file.flush()
    tools = [tool.plural for tool in counted_tools(agent.task)]
    summary = {"setting": setting, "metrics": metrics, "tools": tools} | summarize(
        rows, metrics, tools
    )
    write_file(out / "summary.json", json.dumps(finite(summary), indent=1))
    return summary


def make_row(task: Task, tau: Trajectory, metrics: Mapping[str, float]) -> Row:
    """Makes a line of results.jsonl. `gold_recall`: whether a gold answer stands in some passage
    that was retrieved."""
    q, answer = tau.question, (tau.prediction or "").strip()
    row: Row = {"id": q.id, "reward": tau.reward, **metrics}
    row["answered"] = float(tau.stop == "over" or (tau.stop == "answer" and bool(answer)))
    row |= {tool.plural: tau.served(tool.tag) for tool in counted_tools(task)}
    if isinstance(task, SearchQA):
        found = [text for turn in tau.turns for text in turn.result or []]
        row["gold_recall"] = float(holds_gold(found, q.golds))
    row |= {"sampled_tokens": sum(tau.mask), "stop": tau.stop}
    return row | {"prediction": tau.prediction, "golds": list(q.golds)}


def counted_tools(task: Task) -> Sequence[Any]:
    """The tools whose calls are counted: of search QA the search even for a method that does not
    use it."""
    return task.tools or ([task.search] if isinstance(task, SearchQA) else [])


def summarize(rows: Sequence[Row], metrics: list[str], tools: list[str]) -> Row:
    """The figures of all rows, by the sets of questions, and the main metric, the first one, on
    average over the sets."""
    parts: dict[str, Row] = {}
    for title in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == title]
        part = parts[title] = {"questions": len(own)}
        for name in metrics:
            part[name] = estimate_mean([row[name] for row in own])
        for name in ("answered", *tools, "gold_recall", "sampled_tokens"):
            if name in own[0]:
                part[name] = fmean(row[name] for row in own)
    means = [part[metrics[0]] for part in parts.values()]
    mean = fmean(x["mean"] for x in means)
    # errors of different sets are independent; those below and above add apart (Zou and Donner)
    below = math.hypot(*(x["mean"] - x["low"] for x in means)) / len(means)
    above = math.hypot(*(x["high"] - x["mean"] for x in means)) / len(means)
    average = {"mean": mean, "low": mean - below, "high": mean + above}
    return {"benchmarks": parts, "average": average}


def estimate_mean(x: Sequence[float]) -> dict[str, float]:
    """The mean of x (n,) with its 95 % interval: Wilson's of zeros and ones, the normal one
    otherwise, infinite for a single value."""
    n, p, z = len(x), fmean(x), 1.96
    if {*x} <= {0, 1}:
        centre = (p + z * z / 2 / n) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2) / (1 + z * z / n)
    else:
        centre, half = p, z * stdev(x) / math.sqrt(n) if n > 1 else math.inf
    return {"mean": p, "low": centre - half, "high": centre + half}


def show(summary: Row) -> None:
    """Prints a line for each set of questions, with the names of summary.json."""
    for title, part in summary["benchmarks"].items():
        line = f"{title:16}"
        for name, x in part.items():
            if name == summary["metrics"][0]:
                x = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**x)
            elif name in summary["metrics"]:
                x = x["mean"]
            line += f"  {name} {x if isinstance(x, (int, str)) else f'{x:.3f}'}"
        print(line)
    if len(summary["benchmarks"]) > 1:
        average = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**summary["average"])
        print(f"{'average':16}  {summary['metrics'][0]} {average}")


# ---- the command line


def add_player_flags(parser: argparse.ArgumentParser, knobs: Sequence[str] = KNOBS) -> None:
    """Adds how an agent plays, and the settings that may be given anew."""
    parser.add_argument("--seed", type=int, default=0, help="of what is sampled")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group = parser.add_argument_group("settings, by default those of the run or preset")
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name in knobs:
        text = fields[name].metadata["doc"].replace("%", "%%")
        group.add_argument(
            f"--{name}", type=fields[name].type, default=argparse.SUPPRESS, help=text
        )


def read_player_flags(args: argparse.Namespace, knobs: Sequence[str] = KNOBS) -> Row:
    """Returns the settings that were given."""
    if not (0 <= args.temperature < math.inf and args.seed >= 0):
        raise Fault("--temperature and --seed: give finite numbers of at least 0")
    return {name: x for name, x in vars(args).items() if name in knobs}


def make_parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program that measures agents."""
    parser = argparse.ArgumentParser(
        program, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", metavar="WHAT")
    sets = f"test (the task's own held-out questions), valid, train; search QA: world, {', '.join(BENCHMARKS)}, files"
    add("--data", nargs="+", default=["test"], help=sets)
    add("--n", type=int, default=0, help="questions of a set, a fixed sample by --seed; 0: all")
    add("--instruction", default="", help="file (I_star, else the task's first instruction)")
    add("--out", default="", help="default: runs/evaluation/NAME, with the names of --data")
    add_player_flags(parser)
    return parser


def run(args: argparse.Namespace, kind: type[Agent] = Agent) -> None:
    """Evaluates as the flags say, with an agent of this kind."""
    use_threads(choose_threads())  # before torch
    text = read_instruction(args.instruction) if args.instruction else ""
    found, task = configure(args.what, kind, {"engine": "auto"} | read_player_flags(args))
    sets = collect_questions(task, args.data, args.n, args.seed)
    parts = [found.name]
    parts += [] if kind is Agent else [kind.__name__]
    parts += [] if args.data == ["test"] else sets
    out = Path(args.out or f"runs/evaluation/{'-'.join(parts)}")
    for file in ("config.json", "summary.json"):
        if (out / file).exists():
            raise Fault(f"{out} has a {file} already: remove it, or choose another --out")
    setting = {
        "model": without_secrets(args.what),
        **{key: getattr(args, key) for key in ("data", "n", "seed", "temperature")},
        "agent": kind.__name__,
        **{key: getattr(task.cfg, key) for key in PLAYED},
        "commit": commit(),
    }
    with open_agent(found, task, kind, text, args.temperature, args.seed) as agent:
        print(agent.where or f"task: {task.cfg.task}", flush=True)
        show(evaluate(agent, sets, out, setting))
    print(f"{out}: summary.json, results.jsonl")


def main(argv: list[str] | None = None) -> None:
    args = make_parser("evaluate.py", __doc__).parse_args(argv)
    with one_line("evaluate.py"), stop.listening(), stop.may_stop():
        run(args)


if __name__ == "__main__":
    main()
