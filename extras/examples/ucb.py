"""A selection rule: upper confidence bounds (UCB1) instead of Eq. 4; --tau_s scales the bonus for
what few steps drew.

python extras/fork.py --parts extras.examples.ucb:UCB
"""

import numpy as np

from population import Population


class UCB(Population):
    def probabilities(self):
        # n: steps that drew it, at most `window`
        w, n = np.array([(I.w, len(I.rewards)) for I in self.active]).T
        bound = w + self.cfg.tau_s * np.sqrt(np.log(1 + n.sum()) / np.maximum(n, 1e-9))
        return (bound == bound.max()) / np.sum(bound == bound.max())
