#!/bin/bash
# transformers 5.24.0: a text's vector should not depend on how far its batch is padded: the attention mask leaves the
# padding out. For CANINE, FNet, YOSO, Nystromformer and ConvBERT it does: convolutions, Fourier transforms, hashes and
# landmarks read padding, too, and FNet takes a mask without looking at it. A query embedded alone and the same text
# next to a longer one have two vectors. Those of BERT, DeBERTa and others stay. Embed such texts one by one.
#
# Seen on 2026-11-28, Python 3.11, Linux, 1 - cosine of the means of 12 tokens' vectors, alone and padded by 4, 20, 100,
# four layers of random weights:
#     convbert 0.001 0.001 0.001   nystromformer 0.0002 0.0009 0.002   yoso 0.0007 0.002 0.003
#     canine 0.10 0.08 0.08        fnet 0.12 0.40 0.68                 bert 0 0 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile transformers==5.24.0 torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import torch
import transformers

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)


def move(family, **settings):
    """Returns how far the mean of 12 tokens' vectors moves when 4, 20 and 100 tokens of padding follow them."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=4, **settings)
    model = transformers.AutoModel.from_config(config).eval()
    text, vectors = torch.randint(5, 1000, (1, 12)), []
    for padding in (0, 4, 20, 100):
        ids = torch.cat([text, torch.full((1, padding), config.pad_token_id)], 1)
        mask = (torch.arange(12 + padding) < 12).long()[None]
        with torch.no_grad():
            vectors.append(model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :12].mean(1))
    distances = [1 - torch.cosine_similarity(vectors[0], vector).item() for vector in vectors[1:]]
    print(family, *(f"{distance:.5f}" for distance in distances))
    return max(distances)


for family in ("bert", "deberta-v2"):
    assert move(family) < 1e-5
assert move("convbert") > 5e-4
assert move("nystromformer") > 5e-4
assert move("yoso") > 1e-3
assert move("canine") > 0.05
assert move("fnet") > 0.3
EOF
