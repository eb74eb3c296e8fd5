"""LoRA: merged weights, the reference, what is trained, what full rank can do, checkpoints, ranks,
whole runs."""

import copy
import json
import pickle
import threading
from dataclasses import replace
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_grpo import batch_of, eq2, scaled, settings_of
from test_inspo import SMALL, finish, metrics, start, weights_of
from test_ranks import CFG, LIMIT, together, torchrun
from tiny_model import STOP
from torch.utils._pytree import tree_leaves

import export
from config import WORLD, Config
from engines.torch_engine import TorchEngine
from grpo import Learner, minibatches
from models import lora
from models.model import adapted_layers, is_adapter, load_model, weights, without_adapters
from tasks.task import load_task
from training.policy import Policy
from training.ranks import Ranks

RANK, ALPHA = 4, 8


def made_up(groups, seed=0):
    """Returns groups of three random trajectories, of tokens that both policies have."""
    taus = batch_of(groups, seed)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
    return taus


def adapted(model, rank=RANK, alpha=ALPHA):
    return lora.add(copy.deepcopy(model), rank, alpha)


def trained(model, rank=RANK, alpha=ALPHA):
    """Returns a copy with adapters whose B is no longer zero."""
    model = adapted(model, rank, alpha)
    g = torch.Generator().manual_seed(1)
    for layer in adapted_layers(model).values():
        layer.lora_B.data = 0.05 * torch.randn(layer.lora_B.shape, generator=g)
    return model


def learner_of(model, **settings):
    return Learner(model, None, settings_of(lora_rank=RANK, lora_alpha=ALPHA, **settings))


def loss_of(learner, taus):
    """Returns (loss, extras) of one on-policy mini-batch."""
    return learner.loss(taus, slice(None), learner.make_loss_inputs(taus, None))


def logps_of(model, taus):
    """Returns the log-probs of all action tokens."""
    learner = Learner(model, None, settings_of(beta=0.0))
    return torch.from_numpy(np.concatenate([learner.score_tokens([tau])[0] for tau in taus]))


# ---- the weights


def test_the_stream_is_base_plus_scale_b_a_under_the_plain_names_in_their_order(policy):
    model = trained(policy[0])
    base, found = dict(policy[0].named_parameters()), dict(weights(model))
    adapters = adapted_layers(model)
    engine = TorchEngine(copy.deepcopy(policy[0]), policy[1], STOP)
    engine.load(weights(model))
    assert list(found) == list(base)
    # q, k, v, o, gate, up, down
    assert list(adapters) == [name for name in base if name.endswith("_proj.weight")]
    for name, W in base.items():
        want = W.detach().double()
        if layer := adapters.get(name):
            want = want + ALPHA / RANK * layer.lora_B.double() @ layer.lora_A.double()
        assert torch.equal(engine.model.get_parameter(name), found[name])
        torch.testing.assert_close(found[name].double(), want, atol=1e-6, rtol=0)


def test_adapters_are_float32_start_at_nothing_and_depend_on_the_seed_alone(tiny):
    state, narrow = torch.get_rng_state(), copy.deepcopy(tiny[0]).bfloat16()
    models = (lora.add(copy.deepcopy(narrow), RANK, ALPHA, seed) for seed in (0, 0, 1))
    first, again, other = (dict(model.named_parameters()) for model in models)
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in first.items():
        adapter = is_adapter(name)
        assert p.requires_grad == adapter
        assert p.dtype == (torch.float32 if adapter else torch.bfloat16)
        assert torch.equal(p, again[name]) and (not name.endswith(".lora_B") or not p.any())
        assert torch.equal(p, other[name]) != name.endswith(".lora_A")
    assert lora.add(tiny[0], 0, ALPHA) is tiny[0] and not adapted_layers(tiny[0])


# ---- the reference


