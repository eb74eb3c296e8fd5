"""extras/hotpot.py on a few rows as HotpotQA has them, from both of its sources."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import hub_of

from config import HERE
from extras import hotpot
from journal.directory import read_jsonl
from plumbing.faults import Fault
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from tasks.questions import load_questions

ESIK = ["Esik", ["Esik is a town in Kazakhstan.", " It lies on a river of that name."]]
ALMATY = ["Almaty", ["Almaty is the largest city of Kazakhstan."]]
TRAIN = [
    {"_id": "5a7a06935542990198eaf050", "answer": "yes", "question": "Are Esik and Almaty in one country?",
     "supporting_facts": [["Esik", 0], ["Almaty", 0]], "context": [ESIK, ALMATY, ["Empty", []]],
     "type": "comparison", "level": "medium"},
    {"_id": "5a879ab05542996e4f30887e", "answer": "Kazakhstan", "question": "Where is the river of Esik?",
     "supporting_facts": [["Esik", 0]], "context": [ALMATY, ESIK], "type": "bridge", "level": "hard"},
]  # fmt: skip
TEST = [
    {"_id": "5a8b57f25542995d1e6f1371", "answer": "Almaty", "question": "Which city is largest where Esik is?",
     "supporting_facts": [["Esik", 0]], "context": [ESIK, ["Almaty", ["It was Alma-Ata", "“until” 1993."]]],
     "type": "bridge", "level": "hard"},
]  # fmt: skip


def of_the_hub(rows):
    """Returns rows of the official JSON as the hub's parquet has them: `id`, and columns in place of pairs."""

    def columns(pairs, *names):
        return dict(zip(names, zip(*pairs, strict=True), strict=True))

    return [
        {key: row[key] for key in ("question", "answer", "type", "level")} | {
            "id": row["_id"], "context": columns(row["context"], "title", "sentences"),
            "supporting_facts": columns(row["supporting_facts"], "title", "sent_id"),
        }
        for row in rows
    ]  # fmt: skip


def written(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(of_the_hub(rows)), path)
    else:
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return str(path)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_both_sources_become_questions_and_a_corpus_of_all_passages_each_once(tmp_path, suffix):
    files = {name: [written(tmp_path / f"{name}.{suffix}", rows)] for name, rows in (("train", TRAIN), ("test", TEST))}
    assert hotpot.convert(tmp_path / "out", files) == {"train": 2, "test": 1, "corpus": 3}
    for name, rows in (("train", TRAIN), ("test", TEST)):
        found = load_questions(tmp_path / "out" / f"{name}.jsonl")
        assert [(q.id, q.text, q.golds, q.source, q.hops) for q in found] == [
            (row["_id"], row["question"], (row["answer"],), "hotpotqa", 2) for row in rows
        ]
    corpus = Corpus(tmp_path / "out" / "corpus.jsonl")
    assert [corpus[k]["contents"] for k in range(3)] == [
        '"Esik"\nEsik is a town in Kazakhstan. It lies on a river of that name.',
        '"Almaty"\nAlmaty is the largest city of Kazakhstan.',
        '"Almaty"\nIt was Alma-Ata “until” 1993.',
    ]
    assert len({corpus[k]["id"] for k in range(3)}) == 3
    assert BM25.build(corpus.texts()).search(["Where is the river of Esik?"], 1)[0][0][0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["corpus.jsonl", "test.jsonl", "train.jsonl"]


def without(key):
    return [TRAIN[0], {k: v for k, v in TRAIN[1].items() if k != key}]


@pytest.mark.parametrize("rows, says", [
    (without("question"), r"train.json:2: no question"), (without("answer"), "train.json:2: no answer"),
    (without("_id"), "train.json:2: no id"), (without("context"), "train.json:2: no context"),
    ([TRAIN[0] | {"context": [["Esik", None]]}], "train.json:1: no context"), (["x"], "train.json:1: no object"),
    ([TRAIN[0] | {"context": {"title": ["a", "b"], "sentences": [["c"]]}}], "train.json:1: no context"),
    ([TRAIN[0] | {"answer": "\ud800"}], "train.json:1: half of a surrogate pair"),
    ({"data": TRAIN}, "train.json: no list of questions"), ("[{", "train.json: no JSON"), ("", "train.json: no JSON"),
])  # fmt: skip
def test_a_file_of_another_form_is_a_line_and_what_was_there_stays(tmp_path, rows, says):
    out = tmp_path / "out"
    written(out / "train.jsonl", "old")
    with pytest.raises(Fault, match=says) as e:
        hotpot.convert(out, {"train": [written(tmp_path / "train.json", rows)]})
    assert "\n" not in str(e.value)
    assert [path.name for path in out.iterdir()] == ["train.jsonl"] and (out / "train.jsonl").read_text() == "old"


@pytest.mark.parametrize("name", ["gone.json", "gone.parquet", "damaged.parquet"])
def test_a_file_that_cannot_be_read_is_a_line(tmp_path, name):
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    with pytest.raises(Fault, match=name):
        hotpot.convert(tmp_path / "out", {"train": [str(tmp_path / name)]})


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Fault, match=f"cannot write {tmp_path}/file/out"):
        hotpot.convert(tmp_path / "file" / "out", {"train": [written(tmp_path / "train.json", TRAIN)]})


def test_the_command_fetches_the_hub_s_files_once(tmp_path):
    folder = tmp_path / "hub/datasets/hotpotqa/hotpot_qa/distractor"
    parts = {"train-00000-of-00002": TRAIN[:1], "train-00001-of-00002": TRAIN[1:], "validation-00000-of-00001": TEST}
    for name, rows in parts.items():
        written(folder / f"{name}.parquet", rows)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    with hub_of(tmp_path / "hub") as hub:
        env = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        for _ in range(2):
            command = [sys.executable, HERE / "extras" / "hotpot.py", "out"]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stderr
            assert "2 questions to train on, 1 held out, 3 passages" in done.stdout
        assert len(hub.fetched()) == 3
    assert [row["id"] for row in read_jsonl(tmp_path / "out" / "train.jsonl")] == [row["_id"] for row in TRAIN]
