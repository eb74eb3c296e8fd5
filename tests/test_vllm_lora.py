"""vLLM with a policy's adapters, in the process and behind `vllm serve`, on the CPU.

.venv-vllm/bin/python -m pytest tests/test_vllm_lora.py
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import requests
import torch
from test_engine import contexts_of
from tiny_model import STOP

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from test_lora import ALPHA, RANK, adapted, faint, share_of_update, trained  # noqa: E402, F401
from test_vllm import ENV, MAX_LEN, ROOT, more, off, turns  # noqa: E402

from config import WORLD  # noqa: E402
from engines.torch_engine import TorchEngine  # noqa: E402
from engines.vllm_engine import StaleWeights, VllmEngine, lora_settings  # noqa: E402
from engines.vllm_server import EngineDown, VllmServer  # noqa: E402
from models import lora  # noqa: E402
from models.model import load_policy, weights  # noqa: E402
from plumbing.faults import Fault  # noqa: E402

LORA = {"lora_rank": RANK, "lora_alpha": ALPHA}


def engine_of(path, tokenizer, dtype="float32"):
    return VllmEngine(str(path), tokenizer, STOP, max_len=MAX_LEN, dtype=dtype, memory=0.02, seed=0, **LORA)


@pytest.fixture(scope="module")
def pair():
    """(engine, policy with trained adapters, tokenizer); the engine has received the frozen weights and those."""
    model, tokenizer = load_policy(str(WORLD / "policy"), "cpu")
    engine = engine_of(WORLD / "policy", tokenizer)
    engine.load(weights(adapted(model)))
    model = trained(model)
    engine.load(weights(model, frozen=False))
    yield engine, model, tokenizer
    engine.close()


@pytest.fixture
def engine(pair):
    """With the policy's adapters; restored after each test."""
    yield pair[0]
    pair[0].load(weights(pair[1], frozen=False))


# ---- in the process


def test_it_computes_with_the_adapters_as_the_trainer_does(pair, engine):
    _, model, tokenizer = pair
    contexts, twin = contexts_of(tokenizer), TorchEngine(model, tokenizer, STOP)
    assert engine.unproven == 0
    ours, theirs = turns(engine, contexts, 30, 0.0), turns(twin, contexts, 30, 0.0)
    assert {key: ids for key, (ids, _) in ours.items()} == {key: ids for key, (ids, _) in theirs.items()}
    for temperature in (0.0, 0.7, 1.0):
        assert off(model, contexts, turns(engine, contexts, 30, temperature), temperature) < 1e-4


def test_new_adapters_are_used_at_once_and_no_cache_of_the_old_ones(pair, engine):
    _, model, tokenizer = pair
    contexts, other = contexts_of(tokenizer), trained(load_policy(str(WORLD / "policy"), "cpu")[0], size=0.1)
    before = turns(engine, contexts, 10, 1.0)
    assert off(other, contexts, before, 1.0) > 0.05
    sent = {name: p.clone() for name, p in other.named_parameters()}
    engine.load(weights(other, frozen=False))
    assert off(other, contexts, turns(engine, contexts, 10, 1.0), 1.0) < 1e-4
    assert all(torch.equal(p, sent[name]) for name, p in other.named_parameters())  # vLLM scales a copy
    list(engine.generate(contexts, 10, 1.0))
    engine.sleep()
    engine.load(weights(model, frozen=False))
    assert turns(engine, contexts, 10, 1.0) == before


def test_in_bfloat16_it_has_what_a_small_update_changes(faint):  # noqa: F811
    path, model, tokenizer = faint
    engine = engine_of(path, tokenizer, "bfloat16")
    try:
        engine.load(weights(adapted(load_policy(path, "cpu")[0])))
        assert abs(share_of_update(engine, model, tokenizer)) < 0.2
        engine.load(weights(model, frozen=False))
        assert engine.unproven == 0
        assert share_of_update(engine, model, tokenizer) == pytest.approx(1, abs=0.2)
        with torch.no_grad():  # an update later, of one part in 300
            for name, p in model.named_parameters():
                if ".lora_B." in name:
                    p.add_(1e-6 * p.sign())
        engine.engine.add_lora = lambda request: True  # it is not handed over
        with pytest.raises(StaleWeights, match="q_proj.lora_B"):
            engine.load(weights(model, frozen=False))
    finally:
        engine.close()


