#!/bin/bash
# torch 2.13.0, on a CPU: the gradient of a bfloat16 embedding is summed in bfloat16, one occurrence after the other,
# and ends where the next one is rounded away: a token that occurs 10,000 times with a gradient of 1 gets 256. The same
# lookup as a one-hot product gets 9984, and so do the bias of a linear layer and index_add_. Frequent tokens (the
# template's, the tools', "the") learn a fraction of what they should, and the larger the batch, the less. A float32
# embedding under autocast, or a batch in pieces that are summed in float32, avoids it.
#
# Seen on 2026-11-28, Python 3.11, Linux (2.14.1: the same), gradient of a token that occurs so often:
#     100: embedding 100, one-hot 100    1000: 256, 1000    10000: 256, 9984    in float32 10000
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import torch
from torch.nn.functional import one_hot

print("torch", torch.__version__)


def gradients(times, dtype):
    """The gradient of token 1's weight when it occurs so often, looked up in an embedding and as a one-hot product."""
    tokens, found = torch.ones(times, dtype=torch.long), []
    for look_up in (
        lambda embedding: embedding(tokens),
        lambda embedding: one_hot(tokens, 3).to(dtype) @ embedding.weight,
    ):
        embedding = torch.nn.Embedding(3, 2, dtype=dtype)
        look_up(embedding).float().sum().backward()
        found.append(embedding.weight.grad[1, 0].item())
    print(dtype, times, "times: embedding, one-hot", found)
    return found


assert gradients(100, torch.bfloat16) == [100, 100]
assert gradients(1000, torch.bfloat16) == [256, 1000]
assert gradients(10_000, torch.bfloat16) == [256, 9984]
assert gradients(10_000, torch.float32) == [10_000, 10_000]
EOF
