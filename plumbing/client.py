"""HTTP with JSON bodies, and the one rule of retries for every server that a run talks to."""

import concurrent.futures
import contextlib
import email.utils
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import requests
import tenacity
import urllib3

from plumbing.faults import Fault, Outage
from plumbing.outside import at, clean, credentials, decoded, secrets_of, without_secrets

T = TypeVar("T")
MAX_WAIT = 60.0  # seconds between two rounds, whatever a server asks for
MAX_ANSWER = 64 << 20  # bytes of an answer, unpacked
BROKEN_OFF = (urllib3.exceptions.ProtocolError, urllib3.exceptions.DecodeError, urllib3.exceptions.SSLError)
CONNECTION_FAULTS = (requests.ConnectionError, requests.Timeout, *BROKEN_OFF)


class RequestFailed(Outage):
    """No usable answer: the server and its last fault in words. A `transient` fault may be gone at the next attempt."""

    def __init__(self, text: str, transient: bool = False, retry_after: float = 0.0):
        super().__init__(text)
        self.transient, self.retry_after = transient, retry_after


class Answer(NamedTuple):
    """A whole answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """A client of one server, or of several that can stand in for each other.

    Connection faults, time-outs, 429 and 5xx are transient: the next server is asked at once. When all have failed,
    the client waits and asks them all again, up to `retries` times. It waits for `backoff` seconds, doubled every time
    and varied by half, or for as long as Retry-After asks; never longer than MAX_WAIT. Other statuses are final. So is
    a body that is not what the client `expects`, unless `retry_malformed`. `timeout` seconds are for a whole call,
    however slowly its answer trickles in; `retry_timeout=False` is for servers that may still be busy with it.

    What arrives is cleaned (`outside.clean`): it holds neither half surrogate pairs nor the keys in `headers` and in
    `urls`, which a server may echo. No redirect is followed: it would take questions and gold answers to another host.

    `revive` is called before every round but the first; it may return a new URL for the server in use, or "". The
    environment's proxies are used only with `proxies`, and never for this machine.
    """

    def __init__(
        self, urls: Iterable[str], *, timeout: float, retries: int, backoff: float, expects: str = "JSON",
        headers: Mapping[str, str] | None = None, proxies: bool = False, retry_malformed: bool = False,
        retry_timeout: bool = True, revive: Callable[[], str] = lambda: "",
    ):  # fmt: skip
        self.urls = [at(url) for url in urls]  # the first is in use
        self.timeout, self.retries, self.backoff, self.expects = timeout, retries, backoff, expects
        self.retry_malformed, self.retry_timeout, self.revive = retry_malformed, retry_timeout, revive
        own = [word for url in self.urls for word in credentials(url)]
        self.secrets = secrets_of([*(headers or {}).values(), *own])
        self.faults = 0  # transient faults so far
        self.session = requests.Session()
        self.session.headers.update(headers or {})
        self.session.trust_env = proxies and not any(map(_is_loopback, self.urls))
        for scheme in ("http://", "https://"):  # as many connections as the caller has threads
            self.session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=1024))

    def get(self, path: str, read: Callable[[Any], T], retries: int | None = None) -> T:
        """Returns `read(answer)` of a GET; see `post`."""
        return self._request("GET", path, None, read, retries)

    def post(self, path: str, body: Any, read: Callable[[Any], T], retries: int | None = None) -> T:
        """Returns `read(answer)` of a POST of `body`; `retries` replaces the client's. Raises RequestFailed.

        A LookupError, TypeError or ValueError of `read` makes the answer malformed. `str` reads one that is no JSON.
        """
        return self._request("POST", path, body, read, retries)

    def _request(self, method: str, path: str, body: Any, read: Callable[[Any], T], retries: int | None) -> T:
        attempts = 1 + (self.retries if retries is None else retries)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(attempts),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, RequestFailed) and e.transient),
            wait=self._seconds_to_wait,
            before=self._before_round,
            reraise=True,
        )
        try:
            answer: T = retrying(self._ask_each_server, partial(self._ask, method, path, body, read))
            return answer
        except RequestFailed as e:
            place = path.partition("?")[0]
            if not e.transient:
                raise RequestFailed(f"{self._without_secrets(self.urls[0])}{place}: {e}") from e
            times = f", {attempts} times" if attempts > 1 else ""
            urls = self._without_secrets(" and ".join(self.urls))
            raise RequestFailed(f"{urls}{place}: {e}{times}", True) from e

    def _before_round(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number > 1:
            try:
                self.urls[0] = at(self.revive()) or self.urls[0]
            except Fault as e:
                raise RequestFailed(str(e)) from e

    def _seconds_to_wait(self, state: tenacity.RetryCallState) -> float:
        backoff = self.backoff * 2.0 ** (state.attempt_number - 1) * random.uniform(0.5, 1.5)
        fault = state.outcome.exception() if state.outcome else None
        return min(MAX_WAIT, max(backoff, fault.retry_after if isinstance(fault, RequestFailed) else 0.0))

    def _ask_each_server(self, ask: Callable[[], T]) -> T:
        retry_after = 0.0
        for _ in self.urls:
            try:
                return ask()
            except RequestFailed as e:
                if not e.transient:
                    raise
                last, retry_after = str(e), max(retry_after, e.retry_after)
                self.faults += 1
                self.urls = [*self.urls[1:], self.urls[0]]
        raise RequestFailed(last, True, retry_after)

    def _ask(self, method: str, path: str, body: Any, read: Callable[[Any], T]) -> T:
        exchange = partial(self._exchange, method, at(self.urls[0], path), body)
        try:
            answer = within(self.timeout, exchange)
        except (requests.ReadTimeout, urllib3.exceptions.ReadTimeoutError, concurrent.futures.TimeoutError):
            raise RequestFailed(f"no whole answer in {self.timeout:g} s", self.retry_timeout) from None
        except CONNECTION_FAULTS as e:
            raise RequestFailed(type(e).__name__, True) from None
        except (requests.RequestException, ValueError) as e:  # an invalid URL; urllib3's ValueErrors come through too
            raise RequestFailed(self._without_secrets(f"{type(e).__name__}: {e}")) from None
        if 300 <= answer.status < 400:
            place = self._without_secrets(answer.headers.get("Location", "nowhere"))
            raise RequestFailed(f"HTTP {answer.status}: it redirects to {place[:200]}; name that server if it is yours")
        if answer.status >= 400:
            text = self._without_secrets(answer.body[:10_000].decode(errors="replace"))
            fault = f"HTTP {answer.status}: {' '.join(text.split())[:200]}".rstrip(": ")
            raise RequestFailed(fault, answer.status == 429 or answer.status >= 500, _retry_after(answer))
        try:
            found = answer.body.decode() if read is str else decoded(answer.body, parse_constant=_refuse)
            if self.secrets or b"\\ud" in answer.body.lower():  # large answers of an engine need no pass in Python
                found = clean(found, self.secrets)
            return read(found)
        except (LookupError, TypeError, ValueError) as e:
            why = self._without_secrets(f"{type(e).__name__}: {str(e)[:200]}")
            raise RequestFailed(f"not {self.expects} ({why})", self.retry_malformed) from None

    def _exchange(self, method: str, url: str, body: Any, ended: threading.Event) -> Answer:
        """Returns the answer; stops reading it once the call has `ended`."""
        timeout = (min(5.0, self.timeout), self.timeout)  # to connect, between two bytes
        parts, size = [], 0
        with self.session.request(method, url, json=body, timeout=timeout, stream=True, allow_redirects=False) as reply:
            while (part := reply.raw.read1(1 << 16, decode_content=True)) and not ended.is_set():
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER:
                    raise RequestFailed(f"its answer is larger than {MAX_ANSWER >> 20} MiB")
            return Answer(reply.status_code, reply.headers, b"".join(parts))

    def _without_secrets(self, text: str) -> str:
        return str(clean(without_secrets(text), self.secrets))


def within(seconds: float, work: Callable[[threading.Event], T]) -> T:
    """Returns work(ended); after `seconds` sets `ended` and raises concurrent.futures.TimeoutError.

    The work is done in a thread, which is left to itself then: a blocked read cannot be ended from outside.
    """
    ended = threading.Event()
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work(ended))
        except BaseException as e:  # raised by `result`, in the caller's thread
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    finally:
        ended.set()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _retry_after(answer: Answer) -> float:
    """Returns the seconds that a Retry-After header asks for, as a number or an HTTP date; 0 if it makes no sense."""
    value = answer.headers.get("Retry-After", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))  # in this order NaN gives 0
    with contextlib.suppress(ValueError, OverflowError):
        if date := email.utils.parsedate_tz(value):
            return max(0.0, email.utils.mktime_tz(date) - time.time())
    return 0.0


def _is_loopback(url: str) -> bool:
    return re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)", url) is not None
