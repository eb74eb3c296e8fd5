"""What an agent can call: the texts that derive from a task's tools, the calculator, and the search
client."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_server import Handler, free_port, passages

from config import Config
from plumbing.batches import Batches
from plumbing.faults import Fault, Outage, ToolDown
from tasks.search_qa import Search, SearchQA
from tasks.tools import (
    WORDS,
    Calculator,
    Function,
    Tags,
    check_words,
    explain_invalid_action,
    find_answer,
)

SEARCH, CALCULATOR = Search("http://127.0.0.1:9", topk=3), Calculator()  # nobody listens there


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
    assert tags_of([SEARCH]).stop_strings() == ("</search>", "</answer>")
    assert tags_of([SEARCH, CALCULATOR]).stop_strings() == (
        "</search>",
        "</calculate>",
        "</answer>",
    )
    assert words_of() == ("think", "answer")
    assert words_of(SEARCH, CALCULATOR) == (
        "think",
        "answer",
        "search",
        "information",
        "calculate",
        "result",
    )
    assert explain_invalid_action([SEARCH]) == (
        "\n\nThat was neither a search nor an answer. Write <search> query </search> or <answer> answer </answer>.\n\n"
    )
    assert explain_invalid_action([SEARCH, CALCULATOR]) == (
        "\n\nThat was neither a search nor a calculation nor an answer. Write <search> query </search>, "
        "<calculate> expression </calculate> or <answer> answer </answer>.\n\n"
    )


@pytest.mark.parametrize(
    "names, tags",
    [("search", ["search"]), ("calculator,search", ["calculate", "search"]), ("none", [])],
)
def test_search_qa_has_the_tools_that_are_named_in_their_order(names, tags):
    assert [tool.tag for tool in SearchQA(Config(tools=names)).tools] == tags


@pytest.mark.parametrize(
    "names, says",
    [
        (
            "search,browser",
            "--tools search,browser: choose search, search with calculator, none, or module:function",
        ),
        ("search,,calculator", "--tools search,,calculator: choose"),
        ("calculator", "--tools calculator: choose"),
        ("none,search", "--tools none,search: choose"),
    ],
)
def test_a_tool_that_does_not_exist_is_one_line(names, says):
    with pytest.raises(Fault, match=re.escape(says)):
        SearchQA(Config(tools=names))


def test_a_tool_of_ones_own_is_five_words_and_a_function():
    class Clock(Function):
        tag, noun, argument, plural, result_tag = (
            "clock",
            "a look at the clock",
            "city",
            "looks",
            "time",
        )

        def run(self, city):
            return {"Rome": "12:00"}[city]

    clock = Clock()
    assert tags_of([clock]).stop_strings() == ("</clock>", "</answer>")
    message = explain_invalid_action([clock])
    assert (
        "neither a look at the clock nor an answer. Write <clock> city </clock> or <ans" in message
    )
    tool, argument = find_call("<clock>\nRome </clock>", [SEARCH, clock])
    assert tool is clock and tool.show(tool.submit(argument).result()) == "12:00"
    assert tool.of(None) is tool
    assert tool.submit("Atlantis").result() == ["not a look at the clock (KeyError)"]


def make_tool(**changed):
    words = dict(zip(WORDS, ("dial", "a call", "number", "calls", "tone"), strict=True))
    return type("Dial", (Function,), words | changed | {"run": lambda self, number: number})


@pytest.mark.parametrize(
    "changed, says",
    [
        *(({word: value}, f"> has the {word} {value!r}") for word in ("tag", "result_tag") for value in ("", " ")),
        ({"tag": "a b"}, "has the tag 'a b'"), ({"tag": "<dial>"}, "has the tag '<dial>'"),
        ({"result_tag": "tone."}, "has the result_tag 'tone.'"),
        ({"tag": "calculate"}, "has the tag 'calculate'"), ({"tag": "answer"}, "has the tag 'answer'"),
        ({"tag": "think"}, "has the tag 'think'"), ({"result_tag": "answer"}, "has the result_tag 'answer'"),
        ({"result_tag": "dial"}, "has the result_tag 'dial'"), ({"tag": "result"}, "has the result_tag 'result'"),
        ({"plural": "calculations"}, "has the plural 'calculations'"), ({"plural": "loss"}, "has the plural 'loss'"),
    ],
)  # fmt: skip
def test_a_tool_with_a_word_that_is_no_tag_or_another_s_is_one_line(changed, says):
    with pytest.raises(Fault, match=re.escape(says)) as refused:
        check_words("--task x", [Calculator(), make_tool(**changed)()])
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


@pytest.mark.parametrize("word", ["tag", "plural", "result_tag"])
def test_a_tool_without_a_word_does_not_come_as_far_as_a_rollout(word):
    Dial = make_tool()
    delattr(Dial, word)
    with pytest.raises(AttributeError, match=f"'Dial' object has no attribute '{word}'"):
        check_words("--task x", [Dial()])


def test_tools_may_share_the_tag_of_their_results():
    for tools in ([CALCULATOR, make_tool(result_tag="result")()], [SEARCH, CALCULATOR], []):
        check_words("--task x", tools)


# ---- calls in a turn


@pytest.mark.parametrize(
    "text, query",
    [
        ("<search> who </search>", "who"),
        # a token may hold more than the tag's end
        ("<think>x</think><search>two\nlines</search>\n\n", "two\nlines"),
        ("<search>a <search>b</search>", "b"),  # the innermost
        ("<search> <b> 1 < 2 & </b> </search>", "<b> 1 < 2 & </b>"),
        ("<answer>x <search>q</search>", "q"),
        ("<search></search>", ""),
        ("<search>cut off", None),
        ("</search><search>", None),
        ("<Search>q</Search>", None),
        ("<answer>x</answer>", None),
        ("<calculate>1</calculate>", None),  # no tool of this run
        ("", None),
    ],
)
def test_the_query_of_a_search(text, query):
    assert find_call(text, [SEARCH]) == (None if query is None else (SEARCH, query))


@pytest.mark.parametrize(
    "text",
    [
        "<search>" * 50_000, "<search>" + "x" * 500_000, "<search>a</calculate>" * 20_000,
        "<answer>" * 50_000 + "x", "<answer>" + "x" * 500_000,
    ],
)  # fmt: skip
def test_a_degenerate_turn_is_read_in_linear_time(text):
    start = time.thread_time()
    assert find_call(text, [SEARCH, CALCULATOR]) is None and find_answer(text) is None
    assert time.thread_time() - start < 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<search>", "</search>", "<calculate>", "</calculate>", "a", " ", "\n"])
    ).map("".join)
)
def test_a_call_is_an_opening_tag_and_its_closing_tag_with_no_opening_tag_between(text):
    calls = []
    for tool in (SEARCH, CALCULATOR):
        opening, closing = f"<{tool.tag}>", f"</{tool.tag}>"
        for start in range(len(text)):
            argument, end, _ = text[start + len(opening) :].partition(closing)
            if text.startswith(opening, start) and end and opening not in argument:
                calls.append((start, tool, argument.strip()))
    earliest = min(calls, key=lambda call: call[0], default=None)
    assert find_call(text, [SEARCH, CALCULATOR]) == (earliest and earliest[1:])


@pytest.mark.parametrize(
    "response, want",
    [
        ("<answer> Beijing </answer>", "Beijing"),
        ("<answer>a</answer> no: <answer>b</answer>", "b"),
        ("<answer>a</answer> then <answer>b", "a"),  # cut off: the complete one stands
        ("<answer>a</answer> b</answer>", "a"),
        ("<answer> <answer> x </answer>", "x"),
        ("<answer>a <answer>b</answer> c</answer>", "b"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("</answer>a<answer>", None),
        ("<answer>a", None),
        ("", None),
    ],
)
def test_last_answer(response, want):
    assert find_answer(response) == want


# ---- the calculator


@pytest.mark.parametrize(
    "expression, result",
    [
        ("3 * (4 + 5)", "27"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("-2 ** 2", "-4"),
        ("7 // 2", "3"),
        ("1 +\n2", "3"),
        ("1234567 * 7654321", "9449772114007"),
        ("2 ** 50", "1125899906842624"),
        ("1234567.0 * 7654321", "9.44977211401e+12"),
        ("10 ** 30 + 1", "1000000000000000000000000000001"),
        ("9449772114007 / 7", "1.34996744486e+12"),
        ("(10 ** 15 + 2) // 4 * 4", "1000000000000000"),
        ("1\n2", "not a calculation (SyntaxError)"),
        ("1 / 0", "not a calculation (ZeroDivisionError)"),
        ("(-8) ** 0.5", "not a calculation (TypeError)"),  # complex
        ("", "not a calculation (ValueError)"),
        ("two plus two", "not a calculation (ValueError)"),
        ("__import__('os')", "not a calculation (ValueError)"),
        ("9 ** 9 ** 9 ** 9", "not a calculation (NumberTooHigh)"),
        ("1" * 201, "not a calculation (ValueError)"),
    ],
)
def test_the_calculator_computes_arithmetic_and_answers_whatever_it_is_given(expression, result):
    start = time.thread_time()
    assert CALCULATOR.show(CALCULATOR.submit(expression).result(0)) == result
    assert time.thread_time() - start < 0.5


# ---- the search client


def test_passages_are_shown_with_number_title_and_text():
    passages = ['"Paris"\nThe capital\nof France. ', " Rome \nA city.", "no text", ""]
    assert SEARCH.show(passages) == (
        "Doc 1(Title: Paris) The capital\nof France.\n"
        "Doc 2(Title: Rome) A city.\n"
        "Doc 3(Title: no text) \n"
        "Doc 4(Title: ) "
    )
    assert SEARCH.show([]) == ""


ECHO = passages(lambda query: [f'"{query}"\nText.'])  # every query finds itself


def batches(server):
    """Returns the queries of each request."""
    return [json.loads(body)["queries"] for _, _, body in server.requests]


def test_a_query_brings_as_many_passages_as_were_asked_for(serve):
    server = serve(ECHO, passages(lambda query: ["a", "b", "c"]), {"result": [[]]})
    search = Search(server.url + "/", topk=2)
    assert [search.submit("who").result(60) for _ in range(3)] == [['"who"\nText.'], ["a", "b"], []]
    path, _, body = server.requests[0]
    assert path == "/retrieve" and json.loads(body) == {
        "queries": ["who"],
        "topk": 2,
        "return_scores": True,
    }


def test_queries_that_wait_leave_together_in_bounded_batches_and_a_duplicate_among_them_is_sent_once(
    serve,
):
    began, gate = threading.Event(), threading.Event()

    def first(handler):
        began.set()
        assert gate.wait(60)
        return ECHO(handler)

    server = serve(first, ECHO)
    search = Search(server.url, topk=3)
    queries = ["a", *"bcdcb", *(f"q{k}" for k in range(300))]
    futures = [search.submit("a")]
    assert began.wait(60)
    futures += [search.submit(query) for query in queries[1:]]
    gate.set()
    assert [future.result(60) for future in futures] == [[f'"{query}"\nText.'] for query in queries]
    search.submit("a").result(60)  # it keeps no answers
    assert [(batch[:4], len(batch)) for batch in batches(server)] == [
        (["a"], 1),
        (["b", "c", "d", "q0"], 254),
        (["q251", "q252", "q253", "q254"], 49),
        (["a"], 1),
    ]


class Panic(BaseException):
    """As tokenizers raises what its Rust does."""


@pytest.mark.parametrize("fault, raised", [(Panic, Panic), (dict, KeyError)])
def test_a_batch_that_ends_badly_is_not_the_last(fault, raised):
    def answer(keys):
        if keys == ["well"]:
            return {"well": 1}
        if fault is dict:
            return {"a": 1}  # "b" is missing
        raise fault

    batches = Batches(answer, most=2, wait=60)
    asked = [batches.submit(key) for key in ("a", "b", "well", "well")]
    for future in asked[:2]:
        with pytest.raises(raised):
            future.result(60)
    assert [future.result(60) for future in asked[2:]] == [1, 1] and batches.count == 2


def test_a_server_that_stays_away_is_named_and_later_queries_are_sent_all_the_same(serve, waits):
    server = serve(*[(500, {}, "")] * 6, ECHO)
    search = Search(server.url, topk=3, retries=2)
    with pytest.raises(ToolDown, match=f"{server.url}/retrieve: HTTP 500"):
        search.submit("who").result(60)
    assert search.submit("who").result(60) and len(server.requests) == 7


def test_a_connection_is_kept(serve, monkeypatch):
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    server = serve({"result": [[]]})
    search = Search(server.url, topk=3)
    for k in range(5):
        search.submit(str(k)).result(60)
    assert len(server.requests) == 5 and len(server.clients) == 1


@pytest.mark.parametrize(
    "hit, contents",
    [
        ({"document": {"id": "1", "contents": "A\nb"}, "score": 1.0}, "A\nb"),
        ({"id": "1", "contents": "A\nb"}, "A\nb"),  # as Search-R1's server answers without scores
        ({"document": {"title": "A", "text": "b"}}, '"A"\nb'),
        ({"title": None, "text": "b", "score": 1}, '""\nb'),
        ({"text": "b"}, '""\nb'),
        ({"contents": "A\nb", "text": "c"}, "A\nb"),
    ],
)
def test_a_hit_is_a_document_or_has_one_with_contents_or_title_and_text(serve, hit, contents):
    assert Search(serve({"result": [[hit]]}).url, topk=3, retries=0).submit("who").result(60) == [
        contents
    ]


@pytest.mark.parametrize(
    "line, title",
    [
        ('"Emma"', "Emma"), ("Emma", "Emma"), (' "Emma" ', "Emma"), ('""Heroes" (album)"', '"Heroes" (album)'),
        ('"The "Heroes""', 'The "Heroes"'), ('""', ""), ("", ""), ('6" gun', '6" gun'),
    ],
)  # fmt: skip
def test_a_title_loses_its_quotes_and_none_of_its_own(line, title):
    assert Search("", topk=3).show([f"{line}\ntext"]) == f"Doc 1(Title: {title}) text"


@pytest.mark.parametrize(
    "body",
    [
        "no json", "[]", "{}", '{"result": null}', '{"result": []}', '{"result": [[], []]}', '{"result": [3]}',
        '{"result": [["text"]]}', '{"result": [[{"id": "0", "content": "x"}]]}', '{"result": [[{"document": {}}]]}',
        '{"result": [[{"document": {"contents": null}}]]}',
        '{"result": [[{"document": {"contents": "x"}}, {"document": {"contents": 1}}]]}',
        '{"result": [[{"document": {"contents": ["x"]}}]]}', '{"result": [["the contents of a text"]]}',
        '{"result": [[{"document": "contents"}]]}', '{"result": [[{"document": null}]]}', '{"result": [[null]]}',
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
