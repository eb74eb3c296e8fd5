"""The first screen of a page: did it learn, which instruction won and why, what did it cost, what
went wrong."""

import time
from collections.abc import Sequence
from statistics import fmean

from journal.rows import count_costs
from journal.silence import ALL_ALIKE, NO_ANSWER, NOT_FOLLOWED, SOLVED, Silence
from journal.summary import count_seconds, measure_speed, trace_lineage
from page.read import Row, Run, number

# panel that shows a sign
PANELS = {
    NO_ANSWER: "answered", ALL_ALIKE: "zero_variance_groups", SOLVED: "zero_variance_groups", NOT_FOLLOWED: "reward",
}  # fmt: skip
RUNNING = 600.0  # seconds without a line after which an unfinished run counts as stopped


def verdict(run: Run, tree: Row) -> Row:
    """The answers of the first screen."""
    return {
        "status": status(run),
        "learned": learned(run),
        "winner": winner(run, tree),
        "cost": cost(run),
        "vain": tell_vain(run),
        "warnings": warnings(run),
    }


def status(run: Run) -> Row:
    """Returns {"state", "t", "T", "written"}; state: finished, running, or stopped (no line for ten
    minutes)."""
    state = (
        "finished"
        if run.summary
        else "running"
        if time.time() - run.written < RUNNING
        else "stopped"
    )
    return {"state": state, "t": run.t, "T": run.T, "written": run.written}


def learned(run: Run) -> Row:
    """What was gained: the final table with its sentence, or for an unfinished run its rewards."""
    rewards = column(run.steps, "reward")
    few = max(1, min(5, len(rewards) // 2))
    return {
        "table": run.summary.get("held_out", {}),
        "questions": run.summary.get("questions"),
        "sentence": run.summary.get("conclusion", ""),
        "few": few,
        "rewards": [fmean(rewards[:few]), fmean(rewards[-few:])] if rewards else None,
    }


def winner(run: Run, tree: Row) -> Row | None:
    """The winning instruction, or the one that leads now, and what speaks for it; None without
    any."""
    by_id = {I["id"]: I for I in tree["instructions"]}
    last = [row for row in run.steps if row.get("w")][-1:]
    id = run.summary.get("generations", [last[0]["best"] if last else min(by_id, default=None)])[-1]
    if id not in by_id:
        return None
    w = {int(j): value for j, value in last[0]["w"].items()} if last else {}
    others = sorted(((value, j) for j, value in w.items() if j != id), reverse=True)
    return {
        "id": id,
        "lineage": trace_lineage(
            {j: I["parents"][0] if I["parents"] else None for j, I in by_id.items()}, id
        ),
        "w": w.get(id),
        "since": by_id[id]["born"],
        "second": {"id": others[0][1], "w": others[0][0]} if others else None,
        "ever": len(by_id),
        "refused": len(tree["refused"]),
    }


def cost(run: Run) -> Row:
    """What the run has spent: calls and tokens, rollouts, seconds by phase, and how fast it was."""
    calls = [row["call"] for row in run.reflections if "call" in row]
    costs = count_costs(run.steps, run.reflections, run.events, run.tools)
    total = run.summary.get("seconds") or max(column(run.steps, "time/total"), default=0.0)
    phases = count_seconds(run.steps)
    phases["other"] = max(0.0, total - sum(phases.values()))
    failed = {name for row in run.steps for name in row if name.endswith("/faults")}
    return {
        "calls": costs["optimizer_calls"],
        "optimizer": run.config.get("optimizer_model"),
        **{name: sum(column(calls, name)) for name in ("prompt_tokens", "completion_tokens")},
        "optimizer_seconds": costs["optimizer_seconds"],
        "training": costs["training_rollouts"],
        "verification": costs["verification_rollouts"],
        "tool_calls": costs["tool_calls"],
        "faults": sum(max(column(run.steps, name), default=0) for name in failed),
        "seconds": total,
        "phases": phases,
        "speed": measure_speed(run.steps),
    }


# ---- what went wrong


def tell_vain(run: Run) -> str:
    """Returns a sentence if instructions should have changed, and did not."""
    mode = run.config.get("mode", "static")
    if mode == "static" or run.summary.get("evolved") is not False:
        return ""
    return f"No evolution changed the instructions: this is no result of --mode {mode}."


def warnings(run: Run) -> list[Row]:
    """What a person who knows the failures of such runs would point at: {"text", "panel", "t"}."""
    rows, out = [row for row in run.steps if row["t"] > 0], list[Row]()

    def warn(text: str, panel: str = "", t: int | None = None) -> None:
        out.append({"text": text, "panel": panel, "t": t})

    if not rows:
        warn("No step has been measured yet.")
        return out
    for name in dict.fromkeys(("loss", "grad_norm", "reward", run.metrics[0])):
        if broken := [row["t"] for row in rows if name in row and number(row[name]) is None]:
            warn(f"{name} is not a number at step {broken[0]}.", name, broken[0])
    few = max(1, min(10, len(rows) // 5))
    entropy, reward = column(rows, "entropy"), column(rows, "reward")
    if entropy and (end := fmean(entropy[-few:])) < 0.05 * (start := fmean(entropy[:few])):
        warn(
            f"Entropy has collapsed from {start:.3g} to {end:.3g} nats: the policy hardly explores.",
            "entropy",
        )
    silence, lasted = Silence(), dict[str, tuple[int, str]]()
    for row in run.steps:
        silence.hear(row)
        for sign, line in silence.lasting():
            lasted[sign] = row["t"], line.partition("  ")[2]
    for sign, (t, text) in lasted.items():
        until = "To the end" if t == rows[-1]["t"] else f"Up to step {t}"
        warn(f"{until}, {text}", PANELS.get(sign, ""))
    if vain := tell_vain(run):
        warn(vain, "tree")
    if gaps := [row for row in rows if (number(row.get("logp_gap")) or 0) > 0.05]:
        t, gap = gaps[0]["t"], max(column(gaps, "logp_gap"))
        warn(
            f"Engine and trainer differ by up to {gap:.2g} nat a token, from step {t} on.",
            "logp_gap",
            t,
        )
    if skipped := [row["t"] for row in rows if row.get("skipped_updates")]:
        n = sum(column(rows, "skipped_updates"))
        warn(
            f"{n:.0f} optimizer steps were skipped: loss or gradient were not finite.",
            "skipped_updates",
            skipped[0],
        )
    if len(reward) >= 10 and max(means := _windows(reward, few)) - means[-1] > 0.3 * max(
        map(abs, means)
    ):
        warn(f"Reward fell from {max(means):.2f} to {means[-1]:.2f}.", "reward")
    return out


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [x for row in rows if (x := number(row.get(name))) is not None]


def _windows(x: Sequence[float], n: int) -> list[float]:
    """The means of n neighbours."""
    return [fmean(x[k : k + n]) for k in range(max(1, len(x) - n + 1))]
