#!/bin/bash
# transformers 5.24.0: next to a config.json of model_type qwen2, AutoTokenizer reads any tokenizer.json as Qwen2's
# byte-level BPE. A vocabulary of whole words then encodes every text to nothing, without an error or a warning; next to
# a config of Llama, Mistral or GPT-2 the same file works. Who trains a small Qwen with a tokenizer of their own meets
# it. An auto_map of nulls in tokenizer_config.json makes AutoTokenizer take the class that this file names.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     llama  TokenizersBackend [0, 1]
#     qwen2  Qwen2Tokenizer    []
#     qwen2 with an auto_map of nulls  TokenizersBackend [0, 1]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile transformers==5.24.0 tokenizers==0.23.3
venv/bin/python - <<'EOF'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

words = Tokenizer(models.WordLevel({"red": 0, "blue": 1, "[UNK]": 2}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()


def load(folder, config, **more):
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    config(vocab_size=3).save_pretrained(folder)
    file = Path(folder, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    found = AutoTokenizer.from_pretrained(folder)
    print(folder, type(found).__name__, found("red blue")["input_ids"])
    return found("red blue")["input_ids"]


assert load("llama", LlamaConfig) == [0, 1]
assert load("qwen2", Qwen2Config) == []
assert load("mapped", Qwen2Config, auto_map={"AutoTokenizer": [None, None]}) == [0, 1]
EOF
