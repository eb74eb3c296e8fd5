"""The paper's tables and figures in the world: runs what is missing, writes results/ from the committed rows.

    make paper                                                            # everything, seeds 0 to 4
    python -m extras.campaigns.paper --arms static --seeds 101 102 --extra "--lr 5e-4" --results runs/tuning

A finished run leaves a row in results/rows.jsonl and is not run again: stop the campaign whenever you like and repeat
the command. The same commit and seed give the same row on the same machine. Seeds 0 to 4 are reported, tuning takes 100
and up; but the world itself was changed after seeds 0 to 4 of an earlier one had been seen (`provenance`), so inspo and
static play 5 to 9, too.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from config import HERE, PRESETS
from evaluation.statistics import between_seeds, holm, interval, over_seeds
from extras.campaigns.arms import ARMS, Campaign, Row, clock, origin
from extras.campaigns.claims import CLAIMS, CLOSED, GIVEN, UNTRAINED, Claim, Rows, Verdict, verdict
from extras.campaigns.seeds import fisher, share, two_valued
from journal.directory import read_jsonl
from page.read import many
from plumbing.faults import Fault, one_line
from tasks.questions import load_questions

SEEDS, FRESH = range(5), range(5, 10)  # FRESH: not seen when the world was closed to the static arm
FRESH_ARMS = ("inspo", "static")  # that play these, too
TABLE_1 = {  # method -> where its row comes from
    "direct": "direct", "sft": "sft", "grpo": "grpo", "ircot": "ircot", "rag": "rag", "sft_reject": "sft_reject",
    "search_o1": "search_o1", "search_r1": "static", "inspo": "inspo",
}  # fmt: skip


def complete(campaign: Campaign, arms: list[str], seeds: list[int], at_once: int) -> list[str]:
    """Runs arms that have no row yet, whole seeds first; returns why some failed: the others go on."""
    jobs = [(arm, seeds[: k + 1]) for k in range(len(seeds)) for arm in arms]
    if left := {(arm, some[-1]) for arm, some in jobs} - set(campaign.done()):
        print(f"{len(left)} runs, {at_once} at a time, about 4 minutes each, into {campaign.runs}", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        return [fault for fault in pool.map(lambda job: attempt(campaign, *job), jobs) if fault]


def attempt(campaign: Campaign, arm: str, seeds: list[int]) -> str:
    """Runs an arm with the last of the seeds, unless it has a row; returns why it failed, or ""."""
    try:
        if campaign.find(arm, seeds[-1]):
            return ""
        row = transfer(campaign, seeds) if arm == "transfer" else campaign.row(arm, seeds[-1])
    except Fault as fault:
        print(fault, flush=True)
        return str(fault)
    em = json.dumps(row["em"]) if arm == "transfer" else f"{row['em']:.3f}"
    print(f"{arm:16}seed {seeds[-1]}  EM {em}", flush=True)
    return ""


def untrained(campaign: Campaign, method: str) -> Row:
    """Returns the row of a method that does not train, played greedily by the world's first policy."""
    if found := campaign.find(method, 0):
        return found
    from extras.table1 import main as table1

    out = campaign.runs / f"evaluation-{method}"
    table1(["world", "--method", method, "--data", "world", "--out", str(out)])
    part = json.loads((out / "summary.json").read_text())["benchmarks"]["world"]
    row = {"arm": method, "seed": 0, **origin(), "em": part["em"]["mean"]}
    row |= {"questions": part["questions"], "searches": part["searches"], "gold_recall": part["gold_recall"]}
    return campaign.keep(row)


