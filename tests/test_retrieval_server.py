"""The retrieval server as its clients see it: passages, HTTP, ranking against a BM25 written here, batches, faults,
processes' ends."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import requests
from passages import make_corpus, refusal, serving, until, write_corpus

import retrieval_server
from plumbing.faults import Fault
from plumbing.servers import Child, listen
from retrieval_server import BM25, Corpus

ROOT = Path(__file__).parents[1]
SERVER = ["-m", "retrieval_server"]


def random_corpus(n):
    draw, zipf = random.Random(0), [1 / (i + 1) for i in range(200)]
    words = [f"w{i}" for i in range(200)]
    texts = [" ".join(draw.choices(words, zipf, k=draw.randint(3, 40))) for _ in range(n)]
    for copy, original in [(250, 3), (40, 120), (251, 3)]:  # repeated texts: ties
        texts[copy] = texts[original]
    # Equal scores by the formula, but their terms are added in another order, and so round
    # differently.
    for i, counts in enumerate([(3, 2, 1, 4), (1, 2, 3, 4), (3, 4, 2, 1), (2, 1, 4, 3)]):
        texts[200 + i] = "".join(f"x{j} " * count for j, count in enumerate(counts))
    return [{"id": f"p{i}", "contents": f'"Title {i}"\n{text}'} for i, text in enumerate(texts)]


PASSAGES = random_corpus(300)


def lucene_scores(query, passages, k1=1.5, b=0.75):
    """Returns Lucene's BM25 scores in fp64: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), no factor k1
    + 1."""
    documents = [Counter(re.findall(r"\w+", p["contents"].lower())) for p in passages]
    average = sum(tf.total() for tf in documents) / len(documents)
    df = Counter(word for tf in documents for word in tf)
    scores = np.zeros(len(documents))
    for i, tf in enumerate(documents):
        for word in re.findall(r"\w+", query.lower()):
            idf = math.log(1 + (len(documents) - df[word] + 0.5) / (df[word] + 0.5))
            scores[i] += idf * tf[word] / (tf[word] + k1 * (1 - b + b * tf.total() / average))
    return scores


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    corpus = Corpus(write_corpus(tmp_path_factory.mktemp("server") / "corpus.jsonl", PASSAGES))
    with serving(BM25.build(corpus.texts()), corpus) as url:
        yield url


def retrieve(url, **body):
    response = requests.post(url + "/retrieve", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["result"]


# --- passages on disk ---


@pytest.mark.parametrize("newline, end", [("\n", ""), ("\r\n \t\r\n", "\n")])
def test_rows_are_read_like_plain_json(tmp_path, newline, end):
    texts = ['a "quote"', "naïve 日本語 🦉", "\u2028 \x85 \x0b", "line\nbreak", ""]
    rows = [{"id": k, "contents": text} for k, text in enumerate(texts)]
    passages = [{"id": str(k), "contents": text} for k, text in enumerate(texts)]
    rows += [{"_id": "b", "title": "T", "text": "x", "metadata": {}}]  # BEIR's
    rows += [{"id": "c", "title": "T", "text": "x", "contents": "y"}]
    passages += [{"id": "b", "contents": '"T"\nx'}, {"id": "c", "contents": "y"}]
    lines = [json.dumps(row, ensure_ascii=k % 2 == 0) for k, row in enumerate(rows)]
    (path := tmp_path / "c.jsonl").write_bytes((newline + newline.join(lines) + end).encode())
    corpus = Corpus(path)
    with ThreadPoolExecutor(8) as pool:  # any thread reads any row
        assert list(pool.map(corpus.__getitem__, range(len(corpus)))) == passages
    assert list(corpus.texts()) == [passage["contents"] for passage in passages]


@pytest.mark.parametrize(
    "line",
    [b'["1", "x"]', b'{"contents": "x"}', b'{"id": "1", "contents": ["x"]}', b"\x1f\x8b packed"],
)
def test_a_bad_row_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": 1, "contents": "x"}\r\n\n' + line + b'\n{"id": 2, "contents": "x"}')
    corpus = Corpus(path)
    assert corpus[0]["id"] == "1" and corpus[2]["id"] == "2"
    for read in (lambda: corpus[1], lambda: list(corpus.texts())):
        assert f"{path}, row 2" in refusal(read)


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"\n \r\n"), Path.mkdir, lambda p: None])
def test_without_passages_or_a_file_it_does_not_start(tmp_path, make):
    path = tmp_path / "c.jsonl"
    make(path)
    assert str(path) in refusal(Corpus, path)


def test_passages_cost_no_memory(tmp_path):
    n = 20_000
    path = write_corpus(tmp_path / "c", ({"id": str(i), "contents": "x" * 600} for i in range(n)))
    tracemalloc.start()
    corpus = Corpus(path)
    assert corpus[n - 1]["id"] == str(n - 1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 8 bytes a row; all texts would take 600, a list of int objects 40
    assert used < 20 * n


# --- the wire format, Search-R1's ---


def test_hits_with_and_without_scores(url):
    queries = ["title 7", "w3 w150"]
    result = retrieve(url, queries=queries, topk=4, return_scores=True)
    best = result[0][0]
    assert best == {"document": PASSAGES[7], "score": pytest.approx(best["score"])}
    assert best["score"] > result[0][1]["score"] > 0
    for topk, n in ({"topk": 4}, 4), ({}, 3), ({"topk": None}, 3):
        assert retrieve(url, queries=queries, **topk) == [
            [hit["document"] for hit in hits[:n]] for hits in result
        ]


def test_health(url):
    health = requests.get(url + "/health", timeout=60).json()
    assert health == {"status": "ok", "passages": len(PASSAGES), "index": "bm25"}


def test_a_short_response_does_not_wait_for_a_delayed_acknowledgement(url):
    fast = asked = 0
    with requests.Session() as session:
        # Some are slow on a busy machine; with Nagle's algorithm all are but the first.
        while fast < 20 and asked < 500:
            start = time.perf_counter()
            session.get(url + "/health", timeout=60)
            fast += time.perf_counter() - start < 0.03
            asked += 1
    assert fast == 20


# --- the ranking ---


def test_ranking_equals_bm25_by_lucenes_formula(url):
    draw = random.Random(1)
    queries = [" ".join(f"W{draw.randint(0, 220)}" for _ in range(k % 8 + 1)) for k in range(40)]
    # whole passages that are there three times, and terms that are added in other orders
    queries += [
        PASSAGES[3]["contents"].partition("\n")[2],
        "x0 x1 x2 x3",
        "x3 x0 x2 x1",
        "x1 x3 x0 x2",
    ]
    queries += ["w1 w1 w2", "Title 12, w5?", "the title: w9 unknown", "", "?!", "nowhere"]
    scores = [lucene_scores(query, PASSAGES) for query in queries]
    for topk in (100, 2):  # which cuts through ties
        result = retrieve(url, queries=queries, topk=topk, return_scores=True)
        for query, of_query, hits in zip(queries, scores, result, strict=True):
            rounded = of_query.astype(np.float32)  # equal in fp32 is a tie
            order = [i for i in np.argsort(-rounded, kind="stable") if rounded[i] > 0][:topk]
            assert [h["document"] for h in hits] == [PASSAGES[i] for i in order], query
            np.testing.assert_allclose([h["score"] for h in hits], of_query[order], rtol=1e-6)
        assert result[-3:] == [[], [], []]


@pytest.mark.parametrize(
    "text, query",
    [
        ("東京は日本の首都である。", "首都はどこですか？"),
        ("กรุงเทพเป็นเมืองหลวง", "เมืองหลวง"),
        ("ﾆﾎﾝ ６", "ニホン 6"),
        ("Zoë Saldaña", "Saldan\u0303a"),
        ("a dog I saw", "i"),  # all words count
    ],
)
def test_words_of_any_script_are_found(text, query):
    index = BM25.build(["A river.", "其他東西", text, "かわ", "แม่น้ำ", "dogs"])
    assert index.search([query], 100)[0][0][0] == 2  # more than there are passages


# --- limits ---


@pytest.mark.parametrize(
    "body, status",
    [
        ({"queries": ["w1"], "topk": 0}, 422),
        ({"queries": ["w1"], "topk": 101}, 422),
        ({"queries": ["w1"] * 16384, "topk": 1}, 200),
        ({"queries": ["w1"] * 16385}, 422),
        ({"queries": ["w1"] * 1001, "topk": 100}, 422),  # 100,000 passages at most
        ({"queries": "w1"}, 422),
    ],
)
def test_limits_of_a_request(url, body, status):
    assert requests.post(url + "/retrieve", json=body, timeout=60).status_code == status


# --- batches ---


class Gate:
    """An index in which query "7" finds rows 7, 8, ...; it records its batches."""

    name = "gate"

    def __init__(self):
        self.batches, self.fault = [], None

    def search(self, queries, k):
        self.batches.append((sorted(queries), k))
        if self.fault:
            raise self.fault
        return [[(int(q) + i, 1.0 - i) for i in range(k)] for q in queries]


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(make_corpus(tmp_path_factory.mktemp("serving") / "corpus.jsonl"))


def ids(hits):
    return [hit["id"] for hit in hits]


def test_requests_are_searched_together_and_duplicates_once(gate, corpus, monkeypatch):
    """And no answer depends on its neighbours' topk."""
    monkeypatch.setattr(retrieval_server, "MAX_WAIT", 600.0)
    monkeypatch.setattr(retrieval_server, "MAX_BATCH", 5)
    with serving(gate, corpus) as url, ThreadPoolExecutor(2) as pool:
        bodies = [{"topk": 3}, {"topk": 2, "return_scores": True}]
        asked = [pool.submit(retrieve, url, queries=["1"], **body) for body in bodies]
        # /health answers meanwhile
        assert requests.get(url + "/health", timeout=60).ok and not gate.batches
        rest = retrieve(url, queries=["2", "1", "5"])  # a full batch does not wait
        [a], [b] = (future.result() for future in asked)
    assert [ids(hits) for hits in [a, *rest]] == [
        [f"p{q + i}" for i in range(3)] for q in (1, 2, 1, 5)
    ]
    assert [(h["document"]["id"], h["score"]) for h in b] == [("p1", 1.0), ("p2", 0.0)]
    assert sorted(gate.batches) == [(["1"], 2), (["1", "2", "5"], 3)]


