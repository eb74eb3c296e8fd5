"""The LLM-based optimizer (§3.2): App. E's prompts, strict parsing, and a client that no fault of it can stop."""

import email.utils
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import reflect
from config import SEARCH_R1
from reflect import (
    Optimizer,
    OptimizerDown,
    check,
    paid_calls,
    paraphrase_prompt,
    parse,
    reflection_prompt,
    same,
    shorten,
    token_counter,
)


def words(text):
    """A token counter for tests: words."""
    return len(text.split())


# --- the prompts of App. E ----------------------------------------------------------------------------------------


def test_the_paraphrase_prompt_is_that_of_appendix_e():
    assert paraphrase_prompt("Search. Then <answer> x </answer>.", 6) == (
        "<ins_0> Search. Then <answer> x </answer>. </ins_0>\n"
        "\n"
        "Improve the above prompt.\n"
        "Give 6 different candidates.\n"
        "Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.\n"
        "For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.\n"
        "List the instruction candidates in <ins_1>...</ins_1> to <ins_6>...</ins_6> tags."
    )


def test_the_reflection_prompt_is_that_of_appendix_e():
    failures = [("Question: who?\n<answer>it is me</answer>", ("me",)), ("Question: where?", ("Rome", "Roma"))]
    assert reflection_prompt("Search. Then <answer> x </answer>.", failures, 3, 1000, words) == (
        "The initial prompt is:\n"
        "\n"
        "<ins_0>\n"
        "Search. Then <answer> x </answer>.\n"
        "</ins_0>\n"
        "\n"
        "However, it still gets the following examples wrong:\n"
        "\n"
        "<example>\n"
        "Response: Question: who?\n"
        "<answer>it is me</answer>\n"
        "Correct answer: me\n"
        "</example>\n"
        "<example>\n"
        "Response: Question: where?\n"
        "Correct answer: Rome or Roma\n"
        "</example>\n"
        "\n"
        "Analyze the reasons behind these mistakes and why the prompt could have gotten these examples wrong.\n"
        "Now take the reasons into account. Revise and improve the initial prompt by giving 3 different but better "
        "candidates.\n"
        "Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.\n"
        "For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.\n"
        "List the instruction candidates in <ins_1>...</ins_1> to <ins_3>...</ins_3> tags."
    )


def test_braces_in_an_instruction_or_a_response_reach_the_optimizer_as_they_are():
    assert "<ins_0> {n} and {x[0]} </ins_0>" in paraphrase_prompt("{n} and {x[0]}", 2)
    prompt = reflection_prompt("{examples} {n}", [("{instruction} {{}}", ("{gold}",))], 2, 1000, words)
    assert "<ins_0>\n{examples} {n}\n</ins_0>" in prompt
    assert "Response: {instruction} {{}}\nCorrect answer: {gold}\n" in prompt


# --- long failures ------------------------------------------------------------------------------------------------

QUESTION = "Question: What is the country of the birthplace of the director of Solaris?"
ACTIONS = ["<think>the director first</think>", "<search>director of Solaris</search>", "<search>Andrei born</search>"]
END = "<think>Zavrazhye is in Russia</think>\n<answer>Soviet Union</answer>"


