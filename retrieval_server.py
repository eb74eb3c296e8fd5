"""A search server over a passage file, with Search-R1's wire format: BM25, or an encoder's vectors in a FAISS index.

    python retrieval_server.py --corpus corpus.jsonl                                 BM25, made at the start
    python retrieval_server.py --corpus wiki.jsonl --index wiki-bm25 --build bm25    makes an index and exits
    python retrieval_server.py --corpus wiki-18.jsonl --index e5_Flat.index --encoder intfloat/e5-base-v2
    python retrieval_server.py --corpus wiki.jsonl --index wiki-e5 --encoder intfloat/e5-base-v2 --build IVF16384,SQ8

    curl localhost:8000/retrieve -H 'Content-Type: application/json' -d '{"queries": ["who wrote Emma ?"]}'

    POST /retrieve  {"queries": ["who wrote it ?"], "topk": 3, "return_scores": true}
                 -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 2.5}]]}
    GET  /health -> {"status": "ok", "passages": 1000, "index": "bm25"}

Without scores each hit is the document itself. Concurrent requests are searched together.
"""

import argparse
import asyncio
import json
import os
import signal
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import bm25s
import numpy as np
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from tqdm import tqdm

from plumbing.batches import Batches
from plumbing.faults import Fault, first_line, one_line
from plumbing.outside import clean, contents_of
from plumbing.servers import listen, serve_app
from plumbing.words import split_words

MAX_TOPK = 100
MAX_QUERIES = 16384  # per request: Search-R1 sends all queries of a step at once
MAX_HITS = 100_000  # queries x topk of a request, whose answer is in memory
MAX_QUERY = 4096  # characters
MAX_BATCH, MAX_WAIT = 256, 0.002  # queries searched together; seconds that the first waits
CHUNK = 1024  # passages that are encoded at a time
ENCODE = {"normalize_embeddings": True, "show_progress_bar": False}
SAMPLE = 1 << 20  # passages that IVF's cells and the scalar quantizer are trained on

# Families of encoders that publish no prompts: prefix of queries, of passages, pooling.
FAMILIES = {
    "e5": ("query: ", "passage: ", "mean"),  # arXiv 2212.03533
    # arXiv 2309.07597, English v1.5
    "bge": ("Represent this sentence for searching relevant passages: ", "", "cls"),
}

Hits = list[tuple[int, float]]  # (row of the corpus, score), best first


