"""What an agent can call: how a call looks in its text, who answers it, and how the result is shown (§2.1).

A tool is a class below with five words and `submit`. The strings that end a turn, the message after an invalid action,
the shape of an observation and the names of the metrics all derive from the tools in use (`--tools`).
"""

import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import requests
import simpleeval

from faults import Fault, ToolDown

simpleeval.MAX_POWER = 1000  # an exponent, so that no calculation takes long
ANSWER = "answer"  # the tag that ends a trajectory


class Tool(ABC):
    """One tool: `<tag>argument</tag>` calls it, `<result_tag>...</result_tag>` holds what it returns."""

    tag: str  # search
    noun: str  # a search
    argument: str  # query
    plural: str  # searches: its metric
    result_tag: str  # information
    faults = 0  # requests that failed so far

    @abstractmethod
    def submit(self, argument: str) -> "Future[list[str]]":
        """Returns a Future of the result, a list of texts; it raises ToolDown where there will be none."""

    def show(self, result: list[str]) -> str:
        """Returns the text of a result as the policy reads it, without its tag."""
        return "\n".join(result)


class Calculator(Tool):
    """Arithmetic on numbers: `<calculate> 3 * (4 + 5) </calculate>` returns 27."""

    tag, noun, argument, plural, result_tag = "calculate", "a calculation", "expression", "calculations", "result"

    def submit(self, argument: str) -> "Future[list[str]]":
        done: Future[list[str]] = Future()
        try:
            if not re.fullmatch(r"[\d\s.+*/%()-]{1,200}", argument):
                raise ValueError(argument)
            value = simpleeval.SimpleEval(names={}, functions={}).eval(argument)
            done.set_result([f"{value:.12g}"])
        except Exception as e:  # whatever the policy wrote, it gets a reply
            done.set_result([f"not a calculation ({type(e).__name__})"])
        return done


def stop_strings(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Returns the strings that end a turn: the closing tag of every tool, and of the answer."""
    return tuple(f"</{tag}>" for tag in [*(tool.tag for tool in tools), ANSWER])


def invalid_action(tools: Sequence[Tool]) -> str:
    """Returns the observation after a turn that neither called a tool nor answered."""
    nouns = " nor ".join([*(tool.noun for tool in tools), "an answer"])
    *calls, answer = [f"<{tag}> {what} </{tag}>" for tag, what in _calls(tools)]
    return f"\n\nThat was neither {nouns}. Write {', '.join(calls)} or {answer}.\n\n"


def _calls(tools: Sequence[Tool]) -> list[tuple[str, str]]:
    return [*((tool.tag, tool.argument) for tool in tools), (ANSWER, "answer")]


def find_call(text: str, tools: Sequence[Tool]) -> tuple[Tool, str] | None:
    """Returns the tool that a turn calls first and its argument; None where no call is complete."""
    found = []
    for tool in tools:
        if match := re.search(rf"<{tool.tag}>((?:(?!<{tool.tag}>).)*?)</{tool.tag}>", text, re.S):
            found.append((match.start(), tool, match.group(1).strip()))
    return min(found, key=lambda call: call[0])[1:] if found else None


class Search(Tool):
    """Client of POST /retrieve: queries in, passages out.

    One thread sends whatever has queued up since its last request as one request, so batches form by themselves
    under load and a lone query leaves at once; a query that is already under way is not sent again. `url` may name
    several servers, with commas: after a fault that can pass (connection, timeout, 5xx) the next one is asked. When
    all have failed they are tried again, with exponential back-off or after the seconds of Retry-After; `revive` is
    called before (the run restarts its own server there) and may give a new URL. After `retries` such rounds the
    futures raise ToolDown.
    """

    tag, noun, argument, plural, result_tag = "search", "a search", "query", "searches", "information"

    def __init__(
        self, url: str, topk: int, timeout: float = 30, retries: int = 6, revive: Callable[[], str] = lambda: ""
    ):
        self.urls = [u.strip().rstrip("/") for u in url.split(",")]  # the first is in use
        self.topk, self.timeout, self.retries, self.revive = topk, timeout, retries, revive
        self.faults = 0  # requests that failed, for the metrics
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy from the environment would be asked even for loopback
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._under_way: dict[str, Future] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._send_batches, daemon=True).start()

    def submit(self, argument: str) -> "Future[list[str]]":
        """Returns a Future of the passages' `contents`, best first."""
        query = argument[:4096]  # the server takes no more
        with self._lock:
            if query not in self._under_way:
                self._under_way[query] = Future()
                self._queue.put(query)
            return self._under_way[query]

    def show(self, result: list[str]) -> str:
        """Returns the passages as the policy reads them (App. F); each is `"Title"\\ntext`."""
        shown = []
        for k, contents in enumerate(result, 1):
            title, _, text = contents.partition("\n")
            shown.append(f"Doc {k}(Title: {title.strip().strip(chr(34))}) {text.strip()}")
        return "\n".join(shown)

    def _send_batches(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty() and len(batch) < 256:
                batch.append(self._queue.get())
            try:
                results, fault = self._retrieve(batch), None
            except Exception as e:  # reaches the caller through its futures
                results, fault = [None] * len(batch), e
            with self._lock:
                futures = [self._under_way.pop(query) for query in batch]
            for future, documents in zip(futures, results, strict=True):
                if fault:
                    future.set_exception(fault)
                else:
                    future.set_result(documents)

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        pause = 0.0  # what the servers asked for
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(max(pause, min(8.0, 0.25 * 2**attempt)))
                try:
                    self.urls[0] = (self.revive() or self.urls[0]).rstrip("/")
                except Fault as e:
                    raise ToolDown(f"{self.urls[0]}: {e}") from None
                pause = 0.0
            for _ in self.urls:
                answer, fault = self._post(body)
                if not fault:
                    return self._documents(answer, len(queries))
                self.faults += 1
                after = "" if answer is None else answer.headers.get("Retry-After", "")
                pause = max(pause, min(60.0, float(after)) if after.isdecimal() else 0.0)
                self.urls.append(self.urls.pop(0))
        raise ToolDown(f"{' and '.join(self.urls)}/retrieve: {fault}, {self.retries + 1} times")

    def _post(self, body: dict) -> tuple[requests.Response | None, str]:
        """The answer of the server in use, and the fault if it is one that can pass."""
        try:
            timeout = (min(5, self.timeout), self.timeout)  # to connect, to answer
            answer = self._http.post(f"{self.urls[0]}/retrieve", json=body, timeout=timeout)
            return answer, f"HTTP {answer.status_code}" if answer.status_code >= 500 else ""
        except requests.RequestException as e:
            return None, type(e).__name__

    def _documents(self, answer: requests.Response, n: int) -> list[list[str]]:
        """The passages of n queries; ToolDown where the answer is not Search-R1's."""
        try:
            answer.raise_for_status()
            rows = answer.json()["result"]
            if len(rows) != n:
                raise ValueError(f"{len(rows)} results for {n} queries")
            documents = [[hit["document"]["contents"] for hit in hits] for hits in rows]
            if not all(isinstance(contents, str) for hits in documents for contents in hits):
                raise TypeError("contents that are no text")
            return documents
        except (requests.RequestException, ValueError, KeyError, TypeError) as e:
            raise ToolDown(f"{self.urls[0]}/retrieve: not a Search-R1 answer ({type(e).__name__}: {e})") from e
