"""The embedded world in one process, for notebooks: its first policy, its questions, a search
without a server."""

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from config import PRESETS, Config
from engines.torch_engine import TorchEngine
from grpo import Learner
from models.model import load_model, load_tokenizer
from plumbing.files import read_jsonl
from retrieval_server import BM25
from rollout import rollout
from tasks import Job, Question, Task, Trajectory
from tasks.search_qa import Search, SearchQA
from tasks.task import choose_instruction, rng_of, set_rewards


def config(**knobs: Any) -> Config:
    """The configuration of the embedded default, with other knobs where they are given."""
    return Config(**PRESETS["world"] | knobs)


def score(learner: Learner, taus: Sequence[Trajectory]) -> list[Any]:
    """Returns the log-probs of each trajectory's tokens with mask 1, under the policy now."""
    ends = np.cumsum([sum(tau.mask) for tau in taus])
    return np.split(learner.score_tokens(taus)[0], ends[:-1])


class Library(Search):
    """The world's search, answered at once: the passages and the ranking are those of its
    server."""

    def __init__(self, cfg: Config):
        super().__init__("", cfg.topk)
        self.contents = [row["contents"] for row in read_jsonl(Path(cfg.corpus))]
        self.index = BM25.build(self.contents)

    def submit(self, argument: str) -> "Future[list[str]]":
        passages: Future[list[str]] = Future()
        passages.set_result(
            [self.contents[row] for row, _ in self.index.search([argument], self.topk)[0]]
        )
        return passages


class LibraryQA(SearchQA):
    """Search QA whose search needs no server."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.tools = [Library(cfg)]
        self.instruction = choose_instruction(self)


class Player:
    """A policy with its engine and its learner in this process: `rollout` and `update`, as inspo.py
    calls them."""

    def __init__(self, cfg: Config, task: Task):
        self.cfg, self.task, ends = cfg, task, task.make_format().stop_strings()
        self.model, self.tokenizer = load_model(cfg.model), load_tokenizer(cfg.model)
        self.engine = TorchEngine(self.model, self.tokenizer, ends)
        self.learner = Learner(self.model, copy.deepcopy(self.model), cfg)

    def rollout(self, t: int, purpose: str, jobs: Sequence[Job]) -> list[Trajectory]:
        """Plays the jobs; other steps and purposes, other samples."""
        seed = int(rng_of(self.cfg.seed, t, purpose).integers(2**31))
        return rollout(
            self.engine,
            self.tokenizer,
            self.task,
            jobs,
            self.cfg,
            temperature=self.cfg.temperature,
            seed=seed,
        )

    def play(
        self, t: int, purpose: str, instruction: str, questions: Iterable[Question], G: int = 1
    ) -> list[Trajectory]:
        """Asks each question G times under an instruction, which is a group, and sets rewards and
        advantages (Alg.1 line 6 and 7, Eq. 3)."""
        jobs = [Job(0, instruction, q, k) for k, q in enumerate(questions) for _ in range(G)]
        taus = self.rollout(t, purpose, jobs)
        set_rewards(self.task, taus)
        self.learner.set_advantages(taus)
        return taus

    def measure(self, instruction: str, questions: Iterable[Question]) -> float:
        """Returns the mean reward of an answer to each question."""
        return float(np.mean([tau.reward for tau in self.play(0, "test", instruction, questions)]))
