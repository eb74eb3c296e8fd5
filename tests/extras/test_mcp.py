"""Tools of a real MCP server, over stdin and HTTP: calls, wrong arguments, a server that dies, one
that lies."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from json_server import free_port

from config import Config
from plumbing.faults import Fault, ToolDown
from tasks import Question
from tasks.task import load_task
from tasks.tools import Failure

pytest.importorskip(
    "mcp", reason="the MCP SDK is not installed here: pip install mcp jsonschema-rs"
)

from extras.plugs import mcp  # noqa: E402
from extras.plugs.mcp import RETRIES, ROUNDS, list_tools  # noqa: E402

SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = f"{sys.executable} {SERVER}"
NAMES = {"add", "shout", "fail", "sleep", "secret", "refuse", "show"}


def tools(target=COMMAND):
    """The tools of a server, by name: of one for all tests, unless the target is another's."""
    found = list_tools(target, f"--tools mcp:{target}")
    return {tool.name: tool for tool in found if not isinstance(tool, Fault)}


def own(blanks=itertools.count(1)):  # noqa: B008
    """Returns the command once more, for a server that a test may break."""
    return COMMAND + " " * next(blanks)


def answered(tool, argument):
    [text] = tool.submit(argument).result(60)
    return text


def children():
    return [
        p for p in psutil.Process().children(recursive=True) if SERVER.name in " ".join(p.cmdline())
    ]


@pytest.fixture
def http():
    """(URL, start): a server by HTTP, which `start` starts again on the same port."""
    port, running = free_port(), []

    def start():
        command = [sys.executable, SERVER, "--port", str(port)]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        next(line for line in running[-1].stderr if "running on" in line)
        return running[-1]

    yield f"http://127.0.0.1:{port}/mcp", start
    for process in running:
        process.kill()
        process.wait()


