"""Runs of the world that are killed, stopped, starved and resumed (`make chaos`): a line each, a table, JSON last.

A scenario disturbs a small run once, or again while it resumes: a signal at one of MOMENTS, which the run's files tell,
or a disk or a server that fails at any time. Then the run is resumed in peace, and has to end with the metrics, the
population, the instruction and the weights of an undisturbed run, to the bit. Where the disturbed run ends by itself,
it has to say how to resume, without a traceback. `--ranks 1 2` alternates between one process and torchrun with two;
`--only` picks scenarios. The full disk is a tmpfs, which takes root. Exits with 1 if a run failed.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from extras.bench.harness import BEST, ROOT, descendants, kill_tree, parser_of
from journal.directory import read_jsonl
from plumbing.faults import Fault, one_line

FLAGS = "--seed 6 --batch 2 --mini 2 --G 2 --K_p 1 --K_e 3 --D_B 4 --rounds 2 --eval_n 3 --eval_every 2 --save_every 2"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
LIMIT = 900.0  # seconds of one run, on a machine that others use too


class Run:
    """One process of inspo.py, or torchrun with several, on a directory."""

    def __init__(self, out: Path, ranks: int, flags: list[str]):
        self.out = out
        program = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] * (ranks > 1)
        resume = ["--resume"] if (out / "config.json").exists() else flags
        self.output = tempfile.TemporaryFile("w+")  # not a pipe: servers that outlive a kill would keep it open
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *program, "inspo.py", "--out", str(out), *resume], stdout=self.output,
            stderr=subprocess.STDOUT, env=ENV, cwd=ROOT, start_new_session=True, preexec_fn=hear_signals,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Returns whether `condition` came true while the run was alive."""
        while self.process.poll() is None and time.monotonic() < self.began + LIMIT:
            if condition():
                return True
            time.sleep(0.002)
        return False

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > end)

    def end(self) -> tuple[int, str]:
        """Waits for the run; returns its exit code and its output."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill_tree(self.process)
            raise Fault(f"{self.out}: a run hung") from None
        self.output.seek(0)
        return code, self.output.read()

    def find(self, word: str) -> list[int]:
        """The ids of the run's processes that have a word in their command line, servers included."""
        with contextlib.suppress(ProcessLookupError):
            commands = {each.pid: " ".join(each.cmdline()) for each in descendants(self.process.pid)}
            return [pid for pid, command in commands.items() if word in command]
        return []


