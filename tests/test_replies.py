"""What chat endpoints reply, read alike for the optimizer, a judge and an evaluated model."""

import json

import pytest
from json_server import json_servers

from plumbing.client import Reply, read_reply
from plumbing.faults import OptimizerDown
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


SHAPES = {  # answer -> its reply
    "plain": (said({"content": "A"}), Reply("A")),
    "null": (said({"content": None}), Reply("")),
    "no content": (said({"reasoning_content": "B"}, "length"), Reply("", cut=True)),
    "no finish_reason": ({"choices": [{"message": {"content": "A"}}]}, Reply("A")),
    "thoughts beside it": (said({"content": "A", "reasoning": "B"}), Reply("A")),
    "cut": (said({"content": "A"}, "length"), Reply("A", cut=True)),
    "billed": (
        said({"content": "A"}, usage={"prompt_tokens": 11, "completion_tokens": 7}),
        Reply("A", prompt_tokens=11, completion_tokens=7),
    ),
    "billed in part": (
        said({"content": "A"}, usage={"prompt_tokens": 11, "completion_tokens": None}),
        Reply("A", prompt_tokens=11),
    ),
    "usage null": (said({"content": "A"}, usage=None), Reply("A")),
}
NO_REPLY = {  # answer -> what is shown of it
    "choices null": ({"choices": None, "error": {"message": "pool is full"}}, "pool is full"),
    "error alone": ({"error": "pool is full"}, "pool is full"),
    "legacy": ({"choices": [{"text": "A"}]}, "message"),
    "a number": (said({"content": 7}), "not text"),
    "parts": (said({"content": [{"type": "text", "text": "A"}]}), "not text"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reply_is_read(serve, shape):
    answer, expected = SHAPES[shape]
    assert read_reply(answer) == expected
    call = Optimizer(serve(answer).url, "m", retries=0).ask("prompt")
    assert (call.reply, call.cut) == (expected.text, expected.cut)
    # what is not billed is estimated
    assert call.prompt_tokens == (expected.prompt_tokens or 1)


@pytest.mark.parametrize("shape", NO_REPLY)
def test_what_is_no_reply_is_shown(serve, shape):
    answer, shown = NO_REPLY[shape]
    with pytest.raises(OptimizerDown, match=f"malformed answer .*{shown}"):
        Optimizer(serve((200, {}, json.dumps(answer))).url, "m", retries=0).ask("p")
