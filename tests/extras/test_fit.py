"""The estimated memory of a run against numbers by hand, against autograd, and against two real
processes; its time against what a card measured (docs/gpus.md)."""

import copy
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks_fit import Live
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from config import Config, parse_flags
from extras import fit
from extras.fit import Place, activations, estimate, find_fit, find_peak, kv_bytes, read_cards
from kernels import grpo_head
from models import lora
from models.model import empty, skeleton
from models.packing import Packing
from plumbing.faults import Fault

ROOT = Path(__file__).parent.parent.parent
P3, P7 = 3_085_938_688, 7_615_616_512
B3, B7 = (fit.shapes(f"Qwen/Qwen2.5-{size}") for size in ("3B", "7B"))
CFG3, CFG7 = (
    parse_flags(["--micro_tokens", "32768", "--recompute", "1", "--gather", "0", "--model", name])
    for name in ("qwen2.5-3b", "qwen2.5-7b")
)


@pytest.fixture(scope="module", autouse=True)
def count_once():
    """Activations of the same shapes are counted once: an estimate is mostly that."""
    known = {}

    def counted(model, *knobs):
        shapes = model.config.to_json_string(), *(p.shape for p in model.parameters())
        if (shapes, knobs) not in known:
            known[shapes, knobs] = activations(model, *knobs)
        return known[shapes, knobs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "activations", counted)
        yield


def of(fitted, column="update"):
    return {part.name: getattr(part, column) for part in fitted.parts}


@functools.cache
def estimated(cfg=CFG7, engine="vllm", gpus=8, gpu_mem=80, **knobs):
    """Returns the estimate for one of the two presets."""
    return estimate(replace(cfg, **knobs), B3 if cfg is CFG3 else B7, engine, gpus, gpu_mem)


# --- by hand
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, P", [(CFG3, P3), (CFG7, P7)])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_the_model_s_state_is_16_bytes_a_parameter_and_2_of_the_reference(cfg, P, gpus):
    fitted = estimated(cfg, gpus=gpus)  # no padding: all first dimensions are multiples of 8
    update, rollout = of(fitted), of(fitted, "rollout")
    for name, bytes in {"policy": 4, "moments of AdamW": 8, "gradients": 4}.items():
        assert update[f"{name} (float32 shards)"] == bytes * P / gpus
    assert (
        update["reference (bfloat16 shards)"]
        == rollout["reference (bfloat16 shards)"]
        == 2 * P / gpus
    )
    assert rollout["policy (float32 shards)"] == 4 * P / gpus
    assert rollout["gradients (float32 shards)"] == 0
    assert fitted.title == f"{P / 1e6:,.0f}M parameters on {gpus} x 80 GB"


def block_and_root(H, I, kv, V, heads):
    """Returns the parameters of one block, and of embedding, last norm and head, of which a tied
    one counts once."""
    return H * (H + 2 * kv) + (H + 2 * kv) + H * H + 3 * H * I + 2 * H, heads * V * H + H


@pytest.mark.parametrize("cfg, layers, P, shapes", [
    (CFG3, 36, P3, (2048, 11008, 256, 151936, 1)), (CFG7, 28, P7, (3584, 18944, 512, 152064, 2)),
])  # fmt: skip
def test_gathered_weights_by_hand(cfg, layers, P, shapes):
    block, root = block_and_root(*shapes)
    assert layers * block + root == P
    gathered = of(estimated(cfg))["policy (embedding, head and two blocks, gathered in bfloat16)"]
    assert gathered == 2 * root + 4 * block


def test_reduced_gradients_by_hand():
    """The head's in bfloat16; a block's in bfloat16, in float32 for the reduction, and its share of
    the result."""
    block, _ = block_and_root(3584, 18944, 512, 152064, 2)
    assert of(estimated())["gradients being reduced"] == 2 * 152064 * 3584 + (2 + 4 + 0.5) * block


