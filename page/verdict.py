"""The first screen of a page: did it learn, which instruction won and why, what did it cost, what
stands out."""

import time
from collections.abc import Iterator, Sequence
from statistics import fmean

from journal.rows import count_costs
from journal.summary import count_seconds, measure_speed, trace_lineage
from page.read import Run, finite_number
from plumbing.files import Row

RUNNING = 600.0  # seconds without a line after which an unfinished run counts as stopped


def judge_run(run: Run, tree: Row) -> Row:
    """The answers of the first screen."""
    return {
        "status": find_status(run),
        "learned": describe_gain(run),
        "winner": describe_winner(run, tree),
        "cost": sum_costs(run),
        "warnings": find_warnings(run),
    }


def find_status(run: Run) -> Row:
    """Returns {"state", "t", "T", "written"}; state: finished, running, or stopped (no line for ten
    minutes)."""
    state = "running" if time.time() - run.written < RUNNING else "stopped"
    if run.summary:
        state = "finished"
    return {"state": state, "t": run.t, "T": run.T, "written": run.written}


def describe_gain(run: Run) -> Row:
    """What was gained: the final table , or for an unfinished run its rewards."""
    rewards = read_column(run.steps, "reward")
    few = max(1, min(5, len(rewards) // 2))
    return {
        "table": run.summary.get("held_out", {}),
        "questions": run.summary.get("questions"),
        "few": few,
        "rewards": [fmean(rewards[:few]), fmean(rewards[-few:])] if rewards else None,
    }


def describe_winner(run: Run, tree: Row) -> Row | None:
    """The winning instruction, or the one that leads now, and what speaks for it; None without
    any."""
    by_id = {I["id"]: I for I in tree["instructions"]}
    weighed = [row for row in run.steps if row.get("w")]
    last = weighed[-1] if weighed else {"w": {}, "best": min(by_id, default=None)}
    id = run.summary.get("generations", [last["best"]])[-1]
    if id not in by_id:
        return None
    parents = {j: I["parents"][0] if I["parents"] else None for j, I in by_id.items()}
    others = [[w, j] for j, w in last["w"].items() if j != str(id)]
    return {
        "id": id,
        "lineage": trace_lineage(parents, id),
        "w": last["w"].get(str(id)),
        "second": max(others, default=None),  # weight and id
    }


def sum_costs(run: Run) -> Row:
    """What the run has spent: calls and tokens, rollouts, seconds by phase, and how fast it was."""
    calls = [row["call"] for row in run.reflections if "call" in row]
    total = run.summary.get("seconds") or max(read_column(run.steps, "time/total"), default=0.0)
    phases = count_seconds(run.steps)
    phases["other"] = max(0.0, total - sum(phases.values()))
    return count_costs(run.steps, run.reflections, run.events, run.tools) | {
        "optimizer": run.config.get("optimizer_model"),
        **{name: sum(read_column(calls, name)) for name in ("prompt_tokens", "completion_tokens")},
        "seconds": total,
        "phases": phases,
        "speed": measure_speed(run.steps),
    }


# ---- what stands out


def find_warnings(run: Run) -> list[Row]:
    """What a person who knows the failures of such runs would point at: {"text", "panel"}."""
    rows = [row for row in run.steps if row["t"] > 0]
    if not rows:
        return [_warning("No step has been measured yet.")]
    return [*_of_numbers(rows, run.metrics[0]), *_of_updates(rows)]


def _warning(text: str, panel: str = "") -> Row:
    return {"text": text, "panel": panel}


def _of_numbers(rows: list[Row], metric: str) -> Iterator[Row]:
    """What is not a number, or falls."""
    # not a number
    for name in dict.fromkeys(("loss", "grad_norm", "reward", metric)):
        broken = [row["t"] for row in rows if name in row and finite_number(row[name]) is None]
        if broken:
            yield _warning(f"{name} is not a number at step {broken[0]}.", name)
    few = max(1, min(10, len(rows) // 5))
    entropy, reward = read_column(rows, "entropy"), read_column(rows, "reward")
    # collapsed
    if entropy:
        start, end = fmean(entropy[:few]), fmean(entropy[-few:])
        if end < 0.05 * start:
            fell = f"from {start:.3g} to {end:.3g} nats"
            yield _warning(f"Entropy has collapsed {fell}: the policy hardly explores.", "entropy")
    if len(reward) >= 10:
        means = [fmean(reward[k : k + few]) for k in range(len(reward) - few + 1)]
        best, last = max(means), means[-1]
        if best - last > 0.3 * max(abs(mean) for mean in means):
            yield _warning(f"Reward fell from {best:.2f} to {last:.2f}.", "reward")


def _of_updates(rows: list[Row]) -> Iterator[Row]:
    """Engine against trainer, and updates that were left out."""
    gaps = [row for row in rows if (finite_number(row.get("logp_gap")) or 0) > 0.05]
    if gaps:
        t, most = gaps[0]["t"], max(read_column(gaps, "logp_gap"))
        text = f"Engine and trainer differ by up to {most:.2g} nat a token, from step {t} on."
        yield _warning(text, "logp_gap")
    skipped = [row for row in rows if row.get("skipped_updates")]
    if skipped:
        n = sum(read_column(skipped, "skipped_updates"))
        text = f"{n:.0f} optimizer steps were skipped: loss or gradient were not finite."
        yield _warning(text, "skipped_updates")


def read_column(rows: Sequence[Row], name: str) -> list[float]:
    values = [finite_number(row.get(name)) for row in rows]
    return [x for x in values if x is not None]
