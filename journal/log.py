"""What a run prints and writes down. `Log` is told what happens, and only records it."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from config import Config, evolves, preset_of
from journal.directory import RunDirectory
from journal.screen import Screen
from journal.silence import Silence
from journal.summary import (
    added_sentences,
    conclusion,
    count_calls,
    ending,
    label,
    line,
    lineage,
    many,
    step_metrics,
    weights,
)
from journal.tokens import show_mask, token_data
from journal.track import Tracker
from plumbing.faults import Fault
from plumbing.outside import printable
from plumbing.versions import versions
from population import Candidate, Instruction, Population
from reflect import Call
from rollout import space_evenly
from tasks import Question, Task, Trajectory
from tasks.metrics import average_by_source, compute_metrics
from tasks.sampling import take_subset
from training.policy import STORED

# attributes of Log that a resumed run goes on with
BOOKS = ("row", "held_out", "spread", "metrics")
START = "first policy, first instruction"
TABLE = (
    "trained policy, I_star",
    "trained policy, first instruction",
    START,
    "first policy, I_star",
)


@dataclass
class Ledger:
    """What evolution costs in addition to training (App. C)."""

    training_rollouts: int = 0
    verification_rollouts: int = 0
    optimizer_calls: int = 0
    optimizer_tokens: int = 0
    optimizer_seconds: float = 0.0
    tool_calls: int = 0
    evolutions: int = 0
    evolutions_in_vain: int = 0  # that left P as it was


class Log:
    def __init__(self, cfg: Config, run: RunDirectory, task: Task, tokenizer: Any):
        self.cfg, self.run, self.task, self.tokenizer = cfg, run, task, tokenizer
        self.screen = Screen(cfg.T)
        self.clock = self.began = time.perf_counter()
        # By earlier processes of this run, as far as they wrote it down.
        self.spent: float = max(
            (row.get("time/total", 0.0) for row in run.rows("metrics")), default=0.0
        )
        self.versions = versions()  # now: the code may change while it runs
        self.track = Tracker(cfg.tracker, run.path, run.id, asdict(cfg))
        self.silence = Silence()
        self.ledger = Ledger()
        self.row: dict[str, Any] = {}  # of metrics.jsonl
        self.held_out: dict[str, dict[str, float]] = {}  # rows of the final table
        # standard deviation of the first metric over the questions, by row
        self.spread: dict[str, float] = {}
        self.metrics: list[str] = []  # names of the task's metrics, the most important first

    def note(self, text: str) -> None:
        self.screen.note(text)

    def introduce(self, policy: str, tools: str, optimizer: str) -> None:
        """Prints what is about to be trained, and with what."""
        cfg = self.cfg
        train, test = (
            self.task.questions("train"),
            take_subset(self.task.questions("test"), cfg.eval_n),
        )
        lines = [
            f"{cfg.mode}: {preset_of(cfg.model)} ({policy}) on {len(train)} questions, {len(test)} held out"
        ]
        steps = f"{cfg.T} steps of {cfg.batch} questions x {cfg.G}, seed {cfg.seed}"
        lines += [tools, f"optimizer: {optimizer}", f"{steps}; everything goes to {self.run.path}"]
        self.note("\n".join(filter(None, lines)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the books that a resumed run goes on with."""
        return {name: getattr(self, name) for name in BOOKS} | {"ledger": vars(self.ledger)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in BOOKS:
            setattr(self, name, state[name])
        self.ledger = Ledger(**state["ledger"])
        self.clock = time.perf_counter()
        for row in self.run.rows("metrics"):
            self.silence.step(row)

    def seconds(self) -> float:
        """Returns how long the processes of this run have taken together."""
        return float(self.spent + time.perf_counter() - self.began)

    def spend(self, *columns: str) -> None:
        """Adds the seconds since the last call to these columns of the step."""
        now = time.perf_counter()
        for name in columns:
            self.row[f"time/{name}"] = self.row.get(f"time/{name}", 0.0) + now - self.clock
        self.clock = now

    # ---- steps

    def begin_step(self) -> None:
        self.clock = time.perf_counter()

    def measure(self, taus: Sequence[Trajectory]) -> dict[str, Any]:
        """Returns what a step's row says of its rewarded rollouts."""
        self.rewarded = time.perf_counter()
        return step_metrics(self.task, taus, self.cfg.G, self.metrics)

    def step(self, t: int, taus: Sequence[Trajectory], P: Population, row: dict[str, Any]) -> None:
        """Logs the rollouts and the update of step t, with the weights as they are before any
        instruction is pruned."""
        self.ledger.training_rollouts += len(taus)
        self.ledger.tool_calls += sum(
            tau.served(tool.tag) for tau in taus for tool in self.task.tools
        )
        if t == 1:
            longest = max(taus, key=lambda tau: len(tau.turns))
            self.note(
                f"step   1  tokens after a | are trained on:\n{show_mask(longest, self.tokenizer)}"
            )
        # Only rewards take time besides rollouts, metrics and update: a judge may take more than
        # all of them.
        self.updated(
            t,
            taus,
            row | weights(P) | {"time/reward": self.rewarded - self.clock - row["time/rollout"]},
        )

    def updated(self, t: int, taus: Sequence[Trajectory], row: dict[str, Any]) -> None:
        """Logs an update of the policy: what it learned from, and the step's row of
        metrics.jsonl."""
        rows = [
            tau.record() | ({"token_data": token_data(tau, self.tokenizer)} if tau.tokens else {})
            for tau in taus
        ]
        self.run.write_trajectories(f"step-{t:06d}", rows)
        self.track.trajectories(taus, t)
        if n := row.get("skipped_updates"):
            self.note(
                f"step {t:3d}  optimizer steps skipped, as loss or gradient were not finite: {n}"
            )
        self.row, self.clock = row, time.perf_counter()

    def evaluated(self, split: str, taus: Sequence[Trajectory]) -> None:
        """Logs an evaluation of the policy in training."""
        self.row |= {f"{split}/{name}": x for name, x in self.means(taus).items()}
        self.spend("evaluate")

    def end_step(self, t: int, P: Population) -> None:
        """Writes the row of a step, and shows it."""
        row = self.row | {"time/total": self.seconds()}
        self.run.append("metrics", {"t": t} | row)
        numbers = {name: x for name, x in row.items() if isinstance(x, (int, float))}
        self.track.log(numbers | {f"w/{j}": w for j, w in row.get("w", {}).items()}, t)
        seconds = sum(
            row.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "update", "evolve")
        )
        shown = line(row | {"P": len(P)}, [tool.plural for tool in self.task.tools])
        self.screen.step(t, f"{shown}  {seconds:.1f} s/step")
        for warning in self.silence.step(row):
            self.note(f"WARNING  {warning}")

    # ---- evaluations on held-out questions

    def means(self, taus: Sequence[Trajectory], setting: str = "") -> dict[str, float]:
        """Returns means of the task's metrics, by source too, and of tool calls.

        Of a `setting` of the final table it stores a sample of the trajectories, the same questions
        for all.
        """
        rows = compute_metrics(self.task, taus, self.metrics)
        self.metrics = list(rows[0])
        if setting:
            self.spread[setting] = statistics.pstdev(row[self.metrics[0]] for row in rows)
            stored = [
                taus[k].record() | {"setting": setting, "metrics": rows[k]}
                for k in space_evenly(len(taus), STORED)
            ]
            self.run.write_trajectories(
                f"test-{setting.replace(', ', '-').replace(' ', '_')}", stored
            )
        calls = {
            tool.plural: statistics.fmean(tau.served(tool.tag) for tau in taus)
            for tool in self.task.tools
        }
        return average_by_source(taus, rows) | calls

    def compared(self, setting: str, taus: Sequence[Trajectory]) -> None:
        """Logs one of the settings of the final table."""
        self.held_out[setting], self.questions = self.means(taus, setting), len(taus)

    def begin(self, taus: Sequence[Trajectory]) -> None:
        """Logs what the first policy can do under the first instruction."""
        self.compared(START, taus)
        start = self.held_out[START]
        row = {f"test/{name}": x for name, x in start.items()}
        self.run.append("metrics", {"t": 0, "metrics": self.metrics} | row)
        self.track.log(row, 0)
        calls = count_calls(start, [tool.plural for tool in self.task.tools])
        scores = {label(self.metrics[0]): start[self.metrics[0]]} | calls
        shown = ", ".join(f"{name} {x:.3f}" for name, x in scores.items())
        self.note(f"held-out questions, first policy, first instruction: {shown}")

    # ---- the population

    def event(self, t: int, event: str, P: Population, text: str) -> None:
        """Shows what happened to the population, and appends it with the population to
        population.jsonl."""
        self.note(f"step {t:3d}  {event:6s}  {text}")
        self.run.append(
            "population", {"t": t, "event": event, "text": text, "P": [asdict(I) for I in P.active]}
        )
        if event != "prune":
            self.track.log(
                {"instructions": "\n\n".join(f"#{I.id} (w {I.w:.2f}): {I.text}" for I in P.active)},
                t,
            )

    def started(self, P: Population) -> None:
        variations = f" and {many(len(P) - 1, 'variation')}" * (len(P) > 1)
        self.event(0, "start", P, f"|P| {len(P)}: the first instruction{variations}")

    def pruned(self, t: int, P: Population, pruned: Sequence[Instruction]) -> None:
        why = {I.id: f"w {I.w:.2f}" if I.rewards else "no question drew it" for I in pruned}
        names = ", ".join(f"#{id} ({text})" for id, text in why.items()) or "none"
        self.event(t, "prune", P, f"|P| {len(P) + len(pruned)} -> {len(P)}: pruned {names}")

    def call(self, t: int, round: int, parent: Instruction, call: Call) -> None:
        """Logs a call to the optimizer, before anything else happens: a resumed run never pays for
        it again."""
        self.ledger.optimizer_calls += 1
        self.ledger.optimizer_tokens += call.prompt_tokens + call.completion_tokens
        self.ledger.optimizer_seconds += call.seconds
        if not call.paid_before:
            self.run.append(
                "reflections", {"t": t, "round": round, "parent": parent.id, "call": asdict(call)}
            )

    def proposed(
        self,
        t: int,
        round: int,
        parent: Instruction,
        call: Call,
        accepted: list[int],
        rejected: list[dict[str, Any]],
    ) -> None:
        """Logs which blocks of a reply are candidates, by their place in it, and why the others are
        not."""
        row = {
            "t": t,
            "round": round,
            "parent": parent.id,
            "accepted": accepted,
            "rejected": rejected,
        }
        self.run.append("reflections", row)
        self.row["candidates"] = self.row.get("candidates", 0) + len(accepted)
        self.spend("evolve")
        if accepted:
            return
        why = f"the first: {rejected[0]['reason']}" if rejected else "it has no <ins_k> block"
        cut = "; it was cut off by a length limit" * call.cut + "; it was refused" * call.refused
        self.note(
            f"step {t:3d}  the optimizer's reply has no candidate, {len(rejected)} were rejected; {why}{cut}"
        )

    def played(self, t: int, round: int, parent: Instruction, taus: Sequence[Trajectory]) -> None:
        """Counts a verification's rollouts, and stores a sample: the same questions under a parent
        and its revisions.

        `candidate` is 0 for the parent and k for the k-th accepted revision of the round.
        """
        self.ledger.verification_rollouts += len(taus)
        self.spend("evolve", "verify")
        ids = list(dict.fromkeys(tau.question.id for tau in taus))
        chosen = {ids[k] for k in space_evenly(len(ids), STORED)}
        rows = [
            tau.record() | {"parent": parent.id, "candidate": k // len(ids)}
            for k, tau in enumerate(taus)
            if tau.question.id in chosen
        ]
        self.run.write_trajectories(f"verify-{t:06d}-{round}", rows)

    def verified(
        self,
        t: int,
        round: int,
        D_B: Sequence[Question],
        verified: Sequence[Candidate],
        joining: Sequence[Candidate],
    ) -> None:
        parent, self.r_parent = verified[0].parent, verified[0].r_parent
        rows = [
            {
                "text": c.text,
                "parent": c.parent,
                "r": c.r,
                "r_parent": c.r_parent,
                "joined": c in joining,
            }
            for c in verified
        ]
        row = {
            "t": t,
            "round": round,
            "parent": parent,
            "r_parent": self.r_parent,
            "D_B": [q.id for q in D_B],
        }
        self.run.append(
            "reflections", row | {"rollouts": (1 + len(rows)) * len(D_B), "verified": rows}
        )
        rewards = {x for c in verified for x in (*c.rewards, *c.parent_rewards)}
        if len(rewards) == 1:
            self.note(
                f"step {t:3d}  verified nothing: all rewards on D_B are {rewards.pop():.2f}, the parent's too"
            )

    def evolved(
        self,
        t: int,
        P: Population,
        parents: Sequence[Instruction],
        joined: Sequence[Instruction],
        shortfall: str,
    ) -> None:
        """Logs an evolution; `shortfall`: why there are places left."""
        text = f"no new instruction: {shortfall}; P stays as it is"
        if joined:
            text = f"parent {', '.join(f'#{I.id}' for I in parents)} ({self.r_parent:.2f} on D_B); {len(joined)} joined"
        if joined and len(P) < self.cfg.N_P:
            text += f"; {many(self.cfg.N_P - len(P), 'place')} left: {shortfall}"
        self.joined(t, P, joined, text)

    def joined(self, t: int, P: Population, joined: Sequence[Instruction], text: str) -> None:
        """Shows an evolution in a line, and below it the instructions that joined."""
        self.ledger.evolutions += 1
        self.ledger.evolutions_in_vain += not joined
        for I in joined:
            parent = P.family[I.parent].text if I.parent is not None else ""
            score = f"{I.verified:.2f}" if I.verified is not None else ""
            text += f"\n{'':18}#{I.id:<3d} {score:4s}  + {added_sentences(I.text, parent)}"
        self.event(t, "evolve", P, text)
        self.spend("evolve")

    # ---- the end

    def finish(self, P: Population, I_star: Instruction) -> dict[str, Any]:
        """Writes, prints and returns the result: I_star, and the metrics of both policies under
        both instructions."""
        cfg, run, cost = self.cfg, self.run, self.ledger
        rows = {name: self.held_out[name] for name in TABLE if name in self.held_out}
        metric, n = self.metrics[0], self.questions
        evolved = cost.evolutions > cost.evolutions_in_vain
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "metric": metric, "metrics": self.metrics,
            "tools": [tool.plural for tool in self.task.tools], "start": rows[START], "end": next(iter(rows.values())),
            "held_out": rows, "spread": self.spread, "questions": n, "seconds": round(self.seconds(), 1),
            "overhead_inference": round(cost.verification_rollouts / max(1, cost.training_rollouts), 4),
            "ledger": asdict(cost), "generations": lineage({I.id: I.parent for I in P.family}, I_star.id),
            "I_star": I_star.text, "evolved": evolved, "versions": self.versions,
            "conclusion": conclusion({name: row[metric] for name, row in rows.items()}, n, metric, self.spread),
        }  # fmt: skip
        run.write("summary.json", json.dumps(summary, indent=1))
        final = {f"final/{name}/{k}": x for name, row in rows.items() for k, x in row.items()}
        self.track.log({"I_star": I_star.text, **final}, cfg.T)
        self.screen.close()
        print(printable(ending(summary, run.path)))
        for _, _, warning in self.silence.lasting():
            print(f"WARNING  until the end, {warning}")
        if evolves(cfg) and not evolved:
            vain = "no evolution took place"
            if cost.evolutions:
                vain = f"{many(cost.evolutions, 'evolution')} left the population as it was"
            print(
                f"{vain}: this is no result of --mode {cfg.mode} (evolved: false in summary.json)."
            )
        try:
            write_page = importlib.import_module("report").write_page
            page = write_page([run.path], run.path / "report.html")
            print(f"see it: {page}")
        except (Fault, ImportError) as e:  # the run is complete without its page
            print(f"no page: {e} (python report.py {run.path} writes it)")
        return summary
