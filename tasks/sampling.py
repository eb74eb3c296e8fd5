"""Which questions a step, a subset or an evaluation asks: the same for the same seed."""

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from tasks.trajectories import Question

T = TypeVar("T")
STORED = 24  # questions of an evaluation or a verification whose trajectories a run stores


def space_evenly(n: int, k: int) -> list[int]:
    """Returns at most k of the places 0..n-1, evenly spaced: always the same sample."""
    if n <= k:
        return list(range(n))
    return [j * n // k for j in range(k)]


def rng_of(seed: int, t: int, purpose: str) -> np.random.Generator:
    """Returns a generator that depends on (seed, step, purpose) alone: there is no state to
    save."""
    return np.random.default_rng([seed, t, zlib.crc32(purpose.encode())])


def draw_questions(D: Mapping[Any, T], n: int, seed: int, t: int) -> list[T]:
    """Returns the `n` questions of step t: epochs over D, each in its own order."""
    questions = list(D.values())
    drawn = list[T]()
    epoch, place = divmod((t - 1) * n, len(questions))
    while len(drawn) < n:
        order = rng_of(seed, epoch, "epoch").permutation(len(questions))
        drawn += [questions[k] for k in order[place : place + n - len(drawn)]]
        epoch, place = epoch + 1, 0
    return drawn


def take_subset(questions: list[Question], n: int, seed: int = 0) -> list[Question]:
    """Returns `n` of the questions in their order, the same ones for a seed, each source in its
    share; 0: all."""
    if not 0 < n < len(questions):
        return questions
    order = rng_of(seed, 0, "subset").permutation(len(questions))
    sources = np.array([q.source for q in questions])[order]
    # Interleave the sources: the k-th question of a source with m has the place (k + 1/2) / m.
    place = np.empty(len(questions))
    for source in np.unique(sources):
        own = order[sources == source]
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
    return [questions[k] for k in sorted(place.argsort(kind="stable")[:n])]
