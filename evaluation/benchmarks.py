"""The paper's seven benchmarks and the world's questions: where their files are, which split is evaluated.

FlashRAG's JSONL (RUC-NLPIR/FlashRAG_datasets on the Hugging Face hub, `<name>/{train,dev,test}.jsonl`) and Search-R1's
parquet of all sets (scripts/data_process/qa_search_test_merge.py there writes it) hold the same questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config import PRESETS
from plumbing.faults import Fault
from plumbing.hub import download as fetch
from tasks import Question
from tasks.questions import HOPS, load_questions

HUB = "RUC-NLPIR/FlashRAG_datasets"
SIZES = {  # questions of the split that is evaluated: test if there is one, else dev
    "hotpotqa": 7405, "2wikimultihopqa": 12576, "musique": 2417, "bamboogle": 125,
    "nq": 3610, "triviaqa": 11313, "popqa": 14267,
}  # fmt: skip
SPLITS = {name: "dev" if name in ("hotpotqa", "2wikimultihopqa", "musique") else "test" for name in SIZES}


def load(name: str, folder: Path, hub: bool = False, skip: Callable[[str], None] | None = None) -> list[Question]:
    """Returns the questions of a benchmark, of the world, or of a user's .jsonl or .parquet file.

    Raises Fault with the path expected and where to get the file. `hub` downloads what `folder` lacks; `skip` as in
    `load_questions`.
    """
    if name == "world":
        return load_questions(PRESETS["world"]["test"], skip)
    if name not in SIZES:
        if not name.endswith((".jsonl", ".parquet")):
            raise Fault(f"--data {name}: no such benchmark; choose from world, {', '.join(SIZES)}, or give a file")
        return load_questions(name, skip)
    found = find(name, folder)
    if found is None and hub:
        found = download(name, folder)
    if found is None:
        raise Fault(
            f"--data {name}: no {folder / name / (SPLITS[name] + '.jsonl')}; get it with "
            f"`hf download {HUB} {name}/{SPLITS[name]}.jsonl --repo-type dataset --local-dir {folder}`, or with --hub"
        )
    questions = load_questions(found, skip)
    if found.parent == folder:  # Search-R1's file of all sets
        questions = [q for q in questions if q.source == name]
        if not questions:
            raise Fault(f"--data {name}: {found} has no row with data_source {name}; put a file at {folder / name}")
    return [replace(q, source=name, hops=q.hops or HOPS.get(name, 0)) for q in questions]


def find(name: str, folder: Path) -> Path | None:
    """Returns the file of the first split that is there: test, dev, train (Search-R1's rule); then a merged parquet."""
    for split in ("test", "dev", "train"):
        for suffix in ("jsonl", "parquet"):
            if (path := folder / name / f"{split}.{suffix}").is_file():
                return path
    return merged if (merged := folder / "test.parquet").is_file() else None


def download(name: str, folder: Path) -> Path:
    """Returns the evaluated split's file, fetched from the hub into `folder`; raises Fault where it is out of reach."""
    file = f"{name}/{SPLITS[name]}.jsonl"
    try:
        return fetch(HUB, file, folder=folder)
    except Fault as e:
        raise Fault(f"--hub: {HUB}: {e}; copy its {file} to {folder / file} from a machine that has it") from None


def size_note(name: str, n: int) -> str:
    """Returns a line if a benchmark has fewer or more questions than its published split; "" if it is right."""
    if name in SIZES and n != SIZES[name]:
        return f"{name}: {n:,} questions, its published {SPLITS[name]} split has {SIZES[name]:,}"
    return ""
