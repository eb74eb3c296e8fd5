#!/bin/bash
# verl 0.9.1: a group whose answers all get one reward should teach nothing. Under GRPO it does: the float32 mean of
# eight times 1.2 is not 1.2, and what is left is divided by a standard deviation as small, plus only 1e-6 (TRL adds
# 1e-4). All eight answers get an advantage of 0.1 or -0.1 alike, by the reward's last digits: with 1 for the answer and
# 0.2 for the format a group that is all right is pushed, one at 0.9 is pulled. GDPO (adv_estimator=gdpo) whitens such
# batches afterwards: where every group agrees, advantages are as large as in any other batch. Multiples of 1/8 are
# safe.
#
# Seen on 2026-11-28, Python 3.11, Linux, advantages of groups of 8 equal rewards:
#     GRPO 1.2 0.106   0.9 -0.056   0.1 -0.007   1.0 and 0.125 0
#     GDPO, two such groups, of 1.2 and of 0.9: 0.97 and -0.97
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5 tensordict==0.10.0 ray==2.51.1 \
    hydra-core==1.3.8 transformers==5.10.0 codetiming==1.4.0
venv/bin/python -m pip install -qq --no-compile --no-deps verl==0.9.1
cat > advantages.py <<'EOF'
import numpy as np
import torch
import verl
from verl.trainer.ppo.core_algos import get_adv_estimator_fn


def advantages(estimator, *rewards):
    """The advantage of the first answer of each group of 8 answers of one token, which all get the group's reward."""
    scores = torch.tensor(rewards).repeat_interleave(8)[:, None]
    groups = np.arange(len(rewards)).repeat(8)
    found, _ = get_adv_estimator_fn(estimator)(scores, torch.ones_like(scores), groups)
    assert all((group == group[0]).all() for group in found.view(-1, 8))
    print(estimator, rewards, [round(advantage, 3) for advantage in found[::8, 0].tolist()])
    return found[::8, 0].abs().tolist()


print("verl", verl.__version__, "torch", torch.__version__)
large, middle, small, *safe = advantages("grpo", 1.2, 0.9, 0.1, 1.0, 0.125)
assert large > 0.1 and middle > 0.05 and small > 0.005 and safe == [0, 0]
assert min(advantages("gdpo", 1.2, 0.9)) > 0.9
EOF
venv/bin/python advantages.py 2> warnings || (cat warnings && false)
