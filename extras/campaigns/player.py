"""Plays questions with a policy of the small world under any instruction; shared by the campaigns."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from config import HERE, PRESETS, Config
from engines.torch_engine import TorchEngine
from models.model import load_policy
from plumbing.servers import Child
from rollout import rollout
from tasks import Job, Question
from tasks.search_qa import SearchQA
from tasks.tools import stop_strings

Play = Callable[[list[str], list[Question], float], np.ndarray]


@contextlib.contextmanager
def player(policy: str = "") -> Iterator[Play]:
    """Yields play(instructions, questions, temperature) -> exact match of each question under its instruction (n,).

    `policy`: directory; "" is the first policy of the world.
    """
    cfg = Config(**PRESETS["world"])
    model, tokenizer = load_policy(policy or cfg.model, "cpu")
    task = SearchQA(cfg)
    with tempfile.TemporaryDirectory() as folder:
        with Child([str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], f"{folder}/log") as server:
            task.connect(server.url)
            engine = TorchEngine(model, tokenizer, stop_strings(task.tools), cfg.max_rows)

            def play(instructions: list[str], questions: list[Question], temperature: float) -> np.ndarray:
                asked = enumerate(zip(instructions, questions, strict=True))
                jobs = [Job(None, text, q, group) for group, (text, q) in asked]
                taus = rollout(engine, tokenizer, task, jobs, cfg, temperature=temperature, seed=0)
                return np.array(task.reward(taus))

            yield play
