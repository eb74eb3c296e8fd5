#!/bin/bash
# torch 2.13.0: weights that two modules share come apart when a model leaves the meta device, the usual way to load a
# large one: to_empty() makes one tensor for each use, and so does load_state_dict(assign=True), which reports that all
# keys match. A head tied to the embedding is from then on trained, counted and saved on its own. to(dtype) keeps the
# tie. Tie again after loading (transformers: model.tie_weights()).
#
# Seen on 2026-11-27, Python 3.11, Linux (2.15.0: the same):
#     is the head the embedding? on meta True, to(bfloat16) True, to_empty False, assigned False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def tied(self):
        return self.head.weight is self.embedding.weight


whole = Model()
with torch.device("meta"):
    empty, assigned = Model(), Model()
print("made", whole.tied(), "on meta", empty.tied())
assert whole.tied() and empty.tied() and assigned.tied()
empty.to_empty(device="cpu")
keys = assigned.load_state_dict(whole.state_dict(), assign=True)
print("to(bfloat16)", whole.to(torch.bfloat16).tied(), "to_empty", empty.tied(), "assigned", assigned.tied(), keys)
assert whole.tied() and not empty.tied() and not assigned.tied()
assert not keys.missing_keys and not keys.unexpected_keys
assert len(list(whole.parameters())) == 1 and len(list(empty.parameters())) == 2
EOF
