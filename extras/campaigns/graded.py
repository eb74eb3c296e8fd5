"""The graded world (extras/graded): does evolving along with the policy pay, and does it pay more the more d is?

    make graded                                                  # what results/graded_plan.md registers; resumable
    python -m extras.campaigns.graded --drifts 0 1 --arms paired fst absorb both       # its second part
    python -m extras.campaigns.graded --drifts 0 1 --arms fst-own absorb-stay both-stay --worlds 200 201 202 203 204 205
    python -m extras.campaigns.graded --worlds 1 2 --name graded_pilot_runs    # a pilot: worlds below 200
    python -m extras.campaigns.graded --report                                 # writes page and figure, runs nothing

A run is an arm in a world with a drift. The world's seed is the run's: worlds are independent, and arms are paired by
them. Finished runs leave a row in graded.jsonl and are not run again; worlds come one after the other, each whole.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from config import HERE, Config
from engines.torch_engine import TorchEngine
from evaluation.statistics import holm, over_seeds
from extras.campaigns.arms import begun, cpu_seconds, launch, origin, rollouts
from extras.campaigns.player import LOADING
from extras.campaigns.seeds import seeds_by_mean
from extras.graded.form import EMPTY, FILLERS, LINES, OPTIONAL, RULES, START, WORDINGS, World, clauses
from extras.graded.optimizer import clause_of
from extras.graded.task import Graded
from extras.graded.warm_start import POLICY
from journal.directory import read_jsonl
from models.model import load_policy
from page.read import many
from plumbing.faults import Fault, one_line
from plumbing.servers import Child
from rollout import rollout
from tasks import Job
from tasks.tools import stop_strings

Row = dict[str, Any]
DRIFTS = (0.0, 0.5, 1.0)
FIRST, WORLDS = 200, 12  # the worlds that the plan registers: 200 and the next ones, never seen in tuning
ALL = ("online", "before", "after", "unverified", "blind")
SECOND = ("paired", "fst", "absorb", "both")  # the plan's second part, in the same worlds without d = 0.5
MORE = ("fst-own", "absorb-stay", "both-stay")  # not in the plan: made after its runs had been seen
PLANNED = (len(ALL) * len(DRIFTS) + len(SECOND) * 2) * WORLDS  # runs
MARGIN = 0.05  # of non-inferiority and equivalence: what one clause is worth
COMMON = (
    "--task extras.graded.task:Graded --retriever none --engine torch --device cpu --T 60 --batch 24 --mini 24 --G 5"
    " --lr 3e-4 --micro_tokens 4096 --max_response 32 --max_prompt 160 --N_P 7 --K_p 5 --K_e 5 --T_e 46 --D_B 24"
    " --rounds 1 --buffer 600 --max_instruction 200 --save_every 100 --token_rows 0 --recompute 0 --compare 2"
)
STAY = "--teacher {0}/I_star.txt"  # who is told are the weights that absorbing starts from
ABSORB = f"--teacher_weights step {STAY}"  # as registered: the teacher moves with the policy
ONLINE = "--T 45 --T_e 41"  # what is left of it where 15 steps of absorbing follow
ALONE = "--T 50"  # a phase of evolution alone: as many evolutions as online has, and five steps to rank the last


class Arm(NamedTuple):
    """`stages`: (program, flags) one after the other; {0} is the directory of the first one's run."""

    what: str
    stages: tuple[tuple[str, str], ...] = (("inspo.py", ""),)
    model: str = "graded"  # who reflects: extras/graded/optimizer.py


