"""The estimated memory of a run against numbers by hand, against autograd, and against two real
processes; its time against what a card measured (docs/gpus.md)."""

import functools
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


@pytest.mark.parametrize("cfg, P, gpus", [(CFG3, P3, 1), (CFG7, P7, 8)])
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


def test_the_state_with_lora_by_hand():
    """Frozen bf16 weights, 16 bytes a parameter of the adapters, no reference, no gradient of
    embedding and head."""
    H, I, kv, r, gpus = 3584, 18944, 512, 32, 8
    # q and o, k and v, gate and up and down
    per_block = r * (2 * (H + H) + 2 * (H + kv) + 3 * (H + I))
    A = 28 * per_block
    fitted = estimated(lora_rank=r)
    update, rollout = of(fitted), of(fitted, "rollout")
    for part in (update, rollout):
        assert part["policy (frozen, bfloat16 shards)"] == 2 * P7 / gpus
        assert part["adapters (float32 shards)"] == 4 * A / gpus
    assert update["moments of AdamW (float32 shards)"] == 8 * A / gpus
    assert update["gradients (float32 shards)"] == 4 * A / gpus
    assert not any(name.startswith(("reference", "policy (float32")) for name in update)
    block, root = block_and_root(H, I, kv, 152064, 2)
    gathered = update["policy (embedding, head and two blocks, gathered in bfloat16)"]
    assert gathered == 2 * root + 4 * (block + per_block)
    assert update["gradients being reduced"] == (2 + 4 + 4 / gpus) * per_block
    assert rollout["vLLM (weights)"] == 2 * P7  # merged


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


@pytest.mark.parametrize(
    "name, P", [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", P3), ("7B", P7)]
)  # as the hub publishes them
def test_the_presets_shapes_need_no_hub(name, P):
    assert sum(p.numel() for p in skeleton(fit.shapes(f"Qwen/Qwen2.5-{name}")).parameters()) == P


# --- its verdict
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, where, words",
    [
        ({}, ("vllm", 1, 24), "the update needs largest: moments of AdamW (float32 shards) 60.9"),
        ({"recompute": 0}, (), "largest: activations kept of 32,768 tokens 152.6"),
        ({"vllm_memory": 0.22}, (), "17.6 GB of vLLM have no room CUDA graphs (2.9)"),
        ({"vllm_memory": 0.24}, (), ""),  # 19.2 GB: the weights are 15.2
    ],
)  # fmt: skip
def test_a_refusal_names_the_largest_parts(change, where, words):
    fitted = estimated(CFG7, *where, **change)
    fault = fitted.fault()
    assert "\n" not in fault
    assert bool(fault) == ("do not fit" in fault) == bool(words)
    assert all(word in fault for word in words.split())


def changed(argv, cards, engine="vllm"):
    """Returns what `find_fit` changes of the flags' configuration, which it makes fit."""
    cfg, (gpus, _, memory) = parse_flags(["--model", *argv.split()]), read_cards(cards)
    place = Place(fit.shapes(cfg.model), engine, gpus, memory)
    found, fitted = find_fit(cfg, place)
    assert not fitted.fault() and not estimate(found, *place).fault()
    return {name: x for name, x in vars(found).items() if x != getattr(cfg, name)}


@pytest.mark.parametrize("preset, cards", [
    ("qwen2.5-1.5b --lora_rank 32", "rtx4090"), ("qwen2.5-7b", "8xh100"),
])  # fmt: skip
@pytest.mark.slow
def test_a_preset_has_the_flags_of_its_cards(preset, cards):
    assert changed(preset, cards) == {}


@pytest.mark.parametrize("argv, cards, names", [  # as newcomers found them by trial
    ("qwen2.5-3b", "1x24GB", "vllm_memory lora_rank"), ("qwen2.5-3b", "h100", "vllm_memory"),
])  # fmt: skip
@pytest.mark.slow
def test_what_does_not_fit_gets_less_for_vllm_and_then_adapters(argv, cards, names):
    how = {"recompute", "gather", "micro_tokens"}  # only time and memory
    assert changed(argv, cards).keys() - how == set(names.split())


@pytest.mark.parametrize("text", ["8xv100", "2x48", "0xh100"])
def test_cards_that_are_none_are_refused(text):
    with pytest.raises(Fault, match="say last how many"):
        read_cards(text)


