"""The warm start from nothing, as `make warm-start` runs it: instructions steer the resulting policy."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from data import em, load_questions
from engines.torch_engine import TorchEngine
from harness.servers import Child
from rollout import Job, rollout
from tools import Search, stop_strings
from training.model import load_policy
from world.clauses import BEST, START, write

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_rebuilt_policy_follows_a_combination_it_was_never_shown(tmp_path):
    build = [sys.executable, "-m", "world.warm_start", "--out", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=1200, capture_output=True)
    for name in ("corpus.jsonl", "train.jsonl", "test.jsonl", "instruction.txt", "policy/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "world" / "files" / name).read_bytes(), name
    model, tokenizer = load_policy(str(tmp_path / "policy"), "cpu")
    questions = load_questions(tmp_path / "test.jsonl")[:150]
    server = [str(ROOT / "retrieval_server.py"), "--corpus", str(tmp_path / "corpus.jsonl")]
    with Child(server, tmp_path / "log") as child:
        tools = [Search(child.url, 3)]
        cfg = Config(max_turns=4, max_response=48, max_observation=100, max_prompt=480)
        engine = TorchEngine(model, tokenizer, stop_strings(tools))

        def exact_match(instructions: list[str]) -> float:
            jobs = [Job(0, text, q, k) for k, (text, q) in enumerate(zip(instructions, questions, strict=True))]
            taus = rollout(engine, tokenizer, tools, jobs, cfg, temperature=0.0, seed=0)
            return sum(em(tau.prediction, q.golds) for tau, q in zip(taus, questions, strict=True)) / len(questions)

        dice = random.Random(0)
        assert exact_match([START] * len(questions)) <= 0.25
        assert exact_match([write(dice, sorted(BEST)) for _ in questions]) >= 0.80
