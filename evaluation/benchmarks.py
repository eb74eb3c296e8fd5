"""The paper's seven benchmarks and the world's questions: where their files are, which split is
evaluated.

FlashRAG's JSONL (RUC-NLPIR/FlashRAG_datasets on the Hugging Face hub,
`<name>/{train,dev,test}.jsonl`) and Search-R1's parquet of all sets
(scripts/data_process/qa_search_test_merge.py there writes it) hold the same questions.
"""

from dataclasses import replace
from pathlib import Path

from config import PRESETS
from plumbing.faults import Fault
from tasks import Question
from tasks.questions import load_questions

HUB = "hf://datasets/RUC-NLPIR/FlashRAG_datasets"
SIZES = {  # questions of the split that is evaluated: test if there is one, else dev
    "hotpotqa": 7405, "2wikimultihopqa": 12576, "musique": 2417, "bamboogle": 125,
    "nq": 3610, "triviaqa": 11313, "popqa": 14267,
}  # fmt: skip
SPLITS = {
    name: "dev" if name in ("hotpotqa", "2wikimultihopqa", "musique") else "test" for name in SIZES
}


def load_benchmark(name: str, folder: Path) -> list[Question]:
    """Reads the questions of a benchmark, of the world, or of a user's file; Fault where there are
    none.

    A benchmark that is not in `folder` is fetched from the hub, once.
    """
    if name not in SIZES:
        return load_questions(PRESETS["world"]["test"] if name == "world" else name)
    # Search-R1's rule for the split: test, dev, train. The last file is its own, of all sets.
    files = [
        folder / name / f"{split}.{kind}"
        for split in ("test", "dev", "train")
        for kind in ("jsonl", "parquet")
    ]
    merged, on_disk = folder / "test.parquet", [path for path in files if path.is_file()]
    wanted = f"{name}/{SPLITS[name]}.jsonl"
    if on_disk:
        questions = load_questions(on_disk[0])
    elif merged.is_file():
        questions = [q for q in load_questions(merged) if q.source == name]
    else:
        try:
            questions = load_questions(f"{HUB}/{wanted}")
        except Fault as e:
            raise Fault(f"no {folder / wanted}, and {e}") from None
    if len(questions) != SIZES[name]:
        print(
            f"note: {name}: {len(questions):,} questions, its published {SPLITS[name]} split has {SIZES[name]:,}"
        )
    return [replace(q, source=name) for q in questions]
