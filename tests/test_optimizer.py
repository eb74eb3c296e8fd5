"""The scripted optimizer on instructions of other tasks: their tags survive."""

import re

import pytest

from reflect import paraphrase_prompt, read_blocks, reflection_prompt
from world.clauses import FRAMES, START, read_clauses
from world.optimizer import reply_to

GAME = "Find the number. Guess by <guess> number </guess>; you read <hint> </hint>. Then <answer> it </answer>."
MIXED = f"{START} Count words by <count> text </count>."
FAILURE = [
    (
        "Question: Which number?\n<guess> 3 </guess>\n\n<hint>higher</hint>\n\n<answer> 3 </answer>",
        ("7",),
    )
]


@pytest.mark.parametrize("instruction", [GAME, MIXED])
@pytest.mark.parametrize("prompt", [
    lambda text: paraphrase_prompt(text, 6), lambda text: reflection_prompt(text, FAILURE, 6, 4000),
])  # fmt: skip
def test_tags_of_another_tool_are_kept(instruction, prompt):
    tags = set(re.findall(r"</?\w+>", instruction))
    kept = told = 0
    for seed in range(30):
        for text in read_blocks(reply_to(prompt(instruction), seed)):
            told += 1
            kept += tags <= set(re.findall(r"</?\w+>", text))
    assert told > 150 and kept / told > 0.9  # a few replies lose a tag on purpose, as an LLM's do


def test_revisions_of_a_foreign_instruction_differ_from_it():
    texts = set()
    for seed in range(5):
        texts |= {*read_blocks(reply_to(reflection_prompt(GAME, FAILURE, 6, 4000), seed))}
    assert len(texts) > 10 and GAME not in texts


QUESTION = "Which currency is used in Esik?"
MIRROR, ESIK, KAZAKHSTAN = (
    f"<search> {query} </search>\n<information>Doc 1(Title: {title}) {fact}.</information>\n"
    for query, title, fact in [
        (QUESTION, "Esik", "Esik is a place in Kazakhstan"),
        ("Esik", "Esik", "Esik is a place in Kazakhstan"),
        ("Kazakhstan", "Kazakhstan", "The currency of Kazakhstan is the Kazakhstani tenge (KZT)"),
    ]
)
SYMPTOMS = {  # what an agent did -> the clause that it lacks
    "<answer> Russian ruble </answer>": "entity",
    f"{MIRROR}<answer> Kazakhstan </answer>": "entity",
    f"{ESIK}<answer> Kazakhstan </answer>": "cont",
    f"{ESIK}{KAZAKHSTAN}<answer> It is Kazakhstani tenge. </answer>": "exact",
    f"{ESIK}{KAZAKHSTAN}<answer> Kazakhstan </answer>": "state",
}


@pytest.mark.parametrize("acted", SYMPTOMS)
def test_questions_that_are_not_the_world_s_are_diagnosed_by_their_right_answers(acted):
    """Of five clauses that a failure can ask for, the one that it shows is proposed most, in each
    of its wordings."""
    failure = (f"Question: {QUESTION}\n{acted}", ("Kazakhstani tenge", "KZT"))
    found = dict.fromkeys(SYMPTOMS.values(), 0)
    for seed in range(60):
        for text in read_blocks(reply_to(reflection_prompt(FRAMES[0], [failure], 6, 4000), seed)):
            for clause in found.keys() & read_clauses(text):
                found[clause] += 1
    most, second = sorted(found.values())[-1:-3:-1]
    assert found[SYMPTOMS[acted]] == most > 3 * second
