"""The scripted optimizer on questions of other sets than the world's."""

import pytest

from reflect import read_blocks, reflection_prompt
from world.clauses import FRAMES, read_clauses
from world.optimizer import reply_to

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
