"""Python functions and methods as tools: what the policy is told of them, how calls are read, what
becomes a reply."""

import asyncio
import json
import re
import sys
import threading
from typing import Literal

import numpy as np
import pytest
import torch
from json_server import passages
from test_rollout import ASKED, ROOT, play, spelled
from tiny_model import FIXTURE

import inspo
from config import PRESETS, Config
from plumbing.faults import Fault, ToolDown
from tasks.functions import TypedFunction
from tasks.search_qa import SearchQA
from tasks.task import choose_instruction, load_task, rate_failures
from tasks.tools import Failure, check_words


def forecast(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """Returns the weather of a city.

    Args:
        city: Its name
        days: How many days ahead
        unit: Of the temperature
    """
    return {"city": city, "days": days, "unit": unit}


async def shout(text: str) -> str:
    """Says a text in capitals.

    Args:
        text: What to say
    """
    await asyncio.sleep(0.01)
    return text.upper()


def answered(function, argument):
    return TypedFunction(function, "--tools x").submit(argument).result(60)


# ---- calls


def test_arguments_are_a_json_object_and_results_that_are_no_text_are_json():
    [text] = answered(forecast, '{"city": "東京", "days": "2"}')
    assert json.loads(text) == {"city": "東京", "days": 2, "unit": "C"} and "\\u" not in text
    # a text alone needs no JSON
    assert answered(shout, '"hi"') == ['"HI"'] and answered(shout, '{"text": "hi"}') == ["HI"]
    assert answered(shout, '{"text": 3}')[0].startswith("wrong arguments of shout: text: ")


@pytest.mark.parametrize(
    "argument, names",
    [
        ("", ["city: Field required"]),
        ("Rome", ["Invalid JSON"]),
        ('"Rome"', ["Input should be an object"]),
        ('{"city": 3, "unit": "K", "where": 1}', ["city: ", "unit: ", "'C' or 'F'", "where: Ext"]),
    ],
)
def test_arguments_that_are_wrong_become_a_reply_which_names_them(argument, names):
    reply = answered(forecast, argument)
    assert reply[0].startswith("wrong arguments of forecast: ") and not isinstance(reply, Failure)
    assert all(name in reply[0] for name in names)
    assert "http" not in reply[0] and "\n" not in reply[0]


def no_arguments(function):
    function.__doc__ = "Does something."
    return function


@pytest.mark.parametrize("error", [ValueError("over"), SystemExit("over")])
def test_what_a_function_raises_becomes_a_reply_that_is_told_from_others(error):
    @no_arguments
    def fails():
        raise error

    reply = answered(fails, "")
    assert reply == [f"fails failed: {type(error).__name__}: over"] and isinstance(reply, Failure)
    assert not isinstance(answered(shout, ""), Failure)


def test_an_outage_is_raised():
    @no_arguments
    def down():
        raise ToolDown("the weather station does not answer")

    with pytest.raises(ToolDown, match="weather station"):
        answered(down, "")


def test_a_call_that_hangs_or_exits_is_answered_in_time_and_concerns_no_other_call():
    gate, cancelled = threading.Event(), threading.Event()

    @no_arguments
    def hangs():
        gate.wait(100)

    @no_arguments
    async def blocks():
        gate.wait(100)

    @no_arguments
    async def sleeps():
        try:
            await asyncio.sleep(100)
        finally:
            cancelled.set()

    @no_arguments
    async def exits():
        sys.exit("enough")

    hangs.timeout = blocks.timeout = sleeps.timeout = 0.3
    calls = [TypedFunction(f, "").submit("") for f in (hangs, blocks, sleeps)]
    assert answered(shout, "hi") == ["HI"]  # before the gate opens
    assert answered(exits, "") == ["exits failed: SystemExit: enough"]
    replies = [call.result(60) for call in calls]
    assert replies == [[f"{name} took longer than 0.3 s"] for name in ("hangs", "blocks", "sleeps")]
    assert all(isinstance(reply, Failure) for reply in replies)
    gate.set()
    assert cancelled.wait(60)  # a second after its reply


def test_a_result_is_text_that_a_tokenizer_accepts():
    assert answered(no_arguments(lambda: "\ud800x"), "") == ["\ufffdx"]


@pytest.mark.parametrize(
    "result, reply",
    [
        ({"x": np.int64(3)}, '{"x": 3}'), (np.arange(3), "[0, 1, 2]"), (torch.ones(2), "[1.0, 1.0]"),
        (np.float32("nan"), "null"),
        ({"mean": float("nan"), "n": 0}, '{"mean": null, "n": 0}'), (None, "null"),
        (object(), "returns failed: "), ({"x": [threading.Lock]}, "returns failed: "),
    ],
)  # fmt: skip
def test_numbers_and_arrays_are_json_and_what_is_no_json_is_a_failure(result, reply):
    @no_arguments
    def returns():
        return result

    [text] = answered(returns, "")
    assert text.startswith(reply) and " at 0x" not in text


def test_the_calls_of_a_tool_that_failed_are_a_column_of_metrics(tiny):
    def broken(days: int):
        """Returns a share.

        Args:
            days: Of how many
        """
        return {"days": 3 / days}

    tool = TypedFunction(broken, "")
    task = load_task(Config(task="test_functions:Asking", tools="test_functions:shout"))
    task.tools = [*task.tools, tool]
    zero, three = (f'<broken>{{"days": {days}}}</broken>' for days in (0, 3))
    tau, _ = play(tiny[1], task, zero, zero, three, "<shout>ja</shout>", zero)
    # one is unserved
    assert rate_failures(tau.turns, tool) == {"broken_calls/failed": 2 / 3}
    assert rate_failures(tau.turns, task.tools[0]) == {}


# ---- what the policy and the loop know of them


def test_the_words_of_a_tool_come_from_its_function(monkeypatch):
    weather, loud = (TypedFunction(f, "") for f in (forecast, shout))
    check_words("--tools x", [weather, loud])
    assert (loud.tag, loud.argument, loud.plural) == ("shout", "text", "shout_calls")
    assert weather.argument == '{"city": ..., "days": ..., "unit": ...}'
    monkeypatch.setattr(shout, "result_tag", "echo", raising=False)
    assert (loud.result_tag, TypedFunction(shout, "").result_tag) == ("result", "echo")


class Asking(SearchQA):
    """Search QA with a single question."""

    def questions(self, split):
        return [ASKED]


def test_a_rollout_with_functions_beside_search(tiny):
    """The observations, by hand; every token but those of the policy is as its text is
    tokenized."""
    mine = "test_functions:shout,search,test_functions:forecast"
    task = load_task(Config(task="test_functions:Asking", tools=mine))
    task.connect("http://127.0.0.1:9")  # as `start` does; the functions stay
    assert [tool.tag for tool in task.tools] == ["search", "shout", "forecast"]
    turns = ['<forecast>{"city": "Bern"}</forecast>', "<shout> ja </shout>", "<forecast>Bern</forecast>", "<shout>",
             "<answer>x</answer>"]  # fmt: skip
    tau, _ = play(tiny[1], task, *turns)
    wrong = "wrong arguments of forecast: Invalid JSON: expected value at line 1 column 1"
    shown = ['{"city": "Bern", "days": 1, "unit": "C"}', "JA", wrong]
    assert [turn.result for turn in tau.turns] == [*([text] for text in shown), None, None]
    assert (tau.stop, tau.invalid) == ("answer", 1)
    assert (tau.served("forecast"), tau.served("shout")) == (2, 1)
    ids = []
    for turn, text in zip(turns, shown, strict=False):
        ids += spelled(tiny[1], turn)
        for piece in (f"\n\n<result>{text}", "</result>\n\n"):
            ids += tiny[1](piece, add_special_tokens=False)["input_ids"]
    assert tau.ids[tau.prompt_tokens :][: len(ids)] == ids


def test_every_prompt_names_the_functions_whatever_the_instruction(tiny):
    task = load_task(Config(task="test_functions:Asking", tools="search,test_functions:forecast"))
    plain = load_task(Config(task="test_functions:Asking"))
    for instruction in ("Answer.", "Be quick."):
        text = tiny[1].decode(task.make_format(tiny[1]).encode_prompt(instruction, ASKED))
        assert (
            '<forecast> {"city": ..., "days": ..., "unit": ...} </forecast>: Returns the weather'
            in text
        )
        assert re.search(r"days: .*How many days ahead.*\n.*\"enum\": \[\"C\", \"F\"\]", text)
        before, _, after = text.partition(f"{instruction}\n\nTools, ")
        without = tiny[1].decode(plain.make_format(tiny[1]).encode_prompt(instruction, ASKED))
        assert without.startswith(before + instruction) and without.endswith(
            after[after.index("\n\nQuestion: ") :]
        )


def test_functions_alone_need_no_search_server():
    task = load_task(Config(tools="test_functions:shout"))
    task.check()
    assert task.start(None) == "tools: shout" and [tool.tag for tool in task.tools] == ["shout"]


@pytest.mark.parametrize("tools, searches", [("none", False), ("search", True)])
@pytest.mark.parametrize("given", [PRESETS["world"]["instruction"], ""])
def test_the_first_instruction_fits_the_tools(tools, searches, given):
    instruction = choose_instruction(load_task(Config(tools=tools, instruction=given)))
    assert ("<search>" in instruction) == searches and "<answer>" in instruction


@pytest.mark.slow
def test_a_run_with_the_function_of_the_page(tmp_path, monkeypatch, tiny_path, serve):
    page = (ROOT / "docs" / "tasks.md").read_text()
    [code] = re.findall(r"```python\n(def forecast.*?)```", page, re.S)
    (tmp_path / "weather.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    settings = {name: str(FIXTURE / f"{name}.jsonl") for name in ("train", "test")}
    settings |= dict(model=tiny_path, mode="static", T=1, batch=2, G=2, eval_n=2, max_prompt=1400)
    settings |= dict(max_response=8, retriever=serve(passages(lambda query: ["A\nb"])).url)
    settings |= dict(tools=re.search(r"inspo.py --tools (\S+)", page)[1])
    summary = inspo.train(**settings).summary
    assert summary["tools"] == ["searches", "forecast_calls"] and "forecast_calls" in summary["end"]


# ---- what is refused

MODULE = '''
from __future__ import annotations
import functools

def typeless(x):
    """Does.

    Args:
        x: A thing
    """

part = functools.partial(typeless, 1)

def half(x: int, y: int):
    """Does.

    Args:
        x: A thing
    """

def search(query: str):
    """Searches.

    Args:
        query: What for
    """
'''


@pytest.mark.parametrize(
    "tools, says",
    [
        ("my_tools:typeless", "--tools my_tools:typeless: "),
        ("search, my_tools:half", "--tools my_tools:half: "),
        ("my_tools:part", "--tools my_tools:part: it is not a function"),
        ("my_tools:nothing", "nothing is not a function in my_tools"),
        ("my_toolz:search", "--tools my_toolz:search: my_toolz cannot be imported"),
        ("my_tools:", "--tools my_tools:: give it as module:name, for a function"),
        ("search,my_tools:search", "has the tag 'search'; tags are"),
    ],
)
def test_what_is_no_tool_is_refused_in_one_line(tmp_path, monkeypatch, tools, says):
    (tmp_path / "my_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    with pytest.raises(Fault) as fault:
        load_task(Config(tools=tools))
    assert says in str(fault.value) and "\n" not in str(fault.value)


def test_in_a_game_functions_can_be_called_too():
    task = load_task(Config(task="test_evaluate:Rolling", tools="test_functions:shout"))
    assert [tool.tag for tool in task.tools] == ["search", "shout"]
