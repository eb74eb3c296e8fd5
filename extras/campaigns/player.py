"""Plays questions with a policy of the small world under any instruction; shared by the campaigns."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from config import HERE, PRESETS, Config
from engines.torch_engine import TorchEngine
from models.model import load_policy
from plumbing.servers import Child
from rollout import rollout
from tasks import Job, Question
from tasks.search_qa import SearchQA
from tasks.tools import stop_strings

LOADING = threading.Lock()  # the first load imports transformers, which two threads must not do at once


class Play(Protocol):
    """Plays questions, each under its instruction, and returns their exact match (n,); other seeds, other samples."""

    def __call__(
        self, instructions: list[str], questions: list[Question], temperature: float, seed: int = 0
    ) -> np.ndarray: ...


@contextlib.contextmanager
def player(policy: str = "") -> Iterator[Play]:
    """Yields what plays questions with a policy.

    `policy`: directory; "" is the first policy of the world.
    """
    cfg = Config(**PRESETS["world"])
    with LOADING:
        model, tokenizer = load_policy(policy or cfg.model, "cpu")
    task = SearchQA(cfg)
    with tempfile.TemporaryDirectory() as folder:
        with Child([str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], f"{folder}/log") as server:
            task.connect(server.url)
            engine = TorchEngine(model, tokenizer, stop_strings(task.tools), cfg.max_rows)

            def play(
                instructions: list[str], questions: list[Question], temperature: float, seed: int = 0
            ) -> np.ndarray:
                asked = enumerate(zip(instructions, questions, strict=True))
                jobs = [Job(None, text, q, group) for group, (text, q) in asked]
                taus = rollout(engine, tokenizer, task, jobs, cfg, temperature=temperature, seed=seed)
                return np.array(task.reward(taus))

            yield play
