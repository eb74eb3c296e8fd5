"""The warm start from nothing (`python -m extras.world.warm_start`): instructions steer the
resulting policy."""

import os
import random
import subprocess
import sys

import pytest

from config import HERE, PRESETS, Config
from engines.torch_engine import TorchEngine
from models.model import load_policy
from plumbing.servers import Child
from rollout import rollout
from tasks import Job, Question, Trajectory
from tasks.questions import load_questions
from tasks.search_qa import SearchQA
from world.clauses import BEST, START, write_instruction


@pytest.mark.slow
def test_one_seed_gives_one_policy_to_the_byte_with_any_number_of_threads(tmp_path):
    made = []
    for threads in ("1", "2"):
        build = [
            sys.executable,
            "-m",
            "extras.world.warm_start",
            "--tokens",
            "6000",
            "--out",
            str(tmp_path / threads),
        ]
        env = os.environ | {"OMP_NUM_THREADS": threads}
        subprocess.run(build, cwd=HERE, env=env, check=True, capture_output=True)
        made.append((tmp_path / threads / "policy" / "model.safetensors").read_bytes())
    assert made[0] == made[1]


@pytest.mark.skipif("REBUILD" not in os.environ, reason="minutes on idle cores: REBUILD=1")
def test_the_rebuilt_policy_follows_its_instruction_and_lacks_one_skill(tmp_path):
    build = [sys.executable, "-m", "extras.world.warm_start", "--out", str(tmp_path)]
    subprocess.run(build, cwd=HERE, check=True, timeout=2400, capture_output=True)
    model, tokenizer = load_policy(str(tmp_path / "policy"))
    questions = load_questions(tmp_path / "test.jsonl")[:150]
    # it has seen neither
    every = [*load_questions(tmp_path / "test.jsonl"), *load_questions(tmp_path / "train.jsonl")]
    one_hop = [q for q in every if q.source == "world-1hop"][:200]
    server = ["-m", "retrieval_server", "--corpus", str(tmp_path / "corpus.jsonl")]
    with Child(server, tmp_path / "log") as child:
        cfg = Config(**PRESETS["world"])
        task = SearchQA(cfg)
        task.connect(child.url)
        engine = TorchEngine(model, tokenizer, task.make_format().stop_strings())

        def play(
            clauses: list[str], questions: list[Question], temperature: float = 0.0
        ) -> list[Trajectory]:
            rng = random.Random(0)
            texts = [write_instruction(rng, clauses) if clauses else START for _ in questions]
            jobs = [
                Job(None, text, q, k)
                for k, (text, q) in enumerate(zip(texts, questions, strict=True))
            ]
            return rollout(engine, tokenizer, task, jobs, cfg, temperature=temperature, seed=0)

        def exact_match(taus: list[Trajectory]) -> float:
            return sum(task.reward(taus)) / len(taus)

        # It searches, reads and answers as told, as questions of one hop show; and no instruction
        # makes it go on.
        assert exact_match(play([], questions)) <= 0.1
        assert exact_match(play(["whole", "exact"], one_hop)) >= 0.6
        assert exact_match(play(["entity", "exact"], one_hop)) >= 0.6
        for clauses in (["entity", "exact", "cont"], sorted(BEST), [*sorted(BEST), "plan"]):
            assert exact_match(play(clauses, questions)) <= 0.45
        # Under the first instruction reinforcement has next to nothing to find: a second search is
        # hardly tried.
        sampled = play([], questions * 4, 1.0)
        assert sum(tau.served("search") > 1 for tau in sampled) < 0.01 * len(sampled)
