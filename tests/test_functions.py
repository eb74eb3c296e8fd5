"""Python functions and methods as tools: what the policy is told of them, how calls are read, what
becomes a reply."""

import asyncio
import gzip
import json
import pickle
import re
import sys
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from json_server import passages
from pydantic import BaseModel, Field
from test_rollout import ASKED, ROOT, Plain, Script, play, roll, spelled
from tiny_model import FIXTURE

import inspo
from config import PRESETS, Config, read_config
from models.model import load_tokenizer
from plumbing.faults import Fault, ToolDown
from tasks import Job
from tasks.functions import TypedFunction
from tasks.search_qa import SearchQA
from tasks.task import Game, choose_instruction, count_useless, load_task
from tasks.tools import Failure, Tags, check_words


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


@pytest.mark.parametrize(
    "argument, result",
    [
        ('{"city": "Rome"}', {"city": "Rome", "days": 1, "unit": "C"}),
        ('{"city": "東京", "days": "2", "unit": "F"}', {"city": "東京", "days": 2, "unit": "F"}),
    ],
)
def test_arguments_are_a_json_object_and_results_that_are_no_text_are_json(argument, result):
    [text] = answered(forecast, argument)
    assert json.loads(text) == result and "\\u" not in text
    # a text alone needs no JSON
    for text in ('"hi"', "text: hi", '["text"]'):
        assert answered(shout, text) == [text.upper()]
    assert answered(shout, '{"text": "hi"}') == ["HI"]
    assert answered(shout, '{"text": 3}')[0].startswith("wrong arguments of shout: text: ")


@pytest.mark.parametrize(
    "argument, names",
    [
        ("", ["city: Field required"]),
        ("Rome", ["Invalid JSON"]),
        ('"Rome"', ["Input should be an object"]),
        ('{"city": "Rome", "days": "soon"}', ["days: Input should be a valid integer"]),
        (
            '{"city": 3, "unit": "K", "where": 1}',
            ["city: ", "unit: ", "'C' or 'F'", "where: Extra"],
        ),
        ('{"city": ' + "[" * 100_000, ["Invalid JSON"]),
        ('{"city": "\\ud800"}', ["Invalid JSON"]),
    ],
)
def test_arguments_that_are_wrong_become_a_reply_which_names_them(argument, names):
    called = []

    def recorded(city: str, days: int = 1, unit: Literal["C", "F"] = "C"):
        called.append(city)

    recorded.__doc__, recorded.__name__ = forecast.__doc__, "forecast"
    [text] = answered(recorded, argument)
    assert text.startswith("wrong arguments of forecast: ") and not called
    assert all(name in text for name in names) and "http" not in text and "\n" not in text


def no_arguments(function):
    function.__doc__ = "Does something."
    return function


def test_what_a_function_raises_becomes_a_reply_but_an_outage_is_raised():
    @no_arguments
    def over():
        raise ValueError("the game is over")

    @no_arguments
    def leaves():
        sys.exit("enough")

    @no_arguments
    async def cancelled():
        raise asyncio.CancelledError

    @no_arguments
    def down():
        raise ToolDown("the weather station does not answer")

    assert answered(over, "") == ["over failed: ValueError: the game is over"]
    assert answered(leaves, "") == ["leaves failed: SystemExit: enough"]
    assert answered(cancelled, "")[0].startswith("cancelled failed: CancelledError")
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

    @no_arguments
    async def interrupted():
        raise KeyboardInterrupt

    hangs.timeout = blocks.timeout = sleeps.timeout = 0.3
    calls = [TypedFunction(f, "").submit("") for f in (hangs, blocks, sleeps)]
    assert answered(shout, "hi") == ["HI"]  # before the gate opens
    assert answered(exits, "") == ["exits failed: SystemExit: enough"]
    assert answered(interrupted, "")[0].startswith("interrupted failed: KeyboardInterrupt")
    replies = [call.result(60) for call in calls]
    assert replies == [[f"{name} took longer than 0.3 s"] for name in ("hangs", "blocks", "sleeps")]
    assert answered(shout, "hi") == ["HI"]
    gate.set()
    assert cancelled.wait(60)  # a second after its reply


def test_calls_run_side_by_side():
    barrier = threading.Barrier(20, timeout=60)

    @no_arguments
    def meets():
        return barrier.wait() >= 0

    tool = TypedFunction(meets, "")
    tool.timeout = 60
    assert [call.result(60) for call in [tool.submit("") for _ in range(20)]] == [["true"]] * 20


def test_a_result_is_text_that_a_tokenizer_accepts():
    @no_arguments
    def half():
        return "\ud800x"

    assert answered(half, "") == ["\ufffdx"]


@dataclass
class Seen:
    value: object


