"""vLLM in the process and behind `vllm serve`, on the CPU, against TorchEngine and transformers'
own forward pass.

.venv-vllm/bin/python -m pytest tests/test_vllm.py
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_engine import contexts_of, plain_logprobs
from test_lora import trained
from test_model import PER_LAYER, make_family, own_logps
from tiny_model import STOP

import engines.vllm_engine as vllm_engine
from config import WORLD
from engines import choose, watch_ends
from engines.choose import check_vllm, vllm_version
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine
from models.model import load_model, load_tokenizer, weights
from plumbing.chat import turn_ends
from plumbing.faults import EngineFault, Fault

pytest.importorskip("vllm")
ROOT = Path(__file__).parent.parent
ENV = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
MAX_LEN = 500


def turns(engine, contexts, max_new, temperature, seed=0):
    """Returns key -> (ids, log-probs) of a first turn of every row."""
    engine.reset(seed)
    return more(engine, contexts, max_new, temperature)


def more(engine, contexts, max_new, temperature):
    ended = list(engine.generate(contexts, max_new, temperature))
    while len(ended) < len(contexts):
        ended += engine.generate({}, max_new, temperature)
    assert not list(engine.generate({}, max_new, temperature))
    return {key: (ids, logps) for key, ids, logps, _ in ended}


def off(model, contexts, ended, temperature):
    """Returns the largest difference of the log-probs from transformers'; asserts that greedy
    tokens are likeliest."""
    worst = 0.0
    for key, (ids, logps) in ended.items():
        wanted = plain_logprobs(model, contexts[key], ids, temperature)
        of_sampled = wanted.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert len(logps) == len(ids)
        assert temperature or (of_sampled > wanted.amax(1) - 1e-4).all()
        worst = max(worst, (of_sampled - torch.tensor(logps).double()).abs().max().item())
    return worst


def changed(model, factor=1.2):
    """Returns a copy with all weights multiplied by `factor`."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(factor)
    return other


# ---- in the process: `world` has a tied head, `tiny` has not


def opened(path):
    """An engine of a policy, which is closed after a with block."""
    engine = VllmEngine(
        path, load_tokenizer(path), STOP, max_len=MAX_LEN, dtype="float32", memory=0.02
    )
    return contextlib.closing(engine)


@pytest.fixture(scope="module", params=["world", "tiny"])
def pair(request, tiny_path):
    """(engine with the policy's weights, model, tokenizer)"""
    path = {"world": str(WORLD / "policy"), "tiny": tiny_path}[request.param]
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert model.config.tie_word_embeddings == (request.param == "world")
    with opened(path) as engine:
        engine.load(weights(model))
        yield engine, model, tokenizer


@pytest.fixture
def engine(pair):
    """With the policy's weights, the next of which it proves; restored after each test."""
    engine, model, tokenizer = pair
    engine.proven = False
    yield engine
    engine.ended = watch_ends(tokenizer, STOP)
    engine.load(weights(model))


def test_greedy_turns_are_the_torch_engine_s_token_by_token(pair, engine):
    _, model, tokenizer = pair
    contexts = contexts_of(tokenizer)
    # Its text contains no stop string, so use pieces of the text as stop strings.
    texts = [tokenizer.decode(ids) for ids, _ in turns(engine, contexts, 30, 0.0).values()]
    stop = tuple({text[k : k + 3] for text, k in zip(texts, (8, 14, 20, 30, 40), strict=False)})
    engine.ended = watch_ends(tokenizer, stop)
    twin = TorchEngine(model, tokenizer, stop)
    engine.reset(0)
    lengths = set()
    for turn in range(3):
        ours, theirs = more(engine, contexts, 20, 0.0), more(twin, contexts, 20, 0.0)
        # vLLM goes on with no turn that a stop string has ended
        assert not engine.core.engine_core.scheduler.has_unfinished_requests()
        assert {key: ids for key, (ids, _) in ours.items()} == {
            key: ids for key, (ids, _) in theirs.items()
        }
        torch.testing.assert_close(
            [lp for _, lp in ours.values()], [theirs[k][1] for k in ours], atol=1e-4, rtol=0
        )
        lengths |= {len(ids) for ids, _ in ours.values()}
        seen = {row: tokenizer("the city is " * (1 + row % 3))["input_ids"] for row in contexts}
        contexts = {
            row: contexts[row] + ours[row][0] + seen[row] for row in contexts if row != turn
        }
    assert len(lengths) > 3  # some turns ended at a stop string


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_are_those_of_transformers_at_the_temperature(pair, engine, temperature):
    contexts = contexts_of(pair[2])
    assert off(pair[1], contexts, turns(engine, contexts, 30, temperature), temperature) < 1e-4


