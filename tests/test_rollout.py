"""A trajectory as the specification has it, with a scripted policy and a real retrieval server; the search client."""

import json
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_model import FIXTURE

import rollout as module
from config import SEARCH_R1
from data import Question
from engines.torch_engine import TorchEngine
from grpo import advantages
from harness.servers import Child
from rollout import INVALID, STOP, Search, SearchDown, observation, observation_ids, prompt_ids, query_of, rollout

ROOT = Path(__file__).parents[1]
ASKED = Question("q-0", "Who designed the Sydney Opera House?", ("Jørn Utzon",), "fixture")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Child([str(ROOT / "retrieval_server.py"), "--corpus", str(FIXTURE / "corpus.jsonl")], log) as child:
        yield child.url


@pytest.fixture
def search(server):
    return Search(server, topk=3, retries=0)


def spelled(tokenizer, text):
    """Ids that say `text` as a policy may and a tokenizer never would: a byte each."""
    return [i for piece in text for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]


class Script:
    """An engine that plays given texts: row k's turns are texts[k], and the last row ends first.

    Its log-probs are -1, -2, ... in each turn.
    """

    max_rows, lockstep = 512, True

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts = tokenizer, texts
        self.contexts = []  # of each call

    def begin(self, seed):
        self.turn = 0

    def generate(self, contexts, max_new, temperature):
        self.contexts.append({row: list(ids) for row, ids in contexts.items()})
        for row in reversed(contexts):
            ids = spelled(self.tokenizer, self.texts[row][self.turn])
            yield row, ids, [-1.0 - k for k in range(len(ids))]
        self.turn += 1


LIMITS = dict(max_turns=4, max_response=500, max_observation=500, max_prompt=4096, temperature=1.0, seed=0)


def play(tokenizer, search, *turns, instruction="Answer.", **limits):
    """(trajectory, engine) of one question whose answer was scripted as these turns."""
    engine = Script(tokenizer, turns)
    [tau] = rollout(engine, tokenizer, search, [(7, instruction, ASKED, 3)], **LIMITS | limits)
    return tau, engine


# ---- tokens in, tokens out


def test_the_mask_is_1_on_exactly_the_sampled_tokens(tokenizer, search):
    turns = "<think>hm</think><search> capital of France </search>", "well, Ærø", "<answer>Jørn Utzon</answer>"
    tau, _ = play(tokenizer, search, *turns)
    said = [spelled(tokenizer, text) for text in turns]
    assert all(tokenizer(text)["input_ids"] != ids for text, ids in zip(turns, said, strict=True))  # would re-encode
    documents = tau.turns[0]["documents"]
    parts = [  # (ids, sampled?)
        (prompt_ids(tokenizer, "Answer.", ASKED.text), 0),
        (said[0], 1), (tokenizer(observation(documents))["input_ids"], 0),
        (said[1], 1), (tokenizer(INVALID)["input_ids"], 0),
        (said[2], 1),
    ]  # fmt: skip
    assert tau.ids == [i for ids, _ in parts for i in ids]
    assert tau.mask == [sampled for ids, sampled in parts for _ in ids]
    assert tau.logps == [sampled * (-1.0 - k) for ids, sampled in parts for k in range(len(ids))]
    assert tau.prompt_tokens == len(parts[0][0])


def test_what_a_trajectory_tells(tokenizer, search):
    turns = "<search> capital of France </search>", "Paris?", "<answer> Paris </answer>"
    tau, _ = play(tokenizer, search, *turns)
    assert (tau.instruction, tau.question, tau.group) == (7, "q-0", 3)
    assert (tau.asked, tau.served, tau.stop, tau.prediction) == (1, 1, "answer", "Paris")
    documents = tau.turns[0]["documents"]
    assert tau.turns == [
        {"text": turns[0], "query": "capital of France", "documents": documents},
        {"text": turns[1]},
        {"text": turns[2]},
    ]
    assert tau.response == turns[0] + observation(documents) + turns[1] + INVALID + turns[2]
    row = json.loads(json.dumps(tau.record()))
    assert (row["tokens"], row["action_tokens"]) == (len(tau.ids), sum(tau.mask))
    assert row["turns"] == tau.turns and not {"ids", "mask", "logps"} & set(row)