def test_the_state_with_lora_by_hand():
    """Frozen bf16 weights, 16 bytes a parameter of the adapters, no reference, no gradient of
    embedding and head."""
    H, I, kv, r, gpus = 3584, 18944, 512, 32, 8
    # q and o, k and v, gate and up and down
    per_block = r * (2 * (H + H) + 2 * (H + kv) + 3 * (H + I))
    A = 28 * per_block
    fitted = estimated(lora_rank=r)
    update, rollout = of(fitted), of(fitted, "rollout")
    assert (
        update["policy (frozen, bfloat16 shards)"]
        == rollout["policy (frozen, bfloat16 shards)"]
        == 2 * P7 / gpus
    )
    assert (
        update["adapters (float32 shards)"] == rollout["adapters (float32 shards)"] == 4 * A / gpus
    )
    assert update["moments of AdamW (float32 shards)"] == 8 * A / gpus
    assert (
        update["gradients (float32 shards)"] == 4 * A / gpus
        and rollout["gradients (float32 shards)"] == 0
    )
    assert not any(name.startswith(("reference", "policy (float32")) for name in update)
    block, root = block_and_root(H, I, kv, 152064, 2)
    gathered = update["policy (embedding, head and two blocks, gathered in bfloat16)"]
    assert gathered == 2 * root + 4 * (block + per_block)
    assert update["gradients being reduced"] == (2 + 4 + 4 / gpus) * per_block
    assert rollout["vLLM (weights)"] == 2 * P7  # merged
    assert fitted.title == "7,616M parameters, LoRA, on 8 x 80 GB"


def test_the_kv_cache_by_hand():
    assert kv_bytes(B3) == 2 * 36 * 2 * 128 * 2 and kv_bytes(B7) == 2 * 28 * 4 * 128 * 2
    fitted = estimated()
    rollout = of(fitted, "rollout")
    assert rollout["vLLM (weights)"] == 2 * P7
    # residual, hidden states, gate and up, their product
    work = 16384 * 2 * (3584 + 3584 + 2 * 18944 + 18944)
    assert rollout["vLLM (activations, or the sampler's logits)"] == work > 4 * 4 * 512 * 152064
    graphs = rollout["vLLM (CUDA graphs, an allowance; also while asleep)"]
    assert graphs == 28 * 30e6 == of(fitted)["vLLM (CUDA graphs, an allowance; also while asleep)"]
    tokens = (0.75 * 80e9 - 2 * P7 - work - graphs) / 57344
    assert (
        rollout["vLLM (KV cache)"] == pytest.approx(57344 * tokens)
        and f"runs {tokens // 4596:.0f} of a rank's 320 trajectories at once" in fitted.table()
    )


def test_the_sampler_s_logits_can_need_more_than_the_activations():
    rollout = of(estimated(CFG3), "rollout")
    work = 16384 * 2 * (2048 + 2048 + 3 * 11008)
    assert rollout["vLLM (activations, or the sampler's logits)"] == 4 * 4 * 512 * 151936 > work


