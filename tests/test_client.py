"""The one rule of retries (plumbing/client.py), against real HTTP servers."""

import email.utils
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from json_server import break_off, free_port, hang_up, too_slow

from plumbing.client import Client, RequestFailed

OK = {"value": 1}
BUSY = (503, {}, "busy")


def value(answer):
    return answer["value"]


def failure(url, path="/path", timeout=60, retries=0, **more):
    with pytest.raises(RequestFailed) as failed:
        Client(url, timeout, retries, **more).ask(path, {}, value)
    return failed.value


def test_a_request_sends_json_or_nothing_and_returns_what_its_reader_makes_of_the_answer(serve):
    server = serve(OK)
    client = Client(server.url + "/", 60, 0, key="k")
    assert [client.ask("/path", body, value) for body in ({"é": [1]}, {}, None)] == [1, 1, 1]
    (path, headers, body), (_, _, empty), (_, _, none) = server.requests
    assert path == "/path" and headers["Authorization"] == "Bearer k"
    assert headers["Content-Type"] == "application/json"
    assert (json.loads(body), empty, none) == ({"é": [1]}, b"{}", b"")


@pytest.mark.parametrize(
    "base, asked", [("", ""), ("//", ""), ("/v1/ \n", "/v1"), ("/path", ""), ("/v1/path/", "/v1")]
)
def test_a_base_may_end_in_slashes_or_name_what_is_asked(serve, base, asked):
    """Search-R1's own URL ends in /retrieve."""
    server = serve(OK)
    assert Client(server.url + base, 60, 0).ask("/path", {}, value) == 1
    assert server.requests[0][0] == f"{asked}/path"


def test_threads_may_share_a_client(serve, waits):
    server = serve(hang_up, BUSY, *[OK] * 32)
    client = Client(server.url, 60, 3)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda k: client.ask("/path", {"k": k}, value), range(32))) == [1] * 32
    assert len(server.requests) == 34
    assert {json.loads(body)["k"] for _, _, body in server.requests} == set(range(32))


# ---- faults


@pytest.mark.parametrize(
    "fault, words",
    [
        ((408, {}, "try again"), "HTTP 408: try again"),
        ((429, {}, "slow down"), "HTTP 429: slow down"),
        ((500, {}, ""), "HTTP 500"),
        ((503, {}, "<html>\n  <b>over</b>\n"), "HTTP 503: <html> <b>over</b>"),
        ((529, {}, "x" * 999), f"HTTP 529: {'x' * 200}"),
        (hang_up, "ProtocolError: "),
    ],
)
def test_a_transient_fault_is_retried_and_named_in_one_line_if_it_stays(serve, waits, fault, words):
    server = serve(fault, fault, OK)
    assert Client(server.url, 60, 3).ask("/path", {"k": 1}, value) == 1
    assert {body for _, _, body in server.requests} == {b'{"k": 1}'}
    stays = serve(fault)
    said = str(failure(stays.url, retries=2))
    assert said.startswith(f"{stays.url}/path: {words}") and "\n" not in said
    assert len(server.requests) == len(stays.requests) == 3


def test_a_server_that_does_not_listen_or_breaks_off_or_never_answers_is_named(serve):
    gone = f"http://127.0.0.1:{free_port()}"
    assert str(failure(gone)).startswith(f"{gone}/path: ") and failure(gone).status == 0
    assert "refused" in str(failure(gone))
    assert "timeout=0.2" in str(failure(serve(too_slow).url, timeout=0.2))
    assert failure(serve(break_off).url).status == 0


def test_a_server_that_comes_back_is_reached(serve, monkeypatch):
    port, come_back = free_port(), []
    monkeypatch.setattr(
        "urllib3.Retry.sleep", lambda *_: come_back or come_back.append(serve(OK, port=port))
    )
    assert Client(f"http://127.0.0.1:{port}", 60, 3).ask("/path", {}, value) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 499])
def test_other_statuses_are_final(serve, waits, status):
    server = serve((status, {}, "no\nsuch key"))
    failed = failure(server.url, "/path?secret=1", retries=3)
    assert str(failed) == f"{server.url}/path: HTTP {status}: no such key"
    assert failed.status == status and len(server.requests) == 1 and not waits


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://127.0.0.1", "http://", "http://["])
def test_an_invalid_url_is_one_line(waits, url):
    assert failure(url, retries=3).status == 0 and not waits


@pytest.mark.parametrize("text", ["", "<html>", "[]", '"value"', "{}", '{"error": "not loaded"}'])
def test_a_malformed_answer_is_quoted(serve, text):
    said = str(failure(serve((200, {}, text)).url))
    assert "/path: malformed answer" in said and repr(text) in said  # a page to log in, an error


def test_a_fault_in_the_reader_itself_is_not_hidden(serve):
    with pytest.raises(ZeroDivisionError):
        Client(serve(OK).url, 60, 0).ask("/path", {}, lambda answer: 1 // 0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(serve, waits, status):
    elsewhere = serve(OK)
    server = serve((status, {"Location": f"{elsewhere.url}/path"}, ""))
    assert failure(server.url, retries=3).status == status
    assert not elsewhere.requests and len(server.requests) == 1 and not waits


def test_no_fault_names_a_key_or_a_password(serve):
    for fault in (BUSY, (400, {}, "no"), (200, {}, "no"), hang_up):
        url = serve(fault).url.replace("//", "//user:password@")
        said = str(failure(url, key="sk-secret"))
        assert "sk-secret" not in said and "password" not in said


def test_half_characters_are_replaced_wherever_they_stand(serve):
    server = serve((200, {}, r'{"value": ["a\ud800", {"\uDFFF": "\ud83d\ude00"}]}'))
    read = Client(server.url, 60, 0).ask("/path", {}, value)
    assert read == ["a\ufffd", {"\ufffd": "\U0001f600"}]


# ---- waiting


def test_the_wait_doubles_and_has_an_upper_bound(serve, waits):
    failure(serve(BUSY).url, retries=8)
    for k, wait in enumerate(waits, 1):  # the first attempt after a fault does not wait
        assert min(60, 2**k) <= wait <= min(60, 2**k + 1)
    assert len(waits) == 7


@pytest.mark.parametrize(
    "status, after, wait", [(429, "17", 17), (503, "3600", 60), (529, "3", 3), (429, "date", 20)]
)
def test_a_server_says_how_long_to_wait(serve, waits, status, after, wait):
    if after == "date":
        after = email.utils.formatdate(time.time() + 20, usegmt=True)
    server = serve((status, {"Retry-After": after}, ""), OK)
    assert Client(server.url, 60, 3).ask("/path", {}, value) == 1
    assert waits[0] == pytest.approx(wait, abs=1.5)


# ---- proxies


@pytest.mark.parametrize(
    "key, name, by_proxy",
    [
        ("", "127.0.0.1", 0),
        ("k", "0.0.0.0", 1),  # no loopback address, and yet this machine
        ("", "0.0.0.0", 0),
    ],
)
def test_a_proxy_of_the_environment_is_used_for_services_outside(
    serve, monkeypatch, key, name, by_proxy
):
    proxy = serve(OK)
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, proxy.url)
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    url = f"http://{name}:{serve(OK).server_port}"
    assert Client(url, 60, 0, key).ask("/path", {}, value) == 1
    assert len(proxy.requests) == by_proxy