class Typed(BaseModel):
    value: object


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raises(e):
    raise e


@pytest.mark.parametrize(
    "result, reply",
    [
        (lambda: np.float32(1.5), "1.5"), (lambda: {"x": np.int64(3)}, '{"x": 3}'),
        (lambda: [np.bool_(True)], "[true]"),
        (lambda: np.arange(3), "[0, 1, 2]"), (lambda: np.float32("nan"), "null"), (lambda: torch.ones(2), "[1.0, 1.0]"),
        (lambda: Seen(np.float32(2)), '{"value": 2.0}'),
        (lambda: {np.int64(3): 1}, '{"3": 1}'), (lambda: (k for k in range(3)), "[0, 1, 2]"),
        (lambda: Typed(value=np.int64(3)), '{"value": 3}'), (lambda: deque([np.int64(3)]), "[3]"),
        (lambda: np.array([np.int64(3), "a", None], dtype=object), '[3, "a", null]'),
    ],
)  # fmt: skip
def test_numbers_and_arrays_of_numpy_and_torch_and_iterators_are_json(result, reply):
    assert answered(no_arguments(result), "") == [reply]


def never_returns():
    threading.Event().wait()


@pytest.mark.parametrize(
    "call, failed",
    [
        (lambda: raises(ValueError("no")), True), (lambda: raises(Mute()), True), (lambda: raises(SystemExit()), True),
        (object, True), (never_returns, True), (lambda: "", False), (lambda: None, False),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_told_from_one_that_does_not(call, failed):
    function = no_arguments(lambda: call())
    function.timeout = 0.5 if call is never_returns else 60
    result = answered(function, "")
    assert isinstance(result, Failure) == failed
    assert pickle.loads(pickle.dumps(result)) == result and json.loads(json.dumps(result)) == result


def test_wrong_arguments_are_the_policy_s_and_no_failure_of_the_tool():
    assert not isinstance(answered(forecast, "Rome"), Failure)


def test_the_calls_of_a_tool_that_failed_are_a_column_of_metrics(tiny):
    def broken(city: str, days: int = 1):
        return {"days": 3 / days}

    broken.__doc__, broken.__name__ = forecast.__doc__.partition("        unit")[0], "forecast"
    tool = TypedFunction(broken, "")
    call = '<forecast>{"city": "Bern", "days": %d}</forecast>'
    task = load_task(Config(task="test_functions:Asking", tools="test_functions:shout"))
    task.tools = [*task.tools, tool]
    turns = [call % 0, call % 0, call % 3, "<shout>ja</shout>", call % 0]
    tau, _ = play(tiny[1], task, *turns)
    # one is unserved
    assert count_useless(tau.turns, tool) == {
        "forecast_calls/empty": 0,
        "forecast_calls/failed": 2 / 3,
    }
    assert count_useless(tau.turns, task.tools[0]) == {"shout_calls/empty": 0}


def greet(name: str = "Bern"):
    """Greets.

    Args:
        name: Who
    """
    return f"hello {name!r}"


def pick(names: list[str], weights: dict[str, int] | None = None) -> list[str]:
    """Picks.

    Args:
        names: Of whom
        weights: By name
    """
    return [f"{name} {(weights or {}).get(name)}" for name in names]


@pytest.mark.parametrize(
    "function, argument, reply",
    [
        (greet, "", "hello 'Bern'"), (greet, "Rome", "hello 'Rome'"),
        (shout, "", "wrong arguments of shout: text: Field required"),
        (pick, '{"names": ["a"]}', '["a None"]'),
        (pick, '{"names": ["a", "b"], "weights": {"b": 2}}', '["a None", "b 2"]'),
        (pick, '{"names": "a"}', "wrong arguments of pick: names: Input should be a valid array"),
    ],
)  # fmt: skip
def test_arguments_that_have_defaults_may_be_left_out(function, argument, reply):
    assert answered(function, argument) == [reply]


def shown_of(tool):
    """What every prompt says of a tool's arguments, by name; "": of them together."""
    lines = [line.strip().partition(": ") for line in tool.usage().splitlines()[1:]]
    named = {name: json.loads(rest) for name, _, rest in lines if not name.startswith("{")}
    return named | {"": json.loads("".join(lines[-1]))}


def kinds(
    pair: tuple[int, str], all: list[int], either: int | str,
    days: Annotated[int, Field(ge=1, le=7)] = 1,
    *, perhaps: float | None = None,
) -> object:  # fmt: skip
    """Takes kinds.

    Args:
        pair: Two
        all: Any number
        either: Of two types
        days: How many
        perhaps: Or none
    """
    return [pair, all, either, days, perhaps]


GIVEN = {"pair": [1, "a"], "all": [1, 2, 3], "either": "x"}


@pytest.mark.parametrize(
    "argument, reply",
    [
        (GIVEN, [[1, "a"], [1, 2, 3], "x", 1, None]),
        (GIVEN | {"either": 5, "days": 7, "perhaps": 1}, [[1, "a"], [1, 2, 3], 5, 7, 1.0]),
        (GIVEN | {"perhaps": None}, [[1, "a"], [1, 2, 3], "x", 1, None]),
        (GIVEN | {"days": 8}, "days: "), (GIVEN | {"pair": [1]}, "pair: "), (GIVEN | {"all": ["a"]}, "all: "),
    ],
)  # fmt: skip
def test_types_that_pydantic_has_a_schema_of_are_types_of_arguments(argument, reply):
    [text] = answered(kinds, json.dumps(argument))
    assert json.loads(text) == reply if isinstance(reply, list) else f"kinds: {reply}" in text


def test_what_is_returned_may_be_of_a_type_that_only_its_values_make_json():
    def count(n: int) -> np.ndarray:
        """Counts.

        Args:
            n: How far
        """
        return np.arange(n)

    assert answered(count, '{"n": 3}') == ["[0, 1, 2]"]


def test_the_prompt_shows_each_argument():
    shown = shown_of(TypedFunction(kinds, ""))
    assert shown["days"] == {"type": "integer", "description": "How many"}
    assert shown["perhaps"] == {"type": "number", "nullable": True, "description": "Or none"}
    assert shown["either"] == {"type": ["integer", "string"], "description": "Of two types"}
    assert shown[""] == {"type": "object", "required": ["pair", "all", "either"]}


@pytest.mark.parametrize(
    "result, reply",
    [
        (
            {"mean": float("nan"), "most": float("inf"), "n": 0},
            '{"mean": null, "most": null, "n": 0}',
        ),
        *(
            (other, "returns failed: ")
            for other in (object(), threading.Lock, {"x": [threading.Lock()]})
        ),
    ],
)
def test_what_json_has_no_word_for_is_null_and_a_result_that_is_no_json_is_refused(result, reply):
    @no_arguments
    def returns():
        return result

    [text] = answered(returns, "")
    assert text.startswith(reply) and " at 0x" not in text


# ---- what the policy and the loop know of them


def test_the_words_of_a_tool_come_from_its_function():
    weather, loud = (TypedFunction(f, "") for f in (forecast, shout))
    form = Tags(SimpleNamespace(tools=[weather, loud]))
    assert form.stop_strings() == ("</forecast>", "</shout>", "</answer>")
    check_words("--tools x", [weather, loud])
    assert (loud.argument, loud.plural, loud.result_tag) == ("text", "shout_calls", "result")
    assert weather.argument == '{"city": ..., "days": ..., "unit": ...}'
    shout.result_tag = "echo"
    try:
        assert TypedFunction(shout, "").result_tag == "echo"
    finally:
        del shout.result_tag


class Asking(SearchQA):
    """Search QA with a single question."""

    def questions(self, split):
        return [ASKED]


def test_a_rollout_with_functions_beside_search(tiny):
    """The observations, by hand; every token but those of the policy is as its text is
    tokenized."""
    task = load_task(
        Config(
            task="test_functions:Asking",
            tools="test_functions:shout,search,test_functions:forecast",
        )
    )
    assert isinstance(task, SearchQA) and task.cfg.tools == "search"
    assert [tool.tag for tool in task.tools] == ["search", "shout", "forecast"]
    task.connect("http://127.0.0.1:9")  # as `start` does; the functions stay
    assert [tool.tag for tool in task.tools] == ["search", "shout", "forecast"]
    turns = ['<forecast>{"city": "Bern"}</forecast>', "<shout> ja </shout>", "<forecast>Bern</forecast>", "<shout>",
             "<answer>x</answer>"]  # fmt: skip
    tau, engine = play(tiny[1], task, *turns)
    wrong = "wrong arguments of forecast: Invalid JSON: expected value at line 1 column 1"
    shown = ['{"city": "Bern", "days": 1, "unit": "C"}', "JA", wrong]
    assert [turn.result for turn in tau.turns] == [[shown[0]], [shown[1]], [shown[2]], None, None]
    assert (tau.stop, tau.invalid, tau.served("forecast"), tau.served("shout")) == (
        "answer",
        1,
        2,
        1,
    )
    observations = [f"\n\n<result>{text}</result>\n\n" for text in shown]
    for turn, text in zip(turns, observations, strict=False):
        assert turn + text in tau.response
    ids = [
        i
        for turn, text in zip(turns, observations, strict=False)
        for i in spelled(tiny[1], turn)
        + tiny[1](text.split("</result>")[0], add_special_tokens=False)["input_ids"]
        + tiny[1]("</result>\n\n", add_special_tokens=False)["input_ids"]
    ]
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


@pytest.mark.parametrize(
    "tools, searches", [("test_functions:shout", 0), ("none", 0), ("search", 1)]
)
@pytest.mark.parametrize("preset", [True, False])
def test_the_first_instruction_fits_the_tools(tools, searches, preset):
    task = load_task(
        Config(tools=tools, instruction=PRESETS["world"]["instruction"] if preset else "")
    )
    instruction = choose_instruction(task)
    assert ("<search>" in instruction) == (
        "search" in instruction
    ) == searches and "<answer>" in instruction


def test_a_run_with_the_function_of_the_page(tmp_path, monkeypatch, tiny_path, serve):
    page = (ROOT / "docs" / "tasks.md").read_text()
    [code] = re.findall(r"```python\n(def forecast.*?)```", page, re.S)
    tools = re.search(r"python inspo.py --tools (\S+)", page)[1]
    (tmp_path / "weather.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    search = serve(passages(lambda query: ["A\nb"]))
    inspo.main(
        [
            "--model",
            tiny_path,
            "--train",
            str(FIXTURE / "train.jsonl"),
            "--test",
            str(FIXTURE / "test.jsonl"),
            "--retriever",
            search.url,
            "--tools",
            tools,
            "--mode",
            "static",
            "--T",
            "1",
            "--batch",
            "2",
            "--G",
            "2",
            "--eval_n",
            "4",
            "--max_response",
            "8",
            "--max_prompt",
            "1400",
            "--out",
            "run",
        ]
    )
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tools"] == ["searches", "forecast_calls"] and "forecast_calls" in summary["end"]
    with gzip.open(run / "trajectories" / "step-000001.jsonl.gz", "rt") as file:
        tau = json.loads(next(file))
    task, tokenizer = load_task(read_config(run)), load_tokenizer(tiny_path)
    [asked] = [q for q in task.questions("train") if q.id == tau["question"]]
    assert tau["prompt_tokens"] == len(
        task.make_format(tokenizer).encode_prompt(task.instruction, asked)
    )


# ---- what is refused

MODULE = '''
from __future__ import annotations

def typeless(x):
    """Does.

    Args:
        x: A thing
    """

def silent(x: int): ...

def half(x: int, y: int):
    """Does.

    Args:
        x: A thing
    """

def odd(x: Unheard):
    """Does.

    Args:
        x: A thing
    """

def search(query: str):
    """Searches.

    Args:
        query: What for
    """

def answer(query: str):
    """Answers.

    Args:
        query: What for
    """

class Kind:
    """A class."""
'''


@pytest.mark.parametrize(
    "tools, says",
    [
        ("my_tools:typeless", "Argument x is missing a type hint in function typeless"),
        ("my_tools:silent", "--tools my_tools:silent: Cannot generate JSON schema for silent"),
        ("my_tools:half", "the docstring has no description for the argument 'y'"),
        ("my_tools:odd", "--tools my_tools:odd: name 'Unheard' is not defined"),
        ("my_tools:Kind", "Kind is not a function in my_tools"),
        ("my_tools:nothing", "nothing is not a function in my_tools"),
        ("my_toolz:search", "--tools my_toolz:search: my_toolz cannot be imported"),
        ("my_tools:", "--tools my_tools:: give it as module:name, for a function"),
        ("search,my_tools:search", "has the tag 'search'; tags are"),
        ("my_tools:search,my_tools:search", "has the tag 'search'; tags are"),
        ("my_tools:answer", "has the tag 'answer'; tags are"),
    ],
)
def test_what_is_no_tool_is_refused_in_one_line(tmp_path, monkeypatch, tools, says):
    (tmp_path / "my_tools.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    with pytest.raises(Fault) as fault:
        load_task(Config(tools=tools))
    assert says in str(fault.value) and "\n" not in str(fault.value)


class Steps(Game):
    """A game that counts its moves."""

    questions, reward, reset = Asking.questions, Plain.reward, lambda self, question: 0

    def step(self, tau, move):
        tau.state += 1
        return str(tau.state)


def test_in_a_game_functions_can_be_called_too(tiny):
    task = load_task(Config(task="test_functions:Steps", tools="test_functions:shout"))
    script = [["<move>a</move>", "<shout>b</shout>", "<move>c</move>", "<answer>x</answer>"]] * 2
    taus = roll(
        Script(tiny[1], *script), tiny[1], task, [Job(0, "Go.", ASKED, k) for k in range(2)]
    )
    assert [[turn.result for turn in tau.turns] for tau in taus] == [
        [["1"], ["B"], ["2"], None]
    ] * 2