CALLS = [
    # one text: bare
    ("add", '{"a": 2, "b": 3}', "5"), ("add", '{"a": 2}', "3"), ("shout", "so what?", r"SO WHAT\?"),
    *(("add", x, "wrong arguments of add: .*") for x in ('{"a": "two"}', '{"b": 1}', "{a: 2}")),
    ("fail", "no luck", ".*no luck.*"), ("refuse", '{"times": 3}', "refuse failed: quota exceeded 3 times"),
    ("sleep", '{"seconds": 20}', "sleep took longer than 0.5 s"), ("show", "file:///x", r"what it holds\n\(image\)"),
    ("secret", "OPENAI_API_KEY", "none"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def key():
    """A secret of this process, which no server is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "sk-secret")
        yield


@pytest.mark.parametrize("by", ["command", pytest.param("url", marks=pytest.mark.slow)])
def test_calls_run_side_by_side_and_errors_are_replies_that_restart_nothing(by, http):
    url, start = http
    if by == "url":
        start()
    found = tools(url if by == "url" else COMMAND)
    found["sleep"].timeout = 0.5
    for name, argument, reply in CALLS:
        if (by, name) != ("url", "secret"):  # started here, not by the client
            result = found[name].submit(argument).result(60)
            assert re.fullmatch(reply, *result), (name, argument)
            assert isinstance(result, Failure) == (name in ("fail", "refuse", "sleep"))
    calls = [found["add"].submit(json.dumps({"a": k})) for k in range(20)]
    assert [call.result(60) for call in calls] == [[str(k + 1)] for k in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_is_replaced_and_the_call_repeated(number, monkeypatch):
    monkeypatch.setattr(mcp, "PROBE", 3)
    before = {p.pid for p in children()}
    found = tools(own())
    [mine] = [p for p in children() if p.pid not in before]
    mine.send_signal(number)
    found["add"].timeout = 3
    assert answered(found["add"], '{"a": 1}') == "2"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_stays_away_or_frozen_stops_the_run_and_is_named(number, http, monkeypatch):
    url, start = http
    process, naps = start(), []
    found = tools(url)
    monkeypatch.setattr(mcp, "back_off", lambda round: naps.append(round) or 0)
    monkeypatch.setattr(mcp, "PROBE", 0.2)
    monkeypatch.setattr(mcp, "PATIENCE", 0.2)
    found["add"].timeout = 0.2
    process.send_signal(number)
    with pytest.raises(ToolDown, match=f"{url}: the MCP server ended and does not start again"):
        answered(found["add"], '{"a": 1}')
    assert len(naps) == RETRIES


@pytest.mark.slow
def test_a_server_by_http_that_is_away_for_a_while_is_waited_for(http, monkeypatch):
    url, start = http
    process, waits = start(), []
    found = tools(url)
    process.kill()
    process.wait()

    def back_off(round):
        waits.append(round)
        if round == 3:
            start()
        return 0.01

    monkeypatch.setattr(mcp, "back_off", back_off)
    calls = [found["add"].submit(json.dumps({"a": k})) for k in range(8)]
    assert [call.result(60) for call in calls] == [[str(k + 1)] for k in range(8)]
    # once for all calls
    assert waits == [1, 2, 3]


@pytest.mark.slow
def test_calls_that_all_take_too_long_are_counted_and_stop_the_run(monkeypatch):
    found, begun = tools(own()), mcp._begun
    found["sleep"].timeout, together = 0.1, threading.Barrier(2 * ROUNDS, timeout=60)
    with monkeypatch.context() as patch:  # side by side: one round
        patch.setattr(mcp, "_begun", lambda work: together.wait() >= 0 and begun(work))
        late = [found["sleep"].submit('{"seconds": 5}') for _ in range(2 * ROUNDS)]
        assert {call.result(60)[0] for call in late} == {"sleep took longer than 0.1 s"}
    for _ in range(ROUNDS - 2):
        assert answered(found["sleep"], '{"seconds": 5}') == "sleep took longer than 0.1 s"
        # says nothing of the server
        assert answered(found["sleep"], "{}").startswith("wrong arguments")
    with pytest.raises(ToolDown, match="it has served no call in 6 rounds"):
        answered(found["sleep"], '{"seconds": 5}')
    assert answered(found["add"], '{"a": 1}') == "2"


# ---- schemas and results


def schema(a):
    return {"type": "object", "properties": {"a": a}}


LEFT_OUT = [  # changes of a copy of `add`, and what a note says
    ({"name": "far", "parameters": schema({"$ref": "file:///etc/hosts"})}, "lies outside"),
    ({"name": "odd", "parameters": schema({"pattern": "(("})}, "schema of its tool odd is invalid"),
    ({"name": "mute", "description": " "}, "mute has no description"), ({"name": "1st"}, "<1st> .* no digit first"),
    ({"name": "answer"}, "has the tag 'answer'"),
]  # fmt: skip


@pytest.mark.slow
def test_a_tool_that_cannot_be_offered_is_left_out_with_a_note_and_the_rest_serves(
    tmp_path, capsys
):
    more = json.dumps([{"name": "a_dd"}, *(change for change, _ in LEFT_OUT)])
    # a spec has no comma
    (tmp_path / SERVER.name).write_text(f"exec {COMMAND} --more {shlex.quote(more)}\n")
    target = f"sh {tmp_path / SERVER.name}"
    task = load_task(Config(tools=f"search,mcp:{target}"))
    assert {tool.tag for tool in task.tools} == {"search", "a_dd"} | NAMES
    notes = capsys.readouterr().out.splitlines()
    for note, (_, says) in zip(notes, LEFT_OUT, strict=True):
        assert re.fullmatch(f"note: --tools mcp:.*{says}.*; it is left out", note)


@pytest.mark.parametrize(
    "target, says",
    [
        ("sh -c 'echo it has no licence >&2'", "it has no licence"), ("/no/such/program", "/no/such/program"),
        ("http://127.0.0.1:9/mcp", "no MCP server"),
    ],
)  # fmt: skip
def test_a_server_that_is_none_or_lies_is_one_line(target, says):
    with pytest.raises(Fault, match=says) as e:
        tools(target)
    assert str(e.value).startswith(f"--tools mcp:{target}: ") and "\n" not in str(e.value)


def test_a_task_has_the_server_s_tools_beside_its_own():
    task = load_task(Config(tools=f"search,mcp:{COMMAND}"))
    assert {tool.tag for tool in task.tools} == {"search"} | NAMES
    assert "</add>" in task.make_format().stop_strings()
    [message] = task.make_format().messages("Answer.", Question("q", "What is it?"))
    assert "<add> " in message["content"] and "Adds two numbers." in message["content"]
    with pytest.raises(Fault, match="its tool <add> has the tag 'add'; "):
        load_task(Config(tools=f"mcp:{COMMAND},mcp:{COMMAND} "))


def teardown_module():
    for process in children():
        os.kill(process.pid, signal.SIGKILL)
