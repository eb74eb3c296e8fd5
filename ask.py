"""Ask the trained agent: it thinks, searches and answers under its best instruction.

    python ask.py "What is the birthplace of the director of the film Gibax Gastaith?"
    python ask.py --run runs/NAME            # questions from the keyboard, one a line
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from config import HERE, Config
from data import Question, load_questions
from engines.torch_engine import TorchEngine
from harness.servers import Child
from rollout import STOP, Search, rollout
from training.model import load_policy


def newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/I_star.txt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        sys.exit("ask.py: no finished run under runs/; make train makes one, or name one with --run")
    return runs[-1].parent


def show(tau) -> None:
    """A trajectory turn by turn: what the agent wrote, which passages it was given."""
    for turn in tau.turns:
        print(f"\n  agent   {turn['text'].strip()}")
        for k, contents in enumerate(turn.get("documents", []), 1):
            print(f"  doc {k}   {' '.join(contents.split())[:160]}")
    print(f"\n  answer  {tau.prediction if tau.prediction is not None else f'none ({tau.stop})'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", help="without one, questions are read from the keyboard")
    parser.add_argument("--run", type=Path, help="directory of a finished run; the newest under runs/ without it")
    parser.add_argument("--retriever", default="", help="URL of a search server; else the run's corpus is served")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run = args.run or newest_run()
    if not (run / "I_star.txt").is_file():
        sys.exit(f"ask.py: {run} holds no finished run (no I_star.txt)")
    cfg = Config(**json.loads((run / "config.json").read_text()))
    instruction = (run / "I_star.txt").read_text().strip()
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_policy(str(run / "policy"), device)
    engine = TorchEngine(model, tokenizer, STOP)
    with tempfile.TemporaryDirectory() as tmp:
        url = args.retriever or cfg.retriever
        server = None if url else Child([str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], f"{tmp}/log")
        search = Search(url or server.url, cfg.topk)

        def answer(text: str) -> None:
            text = text.strip()
            q = Question("asked", text if text.endswith("?") else text + "?", (), "asked")
            limits = dict(max_turns=cfg.max_turns, max_response=cfg.max_response, max_prompt=cfg.max_prompt)
            show(rollout(engine, tokenizer, search, [(0, instruction, q, 0)], **limits, seed=args.seed,
                         max_observation=cfg.max_observation, temperature=args.temperature)[0])  # fmt: skip

        try:
            print(f"{run}\n\n{instruction}")
            if args.question:
                return answer(args.question)
            example = random.choice(load_questions(cfg.test)).text
            print(f"\nA question a line, an empty line ends. For example: {example}")
            while text := input("\n> ").strip():
                answer(text)
        except (EOFError, KeyboardInterrupt):
            print()
        finally:
            if server:
                server.stop()


if __name__ == "__main__":
    main()
