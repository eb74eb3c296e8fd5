"""Runs of the world that are killed, stopped, starved and resumed (`make chaos`): a line each, a table, JSON last.

A scenario disturbs a small run once, or again while it resumes. A signal comes in a phase that the run's files tell:
its start, the first step, a later one, the reflection or the verification of an evolution, an evaluation, the save of
a checkpoint, the end; signals take the phases in turns. All ranks are frozen there before it is sent, so that the phase
is certain; a run that went past it is played again. Then it is resumed in peace, and has to end with the metrics, the
population, the instruction and the weights of a run that nobody disturbed, to the bit. Where the disturbed run ends by
itself, it has to say how to resume, without a traceback. `--ranks 1 2` alternates between one process and torchrun with
two; `--only` picks scenarios. The full disk is a tmpfs, which takes root. Exits with 1 if a run failed.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from bench.processes import descendants, kill_tree  # noqa: E402
from config import read_config  # noqa: E402
from journal.directory import read_jsonl  # noqa: E402
from plumbing.faults import Fault, one_line  # noqa: E402

INSTRUCTION = HERE / "tests" / "fixture" / "instruction.txt"  # under it the first policy scores, so there are gradients
FLAGS = f"--instruction {INSTRUCTION} --seed 6 --batch 2 --mini 2 --G 2 --K_p 1 --K_e 3 --D_B 4 --rounds 2 --eval_n 3"
FLAGS += " --eval_every 2 --save_every 2"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
LIMIT = 900.0  # seconds of one run, on a machine that others use too


class Run:
    """One process of inspo.py, or torchrun with several, on a directory."""

    def __init__(self, out: Path, ranks: int, flags: list[str]):
        self.out = out
        program = [sys.executable, "inspo.py"]
        if ranks > 1:
            program = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "inspo.py"]
        resume = ["--resume"] if (out / "config.json").exists() else flags
        self.output = tempfile.TemporaryFile("w+")  # not a pipe: servers that outlive a kill would keep it open
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*program, "--out", str(out), *resume], stdout=self.output, stderr=subprocess.STDOUT, env=ENV, cwd=HERE,
            start_new_session=True, preexec_fn=hear_signals,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Returns whether `condition` came true while the run was alive."""
        while self.process.poll() is None and time.monotonic() < self.began + LIMIT:
            if condition():
                return True
            time.sleep(0.002)
        return False

    def end(self) -> tuple[int, str]:
        """Waits for the run; returns its exit code and its output."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Fault(f"{self.out}: a run hung") from None
        self.output.seek(0)
        return code, self.output.read()

    def kill(self) -> None:
        """Kills all of the run's processes; its servers end by themselves."""
        kill_tree(self.process)

    def ranks(self) -> list[int]:
        """Returns the process ids of the ranks."""
        found = descendants(self.process.pid)
        ranks = [each.pid for each in found if "inspo.py" in words(each) and "-m" not in words(each)]
        return ranks or [self.process.pid]

    def freeze(self) -> None:
        """Stops all ranks; returns when they stand still."""
        for pid in self.ranks():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
                while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZX":
                    time.sleep(0.001)

    def thaw(self) -> None:
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def server(self, name: str) -> int:
        """Returns the process id of a server of the run; 0 if there is none."""
        found = descendants(self.process.pid)
        return next((each.pid for each in found if any(name in word for word in words(each))), 0)