def long_failure(passage_words):
    observed = "<information>" + "Doc 1(Title: Solaris) " + "lorem ipsum " * (passage_words // 2) + "</information>"
    return "\n".join([QUESTION, ACTIONS[0], ACTIONS[1], observed, ACTIONS[2], observed, END])


def test_a_failure_within_its_budget_is_shown_as_it_is():
    text = long_failure(400)
    assert shorten(text, words(text), words) == text


@pytest.mark.parametrize("budget", [600, 200, 80, 40])
def test_a_long_failure_loses_the_middle_of_its_observations_first(budget):
    short = shorten(long_failure(4000), budget, words)
    assert words(short) <= budget
    for part in (QUESTION, *ACTIONS, END):
        assert part in short
    assert short.count("<information>") == short.count("</information>") == 2
    assert " [...] " in short


def test_observations_are_cut_no_more_than_is_needed():
    text = long_failure(4000)
    by_budget = [words(shorten(text, budget, words)) for budget in (60, 200, 600, 2000)]
    assert by_budget == sorted(by_budget)
    assert by_budget[-1] > 500
    assert "Doc 1(Title: Solaris) lorem" in shorten(text, 600, words)  # an observation's start and end stay


def test_where_observations_are_not_enough_question_and_end_stay():
    text = QUESTION + "\n<think>" + "and so on " * 3000 + "</think>\n" + END
    short = shorten(text, 60, words)
    assert words(short) <= 60
    assert short.startswith(QUESTION)
    assert short.endswith(END)


def test_every_failure_gets_its_share_of_the_budget():
    failures = [(long_failure(4000), ("gold",))] * 4
    prompt = reflection_prompt("Do it.", failures, 6, 400, words)
    assert prompt.count(QUESTION) == prompt.count(END) == prompt.count("Correct answer: gold") == 4
    assert words(prompt) <= 400 + words(reflection_prompt("Do it.", [("", ("gold",))] * 4, 6, 400, words))


# --- replies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, blocks",
    [
        ("<ins_1>A</ins_1><ins_2>B</ins_2>", ["A", "B"]),
        ("1. Too short.\n\n<ins_1>\n  A\nB  \n</ins_1>\n\nand\n\n<ins_2>C</ins_2>\nI hope this helps!", ["A\nB", "C"]),
        ("", []),
        ("I would rewrite the prompt with clearer steps.", []),
        ("<ins_1>A", []),  # cut off
        ("A</ins_1>", []),
        ("<ins_1>A\n<ins_2>B</ins_2>", ["B"]),  # 1 was never closed
        ("<ins_1>A</ins_1><ins_2>B", ["A"]),
        ("<ins_1>A</ins_2>", []),
        ("<ins_1>A</ins_2> x </ins_1>", []),  # numbers that do not match: which text was meant?
        ("<ins_1>A</ins_2><ins_2>B</ins_2>", ["B"]),
        ("<ins_1>A <ins_2>B</ins_2> C</ins_1>", ["B"]),  # nested: the complete inner block alone
        ("<ins_1>A <ins_1>B</ins_1> C</ins_1>", ["B"]),
        ("<ins_0>the parent</ins_0><ins_1>A</ins_1>", ["A"]),  # an echo of the parent is no candidate
        ("<ins_0><ins_1>A</ins_1></ins_0>", ["A"]),
        ("<ins_1><ins_0>the parent</ins_0></ins_1>", []),
        ("<ins_01>A</ins_01><ins_>B</ins_><ins_x>C</ins_x><ins_-1>D</ins_-1>", []),
        ("<INS_1>A</INS_1>", []),
        ("```xml\n<ins_1>\nA\n</ins_1>\n```", ["A"]),
        ("**<ins_1>** A **</ins_1>**", ["** A **"]),
        ("<ins_1>A</ins_1>\r\n<ins_2>\r\nB\r\nC\r\n</ins_2>\r\n", ["A", "B\r\nC"]),
        ("<ins_1></ins_1><ins_2> \n </ins_2>", ["", ""]),  # `check` says "empty"
        ("<ins_1>A</ins_1><ins_1>B</ins_1>", ["A", "B"]),  # a number twice: two candidates
        ("<ins_2>B</ins_2><ins_1>A</ins_1>", ["B", "A"]),  # in the order they come in
        ("<ins_1>```\nA\n```</ins_1>", ["```\nA\n```"]),  # what is in a block stays as it is
        ("<ins_1><search> q </search> & <answer>a</answer></ins_1>", ["<search> q </search> & <answer>a</answer>"]),
    ],
)
def test_only_complete_numbered_blocks_of_a_reply_are_taken(reply, blocks):
    assert parse(reply) == blocks


