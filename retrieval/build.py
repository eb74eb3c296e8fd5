"""Builds an index over a corpus: BM25, or the vectors of an encoder in FAISS.

    python -m retrieval.build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5 --type IVF16384,SQ8
    python -m retrieval.build --corpus wiki.jsonl --encoder bm25 --index wiki-bm25

All work happens in `<index>.partial/`, which becomes `<index>` once it is complete. Passages are
encoded on all visible GPUs. After a kill the same command resumes with the vectors on disk; the
index itself is made in memory and starts over.
"""

from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import torch
from tqdm import tqdm

from plumbing.faults import Fault, one_line
from plumbing.files import write_file
from retrieval.bm25 import BM25, WORDS
from retrieval.corpus import Corpus
from retrieval.encoder import FAMILIES, Encoder
from retrieval.index import open_index

CHUNK = 256  # passages that an encoder encodes at a time
SAMPLE = 1 << 20  # vectors that IVF's cells and the scalar quantizer are trained on


def encode(corpus: Corpus, encoders: list[Encoder], path: Path) -> np.ndarray:
    """Appends the vectors that an earlier run has not written; returns those of all, (N, d) fp32,
    memory-mapped."""
    n, d = len(corpus), encoders[0].dimension

    def encode_chunk(encoder: Encoder, first: int) -> np.ndarray:
        return encoder.passages(
            [corpus[row]["contents"] for row in range(first, min(first + CHUNK, n))]
        )

    with open(path, "ab") as file, ThreadPoolExecutor(len(encoders)) as pool:
        done = file.tell() // (4 * d)
        file.truncate(4 * d * done)  # a kill may have cut off a vector
        if shutil.disk_usage(path.parent).free < 4 * d * (n - done):
            raise Fault(
                f"{path.parent}: no room for {4 * d * n / 1e9:.2f} GB of vectors; name another --index"
            )
        with tqdm(total=n, initial=done, desc="encoding", unit=" passages") as bar:
            while done < n:
                for vectors in pool.map(encode_chunk, encoders, range(done, n, CHUNK)):
                    file.write(vectors)
                    done += len(vectors)
                    bar.update(len(vectors))
    return np.memmap(path, np.float32, "r", shape=(n, d))


def fill(index: faiss.Index, vectors: np.ndarray) -> faiss.Index:
    """Trains an empty index and adds the vectors, in memory."""
    index.verbose = True
    if not index.is_trained:
        rows = np.random.default_rng(0).choice(
            len(vectors), min(len(vectors), SAMPLE), replace=False
        )
        index.train(vectors[np.sort(rows)])
    index.add(vectors)
    return index


def build_dense(corpus: Corpus, encoders: list[Encoder], folder: Path, kind: str) -> None:
    """Writes `index.faiss`, of FAISS's type `kind`."""
    # before hours of encoding
    index = faiss.index_factory(encoders[0].dimension, kind, faiss.METRIC_INNER_PRODUCT)
    vectors = folder / "vectors"
    faiss.write_index(fill(index, encode(corpus, encoders, vectors)), str(folder / "index.faiss"))
    vectors.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    """Builds the index that the command line describes; raises Fault if it cannot."""
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = 'JSONL: {"id", "contents"} or {"id", "title", "text"} a line'
    parser.add_argument("--corpus", required=True, help=rows)
    parser.add_argument(
        "--encoder", required=True, help="a BERT-type model (Hugging Face id or directory), or bm25"
    )
    parser.add_argument("--index", required=True, help="directory to create")
    parser.add_argument(
        "--type", default="Flat", help="by FAISS's name, such as IVF16384,SQ8 or HNSW32,Flat (Flat)"
    )
    parser.add_argument(
        "--family", default="", choices=["", *FAMILIES], help="prefixes and pooling (from the name)"
    )
    parser.add_argument(
        "--max_length", type=int, help="tokens of a passage that count (256, or the encoder's most)"
    )
    args = parser.parse_args(argv)
    out = Path(args.index)
    if out.exists():
        raise Fault(f"--index {out}: already exists; remove it or name another directory")
    corpus = Corpus(args.corpus)
    model = os.path.abspath(args.encoder) if os.path.isdir(args.encoder) else args.encoder
    manifest = {"encoder": model, "passages": len(corpus), "digest": corpus.digest}
    encoders = []
    if model == "bm25":
        manifest["words"] = WORDS
    else:
        devices = [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu"]
        encoders = [
            Encoder(model, args.family, args.max_length or 256, device) for device in devices
        ]
        most = encoders[0].max_length
        if args.max_length not in (None, most):
            raise Fault(
                f"--max_length {args.max_length}: {model} takes {most} tokens; give at most that"
            )
        manifest |= {"family": encoders[0].family, "max_length": encoders[0].max_length}
        print(
            f"{len(corpus):,} passages, {model} on {' '.join(devices)} -> {args.type}", flush=True
        )
    partial = out.with_name(f"{out.name}.partial")
    kept = partial / "index.json"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if kept.exists() and kept.read_text("utf-8") != json.dumps(manifest, indent=1):
            raise Fault(
                f"{partial}: begun with another encoder, --family, --max_length or corpus; remove it"
            )
        write_file(kept, json.dumps(manifest, indent=1))
        if encoders:
            build_dense(corpus, encoders, partial, args.type)
        else:
            texts = tqdm(corpus.texts(), total=len(corpus), desc="reading", unit=" passages")
            BM25.build(texts).index.save(partial, show_progress=False)
        os.replace(partial, out)
    except stop.Stopped:
        raise Fault(f"\nstopped; the same command resumes with the vectors in {partial}") from None
    except (
        OSError,
        RuntimeError,
    ) as e:  # RuntimeError: FAISS's, for instance if it does not know the --type
        where = f"{partial}, --type {args.type}" if encoders else partial
        raise Fault(f"{where}: {e}; the same command resumes with what is there") from None
    open_index(args.index, corpus)  # compares some vectors with their passages
    print(f"made {out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e9:.3f} GB")


if __name__ == "__main__":
    with one_line(), stop.listening(), stop.may_stop():
        main()