def hear_signals() -> None:
    """Undoes what a shell does to jobs in the background: they ignore Ctrl-C, and with nohup a hang-up."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


# ---- what a run is doing

PHASES = ("start", "first step", "step", "reflection", "verification", "evaluation", "checkpoint", "end")


def phase(out: Path) -> str:
    """Returns what a run is doing, by what it has written; "" before and after."""
    if not (out / "config.json").exists() or (out / "summary.json").exists():
        return ""
    if list(out.glob("checkpoints/.*.tmp")):
        return "checkpoint"
    if (out / "I_star.txt").exists():
        return "end"
    if not (rows := read_jsonl(out / "metrics.jsonl")):
        return "start"
    t, cfg = int(rows[-1]["t"]) + 1, read_config(out)
    if not (out / "trajectories" / f"step-{t:06d}.jsonl.gz").exists():
        return "first step" if t == 1 else "step"
    if t % cfg.K_e == 0 and t < cfg.T_e:
        if not any(row["t"] == t and row["event"] == "evolve" for row in read_jsonl(out / "population.jsonl")):
            last = read_jsonl(out / "reflections.jsonl")[-1]
            return "verification" if last["t"] == t and last.get("accepted") else "reflection"
    return "evaluation" if t % cfg.eval_every == 0 and t < cfg.T else "step"


def durations(run: Run) -> dict[str, float]:
    """Returns the seconds that a run which nobody disturbs spends in each phase at a time, at most."""
    found, now, since = dict.fromkeys(PHASES, 0.0), "", time.monotonic()
    while run.process.poll() is None:
        if (then := phase(run.out)) != now:
            if now:
                found[now] = max(found[now], time.monotonic() - since)
            now, since = then, time.monotonic()
        time.sleep(0.001)
    return found


# ---- what can happen: each takes (run, rng, seconds of an undisturbed run)


def at_random(run: Run, rng: random.Random, seconds: float) -> None:
    moment = time.monotonic() + rng.uniform(0, seconds)
    run.wait_for(lambda: time.monotonic() > moment)


def frozen_in(run: Run, wanted: str, rng: random.Random, seconds: float) -> bool:
    """Stops a run somewhere in the first `seconds` of a phase; returns whether it has, rather than ended before."""
    skip = rng.randrange(3)  # which of the times, if there are as many
    while run.wait_for(lambda: phase(run.out) == wanted):
        if wanted in ("start", "first step", "end") or not skip:
            moment = time.monotonic() + rng.uniform(0, seconds)
            run.wait_for(lambda moment=moment: time.monotonic() > moment or phase(run.out) != wanted)
            run.freeze()
            if phase(run.out) == wanted:
                return True
            run.thaw()
        skip = max(0, skip - 1)
        run.wait_for(lambda: phase(run.out) != wanted)
    return False


def kill(run: Run, rng: random.Random) -> None:
    run.kill()


def kill_a_rank(run: Run, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(run.ranks()), signal.SIGKILL)
    run.thaw()


def stop(number: signal.Signals) -> Callable[[Run, random.Random], None]:
    """Returns what sends a run a signal, which it hears when it goes on."""

    def signals(run: Run, rng: random.Random) -> None:
        run.process.send_signal(number)
        run.thaw()

    return signals


def fill_the_disk(run: Run, rng: random.Random, seconds: float) -> None:
    run.wait_for((run.out / "config.json").exists)
    at_random(run, rng, seconds * 0.7)
    left = rng.choice([0, 0, 1 << 14, 1 << 20])  # nothing fits, or a line, or half a checkpoint
    with contextlib.suppress(OSError), open(run.out.parent / "filler", "wb", buffering=0) as f:
        while True:
            f.write(bytes(1 << 12))
    if left:
        with contextlib.suppress(OSError):
            os.truncate(run.out.parent / "filler", max(0, (run.out.parent / "filler").stat().st_size - left))


def server(name: str, number: signal.Signals) -> Callable[[Run, random.Random, float], None]:
    """Returns a scenario that kills a server of the run, or lets it hang for some seconds."""

    def signals(run: Run, rng: random.Random, seconds: float) -> None:
        run.wait_for((run.out / "metrics.jsonl").exists)
        at_random(run, rng, seconds / 2)
        if pid := run.server(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(rng.uniform(1, 5))
                    os.kill(pid, signal.SIGCONT)

    return signals


SIGNALS: dict[str, Callable[[Run, random.Random], None]] = {  # in a phase
    "SIGKILL of all": kill,
    "SIGTERM": stop(signal.SIGTERM),
    "SIGINT": stop(signal.SIGINT),
    "SIGKILL of one rank": kill_a_rank,
    "SIGHUP": stop(signal.SIGHUP),
}
OTHERS: dict[str, Callable[[Run, random.Random, float], None]] = {  # at any time
    "disk full": fill_the_disk,
    "search server killed": server("retrieval_server", signal.SIGKILL),
    "search server slow": server("retrieval_server", signal.SIGSTOP),
    "optimizer killed": server("world.optimizer", signal.SIGKILL),
    "optimizer slow": server("world.optimizer", signal.SIGSTOP),
}


# ---- one run


def result(out: Path) -> dict[str, object]:
    """Returns what has to be equal to the bit: all but times, and requests that failed."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    calls = [json.loads(line) for line in (out / "reflections.jsonl").read_text().splitlines()]
    keys = [row["call"]["key"] for row in calls if "call" in row]
    return {
        "metrics": [{k: v for k, v in r.items() if not k.startswith(("time/", "search/"))} for r in rows],
        "population": (out / "population.jsonl").read_text(),
        "I_star": (out / "I_star.txt").read_text(),
        "weights": (out / "policy" / "model.safetensors").read_bytes(),
        "calls": sorted(keys),
    }