@pytest.mark.parametrize(
    "name, P", [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", P3), ("7B", P7)]
)  # as the hub publishes them
def test_the_presets_shapes_need_no_hub(name, P):
    assert sum(p.numel() for p in skeleton(fit.shapes(f"Qwen/Qwen2.5-{name}")).parameters()) == P


# --- its verdict
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, rows", [(CFG3, 320), (CFG7, 158)])
def test_the_paper_s_setting_fits_8_gpus_of_80_gb_with_the_share_that_its_preset_gives_vllm(
    cfg, rows
):
    """vLLM refuses to start unless its whole share is free beside policy and reference; moments
    come later."""
    fitted = estimated(cfg)
    text, there = fitted.table(), of(fitted, "rollout")
    there = there["policy (float32 shards)"] + there["reference (bfloat16 shards)"]
    assert there + cfg.vllm_memory * 80e9 < fitted.usable and fitted.fault() == ""
    assert f"{fitted.update / 1e9:10.1f}{fitted.rollout / 1e9:10.1f}" in text
    assert f"\nvLLM runs {rows} of" in text


def test_weights_that_are_gathered_by_hand():
    """Of policy and reference, in bf16, and whole float32 gradients; one rank holds the last two
    anyway."""
    blocks = 2 * 36 * 77_076_992  # bytes of the 3B's blocks
    for gpus, more in (1, 0), (8, 6 * 3_085_938_688):
        at_a_time, gathered = (
            estimated(CFG3, gpus=gpus, gpu_mem=141, gather=gather).update for gather in (0, 1)
        )
        assert gathered - at_a_time == pytest.approx(blocks * 34 / 36 + more, rel=1e-6)


@pytest.mark.parametrize(
    "change, where, words",
    [
        ({}, ("vllm", 1, 24), "the update needs largest: moments of AdamW (float32 shards) 60.9"),
        ({"recompute": 0}, (), "largest: activations kept of 32,768 tokens 152.6"),
        ({"micro_tokens": 131072}, (), "largest: activations and their gradients in one"),
        ({"vllm_memory": 0.9}, (), "the rollout needs largest: vLLM (KV cache) 53.8"),
        ({"vllm_memory": 0.22}, (), "17.6 GB of vLLM have no room CUDA graphs (2.9)"),
        ({}, ("torch",), "largest: torch engine (KV cache of 512 rows, twice) 269.9"),
        ({"vllm_memory": 0.24}, (), ""),  # 19.2 GB: the weights are 15.2
    ],
)  # fmt: skip
def test_a_refusal_names_the_largest_parts(change, where, words):
    fitted = estimated(CFG7, *where, **change)
    fault = fitted.fault()
    assert "\n" not in fault
    assert bool(fault) == ("do not fit" in fault) == bool(words)
    assert all(word in fault for word in words.split())


def test_the_caller_s_config_is_unchanged():
    config, before = copy.deepcopy(B3), B3.to_dict()
    estimate(CFG3, config, "vllm", 8, 80)
    assert config.to_dict() == before and config._attn_implementation == B3._attn_implementation


def changed(argv, cards, engine="vllm"):
    """Returns what `find_fit` changes of the flags' configuration, which it makes fit."""
    cfg, (gpus, _, memory) = parse_flags(["--model", *argv.split()]), read_cards(cards)
    place = Place(fit.shapes(cfg.model), engine, gpus, memory)
    found, fitted = find_fit(cfg, place)
    assert not fitted.fault() and not estimate(found, *place).fault()
    return {name: x for name, x in vars(found).items() if x != getattr(cfg, name)}


@pytest.mark.parametrize("preset, cards", [
    ("qwen2.5-0.5b", "rtx4090"), ("qwen2.5-1.5b --lora_rank 32", "rtx4090"), ("qwen2.5-3b", "8xh100"),
    ("qwen2.5-7b", "8xh100"),
])  # fmt: skip
def test_a_preset_has_the_flags_of_its_cards(preset, cards):
    assert changed(preset, cards) == {}


@pytest.mark.parametrize("argv, cards, names", [  # as newcomers found them by trial
    ("qwen2.5-3b", "h100", "vllm_memory"), ("qwen2.5-3b", "1x24GB", "vllm_memory lora_rank"),
    ("qwen2.5-7b --lora_rank 32", "1xH100", "vllm_memory"),
    ("qwen2.5-7b --vllm_memory 0.22", "8xh100", "vllm_memory"),  # no room for its weights
])  # fmt: skip
def test_what_does_not_fit_gets_less_for_vllm_and_then_adapters(argv, cards, names):
    how = {"recompute", "gather", "micro_tokens"}  # only time and memory
    assert changed(argv, cards).keys() - how == set(names.split())


@pytest.mark.slow
def test_activations_are_kept_where_they_fit():
    """Measured on an H200, tokens/s of 3B: kept 8,192 at a time 19.1k, 16,384 20.4k, 32,768 21.1k;
    recomputed, 32,768 at a time, 18.1k."""
    for memory, tokens in ((80, 8192), (141, 16384), (400, 32768)):
        cfg, _ = find_fit(CFG3, Place(B3, "vllm", 8, memory))
        assert cfg == replace(CFG3, recompute=0, micro_tokens=tokens, gather=1)
    assert find_fit(CFG7, Place(B7, "vllm", 8, 40))[0].recompute == 1


@pytest.mark.parametrize("text", ["8xv100", "8x", "0gb", "2x48", "gb", "0xh100", ""])
def test_cards_that_are_none_are_refused(text):
    with pytest.raises(Fault, match="say last how many"):
        read_cards(text)


@pytest.mark.parametrize("text, cards", [
    ("8xH100", (8, "h100", 80)), ("a100", (1, "a100", 80)), ("2x48gb", (2, "48gb", 48)),
])  # fmt: skip
def test_cards_by_name_or_memory(text, cards):
    assert read_cards(text) == cards


def test_the_command_is_printed_with_its_hours_and_those_of_a_night(capsys):
    fit.main(["--model", "qwen2.5-3b", "1x24gb"])
    printed = capsys.readouterr().out
    assert "python inspo.py --model qwen2.5-3b --" in printed and "hours" not in printed
    fit.main(["--model", "qwen2.5-3b", "rtx4090"])
    printed = capsys.readouterr().out
    runs = re.findall(r"^ *([\d.]+) hours  python inspo.py (.*)$", printed, re.M)
    hours, commands = [float(h) for h, _ in runs], [command.split() for _, command in runs]
    assert hours[0] > 100 and all(5 < h <= fit.NIGHT for h in hours[1:]) and len(hours) > 1
    for h, command in zip(hours, commands, strict=True):
        cfg, model = parse_flags(command), skeleton(B3)
        assert "--lora_rank" in command
        assert fit.hours(cfg, model, 1, find_peak("rtx4090")) == pytest.approx(h, abs=0.05)
    with pytest.raises(Fault, match="do not fit: .*take more GPUs"):
        fit.main(["--model", "qwen2.5-7b", "1x12gb"])


# --- activations: against a formula, and against autograd's on the CPU
# ---------------------------------------------

SMALL = dict(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    tie_word_embeddings=False,
    head_dim=32,
)
LENGTHS = [200, 312]
T = sum(LENGTHS)


@pytest.mark.parametrize("kind, recompute, rank", [  # every pair of two of them
    (Qwen2Config, 0, 0), (Qwen2Config, 1, 16), (LlamaConfig, 0, 16), (LlamaConfig, 1, 0), (Qwen3Config, 0, 16),
    (Qwen3Config, 1, 0),
])  # fmt: skip
def test_activations_equal_autograd_s(kind, recompute, rank):
    config = kind(**SMALL)
    model = lora.add(empty(config, torch.bfloat16, "cpu").train(), rank, 32).bfloat16()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        # FSDP2 frees them, too
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packing = Packing(LENGTHS)
    positions = packing.positions[None]
    with Live([*model.parameters(), *model.buffers()]) as live:
        hidden = model.base_model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            packing=packing,
        ).last_hidden_state
        held, loss = live.now(), hidden.sum()
        del hidden
        loss.backward()
    kept, again = activations(
        lora.add(skeleton(config, torch.bfloat16), rank, 32).bfloat16(), T, recompute, 0
    )
    output = T * 128 * 2  # of the last norm: counted in `held`, not in `kept`
    # cos and sin, which `activations` counts in the block
    shared = T * 2 * 2 * 32 if recompute else 0
    assert kept + output + shared == pytest.approx(held, rel=0.01)
    assert 0.99 < (kept + again) / live.most < 1.08  # the last norm's may be freed by then


