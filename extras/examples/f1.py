"""A reward: token F1 instead of exact match.

python inspo.py --task extras.examples.f1:F1
"""

from tasks.questions import f1
from tasks.search_qa import SearchQA


class F1(SearchQA):
    def reward(self, taus):
        return [f1(tau.prediction, tau.question.golds) for tau in taus]
