"""A surrogate: CISPO (arXiv 2506.13585), whose clipped ratio has no gradient.

python extras/fork.py --parts extras.examples.cispo:CISPO
"""

import torch

from grpo import Learner


class CISPO(Learner):
    def surrogate(self, logp, rho, adv, **_):
        return torch.clamp(rho, max=1.28).detach() * adv * logp