def test_the_kl_is_that_to_the_first_policy_which_the_adapters_leave_as_it_was(world):
    taus = scaled(made_up(2), 0)  # all advantages 0: the loss is beta times the KL
    model, first = trained(world[0]).double(), copy.deepcopy(world[0]).double()
    now = logps_of(model, taus)
    learner = learner_of(model)
    assert learner.reference is model
    want, kl, _ = eq2(model, first, taus)
    loss, extras = loss_of(learner, taus)
    assert kl > 1e-3 and extras["kl"].mean().item() == pytest.approx(kl, rel=1e-6)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    with without_adapters(model):
        assert torch.equal(logps_of(model, taus), logps_of(first, taus))
    assert torch.equal(logps_of(model, taus), now)


# ---- training


def gradients(model, taus, **settings):
    """Returns the gradients of Eq. 2, KL to a first policy left out."""
    learner = Learner(model, None, settings_of(beta=0.0, **settings))
    model.train()
    loss_of(learner, taus)[0].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_adapters_gradients_are_the_weights_by_the_chain_rule(world, recompute):
    """Full training of the merged weights gives G; then dL/dB = scale G A^T and dL/dA = scale B^T
    G."""
    model, taus, plain = trained(world[0]).double(), made_up(2), copy.deepcopy(world[0]).double()
    with torch.no_grad():
        for name, layer in adapted_layers(model).items():
            plain.get_parameter(name).add_(ALPHA / RANK * layer.lora_B @ layer.lora_A)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mine, full = gradients(model, taus), gradients(plain, taus)
    assert len(mine) == 2 * 7 * 3
    for name, layer in adapted_layers(model).items():
        G, path = full[name], name.removesuffix(".weight")
        for part, want in (
            ("lora_B", ALPHA / RANK * G @ layer.lora_A.T),
            ("lora_A", ALPHA / RANK * layer.lora_B.T @ G),
        ):
            got = mine[f"{path}.{part}"]
            assert (got - want).norm() <= 1e-6 * want.norm() > 0, (name, part)


# ---- checkpoints


