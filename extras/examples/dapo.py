"""An objective: DAPO's (arXiv 2503.14476). Every token of a mini-batch weighs the same, and the
upper clip is wider.

python extras/fork.py --parts extras.examples.dapo:DAPO
"""

from grpo import Learner


class DAPO(Learner):
    def terms(self, *args):
        terms = super().terms(*args)
        every_token = 0 * terms["token_weight"] + 1 / max(1, len(terms["token_weight"]))
        return terms | {"token_weight": every_token, "eps_high": 0.28}
