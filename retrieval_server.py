"""A search server over a passage file, with Search-R1's wire format: BM25, a dense encoder under FAISS, or both.

    python retrieval_server.py --corpus corpus.jsonl                            BM25, built at the start
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5              an index of `python -m retrieval.build`
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5 wiki-bm25    two, ranks fused
    python retrieval_server.py --corpus wiki-18.jsonl --index e5_Flat.index --encoder intfloat/e5-base-v2

    curl localhost:8000/retrieve -H 'Content-Type: application/json' -d '{"queries": ["who wrote Emma ?"]}'

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25", "corpus": "a digest of its passages", ...}

Without scores each hit is the document itself. /health also counts queries received, cached, shared with another
request and waiting, and batches. The page /docs documents the calls and their limits. Concurrent requests are searched
together, off the event loop.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from cachetools import LRUCache
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from plumbing.faults import one_line
from plumbing.outside import printable
from plumbing.servers import listen, serve
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import Dense, Fused, open_index

MAX_TOPK = 100
MAX_QUERIES = 16384  # per request: Search-R1 sends all queries of a step at once
MAX_QUERY = 4096  # characters
MAX_BODY = 16 << 20  # bytes
MAX_WAITING = 8192  # queries in the queue
MAX_WAIT = 0.002  # seconds that the first query of a batch waits for others
MAX_CONNECTIONS = 512  # more are closed at once
READ_TIMEOUT = 30.0  # seconds in which a request must begin to arrive, and then arrive


class Search(BaseModel):
    queries: list[str] = Field(max_length=MAX_QUERIES, description=f"the first {MAX_QUERY} characters of each count")
    topk: int | None = Field(None, ge=1, le=MAX_TOPK, description="the server's --topk if null")
    return_scores: bool = False


class Passage(BaseModel):
    id: str
    contents: str = Field(examples=['"Title"\ntext'])


class Hit(BaseModel):
    document: Passage
    score: float


class Results(BaseModel):
    result: list[list[Hit]] | list[list[Passage]]


class Refused(Exception):
    """A request that is answered with the HTTP status `args[0]`, for the reason `args[1]`."""


Key = tuple[str, int, bool]  # query, topk, with scores


class Batcher:
    """Queries of concurrent requests -> batches for one searching thread -> answers as JSON.

    A batch leaves when the thread is free and `max_batch` queries wait, or MAX_WAIT after the first of them. A query
    that is already waiting or being searched is not searched again; answers stay in an LRU cache of `cache_bytes`.
    `answer(keys)` returns for each key the JSON of its hits, or an exception; it runs in the thread, everything else on
    the event loop.
    """

    def __init__(self, answer, max_batch: int, cache_bytes: int):
        self.answer, self.max_batch = answer, max_batch
        # key -> (query, answer); the size includes the query, which may be the longer of the two
        self._cache = LRUCache(cache_bytes, lambda entry: sys.getsizeof(entry[0]) + len(entry[1].result()) + 300)
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._in_flight: dict[Key, asyncio.Future[bytes]] = {}  # waiting, or being searched
        self._thread = ThreadPoolExecutor(1, "search")
        self._seconds_per_query = 0.01  # of the last batch
        self._counts = Counter(queries=0, cached=0, shared=0, batches=0)

    def counts(self) -> dict[str, int]:
        """Queries received, found in the cache, in flight for another request; batches; queries in the queue now."""
        return {**self._counts, "waiting": self._queue.qsize()}

    async def ask(self, keys: list[Key]) -> list[bytes]:
        """Returns the JSON of each key's hits; raises what the search raised, or, having queued nothing, Refused."""
        self._counts["queries"] += len(keys)
        waiting = self._queue.qsize()
        new = {key for key in keys if key not in self._cache and key not in self._in_flight}
        # An empty queue accepts a request of any size, or a large one could never be served.
        if new and waiting and waiting + len(new) > MAX_WAITING:
            seconds = math.ceil(waiting * self._seconds_per_query)
            raise Refused(503, f"{waiting} queries are already waiting; retry later", {"retry-after": str(seconds)})
        answers = [self._answer_to(key) for key in keys]
        if answers:
            await asyncio.wait(answers)  # awaiting each would, when one request is abandoned, cancel it for others
        return [answer.result() for answer in answers]

    def _answer_to(self, key: Key) -> asyncio.Future[bytes]:
        if key in self._cache:
            self._counts["cached"] += 1
            return self._cache[key][1]
        if key in self._in_flight:
            self._counts["shared"] += 1
        else:
            self._in_flight[key] = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(key)
        return self._in_flight[key]

    async def run(self) -> None:
        """Searches one batch after another until cancelled."""
        while True:
            batch = [await self._queue.get()]
            if self._queue.qsize() + 1 < self.max_batch:
                await asyncio.sleep(MAX_WAIT)
            while len(batch) < self.max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._counts["batches"] += 1
            start = time.perf_counter()
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, batch)
            except Exception as e:  # the encoder or FAISS: these requests fail, the server continues
                answers = [e] * len(batch)
            self._seconds_per_query = (time.perf_counter() - start) / len(batch)
            for reason in {explain(e) for e in answers if isinstance(e, Exception)}:
                print(printable(reason), file=sys.stderr, flush=True)
            for key, answer in zip(batch, answers, strict=True):
                future = self._in_flight.pop(key)
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                    continue
                future.set_result(answer)
                with suppress(ValueError):  # larger than the whole cache
                    self._cache[key] = key[0], future


