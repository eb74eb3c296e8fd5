"""The computed seconds of a step against counts by hand, torch's own counter, and what more hardware must do."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config

from config import parse
from models import lora
from models.layers import NormShapes
from models.model import blocks, empty
from tasks import Question, Trajectory
from training.fit import shapes
from training.speed import (
    CARDS,
    CHECKPOINTS,
    Assumed,
    Card,
    Lengths,
    Moved,
    Shape,
    between_seconds,
    card_here,
    decode_bytes,
    forward_bytes,
    forward_flops,
    moved,
    reached,
    rollout_seconds,
    shape_of,
    step_seconds,
    sync_seconds,
    table,
    typical,
    update_bytes,
    update_flops,
    update_seconds,
)
from training.speed import most as upper_bound

SMALL = Qwen2Config(
    hidden_size=8, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50, tie_word_embeddings=False, head_dim=2,
)  # fmt: skip
BLOCK = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20  # q, k and v, o, and gate, up, down
UNIT = Card(flops=1.0, bandwidth=1.0, link=1.0, host=1.0, memory=1.0, name="")
EXACT = Assumed(
    flops=1, bandwidth=1, link=1, host=0, python=0, disk=math.inf, digest=math.inf, staged=math.inf, search=0
)  # fmt: skip
PLAIN = Shape(
    parameters=100, matrices=60, head=20, vocabulary=10, width=3, kv=7, forward=5.0, backward=11.0, adapters=0
)  # fmt: skip
CFG3, CFG7 = (parse(["--dry_run", "--model", name]) for name in ("qwen2.5-3b", "qwen2.5-7b"))


def test_a_small_shape_by_hand():
    shape = shape_of(SMALL)
    assert shape.matrices == 3 * BLOCK and shape.head == 8 * 50 and shape.vocabulary == 50
    assert shape.width == 3 * 4 * 2 and shape.kv == 3 * 2 * 2 * 2 * 2  # layers, keys and values, heads, dim, bytes
    biases, norms = 3 * (8 + 4 + 4), 3 * 2 * 8 + 8
    assert shape.parameters == 3 * BLOCK + 2 * 8 * 50 + biases + norms


def test_qwen_3b_has_the_parameters_that_its_card_names():
    shape = shape_of(shapes("Qwen/Qwen2.5-3B"))
    assert shape.parameters == 3_085_938_688
    block = 2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 11008
    assert shape.matrices == 36 * block and shape.head == 2048 * 151936 and shape.kv == 36864
    assert shape.matrices / 1e9 == pytest.approx(2.77, abs=0.005)  # 2.77B without embeddings, says its model card


@pytest.mark.parametrize("n", [16, 33])
def test_flops_equal_torch_s_counter(n):
    """Torch counts all pairs of an attention; a causal one computes half, and the diagonal."""
    model = empty(SMALL, torch.float32, "cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    model.set_attn_implementation("eager")
    ids = torch.zeros(1, n, dtype=torch.long)
    shape = shape_of(SMALL)
    with FlopCounterMode(display=False) as counted:
        logits = model(input_ids=ids, use_cache=False).logits
    rope = 2 * counted_rope(model, ids)
    assert counted.get_total_flops() - rope == forward_flops(shape, n, n, n * n)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    ours = update_flops(shape, n, n, n * n, recompute=0)
    assert ours - 2 * shape.width * n * n == counted.get_total_flops() - rope  # a fused kernel repeats one product
    assert logits.shape == (1, n, 50)
    assert update_flops(shape, n, n, n * n, recompute=1) - ours == forward_flops(shape, n, 0, n * n)


def test_flops_with_lora_equal_torch_s_counter(n=16):
    """The policy's own weights get no gradient, the head's included."""
    model = lora.add(empty(SMALL, torch.float32, "cpu"), 2, 2)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    model.set_attn_implementation("eager")
    shape = shape_of(SMALL, rank=2)
    assert shape.adapters == 3 * 2 * (16 + 12 + 12 + 16 + 28 + 28 + 28)  # in + out of q, k, v, o, gate, up, down
    assert shape.parameters == shape_of(SMALL).parameters and shape.matrices == 3 * BLOCK + shape.adapters
    x, ids = torch.randn(1, n, 8, requires_grad=True), torch.zeros(1, n, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=x, use_cache=False).logits.sum().backward()
    ours = update_flops(shape, n, n, n * n, recompute=0) - 2 * shape.width * n * n
    assert ours == counted.get_total_flops() - 2 * counted_rope(model, ids)


def test_what_an_adapter_moves_by_hand():
    """A unit of the intermediate size adds, to what it does without adapters: gate's and up's B write it, scaling reads
    and writes it, the sum reads two and writes one; down's A reads it. Weights are read once for 1,024 tokens."""
    wide = copy.deepcopy(SMALL)
    wide.intermediate_size += 1000
    plain, adapted = ([shape_of(config, rank=rank).forward for config in (SMALL, wide)] for rank in (0, 2))
    more = (adapted[1] - adapted[0]) - (plain[1] - plain[0])
    assert more == pytest.approx(3 * 2 * 1000 * (2 * (1 + 2 + 3) + 1 + 3 * 2 / 1024))


