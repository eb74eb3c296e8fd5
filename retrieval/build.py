"""Building an index: passages -> vectors -> FAISS, streaming, in as many processes as there are GPUs, resumable.

    python retrieval_server.py build --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --index wiki-e5 --type flat

Everything happens in `<index>.partial/`, which is renamed to `<index>` when it has been checked. Vectors are written
in place into a file that is a flat FAISS index from its first byte, chunk by chunk; a byte of `done` per chunk says
which are on the disk. After a kill the same command goes on with the chunks that are missing (IVF: also with the blocks
that are; HNSW is added anew, in memory; BM25 begins again).
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

from retrieval.bm25 import BM25, words
from retrieval.corpus import Corpus
from retrieval.encoder import FAMILIES, Encoder
from retrieval.index import Dense, read_faiss, set_width
from retrieval.vectors import CHUNK, encode, vectors_of

BLOCK = 1 << 18  # vectors that are added to an IVF or HNSW index at once


def cells(n: int) -> int:
    """The number of cells of an IVF index over n vectors: a power of 2 up to 4 sqrt(n), as FAISS advises."""
    return 1 << int(np.log2(max(1, min(4 * n**0.5, n / 39))))  # k-means wants 39 vectors a cell


def factory(kind: str, n: int) -> str:
    """FAISS's name of an index type for n vectors; "" for what `build` does not make."""
    names = {"flat": "Flat", "ivf": f"IVF{cells(n)},Flat", "ivf-sq8": f"IVF{cells(n)},SQ8", "hnsw": "HNSW32,Flat"}
    name = names.get(kind, kind)
    return name if re.fullmatch(r"(IVF\d+,|HNSW\d+,)?(Flat|SQ8|SQfp16)", name) else ""


def expected(name: str, n: int, d: int) -> dict[str, float]:
    """What an index of n vectors of d numbers takes, in bytes: on disk at the end and on the way, in memory to build.

    `name` is FAISS's. Flat: 4 d a vector, written in place. IVF: 8 more for the id, and the vectors stay beside the
    lists and their blocks until the end; memory for a block and for 64 training vectors a cell. HNSW and others are
    built in memory.
    """
    flat = 4 * d * n
    code = d if "SQ8" in name else 2 * d if "SQfp16" in name else 4 * d
    if name == "Flat":
        return {"disk": flat, "way": flat, "build": 4 * d * CHUNK}
    if name.startswith("IVF"):
        nlist = int(name[3:].partition(",")[0])
        lists = (code + 8) * n + 4 * d * nlist
        return {
            "disk": lists,
            "way": flat + 2 * lists,
            "build": 4 * d * min(n, 64 * nlist) + (code + 4 * d) * min(n, BLOCK),
        }
    m = re.search(r"HNSW(\d*)", name)  # M neighbours, twice as many on the ground level; 32 if not said
    links = 4 * (2 * int(m[1] or 32) + 1) + 12 if m else 0  # 1 above the ground on average; bookkeeping
    return {"disk": (code + links) * n, "way": flat + (code + links) * n, "build": (code + 2 * links) * n}


def expected_bm25(n: int, distinct: float) -> dict[str, float]:
    """The same for BM25 over n passages of so many different words each."""
    postings = distinct * n  # 8 bytes a score, 4 a row
    return {"disk": 12 * postings, "way": 24 * postings, "build": min(1e9, 100 * postings) + 16 * n}  # vocabulary


# --- index ---


def make_index(name: str, partial: Path, d: int) -> Path:
    """Makes the FAISS index `name` of `partial/vectors.faiss`; returns its file."""
    out, source = partial / "index.faiss", partial / "vectors.faiss"
    if out.exists():  # an earlier run came this far
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
            some = np.ascontiguousarray(x[first : first + BLOCK])
            blocks.append(partial / f"block{first // BLOCK}.faiss")
            if ivf and not blocks[-1].exists():
                block = faiss.read_index(str(trained))
                block.add_with_ids(some, np.arange(first, first + len(some)))
                _write(block, blocks[-1])
            elif not ivf:
                for part in np.array_split(some, max(1, len(some) >> 13)):
                    index.add(part)
                    bar.update(len(part))
            bar.update(first + len(some) - bar.n)
    if ivf:  # merged on the disk, so the lists are never in memory as a whole
        (partial / "lists.ivfdata").unlink(missing_ok=True)
        merge_ondisk(index, [str(block) for block in blocks], str(partial / "lists.ivfdata"))
    _write(index, out)
    return out


def _write(index, path: Path) -> None:
    temporary = f"{path}.tmp"
    faiss.write_index(index, temporary)
    os.replace(temporary, path)


