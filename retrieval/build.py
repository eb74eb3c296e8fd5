"""Builds an index: passages -> vectors -> FAISS, streaming, with one process per GPU, resumable.

    python retrieval_server.py build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5 --type flat

All work happens in `<index>.partial/`, which is renamed to `<index>` once it has been checked. Vectors are written in
place, chunk by chunk, into a file that is a flat FAISS index from its first byte; one byte of `done` per chunk marks
those on disk. After a kill the same command resumes with the missing chunks, and with the missing blocks of IVF; HNSW
is added again from the vectors, in memory, and BM25 starts over.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path

import faiss
import numpy as np
import psutil
import torch
from faiss.contrib.ondisk import merge_ondisk
from tqdm import tqdm

from plumbing.faults import Fault
from retrieval.bm25 import BM25, words
from retrieval.corpus import Corpus
from retrieval.encoder import FAMILIES, Encoder
from retrieval.index import Dense, read_faiss, record, set_width
from retrieval.vectors import CHUNK, encode, vectors_of

MADE = re.compile(  # what `build` writes into its directory
    r"((build|index)\.json|lock|done|scores|rows|(vectors|index|trained|block\d+)\.faiss|lists\.ivfdata"
    r"|(data|indices|indptr|vocab|params)(\.csc)?\.index\.(npy|json))(\.tmp)?"
)
BLOCK = 1 << 18  # vectors added to an IVF or HNSW index at once


def cells(n: int) -> int:
    """Returns the number of cells for an IVF index of n vectors: a power of 2 up to 4 sqrt(n), as FAISS advises."""
    return 1 << int(np.log2(max(1, min(4 * n**0.5, n / 39))))  # k-means wants 39 vectors a cell


def factory(kind: str, n: int) -> str:
    """Returns FAISS's name for an index type over n vectors; "" for a type that `build` does not make."""
    names = {"flat": "Flat", "ivf": f"IVF{cells(n)},Flat", "ivf-sq8": f"IVF{cells(n)},SQ8", "hnsw": "HNSW32,Flat"}
    name = names.get(kind, kind)
    return name if re.fullmatch(r"(IVF\d+,|HNSW\d+,)?(Flat|SQ8|SQfp16)", name) else ""


def expected(name: str, n: int, d: int) -> dict[str, float]:
    """Returns the bytes for an index of n vectors of d numbers: on disk, on disk at most, in memory while building.

    `name` is FAISS's. Flat: 4 d per vector, written in place. IVF: 8 more for the id, and the vectors stay beside the
    lists and their blocks until the end; memory holds one block, and 64 training vectors per cell. HNSW and others are
    built in memory.
    """
    flat = 4 * d * n
    code = d if "SQ8" in name else 2 * d if "SQfp16" in name else 4 * d
    if name == "Flat":
        return {"disk": flat, "disk_peak": flat, "memory": 4 * d * CHUNK}
    if name.startswith("IVF"):
        nlist = int(name[3:].partition(",")[0])
        lists = (code + 8) * n + 4 * d * nlist
        return {
            "disk": lists,
            "disk_peak": flat + 2 * lists,
            "memory": 4 * d * min(n, 64 * nlist) + (code + 4 * d) * min(n, BLOCK),
        }
    m = re.search(r"HNSW(\d*)", name)  # M neighbours, 32 by default; twice as many on the ground level
    links = 4 * (2 * int(m[1] or 32) + 1) + 12 if m else 0  # on average 1 more above the ground; bookkeeping
    return {"disk": (code + links) * n, "disk_peak": flat + (code + links) * n, "memory": (code + 2 * links) * n}


def expected_bm25(n: int, distinct: float) -> dict[str, float]:
    """Returns the same for BM25 over n passages with `distinct` different words each."""
    postings = distinct * n  # 8 bytes per score, 4 per row
    memory = min(1e9, 100 * postings) + 16 * n  # the vocabulary, at most 1 GB; lengths
    return {"disk": 12 * postings, "disk_peak": 24 * postings, "memory": memory}


# --- index ---


