"""The computed seconds of a step against counts by hand, torch's own counters, and what more hardware must do."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, Qwen2Config

import inspo
from config import parse
from extras.speed import (
    CARDS,
    MOVED,
    Card,
    Lengths,
    Shape,
    rollout_seconds,
    shape_of,
    step_seconds,
    table,
    typical,
    update_seconds,
    upper_bound,
)
from models import lora
from models.layers import fuse_shapes
from models.model import empty, skeleton
from training import fit

SMALL = Qwen2Config(
    hidden_size=8, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50, tie_word_embeddings=False, head_dim=2,
)  # fmt: skip
BLOCK = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20  # q, k and v, o, and gate, up, down
UNIT, COUNT = Card(1.0, 1.0, 1.0), Card(1.0, math.inf, math.inf)  # with the second, seconds are FLOPs
PLAIN = Shape(
    parameters=100, trained=100, matrices=60, head=20, vocabulary=10, width=3, kv=7, forward=5.0, backward=11.0
)  # fmt: skip
CFG3, CFG7 = (parse(["--dry_run", "--model", name]) for name in ("qwen2.5-3b", "qwen2.5-7b"))


def test_shapes_by_hand():
    shape = shape_of(SMALL)
    assert shape.matrices == 3 * BLOCK and shape.head == 8 * 50 and shape.vocabulary == 50
    assert shape.width == 3 * 4 * 2 and shape.kv == 3 * 2 * 2 * 2 * 2  # layers, keys and values, heads, dim, bytes
    biases, norms = 3 * (8 + 4 + 4), 3 * 2 * 8 + 8
    assert shape.parameters == shape.trained == 3 * BLOCK + 2 * 8 * 50 + biases + norms
    thin = shape_of(SMALL, rank=2)
    adapters = 3 * 2 * (16 + 12 + 12 + 16 + 28 + 28 + 28)  # in + out of q, k, v, o, gate, up, down
    assert thin == replace(shape, trained=adapters)
    known = shape_of(fit.shapes("Qwen/Qwen2.5-3B"))
    assert known.parameters == 3_085_938_688 and known.kv == 36864
    assert known.matrices / 1e9 == pytest.approx(2.77, abs=0.005)  # 2.77B without embeddings, says its model card


@pytest.mark.parametrize("rank", [0, 2])
def test_flops_equal_torch_s_counter(rank, n=16):
    """Torch counts all pairs of an attention, of which a causal one computes half. A fused kernel repeats one product.
    LoRA's thin products are left out, and its frozen weights get no gradient."""
    model = lora.add(empty(SMALL, torch.float32, "cpu"), rank, 2)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    model.set_attn_implementation("eager")
    x, ids = torch.randn(1, n, 8, requires_grad=True), torch.zeros(1, n, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=x, use_cache=False).logits.sum().backward()
    with FlopCounterMode(display=False) as rope:
        model.base_model.rotary_emb(torch.zeros(1, n, 8), ids)
    cfg = replace(CFG3, batch=1, mini=1, G=1, micro_tokens=n, recompute=0)
    shape, lengths = shape_of(SMALL, rank=rank), Lengths("", 0, 0, n, n, 0, 1)
    ours = update_seconds(cfg, shape, COUNT, 1, lengths)["update"] + (14 / 2 - 2) * shape.width * n * n
    if rank:  # of every layer: B A twice; x A^T and dB, dy B and dA
        weights = shape.matrices + shape.head
        ours += 2 * shape.trained * 2 * n - 2 * 2 * shape.trained / shape.parameters * weights * n / 2
        ours += 2 * 2 * rank * shape.matrices
    assert counted.get_total_flops() - rope.get_total_flops() == pytest.approx(ours, rel=1e-9)
    again = update_seconds(replace(cfg, recompute=1), shape, COUNT, 1, lengths)["update"]
    once = update_seconds(cfg, shape, COUNT, 1, lengths)["update"]
    assert again - once == pytest.approx(2 * shape.matrices * n + 4 * shape.width * n * n / 2)


