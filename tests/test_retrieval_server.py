"""The retrieval server as its users see it: real processes and HTTP; ranking against a BM25 written here."""

import http.client
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbing.faults import Fault
from plumbing.servers import Child, listen
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus

ROOT = Path(__file__).parents[1]
SERVER = str(ROOT / "retrieval_server.py")


def write_corpus(path, passages):
    path.write_text("".join(json.dumps(p) + "\n" for p in passages))
    return str(path)


def random_corpus(n):
    draw = random.Random(0)
    vocabulary = [f"w{i}" for i in range(200)]
    zipf = [1 / (i + 1) for i in range(200)]
    texts = [" ".join(draw.choices(vocabulary, zipf, k=draw.randint(3, 40))) for _ in range(n)]
    passages = [{"id": f"p{i}", "contents": f'"Title {i}"\n{t}'} for i, t in enumerate(texts)]
    for copy, original in [(250, 3), (40, 120), (251, 3)]:  # repeated texts: ties
        passages[copy]["contents"] = passages[original]["contents"]
    # Equal scores by the formula, but their terms are added in another order, and so round differently.
    for i, counts in enumerate([(3, 2, 1, 4), (1, 2, 3, 4), (3, 4, 2, 1), (2, 1, 4, 3)]):
        text = " ".join(f"x{j} " * count for j, count in enumerate(counts))
        passages[200 + i]["contents"] = f'"Zz {i}"\n{text}'
    return passages


PASSAGES = random_corpus(300)


def lucene_scores(query, passages, k1=1.5, b=0.75):
    """Returns Lucene's BM25 scores in fp64: idf = ln(1 + (N - df + 0.5) / (df + 0.5)), no factor k1 + 1."""
    documents = [re.findall(r"\w+", p["contents"].lower()) for p in passages]
    average = sum(map(len, documents)) / len(documents)
    df = Counter(word for d in documents for word in set(d))
    scores = np.zeros(len(documents))
    for i, document in enumerate(documents):
        tf = Counter(document)
        for word in re.findall(r"\w+", query.lower()):
            if word in tf:
                idf = math.log(1 + (len(documents) - df[word] + 0.5) / (df[word] + 0.5))
                scores[i] += idf * tf[word] / (tf[word] + k1 * (1 - b + b * len(document) / average))
    return scores