@pytest.mark.parametrize("fused", [0, 1])
def test_a_block_of_qwen2_by_hand(fused):
    """Bytes per token. Torch's norms keep a float32 copy besides and its MLP silu's output, whose
    gradient is one more; Liger's keep input and output, and gate, up and their product."""
    H, I, q, kv, heads = 3584, 18944, 3584, 512, 28
    # input or its normalized form, output; 1 / root mean square
    norm = 2 * H + 2 * H + 4 + (0 if fused else 4 * H)
    # q, k, v, out, log-sum-exp, out as rows
    attention = 2 * q + 2 * 2 * kv + 2 * q + 4 * heads + 2 * q
    mlp = 2 * (3 if fused else 4) * I
    gradients, position = 2 * H + 2 * (1 if fused else 2) * I, 2 * 2 * 128  # cos and sin, once
    kept, again = activations(skeleton(B7, torch.bfloat16), 1000, 1, fused)
    last = 2 * H + 4 if fused else 4 * H + 2 * H
    assert kept == pytest.approx(1000 * (28 * 2 * H + last), rel=1e-4)
    assert again == pytest.approx(
        1000 * (2 * norm + attention + mlp + gradients + position), rel=1e-4
    )
    update = of(estimated(fused_layers=fused))
    assert update["activations and their gradients in one block"] == pytest.approx(
        32768 / 1000 * again
    )


