"""Run in a copy of the project: one run with the page's advantage, selection rule and proposer, which prunes a lot.

    python together.py [flags of inspo.py]
"""

import inspo
from config import parse

train, inspo.train = inspo.train, lambda *args, **kwargs: None
from my_advantage import OPO  # noqa: E402
from my_proposer import Reminded  # noqa: E402
from my_selection import UCB  # noqa: E402


class Narrow(UCB):
    def prune(self, ranked, N_parent, t):
        return self._drop(ranked[2:], t)


train(parse(), learner=OPO, population=lambda cfg: Narrow(cfg.tau_s, cfg.window), evolution=Reminded)
