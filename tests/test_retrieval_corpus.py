"""Passages on disk: rows as plain json reads them, the file of offsets, parquet, and the memory that a corpus takes."""

import errno
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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import retrieval.corpus
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


def refusal(path):
    with pytest.raises(Fault) as refused:
        Corpus(path)
    message = str(refused.value)
    assert "\n" not in message and ";" in message, message
    return message


@pytest.fixture
def large(monkeypatch):
    """Treats every corpus as large."""
    monkeypatch.setattr(retrieval.corpus, "LARGE", 0)


@pytest.fixture
def no_scan(monkeypatch):
    """A function after whose call no corpus can be scanned."""

    def scan(*_):
        raise AssertionError("scanned the corpus again")

    return lambda: monkeypatch.setattr(retrieval.corpus, "_scan", scan)


# --- rows ---


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\r\n \t\r\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("size", [0, 1 << 40])
def test_rows_are_read_like_plain_json(tmp_path, monkeypatch, newline, ascii_only, ended, size):
    monkeypatch.setattr(retrieval.corpus, "LARGE", size)
    text = newline + newline.join(json.dumps(row, ensure_ascii=ascii_only) for row in random_rows(200))
    path = tmp_path / "c.jsonl"
    path.write_bytes((text + newline * ended).encode())
    with open(path, encoding="utf-8", newline="\n") as f:
        expected = as_passages([json.loads(line) for line in f if line.strip()])
    assert len(expected) == 200
    for _ in range(2):  # the second time with the file of offsets, if there is one
        corpus = Corpus(path)
        assert len(corpus) == 200 and corpus.size == path.stat().st_size
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
        (b'{"id": ', "not a passage (Expecting value"),
        (b'{"id": "1", "contents": "\xff"}', "not a passage ('utf-8' codec can't decode"),
        (b'["1", "x"]', "not a passage (list indices must be"),
        (b'{"contents": "x"}', 'no "id"'),
        (b'{"id": "1", "text": "x"}', 'no "contents"'),
        (b'{"id": "1", "title": "x"}', 'no "text"'),
        (b'{"id": true, "contents": "x"}', 'not a passage ("id" is of type bool'),
        (b'{"id": 1.5, "contents": "x"}', 'not a passage ("id" is of type float'),
        (b'{"id": "1", "contents": null}', "not a passage (sequence item 1: expected str instance, NoneType"),
        (b'{"id": "\\udc00", "contents": "x"}', "not a passage ('utf-8' codec can't encode"),
        (b"[" * 100_000, "not a passage (maximum recursion depth"),
    ],
)
@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, monkeypatch, line, complaint, size):
    monkeypatch.setattr(retrieval.corpus, "LARGE", size)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": 1, "contents": "x"}\r\n\n' + line + b'\n{"id": 2, "contents": "x"}')
    assert refusal(path).startswith(f"{path}:3: {complaint}")
    assert os.listdir(tmp_path) == ["c.jsonl"]  # no partial file remains


def archive(text, mode):
    """Returns the bytes of a tar archive of one file, in folders as Search-R1's corpus is."""
    out, info = io.BytesIO(), tarfile.TarInfo("data00/indexes/wiki_dump.jsonl")
    info.size = len(text)
    with tarfile.open(fileobj=out, mode=mode) as tar:
        tar.addfile(info, io.BytesIO(text))
    return out.getvalue()


@pytest.mark.parametrize("name", ["wiki-18.jsonl.gz", "wiki-18.jsonl"])
@pytest.mark.parametrize("pack, tool", [
    (gzip.compress, "gunzip"), (lambda text: archive(text, "w"), "tar -xOf"),
    (lambda text: archive(text, "w:gz"), "tar -xOzf"),
], ids=["gzip", "tar", "both"])  # fmt: skip
def test_packed_passages_are_refused_with_the_program_that_unpacks_them(tmp_path, name, pack, tool):
    text = b"".join(b'{"id": %d, "contents": "x"}\n' % k for k in range(50))
    path = tmp_path / name
    path.write_bytes(pack(text))
    message = refusal(path)
    assert "packed" in message and f"`{tool}`" in message
    with open(path, "rb") as packed:
        command = [*tool.split(), "-"][: 3 if tool != "gunzip" else 1]
        assert subprocess.run(command, stdin=packed, capture_output=True).stdout == text


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\x1f\x8b\x08" + bytes(20))
    assert str(path) in refusal(path)


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"\n \r\n"), Path.mkdir, lambda p: None])
def test_without_passages_or_a_file_it_does_not_start(tmp_path, large, make):
    path = tmp_path / "c.jsonl"
    make(path)
    assert refusal(path).startswith(f"{path}: ")


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
        with pytest.raises(ValueError, match="corpus has changed") as changed:
            print(change, corpus[19])
        assert str(path) in str(changed.value) and "\n" not in str(changed.value)


