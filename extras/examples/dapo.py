"""An objective: DAPO's (arXiv 2503.14476). Every token of a mini-batch weighs the same, and the
upper clip is wider.

python extras/fork.py --parts extras.examples.dapo:DAPO
"""

from grpo import Learner


class DAPO(Learner):
    def make_loss_inputs(self, *args):
        inputs = super().make_loss_inputs(*args)
        every_token = 0 * inputs["token_weight"] + 1 / max(1, len(inputs["token_weight"]))
        return inputs | {"token_weight": every_token, "eps_high": 0.28}
