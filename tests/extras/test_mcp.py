"""Tools of a real MCP server, over stdin and HTTP: calls, wrong arguments, a server that dies, one that lies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from config import Config
from plumbing.faults import Fault, ToolDown
from tasks import Question, load_task
from tasks.tools import list_stop_strings

pytest.importorskip("mcp", reason="the MCP SDK is not installed here: pip install mcp jsonschema")

from extras.plugs.mcp import tools_of  # noqa: E402

SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = f"{sys.executable} {SERVER}"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def tools(target):
    """The tools of a server of its own, by name."""
    tools_of.cache_clear()
    return {tool.name: tool for tool in tools_of(target, f"--tools mcp:{target}")}


def answered(tool, argument):
    [text] = tool.submit(argument).result(60)
    return text


def children():
    return [p for p in psutil.Process().children(recursive=True) if SERVER.name in " ".join(p.cmdline())]


@pytest.fixture
def http():
    """(URL, start): a server by HTTP, which `start` starts again on the same port."""
    port, running = free_port(), []

    def start():
        running.append(subprocess.Popen([sys.executable, SERVER, "--port", str(port)], stderr=subprocess.DEVNULL))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    return running[-1]
            time.sleep(0.1)
        raise AssertionError("the server does not listen")

    yield f"http://127.0.0.1:{port}/mcp", start
    for process in running:
        process.kill()
        process.wait()


def check_calls(found):
    assert answered(found["add"], '{"a": 2, "b": 3}') == "5" and answered(found["add"], '{"a": 2}') == "3"
    assert answered(found["shout"], "so what?") == "SO WHAT?"  # one text: bare
    assert "no luck" in answered(found["fail"], "no luck")
    for wrong in ('{"a": "two"}', '{"b": 1}', "[1, 2]", "{a: 2}", ""):
        assert answered(found["add"], wrong).startswith("wrong arguments of add: "), wrong
    calls = [found["add"].submit(json.dumps({"a": k})) for k in range(20)]
    assert [call.result(60) for call in calls] == [[str(k + 1)] for k in range(20)]


def test_calls_over_stdin_and_stdout():
    found = tools(COMMAND)
    check_calls(found)
    assert found["add"].faults == 0


def test_calls_over_http(http):
    url, start = http
    start()
    check_calls(tools(url))


def test_a_server_sees_no_keys(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert answered(tools(COMMAND)["secret"], "OPENAI_API_KEY") == "none"


def test_a_call_that_takes_too_long_is_a_reply():
    found = tools(COMMAND)
    found["sleep"].timeout = 0.3
    assert answered(found["sleep"], '{"seconds": 20}') == "sleep took longer than 0.3 s"
    assert answered(found["add"], '{"a": 1}') == "2"


def test_a_server_that_dies_is_started_again_and_the_call_repeated(tmp_path):
    before = {p.pid for p in children()}
    found = tools(COMMAND)
    assert answered(found["end"], str(tmp_path / "here")) == "still here"
    [mine] = [p for p in children() if p.pid not in before]
    mine.send_signal(signal.SIGKILL)
    mine.wait(10)
    assert answered(found["add"], '{"a": 1}') == "2"
    assert sum(tool.faults for tool in found.values()) == 2


def test_a_call_that_ends_every_server_is_at_fault_itself():
    found = tools(COMMAND)
    assert answered(found["end"], "") == "end failed: the server ended during the call"
    assert answered(found["add"], '{"a": 1}') == "2"


def test_a_server_that_stays_away_stops_the_run_and_is_named(http):
    url, start = http
    process = start()
    found = tools(url)
    process.kill()
    process.wait()
    with pytest.raises(ToolDown, match=url):
        answered(found["add"], '{"a": 1}')
    start()
    assert answered(found["add"], '{"a": 1}') == "2"  # a resumed run would find it


@pytest.mark.parametrize(
    "target, says",
    [
        (f"{COMMAND} --lie type", "schema of its tool add"), (f"{COMMAND} --lie keyword", "schema of its tool add"),
        (f"{COMMAND} --lie silent", "add has no description"),
        (f"{COMMAND} --lie none", "it has no licence"), ("/no/such/program", "/no/such/program"),
        ("http://127.0.0.1:9/mcp", "http://127.0.0.1:9"), ("", "no URL"),
    ],
)  # fmt: skip
def test_a_server_that_is_none_or_lies_is_one_line(target, says):
    with pytest.raises(Fault, match=says) as e:
        tools(target)
    assert str(e.value).startswith(f"--tools mcp:{target}: ") and "\n" not in str(e.value)


def test_a_task_has_the_server_s_tools_beside_its_own():
    task = load_task(Config(tools=f"search,mcp:{COMMAND}"))
    assert {tool.tag for tool in task.tools} == {"search", "add", "shout", "fail", "sleep", "end", "secret"}
    assert "</add>" in list_stop_strings(task.tools)
    [message] = task.format.messages(task, "Answer.", Question("q", "What is it?"))
    assert "<add> " in message["content"] and "Adds two numbers." in message["content"]
    with pytest.raises(Fault, match="its tool <add> has the tag 'add'; "):
        load_task(Config(tools=f"mcp:{COMMAND},mcp:{COMMAND} "))
    with pytest.raises(Fault, match="its tool <1st> has the tag '1st'; tags are"):
        load_task(Config(tools=f"mcp:{COMMAND} --lie name"))


def teardown_module():
    for process in children():
        os.kill(process.pid, signal.SIGKILL)