def test_a_turn_is_sampled_from_the_whole_context_so_far(tokenizer, search):
    tau, engine = play(tokenizer, search, "hm", "<search>Seine</search>", "<answer>x</answer>")
    begins = [k for k in range(1, len(tau.mask)) if tau.mask[k - 1 : k + 1] == [0, 1]]
    assert [calls[0] for calls in engine.contexts] == [tau.ids[:k] for k in begins]


def test_the_prompt_is_the_chat_template_of_instruction_and_question(tokenizer):
    assert tokenizer.decode(prompt_ids(tokenizer, "Be brief.", "Who?")) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nBe brief.\n\nQuestion: Who?\n<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- observations


def test_an_observation_is_the_passages_with_their_titles(tokenizer, search):
    tau, _ = play(tokenizer, search, "<search>river Seine Paris</search>", "<answer>x</answer>")
    corpus = [json.loads(line)["contents"] for line in (FIXTURE / "corpus.jsonl").open(encoding="utf-8")]
    documents = tau.turns[0]["documents"]
    assert len(documents) == 3 and set(documents) <= set(corpus) and documents[0].startswith('"Paris"\n')
    (a, b, c) = [document.split("\n", 1) for document in documents]
    assert tau.response == (
        "<search>river Seine Paris</search>\n\n"
        f"<information>Doc 1(Title: Paris) {a[1]}\n"
        f"Doc 2(Title: {b[0][1:-1]}) {b[1]}\n"
        f"Doc 3(Title: {c[0][1:-1]}) {c[1]}</information>\n\n"
        "<answer>x</answer>"
    )


def test_a_search_that_finds_nothing_is_served_with_an_empty_observation(tokenizer, search):
    for nothing in ("qqqq", ""):
        tau, _ = play(tokenizer, search, f"<search>{nothing}</search>", "<answer>x</answer>")
        assert (tau.asked, tau.served, tau.turns[0]["documents"]) == (1, 1, [])
        assert "\n\n<information></information>\n\n" in tau.response


def test_a_long_observation_is_cut_inside_its_tag(policy):
    tokenizer = policy[1]
    documents = ['"Paris"\nThe capital of France.', '"Rome"\n' + "A city with a river. " * 30]
    whole = observation_ids(tokenizer, documents, 10_000)
    assert tokenizer.decode(whole).split() == tokenizer.decode(tokenizer(observation(documents))["input_ids"]).split()
    end = tokenizer("</information>\n\n", add_special_tokens=False)["input_ids"]
    for limit in [*range(1, len(whole), 7), len(whole) - 1, len(whole), len(whole) + 1]:
        ids = observation_ids(tokenizer, documents, limit)
        assert len(ids) == max(len(end), min(limit, len(whole)))
        assert ids[-len(end) :] == end and ids[: -len(end)] == whole[: len(ids) - len(end)]


def test_the_observation_limit_holds_in_a_rollout(tokenizer, search):
    tau, _ = play(tokenizer, search, "<search>river Seine</search>", "<answer>x</answer>", max_observation=60)
    seen = tau.mask[tau.prompt_tokens :].count(0)
    assert seen == 60 and "</information>\n\n<answer>" in tau.response


# ---- actions


def test_an_invalid_action_gets_a_corrective_message_and_costs_a_turn(tokenizer, search):
    tau, _ = play(tokenizer, search, "I think so.", "<search>Seine</search>", max_turns=1)
    assert tau.response == "I think so." + INVALID + "<search>Seine</search>"
    assert (tau.asked, tau.served, tau.invalid, tau.stop) == (1, 0, 1, "turns")


def test_an_empty_answer_is_an_answer(tokenizer, search):
    tau, _ = play(tokenizer, search, "<answer> </answer>", "never")
    assert (tau.stop, tau.prediction, len(tau.turns)) == ("answer", "", 1)


