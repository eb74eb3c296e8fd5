"""Queries -> rows of the corpus: BM25, or vectors under FAISS, from an index directory or a FAISS
file."""

import json
from contextlib import suppress
from pathlib import Path

import bm25s
import numpy as np

from plumbing.faults import Fault
from retrieval.bm25 import BM25, WORDS, Hits
from retrieval.corpus import Corpus


class Dense:
    """An encoder's vectors in a FAISS index of any kind; the score is the inner product."""

    def __init__(self, encoder, index):
        self.encoder, self.index = encoder, index
        self.name = f"{type(index).__name__.removeprefix('Index')} {encoder.name}"

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query its k nearest rows; fewer where an approximate index finds
        fewer."""
        return self.nearest(self.encoder.queries(queries), k)

    def nearest(self, vectors: np.ndarray, k: int) -> list[Hits]:
        """Returns the same for query vectors (N, d)."""
        import faiss

        scores, rows = self.index.search(vectors, min(k, self.index.ntotal))  # (N, k)
        # an L2 index returns distances: smaller is better
        sign = 1 if faiss.is_similarity_metric(self.index.metric_type) else -1
        found = []
        for pairs in map(zip, rows.tolist(), (sign * scores).tolist()):
            hits = [(row, score) for row, score in pairs if row >= 0]
            found.append(sorted(hits, key=lambda hit: (-hit[1], hit[0])))
        return found

    def set_width(self, nprobe: int, ef: int) -> None:
        """Sets how much of an approximate index a query visits: `nprobe` cells for IVF, a beam of
        `ef` for HNSW."""
        import faiss

        for name, width in {"nprobe": nprobe, "efSearch": ef, "quantizer_efSearch": ef}.items():
            # of an index that has no such width, whatever it is wrapped in
            with suppress(RuntimeError):
                faiss.ParameterSpace().set_index_parameter(self.index, name, width)

    def shard(self) -> None:
        """Splits the index over the visible GPUs, fp16; raises Fault if this FAISS sees none."""
        import faiss

        if not getattr(faiss, "get_num_gpus", int)():
            raise Fault(
                "--shard_gpus: this FAISS sees no GPU; pip install faiss-gpu in place of faiss-cpu, or leave it out"
            )
        options = faiss.GpuMultipleClonerOptions()
        options.shard, options.useFloat16 = True, True
        self.index = faiss.index_cpu_to_all_gpus(self.index, options)

    def warn_of_mismatch(self, corpus: Corpus, path: str) -> None:
        """Prints a warning if vectors differ from those of their passages: another encoder, prefix
        or corpus order."""
        import faiss

        rows = sorted({len(corpus) * k // 4 for k in range(4)})
        expected = self.encoder.passages([corpus[row]["contents"] for row in rows])  # (4, d)
        try:
            stored = np.stack([self.index.reconstruct(row) for row in rows])  # (4, d)
            with suppress(RuntimeError):  # PQ keeps vectors roughly
                numbered = isinstance(self.index, faiss.IndexIDMap)
                codec = faiss.downcast_index(self.index.index) if numbered else self.index
                codec = getattr(codec, "storage", codec)
                expected = codec.sa_decode(codec.sa_encode(expected))
        # IVF cannot return its vectors: compare with the passages that it finds instead
        except RuntimeError:
            nearest = self.index.search(expected, 1)[1][:, 0]
            if nearest.max() >= len(corpus):
                raise Fault(
                    f"--index {path}: it has vector {nearest.max()}, {corpus.path} has {len(corpus)} passages; number"
                    " the vectors by their rows, from 0"
                ) from None
            stored = self.encoder.passages([corpus[int(row)]["contents"] for row in nearest])
        lengths = np.linalg.norm(stored, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = (stored * expected).sum(1) / np.maximum(lengths, 1e-9)  # (4,)
        if cosine.min() < 0.9:
            row = rows[int(cosine.argmin())]
            print(
                f"warning: --index {path}: vector {row} does not match passage {row} (cosine {cosine.min():.2f}); "
                f"check --encoder, --family ({self.encoder.family}) and that the corpus is in the index's order",
                flush=True,
            )


def open_index(
    path: str, corpus: Corpus, encoder: str = "", family: str = "", device: str = ""
) -> BM25 | Dense:
    """Opens an index directory, or a FAISS file such as Search-R1's, over `corpus`; raises Fault if
    they do not match.

    A directory records its encoder and family; `encoder` and `family` override them, for instance
    if the model has moved. Arrays and vectors are memory-mapped.
    """
    file, max_length = Path(path), 256
    if not file.is_file():
        manifest = _read_manifest(file, corpus)
        if manifest["encoder"] == "bm25":
            if manifest.get("words") != WORDS:
                raise Fault(f"--index {path}: of another idea of a word; build it again")
            try:
                return BM25(bm25s.BM25.load(path, mmap=True))
            except (OSError, ValueError, EOFError) as e:
                raise Fault(f"--index {path}: damaged ({e}); build it again") from None
        encoder, family = encoder or manifest["encoder"], family or manifest["family"]
        file, max_length = file / "index.faiss", manifest["max_length"]
    elif not encoder:
        raise Fault(f"--index {path}: a FAISS file; name the model that made it with --encoder")

    # here: torch takes seconds to import, and BM25 does not need it
    from retrieval.encoder import Encoder

    # the vectors, and who makes those of queries
    index = read_faiss(file)
    if index.ntotal != len(corpus):
        raise Fault(
            f"--index {path}: {index.ntotal:,} vectors, {corpus.path} has {len(corpus):,} passages; give the"
            " corpus it was built from"
        )
    dense = Dense(Encoder(encoder, family, max_length, device), index)
    if index.d != dense.encoder.dimension:
        raise Fault(
            f"--index {path}: vectors of {index.d} numbers, {encoder} makes {dense.encoder.dimension}; give"
            " the --encoder it was built with"
        )
    dense.warn_of_mismatch(corpus, path)
    return dense


def _read_manifest(folder: Path, corpus: Corpus) -> dict:
    file = folder / "index.json"
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise Fault(
            f"{file}: {getattr(e, 'strerror', e)}; give a directory made by retrieval/build.py, or a FAISS"
            " file"
        ) from None
    if manifest["digest"] != corpus.digest:
        raise Fault(
            f"--index {folder}: built from {manifest['passages']:,} other passages than the {len(corpus):,} of"
            f" {corpus.path}; give the corpus it was built from"
        )
    return manifest


def read_faiss(path: Path):
    """Memory-maps a FAISS file of any kind; raises Fault if it is not one."""
    import faiss

    file, beside = str(path), faiss.IO_FLAG_ONDISK_SAME_DIR
    try:
        try:
            return faiss.read_index(file, faiss.IO_FLAG_MMAP_IFC | beside)
        except RuntimeError:  # IVF lists in a file of their own, which FAISS maps by itself
            return faiss.read_index(file, faiss.IO_FLAG_READ_ONLY | beside)
    except RuntimeError as e:
        raise Fault(
            f"--index {path}: not a FAISS index ({e}); give a file written by FAISS"
        ) from None
