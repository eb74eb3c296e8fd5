"""A search engine over a passage file, with Search-R1's wire format and BM25 ranking.

    python retrieval_server.py --corpus corpus.jsonl --port 8000

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25"}

Without scores each hit is the document itself. The other calls and their limits are on the page /docs.
"""

import argparse
import json
import re
from typing import Annotated

import bm25s
import numpy as np
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from servers import listen, serve

MAX_TOPK = 100


class Search(BaseModel):
    queries: list[Annotated[str, Field(max_length=4096)]] = Field(max_length=1024)
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


def load_corpus(path: str) -> list[dict[str, str]]:
    """Returns the passages {"id", "contents"} of a JSONL file in its order; SystemExit names a bad line.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}.
    """
    passages = []
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    passages.append(_passage(line, f"{path}:{number}"))
    except OSError as e:
        raise SystemExit(f"{path}: {e.strerror}; give a readable JSONL file as --corpus") from None
    if not passages:
        raise SystemExit(f'{path}: no passages; write one {{"id": ..., "contents": ...}} a line')
    return passages


def _passage(line: bytes, where: str) -> dict[str, str]:
    todo = 'write one {"id": ..., "contents": "\\"Title\\"\\ntext"} a line'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise SystemExit(f"{where}: not valid JSON ({e}); {todo}") from None
    if not isinstance(row, dict):
        raise SystemExit(f"{where}: a row is a JSON object, not {type(row).__name__}; {todo}")
    titled = "contents" not in row and "title" in row
    for field in ("id", "title", "text") if titled else ("id", "contents"):
        if field not in row:
            raise SystemExit(f'{where}: no "{field}"; {todo}')
        if type(row[field]) not in ((str, int) if field == "id" else (str,)):
            raise SystemExit(f'{where}: "{field}" is of type {type(row[field]).__name__}; {todo}')
    contents = f'"{row["title"]}"\n{row["text"]}' if titled else row["contents"]
    passage = {"id": str(row["id"]), "contents": contents}
    try:
        "".join(passage.values()).encode()
    except UnicodeEncodeError:  # JSON can write half a character; UTF-8, and so a response, cannot
        raise SystemExit(f"{where}: half of a surrogate pair; write the whole character") from None
    return passage


def words(text: str) -> list[str]:
    """Returns the lower-cased words of a text; stop words stay, nothing is stemmed."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """BM25 with Lucene's formula, k1 = 1.5, b = 0.75, over texts held in memory (bm25s, arXiv 2407.03618)."""

    def __init__(self, texts: list[str]):
        self.vocabulary: dict[str, int] = {}
        tokens = [[self.vocabulary.setdefault(w, len(self.vocabulary)) for w in words(t)] for t in texts]
        if not self.vocabulary:
            raise SystemExit("no passage of the corpus has a word in it; check the file given as --corpus")
        self.index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, dtype="float64")
        self.index.index((tokens, self.vocabulary), create_empty_token=False, show_progress=False)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Returns (passage index, score) of the k best passages with score > 0; ties in corpus order."""
        tokens = [self.vocabulary[w] for w in words(query) if w in self.vocabulary]
        # Rounded to fp32, so that scores which tie on paper tie here too, in whatever order they were added.
        scores = self.index.get_scores_from_ids(tokens).astype(np.float32)  # (passages,)
        k = min(k, len(scores))
        # bm25s's own top-k (argpartition) orders ties arbitrarily; a stable sort of all passages is slow.
        threshold = np.partition(scores, -k)[-k]
        hits = np.flatnonzero((scores >= threshold) & (scores > 0))
        hits = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return list(zip(hits.tolist(), scores[hits].tolist(), strict=True))


def make_app(passages: list[dict[str, str]], topk: int) -> FastAPI:
    """Returns the ASGI app that answers /retrieve and /health (Search-R1's wire format) over the passages."""
    bm25 = BM25([p["contents"] for p in passages])
    app = FastAPI(title="Passage retrieval")

    @app.exception_handler(RequestValidationError)
    async def refuse(_, error: RequestValidationError) -> JSONResponse:
        # FastAPI would quote the input; a NaN or half a surrogate pair in it cannot be written: status 500.
        errors = [{key: e[key] for key in ("type", "loc", "msg")} for e in error.errors()]
        return JSONResponse({"detail": errors}, 422)

    @app.post("/retrieve", response_model=Found)
    def retrieve(search: Search) -> JSONResponse:
        """Finds the best passages of each query; a query without a known word finds none."""
        result = []
        for query in search.queries:
            hits = bm25.search(query, search.topk or topk)
            if search.return_scores:
                result.append([{"document": passages[i], "score": score} for i, score in hits])
            else:
                result.append([passages[i] for i, _ in hits])
        return JSONResponse({"result": result})  # past FastAPI's own encoder, which visits every value

    @app.get("/health")
    async def health() -> dict[str, str | int]:  # async: answers even while every worker thread searches
        return {"status": "ok", "passages": len(passages), "index": "bm25"}

    return app


def main() -> None:
    # Without a usage text an error is one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--corpus", required=True, help='rows {"id", "contents"} or {"id", "title", "text"}')
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--topk", type=int, default=3, help=f"passages a query, 1 to {MAX_TOPK} (3)")
    parser.add_argument("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"argument --topk: {args.topk} is not from 1 to {MAX_TOPK}")
    sock = listen(args.host, args.port)  # before the corpus is read: a port in use is known at once
    serve(make_app(load_corpus(args.corpus), args.topk), sock, args.child)


if __name__ == "__main__":
    main()