def small_head(hidden, vocabulary, tokens, tied=False, **knobs):
    """Returns the estimate of a model whose head is the largest part, in a micro-batch of so many
    tokens."""
    small = dict(
        hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, vocab_size=vocabulary
    )
    config = Qwen2Config(**SMALL | small | dict(tie_word_embeddings=tied))
    cfg = replace(
        CFG7, micro_tokens=tokens, max_prompt=4, max_response=4, max_observation=4, **knobs
    )
    return estimate(cfg, config, "vllm", 8, 80)


def test_the_head_s_gradients_by_measurement():
    N, H, V = 8, 32, 3000
    hidden = torch.randn(N, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.bfloat16, requires_grad=True)
    with Live([hidden, weight]) as live:
        targets, ones = torch.zeros(N, dtype=torch.long), torch.ones(N)
        loss, _ = grpo_head(hidden, weight, targets, adv=ones, token_weight=ones)
        live.most = 0
        loss.backward()
    fitted = small_head(H, V, N, tied=True)
    assert "largest in the backward pass of the head" in fitted.table()
    assert of(fitted)["the head's logits and gradients"] == pytest.approx(live.most, rel=0.02)


# dW, which a frozen head has not
@pytest.mark.parametrize("rank, gradient", [(0, 4 * 3000 * 32), (2, 0)])
def test_the_head_s_logits_are_one_chunk_in_float32(rank, gradient):
    assert inspect.signature(grpo_head).parameters["chunk"].default == fit.CHUNK
    fitted = small_head(32, 3000, 5000, lora_rank=rank)
    assert "largest in the forward pass of the head" in fitted.table()
    wanted = 4 * 4096 * 3000 + gradient + (2 + 4) * 5000 * 32  # logits, dW, hidden states and dX
    assert of(fitted)["the head's logits and gradients"] == wanted


# --- against two processes
# ----------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_two_real_ranks_use_the_estimated_memory(tmp_path):
    # odd: padded
    config = Qwen2Config(**SMALL | dict(vocab_size=301, intermediate_size=333, num_hidden_layers=3))
    config.save_pretrained(tmp_path)
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "tests/ranks_fit.py",
        *[tmp_path] * 2,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    cfg = replace(CFG7, micro_tokens=256, max_prompt=50, max_response=50, max_observation=50)
    fitted = estimate(cfg, config, "another", 2, 80)
    whole = sum(p.numel() for p in skeleton(config).parameters())
    # FSDP2 pads 301 rows to 302
    assert whole / 2 < of(fitted)["policy (float32 shards)"] / 4 < whole / 2 * 1.01
    for rank in (0, 1):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        most = measured.pop("most")
        assert len(measured) == 4
        for name, bytes in measured.items():
            assert bytes == pytest.approx(of(fitted)[name], rel=0.01), (rank, name)
        there = sum(
            measured[name] for name in measured if "shards" in name and "gradients" not in name
        )
        # not all parts peak at the same time
        assert 1 < fitted.update / (there + most) < 1.15, rank


# --- time

