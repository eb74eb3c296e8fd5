"""Builds an index over a corpus: BM25, or the vectors of an encoder in FAISS.

    python -m retrieval.build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5 --type IVF16384,SQ8
    python -m retrieval.build --corpus wiki.jsonl --encoder bm25 --index wiki-bm25

All work happens in `<index>.partial/`, which becomes `<index>` once it is complete. Passages are
encoded on all visible GPUs. After a kill the same command resumes with the vectors on disk; the
index itself is made in memory and starts over.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import torch
from tqdm import tqdm

from plumbing import stop
from plumbing.faults import Fault, one_line
from plumbing.files import write_file
from retrieval import parser_of
from retrieval.bm25 import BM25, WORDS
from retrieval.corpus import Corpus
from retrieval.encoder import Encoder
from retrieval.index import open_index

CHUNK = 256  # passages that an encoder encodes at a time
SAMPLE = 1 << 20  # vectors that IVF's cells and the scalar quantizer are trained on


def encode_corpus(corpus: Corpus, encoders: list[Encoder], path: Path) -> np.ndarray:
    """Appends the vectors that an earlier run has not written; returns those of all, (N, d) fp32,
    memory-mapped."""
    n, d = len(corpus), encoders[0].dimension

    def encode_chunk(encoder: Encoder, first: int) -> np.ndarray:
        rows = range(first, min(first + CHUNK, n))
        return encoder.passages([corpus[row]["contents"] for row in rows])

    with open(path, "ab") as file, ThreadPoolExecutor(len(encoders)) as pool:
        # what an earlier run has written
        done = file.tell() // (4 * d)
        file.truncate(4 * d * done)  # a kill may have cut off a vector
        if shutil.disk_usage(path.parent).free < 4 * d * (n - done):
            raise Fault(
                f"{path.parent}: no room for {4 * d * n / 1e9:.2f} GB of vectors; name another --index"
            )

        # the rest
        with tqdm(total=n, initial=done, desc="encoding", unit=" passages") as bar:
            while done < n:
                for vectors in pool.map(encode_chunk, encoders, range(done, n, CHUNK)):
                    file.write(vectors)
                    done += len(vectors)
                    bar.update(len(vectors))
    return np.memmap(path, np.float32, "r", shape=(n, d))


def fill_index(index: faiss.Index, vectors: np.ndarray) -> faiss.Index:
    """Trains an empty index and adds the vectors, in memory."""
    index.verbose = True
    if not index.is_trained:
        n = len(vectors)
        rows = np.random.default_rng(0).choice(n, min(n, SAMPLE), replace=False)
        index.train(vectors[np.sort(rows)])
    index.add(vectors)
    return index


def main(argv: list[str] | None = None) -> None:
    """Builds the index that the command line describes; raises Fault if it cannot."""
    # the command line
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--encoder", required=True, help="a BERT-type model (Hugging Face id or directory), or bm25"
    )
    add("--index", required=True, help="directory to create")
    add(
        "--type", default="Flat", help="by FAISS's name, such as IVF16384,SQ8 or HNSW32,Flat (Flat)"
    )
    add(
        "--max_length", type=int, help="tokens of a passage that count (256, or the encoder's most)"
    )
    args = parser.parse_args(argv)
    out = Path(args.index)
    if out.exists():
        raise Fault(f"--index {out}: already exists; remove it or name another directory")

    # what the index is of
    corpus = Corpus(args.corpus)
    manifest = {"passages": len(corpus), "digest": corpus.digest}
    encoders = []
    if args.encoder == "bm25":
        manifest |= {"encoder": "bm25", "words": WORDS}
    else:
        encoders = load_encoders(args.encoder, args.family, args.max_length)
        first = encoders[0]
        manifest |= {"encoder": first.name, "family": first.family, "max_length": first.max_length}
        devices = " ".join(encoder.device for encoder in encoders)
        print(f"{len(corpus):,} passages, {first.name} on {devices} -> {args.type}", flush=True)

    # the work
    build_index(corpus, manifest, encoders, out, args.type)
    open_index(args.index, corpus)  # compares some vectors with their passages
    print(f"made {out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e9:.3f} GB")


def load_encoders(model: str, family: str, max_length: int | None) -> list[Encoder]:
    """Loads a model on every visible GPU, or on the CPU."""
    if os.path.isdir(model):
        model = os.path.abspath(model)
    devices = [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu"]
    encoders = [Encoder(model, family, max_length or 256, device) for device in devices]
    most = encoders[0].max_length
    if max_length not in (None, most):
        raise Fault(f"--max_length {max_length}: {model} takes {most} tokens; give at most that")
    return encoders


def build_index(
    corpus: Corpus, manifest: dict, encoders: list[Encoder], out: Path, kind: str
) -> None:
    """Fills `<out>.partial`, with what an earlier call left there, and renames it."""
    partial = out.with_name(f"{out.name}.partial")
    kept, text = partial / "index.json", json.dumps(manifest, indent=1)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if kept.exists() and kept.read_text("utf-8") != text:
            raise Fault(
                f"{partial}: begun with another encoder, --family, --max_length or corpus; remove it"
            )
        write_file(kept, text)

        # its files
        if encoders:
            # before hours of encoding: `kind` may be none of FAISS's
            index = faiss.index_factory(encoders[0].dimension, kind, faiss.METRIC_INNER_PRODUCT)
            file = partial / "vectors"
            fill_index(index, encode_corpus(corpus, encoders, file))
            faiss.write_index(index, str(partial / "index.faiss"))
            file.unlink(missing_ok=True)
        else:
            texts = tqdm(corpus.texts(), total=len(corpus), desc="reading", unit=" passages")
            BM25.build(texts).index.save(partial, show_progress=False)
        os.replace(partial, out)
    except stop.Stopped:
        raise Fault(f"\nstopped; the same command resumes with the vectors in {partial}") from None
    # RuntimeError: FAISS's, as of a --type that it does not know
    except (OSError, RuntimeError) as e:
        where = f"{partial}, --type {kind}" if encoders else partial
        raise Fault(f"{where}: {e}; the same command resumes with what is there") from None


if __name__ == "__main__":
    with one_line(), stop.listening(), stop.may_stop():
        main()
