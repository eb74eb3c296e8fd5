#!/bin/bash
# verl 0.9.1: clip_ratio, PPO's epsilon and the first knob of the actor's configuration, changes nothing: clip_ratio_low
# and clip_ratio_high have defaults of their own, 0.2, and only where both are null is clip_ratio read. A sweep over it
# compares equal runs. The KL loss (kl_loss_type low_var_kl) is cut off at 10, so its gradient is 0 where a token's
# log-prob has fallen by more than 2.62 below the reference's: the penalty ends where it should pull hardest.
#
# Seen on 2026-11-28, Python 3.11, Linux:
#     loss's slope at a ratio of 1.15, advantage 1: default -1.15, clip_ratio=0.1 -1.15, low and high null, too: 0.0
#     KL's slope, log-prob below the reference's by 2, 2.6, 2.7, 4: -6.39, -12.46, 0.0, 0.0 (k3's: -13.88 and -53.6)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile torch==2.13.0 numpy==2.3.5 tensordict==0.10.0 ray==2.51.1 \
    hydra-core==1.3.8 transformers==5.10.0 codetiming==1.4.0
venv/bin/python -m pip install -qq --no-compile --no-deps verl==0.9.1
cat > slopes.py <<'EOF'
import math

import torch
import verl
from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, kl_penalty
from verl.utils.config import omega_conf_to_dataclass


def policy_slope(ratio, *overrides):
    """The slope of the loss of one token of advantage 1 in its log-prob, as `main_ppo` with these overrides has it."""
    overrides = [f"actor_rollout_ref.actor.{override}" for override in overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        actor = compose("ppo_trainer", overrides).actor_rollout_ref.actor
    actor.ppo_micro_batch_size_per_gpu = 1
    old, logp, one = torch.zeros(1, 1), torch.full((1, 1), math.log(ratio), requires_grad=True), torch.ones(1, 1)
    compute_policy_loss_vanilla(old, logp, one, one, config=omega_conf_to_dataclass(actor))[0].backward()
    return round(logp.grad.item(), 2)


def kl_slope(below):
    logp = torch.tensor([-float(below)], requires_grad=True)
    kl_penalty(logp, torch.zeros(1), "low_var_kl").sum().backward()
    return round(logp.grad.item(), 2)


print("verl", verl.__version__)
slopes = [
    policy_slope(1.15),
    policy_slope(1.15, "clip_ratio=0.1"),
    policy_slope(1.15, "clip_ratio=0.1", "clip_ratio_low=null", "clip_ratio_high=null"),
]
print("default; clip_ratio=0.1; low and high null, too", slopes)
kl = [kl_slope(below) for below in (2, 2.6, 2.7, 4)]
print("KL at 2, 2.6, 2.7, 4", kl, "k3's", [round(1 - math.exp(below), 2) for below in (2, 2.6, 2.7, 4)])
assert slopes == [-1.15, -1.15, 0]
assert kl == [-6.39, -12.46, 0, 0]
EOF
venv/bin/python slopes.py 2> warnings || (cat warnings && false)