def gone(pid):
    """Returns whether the process has ended; a zombie counts as ended."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state.strip() or state.strip().startswith("Z")


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    corpus = write_corpus(folder / "corpus.jsonl", PASSAGES)
    with Child([SERVER, "--corpus", corpus], folder / "log") as child:
        yield child
        assert child.alive() and (folder / "log").read_text().count("\n") == 2  # passages, where it listens: no fault


def retrieve(server, **body):
    response = requests.post(server.url + "/retrieve", json=body, timeout=10)
    assert response.status_code == 200, response.text
    return response.json()["result"]


# --- the wire format, Search-R1's ---


def test_hits_with_scores(server):
    result = retrieve(server, queries=["title 7", "w150"], topk=2, return_scores=True)
    assert len(result) == 2 and len(result[0]) == 2
    best = result[0][0]
    assert best["document"] == PASSAGES[7] and best["document"]["contents"].startswith('"Title 7"\n')
    assert best.keys() == {"document", "score"} and type(best["score"]) is float
    assert best["score"] > result[0][1]["score"] > 0


def test_hits_without_scores_are_the_same_documents(server):
    queries = ["title 7", "w3 w150"]
    scored = retrieve(server, queries=queries, topk=4, return_scores=True)
    assert retrieve(server, queries=queries, topk=4) == [[h["document"] for h in hits] for hits in scored]


@pytest.mark.parametrize("topk", [{}, {"topk": None}])
def test_topk_is_3_by_default(server, topk):
    assert [len(hits) for hits in retrieve(server, queries=["title", "w1"], **topk)] == [3, 3]


def test_health_and_the_openapi_page(server):
    health = requests.get(server.url + "/health", timeout=5).json()
    expected = {"status": "ok", "passages": len(PASSAGES), "index": "bm25", "waiting": 0}
    assert health.pop("corpus") and health.items() >= expected.items()
    assert requests.get(server.url + "/docs", timeout=5).status_code == 200
    schema = requests.get(server.url + "/openapi.json", timeout=5).json()
    body = schema["paths"]["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/Search")


def test_a_short_response_does_not_wait_for_a_delayed_acknowledgement(server):
    with requests.Session() as session:
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            session.get(server.url + "/health", timeout=5)
            seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[5] < 0.03  # the fastest quarter; with Nagle's algorithm 0.044


# --- the ranking ---


def test_ranking_equals_bm25_by_lucenes_formula(server):
    draw = random.Random(1)
    queries = [" ".join(f"W{draw.randint(0, 220)}" for _ in range(draw.randint(1, 8))) for _ in range(60)]
    queries += ["w1 w1 w2", "Title 12, w5?", "the title: w9 unknown"]
    result = retrieve(server, queries=queries, topk=100, return_scores=True)
    for query, hits in zip(queries, result, strict=True):
        scores = lucene_scores(query, PASSAGES)
        rounded = scores.astype(np.float32)  # equal in fp32 is a tie
        order = [i for i in np.argsort(-rounded, kind="stable") if rounded[i] > 0][:100]
        assert [h["document"] for h in hits] == [PASSAGES[i] for i in order], query
        np.testing.assert_allclose([h["score"] for h in hits], scores[order], rtol=1e-6)


def test_ties_keep_the_order_of_the_corpus(server):
    everywhere = retrieve(server, queries=["title"], topk=100, return_scores=True)[0]
    assert len(everywhere) == 100 > len({h["score"] for h in everywhere})
    assert everywhere == sorted(everywhere, key=lambda h: (-h["score"], int(h["document"]["id"][1:])))
    words = PASSAGES[3]["contents"]
    assert [p["id"] for p in retrieve(server, queries=[words], topk=3)[0]] == ["p3", "p250", "p251"]
    # A cut through a tie keeps its first members.
    assert [p["id"] for p in retrieve(server, queries=[words], topk=2)[0]] == ["p3", "p250"]


def test_ties_do_not_depend_on_the_order_of_addition(server):
    queries = ["x0 x1 x2 x3", "x3 x0 x2 x1", "x1 x3 x0 x2", "x2 x1 x3 x0"]
    scores = [lucene_scores(query, PASSAGES)[200:204] for query in queries]
    assert any(len(set(s)) > 1 for s in scores)  # they differ in the last bits of fp64
    for hits in retrieve(server, queries=queries, topk=5, return_scores=True):
        assert [h["document"]["id"] for h in hits] == ["p200", "p201", "p202", "p203"]
        assert len({h["score"] for h in hits}) == 1


def test_all_words_count_and_none_is_stemmed(tmp_path):
    texts = ["the cat", "cats", "a dog I saw", "Ünï-code"]
    corpus = write_corpus(tmp_path / "c", [{"id": i, "title": "", "text": t} for i, t in enumerate(texts)])
    with Child([SERVER, "--corpus", corpus, "--topk", "100"], tmp_path / "log") as server:
        found = retrieve(server, queries=["THE", "cat", "cats", "i", "ünï"])
    assert [[p["id"] for p in hits] for hits in found] == [["0"], ["0"], ["1"], ["2"], ["3"]]
    assert found[0][0]["contents"] == '""\nthe cat'  # made from title and text


# --- limits ---


def test_no_queries_no_results(server):
    assert retrieve(server, queries=[]) == []


def test_a_query_without_a_known_word_finds_nothing(server):
    assert retrieve(server, queries=["", "?!", "nowhere", "w1"], topk=1)[:3] == [[], [], []]


def test_no_more_hits_than_passages(tmp_path):
    corpus = write_corpus(tmp_path / "c", [{"id": "a", "contents": "x y"}, {"id": "b", "contents": "x"}])
    with Child([SERVER, "--corpus", corpus], tmp_path / "log") as server:
        assert [p["id"] for p in retrieve(server, queries=["x"], topk=100)[0]] == ["b", "a"]


@pytest.mark.parametrize(
    "body, status",
    [
        ({"queries": ["w1"], "topk": 0}, 422),
        ({"queries": ["w1"], "topk": 1}, 200),
        ({"queries": ["w1"], "topk": 100}, 200),
        ({"queries": ["w1"], "topk": 101}, 422),
        ({"queries": ["w1"] * 16384, "topk": 1}, 200),
        ({"queries": ["w1"] * 16385}, 422),
        ({"queries": ["w" * 5000]}, 200),
        ({"queries": "w1"}, 422),
        ({"topk": 3}, 422),
    ],
)
def test_limits_of_a_request(server, body, status):
    assert requests.post(server.url + "/retrieve", json=body, timeout=10).status_code == status


def post_bytes(server, body, kind="application/json"):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.request("POST", "/retrieve", body, {"Content-Type": kind})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"queries": [NaN]}',
        b'{"queries": ["w1"], "topk": NaN}',
        b'{"queries": ["w1"], "topk": -Infinity}',
        b'{"queries": ["w1"], "topk": 1e999}',
        b'{"queries": ["w1"], "topk": ' + b"9" * 5000 + b"}",
        b'{"queries": [["\\ud800"]]}',
        b'{"queries": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"[" * 100_000,
    ],
)
def test_a_malformed_body_is_the_clients_error(server, body):
    for kind in ("application/json", "text/plain"):
        status, text = post_bytes(server, body, kind)
        assert 400 <= status < 500, text
        assert json.loads(text)["detail"]


def test_half_a_character_is_replaced(server):
    status, text = post_bytes(server, b'{"queries": ["w1 \\ud800"], "topk": 1}')
    assert status == 200 and json.loads(text)["result"] == retrieve(server, queries=["w1"], topk=1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
bodies = st.fixed_dictionaries(
    {},
    optional={"queries": st.lists(st.text(), max_size=4) | values, "topk": values, "return_scores": values},
)


@settings(max_examples=80, deadline=None, database=None)
@given(body=st.binary(max_size=60) | (bodies | values).map(lambda value: json.dumps(value).encode()))
def test_no_body_makes_the_server_fail(server, body):
    status, text = post_bytes(server, body)
    assert status in (200, 400, 422), text
    json.loads(text)


# --- faults at the start: one line with the problem, the place and the remedy ---


def run_server(*arguments):
    return subprocess.run([sys.executable, SERVER, *arguments], capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "no such file"),
        (b"", "no passages"),
        (b"\n \n", "no passages"),
        (b'{"id": "1", "contents": "x"}\n{"id": \n', ", row 1: not a passage (JSONDecodeError: Expecting value"),
        (b'\n["1", "x"]\n', ", row 0: not a passage (TypeError: list indices"),
        (b'{"id": "1", "contents": "?!"}\n', "no passage of the corpus has a word"),
    ],
)
def test_a_bad_corpus_is_refused_in_one_line(tmp_path, content, complaint):
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Fault) as refused:
        BM25.build(Corpus(path).texts())
    message = str(refused.value)
    assert complaint.lower() in message.lower() and "\n" not in message and ";" in message
    assert str(path) in message or "word" in complaint


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--corpus", "nowhere.jsonl", "--port", "0"], "nowhere.jsonl: No such file"),
        (["--corpus", "c", "--top", "5"], "unrecognized arguments: --top 5"),
        (["--corpus", "c", "--topk", "0"], "--topk: 0 is not from 1 to 100"),
        (["--port", "0"], "required: --corpus"),
        (["--corpus", "c", "--port", "70000"], "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_a_bad_command_line_fails_with_one_line(arguments, complaint):
    done = run_server(*arguments)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_a_port_in_use_is_named(server):
    port = str(urlsplit(server.url).port)
    done = run_server("--corpus", "not read", "--port", port)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr and "already in use" in done.stderr and "--port" in done.stderr


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "a..b", "fe80::bad::1"])
def test_a_host_that_cannot_be_bound_is_named(host):
    with pytest.raises(Fault, match=re.escape(f"cannot listen on {host}:0")) as refused:
        listen(host, 0)
    assert "\n" not in str(refused.value) and "--host" in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_by_default_it_binds_this_machine_only(host):
    with listen(host, 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    assert "(127.0.0.1: this machine only)" in " ".join(run_server("--help").stdout.split())


# --- a server ends with its run ---


def test_stop_leaves_no_process(tmp_path):
    corpus = write_corpus(tmp_path / "c", PASSAGES[:5])
    with Child([SERVER, "--corpus", corpus], tmp_path / "log") as child:
        pid = child._process.pid
        assert child.alive()
        os.kill(pid, signal.SIGINT)  # Ctrl-C is for the parent to handle
        assert not wait_until(lambda: not child.alive(), 0.5)
        assert retrieve(child, queries=["title"], topk=1)
    assert not child.alive() and gone(pid)
    child.stop()  # stopping twice does no harm
    with pytest.raises(requests.ConnectionError):
        requests.get(child.url + "/health", timeout=5)
    assert "Traceback" not in (tmp_path / "log").read_text()


PARENT = """
import sys, time
from plumbing.servers import Child
with Child(sys.argv[2:], sys.argv[1]) as child:
    print(child._process.pid, child.url, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_ends_however_its_parent_ends(tmp_path, number):
    corpus = write_corpus(tmp_path / "c", PASSAGES[:5])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path / "log", SERVER, "--corpus", corpus],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with parent:
        pid, url = parent.stdout.readline().decode().split()
        assert requests.get(url + "/health", timeout=5).status_code == 200
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # like a terminal: to the parent and the child
        else:
            os.kill(parent.pid, number)
        parent.wait(10)
    assert wait_until(lambda: gone(pid))
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_ctrl_c_ends_a_server_started_by_hand(tmp_path):
    corpus = write_corpus(tmp_path / "c", PASSAGES[:5])
    command = [sys.executable, SERVER, "--corpus", corpus, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"5 passages of {corpus}, bm25\n"
        url = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())[1]
        assert requests.get(url + "/health", timeout=5).status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_child_that_stops_while_starting_is_explained(tmp_path):
    log = tmp_path / "log"
    log.write_text("an earlier run's last line\n")
    with pytest.raises(Fault, match="stopped while starting: nowhere.jsonl: No such file") as refused:
        Child([SERVER, "--corpus", "nowhere.jsonl"], log)
    assert str(log) not in str(refused.value)  # its caller may delete it
    assert log.read_text().startswith("an earlier run's last line\n")


def test_a_child_that_is_never_ready_is_stopped(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)")
    with pytest.raises(Fault, match=r"not ready after 0.5 s: it printed no error$"):
        Child([str(script), str(tmp_path / "pid")], tmp_path / "log", deadline=0.5)
    assert gone((tmp_path / "pid").read_text())


CHATTY = """
import http.server, os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("x" * 1_000_000, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["OMP_NUM_THREADS"].encode())
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("starting", flush=True)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def test_a_child_may_print_and_is_killed_if_it_ignores_sigterm(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the child is reached directly, past any proxy
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    (tmp_path / "chatty.py").write_text(CHATTY)
    with Child([str(tmp_path / "chatty.py")], tmp_path / "log") as child:
        session = requests.Session()
        session.trust_env = False
        assert session.get(child.url, timeout=5).text == "1"  # OMP_NUM_THREADS of the child
    assert child._process.returncode == -signal.SIGKILL
