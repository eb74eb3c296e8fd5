"""A proposer: after the failures, the optimizer reads what has been tried and dropped.

python extras/fork.py --parts extras.examples.reminded:Reminded --optimizer_model NAME
"""

from inspo import Evolution


class Reminded(Evolution):
    def prompt(self, *args):
        dropped = [I for I in self.P.family if I.left and I.rewards]
        return "\n\n".join(
            [super().prompt(*args), *(f"Dropped, reward {I.w:.2f}: {I.text}" for I in dropped)]
        )