def test_what_ends_a_turn_ends_it_and_is_kept_and_nothing_else_does(pair, engine):
    tokenizer, contexts = pair[2], dict.fromkeys(range(24), contexts_of(pair[2])[0])
    engine.load(weights(changed(pair[1], factor=0.0)))  # any token is as likely
    for eos in (tokenizer.eos_token, "the", "of"):
        other = copy.deepcopy(tokenizer)
        other.eos_token, other.name_or_path = eos, ""  # its model's own files declare none
        engine.ended = watch_ends(other, ("never" * 3,))
        ends = set(turn_ends(other))
        ended = [ids for ids, _ in turns(engine, contexts, 200, 1.0, seed=len(eos)).values()]
        assert other.eos_token_id in ends and all(not ends & {*ids[:-1]} for ids in ended)
        assert all(ids[-1] in ends or len(ids) == 200 for ids in ended)
        assert 0 < sum(ids[-1] in ends for ids in ended) < 24
    assert any(tokenizer.eos_token_id in ids for ids in ended)  # and the turn continued


def test_samples_are_a_function_of_the_seed(pair, engine):
    """On the CPU, with the same rows together; on CUDA with any others, too (not run here)."""
    contexts = contexts_of(pair[2])  # at temperature 2: at 1 the world's policy often says the same
    together = turns(engine, contexts, 12, 2.0, seed=7)
    torch.randn(3)  # torch's global generator plays no part
    assert turns(engine, contexts, 12, 2.0, seed=7) == together
    other = turns(engine, contexts, 12, 2.0, seed=8)
    assert sum(other[key][0] == together[key][0] for key in contexts) < len(contexts) / 2
    rows = turns(engine, dict.fromkeys(range(8), contexts[0]), 12, 2.0)
    assert len({tuple(ids) for ids, _ in rows.values()}) > 4


def test_new_turns_begin_while_others_run(pair, engine):
    engine.ended = watch_ends(pair[2], ("never" * 3,))
    contexts = contexts_of(pair[2])
    alone = turns(engine, contexts, 30, 0.0)
    engine.reset(0)
    assert not list(engine.generate({0: contexts[0]}, 30, 0.0))
    for _ in range(4):
        assert not list(engine.generate({}, 30, 0.0))
    new = {key: contexts[key] for key in contexts if key}
    ended = list(engine.generate(new, 5, 0.0))
    while len(ended) < len(contexts):
        ended += engine.generate({}, 5, 0.0)
    assert ended[-1][0] == 0  # the first to begin, with the longer turn, is the last to end
    for key, ids, *_ in ended:
        want = alone[key][0] if key == 0 else alone[key][0][:5]
        assert ids == want


def test_reset_forgets_running_rows(pair, engine):
    contexts = contexts_of(pair[2])
    list(engine.generate(contexts, 30, 1.0))
    ended = turns(engine, {3: contexts[3]}, 30, 0.0)
    assert list(ended) == [3] and off(pair[1], contexts, ended, 0.0) < 1e-4


# ---- its weights


