#!/bin/bash
# torch 2.13.0: autocast keeps the bfloat16 copy of a float32 weight that it has made until its block ends, and does not
# see that an optimizer has changed the weight. A loop of steps inside one block computes every forward pass with the
# weights of the first: the loss does not move, while gradients and weights do, by the same gradient each time. The same
# happens to a reference or an average whose weights are swapped in. autocast around each forward pass, or
# cache_enabled=False, trains.
#
# Seen on 2026-11-28, Python 3.11, Linux (2.14.1: the same), loss at steps 1, 2, 10 of the same training:
#     one block for all steps 5.77, 5.77, 5.77   without its cache 5.77, 3.41, 0.13   a block for each 5.77, 3.41, 0.13
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5
venv/bin/python - <<'EOF'
import contextlib

import torch


def train(around_all, around_each):
    """Returns the losses of ten steps and how far the weights have moved."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
    optimizer, first, losses = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone(), []
    with around_all():
        for _ in range(10):
            with around_each():
                loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(loss.item(), 4))
    return losses, (model.weight - first).norm().item()


def block(**settings):
    return lambda: torch.autocast("cpu", torch.bfloat16, **settings)


print("torch", torch.__version__)
one, moved = train(block(), contextlib.nullcontext)
uncached, _ = train(block(cache_enabled=False), contextlib.nullcontext)
each, _ = train(contextlib.nullcontext, block())
print("one block", one, "weights moved", round(moved, 2), "\nwithout its cache", uncached, "\na block for each", each)
assert len(set(one)) == 1 and moved > 1
assert uncached == each and each[-1] < each[0] / 10
EOF
