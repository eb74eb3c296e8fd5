"""What a run finds out about its servers before it starts."""

import json
import re
from dataclasses import replace

import pytest
from json_server import JsonServer

from config import SEARCH_R1, WORLD, Config, parse
from tasks.questions import Question
from plumbing.faults import Fault
from journal.directory import RunDirectory
from plumbing.servers import Servers
from journal.start import check_prompt, connect_optimizer, connect_search, describe, try_search
from reflect import Optimizer, paraphrase_prompt
from rollout import prompt_ids
from tasks.tools import Search
from models.model import load_tokenizer

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


def test_passages_without_text_are_none(serving):
    with pytest.raises(Fault, match="found no passage for any of 5 questions"):
        try_search(Search(serving(answer(lambda query: ["", " \n"])), 3), QUESTIONS, CFG)


def test_a_server_whose_passages_hold_nearly_no_gold_answer_is_suspicious(serving):
    questions = QUESTIONS * 5
    url = serving(answer(lambda query: ["A\nPerson 1" if "number 1?" in query else "A\nx"]))
    said = try_search(Search(url, 3), QUESTIONS, CFG)
    assert said.endswith("in the passages of 1")  # a fifth
    said = try_search(Search(serving(answer(lambda query: ["A\nx"])), 3), questions, CFG)
    assert said.endswith("of 0: nearly none; check that index, corpus and questions belong together")


def test_a_refused_topk_is_named(serving):
    with pytest.raises(Fault, match=r"HTTP 422: too many\); check --retriever, and --topk 1000"):
        try_search(Search(serving((422, {}, "too many")), 1000), QUESTIONS, Config(topk=1000))


def test_an_instruction_that_leaves_no_room_for_a_turn_ends_the_run_at_its_start():
    tokenizer = load_tokenizer(str(WORLD / "policy"))
    lengths = [len(prompt_ids(tokenizer, SEARCH_R1, q.text)) for q in QUESTIONS]
    check_prompt(tokenizer, QUESTIONS, Config(max_prompt=min(lengths)))
    with pytest.raises(Fault, match=f"--max_prompt 10: .* are {min(lengths)} tokens at least, .*; raise it"):
        check_prompt(tokenizer, QUESTIONS, Config(max_prompt=10))


def test_a_scripted_optimizer_that_was_killed_comes_back(tmp_path):
    cfg = replace(parse(["--seed", "3"]), optimizer_retries=1)
    with Servers(tmp_path / "log") as serve:
        optimizer = connect_optimizer(cfg, serve, RunDirectory(tmp_path / "r"))
        prompt = paraphrase_prompt("Answer in <answer> </answer>.", 2)
        first = optimizer.ask(prompt, "t0")
        [child] = serve._running.values()
        child.stop()
        again = optimizer.ask(prompt, "t0")
        assert again.reply == first.reply and not again.paid_before


def test_no_password_in_a_url_is_shown():
    assert describe(Optimizer("http://me:pass@host/v1", "m")).startswith("m at http://host/v1 ")


@pytest.mark.parametrize("reply", [{"results": [[]]}, {"result": [[{"text": "x"}]]}, {"result": []}])
def test_a_server_with_other_field_names_ends_the_run_at_its_start(serving, reply):
    url = serving(reply)
    with pytest.raises(Fault, match=rf"--retriever {url}/retrieve: not a Search-R1 answer \((Key|Value)Error"):
        connect_search(Config(retriever=url), None)
