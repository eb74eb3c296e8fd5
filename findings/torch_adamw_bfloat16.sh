#!/bin/bash
# torch 2.13.0: AdamW keeps its moments in the parameter's type. In bfloat16 0.999 v is rounded back to v, so the second
# moment never falls. After 100 gradients of 1 and 10,000 of 0.01 it is a thousand times that of float32, and a step has
# a thirtieth of its length; under gradients of 1 alone it stops at 0.5 (fused: at 0.25) instead of 1, and steps are 1.4
# (2.0) times as long. transformers 5 loads a checkpoint in the type that it was saved in, and 0.999 is the default here
# and in its Trainer. float32 parameters under autocast avoid it; with betas=(0.9, 0.95) the second moment falls.
#
# Seen on 2026-11-28, Python 3.11, Linux, second moment and length of a step in learning rates:
#     gradients of 1, then 0.01   float32 0.0001, 0.98   bfloat16 0.098, 0.03   bfloat16, beta2 0.95 0.0001, 0.98
#     gradients of 1              float32 1.00, 1.00     bfloat16 0.50, 1.39    bfloat16, fused 0.25, 1.97
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import torch


def train(gradients, dtype, **settings):
    """Returns the second moment and the length of the last step in learning rates, without weight decay."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0, **settings)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    first, second = (optimizer.state[weight][name].item() for name in ("exp_avg", "exp_avg_sq"))
    step = first / second**0.5  # biases are corrected by factors of 1 after so many steps
    print(dtype, settings, "second moment", round(second, 5), "step", round(step, 3))
    return second, step


print("torch", torch.__version__)
large, falling = [1.0] * 10_000, [1.0] * 100 + [0.01] * 10_000
exact, rounded = train(falling, torch.float32), train(falling, torch.bfloat16)
assert exact[0] < 1.1e-4 and exact[1] > 0.95
assert rounded[0] > 0.09 and rounded[1] < 0.04
assert train(falling, torch.bfloat16, betas=(0.9, 0.95))[0] < 2e-4
assert train(large, torch.float32)[0] > 0.99
assert train(large, torch.bfloat16)[0] == 0.5
assert train(large, torch.bfloat16, fused=True)[0] == 0.25
EOF
