#!/bin/bash
# transformers 5.19.0: the ImportError for a package that is missing begins with an empty line. Programs that show the
# first line of an exception, as many command lines and logs do, show nothing at all: here for a folder with Mistral's
# tekken.json and no mistral-common. str(e).strip() first.
#
# Seen on 2026-11-27, Python 3.11, Linux:
#     ImportError, first line '', second line 'MistralConverter requires the mistral-common library but it was not ...'
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q transformers==5.19.0
venv/bin/python - <<'EOF'
import json
from pathlib import Path

from transformers import AutoTokenizer, MistralConfig

MistralConfig(vocab_size=300, num_hidden_layers=1).save_pretrained("model")
config = {"pattern": ".", "num_vocab_tokens": 1, "default_vocab_size": 9, "default_num_special_tokens": 8, "version": "v3"}
vocab = [{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}]
Path("model", "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
try:
    AutoTokenizer.from_pretrained("model")
except ImportError as e:
    first, second, *_ = str(e).splitlines()
    print(type(e).__name__, repr(first), repr(second))
    assert first == "" and "mistral-common" in second
else:
    raise AssertionError("it was loaded")
EOF
