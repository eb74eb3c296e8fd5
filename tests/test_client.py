"""The one rule of retries (plumbing/client.py), against real HTTP servers."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from json_server import break_off, free_port, hang_up, too_slow

from plumbing.client import Client, RequestFailed

OK = {"value": 1}
BUSY = (503, {}, "<html>\n  <b>busy</b>\n")


def value(answer):
    return answer["value"]


def failure(url, path="/path", timeout=60, retries=0, **more):
    with pytest.raises(RequestFailed) as failed:
        Client(url, timeout, retries, **more).ask(path, {}, value)
    assert "\n" not in str(failed.value)
    return failed.value


def test_a_request_sends_json_or_nothing_and_returns_what_its_reader_makes_of_the_answer(serve):
    server = serve(OK)
    client = Client(server.url + "/", 60, 0, key="k")
    assert [client.ask("/path", body, value) for body in ({"é": [1]}, None)] == [1, 1]
    (path, headers, body), (_, _, none) = server.requests
    assert path == "/path" and headers["Authorization"] == "Bearer k"
    assert (json.loads(body), none) == ({"é": [1]}, b"")


@pytest.mark.parametrize(
    "base, asked", [("//", "/path"), ("/v1/ \n", "/v1/path"), ("/v1/path/", "/v1/path")]
)
def test_a_base_may_end_in_slashes_or_name_what_is_asked(serve, base, asked):
    """Search-R1's own URL ends in /retrieve."""
    server = serve(OK)
    assert Client(server.url + base, 60, 0).ask("/path", {}, value) == 1
    assert server.requests[0][0] == asked


# ---- faults


@pytest.mark.parametrize(
    "fault, words",
    [
        ((408, {}, "try again"), "HTTP 408: try again"),
        ((429, {}, "x" * 999), f"HTTP 429: {'x' * 200}"),
        (BUSY, "HTTP 503: <html> <b>busy</b>"),
        (hang_up, "ProtocolError: "),
    ],
)
def test_a_transient_fault_is_retried_and_named_if_it_stays(serve, waits, fault, words):
    server = serve(fault, fault, *[OK] * 32)
    client = Client(server.url, 60, 3)
    with ThreadPoolExecutor(16) as pool:  # threads share it
        assert list(pool.map(lambda k: client.ask("/path", {"k": k}, value), range(32))) == [1] * 32
    assert {json.loads(body)["k"] for _, _, body in server.requests} == set(range(32))
    stays = serve(fault)
    assert str(failure(stays.url, retries=2)).startswith(f"{stays.url}/path: {words}")
    assert len(stays.requests) == 3 and len(server.requests) == 34


def test_a_server_that_does_not_listen_or_breaks_off_or_never_answers_is_named(serve):
    gone = failure(f"http://127.0.0.1:{free_port()}")
    assert "/path: " in str(gone) and "refused" in str(gone) and gone.status == 0
    assert "timeout=0.2" in str(failure(serve(too_slow).url, timeout=0.2))
    assert failure(serve(break_off).url).status == 0


@pytest.mark.parametrize("status", [302, 307, 400, 404])
def test_other_statuses_are_final_and_no_redirect_is_followed(serve, waits, status):
    elsewhere = serve(OK)
    server = serve((status, {"Location": f"{elsewhere.url}/path"}, "no\nsuch key"))
    failed = failure(server.url, "/path?secret=1", retries=3)
    assert str(failed) == f"{server.url}/path: HTTP {status}: no such key"
    assert failed.status == status and len(server.requests) == 1 and not waits
    assert not elsewhere.requests


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "http://["])
def test_an_invalid_url_is_one_line(waits, url):
    assert failure(url, retries=3).status == 0 and not waits


@pytest.mark.parametrize("text", ["<html>", "[]", '{"error": "not loaded"}'])
def test_a_malformed_answer_is_quoted(serve, text):
    said = str(failure(serve((200, {}, text)).url))
    assert "/path: malformed answer" in said and repr(text) in said  # a page to log in, an error


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


def test_the_wait_doubles_up_to_a_minute_or_is_what_the_server_says(serve, waits):
    failure(serve(BUSY).url, retries=8)
    for k, wait in enumerate(waits, 1):  # the first attempt after a fault does not wait
        assert min(60, 2**k) <= wait <= min(60, 2**k + 1)
    assert len(waits) == 7
    for after, wait in (("17", 17), ("3600", 60)):
        waits.clear()
        Client(serve((429, {"Retry-After": after}, ""), OK).url, 60, 3).ask("/path", {}, value)
        assert waits[0] == pytest.approx(wait, abs=1.5)


# ---- proxies


@pytest.mark.parametrize("key", [{"key": "k"}, {}])
def test_a_proxy_of_the_environment_is_used_for_services_outside(serve, monkeypatch, key):
    proxy = serve(OK)
    for variable in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(variable, proxy.url)
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    url = f"http://0.0.0.0:{serve(OK).server_port}"  # no loopback address, and yet this machine
    assert Client(url, 60, 0, **key).ask("/path", {}, value) == 1
    assert len(proxy.requests) == len(key)
