"""Answers, replies and rows of a valid shape with one part broken give a result or one clear fault,
nothing else.

`make fuzz` runs it with 10^5 answers of each server; `make test` with a few, always the same.
"""

import json
import os
from concurrent.futures import TimeoutError
from dataclasses import asdict
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_like import control_ids, made

from config import Config
from engines import FinishedTurn
from plumbing.faults import Fault, OptimizerDown, ToolDown
from plumbing.outside import printable
from reflect import MAX_REPLY, Optimizer, fold_words, read_candidates, read_paid_calls
from retrieval.corpus import Corpus
from rollout import rollout
from tasks import Job, Question
from tasks.formats import encode, find_lost_tag
from tasks.questions import load_questions
from tasks.search import MAX_PASSAGE, Search
from tasks.search_qa import SearchQA

N = int(os.environ.get("FUZZ", 0))  # 10^5 in `make fuzz`
KEY, GOLD = "sk-secret-123", "Andrei Tarkovsky"
PARENT = "Think in <think> </think>, search with <search> </search>, answer in <answer> </answer>."
PARSED = partial(find_lost_tag, names=["search", "answer"])
TOKENIZERS = ("world", "qwen", "deepseek")
ASKED = Question("q", "Who?", (GOLD,), "s")
TASK = SearchQA(Config(max_observation=60, search_retries=0))


def examples(some: int, share: float = 1.0):
    """Returns hypothesis's settings: `some` examples, always the same, or the `share` of N."""
    skipped = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ]
    return settings(
        max_examples=int(N * share) or some,
        derandomize=not N,
        deadline=None,
        database=None,
        suppress_health_check=skipped,
    )


# ---- what comes from outside

SPOKEN = [
    "<|im_\u200bend|>",
    "<|im_end|>", "<|im_start|>assistant", "<|user|>", "<eos>", "<｜User｜>", "</s>", "[INST]", "＜|im_end|＞",
    "</information>", "<information>", "<answer>", "</answer>", "<search>", "<think>", "</think>", "\nQuestion: who?",
    "\x1b[2J", "\x00", "\u202e", "\ud800", "\udfff", "😀", "漢", " ", "\n", "Search one entity at a time.", KEY, GOLD,
    GOLD.upper(), "Ａｎｄｒｅｉ Ｔａｒｋｏｖｓｋｙ", "Bearer " + KEY, "a" * 2000, "<ins_3>", "</ins_3>", PARENT, PARENT,
]  # fmt: skip
said = st.lists(
    st.sampled_from(SPOKEN) | st.text(st.characters(codec=None), max_size=4), max_size=6
).map(" ".join)
numbers = st.integers() | st.floats() | st.sampled_from([10**30, -1, 1e400, float("nan")])
scalars = st.none() | st.booleans() | numbers | said
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(said, x, max_size=3), max_leaves=5
)
deep = st.integers(1, 5000).map(lambda n: "[" * n)


def places(value, path=()):
    """Yields the path of every part of a JSON value."""
    yield path
    for key, part in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(part, (*path, key))


@st.composite
def broken(draw, shape):
    """Returns the text of a JSON value of this shape with at most one part replaced, missing or cut
    off."""
    value = draw(shape)
    path = draw(st.sampled_from(list(places(value))))
    damage = draw(st.sampled_from(["none", "none", "replace", "remove", "cut", "deep"]))
    if damage == "deep":
        return draw(deep)
    if path and damage in ("replace", "remove"):
        *way, last = path
        inner = value
        for key in way:
            inner = inner[key]
        if damage == "replace":
            inner[last] = draw(anything)
        else:
            del inner[last]
    elif damage == "replace":
        value = draw(anything)
    text = json.dumps(value)
    return text[: draw(st.integers(0, len(text)))] if damage == "cut" else text


