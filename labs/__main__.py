"""Runs labs without a browser: says of each blank what is wrong, and what the run found.

    python -m labs 3                  # lab 3 as it stands in labs/
    python -m labs 3 --solution       # with labs/solutions/lab3.py in its blanks
    python -m labs class/*.py         # copies of labs: a line for each blank of each file

It runs the code in those files: read a stranger's first.
"""

import plumbing  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import os
import sys
from pathlib import Path

from labs import desk
from plumbing import stop
from plumbing.faults import Fault, one_line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m labs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="+", help="numbers of labs, or files")
    parser.add_argument(
        "--solution", action="store_true", help="fill the blanks from labs/solutions"
    )
    args = parser.parse_args(argv)
    right = True
    for which in args.which:
        number = int(which) if which.isdigit() else 0
        if number and number not in desk.NUMBERS:
            raise Fault(
                f"there is no lab {number}: give a number from {desk.NUMBERS[0]} to {desk.NUMBERS[-1]}"
            )
        if args.solution and not number:
            raise Fault(f"--solution: it fills labs by number, not {which}")
        if not number and not Path(which).is_file():
            raise Fault(f"{which}: there is no such file; give a file, or the number of a lab")
        try:
            begun = sum(os.times()[:4])  # with the processes that it starts
            defined = desk.run(number or which, desk.solution(number) if args.solution else None)
        except stop.Stopped:
            raise
        except (
            Exception,
            SystemExit,
        ) as e:  # a reader's file, which costs the others of a class nothing
            print(
                f"{which}  WRONG  it does not run to its end ({type(e).__name__}: {e})", flush=True
            )
            right = False
            continue
        seconds = sum(os.times()[:4]) - begun
        for verdict in desk.verdicts(defined):
            print(f"{which}  {'right' if verdict.right else 'WRONG'}  {verdict.text}", flush=True)
            right = right and verdict.right
        for name, value in defined.get("found", {}).items():
            print(f"{which}  found  {name}: {value:.4g}")
        print(f"{which}  {seconds:.1f} s of CPU")
    sys.exit(not right)


if __name__ == "__main__":
    with one_line("labs"):
        main()
