"""The runs of a campaign: what each arm is, how it is run once, and the row that it leaves behind."""

import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from config import HERE, PRESETS
from journal.directory import read_jsonl
from plumbing.faults import Fault
from plumbing.versions import commit
from world.clauses import BEST, write

Row = dict[str, Any]
Job = TypeVar("Job")
SAMPLER = "one uniform number a row"  # how engines/torch_engine.py draws a token; rows of another one name it
RUNNING: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)


class Arm(NamedTuple):
    """`flags` are added to the embedded default's; {arm} is the directory of that arm's run with the same seed."""

    what: str
    flags: str = ""
    program: str = "inspo.py"


ARMS = {
    "inspo": Arm("instruction and policy evolve together"),
    "static": Arm("Search-R1: one instruction, the policy trains", "--mode static"),
    "frozen": Arm("evolution, the policy frozen", "--lr 0"),
    # the other trained rows of Table 1
    "grpo": Arm("GRPO without tools", "", "extras/table1.py train grpo"),
    "sft": Arm("supervised on gold answers, no tools", "", "extras/table1.py train sft"),
    "sft_reject": Arm("supervised on its own correct rollouts", "", "extras/table1.py train sft_reject"),
    # Fig. 3
    "before": Arm("instruction optimised before RL", "--mode static --instruction {frozen}/I_star.txt"),
    "after": Arm("instruction optimised after RL", "{world} --lr 0 --model {static}/policy"),
    "around": Arm(
        "RL, instruction optimised, RL again under it",
        "{world} --mode static --T_e 0 --model {static}/policy --instruction {after}/I_star.txt",
    ),
    "paraphrase": Arm("proposer: paraphrase", "--proposer paraphrase"),
    "history": Arm("proposer: history", "--proposer history"),
    "constant": Arm("a constant population, never pruned", "--K_p 1000000 --T_e 0"),
    "unverified": Arm("pruned and expanded, not verified", "--D_B 0"),
    # Fig. 6
    "parents-2": Arm("N_parent 2", "--N_parent 2"),
    "parents-3": Arm("N_parent 3", "--N_parent 3"),
    "tau-0.05": Arm("tau_s 0.05", "--tau_s 0.05"),
    "tau-1.0": Arm("tau_s 1.0", "--tau_s 1.0"),
    # not in the paper
    "question-groups": Arm("advantages by question, across instructions", "--groups question", "extras/selection.py"),
    "guessing": Arm("the optimizer proposes at random", "--optimizer_model guessing"),
    # the optimizer may bring new clauses whatever it is shown: what Fig. 3's proposers can be compared with
    "fair": Arm("fair proposers: reflection", "--optimizer_model fair"),
    "fair-paraphrase": Arm("fair proposers: paraphrase", "--optimizer_model fair --proposer paraphrase"),
    "fair-history": Arm("fair proposers: history", "--optimizer_model fair --proposer history"),
    "fair-constant": Arm("fair proposers: a constant population", "--optimizer_model fair --K_p 1000000 --T_e 0"),
    "unpruned": Arm("evolves, not pruned between evolutions", "--K_p 1000000"),
    "half": Arm("evolution ends at half its time", "--T_e {half_T_e}"),
}
WITH_CANARY = ("inspo", "static", "frozen")  # whose policies are also played under one good instruction, for Fig. 5


def needs(arm: str) -> list[str]:
    """Returns the arms whose runs this one starts from."""
    return [other for other in ARMS if f"{{{other}}}" in ARMS[arm].flags]


def flags_of(arm: str, extra: str) -> str:
    """Returns the flags that a row says its run had, with the `extra` ones of its campaign."""
    return f"{extra} {ARMS[arm].flags if arm in ARMS else ''}".strip()


def argv_of(arm: str, built_on: dict[str, str], extra: str = "") -> list[str]:
    """Returns an arm's command, without `python`; `built_on`: directories of the runs that it needs, by arm.

    `extra` flags come before the arm's own, which win.
    """
    world = " ".join(f"--{name} {value}" for name, value in PRESETS["world"].items() if name != "model")
    half = PRESETS["world"]["T_e"] // 2
    flags = ARMS[arm].flags.format(**built_on, world=f"{world} {extra}", half_T_e=half)
    return [*ARMS[arm].program.split(), *extra.split(), *flags.split()]