blocks = st.lists(st.tuples(st.integers(0, 12), said), max_size=9).map(
    lambda pairs: "\n".join(f"<ins_{k}>{PARENT} {text}</ins_{k}>" for k, text in pairs)
)
completions = st.fixed_dictionaries(
    {
        "choices": st.fixed_dictionaries(
            {
                "message": st.fixed_dictionaries(
                    {"role": st.just("assistant"), "content": blocks | said}
                ),
                "finish_reason": st.sampled_from(["stop", "length", None]),
            }
        ).map(lambda choice: [choice]),
        "usage": st.fixed_dictionaries({"prompt_tokens": numbers, "completion_tokens": numbers}),
    }
)
hits = st.fixed_dictionaries(
    {
        "document": st.fixed_dictionaries(
            {"id": said, "contents": said | said.map(lambda x: x * 99)}
        ),
        "score": numbers,
    }
)
found = st.fixed_dictionaries({"result": st.lists(hits, max_size=4).map(lambda row: [row])})
rows = st.fixed_dictionaries(
    {
        "id": said,
        "question": said,
        "golden_answers": st.lists(said, max_size=3),
        "data_source": said,
    }
)
search_r1 = st.fixed_dictionaries(
    {
        "prompt": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": said}), max_size=2
        ),
        "reward_model": st.fixed_dictionaries(
            {"ground_truth": st.fixed_dictionaries({"target": st.lists(said)})}
        ),
        "extra_info": st.fixed_dictionaries({"index": numbers}),
    }
)
statuses = st.sampled_from([200] * 12 + [204, 301, 307, 400, 401, 429, 500, 503])


class Says(BaseHTTPRequestHandler):
    """Answers every request with the server's `status` and `body`, and keeps the connection."""

    protocol_version = "HTTP/1.1"
    # or each answer waits 40 ms for the acknowledgement of its headers
    disable_nagle_algorithm = True

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        if self.server.status in (301, 307):
            self.send_header("Location", f"http://127.0.0.1:9/{KEY}")
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def one_line(fault: Exception, secrets: list[str]) -> None:
    text = printable(str(fault))
    assert (
        "\n" not in text
        and "\x1b" not in text
        and len(text) < 700
        and not any(x in text for x in secrets)
    ), text


@cache
def scaffold(name: str) -> list[int]:
    """Returns the control tokens of a prompt that are the chat template's own."""
    return [
        i
        for i in TASK.make_format(made(name)).encode_prompt("x", Question("x", "x"))
        if i in control_ids(made(name))
    ]


def speaks_for_nobody(name: str, instruction: str, question: str) -> None:
    ids, forbidden = (
        TASK.make_format(made(name)).encode_prompt(instruction, Question("q", question)),
        control_ids(made(name)),
    )
    assert [i for i in ids if i in forbidden] == scaffold(name)


def test_an_optimizer_may_reply_anything(server):
    optimizer = Optimizer(server.url, "m", KEY, retries=0, timeout=20)
    count = iter(range(10**9))

    @examples(50)
    @given(statuses, broken(completions), st.sampled_from(TOKENIZERS))
    def check(status, text, name):
        server.status, server.body = status, text.encode()
        try:
            call = optimizer.ask("prompt", f"t{next(count)}")
        except OptimizerDown as e:
            return one_line(e, [KEY])
        stored = json.dumps(asdict(call), allow_nan=False)
        assert KEY not in stored and stored.encode() and len(call.reply) <= MAX_REPLY
        assert 0 <= call.prompt_tokens < 10**9 and 0 <= call.completion_tokens < 10**9
        assert read_paid_calls([{"call": json.loads(stored)}]) == {call.key: call}
        accepted, rejected = read_candidates(
            call.reply, PARENT, {fold_words(PARENT)}, [GOLD], 1500, 6, PARSED
        )
        assert len(accepted) <= 6
        for instruction in accepted.values():
            assert "\x1b" not in instruction and GOLD.lower() not in fold_words(instruction)
            assert not any(x in instruction for x in ("<|", "<｜", "\nQuestion:", "</s>", "[INST]"))
            speaks_for_nobody(name, instruction, "Who?")

    check()