@pytest.mark.parametrize("last", ["<search>c</search>", "no idea"])
def test_after_max_turns_searches_comes_a_last_turn_in_which_no_search_is_served(tokenizer, server, last):
    sent = []
    search = Search(server, topk=3)
    submit = search.submit
    search.submit = lambda query: sent.append(query) or submit(query)
    tau, _ = play(tokenizer, search, "<search>a</search>", "<search>b</search>", last, "never", max_turns=2)
    assert sent == ["a", "b"]
    assert (tau.asked, tau.served, tau.stop, tau.prediction) == (2 + ("search" in last), 2, "turns", None)
    assert tau.response.endswith(last) and tau.mask[-1] == 1  # no observation follows
    tau, _ = play(tokenizer, search, "<search>a</search>", "<search>b</search>", "<answer>c</answer>", max_turns=2)
    assert (tau.stop, tau.prediction) == ("answer", "c")


def test_a_full_context_ends_the_trajectory_and_never_costs_the_instruction(tokenizer, search):
    turns = "<search>Seine</search>", "hm", "<answer>x</answer>"
    instruction = "Answer. " * 50
    free, _ = play(tokenizer, search, *turns, instruction=instruction)
    begins = [k for k in range(1, len(free.ids)) if free.mask[k - 1 : k + 1] == [0, 1]]  # tokens before each turn
    for limit, actions in [(begins[0] - 1, 0), (begins[0], 1), (begins[1] - 1, 1), (begins[1], 2), (begins[2], 3)]:
        tau, engine = play(tokenizer, search, *turns, instruction=instruction, max_prompt=limit)
        assert len(tau.turns) == actions
        assert tau.stop == ("length" if actions < 3 else "answer")
        assert tau.ids == free.ids[: [*begins, len(free.ids)][actions]]  # from its first token on: nothing is cut away
        assert tau.prediction == ("x" if actions == 3 else None)


def test_rows_end_at_different_times_and_only_the_others_go_on(tokenizer, search):
    answer = "<answer>x</answer>"
    script = [[answer], ["hm", "<search>Rhine</search>", answer], ["<search>Seine</search>", "hm", "hm", answer]]
    engine = Script(tokenizer, *script)
    jobs = [(0, "Answer.", ASKED, k) for k in range(3)]
    taus = rollout(engine, tokenizer, search, jobs, **LIMITS)
    assert [list(rows) for rows in engine.contexts] == [[0, 1, 2], [1, 2], [1, 2], [2]]  # in the order of the jobs
    assert [[turn["text"] for turn in tau.turns] for tau in taus] == script
    assert [tau.group for tau in taus] == [0, 1, 2]


def test_a_search_leaves_while_other_rows_still_generate(tokenizer, search):
    events = []
    submit = search.submit
    search.submit = lambda query: events.append(query) or submit(query)

    class Slow(Script):
        def generate(self, *args):
            for row, ids, logps in super().generate(*args):
                yield row, ids, logps
                events.append(row)

    a, b, answer = "<search>a</search>", "<search>b</search>", "<answer>x</answer>"
    rollout(Slow(tokenizer, [a, answer], [b, answer]), tokenizer, search, [(0, "", ASKED, 0)] * 2, **LIMITS)
    assert events[:4] == ["b", 1, "a", 0]


class Free(Script):
    """A script without lockstep: a turn of row k takes as many calls of `generate` as its text has words."""

    max_rows, lockstep = 10**9, False

    def begin(self, seed):
        self.under_way, self.turns, self.calls = {}, {}, 0

    def generate(self, contexts, max_new, temperature):
        self.calls += 1
        assert self.calls < 1000
        for row, ids in contexts.items():
            self.contexts.append((self.calls, row, list(ids)))
            text = self.texts[row][self.turns.setdefault(row, 0)]
            self.turns[row] += 1
            self.under_way[row] = text, len(text.split())
        for row, (text, left) in list(self.under_way.items()):
            self.under_way[row] = text, left - 1
            if left == 1:
                del self.under_way[row]
                ids = spelled(self.tokenizer, text)
                yield row, ids, [-1.0 - k for k in range(len(ids))]


