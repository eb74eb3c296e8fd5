"""Passages on disk: rows as plain json reads them, and the memory that a corpus takes."""

import gzip
import json
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from passages import refusal, write_corpus

from retrieval.corpus import Corpus

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
        beir = {"_id": key, "title": draw.choice(WORDS), "text": text, "metadata": {"url": ""}}
        untitled = [beir, {"id": key, "text": text}, {"id": key, "title": None, "text": text}]
        rows.append(
            draw.choice([{"id": key, "contents": text}, both, both | {"contents": text}, *untitled])
        )
    return rows


def as_passages(rows):
    """Returns the passages that the rows stand for, computed independently."""
    contents = [
        row.get("contents", f'"{row.get("title") or ""}"\n{row.get("text")}') for row in rows
    ]
    return [
        {"id": str(row.get("id", row.get("_id"))), "contents": text}
        for row, text in zip(rows, contents, strict=True)
    ]


# --- rows ---


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\r\n \t\r\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_rows_are_read_like_plain_json(tmp_path, newline, ascii_only, ended):
    rows = random_rows(200)
    text = newline + newline.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    path = tmp_path / "c.jsonl"
    path.write_bytes((text + newline * ended).encode())
    expected = as_passages(rows)
    corpus = Corpus(path)
    assert len(corpus) == 200 and os.listdir(tmp_path) == ["c.jsonl"]
    assert [corpus[row] for row in range(200)] == expected
    assert list(corpus.texts()) == [p["contents"] for p in expected]
    with pytest.raises(IndexError):
        corpus[200]


def test_concurrent_threads_get_their_own_rows(tmp_path):
    rows = [{"id": str(i), "contents": f"{i} " * (i % 50)} for i in range(3000)]
    corpus = Corpus(write_corpus(tmp_path / "c", rows))

    def read(seed):
        order = random.Random(seed).choices(range(3000), k=3000)
        return all(corpus[i] == rows[i] for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b'{"id": ', "JSONDecodeError: Expecting value"),
        (b'{"id": "1", "contents": "\xff"}', "UnicodeDecodeError: 'utf-8' codec can't decode"),
        (b'["1", "x"]', "TypeError: list indices must be"),
        (b'{"contents": "x"}', "KeyError: 'id'"),
        (b'{"id": "1", "title": "x"}', "KeyError: 'contents'"),
        (b'{"id": "1", "content": "x"}', "KeyError: 'contents'"),
        (b'{"id": "1", "title": "x", "text": null}', "TypeError: "),
        (b'{"id": "1", "title": 5, "text": "x"}', "TypeError: "),
        (b'{"id": "1", "contents": null}', "TypeError: its contents are not text"),
        (b'{"id": "1", "contents": ["x"]}', "TypeError: its contents are not text"),
        (b'{"id": "1", "title": "x", "text": ["x"]}', "TypeError: "),
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
        assert refusal(read).startswith(f"{path}, row 2: not a passage ({complaint}")


# tar: a header
@pytest.mark.parametrize(
    "pack", [gzip.compress, lambda text: b"wiki.jsonl".ljust(512, b"\0") + text]
)
def test_packed_passages_are_refused(tmp_path, pack):
    path = tmp_path / "wiki-18.jsonl"
    path.write_bytes(pack(b"".join(b'{"id": %d, "contents": "x"}\n' % k for k in range(50))))
    assert "a corpus is unpacked JSONL" in refusal(lambda: Corpus(path).digest)


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"\n \r\n"), Path.mkdir, lambda p: None])
def test_without_passages_or_a_file_it_does_not_start(tmp_path, make):
    path = tmp_path / "c.jsonl"
    make(path)
    assert refusal(Corpus, path).startswith(f"{path}: ")


def test_a_pipe_is_refused():
    """As of `--corpus <(zcat wiki.jsonl.gz)`: it can be read once."""
    read, write = os.pipe()
    os.close(write)
    assert "Illegal seek" in refusal(Corpus, f"/dev/fd/{read}")
    os.close(read)


# --- a changing file ---


@pytest.mark.parametrize(
    "change", [lambda rows: rows[:3], lambda rows: [b"one more\n", *rows], lambda rows: []]
)
def test_a_file_changed_after_opening_gives_no_wrong_text(tmp_path, change):
    path = tmp_path / "c"
    corpus = Corpus(write_corpus(path, [{"id": i, "contents": "abc" * (i + 1)} for i in range(20)]))
    # in place, like an editor or `cp`
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert f"{path}, row 20: not a passage" in refusal(lambda: corpus[19])


def test_a_replaced_file_is_still_read_in_its_old_version(tmp_path):
    rows = random_rows(20)
    corpus = Corpus(write_corpus(tmp_path / "c", rows))
    # like `mv`: the open file is still the old one
    os.replace(write_corpus(tmp_path / "new", rows[::-1]), tmp_path / "c")
    assert list(corpus) == as_passages(rows)


def test_passages_cost_no_memory(tmp_path):
    n = 40_000
    path = write_corpus(tmp_path / "c", ({"id": str(i), "contents": "x" * 600} for i in range(n)))
    tracemalloc.start()
    corpus = Corpus(path)
    for row in random.Random(0).choices(range(n), k=1000):
        assert corpus[row]["id"] == str(row)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 8 bytes a row; all texts would take 600, a list of int objects 40
    assert len(corpus) == n and used < 20 * n
