"""Queries -> rows of the corpus: BM25, vectors under FAISS, or both, from an index directory or a FAISS file."""

import hashlib
import json
from pathlib import Path

import numpy as np

from plumbing.faults import Fault
from retrieval.bm25 import BM25, Hits
from retrieval.corpus import Corpus

SAMPLES, SAMPLE = 256, 4096  # blocks of a file that every start reads, and their bytes


def sampled(path: Path) -> str:
    """Returns a hash of blocks spread evenly over a file; a file of a megabyte or less is read whole."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as f:
        if size <= SAMPLES * SAMPLE:
            digest.update(f.read())
        else:
            for k in range(SAMPLES):
                f.seek((size - SAMPLE) * k // (SAMPLES - 1))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()


def whole(path: Path) -> str:
    """Returns a hash of all of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def record(path: Path) -> dict[str, int | str]:
    """Returns what index.json keeps of a file of the index."""
    return {"size": path.stat().st_size, "sampled": sampled(path), "sha256": whole(path)}


class Dense:
    """An encoder's vectors in a FAISS index of any kind; the score is the inner product."""

    def __init__(self, encoder, index, name: str):
        self.encoder, self.index, self.name = encoder, index, name

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query its k nearest rows; fewer where an approximate index finds fewer."""
        if not queries:
            return []
        return self.nearest(self.encoder.queries(queries), k)

    def nearest(self, vectors: np.ndarray, k: int) -> list[Hits]:
        """Returns the same for query vectors (N, d)."""
        scores, rows = self.index.search(vectors, min(k, self.index.ntotal))  # (N, k)
        sign = 1 if self.index.metric_type == 0 else -1  # an L2 index returns distances: smaller is better
        return [
            sorted(
                ((int(row), sign * float(score)) for row, score in zip(*found, strict=True) if row >= 0),
                key=lambda hit: (-hit[1], hit[0]),
            )
            for found in zip(rows, scores, strict=True)
        ]


class Fused:
    """Reciprocal-rank fusion of several indexes: a row scores the sum of 1 / (60 + rank) (Cormack et al., 2009)."""

    DEPTH = 100  # ranks that count; the same for every k, so a longer answer begins with the shorter one

    def __init__(self, parts: list):
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows after fusion; ties in corpus order."""
        fused = []
        for found in zip(*(part.search(queries, self.DEPTH) for part in self.parts), strict=True):
            scores: dict[int, float] = {}
            for hits in found:
                for rank, (row, _) in enumerate(hits, 1):
                    scores[row] = scores.get(row, 0.0) + 1 / (60 + rank)
            fused.append(sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))[:k])
        return fused


def open_index(
    path: str,
    corpus: Corpus,
    *,
    encoder: str = "",
    family: str = "",
    device: str = "",
    nprobe: int = 64,
    ef: int = 128,
    shard_gpus: bool = False,
    verify: bool = False,
) -> BM25 | Dense:
    """Opens an index directory, or a FAISS file such as Search-R1's, over `corpus`; raises Fault if they do not match.

    A directory records a hash of its files, of which blocks are compared, or, with `verify`, all bytes. It records its
    encoder and family; `encoder` and `family` override them, for instance if the model has
    moved. A query visits `nprobe` cells of an IVF index, and searches an HNSW graph with width `ef`. The file is
    memory-mapped, or, with `shard_gpus`, read once and split over the visible GPUs in fp16.
    """
    folder = Path(path)
    todo = "give a directory made by `build`, or a FAISS file"
    if folder.is_file():
        if not encoder:
            raise Fault(f"--index {path}: a FAISS file; name the model that made it with --encoder")
        meta = {"encoder": encoder, "family": family, "max_length": 256, "file": folder.name}
        folder = folder.parent
    else:
        try:
            meta = json.loads((folder / "index.json").read_text())
            passages, digest, _ = meta["passages"], meta["digest"], meta["encoder"]
            for name, written in meta["files"].items():
                file, size = folder / name, written["size"]
                if file.stat().st_size != size:
                    raise Fault(f"{file}: incomplete, `build` wrote {size:,} bytes; copy it again")
                if sampled(file) != written["sampled"] or (verify and whole(file) != written["sha256"]):
                    raise Fault(f"{file}: not the bytes that `build` wrote; copy it again, or build the index again")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            where = getattr(e, "filename", None) or folder / "index.json"
            raise Fault(f"{where}: {getattr(e, 'strerror', None) or 'not what `build` wrote'}; {todo}") from None
        if passages != len(corpus):
            mismatch = f"built from {passages:,} passages, {corpus.path} has {len(corpus):,}"
            raise Fault(f"--index {path}: {mismatch}; give the corpus it was built from")
        if digest != corpus.digest:
            mismatch = f"built from other passages than {corpus.path} has"
            raise Fault(f"--index {path}: {mismatch}; give the corpus it was built from")
        if meta["encoder"] == "bm25":
            try:
                return BM25.open(folder, len(corpus))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
                raise Fault(f"--index {path}: its BM25 index cannot be read ({e}); build it again") from None
        meta |= {key: value for key, value in (("encoder", encoder), ("family", family)) if value}

    from retrieval.encoder import Encoder  # here: torch takes seconds to import, and BM25 does not need it

    index = read_faiss(folder / meta["file"])
    if index.ntotal != len(corpus):
        mismatch = f"{index.ntotal:,} vectors, {corpus.path} has {len(corpus):,} passages"
        raise Fault(f"--index {path}: {mismatch}; give the corpus it was built from")
    model = Encoder(meta["encoder"], meta["family"], meta["max_length"], device)
    if index.d != model.dimension:
        mismatch = f"vectors of {index.d} numbers, {model.name} makes {model.dimension}"
        raise Fault(f"--index {path}: {mismatch}; give the --encoder it was built with")
    set_width(index, nprobe, ef)
    warn_of_mismatch(index, corpus, model, path)
    name = f"{kind_of(index)} {model.name}"
    if shard_gpus:
        index = _on_gpus(index)
    return Dense(model, index, name)


