"""How ranks share the groups of a rollout: whole groups, each once, more of them to whoever is faster."""

import random

import pytest
import torch.distributed as dist
from test_rollout import Found, Plain, Script, jobs

from config import Config
from rollout import play
from training.ranks import Ranks

GROUPS = [k // 5 for k in range(200)]  # 40 groups of 5


def ranks_of(size):
    """Returns `size` ranks with one store."""
    store, ranks = dist.HashStore(), [Ranks.__new__(Ranks) for _ in range(size)]
    for r in ranks:
        r.size, r.store, r.deals = size, store, 0
    return ranks


@pytest.mark.parametrize("speeds", [[1], [1, 1], [3, 1], [1, 1, 1, 0.05]])
def test_every_group_is_dealt_once_and_whole_and_faster_ranks_get_more(speeds):
    rng, ranks = random.Random(0), ranks_of(len(speeds))
    for _ in range(2):  # a second rollout starts anew
        takes = [r.deal(GROUPS) for r in ranks]
        played: list[list[int]] = [[] for _ in ranks]
        in_play = [0] * len(ranks)
        while True:
            for k, take in enumerate(takes):
                mine = take(in_play[k])
                played[k] += mine
                in_play[k] += len(mine)
            if not any(in_play):
                break
            for k, speed in enumerate(speeds):  # a row ends now and then
                in_play[k] -= min(in_play[k], int(speed > rng.random() * max(speeds)))
        assert sorted(sum(played, [])) == list(range(200))
        for mine in played:
            assert all(set(range(5 * (k // 5), 5 * (k // 5) + 5)) <= set(mine) for k in mine)
        sizes = [len(mine) for mine in played]
        if len(set(speeds)) == 1:
            assert max(sizes) - min(sizes) <= 20
        else:
            assert sizes[0] >= sizes[-1] + 15


def test_jobs_join_a_rollout_while_others_run(tiny):
    tokenizer = tiny[1]
    engine = Script(tokenizer, *[["<search>x</search>", f"<answer>{k}</answer>"] for k in range(6)])
    engine.lockstep = False
    turns = [0] * 6

    def generate(contexts, max_new, temperature):
        engine.contexts.append(sorted(contexts))
        for row in contexts:
            text = engine.texts[row][turns[row]]
            turns[row] += 1
            yield row, tokenizer(text)["input_ids"], [0.0] * len(tokenizer(text)["input_ids"])

    engine.generate = generate
    hands, asked = [[4, 1], [], [5]], []

    def deal(in_play):
        asked.append(in_play)
        return hands.pop(0) if hands else []

    taus = play(engine, tokenizer, Plain(Found("A\nb")), jobs(6), Config(), deal, 1.0, 0)
    assert {k: tau.prediction for k, tau in taus.items()} == {4: "4", 1: "1", 5: "5"}
    assert engine.contexts == [[1, 4], [1, 4], [5], [5]] and asked == [0, 2, 0, 1, 0]
    assert [tau.served("search") for tau in taus.values()] == [1, 1, 1]
