"""HTTP with JSON bodies, and the one rule of retries for every server that a run talks to."""

import http.client
import random
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

import requests
import urllib3

from plumbing.faults import Outage
from plumbing.outside import at, clean, decoded, without_secrets

T = TypeVar("T")
MAX_WAIT = 60.0  # seconds between two rounds, whatever a server asks for
MAX_ANSWER = 64 << 20  # bytes of an answer, unpacked
LOOPBACK = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)")
BUSY = (408, 409, 425, 429)  # statuses besides 5xx that another attempt may not meet

# How servers say that a conversation is too long, and how they name an option that a model refuses.
TOO_LONG = re.compile(
    r"HTTP 413|\btokens\b|context.?(?:length|size|window|limit)|too.?(?:long|large)", re.I
)
# What no other attempt mends: some say so as a fault of their own (llama.cpp, HTTP 500 or 200), some
# in an answer of 200 that holds the status of an error (OpenRouter).
FINAL = re.compile(
    r"context.?(?:length|size|window|limit)|too large to process|prompt is too long|allowed length"
    r"|['\"]code['\"]: ?['\"]?4(?!08|09|25|29)\d\d\b",
    re.I,
)
# How long to wait, in a header or, without one, in words: "in 44.2s", "in 1m12.5s", "after 26 seconds".
WAIT = re.compile(
    r"(?:(?:again|retry) (?:in|after) |retryDelay\W+)(?:(\d+)m)?(\d+(?:\.\d*)?) ?(m?s)", re.I
)
OPTION = re.compile(
    r"(?:['\"`:]|\b(?:parameter|argument|field|support))s? ?(max_(?:completion_)?tokens|temperature|stop|seed)\b",
    re.I,
)


class RequestFailed(Outage):
    """No usable answer: the server and its last fault in words. A `transient` fault may be gone at
    the next attempt."""

    def __init__(self, text: str, transient: bool = False, retry_after: float = 0.0):
        super().__init__(text)
        self.transient, self.retry_after = transient, retry_after


def respond(sock: Any, **options: Any) -> http.client.HTTPResponse:
    """Returns a response; the socket's time-out at this moment is for all of it, status line,
    headers and chunks."""
    response = http.client.HTTPResponse(sock, **options)
    raw: Any = response.fp.raw
    read, end = raw.readinto, monotonic() + sock.gettimeout()

    def readinto(buffer: Any) -> Any:
        left = end - monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        return read(buffer)

    raw.readinto = readinto
    return response


class Connections(requests.adapters.HTTPAdapter):
    """Connections whose responses come from `respond`: urllib3's own time-out is for two bytes in a
    row."""

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = type(
            "Connection", (type(pool).ConnectionCls,), {"response_class": staticmethod(respond)}
        )
        return pool


