"""Demonstrations on the real facts: they follow their instruction, and see what a run's search
server returns."""

import random
import re

import pytest

from config import FACTS
from extras.real.demos import BEST, Facts, demo
from world.clauses import read_clauses


@pytest.fixture(scope="module")
def facts():
    return Facts()


@pytest.fixture(scope="module")
def rows(facts):
    rng = random.Random(7)
    return [demo(rng, facts) for _ in range(400)]


def said(row, role):
    return [m["content"] for m in row["messages"] if m["role"] == role]


def test_a_conversation_ends_with_the_only_answer_and_every_search_has_a_result(rows):
    for row in rows:
        roles = [m["role"] for m in row["messages"]]
        n = roles.count("tool")
        assert roles == ["user", *["assistant", "tool"] * n, "assistant"] and 1 <= n <= 3
        turns = said(row, "assistant")
        assert [bool(re.fullmatch(r"<search> .+ </search>", x)) for x in turns] == [True] * n + [
            False
        ]
        assert re.fullmatch(r"<answer> .+ </answer>", turns[-1])
        assert row["instruction"] in said(row, "user")[0]


def test_no_instruction_has_all_that_solves_a_question(rows):
    assert not any(set(read_clauses(row["instruction"])) >= BEST for row in rows)
    pairs = {frozenset(set(read_clauses(row["instruction"])) & BEST) for row in rows}
    assert {frozenset(BEST - {c}) for c in BEST} <= pairs  # but any two


@pytest.mark.slow
def test_results_are_those_of_the_search_server(facts, tmp_path):
    """Asked over HTTP, as a run asks it."""
    from plumbing.servers import Child
    from tasks.search_qa import Search

    row = demo(random.Random(3), facts)
    queries = [x[len("<search> ") : -len(" </search>")] for x in said(row, "assistant")[:-1]]
    command = ["-m", "retrieval_server", "--corpus", str(FACTS / "corpus.jsonl")]
    with Child(command, tmp_path / "log") as server:
        search = Search(server.url, 1, retries=0)
        assert [search.show(search.submit(query).result()) for query in queries] == said(
            row, "tool"
        )