def test_without_lockstep_no_row_waits_for_another(tokenizer):
    """Row 1's search never comes back before row 0 has ended; row 2 generates for long."""
    held, asked = Future(), []

    class Held(Found):
        def submit(self, query):
            asked.append(query)
            return held if query == "slow" else super().submit(query)

    class Watched(Free):
        def generate(self, contexts, *rest):
            if self.calls == 30:  # row 0 has long ended
                held.set_result(['"S"\nslow'])
            yield from super().generate(contexts, *rest)

    search, answer = "<search>fast</search>", "<answer>x</answer>"
    long = "<search> a" + " b" * 50 + "</search>"
    script = [search, search, answer], ["<search>slow</search>", answer], [long, answer]
    engine = Watched(tokenizer, *script)
    taus = rollout(engine, tokenizer, Held('"F"\nfast'), [(0, "", ASKED, k) for k in range(3)], **LIMITS)
    assert [[turn["text"] for turn in tau.turns] for tau in taus] == [list(texts) for texts in script]
    starts = [(call, row) for call, row, _ in engine.contexts]
    assert starts[:5] == [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0)]  # row 0 goes on while 1 searches and 2 generates
    assert starts[5][1] == 1 and 30 < starts[5][0] < 35 and starts[6][0] > 50
    assert asked[:3] == ["fast", "slow", "fast"]
    for _, row, ids in engine.contexts:  # every turn continues the row's own context
        assert taus[row].ids[: len(ids)] == ids


def test_an_engine_with_nothing_to_do_waits_for_a_search_instead_of_spinning(tokenizer):
    held = Future()

    class Held(Found):
        def submit(self, query):
            threading.Timer(0.2, held.set_result, [['"S"\nslow']]).start()
            return held

    engine = Free(tokenizer, ["<search>slow</search>", "<answer>x</answer>"])
    [tau] = rollout(engine, tokenizer, Held(), [(0, "", ASKED, 0)], **LIMITS)
    assert tau.served == 1 and engine.calls <= 3


def test_in_lockstep_a_turn_begins_when_all_searches_are_back(tokenizer):
    slow = Future()

    class Held(Found):
        def submit(self, query):
            if query == "slow":
                threading.Timer(0.2, slow.set_result, [['"S"\nslow']]).start()
                return slow
            return super().submit(query)

    answer = "<answer>x</answer>"
    engine = Script(tokenizer, ["<search>slow</search>", answer], ["<search>fast</search>", answer])
    rollout(engine, tokenizer, Held(), [(0, "", ASKED, 0)] * 2, **LIMITS)
    assert [list(rows) for rows in engine.contexts] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    "text, query",
    [
        ("<search> who </search>", "who"),
        ("<think>x</think><search>two\nlines</search>\n\n", "two\nlines"),  # a token may say more than the tag
        ("<search>a <search>b</search>", "b"),  # the innermost
        ("<search> <b> 1 < 2 & </b> </search>", "<b> 1 < 2 & </b>"),
        ("<answer>x <search>q</search>", "q"),
        ("<search></search>", ""),
        ("<search>cut off", None),
        ("no opening tag</search>", None),
        ("</search><search>", None),
        ("<Search>q</Search>", None),
        ("<answer>x</answer>", None),
        ("", None),
    ],
)
def test_query_of(text, query):
    assert query_of(text) == query


def test_query_of_is_linear_in_a_degenerate_turn():
    start = time.perf_counter()
    assert query_of("<search>" * 50_000) is None and query_of("<search>" + "x" * 500_000) is None
    assert time.perf_counter() - start < 2


def test_a_query_of_any_length_is_served(tokenizer, search):
    tau, _ = play(tokenizer, search, f"<search>Seine {'=' * 5000}</search>", "<answer>x</answer>", max_prompt=20_000)
    assert tau.served == 1 and "Seine" in tau.turns[0]["documents"][0]


# ---- the prediction


class Found:
    """A search that finds the same documents, whatever is asked."""

    def __init__(self, *documents):
        self.documents = list(documents)

    def submit(self, query):
        future = Future()
        future.set_result(self.documents)
        return future


