#!/bin/bash
# bm25s 0.3.16: the default tokenizer takes words of two letters or more, also with stopwords=None. "vitamin C" and
# "vitamin K" are one query, and the passage about C is ranked first for both, as it is shorter. "C#" alone is an empty
# query. A Chinese sentence is one word. Give tokenize() a token_pattern such as r"(?u)\b\w+\b".
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     "vitamin C", "vitamin K", "C#" -> ['vitamin'], ['vitamin'], []
#     best passage for "vitamin K": Vitamin C is ascorbic acid
#     the same with the pattern above: Vitamin K helps blood to clot
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile bm25s==0.3.16
venv/bin/python - <<'EOF'
import bm25s

passages = ["Vitamin C is ascorbic acid", "Vitamin K helps blood to clot"]


def best(query, **how):
    split = lambda texts: bm25s.tokenize(texts, stopwords=None, show_progress=False, **how)
    index = bm25s.BM25()
    index.index(split(passages), show_progress=False)
    return passages[index.retrieve(split([query]), k=1, show_progress=False).documents[0, 0]]


queries = ["vitamin C", "vitamin K", "C#", "北京是中国的首都"]
words = bm25s.tokenize(queries, stopwords=None, return_ids=False, show_progress=False)
print(words, best("vitamin K"), best("vitamin K", token_pattern=r"(?u)\b\w+\b"), sep="\n")
assert words == [["vitamin"], ["vitamin"], [], ["北京是中国的首都"]]
assert best("vitamin K") == passages[0]
assert best("vitamin K", token_pattern=r"(?u)\b\w+\b") == passages[1]
EOF
