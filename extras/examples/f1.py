"""A reward: token F1 instead of exact match.

python inspo.py --task extras.examples.f1:F1
"""

from tasks.search_qa import SearchQA, f1


class F1(SearchQA):
    passing_reward = 0.5  # the least F1 that is no failure, which the optimizer would be shown

    def reward(self, taus):
        return [f1(tau.prediction, tau.question.golds) for tau in taus]
