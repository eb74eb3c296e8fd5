"""A search server over a passage file, with Search-R1's wire format: BM25, a dense encoder under FAISS, or both.

    python retrieval_server.py --corpus corpus.jsonl                                        BM25, built at the start
    python retrieval_server.py build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5                          an index made by `build`
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5 wiki-bm25                two, ranks fused
    python retrieval_server.py --corpus wiki-18.jsonl --index e5_Flat.index --encoder intfloat/e5-base-v2

    curl localhost:8000/retrieve -H 'Content-Type: application/json' -d '{"queries": ["who wrote Emma ?"]}'

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25", "corpus": "a digest of its passages"}
    GET  /metrics   counters and times for Prometheus

Without scores each hit is the document itself. The page /docs documents all calls and their limits. Concurrent requests
are searched together, off the event loop. `build --help` documents how an index is built.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Annotated

from cachetools import LRUCache
from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, Field

from plumbing.faults import one_line
from plumbing.outside import printable
from plumbing.servers import listen, serve
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import Fused, open_index

MAX_TOPK = 100
MAX_QUERIES = 16384  # per request: Search-R1 sends all queries of a step at once
MAX_QUERY = 4096  # characters
MAX_BODY = 16 << 20  # bytes


class Search(BaseModel):
    # With any max_length, pydantic rejects half of a surrogate pair, which no encoder accepts.
    queries: list[Annotated[str, Field(max_length=MAX_BODY)]] = Field(
        max_length=MAX_QUERIES, description=f"the first {MAX_QUERY} characters of each count"
    )
    topk: int | None = Field(None, ge=1, le=MAX_TOPK, description="the server's --topk if null")
    return_scores: bool = False


class Passage(BaseModel):
    id: str
    contents: str = Field(examples=['"Title"\ntext'])


class Hit(BaseModel):
    document: Passage
    score: float


class Found(BaseModel):
    result: list[list[Hit]] | list[list[Passage]]


class Busy(Exception):
    """The queue is full; `args[0]` is the number of seconds after which it should have room again."""


class SearchFailed(Exception):
    """The encoder, the index or a row of the corpus failed; `args[0]` is the reason."""


class Metrics:
    """The counters and histograms behind /metrics."""

    def __init__(self):
        self.registry = CollectorRegistry()
        add = {"registry": self.registry}
        ms = [0.001 * 2**k for k in range(15)]  # 1 ms to 16 s
        self.requests = Counter("retrieval_requests", "requests by HTTP status", ["status"], **add)
        self.queries = Counter("retrieval_queries", "queries received", **add)
        self.cached = Counter("retrieval_cached", "queries answered from the cache", **add)
        self.shared = Counter("retrieval_shared", "queries already in flight for another request", **add)
        self.waiting = Gauge("retrieval_waiting", "queries in the queue", **add)
        self.passages = Gauge("retrieval_passages", "passages of the corpus", **add)
        sizes = [2**k for k in range(11)]
        self.batch = Histogram("retrieval_batch_queries", "queries per batch", buckets=sizes, **add)
        self.search_s = Histogram("retrieval_search_seconds", "time to search a batch", buckets=ms, **add)
        self.request_s = Histogram("retrieval_request_seconds", "time to answer a request", buckets=ms, **add)


Key = tuple[str, int, bool]  # query, topk, with scores


class Batcher:
    """Queries of concurrent requests -> batches for one searching thread -> answers as JSON.

    A batch leaves when `max_batch` queries wait, or `max_wait` seconds after the first of them. A query that is already
    waiting or being searched is not searched again; answers stay in an LRU cache of `cache_bytes`. A request that would
    make more than `max_queue` queries wait is refused. `answer(keys)` returns for each key the JSON of its hits, or an
    exception; it runs in the thread, everything else on the event loop.
    """

    def __init__(self, answer, metrics: Metrics, max_batch: int, max_wait: float, max_queue: int, cache_bytes: int):
        self.answer, self.metrics = answer, metrics
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        # key -> (query, answer); the size includes the query, which may be the longer of the two
        self._cache = LRUCache(cache_bytes, getsizeof=lambda entry: sys.getsizeof(entry[0]) + len(entry[1]) + 300)
        self._queue: deque[Key] = deque()
        self._in_flight: dict[Key, asyncio.Future] = {}  # waiting, or being searched
        self._nonempty, self._full = asyncio.Event(), asyncio.Event()  # the queue; a batch
        self._thread = ThreadPoolExecutor(1, "search")
        self._seconds_per_query = 0.01  # smoothed

    async def ask(self, keys: list[Key]) -> list[bytes]:
        """Returns the JSON of each key's hits; raises SearchFailed, or Busy, having queued nothing, on a full queue."""
        new = {key for key in keys if key not in self._cache and key not in self._in_flight}
        self.metrics.queries.inc(len(keys))
        # An empty queue accepts a request of any size, or a large one could never be served.
        if new and self._queue and len(self._queue) + len(new) > self.max_queue:
            raise Busy(math.ceil(len(self._queue) * self._seconds_per_query))
        answers: list[bytes | Exception | asyncio.Future] = []
        for key in keys:
            if key in self._cache:
                self.metrics.cached.inc()
                answers.append(self._cache[key][1])
                continue
            if key in self._in_flight:
                self.metrics.shared.inc()
            else:
                self._in_flight[key] = asyncio.get_running_loop().create_future()
                self._queue.append(key)
            answers.append(self._in_flight[key])
        self.metrics.waiting.set(len(self._queue))
        if self._queue:
            self._nonempty.set()
        if len(self._queue) >= self.max_batch:
            self._full.set()
        if pending := {answer for answer in answers if isinstance(answer, asyncio.Future)}:
            await asyncio.wait(pending)  # awaiting each would, when one request is abandoned, cancel it for others
        found = [answer.result() if isinstance(answer, asyncio.Future) else answer for answer in answers]
        if failed := [answer for answer in found if isinstance(answer, Exception)]:
            raise SearchFailed(f"{type(failed[0]).__name__}: {failed[0]}")
        return found

    async def run(self) -> None:
        """Searches one batch after another until cancelled."""
        while True:
            await self._nonempty.wait()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), self.max_wait)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self.max_batch))]
            if not self._queue:
                self._nonempty.clear()
            if len(self._queue) < self.max_batch:
                self._full.clear()
            self.metrics.waiting.set(len(self._queue))
            self.metrics.batch.observe(len(batch))
            start = time.perf_counter()
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, batch)
            except Exception as e:  # the encoder or FAISS: these requests fail, the server continues
                answers = [e] * len(batch)
            for reason in {f"{type(e).__name__}: {e}" for e in answers if isinstance(e, Exception)}:
                print(printable(f"search failed: {reason}"), file=sys.stderr, flush=True)
            seconds = time.perf_counter() - start
            self.metrics.search_s.observe(seconds)
            self._seconds_per_query += 0.1 * (seconds / len(batch) - self._seconds_per_query)
            for key, answer in zip(batch, answers, strict=True):
                if isinstance(answer, bytes):
                    with suppress(ValueError):  # larger than the whole cache
                        self._cache[key] = key[0], answer
                self._in_flight.pop(key).set_result(answer)