class Corpus:
    """The passages {"id", "contents"} of a JSONL file, by row number from 0.

    Rows are Search-R1's {"id", "contents"}, or {"id", "title", "text"}, with `_id` in BEIR's. Only
    the offsets of rows are in memory; each is read from disk on access, by any thread.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._starts, end = str(path), array("Q"), 0
        try:
            with open(path, "rb") as file:
                for line in file:
                    if line.strip():
                        self._starts.append(end)
                    end += len(line)
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise Fault(f"--corpus {path}: {e.strerror}; give a readable JSONL file") from None
        if not self._starts:
            raise Fault(f"--corpus {path}: no passages; check the file")
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, str]:
        start, end = self._starts[row], self._starts[row + 1]
        try:
            fields = json.loads(os.pread(self._fd, end - start, start))
            id = fields["id"] if "id" in fields else fields["_id"]
            return {"id": str(id), "contents": contents_of(fields)}
        except (ValueError, TypeError, LookupError) as e:
            raise Fault(
                f'{self.path}, row {row + 1}: not {{"id": ..., "contents": ...}}'
                f" ({type(e).__name__}: {e}); a corpus is unpacked JSONL"
            ) from None

    def texts(self) -> Iterator[str]:
        """The contents of all passages, in order."""
        return (self[row]["contents"] for row in range(len(self)))


class BM25:
    """BM25 with Lucene's formula, k1 = 1.5, b = 0.75, in an index of bm25s (arXiv 2407.03618)."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25):
        self.index = index

    @classmethod
    def build(cls, texts: Iterable[str]) -> "BM25":
        """Indexes the texts in memory, at 40 bytes a word."""
        vocabulary: dict[str, int] = {}
        tokens = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text)]
            for text in texts
        ]
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, dtype="float64", csc_backend="scipy")
        index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index)

    def __len__(self) -> int:
        return self.index.scores["num_docs"]

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows with score > 0; ties in corpus order."""
        vocabulary, found = self.index.vocab_dict, []
        for query in queries:
            tokens = [vocabulary[word] for word in split_words(query) if word in vocabulary]
            # Rounded to fp32, so that scores that are equal on paper tie, in whatever order their
            # terms were added.
            scores = self.index.get_scores_from_ids(tokens).astype(np.float32)  # (passages,)
            k = min(k, len(scores))
            # bm25s's own top-k (argpartition) orders ties arbitrarily; a stable sort of all passages
            # is slow.
            threshold = np.partition(scores, -k)[-k]
            hits = np.flatnonzero((scores >= threshold) & (scores > 0))
            hits = hits[np.argsort(-scores[hits], kind="stable")[:k]]
            found.append(list(zip(hits.tolist(), scores[hits].tolist(), strict=True)))
        return found


def infer_family(name: str) -> str:
    """Returns the family that the name of an encoder says, "" for none."""
    name = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if "e5" in name:
        return "" if "instruct" in name else "e5"
    return "bge" if "bge" in name and "-en" in name else ""


def load_encoder(name: str, family: str, device: str) -> Any:
    """Loads a model of sentence-transformers, in fp16 on a GPU; texts are cut at 256 tokens.

    Its prompts are its own, or those of its `family`, a key of FAMILIES, by default the one in its
    name. Raises Fault if it cannot be loaded, or does not pool as its family.
    """
    # here: they take seconds to import
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = SentenceTransformer(name, device=device or None)
    except (OSError, ValueError, RuntimeError) as e:
        raise Fault(
            f"--encoder {name}: {first_line(e)}; give a model's Hugging Face id or folder"
        ) from None
    model.max_seq_length = min(256, model.max_seq_length or 256)
    if model.device.type == "cuda":
        model.half()
    query = model.prompts.get("query")
    passage = model.prompts.get("document") or model.prompts.get("passage")
    if not (family or query or passage):
        family = infer_family(name)
    if family:
        query, passage, pooling = FAMILIES[family]
        own = model[1].pooling_mode
        if own != pooling:
            raise Fault(
                f"--encoder {name}: pools by {own}, {family} by {pooling}; give its --family"
            )
    model.prompts = {"query": query, "document": passage}
    return model


class Dense:
    """An encoder's vectors in a FAISS index of any kind; a score is the inner product."""

    def __init__(self, path: str, encoder: Any, nprobe: int, ef: int, shard_gpus: bool):
        """Maps a FAISS file into memory; a query visits `nprobe` cells of IVF, a beam of `ef` in
        HNSW."""
        import faiss

        try:
            self.index = faiss.read_index(path, faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as e:
            raise Fault(f"--index {path}: {first_line(e)}; give a file written by FAISS") from None
        self.encoder, self.name = encoder, type(self.index).__name__
        d = encoder.get_embedding_dimension()
        if self.index.d != d:
            raise Fault(
                f"--index {path}: vectors of {self.index.d} numbers, not {d}; give its --encoder"
            )
        for name, width in {"nprobe": nprobe, "efSearch": ef, "quantizer_efSearch": ef}.items():
            with suppress(RuntimeError):  # an index that has no such width
                faiss.ParameterSpace().set_index_parameter(self.index, name, width)
        if shard_gpus:
            options = faiss.GpuMultipleClonerOptions()
            options.shard, options.useFloat16 = True, True
            self.index = faiss.index_cpu_to_all_gpus(self.index, options)

    def __len__(self) -> int:
        return self.index.ntotal

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query its k nearest rows, fewer where the index finds fewer."""
        scores, rows = self.index.search(self.encoder.encode_query(queries, **ENCODE), k)  # (N, k)
        found = []
        for pairs in map(zip, rows.tolist(), scores.tolist()):
            found.append([(row, score) for row, score in pairs if row >= 0])
        return found


def fill_index(index: Any, corpus: Corpus, encoder: Any) -> None:
    """Trains an empty FAISS index, and adds the vectors of all passages, encoded on all GPUs."""
    pool = encoder.start_multi_process_pool() if encoder.device.type == "cuda" else None

    def encode(rows: Iterable[int]) -> np.ndarray:
        texts = [corpus[int(row)]["contents"] for row in rows]
        return encoder.encode_document(texts, pool=pool, **ENCODE)

    n = len(corpus)
    if not index.is_trained:
        rows = np.random.default_rng(0).choice(n, min(n, SAMPLE), replace=False)
        index.train(encode(np.sort(rows)))
    for first in tqdm(range(0, n, CHUNK), "encoding"):
        index.add(encode(range(first, min(first + CHUNK, n))))


def build(corpus: Corpus, path: str, kind: str, encoder: Any) -> None:
    """Makes an index in memory, then at `path`: BM25's, or of one of FAISS's types."""
    partial = f"{path}.partial"
    try:
        if encoder:
            import faiss

            d = encoder.get_embedding_dimension()
            index = faiss.index_factory(d, kind, faiss.METRIC_INNER_PRODUCT)
            fill_index(index, corpus, encoder)
            faiss.write_index(index, partial)
        else:
            texts = tqdm(corpus.texts(), "reading", len(corpus), unit=" passages")
            BM25.build(texts).index.save(partial, show_progress=False)
        os.replace(partial, path)
    # RuntimeError: FAISS's, as of a type that it does not know
    except (OSError, RuntimeError) as e:
        raise Fault(
            f"--index {path}: {first_line(e)}; give --build a type of FAISS, --index a place with room"
        ) from None


class Query(BaseModel):
    queries: list[str] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)  # None: the server's --topk
    return_scores: bool = False


def find_passages(
    corpus: Corpus, index: BM25 | Dense, keys: list[tuple[str, int]]
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Returns {(query, topk): hits}; one search per topk, so that no answer depends on its
    batch."""
    answers = {}
    for k in {k for _, k in keys}:
        queries = [query for query, topk in keys if topk == k]
        for query, hits in zip(queries, index.search(queries, k), strict=True):
            answers[query, k] = [{"document": corpus[row], "score": score} for row, score in hits]
    return answers


def make_app(corpus: Corpus, index: BM25 | Dense, topk: int = 3) -> FastAPI:
    """Makes the ASGI app that serves /retrieve and /health; `topk` is the default of a request."""
    batches = Batches(partial(find_passages, corpus, index), MAX_BATCH, MAX_WAIT)
    app = FastAPI(title="Passage retrieval")

    @app.post("/retrieve")
    async def retrieve(query: Query) -> JSONResponse:
        k = query.topk or topk
        if len(query.queries) * k > MAX_HITS:
            raise HTTPException(422, f"queries x topk are more than {MAX_HITS:,}; send fewer")
        asked = [batches.submit((clean(text[:MAX_QUERY]), k)) for text in query.queries]
        answers = await asyncio.gather(*map(asyncio.wrap_future, asked))
        if not query.return_scores:
            answers = [[hit["document"] for hit in hits] for hits in answers]
        return JSONResponse({"result": answers})

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "passages": len(corpus), "index": index.name}

    return app


