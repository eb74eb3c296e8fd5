"""A reward: token F1 instead of exact match.

python inspo.py --task extras.examples.f1:F1
"""

from tasks.search_qa import SearchQA, f1


class F1(SearchQA):
    def reward(self, taus):
        return [f1(tau.prediction, tau.question.golds) for tau in taus]
