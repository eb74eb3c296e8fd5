"""Tokens in, tokens out: the protocol between the agent loop and whatever samples from the
policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from plumbing.chat import turn_ends

if TYPE_CHECKING:  # `inspo.py --help` imports this module and must not wait for torch
    from models.model import Weights

Contexts = dict[int, list[int]]  # a row's key -> its whole context


class FinishedTurn(NamedTuple):
    """What the policy sampled in one turn of a row."""

    key: int  # the caller's name for the row
    ids: list[int]  # sampled tokens, the one that ended the turn included
    logps: list[float]  # log-probability of each, at the sampling temperature
    stop: str = ""  # why a server takes no more of the row, as Trajectory's


Turns = Iterator[FinishedTurn]  # as they finish


class Engine(Protocol):
    """Samples turns from the policy.

    A row is one trajectory in the making, named by a key of the caller's choice; `reset` starts a
    batch of rows, and each `generate` starts further turns in it. All contexts and turns are token
    ids. Errors are EngineFault.
    """

    max_rows: int  # rows that one batch may hold
    # whether samples depend on which rows are generated together: then start all turns of a round in
    # one call
    lockstep: bool

    def reset(self, seed: int) -> None:
        """Forgets all rows, even unfinished ones, and seeds the samples that follow."""

    def generate(self, contexts: Contexts, max_new: int, temperature: float) -> Turns:
        """Starts a turn for every row in `contexts` and yields turns as they finish.

        A turn finishes with a stop string (which stays in it), with one of `turn_ends`, or after
        `max_new` tokens. A lockstep engine yields all turns before the iterator ends, and forgets
        rows that `contexts` leaves out. Any other engine generates a little, yields the turns that
        have finished, possibly none, and continues on the next call, for which `contexts` may be
        empty. The cached part of a context is not recomputed. Temperature 0 is greedy, with
        log-probabilities at temperature 1.
        """

    def load(self, weights: Weights) -> None:
        """Replaces all weights, consumed one at a time; forgets all rows.

        Under torchrun, all ranks call this together.
        """

    def sleep(self) -> None:
        """Releases the memory that only generation needs; `load` wakes the engine up."""

    def close(self) -> None:
        """Releases everything, so that the process can exit; the engine cannot be used again."""


def watch_ends(tokenizer: Any, stop: tuple[str, ...]) -> Callable[[list[int]], bool]:
    """Returns a function of a turn's tokens so far: whether the last one ends the turn, as one of
    `turn_ends` or because it completes one of the strings `stop`."""
    ends = frozenset(turn_ends(tokenizer))
    # Only a token whose text contains the last character of a stop string can complete it: decode
    # after those.
    last = {s[-1] for s in stop}
    known = sorted(tokenizer.get_vocab().values())  # some ids may name nothing
    texts = tokenizer.batch_decode([[i] for i in known], skip_special_tokens=False)
    completing = {i for i, text in zip(known, texts, strict=True) if last & set(text)}
    # a character has at most 4 bytes, a token at least 1
    tail = 4 * max(map(len, stop), default=0)

    def ended(ids: list[int]) -> bool:
        if ids[-1] in ends:
            return True
        if ids[-1] not in completing:
            return False
        text = tokenizer.decode(ids[-tail:], skip_special_tokens=False)
        return any(s in text for s in stop)

    return ended