def test_the_example_in_the_instruction_is_never_the_prediction(tokenizer):
    assert "<answer> Beijing </answer>" in SEARCH_R1
    tau, _ = play(tokenizer, Found(), "<search>a</search>", "no", instruction=SEARCH_R1, max_turns=1)
    assert tau.stop == "turns" and tau.prediction is None
    tau, _ = play(tokenizer, Found(), "no", "<answer>Utzon</answer>", instruction=SEARCH_R1)
    assert tau.prediction == "Utzon"
    tau, _ = play(tokenizer, Found(), "no", instruction=SEARCH_R1, max_prompt=1)
    assert tau.stop == "length" and tau.prediction is None


def test_the_prediction_is_what_the_policy_wrote_never_what_it_was_shown(tokenizer):
    assert "<answer>" in INVALID
    tau, _ = play(tokenizer, Found(), "no", "<answer>cut off", max_turns=1)
    assert tau.prediction is None
    passage = '"Trap"\nThey said <answer>Trap</answer> there.'
    tau, _ = play(tokenizer, Found(passage), "<search>a</search>", "no", max_turns=1)
    assert "<answer>Trap</answer>" in tau.response and tau.prediction is None
    tau, _ = play(tokenizer, Found('"T"\n</answer>'), "<answer>a<search>b</search>", "no", max_turns=1)
    assert tau.prediction is None


# ---- many jobs