# ---- the proof


def test_adapters_that_vllm_did_not_take_are_noticed(pair, engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "add_lora", lambda request: True)
        with pytest.raises(StaleWeights, match=r"^model\.layers\.0\..*lora_B.*off"):
            engine.load(weights(trained(load_policy(str(WORLD / "policy"), "cpu")[0], size=0.0501), frozen=False))


@pytest.mark.parametrize("layer", ["self_attn.k_proj", "mlp.down_proj"])
def test_an_adapter_that_was_not_sent_is_named(pair, engine, layer):
    with pytest.raises(StaleWeights, match=rf"^model\.layers\.1\.{layer}\.lora_A.* was not sent"):
        engine.load(sent for sent in weights(pair[1], frozen=False) if f"layers.1.{layer}" not in sent[0])


def test_an_adapter_without_a_layer_in_the_engine_is_named(pair, engine):
    extra = [("model.layers.9.mlp.up_proj.lora_A.default.weight", torch.ones(RANK, 128))]
    extra += [("model.layers.9.mlp.up_proj.lora_B.default.weight", torch.ones(256, RANK))]
    with pytest.raises(StaleWeights, match=r"^model\.layers\.9\.mlp\.up_proj\.lora_A.* has no layer"):
        engine.load([*weights(pair[1], frozen=False), *extra])


def test_a_frozen_weight_that_differs_in_the_engine_is_named(pair, engine):
    model, name = pair[1], "model.layers.1.mlp.up_proj.base_layer.weight"
    with pytest.raises(StaleWeights, match=r"^model\.layers\.1\.mlp\.up_proj\.weight .*off"):
        engine.load((key, 1.0001 * p if key == name else p) for key, p in weights(model))
    with pytest.raises(StaleWeights, match=r"^model\.layers\.1\.mlp\.up_proj\.weight .*off"):
        engine.load(weights(model, frozen=False))  # it is compared at every load
    engine.load(weights(model))


@pytest.mark.parametrize("rank, room", [(1, 1), (4, 8), (32, 32), (33, 64), (512, 512)])
def test_vllm_has_room_for_the_rank(rank, room, tiny_path):
    found = lora_settings(tiny_path, rank)
    assert found["max_lora_rank"] == room and "lm_head" not in found["lora_target_modules"]


def test_a_rank_that_vllm_cannot_take_is_one_line(tiny_path):
    with pytest.raises(Fault, match="--lora_rank 513: .*512.*--engine torch"):
        lora_settings(tiny_path, 513)


# ---- a server


