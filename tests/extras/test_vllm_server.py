"""Turns by two `vllm serve` on the CPU, against TorchEngine and transformers' own forward pass.

.venv-vllm/bin/python -m pytest tests/extras/test_vllm_server.py
"""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import requests
from json_server import free_port, json_servers
from test_engine import contexts_of
from test_vllm import ENV, MAX_LEN, ROOT, changed, off, torchrun, turns
from tiny_model import STOP

import extras.engines.vllm_server as vllm_server
from engines.torch_engine import TorchEngine
from extras.engines.vllm_server import VllmServer
from models.model import weights
from plumbing.faults import EngineFault, Fault, Outage

pytest.importorskip("vllm")

ENV["PYTHONPATH"] += (
    f":{ROOT / 'tests' / 'extras'}"  # ranks_vllm.py takes store_transfer.py from there
)


def settings(path):
    return SimpleNamespace(model=path, longest=MAX_LEN)


@pytest.fixture(scope="module", autouse=True)
def starting(tiny_path):
    """(url, process) of two `vllm serve` of the tiny policy; they start while the tests of the
    engine run."""
    command = [
        sys.executable, "tests/extras/store_transfer.py", "serve", tiny_path, "--host", "127.0.0.1",
        "--dtype", "float32",
        "--max-model-len", str(MAX_LEN), "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--weight-transfer-config", '{"backend": "store"}', "--load-format", "dummy", "--enforce-eager",
        "--no-enable-chunked-prefill", "--gpu-memory-utilization", "0.08",
    ]  # fmt: skip
    env = ENV | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    started = []
    try:
        for _ in range(2):
            port = free_port()
            own = [*command, "--port", str(port)]
            process = subprocess.Popen(
                own, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True
            )
            started.append((f"http://127.0.0.1:{port}", process))
        yield started
    finally:
        for _, process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def urls(starting):
    end = time.time() + 600
    for url, process in starting:
        while True:
            assert process.poll() is None and time.time() < end, "vllm serve did not start"
            try:
                if requests.get(f"{url}/health", timeout=10).ok:
                    break
            except requests.RequestException:
                time.sleep(0.3)
    return ",".join(url for url, _ in starting)


@pytest.fixture(scope="module")
def server(urls, tiny, tiny_path):
    """A client of both servers, which have the tiny policy's weights."""
    from store_transfer import Server

    server = Server(settings(tiny_path), tiny[1], STOP, urls)
    server.load(weights(tiny[0]))
    yield server
    server.close()


def test_two_servers_are_one_engine(server, tiny):
    model, tokenizer = tiny
    contexts = contexts_of(tokenizer)
    server.stop = (tokenizer.decode(turns(server, {0: contexts[0]}, 10, 0.0)[0][0])[-3:],)
    ours, theirs = (
        turns(e, contexts, 20, 0.0) for e in (server, TorchEngine(model, tokenizer, server.stop))
    )
    server.stop = STOP
    assert {key: ids for key, (ids, _) in ours.items()} == {
        key: ids for key, (ids, _) in theirs.items()
    }
    assert len(ours[0][0]) == 10
    for temperature in (0.0, 0.7, 1.0):
        ended = turns(server, contexts, 30, temperature, seed=5)
        assert off(model, contexts, ended, temperature) < 1e-4
        again = turns(server, contexts, 30, temperature, seed=5)
        assert {key: ids for key, (ids, _) in again.items()} == {
            key: ids for key, (ids, _) in ended.items()
        }
    assert turns(server, contexts, 30, 1.0, seed=6) != ended


def test_both_servers_get_new_weights(server, tiny):
    model, tokenizer = tiny
    other, contexts = changed(model), contexts_of(tokenizer)
    server.load(weights(other))
    assert off(other, contexts, turns(server, contexts, 10, 1.0), 1.0) < 1e-4
    server.load(weights(model))
    assert off(model, contexts, turns(server, contexts, 10, 1.0), 1.0) < 1e-4