def transfer(campaign: Campaign, seeds: list[int]) -> Row:
    """Returns EM of the last seed's policies, inspo's and static's, under I_star of all these seeds.

    `em[arm][k]`: on the held-out questions, greedy, under the k-th seed's I_star.
    """
    from extras.campaigns.player import player

    test = load_questions(PRESETS["world"]["test"])
    texts = [campaign.row("inspo", seed)["I_star"] for seed in seeds]
    em = {}
    for arm in ("inspo", "static"):
        with player(str(campaign.run(arm, seeds[-1]) / "policy")) as play:
            em[arm] = [round(float(play([text] * len(test), test, 0.0).mean()), 4) for text in texts]
    row = {"arm": "transfer", "seed": seeds[-1], "seeds": seeds, **origin(), "em": em}
    return campaign.keep(row)


def read(path: Path) -> Rows:
    """Returns the rows by arm, in the order of their seeds."""
    rows: dict[str, list[Row]] = {}
    for row in sorted(read_jsonl(path), key=lambda row: row["seed"]):
        rows.setdefault(row["arm"], []).append(row)
    return rows


def parts(rows: Rows) -> tuple[Rows, Rows]:
    """Returns the rows that the campaign tests, and those of FRESH seeds, which it reads alone: {} if there are none.

    Where a campaign has no other seeds, it tests these.
    """
    seen, fresh = (
        {arm: [row for row in rows.get(arm, ()) if (row["seed"] in FRESH) == new] for arm in FRESH_ARMS}
        for new in (False, True)
    )
    if not all(seen.values()):
        return rows, {}
    return {**rows, **seen}, fresh if all(fresh.values()) else {}


def told(claim: Claim, rows: Rows) -> Verdict:
    """Returns what the rows say of a claim: the tested ones, or those of FRESH seeds if only they keep its curve."""
    tested, fresh = parts(rows)
    arms = (claim.a, *claim.b) if claim.instead else ()
    kept = all(claim.curve in row["curves"] for arm in arms for row in tested.get(arm, ()))
    if kept or not fresh:
        return verdict(claim, tested)
    found = verdict(claim, fresh)
    return found._replace(why=f"on seeds {FRESH[0]} to {FRESH[-1]}, whose rows alone keep {claim.curve}: {found.why}")


def line_of(arm: str, mine: Sequence[Row]) -> str:
    """Returns an arm in one line, for the terminal."""
    em = " ".join(f"{row['em']:.2f}" for row in mine)
    what = ARMS[arm].what if arm in ARMS else "the first policy, untrained"
    return f"{arm:16}EM {em:25}{np.mean([row['searches'] for row in mine]):.1f} searches   {what}"


