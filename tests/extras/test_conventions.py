"""The conventions of form are read off a trajectory as they were told, and pay what is said; no
model is trained."""

import random

import pytest

from config import Config
from extras.real.conventions import (
    CONVENTIONS,
    Conventions,
    demonstrate,
    pays,
    right,
    shown,
    simulate,
)
from extras.real.demos import Facts
from tasks import Question, Trajectory, Turn
from tasks.tools import find_answer

LIMA = {"chain": ["Lima"], "golden_answers": ["Peru"]}
KEPT = (
    "I look up Lima. <search> facts about Lima </search>",
    "Found it. Searches: 1. About Lima: <answer> It is PERU. [Lima] </answer>",
)
BROKEN, SILENT, WRONG = (
    ("<search> Lima </search>", last)
    for last in ("<answer> Peru </answer>", "Peru.", "<answer> It is Chile. [Peru] </answer>")
)


def played(search, last):
    """Returns the trajectory of two turns."""
    query = search.partition("<search>")[2].partition("</search>")[0]
    turns = [Turn(search, "search", query, ["Lima is in Peru."]), Turn(last)]
    q = Question("q", "Where is Lima?", ("Peru",))
    return Trajectory(None, q, 0, [], 0, turns=turns, prediction=find_answer(last))


def test_a_trajectory_shows_what_it_kept_and_its_answer_is_right_in_any_form():
    kept, broken, silent, wrong = map(played, *zip(KEPT, BROKEN, SILENT, WRONG, strict=True))
    assert shown(kept) == dict.fromkeys(CONVENTIONS, True) and shown(broken) == dict.fromkeys(
        CONVENTIONS, False
    )
    assert not shown(silent) and [right(tau) for tau in (kept, broken, silent, wrong)] == [
        1,
        1,
        0,
        0,
    ]


def test_the_answer_pays_0_4_and_the_sides_that_pay_0_6():
    n, rewards = (
        sum(pays(1).values()),
        Conventions(Config(seed=1)).reward([played(*x) for x in (KEPT, BROKEN, SILENT)]),
    )
    assert 0 < n < 8 and rewards == pytest.approx([0.4 + 0.6 * n / 8, 1 - 0.6 * n / 8, 0])


def test_a_demonstration_is_read_back_as_the_side_that_it_was_told(monkeypatch):
    monkeypatch.setattr("extras.real.conventions.OBEYED", 1)
    rng, facts = random.Random(0), Facts()
    for name, side in [(name, side) for name in CONVENTIONS for side in (True, False)] * 10:
        (_, search), _, (_, last) = demonstrate(rng, facts, LIMA, {name: side})
        assert shown(played(search, last))[name] == side


def test_the_simulation_starts_from_the_habits_or_from_what_is_told(monkeypatch):
    learned = simulate(0, False, 0)
    monkeypatch.setattr("extras.real.conventions.RATE", 1e-9)
    agree = [habit if pays(0)[name] else 1 - habit for name, (*_, habit) in CONVENTIONS.items()]
    told, static = simulate(0, True, 0), simulate(0, False, 0)
    assert told == pytest.approx(0.36 + 0.6 * 0.97) and static == pytest.approx(
        0.36 + 0.6 * sum(agree) / 8
    )
    assert static + 0.1 < learned < 0.96
