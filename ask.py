"""Ask the trained agent: it plays its task under its best instruction, turn by turn.

python ask.py "What is the birthplace of the director of the film Gibax Gastaith?"
python ask.py --run runs/NAME            # questions from the keyboard, one a line
python ask.py --run runs/NAME ID         # one of the held-out questions, which can be scored
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluate import add_player_flags, load_agent, read_player_flags
from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.outside import printable
from plumbing.threads import choose_threads, use_threads


def newest_run() -> str:
    runs = sorted(Path("runs").glob("*/I_star.txt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise Fault("no finished run under runs/; make train makes one, or name one with --run")
    return str(runs[-1].parent)


def read_questions() -> Iterator[str]:
    print("\nOne question per line; an empty line ends.")
    with contextlib.suppress(EOFError):  # Ctrl-D, or the end of a file
        yield from iter(lambda: input("\n> ").strip(), "")
    print()


def show(tau: Any) -> None:
    """Prints a trajectory turn by turn: what the agent wrote, and what its tools returned."""
    lines = []
    for turn in tau.turns:
        lines.append(f"\n  agent   {turn.text.strip()}")
        for text in turn.result or []:
            lines.append(f"  {turn.tool:8}{' '.join(text.split())[:160]}")
    lines.append(f"\n  answer  {tau.prediction}" if tau.prediction else f"\n  the end ({tau.stop})")
    print(printable("\n".join(lines)))


def ask(args: argparse.Namespace) -> None:
    with load_agent(args.run or newest_run(), **read_player_flags(args)) as agent:
        print(printable(agent.instruction))

        # a question after the other
        for text in [" ".join(args.question)] if args.question else read_questions():
            tau = agent.ask(text)
            print(printable(f"\n  asked   {tau.question.text}"))
            show(tau)
            if tau.question.source != "asked":
                [metrics] = agent.score([tau])
                scores = ", ".join(f"{name} {x:.3g}" for name, x in metrics.items())
                print(printable(f"  scored  {scores}"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("question", nargs="*", help="without one, it reads questions from the keyboard")
    add("--run", default="", help="a finished run, or a checkpoint of it [the newest in runs/]")
    add_player_flags(parser)
    args = parser.parse_args(argv)
    with one_line("ask.py"), stop.listening(), stop.may_stop():
        use_threads(choose_threads())
        ask(args)


if __name__ == "__main__":
    main()
