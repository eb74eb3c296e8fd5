"""Ask the trained agent: it plays its task under its best instruction, turn by turn.

python ask.py "What is the birthplace of the director of the film Gibax Gastaith?"
python ask.py --run runs/NAME            # questions from the keyboard, one a line
python ask.py --run runs/NAME ID         # one of the held-out questions, which can be scored
"""

from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import textwrap
from pathlib import Path

from evaluation.agents import METHODS, Agent, agent, instruction_of, subject
from plumbing.faults import Fault, one_line
from plumbing.outside import clean, printable
from plumbing.status import status
from plumbing.threads import use_idle_cores
from tasks import Question, Task, Trajectory, load_task, measure, reward
from tasks.search_qa import SearchQA

FLAGS = {  # of inspo.py that may differ from the run's
    "task": "module:Class", "tools": "what it can call", "reward": "module:function", "format": "how calls are written",
    "retriever": "URL of a search server",
}  # fmt: skip


def newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/I_star.txt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise Fault("no finished run under runs/; make train makes one, or name one with --run")
    return runs[-1].parent


def held_out(task: Task) -> list[Question]:
    """Returns the questions that are known; a run can be asked others where its files are gone."""
    try:
        return task.questions("test")
    except Fault:
        return []


def question_of(task: Task, text: str, known: list[Question]) -> Question:
    """Returns the known question of this id or text, or a new one. Fault if the task's questions are more than text."""
    text = clean(text.strip())  # the shell's bytes may be no text
    if isinstance(task, SearchQA) and not text.endswith("?") and text not in [q.id for q in known]:
        text += "?"
    for q in known:
        if text in (q.id, q.text):
            return q
    if any(q.data is not None for q in known):
        raise Fault(f"a question of {task.cfg.task} is more than its text: give the id of one, such as {known[0].id}")
    return Question("asked", text, source="asked")


def example_of(known: list[Question]) -> str:
    if not known:
        return ""
    return f" For example: {known[0].text if known[0].data is None else known[0].id}"


def folded(text: str) -> str:
    """Returns a text in lines of a terminal's width."""
    return "\n".join(textwrap.fill(line, 120) for line in text.splitlines())


def show(tau: Trajectory) -> None:
    """Prints a trajectory turn by turn: what the agent wrote, and what its tools returned."""
    for turn in tau.turns:
        print(printable(folded(f"\n  agent   {turn.text.strip()}")))
        for text in turn.result or []:
            print(printable(f"  {turn.tool:8}{' '.join(text.split())[:160]}"))
    if tau.prediction is None:
        print({"over": "\n  the end"}.get(tau.stop, f"\n  answer  none ({tau.stop})"))
    else:
        print(printable(f"\n  answer  {tau.prediction}"))


def answer(player: Agent, q: Question, known: list[Question]) -> None:
    """Plays a question and prints how; a known one is scored."""
    if q in known:
        print(printable(f"\n  asked   {q.text}"))
    [tau] = player.play([q])
    show(tau)
    if q in known:
        reward(player.task, [tau])
        [metrics] = measure(player.task, [tau])
        print(printable(f"  scored  {', '.join(f'{name} {x:.3g}' for name, x in metrics.items())}"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", help="without one, questions are read from the keyboard")
    parser.add_argument("--run", default="", help="a finished run, or a checkpoint; default: the newest in runs/")
    for name in FLAGS:
        parser.add_argument(f"--{name}", help=f"{FLAGS[name]}; default: as in training")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.temperature < 0 or args.seed < 0:
        parser.error("--temperature and --seed must not be negative")
    with one_line("ask.py"), stop.listening(), stop.may_stop():
        use_idle_cores()
        ask(args)


def ask(args: argparse.Namespace) -> None:
    run = args.run or str(newest_run())
    status("loading the policy")
    with subject(run) as chosen:
        if not chosen.I_star:
            raise Fault(f"{run} holds no finished run (no I_star.txt)")
        task = load_task(chosen.configured(args, FLAGS, engine="torch"))
        instruction, known = instruction_of(chosen, task, METHODS["inspo"]), held_out(task)
        if args.question:
            q = question_of(task, args.question, known)
        with agent(chosen, task, instruction, args.temperature, args.seed) as player:
            status("")
            print(printable(f"{run}\n\n{folded(instruction)}"))
            if args.question:
                return answer(player, q, known)
            print(printable(f"\nA question a line, an empty line ends.{example_of(known)}"))
            try:
                while text := input("\n> ").strip():
                    try:
                        answer(player, question_of(task, text, known), known)
                    except Fault as e:
                        print(printable(f"  {e}"))
            except (EOFError, stop.Stopped):
                print()


if __name__ == "__main__":
    main()
