"""The search tool: a client of Search-R1's POST /retrieve, and how a run finds out whether its
server is any good."""

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from config import Config
from plumbing.batches import Batches
from plumbing.client import Client
from plumbing.faults import Fault, Outage, ToolDown
from plumbing.outside import contents_of, without_secrets
from plumbing.stop import count_ranks
from tasks import Question
from tasks.questions import holds_gold
from tasks.tools import Tool

# where retrieval_server.py and Search-R1's own listen unless told otherwise
DEFAULT = "http://127.0.0.1:8000"
DATA = Path("data")
WIKI, INDEXES, E5 = "wiki-18.jsonl", ("e5_HNSW64.index", "e5_Flat.index"), "intfloat/e5-base-v2"
MAX_PASSAGE = 100_000  # characters of a passage that are read and kept


class Search(Tool):
    """Client of Search-R1's POST /retrieve: queries in, passages out.

    One thread sends whatever has queued up since its last request as one request: batches form
    under load, and a lone query leaves at once. Where the server stays away (plumbing/client.py says
    what is retried), the futures raise ToolDown.
    """

    tag, noun, argument = "search", "a search", "query"
    plural, result_tag = "searches", "information"
    description = "Searches a collection of passages and returns those that match the query best."

    def __init__(self, url: str, topk: int, timeout: float = 30, retries: int = 5):
        self.topk, self.timeout, self.retries = topk, timeout, retries
        self.connect(url)
        self._batches = Batches(self._retrieve, 256)

    def connect(self, url: str, restart: Callable[[], object] = lambda: None) -> None:
        """Searches at another server from now on; `restart` starts it again if it has died."""
        self.url, self._restart = url, restart
        self._client = Client(url, self.timeout, self.retries)

    def submit(self, argument: str) -> Future[list[str]]:
        """Returns a Future of the passages' `contents`, best first."""
        return self._batches.submit(argument)

    def show(self, result: list[str]) -> str:
        """Returns the passages as the policy reads them (App. F); each is `"Title"\\ntext`."""
        shown = []
        for k, contents in enumerate(result, 1):
            title, _, text = contents.partition("\n")
            title = re.sub('^"(.*)"$', r"\1", title.strip())
            shown.append(f"Doc {k}(Title: {title}) {text.strip()}")
        return "\n".join(shown)

    def _retrieve(self, queries: list[str]) -> dict[str, list[str]]:
        def read(answer: Any) -> dict[str, list[str]]:
            passages = {}
            for query, hits in zip(queries, answer["result"], strict=True):
                best = [hit["document"] if "document" in hit else hit for hit in hits[: self.topk]]
                passages[query] = [contents_of(document)[:MAX_PASSAGE] for document in best]
            return passages

        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        fault: Outage | None = None
        for _ in range(2):  # this run's own server may die while it is asked
            try:
                self._restart()
                return self._client.ask("/retrieve", body, read)
            except Outage as e:
                fault = e
        raise ToolDown(f"the search server gives no usable answer ({fault})") from fault


def choose_source(cfg: Config) -> Config:
    """Returns `cfg` with what to search if it names neither --retriever nor --corpus; raises Fault
    if there is nothing.

    That is the server on port 8000 of this machine, if one answers there, else Search-R1's corpus
    and index in DATA. Nothing is searched that some node of a torchrun job cannot reach.
    """
    ranks = count_ranks()
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if nodes > 1 and (not cfg.retriever or re.search("//(127\\.|localhost)", cfg.retriever)):
        raise Fault(f"{nodes} nodes: give --retriever with an address that all of them can reach")
    if cfg.corpus and not cfg.retriever and not Path(cfg.corpus).is_file():
        raise Fault(f"--corpus {cfg.corpus}: no such file; check the path")
    if cfg.corpus or cfg.retriever:
        return cfg
    if not probe(DEFAULT, cfg.topk):
        return replace(cfg, retriever=DEFAULT)
    if find_index(str(DATA / WIKI)):
        return replace(cfg, corpus=str(DATA / WIKI))
    raise Fault(
        f"nothing to search: give --corpus (passages) or --retriever (URL of a running server), start one at {DEFAULT},"
        f" or put {WIKI} and {INDEXES[0]} into {DATA}/ (docs/retrieval.md says where they are)"
    )


def probe(url: str, topk: int) -> BaseException | None:
    """Asks a search server; returns why it does not answer, None if it does."""
    return Search(url, topk, retries=0).submit("is anyone there").exception()


def find_index(corpus: str) -> str:
    """Returns the FAISS file of Search-R1's corpus, which is expected beside it; "" for any other
    corpus."""
    passages = Path(corpus)
    if passages.name == WIKI and passages.is_file():
        for name in INDEXES:
            path = passages.with_name(name)
            if path.is_file():
                return str(path)
    return ""


def start_server(cfg: Config, serve: Callable[..., str]) -> tuple[str, Callable[[], object], str]:
    """Returns the URL of --retriever, which answers, or of a server over --corpus; what restarts
    that; and where a run searches, in words."""
    if cfg.retriever:
        fault = probe(cfg.retriever, cfg.topk)
        if fault:
            raise Fault(
                f"--retriever: {fault}; start it (at http://...), or serve --corpus with --retriever ''"
            )
        return (
            cfg.retriever,
            lambda: None,
            without_secrets(cfg.retriever),
        )  # there is nothing to restart
    argv = ["-m", "retrieval_server", "--corpus", cfg.corpus]
    index = find_index(cfg.corpus)
    if index:  # on the CPU: the GPUs are the policy's
        argv += ["--index", index, "--encoder", E5, "--device", "cpu"]
    # A slow core makes BM25 of 1 MB of passages a second (docs/LOG.md), and reads 10.
    deadline = 60 + Path(cfg.corpus).stat().st_size / (1e7 if index else 1e6)
    own = partial(serve, *argv, deadline=deadline)
    url, how = own(), Path(index).name or "BM25"
    return url, own, f"{url} ({how} over {cfg.corpus}, started by this run)"


def try_search(search: Search, questions: Sequence[Question]) -> str:
    """Returns how fast and how well the server answers some questions, in words; Fault if it finds
    nothing at all."""
    start, n = time.perf_counter(), len(questions)
    futures = [search.submit(q.text) for q in questions]
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - start
    if not any(text.strip() for passages in results for text in passages):
        raise Fault(
            f"{without_secrets(search.url)} found no passage for any of {n} questions: check its index, and that it"
            " answers as Search-R1's server does"
        )
    hits = 0
    for passages, q in zip(results, questions, strict=True):
        hits += holds_gold(passages, q.golds)
    said = (
        f"{n} questions took {seconds:.2f} s, 1,000 searches would take {1000 * seconds / n:,.1f} s;"
        f" a gold answer was in the passages of {hits} of them"
    )
    if hits < n / 20:
        said += ": nearly none; check that index, corpus and questions belong together"
    return said
