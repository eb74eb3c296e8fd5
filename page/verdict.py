"""The first screen of a page: did it learn, which instruction won and why, what did it cost, what went wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence

from journal.silence import ALL_ALIKE, NO_ANSWER, PATIENCE, Silence
from page.family import lineage, undecided_of
from page.read import Row, Run, number

RUNNING = 600.0  # seconds without a line after which an unfinished run counts as stopped


def verdict(run: Run, tree: Row) -> Row:
    """Returns the answers of the first screen."""
    return {
        "status": status(run), "learned": learned(run), "winner": winner(run, tree), "cost": cost(run),
        "warnings": warnings(run),
    }  # fmt: skip


def status(run: Run) -> Row:
    """Returns {"state", "t", "T", "written"}; state: finished, running, or stopped (no line for ten minutes)."""
    state = "finished" if run.finished else "running" if time.time() - run.written < RUNNING else "stopped"
    return {"state": state, "t": run.t, "T": run.T, "written": run.written}


def learned(run: Run) -> Row:
    """Returns what was gained: the final table with its sentence, or for an unfinished run its rewards."""
    table, questions = run.held_out, number(run.summary.get("questions"))
    rewards = column(run, "reward")
    few = max(1, min(5, len(rewards) // 2))
    sentence = str(run.summary.get("conclusion", ""))
    out: Row = {"table": table, "questions": questions, "sentence": sentence, "few": few}
    out["rewards"] = [mean(rewards[:few]), mean(rewards[-few:])] if rewards else None
    return out


def winner(run: Run, tree: Row) -> Row | None:
    """Returns the winning instruction, or the one that leads now, and what speaks for it; None without any."""
    by_id = {I["id"]: I for I in tree["instructions"]}
    generations = run.summary.get("generations") or []
    last = [row for row in run.steps if isinstance(row.get("w"), dict) and row["w"]]
    id = generations[-1] if generations else last[-1].get("best") if last else min(by_id, default=None)
    if not isinstance(id, int) or id not in by_id:
        return None
    w = {int(j): value for j, value in (last[-1]["w"] if last else {}).items() if str(j).isdigit()}
    others = sorted(((value, j) for j, value in w.items() if j != id), reverse=True)
    history = [entry for entry in by_id[id]["history"] if entry[1] is not None]
    prunings = [event for event in run.events if event.get("event") == "prune"]
    undecided = [j for j in (undecided_of(prunings[-1]) if prunings else []) if j in w and j != id]
    return {
        "id": id, "lineage": lineage(tree["instructions"], id), "w": w.get(id), "steps": len(history),
        "rivals": len(w) - 1, "second": {"id": others[0][1], "w": others[0][0]} if others else None,
        "ever": len(by_id), "refused": len(tree["refused"]), "since": by_id[id]["born"], "undecided": undecided,
    }  # fmt: skip


def cost(run: Run) -> Row:
    """Returns what the run has spent: calls and tokens, rollouts, seconds by phase."""
    calls = [row["call"] for row in run.reflections if isinstance(row.get("call"), dict)]
    verified = [row for row in run.reflections if isinstance(row.get("verified"), list)]
    ledger = run.summary.get("ledger") or {}
    rollouts = len(run_steps(run)) * (number(run.config.get("batch")) or 0) * (number(run.config.get("G")) or 0)
    total = number(run.summary.get("seconds")) or max(column(run, "time/total"), default=0.0)
    verify = sum(column(run, "time/verify"))
    phases = {name: sum(column(run, f"time/{name}")) for name in ("rollout", "reward", "update", "evaluate", "log")}
    # The optimizer's calls and the rest of an evolution; the evaluation of a step is measured within it.
    rest = sum(column(run, "time/evolve")) - verify
    phases |= {"verify": verify, "evolve": max(0.0, rest)}
    phases["other"] = max(0.0, total - sum(phases.values()))
    return {
        "calls": ledger.get("optimizer_calls", len(calls)),
        "prompt_tokens": sum(number(call.get("prompt_tokens")) or 0 for call in calls),
        "completion_tokens": sum(number(call.get("completion_tokens")) or 0 for call in calls),
        "optimizer_seconds": sum(number(call.get("seconds")) or 0 for call in calls),
        "optimizer": run.config.get("optimizer_model"),
        "training": ledger.get("training_rollouts", rollouts),
        "verification": ledger.get(
            "verification_rollouts", sum(number(row.get("rollouts")) or 0 for row in run.reflections)
            or sum((1 + len(row["verified"])) * len(row.get("D_B") or []) for row in verified)
        ),
        "tool_calls": ledger.get("tool_calls", ledger.get("searches")),  # as older runs called them
        "faults": sum(faults(run).values()),
        "seconds": total, "phases": phases,
    }  # fmt: skip


def faults(run: Run) -> dict[str, float]:
    """Returns how many requests have failed, by the name before "/faults" in metrics.jsonl."""
    names = {name for row in run.steps for name in row if name.endswith("/faults")}
    return {name.rpartition("/")[0]: max(column(run, name), default=0) for name in sorted(names)}


# ---- what went wrong


def warnings(run: Run) -> list[Row]:
    """Returns what a person who knows the failures of such runs would point at: {"text", "panel", "t"}."""
    rows, out = run_steps(run), []

    def warn(text: str, panel: str = "", t: int | None = None) -> None:
        out.append({"text": text, "panel": panel, "t": t})

    if not rows:
        return [{"text": "No step has been measured yet.", "panel": "", "t": None}]
    for name in dict.fromkeys(("loss", "grad_norm", "reward", run.metric)):
        if broken := [row for row in rows if name in row and number(row[name]) is None]:
            warn(f"{name} is not a number at step {broken[0]['t']}.", name, broken[0]["t"])
    few = max(1, min(10, len(rows) // 5))
    first, last = rows[:few], rows[-few:]
    entropy = [mean(values(part, "entropy")) for part in (first, last)]
    if None not in entropy and entropy[1] < 0.05 * entropy[0]:  # type: ignore[operator]
        warn(
            f"Entropy has collapsed from {entropy[0]:.3g} to {entropy[1]:.3g} nats: the policy hardly explores.",
            "entropy",
        )
    if answered := values(rows, "answered"):
        best, now = max(_windows(answered, few)), mean(answered[-few:]) or 0.0
        if best - now > 0.1:
            warn(f"Trajectories that end in an answer fell from {best:.0%} to {now:.0%}.", "answered")
    silence = Silence()
    for row in rows:
        silence.step(row)
    for sign, _, text in silence.lasting():
        warn(f"To the end, {text}", {NO_ANSWER: "answered", ALL_ALIKE: "zero_variance_groups"}.get(sign, ""))
    alike = values(rows, "zero_variance_groups")
    if alike and not silence.since[ALL_ALIKE] >= PATIENCE and (share := sum(alike[-few:]) / len(alike[-few:])) > 0.9:
        warn(f"{share:.0%} of the last groups have rewards all alike, and teach nothing.", "zero_variance_groups")
    gap = values(rows, "logp_gap")
    if gap and (worst := max(gap)) > 0.05:
        t = next(row["t"] for row in rows if row.get("logp_gap") == worst)
        warn(f"Engine and trainer differ by up to {worst:.2g} nat a token (step {t}).", "logp_gap", t)
    for name, n in faults(run).items():
        if n:
            warn(f"{n:.0f} requests to {name} failed and were repeated.")
    if skipped := [row for row in rows if row.get("skipped_updates")]:
        n, t = sum(values(skipped, "skipped_updates")), skipped[0]["t"]
        warn(f"{n:.0f} optimizer steps were skipped: loss or gradient were not finite.", "skipped_updates", t)
    if len(reward := values(rows, "reward")) >= 10:
        means = _windows(reward, few)
        if max(means) - means[-1] > 0.3 * max(map(abs, means)):
            warn(f"Reward fell from {max(means):.2f} to {means[-1]:.2f}.", "reward")
    barren = [e for e in run.events if e.get("event") == "evolve" and "no new instruction" in str(e.get("text", ""))]
    for event in barren:
        reason = str(event["text"]).partition("no new instruction: ")[2].partition(";")[0]
        warn(f"Step {event['t']} brought no new instruction: {reason}.", "tree", event["t"])
    return out


def run_steps(run: Run) -> list[Row]:
    """Returns the rows of steps, without those that hold evaluations alone."""
    return [row for row in run.steps if "reward" in row or "loss" in row]


def values(rows: Sequence[Row], name: str) -> list[float]:
    return [x for row in rows if (x := number(row.get(name))) is not None]


def column(run: Run, name: str) -> list[float]:
    return values(run.steps, name)


def mean(x: Sequence[float]) -> float | None:
    return sum(x) / len(x) if x else None


def _windows(x: Sequence[float], n: int) -> list[float]:
    """Returns the means of n neighbours."""
    return [sum(x[k : k + n]) / n for k in range(max(1, len(x) - n + 1))]