def table_1(rows: Rows, published: Row) -> list[str]:
    """Returns Table 1: the world's figures beside the paper's averages."""
    lines = ["| | EM in the world, by seed | mean, 95 % | searches | the paper's average, 3B | 7B | real models here |"]
    lines.append("|---|---|---|---|---|---|---|")
    for method, arm in TABLE_1.items():
        mine = rows.get(arm, [])
        em = [row["em"] for row in mine]
        n = mine[0]["questions"] if mine else 0
        mean = over_seeds(em) if len(em) > 1 else interval(np.repeat([1.0, 0.0], split(em[0], n))) if em else None
        level = f"{mean}" if mean else "not run yet"
        level += "" if len(em) != 1 else f", over {n} questions"
        searches = f"{np.mean([row['searches'] for row in mine]):.2f}" if mine else ""
        paper = [f"{published['paper'][size][method][-1]:.3f}" for size in ("qwen2.5-3b", "qwen2.5-7b")]
        cells = [method, ", ".join(f"{x:.2f}" for x in em), level, searches, *paper, "not run here"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def published_table(published: Row) -> list[str]:
    """Returns exact match of real models by benchmark: the paper's, public reproductions', and ours."""
    columns = published["paper"]["columns"]
    lines = [f"| | {' | '.join(columns)} | source |", "|---" * (len(columns) + 2) + "|"]
    for size in ("qwen2.5-3b", "qwen2.5-7b"):
        for method, row in published["paper"][size].items():
            lines.append(f"| {size}, {method} | {' | '.join(f'{x:.3f}' for x in row)} | the paper |")
        lines.append(f"| {size}, all methods | {' | '.join(['not run here'] * len(columns))} | this project |")
    for run in published["reproductions"]:
        scores = [run[c] for c in columns[:-1] if c in run]
        cells = [f"{run[c]:.3f}" if c in run else "" for c in columns[:-1]]
        cells.append(f"{np.mean(scores):.3f}" if len(scores) == len(columns) - 1 else "")
        lines.append(f"| {run['what']} | {' | '.join(cells)} | {run['source']} |")
    return lines


def split(em: float, n: int) -> list[int]:
    return [round(em * n), n - round(em * n)]


def arms_table(rows: Rows) -> list[str]:
    """Returns every trained arm against inspo: Welch's test, Fisher's if two-valued; Holm's p over all of them."""
    unit, seconds = clock([row for arm in ARMS for row in rows.get(arm, ())])
    lines = [f"| | EM, by seed | got there | mean, 95 % | difference from inspo, 95 % | Holm's p | visible | searches"
             f" | verification | {unit}minutes |", "|---" * 10 + "|"]  # fmt: skip
    em = {arm: [row["em"] for row in rows[arm]] for arm in ARMS if rows.get(arm)}
    counted = {arm for arm in em if two_valued(em[arm]) or two_valued(em.get("inspo", []))}
    others = [arm for arm in em if arm != "inspo" and "inspo" in em]
    differences = {arm: between_seeds(em[arm], em["inspo"]) for arm in others if arm not in counted}
    p = {arm: fisher(share(em[arm]), share(em["inspo"])) if arm in counted else differences[arm].p for arm in others}
    family = dict(zip(p, holm(list(p.values())), strict=True))
    for arm, mine in em.items():
        cells = [f"{arm}: {ARMS[arm].what}", ", ".join(f"{x:.2f}" for x in mine), f"{share(mine)}"]
        cells += ["" if two_valued(mine) else f"{over_seeds(mine)}"]
        cells += [f"{differences[arm].interval:+}" if arm in differences else ""]
        told = arm in family and not np.isnan(family[arm])
        cells += [(f"{family[arm]:.3f}" if family[arm] >= 0.001 else f"{family[arm]:.0e}") if told else ""]
        shown = arm in differences and np.isfinite(differences[arm].visible)  # not of one run an arm
        cells += [f"{differences[arm].visible:.3f}" if shown else ""]
        mean = {key: float(np.mean([row[key] for row in rows[arm]])) for key in ("searches", "overhead")}
        cells += [f"{mean['searches']:.2f}", f"{100 * mean['overhead']:.0f} %"]
        cells.append(f"{np.mean([seconds(row) for row in rows[arm]]) / 60:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def at_equal(rows: Rows, column: int) -> list[str]:
    """Returns EM of the arms at the smallest budget any run of theirs ends with, interpolated between evaluations.

    `column` of `evals`: 0 steps, 3 rollouts (verification counted), 4 seconds: of CPU time, if it was counted of all
    runs, which then grows from evaluation to evaluation as the clock's.
    """
    arms = [arm for arm in ("inspo", "static", "frozen", "guessing", "unverified") if rows.get(arm)]
    unit, seconds = clock([row for arm in arms for row in rows[arm]])

    def spent(row: Row) -> list[float]:
        values = [e[column] for e in row["evals"]]
        return [x * seconds(row) / values[-1] for x in values] if unit and column == 4 else values

    budget = min(spent(row)[-1] for arm in arms for row in rows[arm])
    cells = []
    for arm in arms:
        em = [np.interp(budget, spent(row), [e[1] for e in row["evals"]]) for row in rows[arm]]
        if two_valued([float(x) for x in em]):
            cells.append(f"{arm} got there {share([float(x) for x in em])}")
            continue
        found = over_seeds([float(x) for x in em])
        half = found.high - found.mean
        cells.append(f"{arm} {found.mean:.3f}" + (f" ± {half:.3f}" if np.isfinite(half) else ""))
    return [f"{budget:,.0f}", "; ".join(cells)]


def transfer_table(rows: Rows) -> list[str]:
    """Returns EM under I_star of each seed: of the first policy, and of the policies that this seed or a later made."""
    mine = rows["transfer"]
    seeds = [row["seed"] for row in mine]
    lines = [f"| policy | {' | '.join(f'I_star of seed {s}' for s in seeds)} |", "|---" * (len(seeds) + 1) + "|"]
    first = {row["seed"]: row["held_out"].get("first policy, I_star") for row in rows.get("inspo", [])}
    lines.append(f"| first | {' | '.join('' if first.get(s) is None else f'{first[s]:.2f}' for s in seeds)} |")
    for arm in ("inspo", "static"):
        for row in mine:
            em = dict(zip(row["seeds"], row["em"][arm], strict=True))
            cells = " | ".join(f"{em[s]:.2f}" if s in em else "" for s in seeds)
            lines.append(f"| {arm}, seed {row['seed']} | {cells} |")
    own = [row["em"]["inspo"][-1] for row in mine]
    other = [x for row in mine for x in row["em"]["inspo"][:-1]]
    if other:
        lines.append(f"\nUnder its own policy {np.mean(own):.3f}, under those of later seeds {np.mean(other):.3f} "
                     f"(lowest {min(other):.2f}).")  # fmt: skip
    return lines


def closing(second_hand: Rows, rows: Rows) -> str:
    """Returns what the world gave before and after it was closed to the static arm."""
    before = {arm: [row for row in mine if row.get("world") == "open"] for arm, mine in second_hand.items()}
    em = [[[row["em"] for row in part.get(arm, ())] for arm in FRESH_ARMS] for part in (before, *parts(rows))]
    if not all((*em[0], *em[1])):
        return ""
    gain = [f"{np.mean(inspo) - np.mean(static):+.2f}" for inspo, static in em if inspo and static]
    return (
        "The world was closed to the static arm after its first seeds had been seen: it had"
        f" {', '.join(f'{x:.2f}' for x in em[0][1])} on seeds {SEEDS[0]} to {SEEDS[-1]}. INSPO's gain over it was"
        f" {gain[0]} before that and is {gain[1]} in the campaign's rows of these seeds"
        + (f", {gain[2]} on seeds {FRESH[0]} to {FRESH[-1]}, which nobody had seen." if len(gain) > 2 else ".")
    )


def replication(fresh: Rows) -> list[str]:
    """Returns what the FRESH seeds alone say of the claims that inspo and static decide."""
    pair = Claim("Table 1", "INSPO has a higher EM than Search-R1", "inspo", ("static",), given=CLOSED)
    lines = ["| | the paper says | on these seeds | because |", "|---|---|---|---|"]
    for claim in (pair, *(claim for claim in CLAIMS if {claim.a, *claim.b} <= {*FRESH_ARMS})):
        found = verdict(claim, fresh)
        lines.append(f"| {claim.where} | {claim.says} | {found} | {found.why} |")
    em = {arm: ", ".join(f"{row['em']:.2f}" for row in fresh[arm]) for arm in FRESH_ARMS}
    return [f"EM: {'; '.join(f'{arm} {by_seed}' for arm, by_seed in em.items())}.", "", *lines, "", canary_line(fresh)]


def canary_line(rows: Rows) -> str:
    """Returns how the policies of INSPO and of static do under one good instruction that no run is given."""
    name = "trained policy, canary"
    em = {a: [r["held_out"][name] for r in rows.get(a, ()) if name in r["held_out"]] for a in ("inspo", "static")}
    if min(map(len, em.values())) < 2:
        return ""
    found = between_seeds(em["inspo"], em["static"])
    told = (
        ". They differ."
        if found.p < 0.05
        else ": not told apart. So nothing here shows that INSPO trains a better policy; what its gain takes is an"
        " instruction and a policy that match, and static never meets such an instruction."
    )
    means = [float(np.mean(x)) for x in em.values()]
    return (
        f"Under one good instruction that no run is given, INSPO's policies have {means[0]:.3f} and static's"
        f" {means[1]:.3f} ({found.interval:+}, p {found.p:.2f}){told}"
    )


def provenance(rows: Rows, second_hand: Rows) -> list[str]:
    """Returns where the rows are from: what is lost, who drew the tokens, which stand for two arms, what others saw."""
    every = [row for mine in rows.values() for row in mine]
    samplers = Counter(row.get("sampler", "not named") for row in every)
    cpu = sum(row.get("cpu_seconds") is not None for row in every)
    lost = sum(bool(row.get("commit_lost")) for row in every)
    commits = ", ".join(sorted({str(row["commit"]) for row in every}))
    by_sampler = "; ".join(f"{name}: {many(n, 'row')}" for name, n in samplers.most_common())
    out = [
        f"- Commits: {commits}; {many(lost, 'row') if lost else 'no row'} of a commit that is not kept.",
        f"- Sampler: {by_sampler}. Rows of an arm may mix them.",
        f"- CPU seconds were counted of {cpu} of {len(every)} rows; the others have the clock's.",
        f"- Machine: {'; '.join(sorted({row['machine'] for row in every}))}.",
        "- static's rows are also search_r1 of Table 1; inspo's are also N_parent 1, tau_s 0.2 and 'verified'.",
    ]
    if said := closing(second_hand, rows):
        out.append(f"- {said} The figures before it are from LOG.md (second_hand.jsonl): no row of them is kept.")
    told = []
    for arm in ARMS:
        again = [row for row in second_hand.get(arm, ()) if row["world"] == "closed"]
        if again:
            em = [row["em"] for row in again]
            whole = share([*[row["em"] for row in rows.get(arm, ())], *em])
            told.append(f"{arm} {', '.join(f'{x:.3f}' for x in em)} (with the rows here {whole} got there)")
    if told:
        out.append(
            "- Reruns by other hands, seeds 11 and 12, of which only EM was told (second_hand.jsonl): "
            + "; ".join(told) + "."
        )  # fmt: skip
    return out


def page(rows: Rows, pictures: list[str], published: Row, second_hand: Rows | None = None) -> str:
    """Returns results/paper.md."""
    tested, fresh = parts(rows)
    every = [row for mine in rows.values() for row in mine]
    minutes = sum(row.get("minutes", 0) for row in every)
    unit, _ = clock([row for arm in ARMS for row in rows.get(arm, ())])
    whose = "the CPU's" if unit else "of runs that shared the machine"
    out = [
        "# The paper's results in the small world",
        "",
        f"Written by `make paper` from rows.jsonl: {many(len(every), 'row')}, {many(round(minutes), 'minute')} of one "
        "thread. The world is [built so that it takes both](../world/README.md): these figures show the mechanism and "
        f"are no evidence for the claims on real models. Seconds are {whose}. Whether evolving along pays is asked "
        "in [another world](graded.md); whether a population makes a policy robust to wording, "
        "[in this one](wording.md).",
        "",
        "## Claims",
        "",
    ]
    said = [told(claim, rows) for claim in CLAIMS]
    planned = len(ARMS) * len(SEEDS) + len(FRESH_ARMS) * len(FRESH)
    runs = sum(len(rows.get(arm, [])) for arm in ARMS)
    if runs < planned:
        out += [f"The campaign is not complete: {runs} of {planned} runs are in.", ""]
    out += [tally(rows), ""]
    out += ["| | the paper says | in the world | because |", "|---|---|---|---|"]
    for claim, found in zip(CLAIMS, said, strict=True):
        out.append(f"| {claim.where} | {claim.says} | {found} | {found.why} |")
    if tested.get("inspo"):
        cost = float(np.mean([row["overhead"] for row in tested["inspo"]]))
        why = f"{100 * cost:.1f} % here, which follows from the sizes"
        out.append(f"| App. C | verification is 1.4 to 7 % of the inferences | {GIVEN} | {why} |")
    if line := canary_line(tested):
        out += ["", line]
    if fresh:
        out += ["", f"## Seeds {FRESH[0]} to {FRESH[-1]}, not seen when the world was closed", "", *replication(fresh)]
    out += ["", "## Where the rows are from", "", *provenance(rows, second_hand or {})]
    out += ["", "## Table 1", "", *table_1(tested, published)]
    if any(tested.get(arm) for arm in ARMS):
        out += ["", "## Every arm", "", *arms_table(tested), ""]
        out.append(
            "(*got there*: runs above EM 0.5, with Clopper and Pearson's 95 % interval; none ends near it. Where some "
            "did and others did not, a mean says nothing of either, and p is Fisher's; else differences and p by "
            "Welch's t test over seeds; *visible*: the true difference that it finds at 5 % in 80 % of the cases; "
            "verification as a share of the training rollouts.)"
        )
        if tested.get("inspo"):
            out += ["", "## At equal cost", "", "| equal | budget | EM |", "|---|---|---|"]
            for name, column in (("steps", 0), ("rollouts, verification counted", 3), (f"{unit}seconds", 4)):
                out.append(f"| {name} | {' | '.join(at_equal(tested, column))} |")
    if tested.get("transfer"):
        out += ["", "## Is I_star portable?", "", *transfer_table(tested)]
    out += ["", *[f"![{name}]({name})" for name in pictures], ""]
    out += ["## Real models, as published", "", *published_table(published)]
    return "\n".join(out) + "\n"


def tally(rows: Rows) -> str:
    """Returns how many of the claims are of which kind."""
    count = Counter(f"{told(claim, rows)}" for claim in CLAIMS)
    return f"{len(CLAIMS)} claims. {'; '.join(f'{what}: {n}' for what, n in count.most_common()).capitalize()}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *UNTRAINED, "transfer"])
    parser.add_argument("--seeds", type=int, nargs="+", help="0 to 4, and of inspo and static 5 to 9, if not given")
    parser.add_argument("--every", type=int, default=20, help="steps between held-out evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a thread each")
    parser.add_argument("--extra", default="", help="flags of inspo.py for every run, in one string")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "paper", help="where the runs' directories go")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows, page and figures go")
    args = parser.parse_args(argv)
    known = [*ARMS, *UNTRAINED, "transfer"]
    if unknown := [arm for arm in args.arms if arm not in known]:
        parser.error(f"--arms {unknown[0]}: choose from {', '.join(known)}")
    campaign = Campaign(args.runs, args.results / "rows.jsonl", args.every, args.extra)
    with one_line("extras.campaigns.paper"):
        arms = [arm for arm in (*ARMS, "transfer") if arm in args.arms]
        failed = complete(campaign, arms, args.seeds or [*SEEDS], args.jobs)
        if not args.seeds:
            failed += complete(campaign, [arm for arm in FRESH_ARMS if arm in arms], [*FRESH], args.jobs)
        for method in UNTRAINED:
            if method in args.arms:
                untrained(campaign, method)
        from extras.campaigns.figures import draw

        rows = read(campaign.rows)
        published = json.loads((HERE / "results" / "paper.json").read_text())
        others = read(HERE / "results" / "second_hand.jsonl")
        text = page(rows, draw(parts(rows)[0], args.results), published, others)
        (args.results / "paper.md").write_text(text)
        for arm in args.arms:
            if rows.get(arm) and arm != "transfer":
                print(line_of(arm, rows[arm]))
        print(f"{args.results / 'paper.md'} has tables and claims")
        if args.results == HERE / "results":
            from extras.campaigns import readme

            readme.main()
        if failed:
            raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    main()
