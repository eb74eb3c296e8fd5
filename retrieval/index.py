"""Queries -> rows of the corpus: BM25, vectors under FAISS, or both. An index is a directory, or a FAISS file."""

import json
from pathlib import Path

import numpy as np

from retrieval.bm25 import BM25, Hits
from retrieval.corpus import Corpus


class Dense:
    """Vectors of an encoder under a FAISS index of any kind; the score is their inner product."""

    def __init__(self, encoder, index, name: str):
        self.encoder, self.index, self.name = encoder, index, name

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query its k nearest rows; fewer where an approximate index finds fewer."""
        if not queries:
            return []
        return self.nearest(self.encoder.queries(queries), k)

    def nearest(self, vectors: np.ndarray, k: int) -> list[Hits]:
        """The same for vectors (N, d)."""
        scores, rows = self.index.search(vectors, min(k, self.index.ntotal))  # (N, k)
        sign = 1 if self.index.metric_type == 0 else -1  # an L2 index has distances: less is better
        return [
            sorted(
                ((int(row), sign * float(score)) for row, score in zip(*found, strict=True) if row >= 0),
                key=lambda hit: (-hit[1], hit[0]),
            )
            for found in zip(rows, scores, strict=True)
        ]


class Fused:
    """Several indexes by reciprocal-rank fusion: a row's score is the sum of 1 / (60 + rank) (Cormack et al., 2009)."""

    DEPTH = 100  # ranks that count; the same for every k, so a longer answer begins with the shorter one

    def __init__(self, parts: list):
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows of the fusion; ties in corpus order."""
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
) -> BM25 | Dense:
    """Opens an index directory or a FAISS file (Search-R1's) over `corpus`; SystemExit where they do not fit.

    A directory knows its encoder; `encoder` and `family` go before it, as when the model has moved. `nprobe` is the
    number of an IVF index's cells that a query visits, `ef` the width of a search in an HNSW graph. The file is
    memory-mapped, or with `shard_gpus` read once and split over the visible GPUs in fp16.
    """
    folder = Path(path)
    todo = "give a directory made by `build`, or a FAISS file"
    if folder.is_file():
        if not encoder:
            raise SystemExit(f"--index {path}: a FAISS file; name the model that it was made with by --encoder")
        made = {"encoder": encoder, "family": family, "max_length": 256, "file": folder.name}
        folder = folder.parent
    else:
        try:
            made = json.loads((folder / "index.json").read_text())
            passages, digest, _ = made["passages"], made["digest"], made["encoder"]
            for name, size in made["files"].items():
                if (folder / name).stat().st_size != size:
                    raise SystemExit(f"{folder / name}: not whole, {size:,} bytes were built; copy it again")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            where = getattr(e, "filename", None) or folder / "index.json"
            raise SystemExit(f"{where}: {getattr(e, 'strerror', None) or 'not what `build` wrote'}; {todo}") from None
        if passages != len(corpus):
            have = f"made from {passages:,} passages, {corpus.path} has {len(corpus):,}"
            raise SystemExit(f"--index {path}: {have}; give its corpus")
        if digest != corpus.digest:
            raise SystemExit(f"--index {path}: made from other passages than those of {corpus.path}; give its corpus")
        if made["encoder"] == "bm25":
            return BM25.open(folder)
        made |= {key: value for key, value in (("encoder", encoder), ("family", family)) if value}

    from retrieval.encoder import Encoder  # here: torch takes seconds, and BM25 needs none

    index = read_faiss(folder / made["file"])
    if index.ntotal != len(corpus):
        have = f"{index.ntotal:,} vectors, {corpus.path} has {len(corpus):,} passages"
        raise SystemExit(f"--index {path}: {have}; give its corpus")
    model = Encoder(made["encoder"], made["family"], made["max_length"], device)
    if index.d != model.dimension:
        have = f"vectors of {index.d}, {model.name} makes {model.dimension}"
        raise SystemExit(f"--index {path}: {have}; give its --encoder")
    set_width(index, nprobe, ef)
    look_alike(index, corpus, model, path)
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
        raise SystemExit(f"--shard_gpus: {str(e).splitlines()[0]}; leave it out to search on the CPU") from None


def read_faiss(path: Path):
    """Memory-maps a FAISS file of any kind; SystemExit where it is none."""
    import faiss

    file, beside = str(path), faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        try:
            return faiss.read_index(file, faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_MMAP | beside)
        except RuntimeError:  # IVF lists have a map of their own kind,
            index = faiss.read_index(file, faiss.IO_FLAG_MMAP)
            lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
            if lists.filename != file:  # which this flag leaves out where they are in a file of their own
                index = faiss.read_index(file, faiss.IO_FLAG_READ_ONLY | beside)
            return index
    except RuntimeError as e:
        why = "no such file" if not path.exists() else str(e).rsplit(": ", 1)[-1].strip()
        raise SystemExit(f"--index {path}: not a FAISS index ({why}); give a file that FAISS wrote") from None


def kind_of(index) -> str:
    """What a FAISS index is, as "Flat", "IVF" or "HNSW"."""
    name = type(index).__name__.removeprefix("Index")
    return next((kind for kind in ("IVF", "HNSW", "Flat") if kind in name), name)


def set_width(index, nprobe: int, ef: int) -> None:
    """Sets how much of an approximate index a query looks at."""
    import faiss

    if hasattr(inner := faiss.downcast_index(index), "hnsw"):
        inner.hnsw.efSearch = ef
    elif ivf := faiss.try_extract_index_ivf(index):
        ivf.nprobe = nprobe


def look_alike(index, corpus: Corpus, encoder, path: str) -> None:
    """Warns where vectors of the index are not those of their passages: another encoder, prefix or corpus order."""
    rows = sorted({len(corpus) * k // 4 for k in range(4)})
    here = encoder.passages([corpus[row]["contents"] for row in rows])  # (4, d)
    try:
        there = np.stack([index.reconstruct(row) for row in rows])
    except RuntimeError:  # IVF cannot give its vectors back: those of the passages that it takes for them
        found = index.search(here, 1)[1][:, 0]
        there = encoder.passages([corpus[int(row)]["contents"] for row in found])
    cosine = (there * here).sum(1) / np.maximum(np.linalg.norm(there, axis=1), 1e-9)
    if cosine.min() < 0.9:
        row = rows[int(cosine.argmin())]
        print(
            f"warning: --index {path}: vector {row} is not like passage {row} (cosine {cosine.min():.2f}); "
            f"check --encoder, --family ({encoder.family}) and that the corpus is in the index's order",
            flush=True,
        )
