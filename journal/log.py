"""What a run writes and prints: `Log` takes rows (journal/rows.py) and keeps what a resumed run
needs of them."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from time import perf_counter

from config import Config, evolves, preset_of
from journal.rows import count_costs, make_evaluation_row
from journal.screen import Screen
from journal.summary import START, TABLE, count_calls, label, many, tabulate, trace_lineage
from journal.track import Tracker
from plumbing.faults import Fault
from plumbing.files import Row
from plumbing.outside import printable
from plumbing.versions import versions
from population import Instruction, Population
from run import Run
from tasks import Task, Trajectory
from tasks.metrics import compute_metrics
from tasks.sampling import STORED, space_evenly, take_subset
from training.policy import Policy


class Log:
    def __init__(self, cfg: Config, run: Run, task: Task, policy: Policy, began: float):
        """`began`: when the run did, by `perf_counter`."""
        self.cfg, self.run, self.task, self.policy, self.began = cfg, run, task, policy, began
        self.tools = [tool.plural for tool in task.tools]
        self.screen = Screen(cfg.T, self.tools)
        policy.progress = self.screen.show_rollouts
        earlier = run.rows("metrics")  # of a run that is resumed
        self.spent: float = max((row.get("time/total", 0.0) for row in earlier), default=0.0)
        self.versions = versions()  # now: the code may change while it runs
        self.track = Tracker(cfg.tracker, run.path, run.config["id"], asdict(cfg), self.screen.note)
        self.row: Row = {}  # of the step under way, for metrics.jsonl
        self.held_out: dict[str, Row] = {}  # rows of the final table
        self.metrics: list[str] = []  # names of the task's metrics, the most important first
        for row in earlier[:1]:
            self.metrics = row["metrics"]
            named = [name for name in row if name.startswith("test/")]
            self.held_out[START] = {name.removeprefix("test/"): row[name] for name in named}

    def introduce(self, tools: str, optimizer: str, parts: str) -> None:
        """Prints what is about to be trained, and with what."""
        cfg, task = self.cfg, self.task
        train, test = task.questions("train"), take_subset(task.questions("test"), cfg.eval_n)
        asked = f"{many(len(train), 'question')}, {len(test)} held out"
        steps = f"{many(cfg.T, 'step')} of {many(cfg.batch, 'question')} x {cfg.G}, seed {cfg.seed}"
        policy = f"{self.policy.describe()}, {self.policy.cfg.engine} engine"
        lines = [
            f"{cfg.mode}: {preset_of(cfg.model)} ({policy}) on {asked}",
            tools,
            parts,
            f"optimizer: {optimizer}",
            f"{steps}; everything goes to {self.run.path}",
        ]
        if evolves(cfg):
            lines.append(
                "P: the instructions in use; w: mean reward of one; D_B: questions that verify a revision"
            )
        self.screen.note("\n".join(filter(None, lines)))

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the seconds inside to a column of the step's row."""
        began = perf_counter()
        yield
        column = f"time/{phase}"
        self.row[column] = self.row.get(column, 0.0) + perf_counter() - began

    def write_row(self, name: str, row: Row) -> None:
        """Appends a row to `name`.jsonl, and shows what a person has to see of it."""
        self.run.append(name, row)
        self.screen.show_row(name, row)
        if name == "population" and row["event"] != "prune":
            texts = []
            for I in row["P"]:
                texts.append(f"#{I['id']} (w {Instruction(**I).w:.2f}): {I['text']}")
            self.track.log({"instructions": "\n\n".join(texts)}, row["t"])

    # ---- a step

    def keep_step(self, t: int, taus: Sequence[Trajectory], row: Row) -> None:
        """Writes what an update learned from; its row waits for evolution and evaluation."""
        self.run.write_trajectories(f"step-{t:06d}", [tau.record() for tau in taus])
        self.row |= row

    def add_evaluation(self, split: str, taus: Sequence[Trajectory]) -> None:
        """Adds an evaluation of the policy in training to the step's row, and shows its first metric;
        one of no questions has no columns."""
        if not taus:
            return
        scores, main = compute_metrics(self.task, taus, self.metrics), self.metrics[0]
        means = make_evaluation_row(self.task, taus, scores)
        self.screen.note(f"{split} questions, best instruction: {label(main)} {means[main]:.3f}")
        self.row |= {f"{split}/{name}": x for name, x in means.items()}

    def end_step(self, t: int) -> None:
        """Writes the row of a step."""
        row = self.row | {"time/total": self.spent + perf_counter() - self.began}
        self.write_row("metrics", {"t": t} | row)
        numbers = {name: x for name, x in row.items() if isinstance(x, (int, float))}
        self.track.log(numbers | {f"w/{j}": w for j, w in row.get("w", {}).items()}, t)
        self.row = {}

    # ---- the final table

    def add_result(self, setting: str, taus: Sequence[Trajectory]) -> None:
        """Adds a row to the final table, and stores some of its trajectories: the same questions in
        every row."""
        scores = compute_metrics(self.task, taus, self.metrics)
        self.metrics, self.questions = list(scores[0]), len(taus)
        self.held_out[setting] = make_evaluation_row(self.task, taus, scores)
        stored = [
            taus[k].record() | {"setting": setting, "metrics": scores[k]}
            for k in space_evenly(len(taus), STORED)
        ]
        self.run.write_trajectories(f"test-{setting.replace(', ', '-').replace(' ', '_')}", stored)

    def write_start(self, taus: Sequence[Trajectory]) -> None:
        """Writes what the first policy can do under the first instruction."""
        self.add_result(START, taus)
        start, main = self.held_out[START], self.metrics[0]
        row = {f"test/{name}": x for name, x in start.items()}
        self.write_row("metrics", {"t": 0, "metrics": self.metrics, "tools": self.tools} | row)
        scores = {label(main): start[main]} | count_calls(start, self.tools)
        shown = ", ".join(f"{name} {x:.3f}" for name, x in scores.items())
        self.screen.note(f"held-out questions, {START}: {shown}")
        self.track.log(row, 0)
        self.row = {}

    def finish(self, P: Population, I_star: Instruction) -> Row:
        """Writes, prints and returns the result: I_star, and the metrics of both policies under
        both instructions."""
        cfg, run = self.cfg, self.run
        steps, reflections, events = map(run.rows, ("metrics", "reflections", "population"))
        rows = {name: self.held_out[name] for name in TABLE if name in self.held_out}
        metric, n = self.metrics[0], self.questions
        cost = count_costs(steps, reflections, events, self.tools)
        seconds = self.spent + perf_counter() - self.began
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "metric": metric, "metrics": self.metrics,
            "tools": self.tools, "start": rows[START], "end": next(iter(rows.values())),
            "held_out": rows, "questions": n, "seconds": round(seconds, 1),
            "overhead_inference": round(cost["verification_rollouts"] / max(1, cost["training_rollouts"]), 4),
            "ledger": cost, "generations": trace_lineage({I.id: I.parent for I in P.family}, I_star.id),
            "I_star": I_star.text, "versions": self.versions,
        }  # fmt: skip
        run.write("summary.json", json.dumps(summary, indent=1))
        final = {f"final/{name}/{k}": x for name, row in rows.items() for k, x in row.items()}
        self.track.log({"I_star": I_star.text, **final}, cfg.T)

        # the last screen
        self.screen.close()
        lines = [
            tabulate(summary),
            f"{many(cfg.T, 'step')} in {seconds:.0f} s. {run.path}: summary.json (metrics by source, too), "
            "I_star.txt, policy/, metrics.jsonl, population.jsonl, reflections.jsonl, trajectories/",
        ]
        print(printable("\n".join(filter(None, lines))))
        try:
            report = importlib.import_module("report")
            print("see it:", report.write_page([run.path], run.path / "report.html"))
        except (Fault, ImportError) as e:  # the run is complete without its page
            print(f"no page: {e} (python report.py {run.path} writes it)")
        return summary
