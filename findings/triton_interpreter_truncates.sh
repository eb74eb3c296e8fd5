#!/bin/bash
# triton 3.9.0, TRITON_INTERPRET=1, the way to test kernels without a GPU: float32 is cut off to bfloat16, where a GPU
# rounds to the nearest (the default of tl.cast's fp_downcast_rounding). Half of all values differ from torch's in the
# last bit, and all of them towards 0: a mean is a quarter of a percent too small. A test against torch then fails for a
# right kernel, or its tolerance is doubled and hides a wrong one. Store float32, and let torch round.
#
# Seen on 2026-11-28, Python 3.11, Linux, 4096 values between 1 and 2:
#     equal to torch's 0.5, mean error torch 0.0000, interpreter -0.0039 (bfloat16's step there is 0.0078)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 triton==3.9.0 numpy==2.3.5
cat > kernel.py <<'EOF'
import torch
import triton
import triton.language as tl


@triton.jit
def copy(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


print("triton", triton.__version__, "torch", torch.__version__)
torch.manual_seed(0)
x = 1 + torch.rand(4096)
cut, rounded = torch.empty(4096, dtype=torch.bfloat16), x.bfloat16()
copy[(1,)](x, cut, N=4096)
equal = (cut == rounded).float().mean().item()
errors = {"torch": (rounded.float() - x).mean().item(), "interpreter": (cut.float() - x).mean().item()}
print("equal to torch's", round(equal, 2), "mean errors", {name: round(error, 4) for name, error in errors.items()})
assert 0.45 < equal < 0.55
assert abs(errors["torch"]) < 2e-4
assert (cut.float() <= x).all()
assert -0.0042 < errors["interpreter"] < -0.0036
EOF
TRITON_INTERPRET=1 venv/bin/python kernel.py
