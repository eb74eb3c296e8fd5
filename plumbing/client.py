"""HTTP with JSON bodies, the one rule of retries for every server that a run talks to, and what chat
endpoints reply: to the optimizer, a judge and an evaluated model alike."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from plumbing.faults import Outage
from plumbing.outside import clean, join_url, without_secrets

T = TypeVar("T")
MAX_WAIT = 60  # seconds between two attempts, whatever a server asks for
BUSY = (408, 409, 425, 429, *range(500, 600))  # statuses that another attempt may not meet


class RequestFailed(Outage):
    """No usable answer of a server; `status` is that of its answer, 0 where there was none or it could
    not be read."""

    def __init__(self, text: str, status: int = 0):
        super().__init__(text)
        self.status = status


class Client:
    """A client of one server.

    Connection faults, time-outs and BUSY answers are followed by up to `retries` more attempts: the
    first at once, the others after 2, 4, 8, ... seconds or as Retry-After asks. `timeout`: seconds
    until something arrives. No redirect is followed: it would take questions and gold answers to
    another host. `key` is for a service outside, which the environment's proxies may lead to.
    """

    def __init__(self, url: str, timeout: float, retries: int, key: str = ""):
        self.url, self.timeout = join_url(url), timeout
        self.session = requests.Session()
        self.session.trust_env = bool(key)
        if key:
            self.session.headers["Authorization"] = f"Bearer {key}"
        retry = Retry(
            retries,
            allowed_methods=None,
            status_forcelist=BUSY,
            backoff_factor=1,
            backoff_max=MAX_WAIT,
            backoff_jitter=1,
            retry_after_max=MAX_WAIT,
            raise_on_status=False,
        )
        for scheme in ("http://", "https://"):  # as many connections as the caller has threads
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=256, max_retries=retry))

    def ask(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """Returns `read(answer)` of a POST of `body`, or of a GET where it is None.

        Raises RequestFailed, also for an answer that `read` cannot read.
        """
        url = join_url(self.url, path)
        method = "GET" if body is None else "POST"
        said = without_secrets(url)
        try:
            reply = self.session.request(
                method, url, json=body, timeout=self.timeout, allow_redirects=False
            )
        except requests.RequestException as e:
            reason = getattr(e.args and e.args[0], "reason", e)  # urllib3's, after the last attempt
            what = without_secrets(str(reason)).rpartition(": ")[2]
            raise RequestFailed(f"{said}: {type(reason).__name__}: {what}") from None
        beginning = " ".join(reply.text.split())[:200]
        if reply.status_code >= 300:
            text = f"{said}: HTTP {reply.status_code}: {beginning}".rstrip(": ")
            raise RequestFailed(text, reply.status_code)
        try:
            return read(clean(reply.json()))
        # perhaps a page to log in
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            raise RequestFailed(
                f"{said}: malformed answer ({type(e).__name__}: {str(e)[:200]}; it begins {beginning!r})"
            ) from None


class Reply(NamedTuple):
    """What a chat model says, and the tokens that its server bills; 0: it does not say."""

    text: str
    cut: bool = False  # it ended at the limit of tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_reply(answer: Any) -> Reply:
    """Returns the reply that a chat completion holds."""
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    text = choice["message"].get("content") or ""  # null: all of it is thoughts
    if not isinstance(text, str):
        raise TypeError("content is not text")
    billed = [int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion")]
    return Reply(text, choice.get("finish_reason") == "length", *billed)


def without_thoughts(text: str, part: re.Pattern[str]) -> str:
    """Returns what follows a model's thoughts: what is behind the last `</think>` before the last
    `part` of an answer. One inside a part, or after the last part, ends nothing. "" if thoughts never
    end.

    Templates that write `<think>` themselves leave a reply with the closing tag alone.
    """
    # parts are NULs, so every place stays the same
    masked = part.sub(lambda found: "\0" * len(found[0]), text)
    # the last one before the last part; none without a part, where rfind is -1
    end = masked.rfind("</think>", 0, masked.rfind("\0") + 1)
    if end >= 0:
        return text[end + len("</think>") :]
    return "" if masked.lstrip().startswith("<think>") else text