def counted_rope(model, ids):
    """Returns the multiplications that torch counts in the rotary embedding's outer product."""
    with FlopCounterMode(display=False) as counted:
        model.base_model.rotary_emb(torch.zeros(1, ids.shape[1], 8), ids)
    return counted.get_total_flops() / 2


def test_flops_and_bytes_by_hand():
    assert forward_flops(PLAIN, 10, 4, 50) == 2 * 60 * 10 + 2 * 20 * 4 + 4 * 3 * 50
    assert update_flops(PLAIN, 10, 4, 50, 0) == 6 * 60 * 10 + 6 * 20 * 4 + 14 * 3 * 50
    assert update_flops(PLAIN, 10, 4, 50, 1) == 8 * 60 * 10 + 6 * 20 * 4 + 18 * 3 * 50
    assert forward_bytes(PLAIN, 10, 4) == 50 + 4 * 10 * 8
    assert update_bytes(PLAIN, 10, 4, 1) == 10 * (5 + 5 + 11) + 4 * 10 * (8 + 6)
    assert decode_bytes(PLAIN, 4, 30) == 2 * 80 + 4 * 30 * 7


def test_what_an_mlp_moves_by_hand():
    """Adding a unit to the intermediate size adds silu (2), its product (3), and 2 + 2 + 3 + 3 + 3 in the backward
    pass: dproduct times up and times silu, silu's gradient, and the sum of two gradients of the input."""
    from models import model as m

    wide = copy.deepcopy(SMALL)
    wide.intermediate_size += 1000
    small, large = (moved(m.skeleton(config, torch.bfloat16)) for config in (SMALL, wide))
    layers = len(blocks(m.skeleton(SMALL)))
    assert large[0] - small[0] == layers * 2 * 1000 * (2 + 3)
    assert large[1] - small[1] == layers * 2 * 1000 * (3 + 3 + 3)  # two products, silu's


def test_what_liger_s_layers_move_by_hand():
    """Adding a unit to the intermediate size adds gate, up and their product; in the backward pass the product's
    gradient, gate and up are read, and the gradients of both are written."""
    wide, layers = copy.deepcopy(SMALL), 3
    wide.intermediate_size += 1000
    small, large = (shape_of(config, fused=1) for config in (SMALL, wide))
    assert large.forward - small.forward == layers * 2 * 1000 * 3
    assert large.backward - small.backward == layers * 2 * 1000 * 5
    x, weight = torch.empty(1, 10, 8, device="meta", requires_grad=True), torch.empty(8, device="meta")
    with Moved() as forward:
        y = NormShapes.apply(x, weight)
    with Moved() as backward:
        y.backward(torch.empty_like(y))
    assert (forward.bytes, backward.bytes) == (4 * (2 * 80 + 8), 4 * 3 * 80)  # x, y and the weight; dy, x and dx
    eager = shape_of(SMALL)
    assert small.forward < 0.5 * eager.forward and small.backward < 0.7 * eager.backward


