"""What an agent can call: the texts that derive from a task's tools, and the search client."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from found_search import Product
from json_server import Handler, free_port, passages

from config import Config
from plumbing.batches import Batches
from plumbing.faults import Fault, Outage, ToolDown
from tasks.search_qa import Search
from tasks.task import load_task
from tasks.tools import WORDS, Function, Tags, check_words, explain_invalid_action, find_answer

SEARCH, PRODUCT = Search("http://127.0.0.1:9", topk=3), Product()  # nobody listens there


# ---- what derives from the tools in use


def tags_of(tools):
    return Tags(SimpleNamespace(tools=tools))


def words_of(*tools):
    return tags_of(tools).reserved_tags()


def find_call(text, tools):
    """Returns the tool that a turn calls first, and the argument; None if no call is complete."""
    action = tags_of(tools).parse_turn(text)
    return (action.tool, action.argument) if action.tool else None


def test_tags_and_messages_name_every_tool():
    assert tags_of([SEARCH, PRODUCT]).stop_strings() == ("</search>", "</calculate>", "</answer>")
    words = ("think", "answer", "search", "information", "calculate", "result")
    assert words_of(SEARCH, PRODUCT) == words and words_of() == words[:2]
    assert explain_invalid_action([SEARCH, PRODUCT]) == (
        "\n\nThat was neither a search nor a calculation nor an answer. Write <search> query </search>, "
        "<calculate> expression </calculate> or <answer> answer </answer>.\n\n"
    )


@pytest.mark.parametrize("names", ["search,browser", "search,,none", "browser"])
def test_search_qa_has_the_tools_that_are_named_and_no_others(names):
    named = load_task(Config(tools="calculator,search")).tools
    assert [tool.tag for tool in named] == ["search", "calculate"]
    with pytest.raises(Fault, match=f"--tools {names}: choose search, none, calculator"):
        load_task(Config(tools=names))


def make_tool(run=str, **changed):
    words = dict(zip(WORDS, ("dial", "a call", "number", "calls", "tone"), strict=True))
    return type("Dial", (Function,), words | changed | {"run": staticmethod(run)})()


def test_a_tool_of_ones_own_is_five_words_and_a_function():
    dial = make_tool({"7": "seven"}.__getitem__)
    tool, argument = find_call("<dial>\n7 </dial>", [SEARCH, dial])
    assert tool is dial and tool.show(tool.submit(argument).result()) == "seven"
    assert tool.submit("8").result() == ["not a call (KeyError)"]


@pytest.mark.parametrize(
    "word, value",
    [
        ("tag", " "), ("result_tag", " "), ("tag", "a b"), ("result_tag", "tone."), ("tag", "calculate"),
        ("tag", "think"), ("result_tag", "dial"), ("plural", "calculations"), ("plural", "loss"),
    ],
)  # fmt: skip
def test_a_tool_with_a_word_that_is_blank_or_another_s_is_one_line(word, value):
    with pytest.raises(Fault, match=f"> has the {word} {value!r}; [^\n]*$"):
        check_words("--task x", [Product(), make_tool(**{word: value})])


def test_tools_may_share_the_tag_of_their_results():
    check_words("--task x", [PRODUCT, make_tool(result_tag="result")])


# ---- calls in a turn


@pytest.mark.parametrize(
    "text, query",
    [
        # a token may hold more than the tag's end
        ("<think>x</think><search>two\nlines</search>\n\n", "two\nlines"),
        ("<search>a <search>b</search>", "b"),  # the innermost
        ("<search> <b> 1 < 2 & </b> </search>", "<b> 1 < 2 & </b>"),
        ("<search></search>", ""),
        ("</search><search>", None),
        ("<Search>q</Search>", None),
        ("<calculate>1</calculate>", None),  # no tool of this run
    ],
)
def test_the_query_of_a_search(text, query):
    assert find_call(text, [SEARCH]) == (None if query is None else (SEARCH, query))


def test_a_degenerate_turn_is_read_in_linear_time():
    start = time.thread_time()
    for text in ("<search>" * 50_000, "<search>a</calculate>" * 20_000, "<answer>" * 50_000):
        assert find_call(text, [SEARCH, PRODUCT]) is None and find_answer(text) is None
    assert time.thread_time() - start < 3


@pytest.mark.parametrize(
    "response, want",
    [
        ("<answer>a</answer> no: <answer> two\nlines </answer>", "two\nlines"),
        ("<answer>a</answer> then <answer>b", "a"),  # cut off: the complete one stands
        ("<answer>a <answer>b</answer> c</answer>", "b"),
        ("<answer></answer>", ""),
        ("</answer>a<answer>", None),
    ],
)
def test_last_answer(response, want):
    assert find_answer(response) == want


# ---- the search client


def test_passages_are_shown_with_number_title_and_text():
    passages = [
        '"Paris"\nThe capital\nof France. ',
        " Rome \nA city.",
        "no text",
        '"The "Heroes""\n',
    ]
    assert SEARCH.show(passages) == (
        "Doc 1(Title: Paris) The capital\nof France.\n"
        "Doc 2(Title: Rome) A city.\n"
        "Doc 3(Title: no text) \n"
        'Doc 4(Title: The "Heroes") '
    )


ECHO = passages(lambda query: [f'"{query}"\nText.'])  # every query finds itself


def test_a_query_brings_as_many_passages_as_were_asked_for_over_one_connection(serve, monkeypatch):
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    server = serve(ECHO, passages(lambda query: ["a", "b", "c"]), {"result": [[]]})
    search = Search(server.url + "/", topk=2)
    assert [search.submit("who").result(60) for _ in range(3)] == [['"who"\nText.'], ["a", "b"], []]
    path, _, body = server.requests[0]
    asked = {"queries": ["who"], "topk": 2, "return_scores": True}
    assert path == "/retrieve" and json.loads(body) == asked and len(server.clients) == 1


def test_queries_that_wait_leave_together_in_bounded_batches_and_a_duplicate_is_sent_once(serve):
    gate = threading.Event()
    server = serve(lambda handler: gate.wait(60) and ECHO(handler), ECHO)
    search, queries = Search(server.url, topk=3), ["a", *"bcdcb", *(f"q{k}" for k in range(300))]
    futures = [search.submit("a")]
    while not server.requests:
        time.sleep(0.01)
    futures += [search.submit(query) for query in queries[1:]]
    gate.set()
    assert [future.result(60) for future in futures] == [[f'"{query}"\nText.'] for query in queries]
    batches = [json.loads(body)["queries"] for _, _, body in server.requests]
    assert [(batch[:4], len(batch)) for batch in batches] == [
        (["a"], 1),
        (["b", "c", "d", "q0"], 254),
        (["q251", "q252", "q253", "q254"], 49),
    ]


class Panic(BaseException):
    """As tokenizers raises what its Rust does."""


def test_a_batch_that_ends_badly_is_not_the_last():
    batches_asked = []

    def answer(keys):
        batches_asked.append(keys)
        if keys != ["well"]:
            raise Panic
        return {"well": 1}

    batches = Batches(answer, most=2, wait=60)
    asked = [batches.submit(key) for key in ("a", "b", "well", "well")]
    for future in asked[:2]:
        with pytest.raises(Panic):
            future.result(60)
    assert [future.result(60) for future in asked[2:]] == [1, 1] and len(batches_asked) == 2


def test_a_server_that_stays_away_is_named_and_later_queries_are_sent_all_the_same(serve, waits):
    server = serve(*[(500, {}, "")] * 3, ECHO)
    search = Search(server.url, topk=3, retries=2)
    with pytest.raises(ToolDown, match=f"{server.url}/retrieve: HTTP 500"):
        search.submit("who").result(60)
    assert search.submit("who").result(60) and len(server.requests) == 4


@pytest.mark.parametrize(
    "hit, contents",
    [
        ({"id": "1", "contents": "A\nb"}, "A\nb"),  # as Search-R1's server answers without scores
        ({"document": {"title": "A", "text": "b"}}, '"A"\nb'),
        ({"title": None, "text": "b", "score": 1}, '""\nb'),
        ({"contents": "A\nb", "text": "c"}, "A\nb"),
    ],
)
def test_a_hit_is_a_document_or_has_one_with_contents_or_title_and_text(serve, hit, contents):
    search = Search(serve({"result": [[hit]]}).url, topk=3, retries=0)
    assert search.submit("who").result(60) == [contents]


@pytest.mark.parametrize(
    "body",
    [
        "no json", "{}", '{"result": null}', '{"result": []}', '{"result": [[], []]}', '{"result": [["text"]]}',
        '{"result": [[{"document": {}}]]}', '{"result": [[{"document": {"contents": ["x"]}}]]}', '{"result": [[null]]}',
    ],
)  # fmt: skip
def test_a_malformed_answer_is_search_down(serve, body):
    with pytest.raises(ToolDown, match="malformed answer"):
        Search(serve((200, {}, body)).url, topk=3, retries=0).submit("who").result(60)


def test_a_server_of_the_run_that_died_is_started_again(serve, waits):
    port, started = free_port(), []

    def restart():
        if not started:
            started.append(serve(ECHO, port=port))

    search = Search("", topk=3)
    search.connect(f"http://127.0.0.1:{port}", restart)
    assert search.submit("who").result(60) == ['"who"\nText.'] and started


def test_a_server_that_cannot_be_started_again_is_search_down():
    def restart():
        # as plumbing.servers.Servers does
        raise Outage("retrieval_server stopped while starting: no memory")

    search = Search("", topk=3)
    search.connect("http://127.0.0.1:9", restart)
    with pytest.raises(ToolDown, match="no memory"):
        search.submit("who").result(60)