def _on_gpus(index):
    import faiss

    gpus = getattr(faiss, "get_num_gpus", int)()
    try:
        if not gpus:
            raise RuntimeError("this FAISS sees no GPU (pip install faiss-gpu in place of faiss-cpu)")
        options = faiss.GpuMultipleClonerOptions()
        options.shard, options.useFloat16 = True, True
        return faiss.index_cpu_to_all_gpus(index, options, gpus)
    except RuntimeError as e:
        raise Fault(f"--shard_gpus: {str(e).splitlines()[0]}; leave it out to search on the CPU") from None


def read_faiss(path: Path):
    """Memory-maps a FAISS file of any kind; raises Fault if it is not one."""
    import faiss

    file, beside = str(path), faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        try:
            return faiss.read_index(file, faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_MMAP | beside)
        except RuntimeError:  # IVF lists are mapped in their own way,
            index = faiss.read_index(file, faiss.IO_FLAG_MMAP)
            lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
            if lists.filename != file:  # which this flag skips if they are in a separate file
                index = faiss.read_index(file, faiss.IO_FLAG_READ_ONLY | beside)
            return index
    except RuntimeError as e:
        reason = "no such file" if not path.exists() else str(e).rsplit(": ", 1)[-1].strip()
        raise Fault(f"--index {path}: not a FAISS index ({reason}); give a file written by FAISS") from None


def kind_of(index) -> str:
    """Returns the kind of a FAISS index, "Flat", "IVF" or "HNSW"; any other by its class's name."""
    name = type(index).__name__.removeprefix("Index")
    return next((kind for kind in ("IVF", "HNSW", "Flat") if kind in name), name)


def set_width(index, nprobe: int, ef: int) -> None:
    """Sets how much of an approximate index a query visits: `nprobe` for IVF, `ef` for HNSW."""
    import faiss

    if hasattr(inner := faiss.downcast_index(index), "hnsw"):
        inner.hnsw.efSearch = ef
    elif ivf := faiss.try_extract_index_ivf(index):
        ivf.nprobe = nprobe


def warn_of_mismatch(index, corpus: Corpus, encoder, path: str) -> None:
    """Prints a warning if vectors differ from those of their passages: another encoder, prefix or corpus order."""
    rows = sorted({len(corpus) * k // 4 for k in range(4)})
    expected = encoder.passages([corpus[row]["contents"] for row in rows])  # (4, d)
    try:
        stored = np.stack([index.reconstruct(row) for row in rows])  # (4, d)
    except RuntimeError:  # IVF cannot return its vectors: compare with the passages that it finds instead
        found = index.search(expected, 1)[1][:, 0]
        stored = encoder.passages([corpus[int(row)]["contents"] for row in found])
    cosine = (stored * expected).sum(1) / np.maximum(np.linalg.norm(stored, axis=1), 1e-9)  # (4,)
    if cosine.min() < 0.9:
        row = rows[int(cosine.argmin())]
        print(
            f"warning: --index {path}: vector {row} does not match passage {row} (cosine {cosine.min():.2f}); "
            f"check --encoder, --family ({encoder.family}) and that the corpus is in the index's order",
            flush=True,
        )