def test_a_step_s_parts_by_hand():
    cfg = replace(CFG3, batch=8, mini=4, G=2, micro_tokens=40, recompute=1)
    lengths = Lengths("", prompt=4, observed=6, sampled=10, row=20, longest=25, searches=3, rounds=2)
    found = update_seconds(cfg, PLAIN, replace(UNIT, link=math.inf), 2, lengths, EXACT)
    tokens, scored, pairs = 8 * 4 + 16 * 16, 16 * 10, 8 * 8 + 16 * (200 - 8)  # eight prompts of 4, each once
    score = (forward_flops(PLAIN, tokens, scored, pairs) + forward_bytes(PLAIN, tokens, scored)) / 2
    update = (update_flops(PLAIN, tokens, scored, pairs, 1) + update_bytes(PLAIN, tokens, scored, 1)) / 2
    assert found == {"old log-probs": score / 2, "reference": score, "update": update, "optimizer": 2 * 40 * 100 / 2}
    slow = update_seconds(cfg, PLAIN, replace(UNIT, link=1e-3), 2, lengths, EXACT)
    batches = 2 * 2  # two updates of 144 tokens: four micro-batches, two a rank
    assert slow["update"] == pytest.approx(batches * 8 * 100 / 2 / 1e-3)
    one = update_seconds(replace(cfg, mini=8, beta=0.0), PLAIN, UNIT, 2, lengths, EXACT)
    assert one["old log-probs"] == one["reference"] == 0

    host = replace(EXACT, host=0.5, search=0.25)
    found = rollout_seconds(PLAIN, replace(UNIT, flops=math.inf), 2, 61, 8, 2, lengths, host)  # room for 3 of 8
    one, three = (decode_bytes(PLAIN, rows, 4 + 8) + 0.5 * rows for rows in (1, 3))
    assert found["decode"] == pytest.approx(8 / 3 * 10 * three)
    assert found["tail"] == pytest.approx((25 - 10 + (3 - 8 / 3) * 10) * one)
    assert found["searches"] == 0.75
    found = rollout_seconds(PLAIN, UNIT, 2, 1e9, 8, 2, lengths, EXACT)
    assert found["prefill"] == forward_flops(PLAIN, 8 * 6 + 4 * 4, 0, 8 * 6 * 12 + 4 * 4 * 4 / 2)
    assert found["decode"] == 10 * max(decode_bytes(PLAIN, 8, 12), forward_flops(PLAIN, 8, 8, 8 * 12))
    assert sync_seconds(PLAIN, UNIT, 2, EXACT) == 4 * 100 / 2 + 14 * 100


def test_what_is_between_rollouts_and_update_by_hand():
    cfg = replace(CFG3, batch=8, G=2, save_every=5, eval_every=2)
    lengths = Lengths("", prompt=4, observed=6, sampled=10, row=20, longest=25, searches=3, rounds=2)
    slow = replace(EXACT, python=0.5, disk=3.0, digest=2.0, staged=5.0)
    copied = between_seconds(cfg, PLAIN, UNIT, 4, lengths, slow)
    assert list(copied.values())[2] == pytest.approx(12 * 100 / (4 * 5) / 2)
    cfg = replace(cfg, async_save=0)
    found = between_seconds(cfg, PLAIN, UNIT, 4, lengths, slow)
    assert list(found.values()) == [16 * 20 * 0.5, 0, pytest.approx(12 * 100 * (1 / 3 + 1 / 8) / 2)]
    thin = between_seconds(replace(cfg, eval_every=0), replace(PLAIN, adapters=7), UNIT, 4, lengths, slow)
    assert list(thin.values())[1:] == [2 * 2 * 100, pytest.approx(12 * 7 * (1 / 3 + 1 / 8) / 5)]


def test_a_checkpoint_that_takes_longer_than_the_steps_between_makes_them_wait():
    cfg, parts = replace(CFG3, save_every=2, eval_every=0), {}
    for disk in (math.inf, 1e-9):
        assumed = replace(EXACT, disk=disk)
        parts[disk] = step_seconds(cfg, PLAIN, UNIT, 8, 0.0, typical(CFG3), assumed)
    assert parts[math.inf][CHECKPOINTS] == 0 and sum(parts[1e-9].values()) == pytest.approx(12 * 100 * 1e9 / 2)


def played(prompt, *tails):
    """Returns trajectories of one prompt; a tail is (tokens sampled, observed)."""
    taus = []
    for sampled, observed in tails:
        tau = Trajectory(0, Question("q", "Who?"), 0, [prompt] * prompt, prompt, [0] * prompt, [0.0] * prompt)
        tau.act([1] * sampled, [-1.0] * sampled)
        tau.observe([2] * observed)
        taus.append(tau)
    return taus


@pytest.mark.parametrize("beta, mini, scores", [(0.0, 2, 0), (0.1, 2, 1), (0.1, 1, 1.5)])
def test_the_mfu_of_an_update_by_hand(beta, mini, scores):
    """Two trajectories share a prompt of 4 tokens, and one has a prompt of 3 of its own; whoever recomputes works more
    than is needed."""
    cfg, card = replace(CFG3, batch=2, mini=mini, beta=beta, recompute=1), replace(UNIT, flops=1000.0)
    taus = [*played(4, (5, 2), (6, 0)), *played(3, (2, 1))]
    tokens, scored = 4 + 7 + 6 + 3 + 3, 5 + 6 + 2
    pairs = 4 * 4 / 2 + (11 * 11 - 4 * 4) / 2 + (10 * 10 - 4 * 4) / 2 + 6 * 6 / 2
    forward = 2 * 60 * tokens + 2 * 20 * scored + 4 * 3 * pairs
    update = forward + 4 * 60 * tokens + 4 * 20 * scored + 10 * 3 * pairs
    found = reached(cfg, PLAIN, card, 4, taus, 0.25)
    assert found == pytest.approx((update + scores * forward) / (0.25 * 4 * 1000))


