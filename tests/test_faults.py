"""A program's standard output may end before the program does: its reader is gone, its disk full,
or it never was."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_inspo import ENV, SMALL

from plumbing.faults import first_line

ROOT = Path(__file__).parent.parent
WORK = """
import sys, pathlib
from plumbing.faults import Fault, one_line
with one_line("work.py"):
    for k in range(3):
        print("line", k, flush=True)
    pathlib.Path(sys.argv[1]).write_text("done")
    print("the last line")
    if sys.argv[2:]:
        raise Fault("a fault")
"""


def shell(line: str, *argv: object, unbuffered: str = "") -> subprocess.CompletedProcess:
    """Runs WORK, or a program, as "$@" of a line of bash; a pipe's exit code is that of its first
    part.

    `unbuffered`: Python's PYTHONUNBUFFERED; with it writing fails, without it flushing.
    """
    env = ENV | {"PYTHONUNBUFFERED": unbuffered}
    command = ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable, *map(str, argv)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "line, why",
    [
        # the reader is gone before the first line: echo's writes fail
        ('{ trap "" PIPE; while echo; do :; done 2> /dev/null; "$@"; } | true', "Broken pipe"),
        ('"$@" > /dev/full', "No space left on device"),
    ],
)
def test_a_program_goes_on_without_its_output_and_says_so_once(tmp_path, line, why, unbuffered):
    done = shell(line, "-c", WORK, tmp_path / "result", unbuffered=unbuffered)
    assert (done.returncode, (tmp_path / "result").read_text()) == (0, "done")
    assert done.stderr == f"standard output cannot be written ({why}): continuing without it\n"
    done = shell(line, "-c", WORK, tmp_path / "result", "fault", unbuffered=unbuffered)
    assert done.returncode == 1 and done.stderr.endswith("without it\nwork.py: a fault\n")


def test_a_reader_that_leaves_at_the_end_and_an_output_that_never_was_are_no_faults(tmp_path):
    # what is left to print may still be buffered
    done = shell('"$@" | head -1', "-c", WORK, tmp_path / "result")
    assert (done.returncode, done.stdout) == (0, "line 0\n") and "Traceback" not in done.stderr
    late = WORK.replace(", flush=True", "")  # all of it is in the buffer when the program ends
    done = shell('"$@" > /dev/full', "-c", late, tmp_path / "result")
    assert done.returncode == 0 and done.stderr.startswith(
        "standard output cannot be written (No space"
    )
    done = shell('"$@" >&-', "-c", WORK, tmp_path / "closed")
    assert (done.returncode, done.stderr, (tmp_path / "closed").read_text()) == (0, "", "done")


def test_output_that_can_be_written_is_as_ever(tmp_path):
    done = shell('"$@"', "-c", WORK, tmp_path / "result")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "line 0\nline 1\nline 2\nthe last line\n"


@pytest.mark.slow
def test_a_run_is_complete_though_nobody_reads_it_any_more(tmp_path):
    flags = [*SMALL, "--T", 1, "--mode", "static", "--out", tmp_path / "run"]
    done = shell('"$@" | head -1', "inspo.py", *flags)
    assert done.returncode == 0 and done.stdout.startswith("static: world")
    assert done.stderr == "standard output cannot be written (Broken pipe): continuing without it\n"
    assert all(
        (tmp_path / "run" / name).exists()
        for name in ("summary.json", "I_star.txt", "policy", "report.html")
    )


@pytest.mark.parametrize(
    "message, line",
    [
        # as transformers writes what is not installed
        ("\nX requires y.\nInstall it.", "X requires y."),
        (" \r\n\t\n  first\r\nsecond", "first"),
        ("one", "one"),
        ("\n \n", "ImportError"),
        ("", "ImportError"),
    ],
)
def test_the_first_line_of_an_exception_says_something(message, line):
    assert first_line(ImportError(message)) == line
