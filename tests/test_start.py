"""What a run finds out about its servers before it starts."""

import json
import re

import pytest
from json_server import JsonServer

from config import Config
from data import Question
from faults import Fault
from harness.start import connect_search, try_search
from tools import Search

QUESTIONS = [Question(str(k), f"Who is number {k}?", (f"Person {k}",), "x") for k in range(5)]
CFG = Config(batch=8, G=5, max_turns=4)


def answer(contents):
    """Answers every query with the passages that `contents` returns for it."""

    def reply(handler):
        queries = json.loads(handler.server.requests[-1][2])["queries"]
        result = [[{"document": {"contents": text}, "score": 1.0} for text in contents(query)] for query in queries]
        body = json.dumps({"result": result}).encode()
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


@pytest.fixture
def serving():
    servers = []

    def start(script):
        servers.append(JsonServer(script))
        return servers[-1].url

    yield start
    for server in servers:
        server.stop()


def test_searches_are_timed_and_gold_answers_counted(serving):
    # "Person 1" is not in "Person 12", nor in "person".
    passage = {1: "A\nIt was the person 1!", 2: "A\nPerson, 2.", 3: "A\nPerson 12", 4: "A\nperson"}
    url = serving(answer(lambda query: [passage.get(int(query.split()[-1][:-1]), "A\nnothing")]))
    said = try_search(Search(url, 3), QUESTIONS, CFG)
    seconds, once, most = map(
        float, re.search(r"5 questions took (.*) s, .* wait (.*) s if .*, (.*) s at", said).groups()
    )
    assert "a step's 40 trajectories" in said and said.endswith("in the passages of 2")
    assert once == pytest.approx(8 * seconds, abs=0.1) and most == pytest.approx(32 * seconds, abs=0.3)


def test_a_server_that_finds_nothing_ends_the_run_at_its_start(serving):
    with pytest.raises(Fault, match="found no passage for any of 5 questions: check its index"):
        try_search(Search(serving(answer(lambda query: [])), 3), QUESTIONS, CFG)


@pytest.mark.parametrize("reply", [{"results": [[]]}, {"result": [[{"text": "x"}]]}, {"result": []}])
def test_a_server_with_other_field_names_ends_the_run_at_its_start(serving, reply):
    url = serving(reply)
    with pytest.raises(Fault, match=rf"--retriever {url}/retrieve: not a Search-R1 answer \((Key|Value)Error"):
        connect_search(Config(retriever=url), None)
