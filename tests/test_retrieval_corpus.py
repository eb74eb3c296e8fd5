"""Passages on disk: rows as plain json reads them, and the memory that a corpus takes."""

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plumbing.faults import Fault
from retrieval.corpus import Corpus

ROOT = Path(__file__).parents[1]
WORDS = [
    "plain",
    'quoted "x"',
    "naïve",
    "日本語",
    "🦉",
    "\u2028",
    "\x85",
    "\x0b",
    "a\\nb",
    "tab\t",
    "line\nbreak",
    " ",
    "",
]


def random_rows(n, seed=0):
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        text = " ".join(draw.choices(WORDS, k=draw.randint(0, 12)))
        key = draw.choice([i, f"p{i}", -i, ""])
        both = {"id": key, "title": draw.choice(WORDS), "text": text}
        rows.append(draw.choice([{"id": key, "contents": text}, both, both | {"contents": text}]))
    return rows


def as_passages(rows):
    """Returns the passages that the rows stand for, computed independently."""
    contents = [row["contents"] if "contents" in row else '"' + row["title"] + '"\n' + row["text"] for row in rows]
    return [{"id": str(row["id"]), "contents": text} for row, text in zip(rows, contents, strict=True)]


def write(path, rows, newline="\n"):
    path.write_text("".join(json.dumps(row) + newline for row in rows), newline="")
    return path


def passages(corpus):
    return [corpus[row] for row in range(len(corpus))]


def refusal(read):
    with pytest.raises(Fault) as refused:
        read()
    message = str(refused.value)
    assert "\n" not in message and ";" in message, message
    return message


# --- rows ---


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\r\n \t\r\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_rows_are_read_like_plain_json(tmp_path, newline, ascii_only, ended):
    text = newline + newline.join(json.dumps(row, ensure_ascii=ascii_only) for row in random_rows(200))
    path = tmp_path / "c.jsonl"
    path.write_bytes((text + newline * ended).encode())
    with open(path, encoding="utf-8", newline="\n") as f:
        expected = as_passages([json.loads(line) for line in f if line.strip()])
    assert len(expected) == 200
    corpus = Corpus(path)
    assert len(corpus) == 200 and os.listdir(tmp_path) == ["c.jsonl"]
    assert passages(corpus) == expected
    assert list(corpus.texts()) == [p["contents"] for p in expected]
    with pytest.raises(IndexError):
        corpus[200]


def test_concurrent_threads_get_their_own_rows(tmp_path):
    rows = [{"id": i, "contents": f"{i} " * (i % 50)} for i in range(3000)]
    corpus = Corpus(write(tmp_path / "c", rows))

    def read(seed):
        order = random.Random(seed).choices(range(3000), k=3000)
        return all(corpus[i] == {"id": str(i), "contents": f"{i} " * (i % 50)} for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b'{"id": ', "JSONDecodeError: Expecting value"),
        (b'{"id": "1", "contents": "\xff"}', "UnicodeDecodeError: 'utf-8' codec can't decode"),
        (b'["1", "x"]', "TypeError: list indices must be"),
        (b'{"contents": "x"}', "KeyError: 'id'"),
        (b'{"id": "1", "text": "x"}', "KeyError: 'title'"),
        (b'{"id": "1", "title": "x"}', "KeyError: 'text'"),
        (b'{"id": "1", "title": null, "text": "x"}', "TypeError: "),
        (b'{"id": "1", "contents": null}', "TypeError: sequence item 1: expected str instance, NoneType"),
        (b'{"id": "1", "contents": 5}', "TypeError: sequence item 1: expected str instance, int"),
        (b'{"id": "\\udc00", "contents": "x"}', "UnicodeEncodeError: 'utf-8' codec can't encode"),
        (b"[" * 100_000, "RecursionError: maximum recursion depth"),
    ],
)
def test_a_bad_row_is_named_by_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": 1, "contents": "x"}\r\n\n' + line + b'\n{"id": 2, "contents": "x"}')
    corpus = Corpus(path)
    assert corpus[0]["id"] == "1" and corpus[2]["id"] == "2"
    for read in (lambda: corpus[1], lambda: corpus.digest, lambda: list(corpus.texts())):
        assert refusal(read).startswith(f"{path}, row 1: not a passage ({complaint}")


