"""`--task openenv:URL` against OpenEnv's own servers, where the package can be had (OPENENV_PYTHON:
the interpreter of an environment that has it; its requirements exclude ours), and servers that are
none."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hermes_like import small
from json_server import JsonServer, free_port
from scripted import Says
from test_rollout import roll
from test_seam import refused
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from config import Config
from extras.plugs.openenv import text_of
from plumbing.faults import ToolDown
from tasks import Job
from tasks.task import load_task, set_rewards
from tasks.tools import Failure

PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def server():
    """A function that starts OpenEnv's server of an environment, and returns its URL."""
    if subprocess.run([PYTHON, "-c", "import openenv, fastmcp"], capture_output=True).returncode:
        pytest.skip("the package openenv is not installed")
    started = []

    def start(kind, sessions):
        port = free_port()
        script = str(Path(__file__).with_name("openenv_server.py"))
        started.append(subprocess.Popen([PYTHON, script, str(port), kind, str(sessions)]))
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.1)
        raise TimeoutError

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def vault(server):
    return server("vault", 3)


@pytest.fixture(scope="module")
def counter(server):
    return server("counter", 1)


def task_at(url, **knobs):
    task = load_task(Config(task=f"openenv:{url}", batch=2, G=2, **knobs))
    return task, task.start(lambda *_: "")


def play(task, *turns, seeds=(12,)):
    """Plays the same turns in the episodes of these seeds, each a group, and rewards them."""
    tokenizer = small("qwen2_5")
    jobs = [Job(0, "Go.", task.questions("train")[seed], seed) for seed in seeds]
    taus = roll(Says(tokenizer, *[turns] * len(seeds)), tokenizer, task, jobs)
    set_rewards(task, taus)
    return taus


def test_an_action_is_a_tool_rewards_are_summed_and_done_ends(vault):
    task, said = task_at(vault)
    [tool] = task.tools
    assert "tools: step" in said and tool.schema["description"] == "Dials a digit of the code."
    assert list(tool.schema["parameters"]["properties"]) == ["digit"]
    turns = [
        '<step> {"digit": 1} </step>',
        '<step> {"digit": 7} </step>',
        '<step> {"digit": 2} </step>',
    ]
    [tau] = play(task, turns[0], turns[2], "<answer> never read </answer>")
    assert tau.stop == "over" and tau.reward == 1.0  # that of reset is none of a step
    assert [turn.result for turn in tau.turns] == [["Nothing."], ["It opens."]]
    [tau] = play(task, turns[0], turns[1], "<answer> done </answer>")
    assert tau.stop == "answer" and tau.reward == 0.5
    [tau] = play(task, "<answer> done </answer>")
    assert tau.reward == 0.0
    [message] = task.prompt("Go.", task.questions("train")[345])
    assert message["content"] == "Go.\n\nA vault of 3 digits.\n"


def test_mcp_tools_are_tools(counter):
    task, said = task_at(counter)
    assert "tools: add, ask" in said
    turns = [
        '<add> {"n": 5} </add>',
        "<ask> x </ask>",
        "<ask> nothing </ask>",
        '<add> {"n": 7} </add>',
    ]
    [tau] = play(task, *turns, "<answer> no </answer>", seeds=(12,))
    five, word, failure, twelve = (turn.result for turn in tau.turns)
    assert (five, twelve) == (["5 of 12"], ["12 of 12"]) and tau.stop == "over"
    assert json.loads(word[0]) == {"word": "x", "means": "ä"}
    assert isinstance(failure, Failure) and "It means nothing." in failure[0]
    assert tau.reward == 1.0
    [message] = task.prompt("Go.", task.questions("train")[3])
    assert message["content"] == "Go.\n\nCount to 3.\n"


def test_as_many_episodes_are_played_at_once_as_the_server_has_sessions(vault, counter):
    task, said = task_at(vault)
    assert task.at_once == 3 and "at once: 3; it allows no more" in said
    turns = ['<step> {"digit": 1} </step>', '<step> {"digit": 2} </step>', "<answer>x</answer>"]
    taus = play(task, *turns, seeds=(12, 1, 21, 12, 99))
    assert [tau.reward for tau in taus] == [1.0, 0.5, 0.0, 1.0, 0.0]
    single, said = task_at(counter)
    assert single.at_once == 1
    assert "no OpenEnv environment answers there (Server at capacity" in refused(task_at, counter)
    # a call that fails costs its session, whose place is free a moment later
    turns = [
        '<add> {"n": 2} </add>',
        "<ask> nothing </ask>",
        '<add> {"n": 2} </add>',
        "<answer>x</answer>",
    ]
    taus = play(single, *turns, seeds=(2, 4))
    assert [(tau.stop, tau.reward) for tau in taus] == [("over", 0.25), ("over", 0.75)]


