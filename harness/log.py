"""What a run prints and writes down while Algorithm 1 runs: metrics, events, costs, checkpoints, evaluations."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import report
from config import Config, first_instruction, read_instruction
from data import Question, em, f1, subset
from faults import Fault
from harness.directory import RunDirectory
from outside import printable
from population import Candidate, Instruction, Population, ReplayBuffer
from reflect import Call
from rollout import Job, Trajectory
from training.policy import Policy


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
        bar: tqdm[Any], began: float,
    ):  # fmt: skip
        """`began`: time.time() at which the process started."""
        self.cfg, self.run, self.policy, self.bar, self.began = cfg, run, policy, bar, began
        self.test, self.valid = subset(test, cfg.eval_n), subset(valid, cfg.eval_n)
        self.track = tracker(cfg.tracker, run.path, cfg)
        self.ledger = Ledger()
        self.t = 0  # the step in progress, or the last one
        self.spent = 0.0  # seconds of earlier processes of this run
        self.start: dict[str, float] = {}  # scores of the first policy under the first instruction
        self.row: dict[str, Any] = {}  # of metrics.jsonl

    # ---- the steps

    def restore(self) -> tuple[Population, ReplayBuffer] | None:
        """Restores a resumed run's policy; returns its population and buffer. None: start from the beginning."""
        found = self.run.rewind() if self.cfg.resume else None
        if not found:
            return None
        checkpoint, state = found
        P, B = Population(self.cfg.tau_s, self.cfg.window), ReplayBuffer(self.cfg.buffer)
        P.load_state_dict(state["population"])
        B.load_state_dict(state["buffer"])
        self.ledger, self.start, self.spent = Ledger(**state["ledger"]), state["start"], state["seconds"]
        self.t = state["t"]
        self.policy.load(checkpoint, self.t)
        self.bar.update(self.t)
        self.note(f"resumed after step {self.t}")
        return P, B

    def steps(self, P: Population, B: ReplayBuffer) -> Iterator[int]:
        """Yields the numbers of the steps to take; completes each step's log when the next one is asked for."""
        self.P, self.B = P, B
        if not self.start:
            self.start = self.evaluate(first_instruction(self.cfg), 0, self.test)
            self.run.append(
                "metrics", {"t": 0} | self.named("test", self.start) | self.named("canary", self.score_canary(0))
            )
        if unproven := self.policy.worker.engine.unproven:
            self.note(f"note: {unproven} weights cannot be read back from the engine: only its log-probs are checked")
        scores = f"EM {self.start['em']:.3f}, {self.start['searches']:.2f} searches"
        self.note(f"held-out questions, first policy, first instruction: {scores}")
        for t in range(self.t + 1, self.cfg.T + 1):
            self.t = t
            self.policy.seconds.clear()
            yield t
            self.complete_step()

    def step(self, t: int, taus: Sequence[Trajectory], P: Population, update: dict[str, float]) -> None:
        """Logs the rollouts and the update of step t, with the weights as they are before anyone is pruned."""
        began = time.time()
        self.ledger.training_rollouts += len(taus)
        self.ledger.searches += sum(tau.served("search") for tau in taus)
        self.run.write_trajectories(t, [tau.record() for tau in taus])
        self.row = report.step_metrics(taus, P, self.cfg.G, self.policy.worker.tools) | update
        self.row |= {f"time/{name}": seconds for name, seconds in self.policy.seconds.items()}
        self.logged = time.time()
        self.row["time/log"] = self.logged - began

    def complete_step(self) -> None:
        """Writes the step's row; evaluates and saves where the step calls for it."""
        t, row = self.t, self.row
        row["time/evolve"] = time.time() - self.logged
        row |= {"time/total": self.spent + time.time() - self.began, "search/faults": self.policy.faults()}
        if self.cfg.eval_every and t % self.cfg.eval_every == 0 and t < self.cfg.T:
            for name, questions in (("valid", self.valid), ("test", self.test)):
                scores = self.evaluate(self.P.best().text, t, questions) if questions else {}
                row |= self.named(name, scores)
            row |= self.named("canary", self.score_canary(t))
        self.run.append("metrics", {"t": t} | row)
        self.track({k: v for k, v in row.items() if isinstance(v, (int, float))}, t)
        seconds = row["time/rollout"] + row["time/update"] + row["time/log"] + row["time/evolve"]
        line = (
            f"reward {row['reward']:.2f}  searches {row['searches']:.2f}  KL {row['kl']:.4f}  "
            f"|P| {len(self.P)}  best w {row['w_best']:.2f}  {seconds:.1f} s/step"
        )
        self.bar.set_postfix_str(line)
        self.bar.update()
        if self.bar.disable and t % max(1, self.cfg.T // 20) == 0:  # no terminal, no bar: a line now and then
            print(f"step {t:3d}  {line}", flush=True)
        if t % self.cfg.save_every == 0 or t == self.cfg.T or "test/em" in row:
            self.save(t)

    def save(self, t: int) -> None:
        parts: dict[str, Any] = {
            "population": self.P.state_dict(),
            "buffer": self.B.state_dict(),
            "ledger": asdict(self.ledger),
        }
        parts |= {"start": self.start, "seconds": self.spent + time.time() - self.began}
        self.run.checkpoint(t, self.policy.save, parts)

    def rescue(self) -> None:
        """Saves what the last complete step left, unless the step in progress has touched the policy already."""
        if self.t and self.policy.t < self.t:
            self.save(self.t - 1)

    def evaluate(self, instruction: str, t: int, questions: list[Question]) -> dict[str, float]:
        """Returns EM, F1 and tool calls a question, greedy; EM by source too."""  # CHOICE-11
        jobs = [Job(0, instruction, q, group) for group, q in enumerate(questions)]
        taus = self.policy.rollout(t, "evaluate", jobs, temperature=0.0)
        scores: dict[str, list[float]] = {"em": [], "f1": []}
        for tau in taus:
            exact = em(tau.prediction, tau.question.golds)
            scores["em"].append(exact)
            scores.setdefault(f"em/{tau.question.source}", []).append(exact)
            scores["f1"].append(f1(tau.prediction, tau.question.golds))
            for tool in self.policy.worker.tools:
                scores.setdefault(tool.plural, []).append(tau.served(tool.tag))
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
        """Prints a line above the progress bar."""
        self.bar.write(printable(text))

    def event(self, t: int, event: str, P: Population, text: str) -> None:
        """Prints what happened to the population, and appends it with the population to population.jsonl."""
        self.note(f"step {t:3d}  {event:6s}  {text}")
        row = {"t": t, "event": event, "text": text, "P": [asdict(I) for I in P.active]}
        self.run.append("population", row)

    def started(self, P: Population) -> None:
        self.event(0, "start", P, f"|P| {len(P)}: the first instruction and {len(P) - 1} variations")

    def pruned(self, t: int, P: Population, pruned: Sequence[Instruction]) -> None:
        left = ", ".join(f"#{I.id} (w {I.w:.2f})" for I in pruned) or "nobody"
        self.event(t, "prune", P, f"|P| {len(P) + len(pruned)} -> {len(P)}: {left} left")

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
        fault = f"all {len(rejected)} were rejected, the first: {rejected[0]['reason']}" if rejected else "none in it"
        if call.cut:
            fault += "; it was cut off by a length limit"
        self.note(f"step {t:3d}  no candidate in the optimizer's reply: {fault}")

    def verified(
        self, t: int, round: int, parent: Instruction, D_B: Sequence[Question], scored: Sequence[Candidate],
        joining: Sequence[Candidate],
    ) -> None:  # fmt: skip
        self.ledger.verification_rollouts += (1 + len(scored)) * len(D_B)
        self.r_parent = scored[0].r_parent
        row = {"t": t, "round": round, "parent": parent.id, "r_parent": scored[0].r_parent}
        verified = [asdict(c) | {"joined": c in joining} for c in scored]
        self.run.append("reflections", row | {"D_B": [q.id for q in D_B], "verified": verified})

    def evolved(
        self, t: int, P: Population, parents: Sequence[Instruction], joined: Sequence[Instruction], shortfall: str
    ) -> None:
        self.ledger.evolutions += 1
        ids = ", ".join(f"#{I.id}" for I in parents)
        text = f"parent {ids} ({self.r_parent:.2f} on D_B); {len(joined)} joined"
        if len(P) < self.cfg.N_P:
            text += f"; {self.cfg.N_P - len(P)} places stay empty: {shortfall}"
        for I in joined:
            parent = P.family[I.parent].text if I.parent is not None else ""
            text += f"\n{'':18}#{I.id:<3d} {I.verified:.2f}  + {report.added_sentences(I.text, parent)}"
        self.event(t, "evolve", P, text)

    def not_evolved(self, t: int, P: Population, shortfall: str) -> None:
        self.ledger.evolutions += 1
        self.ledger.evolutions_in_vain += 1
        self.event(t, "evolve", P, f"no new instruction: {shortfall}; P stays as it is")

    # ---- the end

    def finish(self, I_star: Instruction) -> None:
        """Writes and prints the result: I_star, the policy, the scores of both policies under both instructions."""
        cfg, run, first = self.cfg, self.run, first_instruction(self.cfg)
        run.write("I_star.txt", I_star.text + "\n")
        self.policy.export(run.path / "policy")
        rows = {"trained policy, first instruction": (end := self.evaluate(first, cfg.T, self.test))}
        rows["first policy, first instruction"] = self.start
        if cfg.canary:
            rows["trained policy, canary"] = self.score_canary(cfg.T)
        if I_star.text != first:
            rows = {"trained policy, I_star": (end := self.evaluate(I_star.text, cfg.T, self.test))} | rows
            self.policy.reset()
            rows["first policy, I_star"] = self.evaluate(I_star.text, cfg.T, self.test)
        summary = {  # other programs may rely on these keys
            "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "em_start": self.start["em"], "em_best": end["em"],
            "searches_start": self.start["searches"], "searches_end": end["searches"],
            "seconds": round(self.spent + time.time() - self.began, 1), "questions": len(self.test), "held_out": rows,
            "overhead_inference": round(self.ledger.overhead_inference(), 4), "ledger": asdict(self.ledger),
            "generations": report.lineage(self.P, I_star), "I_star": I_star.text,
            "evolved": self.ledger.evolutions > self.ledger.evolutions_in_vain,
        }  # fmt: skip
        run.write("summary.json", json.dumps(summary, indent=1))
        pictures = report.draw(run.path)
        self.bar.close()
        print(printable(report.ending(summary, rows, pictures, run.path)))
        if cfg.mode == "inspo" and not summary["evolved"]:
            n = self.ledger.evolutions
            what = f"None of {n} evolutions changed the population" if n else "No evolution took place"
            print(f"{what}: this is no result of INSPO's (evolved: false in summary.json).")


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
    except ImportError:
        raise Fault(f"--tracker {name}: not installed; pip install {name}, or leave it out") from None
    writer = SummaryWriter(path / "tensorboard")

    def log(metrics: dict[str, float], t: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, t)

    return log