def archive(text, mode):
    """Returns the bytes of a tar archive of one file, in folders as Search-R1's corpus is."""
    out, info = io.BytesIO(), tarfile.TarInfo("data00/indexes/wiki_dump.jsonl")
    info.size = len(text)
    with tarfile.open(fileobj=out, mode=mode) as tar:
        tar.addfile(info, io.BytesIO(text))
    return out.getvalue()


@pytest.mark.parametrize("name", ["wiki-18.jsonl.gz", "wiki-18.jsonl"])
@pytest.mark.parametrize("pack", [
    gzip.compress, lambda text: archive(text, "w"), lambda text: archive(text, "w:gz"),
    lambda _: b"\x1f\x8b\x08" + bytes(20),
], ids=["gzip", "tar", "both", "damaged"])  # fmt: skip
def test_packed_passages_are_refused(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(b"".join(b'{"id": %d, "contents": "x"}\n' % k for k in range(50))))
    corpus = Corpus(path)
    assert "a corpus is unpacked JSONL" in refusal(lambda: corpus.digest)


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"\n \r\n"), Path.mkdir, lambda p: None])
def test_without_passages_or_a_file_it_does_not_start(tmp_path, make):
    path = tmp_path / "c.jsonl"
    make(path)
    assert refusal(lambda: Corpus(path)).startswith(f"{path}: ")


# --- a changing file ---


def test_a_file_changed_after_opening_gives_no_wrong_text(tmp_path):
    rows = [{"id": i, "contents": "abc" * (i + 1)} for i in range(20)]
    path = write(tmp_path / "c", rows)
    changes = {
        "shorter": write(tmp_path / "a", rows[:3]).read_bytes(),
        "shifted": write(tmp_path / "b", [{"id": "new", "contents": "one more"}, *rows]).read_bytes(),
        "empty": b"",
    }
    before = path.read_bytes()
    for change, after in changes.items():
        path.write_bytes(before)
        os.utime(path, (1e9, 1e9))
        corpus = Corpus(path)
        path.write_bytes(after)  # in place, like an editor or `cp`
        assert f"{path}, row 19: not a passage" in refusal(lambda: print(change, corpus[19]))  # noqa: B023


def test_a_replaced_file_is_still_read_in_its_old_version(tmp_path):
    rows = random_rows(20)
    corpus = Corpus(write(tmp_path / "c", rows))
    os.replace(write(tmp_path / "new", rows[::-1]), tmp_path / "c")  # like `mv`: the open file is still the old one
    assert passages(corpus) == as_passages(rows)


# --- memory ---

MEASURE = """
import random, re, sys
import numpy
from retrieval.corpus import Corpus

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

before, draw = anonymous(), random.Random(0)
corpus = Corpus(sys.argv[1])
for row in draw.choices(range(len(corpus)), k=1000):
    assert corpus[row]["id"] == str(row)
print(len(corpus), anonymous() - before)
"""


def test_passages_cost_no_memory(tmp_path):
    path, n, text = tmp_path / "c.jsonl", 200_000, "x" * 600
    with open(path, "w") as f:
        f.writelines(f'{{"id": {i}, "contents": "{text}"}}\n' for i in range(n))
    assert path.stat().st_size > 120e6
    run = [sys.executable, "-c", MEASURE, path]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows, megabytes = re.fullmatch(r"(\d+) (\S+)\n", done.stdout).groups()
    # 8 bytes per row are 1.6 MB; all texts would take 120, and a list of int objects 8
    assert int(rows) == n and float(megabytes) < 6