def make_index(name: str, partial: Path, d: int) -> Path:
    """Makes the FAISS index `name` from `partial/vectors.faiss`; returns its path."""
    out, source = partial / "index.faiss", partial / "vectors.faiss"
    if out.exists():  # an earlier run got this far
        return out
    if name == "Flat":
        os.replace(source, out)
        return out
    x = vectors_of(source, d)
    n = len(x)
    index = faiss.index_factory(d, name, faiss.METRIC_INNER_PRODUCT)
    ivf = name.startswith("IVF")
    trained = partial / "trained.faiss"
    if not index.is_trained and trained.exists():
        index = faiss.read_index(str(trained))
    elif not index.is_trained:
        sample = min(n, 64 * faiss.extract_index_ivf(index).nlist if ivf else 1 << 16)
        print(f"training {name} on {sample:,} vectors", flush=True)
        rows = np.sort(np.random.default_rng(0).choice(n, sample, replace=False))
        index.train(np.ascontiguousarray(x[rows]))
        _write(index, trained)
    blocks = []
    with tqdm(total=n, desc=f"adding to {name}", unit=" vectors") as bar:
        for first in range(0, n, BLOCK):
            vectors = np.ascontiguousarray(x[first : first + BLOCK])
            blocks.append(partial / f"block{first // BLOCK}.faiss")
            if ivf and not blocks[-1].exists():
                block = faiss.read_index(str(trained))
                block.add_with_ids(vectors, np.arange(first, first + len(vectors)))
                _write(block, blocks[-1])
            elif not ivf:
                for part in np.array_split(vectors, max(1, len(vectors) >> 13)):
                    index.add(part)
                    bar.update(len(part))
            bar.update(first + len(vectors) - bar.n)
    if ivf:  # merge on disk: the lists never have to fit into memory
        (partial / "lists.ivfdata").unlink(missing_ok=True)
        merge_ondisk(index, [str(block) for block in blocks], str(partial / "lists.ivfdata"))
    _write(index, out)
    return out


def _write(index, path: Path) -> None:
    temporary = f"{path}.tmp"
    faiss.write_index(index, temporary)
    os.replace(temporary, path)


