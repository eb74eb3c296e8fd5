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
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tqdm import tqdm

from config import PRESETS, Config, check_settings, read_config
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.files import Row, commit, write_file, writing
from plumbing.hub import check_model
from plumbing.outside import clean, finite, map_texts, without_secrets
from plumbing.servers import Servers
from plumbing.threads import choose_threads, use_threads
from plumbing.trust import check_origin
from rollout import rollout
from tasks import Job, Question, Task, Trajectory
from tasks.search_qa import SearchQA, holds_gold, load_questions
from tasks.task import (
    choose_instruction,
    compute_metrics,
    import_named,
    load_task,
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
# Flags of inspo.py that matter here; a run's own values are the defaults.
KNOBS = (
    "task", "reward", "tools", "format", "instruction", "test", "topk", "max_turns", "max_response", "max_observation",
    "max_prompt", "retriever", "corpus", "engine", "device", "vllm_memory",
)  # fmt: skip


class Agent(contextlib.ExitStack):
    """A model that plays a task under an instruction, as in training; `close` ends it.

    A subclass may play otherwise, with `knobs` of its own.
    """

    knobs: Mapping[str, Any] = {}

    def __init__(self, what: str | Path, temperature: float = 0.0, seed: int = 0, **settings: Any):
        """Finds a run, a checkpoint that export.py has written, a model or a preset. Raises Fault.

        `seed`: of its samples. `settings`: those in which it differs from the run, as `inspo.train`
        takes them.
        """
        super().__init__()
        if min(temperature, seed) < 0:
            raise Fault("--temperature and --seed: give numbers of at least 0")
        cfg, self.weights, run = find_model(str(what))
        given = check_settings(Config, settings)
        if run:
            check_origin(run, vars(cfg), given)
        cfg = dataclasses.replace(cfg, **{**given, **self.knobs})
        self.task = load_task(cfg, settings.get("task"))
        self.instruction = choose_instruction(self.task)
        self.temperature, self.seed = temperature, seed

    def start(self) -> str:
        """Starts what the tools need, and loads the model; returns where it searches, in a line.
        Raises Fault."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.task.check()
        where = self.task.start(self.enter_context(Servers(f"{folder}/log")))
        cfg = self.task.cfg
        self.engine, self.tokenizer = open_engine(self.weights, cfg, self.stop_strings())
        self.callback(self.engine.close)
        return where or f"task: {cfg.task}"

    def stop_strings(self) -> tuple[str, ...]:
        """What ends a turn."""
        return self.task.make_format().stop_strings()

    def find_question(self, text: str) -> Question:
        """Returns the held-out question of this id or text, or a new one; Fault if the task's are
        more than text."""
        text, held_out = clean(text.strip()), list[Question]()  # the shell's bytes may not be text
        with contextlib.suppress(Fault):  # their file may be gone
            held_out = self.task.questions("test")
        for q in held_out:
            if text in (q.id, q.text, q.text.removesuffix("?")):
                return q
        if isinstance(self.task, SearchQA):
            text += "?" * (not text.endswith("?"))
        elif any(q.data is not None for q in held_out):
            raise Fault(
                f"a question of {self.task.cfg.task} is more than its text: give an id, such as {held_out[0].id}"
            )
        return Question("asked", text, source="asked")

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
        )

    def score(self, taus: list[Trajectory]) -> list[dict[str, float]]:
        """Sets the rewards of finished trajectories; returns the task's metrics of each."""
        set_rewards(self.task, taus)
        return compute_metrics(self.task, taus)


# ---- which agent


def find_model(what: str) -> tuple[Config, str, Path | None]:
    """Returns the configuration of the run, preset or model that a command line names, with the
    run's I_star as its instruction; where its weights are; and the run's directory. Raises Fault."""
    if what in PRESETS:
        return Config(**PRESETS[what]), PRESETS[what]["model"], None
    path = Path(what)
    # itself, or the one that a checkpoint is in
    run = next((p for p in (path, path.parent) if (p / "checkpoints").is_dir()), None)
    weights = str(path / "policy") if run == path else what
    if path.is_dir() and not Path(weights, "config.json").is_file():
        raise Fault(
            f"{what} holds no finished run: wait, resume it, or give a directory that `python export.py {what}` has"
            " written"
        )
    if not path.is_dir() and "://" not in what:
        check_model(what)
    cfg = read_config(run) if run else Config(model=what)
    if (path / "I_star.txt").is_file():
        cfg = dataclasses.replace(cfg, instruction=str(path / "I_star.txt"))
    return cfg, weights, run


def load_agent(what: str | Path, **how: Any) -> Agent:
    """Returns an Agent that has started; close it, or use it in a `with`. Raises Fault."""
    agent = Agent(what, **how)
    agent.start()
    return agent


def open_engine(weights: str, cfg: Config, ends: tuple[str, ...]) -> tuple[Any, Any]:
    """Loads a model into the engine that training would choose; returns both, with its
    tokenizer."""
    if "://" in weights:
        kind = import_named(f"--engine {cfg.engine}", cfg.engine, "class")
        engine = kind(dataclasses.replace(cfg, model=weights), None, ends)
        return engine, engine.tokenizer
    # here: torch takes seconds to import
    import torch

    from engines.choose import choose_engine, device_of, is_too_old
    from engines.torch_engine import TorchEngine
    from models import model as models

    device = device_of(cfg)
    model, tokenizer = models.load_model(weights, cfg.longest), models.load_tokenizer(weights)
    wide = device == "cpu" or cfg.dtype == "float32" or is_too_old(device)
    if choose_engine(cfg, device) == "vllm":
        from engines.vllm_engine import VllmEngine

        engine = VllmEngine(
            weights,
            tokenizer,
            ends,
            max_len=cfg.longest,
            memory=cfg.vllm_memory,
            dtype="float32" if wide else "bfloat16",
        )
        engine.load(models.weights(model))
        return engine, tokenizer
    if not wide:  # `to` would also round what positions are computed with
        model = models.fill(
            models.empty(models.load_config(weights), torch.bfloat16, device), model
        )
    return TorchEngine(model.to(device), tokenizer, ends), tokenizer


# ---- which questions


def collect_questions(
    task: Task, names: Sequence[str], n: int, seed: int
) -> dict[str, list[Question]]:
    """Returns the questions of --data by the names of their sets, at most n of each. Raises
    Fault."""
    sets = {}
    load = getattr(task, "load", load_questions)
    for name in names:
        title = Path(name).stem
        if name in SPLITS:
            questions = task.questions(name)
        elif name in BENCHMARKS:
            rows = load(f"{HUB}/{name}/{BENCHMARKS[name]}.jsonl")
            questions = [dataclasses.replace(q, source=name) for q in rows]
        else:
            questions = load(name)
        if title in sets or not questions:
            raise Fault(f"--data {name}: it has no questions, or is named twice")
        sets[title] = take_subset(questions, n, seed)
    return sets


# ---- an evaluation


def evaluate(agent: Agent, sets: Mapping[str, list[Question]], out: Path, setting: Row) -> None:
    """Plays all questions, `sets` by their names; writes results.jsonl and summary.json, and prints
    a line for each set."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Row] = {}
    with (
        open(out / "results.jsonl", "w", encoding="utf-8") as file,
        tqdm(total=sum(map(len, sets.values())), unit="question") as bar,
    ):
        for title, questions in sets.items():
            rows = list[Row]()
            for first in range(0, len(questions), CHUNK):
                agent.seed = setting["seed"] + first
                taus = agent.play(questions[first : first + CHUNK])
                measured = agent.score(taus)
                with writing(out):
                    for tau, metrics in zip(taus, measured, strict=True):
                        rows.append({"data": title} | make_row(agent.task, tau, metrics))
                        file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                bar.update(len(taus))
            parts[title] = summarize(rows, list(metrics))
    main = next(iter(metrics))
    summary = {
        "setting": map_texts(setting, without_secrets),
        "metrics": list(metrics),
        "benchmarks": parts,
        "average": fmean(part[main]["mean"] for part in parts.values()),
    }
    write_file(out / "summary.json", json.dumps(finite(summary), indent=1))
    for title, part in parts.items():
        print(f"{title:16}", *(f"{name} {show(x)}" for name, x in part.items()), sep="  ")
    print(
        f"{'average':16}  {main} {summary['average']:.3f}  temperature {setting['temperature']:g}"
    )


def make_row(task: Task, tau: Trajectory, metrics: Mapping[str, float]) -> Row:
    """Makes a line of results.jsonl. `gold_recall`: whether a gold answer stands in some passage
    that was retrieved."""
    row: Row = {"id": tau.question.id, "reward": tau.reward, **metrics}
    row["answered"] = float(tau.stop == "over" or bool((tau.prediction or "").strip()))
    for tool in task.tools:
        row[tool.plural] = tau.served(tool.tag)
    if isinstance(task, SearchQA):
        found = [text for turn in tau.turns for text in turn.result or []]
        row["gold_recall"] = float(holds_gold(found, tau.question.golds))
    return row | {
        "sampled_tokens": sum(tau.mask),
        "stop": tau.stop,
        "prediction": tau.prediction,
        "golds": list(tau.question.golds),
    }


def summarize(rows: Sequence[Row], metrics: Sequence[str]) -> Row:
    """Returns the means of a set of questions, those of metrics with their intervals."""
    part: Row = {"questions": len(rows)}
    for name, x in rows[0].items():
        if isinstance(x, (int, float)):
            column = [row[name] for row in rows]
            part[name] = estimate_mean(column) if name in metrics else fmean(column)
    return part


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


def show(x: Any) -> str:
    if isinstance(x, dict):
        return "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**x)
    return f"{x:.3f}" if isinstance(x, float) else str(x)


# ---- the command line


def add_player_flags(parser: argparse.ArgumentParser, knobs: Sequence[str] = KNOBS) -> None:
    """Adds how an agent plays, and the settings that may be given anew."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the sampling")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    for name in knobs:
        add(f"--{name}", default=argparse.SUPPRESS, help="as in inspo.py")