@pytest.mark.parametrize(
    "observation, text",
    [
        ({"text": "ok", "legal": []}, "ok"), ({"board": [1], "turn": 2}, '{"board": [1], "turn": 2}'),
        ({}, ""), ({"metadata": {"episode_id": "x", "said": "ä"}}, "ä"), ("ok", "ok"),
        ({"tool_name": "go", "result": {"content": [{"type": "text", "text": "ok"}]}}, "ok"),
    ],
)  # fmt: skip
def test_what_the_policy_reads_of_an_observation(observation, text):
    assert text_of(observation) == text


# ---- servers that are none


def socket_server(handler):
    """Serves WebSockets with this handler; returns the server and its URL."""
    server = serve(handler, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def test_what_is_no_openenv_server_is_refused_in_one_line():
    said = refused(task_at, f"http://127.0.0.1:{free_port()}")
    assert "no OpenEnv environment answers there" in said
    page = JsonServer((404, {}, ""))
    assert "no OpenEnv environment answers there" in refused(task_at, page.url)
    page.stop()


TOOL = {"name": "go", "description": "Goes.", "input_schema": {"type": "object"}}


def speak(ws, reply):
    """Speaks the protocol with one MCP tool that a policy can call; the k-th call of a connection
    gets reply(k, its arguments), which may be none: then it ends."""
    calls = 0
    for data in (json.loads(message).get("data", {}) for message in ws):
        seen, more = {"tools": [TOOL | {"name": "3d"}, TOOL | {"description": ""}, TOOL]}, {}
        if data.get("type") == "call_tool":
            calls += 1
            seen, more = {"text": reply(calls, data["arguments"])}, {"reward": 1}
            if not seen["text"]:
                return
        with contextlib.suppress(ConnectionClosed):
            ws.send(json.dumps({"type": "observation", "data": {"observation": seen} | more}))


def test_a_call_that_takes_too_long_ends_its_episode_whose_replies_no_other_reads():
    gate = threading.Event()

    def slow(k, arguments):
        return f"reply {arguments['n']}" if arguments["n"] or gate.wait(60) else ""

    server, url = socket_server(lambda ws: speak(ws, slow))
    task, _ = task_at(url)
    task.tools[0].timeout = 0.1
    [late] = play(task, '<go>{"n": 0}</go>', '<go>{"n": 1}</go>')
    assert [turn.result for turn in late.turns] == [["go took longer than 0.1 s"]]
    assert late.stop == "over"
    gate.set()
    task.tools[0].timeout = 60
    for _ in range(3):
        [tau] = play(task, *[f'<go>{{"n": {n}}}</go>' for n in (1, 2)], "<answer>x</answer>")
        assert [turn.result for turn in tau.turns[:2]] == [["reply 1"], ["reply 2"]]
    del task
    server.shutdown()


def test_a_lost_connection_ends_its_episode_and_a_lost_server_the_run(monkeypatch, capsys):
    monkeypatch.setattr("extras.plugs.openenv.back_off", lambda round: 0)
    server, url = socket_server(lambda ws: speak(ws, lambda k, _: "ok" * (k < 2)))
    task, _ = task_at(url)
    # a tool that cannot be offered is left out, and the rest serves
    assert [tool.tag for tool in task.tools] == ["go"]
    assert capsys.readouterr().out.count("; it is left out\n") == 2
    for tau in play(task, "<go> </go>", "<go> </go>", "<answer>x</answer>", seeds=(1, 2)):
        assert tau.stop == "over" and tau.reward == 1.0
        assert "the environment is gone" in tau.turns[1].result[0]
    assert play(task, "<answer>x</answer>")[0].stop == "answer"  # over a new connection
    server.shutdown()
    with pytest.raises(ToolDown, match="does not answer"):
        play(task, "<answer>x</answer>")
