"""What a run shows while it runs: plain lines, and a progress bar in a real terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from journal.screen import Screen

ROOT = Path(__file__).parent.parent
ROW = {
    "reward": 0.25,
    "searches": 1.5,
    "kl": 0.01,
    "w_best": 0.4,
    "entropy": float("nan"),
    "answered": 1.0,
    "P": 4,
}


def test_without_a_terminal_lines_are_plain(capsys):
    screen = Screen(100, ["searches"])
    screen.note("a note\x1b[2J")
    for t in range(1, 11):
        screen.show_row("metrics", ROW | {"t": t, "time/rollout": 1.5, "time/update": 2})
    screen.close()
    assert capsys.readouterr().out.splitlines() == [
        "a note\\x1b[2J",
        *(
            f"step {t:3d}  reward 0.25  searches 1.50  KL 0.0100  best w 0.40  3.5 s/step"
            for t in (5, 10)
        ),
    ]


def test_in_a_real_terminal_a_bar_is_drawn_below_the_lines_and_left_standing():
    code = (
        "from journal.screen import Screen\n"
        "screen = Screen(3)\n"
        "screen.note('Name [bold]one[/bold] entity.\\x1b[2J')\n"
        "for t in (1, 2, 3):\n"
        "    screen.show_rollouts('verify 0', 7, 9)\n"
        "    screen.show_row('metrics', {'t': t, 'reward': 0.5})\n"
        "screen.close()\n"
        "print('the end')"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    env = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=theirs, stdout=theirs, env=env
    )
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
    assert "Name [bold]one[/bold] entity.\\x1b[2J" in out and "step   3  reward 0.50" in out
    assert "3/3" in out and out.rstrip().endswith("the end")
