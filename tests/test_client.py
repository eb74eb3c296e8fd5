"""The one rule of retries (plumbing/client.py), against real HTTP servers that fail in every way it
knows."""

import email.utils
import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_server import Handler, break_off, free_port, hang_up, too_slow, trickle

from plumbing import client as module
from plumbing.client import Client, RequestFailed, back_off
from plumbing.faults import Outage

OK = {"value": 1}
BUSY = (503, {}, "busy")


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds that clients would have waited between rounds; they do not wait here."""
    waited = []
    monkeypatch.setattr("plumbing.client.sleep", waited.append)
    return waited


def client(*urls, timeout=60, retries=3, **more):
    return Client(urls, timeout, retries, **more)


def value(answer):
    return answer["value"]


class KeepAlive(Handler):
    protocol_version = "HTTP/1.1"


# ---- requests


def test_a_request_sends_json_or_nothing_and_returns_what_its_reader_makes_of_the_answer(serve):
    server = serve(OK, OK, OK, (200, {}, "Success: 'x' added"))
    asker = client(server.url + "/", key="k")
    assert [asker.ask("/path", body, value) for body in ({"é": [1]}, {}, None)] == [1, 1, 1]
    assert asker.ask("/load?a=b", {}, str) == "Success: 'x' added"  # no JSON
    assert [path for path, _, _ in server.requests] == ["/path"] * 3 + ["/load?a=b"]
    (_, headers, body), (_, _, empty), (_, _, none), _ = server.requests
    assert headers["Content-Type"] == "application/json" and headers["Authorization"] == "Bearer k"
    assert (json.loads(body), empty, none) == ({"é": [1]}, b"{}", b"")


@pytest.mark.parametrize(
    "base, asked",
    [
        ("", ""),
        ("//", ""),
        ("/v1/ \n", "/v1"),
        ("?k=1", ""),
        ("/path", ""),
        ("/v1/path/?k=1", "/v1"),
    ],
)
def test_a_base_may_end_in_slashes_have_a_query_or_name_what_is_asked(serve, base, asked):
    """Search-R1's own URL ends in /retrieve, Azure's in /chat/completions."""
    server = serve(OK)
    assert client(server.url + base).ask("/path", {}, value) == 1
    assert server.requests[0][0] == f"{asked}/path" + "?k=1" * ("?" in base)


def test_threads_may_share_a_client(serve, waits):
    server = serve(hang_up, BUSY, *[OK] * 32)
    asker = client(server.url)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda k: asker.ask("/path", {"k": k}, value), range(32))) == [1] * 32
    assert len(server.requests) == 34 and len(waits) == asker.faults == 2
    assert {json.loads(body)["k"] for _, _, body in server.requests} == set(range(32))


# ---- which faults are transient


@pytest.mark.parametrize(
    "fault, words",
    [
        ((408, {}, "try again"), "HTTP 408: try again"),
        ((409, {}, '{"error": "try again"}'), 'HTTP 409: {"error": "try again"}'),
        ((425, {}, ""), "HTTP 425"),
        ((429, {}, "slow down"), "HTTP 429: slow down"),
        ((500, {}, ""), "HTTP 500"),
        ((503, {}, "<html>\n  <b>over</b>\n"), "HTTP 503: <html> <b>over</b>"),
        ((529, {}, "x" * 999), f"HTTP 529: {'x' * 200}"),
        (hang_up, "ConnectionError"),
        (break_off, "ProtocolError"),
    ],
)
def test_a_transient_fault_is_retried_and_named_in_one_line_if_it_stays(serve, waits, fault, words):
    server = serve(fault, fault, OK)
    asker = client(server.url)
    assert asker.ask("/path", {"k": 1}, value) == 1
    assert len(server.requests) == 3 and len(waits) == asker.faults == 2
    assert {body for _, _, body in server.requests} == {b'{"k": 1}'}
    server = serve(fault)
    with pytest.raises(RequestFailed) as failed:
        client(server.url, retries=2).ask("/path", {}, value)
    assert str(failed.value) == f"{server.url}/path: {words}, 3 times" and failed.value.transient
    assert len(server.requests) == 3


def test_a_server_that_comes_back_is_reached(serve, monkeypatch):
    port = free_port()
    monkeypatch.setattr("plumbing.client.sleep", lambda _: serve(OK, port=port))
    assert client(f"http://127.0.0.1:{port}").ask("/path", {}, value) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 428, 430, 499])
def test_other_statuses_are_final(serve, waits, status):
    server, other = serve((status, {"Retry-After": "1"}, "no\nsuch key")), serve(OK)
    asker = client(server.url, other.url)
    with pytest.raises(RequestFailed) as failed:
        asker.ask("/path?secret=1", {}, value)
    assert (
        str(failed.value) == f"{server.url}/path: HTTP {status}: no such key"
        and not failed.value.transient
    )
    assert len(server.requests) == 1 and not other.requests and not waits and asker.faults == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://127.0.0.1",
        "http://",
        "http://[",
        "http://a b",
        f"http://{'a' * 64}",
    ],
)
def test_an_invalid_url_is_final(waits, url):
    with pytest.raises(RequestFailed) as failed:
        client(url).ask("/path", {}, value)
    assert not failed.value.transient and not waits


@pytest.mark.parametrize(
    "text",
    [
        "", "<html>", 'data: {"value": 1}\n\n', "[]", '"value"', "{}", '{"value"', '{"error": "not loaded"}',
        "[" * 200_000, '{"value": NaN}', '{"value": -Infinity}', '{"value": ' + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_a_malformed_body_is_never_read_and_may_be_better_the_next_time(serve, waits, text):
    with pytest.raises(RequestFailed, match=r"/path: malformed answer \(\w+Error: .*\)$") as failed:
        client(serve((200, {}, text)).url, retries=0).ask("/path", {}, value)
    assert len(str(failed.value)) < 400
    assert repr(text[:80]) in str(failed.value)  # a page to log in, an event stream, an error
    server = serve((200, {}, text), OK)
    assert client(server.url).ask("/path", {}, value) == 1
    assert len(server.requests) == 2 and len(waits) == 1


@pytest.mark.parametrize(
    "error, final",
    [
        ({"code": 403, "message": "flagged"}, True), ({"code": "402", "message": "no credits"}, True),
        ({"code": 400, "message": "x"}, True), ({"code": 429, "message": "x"}, False),
        ({"code": 408, "message": "x"}, False), ({"code": 502, "message": "x"}, False),
        ({"message": "x", "code": None}, False), ({"code": 4031}, False),
    ],
)  # fmt: skip
def test_the_status_that_an_answer_of_200_holds_counts(serve, waits, error, final):
    def read(answer):
        raise ValueError(answer["error"])

    with pytest.raises(RequestFailed) as failed:
        client(serve({"error": error}).url, retries=2).ask("/path", {}, read)
    assert failed.value.transient != final and len(waits) == (0 if final else 2)


def test_a_fault_in_the_reader_itself_is_not_hidden(serve):
    def read(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client(serve(OK).url).ask("/path", {}, read)


def test_a_request_that_must_not_be_repeated_is_sent_once(serve, waits):
    for fault, words in ((BUSY, "HTTP 503: busy"), (hang_up, "ConnectionError")):
        server = serve(fault, OK)
        with pytest.raises(RequestFailed, match=f"/path: {words}$"):
            client(server.url, retries=5).ask("/path", {}, value, retries=0)
        with pytest.raises(RequestFailed, match=f"/path: {words}$"):
            client(serve(fault, OK).url, retries=5).ask("/path", None, value, retries=0)
        assert len(server.requests) == 1 and not waits


def test_after_a_read_time_out_a_server_is_asked_again_unless_it_may_still_be_busy(serve, waits):
    for again, said in ((True, ", 3 times"), (False, "")):
        asker = client(serve(too_slow).url, timeout=0.2, retries=2, retry_timeout=again)
        with pytest.raises(
            RequestFailed, match=f"/path: no whole answer in 0.2 s{said}$"
        ) as failed:
            asker.ask("/path", {}, value)
        assert failed.value.transient == again and asker.faults == (3 if again else 0)
        assert len(waits) == 2
    assert client(serve(BUSY, OK).url, retry_timeout=False).ask("/path", {}, value) == 1


def test_no_fault_names_a_header(serve):
    for fault in (BUSY, (400, {}, "no"), (200, {}, "no"), hang_up):
        with pytest.raises(RequestFailed) as failed:
            client(serve(fault).url, key="sk-secret").ask("/path", {}, value)
        assert "sk-secret" not in repr(failed.value) + repr(failed.value.__cause__)


# ---- what a server may send


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "at_once, then",
    [
        (b"", b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 500),
        (b"", b"HTTP/1.1 200 " + b"O" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"X: x\r\n" * 90),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 20),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10**6, b""),  # as fast as it can
        (CHUNKED, b"2;extension=" + b"x" * 500),
        (CHUNKED, b"1\r\n \r\n" * 90),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: x\r\n" * 90),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" " * 500),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(b"x" * 10**6)[:500]),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n", b" " * 500),
    ],
)  # fmt: skip
def test_the_deadline_holds_whatever_trickles_in(serve, at_once, then):
    def answer(handler):
        handler.wfile.write(at_once)
        return trickle(then)(handler) or too_slow(handler)

    server, began = serve(answer), time.perf_counter()
    with pytest.raises(RequestFailed, match="/path: no whole answer in 0.4 s$"):
        client(server.url, timeout=0.4).ask("/path", {}, value, retries=0)
    assert 0.35 < time.perf_counter() - began < 8


def test_an_answer_that_trickles_in_before_the_deadline_is_whole(serve):
    body = trickle(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"value": 1}', seconds=0.001)
    assert client(serve(body).url).ask("/path", {}, value, retries=0) == 1


def test_each_call_has_a_deadline_of_its_own_on_a_connection_that_stays(serve, monkeypatch):
    """A slow call that is whole in time leaves its connection, and all of its time, to the next
    one."""
    passed = []  # times 40 seconds

    def answer(handler):
        passed.append(40)
        return OK

    monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + sum(passed))
    server = serve(answer)
    server.RequestHandlerClass = KeepAlive
    asker = client(server.url, timeout=60)
    assert [asker.ask("/path", {}, value) for _ in range(5)] == [1] * 5
    assert len(server.clients) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(serve, waits, status):
    elsewhere = serve(OK)
    server = serve((status, {"Location": f"{elsewhere.url}/path?key=sk-secret-1"}, ""))
    with pytest.raises(
        RequestFailed, match=f"HTTP {status}: it redirects to {elsewhere.url}"
    ) as failed:
        client(server.url, key="sk-secret-1").ask("/path", {"gold": "Paris"}, value)
    assert not elsewhere.requests and len(server.requests) == 1 and not waits
    assert "sk-secret-1" not in str(failed.value)


def test_an_answer_without_end_is_refused(serve, monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWER", 1 << 20)
    for headers, body in (
        ({}, b" " * (2 << 20)),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * (4 << 20))),
    ):

        def pour(handler, headers=headers, body=body):
            handler.send_response(200)
            for name, text in headers.items():
                handler.send_header(name, text)
            handler.end_headers()
            handler.wfile.write(body)

        with pytest.raises(RequestFailed, match="/path: its answer is larger than 1 MiB$"):
            client(serve(pour).url).ask("/path", {}, value)


def test_half_characters_are_replaced_wherever_they_stand(serve):
    server = serve((200, {}, r'{"value": ["a\ud800", {"\uDFFF": "\ud83d\ude00"}]}'))
    assert client(server.url).ask("/path", {}, value) == ["a\ufffd", {"\ufffd": "\U0001f600"}]


KEY = "sk-proj/12345"


@pytest.mark.parametrize(
    "answer",
    [
        (400, {}, f"invalid key {KEY}"), (503, {}, f"<b>{KEY}</b>"), (200, {}, f"no json: {KEY}"),
        (200, {}, json.dumps({"other": KEY})), (200, {}, json.dumps({"value": [f"your key is {KEY}", {KEY: 1}]})),
        (200, {}, json.dumps({"value": KEY}).replace("-", "\\u002d")), (307, {"Location": f"http://x/{KEY}"}, ""),
    ],
)  # fmt: skip
def test_a_key_that_the_server_echoes_goes_nowhere(serve, answer):
    asker = client(
        "http://user:password@" + serve(answer).url.removeprefix("http://"), key=KEY, retries=0
    )
    try:
        found = repr(asker.ask("/path", {}, value))
        assert "[secret]" in found
    except RequestFailed as e:
        found = repr(e) + repr(e.__cause__)
    assert KEY not in found and "password" not in found


@pytest.mark.parametrize("user, sent", [("", "Bearer sk-12345678"), ("me:x@", "Basic bWU6eA==")])
def test_a_netrc_replaces_no_key(serve, monkeypatch, tmp_path, user, sent):
    (tmp_path / "netrc").write_text("default login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("no_proxy", "*")
    server = serve(OK)
    client(f"http://{user}0.0.0.0:{server.server_port}", key="sk-12345678").ask("/path", {}, value)
    assert server.requests[0][1]["Authorization"] == sent


def test_a_key_that_no_header_can_hold_is_not_shown(serve):
    with pytest.raises(RequestFailed, match="InvalidHeader") as failed:
        client(serve(OK).url, key="sk-12345678\n").ask("/path", {}, value)
    assert "sk-12345678" not in str(failed.value)


# ---- waiting


def test_the_wait_doubles_varies_by_half_and_has_an_upper_bound(serve, waits):
    with pytest.raises(RequestFailed):
        client(serve(BUSY).url, retries=8).ask("/path", {}, value)
    assert len(waits) == 8
    for k in range(8):
        others = [back_off(k + 1) for _ in range(32)]  # of 8 all may be cut to a minute
        assert all(
            min(60, 2**k * 0.5) <= wait <= min(60, 2**k * 1.5) for wait in [waits[k], *others]
        )
        assert max(others) - min(others) > 0.05 * min(others) or k == 7  # 64 to 192 s: a minute
        assert max(others) == 60 or k < 6


@pytest.mark.parametrize(
    "headers, said, wait",
    [
        ({"Retry-After": "17"}, "", 17), ({"Retry-After": " 3 "}, "", 3), ({"Retry-After": "7.66"}, "", 7.66),
        ({"Retry-After": "3600"}, "", 60), ({"Retry-After": "9" * 400}, "", 60), ({"Retry-After": "9s"}, "", 9),
        ({"retry-after-ms": "7500"}, "", 7.5),
        ({"retry-after-ms": "7500", "retry-after": "8"}, "", 7.5), ({"retry-after": "8"}, "Try again in 20s.", 8),
        # without a header: Gemini, LiteLLM, Azure, OpenAI
        ({}, '[{"error": {"code": 429, "details": [{"retryDelay": "44s"}]}}]', 44),
        ({}, "Quota exceeded. Please retry in 44.241889s.", 44.241889),
        ({}, "No deployments available, Try again in 41 seconds. Passed model=x", 41),
        ({}, "have exceeded call rate limit. Please retry after 26 seconds.", 26),
        ({}, "Please try again in 0m8.5s.", 8.5), ({}, "Please try again in 1m5s.", 60),
        ({}, "x" * 300 + " Please try again in 9000ms.", 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [429, 503])
def test_what_a_server_asks_to_wait_is_waited_up_to_a_minute(
    serve, waits, status, headers, said, wait
):
    assert client(serve((status, headers, said), OK).url).ask("/path", {}, value) == 1
    assert waits == [wait]


@pytest.mark.parametrize("ahead, low, high", [(50, 20, 50), (3600, 60, 60), (-3600, 0.5, 1.5)])
def test_retry_after_as_a_date_is_honoured_up_to_a_minute(serve, waits, ahead, low, high):
    date = email.utils.formatdate(time.time() + ahead, usegmt=True)
    client(serve((503, {"Retry-After": date}, ""), OK).url).ask("/path", {}, value)
    (wait,) = waits
    assert low <= wait <= high


@pytest.mark.parametrize(
    "asked",
    ["0", "0.2", "-5", "nan", "-inf", "soon", "", "yesterday GMT", "Wed, 99 Xyz 99999 07:28 GMT"],
)
def test_a_retry_after_of_nothing_or_nonsense_waits_as_usual(serve, waits, asked):
    client(serve((429, {"Retry-After": asked}, ""), OK).url).ask("/path", {}, value)
    (wait,) = waits
    assert 0.5 <= wait <= 1.5


@settings(max_examples=50, deadline=None)
@given(
    st.text()
    | st.from_regex(r"Wed, \d{1,5} (Oct|Xyz) [0-9]{1,12} \d\d:\d\d:\d\d (GMT|[+-]\d{1,9})")
)
def test_no_retry_after_breaks_the_client(text):
    assert module._wait_asked({"Retry-After": text}, text) >= 0


def test_a_long_number_to_wait_is_read_in_no_time():
    start = time.thread_time()
    assert module._wait_asked({}, "retry in " + "1" * 500_000) == 0
    assert time.thread_time() - start < 2


def test_retry_after_never_shortens_the_back_off(serve, waits):
    server = serve(*[BUSY] * 4, (429, {"Retry-After": "1"}, ""), OK)
    assert client(server.url, retries=5).ask("/path", {}, value) == 1 and waits[4] >= 8


# ---- several servers


def test_after_a_fault_the_next_server_is_asked_at_once_and_stays_in_use(serve, waits):
    broken, well = serve(BUSY), serve(OK)
    asker = client(broken.url, well.url)
    assert asker.ask("/path", {}, value) == asker.ask("/path", {}, value) == 1
    assert (len(broken.requests), len(well.requests)) == (1, 2) and not waits
    assert asker.urls == [well.url, broken.url] and asker.faults == 1


def test_the_client_waits_when_all_servers_have_failed(serve, waits):
    a, b, c = serve(BUSY, OK), serve(hang_up), serve((429, {}, ""))
    asker = client(a.url, b.url, c.url)
    assert asker.ask("/path", {}, value) == 1
    assert (
        [len(server.requests) for server in (a, b, c)] == [2, 1, 1]
        and len(waits) == 1
        and asker.faults == 3
    )


def test_when_all_servers_stay_away_the_last_is_named(waits):
    a, b = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    asker = client(f" {a}/", b, retries=1)
    with pytest.raises(RequestFailed) as failed:
        asker.ask("/path?x=1", {}, value)
    assert str(failed.value) == f"{b}/path: ConnectionError, 2 times"
    assert asker.faults == 4 and len(waits) == 1


def test_revive_is_called_after_the_wait_before_every_round_but_the_first(serve, monkeypatch):
    events = []
    monkeypatch.setattr("plumbing.client.sleep", lambda _: events.append("wait"))
    new = serve(OK)
    urls = ["", new.url + "/"]

    def revive():
        events.append("revive")
        return urls.pop(0)

    gone = f"http://127.0.0.1:{free_port()}"
    asker = client(gone, revive=revive)
    assert asker.ask("/path", {}, value) == asker.ask("/path", {}, value) == 1
    assert events == ["wait", "revive"] * 2 and asker.urls == [new.url]


def test_what_cannot_be_revived_is_final(waits):
    def revive():
        raise Outage("no memory")

    with pytest.raises(Outage, match="^no memory$"):
        client(f"http://127.0.0.1:{free_port()}", revive=revive).ask("/path", {}, value)
    assert len(waits) == 1


# ---- proxies


@pytest.mark.parametrize(
    "proxies, name, by_proxy",
    [
        (True, "127.0.0.1", 0),
        (True, "localhost", 0),
        (True, "127.1.2.3", 0),
        (True, "0.0.0.0", 1),  # no loopback address, and yet this machine
        (False, "0.0.0.0", 0),
    ],
)
def test_a_proxy_of_the_environment_is_used_only_if_asked_and_never_for_this_machine(
    serve, monkeypatch, proxies, name, by_proxy
):
    proxy = serve(OK)
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, proxy.url)
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    port = serve(OK).server_port
    url = f"http://{name}:{port}"
    try:
        client(url, key="" if proxies else None, retries=0).ask("/path", {}, value)
    except RequestFailed:  # 127.1.2.3: nobody listens there
        assert name == "127.1.2.3"
    assert len(proxy.requests) == by_proxy


def test_interrupting_a_wait_ends_it(serve, monkeypatch):
    def sleep(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("plumbing.client.sleep", sleep)
    server = serve(BUSY)
    with pytest.raises(KeyboardInterrupt):
        client(server.url).ask("/path", {}, value)
    assert len(server.requests) == 1
