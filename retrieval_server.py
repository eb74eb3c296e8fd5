"""A search engine over a passage file, with Search-R1's wire format: BM25, a dense encoder under FAISS, or both.

    python retrieval_server.py --corpus corpus.jsonl                                        BM25, made at the start
    python retrieval_server.py build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5                          what `build` made
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5 wiki-bm25                both, ranks fused
    python retrieval_server.py --corpus wiki-18.jsonl --index e5_Flat.index --encoder intfloat/e5-base-v2

    curl localhost:8000/retrieve -H 'Content-Type: application/json' -d '{"queries": ["who wrote Emma ?"]}'

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25"}
    GET  /metrics   counters and times for Prometheus

Without scores each hit is the document itself. The other calls and their limits are on the page /docs.
Requests that come together are searched together, off the event loop; `build --help` tells how an index is made.
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

from harness.servers import listen, serve
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import Fused, open_index

MAX_TOPK = 100
MAX_QUERIES = 16384  # of a request: Search-R1 sends all of a step's at once
MAX_QUERY = 4096  # characters
MAX_BODY = 16 << 20  # bytes


class Search(BaseModel):
    # a limit, if one without effect, makes pydantic refuse half of a surrogate pair, which no encoder takes
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
    """The queue is full; `args[0]` is the number of seconds after which it should have room."""


class SearchFailed(Exception):
    """The encoder, the index or a row of the corpus; `args[0]` tells."""


class Metrics:
    """What /metrics shows."""

    def __init__(self):
        self.registry = CollectorRegistry()
        add = {"registry": self.registry}
        ms = [0.001 * 2**k for k in range(15)]  # 1 ms to 16 s
        self.requests = Counter("retrieval_requests", "requests by HTTP status", ["status"], **add)
        self.queries = Counter("retrieval_queries", "queries asked", **add)
        self.cached = Counter("retrieval_cached", "queries answered from the cache", **add)
        self.shared = Counter("retrieval_shared", "queries that were being searched already", **add)
        self.waiting = Gauge("retrieval_waiting", "queries in the queue", **add)
        self.passages = Gauge("retrieval_passages", "passages of the corpus", **add)
        sizes = [2**k for k in range(11)]
        self.batch = Histogram("retrieval_batch_queries", "queries of a batch", buckets=sizes, **add)
        self.search_s = Histogram("retrieval_search_seconds", "time to search a batch", buckets=ms, **add)
        self.request_s = Histogram("retrieval_request_seconds", "time to answer a request", buckets=ms, **add)


Key = tuple[str, int, bool]  # query, topk, with scores


class Batcher:
    """Queries of concurrent requests -> batches for one searching thread -> answers as JSON.

    A batch leaves when `max_batch` queries wait, or `max_wait` seconds after the first of them. A query that waits or
    is being searched already is not searched again; answers stay in an LRU cache of `cache_bytes`. More than
    `max_queue` waiting queries are refused. `answer(keys)` returns the JSON of each key's hits, or an exception for a
    key; it runs in the thread, everything else on the event loop.
    """

    def __init__(self, answer, metrics: Metrics, max_batch: int, max_wait: float, max_queue: int, cache_bytes: int):
        self.answer, self.metrics = answer, metrics
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        # key -> (query, answer): the query as well, for it may be the longer one
        self._cache = LRUCache(cache_bytes, getsizeof=lambda kept: sys.getsizeof(kept[0]) + len(kept[1]) + 300)
        self._queue: deque[Key] = deque()
        self._open: dict[Key, asyncio.Future] = {}  # waiting, or being searched
        self._some, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "search")
        self._pace = 0.01  # seconds a query, smoothed

    async def ask(self, keys: list[Key]) -> list[bytes]:
        """Returns the JSON of each key's hits; raises SearchFailed, or Busy, having queued nothing, on a full queue."""
        fresh = {key for key in keys if key not in self._cache and key not in self._open}
        self.metrics.queries.inc(len(keys))
        # into an empty queue any request fits: it could never be served otherwise
        if fresh and self._queue and len(self._queue) + len(fresh) > self.max_queue:
            raise Busy(math.ceil(len(self._queue) * self._pace))
        answers: list[bytes | Exception | asyncio.Future] = []
        for key in keys:
            if key in self._cache:
                self.metrics.cached.inc()
                answers.append(self._cache[key][1])
                continue
            if key in self._open:
                self.metrics.shared.inc()
            else:
                self._open[key] = asyncio.get_running_loop().create_future()
                self._queue.append(key)
            answers.append(self._open[key])
        self.metrics.waiting.set(len(self._queue))
        if self._queue:
            self._some.set()
        if len(self._queue) >= self.max_batch:
            self._full.set()
        if pending := {answer for answer in answers if isinstance(answer, asyncio.Future)}:
            await asyncio.wait(pending)  # not `await` on each: a request that is given up would cancel it for others
        found = [answer.result() if isinstance(answer, asyncio.Future) else answer for answer in answers]
        if failed := [answer for answer in found if isinstance(answer, Exception)]:
            raise SearchFailed(f"{type(failed[0]).__name__}: {failed[0]}")
        return found

    async def run(self) -> None:
        """Searches batch after batch, until cancelled."""
        while True:
            await self._some.wait()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), self.max_wait)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self.max_batch))]
            if not self._queue:
                self._some.clear()
            if len(self._queue) < self.max_batch:
                self._full.clear()
            self.metrics.waiting.set(len(self._queue))
            self.metrics.batch.observe(len(batch))
            start = time.perf_counter()
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, batch)
            except Exception as e:  # the encoder or FAISS: these requests fail, the server goes on
                answers = [e] * len(batch)
            for text in {f"{type(e).__name__}: {e}" for e in answers if isinstance(e, Exception)}:
                print(f"search failed: {text}", file=sys.stderr, flush=True)
            seconds = time.perf_counter() - start
            self.metrics.search_s.observe(seconds)
            self._pace += 0.1 * (seconds / len(batch) - self._pace)
            for key, answer in zip(batch, answers, strict=True):
                if isinstance(answer, bytes):
                    with suppress(ValueError):  # larger than the whole cache
                        self._cache[key] = key[0], answer
                self._open.pop(key).set_result(answer)


