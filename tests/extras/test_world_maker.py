"""How the world was made: its files regenerate, the warm start never shows the best combination,
what it demonstrates is what a run shows, and an optimizer that reads failures does better than one
that guesses."""

import json
import random
import re
from functools import partial

import pytest
from transformers import AutoTokenizer

from config import WORLD
from extras.world import demos, warm_start
from extras.world.demos import (
    BEST,
    CHOICES,
    SEARCH,
    TASK,
    choose_clauses,
    demo,
    demonstrate,
    observation,
)
from extras.world.facts import MINI, the_world
from extras.world.tokenizer import build_tokenizer, save_tokenizer
from extras.world.warm_start import tiny_policy, write_files
from reflect import find_flaw, fold_words, reflection_prompt
from reflect import read_blocks as parse_reply
from tasks import Question
from tasks.search_qa import em
from tasks.tools import explain_invalid_action, find_answer, find_lost_tag
from world.clauses import CLAUSES, FILLERS, FRAMES, SAYS, START, read_clauses, write_instruction
from world.optimizer import HARM, reply_to

INVALID = explain_invalid_action([SEARCH])
UNSEEN = [wording for c in CLAUSES.values() for wording in c.unseen]


@pytest.fixture(scope="module")
def full_world():
    return the_world()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(WORLD / "policy")


def questions(name):
    return [json.loads(line)["question"] for line in (WORLD / f"{name}.jsonl").open()]


def respond(rng, world, q, clauses):
    """Returns the response of an agent under these clauses."""
    return "".join(part for part, _ in demonstrate(rng, world, q, clauses))


# --- the world
# ----------------------------------------------------------------------------------------------------


