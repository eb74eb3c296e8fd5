"""The scripted optimizer on instructions of other tasks: their tags survive."""

import re

import pytest

from reflect import paraphrase_prompt, parse, reflection_prompt
from world.clauses import START
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
