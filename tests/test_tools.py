"""What an agent can call: the texts that derive from the tools in use, the calculator, and the search client."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

import tools as module
from faults import Fault, ToolDown
from tools import Search, find_call

SEARCH = Search("http://127.0.0.1:9", topk=3)  # nobody listens there


@pytest.mark.parametrize(
    "text, query",
    [
        ("<search> who </search>", "who"),
        ("<think>x</think><search>two\nlines</search>\n\n", "two\nlines"),  # a token may say more than the tag
        ("<search>a <search>b</search>", "b"),  # the innermost
        ("<search> <b> 1 < 2 & </b> </search>", "<b> 1 < 2 & </b>"),
        ("<answer>x <search>q</search>", "q"),
        ("<search></search>", ""),
        ("<search>cut off", None),
        ("no opening tag</search>", None),
        ("</search><search>", None),
        ("<Search>q</Search>", None),
        ("<answer>x</answer>", None),
        ("", None),
    ],
)
def test_the_argument_of_a_call(text, query):
    assert find_call(text, [SEARCH]) == (None if query is None else (SEARCH, query))


def test_a_degenerate_turn_is_read_in_linear_time():
    start = time.perf_counter()
    assert find_call("<search>" * 50_000, [SEARCH]) is None and find_call("<search>" + "x" * 500_000, [SEARCH]) is None
    assert time.perf_counter() - start < 2


# ---- the search client


class Retriever(ThreadingHTTPServer):
    """POST /retrieve as Search-R1 has it; its first answers are the given faults, one a request.

    A fault is a status, a body, "drop" (the connection closes without an answer) or "hang" (no answer for a while).
    Every query finds itself. While `gate` is clear a request waits.
    """

    daemon_threads = True

    def __init__(self, *faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.batches, self.gate = list(faults), [], threading.Event()
        self.gate.set()
        self.retry_after, self.connections = [], 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        pass  # a client that has given up waiting


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.faults.pop(0) if self.server.faults else None
        self.server.batches.append(body["queries"])
        self.server.body = body
        assert self.server.gate.wait(5)
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "hang":
            time.sleep(0.8)
        status = fault if isinstance(fault, int) else 200
        hits = [[{"document": {"id": "0", "contents": f'"{q}"\nText.'}, "score": 1.0}] for q in body["queries"]]
        answer = fault.encode() if isinstance(fault, str) and fault != "hang" else json.dumps({"result": hits}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        if self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after.pop(0))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def retriever():
    """Retriever, whose instances are stopped at the end."""
    started = []

    def start(*faults):
        started.append(Retriever(*faults))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


@pytest.fixture(autouse=True)
def naps(monkeypatch):
    """The seconds that the client would have slept between retries; it does not sleep here."""
    naps = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=naps.append))
    return naps


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_query_brings_its_passages(retriever):
    server = retriever()
    assert Search(server.url + "/", topk=5).submit("who").result(10) == ['"who"\nText.']
    assert server.body == {"queries": ["who"], "topk": 5, "return_scores": True}


def test_queries_that_wait_leave_together_and_a_duplicate_in_flight_is_sent_once(retriever):
    server = retriever()
    server.gate.clear()
    search = Search(server.url, topk=3)
    first = search.submit("a")
    wait_until(lambda: server.batches)
    futures = {query: search.submit(query) for query in "bcd"}
    assert search.submit("a") is first and search.submit("c") is futures["c"]
    server.gate.set()
    assert {query: future.result(10) for query, future in futures.items()} == {q: [f'"{q}"\nText.'] for q in "bcd"}
    assert server.batches == [["a"], ["b", "c", "d"]]
    search.submit("a").result(10)  # answered before: nothing is under way, so it is asked again
    assert server.batches[2:] == [["a"]]


def test_a_batch_is_bounded(retriever):
    server = retriever()
    server.gate.clear()
    search = Search(server.url, topk=3)
    futures = [search.submit("first")]
    wait_until(lambda: server.batches)
    futures += [search.submit(f"q{k}") for k in range(600)]
    server.gate.set()
    assert [future.result(10)[0] for future in futures[1:]] == [f'"q{k}"\nText.' for k in range(600)]
    assert [len(batch) for batch in server.batches] == [1, 256, 256, 88]


@pytest.mark.parametrize("fault", [500, 503, "drop", "hang"])
def test_a_fault_that_can_pass_is_retried(retriever, naps, fault):
    server = retriever(fault, fault)
    search = Search(server.url, topk=3, timeout=0.4 if fault == "hang" else 10, retries=3)
    assert search.submit("who").result(10) == ['"who"\nText.']
    assert server.batches == [["who"]] * 3 and search.faults == 2
    assert naps == [0.5, 1.0]  # longer each time


@pytest.mark.parametrize("fault, told", [(500, "HTTP 500"), ("drop", "ConnectionError"), ("hang", "ReadTimeout")])
def test_a_fault_that_stays_is_search_down(retriever, naps, fault, told):
    server = retriever(*[fault] * 8)
    search = Search(server.url, topk=3, timeout=0.4 if fault == "hang" else 10, retries=2)
    with pytest.raises(ToolDown, match=f"{server.url}/retrieve: {told}, 3 times"):
        search.submit("who").result(10)
    assert naps == [0.5, 1.0] and len(server.batches) == 3
    server.faults.clear()
    assert search.submit("who").result(10)  # the client itself is well


def test_after_a_fault_the_next_server_is_asked_at_once_and_stays_the_one_in_use(retriever, naps):
    broken, well = retriever(500, "drop"), retriever()
    search = Search(f"{broken.url}/, {well.url}", topk=3)
    assert search.submit("who").result(10) == search.submit("who").result(10) == ['"who"\nText.']
    assert len(broken.batches) == 1 and len(well.batches) == 2 and search.faults == 1 and naps == []
    well.faults.append(503)
    assert search.submit("when").result(10)
    assert len(broken.batches) == 2 and search.faults == 3 and naps == [0.5]  # both failed: a pause, then well again
    assert search.urls == [well.url, broken.url] and len(well.batches) == 4  # who, who, when, when


def test_when_all_servers_are_gone_all_are_named(naps):
    search = Search("http://127.0.0.1:9,http://127.0.0.1:19", topk=3, retries=1)
    with pytest.raises(ToolDown, match="1:9 and http://127.0.0.1:19/retrieve: ConnectionError, 2 times"):
        search.submit("who").result(10)
    assert search.faults == 4 and naps == [0.5]


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(retriever, naps):
    server = retriever(503, 503, 503)
    server.retry_after = ["3", "soon", "9000"]
    assert Search(server.url, topk=3).submit("who").result(10)
    assert naps == [3.0, 1.0, 60.0]  # what it asked; back-off where it asked nothing of use; never more than a minute


def test_a_connection_is_kept(retriever):
    server = retriever()
    search = Search(server.url, topk=3)
    for k in range(5):
        search.submit(str(k)).result(10)
    assert len(server.batches) == 5 and server.connections == 1


def test_back_off_is_bounded(naps):
    search = Search("http://127.0.0.1:9", topk=3)  # nobody listens there
    with pytest.raises(ToolDown, match="ConnectionError, 7 times"):
        search.submit("who").result(10)
    assert naps == [0.5, 1, 2, 4, 8, 8]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_retried(retriever, status):
    server = retriever(status)
    with pytest.raises(ToolDown, match=str(status)):
        Search(server.url, topk=3).submit("who").result(10)
    assert len(server.batches) == 1


@pytest.mark.parametrize(
    "body",
    [
        "no json", "[]", "null", "{}", '{"result": null}', '{"result": []}', '{"result": [[], []]}', '{"result": [3]}',
        '{"result": [["text"]]}', '{"result": [[{"id": "0", "contents": "x"}]]}', '{"result": [[{"document": {}}]]}',
        '{"result": [[{"document": {"contents": null}}]]}',
    ],
)  # fmt: skip
def test_an_answer_that_is_not_search_r1s_is_search_down(retriever, body):
    server = retriever(body)
    with pytest.raises(ToolDown, match="not a Search-R1 answer"):
        Search(server.url, topk=3).submit("who").result(10)
    assert len(server.batches) == 1


def test_before_a_retry_the_server_is_revived_and_its_new_url_used(retriever):
    new = retriever()
    urls = ["", new.url + "/"]  # the first attempt to revive it changes nothing
    search = Search("http://127.0.0.1:9", topk=3, revive=lambda: urls.pop(0))
    assert search.submit("who").result(10) == ['"who"\nText.']
    assert not urls and search.urls == [new.url] and search.faults == 2


def test_a_server_that_cannot_be_revived_is_search_down():
    def revive():
        raise Fault("retrieval_server.py stopped while starting: no memory")  # as servers.Child does

    search = Search("http://127.0.0.1:9", topk=3, revive=revive)
    with pytest.raises(ToolDown, match="no memory"):
        search.submit("who").result(10)


def test_a_proxy_of_the_environment_is_not_asked(retriever, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Search(retriever().url, topk=3, retries=0).submit("who").result(10)
