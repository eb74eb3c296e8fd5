"""The batches of a run: epochs over the training questions, each in an order of its own, without state."""

from types import SimpleNamespace

from data import Question
from harness.log import Session, rng


def batches(n: int, batch: int, steps: int, seed: int = 0) -> list[list[str]]:
    train = {str(k): Question(str(k), "q?", ("a",), "s") for k in range(n)}
    s = SimpleNamespace(cfg=SimpleNamespace(seed=seed, batch=batch), train=train)
    return [[q.id for q in Session.questions(s, t)] for t in range(1, steps + 1)]


def test_every_epoch_shows_every_question_once_in_another_order():
    flat = [q for part in batches(7, 3, 14) for q in part]  # 42 questions asked: 6 epochs of 7, no multiple of 3
    epochs = [flat[k : k + 7] for k in range(0, 42, 7)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(epochs[0])) == 7
    assert len({tuple(epoch) for epoch in epochs}) > 4


def test_a_batch_may_be_larger_than_the_data():
    (first,) = batches(3, 8, 1)
    assert len(first) == 8 and all(2 <= first.count(q) <= 3 for q in "012")


def test_a_step_asks_the_same_whenever_it_is_asked():
    assert batches(50, 6, 9)[8] == batches(50, 6, 20)[8]
    assert batches(50, 6, 1, seed=1) != batches(50, 6, 1, seed=2)


def test_randomness_depends_on_seed_step_and_purpose():
    draws = {float(rng(*key).random()) for key in [(0, 1, "a"), (0, 1, "b"), (0, 2, "a"), (1, 1, "a"), (0, 1, "a")]}
    assert len(draws) == 4