def test_only_adapters_move_and_a_learner_restored_from_them_continues_bit_by_bit(world):
    taus, through = made_up(2), learner_of(adapted(world[0]))
    through.update(1, [taus])
    state = copy.deepcopy(through.state_dict())
    kept = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert len(kept) == 2 * 7 * 3 and all(map(is_adapter, kept))
    through.update(2, [taus])
    resumed = learner_of(lora.add(copy.deepcopy(world[0]), RANK, ALPHA, seed=9))
    for name, x in resumed.state_dict().items():
        x.copy_(state[name])
    resumed.update(2, [taus])
    first = adapted(world[0])
    for (name, p), q in zip(
        through.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(p, q), name
        assert torch.equal(p, first.get_parameter(name)) != is_adapter(name), name


def policy_of(path, dtype="float32", **knobs):
    few = (
        dict(T=3, warmup=0.0, micro_tokens=300, G=3, mini_batch=12, beta=0.0, max_prompt=1500)
        | knobs
    )
    cfg = Config(model=str(path), engine="torch", **few)
    return Policy(cfg, Ranks("cpu", 1, dtype), load_task(cfg))


def test_an_engine_sleeps_while_a_checkpoint_is_written_or_loaded_and_a_dead_one_costs_none(
    tiny_path, tmp_path
):
    """A state dict takes the room of its weights and cache on a card; it gets them again before the
    next rollout."""
    policy, engine = policy_of(tiny_path), Mock()
    policy.engine, policy.same_model, policy.synced = engine, False, False
    engine.sleep.side_effect = RuntimeError("the engine died")
    policy.sync()
    policy.save(tmp_path / "one")
    policy.written.result()
    assert engine.mock_calls == [call.load(ANY), call.sleep()]
    assert list((tmp_path / "one").glob("*.safetensors"))
    policy.sync()
    policy.sync()
    assert engine.mock_calls[2:] == [call.load(ANY)]
    engine.sleep.side_effect = None
    policy.load(tmp_path / "one", 1)
    assert engine.mock_calls[3:] == [call.sleep()] and not policy.synced


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_checkpoint_holds_the_policy_of_the_moment_in_which_it_began(
    tiny_path, tmp_path, monkeypatch, rank
):
    """It is written after the next update, of which it has nothing; a reset restores the first
    policy."""
    policy = policy_of(tiny_path, lr=1e-2, lora_rank=rank, lora_alpha=ALPHA)
    taus, learner = made_up(2), policy.learner
    first = copy.deepcopy(dict(weights(learner.model)))
    learner.max_gap = 1e9
    policy.update(1, taus)
    then = copy.deepcopy(learner.state_dict())
    go, writer = threading.Event(), dcp.HuggingFaceStorageWriter
    write = writer.write_data
    monkeypatch.setattr(writer, "write_data", lambda *args: go.wait() and write(*args))
    policy.save(tmp_path / "saved")
    policy.update(2, taus)
    go.set()
    policy.written.result()
    policy.reset()
    for name, W in weights(learner.model):
        assert torch.equal(W, first[name]), name
    policy.load(tmp_path / "saved", 1)
    for kept, restored in zip(tree_leaves(then), tree_leaves(learner.state_dict()), strict=True):
        assert torch.equal(kept, restored) if isinstance(kept, torch.Tensor) else kept == restored
    policy.close()


# ---- whole runs


@pytest.mark.slow
def test_a_run_trains_adapters_and_exports_them_merged(tmp_path):
    flags = ["--lora_rank", RANK, "--lora_alpha", ALPHA, "--lr", 0.01, "--recompute", 1]
    code, _, stderr = finish(start("--out", out := tmp_path / "lora", *SMALL, *flags))
    assert code == 0, stderr
    rows = metrics(out)
    assert rows[1]["kl"] < 1e-9 < rows[5]["kl"]
    assert all(0 <= row["logp_gap"] < 1e-4 for row in rows[1:])
    final, first = weights_of(out / "policy"), weights_of(WORLD / "policy")
    for (name, W), (other, V) in zip(final.items(), first.items(), strict=True):
        assert name == other and torch.equal(W, V) != name.endswith("_proj.weight"), name
    [newest] = sorted((out / "checkpoints").glob("step-*"))[-1:]
    shares = sum(path.stat().st_size for path in newest.rglob("*.safetensors"))
    assert shares < 0.5 * (WORLD / "policy" / "model.safetensors").stat().st_size
    export.main([str(out), "--out", str(tmp_path / "merged")])
    merged = weights_of(tmp_path / "merged")
    assert all(torch.equal(merged[name], W) for name, W in final.items())


# ---- several ranks


@pytest.fixture(scope="module")
def path(tiny_path):
    return tiny_path


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Returns a file of seven groups of three, and the settings of a run with adapters."""
    taus = scaled(made_up(7, seed=3), 3)
    cfg = replace(CFG, lora_rank=RANK, lora_alpha=ALPHA, lr=5e-3)
    path = tmp_path_factory.mktemp("batches") / "b.pkl"
    path.write_bytes(pickle.dumps((cfg, minibatches(taus, cfg))))
    return path


@pytest.fixture(scope="module")
def one(path, batches):
    """Returns (metrics, merged weights, first weights) of one process, the model whole."""
    cfg, parts = pickle.loads(batches.read_bytes())
    model = load_model(path)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(lora.add(model, RANK, ALPHA), None, cfg)
    return [learner.update(t, parts) for t in (1, 2)], dict(weights(model)), first


def same(found, merged, one):
    """Asserts equal metrics (5e-5, as docs/gpus.md says) and merged weights, within 1 % of the
    largest move."""
    for mine, theirs in zip(found, one[0][-len(found) :], strict=True):
        assert mine == pytest.approx(theirs, rel=5e-5, abs=1e-6)
    assert list(merged) == list(one[1])
    moved = max((W - one[2][name]).abs().max().item() for name, W in merged.items())
    off = max((W - one[1][name]).abs().max().item() for name, W in merged.items())
    assert moved > 5e-3 and off < 0.01 * moved, (moved, off)


@pytest.mark.ranks
def test_two_processes_compute_what_one_does_and_three_load_their_checkpoint(
    path, batches, tmp_path, one
):
    assert one[0][0]["grad_norm"] > 0.05 and one[0][1]["kl"] > 1e-4
    same(*together(2, path, tmp_path, two=batches)["two"], one)
    load = f"{batches} --load {tmp_path / 'two' / 'dcp'}"
    found, merged = together(3, path, tmp_path, three=load)["three"]
    assert len(found) == 1
    same(found, merged, one)


@pytest.mark.ranks
def test_the_workers_of_a_run_do_so_too(path, batches, tmp_path):
    cfg, parts = pickle.loads(batches.read_bytes())
    cfg, taus = replace(cfg, model=path, max_prompt=480, max_response=48), sum(parts, [])
    first = Learner(load_model(path), None, replace(cfg, beta=0.0, lora_rank=0))
    for tau in taus:  # an engine that agrees with the trainer, or the workers refuse the update
        logps = iter(first.score_tokens([tau])[0].tolist())
        tau.logps = [next(logps) if sampled else 0.0 for sampled in tau.mask]
    (tmp_path / "taus.pkl").write_bytes(pickle.dumps((cfg, taus)))
    workers = torchrun(2, "tests/ranks_policy.py", tmp_path / "taus.pkl", tmp_path)
    code, _, stderr = finish(workers, LIMIT)
    assert code == 0, stderr
    model = load_model(path)
    want = Learner(lora.add(model, RANK, ALPHA), None, cfg).update(1, minibatches(taus, cfg))
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found == pytest.approx(want, rel=2e-5, abs=1e-6)
    exported = weights_of(tmp_path / "policy")
    for name, W in weights(model):
        torch.testing.assert_close(exported[name], W, atol=1e-4, rtol=0)


# ---- bfloat16


def test_without_dithering_what_is_merged_is_rounded(tiny):
    model = lora.add(copy.deepcopy(tiny[0]).bfloat16(), RANK, ALPHA, dithers=0)
    layer = next(iter(adapted_layers(model).values()))
    B = 1e-3 * torch.randn(layer.lora_B.shape, generator=torch.Generator().manual_seed(1))
    merged = lora.merge(layer.weight, layer.lora_A, B, layer.scale, layer.dither)
    exact = layer.weight.float() + layer.scale * (B.bfloat16() @ layer.lora_A.bfloat16())
    off, least = (merged.float() - exact).abs(), (exact.bfloat16().float() - exact).abs()
    # halves go either way
    assert torch.equal(off, least) and not torch.equal(merged, layer.weight)


def test_what_is_merged_is_w_where_b_is_zero_and_rounded_fairly_elsewhere():
    g, n = torch.Generator().manual_seed(1), 200
    W = (0.02 * torch.randn(300, 200, generator=g)).bfloat16()
    A = torch.randn(4, 200, generator=g).bfloat16()
    W[:, :4] = torch.tensor([0.0, -0.0, 2.0**-6, -3e38])
    B = (1e-5 * torch.randn(300, 4, generator=g)).bfloat16()
    dithers = torch.randint(2**16, (n, 500), generator=g, dtype=torch.int32)
    assert torch.equal(lora.merge(W, A, 0 * B, 2.0, dithers[0]), W)
    exact = W.float() + 2 * (B @ A)
    bits = exact.view(torch.int32) & -(2**16)
    # the bfloat16s towards 0 and away from it
    near, far = bits.view(torch.float32), (bits + 2**16).view(torch.float32)
    rises = torch.zeros_like(exact)
    for dither in dithers:
        merged = lora.merge(W, A, B, 2.0, dither).float()
        assert ((merged == near) | (merged == far)).all()
        rises += merged == far
    want = (exact - near) / (far - near)
    off = rises / n - want
    assert (off.abs() < 6 * (want * (1 - want) / n).sqrt() + 1 / n).all()
    assert off.mean().abs() < 1e-3
