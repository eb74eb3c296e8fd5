"""BM25: queries -> rows of the corpus by shared words; all scores are computed at build time (bm25s)."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import bm25s
import numpy as np

from plumbing.faults import Fault

K1, B = 1.5, 0.75
BLOCK = 1 << 15  # passages whose words are in memory at once

Hits = list[tuple[int, float]]  # (row of the corpus, score), best first


def words(text: str) -> list[str]:
    """Returns the lower-cased words of a text; stop words stay, nothing is stemmed."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """BM25 with Lucene's formula, k1 = 1.5, b = 0.75, stored as an index of bm25s (arXiv 2407.03618)."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25):
        self.index, self.vocabulary = index, index.vocab_dict

    @classmethod
    def open(cls, folder: Path, n: int) -> "BM25":
        """Memory-maps an index of n passages written by `build`; raises ValueError if its parts do not fit together."""
        index = bm25s.BM25.load(folder, mmap=True)
        scores, indptr, rows = (index.scores[name] for name in ("data", "indptr", "indices"))
        V, words = len(indptr) - 1, index.vocab_dict
        if index.scores["num_docs"] != n or not len(scores) == len(rows) == indptr[-1] or indptr[0] or V < 1:
            raise ValueError("its arrays do not fit together")
        places = words.values()
        if len(words) != V or {type(k) for k in places} != {int} or min(places) < 0 or max(places) >= V:
            raise ValueError("its vocabulary is not that of its arrays")
        return cls(index)

    @classmethod
    def build(cls, texts: Callable[[], Iterable[str]], folder: Path | None = None) -> "BM25":
        """Indexes the texts in two passes over them; raises Fault if none has a word.

        The index is in memory, or, given a `folder`, in files there: then memory holds only the vocabulary and one
        block of passages, where bm25s's own `index` takes 40 bytes a word. The arrays are bit-identical to bm25s's.
        """
        df: Counter[str] = Counter()  # word -> number of passages that contain it
        lengths = []
        for text in texts():
            found = words(text)
            lengths.append(len(found))
            df.update(dict.fromkeys(found).keys())
        if not df:
            raise Fault("no passage of the corpus has a word in it; check the file given as --corpus")
        vocabulary = {word: k for k, word in enumerate(df)}
        n_words = np.array(lengths, dtype=np.float64)  # (n,)
        n_passages = np.fromiter(df.values(), dtype=np.float64)  # (V,)
        idf = np.log(1 + (len(lengths) - n_passages + 0.5) / (n_passages + 0.5))
        norm = K1 * (1 - B + B * n_words / n_words.mean())

        indptr = np.concatenate(([0], n_passages.cumsum())).astype(np.int64)
        if folder:
            data = _on_disk(folder / "scores", np.float64, indptr[-1])
            indices = _on_disk(folder / "rows", np.int32, indptr[-1])
        else:
            data, indices = np.empty(indptr[-1]), np.empty(indptr[-1], dtype=np.int32)
        next_slot = indptr[:-1].copy()  # where each word's next passage goes
        stream = iter(texts())
        for first in range(0, len(lengths), BLOCK):
            block = [vocabulary[word] for text in islice(stream, BLOCK) for word in words(text)]
            rows = np.repeat(np.arange(len(lengths[first : first + BLOCK])), lengths[first : first + BLOCK])
            # sorted (word, row) pairs, and how often each occurs
            pairs, tf = np.unique(np.array(block, dtype=np.int64) * BLOCK + rows, return_counts=True)
            word, row = np.divmod(pairs, BLOCK)
            row += first
            distinct, start, count = np.unique(word, return_index=True, return_counts=True)
            slots = next_slot[word] + np.arange(len(word)) - np.repeat(start, count)
            data[slots] = idf[word] * (tf / (tf + norm[row]))
            indices[slots] = row
            next_slot[distinct] += count

        index = bm25s.BM25(method="lucene", k1=K1, b=B, dtype="float64")
        index.vocab_dict, index.nonoccurrence_array = vocabulary, None  # Lucene's formula has no such scores
        index.scores = {"data": data, "indices": indices, "indptr": indptr, "num_docs": len(lengths)}
        if folder:
            index.save(folder, show_progress=False)
            (folder / "scores").unlink()
            (folder / "rows").unlink()
        return cls(index)

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows with score > 0; ties in corpus order."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> Hits:
        tokens = [self.vocabulary[w] for w in words(query) if w in self.vocabulary]
        # Rounded to fp32, so that scores that are equal on paper tie, in whatever order their terms were added.
        scores = self.index.get_scores_from_ids(tokens).astype(np.float32)  # (passages,)
        k = min(k, len(scores))
        # bm25s's own top-k (argpartition) orders ties arbitrarily; a stable sort of all passages is slow.
        threshold = np.partition(scores, -k)[-k]
        hits = np.flatnonzero((scores >= threshold) & (scores > 0))
        hits = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return list(zip(hits.tolist(), scores[hits].tolist(), strict=True))


def _on_disk(path: Path, dtype, n: int) -> np.ndarray:
    """Returns a new array in a file; raises OSError here, rather than crash later, if the disk is too small."""
    array = np.memmap(path, dtype=dtype, mode="w+", shape=int(n))
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as f:
            os.posix_fallocate(f.fileno(), 0, array.nbytes)
    return array
