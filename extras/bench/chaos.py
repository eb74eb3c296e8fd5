"""Runs of the world that are killed, stopped, starved and resumed (`make chaos`): a line each, JSON
last.

A scenario disturbs a small run at one of MOMENTS, which the run's files tell, once, or again while
it resumes. Then the run is resumed undisturbed, and has to end with the metrics, the population,
the instruction and the weights of an undisturbed run, bit for bit. Where the disturbed run ends by
itself, it has to say how to resume, without a traceback. `--ranks 1 2` alternates between one
process and torchrun with two; `--only` picks scenarios. The full disk is a tmpfs, which takes root.
Exits with 1 if a run failed.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from extras.bench.harness import (
    ROOT,
    descendants,
    kill_tree,
    parser_of,
    train_command,
    write_instruction,
)
from plumbing.faults import Fault, one_line
from plumbing.files import read_jsonl

FLAGS = "--seed 6 --batch 2 --G 2 --K_p 1 --K_e 3 --D_B 4 --rounds 2 --eval_n 3 --eval_every 2 --save_every 2"
FLAGS += " --T 8 --T_e 7"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
LIMIT = 900.0  # seconds of one run, on a machine that others use too


class Run:
    """One process of inspo.py, or torchrun with several, on a directory."""

    def __init__(self, out: Path, ranks: int, flags: list[str]):
        self.out, self.began = out, time.monotonic()
        # Not a pipe: servers that outlive a kill would keep it open.
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            train_command(out, ranks, flags),
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=ENV,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=hear_signals,
        )

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Waits until `condition` comes true, or the run has ended."""
        while (
            self.process.poll() is None
            and time.monotonic() < self.began + LIMIT
            and not condition()
        ):
            time.sleep(0.002)

    def end(self) -> tuple[int, str]:
        """Waits for the run; returns its exit code and its output."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill_tree(self.process)
            raise Fault(f"{self.out}: a run hung") from None
        self.output.seek(0)
        return code, self.output.read()

    def find(self, word: str) -> list[psutil.Process]:
        """The run's processes that have a word in their command line, servers included."""
        return [each for each in descendants(self.process.pid) if word in " ".join(each.cmdline())]