def check(index, corpus: Corpus, encoder: Encoder, name: str) -> float:
    """Returns the share of 64 passages that find themselves first; SystemExit if index and corpus do not fit."""
    if (index.ntotal, index.d) != (len(corpus), encoder.dimension):
        there = f"{index.ntotal:,} vectors of {index.d}"
        raise SystemExit(f"check failed: {there} for {len(corpus):,} passages; build anew")
    rows = sorted({len(corpus) * k // 64 for k in range(64)})
    here = encoder.passages([corpus[row]["contents"] for row in rows])
    found = [hits[0][0] if hits else 0 for hits in Dense(encoder, index, name).nearest(here, 1)]
    # by the vectors, not the row: an encoder may not tell a passage from its twin
    there = encoder.passages([corpus[row]["contents"] for row in found])
    share = float(((here * there).sum(1) > 0.999).mean())
    if share < (0.99 if name == "Flat" else 0.5):
        raise SystemExit(f"check failed: only {share:.0%} of {len(rows)} passages find themselves first; build anew")
    print(f"checked {index.ntotal:,} vectors of {index.d}; {share:.0%} of {len(rows)} passages find themselves first")
    return share


# --- the command ---


def main(argv: list[str]) -> None:
    """Builds what the command line asks for; SystemExit with one line where it cannot."""
    parser = argparse.ArgumentParser("build", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = '.jsonl or .parquet: {"id", "contents"} or {"id", "title", "text"}'
    parser.add_argument("--corpus", required=True, help=rows)
    parser.add_argument("--encoder", required=True, help="a BERT-type model (Hugging Face id or directory), or bm25")
    parser.add_argument("--index", required=True, help="directory to make")
    parser.add_argument("--type", default="flat", help="flat, ivf, ivf-sq8, hnsw, or as IVF4096,SQfp16 (flat)")
    parser.add_argument("--family", default="", choices=["", *FAMILIES], help="prefixes and pooling (by the name)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a passage (256)")
    parser.add_argument("--workers", type=int, default=0, help="processes (one a GPU; without a GPU 1)")
    parser.add_argument("--yes", action="store_true", help="build even where disk or memory look too small")
    args = parser.parse_args(argv)
    out = Path(args.index)
    _must_be_new(out)
    if args.max_length < 8 or args.workers < 0:
        parser.error("--max_length is at least 8, --workers at least 0")
    corpus = Corpus(args.corpus)
    kept = "the same command " + (
        "begins again" if args.encoder == "bm25" else "goes on with the vectors that are there"
    )
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _must_be_new(out)  # another build may have ended since
            made = _bm25(args, corpus, partial) if args.encoder == "bm25" else _dense(args, corpus, partial)
            parts = [p for p in partial.iterdir() if p.name in ("index.faiss", "lists.ivfdata") or ".index." in p.name]
            made |= {"passages": len(corpus), "digest": corpus.digest}
            _write_json(partial / "index.json", made | {"files": {p.name: p.stat().st_size for p in parts}})
            for path in partial.iterdir():
                if path not in parts and path.name not in ("index.json", "build.json", "lock"):
                    path.unlink()  # vectors and blocks on the way
            os.replace(partial, out)
            for note in ("build.json", "lock"):
                (out / note).unlink()
    except BlockingIOError:
        raise SystemExit(f"--index {out}: another process is building it; wait for it") from None
    except KeyboardInterrupt:
        raise SystemExit(f"\nstopped; {kept} ({partial})") from None
    except OSError as e:
        raise SystemExit(f"{e.filename or partial}: {e.strerror}; {kept}") from None
    except RuntimeError as e:  # FAISS: a full disk, for one
        raise SystemExit(f"{partial}: {str(e).splitlines()[0].rsplit('failed: ', 1)[-1]}; {kept}") from None
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"made {out}: {_size(size)}")


def _must_be_new(out: Path) -> None:
    if out.exists():
        raise SystemExit(f"--index {out}: exists; remove it or name another directory")


def _write_json(path: Path, value: dict) -> None:
    Path(f"{path}.tmp").write_text(json.dumps(value, indent=1))
    os.replace(f"{path}.tmp", path)


def _plan(args, corpus: Corpus, partial: Path, name: str, settings: dict) -> None:
    """Notes what is being built, so that only the same build is gone on with."""
    plan = settings | {"type": name, "passages": len(corpus), "digest": corpus.digest}
    noted = partial / "build.json"
    if noted.exists() and (there := json.loads(noted.read_text())) != plan:
        other = ", ".join(f"{k} {there.get(k)}" for k in plan if there.get(k) != plan[k] and k != "digest")
        other = other or "other passages"
        raise SystemExit(f"{partial}: begun as another build ({other}); remove it or give another --index")
    _write_json(noted, plan)


def _size(b: float) -> str:
    return f"{b / 1e9:.2f} GB" if b > 5e8 else f"{b / 1e6:.1f} MB"


def _announce(args, corpus: Corpus, partial: Path, what: str, need: dict[str, float], seconds: float) -> None:
    """Prints what the build takes; SystemExit where disk or memory do not suffice."""
    disk = shutil.disk_usage(partial).free + sum(p.stat().st_blocks * 512 for p in partial.iterdir())
    memory = psutil.virtual_memory().available
    hours = f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"
    print(
        f"corpus  {corpus.path}: {len(corpus):,} passages, {_size(corpus.size)}\n"
        f"index   {what} -> {args.index}\n"
        f"disk    {_size(need['disk'])}, on the way {_size(need['way'])} ({_size(disk)} free)\n"
        f"memory  {_size(need['build'])} beside the programs ({_size(memory)} free)\n"
        f"time    about {hours}",
        flush=True,
    )
    short = [w for w, a, b in (("disk", need["way"], disk), ("memory", need["build"], memory)) if a > b]
    if short and not args.yes:
        raise SystemExit(f"not enough {' and '.join(short)}; choose another --type, or --yes to try all the same")


def _bm25(args, corpus: Corpus, partial: Path) -> dict:
    _plan(args, corpus, partial, "bm25", {"encoder": "bm25"})
    rows = sorted({len(corpus) * k // 2048 for k in range(2048)})
    start = time.perf_counter()
    sample = [corpus[row]["contents"] for row in rows]
    BM25.build(lambda: sample)
    seconds = (time.perf_counter() - start) / len(rows) * len(corpus)
    need = expected_bm25(len(corpus), sum(len(set(words(text))) for text in sample) / len(rows))
    _announce(args, corpus, partial, "BM25", need, seconds)
    passes = iter(("counting words", "scoring"))

    def texts():
        return tqdm(corpus.texts(), total=len(corpus), desc=next(passes), unit=" passages")

    BM25.build(texts, partial)
    return {"encoder": "bm25"}


def _dense(args, corpus: Corpus, partial: Path) -> dict:
    n = len(corpus)
    name = factory(args.type, n)
    if not name:
        raise SystemExit(
            f"--type {args.type}: not one that `build` makes; give flat, ivf, ivf-sq8, hnsw or IVF1024,SQ8"
        )
    if name.startswith("IVF") and int(name[3:].partition(",")[0]) > n:
        raise SystemExit(f"--type {args.type}: more cells than the {n:,} passages; give ivf or fewer cells")
    encoder = Encoder(args.encoder, args.family, args.max_length)
    where = os.path.abspath(args.encoder) if os.path.isdir(args.encoder) else args.encoder
    settings = {"encoder": where, "family": encoder.family, "max_length": encoder.max_length}
    _plan(args, corpus, partial, name, settings)
    gpus = torch.cuda.device_count()
    workers = args.workers or gpus or 1
    devices = [f"cuda:{k % gpus}" if gpus else "cpu" for k in range(workers)]
    left = n
    if (partial / "done").exists():
        left = min(n, (partial / "done").read_bytes().count(0) * CHUNK)
    a_passage = _seconds_a_passage(encoder, corpus) / (workers if gpus else 1)
    seconds = left * a_passage + _seconds_to_add(name, n, encoder.dimension)
    what = (
        f"{name} of {encoder.name} ({encoder.family}: {encoder.pooling} pooling; {encoder.dimension} numbers, "
        f"{encoder.max_length} tokens), {workers} x {devices[0].partition(':')[0]}"
    )
    _announce(args, corpus, partial, what, expected(name, n, encoder.dimension), seconds)
    if not (partial / "index.faiss").exists():
        encode({"corpus": args.corpus, "digest": corpus.digest} | settings, partial, n, encoder.dimension, devices)
    path = make_index(name, partial, encoder.dimension)
    index = read_faiss(path)
    set_width(index, 64, 128)
    check(index, corpus, encoder, name)
    return settings | {"file": path.name, "type": name}


def _seconds_a_passage(encoder: Encoder, corpus: Corpus) -> float:
    """Encodes passages from all over the corpus: for 3 seconds, or a twentieth of it."""
    some = 32 if encoder.device == "cpu" else CHUNK  # a GPU needs more to be filled
    rows = np.random.default_rng(0).integers(len(corpus), size=(1 + len(corpus) // (20 * some), some))
    encoder.passages([corpus[row]["contents"] for row in rows[0]])  # the first call is slow
    start, k = time.perf_counter(), 0
    while time.perf_counter() - start < 3 and k < len(rows):
        encoder.passages([corpus[row]["contents"] for row in rows[k]])
        k += 1
    return (time.perf_counter() - start) / k / some


def _seconds_to_add(name: str, n: int, d: int) -> float:
    """A measured guess of what building the index takes once the vectors are there."""
    if name.startswith("IVF"):
        nlist = int(name[3:].partition(",")[0])
        a = np.ones((1024, 1024), dtype=np.float32)
        start = time.perf_counter()
        for _ in range(4):
            a @ a
        a_flop = (time.perf_counter() - start) / 4 / 2 / 1024**3
        return (10 * 64 * nlist + n) * nlist * d * 2 * a_flop  # 10 rounds of k-means, then one assignment each
    if "HNSW" in name:
        seconds = []
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal((2048, d)).astype(np.float32)
            index = faiss.index_factory(d, name, faiss.METRIC_INNER_PRODUCT)
            index.train(x)
            start = time.perf_counter()
            index.add(x)
            seconds.append(time.perf_counter() - start)
        # 2.5: a graph of more vectors than the caches hold (LOG.md)
        return 2.5 * float(np.median(seconds)) / 2048 * n * np.log(n + 2) / np.log(2048)
    return 0.0