ARMS = {
    "online": Arm("instruction and policy evolve together"),
    "before": Arm(
        "the instruction evolves, then the policy trains under it",
        (("inspo.py", f"--lr 0 {ALONE}"), ("inspo.py", "--mode static --instruction {0}/I_star.txt")),
    ),
    "after": Arm(
        "the policy trains, then the instruction evolves",
        (("inspo.py", "--mode static"), ("inspo.py", f"--lr 0 {ALONE} --model {{0}}/policy")),
    ),
    "unverified": Arm("online, candidates join unverified", (("inspo.py", "--D_B 0"),)),
    "blind": Arm("online, the optimizer reads no failure", model="blind"),
    "paired": Arm("online, paired ranking", (("extras/selection.py", "--rank paired"),)),
    "fst": Arm("FST, with online's sizes: one revision an evolution", (("extras/fst.py", ""),)),
    "fst-own": Arm(
        "FST, with its own sizes: four revisions an evolution",
        (("extras/fst.py", "--N_P 4 --K_e 6 --T_e 1000000 --rounds 4"),),
    ),
    "absorb": Arm(
        "the instruction evolves, then the policy absorbs it; read untold",
        (("inspo.py", f"--lr 0 {ALONE}"), ("extras/absorb.py", ABSORB)),
    ),
    "absorb-stay": Arm(
        "absorb, by a teacher that stays as it was",
        (("inspo.py", f"--lr 0 {ALONE}"), ("extras/absorb.py", STAY)),
    ),
    "both": Arm(
        "online for 45 steps, then 15 of absorbing; read untold",
        (("inspo.py", ONLINE), ("extras/absorb.py", f"--T 15 --model {{0}}/policy {ABSORB}")),
    ),
    "both-stay": Arm(
        "both, by a teacher that stays as it was",
        (("inspo.py", ONLINE), ("extras/absorb.py", f"--T 15 --model {{0}}/policy {STAY}")),
    ),
}


class Campaign(NamedTuple):
    """Where runs and rows go, and who reflects."""

    runs: Path
    rows: Path
    every: int
    extra: str
    url: str

    def done(self) -> dict[tuple[str, int, float], Row]:
        return {(row["arm"], row["world"], row["drift"]): row for row in read_jsonl(self.rows)}

    def row(self, arm: str, seed: int, drift: float) -> Row:
        """Runs an arm's stages, or resumes them; appends its row and returns it."""
        world = World.of(seed, drift)
        file = world.write(self.runs / f"world-{seed}-{drift:g}.json")
        stages: list[Path] = []
        for k, (program, flags) in enumerate(ARMS[arm].stages):
            out = self.runs / f"{arm}-{seed}-{drift:g}-{k}"
            argv = [program, *COMMON.split(), "--model", str(POLICY), "--train", str(file), "--seed", str(seed)]
            if "static" not in flags:
                argv += ["--optimizer_model", f"{ARMS[arm].model}-{seed}-{world.rule}"]
            argv += [*self.extra.split(), *flags.format(*stages).split(), "--eval_every", str(self.every)]
            argv = begun(out, [*argv, "--out", str(out)])
            if not (out / "summary.json").exists():
                launch(f"{arm}, world {seed}, d {drift:g}", argv, out)
            stages.append(out)
        row = row_of(arm, world, file, stages, self.extra)
        self.rows.parent.mkdir(parents=True, exist_ok=True)
        with open(self.rows, "a") as file_:
            file_.write(json.dumps(row) + "\n")
        return row