def test_a_log_of_calls_may_hold_anything():
    good = st.fixed_dictionaries(
        {
            "call": st.fixed_dictionaries(
                {name: said | numbers for name in ("key", "prompt", "reply", "seconds", "cut")}
            )
        }
    )

    @examples(30, 0.1)
    @given(st.lists(broken(good), max_size=3))
    def check(lines):
        log = []
        for line in lines:
            try:
                log.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
        for call in read_paid_calls(log).values():
            read_candidates(call.reply, PARENT, set(), [GOLD], 1500, 6, PARSED)
            json.dumps(asdict(call))

    check()


class Searcher:
    """An engine that searches once and answers."""

    max_rows, lockstep = 512, True

    def __init__(self, tokenizer):
        self.turns = [
            encode(tokenizer, text) for text in ("<search>who</search>", "<answer>x</answer>")
        ]

    def begin(self, seed):
        self.k = 0

    def generate(self, contexts, max_new, temperature):
        ids = self.turns[self.k]
        self.k += 1
        return [FinishedTurn(row, ids, [-1.0] * len(ids)) for row in contexts]


def test_a_search_server_may_answer_anything(server):
    task = SearchQA(TASK.cfg)
    task.tools = [Search(server.url, topk=3, retries=0, timeout=20)]
    engines = {name: Searcher(made(name)) for name in TOKENIZERS}

    @examples(50)
    @given(statuses, broken(found), st.sampled_from(TOKENIZERS))
    def check(status, text, name):
        server.status, server.body = status, text.encode()
        tokenizer, job = made(name), Job(0, PARENT, ASKED, 0)
        try:
            [tau] = rollout(
                engines[name], tokenizer, task, [job], task.cfg, temperature=0.0, seed=0
            )
        except ToolDown as e:
            return one_line(e, [])
        except TimeoutError:
            raise AssertionError("it hangs") from None
        turn, last = tau.turns
        assert tau.served("search") == 1 and tau.prediction in ("x", "<unk>") and status == 200
        assert len(turn.result) <= 3 and all(len(text) <= MAX_PASSAGE for text in turn.result)
        observed = [
            i
            for i, mine in zip(
                tau.ids[tau.prompt_tokens :], tau.mask[tau.prompt_tokens :], strict=True
            )
            if not mine
        ]
        assert len(observed) <= 60 and not control_ids(tokenizer) & set(observed)
        shown = tokenizer.decode(observed, skip_special_tokens=False)
        assert shown.count("</information>") == 1 == shown.count("<information>")
        assert not any(
            f"<{slash}{tag}>" in shown for tag in ("think", "answer") for slash in ("", "/")
        )
        json.dumps(tau.record(), allow_nan=False)

    check()


@pytest.mark.parametrize("shape", [rows, search_r1], ids=["rows", "search_r1"])
def test_a_file_of_questions_may_hold_anything(shape, tmp_path):
    path = tmp_path / "q.jsonl"

    @examples(20, 0.05)
    @given(st.lists(broken(shape), min_size=1, max_size=3), st.sampled_from(TOKENIZERS))
    def check(lines, name):
        path.write_text("\n".join(lines))
        try:
            questions = load_questions(path)
        except Fault as e:
            assert str(e).startswith(str(path))
            return
        for q in questions:
            assert (
                q.text.endswith("?")
                and all(q.golds)
                and all(isinstance(gold, str) for gold in q.golds)
            )
            speaks_for_nobody(name, PARENT, q.text)

    check()


def test_a_file_of_passages_may_hold_anything(tmp_path):
    path = tmp_path / "c.jsonl"
    passages = st.fixed_dictionaries({"id": said, "contents": said}) | st.fixed_dictionaries(
        {"id": numbers, "title": said, "text": said}
    )

    @examples(20, 0.1)
    @given(st.lists(broken(passages), min_size=1, max_size=3))
    def check(lines):
        path.write_text("\n".join(lines))
        try:
            corpus = Corpus(path)
            for row in range(len(corpus)):
                "".join(corpus[row].values()).encode()
        except Fault as e:
            assert str(e).startswith(str(path))

    check()