@pytest.mark.parametrize("text, cards", [
    ("8xH100", (8, "h100", 80)), ("2x48gb", (2, "48gb", 48)),
])  # fmt: skip
def test_cards_by_name_or_memory(text, cards):
    assert read_cards(text) == cards


@pytest.mark.slow
def test_the_command_is_printed_with_its_hours_and_those_of_a_night(capsys):
    fit.main(["--model", "qwen2.5-3b", "rtx4090"])
    printed = capsys.readouterr().out
    runs = re.findall(r"^ *([\d.]+) hours  python inspo.py (.*)$", printed, re.M)
    hours, commands = [float(h) for h, _ in runs], [command.split() for _, command in runs]
    assert hours[0] > 100 and all(5 < h <= fit.NIGHT for h in hours[1:]) and len(hours) > 1
    for h, command in zip(hours, commands, strict=True):
        seconds = fit.hours(parse_flags(command), skeleton(B3), 1, find_peak("rtx4090"))
        assert "--lora_rank" in command and seconds == pytest.approx(h, abs=0.05)
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
    (Qwen2Config, 1, 16), *(pytest.param(*x, marks=pytest.mark.slow)
                            for x in ((Qwen2Config, 0, 0), (LlamaConfig, 1, 0), (Qwen3Config, 0, 16))),
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


def test_the_head_s_gradients_by_measurement():
    """Of a model whose head is the largest part."""
    N, H, V = 40, 128, 3000
    hidden = torch.randn(N, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.bfloat16, requires_grad=True)
    with Live([hidden, weight]) as live:
        targets, ones = torch.zeros(N, dtype=torch.long), torch.ones(N)
        loss, _ = grpo_head(hidden, weight, targets, adv=ones, token_weight=ones)
        live.most = 0
        loss.backward()
    small = dict(hidden_size=H, intermediate_size=64, num_hidden_layers=1, vocab_size=V)
    config = Qwen2Config(**SMALL | small | dict(tie_word_embeddings=True))
    cfg = replace(CFG7, micro_tokens=N, max_prompt=4, max_response=4, max_observation=32)
    fitted = estimate(cfg, config, "vllm", 8, 80)
    assert of(fitted)["the head's logits and gradients"] == pytest.approx(live.most, rel=0.02)


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


@pytest.mark.parametrize(
    "tokens, knobs, measured",
    [
        # rows that made the constants, 2026-11-27: one step of one mini-batch, a micro-batch
        (1005, {"recompute": 1}, 0.447), (31900, {"recompute": 1}, 1.766), (8160, {"recompute": 0}, 0.427),
        # with gathered weights, commit e1f24a3, later that day
        (1005, {"recompute": 0, "gather": 1}, 0.191), (31900, {"recompute": 1, "gather": 1}, 1.801),
        # that did not make them, commit e22737a on another H200: two mini-batches, the second of which is scored
        (2900, {"batch": 32, "recompute": 0, "micro_tokens": 16384}, 24.9),
        (2700, {"batch": 10, "recompute": 1, "micro_tokens": 32768}, 50 * 2700 / 17400),
    ],
)  # fmt: skip
def test_an_update_of_3b_on_an_h200(tokens, knobs, measured, monkeypatch):
    monkeypatch.setattr(fit, "trajectory", lambda cfg: (0, tokens))
    if "batch" in knobs:
        knobs = knobs | dict(G=5, mini_batch=knobs["batch"] * 5 // 2)
    else:
        knobs = knobs | dict(mini_batch=1, batch=1, micro_tokens=tokens)
    cfg = Config(**knobs)
    if cfg.batch == 1:
        object.__setattr__(cfg, "G", 1)  # the one trajectory that was measured
    seconds = fit.update_seconds(cfg, M3, 1, H200)
    assert seconds == pytest.approx(measured, rel=0.15)


def test_rollouts_of_160_rows_on_an_h200():
    """9.1 and 9.8 s were measured in a run, with 2,300 tokens read; a token costs what it cost
    there."""
    cfg = Config(batch=32, G=5, max_response=480)
    assert fit.trajectory(cfg) == (600, 2300)
    assert fit.rollout_seconds(cfg, M3, 1, H200) == pytest.approx(9.5, rel=0.1)


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GeForce RTX 4090", 165),
])  # fmt: skip
def test_a_card_is_known_by_its_name(name, tflops):
    assert find_peak(name) == tflops * 1e12
    assert find_peak("Tesla T4") is None and find_peak("48gb") is None