def main() -> None:
    """Serves, or builds, what the command line names; raises Fault if it cannot."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--corpus", required=True, help='JSONL: {"id", "contents"} or {"id", "title", "text"}')
    add("--index", default="", help="FAISS file or BM25 folder (BM25, made at the start)")
    add("--build", default="", help="make --index and exit: bm25, or a FAISS type (Flat, HNSW32)")
    add("--encoder", default="", help="the model that made a FAISS file's vectors")
    add(
        "--family", choices=FAMILIES, help="whose prompts --encoder takes (its own, or by its name)"
    )
    add("--device", default="", help="--encoder's: cpu, cuda, cuda:1 (a GPU if there is one)")
    add("--nprobe", type=int, default=64, help="cells of an IVF index that a query visits (64)")
    add("--ef", type=int, default=128, help="search width in an HNSW graph (128)")
    add("--shard_gpus", action="store_true", help="split the index over all GPUs, fp16 (faiss-gpu)")
    add("--topk", type=int, default=3, help=f"passages per query, 1 to {MAX_TOPK} (3)")
    add("--host", default="127.0.0.1", help="address to bind (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port; 0: a free one (8000)")
    add("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"argument --topk: {args.topk} is not from 1 to {MAX_TOPK}")
    dense = args.build not in ("", "bm25") or os.path.isfile(args.index)
    if args.build and not args.index:
        parser.error("argument --index: say where to write it")
    if dense != bool(args.encoder):
        parser.error("argument --encoder: give the model of a FAISS index's vectors; BM25 has none")

    # before the corpus is read, so that a port in use is reported at once
    sock = None if args.build else listen(args.host, args.port)
    corpus = Corpus(args.corpus)
    encoder = load_encoder(args.encoder, args.family, args.device) if dense else None
    if not sock:
        return build(corpus, args.index, args.build, encoder)
    index: BM25 | Dense
    if encoder:
        index = Dense(args.index, encoder, args.nprobe, args.ef, args.shard_gpus)
    elif args.index:
        try:
            index = BM25(bm25s.BM25.load(args.index, mmap=True))
        except OSError as e:
            raise Fault(f"--index {args.index}: {first_line(e)}; make it with --build") from None
    else:
        index = BM25.build(corpus.texts())
    if len(index) != len(corpus):
        raise Fault(
            f"--index {args.index}: it has {len(index):,} passages, --corpus {len(corpus):,}; give its own corpus"
        )
    print(f"{len(corpus):,} passages of {corpus.path}, {index.name}", flush=True)
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))  # that is how a server ends: no line
    serve_app(make_app(corpus, index, args.topk), sock, args.child)


if __name__ == "__main__":
    with one_line():
        main()