def test_ten_and_more_blocks_are_told_apart():
    reply = "\n".join(f"<ins_{k}>candidate {k}</ins_{k}>" for k in range(1, 26))
    assert parse(reply) == [f"candidate {k}" for k in range(1, 26)]
    assert parse("<ins_1>A</ins_10><ins_10>B</ins_10>") == ["B"]


@pytest.mark.parametrize("parent", ["Answer in <answer> </answer>.", "No tags at all."])
def test_talk_about_the_blocks_never_becomes_an_instruction(parent):
    reply = "Here they are, in <ins_1>...</ins_1> to <ins_6>...</ins_6> tags:\n<ins_1>B <answer> </answer></ins_1>"
    accepted = [text for text in parse(reply) if not check(text, parent, set(), [], 100, words)]
    assert accepted == ["B <answer> </answer>"]


def test_a_long_broken_reply_is_parsed_in_no_time():
    start = time.time()
    assert parse("<ins_1>" * 20_000 + "x" * 200_000) == []
    assert parse("<ins_1>" + "a < b " * 50_000) == []
    assert time.time() - start < 2


# --- which candidates may join ------------------------------------------------------------------------------------

PARENT = "Think in <think> </think>, search with <search> </search>, answer in <answer> </answer>."
GOOD = f"Search one entity at a time. {PARENT}"


def reason(candidate, parent=PARENT, taken=(), golds=(), max_tokens=100):
    return check(candidate, parent, {same(t) for t in taken}, list(golds), max_tokens, words)


def test_a_well_formed_candidate_may_join():
    assert reason(GOOD, taken=[PARENT, "another one"], golds=["Zavrazhye"]) == ""


@pytest.mark.parametrize("candidate", ["", "...", "-", "!?"])
def test_a_candidate_without_a_word_is_empty(candidate):
    assert reason(candidate, parent="No tags.") == "empty"


@pytest.mark.parametrize(
    "candidate",
    [PARENT, PARENT.upper(), PARENT.replace(" ", "\r\n  "), PARENT.replace(",", ";").rstrip("."), f"**{PARENT}**"],
)
def test_a_candidate_that_differs_in_case_space_and_punctuation_alone_is_a_duplicate(candidate):
    assert reason(candidate, taken=["x", PARENT]) == "duplicate"
    assert reason(candidate + " Really.", taken=["x", PARENT]) != "duplicate"


def test_a_candidate_may_be_as_long_as_the_limit_and_no_longer():
    n = words(GOOD)
    assert reason(GOOD, max_tokens=n) == ""
    assert reason(GOOD, max_tokens=n - 1) == f"longer than {n - 1} tokens"


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"])
def test_a_candidate_that_lost_any_tag_of_the_parent_is_rejected(tag):
    assert reason(GOOD.replace(tag, "")) == f"lost {tag}"
    assert reason(GOOD.replace(tag, tag.replace("<", "["))) == f"lost {tag}"
    assert reason(GOOD.replace(tag, tag.upper())) == f"lost {tag}"


def test_every_tag_of_search_r1_s_instruction_is_asked_for():
    for tag in ("think", "search", "information", "answer"):
        for written in (f"<{tag}>", f"</{tag}>"):
            without = "Really: " + SEARCH_R1.replace(written, "")
            assert reason(without, parent=SEARCH_R1, max_tokens=1000) == f"lost {written}"
    assert reason("Really: " + SEARCH_R1, parent=SEARCH_R1, max_tokens=1000) == ""


def test_new_tags_are_welcome_and_a_parent_without_tags_asks_for_none():
    assert reason(f"{GOOD} Write a <plan> </plan>.") == ""
    assert reason("Search first.", parent="Just answer, x < y > z.") == ""


@pytest.mark.parametrize(
    "gold, leaked",
    [
        ("Andrei Tarkovsky", "For films the answer is often andrei  TARKOVSKY."),
        ("Andrei Tarkovsky", "Search (Andrei Tarkovsky)!"),
        ("1972", "For example, 1972."),
        ("Łódź", "For example, łódź."),
    ],
)
def test_a_candidate_that_names_a_gold_answer_is_rejected(gold, leaked):
    assert reason(f"{GOOD} {leaked}", golds=["other", gold]) == f"contains the gold answer {gold!r}"


