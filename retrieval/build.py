"""Builds an index over a corpus: BM25, or the vectors of an encoder in FAISS.

    python -m retrieval.build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5 --type IVF16384,SQ8
    python -m retrieval.build --corpus wiki.jsonl --encoder bm25 --index wiki-bm25

All work happens in `<index>.partial/`, which becomes `<index>` once it is complete. Passages are encoded on all
visible GPUs. After a kill the same command resumes with the vectors on disk; the index itself is made in memory and
starts over.
"""

import argparse
import json
import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import faiss
import numpy as np
import torch
from tqdm import tqdm

from plumbing.faults import Fault, one_line
from retrieval.bm25 import BM25
from retrieval.corpus import Corpus
from retrieval.encoder import FAMILIES, Encoder
from retrieval.index import fingerprint, open_index

CHUNK = 256  # passages encoded, written and marked as done together
SAMPLE = 1 << 20  # vectors that IVF's cells and the scalar quantizer are trained on


def encode(corpus: Corpus, encoders: list[Encoder], folder: Path) -> np.ndarray:
    """Encodes the passages that an earlier run has not; returns the vectors of all, (N, d) fp32, memory-mapped."""
    n = len(corpus)
    vectors = _on_disk(folder / "vectors", np.float32, (n, encoders[0].dimension))
    done = _on_disk(folder / "done", np.bool_, (-(-n // CHUNK),))
    chunks = iter(np.flatnonzero(~done).tolist())  # one iterator for all threads

    def work(encoder: Encoder) -> None:
        for k in chunks:
            rows = range(k * CHUNK, min((k + 1) * CHUNK, n))
            vectors[rows.start : rows.stop] = encoder.passages([corpus[row]["contents"] for row in rows])
            vectors.flush()  # the vectors must reach the disk before the mark
            done[k] = True
            bar.update(len(rows))

    with (
        tqdm(total=n, initial=min(n, CHUNK * int(done.sum())), desc="encoding", unit=" passages") as bar,
        ThreadPoolExecutor(len(encoders)) as pool,
    ):
        threads = [pool.submit(work, encoder) for encoder in encoders]
        try:
            wait(threads, return_when=FIRST_EXCEPTION)
        finally:
            list(chunks)  # after a failure or Ctrl-C the other threads find nothing left to do
        for thread in threads:
            thread.result()
    return vectors


def _on_disk(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Maps an array in a file, of zeros if it is new; raises OSError, rather than crash later, if the disk is full."""
    array = np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as f:
            os.posix_fallocate(f.fileno(), 0, array.nbytes)
    return array


def index_of(vectors: np.ndarray, kind: str) -> faiss.Index:
    """Makes the FAISS index that `kind` names, in memory."""
    index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    index.verbose = True
    if not index.is_trained:
        rows = np.random.default_rng(0).choice(len(vectors), min(len(vectors), SAMPLE), replace=False)
        index.train(vectors[np.sort(rows)])
    index.add(vectors)
    return index


def main(argv: list[str] | None = None) -> None:
    """Builds the index that the command line describes; raises Fault if it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = '.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}'
    parser.add_argument("--corpus", required=True, help=rows)
    parser.add_argument("--encoder", required=True, help="a BERT-type model (Hugging Face id or directory), or bm25")
    parser.add_argument("--index", required=True, help="directory to create")
    parser.add_argument("--type", default="Flat", help="by FAISS's name, such as IVF16384,SQ8 or HNSW32,Flat (Flat)")
    parser.add_argument("--family", default="", choices=["", *FAMILIES], help="prefixes and pooling (from the name)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a passage that count (256)")
    args = parser.parse_args(argv)
    out = Path(args.index)
    if out.exists():
        raise Fault(f"--index {out}: already exists; remove it or name another directory")
    corpus = Corpus(args.corpus)
    partial = out.with_name(f"{out.name}.partial")
    manifest = {"encoder": args.encoder, "passages": len(corpus), "digest": corpus.digest}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if args.encoder == "bm25":
            texts = tqdm(corpus.texts(), total=len(corpus), desc="reading", unit=" passages")
            BM25.build(texts).index.save(partial, show_progress=False)
        else:
            manifest |= _build_dense(args, corpus, partial)
        work = {"vectors", "done", "plan.json"}
        manifest["files"] = {path.name: fingerprint(path) for path in partial.iterdir() if path.name not in work}
        (partial / "index.json").write_text(json.dumps(manifest, indent=1))
        os.replace(partial, out)
    except KeyboardInterrupt:
        raise Fault(f"\nstopped; the same command resumes with the vectors in {partial}") from None
    except (OSError, RuntimeError) as e:  # RuntimeError: FAISS's, for instance if the disk is full
        raise Fault(f"{partial}: {e}; the same command resumes with the vectors that are there") from None
    for name in work:
        (out / name).unlink(missing_ok=True)
    open_index(args.index, corpus)  # compares some vectors with their passages
    print(f"made {out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e9:.3f} GB")


def _build_dense(args: argparse.Namespace, corpus: Corpus, partial: Path) -> dict[str, str | int]:
    devices = [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu"]
    encoders = [Encoder(args.encoder, args.family, args.max_length, device) for device in devices]
    d, model = encoders[0].dimension, args.encoder
    try:
        faiss.index_factory(d, args.type, faiss.METRIC_INNER_PRODUCT)  # before hours of encoding
    except RuntimeError as e:
        raise Fault(f"--type {args.type}: {e}; give a name of FAISS's index factory") from None
    plan = {"encoder": os.path.abspath(model) if os.path.isdir(model) else model}
    plan |= {"family": encoders[0].family, "max_length": encoders[0].max_length}
    text, kept = json.dumps(plan | {"digest": corpus.digest}), partial / "plan.json"
    if kept.exists() and kept.read_text() != text:
        raise Fault(f"{partial}: begun with another encoder, --family, --max_length or corpus; remove it")
    kept.write_text(text)
    size = f"{4 * d * len(corpus) / 1e9:.2f} GB of vectors in {partial}"
    print(f"{len(corpus):,} passages, {model} on {' '.join(devices)}, {size} -> {args.type}", flush=True)
    faiss.write_index(index_of(encode(corpus, encoders, partial), args.type), str(partial / "index.faiss"))
    return plan


if __name__ == "__main__":
    with one_line():
        main()
