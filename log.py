"""What a run writes and prints: a row and a line for each step, a row for whatever changes the
instructions, the table at its end, and copies of them for a tracker."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

from tqdm import tqdm

from config import Config, preset_of
from plumbing.faults import Fault, first_line
from plumbing.files import Row
from plumbing.outside import printable
from population import Instruction, Population, RatedCandidate
from run import LOGS, Run
from tasks import Question, Task, Trajectory
from tasks.task import STORED, average_by_source, compute_metrics, rate_failures, space_evenly

Batch = Sequence[Trajectory]
# What the last line of a run shows. Places of P that stayed empty, of all evolutions; steps in which
# P was one instruction, up to the last evolution.
COSTS = (
    "training_rollouts",
    "verification_rollouts",
    "optimizer_tokens",
    "empty_places",
    "steps_of_one",
    "seconds",
)
START = "first policy, first instruction"
TABLE = (
    "trained policy, I_star",
    "trained policy, first instruction",
    START,
    "first policy, I_star",
)


class Log:
    """The rows and lines of a run. `began`: when it did, by `perf_counter`."""

    def __init__(self, cfg: Config, run: Run, task: Task, began: float):
        self.cfg, self.run, self.task, self.began = cfg, run, task, began
        self.tools = [tool.plural for tool in task.tools]
        self.tell_tracker = open_tracker(cfg, run)
        self.row: Row = {}  # of the step under way, for metrics.jsonl

        # what a resumed run finds: its first scores, and the seconds of earlier processes
        rows = run.rows("metrics")
        first = rows[0] if rows else {}
        self.spent: float = rows[-1].get("time/total", 0.0) if rows else 0.0
        self.metrics: list[str] = first.get("metrics", [])  # the most important one first
        scores = {name[5:]: x for name, x in first.items() if name.startswith("test/")}
        self.held_out: dict[str, Row] = {START: scores}  # the final table

        # None: no bar without a terminal. Twice a second at most: other programs need the cores.
        self.bar = tqdm(
            total=cfg.T,
            initial=len(rows[1:]),
            unit="step",
            file=sys.stdout,
            disable=None,
            mininterval=0.5,
        )
        self.printed = perf_counter()  # when the last line was

    # ---- what is printed

    def print(self, text: str) -> None:
        """Prints a text, on a terminal above the bar."""
        self.printed = perf_counter()
        with tqdm.external_write_mode(file=sys.stdout):
            print(printable(text), flush=True)

    def introduce(self, policy: str, *parts: str) -> None:
        """Prints what is about to be trained, and with what."""
        cfg = self.cfg
        lines = [
            f"{cfg.mode}: {preset_of(cfg.model)} ({policy}), seed {cfg.seed}",
            *filter(None, parts),
            f"{cfg.T} steps of {cfg.batch} questions x {cfg.G}; everything goes to {self.run.path}",
        ]
        self.print("\n".join(lines))

    def show_progress(self, purpose: str, done: int, total: int) -> None:
        """Shows at the bar how far rollouts are, and in a line where there was none for a minute."""
        progress = f"{purpose} {done}/{total}"
        self.bar.set_postfix_str(progress)
        if perf_counter() - self.printed > 60:
            self.print(progress)

    # ---- a step

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the seconds inside to a column of the step's row."""
        began = perf_counter()
        yield
        column = f"time/{phase}"
        self.row[column] = self.row.get(column, 0.0) + perf_counter() - began

    def add_rollouts(self, t: int, taus: Batch) -> None:
        """Adds what a step's rewarded trajectories show to its row, and writes them down."""
        G = self.cfg.G
        groups = [{tau.reward for tau in taus[k : k + G]} for k in range(0, len(taus), G)]
        turns = [turn for tau in taus for turn in tau.turns]
        self.row |= average_by_source(taus, [{"reward": tau.reward} for tau in taus])
        self.row |= self.average(taus, compute_metrics(self.task, taus, self.metrics))
        for tool in self.task.tools:
            self.row |= rate_failures(turns, tool)
        self.row |= {
            "answered": fmean(tau.stop == "answer" for tau in taus),
            "valid_actions": 1 - sum(tau.invalid for tau in taus) / max(1, len(turns)),
            "prompt_tokens": fmean(tau.prompt_tokens for tau in taus),
            "response_tokens": fmean(sum(tau.mask) for tau in taus),
            "context_tokens": fmean(len(tau.ids) for tau in taus),
            "zero_variance_groups": fmean(len(rewards) == 1 for rewards in groups),
            "n": Counter(str(tau.instruction_id) for tau in taus),
        }
        self.run.write_trajectories(f"step-{t:06d}", [tau.record() for tau in taus])

    def add_update(self, metrics: Row, P: Population) -> None:
        """Adds the metrics of a step's update to its row, and the weights that P has after it."""
        best, p = P.best(), P.probabilities()
        self.row |= metrics
        self.row |= {"best": best.id, "w_best": best.w}
        self.row["w"] = {I.id: round(I.w, 4) for I in P.active}
        self.row["p"] = {id: round(float(x), 4) for id, x in zip(P.ids, p, strict=True)}

    def add_evaluation(self, split: str, taus: Batch) -> None:
        """Adds an evaluation of the policy in training to the step's row."""
        if not taus:
            return
        means = self.average(taus, compute_metrics(self.task, taus, self.metrics))
        self.row |= {f"{split}/{name}": x for name, x in means.items()}

    def end_step(self, t: int) -> None:
        """Writes the row of a step, and prints it in a line."""
        row: Row = {"t": t} | self.row | {"time/total": self.spent + perf_counter() - self.began}
        self.row = {}
        self.run.append("metrics", row)
        numbers = {name: x for name, x in row.items() if isinstance(x, (int, float))}
        self.track(numbers | {f"w/{j}": w for j, w in row.get("w", {}).items()}, t)
        scores = [f"{split}/{self.metrics[0]}" for split in ("valid", "test")]
        # logp: of a cold start, which has no reward
        columns = ["reward", "logp", "kl", "w_best", *self.tools, *scores]
        if row.get("skipped_updates"):
            columns.append("skipped_updates")
        shown = [f"{name} {row[name]:.3g}" for name in columns if name in row]
        self.bar.update(t - self.bar.n)
        self.print(f"step {t:3d}  {'  '.join(shown)}  {row['time/total']:.0f} s")

    # ---- the instructions

    def write_event(self, t: int, event: str, P: Population, text: str = "") -> None:
        """Writes down that the population has changed, or why it has not, and the population."""
        row = {"t": t, "event": event, "text": text, "P": [asdict(I) for I in P.active]}
        self.run.append("population", row)
        self.print(f"step {t:3d}  {event}: |P| {len(P)}  {text}".rstrip())
        texts = [f"#{I.id} (w {I.w:.2f}): {I.text}" for I in P.active]
        self.track({"instructions": "\n\n".join(texts)}, t)

    def write_verification(
        self,
        t: int,
        round: int,
        D_B: Sequence[Question],
        tested: Sequence[RatedCandidate],
        joining: Sequence[RatedCandidate],
    ) -> None:
        """Writes down the rewards of revisions and of their parent on D_B, and who joins."""
        verified = []
        for c in tested:
            verified.append(dict(text=c.text, r=c.r, r_parent=c.r_parent, joined=c in joining))
        row = {"t": t, "round": round, "parent": tested[0].parent, "D_B": [q.id for q in D_B]}
        row |= {"rollouts": (1 + len(tested)) * len(D_B), "verified": verified}
        self.run.append("reflections", row)

    def write_trials(self, t: int, round: int, parent: int, taus: Batch, n: int) -> None:
        """Writes the trajectories of a verification on n questions: under a parent, whose
        `candidate` is 0, and then under each accepted revision."""
        rows = []
        for k, tau in enumerate(taus):
            rows.append(tau.record() | {"parent": parent, "candidate": k // n})
        self.run.write_trajectories(f"verify-{t:06d}-{round}", rows)

    # ---- the final table

    def add_result(self, setting: str, taus: Batch) -> None:
        """Adds a row to the final table, and stores some of its trajectories: the same questions in
        every row."""
        scores = compute_metrics(self.task, taus, self.metrics)
        self.metrics, self.questions = list(scores[0]), len(taus)
        self.held_out[setting] = self.average(taus, scores)
        rows = []
        for k in space_evenly(len(taus), STORED):
            rows.append(taus[k].record() | {"setting": setting, "metrics": scores[k]})
        self.run.write_trajectories(f"test-{setting.replace(', ', '-').replace(' ', '_')}", rows)

    def write_start(self, taus: Batch, seconds: float = 0.0) -> None:
        """Writes what the first policy can do under the first instruction. `seconds`: of these
        rollouts, by which a step that will take long is announced."""
        self.add_result(START, taus)
        # an update takes about as long as its rollouts
        minutes = 2 * seconds / len(taus) * self.cfg.batch * self.cfg.G / 60
        if minutes > 1:
            self.print(
                f"a step will take some {minutes:.0f} minutes, all {self.cfg.T} {minutes * self.cfg.T / 60:.1f} hours;"
                " faster: a GPU, or more of them; fewer and shorter rollouts (--batch, --G, --max_response)"
            )
        row = {f"test/{name}": x for name, x in self.held_out[START].items()}
        self.row |= {"metrics": self.metrics, "tools": self.tools} | row
        self.end_step(0)

    def finish(self, P: Population, I_star: Instruction) -> Row:
        """Writes, prints and returns the result: I_star, and the metrics of both policies under
        both instructions."""
        cfg, run = self.cfg, self.run
        steps, events, reflections = map(run.rows, LOGS)
        calls = [row["call"] for row in reflections if "call" in row]
        evolved = [row for row in events if row["event"] == "evolve"]
        last = evolved[-1]["t"] if evolved else 0
        rows = {name: self.held_out[name] for name in TABLE if name in self.held_out}
        line, parent = [I_star.id], I_star.parent
        while parent is not None:
            line.insert(0, parent)
            parent = P.family[parent].parent
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode,
            "seed": cfg.seed,
            "steps": cfg.T,
            "metrics": self.metrics,
            "tools": self.tools,
            "start": rows[START],
            "end": next(iter(rows.values())),
            "held_out": rows,
            "questions": self.questions,
            "seconds": round(self.spent + perf_counter() - self.began, 1),
            "training_rollouts": sum(sum(row.get("n", {}).values()) for row in steps),
            "verification_rollouts": sum(row.get("rollouts", 0) for row in reflections),
            "optimizer_tokens": sum(x["prompt_tokens"] + x["completion_tokens"] for x in calls),
            # places of P that stayed empty, in all evolutions; steps in which P was one instruction,
            # up to the last evolution
            "empty_places": sum(cfg.N_P - len(row["P"]) for row in evolved),
            "steps_of_one": sum(len(row.get("w", ())) == 1 for row in steps[: last + 1]),
            "generations": line,
            "I_star": I_star.text,
            "commit": run.config["commit"],
        }
        run.write("summary.json", json.dumps(summary, indent=1))
        final = {f"final/{name}": x for name, x in summary["end"].items()}
        self.track({"I_star": I_star.text, **final}, cfg.T)
        self.bar.close()
        print(printable("\n".join(tabulate(summary))), f"\neverything is in {run.path}", flush=True)
        return summary

    # ---- parts

    def average(self, taus: Batch, scores: Sequence[Row]) -> Row:
        """Returns the means of the task's metrics (`scores`, of each trajectory), by source too,
        and of tool calls."""
        row: Row = average_by_source(taus, scores)
        for tool in self.task.tools:
            row[tool.plural] = fmean(tau.served(tool.tag) for tau in taus)
        return row

    def track(self, row: Row, t: int) -> None:
        """Tells the tracker numbers and texts; one that fails is told no more."""
        try:
            if self.tell_tracker:
                self.tell_tracker(row, step=t)
        except Exception as e:  # a lost network, a process of its own that has died
            self.print(f"--tracker failed ({e!r}) and gets no more data")
            self.tell_tracker = None


def open_tracker(cfg: Config, run: Run) -> Any:
    """Returns what tells --tracker a step's numbers and texts. A resumed run goes on in the
    tracker's run that has its id. Raises Fault."""
    name = cfg.tracker
    if not name:
        return None
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return partial(write_summary, SummaryWriter(run.path / name))
        # trackio has wandb's interface, but knows a run by its name
        api = importlib.import_module(name)
        which = {"id": run.config["id"], "dir": run.path} if name == "wandb" else {}
        title = f"{run.path.name}-{run.config['id']}"
        api.init(project="inspo", name=title, config=asdict(cfg), resume="allow", **which)
        return api.log
    except Exception as e:  # no key, no network, no room
        raise Fault(
            f"--tracker {name} does not start ({first_line(e)}); fix that, or leave it out"
        ) from None


def write_summary(writer: Any, row: Row, step: int) -> None:
    for name, x in row.items():
        add = writer.add_text if isinstance(x, str) else writer.add_scalar
        add(name, x, step)


def tabulate(summary: Row) -> list[str]:
    """Returns the lines of a run's last screen, of its summary.json: the held-out questions' table,
    policy by instruction; the winning instruction; what it took to find it."""
    columns = [*summary["metrics"], *summary["tools"]]
    lines = ["", f"{'held-out questions, greedy':33}" + "".join(f"  {x:>9}" for x in columns)]
    for name, row in summary["held_out"].items():
        lines.append(f"{name:33}" + "".join(f"  {row[column]:9.3f}" for column in columns))
    line = " -> ".join(f"#{j}" for j in summary["generations"])
    lines += ["", f"best instruction, I_star ({line}):", summary["I_star"], ""]
    lines.append(", ".join(f"{name} {summary[name]:,}" for name in COSTS))
    return lines
