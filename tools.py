"""What an agent can call: how a call looks in its text, who answers it, and how the result is shown (§2.1).

A tool is a subclass of `Tool`, five words and `submit`, or of `Function`, five words and `run`. The strings that end a
turn, the message after an invalid action, the tag of an observation and the names of the metrics derive from the tools
in use (`--tools`).
"""

import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import simpleeval

from config import Config
from faults import Fault, ToolDown
from harness.client import Client, RequestFailed

simpleeval.MAX_POWER = 1000  # largest base and exponent, so that no calculation takes long
MAX_PASSAGE = 100_000  # characters of a passage that are read and kept
ANSWER = "answer"  # the tag that ends a trajectory


class Tool(ABC):
    """One tool: `<tag>argument</tag>` calls it, `<result_tag>...</result_tag>` holds what it returns."""

    tag: str  # search
    noun: str  # a search: in the message after an invalid action
    argument: str  # query: likewise
    plural: str  # searches: its metric
    result_tag: str  # information

    @property
    def faults(self) -> int:
        """Requests that have failed so far."""
        return 0

    @abstractmethod
    def submit(self, argument: str) -> "Future[list[str]]":
        """Returns a Future of the result, a list of texts. It raises ToolDown if there is no result."""

    def show(self, result: list[str]) -> str:
        """Returns the text of a result as the policy reads it, without its tag."""
        return "\n".join(result)


class Function(Tool):
    """A tool that answers at once: a subclass has the five words and `run`."""

    @abstractmethod
    def run(self, argument: str) -> str:
        """Returns the result. An exception becomes a reply too, since the policy may write anything."""

    def submit(self, argument: str) -> "Future[list[str]]":
        done: Future[list[str]] = Future()
        try:
            done.set_result([self.run(argument)])
        except Exception as e:
            done.set_result([f"not {self.noun} ({type(e).__name__})"])
        return done


class Calculator(Function):
    """Arithmetic on numbers: `<calculate> 3 * (4 + 5) </calculate>` returns 27."""

    tag, noun, argument, plural, result_tag = "calculate", "a calculation", "expression", "calculations", "result"

    def run(self, argument: str) -> str:
        if not re.fullmatch(r"[\d\s.+*/%()-]{1,200}", argument):
            raise ValueError(argument)
        one_line = " ".join(argument.split())  # of several lines simpleeval would compute the first
        return f"{float(simpleeval.SimpleEval(names={}, functions={}).eval(one_line)):.12g}"


def stop_strings(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Returns the strings that end a turn: the closing tags of the tools and of the answer."""
    return tuple(f"</{tag}>" for tag in [*(tool.tag for tool in tools), ANSWER])


def tags_of(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Returns the agent's tags, which only the policy and the loop write: those of thoughts, tools and answers."""
    return "think", ANSWER, *(tag for tool in tools for tag in (tool.tag, tool.result_tag))


def invalid_action(tools: Sequence[Tool]) -> str:
    """Returns the observation after a turn that neither called a tool nor answered."""
    nouns = " nor ".join([*(tool.noun for tool in tools), "an answer"])
    calls = ", ".join(f"<{tool.tag}> {tool.argument} </{tool.tag}>" for tool in tools)
    return f"\n\nThat was neither {nouns}. Write {calls} or <{ANSWER}> answer </{ANSWER}>.\n\n"


def find_call(text: str, tools: Sequence[Tool]) -> tuple[Tool, str] | None:
    """Returns the tool that a turn calls first, and the argument; None if no call is complete."""
    found = []
    for tool in tools:
        if match := re.search(rf"<{tool.tag}>((?:(?!<{tool.tag}>).)*?)</{tool.tag}>", text, re.S):
            found.append((match.start(), tool, match.group(1).strip()))
    return min(found, key=lambda call: call[0])[1:] if found else None


class Search(Tool):
    """Client of Search-R1's POST /retrieve: queries in, passages out.

    One thread sends whatever has queued up since its last request as one request: batches form under load, and a lone
    query leaves at once. A query that is already under way is not sent again. `url` may name several servers, with
    commas. A transient fault (connection, time-out, 429, 5xx) moves on to the next one at once; when all have failed,
    they are asked again with exponential back-off or after the time that Retry-After asks for. `revive` is called
    before that (the run restarts its own server there) and may return a new URL. After `retries` such rounds the
    futures raise ToolDown.
    """

    tag, noun, argument, plural, result_tag = "search", "a search", "query", "searches", "information"

    def __init__(
        self,
        url: str,
        topk: int,
        timeout: float = 30,
        retries: int = 6,
        backoff: float = 0.5,
        revive: Callable[[], str] = lambda: "",
    ):
        self.topk = topk
        self._client = Client(
            url.split(","), timeout=timeout, retries=retries, backoff=backoff, expects="a Search-R1 answer",
            revive=revive,
        )  # fmt: skip
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._under_way: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._send_batches, daemon=True).start()

    @property
    def urls(self) -> list[str]:
        """The servers, the one in use first."""
        return self._client.urls

    @property
    def faults(self) -> int:
        return self._client.faults

    def submit(self, argument: str) -> "Future[list[str]]":
        """Returns a Future of the passages' `contents`, best first."""
        query = argument[:4096]  # the server accepts no longer ones
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
            results: list[list[str]] = []
            fault: Exception | None = None
            try:
                results = self._retrieve(batch)
            except Exception as e:  # raised by the futures, in the caller's thread
                fault = e
            with self._lock:
                futures = [self._under_way.pop(query) for query in batch]
            for k, future in enumerate(futures):
                if fault:
                    future.set_exception(fault)
                else:
                    future.set_result(results[k])

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        try:
            return self._client.post("/retrieve", body, lambda answer: _read_passages(answer, len(queries), self.topk))
        except RequestFailed as e:
            raise ToolDown(str(e)) from e


def _read_passages(answer: Any, n: int, topk: int) -> list[list[str]]:
    rows = answer["result"]
    if len(rows) != n:
        raise ValueError(f"{len(rows)} results for {n} queries")
    passages = [[hit["document"]["contents"] for hit in hits[:topk]] for hits in rows]
    if not all(isinstance(contents, str) for hits in passages for contents in hits):
        raise TypeError("contents are not text")
    return [[contents[:MAX_PASSAGE] for contents in hits] for hits in passages]


def make_tools(cfg: Config, search: Search) -> list[Tool]:
    """Returns the tools that --tools names, in their order."""
    known: dict[str, Tool] = {"search": search, "calculator": Calculator()}
    names = cfg.tools.split(",")
    if names == ["none"]:
        return []
    if unknown := [name for name in names if name not in known]:
        raise Fault(f"--tools {cfg.tools}: there is no {unknown[0] or 'empty name'}; choose from {', '.join(known)}")
    if "search" not in names:
        raise Fault(f"--tools {cfg.tools}: search must be among them, or none alone")
    return [known[name] for name in names]
