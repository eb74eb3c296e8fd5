"""What chat endpoints reply: every shape is read alike for the optimizer, a judge and an evaluated
model."""

import json

import pytest

from plumbing.faults import OptimizerDown
from plumbing.replies import read_blocks, read_reply, usage_of
from reflect import Optimizer


def said(message, ended="stop"):
    return {"choices": [{"finish_reason": ended, "message": {"role": "assistant"} | message}]}


PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
    {"type": "text", "text": "A"},
    {"text": "B"},
    {"type": "output_text", "text": "C"},
]
SHAPES = {  # answer -> (text, cut, refused)
    "plain": (said({"content": "A", "refusal": None}), ("A", False, False)),
    "no finish_reason": ({"choices": [{"message": {"content": "A"}}]}, ("A", False, False)),
    "null": (said({"content": None}, "tool_calls"), ("", False, False)),
    "thoughts beside": (said({"content": "A", "reasoning_content": "B"}), ("A", False, False)),
    "all thoughts": (said({"reasoning": "B"}, "length"), ("", True, False)),
    "parts": (said({"content": PARTS}), ("ABC", False, False)),
    "cut, Gemini's": (said({"content": "A"}, "MAX_TOKENS"), ("A", True, False)),
    "cut, no message": ({"choices": [{"finish_reason": "length"}]}, ("", True, False)),
    "filtered": (said({}, "content_filter: PROHIBITED_CONTENT"), ("", False, True)),
    "refusal": (said({"content": None, "refusal": "I cannot."}), ("", False, True)),
}
FULL = {"message": "pool is full"}
NO_REPLY = {  # answer -> what is shown of it
    "choices null": ({"choices": None, "error": FULL}, "pool is full"),
    "error in the choice": (
        {"choices": [{"error": FULL, "message": {"content": ""}}]},
        "pool is full",
    ),
    "broken off": (said({"content": "pool"}, "abort"), "pool"),
    "vLLM's": ({"object": "error"} | FULL, "pool is full"),
    "legacy": ({"choices": [{"text": "A"}]}, "message"),
    "a number": (said({"content": 7}), "not text"),
    "parts that are none": (said({"content": ["A", 7]}), ""),
    "list": ([said({"content": "A"})], ""),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reply_is_read_in_every_shape(serve, shape):
    answer, expected = SHAPES[shape]
    call = Optimizer(serve(answer).url, "m", retries=0).ask("p")
    assert read_reply(answer) == expected == (call.reply, call.cut, call.refused)


@pytest.mark.parametrize("shape", NO_REPLY)
def test_what_is_no_reply_says_why(serve, shape):
    answer, shown = NO_REPLY[shape]
    with pytest.raises(OptimizerDown, match=f"malformed answer .*{shown}"):
        Optimizer(serve((200, {}, json.dumps(answer))).url, "m", retries=0).ask("p")


@pytest.mark.parametrize(
    "usage, billed",
    [
        ({"prompt_tokens": 11, "completion_tokens": 7}, (11, 7)),
        # thoughts in the total alone
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 518}, (11, 507)),
        ({"prompt_tokens": 11.0, "completion_tokens": None, "total_tokens": True}, (11, 0)),
        (None, (0, 0)),
    ],
)
def test_usage_is_what_an_answer_bills(usage, billed):
    assert usage_of({"usage": usage}) == billed


# ---- thoughts

D, A, B = "<ins_1>draft</ins_1>", "<ins_1>one</ins_1>", "<ins_2>two</ins_2>"


def test_drafts_in_thoughts_never_count():
    for begin in ("<think>", ""):  # a template may have written it
        assert read_blocks(f"{begin}{D} or <ins_2>\n</think>\n\n{A}\n{B}") == ["one", "two"]
        assert read_blocks(f"{begin}{D}</think>{A}\nIn it `</think>` comes first.") == ["one"]
    for cut in (True, False):
        assert read_blocks(f"<think>{D}</think> Sorry, I cannot.", cut) == []
    assert read_blocks(f"<think>{D} or") == []  # cut off
    assert read_blocks(f"<think>Done.\n{A}\n{B}", cut=False) == ["one", "two"]
    assert read_blocks(f"<think>{D}</think>\n{A}\n<think>{D}</think>\n{B}") == ["two"]


@pytest.mark.parametrize(
    "reply, blocks",
    [
        (f"{A}\n{B}\n\nIn both, the search comes after </think> now.", ["one", "two"]),
        (f"I kept <think> and </think>.\n{A}", ["one"]),
        (f"1. `<think>` comes first:\n{A}\n2. It searches after `</think>`.\n{B}", ["one", "two"]),
        ("<ins_1>Use <think> x </think>.</ins_1>", ["Use <think> x </think>."]),
    ],
)
def test_a_mere_mention_of_a_mark_loses_no_candidate(reply, blocks):
    assert read_blocks(reply) == blocks
