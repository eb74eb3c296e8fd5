"""extras/hotpot.py on a few rows as the hub has them."""

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import hub_of

from config import HERE
from extras import hotpot
from plumbing.files import read_jsonl
from retrieval_server import Corpus
from tasks.search_qa import load_questions

ESIK = ["Esik", ["Esik is a town in Kazakhstan.", " It lies on a river of that name."]]
ALMATY = ["Almaty", ["Almaty is the largest city of Kazakhstan."]]


def row(id, question, answer, *context, level="hard"):
    titles, sentences = zip(*context, strict=True)
    return {
        "id": id,
        "question": question,
        "answer": answer,
        "type": "bridge",
        "level": level,
        "context": {"title": titles, "sentences": sentences},
        "supporting_facts": None,
    }


TRAIN = [
    row(
        "5a7a06935542990198eaf050",
        "Are Esik and Almaty in one country?",
        "yes",
        ESIK,
        ALMATY,
        ["Empty", []],
    ),
    row(
        "5a879ab05542996e4f30887e",
        "Where is the river of Esik?",
        "Kazakhstan",
        ALMATY,
        ESIK,
        level="medium",
    ),
]
TEST = [
    row(
        "5a8b57f25542995d1e6f1371",
        "Which city is largest where Esik is?",
        "Almaty",
        ESIK,
        ["Almaty", ["It was Alma-Ata", "“until” 1993."]],
    )
]


def written(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_rows_become_questions_and_a_corpus_of_all_passages_each_once(tmp_path):
    given = {"train": TRAIN, "test": TEST}
    files = {name: [written(tmp_path / f"{name}.parquet", rows)] for name, rows in given.items()}
    assert hotpot.convert(tmp_path / "out", files) == {"train": 2, "test": 1, "corpus": 3}
    for name, rows in given.items():
        found = load_questions(tmp_path / "out" / f"{name}.jsonl")
        assert [(q.id, q.text, q.golds, q.source) for q in found] == [
            (row["id"], row["question"], (row["answer"],), "hotpotqa") for row in rows
        ]
    corpus = Corpus(tmp_path / "out" / "corpus.jsonl")
    assert [corpus[k]["contents"] for k in range(3)] == [
        '"Esik"\nEsik is a town in Kazakhstan. It lies on a river of that name.',
        '"Almaty"\nAlmaty is the largest city of Kazakhstan.',
        '"Almaty"\nIt was Alma-Ata “until” 1993.',
    ]
    assert len({corpus[k]["id"] for k in range(3)}) == 3


@pytest.mark.slow
def test_the_command_fetches_the_hub_s_files_once(tmp_path):
    folder = tmp_path / "hub/datasets/hotpotqa/hotpot_qa/distractor"
    written(folder / "train-00000-of-00002.parquet", TRAIN[:1])
    written(folder / "train-00001-of-00002.parquet", TRAIN[1:])
    written(folder / "validation-00000-of-00001.parquet", TEST)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    with hub_of(tmp_path / "hub") as hub:
        env = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        for _ in range(2):
            command = [sys.executable, HERE / "extras" / "hotpot.py", "out"]
            done = subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr
            assert "2 questions to train on, 1 held out, 3 passages" in done.stdout
        assert len(hub.fetched()) == 3
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "train.jsonl")] == [
        row["id"] for row in TRAIN
    ]
