"""Plays questions with a policy of the small world under any instruction; shared by the scripts here."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from config import PRESETS, Config
from tasks.questions import Question, em
from engines.torch_engine import TorchEngine
from plumbing.servers import Child
from rollout import Job, rollout
from tasks.tools import Search, stop_strings
from models.model import load_policy

HERE = Path(__file__).parent.parent
Play = Callable[[list[str], list[Question], float], np.ndarray]


@contextlib.contextmanager
def player(policy: str = "") -> Iterator[Play]:
    """Yields play(instructions, questions, temperature) -> exact match of each question under its instruction (n,).

    `policy`: directory; "" is the first policy of the world.
    """
    cfg = Config(**PRESETS["world"])
    model, tokenizer = load_policy(policy or cfg.model, "cpu")
    with tempfile.TemporaryDirectory() as tmp:
        with Child([str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], f"{tmp}/log") as server:
            search = Search(server.url, cfg.topk)
            engine = TorchEngine(model, tokenizer, stop_strings([search]), cfg.max_rows)

            def play(instructions: list[str], questions: list[Question], temperature: float) -> np.ndarray:
                pairs = enumerate(zip(instructions, questions, strict=True))
                jobs = [Job(0, text, q, k) for k, (text, q) in pairs]
                taus = rollout(engine, tokenizer, [search], jobs, cfg, temperature=temperature, seed=0)
                return np.array([em(tau.prediction, tau.question.golds) for tau in taus])

            yield play