def hear_signals() -> None:
    """Undoes what a shell does to jobs in the background: they ignore Ctrl-C, and with nohup a hang-up."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


# ---- when: what a run's files show; each takes its directory

MOMENTS: dict[str, Callable[[Path], object]] = {
    "start": lambda out: (out / "config.json").exists(),
    "step": lambda out: (out / "metrics.jsonl").exists(),
    "evolution": lambda out: any(row["t"] for row in read_jsonl(out / "reflections.jsonl")),
    "checkpoint": lambda out: list(out.glob("checkpoints/.*.tmp")),
    "end": lambda out: (out / "I_star.txt").exists(),
}


# ---- what: each takes (run, rng, seconds of an undisturbed run)


def kill(run: Run, rng: random.Random) -> None:
    kill_tree(run.process)


def kill_a_rank(run: Run, rng: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(run.find("inspo.py --out") or [run.process.pid]), signal.SIGKILL)


def stop(number: signal.Signals) -> Callable[[Run, random.Random], None]:
    return lambda run, rng: run.process.send_signal(number)


def fill_the_disk(run: Run, rng: random.Random, seconds: float) -> None:
    run.wait_for((run.out / "config.json").exists)
    run.wait(rng.uniform(0, seconds * 0.7))
    filler = run.out.parent / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
        while True:
            f.write(bytes(1 << 12))
    left = rng.choice([0, 0, 1 << 14, 1 << 20])  # nothing fits, or a line, or half a checkpoint
    with contextlib.suppress(OSError):
        os.truncate(filler, max(0, filler.stat().st_size - left))


def server(name: str, number: signal.Signals) -> Callable[[Run, random.Random, float], None]:
    """A scenario that kills a server of the run, or lets it hang for some seconds."""

    def disturb(run: Run, rng: random.Random, seconds: float) -> None:
        run.wait_for((run.out / "metrics.jsonl").exists)
        run.wait(rng.uniform(0, seconds / 2))
        for pid in run.find(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(rng.uniform(1, 5))
                    os.kill(pid, signal.SIGCONT)

    return disturb


SIGNALS: dict[str, Callable[[Run, random.Random], None]] = {  # at one of MOMENTS
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
    """What has to be equal to the bit: all but times, and requests that failed."""
    calls = [row["call"]["key"] for row in read_jsonl(out / "reflections.jsonl") if "call" in row]
    rows = read_jsonl(out / "metrics.jsonl")
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(("time/", "search/"))} for row in rows],
        "population": (out / "population.jsonl").read_text(),
        "I_star": (out / "I_star.txt").read_text(),
        "weights": (out / "policy" / "model.safetensors").read_bytes(),
        "calls": sorted(calls),
        "paid once": len(set(calls)) == len(calls),
    }


def complaint(code: int, output: str, out: Path) -> str:
    """What is wrong with the end of a run that was not killed; "" if nothing is."""
    frames = re.findall(r'^ *File "(.*?)", line', output, re.M)  # torchrun has tracebacks of its own
    if any(frame.startswith(str(ROOT)) and "/.venv/" not in frame for frame in frames):
        return "a traceback"
    if code and not ("--resume" in output or "stopped by" in output):
        return "it does not say how to resume"
    return "files are left half written" if list(out.rglob("*.tmp")) else ""


@contextlib.contextmanager
def place(name: str, tmp: str) -> Iterator[Path]:
    """Yields a directory for a run; for a full disk, a tmpfs of 64 MB."""
    folder = Path(tempfile.mkdtemp(dir=tmp))
    if name != "disk full":
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        raise Fault(f"no tmpfs can be mounted here ({made.stderr.strip()}): leave the full disk out with --only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class Whole:
    """An undisturbed run: its result and its seconds."""

    def __init__(self, out: Path, ranks: int, flags: list[str]):
        self.ranks, self.flags = ranks, flags
        run = Run(out, ranks, flags)
        code, output = run.end()
        if code:
            raise Fault(f"the undisturbed run failed: {output[-2000:]}")
        self.result, self.seconds = result(out), time.monotonic() - run.began
        print(f"undisturbed, {ranks} processes: {self.seconds:.0f} s", flush=True)

    def disturbed(self, name: str, moment: str, rng: random.Random, tmp: str) -> dict:
        """Returns the row of one scenario: how it ended each time, and its fault, if the result is another one."""
        row: dict = {"scenario": name, "moment": moment, "ranks": self.ranks, "ends": [], "resumed": [], "fault": ""}
        with place(name, tmp) as folder:
            out = folder / "run"
            for _ in range(rng.choice([1, 1, 2])):
                run = Run(out, self.ranks, self.flags)
                if moment:
                    run.wait_for(lambda: bool(MOMENTS[moment](out)))
                    run.wait(rng.choice([0, rng.uniform(0, 0.5)]))
                    SIGNALS[name](run, rng)
                else:
                    OTHERS[name](run, rng, self.seconds)
                code, output = run.end()
                (folder / "filler").unlink(missing_ok=True)
                row["ends"].append("stopped" if code else "ended")
                if not name.startswith("SIGKILL"):
                    row["fault"] = row["fault"] or complaint(code, output, out)
                if not code:
                    break
            if code:
                code, output = Run(out, self.ranks, self.flags).end()
                row["resumed"] = re.findall(r"resumed \w+ step \d+", output)
                row["fault"] = row["fault"] or "it cannot be resumed" * bool(code)
            if not row["fault"]:
                ours = result(out)
                row["fault"] = ", ".join(f"other {key}" for key in ours if ours[key] != self.result[key])
        row["output"] = output.splitlines()[-60:] if row["fault"] else []
        return row


def table(rows: list[dict]) -> str:
    lines = ["| scenario | processes | runs | resumed | as undisturbed |", "|---|---|---|---|---|"]
    groups = collections.defaultdict(list)
    for row in rows:
        groups[" at ".join(filter(None, (row["scenario"], row["moment"]))), row["ranks"]].append(row)
    for (name, ranks), some in groups.items():
        resumed, good = sum(bool(row["resumed"]) for row in some), sum(not row["fault"] for row in some)
        lines.append(f"| {name} | {ranks} | {len(some)} | {resumed} | {good} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of a run, in turns")
    parser.add_argument("--steps", type=int, default=8, help="T")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    parser.add_argument("--only", nargs="+", choices=[*SIGNALS, *OTHERS], default=[*SIGNALS, *OTHERS])
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=[*MOMENTS], help="of a signal, in turns")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file to which a row is appended for each")
    return parser.parse_args()


def main() -> None:
    args = parse()
    moments, rows, whole = itertools.cycle(args.moments), [], {}
    with tempfile.TemporaryDirectory() as tmp:
        instruction = Path(tmp, "instruction.txt")
        instruction.write_text(BEST)  # under it the first policy scores, so there are gradients
        flags = f"{FLAGS} --instruction {instruction} --T {args.steps} --T_e {args.steps - 1}".split()
        for k in range(args.runs):
            name = args.only[k % len(args.only)]
            ranks = args.ranks[k // len(args.only) % len(args.ranks)]
            if ranks not in whole:
                whole[ranks] = Whole(Path(tmp, f"whole-{ranks}"), ranks, flags)
            moment = next(moments) if name in SIGNALS else ""
            row = whole[ranks].disturbed(name, moment, random.Random(f"{args.seed} {k}"), tmp)
            rows.append(row)
            where, ends = f" at {moment}" * bool(moment), ", ".join([*row["ends"], *row["resumed"]])
            print(f"{k + 1:3d}  {name}{where}, {ranks}: {ends}: {row['fault'] or 'as undisturbed'}", flush=True)
            print(*row["output"], sep="\n", end="\n" * bool(row["output"]), flush=True)
            with open(args.log, "a") as f:
                f.write(json.dumps(row) + "\n")
    failed = sum(bool(row["fault"]) for row in rows)
    print(f"\n{table(rows)}\n")
    print(json.dumps({"runs": len(rows), "failed": failed, "seed": args.seed, "steps": args.steps}))
    if failed:
        raise Fault(f"{failed} of {len(rows)} runs failed")


if __name__ == "__main__":
    with one_line():
        main()
