"""The paper's seven benchmarks, from the Hugging Face hub, and the world's questions.

FlashRAG's data sets there (RUC-NLPIR/FlashRAG_datasets, `<name>/{train,dev,test}.jsonl`) are
fetched once. Search-R1's rule says which split is evaluated: test if there is one, else dev.
"""

from collections.abc import Callable
from dataclasses import replace

from config import PRESETS
from tasks import Question
from tasks.questions import load_questions

HUB = "hf://datasets/RUC-NLPIR/FlashRAG_datasets"
BENCHMARKS = {  # the split that is evaluated, and its questions
    "hotpotqa": ("dev", 7405), "2wikimultihopqa": ("dev", 12576), "musique": ("dev", 2417),
    "bamboogle": ("test", 125), "nq": ("test", 3610), "triviaqa": ("test", 11313), "popqa": ("test", 14267),
}  # fmt: skip


def load_benchmark(
    name: str, load: Callable[[str], list[Question]] = load_questions
) -> list[Question]:
    """Returns the questions of a benchmark, of the world, or of a user's file, which a task may
    `load`; raises Fault where there are none."""
    if name not in BENCHMARKS:
        return load(PRESETS["world"]["test"] if name == "world" else name)
    split, published = BENCHMARKS[name]
    questions = load(f"{HUB}/{name}/{split}.jsonl")
    if len(questions) != published:
        print(f"note: {name}: {len(questions):,} questions, published were {published:,}")
    return [replace(q, source=name) for q in questions]
