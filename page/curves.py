"""The curves of a page: every number of metrics.jsonl over the steps; runs that differ by their seed are one group."""

from page.read import Row, Run, number

# Settings that say where a run ran and what it kept, not what it is.
ASIDE = {
    "seed", "out", "resume", "device", "tracker", "retriever", "keep", "save_every", "engine", "vllm", "dry_run",
    "patience", "micro_tokens", "max_rows", "id", "commit",
}  # fmt: skip


def curves(run: Run) -> Row:
    """Returns {"t": [...], "series": {name: [...]}} with None where a step has no such number.

    The scores at the run's end, which are in summary.json alone, are those of the last step.
    """
    names = sorted({name for row in run.steps for name, value in row.items() if number(value) is not None} - {"t"})
    series = {name: [number(row.get(name)) for row in run.steps] for name in names}
    for name, value in run.summary.get("end", {}).items():
        if f"test/{name}" in series:
            series[f"test/{name}"][-1] = value
    return {"t": [row["t"] for row in run.steps], "series": series}


def groups(runs: list[Run]) -> list[Row]:
    """Returns [{"label", "runs"}]: runs with the same settings but for the seed; `runs` are places in the list."""
    members: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        settings = {name: value for name, value in run.config.items() if name not in ASIDE}
        members.setdefault(repr(sorted(settings.items())) if settings else run.name, []).append(k)
    out = []
    for places in members.values():
        seeds = f" ({len(places)} seeds)" if len(places) > 1 else ""
        out.append({"label": runs[places[0]].name + seeds, "runs": places})
    return out
