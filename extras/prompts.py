"""The prompts of Table 1's methods, restated: in prose, and in the few words that the world's
policy knows."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from config import WORLD


class Prompt(NamedTuple):
    """What the user says, and how the model's reply begins; both with {question}, {documents},
    {thoughts}."""

    user: str
    reply: str = ""


@dataclass(frozen=True)
class Wording:
    """The prompts of the methods in one language: prose, or the few words that the world's policy
    knows."""

    direct: str  # the instruction for answering at once
    target: str  # what supervision shows as the reply to it
    grpo: str  # the instruction for reasoning without tools
    rag: Prompt
    ircot: Prompt
    sentence_ends: tuple[str, ...]  # where a step of IRCoT ends
    search_o1: Prompt
    query: tuple[str, str]  # Search-o1's tags around a query
    result: tuple[str, str]  # and around what it has read
    read: Prompt  # Search-o1's reading of documents, apart from the reasoning
    read_end: str  # what follows it in the reply is not read


PROSE = Wording(
    direct=(
        "Answer the given question from what you know. Write the answer alone inside <answer> and </answer>. For "
        "example, <answer> Beijing </answer>."
    ),
    target="<answer> {answer} </answer>",
    grpo=(
        "Answer the given question. Reason inside <think> and </think> first, then give the answer inside <answer> and "
        "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
    ),
    rag=Prompt(
        "Answer the question from these documents. Write the answer alone, no other words.\n\n{documents}\n\n{question}"
    ),
    ircot=Prompt(
        'Reason step by step over the documents, one sentence a step, and end with the sentence "So the answer is: " '
        "and the answer.\n\nDoc 1(Title: Lisbon) Lisbon is the capital and largest city of Portugal.\n"
        "Doc 2(Title: Portugal) Portugal is a country in Europe. It borders Spain and the Atlantic Ocean.\n"
        "Question: Which ocean borders the country whose capital is Lisbon?\n"
        "Thought: Lisbon is the capital of Portugal. Portugal borders the Atlantic Ocean. So the answer is: the "
        "Atlantic Ocean.\n\n{documents}\nQuestion: {question}\nThought:{thoughts}"
    ),
    sentence_ends=(".", "\n"),
    search_o1=Prompt(
        "You can search. To do so, write <|begin_search_query|> your query <|end_search_query|>; what was found then "
        "stands between <|begin_search_result|> and <|end_search_result|>. You may search {searches} times; break the "
        "question into steps, and search for what a step needs. When you are sure, write the final answer as "
        "\\boxed{{answer}}.\n\nQuestion: {question}"
    ),
    query=("<|begin_search_query|>", "<|end_search_query|>"),
    result=("\n\n<|begin_search_result|>", "<|end_search_result|>\n\n"),
    read=Prompt(
        "Somebody reasons about a question and has searched. Find in the documents what helps the next step, and write "
        'it in a few sentences after "Final Information:"; write that nothing helps if that is so.\n\n'
        "Reasoning so far:\n{thoughts}\n\nQuery: {question}\n\nDocuments:\n{documents}"
    ),
    read_end="Reasoning so far:",
)
_FRAME = (
    "Think in <think> </think>, {}read <information> </information>, answer in <answer> </answer>."
)
_ASK = "\n\nQuestion: {question}\n"
IN_WORLD = Wording(
    direct=f"{_FRAME.format('')} Answer from memory. Give just the name as answer.",
    target="<think></think><answer>{answer}</answer>",
    grpo=f"{_FRAME.format('')} Answer from memory. Give just the name as answer.",
    rag=Prompt(
        f"{_FRAME.format('search with <search> </search>, ')} Search the whole question once. Give just the name as "
        f"answer.{_ASK}",
        "<think></think><search>{question}</search>\n\n<information>{documents}</information>\n\n",
    ),
    ircot=Prompt(
        f"{_FRAME.format('search with <search> </search>, ')} State the fact found after each search. Give just the "
        f"name as answer.{_ASK}",
        "<think></think><search>{question}</search>\n\n<information>{documents}</information>\n\n{thoughts}",
    ),
    sentence_ends=("</think>", "</answer>"),
    search_o1=Prompt(
        f"{_FRAME.format('search with <search> </search>, ')} Search one entity at a time. Give just the name as "
        f"answer.{_ASK}"
    ),
    query=("<search>", "</search>"),
    result=("\n\n<information>", "</information>\n\n"),
    read=Prompt(
        f"{_FRAME.format('search with <search> </search>, ')} Write down the evidence before the next step.{_ASK}",
        "<search>{question}</search>\n\n<information>{documents}</information>\n\n<think>",
    ),
    read_end="</think>",
)


def wording(model: str) -> Wording:
    """Returns the prompts for a model: the world's for the world's policy and for what was trained
    from it."""
    return IN_WORLD if Path(model) == WORLD / "policy" else PROSE