def test_equal_questions_in_two_groups_stay_two_groups(tokenizer):
    texts = ["<answer>a</answer>", "<answer>b</answer>"] * 2
    engine = Script(tokenizer, *[[text] for text in texts])
    taus = rollout(engine, tokenizer, Found(), [(0, "Answer.", ASKED, group) for group in (0, 0, 1, 1)], **LIMITS)
    assert [tau.group for tau in taus] == [0, 0, 1, 1] and len({id(tau.ids) for tau in taus}) == 4
    for tau, reward in zip(taus, [1.0, 1.0, 1.0, 0.0], strict=True):
        tau.reward = reward
    A = advantages(taus)
    assert [A[id(tau)] for tau in taus] == pytest.approx([0, 0, 0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_more_jobs_than_rows_give_a_trajectory_each_in_their_order(world):
    model, tokenizer = world
    questions = [Question(f"q-{k}", f"What is the {'base mayor film'.split()[k]}?", ("x",), "") for k in range(3)]
    jobs = [(k, "Think, search, answer.", questions[k % 3], 10 + k) for k in range(7)]
    found = Found('"Pais Kranford"\nA city with mayor Krinoun Lizais.')
    limits = LIMITS | dict(max_turns=2, max_response=30, temperature=0.0)
    together = rollout(TorchEngine(model, tokenizer, STOP), tokenizer, found, jobs, **limits)
    heard = []
    few = TorchEngine(model, tokenizer, STOP, max_rows=3)
    apart = rollout(few, tokenizer, found, jobs, progress=heard.append, **limits)
    assert heard == [3, 6, 7]
    for k, tau in enumerate(apart):
        assert (tau.instruction, tau.question, tau.group) == (k, f"q-{k % 3}", 10 + k)
    assert all(tau.stop for tau in apart)
    assert [tau.ids for tau in apart] == [tau.ids for tau in together]  # greedy: it does not matter who sits beside


def test_two_batches_of_rows_are_not_sampled_alike(world):
    model, tokenizer = world
    engine = TorchEngine(model, tokenizer, STOP, max_rows=4)
    limits = LIMITS | dict(max_turns=2, max_response=30)
    jobs = [(0, "Think, search, answer.", ASKED, 0)] * 8
    taus = rollout(engine, tokenizer, Found(), jobs, **limits)
    assert [tau.ids for tau in taus[:4]] != [tau.ids for tau in taus[4:]]
    again = rollout(engine, tokenizer, Found(), jobs, **limits)
    assert [(tau.ids, tau.logps) for tau in again] == [(tau.ids, tau.logps) for tau in taus]
    other = rollout(engine, tokenizer, Found(), jobs, **limits | dict(seed=1))
    assert [tau.ids for tau in other] != [tau.ids for tau in taus]


# ---- the search client


class Retriever(ThreadingHTTPServer):
    """POST /retrieve as Search-R1 has it; its first answers are the given faults, one a request.

    A fault is a status, a body, "drop" (the connection closes without an answer) or "hang" (no answer for a while).
    Every query finds itself. While `gate` is clear a request waits.
    """

    daemon_threads = True

    def __init__(self, *faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.batches, self.gate = list(faults), [], threading.Event()
        self.gate.set()
        self.retry_after, self.connections = [], 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        pass  # a client that has given up waiting


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.faults.pop(0) if self.server.faults else None
        self.server.batches.append(body["queries"])
        self.server.body = body
        assert self.server.gate.wait(5)
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "hang":
            time.sleep(0.8)
        status = fault if isinstance(fault, int) else 200
        hits = [[{"document": {"id": "0", "contents": f'"{q}"\nText.'}, "score": 1.0}] for q in body["queries"]]
        answer = fault.encode() if isinstance(fault, str) and fault != "hang" else json.dumps({"result": hits}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        if self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after.pop(0))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def retriever():
    """Retriever, whose instances are stopped at the end."""
    started = []

    def start(*faults):
        started.append(Retriever(*faults))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


@pytest.fixture(autouse=True)
def naps(monkeypatch):
    """The seconds that the client would have slept between retries; it does not sleep here."""
    naps = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=naps.append))
    return naps


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_query_brings_its_passages(retriever):
    server = retriever()
    assert Search(server.url + "/", topk=5).submit("who").result(10) == ['"who"\nText.']
    assert server.body == {"queries": ["who"], "topk": 5, "return_scores": True}


def test_queries_that_wait_leave_together_and_a_duplicate_in_flight_is_sent_once(retriever):
    server = retriever()
    server.gate.clear()
    search = Search(server.url, topk=3)
    first = search.submit("a")
    wait_until(lambda: server.batches)
    futures = {query: search.submit(query) for query in "bcd"}
    assert search.submit("a") is first and search.submit("c") is futures["c"]
    server.gate.set()
    assert {query: future.result(10) for query, future in futures.items()} == {q: [f'"{q}"\nText.'] for q in "bcd"}
    assert server.batches == [["a"], ["b", "c", "d"]]
    search.submit("a").result(10)  # answered before: nothing is under way, so it is asked again
    assert server.batches[2:] == [["a"]]


def test_a_batch_is_bounded(retriever):
    server = retriever()
    server.gate.clear()
    search = Search(server.url, topk=3)
    futures = [search.submit("first")]
    wait_until(lambda: server.batches)
    futures += [search.submit(f"q{k}") for k in range(600)]
    server.gate.set()
    assert [future.result(10)[0] for future in futures[1:]] == [f'"q{k}"\nText.' for k in range(600)]
    assert [len(batch) for batch in server.batches] == [1, 256, 256, 88]


@pytest.mark.parametrize("fault", [500, 503, "drop", "hang"])
def test_a_fault_that_can_pass_is_retried(retriever, naps, fault):
    server = retriever(fault, fault)
    search = Search(server.url, topk=3, timeout=0.4 if fault == "hang" else 10, retries=3)
    assert search.submit("who").result(10) == ['"who"\nText.']
    assert server.batches == [["who"]] * 3 and search.faults == 2
    assert naps == [0.5, 1.0]  # longer each time


@pytest.mark.parametrize("fault, told", [(500, "HTTP 500"), ("drop", "ConnectionError"), ("hang", "ReadTimeout")])
def test_a_fault_that_stays_is_search_down(retriever, naps, fault, told):
    server = retriever(*[fault] * 8)
    search = Search(server.url, topk=3, timeout=0.4 if fault == "hang" else 10, retries=2)
    with pytest.raises(SearchDown, match=f"{server.url}/retrieve: {told}, 3 times"):
        search.submit("who").result(10)
    assert naps == [0.5, 1.0] and len(server.batches) == 3
    server.faults.clear()
    assert search.submit("who").result(10)  # the client itself is well


def test_after_a_fault_the_next_server_is_asked_at_once_and_stays_the_one_in_use(retriever, naps):
    broken, well = retriever(500, "drop"), retriever()
    search = Search(f"{broken.url}/, {well.url}", topk=3)
    assert search.submit("who").result(10) == search.submit("who").result(10) == ['"who"\nText.']
    assert len(broken.batches) == 1 and len(well.batches) == 2 and search.faults == 1 and naps == []
    well.faults.append(503)
    assert search.submit("when").result(10)
    assert len(broken.batches) == 2 and search.faults == 3 and naps == [0.5]  # both failed: a pause, then well again
    assert search.urls == [well.url, broken.url] and len(well.batches) == 4  # who, who, when, when


def test_when_all_servers_are_gone_all_are_named(naps):
    search = Search("http://127.0.0.1:9,http://127.0.0.1:19", topk=3, retries=1)
    with pytest.raises(SearchDown, match="1:9 and http://127.0.0.1:19/retrieve: ConnectionError, 2 times"):
        search.submit("who").result(10)
    assert search.faults == 4 and naps == [0.5]


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(retriever, naps):
    server = retriever(503, 503, 503)
    server.retry_after = ["3", "soon", "9000"]
    assert Search(server.url, topk=3).submit("who").result(10)
    assert naps == [3.0, 1.0, 60.0]  # what it asked; back-off where it asked nothing of use; never more than a minute


def test_a_connection_is_kept(retriever):
    server = retriever()
    search = Search(server.url, topk=3)
    for k in range(5):
        search.submit(str(k)).result(10)
    assert len(server.batches) == 5 and server.connections == 1


def test_back_off_is_bounded(naps):
    search = Search("http://127.0.0.1:9", topk=3)  # nobody listens there
    with pytest.raises(SearchDown, match="ConnectionError, 7 times"):
        search.submit("who").result(10)
    assert naps == [0.5, 1, 2, 4, 8, 8]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_retried(retriever, status):
    server = retriever(status)
    with pytest.raises(SearchDown, match=str(status)):
        Search(server.url, topk=3).submit("who").result(10)
    assert len(server.batches) == 1


@pytest.mark.parametrize(
    "body",
    [
        "no json", "[]", "null", "{}", '{"result": null}', '{"result": []}', '{"result": [[], []]}', '{"result": [3]}',
        '{"result": [["text"]]}', '{"result": [[{"id": "0", "contents": "x"}]]}', '{"result": [[{"document": {}}]]}',
        '{"result": [[{"document": {"contents": null}}]]}',
    ],
)  # fmt: skip
def test_an_answer_that_is_not_search_r1s_is_search_down(retriever, body):
    server = retriever(body)
    with pytest.raises(SearchDown, match="not a Search-R1 answer"):
        Search(server.url, topk=3).submit("who").result(10)
    assert len(server.batches) == 1


def test_before_a_retry_the_server_is_revived_and_its_new_url_used(retriever):
    new = retriever()
    urls = ["", new.url + "/"]  # the first attempt to revive it changes nothing
    search = Search("http://127.0.0.1:9", topk=3, revive=lambda: urls.pop(0))
    assert search.submit("who").result(10) == ['"who"\nText.']
    assert not urls and search.urls == [new.url] and search.faults == 2


def test_a_server_that_cannot_be_revived_is_search_down():
    def revive():
        raise SystemExit("retrieval_server.py stopped while starting: no memory")  # as servers.Child does

    search = Search("http://127.0.0.1:9", topk=3, revive=revive)
    with pytest.raises(SearchDown, match="no memory"):
        search.submit("who").result(10)


def test_a_proxy_of_the_environment_is_not_asked(retriever, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Search(retriever().url, topk=3, retries=0).submit("who").result(10)


def test_a_trajectory_is_never_finished_without_its_results(retriever, tokenizer):
    server = retriever(*[500] * 10)
    search = Search(server.url, topk=3, retries=1)
    engine = Script(tokenizer, ["<answer>x</answer>"], ["<search>a</search>", "<answer>guess</answer>"])
    with pytest.raises(SearchDown):
        rollout(engine, tokenizer, search, [(0, "", ASKED, 0)] * 2, **LIMITS)
    assert len(engine.contexts) == 1  # no turn was played on without them