class Door:
    """ASGI middleware: refuses a request body of more than MAX_BODY bytes with 413; counts and times /retrieve."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/retrieve":
            return await self.app(scope, receive, send)
        start, size = time.perf_counter(), 0

        async def receive_some():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise HTTPException(413, f"a body of more than {MAX_BODY >> 20} MiB; send fewer queries a request")
            return message

        async def send_counted(message):
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(message["status"]).inc()
                self.metrics.request_s.observe(time.perf_counter() - start)
            await send(message)

        await self.app(scope, receive_some, send_counted)


def make_app(corpus: Corpus, index, topk: int, *, max_batch=256, max_wait=0.002, max_queue=8192, cache_bytes=64 << 20):
    """Returns the ASGI app that answers /retrieve, /health and /metrics over the corpus; `topk` is the default."""
    metrics = Metrics()
    metrics.passages.set(len(corpus))

    def answer(keys: list[Key]) -> list[bytes | Exception]:
        found: dict[Key, list] = {}
        for k in {k for _, k, _ in keys}:  # one search a value of topk: an answer does not depend on its neighbours
            queries = list(dict.fromkeys(query for query, its_k, _ in keys if its_k == k))
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
    app.add_middleware(Door, metrics=metrics)

    @app.exception_handler(RequestValidationError)
    async def refuse(_, error: RequestValidationError) -> JSONResponse:
        # FastAPI would quote the input; a NaN or half a surrogate pair in it cannot be written: status 500.
        errors = [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]
        return JSONResponse({"detail": errors}, 422)

    errors = {
        413: {"description": "Body too large"},
        500: {"description": "Search failed"},
        503: {"description": "Queue full; come back after Retry-After seconds"},
    }

    @app.post("/retrieve", response_model=Found, responses=errors)
    async def retrieve(search: Search) -> Response:
        """Finds the best passages of each query; with BM25 a query without a known word finds none."""
        try:
            k = search.topk or topk
            hits = await batcher.ask([(query[:MAX_QUERY], k, search.return_scores) for query in search.queries])
        except Busy as e:
            wait = {"retry-after": str(e.args[0])}
            return JSONResponse({"detail": f"{max_queue} queries wait already; come back later"}, 503, wait)
        except SearchFailed as e:  # the next batch may fare better
            return JSONResponse({"detail": f"search failed: {e}"}, 500)
        return Response(b'{"result":[' + b",".join(hits) + b"]}", media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "passages": len(corpus), "index": index.name}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return app


def _json(corpus: Corpus, hits: list[tuple[int, float]], scored: bool) -> bytes | Exception:
    try:
        documents = [(corpus[row], score) for row, score in hits]
    except (ValueError, OSError) as e:  # a row that cannot be read is no fault of the batch
        return e
    rows = [{"document": d, "score": score} for d, score in documents] if scored else [d for d, _ in documents]
    return json.dumps(rows, ensure_ascii=False).encode()


def main() -> None:
    if sys.argv[1:2] == ["build"]:
        from retrieval import build  # here: torch and FAISS take seconds to import

        return build.main(sys.argv[2:])
    # Without a usage text an error is one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--corpus", required=True, help='.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}')
    add("--index", nargs="+", default=[], help="directories that `build` made, or a FAISS file (BM25 in memory)")
    add("--encoder", default="", help="the model of a FAISS file that `build` did not make, or where it is now")
    add("--family", default="", choices=["", "e5", "bge", "plain"], help="its prefixes and pooling (by its name)")
    add("--device", default="", help="of the encoder: cpu, cuda, cuda:1 (a GPU if there is one)")
    add("--shard_gpus", action="store_true", help="split the FAISS index over the visible GPUs, fp16")
    add("--nprobe", type=int, default=64, help="cells that a query visits in an IVF index (64)")
    add("--ef", type=int, default=128, help="width of a search in an HNSW graph (128)")
    add("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--topk", type=int, default=3, help=f"passages a query, 1 to {MAX_TOPK} (3)")
    add("--max_batch", type=int, default=256, help="queries that are searched together (256)")
    add("--max_wait_ms", type=float, default=2, help="time that the first of them waits for others (2)")
    add("--max_queue", type=int, default=8192, help="queries that may wait; then 503 with Retry-After (8192)")
    add("--cache_mb", type=float, default=64, help="answers to keep (64)")
    add("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"argument --topk: {args.topk} is not from 1 to {MAX_TOPK}")
    for name in ("nprobe", "ef", "max_batch", "max_queue"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: {getattr(args, name)} is not at least 1")
    for name in ("max_wait_ms", "cache_mb"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"argument --{name}: {getattr(args, name)} is not a number from 0")
    sock = listen(args.host, args.port)  # before the corpus is read: a port in use is known at once
    corpus = Corpus(args.corpus)
    how = {name: getattr(args, name) for name in ("encoder", "family", "device", "nprobe", "ef", "shard_gpus")}
    parts = [open_index(path, corpus, **how) for path in args.index] or [BM25.build(corpus.texts)]
    index = parts[0] if len(parts) == 1 else Fused(parts)
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
