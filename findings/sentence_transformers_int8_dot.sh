#!/bin/bash
# sentence-transformers 6.2.0: util.dot_score multiplies int8 embeddings, its own encode(precision="int8"), in int8:
# sums of products wrap around at 127, and ranks are noise. semantic_search(score_function=dot_score) returns it without
# a word: of 100 queries that float32 embeddings answer, one is; with uint8 it is no better. cos_sim refuses both types.
# .astype("float32") before the product is as good as float32 embeddings.
#
# Seen on 2026-11-28, Python 3.11, Linux, share of 100 queries that find their passage first:
#     float32 1.0   int8 0.01, highest score 127   int8 as float32 1.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0 \
    numpy==2.3.5
venv/bin/python - <<'EOF'
import numpy as np
import sentence_transformers
from sentence_transformers.util import dot_score, quantize_embeddings, semantic_search

print("sentence-transformers", sentence_transformers.__version__)
rng = np.random.default_rng(0)
passages = rng.normal(size=(1000, 64)).astype("float32")
queries = passages[:100] + rng.normal(size=(100, 64), scale=0.3).astype("float32")
ranges = np.stack([passages.min(0), passages.max(0)])


def found(queries, passages):
    """The share of queries whose own passage comes first, by the library's search, and all first scores."""
    hits = [hits[0] for hits in semantic_search(queries, passages, top_k=1, score_function=dot_score)]
    return np.mean([hit["corpus_id"] == i for i, hit in enumerate(hits)]), [hit["score"] for hit in hits]


small = [quantize_embeddings(vectors, precision="int8", ranges=ranges) for vectors in (queries, passages)]
exact, _ = found(queries, passages)
wrapped, scores = found(*small)
converted, _ = found(*(vectors.astype("float32") for vectors in small))
print("float32", exact, "int8", wrapped, "highest score", max(scores), "int8 as float32", converted)
assert exact == converted == 1
assert wrapped < 0.1 and max(scores) <= 127
EOF
