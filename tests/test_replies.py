"""What chat endpoints reply: every shape is read alike for the optimizer, a judge and an evaluated
model."""

import json

import pytest
from json_server import json_servers

from plumbing.faults import OptimizerDown
from plumbing.replies import read_blocks, read_reply, usage_of
from reflect import Optimizer


@pytest.fixture
def serve():
    with json_servers() as start:
        yield start


@pytest.fixture(autouse=True)
def no_waits(waits):
    pass


def said(message, ended="stop", **more):
    choice = {"index": 0, "finish_reason": ended, "message": {"role": "assistant"} | message}
    return {"id": "x", "object": "chat.completion", "choices": [choice]} | more


def text(text, **more):
    return {"type": "text", "text": text, **more}


HM = {"type": "thinking", "thinking": [text("Score: 3")]}
SHAPES = {  # answer -> (text, cut, refused)
    "plain": (said({"content": "A"}), ("A", False, False)),
    "error null": (said({"content": "A"}, error=None), ("A", False, False)),
    "null": (said({"content": None}), ("", False, False)),
    "tool calls alone": (
        said({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ("", False, False),
    ),
    "no finish_reason": ({"choices": [{"message": {"content": "A"}}]}, ("A", False, False)),
    "reasoning_content": (said({"content": "A", "reasoning_content": "B"}), ("A", False, False)),
    "reasoning": (
        said({"content": "A", "reasoning": "B", "reasoning_details": [text("B")]}),
        ("A", False, False),
    ),
    "all thoughts": (said({"reasoning": "B"}, "length"), ("", True, False)),
    "all thoughts, null": (
        said({"content": None, "reasoning_content": "B"}, "length"),
        ("", True, False),
    ),
    "parts": (said({"content": [HM, text("A"), text("B")]}), ("AB", False, False)),
    "parts of thoughts": (
        said({"content": [HM, {"type": "reasoning", "text": "B"}]}, "length"),
        ("", True, False),
    ),
    "no parts": (said({"content": []}), ("", False, False)),
    "a part without a type": (said({"content": [{"text": "A"}]}), ("A", False, False)),
    "output_text": (
        said({"content": [{"type": "output_text", "text": "A", "annotations": []}]}),
        ("A", False, False),
    ),
    "reference": (
        said({"content": [text("A"), {"type": "reference", "reference_ids": [1]}]}),
        ("A", False, False),
    ),
    "cut": (said({"content": "A"}, "length"), ("A", True, False)),
    "cut, Gemini's": (said({"content": "A"}, "MAX_TOKENS"), ("A", True, False)),
    "cut, Mistral's": (said({"content": "A"}, "model_length"), ("A", True, False)),
    "filtered": (said({"content": "A"}, "content_filter"), ("A", False, True)),
    "filtered, null": (said({"content": None}, "content_filter"), ("", False, True)),
    "filtered, Gemini's": (said({}, "content_filter: PROHIBITED_CONTENT"), ("", False, True)),
    "cut, Responses' word": (said({"content": "A"}, "max_output_tokens"), ("A", True, False)),
    "filtered, Gemini's recitation": (said({"content": ""}, "RECITATION"), ("", False, True)),
    "filtered, Bedrock's": (said({"content": "A"}, "guardrail_intervened"), ("A", False, True)),
    "no reason, Ollama's": (said({"content": "A"}, ""), ("A", False, False)),
    "filtered, Zhipu's": (said({"content": ""}, "sensitive"), ("", False, True)),
    "refusal": (said({"content": None, "refusal": "I cannot."}), ("", False, True)),
    # Gemini's
    "cut, no message": ({"choices": [{"index": 0, "finish_reason": "length"}]}, ("", True, False)),
    "filtered, message null": (
        {"choices": [{"finish_reason": "safety", "message": None}]},
        ("", False, True),
    ),
    "refusal null": (said({"content": "A", "refusal": None}), ("A", False, False)),
}
NO_REPLY = {  # answer -> what is shown of it
    "choices null": (
        {"choices": None, "error": {"code": 429, "message": "pool is full"}},
        "pool is full",
    ),
    "choices empty": (
        {"choices": [], "error": {"code": 502, "message": "pool is full"}},
        "pool is full",
    ),
    "error alone": ({"error": "pool is full"}, "pool is full"),
    "error in the choice": (
        {
            "choices": [
                {
                    "finish_reason": "error",
                    "error": {"message": "pool is full"},
                    "message": {"content": ""},
                }
            ]
        },
        "pool is full",
    ),
    "broken off, DeepSeek's": (said({"content": "pool"}, "insufficient_system_resource"), "pool"),
    "broken off, Zhipu's": (said({"content": "pool"}, "network_error"), "pool"),
    "broken off, vLLM's": (said({"content": "pool"}, "abort"), "pool"),
    "broken off, a gateway's": (said({"content": "pool"}, "error"), "pool"),
    "detail": ({"detail": "pool is full"}, "pool is full"),
    "vLLM's": ({"object": "error", "message": "pool is full"}, "pool is full"),
    "prompt blocked": ({"choices": [], "prompt_filter_results": [{"hate": "high"}]}, "hate"),
    "legacy": ({"choices": [{"text": "A"}]}, "message"),
    "a number": (said({"content": 7}), "not text"),
    "a dict": (said({"content": {"text": "A"}}), "not text"),
    "parts that are none": (said({"content": ["A", 7]}), ""),
    "part of null": (said({"content": [text(None)]}), ""),
    "message": ({"choices": [{"message": "A"}]}, ""),
    "no message": ({"choices": [{"finish_reason": "stop"}]}, "message"),
    "choice": ({"choices": ["A"]}, ""),
    "choices": ({"choices": {"0": "A"}}, ""),
    "list": ([said({"content": "A"})], ""),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reply_is_read_in_every_shape(serve, shape):
    answer, expected = SHAPES[shape]
    assert read_reply(answer) == expected
    call = Optimizer(serve(answer).url, "m", retries=0).ask("p")
    assert (call.reply, call.cut, call.refused) == expected


@pytest.mark.parametrize("shape", NO_REPLY)
def test_what_is_no_reply_says_why(serve, shape):
    answer, shown = NO_REPLY[shape]
    with pytest.raises((LookupError, TypeError, ValueError), match=shown or None):
        read_reply(answer)
    with pytest.raises(OptimizerDown, match=f"malformed answer .*{shown}"):
        Optimizer(serve((200, {}, json.dumps(answer))).url, "m", retries=0).ask("p")


# ---- what is billed


@pytest.mark.parametrize(
    "usage, billed",
    [
        ({"prompt_tokens": 11, "completion_tokens": 7}, (11, 7)),
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}, (11, 7)),
        # thoughts in the total alone
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 518}, (11, 507)),
        ({"prompt_tokens": 11, "total_tokens": 511}, (11, 500)),  # all thoughts
        ({"prompt_tokens": 11.0, "completion_tokens": 7.25, "total_tokens": 18.25}, (11, 7)),
        ({"prompt_tokens": 11, "completion_tokens": None, "total_tokens": None}, (11, 0)),
        ({"prompt_tokens": True, "completion_tokens": -7, "total_tokens": "18"}, (0, 0)),
        ({}, (0, 0)), (None, (0, 0)), ("free", (0, 0)), ([11, 7], (0, 0)),
    ],
)  # fmt: skip
def test_usage_is_read_beside_anything(usage, billed):
    for answer in (said({"content": "A"}), said({"content": 7}), {"choices": [], "error": "x"}, {}):
        assert usage_of(answer | {"usage": usage}) == billed