@pytest.mark.parametrize("name, card", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", None), ("TITAN", None)])
def test_the_data_sheet_of_the_gpu_that_is_here(name, card, monkeypatch):
    assert card_here() is None  # there is none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert card_here() is CARDS.get(card)


def test_verification_is_spread_over_an_evolution_s_steps():
    cfg, lengths = replace(CFG3, K_e=10), typical(CFG3)
    parts = step_seconds(cfg, PLAIN, UNIT, 8, 1e9, lengths, EXACT)
    once = sum(rollout_seconds(PLAIN, UNIT, 8, 1e9, 7 * 200, 1, lengths, EXACT).values())  # a parent, six revisions
    assert parts["verification before T_e, spread over K_e steps"] == pytest.approx(once / 10)
    for other in (replace(cfg, mode="static"), replace(cfg, T_e=0)):
        assert not any("verification" in name for name in step_seconds(other, PLAIN, UNIT, 8, 1e9, lengths, EXACT))


def test_the_upper_bound_is_what_the_flags_allow():
    assert upper_bound(CFG3).total == upper_bound(CFG7).total == 4096 + 500 + 500
    assert upper_bound(CFG3).row == 4096 + 500 and typical(CFG3).row == typical(CFG3).total
    assert upper_bound(CFG3).sampled == 5 * 500 and upper_bound(CFG7).sampled == 7 * 500
    assert upper_bound(replace(CFG3, max_turns=99)).sampled == 4096 + 500
    found = typical(CFG3)
    assert (found.prompt, found.observed, found.sampled, found.longest) == (400, 1000, 450, 900)
    assert typical(replace(CFG3, max_turns=1, max_response=20)).sampled == 40


@pytest.mark.parametrize("cfg", [CFG3, CFG7])
def test_more_hardware_is_never_slower(cfg):
    shape, card = shape_of(shapes(cfg.model)), CARDS["h100"]
    for lengths in (typical(cfg), upper_bound(cfg)):

        def seconds(card: Card = card, gpus: int = 8, room: float = 7e5, lengths: Lengths = lengths) -> float:
            return sum(step_seconds(cfg, shape, card, gpus, room, lengths, Assumed()).values())

        by_gpus = [seconds(gpus=gpus) for gpus in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)]
        assert by_gpus == sorted(by_gpus, reverse=True) and by_gpus[0] > 4 * by_gpus[5]
        for name in ("flops", "bandwidth", "link"):
            times = [seconds(replace(card, **{name: k * getattr(card, name)})) for k in (1, 1.5, 2, 4)]
            assert times == sorted(times, reverse=True) and times[0] > times[-1], name
        by_room = [seconds(room=room) for room in (2e5, 4e5, 7e5, 1e6, 2e6)]
        assert by_room == sorted(by_room, reverse=True)


def test_the_cards_are_those_that_the_flag_takes(capsys):
    for name in CARDS:
        assert parse(["--dry_run", "--card", name]).card == name
    with pytest.raises(SystemExit):
        parse(["--dry_run", "--card", "v100"])
    fault = capsys.readouterr().err
    assert f"--card v100: choose {', '.join(list(CARDS)[:-1])} or {list(CARDS)[-1]}" in fault
    assert fault.count("\n") == 1


def test_the_table_leaves_out_what_it_cannot_compute():
    text = table(CFG3, shapes(CFG3.model), 1.5e6)
    assert max(map(len, text.splitlines())) <= 100 and "rollouts:" in text and "Rollouts are left out" not in text
    text = table(replace(CFG3, engine="torch"), SMALL, 0.0)
    assert "Rollouts are left out" in text and "rollouts:" not in text and "verification" not in text


def test_shapes_leave_the_caller_s_config_alone():
    config = copy.deepcopy(SMALL)
    before = config.to_dict(), config._attn_implementation
    shape_of(config)
    assert (config.to_dict(), config._attn_implementation) == before
