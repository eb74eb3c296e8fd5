"""Ask the trained agent: it thinks, searches and answers under its best instruction.

python ask.py "What is the birthplace of the director of the film Gibax Gastaith?"
python ask.py --run runs/NAME            # questions from the keyboard, one a line
"""

import argparse
import random
import tempfile
from pathlib import Path

from plumbing import stop
from config import HERE, read_config
from tasks.questions import Question, load_questions
from plumbing.faults import Fault, one_line
from plumbing.servers import Child
from plumbing.status import status
from plumbing.outside import clean, printable
from rollout import Job, Trajectory, rollout
from tasks.tools import Search, make_tools, stop_strings


def newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/I_star.txt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise Fault("no finished run under runs/; make train makes one, or name one with --run")
    return runs[-1].parent


def show(tau: Trajectory) -> None:
    """Prints a trajectory turn by turn: what the agent wrote, and what its tools returned."""
    for turn in tau.turns:
        print(printable(f"\n  agent   {turn.text.strip()}"))
        for k, text in enumerate(turn.result or [], 1):
            print(printable(f"  doc {k}   {' '.join(text.split())[:160]}"))
    print(printable(f"\n  answer  {tau.prediction if tau.prediction is not None else f'none ({tau.stop})'}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", help="without one, questions are read from the keyboard")
    parser.add_argument("--run", type=Path, help="directory of a finished run; default: the newest under runs/")
    parser.add_argument("--retriever", default="", help="URL of a search server; default: serve the run's corpus")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with one_line("ask.py"), stop.listening():
        ask(args)


def ask(args: argparse.Namespace) -> None:
    run = args.run or newest_run()
    if not (run / "I_star.txt").is_file():
        raise Fault(f"{run} holds no finished run (no I_star.txt)")
    cfg = read_config(run)
    status("loading the policy")
    import torch

    from engines.torch_engine import TorchEngine
    from models.model import load_policy

    instruction = (run / "I_star.txt").read_text().strip()
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as tmp:
        url = args.retriever or cfg.retriever
        server = None if url else Child([str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], f"{tmp}/log")
        tools = make_tools(cfg, Search(server.url if server else url, cfg.topk))
        model, tokenizer = load_policy(str(run / "policy"), device, stop_strings(tools))
        engine = TorchEngine(model, tokenizer, stop_strings(tools))
        status("")

        def answer(text: str) -> None:
            text = clean(text.strip())  # the shell's bytes may be no text
            q = Question("asked", text if text.endswith("?") else text + "?", (), "asked")
            job = Job(0, instruction, q, 0)
            show(rollout(engine, tokenizer, tools, [job], cfg, temperature=args.temperature, seed=args.seed)[0])

        try:
            print(printable(f"{run}\n\n{instruction}"))
            if args.question:
                return answer(args.question)
            example = random.choice(load_questions(cfg.test)).text
            print(printable(f"\nA question a line, an empty line ends. For example: {example}"))
            while text := input("\n> ").strip():
                answer(text)
        except (EOFError, stop.Stopped):
            print()
        finally:
            if server:
                server.stop()


if __name__ == "__main__":
    main()
