"""The scripted optimizer on instructions of other tasks: their tags survive."""

import random
import re

import pytest

from reflect import history_prompt, paraphrase_prompt, parse, reflection_prompt
from world.clauses import CLAUSES, FRAMES, START, read, write
from world.optimizer import reply_to

GAME = "Find the number. Guess by <guess> number </guess>; you read <hint> </hint>. Then <answer> it </answer>."
MIXED = f"{START} Count words by <count> text </count>."
FAILURE = [("Question: Which number?\n<guess> 3 </guess>\n\n<hint>higher</hint>\n\n<answer> 3 </answer>", ("7",))]


@pytest.mark.parametrize("instruction", [GAME, MIXED])
@pytest.mark.parametrize("prompt", [
    lambda text: paraphrase_prompt(text, 6), lambda text: reflection_prompt(text, FAILURE, 6, 4000),
])  # fmt: skip
def test_tags_of_another_tool_are_kept(instruction, prompt):
    tags = set(re.findall(r"</?\w+>", instruction))
    kept = told = 0
    for seed in range(30):
        for text in parse(reply_to(prompt(instruction), seed)):
            told += 1
            kept += tags <= set(re.findall(r"</?\w+>", text))
    assert told > 150 and kept / told > 0.9  # a few replies lose a tag on purpose, as an LLM's do


def test_revisions_of_a_foreign_instruction_differ_from_it():
    texts = {text for seed in range(5) for text in parse(reply_to(reflection_prompt(GAME, FAILURE, 6, 4000), seed))}
    assert len(texts) > 10 and GAME not in texts


QUESTION = "Which currency is used in Esik?"
MIRROR, ESIK, KAZAKHSTAN = (
    f"<search> {query} </search>\n<information>Doc 1(Title: {title}) {fact}.</information>\n"
    for query, title, fact in [
        (QUESTION, "Esik", "Esik is a place in Kazakhstan"), ("Esik", "Esik", "Esik is a place in Kazakhstan"),
        ("Kazakhstan", "Kazakhstan", "The currency of Kazakhstan is the Kazakhstani tenge (KZT)"),
    ]
)  # fmt: skip
SYMPTOMS = {  # what an agent did -> the clause that it lacks
    "<answer> Russian ruble </answer>": "entity",
    f"{MIRROR}<answer> Kazakhstan </answer>": "entity",
    f"{ESIK}<answer> Kazakhstan </answer>": "cont",
    f"{ESIK}{KAZAKHSTAN}<answer> It is Kazakhstani tenge. </answer>": "exact",
    f"{ESIK}{KAZAKHSTAN}<answer> Kazakhstan </answer>": "state",
}


@pytest.mark.parametrize("acted", SYMPTOMS)
def test_questions_that_are_not_the_world_s_are_diagnosed_by_their_right_answers(acted):
    """Of five clauses that a failure can ask for, the one that it shows is proposed most, in each of its wordings."""
    failure = (f"Question: {QUESTION}\n{acted}", ("Kazakhstani tenge", "KZT"))
    found = dict.fromkeys(SYMPTOMS.values(), 0)
    for seed in range(60):
        for text in parse(reply_to(reflection_prompt(FRAMES[0], [failure], 6, 4000), seed)):
            for clause in found.keys() & read(text):
                found[clause] += 1
    most, second = sorted(found.values())[-1:-3:-1]
    assert found[SYMPTOMS[acted]] == most > 3 * second


# ---- fair proposers


SCORES = [([], 2), (["whole"], 5), (["exact"], 30), (["exact", "whole"], 60), (["entity"], 40), (["memory"], 0)]


def told(prompt, seeds=60, fair=True):
    """Returns the clauses of every candidate that replies to a prompt have."""
    return [set(read(text)) for seed in range(seeds) for text in parse(reply_to(prompt, seed, fair=fair))]


def test_any_fair_proposer_brings_new_clauses_and_the_scripted_one_only_where_it_sees_failures():
    history = history_prompt([(START, 0.05), (f"{FRAMES[0]} Be careful.", 0.02)], 6)
    mirror = [(f"Question: {QUESTION}\n{MIRROR}<answer> Kazakhstan </answer>", ("tenge",))]
    for prompt, blind in ((paraphrase_prompt(START, 6), True), (history, True),
                          (reflection_prompt(START, mirror, 6, 4000), False)):  # fmt: skip
        new = [clauses - {"whole"} for clauses in told(prompt)]
        assert set().union(*new) == {*CLAUSES} - {"whole"}  # every other clause is possible
        assert any(not x for x in new)  # and mere wording is
        assert blind == all(not clauses - {"whole"} for clauses in told(prompt, fair=False))


def test_what_a_fair_proposer_reads_is_what_it_brings_more_of():
    mirror = [(f"Question: {QUESTION}\n{MIRROR}<answer> Kazakhstan </answer>", ("tenge",))]
    share = lambda prompt: sum("entity" in x for x in told(prompt)) / len(told(prompt))  # noqa: E731
    assert share(reflection_prompt(START, mirror, 6, 4000)) > 0.4 > 4 * share(paraphrase_prompt(START, 6))


def test_a_fair_history_revises_its_best_instruction_by_what_scored_higher():
    """By hand: with `entity` 40, without it 19.4; with `exact` 45, without it 11.75; `whole` 32.5 against 18."""
    rng = random.Random(0)
    scored = sorted(((write(rng, clauses), score / 100) for clauses, score in SCORES), key=lambda pair: pair[1])
    candidates = told(history_prompt(scored, 6))
    kept = sum("exact" in x or "verbose" in x for x in candidates)  # the best has it; harm may replace it
    assert kept == len(candidates)
    counts = {clause: sum(clause in x for x in candidates) for clause in CLAUSES}
    assert counts["entity"] > 0.4 * len(candidates) and counts["entity"] > 5 * counts["plan"]
    worst = told(history_prompt([(text, 1 - score) for text, score in scored][::-1], 6))
    assert sum("exact" in x for x in worst) < 0.3 * len(worst)  # the scores decide, not the place in the list


def test_fair_replies_are_well_formed_as_often_as_the_scripted_one_s():
    for prompt in (paraphrase_prompt(START, 6), reflection_prompt(START, FAILURE, 6, 4000)):
        many, fewer = (sum(len(parse(reply_to(prompt, s, fair=fair))) for s in range(100)) for fair in (True, False))
        assert abs(many - fewer) < 0.1 * fewer