def test_new_weights_are_used_at_once_also_after_sleep_and_no_cache_of_the_old_ones(pair, engine):
    _, model, tokenizer = pair
    other, contexts = changed(model), contexts_of(tokenizer)
    before = turns(engine, contexts, 10, 1.0)
    assert off(other, contexts, before, 1.0) > 0.05
    engine.load(weights(other))
    assert off(other, contexts, turns(engine, contexts, 10, 1.0), 1.0) < 1e-4
    engine.sleep()
    engine.load(weights(model))
    assert turns(engine, contexts, 10, 1.0) == before


def test_a_policy_with_adapters_comes_with_them_merged(pair, engine):
    adapted, contexts = trained(pair[1]), contexts_of(pair[2])
    assert off(adapted, contexts, turns(engine, contexts, 10, 1.0), 1.0) > 0.01
    engine.load(weights(adapted))
    assert off(adapted, contexts, turns(engine, contexts, 10, 1.0), 1.0) < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_weight_that_differs_in_the_engine_is_named(pair, engine, name, monkeypatch):
    record = vllm_engine.Proof.record

    def one_update_old(self, named):
        for key, tensor in record(self, named):
            yield key, tensor * (1 + 1e-4) + 1e-6 if key == name else tensor

    monkeypatch.setattr(vllm_engine.Proof, "record", one_update_old)
    with pytest.raises(EngineFault, match=f"^{name} .*off"):
        engine.load(weights(pair[1]))


def test_the_first_weights_are_proven_and_no_others(pair, engine, monkeypatch):
    checked = []
    monkeypatch.setattr(vllm_engine.Proof, "check", lambda self, _: checked.append(self.sent))
    for _ in range(2):
        engine.load(weights(pair[1]))
    assert [set(sent) for sent in checked] == [{name for name, _ in weights(pair[1])}]


@pytest.mark.parametrize("family, settings", [
    ("Phi3", {}), ("Mistral", {"sliding_window": 8}),
    ("Gemma4Text", PER_LAYER),  # with buffers that are weights
])  # fmt: skip
def test_a_family_with_weights_that_it_packs_itself_or_windows(
    family, settings, tiny_path, tmp_path
):
    path = make_family(family, settings, tiny_path, tmp_path / family)
    model = changed(load_model(path))
    with opened(path) as engine:
        engine.load(weights(model))
        model.set_attn_implementation("eager")
        contexts = contexts_of(load_tokenizer(path))
        for key, (ids, logps) in turns(engine, contexts, 10, 0.7).items():
            wanted = own_logps(model, torch.tensor(contexts[key] + ids), 0.7)[-len(ids) :]
            of_sampled = wanted.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logps).double(), of_sampled, atol=1e-3, rtol=0)


# ---- processes


def run(*argv):
    """Returns what tests/ranks_vllm.py prints in each process; asserts exit code 0."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)], env=ENV, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(one) for one in re.findall(r"{.*?}", done.stdout)]


def torchrun(*argv):
    return run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "tests/ranks_vllm.py",
        *argv,
    )


def test_a_process_with_an_engine_ends_well(tiny_path):
    [only] = run("tests/ranks_vllm.py", tiny_path)
    assert max(only["errors"]) < 1e-4


def test_each_of_two_ranks_has_its_engine_with_the_weights_of_the_sharded_policy():
    both = torchrun(WORLD / "policy")
    assert sorted(one["rank"] for one in both) == [0, 1]
    assert max(error for one in both for error in one["errors"]) < 1e-4


# ---- is it there


def test_the_version_is_checked_without_importing_it(monkeypatch):
    check_vllm()
    assert vllm_version()
    monkeypatch.setattr(choose, "vllm_version", lambda: "0.31.0")
    with pytest.raises(
        Fault, match=r"vLLM 0\.32, found 0\.31\.0: pip install vllm==0\.32\.0 .*--engine torch"
    ):
        check_vllm()
    monkeypatch.setattr(choose, "vllm_version", str)
    with pytest.raises(Fault, match="found none: pip install"):
        check_vllm()
