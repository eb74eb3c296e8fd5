#!/bin/bash
# sentence-transformers 6.2.0: encode_document says that it takes the first of the prompts "document", "passage" and
# "corpus" that a model has. Every model has "document": without one of its own it is the empty text. So where a model's
# file calls its prompt for passages "passage" or "corpus", encode_document puts nothing before a text, while
# encode_query finds its prompt: queries and passages are encoded by different rules, and nothing says so. Pass
# prompt_name="passage".
#
# Seen on 2026-11-28, Python 3.11, Linux, prompts {"query": "ask: ", "passage": "told: "} in the model's file:
#     after loading: {'query': 'ask: ', 'document': '', 'passage': 'told: '}
#     encode_document equals encode with the prompt "": True, with prompt_name="passage": False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

print("sentence-transformers", version("sentence-transformers"))
words = ["[PAD]", "ask:", "told:", "a", "river"]
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(5))), unk_token="[PAD]"))
made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]").save_pretrained("bert")
config = transformers.BertConfig(
    vocab_size=5, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
transformers.BertModel(config).save_pretrained("bert")
SentenceTransformer(modules=[Transformer("bert"), Pooling(32, "mean")]).save("model")
file = Path("model", "config_sentence_transformers.json")
about = json.loads(file.read_text())
file.write_text(json.dumps(about | {"prompts": {"query": "ask: ", "passage": "told: "}}))

model = SentenceTransformer("model", device="cpu")
print("after loading:", model.prompts)
document = model.encode_document("a river")
bare, passage = model.encode("a river", prompt=""), model.encode("a river", prompt_name="passage")
print("equals without a prompt:", np.allclose(document, bare), "with its passage's:", np.allclose(document, passage))
assert np.allclose(model.encode_query("a river"), model.encode("a river", prompt="ask: "))
assert np.allclose(document, bare) and not np.allclose(document, passage)
EOF