def hear_signals() -> None:
    """Undoes what a shell does to jobs in the background: they ignore Ctrl-C, and with nohup a
    hang-up."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


# what a run's files show; each takes its directory
MOMENTS: dict[str, Callable[[Path], object]] = {
    "start": lambda out: (out / "config.json").exists(),
    "step": lambda out: (out / "metrics.jsonl").exists(),
    "evolution": lambda out: any(row["t"] for row in read_jsonl(out / "reflections.jsonl")),
    "checkpoint": lambda out: list(out.glob("checkpoints/.*.tmp")),
    "end": lambda out: (out / "I_star.txt").exists(),
}


# ---- scenarios: each takes (run, rng)


def fill_the_disk(run: Run, rng: random.Random) -> None:
    filler = run.out.parent / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
        while True:
            f.write(bytes(1 << 12))
    left = rng.choice([0, 0, 1 << 14, 1 << 20])  # nothing fits, or a line, or half a checkpoint
    os.truncate(filler, max(0, filler.stat().st_size - left))


def disturb_server(name: str, number: signal.Signals) -> Callable[[Run, random.Random], None]:
    """A scenario in which a server of the run gets a signal; one that this suspends goes on after
    some seconds."""

    def disturb(run: Run, rng: random.Random) -> None:
        for process in run.find(name):
            process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(rng.uniform(1, 5))
                process.resume()

    return disturb


SCENARIOS: dict[str, Callable[[Run, random.Random], None]] = {
    "SIGKILL of all": lambda run, rng: kill_tree(run.process),
    "SIGTERM": lambda run, rng: run.process.send_signal(signal.SIGTERM),
    "SIGINT": lambda run, rng: run.process.send_signal(signal.SIGINT),
    "SIGKILL of one rank": lambda run, rng: rng.choice(
        run.find("inspo.py --out") or [run.process]
    ).kill(),
    "SIGHUP": lambda run, rng: run.process.send_signal(signal.SIGHUP),
    "disk full": fill_the_disk,
    "search server killed": disturb_server("retrieval_server", signal.SIGKILL),
    "search server slow": disturb_server("retrieval_server", signal.SIGSTOP),
    "optimizer killed": disturb_server("world.optimizer", signal.SIGKILL),
    "optimizer slow": disturb_server("world.optimizer", signal.SIGSTOP),
}


# ---- one run


def read_result(out: Path) -> dict[str, object]:
    """Reads what has to be bit-identical: all but times, and requests that failed."""
    calls = [row["call"]["key"] for row in read_jsonl(out / "reflections.jsonl") if "call" in row]
    rows = read_jsonl(out / "metrics.jsonl")
    return {
        "metrics": [
            {k: v for k, v in row.items() if not k.startswith(("time/", "search/"))} for row in rows
        ],
        "population": (out / "population.jsonl").read_text("utf-8"),
        "I_star": (out / "I_star.txt").read_text("utf-8"),
        "weights": (out / "policy" / "model.safetensors").read_bytes(),
        "calls": sorted(calls),
        "paid once": len(set(calls)) == len(calls),
    }


def check_end(code: int, output: str, out: Path, ranks: int) -> str:
    """Names what is wrong with the end of a run that was not killed; "" if nothing is."""
    # torchrun has tracebacks of its own
    frames = re.findall(r'^ *File "(.*?)", line', output, re.M)
    if any(frame.startswith(str(ROOT)) and "/.venv/" not in frame for frame in frames):
        return "a traceback"
    # torchrun that is stopped while it starts says nothing of the run
    began = ranks == 1 or "everything goes to" in output
    if code and began and not ("--resume" in output or "stopped by" in output):
        return "it does not say how to resume"
    return "files are left half written" if list(out.rglob("*.tmp")) else ""


@contextlib.contextmanager
def make_folder(name: str, tmp: str) -> Iterator[Path]:
    """Yields a directory for a run; for a full disk, a tmpfs of 64 MB."""
    folder = Path(tempfile.mkdtemp(dir=tmp))
    if name != "disk full":
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def undisturbed(out: Path, ranks: int, flags: list[str]) -> dict[str, object]:
    """Runs undisturbed; returns the result that others are compared with."""
    code, output = Run(out, ranks, flags).end()
    if code:
        raise Fault(f"the undisturbed run failed: {output[-2000:]}")
    return read_result(out)


def disturb(out: Path, ranks: int, flags: list[str], row: dict, rng: random.Random) -> str:
    """Runs the scenario of `row` and resumes it, noting how it ended each time; returns its last
    output."""
    for _ in range(rng.choice([1, 1, 2])):
        run = Run(out, ranks, flags)
        run.wait_for(lambda: MOMENTS[row["moment"]](out))
        time.sleep(rng.choice([0, rng.uniform(0, 0.5)]))
        # what is disturbed may have ended by itself
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            SCENARIOS[row["scenario"]](run, rng)
        code, output = run.end()
        (out.parent / "filler").unlink(missing_ok=True)
        row["ends"].append("stopped" if code else "ended")
        if not row["scenario"].startswith("SIGKILL"):
            row["fault"] = row["fault"] or check_end(code, output, out, ranks)
        if not code:
            return output
    code, output = Run(out, ranks, flags).end()
    row["resumed"] = re.findall(r"resumed \w+ step \d+", output)
    row["fault"] = row["fault"] or "it cannot be resumed" * bool(code)
    return output


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="processes of a run, in turns"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=[*SCENARIOS])
    args = parser.parse_args()
    moments, rows, expected = list(MOMENTS), [], dict[int, dict[str, object]]()
    with tempfile.TemporaryDirectory() as tmp:
        flags = [*FLAGS.split(), "--instruction", str(write_instruction(Path(tmp)))]
        for k in range(args.runs):
            name, turn = args.only[k % len(args.only)], k // len(args.only)
            ranks = args.ranks[turn % len(args.ranks)]
            if ranks not in expected:
                expected[ranks] = undisturbed(Path(tmp, f"whole-{ranks}"), ranks, flags)
            # each scenario meets each of them
            moment = moments[(k + k // len(SCENARIOS)) % len(moments)]
            row = {
                "scenario": name,
                "moment": moment,
                "ranks": ranks,
                "ends": [],
                "resumed": [],
                "fault": "",
            }
            with make_folder(name, tmp) as folder:
                output = disturb(
                    folder / "run", ranks, flags, row, random.Random(f"{args.seed} {k}")
                )
                result = {} if row["fault"] else read_result(folder / "run")
            row["fault"] = row["fault"] or ", ".join(
                f"other {x}" for x in result if result[x] != expected[ranks][x]
            )
            if row["fault"]:
                print(*output.splitlines()[-60:], sep="\n", flush=True)
            rows.append(row)
            ends = ", ".join([*row["ends"], *row["resumed"]])
            print(
                f"{k + 1:3d}  {name} at {moment}, {ranks}: {ends}: {row['fault'] or 'as undisturbed'}",
                flush=True,
            )
    failed = sum(bool(row["fault"]) for row in rows)
    print(json.dumps({"runs": len(rows), "failed": failed, "seed": args.seed, "rows": rows}))
    if failed:
        raise Fault(f"{failed} of {len(rows)} runs failed")


if __name__ == "__main__":
    with one_line():
        main()