def test_a_server_with_other_weights_than_the_last_ones_is_noticed(server, tiny):
    url = server.urls[1]
    # as after a restart
    requests.post(f"{url}/update_weight_version", json={"new_version": "default"})
    with pytest.raises(EngineFault, match=f"{url}.*restarted"):
        turns(server, contexts_of(tiny[1]), 3, 1.0)
    server.load(weights(tiny[0]))
    turns(server, contexts_of(tiny[1]), 3, 1.0)


def test_servers_that_did_not_take_the_weights_are_noticed(server, tiny, monkeypatch):
    def lost():
        for _ in server.source:
            pass
        server.request_all(
            "/update_weight_version", *[{"new_version": str(server.loads)}] * len(server.urls)
        )

    with monkeypatch.context() as patch:
        patch.setattr(server.sender, "send_weights", lost)
        server.load(weights(tiny[0]))  # they have these
        with pytest.raises(
            EngineFault, match=f"{server.urls[0]} answers as before, after load {server.loads + 1}"
        ):
            server.load(weights(changed(tiny[0])))
    server.load(weights(changed(tiny[0])))
    server.load(weights(tiny[0]))


@pytest.mark.parametrize(
    "part, key, value, says",
    [
        ("model_config", "max_model_len", 400, "takes 400 tokens, 500 are needed"),
        (None, "weight_transfer_config", None, "weight transfer None"),
    ],
)
def test_a_server_that_was_started_with_other_settings(
    server, tiny, tiny_path, monkeypatch, part, key, value, says
):
    request = type(server).request

    def other(self, url, path, *args, **kwargs):
        answer = request(self, url, path, *args, **kwargs)
        if path.startswith("/server_info"):
            config = answer["vllm_config"]
            (config[part] if part else config)[key] = value
        return answer

    monkeypatch.setattr(type(server), "request", other)
    with pytest.raises(Fault) as e:
        type(server)(settings(tiny_path), tiny[1], STOP, server.urls[0])
    line = str(e.value)
    assert says in line and "\n" not in line
    assert f"VLLM_SERVER_DEV_MODE=1 vllm serve {tiny_path} --host 127.0.0.1 --port" in line
    assert "--max-model-len 500 --logprobs-mode processed_logprobs --enable-scale-out" in line


def test_the_real_client_wants_nccl(server, tiny, tiny_path):
    with pytest.raises(Fault, match='weight transfer store, not nccl.*\'{"backend": "nccl"}\''):
        VllmServer(settings(tiny_path), tiny[1], STOP, server.urls[0])


def test_a_server_of_another_version(tiny, tiny_path):
    with json_servers() as start:
        other = start({"version": "0.31.2"})
        with pytest.raises(Fault, match="is vLLM 0.31.2"):
            VllmServer(settings(tiny_path), tiny[1], STOP, other.url)


def test_two_ranks_send_the_sharded_policy_to_the_servers(server, urls, tiny_path):
    both = torchrun(tiny_path, urls)  # they take the servers from `server`
    assert max(error for one in both for error in one["errors"]) < 1e-4


def test_a_server_that_stays_away_ends_the_run_with_one_line(
    server, starting, tiny, tiny_path, monkeypatch
):
    url, process = starting[1]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    monkeypatch.setattr(vllm_server.VllmServer, "retries", 1)
    monkeypatch.setitem(server.clients, url, vllm_server.Client(url, server.timeout, 1))
    server.loads = 0
    with pytest.raises(Outage, match=f"^{url}/inference/v1/generate: NewConnectionError"):
        turns(server, contexts_of(tiny[1]), 5, 0.0)
    with pytest.raises(
        Fault,
        match=f"VLLM_URLS: {url}/version: NewConnectionError.* VLLM_SERVER_DEV_MODE=1 vllm serve",
    ):
        VllmServer(settings(tiny_path), tiny[1], STOP, url)