def row_of(arm: str, world: World, file: Path, stages: Sequence[Path], extra: str) -> Row:
    """Returns what a finished run leaves in the committed file; `file` holds its world.

    `evals`: [step, reward, skill, rollouts so far with those of verification, CPU seconds so far], held out and greedy,
    under the best instruction of the time, over all stages.
    """
    evals: list[list[float]] = []
    step, played, cpu = 0, 0, 0.0
    curves: dict[str, list[float]] = {"reward": [], "skill": []}
    for k, out in enumerate(stages):
        summary = json.loads((out / "summary.json").read_text())
        rows, count, spent = read_jsonl(out / "metrics.jsonl"), rollouts(out, summary), cpu_seconds(out) or 0.0
        share = spent / summary["seconds"]
        if not k:
            evals.append([0, round(summary["start"]["reward"], 4), round(summary["start"]["skill"], 4), 0, 0.0])
        points = [
            (r["t"], r["test/reward"], r["test/skill"], r["time/total"]) for r in rows if r["t"] and "test/reward" in r
        ]
        end = summary["end"]
        for t, reward, skill, seconds in [*points, (summary["steps"], end["reward"], end["skill"], summary["seconds"])]:
            evals.append(
                [step + t, round(reward, 4), round(skill, 4), played + count(t), round(cpu + share * seconds, 1)]
            )
        for name, curve in curves.items():
            curve += [round(r[name], 3) for r in rows if r["t"]]
        step, played, cpu = step + summary["steps"], played + count(summary["steps"]), cpu + spent
    roles: dict[str, int] = {}
    for clause in clauses(summary["I_star"]):
        roles[world.role(clause)] = roles.get(world.role(clause), 0) + 1
    texts = unseen(world, summary["I_star"])
    played_under = play(stages[-1] / "policy", file, list(texts.values()))
    return {
        "arm": arm, "world": world.seed, "drift": world.drift, "flags": extra, **origin(summary),
        "cpu_seconds": round(cpu, 1), "reward": round(end["reward"], 4), "skill": round(end["skill"], 4),
        "rollouts": played, "roles": roles, "I_star": summary["I_star"],
        "held_out": {name: round(means["reward"], 4) for name, means in summary["held_out"].items()},
        "evals": evals, "curves": curves,
        "unseen": {name: round(reward, 4) for name, (reward, _) in zip(texts, played_under, strict=True)},
    }  # fmt: skip


def unseen(world: World, I_star: str) -> dict[str, str]:
    """Returns I_star, and instructions that no run has trained under but by chance, by name."""
    rng = np.random.default_rng([world.seed, 41])
    mine, fillers = clauses(I_star), [str(word) for word in rng.permutation(FILLERS)[:4]]
    other = World.of(world.seed + 1000, world.drift).best(1.0)
    some = [str(clause) for clause in rng.permutation(world.inventory)[: max(1, len(mine))]]
    return {
        "I_star": I_star,
        "reworded": " ".join([*fillers, *(WORDINGS[clause] for clause in mine)]),
        "reordered": " ".join([*fillers, *(str(clause) for clause in rng.permutation(mine))]),
        "first": START,
        "none": "",
        "random clauses": " ".join([START, *some]),
        "another world's": " ".join([START, *other]),
    }


def play(policy: Path, world: Path, texts: Sequence[str], seed: int = 0) -> list[tuple[float, float]]:
    """Returns (mean reward, mean skill) of a policy under each instruction, sampled, on the held-out forms."""
    cfg = Config(task="extras.graded.task:Graded", train=str(world), max_response=32, max_prompt=160)
    with LOADING:
        model, tokenizer = load_policy(str(policy), "cpu")
    task = Graded(cfg)
    engine = TorchEngine(model, tokenizer, stop_strings(task.tools), 512)
    out = []
    for text in texts:
        jobs = [Job(None, text, q, k) for k, q in enumerate(task.questions("test"))]
        taus = rollout(engine, tokenizer, task, jobs, cfg, temperature=1.0, seed=seed)
        rewards = task.reward(taus)
        out.append((float(np.mean(rewards)), float(np.mean([task.metrics(tau)["skill"] for tau in taus]))))
    return out


# ---- what the rows say


def at(row: Row, budget: float, column: int) -> float:
    """Returns a run's reward at a budget, between evaluations by a straight line; 3: rollouts, 4: CPU seconds."""
    return float(np.interp(budget, [e[column] for e in row["evals"]], [e[1] for e in row["evals"]]))


MEASURES = {
    "equal rollouts": lambda row, online: at(row, online["rollouts"], 3),
    "equal CPU seconds": lambda row, online: at(row, online["cpu_seconds"], 4),
    "at its end": lambda row, online: float(row["reward"]),
}


def gains(rows: Sequence[Row], rival: str, drift: float, measure: str = "equal rollouts") -> dict[int, float]:
    """Returns by world how much more online has than a rival at the budget that online took."""
    of = {(r["arm"], r["world"]): r for r in rows if r["drift"] == drift}
    worlds = sorted(world for arm, world in of if arm == rival and ("online", world) in of)
    return {w: of["online", w]["reward"] - MEASURES[measure](of[rival, w], of["online", w]) for w in worlds}


