"""What a run prints and writes down while Algorithm 1 runs: metrics, events, costs, checkpoints, evaluations."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from config import Config, evolves, first_instruction, read_instruction
from data import Question, em, f1, subset
from faults import Fault
from harness.directory import RunDirectory
from harness.screen import Screen
from harness.summary import added_sentences, ending, lineage, step_metrics
from harness.tokens import piece_reader, token_data
from harness.versions import versions
from outside import printable
from population import Candidate, Instruction, Population, ReplayBuffer
from reflect import Call
from rollout import Job, Trajectory, spread
from training.policy import Policy

DOING = {  # purpose of rollouts -> in words
    "rollout": "rollouts", "verify": "verifying", "evaluate": "evaluating", "reject": "sampling",
}  # fmt: skip


@dataclass
class Ledger:
    """What evolution costs beside training (App. C)."""

    training_rollouts: int = 0
    verification_rollouts: int = 0
    optimizer_calls: int = 0
    optimizer_tokens: int = 0
    optimizer_seconds: float = 0.0
    searches: int = 0
    evolutions: int = 0
    evolutions_in_vain: int = 0  # that left P as it was

    def overhead_inference(self) -> float:
        return self.verification_rollouts / max(1, self.training_rollouts)


class Log:
    """The run as Algorithm 1 sees it: it restores, counts the steps, and is told what happened in them."""

    def __init__(
        self, cfg: Config, run: RunDirectory, policy: Policy, test: list[Question], valid: list[Question],
        screen: Screen, began: float,
    ):  # fmt: skip
        """`began`: time.time() at which the process started."""
        self.cfg, self.run, self.policy, self.screen, self.began = cfg, run, policy, screen, began
        self.versions = versions()  # now: somebody may change the code while it runs
        self.test, self.valid = subset(test, cfg.eval_n), subset(valid, cfg.eval_n)
        self.piece = piece_reader(policy.worker.tokenizer)
        self.track = tracker(cfg.tracker, run.path, cfg)
        self.ledger = Ledger()
        self.t = 0  # the step in progress, or the last one
        self.phase = ""  # what is under way in it: "rollout" until it is logged, then "evolve", "evaluate"
        policy.progress = self.progress
        self.spent = 0.0  # seconds of earlier processes of this run
        self.start: dict[str, float] = {}  # scores of the first policy under the first instruction
        self.row: dict[str, Any] = {}  # of metrics.jsonl

    # ---- the steps

    def restore(self, P: Population) -> tuple[Population, ReplayBuffer] | None:
        """Restores a resumed run's policy; returns its population, in P, and buffer. None: nothing to resume."""
        found = self.run.rewind(self.policy.damage, self.note) if self.cfg.resume else None
        if not found:
            return None
        checkpoint, state = found
        B = ReplayBuffer(self.cfg.buffer)
        try:
            P.load_state_dict(state["population"])
            B.load_state_dict(state["buffer"])
            self.ledger, self.start, self.spent = Ledger(**state["ledger"]), state["start"], state["seconds"]
        except (LookupError, TypeError, ValueError) as e:
            raise Fault(f"{checkpoint}/state.pt is of another program ({type(e).__name__}: {e})") from None
        self.P, self.B, self.t = P, B, state["t"]
        self.phase, self.row, self.logged = state.get("unfinished", ""), state.get("row", {}), time.time()
        self.before_evolution = dataclasses.replace(self.ledger)
        self.policy.load(checkpoint, self.t)
        self.policy.memory = state.get("memory", {})
        self.screen.resumed(self.t - bool(self.phase))
        self.note(f"resumed {'inside' if self.phase else 'after'} step {self.t}")
        return P, B

    def steps(self, P: Population, B: ReplayBuffer) -> Iterator[int]:
        """Yields the numbers of the steps to take; completes each step's log when the next one is asked for."""
        self.P, self.B = P, B
        if not self.start:
            self.start = self.evaluate(first_instruction(self.cfg), 0, self.test, "first policy, first instruction")
            row = self.named("test", self.start) | self.named("canary", self.score_canary(0))
            self.run.append("metrics", {"t": 0} | row)
            self.track(row, 0)
        if unproven := self.policy.worker.engine.unproven:
            self.note(f"note: {unproven} weights cannot be read back from the engine: only its log-probs are checked")
        scores = f"EM {self.start['em']:.3f}, {self.start.get('searches', 0):.2f} searches"
        self.note(f"held-out questions, first policy, first instruction: {scores}")
        if self.phase:  # the run was stopped inside step t
            self.complete_step()
        for t in range(self.t + 1, self.cfg.T + 1):
            self.t, self.phase = t, "rollout"
            self.policy.seconds.clear()
            yield t
            self.complete_step()

    def step(self, t: int, taus: Sequence[Trajectory], P: Population, update: dict[str, float]) -> None:
        """Logs the rollouts and the update of step t, with the weights as they are before anyone is pruned."""
        began = time.time()
        self.ledger.training_rollouts += len(taus)
        self.ledger.searches += sum(tau.served("search") for tau in taus)
        self.run.write_trajectories(f"step-{t:06d}", [self.record(tau) for tau in taus])
        self.row = step_metrics(taus, P, self.cfg.G, self.policy.worker.tools) | update
        self.row |= {f"time/{name}": seconds for name, seconds in self.policy.seconds.items()}
        self.logged = time.time()
        self.row["time/log"] = self.logged - began
        self.phase, self.before_evolution = "evolve", dataclasses.replace(self.ledger)

    def record(self, tau: Trajectory) -> dict[str, Any]:
        """Returns a trajectory's row, with the data of its tokens if it is one of the watched."""
        row = tau.record()
        if tau.tokens:
            row["token_data"] = token_data(tau, self.policy.worker.tokenizer, self.piece, self.cfg.token_limit)
        return row

    def played(self, t: int, round: int, parent: Instruction, taus: Sequence[Trajectory]) -> None:
        """Stores a sample of a verification's rollouts: the same questions under a parent and its revisions.

        In these rows `instruction` is 0 for the parent and k for the k-th accepted revision of the round.
        """
        questions = list(dict.fromkeys(tau.question.id for tau in taus))
        chosen = {questions[k] for k in spread(len(questions), self.cfg.compare)}
        rows = [tau.record() | {"parent": parent.id} for tau in taus if tau.question.id in chosen]
        if rows:
            self.run.write_trajectories(f"verify-{t:06d}-{round}", rows)

    def complete_step(self) -> None:
        """Writes the step's row; evaluates and saves where the step calls for it."""
        self.phase = "evaluate"
        t, row = self.t, dict(self.row)
        row["time/evolve"] = time.time() - self.logged
        row["time/verify"] = self.policy.seconds["verify"]  # a part of time/evolve
        row |= {"time/total": self.spent + time.time() - self.began, "search/faults": self.policy.faults()}
        if self.cfg.eval_every and t % self.cfg.eval_every == 0 and t < self.cfg.T:
            for name, questions in (("valid", self.valid), ("test", self.test)):
                scores = self.evaluate(self.P.best().text, t, questions) if questions else {}
                row |= self.named(name, scores)
            row |= self.named("canary", self.score_canary(t))
            row["time/evaluate"] = self.policy.seconds["evaluate"]
        self.run.append("metrics", {"t": t} | row)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        self.track(numbers | {f"w/{j}": w for j, w in row["w"].items()}, t)
        self.phase = ""
        seconds = row.get("time/rollout", 0.0) + row["time/update"] + row["time/log"] + row["time/evolve"]
        self.screen.step(t, row, self.P, seconds)
        if t % self.cfg.save_every == 0 or t == self.cfg.T or "test/em" in row:
            self.save(t)

    def save(self, t: int, unfinished: str = "") -> None:
        """Saves the state after step t, or at the start of its `unfinished` evolution or evaluation."""
        parts: dict[str, Any] = {"population": self.P.state_dict(), "buffer": self.B.state_dict()}
        parts["memory"] = self.policy.memory
        parts |= {"start": self.start, "seconds": self.spent + time.time() - self.began}
        parts["ledger"] = asdict(self.before_evolution if unfinished == "evolve" else self.ledger)
        if unfinished:
            parts |= {"unfinished": unfinished, "row": self.row}
        self.run.checkpoint(t, self.policy.save, parts)

    def rescue(self) -> None:
        """Saves what a stopped run has done: all but rollouts and evaluations under way, and an update that failed."""
        if self.phase in ("evolve", "evaluate"):  # an evolution changes P once all rollouts are done
            self.save(self.t, self.phase)
        elif self.t and self.phase == "rollout" and self.policy.t < self.t:
            self.save(self.t - 1)

    def progress(self, purpose: str, done: int, total: int) -> None:
        """Shows how far the rollouts are."""
        self.screen.rollouts(self.t, f"{DOING[purpose.split()[0]]} {done}/{total}", done == total)

    def evaluate(self, instruction: str, t: int, questions: list[Question], keep: str = "") -> dict[str, float]:
        """Returns EM, F1 and tool calls a question, greedy; EM by source too.

        Stores a sample of the trajectories under the name `keep`, the same questions for every name.
        """  # CHOICE-11
        jobs = [Job(0, instruction, q, group) for group, q in enumerate(questions)]
        taus = self.policy.rollout(t, "evaluate", jobs, temperature=0.0)
        scores: dict[str, list[float]] = {"em": [], "f1": []}
        for tau in taus:
            exact = tau.reward = em(tau.prediction, tau.question.golds)
            scores["em"].append(exact)
            scores.setdefault(f"em/{tau.question.source}", []).append(exact)
            scores["f1"].append(f1(tau.prediction, tau.question.golds))
            for tool in self.policy.worker.tools:
                scores.setdefault(tool.plural, []).append(tau.served(tool.tag))
        rows = [taus[k].record() | {"setting": keep} for k in spread(len(taus), self.cfg.compare if keep else 0)]
        if rows:
            self.run.write_trajectories(f"test-{keep.replace(', ', '-').replace(' ', '_')}", rows)
        return {name: sum(x) / len(x) for name, x in sorted(scores.items())}

    def named(self, name: str, scores: dict[str, float]) -> dict[str, float]:
        return {f"{name}/{k}": v for k, v in scores.items()}

    def score_canary(self, t: int) -> dict[str, float]:
        """Returns the scores of --canary on the held-out questions; {} without one."""
        if not self.cfg.canary:
            return {}
        return self.evaluate(read_instruction("canary", self.cfg.canary), t, self.test)

    # ---- the population

    def note(self, text: str) -> None:
        self.screen.note(text)

    def event(self, t: int, event: str, P: Population, text: str) -> None:
        """Shows what happened to the population, and appends it with the population to population.jsonl."""
        self.screen.event(t, event, P, text)
        row = {"t": t, "event": event, "text": text, "P": [asdict(I) for I in P.active]}
        row |= {"undecided": P.undecided} if P.undecided else {}
        self.run.append("population", row)

    def started(self, P: Population) -> None:
        self.event(0, "start", P, f"|P| {len(P)}: the first instruction and {len(P) - 1} variations")

    def pruned(self, t: int, P: Population, pruned: Sequence[Instruction]) -> None:
        left = ", ".join(f"#{I.id} (w {I.w:.2f})" for I in pruned) or "nobody"
        text = f"|P| {len(P) + len(pruned)} -> {len(P)}: {left} left"
        text += f"; undecided: {', '.join(f'#{j}' for j in P.undecided)}" if P.undecided else ""
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
        if accepted:
            return
        fault = "has no <ins_k> block"
        if rejected:
            fault = f"has no candidate: all {len(rejected)} were rejected, the first: {rejected[0]['reason']}"
        if call.cut:
            fault += "; it was cut off by a length limit"
        self.note(f"step {t:3d}  the optimizer's reply {fault}")

    def verified(
        self, t: int, round: int, parent: Instruction, D_B: Sequence[Question], scored: Sequence[Candidate],
        joining: Sequence[Candidate],
    ) -> None:  # fmt: skip
        rollouts = (1 + len(scored)) * len(D_B) * self.cfg.gate_samples
        self.ledger.verification_rollouts += rollouts
        self.r_parent = scored[0].r_parent
        row = {"t": t, "round": round, "parent": parent.id, "r_parent": scored[0].r_parent, "rollouts": rollouts}
        verified = [asdict(c) | {"joined": c in joining} for c in scored]
        self.run.append("reflections", row | {"D_B": [q.id for q in D_B], "verified": verified})

    def scored(self, t: int, texts: Sequence[str], D_B: Sequence[Question]) -> None:
        """Counts the rollouts that compare instructions on D_B, without a parent beside them."""
        rollouts = len(texts) * len(D_B) * self.cfg.gate_samples
        self.ledger.verification_rollouts += rollouts
        row = {"t": t, "scored": list(texts), "D_B": [q.id for q in D_B], "rollouts": rollouts}
        self.run.append("reflections", row)

    def evolved(
        self, t: int, P: Population, parents: Sequence[Instruction], joined: Sequence[Instruction], shortfall: str
    ) -> None:
        ids = ", ".join(f"#{I.id}" for I in parents)
        text = f"parent {ids} ({self.r_parent:.2f} on D_B); {len(joined)} joined"
        if len(P) < self.cfg.N_P:
            text += f"; {self.cfg.N_P - len(P)} places stay empty: {shortfall}"
        self.joined(t, P, text, joined)

    def joined(self, t: int, P: Population, text: str, joined: Sequence[Instruction]) -> None:
        """Shows an evolution in a line, and below it who joined."""
        self.ledger.evolutions += 1
        self.ledger.evolutions_in_vain += not joined
        for I in joined:
            parent = P.family[I.parent].text if I.parent is not None else ""
            score = f"{I.verified:.2f}" if I.verified is not None else ""
            text += f"\n{'':18}#{I.id:<3d} {score:4s}  + {added_sentences(I.text, parent)}"
        self.event(t, "evolve", P, text)

    def not_evolved(self, t: int, P: Population, shortfall: str) -> None:
        self.joined(t, P, f"no new instruction: {shortfall}; P stays as it is", [])

    # ---- the end

    def finish(self, I_star: Instruction) -> None:
        """Writes and prints the result: I_star, the policy, the scores of both policies under both instructions."""
        cfg, run, first = self.cfg, self.run, first_instruction(self.cfg)
        run.write("I_star.txt", I_star.text + "\n")
        run.write_directory("policy", self.policy.export)
        name = "trained policy, first instruction"
        rows = {name: (end := self.evaluate(first, cfg.T, self.test, name))}
        rows["first policy, first instruction"] = self.start
        if cfg.canary:
            rows["trained policy, canary"] = self.score_canary(cfg.T)
        if I_star.text != first:
            name = "trained policy, I_star"
            rows = {name: (end := self.evaluate(I_star.text, cfg.T, self.test, name))} | rows
            self.policy.reset()
            name = "first policy, I_star"
            rows[name] = self.evaluate(I_star.text, cfg.T, self.test, name)
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "em_start": self.start["em"], "em_best": end["em"],
            "searches_start": self.start.get("searches", 0.0), "searches_end": end.get("searches", 0.0),
            "seconds": round(self.spent + time.time() - self.began, 1), "questions": len(self.test), "held_out": rows,
            "overhead_inference": round(self.ledger.overhead_inference(), 4), "ledger": asdict(self.ledger),
            "generations": lineage(self.P, I_star), "I_star": I_star.text,
            "evolved": self.ledger.evolutions > self.ledger.evolutions_in_vain, "versions": self.versions,
        }  # fmt: skip
        run.write("summary.json", json.dumps(summary, indent=1))
        self.track({f"final/{name}/{k}": v for name, row in rows.items() for k, v in row.items()}, cfg.T)
        self.screen.close()
        print(printable(ending(summary, rows, run.path)))
        if evolves(cfg) and not summary["evolved"]:
            n = self.ledger.evolutions
            what = f"None of {n} evolutions changed the population" if n else "No evolution took place"
            print(f"{what}: this is no result of --mode {cfg.mode} (evolved: false in summary.json).")
        try:
            print(f"see it: {report.write([run.path], run.path / 'report.html')}")
        except Fault as e:  # the run is complete without its page
            print(f"{e} (python report.py {run.path})")


def tracker(name: str, path: Path, cfg: Config) -> Callable[[dict[str, float], int], None]:
    """Returns log(metrics, t) for wandb or tensorboard; for "" it does nothing, as metrics.jsonl has everything."""
    if not name:
        return lambda metrics, t: None
    try:
        if name == "wandb":
            import wandb

            wandb.init(project="inspo", name=path.name, dir=path, config=dataclasses.asdict(cfg))
            return lambda metrics, t: wandb.log(metrics, step=t)
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise Fault(f"--tracker {name}: cannot be imported ({e}); mend it, or leave it out") from None
    writer = SummaryWriter(path / "tensorboard")

    def log(metrics: dict[str, float], t: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, t)

    return log
