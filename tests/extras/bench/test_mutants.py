"""A room's score, and the faults that its tests do not notice."""

import subprocess
import sys

import pytest

from config import HERE

CODE = """
def clip(x, low):
    if x < low:
        return low
    return x + 0


def unused(x):
    print(x and x)
"""
TEST = """
import sums


def test_clip():
    assert sums.clip(1, 2) == 2 and sums.clip(3, 2) == 3
"""


@pytest.mark.slow
def test_a_fault_that_no_test_notices_is_printed_and_counted(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "sums.py").write_text(CODE)
    (folder / "test_sums.py").write_text(TEST)
    program = (
        "from extras.bench.mutants import measure; measure('sums', ['tests/sums.py'], 'sums', 99)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    survivors = [line.partition(": ")[2] for line in done.stdout.splitlines() if "  ->  " in line]
    assert done.stdout.endswith("| sums | 5 of 5 | 20% |\n"), done.stdout + done.stderr
    assert sorted(survivors) == sorted(
        [
            "x < low  ->  x <= low",
            "x + 0  ->  x - 0",
            "x and x  ->  x or x",
            "print(x and x)  ->  None",
        ]
    )
    assert (folder / "sums.py").read_text() == CODE