class Campaign(NamedTuple):
    """Where runs and rows go, and what all runs share."""

    runs: Path
    rows: Path  # rows.jsonl
    every: int = 20  # steps between held-out evaluations
    extra: str = ""
    threads: int = 1

    def done(self) -> dict[tuple[str, int], Row]:
        """Returns the rows there are, by arm and seed."""
        return {(row["arm"], row["seed"]): row for row in read_jsonl(self.rows)}

    def find(self, arm: str, seed: int) -> Row | None:
        """Returns the row of an arm and seed, if there is one; Fault if it was played with other flags."""
        found = self.done().get((arm, seed))
        flags = flags_of(arm, self.extra)
        if found and found.get("flags", flags) != flags:
            was, now = (f"the flags {x}" if x else "no flags" for x in (found["flags"], flags))
            raise Fault(f"{self.rows} has {arm}, seed {seed}, with {was}, not {now}: choose another --results")
        return found

    def row(self, arm: str, seed: int) -> Row:
        """Returns the row of an arm and seed; runs it only if there is none."""
        if found := self.find(arm, seed):
            return found
        return self.keep(row_of(arm, seed, self.run(arm, seed), self.extra))

    def keep(self, row: Row) -> Row:
        """Appends a row to the committed file and returns it."""
        self.rows.parent.mkdir(parents=True, exist_ok=True)
        with open(self.rows, "a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def run(self, arm: str, seed: int) -> Path:
        """Returns the directory of a finished run: it runs, or resumes, what is not there, and what that needs."""
        with RUNNING[arm, seed]:  # another thread may need the same run
            return self._run(arm, seed)

    def _run(self, arm: str, seed: int) -> Path:
        out, others = self.runs / f"{arm}-seed{seed}", needs(arm)
        argv = argv_of(arm, {other: str(self.runs / f"{other}-seed{seed}") for other in others}, self.extra)
        argv += ["--seed", str(seed), "--eval_every", str(self.every), "--out", str(out)]
        if arm in WITH_CANARY:
            argv += ["--canary", str(canary(self.runs))]
        argv = begun(out, argv)
        if not (out / "summary.json").exists():
            for other in others:
                self.run(other, seed)
            launch(f"{arm}, seed {seed}", argv, out, self.threads)
        return out


def begun(out: Path, argv: list[str]) -> list[str]:
    """Returns what starts a run, or resumes it; Fault if the one that is there has other flags: {out}.argv has them."""
    note, there = Path(f"{out}.argv"), (out / "config.json").exists()
    if there and not (note.exists() and note.read_text() == json.dumps(argv)):
        raise Fault(f"{out} was not started with `{' '.join(argv)}`: remove it, or choose another --runs")
    out.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(argv))
    return [*argv, *(["--resume"] if there else [])]


