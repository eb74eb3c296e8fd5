"""How often verification errs in the world, with a player whose truth is known, and from the committed rows."""

import re

import numpy as np
import pytest

from config import HERE
from extras.campaigns import world
from journal.directory import read_jsonl
from world.clauses import CLAUSES, read


def player_of(quality):
    """Returns a play whose rewards are coins that land on one with quality(instruction)."""

    def play(instructions, questions, temperature, seed=0):
        rng = np.random.default_rng([seed, *instructions[0].encode()])
        return (rng.random(len(questions)) < quality(instructions[0])) * 1.0

    return play


def test_where_nothing_differs_those_that_seemed_worse_join_as_often_as_those_that_seemed_better():
    """Rollouts that say which is worse must not be those of the gate, or it would seem to see what is mere chance."""
    rows = world.pairs(player_of(lambda text: 0.5), list(range(60)))
    seemed = {up: [r["joins"]["48"] for r in rows if (r["reward"][1] > r["reward"][0]) == up] for up in (True, False)}
    assert min(map(len, seemed.values())) > 5
    assert abs(np.mean(seemed[True]) - np.mean(seemed[False])) < 0.25
    same = np.corrcoef([r["reward"][1] - r["reward"][0] for r in rows], [r["joins"]["48"] for r in rows])[0, 1]
    assert abs(same) < 0.5


def test_where_much_differs_the_gate_is_right_on_many_questions_and_less_so_on_few():
    worth = {clause: 0.2 * (-1) ** k for k, clause in enumerate(CLAUSES)}
    quality = lambda text: min(1.0, max(0.0, 0.5 + sum(worth[clause] for clause in read(text))))  # noqa: E731
    rows = world.pairs(player_of(quality), list(range(300)))
    few, many = world.errors(rows, 12), world.errors(rows, 96)
    assert few[0] > many[0] and few[1] > many[1] and max(many) < 0.05


def test_errors_are_means_over_pairs_that_differ_enough():
    pair = lambda a, b, joins: {"reward": [a, b], "joins": {"12": joins}}  # noqa: E731
    rows = [pair(0.5, 0.4, 0.2), pair(0.5, 0.3, 0.1), pair(0.5, 0.6, 0.9), pair(0.5, 0.52, 0.0)]
    assert world.errors(rows, 12) == pytest.approx((0.15, 0.1)) and world.errors(rows, 24) == (None, None)


def test_the_world_s_page_has_what_the_committed_rows_give():
    rows = read_jsonl(HERE / "results" / "gate.jsonl")
    text = (HERE / "world" / "README.md").read_text()
    for n in world.SIZES:
        sides = {True: [], False: []}
        for row in rows:
            gain = row["reward"][1] - row["reward"][0]
            if abs(gain) >= 0.03:
                sides[gain > 0].append(row["joins"][str(n)])
        worse, lost = np.mean(sides[False]), 1 - np.mean(sides[True])
        assert re.search(rf"\| {n}(, the default)? \| {100 * worse:.0f} % \| {100 * lost:.0f} % \|", text), n
