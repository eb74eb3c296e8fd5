"""The search tool: a client of Search-R1's POST /retrieve, and how a run finds out whether its server is any good."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from config import HERE, TaskKnobs
from plumbing.client import Client
from plumbing.faults import Fault, Outage, ToolDown
from plumbing.outside import without_secrets
from tasks import Question
from tasks.questions import normalize
from tasks.tools import Tool

DEFAULT = "http://127.0.0.1:8000"  # where retrieval_server.py and Search-R1's own listen unless told otherwise
DATA = Path("data")  # as evaluate.py's --data_dir
WIKI, INDEXES, E5 = "wiki-18.jsonl", ("e5_HNSW64.index", "e5_Flat.index"), "intfloat/e5-base-v2"
MAX_PASSAGE = 100_000  # characters of a passage that are read and kept

C = TypeVar("C", bound=TaskKnobs)


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
    description = "Searches a collection of passages and returns those that match the query best."

    def __init__(self, url: str, topk: int, timeout: float = 30, retries: int = 6):
        self.topk = topk
        self._client_of = partial(Client, timeout=timeout, retries=retries)
        self.connect(url)
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._under_way: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._send_batches, daemon=True).start()

    def connect(self, url: str, revive: Callable[[], str] = lambda: "") -> None:
        """Searches at other servers from now on."""
        self._client = self._client_of(url.split(","), revive=revive)

    @property
    def urls(self) -> list[str]:
        """The servers, the one in use first."""
        return self._client.urls

    @property
    def faults(self) -> int:
        return self._client.faults

    def submit(self, argument: str) -> Future[list[str]]:
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
            results: Sequence[list[str] | Exception]
            try:
                results = self._retrieve(batch)
            except Exception as e:  # raised by the futures, in the caller's thread
                results = [e] * len(batch)
            with self._lock:
                futures = [self._under_way.pop(query) for query in batch]
            for future, result in zip(futures, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _retrieve(self, queries: list[str]) -> list[list[str]]:
        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        try:
            return self._client.ask("/retrieve", body, lambda answer: _read_passages(answer, len(queries), self.topk))
        except Outage as e:  # also of its revival
            raise ToolDown(f"the search server does not answer ({e})") from e


def _read_passages(answer: Any, n: int, topk: int) -> list[list[str]]:
    rows = answer["result"]
    if len(rows) != n:
        raise ValueError(f"{len(rows)} results for {n} queries")
    passages = [[hit["document"]["contents"] for hit in hits[:topk]] for hits in rows]
    if not all(isinstance(contents, str) for hits in passages for contents in hits):
        raise TypeError("contents are not text")
    return [[contents[:MAX_PASSAGE] for contents in hits] for hits in passages]


def found(cfg: C) -> C:
    """Returns `cfg` with what a run searches that names neither --retriever nor --corpus; raises Fault if it cannot.

    That is the server on port 8000 of this machine, if one answers there, else Search-R1's corpus and index in DATA.
    Nothing is searched that some node of a torchrun job cannot reach.
    """
    nodes = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1 << 30)) or 1
    if nodes > 1 and (not cfg.retriever or re.search("//(127\\.|localhost)", cfg.retriever)):
        raise Fault(f"{nodes} nodes: give --retriever with an address that all of them can reach")
    if cfg.corpus and not cfg.retriever and not Path(cfg.corpus).is_file():
        raise Fault(f"--corpus {cfg.corpus}: no such file; check the path")
    if cfg.corpus or cfg.retriever:
        return cfg
    if not silent(DEFAULT, cfg.topk):
        return replace(cfg, retriever=DEFAULT)
    if index_of(str(DATA / WIKI)):
        return replace(cfg, corpus=str(DATA / WIKI))
    raise Fault(
        f"nothing to search: give --corpus (passages) or --retriever (URL of a running server), start one at {DEFAULT},"
        f" or put {WIKI} and {INDEXES[0]} into {DATA}/ (retrieval/README.md says where they are)"
    )


def silent(url: str, topk: int) -> BaseException | None:
    """Returns why a search server does not answer, None if it does."""
    return Search(url, topk, retries=0).submit("is anyone there").exception()


def index_of(corpus: str) -> str:
    """Returns the FAISS file of Search-R1's corpus, which is expected beside it; "" for any other corpus."""
    beside = [Path(corpus).parent / name for name in INDEXES] if Path(corpus).name == WIKI else []
    return next((str(path) for path in beside if path.is_file() and Path(corpus).is_file()), "")


def reach(cfg: TaskKnobs, serve: Callable[..., str]) -> tuple[str, Callable[[], str]]:
    """Returns the URLs of --retriever, which answers, or of a server over --corpus; and what restarts that."""
    if cfg.retriever:
        if fault := silent(cfg.retriever, cfg.topk):
            raise Fault(f"--retriever: {fault}; start it, or serve --corpus with --retriever ''")
        return cfg.retriever, lambda: ""
    argv, index = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus], index_of(cfg.corpus)
    # A slow core makes BM25 of 1 MB of passages a second (LOG.md), and reads 10.
    deadline = 60 + Path(cfg.corpus).stat().st_size / (1e7 if index else 1e6)
    own = partial(serve, *argv, *(["--index", index, "--encoder", E5] if index else []), deadline=deadline)
    return own(), own


def described(search: Search, cfg: TaskKnobs, questions: Sequence[Question]) -> str:
    """Returns where a run searches, and how that server does on some questions, if there are any."""
    how = Path(index).name if (index := index_of(cfg.corpus)) else "BM25"
    where = without_secrets(cfg.retriever) or f"{search.urls[0]} ({how} over {cfg.corpus}, started by this run)"
    return f"{where}\n        {try_search(search, questions)}" if questions else where


def try_search(search: Search, questions: Sequence[Question]) -> str:
    """Returns how fast and how well the server answers some questions, in words; Fault if it finds nothing at all."""
    began = time.perf_counter()
    try:
        found = [future.result() for future in [search.submit(q.text) for q in questions]]
    except ToolDown as e:
        raise Fault(f"{e}; check --retriever, and --topk {search.topk}") from None
    seconds, n = time.perf_counter() - began, len(questions)
    if not any(text.strip() for passages in found for text in passages):
        raise Fault(
            f"{without_secrets(search.urls[0])} found no passage for any of {n} questions: check its index, and that it"
            " answers as Search-R1's server does"
        )
    texts = [f" {normalize(' '.join(passages))} " for passages in found]
    hits = sum(
        any(f" {normalize(gold)} " in text for gold in q.golds) for q, text in zip(questions, texts, strict=True)
    )
    return (
        f"{n} questions took {seconds:.2f} s, 1,000 searches would take {1000 * seconds / n:,.1f} s;"
        f" a gold answer was in the passages of {hits}"
        + (": nearly none; check that index, corpus and questions belong together" if hits < n / 20 else "")
    )