@pytest.mark.parametrize(
    "gold, innocent",
    [
        ("Andrei Tarkovsky", "Search for directors such as Andrei."),
        ("hotel", "Search for hotels."),  # inside another word
        ("one", "Take one step."),  # too short to be a leak: "a", "yes", "two" are words of any prompt
        ("the", "Read the results."),
        ("", "Whatever."),
        ("!!!", "Whatever!!!"),
        ("answer", "Give the answer."),  # the parent names it already
    ],
)
def test_a_gold_answer_leaks_only_as_whole_words_that_are_long_and_new(gold, innocent):
    assert reason(f"{innocent} {PARENT}", golds=[gold]) == ""


def test_the_example_answer_of_search_r1_s_instruction_is_no_leak():
    assert "Beijing" in SEARCH_R1
    assert reason("Really: " + SEARCH_R1, parent=SEARCH_R1, golds=["Beijing"], max_tokens=1000) == ""
    assert reason("Beijing: " + PARENT, golds=["Beijing"]) == "contains the gold answer 'Beijing'"


# --- the client, against a real HTTP server -----------------------------------------------------------------------


def completion(reply="hello", **more):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]} | more


class Endpoint(ThreadingHTTPServer):
    """Answers POSTs with its `script`, one entry a request (the last one again and again); keeps the requests.

    An entry is a completion (dict), (status, headers, body) or a function of the handler.
    """

    daemon_threads = True

    def __init__(self, *script, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.script, self.requests, self.closing = list(script), [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        script = self.server.script
        self.server.requests.append((self.path, dict(self.headers), body))
        act = script.pop(0) if len(script) > 1 else script[0]
        if callable(act):
            return act(self)
        status, headers, text = (200, {}, json.dumps(act)) if isinstance(act, dict) else act
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def hang_up(handler):
    handler.close_connection = True


def too_slow(handler):
    handler.server.closing.wait(5)


@pytest.fixture
def endpoint():
    """Start endpoints; they stop with the test."""
    started = []

    def start(*script, **kwargs):
        started.append(Endpoint(*script, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def waits(monkeypatch):
    """What the client would have slept, in seconds; it does not."""
    slept = []
    monkeypatch.setattr(reflect.time, "sleep", slept.append)
    return slept


def test_the_client_speaks_openai_s_chat_completions(endpoint):
    server = endpoint(completion("héllo", usage={"prompt_tokens": 11, "completion_tokens": 7}))
    call = Optimizer(server.url, "some-model", "sk-secret").ask("what?\n☃", "t15 r0")
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer sk-secret"
    assert json.loads(body) == {"model": "some-model", "messages": [{"role": "user", "content": "what?\n☃"}]}
    assert call["reply"] == "héllo"
    assert (call["prompt_tokens"], call["completion_tokens"]) == (11, 7)
    assert 0 <= call["seconds"] < 5
    assert call["paid_before"] is False
    assert "sk-secret" not in json.dumps(call)  # it goes to a log file


def test_without_a_key_there_is_no_authorization_header(endpoint):
    server = endpoint(completion())
    Optimizer(server.url, "m").ask("p", "t0 r0")
    assert "Authorization" not in server.requests[0][1]


def test_a_base_url_may_end_in_a_slash(endpoint):
    server = endpoint(completion())
    assert Optimizer(server.url + "/", "m").ask("p", "t0 r0")["reply"] == "hello"
    assert server.requests[0][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"usage": None},
        {"usage": {}},
        {"usage": "free"},
        {"usage": {"prompt_tokens": None, "completion_tokens": None}},
    ],
)
def test_tokens_that_the_endpoint_does_not_count_are_estimated(endpoint, usage):
    call = Optimizer(endpoint(completion("r" * 400, **usage)).url, "m").ask("p" * 4000, "t0 r0")
    assert (call["prompt_tokens"], call["completion_tokens"]) == (1000, 100)


def test_a_reply_of_null_is_an_empty_reply(endpoint):
    assert Optimizer(endpoint(completion(None)).url, "m").ask("p", "t0 r0")["reply"] == ""


@pytest.mark.parametrize("fault", [(429, {}, "slow down"), (500, {}, ""), (503, {}, "<html>"), (529, {}, ""), hang_up])
def test_a_fault_that_can_pass_is_tried_again(endpoint, waits, fault):
    server = endpoint(fault, fault, completion("at last"))
    assert Optimizer(server.url, "m").ask("p", "t0 r0")["reply"] == "at last"
    assert len(server.requests) == 3
    assert len({body for _, _, body in server.requests}) == 1
    assert len(waits) == 2


def test_the_wait_doubles_and_is_jittered(endpoint, waits):
    server = endpoint((500, {}, ""))
    for _ in range(8):
        with pytest.raises(OptimizerDown):
            Optimizer(server.url, "m", retries=4, backoff=1.0).ask("p", "t0 r0")
    assert len(server.requests) == 8 * 5
    for k, at_least, at_most in [(0, 0.5, 1.5), (1, 1, 3), (2, 2, 6), (3, 4, 12)]:
        waited = waits[k::4]
        assert all(at_least <= w <= at_most for w in waited)
        assert max(waited) - min(waited) > 0.05 * at_least


@pytest.mark.parametrize("asked, at_least, at_most", [("17", 17, 17), ("7.5", 7.5, 7.5), ("3600", 60, 60)])
def test_retry_after_in_seconds_is_honoured_up_to_a_minute(endpoint, waits, asked, at_least, at_most):
    server = endpoint((429, {"Retry-After": asked}, ""), completion())
    Optimizer(server.url, "m").ask("p", "t0 r0")
    (wait,) = waits
    assert at_least <= wait <= at_most


def test_retry_after_as_a_date_is_honoured(endpoint, waits):
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    Optimizer(endpoint((503, {"Retry-After": date}, ""), completion()).url, "m").ask("p", "t0 r0")
    (wait,) = waits
    assert 25 < wait <= 30


@pytest.mark.parametrize("asked", ["0", "-5", "nan", "soon", "", "yesterday GMT", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_of_nothing_or_nonsense_waits_as_usual(endpoint, waits, asked):
    Optimizer(endpoint((429, {"Retry-After": asked}, ""), completion()).url, "m").ask("p", "t0 r0")
    (wait,) = waits
    assert 0.5 <= wait <= 1.5


def test_a_refused_connection_is_tried_again(endpoint, waits, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(reflect.time, "sleep", lambda _: endpoint(completion("up now"), port=port))
    assert Optimizer(f"http://127.0.0.1:{port}/v1", "m").ask("p", "t0 r0")["reply"] == "up now"


def test_a_reply_that_takes_too_long_is_asked_for_again(endpoint, waits):
    server = endpoint(too_slow, completion("in time"))
    assert Optimizer(server.url, "m", timeout=0.3).ask("p", "t0 r0")["reply"] == "in time"
    assert len(server.requests) == 2


def test_an_optimizer_that_stays_away_is_down_and_says_why(endpoint, waits):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(OptimizerDown, match="ConnectionError"):
        Optimizer(url, "m", retries=2).ask("p", "t0 r0")
    assert len(waits) == 2
    with pytest.raises(OptimizerDown, match="Timeout"):
        Optimizer(endpoint(too_slow).url, "m", timeout=0.1, retries=1).ask("p", "t0 r0")
    with pytest.raises(OptimizerDown, match="HTTP 503: overloaded"):
        Optimizer(endpoint((503, {}, "overloaded\n")).url, "m", retries=1).ask("p", "t0 r0")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_fault_of_ours_is_not_tried_again(endpoint, waits, status):
    server = endpoint((status, {}, '{"error": "no such key"}'))
    with pytest.raises(OptimizerDown, match=f"HTTP {status}: .*no such key"):
        Optimizer(server.url, "m", "bad").ask("p", "t0 r0")
    assert len(server.requests) == 1
    assert waits == []


@pytest.mark.parametrize(
    "text",
    [
        "<html>gateway</html>",
        "",
        "[]",
        "null",
        '"hello"',
        "{}",
        '{"error": {"message": "quota"}}',
        '{"choices": []}',
        '{"choices": [{"text": "legacy"}]}',
        '{"choices": [{"message": "hello"}]}',
        '{"choices": [{"message": {"content": [{"type": "text", "text": "parts"}]}}]}',
        '{"choices": [{"message": {"content": "hel',
    ],
)
def test_what_is_no_chat_completion_is_never_taken_for_one(endpoint, waits, text):
    server = endpoint((200, {"Content-Type": "application/json"}, text))
    with pytest.raises(OptimizerDown):
        Optimizer(server.url, "m", retries=1).ask("p", "t0 r0")
    assert len(server.requests) == 2


def test_a_url_that_is_none_is_down_too(waits):
    for url in ("", "localhost:8001/v1", "http://", "http://["):
        with pytest.raises(OptimizerDown):
            Optimizer(url, "m", retries=1).ask("p", "t0 r0")


def test_a_proxy_from_the_environment_is_not_asked_for_a_server_on_this_machine(endpoint, waits, monkeypatch):
    proxy = endpoint((502, {}, "I am the proxy"))
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert Optimizer(endpoint(completion()).url, "m", retries=0).ask("p", "t0 r0")["reply"] == "hello"
    assert proxy.requests == []


# --- no call is paid twice ----------------------------------------------------------------------------------------


def test_a_resumed_run_does_not_pay_again_for_a_reply(endpoint):
    server = endpoint(completion("first"), completion("second"))
    before = Optimizer(server.url, "m")
    call = before.ask("prompt", "t15 r0")
    log = [{"t": 15, "call": call | {"prompt": "prompt"}}, {"t": 15, "accepted": []}, {"t": 15, "verified": []}]
    log = [json.loads(json.dumps(row)) for row in log]  # as reflections.jsonl keeps them
    after = Optimizer(server.url, "m", paid=paid_calls(log))
    again = after.ask("prompt", "t15 r0")
    assert len(server.requests) == 1
    assert again["paid_before"] is True
    assert {k: again[k] for k in call if k != "paid_before"} == {k: v for k, v in call.items() if k != "paid_before"}


@pytest.mark.parametrize("prompt, when, model", [("other", "t15 r0", "m"), ("p", "t15 r1", "m"), ("p", "t15 r0", "m2")])
def test_another_prompt_round_or_model_is_another_call(endpoint, prompt, when, model):
    server = endpoint(completion("first"), completion("second"))
    call = Optimizer(server.url, "m").ask("p", "t15 r0")
    after = Optimizer(server.url, model, paid=paid_calls([{"call": call}]))
    assert after.ask(prompt, when)["reply"] == "second"
    assert len(server.requests) == 2


# --- counting tokens ----------------------------------------------------------------------------------------------


def test_without_tiktoken_or_its_encodings_tokens_are_estimated(monkeypatch):
    class Unreachable:
        @staticmethod
        def get_encoding(name):
            raise ConnectionError("no network")

    for module in (None, Unreachable):  # None: not installed
        monkeypatch.setitem(sys.modules, "tiktoken", module)
        count, how = token_counter.__wrapped__()
        assert "estimate" in how
        assert count("") >= 0
        assert 90 <= count("word " * 80) <= 110


def test_with_tiktoken_tokens_are_counted_and_its_special_tokens_are_ordinary_text(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    bytes_ = tiktoken.Encoding(  # an encoding of single bytes, because the real one has to be downloaded
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={"<|end|>": 256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"o200k_base": bytes_}.__getitem__)
    count, how = token_counter.__wrapped__()  # past its cache
    assert how == "tiktoken"
    assert count("hello") == 5
    assert count("<|end|>") == 7