class Moved(TorchDispatchMode):
    """Adds up the bytes that operations read and write, except views and products of matrices."""

    bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        alias = [value.alias_info for value in func._schema.returns]
        view = any(info is not None and not info.is_write for info in alias)
        if not view and not re.search("mm|empty|embedding|alias|_unsafe_view", func.__name__):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)  # expanded: read once
        return out


class NoAttention(torch.autograd.Function):
    """The shapes of an attention that moves nothing."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return query.new_empty(query.transpose(1, 2).shape)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("fused", [0, 1])
def test_bytes_are_those_that_operations_read_and_write(name, fused):
    config = fit.shapes(name)
    model, ids = skeleton(config, torch.bfloat16), torch.zeros(1, 1024, dtype=torch.long, device="meta")
    if fused:
        fuse_shapes(model)
    AttentionInterface.register("nothing", lambda module, q, k, v, *args, **kw: (NoAttention.apply(q, k, v), None))
    model.set_attn_implementation("nothing")
    with Moved() as forward:
        hidden = model.train().base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    with Moved() as backward:
        hidden.backward(torch.empty_like(hidden))
    shape = shape_of(config, fused)
    assert shape.forward * 1024 == pytest.approx(forward.bytes, rel=0.03)
    assert shape.backward * 1024 == pytest.approx(backward.bytes, rel=0.03)
    assert MOVED[1] < MOVED[0]


def test_a_step_s_parts_by_hand():
    cfg = replace(CFG3, batch=8, mini=4, G=2, micro_tokens=40, recompute=1)
    lengths = Lengths("", prompt=4, observed=6, sampled=10, longest=25, searches=3, rounds=2)
    tokens, scored, pairs = 8 * 4 + 16 * 16, 16 * 10, 8 * 8 + 16 * (200 - 8)  # eight prompts of 4, each once
    products = 2 * 60 * tokens + 2 * 20 * scored
    score = (products + 4 * 3 * pairs + 5 * tokens + 8 * 10 * scored) / 2
    update = 3 * products + 2 * 60 * tokens + (4 + 10 + 4) * 3 * pairs
    update = (update + (5 + 5 + 11) * tokens + (8 + 6) * 10 * scored) / 2
    found = update_seconds(cfg, PLAIN, replace(UNIT, link=math.inf), 2, lengths)
    assert found == {"old log-probs": score / 2, "reference": score, "update": update, "optimizer": 2 * 40 * 100 / 2}
    slow = update_seconds(cfg, PLAIN, replace(UNIT, link=1e-3), 2, lengths)
    batches = 2 * 2  # two updates of 144 tokens: four micro-batches, two a rank
    assert slow["update"] == pytest.approx(batches * 8 * 100 / 2 / 1e-3)
    one = update_seconds(replace(cfg, mini=8, beta=0.0), PLAIN, UNIT, 2, lengths)
    assert one["old log-probs"] == one["reference"] == 0

    host = 45e-6
    found = rollout_seconds(PLAIN, replace(UNIT, flops=math.inf), 3, 4, 2, lengths)  # room for 3 of 8
    one, three = (2 * 80 + rows * 12 * 7 + host * rows for rows in (1, 3))  # 12: mean context
    assert found["rollouts: decode"] == pytest.approx(8 / 3 * 10 * three)
    assert found["rollouts: tail"] == pytest.approx((25 - 10 + (3 - 8 / 3) * 10) * one)
    assert found["rollouts: searches"] == pytest.approx(3 * 0.2)
    found = rollout_seconds(PLAIN, UNIT, 512, 4, 2, lengths)
    assert found["rollouts: prefill"] == 2 * 60 * (8 * 6 + 4 * 4) + 4 * 3 * (8 * 6 * 12 + 4 * 4 * 4 / 2)
    assert found["rollouts: decode"] == pytest.approx(10 * (8 * (120 + 40 + 4 * 3 * 12) + 8 * host))


def test_verification_is_spread_over_an_evolution_s_steps():
    cfg, lengths = replace(CFG3, K_e=10, gpus=8), typical(CFG3)
    parts = step_seconds(cfg, PLAIN, UNIT, 1e9, lengths)
    once = sum(rollout_seconds(PLAIN, UNIT, 512, 7 * 200 / 8, 1, lengths).values())  # a parent, six revisions
    assert parts["verification before T_e, spread over K_e steps"] == pytest.approx(once / 10)
    assert parts["weights to vLLM"] == 4 * 7 / 8 * 100 + 14 * 100
    for other in (replace(cfg, mode="static"), replace(cfg, T_e=0)):
        assert not any("verification" in name for name in step_seconds(other, PLAIN, UNIT, 1e9, lengths))


def test_the_upper_bound_is_what_the_flags_allow():
    assert upper_bound(CFG3).total == upper_bound(CFG7).total == 4096 + 500 + 500
    assert upper_bound(CFG3).sampled == 5 * 500 and upper_bound(CFG7).sampled == 7 * 500
    assert upper_bound(replace(CFG3, max_turns=99)).sampled == 4096 + 500
    found = typical(CFG3)
    assert (found.prompt, found.observed, found.sampled, found.longest) == (400, 1000, 450, 900)
    assert typical(replace(CFG3, max_turns=1, max_response=20)).sampled == 40


@pytest.mark.parametrize("cfg", [CFG3, CFG7])
def test_more_hardware_is_never_slower(cfg):
    shape, card = shape_of(fit.shapes(cfg.model)), CARDS["h100"]
    for lengths in (typical(cfg), upper_bound(cfg)):

        def seconds(card: Card = card, gpus: int = 8, room: float = 7e5, lengths: Lengths = lengths) -> float:
            return sum(step_seconds(replace(cfg, gpus=gpus), shape, card, room, lengths).values())

        by_gpus = [seconds(gpus=gpus) for gpus in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)]
        assert by_gpus == sorted(by_gpus, reverse=True) and by_gpus[0] > 4 * by_gpus[5]
        for name in ("flops", "bandwidth", "link"):
            times = [seconds(replace(card, **{name: k * getattr(card, name)})) for k in (1, 1.5, 2, 4)]
            assert times == sorted(times, reverse=True) and times[0] > times[-1], name
        by_room = [seconds(room=room) for room in (2e5, 4e5, 7e5, 1e6, 2e6)]
        assert by_room == sorted(by_room, reverse=True)


def test_the_cards_are_those_that_the_flag_takes(capsys):
    assert list(CARDS) == list(fit.CARDS)
    for name in CARDS:
        assert parse(["--dry_run", "--card", name]).card == name
    with pytest.raises(SystemExit):
        parse(["--dry_run", "--card", "v100"])
    fault = capsys.readouterr().err
    assert f"--card v100: choose {', '.join(list(CARDS)[:-1])} or {list(CARDS)[-1]}" in fault
    assert fault.count("\n") == 1


def test_the_command_prints_the_table_below_that_of_the_memory(capsys):
    inspo.main("--model qwen2.5-7b --dry_run --gpus 8".split())
    cfg, fitted = fit.with_room(CFG7, fit.shapes(CFG7.model), "vllm", 8, 80)
    stdout = capsys.readouterr().out
    assert stdout.startswith(f"{fitted.table()}\n\n{table(cfg, fit.shapes(cfg.model), fitted.kv_tokens)}\n")


def test_the_table_leaves_out_what_it_cannot_compute():
    text = table(CFG3, fit.shapes(CFG3.model), 1.5e6)
    assert max(map(len, text.splitlines())) <= 100 and "rollouts:" in text and "Rollouts are left out" not in text
    text = table(replace(CFG3, engine="torch"), SMALL, 0.0)
    assert "rollouts:" not in text and "Rollouts are left out" in text and "computed, not measured" in text
