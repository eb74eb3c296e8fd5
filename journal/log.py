"""What a run prints and writes down while Algorithm 1 runs: metrics, events, costs, checkpoints, evaluations."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from config import Config, evolves, preset_of, read_instruction
from journal.directory import RunDirectory
from journal.pace import Trace, pace
from journal.screen import Screen
from journal.silence import Silence
from journal.summary import added_sentences, conclusion, ending, label, lineage, many, step_metrics
from journal.tokens import piece_reader, token_data
from journal.track import tracker
from plumbing import stop
from plumbing.faults import DiskFault, Fault, Outage
from plumbing.outside import printable
from plumbing.versions import versions
from population import Candidate, Instruction, Population, ReplayBuffer
from reflect import Call
from rollout import spread
from tasks import Job, Question, Task, Trajectory, by_source, measure, reward, subset
from training.policy import Policy

DOING = {  # purpose of rollouts -> in words
    "rollout": "rollouts", "verify": "verifying", "evaluate": "evaluating",
}  # fmt: skip


@dataclass
class Ledger:
    """What evolution costs beside training (App. C)."""

    training_rollouts: int = 0
    verification_rollouts: int = 0
    optimizer_calls: int = 0
    optimizer_tokens: int = 0
    optimizer_seconds: float = 0.0
    tool_calls: int = 0
    evolutions: int = 0
    evolutions_in_vain: int = 0  # that left P as it was

    def overhead_inference(self) -> float:
        return self.verification_rollouts / max(1, self.training_rollouts)


class Log:
    """The run as Algorithm 1 sees it: it is told what happens, writes it down, evaluates and saves."""

    def __init__(self, cfg: Config, run: RunDirectory, policy: Policy, task: Task, first: str, screen: Screen):
        """`first`: the first instruction."""
        self.cfg, self.run, self.policy, self.task, self.first, self.screen = cfg, run, policy, task, first, screen
        # Clocks that nobody can set; the process began before this module could read one.
        self.began = time.perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
        self.versions = versions()  # now: somebody may change the code while it runs
        self.test, self.valid = (subset(task.questions(split), cfg.eval_n) for split in ("test", "valid"))
        self.piece = piece_reader(policy.worker.tokenizer)
        self.track = tracker(cfg.tracker, run.path, dataclasses.asdict(cfg))
        self.trace = Trace(cfg.profile, run.path)
        self.ledger = Ledger()
        self.t = 0  # the step in progress, or the last one
        self.phase = ""  # what is under way in it: "rollout" until it is logged, then "evolve", "evaluate"
        policy.progress = self.progress
        self.spent = 0.0  # seconds of earlier processes of this run
        self.start: dict[str, float] = {}  # means of the first policy under the first instruction
        self.metrics: list[str] = []  # names of the task's metrics, the most important first
        self.spread: dict[str, float] = {}  # standard deviation of that over the questions, by row of the last table
        self.row: dict[str, Any] = {}  # of metrics.jsonl
        self.silence = Silence()
        self.candidates: list[int] = []  # in each reply of the evolution under way

    def introduce(self, why: str, tools: str, optimizer: str, warnings: Sequence[str]) -> None:
        """Prints what is about to be trained, and with what; `why`: the engine."""
        cfg, worker, ranks = self.cfg, self.policy.worker, self.policy.ranks
        lora = f", {worker.parameters(trained=True) / 1e6:,.2f}M of LoRA trained" if cfg.lora_rank else ""
        device = f"{ranks.size} x " * (ranks.size > 1) + f"{ranks.device}, {ranks.dtype}"
        model = f"{preset_of(cfg.model)} ({worker.parameters() / 1e6:,.2f}M parameters{lora}, {device}, {why})"
        asked = f"{len(self.task.questions('train'))} questions, {len(self.test)} held out"
        steps = f"{cfg.T} steps of {cfg.a_step()}, seed {cfg.seed}"
        lines = [f"{cfg.mode}: {model} on {asked}"]
        if ranks.device == "cuda":
            lines.append(f"fused layers: {worker.layers}; attention: {worker.attention}")
            kept = "recomputed" if worker.cfg.recompute else "kept"
            lines.append(f"updates: {worker.cfg.micro_tokens:,} tokens a forward pass, activations are {kept}")
        lines += [tools, f"optimizer: {optimizer}", f"{steps}; everything goes to {self.run.path}"]
        self.note("\n".join(filter(None, lines)))
        for line in warnings:
            self.note(f"note: {line}")

    # ---- the steps

    def restore(self, P: Population, B: ReplayBuffer) -> tuple[int, str]:
        """Restores a resumed run's policy, population and buffer; returns the step to take and where in it to resume.

        (1, "") for a run that begins; (t, "evolve") or (t, "evaluate") for one that was stopped inside step t.
        """
        self.P, self.B = P, B
        self.spent = self.run.seconds()  # before a row is dropped
        found = self.run.rewind(self.policy.damage, self.note) if self.cfg.resume else None
        if not found:
            return 1, ""
        checkpoint, state = found
        try:
            P.load_state_dict(state["population"])
            B.load_state_dict(state["buffer"])
            self.ledger, self.start = Ledger(**state["ledger"]), state["start"]
            self.spent = max(self.spent, state["seconds"])
            self.metrics, self.spread = state["metrics"], state["spread"]
        except (LookupError, TypeError, ValueError) as e:
            raise Fault(f"{checkpoint}/state.pt is of another program ({type(e).__name__}: {e})") from None
        self.t = state["t"]
        self.phase, self.row, self.logged = state.get("unfinished", ""), state.get("row", {}), time.perf_counter()
        self.before_evolution = dataclasses.replace(self.ledger)
        self.policy.load(checkpoint, self.t)
        self.policy.learner.memory = state["memory"]
        self.screen.resumed(self.t - bool(self.phase))
        for row in self.run.rows("metrics"):
            self.silence.step(row)
        self.note(f"resumed {'inside' if self.phase else 'after'} step {self.t}")
        return self.t + (not self.phase), self.phase

    def begin(self) -> None:
        """Evaluates the first policy under the first instruction, unless a resumed run knows what it can do."""
        if not self.start:
            self.start = self.evaluate(0, self.first, 0, self.test, "first policy, first instruction")
            row = self.named("test", self.start) | self.named("canary", self.score_canary(0))
            self.run.append("metrics", {"t": 0, "metrics": self.metrics} | row)
            self.track.numbers(row, 0)
        if unproven := self.policy.worker.engine.unproven:
            self.note(f"note: {unproven} weights cannot be read back from the engine: only its log-probs are checked")
        known = [self.metrics[0], *(tool.plural for tool in self.task.tools)]
        shown = ", ".join(f"{label(name)} {self.start[name]:.3f}" for name in known)
        self.note(f"held-out questions, first policy, first instruction: {shown}")

    def begin_step(self, t: int) -> None:
        self.t, self.phase, self.step_began = t, "rollout", time.perf_counter()
        self.policy.seconds.clear()
        self.trace.begin(t)

    def step(self, t: int, taus: Sequence[Trajectory], P: Population, update: dict[str, float]) -> None:
        """Logs the rollouts and the update of step t, with the weights as they are before anyone is pruned."""
        began = time.perf_counter()
        self.ledger.training_rollouts += len(taus)
        self.ledger.tool_calls += sum(tau.served(tool.tag) for tau in taus for tool in self.task.tools)
        self.updated(t, taus, step_metrics(taus, P, self.cfg.G, self.task) | update, began)

    def updated(self, t: int, taus: Sequence[Trajectory], row: dict[str, Any], began: float) -> None:
        """Logs an update of the policy: what it learned from, and the step's row of metrics.jsonl.

        `began`: when the step's work had ended and its logging began, by time.perf_counter.
        """
        if traced := self.trace.end():
            self.note(traced)
        self.run.write_trajectories(f"step-{t:06d}", [self.record(tau) for tau in taus])
        self.row = row
        if n := row.get("skipped_updates"):
            self.note(f"step {t:3d}  optimizer steps skipped, as loss or gradient were not finite: {n}")
        self.row |= {f"time/{name}": seconds for name, seconds in self.policy.seconds.items()}
        self.row |= pace(taus, self.policy.seconds)
        self.logged = time.perf_counter()
        # Rewards are all that takes time beside rollouts and update: a judge may take more than both.
        self.row["time/reward"] = max(0.0, began - self.step_began - sum(self.policy.seconds.values()))
        self.row["time/log"] = self.logged - began
        self.phase, self.before_evolution, self.candidates = "evolve", dataclasses.replace(self.ledger), []

    def record(self, tau: Trajectory) -> dict[str, Any]:
        """Returns a trajectory's row, with the data of its tokens if it is one of the watched."""
        row = tau.record()
        if tau.tokens:
            row["token_data"] = token_data(tau, self.policy.worker.tokenizer, self.piece)
        return row

    def played(self, t: int, round: int, parent: Instruction, taus: Sequence[Trajectory]) -> None:
        """Stores a sample of a verification's rollouts: the same questions under a parent and its revisions.

        `candidate` is 0 for the parent and k for the k-th accepted revision of the round.
        """
        questions = list(dict.fromkeys(tau.question.id for tau in taus))
        chosen = {questions[k] for k in spread(len(questions), 24)}
        each = max(1, len(questions) * self.cfg.gate_samples)
        rows = [
            tau.record() | {"parent": parent.id, "candidate": k // each}
            for k, tau in enumerate(taus)
            if tau.question.id in chosen
        ]
        if rows:
            self.run.write_trajectories(f"verify-{t:06d}-{round}", rows)

    def evaluate_step(self, t: int, I: Instruction) -> None:
        """Evaluates the policy in training on the validation and the test questions."""
        self.phase = "evaluate"
        for name, questions in (("valid", self.valid), ("test", self.test)):
            self.row |= self.named(name, self.evaluate(I.id, I.text, t, questions)) if questions else {}
        self.row |= self.named("canary", self.score_canary(t))
        self.row["time/evaluate"] = self.policy.seconds["evaluate"]

    def end_step(self, t: int) -> None:
        """Writes the row of a step, and shows it."""
        row = self.row
        row["time/evolve"] = time.perf_counter() - self.logged - row.get("time/evaluate", 0.0)
        row["time/verify"] = self.policy.seconds["verify"]  # a part of time/evolve
        row |= {"time/total": self.spent + time.perf_counter() - self.began, "search/faults": self.policy.faults()}
        self.run.append("metrics", {"t": t} | row)
        self.run.settle(wait=False)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        self.track.numbers(numbers | {f"w/{j}": w for j, w in row.get("w", {}).items()}, t)
        self.phase = ""
        seconds = sum(row.get(f"time/{name}", 0.0) for name in ("rollout", "reward", "update", "log", "evolve"))
        self.screen.step(t, row, self.P, seconds)
        for warning in self.silence.step(row):
            self.note(f"WARNING  {warning}")

    def save(self, t: int, unfinished: str = "") -> None:
        """Saves the state after step t, or at the start of its `unfinished` evolution or evaluation."""
        parts: dict[str, Any] = {"population": self.P.state_dict(), "buffer": self.B.state_dict()}
        parts |= {"memory": self.policy.learner.memory, "metrics": self.metrics, "spread": self.spread}
        parts |= {"start": self.start, "seconds": self.spent + time.perf_counter() - self.began}
        parts["ledger"] = asdict(self.before_evolution if unfinished == "evolve" else self.ledger)
        if unfinished:
            parts |= {"unfinished": unfinished, "row": self.row}
        self.run.checkpoint(t, self.policy.save, parts)
        if not self.cfg.async_save:
            self.run.settle()

    def rescue(self) -> None:
        """Saves what a stopped run has done: all but rollouts and evaluations under way, and an update that failed."""
        if self.phase in ("evolve", "evaluate"):  # an evolution changes P once all rollouts are done
            self.save(self.t, self.phase)
        elif self.t and self.phase == "rollout" and self.policy.t < self.t:
            self.save(self.t - 1)
        self.run.settle()

    def progress(self, purpose: str, done: int, total: int) -> None:
        """Shows how far the rollouts are."""
        name = purpose.split()[0]
        self.screen.rollouts(self.t, f"{DOING.get(name, name)} {done}/{total}", done == total)

    def evaluate(
        self, id: int | None, instruction: str, t: int, questions: list[Question], keep: str = ""
    ) -> dict[str, float]:
        """Returns means of the task's metrics, by source too, and of tool calls: greedy, under one instruction.

        Stores a sample of the trajectories under the name `keep`, the same questions for every name.
        """  # CHOICE-11
        jobs = [Job(id, instruction, q, group) for group, q in enumerate(questions)]
        taus = self.policy.rollout(t, "evaluate", jobs, temperature=0.0)
        reward(self.task, taus)
        rows = measure(self.task, taus)
        self.metrics = list(rows[0])
        if keep:
            self.spread[keep] = statistics.pstdev(row[self.metrics[0]] for row in rows)
        kept = [
            taus[k].record() | {"setting": keep, "metrics": rows[k]}
            for k in spread(len(taus), 24 if keep else 0)
        ]
        if kept:
            self.run.write_trajectories(f"test-{keep.replace(', ', '-').replace(' ', '_')}", kept)
        calls = {tool.plural: statistics.fmean(tau.served(tool.tag) for tau in taus) for tool in self.task.tools}
        return by_source(taus, rows) | calls

    def named(self, name: str, means: dict[str, float]) -> dict[str, float]:
        return {f"{name}/{k}": v for k, v in means.items()}

    def score_canary(self, t: int) -> dict[str, float]:
        """Returns the means of --canary on the held-out questions; {} without one."""
        if not self.cfg.canary:
            return {}
        return self.evaluate(None, read_instruction("canary", self.cfg.canary), t, self.test)

    # ---- the population

    def note(self, text: str) -> None:
        self.screen.note(text)

    def event(self, t: int, event: str, P: Population, text: str) -> None:
        """Shows what happened to the population, and appends it with the population to population.jsonl."""
        noted = P.noted()
        text += noted.pop("says", "") if event == "prune" else ""
        self.screen.event(t, event, P, text)
        flat = [{k: v for k, v in asdict(I).items() if k != "notes"} | I.notes for I in P.active]
        self.run.append("population", {"t": t, "event": event, "text": text, "P": flat} | noted)
        if event != "prune":
            self.track.text("instructions", "\n\n".join(f"#{I.id} (w {I.w:.2f}): {I.text}" for I in P.active), t)

    def started(self, P: Population) -> None:
        variations = f" and {many(len(P) - 1, 'variation')}" * (len(P) > 1)
        self.event(0, "start", P, f"|P| {len(P)}: the first instruction{variations}")

    def pruned(self, t: int, P: Population, pruned: Sequence[Instruction]) -> None:
        left = ", ".join(f"#{I.id} (w {I.w:.2f})" for I in pruned) or "nobody"
        text = f"|P| {len(P) + len(pruned)} -> {len(P)}: {left} left"
        self.event(t, "prune", P, text)

    def call(self, t: int, round: int, parent: Instruction, call: Call) -> None:
        """Logs a call to the optimizer, before anything else happens: a resumed run never pays for it again."""
        self.ledger.optimizer_calls += 1
        self.ledger.optimizer_tokens += call.prompt_tokens + call.completion_tokens
        self.ledger.optimizer_seconds += call.seconds
        if not call.paid_before:
            self.run.append("reflections", {"t": t, "round": round, "parent": parent.id, "call": asdict(call)})

    def limit(self, rollouts: int) -> str:
        """Returns why evolution must not ask the optimizer and verify with so many `rollouts` now; "" if it may."""
        cfg, ledger = self.cfg, self.ledger
        if cfg.max_optimizer_tokens and ledger.optimizer_tokens >= cfg.max_optimizer_tokens:
            return f"--max_optimizer_tokens {cfg.max_optimizer_tokens} is used up ({ledger.optimizer_tokens} tokens)"
        share = (ledger.verification_rollouts + rollouts) / max(1, ledger.training_rollouts)
        if cfg.max_overhead and share > cfg.max_overhead:
            return f"--max_overhead {cfg.max_overhead:g}: a round more would make it {share:.3g}"
        return ""

    def proposed(
        self, t: int, round: int, parent: Instruction, call: Call, accepted: list[int], rejected: list[dict[str, Any]]
    ) -> None:
        """Logs which blocks of a reply are candidates, by their place in it, and why the others are not."""
        row = {"t": t, "round": round, "parent": parent.id, "accepted": accepted, "rejected": rejected}
        self.run.append("reflections", row)
        self.candidates.append(len(accepted))
        if accepted:
            return
        fault = "has no <ins_k> block"
        if rejected:
            fault = f"has no candidate: all {len(rejected)} were rejected, the first: {rejected[0]['reason']}"
        if call.cut:
            fault += "; it was cut off by a length limit"
        self.note(f"step {t:3d}  the optimizer's reply {fault}")

    def verified(
        self, t: int, round: int, parent: Instruction, D_B: Sequence[Question], verified: Sequence[Candidate],
        joining: Sequence[Candidate],
    ) -> None:  # fmt: skip
        rollouts = (1 + len(verified)) * len(D_B) * self.cfg.gate_samples
        self.ledger.verification_rollouts += rollouts
        self.r_parent = verified[0].r_parent
        rows = [
            {"text": c.text, "parent": c.parent, "r": c.r, "r_parent": c.r_parent, "joined": c in joining}
            | ({"why": c.why} if c.why else {})
            for c in verified
        ]
        row = {"t": t, "round": round, "parent": parent.id, "r_parent": self.r_parent, "rollouts": rollouts}
        self.run.append("reflections", row | {"D_B": [q.id for q in D_B], "verified": rows})

    def scored(self, t: int, texts: Sequence[str], D_B: Sequence[Question]) -> None:
        """Counts the rollouts that compare instructions on D_B, without a parent beside them."""
        rollouts = len(texts) * len(D_B) * self.cfg.gate_samples
        self.ledger.verification_rollouts += rollouts
        row = {"t": t, "scored": list(texts), "D_B": [q.id for q in D_B], "rollouts": rollouts}
        self.run.append("reflections", row)

    def evolved(
        self, t: int, P: Population, parents: Sequence[Instruction], joined: Sequence[Instruction], shortfall: str
    ) -> None:
        """Logs an evolution; `shortfall`: why there are places left."""
        if not joined:
            return self.joined(t, P, f"no new instruction: {shortfall}; P stays as it is", [])
        ids = ", ".join(f"#{I.id}" for I in parents)
        text = f"parent {ids} ({self.r_parent:.2f} on D_B); {len(joined)} joined"
        if len(P) < self.cfg.N_P:
            text += f"; {many(self.cfg.N_P - len(P), 'place')} left: {shortfall}"
        self.joined(t, P, text, joined)

    def joined(self, t: int, P: Population, text: str, joined: Sequence[Instruction]) -> None:
        """Shows an evolution in a line, and below it who joined."""
        if self.candidates:
            self.row["candidates"], self.candidates = sum(self.candidates), []
        self.ledger.evolutions += 1
        self.ledger.evolutions_in_vain += not joined
        for I in joined:
            parent = P.family[I.parent].text if I.parent is not None else ""
            score = f"{I.verified:.2f}" if I.verified is not None else ""
            text += f"\n{'':18}#{I.id:<3d} {score:4s}  + {added_sentences(I.text, parent)}"
        self.event(t, "evolve", P, text)

    # ---- the end

    @contextlib.contextmanager
    def rescued(self) -> Iterator[None]:
        """Saves what a run has done if it is stopped inside, or a part of it fails that may work again later."""
        try:
            yield
        except DiskFault:  # a checkpoint would not fit either
            raise
        except (Outage, stop.Stopped):
            self.rescue()
            raise

    def finish(self, I_star: Instruction) -> None:
        """Writes and prints the result: I_star, the policy, the metrics of both policies under both instructions."""
        cfg, run, first = self.cfg, self.run, self.first
        run.settle()
        run.write("I_star.txt", I_star.text + "\n")
        with run.directory("policy") as path:
            self.policy.export(path)
        name = "trained policy, first instruction"
        rows = {name: (end := self.evaluate(0, first, cfg.T, self.test, name))}
        rows["first policy, first instruction"] = self.start
        if cfg.canary:
            rows["trained policy, canary"] = self.score_canary(cfg.T)
        if I_star.text != first:
            name = "trained policy, I_star"
            rows = {name: (end := self.evaluate(I_star.id, I_star.text, cfg.T, self.test, name))} | rows
            self.policy.reset()
            name = "first policy, I_star"
            rows[name] = self.evaluate(I_star.id, I_star.text, cfg.T, self.test, name)
        means = {name: row[self.metrics[0]] for name, row in rows.items()}
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "metric": self.metrics[0], "metrics": self.metrics,
            "tools": [tool.plural for tool in self.task.tools], "start": self.start, "end": end, "spread": self.spread,
            "seconds": round(self.spent + time.perf_counter() - self.began, 1), "questions": len(self.test),
            "held_out": rows, "overhead_inference": round(self.ledger.overhead_inference(), 4),
            "ledger": asdict(self.ledger), "generations": lineage(self.P, I_star), "I_star": I_star.text,
            "conclusion": conclusion(means, len(self.test), self.metrics[0], self.spread),
            "evolved": self.ledger.evolutions > self.ledger.evolutions_in_vain, "versions": self.versions,
        }  # fmt: skip
        run.write("summary.json", json.dumps(summary, indent=1))
        run.drop_optimizers()
        self.track.numbers({f"final/{name}/{k}": v for name, row in rows.items() for k, v in row.items()}, cfg.T)
        self.track.text("I_star", I_star.text, cfg.T)
        self.screen.close()
        print(printable(ending(summary, run.path)))
        for _, _, warning in self.silence.lasting():
            print(f"WARNING  until the end, {warning}")
        if evolves(cfg) and not summary["evolved"]:
            n = self.ledger.evolutions
            what = f"{many(n, 'evolution')} left the population as it was" if n else "No evolution took place"
            print(f"{what}: this is no result of --mode {cfg.mode} (evolved: false in summary.json).")
        try:
            write = importlib.import_module("report").write
            print(f"see it: {write([run.path], run.path / 'report.html')}")
        except (Fault, ImportError) as e:  # the run is complete without its page
            print(f"no page: {e} (python report.py {run.path} writes it)")