class Patient(AutoHTTPProtocol):
    """uvicorn's protocol, which would wait forever for a request, with a limit on connections and on that wait.

    Every READ_TIMEOUT it looks whether a request is arriving, and closes the connection if it was the same one already
    at the last look. Between two requests uvicorn's own timer runs.
    """

    arriving = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(READ_TIMEOUT, self.check)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def check(self) -> None:
        request = self.cycle  # the last one of which the headers are there; None before the first
        answered = request is not None and request.response_complete
        waiting = request is None or (request.more_body if not answered else self.timeout_keep_alive_task is None)
        if waiting and request is self.arriving:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.arriving = request if waiting else None
            self.loop.call_later(READ_TIMEOUT, self.check)


def explain(error: Exception) -> str:
    return f"search failed: {type(error).__name__}: {error}"


async def read(request: Request) -> Search:
    """Reads the body of a request up to MAX_BODY; raises Refused if it is larger or not a valid search."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(413, f"body larger than {MAX_BODY >> 20} MiB; send fewer queries per request")
    try:
        return Search.model_validate_json(body)
    except ValidationError as e:
        raise Refused(422, e.errors(include_url=False, include_context=False, include_input=False)) from None


def make_app(corpus: Corpus, index, topk: int, max_batch: int = 256, cache_bytes: int = 64 << 20) -> FastAPI:
    """Makes the ASGI app that serves /retrieve and /health; `topk` is the default of a request."""

    def answer(keys: list[Key]) -> list[bytes | Exception]:
        hits: dict[tuple[str, int], list] = {}
        for k in {k for _, k, _ in keys}:  # one search per topk, so that an answer does not depend on its batch
            queries = list(dict.fromkeys(query for query, query_k, _ in keys if query_k == k))
            hits |= {(query, k): rows for query, rows in zip(queries, index.search(queries, k), strict=True)}
        return [_json(corpus, hits[query, k], scored) for query, k, scored in keys]

    batcher = Batcher(answer, max_batch, cache_bytes)

    @asynccontextmanager
    async def lifespan(_):
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(title="Passage retrieval", lifespan=lifespan)
    body = {"required": True, "content": {"application/json": {"schema": Search.model_json_schema()}}}
    errors = {413: "Body too large", 422: "Not a valid search", 500: "Search failed", 503: "Queue full"}
    responses = {status: {"description": text} for status, text in errors.items()}

    @app.post("/retrieve", response_model=Results, responses=responses, openapi_extra={"requestBody": body})
    async def retrieve(request: Request) -> Response:
        """Finds the best passages of each query; with BM25 a query without a known word finds none."""
        try:
            search = await read(request)
            keys = [(query[:MAX_QUERY], search.topk or topk, search.return_scores) for query in search.queries]
            hits = await batcher.ask(keys)
        except Refused as e:
            status, detail, *headers = e.args
            return JSONResponse({"detail": detail}, status, *headers)
        except Exception as e:  # the next batch may succeed
            return JSONResponse({"detail": explain(e)}, 500)
        return Response(b'{"result":[' + b",".join(hits) + b"]}", media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        about = {"status": "ok", "passages": len(corpus), "index": index.name, "corpus": corpus.digest}
        return about | batcher.counts()

    return app


def _json(corpus: Corpus, hits: list[tuple[int, float]], scored: bool) -> bytes | Exception:
    try:
        documents = [(corpus[row], score) for row, score in hits]
    except (ValueError, OSError) as e:  # an unreadable row fails its own query, not the batch
        return e
    rows = [{"document": d, "score": score} for d, score in documents] if scored else [d for d, _ in documents]
    return json.dumps(rows, ensure_ascii=False).encode()


def main() -> None:
    """Serves the corpus that the command line names, until interrupted; raises Fault if it cannot."""
    # Without a usage text an error is one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--corpus", required=True, help='.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}')
    add("--index", nargs="+", default=[], help="directories made by retrieval/build.py, or a FAISS file (BM25)")
    add("--encoder", default="", help="model of a FAISS file from elsewhere, or the new place of an index's model")
    add("--family", default="", choices=["", "e5", "bge", "plain"], help="its prefixes and pooling (from its name)")
    add("--device", default="", help="of the encoder: cpu, cuda, cuda:1 (a GPU if there is one)")
    add("--shard_gpus", action="store_true", help="split the FAISS index over the visible GPUs, fp16")
    add("--nprobe", type=int, default=64, help="cells of an IVF index that a query visits (64)")
    add("--ef", type=int, default=128, help="search width in an HNSW graph (128)")
    add("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--topk", type=int, default=3, help=f"passages per query, 1 to {MAX_TOPK} (3)")
    add("--max_batch", type=int, default=256, help="queries searched together at most (256)")
    add("--cache_mb", type=float, default=64, help="size of the cache of answers (64)")
    add("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    limits = {"topk": (1, MAX_TOPK), "cache_mb": (0, 10**6)} | dict.fromkeys(("nprobe", "ef", "max_batch"), (1, 10**6))
    for name, (least, most) in limits.items():
        if not least <= getattr(args, name) <= most:
            parser.error(f"argument --{name}: {getattr(args, name)} is not from {least} to {most}")
    sock = listen(args.host, args.port)  # before the corpus is read, so that a port in use is reported at once
    corpus = Corpus(args.corpus)
    indexes = [open_index(path, corpus, args.encoder, args.family, args.device) for path in args.index]
    for index in indexes:
        if isinstance(index, Dense):
            index.set_width(args.nprobe, args.ef)
            if args.shard_gpus:
                index.shard()
    index = Fused(indexes) if len(indexes) > 1 else indexes[0] if indexes else BM25.build(corpus.texts())
    print(f"{len(corpus):,} passages of {corpus.path}, {index.name}", flush=True)
    serve(make_app(corpus, index, args.topk, args.max_batch, int(args.cache_mb * 2**20)), sock, args.child, Patient)


if __name__ == "__main__":
    try:
        with one_line():
            main()
    except KeyboardInterrupt:
        sys.exit("\nstopped")
