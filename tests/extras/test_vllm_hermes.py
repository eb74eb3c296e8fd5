"""`--format hermes` beside vLLM: the ids that its chat endpoint gives its model, and turns that end
with EOS alone.

.venv-vllm/bin/python -m pytest tests/extras/test_vllm_hermes.py
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from found_search import Found
from hermes_like import chat_model
from json_server import free_port
from test_hermes import Chat, conversation, forecast, functions, play, prompt_of

from models.model import load_tokenizer
from tasks.functions import TypedFunction
from tasks.tools import Calculator

pytest.importorskip("vllm")
ROOT = Path(__file__).parents[2]
ENV = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENV |= {"VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def path(request, tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat") / request.param, request.param)


@pytest.fixture(scope="module")
def url(path):
    port = free_port()
    command = [
        sys.executable, "tests/extras/store_transfer.py", "serve", path, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "2000", "--enforce-eager", "--gpu-memory-utilization", "0.08",
        "--served-model-name", "tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        for _ in range(600):
            time.sleep(1)
            assert process.poll() is None, f"vllm serve ended with {process.returncode}"
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_before_each_turn_the_ids_are_those_that_the_chat_endpoint_gives_its_model(path, url):
    tokenizer, found = (
        load_tokenizer(path),
        Found('"Opera"\nBuilt by Jørn Utzon.\n', '"Rome"\n A city!  '),
    )
    tools = [found, TypedFunction(forecast, "here"), Calculator()]
    messages, turns = conversation(Path(path).name, found.show(found.documents))
    tau = play(tokenizer, Chat(*tools), *turns, "Utzon.")
    begins = [k for k in range(1, len(tau.ids)) if tau.mask[k - 1 : k + 1] == [0, 1]]
    for message in messages:
        for call in message.get("tool_calls", ()):  # the API has arguments as a text
            call["id"], call["function"]["arguments"] = (
                "call_0",
                json.dumps(call["function"]["arguments"]),
            )
        if message["role"] == "tool":
            message["tool_call_id"] = "call_0"
    for n, begin in enumerate(begins):
        body = {
            "model": "tiny",
            "messages": prompt_of() + messages[: 2 * n],
            "tools": functions(*tools),
        }
        body |= {"max_tokens": 1, "return_token_ids": True}
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.ok, answer.text
        assert tau.ids[:begin] == answer.json()["prompt_token_ids"], n
    assert len(begins) == 4
