"""One training step, of the embedded default or of --model: seconds of rollouts and update; JSON
last.

    OMP_NUM_THREADS=1 python -m extras.bench.step           # and flags of inspo.py

A run whose learning rate is 0, so that all steps start from the same policy, under the world's best
instruction, under which rollouts are longest. The first step warms up; it tells how long a run
takes from its start to the end of its first step. The median of the others counts.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from extras.bench.harness import ROOT, kill_tree, parser_of, train_command, write_instruction
from plumbing.files import read_jsonl


def measure(repeat: int, flags: Sequence[str]) -> dict[str, float]:
    """Returns medians of `repeat` steps of a run with these flags, after one that warms up."""
    # it is killed before it writes a checkpoint
    fixed = "--mode static --lr 0 --eval_n 1 --eval_every 0 --save_every 1000 --T 1000".split()
    with tempfile.TemporaryDirectory() as tmp:
        run = Path(tmp, "run")
        command = train_command(
            run, 1, ["--instruction", str(write_instruction(Path(tmp))), *flags, *fixed]
        )
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(read_jsonl(run / "metrics.jsonl")) < repeat + 2:
            time.sleep(0.1)
        code = process.poll()
        kill_tree(process)
        if code:
            sys.exit(code)  # its own last line says why
        first, *rows = read_jsonl(run / "metrics.jsonl")[1 : repeat + 2]
    result = {
        f"{name}_s": statistics.median(row[f"time/{name}"] for row in rows)
        for name in ("rollout", "update")
    }
    names = ("searches", "response_tokens", "context_tokens")
    result |= {name: statistics.mean(row[name] for row in rows) for name in names if name in first}
    return result | {"start_to_end_of_first_step_s": first["time/total"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="steps after the first")
    args, flags = parser.parse_known_args()
    result = measure(args.repeat, flags)
    for name, value in result.items():
        print(f"{name:30} {value:.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
