"""A search server over a passage file, with Search-R1's wire format: BM25, or a dense encoder under
FAISS.

    python -m retrieval.server --corpus corpus.jsonl                            BM25, built at startup
    python -m retrieval.server --corpus wiki.jsonl --index wiki-e5              an index of `python -m retrieval.build`
    python -m retrieval.server --corpus wiki-18.jsonl --index e5_Flat.index --encoder intfloat/e5-base-v2

    curl localhost:8000/retrieve -H 'Content-Type: application/json' -d '{"queries": ["who wrote Emma ?"]}'

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25", "corpus": "a digest of its passages", ...}

Without scores each hit is the document itself. /health also counts queries received and waiting,
and batches. The page /docs documents the calls and their limits. Concurrent requests are searched
together, off the event loop.
"""

import plumbing  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import asyncio
import os
import signal
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from plumbing.batches import Batches
from plumbing.faults import one_line
from plumbing.outside import clean
from plumbing.servers import listen, serve_app
from retrieval import parser_of
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.index import Dense, open_index

MAX_TOPK = 100
MAX_QUERIES = 16384  # per request: Search-R1 sends all queries of a step at once
MAX_HITS = 100_000  # queries x topk of a request, whose answer is in memory
MAX_QUERY = 4096  # characters
MAX_WAIT = 0.002  # seconds that the first query of a batch waits for others

Key = tuple[str, int]  # query, topk
Answer = list[dict]  # {"document", "score"}, best first


class Search(BaseModel):
    queries: list[str] = Field(
        max_length=MAX_QUERIES, description=f"the first {MAX_QUERY} characters of each count"
    )
    topk: int | None = Field(None, ge=1, le=MAX_TOPK, description="the server's --topk if null")
    return_scores: bool = False


def find_passages(corpus: Corpus, index: BM25 | Dense, keys: list[Key]) -> dict[Key, Answer]:
    """Returns the answers; one search per topk, so that none depends on its batch."""
    queries: dict[int, list[str]] = {}
    for query, k in keys:
        queries.setdefault(k, []).append(query)
    answers = {}
    for k, some in queries.items():
        for query, hits in zip(some, index.search(some, k), strict=True):
            answers[query, k] = [{"document": corpus[row], "score": score} for row, score in hits]
    return answers


async def refuse(_: Request, e: Any) -> JSONResponse:
    """Answers a request of another form, without what was sent."""
    reasons = [{"loc": error["loc"], "msg": error["msg"]} for error in e.errors()]
    return JSONResponse({"detail": reasons}, 422)


def make_app(corpus: Corpus, index: BM25 | Dense, topk: int, max_batch: int = 256) -> FastAPI:
    """Makes the ASGI app that serves /retrieve and /health; `topk` is the default of a request."""
    batches = Batches(partial(find_passages, corpus, index), max_batch, MAX_WAIT)
    app = FastAPI(title="Passage retrieval", exception_handlers={RequestValidationError: refuse})
    app.state.queries = 0

    @app.post("/retrieve")
    async def retrieve(search: Search) -> JSONResponse:
        """Finds the best passages of each query; with BM25 a query without a known word finds
        none."""
        k = search.topk or topk
        if len(search.queries) * k > MAX_HITS:
            raise HTTPException(
                422, f"queries x topk are more than {MAX_HITS:,}; send fewer at once"
            )
        app.state.queries += len(search.queries)
        asked = [batches.submit((clean(query[:MAX_QUERY]), k)) for query in search.queries]
        try:
            answers = await asyncio.gather(*map(asyncio.wrap_future, asked))
        # of the encoder, FAISS or a row: this request fails, the next one may succeed
        except Exception as e:
            raise HTTPException(500, f"search failed: {type(e).__name__}: {e}") from None
        if not search.return_scores:
            return JSONResponse({"result": [[hit["document"] for hit in hits] for hits in answers]})
        return JSONResponse({"result": answers})

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {
            "status": "ok",
            "passages": len(corpus),
            "index": index.name,
            "corpus": corpus.digest,
            "queries": app.state.queries,
            "batches": batches.count,
            "waiting": batches.waiting.qsize(),
        }

    return app


def read_flags() -> argparse.Namespace:
    """Returns the command line's flags; exits with one line where they are wrong."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--index", default="", help="directory made by retrieval/build.py, or a FAISS file (BM25)")
    add(
        "--encoder",
        default="",
        help="model of a FAISS file from elsewhere, or the new place of an index's model",
    )
    add("--device", default="", help="of the encoder: cpu, cuda, cuda:1 (a GPU if there is one)")
    add(
        "--shard_gpus",
        action="store_true",
        help="split the FAISS index over the visible GPUs, fp16",
    )
    add("--nprobe", type=int, default=64, help="cells of an IVF index that a query visits (64)")
    add("--ef", type=int, default=128, help="search width in an HNSW graph (128)")
    add("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--topk", type=int, default=3, help=f"passages per query, 1 to {MAX_TOPK} (3)")
    add("--max_batch", type=int, default=256, help="queries searched together at most (256)")
    add("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    for name in ("topk", "nprobe", "ef", "max_batch"):
        value, most = getattr(args, name), MAX_TOPK if name == "topk" else 10**6
        if not 1 <= value <= most:
            parser.error(f"argument --{name}: {value} is not from 1 to {most}")
    if args.encoder and not args.index:
        parser.error(
            "argument --encoder: BM25 has none; give the --index of its vectors (made by retrieval/build.py)"
        )
    return args


def main() -> None:
    """Serves the corpus that the command line names, until interrupted; raises Fault if it
    cannot."""
    args = read_flags()
    # before the corpus is read, so that a port in use is reported at once
    sock = listen(args.host, args.port)
    corpus = Corpus(args.corpus)
    if args.index:
        index = open_index(args.index, corpus, args.encoder, args.family, args.device)
    else:
        index = BM25.build(corpus.texts())
    if isinstance(index, Dense):
        index.set_width(args.nprobe, args.ef)
        if args.shard_gpus:
            index.shard()
    print(f"{len(corpus):,} passages of {corpus.path}, {index.name}", flush=True)
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))  # that is how a server ends: no line
    serve_app(make_app(corpus, index, args.topk, args.max_batch), sock, args.child)


if __name__ == "__main__":
    with one_line():
        main()