def by_drift(
    rows: Sequence[Row], rival: str, drifts: Sequence[float] = DRIFTS, measure: str = "equal rollouts"
) -> list[list[float]]:
    """Returns online's gain at each of the drifts, for each world that has them all."""
    by = [gains(rows, rival, drift, measure) for drift in drifts]
    return [[x[w] for x in by] for w in sorted(set.intersection(*(set(x) for x in by)))]


def slopes(rows: Sequence[Row], rival: str, measure: str = "equal rollouts") -> list[float]:
    """Returns the least-squares slope of online's gain over d, for each world that has all drifts."""
    return [float(np.polyfit(DRIFTS, x, 1)[0]) for x in by_drift(rows, rival, measure=measure)]


def built_in(drift: float) -> float:
    """Returns what a world pays for choosing late: how much more a policy that has learnt the unit earns under the best
    clauses than under those that were best while it guessed. It is the same in every world."""
    world, form = World.of(0, drift), [(line, 0) for line in range(LINES)]

    def earns(told: Sequence[str]) -> float:
        empty = [(line in OPTIONAL) != (clause_of(line) in told) for line in range(LINES)]
        return world.reward(form, [EMPTY if e else world.right(0) for e in empty])

    return earns(world.best(1.0)) - earns(world.best(1 / RULES))


class Test(NamedTuple):
    name: str
    says: str
    mean: float
    low: float
    high: float
    n: int
    p: float

    @property
    def shown(self) -> str:
        """The mean with its interval, which one world has none of; "" where nothing has run."""
        span = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.n > 1 else ""
        return f"{self.mean:+.3f}{span}" if self.n else ""


def p_of(p: float) -> str:
    """Returns a p-value as it is written; "" if there is none."""
    return "" if np.isnan(p) else f"{p:.4f}" if p >= 1e-4 else f"{p:.0e}"


def against(name: str, says: str, x: Sequence[float], floor: float = 0.0, alternative: str = "greater") -> Test:
    """Returns the t test of the mean of x against `floor`; p is NaN of fewer than two values, or equal ones."""
    found = over_seeds(x) if x else over_seeds([np.nan])
    p = float(stats.ttest_1samp(x, floor, alternative=alternative).pvalue) if len(x) > 1 and found.se > 0 else np.nan
    return Test(name, says, found.mean, found.low, found.high, len(x), p)


def tests(rows: Sequence[Row], measure: str = "equal rollouts") -> list[Test]:
    """Returns the plan's tests, in its order: each a mean over worlds, one-sided."""
    null = list(gains(rows, "before", 0.0, measure).values())
    out = [
        against("H1", f"at d = 0 online is not worse than before by {MARGIN} or more", null, -MARGIN),
        against("H2", "online's gain over before grows with d (slope)", slopes(rows, "before", measure)),
    ]
    for name, rival, says in (
        ("H3", "unverified", "verification pays (all d)"), ("H4", "blind", "reflection pays over blind edits (all d)")
    ):  # fmt: skip
        out.append(against(name, says, [float(np.mean(x)) for x in by_drift(rows, rival, measure=measure)]))
    return out