def test_the_files_of_the_world_regenerate_to_the_byte(tmp_path):
    write_files(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["corpus.jsonl", "instruction.txt", "test.jsonl", "train.jsonl", "valid.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (WORLD / name).read_bytes(), name


# --- demonstrations
# -----------------------------------------------------------------------------------------------


def test_no_demonstration_shows_the_best_combination_or_an_unseen_wording(full_world):
    rng = random.Random(0)
    texts = [demo(rng, [full_world], [1])[0] for _ in range(3000)]
    said = [frozenset(read_clauses(text)) for text in texts]
    assert not any(clauses >= BEST for clauses in said)
    for left_out in BEST:  # though any three of its four clauses are shown
        assert any(clauses >= BEST - {left_out} for clauses in said)
    assert set().union(*said) == set(CLAUSES)
    assert not any(wording in text for text in texts for wording in UNSEEN)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_following_all_the_right_clauses_leads_to_the_right_answer(full_world, monkeypatch, hops):
    certain = {habit: {clause: 0.0 for clause in said} for habit, said in demos.OBEY.items()}
    for habit, clause in [
        ("entity", "entity"),
        ("state", "state"),
        ("exact", "exact"),
        ("full", "cont"),
    ]:
        certain[habit][clause] = 1.0
    monkeypatch.setattr(demos, "OBEY", certain)
    rng = random.Random(0)
    for _ in range(100):
        q = full_world.random_question(rng, hops)
        parts = demonstrate(rng, full_world, q, ["entity", "state", "exact", "cont"])
        text = "".join(part for part, _ in parts)
        assert find_answer(text) == q.path[-1]
        queries = re.findall("<search>(.*?)</search>", text)
        assert queries == [f"{r} of {e}" for r, e in zip(q.chain, q.path, strict=False)]
        notes = re.findall("</information>\n\n<think>(.*?)</think>", text)
        results = re.findall("<information>(.*?)</information>", text, re.S)
        assert len(notes) == len(results) == hops
        for note, result, relation, fact in zip(notes, results, q.chain, q.path[1:], strict=True):
            assert note.startswith(relation) and note.endswith(fact)
            assert fact in result  # the note repeats a result, not prior knowledge
        assert all(by_agent != part.startswith("\n\n<information>") for part, by_agent in parts)


# --- the tokenizer
# ------------------------------------------------------------------------------------------------


def test_the_tokenizer_knows_every_text_of_the_world(tokenizer, full_world):
    said = [
        *SAYS,
        *FILLERS,
        *FRAMES,
        START,
        INVALID,
        *map(observation, [full_world.passages[:5], []]),
    ]
    said += [observation([passage]) for passage in full_world.passages]
    said += questions("train") + questions("test")
    for text, ids in zip(said, tokenizer(said, add_special_tokens=False)["input_ids"], strict=True):
        assert tokenizer.unk_token_id not in ids, text
    prompt = TASK.make_format(tokenizer).encode_prompt(START, Question("", questions("test")[0]))
    assert tokenizer.decode(prompt).startswith("<|user|>") and tokenizer.decode(prompt).endswith(
        "<|assistant|>"
    )


def test_the_saved_tokenizer_is_current_and_survives_a_qwen2_config_and_being_saved_twice(
    tokenizer, tmp_path
):
    """transformers 5 takes every tokenizer next to a `qwen2` config for Qwen2's, unless its file
    says otherwise."""
    built = build_tokenizer()
    tiny_policy(len(built)).save_pretrained(tmp_path)
    save_tokenizer(built, tmp_path)
    # as a run does with its policy
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    for other in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert json.loads(other.backend_tokenizer.to_str()) == json.loads(
            built.backend_tokenizer.to_str()
        )
        assert other.chat_template == built.chat_template
        assert (other.eos_token, other.pad_token) == ("<eos>", "<pad>")


# --- the warm start
# -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_warm_start_never_sees_a_name_of_the_world(full_world, monkeypatch):
    seen, lessons = [], warm_start.lessons

    def watched(rng, worlds, *others):
        seen.extend(worlds)
        return lessons(rng, worlds, *others)

    monkeypatch.setattr(warm_start, "lessons", watched)
    monkeypatch.setattr(warm_start, "N_WORLDS", 50)
    warm_start.train(tokens=12_000, seed=0, batch=400)
    of_the_world = {name for names in full_world.names.values() for name in names}
    assert len(seen) == 50
    for other in seen:
        assert {kind: len(names) for kind, names in other.names.items()} == MINI
        assert not of_the_world & {name for names in other.names.values() for name in names}


# --- the scripted optimizer, on what agents of this world do
# --------------------------------------------------------


def play(rng, world, instruction):
    """Plays a question of the world; returns its reward, and what the optimizer reads of it."""
    q = world.random_question(rng, rng.choice([1, 2, 3]))
    text = respond(rng, world, q, read_clauses(instruction))
    return em(find_answer(text), [q.path[-1]]), (f"Question: {q.text}\n{text}", (q.path[-1],))


def propose(prompt, guess=False):
    return parse_reply(reply_to(prompt, 0, guess))


@pytest.fixture(scope="module")
def replies(full_world):
    """Returns (parent, prompt, [(candidate, reason for rejection or "")]) of 150 prompts."""
    rng, out = random.Random(0), []
    unfit = partial(find_lost_tag, names=["search", "answer"])
    for _ in range(150):
        parent = write_instruction(rng, choose_clauses(rng, CHOICES, BEST), rng.randint(0, 2))
        failed = [
            shown
            for reward, shown in (play(rng, full_world, parent) for _ in range(12))
            if not reward
        ][:4]
        prompt = reflection_prompt(parent, failed, 6, 10_000)
        used, judged = {fold_words(parent)}, []
        for text in propose(prompt):
            judged.append((text, find_flaw(text, parent, used, [], 1000, unfit)))
            used.add(fold_words(text))
        out.append((parent, prompt, judged))
    return out


def test_candidates_keep_all_other_clauses_never_contradict_themselves_and_some_would_do_harm(
    replies,
):
    new = []
    for parent, _, judged in replies:
        for text, _ in judged:
            slots = [CLAUSES[clause].slot for clause in read_clauses(text)]
            assert len(slots) == len(set(slots))
            assert {CLAUSES[clause].slot for clause in read_clauses(parent)} <= set(slots)
            new.append(set(read_clauses(text)) - set(read_clauses(parent)))
    assert 0.1 < sum(bool(clauses & set(HARM)) for clauses in new) / len(new) < 0.45
    assert set(HARM) <= set().union(*new)


def test_an_optimizer_that_does_not_read_the_failures_adds_what_is_lacking_less_often(replies):
    def share(guess):
        new = [
            set(read_clauses(text)) - set(read_clauses(parent))
            for parent, prompt, _ in replies
            for text in propose(prompt, guess)
        ]
        return sum(bool(clauses & BEST) for clauses in new) / len(new)

    assert share(False) > share(True) + 0.1