def read_player_flags(args: argparse.Namespace, knobs: Sequence[str] = KNOBS) -> Row:
    """Returns the arguments of an Agent."""
    return {name: x for name, x in vars(args).items() if name in ("seed", "temperature", *knobs)}


def make_parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program that measures agents."""
    parser = argparse.ArgumentParser(
        program,
        usage="%(prog)s WHAT [--flag value ...]",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", metavar="WHAT")
    sets = f"test (the task's own held-out questions), valid, train; search QA: {', '.join(BENCHMARKS)}, files"
    add("--data", nargs="+", default=["test"], help=sets)
    add("--n", type=int, default=0, help="questions of a set, a fixed sample by --seed; 0: all")
    add("--out", default="", help="default: runs/evaluation/NAME")
    add_player_flags(parser)
    return parser


def run(args: argparse.Namespace, kind: type[Agent] = Agent) -> None:
    """Evaluates as the flags say, with an agent of this kind."""
    use_threads(choose_threads())  # before torch
    with kind(args.what, **read_player_flags(args)) as agent:
        sets = collect_questions(agent.task, args.data, args.n, args.seed)
        out = Path(args.out or f"runs/evaluation/{Path(without_secrets(args.what)).resolve().name}")
        if (out / "summary.json").exists():
            raise Fault(f"{out} has a summary.json already: remove it, or choose another --out")
        played = {name: getattr(agent.task.cfg, name) for name in KNOBS}
        setting = vars(args) | played | {"commit": commit()}
        print(agent.start(), flush=True)
        evaluate(agent, sets, out, setting)
    print(f"{out}: summary.json, results.jsonl")


def main(argv: list[str] | None = None) -> None:
    args = make_parser("evaluate.py", __doc__).parse_args(argv)
    with one_line("evaluate.py"), stop.listening(), stop.may_stop():
        run(args)


if __name__ == "__main__":
    main()