def planned(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of arms that the plan registers."""
    return [row for row in rows if row["arm"] in (*ALL, *SECOND)]


def second(rows: Sequence[Row], rivals: Sequence[str] = SECOND) -> list[Test]:
    """Returns the two-sided tests of the plan's second part: online's gain at equal rollouts, the mean over d."""
    return [
        against(
            rival, ARMS[rival].what, [float(np.mean(x)) for x in by_drift(rows, rival, (0.0, 1.0))],
            alternative="two-sided",
        )
        for rival in rivals
    ]  # fmt: skip


def vanishes(x: Sequence[float], margin: float = MARGIN) -> float:
    """Returns the p of two one-sided t tests that the mean of x lies within the margin of 0 (equivalence)."""
    if len(x) < 2 or not np.std(x) > 0:
        return np.nan
    low = stats.ttest_1samp(x, -margin, alternative="greater").pvalue
    return float(max(low, stats.ttest_1samp(x, margin, alternative="less").pvalue))


def worlds_for(mean: float, sd: float) -> int | None:
    """Returns how many worlds tell a mean gain of this size, paired, in 80 % of the cases; None: no number tried."""
    return seeds_by_mean(mean, sd, 0.0)


def page(rows: Sequence[Row], name: str = "graded") -> str:
    """Returns the page; `name`: of the rows' file and the figure."""
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    worlds = sorted({row["world"] for row in rows})
    text = [
        "# The graded world: online, before, after, by drift", "",
        f"`make graded`, rows in {name}.jsonl, registered in [graded_plan.md](graded_plan.md): {len(planned(rows))}"
        f" of {PLANNED} runs are in, of {many(len(worlds), 'world')}."
        f" Commit {', '.join(sorted({r['commit'] for r in rows}))};"
        f" machine {'; '.join(sorted({r['machine'] for r in rows}))}. Means over worlds, 95 % by Student's t.", "",
        "Held-out reward, greedy, at the end, under the run's own I_star:", "",
        f"| arm | {' | '.join(f'd = {d:g}' for d in DRIFTS)} | rollouts | CPU seconds |",
        "|---" * (len(DRIFTS) + 3) + "|",
    ]  # fmt: skip
    for arm in arms:
        mine = [row for row in rows if row["arm"] == arm]
        cells = [[row["reward"] for row in mine if row["drift"] == d] for d in DRIFTS]
        line = [f"{arm}: {ARMS[arm].what}", *(f"{over_seeds(x)}" if x else "" for x in cells)]
        line += [
            f"{np.mean([row['rollouts'] for row in mine]):,.0f}",
            f"{np.mean([row['cpu_seconds'] for row in mine]):.0f}",
        ]
        text.append(f"| {' | '.join(line)} |")
    for measure in MEASURES:
        heads = " | ".join(f"d = {d:g}" for d in DRIFTS)
        text += ["", f"Online's gain, paired by world, {measure}:", "", f"| over | {heads} | slope over d |"]
        text.append("|---" * (len(DRIFTS) + 2) + "|")
        for arm in arms:
            if arm != "online":
                cells = [list(gains(rows, arm, d, measure).values()) for d in DRIFTS] + [slopes(rows, arm, measure)]
                text.append(f"| {arm} | {' | '.join(f'{over_seeds(x):+}' if x else '' for x in cells)} |")
    paid = [built_in(d) for d in DRIFTS]
    cells = [f"{x:+.2f}" for x in (*paid, np.polyfit(DRIFTS, paid, 1)[0])]
    text += ["", "By construction a perfect chooser gains this over *before* in every world, once the policy has learnt"
             " the unit: the best clauses then, less those that were best before training:", "",
             f"| {heads} | slope over d |", "|---" * (len(DRIFTS) + 1) + "|", f"| {' | '.join(cells)} |"]  # fmt: skip
    found = tests(rows)
    p = holm([test.p for test in found])
    text += ["", "The plan's tests, at equal rollouts, one-sided, Holm's p over the four:"]
    early = min(test.n for test in found) < WORLDS
    if early:
        text[-1] += f" the plan reads them at {WORLDS} worlds, and until then they are a look."
    text += ["", "| | says | mean | worlds | p | Holm's p | |", "|---" * 7 + "|"]
    for test, adjusted in zip(found, p, strict=True):
        verdict = "too few worlds" if np.isnan(adjusted) else "holds" if adjusted < 0.05 else "not shown"
        if adjusted >= 0.05 and test.high < (-MARGIN if test.name == "H1" else 0.0):
            verdict = "refuted"
        if early and test.n > 1:
            verdict += " so far"
        text.append(f"| {test.name} | {test.says} | {test.shown} | {test.n} | {p_of(test.p)} | {p_of(adjusted)} |"
                    f" {verdict} |")  # fmt: skip
    equal = vanishes(list(gains(rows, "before", 0.0).values()))
    if not np.isnan(equal):
        text += [
            "",
            f"That online and before are equal at d = 0 to within {MARGIN}: p {p_of(equal)} (two one-sided tests).",
        ]
    for rivals, says in (
        (SECOND, "The second part: online's gain at equal rollouts, mean of d = 0 and 1, two-sided, Holm's p:"),
        (MORE, "Not in the plan, run after the above had been seen; read in the same way:"),
    ):
        if any(row["arm"] in rivals for row in rows):
            text += ["", says, "", "| over | mean | worlds | p | Holm's p |", "|---" * 5 + "|"]
            others = second(rows, rivals)
            for test, adjusted in zip(others, holm([test.p for test in others]), strict=True):
                cells = [f"{test.name}: {test.says}", test.shown, str(test.n), p_of(test.p), p_of(adjusted)]
                text.append(f"| {' | '.join(cells)} |")
    text += ["", "Clauses of I_star, by what they are in the world:", ""]
    roles = ("late", "early", "both", "either", "harmful", "stunting", "wrong rule", "neutral", "idle")
    text += [f"| arm | d | {' | '.join(roles)} |", "|---" * (len(roles) + 2) + "|"]
    for arm in arms:
        for d in DRIFTS:
            mine = [row for row in rows if (row["arm"], row["drift"]) == (arm, d)]
            if mine:
                means = [f"{np.mean([row['roles'].get(role, 0) for row in mine]):.1f}" for role in roles]
                text.append(f"| {arm} | {d:g} | {' | '.join(means)} |")
    text += wording(rows, arms)
    return "\n".join([*text, "", f"![online's gain by drift]({name}.png)", ""])


def wording(rows: Sequence[Row], arms: Sequence[str]) -> list[str]:
    """Returns the lines of the table of final policies under instructions that they have not trained under."""
    some = [row for row in rows if row.get("unseen")]
    if not some:
        return []
    names = list(some[0]["unseen"])
    text = [
        "", "Final policies under instructions that they have not trained under, sampled, means over worlds and d."
        " Random clauses and another world's best ask for what does not pay here: who follows them loses. What"
        " rewording costs (I_star minus reworded) is beside, and online's cost less the arm's, paired:", "",
        f"| arm | {' | '.join(names)} | rewording costs | online's less |", "|---" * (len(names) + 3) + "|",
    ]  # fmt: skip
    cost = {(r["arm"], r["world"], r["drift"]): r["unseen"]["I_star"] - r["unseen"]["reworded"] for r in some}
    for arm in arms:
        mine = [row for row in some if row["arm"] == arm]
        if not mine:
            continue
        cells = [f"{np.mean([row['unseen'][name] for row in mine]):.3f}" for name in names]
        costs = {(w, d): x for (who, w, d), x in cost.items() if who == arm}
        less = by_world({(w, d): cost["online", w, d] - x for (w, d), x in costs.items() if ("online", w, d) in cost})
        text.append(
            f"| {arm} | {' | '.join(cells)} | {over_seeds(by_world(costs)):+} | "
            + (f"{over_seeds(less):+} |" if less and arm != "online" else "|")
        )
    return text


def by_world(found: dict[tuple[int, float], float]) -> list[float]:
    """Returns the mean of each world over its drifts."""
    return [float(np.mean([x for (w, _), x in found.items() if w == world])) for world in sorted({w for w, _ in found})]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws online's gain over each rival by drift, a thin line a world; and reward by rollouts for each drift."""
    import matplotlib.pyplot as plt

    from extras.campaigns.figures import save  # matplotlib takes a while

    rivals = [arm for arm in ("before", "after") if any(row["arm"] == arm for row in rows)]
    fig, axes = plt.subplots(1, len(rivals) + len(DRIFTS), figsize=(3.2 * (len(rivals) + len(DRIFTS)), 3.4))
    for ax, rival in zip(axes, rivals, strict=False):
        by = {d: gains(rows, rival, d) for d in DRIFTS}
        for w in sorted(set().union(*by.values())):
            ax.plot(
                [d for d in DRIFTS if w in by[d]], [by[d][w] for d in DRIFTS if w in by[d]], "C0", lw=0.7, alpha=0.3
            )
        there = [d for d in DRIFTS if by[d]]
        found = [over_seeds(list(by[d].values())) for d in there]
        half = [x.high - x.mean if np.isfinite(x.high) else 0.0 for x in found]
        ax.errorbar(there, [x.mean for x in found], half, color="C0", lw=2.2, capsize=4)
        ax.axhline(0, color="0.5", lw=0.8)
        if rival == "before":
            grid = np.linspace(0, 1, 61)
            ax.plot(grid, [built_in(d) for d in grid], "k:", lw=1.2, label="a perfect chooser")
            ax.legend(frameon=False, fontsize=8)
        ax.set(title=f"online minus {rival}\nat equal rollouts", xlabel="drift d", xticks=DRIFTS)
    for ax, d in zip(axes[len(rivals) :], DRIFTS, strict=True):
        for k, arm in enumerate(("online", *rivals)):
            curves = [np.array(row["evals"]) for row in rows if (row["arm"], row["drift"]) == (arm, d)]
            if curves:
                grid = np.linspace(0, min(c[-1, 3] for c in curves), 60)
                ax.plot(grid, np.mean([np.interp(grid, c[:, 3], c[:, 1]) for c in curves], 0), f"C{k}", lw=2, label=arm)
        ax.set(title=f"held-out reward, d = {d:g}", xlabel="rollouts, verification included", ylim=(0, 1))
        ax.grid(axis="y", alpha=0.3)
    save(fig, axes[-1], path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ALL), choices=ARMS, metavar="ARM")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(range(FIRST, FIRST + WORLDS)))
    parser.add_argument("--drifts", type=float, nargs="+", default=list(DRIFTS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--every", type=int, default=5, help="steps between held-out evaluations")
    parser.add_argument("--extra", default="", help="flags for every run, in one string")
    parser.add_argument("--runs", type=Path, default=HERE / "runs" / "graded", help="where runs work")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows, page and figure go")
    parser.add_argument("--name", default="graded", help="of rows, page and figure there")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    path = args.results / f"{args.name}.jsonl"
    args.runs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if not args.report:
        with Child(["-m", "extras.graded.optimizer"], args.runs / "optimizer.log") as server:
            os.environ |= {"OPENAI_BASE_URL": f"{server.url}/v1"}
            campaign = Campaign(args.runs.resolve(), path, args.every, args.extra, server.url)
            there = campaign.done()
            jobs = [(arm, w, d) for w in args.worlds for d in args.drifts for arm in args.arms]

            def one(job: tuple[str, int, float]) -> str:
                if (found := there.get(job)) and found["flags"] != args.extra:
                    return f"{path} has {job} with the flags {found['flags']!r}: choose another --results"
                if found:
                    return ""
                try:
                    row = campaign.row(*job)
                except Fault as fault:
                    print(fault, flush=True)
                    return str(fault)
                print(f"{job[0]:12}world {job[1]}  d {job[2]:g}  reward {row['reward']:.3f}  skill {row['skill']:.2f}  "
                      f"{row['rollouts']} rollouts  {row['cpu_seconds']:.0f} CPU s", flush=True)  # fmt: skip
                return ""

            with ThreadPoolExecutor(args.jobs) as pool:
                failed = [fault for fault in pool.map(one, jobs) if fault]
    if rows := read_jsonl(path):
        path.with_suffix(".md").write_text(page(rows, args.name))
        draw(rows, path.with_suffix(".png"))
        print(f"{path.with_suffix('.md')} has the page, {args.name}.png the figure")
        if path == HERE / "results" / "graded.jsonl":
            from extras.campaigns import readme

            readme.main()
    if failed:
        raise Fault(f"{len(failed)} runs failed, the first: {failed[0]}")


if __name__ == "__main__":
    with one_line("extras.campaigns.graded"):
        main()