def check(index, corpus: Corpus, encoder: Encoder, name: str) -> float:
    """Returns the share of 64 passages that find themselves first; raises Fault if index and corpus do not match."""
    if (index.ntotal, index.d) != (len(corpus), encoder.dimension):
        vectors = f"{index.ntotal:,} vectors of {index.d} numbers"
        raise Fault(f"check failed: {vectors} for {len(corpus):,} passages; rebuild the index")
    rows = sorted({len(corpus) * k // 64 for k in range(64)})
    queries = encoder.passages([corpus[row]["contents"] for row in rows])  # (64, d)
    nearest = [hits[0][0] if hits else 0 for hits in Dense(encoder, index, name).nearest(queries, 1)]
    # Compare vectors, not row numbers: an encoder may not distinguish two passages.
    found = encoder.passages([corpus[row]["contents"] for row in nearest])  # (64, d)
    share = float(((queries * found).sum(1) > 0.999).mean())
    if share < (0.99 if name == "Flat" else 0.5):
        raise Fault(f"check failed: only {share:.0%} of {len(rows)} passages find themselves first; rebuild the index")
    print(f"checked {index.ntotal:,} vectors of {index.d}; {share:.0%} of {len(rows)} passages find themselves first")
    return share


# --- the command ---


def main(argv: list[str]) -> None:
    """Builds the index described by the command line `argv`; raises Fault if it cannot."""
    parser = argparse.ArgumentParser("build", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = '.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}'
    parser.add_argument("--corpus", required=True, help=rows)
    parser.add_argument("--encoder", required=True, help="a BERT-type model (Hugging Face id or directory), or bm25")
    parser.add_argument("--index", required=True, help="directory to create")
    parser.add_argument("--type", default="flat", help="flat, ivf, ivf-sq8, hnsw, or FAISS's IVF4096,SQfp16 (flat)")
    parser.add_argument("--family", default="", choices=["", *FAMILIES], help="prefixes and pooling (from the name)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens per passage (256)")
    parser.add_argument("--workers", type=int, default=0, help="processes (one per GPU; 1 without a GPU)")
    parser.add_argument("--yes", action="store_true", help="build even if disk or memory seem too small")
    args = parser.parse_args(argv)
    out = Path(args.index)
    _require_new(out)
    if args.max_length < 8 or args.workers < 0:
        parser.error("--max_length must be at least 8, --workers at least 0")
    corpus = Corpus(args.corpus)
    rerun = "the same command " + ("starts over" if args.encoder == "bm25" else "resumes with the vectors on disk")
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if strangers := sorted(path.name for path in partial.iterdir() if not MADE.fullmatch(path.name)):
            raise Fault(
                f"{partial}: holds {strangers[0]}, which `build` did not make; move it, or give another --index"
            )
        with open(partial / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _require_new(out)  # another build may have finished meanwhile
            meta = _bm25(args, corpus, partial) if args.encoder == "bm25" else _dense(args, corpus, partial)
            parts = [p for p in partial.iterdir() if p.name in ("index.faiss", "lists.ivfdata") or ".index." in p.name]
            meta |= {"passages": len(corpus), "digest": corpus.digest}
            _write_json(partial / "index.json", meta | {"files": {p.name: record(p) for p in parts}})
            for path in partial.iterdir():
                kept = path in parts or path.name in ("index.json", "build.json", "lock")
                if not kept and MADE.fullmatch(path.name):
                    path.unlink()  # intermediate vectors and blocks
            os.replace(partial, out)
            for name in ("build.json", "lock"):
                (out / name).unlink()
    except BlockingIOError:
        raise Fault(f"--index {out}: another process is building it; wait for it") from None
    except KeyboardInterrupt:
        raise Fault(f"\nstopped; {rerun} ({partial})") from None
    except OSError as e:
        raise Fault(f"{e.filename or partial}: {e.strerror}; {rerun}") from None
    except RuntimeError as e:  # from FAISS, for instance if the disk is full
        raise Fault(f"{partial}: {str(e).splitlines()[0].rsplit('failed: ', 1)[-1]}; {rerun}") from None
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"made {out}: {_size(size)}")


def _require_new(out: Path) -> None:
    if out.exists():
        raise Fault(f"--index {out}: already exists; remove it or name another directory")


def _write_json(path: Path, value: dict) -> None:
    Path(f"{path}.tmp").write_text(json.dumps(value, indent=1))
    os.replace(f"{path}.tmp", path)


def _plan(args, corpus: Corpus, partial: Path, name: str, settings: dict) -> None:
    """Records the settings of the build; raises Fault if `partial` was started with different ones."""
    plan = settings | {"type": name, "passages": len(corpus), "digest": corpus.digest}
    path = partial / "build.json"
    try:
        recorded = dict(json.loads(path.read_text())) if path.exists() else plan
    except (ValueError, TypeError, RecursionError):
        raise Fault(f"{path}: damaged; remove {partial} or give another --index") from None
    if recorded != plan:
        differences = ", ".join(f"{k} {recorded.get(k)}" for k in plan if recorded.get(k) != plan[k] and k != "digest")
        differences = differences or "other passages"
        raise Fault(f"{partial}: started as a different build ({differences}); remove it or give another --index")
    _write_json(path, plan)


def _size(b: float) -> str:
    return f"{b / 1e9:.2f} GB" if b > 5e8 else f"{b / 1e6:.1f} MB"


def _announce(args, corpus: Corpus, partial: Path, index: str, need: dict[str, float], seconds: float) -> None:
    """Prints the disk, memory and time that the build needs; raises Fault if disk or memory is too small."""
    written = sum(p.stat().st_blocks * 512 for p in partial.iterdir())  # by an earlier run of this build
    free = {"disk": shutil.disk_usage(partial).free + written, "memory": psutil.virtual_memory().available}
    duration = f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"
    print(
        f"corpus  {corpus.path}: {len(corpus):,} passages, {_size(corpus.size)}\n"
        f"index   {index} -> {args.index}\n"
        f"disk    {_size(need['disk'])}, while building {_size(need['disk_peak'])} ({_size(free['disk'])} free)\n"
        f"memory  {_size(need['memory'])} on top of the processes themselves ({_size(free['memory'])} free)\n"
        f"time    about {duration}",
        flush=True,
    )
    lacking = [name for name, key in (("disk", "disk_peak"), ("memory", "memory")) if need[key] > free[name]]
    if lacking and not args.yes:
        raise Fault(f"not enough {' and '.join(lacking)}; choose another --type, or --yes to try anyway")


def _bm25(args, corpus: Corpus, partial: Path) -> dict:
    _plan(args, corpus, partial, "bm25", {"encoder": "bm25"})
    rows = sorted({len(corpus) * k // 2048 for k in range(2048)})
    start = time.perf_counter()
    sample = [corpus[row]["contents"] for row in rows]
    BM25.build(lambda: sample)
    seconds = (time.perf_counter() - start) / len(rows) * len(corpus)
    need = expected_bm25(len(corpus), sum(len(set(words(text))) for text in sample) / len(rows))
    _announce(args, corpus, partial, "BM25", need, seconds)
    passes = iter(("counting words", "scoring"))  # `texts` is called once for each

    def texts():
        return tqdm(corpus.texts(), total=len(corpus), desc=next(passes), unit=" passages")

    BM25.build(texts, partial)
    return {"encoder": "bm25"}


def _dense(args, corpus: Corpus, partial: Path) -> dict:
    n = len(corpus)
    name = factory(args.type, n)
    if not name:
        raise Fault(f"--type {args.type}: `build` does not make it; give flat, ivf, ivf-sq8, hnsw or IVF1024,SQ8")
    if name.startswith("IVF") and int(name[3:].partition(",")[0]) > n:
        raise Fault(f"--type {args.type}: more cells than the {n:,} passages; give ivf or fewer cells")
    encoder = Encoder(args.encoder, args.family, args.max_length)
    model = os.path.abspath(args.encoder) if os.path.isdir(args.encoder) else args.encoder
    settings = {"encoder": model, "family": encoder.family, "max_length": encoder.max_length}
    _plan(args, corpus, partial, name, settings)
    gpus = torch.cuda.device_count()
    workers = args.workers or gpus or 1
    devices = [f"cuda:{k % gpus}" if gpus else "cpu" for k in range(workers)]
    remaining = n
    if (partial / "done").exists():
        remaining = min(n, (partial / "done").read_bytes().count(0) * CHUNK)
    per_passage = _seconds_per_passage(encoder, corpus) / (workers if gpus else 1)
    seconds = remaining * per_passage + _seconds_to_add(name, n, encoder.dimension)
    description = (
        f"{name} of {encoder.name} ({encoder.family}: {encoder.pooling} pooling; {encoder.dimension} numbers, "
        f"{encoder.max_length} tokens), {workers} x {devices[0].partition(':')[0]}"
    )
    _announce(args, corpus, partial, description, expected(name, n, encoder.dimension), seconds)
    if not (partial / "index.faiss").exists():
        encode({"corpus": args.corpus, "digest": corpus.digest} | settings, partial, n, encoder.dimension, devices)
    path = make_index(name, partial, encoder.dimension)
    index = read_faiss(path)
    set_width(index, 64, 128)
    check(index, corpus, encoder, name)
    return settings | {"file": path.name, "type": name}


def _seconds_per_passage(encoder: Encoder, corpus: Corpus) -> float:
    """Returns the time to encode a passage, measured on random ones for 3 seconds, or on a twentieth of the corpus."""
    batch = 32 if encoder.device == "cpu" else CHUNK  # a GPU takes more to fill
    rows = np.random.default_rng(0).integers(len(corpus), size=(1 + len(corpus) // (20 * batch), batch))
    encoder.passages([corpus[row]["contents"] for row in rows[0]])  # the first call is slow
    start, k = time.perf_counter(), 0
    while time.perf_counter() - start < 3 and k < len(rows):
        encoder.passages([corpus[row]["contents"] for row in rows[k]])
        k += 1
    return (time.perf_counter() - start) / k / batch


def _seconds_to_add(name: str, n: int, d: int) -> float:
    """Returns an estimate of the seconds to build the index from finished vectors, scaled from a short measurement."""
    if name.startswith("IVF"):
        nlist = int(name[3:].partition(",")[0])
        a = np.ones((1024, 1024), dtype=np.float32)
        start = time.perf_counter()
        for _ in range(4):
            a @ a
        seconds_per_flop = (time.perf_counter() - start) / 4 / 2 / 1024**3
        # 10 rounds of k-means over 64 vectors a cell, then each vector is assigned once
        return (10 * 64 * nlist + n) * nlist * d * 2 * seconds_per_flop
    if "HNSW" in name:
        seconds = []
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal((2048, d)).astype(np.float32)
            index = faiss.index_factory(d, name, faiss.METRIC_INNER_PRODUCT)
            index.train(x)
            start = time.perf_counter()
            index.add(x)
            seconds.append(time.perf_counter() - start)
        # 2.5: a larger graph does not fit into the caches (LOG.md)
        return 2.5 * float(np.median(seconds)) / 2048 * n * np.log(n + 2) / np.log(2048)
    return 0.0
