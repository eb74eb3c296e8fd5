"""The clauses of the world's instructions, and their wordings.

An instruction is a frame (which tags to use), some clauses and some filler sentences, in any order.
The warm start teaches the policy the `taught` wordings of every clause together with the behaviour
they ask for. Only the scripted optimizer writes the `unseen` wordings, so that some of its
proposals make the right point in words that the policy has never read.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    slot: str  # clauses of one slot contradict each other
    taught: tuple[str, ...]
    unseen: tuple[str, ...]


CLAUSES = {
    "entity": Clause(
        "search",
        ("Search one entity at a time.", "Break the question into single entity searches.",
         "Look up each entity separately.", "Each query is about one entity."),
        ("Search each entity of the question separately.", "Look up one name at a time."),
    ),
    "whole": Clause(
        "search",
        ("Search the whole question once.", "Use the full question as the query.",
         "Issue one query with all the words.", "Your query is the question itself."),
        ("Search all the words of the question.", "Issue the full question as one query."),
    ),
    "memory": Clause(
        "search",
        ("Answer from memory.", "Do not search at all.", "Rely on what you already know.", "Skip the search."),
        ("Answer what you already know.", "Rely on memory and skip the search."),
    ),
    "state": Clause(
        "note",
        ("State the fact found after each search.", "Write down the evidence before the next step.",
         "Quote the relevant fact after every result.", "Note what each result says."),
        ("State the relevant evidence after every search.", "Write down what each result says."),
    ),
    "terse": Clause(
        "note",
        ("Do not explain.", "Keep thoughts empty.", "Skip the notes.", "Do not write thoughts."),
        ("Do not write notes.", "Keep the notes empty."),
    ),
    "exact": Clause(
        "answer",
        ("Answer with the exact name only.", "Give just the name as answer.",
         "The answer must be a bare name.", "Put only the name in the answer."),
        ("The answer is the exact name only.", "Give just a bare name."),
    ),
    "verbose": Clause(
        "answer",
        ("Answer in a full sentence.", "Make the answer a polite sentence.",
         "Explain inside the answer.", "The answer must be a sentence."),
        ("Put a full sentence in the answer.", "Give a polite sentence as answer."),
    ),
    "cont": Clause(
        "stop",
        ("Keep searching until the last fact is found.", "Do not stop before every step is resolved.",
         "Continue until the evidence is complete.", "Search again while a fact is missing."),
        ("Continue searching until every fact is found.", "Do not stop while the evidence is missing."),
    ),
    "early": Clause(
        "stop",
        ("Stop after the first result.", "Answer as soon as possible.", "One result is enough.",
         "Do not search again."),
        ("Stop as soon as possible.", "The first result is enough."),
    ),
    "plan": Clause(
        "plan",
        ("Plan the steps first.", "List the needed relations before you start.",
         "Begin with a short plan.", "First write the steps as a list."),
        ("Write a short plan before you start.", "Begin with the list of steps."),
    ),
}  # fmt: skip

FRAMES = (
    "Think in <think> </think>, search with <search> </search>, read <information> </information>, "
    "answer in <answer> </answer>.",
    "Use <think> </think> to think, <search> </search> to search and <answer> </answer> to answer. "
    "Results are in <information> </information>.",
    "Write thoughts as <think> </think>, queries as <search> </search>, the answer as <answer> </answer>. "
    "Read results in <information> </information>.",
)
FILLERS = (
    "You are a helpful agent.", "Think step by step.", "Be careful.", "You are a careful researcher.",
    "Take your time.", "Use the search tool.", "Read the question first.", "Do your best.",
)  # fmt: skip

# The static baseline keeps this instruction; evolution starts from it.
START = f"{FRAMES[0]} {CLAUSES['whole'].taught[0]}"

SAYS = {wording: name for name, c in CLAUSES.items() for wording in c.taught + c.unseen}


def write_instruction(
    rng: random.Random, clauses, fillers: int = 0, wordings: str = "taught"
) -> str:
    """Returns an instruction with these clauses; `wordings` is "taught", "unseen" or "any"."""
    sentences = rng.sample(FILLERS, fillers)
    for name in clauses:
        c = CLAUSES[name]
        pool = {"taught": c.taught, "unseen": c.unseen, "any": c.taught + c.unseen}[wordings]
        sentences.append(rng.choice(pool))
    rng.shuffle(sentences)
    sentences.insert(rng.choice([0, len(sentences)]), rng.choice(FRAMES))
    return " ".join(sentences)


def read_clauses(instruction: str) -> list[str]:
    """Returns the clauses that an instruction contains, in order of appearance."""
    places = sorted(
        (instruction.find(wording), name)
        for wording, name in SAYS.items()
        if wording in instruction
    )
    return list(dict.fromkeys(name for _, name in places))
