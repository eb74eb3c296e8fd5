#!/bin/bash
# model2vec 0.10.0: max_length=512 is said to count tokens. encode first cuts a text after 512 times as many characters
# as the vocabulary's median token has, and spaces count, too, which are no tokens: an aligned table or indented code
# loses its end well below 512 tokens. Here the last of 201 tokens is never read, so that two passages that differ in it
# have one vector, and no search tells them apart. max_length=None reads everything.
#
# Seen on 2026-11-28, Python 3.11, Linux:
#     a table of 201 tokens that ends in "approved" or "declined": equal vectors True, with max_length=None False
#     the same table without the padding: equal vectors False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile model2vec==0.10.0 tokenizers==0.23.3 numpy==2.3.5
venv/bin/python - <<'EOF'
from importlib.metadata import version

import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

print("model2vec", version("model2vec"))
words = ["[UNK]", "Zurich", "Geneva", "lake", "river", "approved", "declined"]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
model = StaticModel(np.random.default_rng(0).normal(size=(len(words), 8)).astype("float32"), tokenizer)


def same(width, **settings):
    """Whether a table of 100 rows with a column so wide has one vector with both last words."""
    table = "".join(f"{'Zurich':<{width}}lake\n" for _ in range(100))
    assert len(tokenizer.encode(table + "approved").ids) == 201
    approved, declined = (model.encode(table + word, **settings) for word in ("approved", "declined"))
    return np.array_equal(approved, declined)


cut, whole, narrow = same(40), same(40, max_length=None), same(8)
print("median token", model.median_token_length, "equal vectors", cut, "max_length=None", whole, "no padding", narrow)
assert cut and not whole and not narrow
EOF