def test_a_long_query_is_truncated_and_after_a_failed_search_the_next_one_succeeds(gate, corpus):
    with serving(gate, corpus) as url:
        query = "0" * 4095 + "7"
        gate.fault = MemoryError("no room for the batch")
        answer = requests.post(url + "/retrieve", json={"queries": ["1"]}, timeout=60)
        assert answer.status_code == 500
        gate.fault = None
        assert ids(retrieve(url, queries=[query + "9" * 5000], topk=1)[0]) == ["p7"]
        assert gate.batches[1][0] == [query]


# --- faults at the start: one line with the problem, the place and the remedy ---


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--corpus", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--index", "nowhere"], "--index nowhere: "),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--topk", "0"], "--topk: 0 is not from 1 to 100"),
        (["--encoder", "intfloat/e5-base-v2"], "--encoder: "),
        (["--build", "bm25"], "--index: "),
        (["--top", "5"], "unrecognized arguments: --top 5"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, complaint
):
    corpus = write_corpus(tmp_path / "c", [{"id": "1", "contents": "?!"}])
    argv = ["retrieval_server.py", "--corpus", corpus, "--port", "0", *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises((Fault, SystemExit)) as refused:
        retrieval_server.main()
    message = capsys.readouterr().err or f"{refused.value}\n"
    assert complaint in message and message.count("\n") == 1


def test_an_address_that_cannot_be_bound_is_named(url):
    port = urlsplit(url).port
    message = refusal(listen, "127.0.0.1", port)
    assert f"127.0.0.1:{port}" in message and "already in use" in message
    message = refusal(listen, "no such host", 0)
    assert "cannot listen on no such host:0" in message and "an address of this machine" in message


def test_an_empty_host_does_not_publish_the_server():
    with listen("", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


# --- a server ends with its run ---


def gone(pid):
    """Returns whether the process has ended; a zombie counts as ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_is_for_the_parent_and_stop_leaves_no_process(tmp_path):
    corpus, log = write_corpus(tmp_path / "c", PASSAGES[:5]), tmp_path / "log"
    with Child([*SERVER, "--corpus", corpus], log) as child:
        pid = child._process.pid
        os.kill(pid, signal.SIGINT)
        assert retrieve(child.url, queries=["title"], topk=1) and child.alive()
    assert not child.alive() and gone(pid)
    child.stop()  # stopping twice does no harm
    assert log.read_text().count("\n") == 2  # passages, where it listens: no fault


SMALL = """
import sys
from plumbing.servers import listen, serve_app

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"ok"})

serve_app(app, listen("127.0.0.1", 0), "--child" in sys.argv)
"""
PARENT = """
import sys, time
from plumbing.servers import Child
with Child(sys.argv[2:], sys.argv[1]) as child:
    print(child._process.pid, child.url, flush=True)
    time.sleep(600)
"""


def test_the_child_ends_however_its_parent_ends(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    argv = [sys.executable, "-c", PARENT, tmp_path / "log", tmp_path / "small.py"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid, url = parent.stdout.readline().split()
        assert requests.get(url, timeout=60).text == "ok"
        parent.kill()
    until(lambda: gone(int(pid)))


def test_a_child_that_stops_while_starting_is_explained(tmp_path):
    (log := tmp_path / "log").write_text("an earlier run's last line\n")
    with pytest.raises(Fault, match="stopped while starting: --corpus x.jsonl: No such file"):
        Child([*SERVER, "--corpus", "x.jsonl"], log)
    assert log.read_text().startswith("an earlier run's last line\n--corpus x.jsonl: No such file")


def test_a_child_that_is_never_ready_is_stopped(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(Fault, match="not ready after 0.1 s: it printed nothing"):
        Child([str(script)], tmp_path / "log", deadline=0.1)
    left = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [command for command in left if str(script) in command]