def complaint(code: int, output: str, out: Path, killed: bool) -> str:
    """Returns what is wrong with the end of a disturbed run; "" if it is as it should be."""
    frames = re.findall(r'^ *File "(.*?)", line', output, re.M)  # torchrun has tracebacks of its own
    if any(frame.startswith(str(HERE)) and "/.venv/" not in frame for frame in frames) and not killed:
        return "a traceback"
    if code and not killed and not ("--resume" in output or "stopped by" in output):
        return "it does not say how to resume"
    return "files are left half written" if not killed and list(out.rglob("*.tmp")) else ""


@contextlib.contextmanager
def place(name: str, tmp: str) -> Iterator[Path]:
    """Yields a directory for a run; for a full disk, a tmpfs of 64 MB."""
    folder = Path(tempfile.mkdtemp(dir=tmp))
    if name != "disk full":
        yield folder
        return
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        raise Fault(f"no tmpfs can be mounted here ({made.stderr.strip()}): leave the full disk out with --only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def struck(name: str, wanted: str, out: Path, ranks: int, rng: random.Random, seconds: float, flags: list[str]) -> Run:
    """Returns a run that has been signalled in a phase; one that went past it is played again."""
    for k in range(8):
        run = Run(out, ranks, flags)
        if frozen_in(run, wanted, rng, seconds / 2**k):
            SIGNALS[name](run, rng)
            return run
        run.end()
        shutil.rmtree(out)
    raise Fault(f"no run could be stopped in its phase {wanted!r}")


def disturbed(
    name: str, wanted: str, ranks: int, rng: random.Random, whole: dict, seconds: dict[str, float], flags: list[str],
    tmp: str,
) -> dict:  # fmt: skip
    """Returns the row of one scenario: what happened, and whether the result is the undisturbed run's."""
    row: dict = {"scenario": name, "ranks": ranks, "phase": wanted, "ends": [], "left": [], "resumed": [], "fault": ""}
    killed = name.startswith("SIGKILL")
    with place(name, tmp) as folder:
        out = folder / "run"
        for n in range(rng.choice([1, 1, 2])):
            if wanted and n == 0:
                run = struck(name, wanted, out, ranks, rng, seconds[wanted], flags)
            else:
                run = Run(out, ranks, flags)
                if wanted:
                    at_random(run, rng, seconds[""])
                    SIGNALS[name](run, rng)
                else:
                    OTHERS[name](run, rng, seconds[""])
            code, output = run.end()
            row["seconds"] = time.monotonic() - run.began
            (folder / "filler").unlink(missing_ok=True)
            row["ends"].append("ended" if not code else "killed" if killed else "stopped resumably")
            row["left"].append(max((path.name for path in out.glob("checkpoints/*")), default=""))
            row["fault"] = row["fault"] or complaint(code, output, out, killed)
            row["said"] = [line for line in output.splitlines() if line.strip()][-60 if row["fault"] else -2 :]
            if not code or row["fault"]:
                break
        if code and not row["fault"]:
            code, output = Run(out, ranks, flags).end()
            row["resumed"] = re.findall(r"resumed \w+ step \d+", output)
            if code:
                row["fault"], row["said"] = "it cannot be resumed", output.splitlines()[-8:]
        if not row["fault"]:
            found = result(out)
            row["fault"] = ", ".join(f"other {key}" for key in whole if whole[key] != found[key])
            if len(set(found["calls"])) != len(found["calls"]):
                row["fault"] += " a call was paid for twice"
    return row


def table(rows: list[dict]) -> str:
    lines = ["| scenario | processes | runs | ended | resumed | as undisturbed |", "|---|---|---|---|---|---|"]
    groups = collections.defaultdict(list)
    for row in rows:
        groups[" in phase ".join(filter(None, (row["scenario"], row["phase"]))), row["ranks"]].append(row)
    for (name, ranks), some in groups.items():
        whole = sum(not row["resumed"] and not row["fault"] for row in some)
        good = sum(not row["fault"] for row in some)
        lines.append(f"| {name} | {ranks} | {len(some)} | {whole} | {len(some) - whole} | {good} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of a run, in turns")
    parser.add_argument("--steps", type=int, default=8, help="T")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    parser.add_argument("--only", nargs="+", choices=[*SIGNALS, *OTHERS], help="which scenarios; default: all")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="in which a signal comes, in turns")
    parser.add_argument("--log", type=Path, help="file to which a row is appended after each run")
    args = parser.parse_args()
    flags = [*FLAGS.split(), "--T", str(args.steps), "--T_e", str(args.steps - 1)]
    rng, rows = random.Random(args.seed), []
    names = args.only or [*SIGNALS, *OTHERS]
    order = [(names[k % len(names)], args.ranks[k // len(names) % len(args.ranks)]) for k in range(args.runs)]
    if args.runs < len(names) * len(args.ranks):
        order = [(names[k % len(names)], rng.choice(args.ranks)) for k in range(args.runs)]
    phases = itertools.cycle(args.phases)
    with tempfile.TemporaryDirectory() as tmp:
        whole: dict[int, dict] = {}
        seconds: dict[int, dict[str, float]] = {}
        for k, (name, ranks) in enumerate(order):
            if ranks not in whole:
                run = Run(Path(tmp, f"whole-{ranks}"), ranks, flags)
                seconds[ranks] = durations(run)
                code, output = run.end()
                if code:
                    raise Fault(f"the undisturbed run failed: {output[-2000:]}")
                whole[ranks], seconds[ranks][""] = result(run.out), time.monotonic() - run.began
                shown = ", ".join(f"{s:.2f} s of {name}" for name, s in seconds[ranks].items() if name)
                print(f"undisturbed, {ranks} processes: {seconds[ranks]['']:.0f} s; at most {shown}", flush=True)
            wanted = next(phases) if name in SIGNALS else ""
            row = disturbed(
                name, wanted, ranks, random.Random(f"{args.seed} {k}"), whole[ranks], seconds[ranks], flags, tmp
            )
            rows.append(row)
            if row["ends"][-1] == "ended":  # so that the next random moments fall within a run
                seconds[ranks][""] = min(seconds[ranks][""], row["seconds"])
            left = [f"{end} ({saved or 'nothing saved'})" for end, saved in zip(row["ends"], row["left"], strict=True)]
            ends = ", ".join([*left, *row["resumed"]])
            said = "\n".join(["", *row["said"]]) if row["fault"] else ""
            where = f" in phase {wanted}" if wanted else ""
            print(f"{k + 1:3d}  {name}{where}, {ranks}: {ends}: {row['fault'] or 'as undisturbed'}{said}", flush=True)
            if args.log:
                with open(args.log, "a") as f:
                    f.write(json.dumps(row) + "\n")
    bad = [row for row in rows if row["fault"]]
    print(f"\n{table(rows)}\n")
    hit = collections.Counter(row["phase"] for row in rows if row["phase"])
    print(json.dumps({"runs": len(rows), "failed": len(bad), "seed": args.seed, "steps": args.steps, "phases": hit}))
    if bad:
        raise Fault(f"{len(bad)} of {len(rows)} runs failed")


if __name__ == "__main__":
    with one_line():
        main()
