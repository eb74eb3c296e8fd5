#!/bin/bash
# ranx 0.3.21: before fuse adds up two searches it scales each list to between 0 and 1 (norm="min-max", its default),
# and a list of one passage to 0, as if that had not been found. A keyword search that is certain of one passage counts
# for nothing: the other list's order stands. The same happens to a list of equal scores. norm="max", or method="rrf"
# without a norm, put the passage first.
#
# Seen on 2026-11-28, Python 3.11, Linux, keywords find "gold" alone, vectors find all four:
#     vectors alone 0.9 near, 0.8 far, 0.6 gold, 0.3 other   fused 1.0 near, 0.83 far, 0.5 gold, 0 other
#     fused with norm="max", or method="rrf" and norm=None: gold first
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile ranx==0.3.21
venv/bin/python -W ignore - <<'EOF'
from importlib.metadata import version

from ranx import Run, fuse

print("ranx", version("ranx"))


def order(keywords, **settings):
    """The fused order of passages and their scores, after a search by keywords and one by vectors."""
    vectors = {"near": 0.9, "far": 0.8, "gold": 0.6, "other": 0.3}
    runs = [Run({"query": dict(found)}) for found in (keywords, vectors)]
    fused = fuse(runs, **{"method": "sum"} | settings).run["query"]
    scores = {name: round(float(score), 3) for name, score in fused.items()}
    print(keywords, settings, scores)
    return sorted(scores, key=scores.get, reverse=True)


assert order({"gold": 20.0}) == ["near", "far", "gold", "other"]
assert order({"gold": 20.0, "far": 20.0}) == ["near", "far", "gold", "other"]
assert order({"gold": 20.0}, norm="max")[0] == "gold"
assert order({"gold": 20.0}, norm=None, method="rrf")[0] == "gold"
EOF
