#!/bin/bash
# faiss-cpu 1.15.1: copies of one vector in an HNSW index hide other passages. Of 5000 different vectors each is found
# by itself; with 1000 copies of one more vector among them a fifth is not, and a larger efSearch does not help: the
# copies are linked to one another, and a search that comes upon them stays there. Corpora have such copies: empty
# passages, boilerplate, pages that could not be loaded. The exact index finds all. Add each vector once.
#
# Seen on 2026-11-28, Python 3.11, Linux, share of 1000 vectors found by themselves, efSearch 16 and 2000:
#     no copies 1.0, 1.0   1000 copies 0.77, 0.79   the same with IndexFlatL2 1.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile faiss-cpu==1.15.1 numpy==2.3.5
OMP_NUM_THREADS=1 venv/bin/python - <<'EOF'
import faiss
import numpy as np

print("faiss", faiss.__version__)
rng = np.random.default_rng(0)
vectors = rng.normal(size=(5001, 64)).astype("float32")
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
passages, copied = vectors[:5000], vectors[5000:]


def found(index, copies):
    """The share of the first 1000 passages that each find themselves, for efSearch 16 and 2000."""
    index.add(np.concatenate([passages[:2500], copied.repeat(copies, 0), passages[2500:]]))
    shares = []
    for breadth in (16, 2000):
        if isinstance(index, faiss.IndexHNSW):
            index.hnsw.efSearch = breadth
        _, ids = index.search(passages[:1000], 1)
        shares.append((ids[:, 0] == np.arange(1000)).mean().item())
    print(type(index).__name__, copies, "copies", shares)
    return min(shares), max(shares)


assert found(faiss.IndexHNSWFlat(64, 32), 0)[0] > 0.99
assert found(faiss.IndexHNSWFlat(64, 32), 1000)[1] < 0.95
assert found(faiss.IndexFlatL2(64), 1000)[0] == 1
EOF
