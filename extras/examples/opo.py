"""An advantage: OPO (arXiv 2505.23585), whose baseline weighs a trajectory by its length.

python extras/fork.py --parts extras.examples.opo:OPO
"""

import numpy as np

from grpo import Learner


class OPO(Learner):
    def set_advantages(self, taus):
        for tau in taus:
            r, n = np.array([(x.reward, sum(x.mask)) for x in taus if x.group == tau.group]).T
            tau.advantage = tau.reward - np.dot(r, n) / sum(n)