def test_usage_of_what_is_no_object():
    assert usage_of([]) == usage_of(None) == usage_of("usage") == usage_of({}) == (0, 0)


BILLED = {"usage": {"prompt_tokens": 3000, "completion_tokens": 300}}


# ---- thoughts

D, A, B = "<ins_1>draft</ins_1>", "<ins_1>one</ins_1>", "<ins_2>two</ins_2>"


def test_drafts_in_thoughts_never_count():
    for begin in ("<think>", "\n <think>\n", ""):  # a template may have written it
        for end in ("</think>", "\n</think>\n\n", " So yes.</think> Here they are:\n"):
            assert read_blocks(f"{begin}{D} or <ins_2>{end}{A}\n{B}") == ["one", "two"]
            mentioned = "In it `</think>` comes first, </think> that is."
            assert read_blocks(f"{begin}{D}{end}{A}\n{mentioned}") == ["one"]
        if begin:
            assert read_blocks(f"{begin}{D} or") == []  # cut off
            assert read_blocks(f"{begin}Done.\n{A}\n{B}", cut=False) == ["one", "two"]
            for cut in (True, False):
                assert read_blocks(f"{begin}{D}</think>{A}", cut) == ["one"]
                assert read_blocks(f"{begin}{D}</think> Sorry, I cannot.", cut) == []
    assert read_blocks("<ins_1>Use <think> x </think>.</ins_1>") == ["Use <think> x </think>."]


@pytest.mark.parametrize(
    "reply, blocks",
    [
        (f"{A}\n{B}\n\nIn both, the search comes after </think> now.", ["one", "two"]),
        (f"{A}\n{B}\n\nIn both the search comes after\n</think>", ["one", "two"]),
        (f"I kept <think>.\n{A}", ["one"]),
        (f"I kept <think> and </think>.\n{A}", ["one"]),
        (f"All tags are kept: <think>, <search> and <answer>.\n{A}", ["one"]),
        (f"1. `<think>` comes first:\n{A}\n2. It searches after `</think>`.\n{B}", ["one", "two"]),
        (f"{A}\nThe second one says '</think>' twice.\n{B}", ["one", "two"]),
        # what follows the last thoughts
        (f"<think>{D}</think>\n{A}\n<think>{D}</think>\n{B}", ["two"]),
        (f"<think>{D}</think>: {A}", ["one"]),
        (f"<think>{D}</think>```xml\n{A}\n```", ["one"]),
        (f"<thinks>{A}</thinks>", ["one"]),
    ],
)  # fmt: skip
def test_a_mere_mention_of_a_mark_loses_no_candidate(reply, blocks):
    assert read_blocks(reply) == blocks