M3, H200 = skeleton(B3), find_peak("h200")
# one micro-batch, as `extras.bench.update --micro` has it: one step of one mini-batch
ALONE = Config(batch=1, mini_batch=1, G=1)


@pytest.mark.parametrize(
    "tokens, recompute, measured",
    [
        (1005, 1, 0.447), (4065, 1, 0.501), (8160, 1, 0.477), (14500, 1, 0.818), (31900, 1, 1.766),
        (1005, 0, 0.443), (4065, 0, 0.467), (8160, 0, 0.427), (14500, 0, 0.711), (31900, 0, 1.509),
    ],
)  # fmt: skip
def test_a_micro_batch_of_3b_on_an_h200(tokens, recompute, measured, monkeypatch):
    """The rows that made the constants, 2026-11-27."""
    monkeypatch.setattr(fit, "trajectory", lambda cfg: (0, tokens))
    cfg = replace(ALONE, recompute=recompute, micro_tokens=tokens)
    assert fit.update_seconds(cfg, M3, 1, H200) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "tokens, recompute, measured",
    [(1005, 0, 0.191), (8160, 0, 0.384), (1005, 1, 0.336), (8160, 1, 0.436), (31900, 1, 1.801)],
)
def test_a_micro_batch_with_gathered_weights(tokens, recompute, measured, monkeypatch):
    """Commit e1f24a3, later that day; the rows of 1,005 tokens made the constants."""
    monkeypatch.setattr(fit, "trajectory", lambda cfg: (0, tokens))
    cfg = replace(ALONE, recompute=recompute, micro_tokens=tokens, gather=1)
    assert fit.update_seconds(cfg, M3, 1, H200) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "trajectories, tokens, knobs, measured",
    [
        (160, 2900, {"recompute": 0, "micro_tokens": 16384}, 24.9),  # a whole step
        (50, 2700, {"recompute": 1, "micro_tokens": 32768}, 50 * 2700 / 17400),
        (50, 2700, {"recompute": 0, "micro_tokens": 8192}, 50 * 2700 / 14800),
    ],
)
def test_updates_that_did_not_make_the_constants(
    trajectories, tokens, knobs, measured, monkeypatch
):
    """Commit e22737a on another H200: two mini-batches, the second of which is scored."""
    monkeypatch.setattr(fit, "trajectory", lambda cfg: (0, tokens))
    cfg = Config(batch=trajectories // 5, mini_batch=trajectories // 2, G=5, **knobs)
    assert fit.update_seconds(cfg, M3, 1, H200) == pytest.approx(measured, rel=0.15)


def test_rollouts_of_160_rows_on_an_h200():
    """9.1 and 9.8 s were measured in a run, with 2,300 tokens read; a token costs what it cost
    there."""
    cfg = Config(batch=32, G=5, max_response=480)
    assert fit.trajectory(cfg) == (600, 2300)
    assert fit.rollout_seconds(cfg, M3, 1, H200) == pytest.approx(9.5, rel=0.1)


def test_eight_gpus_share_a_step_and_adapters_save_a_third_of_the_backward_pass():
    cfg = Config(mini_batch=1280, micro_tokens=32768, recompute=0)
    one, eight = (fit.update_seconds(cfg, M3, gpus, H200) for gpus in (1, 8))
    assert one == pytest.approx(8 * eight, rel=0.02)
    # forward, backward twice, reference, half of the log-probs under the old policy
    lora = fit.update_seconds(replace(cfg, lora_rank=32), M3, 1, H200)
    assert lora == pytest.approx(one * 3.5 / 4.5)
    assert fit.rollout_seconds(cfg, M3, 1, H200) == pytest.approx(
        8 * fit.rollout_seconds(cfg, M3, 8, H200)
    )


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("h200", 989),
    ("NVIDIA GeForce RTX 4090", 165),
])  # fmt: skip
def test_a_card_is_known_by_its_name(name, tflops):
    assert find_peak(name) == tflops * 1e12
    assert find_peak("Tesla T4") is None and find_peak("48gb") is None
