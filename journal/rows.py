"""The rows that a run writes, a function each: what happened in, the dict of a line out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from journal.summary import many
from plumbing.files import Row
from population import Candidate, Instruction, Population, mean_rewards
from tasks import Question, Task, Trajectory
from tasks.metrics import average_by_source, compute_metrics
from tasks.sampling import STORED, space_evenly
from tasks.tools import Failure, Tool

# ---- metrics.jsonl


def make_step_row(task: Task, taus: Sequence[Trajectory], G: int, names: Sequence[str] = ()) -> Row:
    """Returns what the rewarded rollouts of a step show; `names`: of the task's metrics, if they
    are known."""
    groups = [taus[k : k + G] for k in range(0, len(taus), G)]
    alike = [group for group in groups if len({tau.reward for tau in group}) == 1]
    turns = max(1, sum(len(tau.turns) for tau in taus))

    # means, by source too, then how tools were used
    row = {
        **average_by_source(taus, [{"reward": tau.reward} for tau in taus]),
        **average_by_source(taus, compute_metrics(task, taus, names)),
    }
    for tool in task.tools:
        row[tool.plural] = fmean(tau.served(tool.tag) for tau in taus)
    for tool in task.tools:
        row |= count_useless(taus, tool)
    return row | {
        "answered": fmean(tau.stop == "answer" for tau in taus),
        "failed": fmean(tau.failed for tau in taus),
        "valid_actions": 1 - sum(tau.invalid for tau in taus) / turns,
        "prompt_tokens": fmean(tau.prompt_tokens for tau in taus),
        "response_tokens": fmean(sum(tau.mask) for tau in taus),
        "context_tokens": fmean(len(tau.ids) for tau in taus),
        "zero_variance_groups": len(alike) / len(groups),
        "all_right_groups": sum(not any(tau.failed for tau in g) for g in alike) / len(groups),
        "all_wrong_groups": sum(all(tau.failed for tau in g) for g in alike) / len(groups),
        "n": {str(j): k for j, k in sorted(Counter(tau.instruction for tau in taus).items())},
        "r_bar": {str(j): round(r, 4) for j, r in sorted(mean_rewards(taus).items())},
    }


def count_useless(taus: Sequence[Trajectory], tool: Tool) -> Row:
    """Returns the shares of a tool's results that hold nothing, and that say why a call failed, if
    one did."""
    results = []
    for tau in taus:
        for turn in tau.turns:
            if turn.tool == tool.tag and turn.result is not None:
                results.append(turn.result)
    if not results:
        return {}

    row = {f"{tool.plural}/empty": fmean(not any(result) for result in results)}
    failed = fmean(isinstance(result, Failure) for result in results)
    if failed:
        row[f"{tool.plural}/failed"] = failed
    return row


def make_weights_row(P: Population) -> Row:
    """Returns the weights of a population, and by which instruction it would be evaluated."""
    best, p = P.best(), P.probabilities()
    return {
        "P": len(P),
        "best": best.id,
        "w_best": best.w,
        "w": {str(I.id): round(I.w, 4) for I in P.active},
        "p": {str(id): round(float(x), 4) for id, x in zip(P.ids, p, strict=True)},
    }


def make_evaluation_row(task: Task, taus: Sequence[Trajectory], scores: Sequence[Row]) -> Row:
    """Returns the means of the task's metrics (`scores`, of each trajectory), by source too, and of
    tool calls."""
    row: Row = average_by_source(taus, scores)
    for tool in task.tools:
        row[tool.plural] = fmean(tau.served(tool.tag) for tau in taus)
    return row


# ---- population.jsonl


def make_event_row(t: int, event: str, P: Population, text: str) -> Row:
    """Returns what happened to the population, with the population."""
    return {"t": t, "event": event, "text": text, "P": [asdict(I) for I in P.active]}


def make_start_row(P: Population) -> Row:
    text = f"|P| {len(P)}: the first instruction"
    if len(P) > 1:
        text += f" and {many(len(P) - 1, 'variation')}"
    return make_event_row(0, "start", P, text)


def make_prune_row(t: int, P: Population, pruned: Sequence[Instruction]) -> Row:
    names = []
    for I in pruned:
        why = f"w {I.w:.2f}" if I.rewards else "no question drew it"
        names.append(f"#{I.id} ({why})")
    text = f"|P| {len(P) + len(pruned)} -> {len(P)}: pruned {', '.join(names) or 'none'}"
    return make_event_row(t, "prune", P, text)


def make_evolution_row(t: int, P: Population, outcome: str) -> Row:
    """Returns an evolution and its outcome in a line."""
    return make_event_row(t, "evolve", P, outcome)


def describe_evolution(
    P_parent: Sequence[Instruction], P_new: Sequence[Candidate], left: int, reason: str
) -> str:
    """Returns the outcome of Alg.1 L17 to L23; `left`: places that stay empty, `reason`: why."""
    if not P_new:
        return f"no new instruction: {reason}; P stays as it is"
    parents = ", ".join(f"#{I.id}" for I in P_parent)
    text = f"parent {parents} ({P_new[-1].r_parent:.2f} on D_B); {len(P_new)} joined"
    if left:
        text += f"; {many(left, 'place')} left: {reason}"
    return text


# ---- reflections.jsonl


def make_verification_row(
    t: int,
    round: int,
    D_B: Sequence[Question],
    tested: Sequence[Candidate],
    joining: Sequence[Candidate],
) -> Row:
    """Returns the rewards of revisions and of their parent on D_B, and who joins."""
    verified = []
    for c in tested:
        verified.append({"text": c.text, "r": c.r, "r_parent": c.r_parent, "joined": c in joining})
    return {
        "t": t,
        "round": round,
        "parent": tested[0].parent,
        "D_B": [q.id for q in D_B],
        "rollouts": (1 + len(tested)) * len(D_B),
        "verified": verified,
    }


def sample_verification(parent: Instruction, taus: Sequence[Trajectory]) -> list[Row]:
    """Returns some of a verification's trajectories: the same questions under a parent and its
    revisions.

    `candidate` is 0 for the parent and k for the k-th accepted revision of the round.
    """
    ids = list(dict.fromkeys(tau.question.id for tau in taus))
    chosen = {ids[k] for k in space_evenly(len(ids), STORED)}
    return [
        tau.record() | {"parent": parent.id, "candidate": k // len(ids)}
        for k, tau in enumerate(taus)
        if tau.question.id in chosen
    ]


# ---- summary.json


def count_costs(
    steps: Sequence[Row], reflections: Sequence[Row], events: Sequence[Row], tools: Sequence[str]
) -> Row:
    """Returns what evolution cost in addition to training (App. C), from the rows of the three
    .jsonl files."""
    rollouts, tool_calls = 0, 0.0
    for row in steps:
        if "n" in row:
            n = sum(row["n"].values())
            rollouts += n
            for tool in tools:
                tool_calls += row[tool] * n
    calls = [row["call"] for row in reflections if "call" in row]
    evolutions = [row for row in events if row["event"] == "evolve"]
    joined = [any(I["born"] == row["t"] for I in row["P"]) for row in evolutions]
    return {
        "training_rollouts": rollouts,
        "verification_rollouts": sum(row.get("rollouts", 0) for row in reflections),
        "optimizer_calls": len(calls),
        "optimizer_tokens": sum(x["prompt_tokens"] + x["completion_tokens"] for x in calls),
        "optimizer_seconds": sum((x["seconds"] for x in calls), 0.0),
        "tool_calls": round(tool_calls),
        "evolutions": len(evolutions),
        "evolutions_in_vain": joined.count(False),  # that left P as it was
    }
