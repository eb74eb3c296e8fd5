"""Queries -> rows of the corpus: BM25, vectors under FAISS, or both. An index is a directory, or a FAISS file."""

import json
import re
from pathlib import Path

import bm25s
import numpy as np

from retrieval.corpus import Corpus

Hits = list[tuple[int, float]]  # (row of the corpus, score), best first


def words(text: str) -> list[str]:
    """Returns the lower-cased words of a text; stop words stay, nothing is stemmed."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """BM25 with Lucene's formula, k1 = 1.5, b = 0.75 (bm25s, arXiv 2407.03618)."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25, vocabulary: dict[str, int]):
        self.index, self.vocabulary = index, vocabulary

    @classmethod
    def build(cls, texts, progress: bool = False) -> "BM25":
        """Indexes an iterable of texts, in memory; SystemExit if no text has a word."""
        vocabulary: dict[str, int] = {}
        tokens = [[vocabulary.setdefault(w, len(vocabulary)) for w in words(text)] for text in texts]
        if not vocabulary:
            raise SystemExit("no passage of the corpus has a word in it; check the file given as --corpus")
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, dtype="float64")
        index.index((tokens, vocabulary), create_empty_token=False, show_progress=progress)
        return cls(index, vocabulary)

    @classmethod
    def open(cls, folder: Path) -> "BM25":
        """Memory-maps what `save` wrote."""
        index = bm25s.BM25.load(folder, mmap=True)
        return cls(index, index.vocab_dict)

    def save(self, folder: Path) -> None:
        self.index.save(folder, show_progress=False)

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows with score > 0; ties in corpus order."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> Hits:
        tokens = [self.vocabulary[w] for w in words(query) if w in self.vocabulary]
        # Rounded to fp32, so that scores which tie on paper tie here too, in whatever order they were added.
        scores = self.index.get_scores_from_ids(tokens).astype(np.float32)  # (passages,)
        k = min(k, len(scores))
        # bm25s's own top-k (argpartition) orders ties arbitrarily; a stable sort of all passages is slow.
        threshold = np.partition(scores, -k)[-k]
        hits = np.flatnonzero((scores >= threshold) & (scores > 0))
        hits = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return list(zip(hits.tolist(), scores[hits].tolist(), strict=True))


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

    A directory knows its encoder; `encoder` and `family` are for a FAISS file. `nprobe` is the number of an IVF
    index's cells that a query visits, `ef` the width of a search in an HNSW graph. The file is memory-mapped, or with
    `shard_gpus` read once and split over the visible GPUs in fp16.
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
        except (OSError, ValueError) as e:
            raise SystemExit(f"{folder / 'index.json'}: {getattr(e, 'strerror', None) or e}; {todo}") from None
    for field, here in (("passages", len(corpus)), ("bytes", corpus.size)):
        if (there := made.get(field, here)) != here:
            raise SystemExit(
                f"--index {path}: made from {there:,} {field}, {corpus.path} has {here:,}; give its corpus"
            )
    if made["encoder"] == "bm25":
        return BM25.open(folder)

    from retrieval.encoder import Encoder  # here: torch takes seconds, and BM25 needs none

    index = read_faiss(folder / made["file"])
    if index.ntotal != len(corpus):
        have = f"{index.ntotal:,} vectors, {corpus.path} has {len(corpus):,} passages"
        raise SystemExit(f"--index {path}: {have}; give its corpus")
    model = Encoder(made["encoder"], made["family"], made["max_length"], device)
    if index.d != model.dimension:
        have = f"vectors of {index.d}, {model.name} makes {model.dimension}"
        raise SystemExit(f"--index {path}: {have}; give its --encoder")
    look_alike(index, corpus, model, path)
    set_width(index, nprobe, ef)
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

    same = faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        try:
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_MMAP | same)
        except RuntimeError:  # IVF lists within the file: they have a map of their own kind
            return faiss.read_index(str(path), faiss.IO_FLAG_MMAP | same)
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
    elif kind_of(index) == "IVF":
        faiss.extract_index_ivf(index).nprobe = nprobe


def look_alike(index, corpus: Corpus, encoder, path: str) -> None:
    """Warns where vectors of the index are not those of their passages: another encoder, prefix or corpus order."""
    rows = sorted({len(corpus) * k // 4 for k in range(4)})
    try:
        there = np.stack([index.reconstruct(row) for row in rows])  # (4, d)
    except RuntimeError:  # an index that cannot give its vectors back, as IVF without its map
        return
    here = encoder.passages([corpus[row]["contents"] for row in rows])
    cosine = (there * here).sum(1) / np.linalg.norm(there, axis=1)
    if cosine.min() < 0.9:
        row = rows[int(cosine.argmin())]
        print(
            f"warning: --index {path}: vector {row} is not like passage {row} (cosine {cosine.min():.2f}); "
            f"check --encoder, --family ({encoder.family}) and that the corpus is in the index's order",
            flush=True,
        )
