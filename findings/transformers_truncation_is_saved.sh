#!/bin/bash
# transformers 5.24.0: a call of a tokenizer with max_length or padding leaves both in the tokenizer, and
# save_pretrained writes what the latest call was into tokenizer.json. transformers itself sets them anew in every call
# and hides it; whoever reads the file with tokenizers, in Python, Rust or JavaScript, then cuts every text at that
# length and pads every text to it. One call without either before save_pretrained writes none.
#
# Seen on 2026-11-28, Python 3.11, Linux, tokens of a text of 20 words:
#     after a call with max_length=8: transformers 20, tokenizers 8
#     after one more call without:    transformers 20, tokenizers 20
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile transformers==5.24.0 tokenizers==0.23.3
venv/bin/python - <<'EOF'
import tokenizers
import transformers

words = [f"word{i}" for i in range(20)]
ids = {word: i for i, word in enumerate([*words, "[PAD]"])}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[PAD]"))
made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
text = " ".join(words)


def save():
    """Returns how many tokens of the text and of its first word each library sees in what was saved."""
    tokenizer.save_pretrained("saved")
    again = transformers.AutoTokenizer.from_pretrained("saved")
    below = tokenizers.Tokenizer.from_file("saved/tokenizer.json")
    counts = [(len(again(part).input_ids), len(below.encode(part).ids)) for part in (text, words[0])]
    print("text: transformers, tokenizers", *counts[0], "first word", *counts[1])
    return counts


print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
assert save() == [(20, 20), (1, 1)]
tokenizer(text, truncation=True, max_length=8, padding="max_length")
assert save() == [(20, 8), (1, 8)]
tokenizer(text)
assert save() == [(20, 20), (1, 1)]
EOF
