"""What a run shows while it runs: plain lines, and a live view in a real terminal."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from journal.screen import Screen, clock, sparkline
from population import Population

ROOT = Path(__file__).parent.parent
ROW = {"reward": 0.25, "searches": 1.5, "kl": 0.01, "w_best": 0.4, "entropy": float("nan"), "answered": 1.0, "P": 4}


def population():
    P = Population(0.2, 5)
    first = P.join("Search once.", None, 0)
    second = P.join("Search once. Name [bold]one[/bold] entity.\x1b[2J", first.id, 10)
    first.rewards, second.rewards = [0.1], [0.8]
    return P


def shown(screen: Screen, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(screen.view())
    return out.getvalue()


def test_without_a_terminal_lines_are_plain(capsys):
    with Screen(100, ["searches"]) as screen:
        screen.note("a note\x1b[2J")
        screen.event(10, "prune", population(), "|P| 4 -> 2")
        for t in range(1, 11):
            screen.step(t, ROW, population(), 3.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a note\\x1b[2J", "step  10  prune   |P| 4 -> 2"]
    assert lines[2:] == [
        f"step {t:3d}  reward 0.25  searches 1.50  KL 0.0100  |P| 2  best w 0.40  3.0 s/step" for t in (5, 10)
    ]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_view_has_curves_population_and_last_events(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    screen = Screen(100, ["searches"], console)
    for t in range(1, 61):
        screen.step(t, ROW | {"reward": t / 100}, population(), 3.0)
    for t in range(1, 7):
        screen.event(t, "prune", population(), f"event {t}\nand its second line")
    text = shown(screen, width)
    assert "step 60 of 100" in text and "0.6" in text and "reward" in text and "searches" in text
    assert text.index("#1") < text.index("#0") and "w 0.80" in text and "Name [bold]" in text and "\x1b" not in text
    assert "event 6" in text and "event 4" in text and "event 3" not in text
    assert all(len(line) <= width for line in text.splitlines()) and len(text.splitlines()) < 24


def test_in_a_real_terminal_the_view_is_drawn_and_left_standing():
    code = (
        "from journal.screen import Screen; from tests.test_screen import ROW, population\n"
        "with Screen(3) as screen:\n"
        "    screen.note('begun')\n"
        "    for t in (1, 2, 3): screen.step(t, ROW, population(), 1.0)\n"
        "print('the end')"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=theirs, stdout=theirs, env=env)
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(ours)
    assert process.wait() == 0
    out = text.decode()
    assert "begun" in out and "step 3 of 3" in out and "▁" in out and out.rstrip().endswith("the end")
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor is back


def test_curves_of_blocks():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4], 2) == "▁█" and sparkline([1.0], 9) == "▁"
    assert [clock(x) for x in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
