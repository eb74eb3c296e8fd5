"""A pruning rule: drops every instruction that is more than 0.1 below the best, instead of the
worse half.

python extras/fork.py --parts extras.examples.margin:Margin
"""

from population import Population


class Margin(Population):
    def prune(self, ranked, N_parent, t):
        keep = max(N_parent, sum(I.w >= ranked[0].w - 0.1 for I in ranked))
        return self._drop(ranked[keep:], t)