class RequestGuard:
    """ASGI middleware for /retrieve: refuses a body larger than MAX_BODY with 413; counts and times the requests."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/retrieve":
            return await self.app(scope, receive, send)
        start, size = time.perf_counter(), 0

        async def receive_limited():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"body larger than {MAX_BODY >> 20} MiB; send fewer queries per request")
            return message

        async def send_counted(message):
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(message["status"]).inc()
                self.metrics.request_s.observe(time.perf_counter() - start)
            await send(message)

        await self.app(scope, receive_limited, send_counted)


def make_app(corpus: Corpus, index, topk: int, *, max_batch=256, max_wait=0.002, max_queue=8192, cache_bytes=64 << 20):
    """Returns the ASGI app that serves /retrieve, /health and /metrics; `topk` is the default of a request."""
    metrics = Metrics()
    metrics.passages.set(len(corpus))

    def answer(keys: list[Key]) -> list[bytes | Exception]:
        found: dict[Key, list] = {}
        for k in {k for _, k, _ in keys}:  # one search per topk, so that an answer does not depend on its batch
            queries = list(dict.fromkeys(query for query, query_k, _ in keys if query_k == k))
            for query, hits in zip(queries, index.search(queries, k), strict=True):
                found[query, k, False] = found[query, k, True] = hits
        return [_json(corpus, found[key], key[2]) for key in keys]

    batcher = Batcher(answer, metrics, max_batch, max_wait, max_queue, cache_bytes)

    @asynccontextmanager
    async def lifespan(_):
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(title="Passage retrieval", lifespan=lifespan)
    app.add_middleware(RequestGuard, metrics=metrics)

    @app.exception_handler(RequestValidationError)
    async def refuse(_, error: RequestValidationError) -> JSONResponse:
        # FastAPI would quote the input, and fail with 500 on a NaN or half a surrogate pair, which JSON cannot hold.
        errors = [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]
        return JSONResponse({"detail": errors}, 422)

    errors = {
        413: {"description": "Body too large"},
        500: {"description": "Search failed"},
        503: {"description": "Queue full; retry after Retry-After seconds"},
    }

    @app.post("/retrieve", response_model=Found, responses=errors)
    async def retrieve(search: Search) -> Response:
        """Finds the best passages of each query; with BM25 a query without a known word finds none."""
        try:
            keys = [(query[:MAX_QUERY], search.topk or topk, search.return_scores) for query in search.queries]
            hits = await batcher.ask(keys)
        except Busy as e:
            headers = {"retry-after": str(e.args[0])}
            return JSONResponse({"detail": f"{max_queue} queries are already waiting; retry later"}, 503, headers)
        except SearchFailed as e:  # the next batch may succeed
            return JSONResponse({"detail": f"search failed: {e}"}, 500)
        return Response(b'{"result":[' + b",".join(hits) + b"]}", media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "passages": len(corpus), "index": index.name, "corpus": corpus.digest}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return app


def _json(corpus: Corpus, hits: list[tuple[int, float]], scored: bool) -> bytes | Exception:
    try:
        documents = [(corpus[row], score) for row, score in hits]
    except (ValueError, OSError) as e:  # an unreadable row fails its own query, not the batch
        return e
    rows = [{"document": d, "score": score} for d, score in documents] if scored else [d for d, _ in documents]
    return json.dumps(rows, ensure_ascii=False).encode()


def main() -> None:
    with one_line():
        if sys.argv[1:2] == ["build"]:
            from retrieval import build  # here: torch and FAISS take seconds to import

            build.main(sys.argv[2:])
        else:
            run_server(sys.argv[1:])


def run_server(argv: list[str]) -> None:
    """Serves the corpus that the command line `argv` names, until interrupted; raises Fault if it cannot."""
    # Without a usage text an error is one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--corpus", required=True, help='.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}')
    add("--index", nargs="+", default=[], help="directories made by `build`, or a FAISS file (BM25 in memory)")
    add("--encoder", default="", help="model of a FAISS file not made by `build`, or the new place of an index's model")
    add("--family", default="", choices=["", "e5", "bge", "plain"], help="its prefixes and pooling (from its name)")
    add("--device", default="", help="of the encoder: cpu, cuda, cuda:1 (a GPU if there is one)")
    add(
        "--verify", action="store_true", help="compare every byte of the indexes with what `build` wrote (else samples)"
    )
    add("--shard_gpus", action="store_true", help="split the FAISS index over the visible GPUs, fp16")
    add("--nprobe", type=int, default=64, help="cells of an IVF index that a query visits (64)")
    add("--ef", type=int, default=128, help="search width in an HNSW graph (128)")
    add("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--topk", type=int, default=3, help=f"passages per query, 1 to {MAX_TOPK} (3)")
    add("--max_batch", type=int, default=256, help="queries searched together at most (256)")
    add("--max_wait_ms", type=float, default=2, help="time that the first query of a batch waits for others (2)")
    add("--max_queue", type=int, default=8192, help="queries that may wait; beyond it 503 with Retry-After (8192)")
    add("--cache_mb", type=float, default=64, help="size of the cache of answers (64)")
    add("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args(argv)
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"argument --topk: {args.topk} is not from 1 to {MAX_TOPK}")
    for name in ("nprobe", "ef", "max_batch", "max_queue"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: {getattr(args, name)} is less than 1")
    for name in ("max_wait_ms", "cache_mb"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"argument --{name}: {getattr(args, name)} is not a finite number of at least 0")
    sock = listen(args.host, args.port)  # before the corpus is read, so that a port in use is reported at once
    corpus = Corpus(args.corpus)
    names = ("encoder", "family", "device", "nprobe", "ef", "shard_gpus", "verify")
    options = {name: getattr(args, name) for name in names}
    indexes = [open_index(path, corpus, **options) for path in args.index] or [BM25.build(corpus.texts)]
    index = indexes[0] if len(indexes) == 1 else Fused(indexes)
    print(f"{len(corpus):,} passages of {corpus.path}, {index.name}", flush=True)
    app = make_app(
        corpus,
        index,
        args.topk,
        max_batch=args.max_batch,
        max_wait=args.max_wait_ms / 1000,
        max_queue=args.max_queue,
        cache_bytes=int(args.cache_mb * 2**20),
    )
    serve(app, sock, args.child)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped")