def test_a_replaced_file_is_still_read_in_its_old_version(tmp_path):
    rows = random_rows(20)
    corpus = Corpus(write(tmp_path / "c", rows))
    os.replace(write(tmp_path / "new", rows[::-1]), tmp_path / "c")  # like `mv`: the open file is still the old one
    assert passages(corpus) == as_passages(rows)


# --- the file of offsets ---


def test_offsets_are_kept_and_used(tmp_path, large, no_scan):
    path = write(tmp_path / "c", random_rows(50))
    expected = passages(Corpus(path))
    assert sorted(os.listdir(tmp_path)) == ["c", "c.offsets"]
    made = os.stat(tmp_path / "c.offsets")
    no_scan()
    assert passages(Corpus(path)) == expected == as_passages(random_rows(50))
    after = os.stat(tmp_path / "c.offsets")
    assert (after.st_ino, after.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_a_small_corpus_leaves_no_file(tmp_path):
    Corpus(write(tmp_path / "c", random_rows(50)))
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("changed", ["size", "time"])
def test_offsets_are_renewed_when_the_corpus_changes(tmp_path, large, no_scan, changed):
    old = [{"id": 1, "contents": "x" * k} for k in range(30)]
    path = write(tmp_path / "c", old)
    os.utime(path, ns=(10**18, 10**18))
    Corpus(path)
    new = old + random_rows(5) if changed == "size" else old[::-1]  # reversed: same size, different offsets
    write(path, new)
    os.utime(path, ns=(10**18, 10**18 + (changed == "time")))
    assert passages(Corpus(path)) == as_passages(new)
    no_scan()
    assert passages(Corpus(path)) == as_passages(new)


@pytest.mark.parametrize("keep", [0, 8, 16, 20, 24, 32, 100, 800, -8, -1])
def test_a_truncated_file_of_offsets_gives_no_wrong_rows(tmp_path, large, keep):
    path, rows = tmp_path / "c", random_rows(100)
    Corpus(write(path, rows))
    kept = tmp_path / "c.offsets"
    kept.write_bytes(kept.read_bytes()[:keep])
    corpus = Corpus(path)
    assert corpus.size == path.stat().st_size and passages(corpus) == as_passages(rows)


@pytest.mark.parametrize("size", [1, 816, 824, 821])
@pytest.mark.parametrize("stamped", [True, False])
def test_garbage_in_place_of_offsets_gives_no_wrong_rows(tmp_path, large, size, stamped):
    path, rows = tmp_path / "c", random_rows(100)
    Corpus(write(path, rows))
    kept = tmp_path / "c.offsets"
    kept.write_bytes(kept.read_bytes()[: 16 * stamped] + random.Random(0).randbytes(size))
    assert passages(Corpus(path)) == as_passages(rows)


def test_offsets_that_cannot_be_written_are_reported_and_not_needed(tmp_path, large, monkeypatch, capsys):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = write(tmp_path / "c", random_rows(50))
    real_open = open

    def open_to_read(file, mode="r", *args, **kwargs):
        return read_only() if "w" in mode else real_open(file, mode, *args, **kwargs)

    # A file system mounted read-only, on which Linux refuses even to unlink a file that does not exist.
    monkeypatch.setattr("builtins.open", open_to_read)
    for module, name in ((os, "replace"), (os, "unlink"), (Path, "unlink")):
        monkeypatch.setattr(module, name, read_only)
    assert passages(Corpus(path)) == as_passages(random_rows(50))
    monkeypatch.undo()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and f"{path}.offsets" in out and "Read-only file system" in out
    assert os.listdir(tmp_path) == ["c"]


def test_ctrl_c_during_the_scan_leaves_no_partial_file(tmp_path, large, monkeypatch):
    path = write(tmp_path / "c", random_rows(50))

    def interrupted(path, size):
        yield 0
        raise KeyboardInterrupt

    monkeypatch.setattr(retrieval.corpus, "_scan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Corpus(path)
    assert os.listdir(tmp_path) == ["c"]


def test_two_processes_can_open_a_corpus_at_once(tmp_path):
    path = write(tmp_path / "c", [{"id": i, "contents": "x" * 200} for i in range(20_000)])
    code = (
        "import sys, retrieval.corpus as c; c.LARGE = 0; corpus = c.Corpus(sys.argv[1]);"
        "assert len(corpus) == 20_000 and corpus[19_999]['id'] == '19999'"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT, stderr=subprocess.DEVNULL) for _ in "12"]
    assert [process.wait(30) for process in both] == [0, 0]
    assert sorted(os.listdir(tmp_path)) == ["c", "c.offsets"]


# --- parquet ---


def test_parquet_gives_its_rows(tmp_path, capsys):
    rows = [{"id": i, "contents": f"{random.Random(i).choice(WORDS)} {i}", "more": [i]} for i in range(25_000)]
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)  # one row group; written out in batches of 10,000
    assert pq.ParquetFile(path).num_row_groups == 1
    assert passages(Corpus(path)) == as_passages(rows)
    assert "writing it out" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["c.parquet", "c.parquet.jsonl"]


