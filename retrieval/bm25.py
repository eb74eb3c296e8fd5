"""BM25: queries -> rows of the corpus by shared words; all scores are computed at build time
(bm25s)."""

from collections.abc import Iterable

import bm25s
import numpy as np

from plumbing.faults import Fault
from plumbing.words import split_words

# kept with an index: how it splits a text
WORDS = split_words("The co-op's \u0130 m², ที่, हिन्दी, 東京 12, u\u0308")
Hits = list[tuple[int, float]]  # (row of the corpus, score), best first


class BM25:
    """BM25 with Lucene's formula, k1 = 1.5, b = 0.75, in an index of bm25s (arXiv 2407.03618)."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25):
        self.index = index

    @classmethod
    def build(cls, texts: Iterable[str]) -> "BM25":
        """Indexes the texts in memory, at 40 bytes a word; raises Fault if none has a word."""
        vocabulary: dict[str, int] = {}
        tokens = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text)]
            for text in texts
        ]
        if not vocabulary:
            raise Fault(
                "no passage of the corpus has a word in it; check the file given as --corpus"
            )
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, dtype="float64", csc_backend="scipy")
        index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index)

    def search(self, queries: list[str], k: int) -> list[Hits]:
        """Returns for each query the k best rows with score > 0; ties in corpus order."""
        vocabulary, found = self.index.vocab_dict, []
        for query in queries:
            tokens = [vocabulary[word] for word in split_words(query) if word in vocabulary]
            # Rounded to fp32, so that scores that are equal on paper tie, in whatever order their
            # terms were added.
            scores = self.index.get_scores_from_ids(tokens).astype(np.float32)  # (passages,)
            k = min(k, len(scores))
            # bm25s's own top-k (argpartition) orders ties arbitrarily; a stable sort of all passages
            # is slow.
            threshold = np.partition(scores, -k)[-k]
            hits = np.flatnonzero((scores >= threshold) & (scores > 0))
            hits = hits[np.argsort(-scores[hits], kind="stable")[:k]]
            found.append(list(zip(hits.tolist(), scores[hits].tolist(), strict=True)))
        return found