class Client:
    """A client of one server, or of several that can stand in for each other.

    Connection faults, time-outs, BUSY, 5xx and answers that cannot be read are transient: the next
    server is asked at once. When all have failed, the client waits and asks them all again, up to
    `retries` times. It waits for a second, doubled every time and varied by half, or for as long as
    Retry-After asks; never longer than MAX_WAIT. Other statuses are final. `timeout` seconds are
    for a whole call, however slowly its answer trickles in; `retry_timeout=False` is for servers
    that may still be busy with it.

    `key` is for a service outside, "" if it needs none: the environment's proxies are used, never
    for this machine. A server may echo the key: it is taken out of what arrives (`outside.clean`).
    No redirect is followed: it would take questions and gold answers to another host. `revive` is
    called before every attempt but the first; it may return a new URL for the server in use, or "".
    """

    def __init__(
        self,
        urls: Iterable[str],
        timeout: float,
        retries: int,
        key: str | None = None,
        retry_timeout: bool = True,
        revive: Callable[[], str] = str,  # which returns ""
    ):
        self.urls = [at(url) for url in urls]  # the first is in use
        self.timeout, self.retries = timeout, retries
        self.retry_timeout, self.revive = retry_timeout, revive
        # a short one ("EMPTY") is a word of any text
        self.secrets = [key.strip()] if key and len(key) >= 8 else []
        self.faults = 0  # transient faults so far
        # options of `chat`; this one is for models that refuse max_tokens
        self.refused = {"max_completion_tokens"}
        self.session = requests.Session()
        self.session.trust_env = key is not None and not any(map(LOOPBACK.match, self.urls))
        if key:
            self.session.headers["Authorization"] = f"Bearer {key}"
            self.session.auth = _sign
        for scheme in ("http://", "https://"):  # as many connections as the caller has threads
            self.session.mount(scheme, Connections(pool_maxsize=1024))

    def ask(self, path: str, body: Any, read: Callable[[Any], T], retries: int | None = None) -> T:
        """Returns `read(answer)` of a POST of `body`, or of a GET where it is None; `retries`
        replaces the client's.

        A LookupError, TypeError or ValueError of `read` makes the answer malformed. `str` reads one
        that is not JSON. Raises RequestFailed.
        """
        failed: RequestFailed | None = None
        for round in range(1 + (self.retries if retries is None else retries)):
            if failed:
                sleep(max(back_off(round), min(MAX_WAIT, failed.retry_after)))
            for _ in self.urls:
                if failed and (new := self.revive()):
                    self.urls[0] = at(new)
                url = at(self.urls[0], path)
                try:
                    return self._exchange(url, body, read)
                except RequestFailed as e:
                    failed = e
                said = clean(without_secrets(f"{url}: {failed}"), self.secrets)
                if not failed.transient or FINAL.search(str(failed)):
                    raise RequestFailed(said)
                self.faults += 1
                self.urls = [*self.urls[1:], self.urls[0]]
        if round:
            said += f", {round + 1} times"
        raise RequestFailed(said, True)

    def chat(self, body: dict[str, Any], read: Callable[[Any], T], retries: int | None = None) -> T:
        """As `ask` of a chat endpoint, without the options that its model has refused."""
        # some gateways stream unless they are told not to
        sent = {"stream": False} | {key: x for key, x in body.items() if key not in self.refused}
        try:
            return self.ask("/chat/completions", sent, read, retries)
        except RequestFailed as e:
            named = OPTION.search(str(e))
            if e.transient or not named or named[1] not in sent or TOO_LONG.search(str(e)):
                raise
        if named[1] not in self.refused:  # another thread may have been told first
            self.refused.add(named[1])
            if named[1] == "max_tokens":
                self.refused.remove("max_completion_tokens")
            print(f"{body['model']} refuses {named[1]}: asking without it", flush=True)
        return self.chat(body, read, retries)

    def _exchange(self, url: str, body: Any, read: Callable[[Any], T]) -> T:
        method, content = "GET" if body is None else "POST", bytearray()
        seconds: Any = urllib3.Timeout(self.timeout, min(5.0, self.timeout))  # in all, to connect
        try:
            reply = self.session.request(
                method, url, json=body, timeout=seconds, stream=True, allow_redirects=False
            )
            with reply:
                while part := reply.raw.read1(1 << 16, decode_content=True):
                    content += part
                    if len(content) > MAX_ANSWER:
                        raise RequestFailed(f"its answer is larger than {MAX_ANSWER >> 20} MiB")
        except (requests.ReadTimeout, urllib3.exceptions.ReadTimeoutError):
            raise RequestFailed(
                f"no whole answer in {self.timeout:g} s", self.retry_timeout
            ) from None
        except ValueError as e:  # of an invalid URL, or a key that no header can hold
            raise RequestFailed(f"{type(e).__name__}: {e}") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as e:
            raise RequestFailed(type(e).__name__, True) from None
        # Something came: an answer, or why there is none.
        said, transient = content.decode(errors="replace"), True
        if reply.status_code < 300:
            try:
                answer = (
                    content.decode() if read is str else decoded(content, parse_constant=_refuse)
                )
                # large answers of an engine need no pass in Python
                if self.secrets or b"\\ud" in content.lower():
                    answer = clean(answer, self.secrets)
                return read(answer)
            except (LookupError, TypeError, ValueError) as e:
                # perhaps a page to log in, or why there is none
                began = clean(said, self.secrets)[:80]
                text = f"malformed answer ({type(e).__name__}: {str(e)[:200]}; it begins {began!r})"
        else:
            transient = reply.status_code in BUSY or reply.status_code >= 500
            text = " ".join(said.split())
            if reply.is_redirect:
                text = f"it redirects to {reply.headers['Location']}"
            text = f"HTTP {reply.status_code}: {text[:200]}".rstrip(": ")
        raise RequestFailed(text, transient, _wait_asked(reply.headers, said))


def back_off(round: int) -> float:
    """Returns the seconds to wait after a round of attempts that has failed; the first one is 1."""
    return min(MAX_WAIT, 2.0 ** (round - 1) * random.uniform(0.5, 1.5))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _sign(request: Any) -> Any:
    """Signs a request with its URL's `user:password@`, or leaves it its key: requests would prefer
    what ~/.netrc has for the host."""
    user = requests.utils.get_auth_from_url(request.url)
    return requests.auth.HTTPBasicAuth(*user)(request) if any(user) else request


def _wait_asked(headers: Mapping[str, str], said: str) -> float:
    """Returns the seconds to wait that a server asks for in Retry-After, a number or an HTTP date, or
    in words; 0 if it does not."""
    ms, after = headers.get("Retry-After-Ms"), headers.get("Retry-After", "").strip()
    seconds = f"{ms}ms" if ms else after + "s" * after[-1:].isdigit()
    asked = WAIT.search(f"retry after {seconds}. {said}")
    if asked:
        minutes, number, unit = asked.groups()
        return 60 * float(minutes or 0) + float(number) / (1000 if unit == "ms" else 1)
    with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().parse_retry_after(after)
    return 0.0