@pytest.mark.parametrize("columns", [["id", "contents"], ["id", "title", "text"], ["title", "id", "contents", "text"]])
def test_parquet_with_and_without_a_contents_column(tmp_path, columns):
    full = [{"id": f"p{i}", "title": w, "text": f"t {i}", "contents": f"c {i}"} for i, w in enumerate(WORDS)]
    rows = [{name: row[name] for name in columns} for row in full]
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    assert passages(Corpus(path)) == as_passages(rows)


def test_parquet_is_written_out_once_per_version(tmp_path, monkeypatch):
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"id": [1], "contents": ["old"]}), path)
    os.utime(path, ns=(10**18, 10**18))
    assert Corpus(path)[0]["contents"] == "old"
    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", None)  # cannot be read again
        assert Corpus(path)[0]["contents"] == "old"
    pq.write_table(pa.table({"id": [1], "contents": ["new"]}), path)
    os.utime(path, ns=(10**18, 10**18 - 1))  # older than before, but different
    assert Corpus(path)[0]["contents"] == "new"
    assert sorted(os.listdir(tmp_path)) == ["c.parquet", "c.parquet.jsonl"]


def damaged(path):
    pq.write_table(pa.table({"id": range(9999), "contents": [f"text {i * 7919 % 9973}" for i in range(9999)]}), path)
    content = bytearray(path.read_bytes())
    content[100 : len(content) // 2] = random.Random(0).randbytes(len(content) // 2 - 100)
    path.write_bytes(content)  # the footer, which is read first, is intact


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda p: p.write_bytes(b""), "cannot be written out"),
        (lambda p: p.write_bytes(b'{"id": 1, "contents": "x"}\n' * 9), "cannot be written out"),
        (lambda p: None, "No such file"),
        (Path.mkdir, ""),
        (damaged, ""),
        (lambda p: pq.write_table(pa.table({"x": [1], "y": ["b"]}), p), 'no "id"'),
        (lambda p: pq.write_table(pa.table({"id": [1], "title": ["b"]}), p), 'no "text"'),
        (lambda p: pq.write_table(pa.table({"id": [1], "contents": pa.array([None], pa.string())}), p), "NoneType"),
        (lambda p: pq.write_table(pa.table({"id": [1], "contents": [b"x"]}), p), "bytes"),
        (lambda p: pq.write_table(pa.table({"id": [], "contents": []}), p), "no passages"),
    ],
)
def test_a_bad_parquet_file_is_refused_in_one_line(tmp_path, make, complaint):
    path = tmp_path / "c.parquet"
    make(path)
    message = refusal(path)
    assert str(path) in message and complaint in message and "None;" not in message
    assert set(os.listdir(tmp_path)) <= {"c.parquet", "c.parquet.jsonl"}  # no partial file


# --- memory ---

MEASURE = """
import random, re, sys
import numpy, tqdm
import retrieval.corpus
from retrieval.corpus import Corpus

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

retrieval.corpus.LARGE = 0
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
    for _ in range(2):  # when the offsets are made, and when they exist
        run = [sys.executable, "-c", MEASURE, path]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        rows, megabytes = re.fullmatch(r"(\d+) (\S+)\n", done.stdout).groups()
        # 8 bytes per row are 1.6 MB; all texts would take 120, and a list of int objects 8
        assert int(rows) == n and float(megabytes) < 6