def launch(what: str, argv: list[str], out: Path, threads: int = 1) -> None:
    """Runs a program of this project; raises Fault if it fails.

    Its output goes to {out}.log and the CPU seconds that it took, with its servers, to {out}.cpu: after what is there
    if it resumes.
    """
    env, mode = os.environ | {"OMP_NUM_THREADS": str(threads)}, "a" if "--resume" in argv else "w"
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out}.log", mode) as log:
        process = subprocess.Popen([sys.executable, *argv], cwd=HERE, env=env, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    with open(f"{out}.cpu", mode) as file:
        print(round(usage.ru_utime + usage.ru_stime, 1), file=file)
    if process.returncode:
        raise Fault(f"{what}: {argv[0]} ended with {process.returncode}; see {out}.log")


def cpu_seconds(out: Path) -> float | None:
    """Returns the CPU seconds of a run that `launch` has started; None where nobody has counted them."""
    path = Path(f"{out}.cpu")
    return round(sum(map(float, path.read_text().split())), 1) if path.exists() else None


def clock(rows: Sequence[Row]) -> tuple[str, Callable[[Row], float]]:
    """Returns ("CPU ", a run's CPU seconds), or ("", its seconds) where they were not counted of all runs.

    Runs share a machine with each other and with others: what the clock says of them is no price.
    """
    if all(row.get("cpu_seconds") is not None for row in rows):
        return "CPU ", lambda row: float(row["cpu_seconds"])
    return "", lambda row: float(row["seconds"] if "seconds" in row else 60 * row["minutes"])


def collect(
    jobs: Sequence[Job], run: Callable[[Job], Row], path: Path, threads: int, says: Callable[[Row], str]
) -> list[str]:
    """Runs jobs in threads, appends each one's row to `path`, prints what it `says`; returns why others failed."""
    lock = threading.Lock()

    def one(job: Job) -> str:
        try:
            row = run(job)
        except Fault as fault:
            print(fault, flush=True)
            return str(fault)
        with lock, open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(says(row), flush=True)
        return ""

    with ThreadPoolExecutor(threads) as pool:
        return [fault for fault in pool.map(one, jobs) if fault]


def publish(page: str, path: Path) -> None:
    """Writes a page, and prints its tables: paragraphs are long lines."""
    path.write_text(page)
    tables = [part.strip() for part in page.split("\n\n") if part.strip().startswith("|")]
    print(*tables, f"{path} has the whole page", sep="\n\n")


def canary(runs: Path) -> Path:
    """Returns a file with a good instruction that no run is given, under which all policies are scored."""
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / "canary.txt"
    if not path.exists():
        path.write_text(write(random.Random(0), sorted(BEST)) + "\n")
    return path


def row_of(arm: str, seed: int, out: Path, extra: str) -> Row:
    """Returns what a finished run leaves in the committed file: enough for every table and figure.

    `evals`: [step, EM, EM under the canary or null, rollouts so far with those of verification, seconds so far].
    """
    summary = json.loads((out / "summary.json").read_text())
    steps = [row for row in read_jsonl(out / "metrics.jsonl") if row["t"]]
    played, end = rollouts(out, summary), summary["end"]
    evals = [[0, summary["start"]["em"], None, 0, 0.0]]
    evals += [
        [row["t"], row["test/em"], row.get("canary/em"), played(row["t"]), round(row["time/total"], 1)]
        for row in steps
        if "test/em" in row
    ]
    last = summary["held_out"].get("trained policy, canary", {}).get("em")
    evals.append([summary["steps"], end["em"], last, played(summary["steps"]), summary["seconds"]])
    curves = ("reward", "searches", "prompt_tokens", "response_tokens", "context_tokens")
    return {
        "arm": arm, "seed": seed, "flags": flags_of(arm, extra), "program": ARMS[arm].program,
        **origin(summary), "minutes": round(summary["seconds"] / 60, 2), "cpu_seconds": cpu_seconds(out),
        "em": end["em"], "questions": summary["questions"], "searches": round(end.get("searches", 0.0), 3),
        "overhead": summary["overhead_inference"], "I_star": summary["I_star"], "evals": evals,
        "held_out": {name: round(means["em"], 4) for name, means in summary["held_out"].items()},
        "curves": {name: [round(row.get(name, 0.0), 3) for row in steps] for name in curves},
    }  # fmt: skip


def rollouts(out: Path, summary: Row) -> Callable[[int], int]:
    """Returns a function from a step of a finished run to the rollouts up to then, those of verification included."""
    verified = [(row["t"], row["rollouts"]) for row in read_jsonl(out / "reflections.jsonl") if "rollouts" in row]
    each = summary["ledger"]["training_rollouts"] // summary["steps"]
    return lambda t: t * each + sum(n for s, n in verified if s <= t)


def origin(summary: Row | None = None) -> Row:
    """Returns what each row says of where it is from: commit (of the run with this summary), machine, date."""
    ran = summary["versions"]["inspo"] if summary else commit()
    return {"commit": ran, "machine": machine(), "sampler": SAMPLER, "date": time.strftime("%Y-%m-%d")}


def machine() -> str:
    """Returns the processor and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{len(os.sched_getaffinity(0))} cores of {name}"
