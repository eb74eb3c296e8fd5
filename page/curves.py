"""The curves of a page: every number of metrics.jsonl over the steps; runs that differ by their
seed are one group."""

from page.read import Run, finite_number
from plumbing.files import Row
from run import CHANGEABLE

SEED = CHANGEABLE | {"seed", "id", "content"}  # by these two runs are one arm
ONE_ARM = SEED | {"commit"}


def collect_curves(run: Run) -> Row:
    """Returns {"t": [...], "series": {name: [...]}} with None where a step has no such number.

    The scores at the run's end, which are in summary.json alone, are those of the last step.
    """
    series = {}
    for name in sorted({name for row in run.steps for name in row} - {"t"}):
        values = [finite_number(row.get(name)) for row in run.steps]
        if any(value is not None for value in values):
            series[name] = values
    for name, value in run.summary.get("end", {}).items():
        if f"test/{name}" in series:
            series[f"test/{name}"][-1] = value
    return {"t": [row["t"] for row in run.steps], "series": series}


def group_runs(runs: list[Run]) -> list[Row]:
    """Returns [{"label", "runs", "unlike"}]: runs that differ by seed and commit alone; `runs` are
    places in the list.

    unlike: what tells them from the first run, by name.
    """
    # places of the runs of each group
    members: list[list[int]] = []
    for k, run in enumerate(runs):
        for group in members:
            if run.config and not find_unlike(runs[group[0]], run) - ONE_ARM:
                group.append(k)
                break
        else:
            members.append([k])

    # what each is called, and what tells it from the first run
    out = []
    for group in members:
        unlike = set[str]()
        for k in group:
            unlike |= find_unlike(runs[0], runs[k]) - SEED
        seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
        out.append({"label": runs[group[0]].name + seeds, "runs": group, "unlike": sorted(unlike)})
    return out


def find_unlike(one: Run, other: Run) -> set[str]:
    """Returns the names of the settings that differ between two runs."""
    a, b = one.config, other.config
    return {name for name in a | b if a.get(name) != b.get(name)}