def serve(path, *flags):
    """Returns (url, process) of a `vllm serve` that has answered."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable, "tests/store_transfer.py", "serve", path, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", str(MAX_LEN), "--logprobs-mode", "processed_logprobs",
        "--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill", "--gpu-memory-utilization", "0.08",
        *flags,
    ]  # fmt: skip
    env = ENV | dict.fromkeys(("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), "1")
    env["VLLM_LOGGING_LEVEL"] = "ERROR"
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.time() + 180
    while True:
        assert process.poll() is None and time.time() < end, "vllm serve did not start"
        try:
            if requests.get(f"{url}/health", timeout=1).ok:
                return url, process
        except requests.RequestException:
            time.sleep(0.3)


@pytest.fixture(scope="module")
def served(tiny_path):
    url, process = serve(tiny_path, "--enable-lora", "--max-lora-rank", "8")
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def client(url, tiny, tiny_path, folder, **settings):
    knobs = LORA | settings
    return VllmServer(url, tiny[1], STOP, model=tiny_path, max_len=MAX_LEN, folder=folder, **knobs)


def test_a_server_computes_with_the_adapters(served, tiny, tiny_path, tmp_path):
    server, contexts = client(served, tiny, tiny_path, tmp_path), contexts_of(tiny[1])
    first, then = adapted(tiny[0]), trained(tiny[0])
    try:
        for model, frozen in ((first, True), (then, False), (first, False), (then, False)):
            server.load(weights(model, frozen=frozen))
            for temperature in (0.0, 1.0):
                assert off(model, contexts, turns(server, contexts, 20, temperature), temperature) < 1e-4
        assert off(first, contexts, more(server, contexts, 10, 1.0), 1.0) > 0.01
        assert not list(tmp_path.iterdir())
        requests.post(f"{served}/update_weight_version", json={"new_version": "default"})  # as after a restart
        with pytest.raises(StaleWeights, match="restarted"):
            turns(server, contexts, 3, 1.0)
        requests.post(f"{served}/v1/unload_lora_adapter", json={"lora_name": "policy"})
        with pytest.raises(EngineDown, match="generate: HTTP 404: .*policy.*does not exist"):
            turns(server, contexts, 3, 1.0)
    finally:
        server.close()


def test_a_server_that_reads_old_adapters_is_noticed(served, tiny, tiny_path, tmp_path, monkeypatch):
    """As from a network's file system that has not heard of the new ones."""
    server, request = client(served, tiny, tiny_path, tmp_path), VllmServer.request
    first = adapted(tiny[0])
    path, names = tmp_path / "old", [name for name, _ in first.named_parameters() if lora.is_adapter(name)]
    lora.export([(name, first.get_parameter(name)) for name in names], RANK, ALPHA, tiny_path, path)

    def stale(self, url, to, body=None, *args):
        body = body | {"lora_path": str(path)} if to == "/v1/load_lora_adapter" else body
        return request(self, url, to, body, *args)

    monkeypatch.setattr(VllmServer, "request", stale)
    try:
        server.load(weights(first))  # its B are zero: nothing needs to change
        for _ in range(2):
            with pytest.raises(StaleWeights, match=f"{served} answers as before"):
                server.load(weights(trained(tiny[0]), frozen=False))
        monkeypatch.undo()
        for _ in range(2):  # the second has nothing new
            server.load(weights(trained(tiny[0]), frozen=False))
    finally:
        server.close()


def test_a_server_that_cannot_see_the_adapters_is_named(served, tiny, tiny_path, tmp_path, monkeypatch):
    server, read = client(served, tiny, tiny_path, tmp_path), requests.Session.request

    def elsewhere(self, method, url, json=None, **kwargs):
        if url.endswith("/v1/load_lora_adapter"):
            json = json | {"lora_path": "/on/another/machine"}
        return read(self, method, url, json=json, **kwargs)

    monkeypatch.setattr(requests.Session, "request", elsewhere)
    with pytest.raises(EngineDown, match="load_lora_adapter: HTTP 404: .*/on/another/machine"):
        server.load(weights(adapted(tiny[0])))
    server.close()


@pytest.mark.parametrize(
    "part, key, value, settings, says",
    [
        ("lora_config", None, None, {}, "takes adapters up to rank 0, not 4"),
        (None, None, None, {"lora_rank": 9}, "takes adapters up to rank 8, not 9"),
        ("model_config", "model", "another", {}, "serves another, not"),
        ("load_config", "load_format", "dummy", {}, "--load-format dummy"),
    ],
)
def test_a_server_that_was_started_with_other_settings(
    served, tiny, tiny_path, tmp_path, monkeypatch, part, key, value, settings, says
):
    request = VllmServer.request

    def other(self, url, path, *args, **kwargs):
        answer = request(self, url, path, *args, **kwargs)
        if path.startswith("/server_info") and part:
            config = answer["vllm_config"]
            (config[part] if key else config)[key or part] = value
        return answer

    monkeypatch.setattr(VllmServer, "request", other)
    with pytest.raises(Fault) as e:
        client(served, tiny, tiny_path, tmp_path, **settings)
    line = str(e.value)
    assert says in line and "\n" not in line
    assert f"VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {tiny_path} " in line
    assert f"--enable-lora --max-lora-rank {16 if settings else 8}" in line and "weight-transfer" not in line
