"""The estimated memory of a run against numbers by hand, against autograd, and against two real processes."""

import copy
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from ranks_fit import Live
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

import engines.vllm_engine as vllm_engine
import inspo
import training.fit as fit
from config import CARDS, Config, parse
from kernels import grpo_head
from models import lora
from models.model import empty, skeleton
from models.packing import Packing
from rollout import encode_prompt, rollout
from tasks import Job, Question
from tasks.search_qa import SearchQA
from tasks.tools import Tool
from training.fit import activations, estimate, kv_bytes, with_room

ROOT = Path(__file__).parent.parent
P3, P7 = 3_085_938_688, 7_615_616_512
P05, P15 = 494_032_768, 1_543_714_304
B3 = Qwen2Config(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
B7 = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
CFG0, CFG3, CFG7 = (parse(["--dry_run", "8xh100", "--model", name]) for name in ("world", "qwen2.5-3b", "qwen2.5-7b"))


def of(fitted, column="update"):
    return {part.name: getattr(part, column) for part in fitted.parts}


# --- by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, config, P", [(CFG3, B3, P3), (CFG7, B7, P7)])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_the_model_s_state_is_16_bytes_a_parameter_and_2_of_the_reference(cfg, config, P, gpus):
    fitted = estimate(cfg, config, "vllm", gpus, 80)  # no padding: all first dimensions are multiples of 8
    update, rollout = of(fitted), of(fitted, "rollout")
    for name, bytes in {"policy": 4, "moments of AdamW": 8, "gradients": 4}.items():
        assert update[f"{name} (float32 shares)"] == bytes * P / gpus
    assert update["reference (bfloat16 shares)"] == rollout["reference (bfloat16 shares)"] == 2 * P / gpus
    assert rollout["policy (float32 shares)"] == 4 * P / gpus
    assert rollout["gradients (float32 shares)"] == 0
    assert fitted.title == f"{P / 1e6:,.0f}M parameters on {gpus} x 80 GB"


def test_gathered_weights_and_reduced_gradients_by_hand():
    H, I, kv, V = 3584, 18944, 512, 152064
    block = H * (H + 2 * kv) + (H + 2 * kv) + H * H + 3 * H * I + 2 * H
    root = 2 * V * H + H
    assert 28 * block + root == P7
    update = of(estimate(CFG7, B7, "vllm", 8, 80))
    assert update["policy (embedding, head and two blocks, gathered in bfloat16)"] == 2 * root + 4 * block
    # the head's gradient in bfloat16; a block's in bfloat16, in float32 for the reduction, and its share of the result
    assert update["gradients being reduced"] == 2 * V * H + (2 + 4 + 0.5) * block


def test_a_tied_head_is_gathered_once():
    H, I, kv, V = 2048, 11008, 256, 151936
    block = H * (H + 2 * kv) + (H + 2 * kv) + H * H + 3 * H * I + 2 * H
    update = of(estimate(CFG3, B3, "vllm", 8, 80))
    gathered = update["policy (embedding, head and two blocks, gathered in bfloat16)"]
    assert gathered == 2 * (V + 1) * H + 4 * block


def test_the_state_with_lora_by_hand():
    """Frozen bf16 weights, 16 bytes a parameter of the adapters, no reference, no gradient of embedding and head."""
    H, I, kv, V, r, gpus = 3584, 18944, 512, 152064, 32, 8
    in_and_out = 2 * (H + H) + 2 * (H + kv) + 3 * (H + I)  # q and o, k and v, gate and up and down
    per_block = r * in_and_out
    A = 28 * per_block
    assert A == 80_740_352
    fitted = estimate(replace(CFG7, lora_rank=r), B7, "vllm", gpus, 80)
    update, rollout = of(fitted), of(fitted, "rollout")
    assert update["policy (frozen, bfloat16 shares)"] == rollout["policy (frozen, bfloat16 shares)"] == 2 * P7 / gpus
    assert update["adapters (float32 shares)"] == rollout["adapters (float32 shares)"] == 4 * A / gpus
    assert update["moments of AdamW (float32 shares)"] == 8 * A / gpus
    assert update["gradients (float32 shares)"] == 4 * A / gpus and rollout["gradients (float32 shares)"] == 0
    assert not any(name.startswith(("reference", "policy (float32")) for name in update)
    block = H * (H + 2 * kv) + (H + 2 * kv) + H * H + 3 * H * I + 2 * H + per_block
    root = 2 * V * H + H
    assert update["policy (embedding, head and two blocks, gathered in bfloat16)"] == 2 * root + 4 * block
    assert update["gradients being reduced"] == (2 + 4 + 4 / gpus) * per_block
    assert rollout["vLLM (weights)"] == 2 * P7  # merged
    assert fitted.title == "7,616M parameters, LoRA, on 8 x 80 GB"


def test_a_frozen_head_has_no_gradient():
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=3000)
    cfg = replace(CFG7, micro_tokens=5000, max_prompt=4, max_response=4, max_observation=4, lora_rank=2)
    fitted = estimate(cfg, Qwen2Config(**SMALL | small), "vllm", 8, 80)
    assert "largest in the forward pass of the head" in fitted.table()
    assert of(fitted)["the head's logits and gradients"] == 4 * 4096 * 3000 + (2 + 4) * 5000 * 32  # logits, states, dX


@pytest.mark.parametrize(
    "argv, verdict",
    [
        (["qwen2.5-7b", "--lora_rank", "32"], "a smaller --vllm_memory"),
        (["qwen2.5-7b", "--lora_rank", "32", "--vllm_memory", "0.7"], "It fits"),
        (["qwen2.5-1.5b", "--dry_run", "1xrtx4090", "--lora_rank", "32"], "It fits"),
        (["qwen2.5-0.5b", "--dry_run", "1xrtx4090"], "It fits"),
        (["qwen2.5-7b"], "--lora_rank 32"),
        (["qwen2.5-1.5b", "--dry_run", "1xrtx4090"], "--lora_rank 32"),
    ],
)
def test_one_gpu_is_told_when_adapters_make_it_fit(argv, verdict):
    cfg = parse(["--dry_run", "1xh100", "--model", *argv])
    fitted = estimate(cfg, fit.shapes(cfg.model), "vllm", 1, CARDS[cfg.dry_run[2:]])
    assert verdict in (fitted.fault().split("; try ")[-1] or fitted.table())


def test_the_kv_cache_by_hand():
    assert kv_bytes(B3) == 2 * 36 * 2 * 128 * 2 and kv_bytes(B7) == 2 * 28 * 4 * 128 * 2
    fitted = estimate(CFG7, B7, "vllm", 8, 80)
    rollout = of(fitted, "rollout")
    assert rollout["vLLM (weights)"] == 2 * P7
    work = 16384 * 2 * (3584 + 3584 + 2 * 18944 + 18944)  # residual, hidden states, gate and up, their product
    assert rollout["vLLM (activations, or the sampler's logits)"] == work > 4 * 4 * 512 * 152064
    graphs = rollout["vLLM (CUDA graphs, an allowance; also while asleep)"]
    assert graphs == 28 * 30e6 == of(fitted)["vLLM (CUDA graphs, an allowance; also while asleep)"]
    tokens = (0.75 * 80e9 - 2 * P7 - work - graphs) / 57344
    assert rollout["vLLM (KV cache)"] == pytest.approx(57344 * tokens) and fitted.kv_tokens == pytest.approx(tokens)
    assert f"room for {tokens:,.0f} tokens of 57.3 kB; a rank's 320 trajectories can need 1,470,720" in fitted.table()
    assert f"{tokens // 4596:.0f} of them run at once" in fitted.table()


def test_the_sampler_s_logits_can_need_more_than_the_activations():
    rollout = of(estimate(CFG3, B3, "vllm", 8, 80), "rollout")
    work = 16384 * 2 * (2048 + 2048 + 3 * 11008)
    assert rollout["vLLM (activations, or the sampler's logits)"] == 4 * 4 * 512 * 151936 > work


def test_the_rows_of_vllm_are_those_that_its_engine_is_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = vllm_engine.settings("m", max_len=9, dtype="bfloat16", memory=0.5, seed=0)
    assert given["max_num_seqs"] == 512 and given["max_num_batched_tokens"] == 16384
    text = estimate(replace(CFG3, batch=8 * 512), B3, "vllm", 8, 400).table()
    assert "a rank's 2,560 trajectories" in text and "512 of them run at once" in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = vllm_engine.settings("m", max_len=9, dtype="bfloat16", memory=0.5, seed=0)
    assert given["max_num_seqs"] is None and given["max_num_batched_tokens"] is None


def test_a_rank_s_trajectories_are_whole_groups():
    assert "a rank's 855 trajectories" in estimate(CFG3, B3, "vllm", 3, 80).table()  # 171 of 512 groups of 5


class LongTurns:
    """An engine whose turns have the maximum length and end in a search."""

    lockstep, max_rows = True, 9

    def __init__(self, tokenizer):
        self.search = tokenizer("<search>who</search>", add_special_tokens=False)["input_ids"]

    def begin(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        for key in contexts:
            yield key, self.search[:1] * (max_new - len(self.search)) + self.search, [0.0] * max_new


def test_the_longest_trajectory_is_the_longest_that_rollout_makes(tiny):
    class Endless(Tool):
        tag, noun, argument, plural, result_tag = "search", "a search", "query", "searches", "information"

        def submit(self, argument):
            future = Future()
            future.set_result(["Title\n" + "word " * 999])
            return future

    _, tokenizer = tiny
    question = Question("q", "Who?", ("x",), "")
    task = SearchQA(Config())
    task.tools = [Endless()]
    prompt = len(encode_prompt(tokenizer, task, "Answer.", question))
    cfg = replace(CFG7, max_turns=4, max_response=60, max_observation=50)
    longest = 0
    for max_prompt in range(prompt, prompt + 240, 10):  # from a limit that the first turn reaches to one that none does
        jobs = [Job(0, "Answer.", question, 0)]
        limited = replace(cfg, max_prompt=max_prompt)
        [tau] = rollout(LongTurns(tokenizer), tokenizer, task, jobs, limited, temperature=1.0, seed=0)
        longest = max(longest, len(tau.ids) - max_prompt)
    assert longest == 60 + 50  # max_response + max_observation past max_prompt
    cfg = replace(CFG7, micro_tokens=100)
    assert "activations kept of 5,096 tokens" in of(estimate(cfg, B7, "vllm", 8, 80))
    assert "activations kept of 32,768 tokens" in of(estimate(CFG7, B7, "vllm", 8, 80))


def test_the_presets_shapes_need_no_hub(monkeypatch):
    for name, P in (("Qwen/Qwen2.5-0.5B", P05), ("Qwen/Qwen2.5-1.5B", P15)):
        assert sum(p.numel() for p in skeleton(fit.shapes(name)).parameters()) == P
    for name, config, P in (("Qwen/Qwen2.5-3B", B3, P3), ("Qwen/Qwen2.5-7B", B7, P7)):
        known = fit.shapes(name)
        assert sum(p.numel() for p in skeleton(known).parameters()) == P
        for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
            assert getattr(known, key) == getattr(config, key)
    assert fit.shapes(CFG0.model).num_hidden_layers == 3  # the world's, from its file


def test_the_command_prints_the_table_and_refuses_what_cannot_fit(capsys):
    argv = ["--model", "qwen2.5-7b", "--dry_run"]
    inspo.main([*argv, "8xh100"])
    stdout, stderr = capsys.readouterr()
    assert stderr == "" and "7,616M parameters on 8 x 80 GB" in stdout
    _, fitted = with_room(CFG7, B7, "vllm", 8, 80)
    assert stdout.startswith(f"{fitted.table()}\n")
    assert "91.4 GB of disk" in stdout  # 7.616e9 x 12 bytes
    inspo.main([*argv, "8xh200"])
    assert "7,616M parameters on 8 x 141 GB" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        inspo.main([*argv, "1xrtx4090"])
    assert "do not fit" in end.value.code and "\n" not in end.value.code


# --- its verdict --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, config", [(CFG3, B3), (CFG7, B7)])
def test_the_paper_s_setting_fits_8_gpus_of_80_gb(cfg, config):
    fitted = estimate(cfg, config, "vllm", 8, 80)
    assert fitted.fault() == ""
    text = fitted.table()
    assert max(map(len, text.splitlines())) <= 100
    assert f"{fitted.update / 1e9:10.1f}{fitted.rollout / 1e9:10.1f}" in text
    assert text.splitlines()[-1].startswith("It fits, with ")


def test_the_presets_give_vllm_what_8_gpus_of_80_gb_have():
    """vLLM refuses to start unless its whole share is free beside policy and reference; moments come later."""
    for cfg, config, rows in ((CFG3, B3, 320), (CFG7, B7, 158)):
        fitted = estimate(cfg, config, "vllm", 8, 80)
        there = of(fitted, "rollout")
        there = there["policy (float32 shares)"] + there["reference (bfloat16 shares)"]
        assert there + cfg.vllm_memory * 80e9 < fitted.usable and fitted.fault() == ""
        assert f"\n{rows} of them run at once" in fitted.table()
    assert estimate(replace(CFG7, vllm_memory=0.78), B7, "vllm", 8, 80).fault()


@pytest.mark.slow
def test_every_recommended_setting_saves_memory():
    """Each knob that --help or a fault recommends shrinks its sum."""
    base = estimate(CFG7, B7, "vllm", 8, 80)
    more = estimate(CFG7, B7, "vllm", 16, 80)
    assert more.update < base.update and more.rollout < base.rollout
    offloaded = estimate(replace(CFG7, offload_reference=True), B7, "vllm", 8, 80)
    assert base.update - offloaded.update == base.rollout - offloaded.rollout == 2 * P7 / 8
    adapters = estimate(replace(CFG7, lora_rank=32), B7, "vllm", 8, 80)
    assert adapters.update < base.update and adapters.rollout < base.rollout
    without = estimate(replace(CFG7, beta=0.0), B7, "vllm", 8, 80)
    assert without.update == offloaded.update and not any(name.startswith("reference") for name in of(without))
    assert estimate(replace(CFG7, recompute=0), B7, "vllm", 8, 80).update > 3 * base.update
    assert estimate(replace(CFG7, micro_tokens=16384), B7, "vllm", 8, 80).update < base.update
    less = estimate(replace(CFG7, vllm_memory=0.65), B7, "vllm", 8, 80)
    assert base.rollout - less.rollout == pytest.approx(0.1 * 80e9) and less.update == base.update
    served = estimate(replace(CFG7, vllm="http://a:8000"), B7, "vllm", 8, 80)
    assert not any(name.startswith("vLLM") for name in of(served)) and "vLLM" not in served.table()
    fewer = estimate(replace(CFG7, max_rows=8), B7, "torch", 8, 80)
    assert fewer.rollout < estimate(CFG7, B7, "torch", 8, 80).rollout


@pytest.mark.slow
def test_activations_are_kept_where_they_fit():
    """In the largest micro-batches of 8,192 tokens or more for which there is room; what was asked for is kept."""
    cfg, fit = with_room(CFG3, B3, "vllm", 8, 80)
    assert cfg == replace(CFG3, recompute=0, micro_tokens=8192)
    assert fit.table() == estimate(cfg, B3, "vllm", 8, 80).table()
    assert with_room(CFG3, B3, "vllm", 8, 141)[0] == replace(CFG3, recompute=0, micro_tokens=16384)
    assert with_room(CFG3, B3, "vllm", 8, 400)[0] == replace(CFG3, recompute=0)
    for gpu_mem in (80, 141):
        tokens = 2 * with_room(CFG3, B3, "vllm", 8, gpu_mem)[0].micro_tokens
        tight = estimate(replace(CFG3, recompute=0, micro_tokens=tokens), B3, "vllm", 8, gpu_mem)
        assert tight.update > 0.9 * tight.usable
    cfg, fit = with_room(CFG7, B7, "vllm", 8, 40)
    assert cfg == replace(CFG7, recompute=1) and fit.update == estimate(CFG7, B7, "vllm", 8, 40).update
    for recompute in (0, 1):
        asked = replace(CFG3, recompute=recompute, micro_tokens=32768)
        assert with_room(asked, B3, "vllm", 8, 80)[0] == asked


@pytest.mark.parametrize(
    "change, engine, gpus, gpu_mem, largest, cures",
    [
        ({}, "vllm", 1, 24, "moments of AdamW (float32 shares) 60.9", ["more GPUs", "--offload_reference"]),
        ({"recompute": 0}, "vllm", 8, 80, "activations kept of 32,768 tokens 152.6", ["--recompute 1"]),
        ({"micro_tokens": 131072}, "vllm", 8, 80, "activations and their gradients in one", ["--micro_tokens"]),
        ({"vllm_memory": 0.9}, "vllm", 8, 80, "vLLM (KV cache) 53.8", ["--vllm_memory"]),
        ({}, "torch", 8, 80, "torch engine (KV cache of 512 rows, twice) 269.9", ["--max_rows"]),
    ],
)
def test_a_refusal_names_the_largest_part_and_a_cure(change, engine, gpus, gpu_mem, largest, cures):
    fitted = estimate(replace(CFG7, **change), B7, engine, gpus, gpu_mem)
    fault = fitted.fault()
    assert "\n" not in fault and "do not fit" in fault and f"largest: {largest}" in fault
    assert all(cure in fault.split("; try ")[1] for cure in cures)
    assert "It fits" not in fitted.table()


def test_a_vllm_share_too_small_for_one_context_is_refused():
    fault = estimate(replace(CFG7, vllm_memory=0.22), B7, "vllm", 8, 80).fault()  # 17.6 GB, the weights are 15.23
    assert "17.6 GB of vLLM have no room" in fault and "CUDA graphs (2.9)" in fault
    assert "a larger --vllm_memory" in fault
    assert estimate(replace(CFG7, vllm_memory=0.24), B7, "vllm", 8, 80).fault() == ""


def test_the_caller_s_config_is_unchanged():
    config, before = copy.deepcopy(B3), B3.to_dict()
    estimate(CFG3, config, "vllm", 8, 80)
    assert config.to_dict() == before and config._attn_implementation == B3._attn_implementation


def test_every_cure_is_a_flag():
    flags = {f"--{f.name}" for f in fields(Config)}
    cures = [part.cure for engine in ("vllm", "torch") for part in estimate(CFG7, B7, engine, 8, 80).parts]
    assert {word for cure in cures for word in cure.split() if word.startswith("--")} <= flags


# --- activations: against a formula, and against autograd's on the CPU ---------------------------------------------

SMALL = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, tie_word_embeddings=False, head_dim=32,
)  # fmt: skip
LENGTHS = [200, 312]
T = sum(LENGTHS)


@pytest.mark.parametrize("kind", [Qwen2Config, LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("rank", [0, 16])
def test_activations_equal_autograd_s(kind, recompute, rank):
    config = kind(**SMALL)
    model = lora.add(empty(config, torch.bfloat16, "cpu").train(), rank, 32).bfloat16()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # FSDP2 frees them, too
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packing = Packing(LENGTHS)
    positions = packing.positions[None]
    with Live([*model.parameters(), *model.buffers()]) as live:
        hidden = model.base_model(
            input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, packing=packing
        ).last_hidden_state
        held, loss = live.now(), hidden.sum()
        del hidden
        loss.backward()
    kept, again = activations(lora.add(skeleton(config, torch.bfloat16), rank, 32).bfloat16(), T, recompute, 0)
    output = T * 128 * 2  # of the last norm: counted in `held`, not in `kept`
    shared = T * 2 * 2 * 32 if recompute else 0  # cos and sin, which `activations` counts in the block
    assert kept + output + shared == pytest.approx(held, rel=0.01)
    assert 0.99 < (kept + again) / live.most < 1.08  # the last norm's may be freed by then


@pytest.mark.parametrize("fused", [0, 1])
def test_a_block_of_qwen2_by_hand(fused):
    """Bytes per token. Torch's norms keep a float32 copy besides and its MLP silu's output, whose gradient is one more;
    Liger's keep input and output, and gate, up and their product."""
    H, I, q, kv, heads = 3584, 18944, 3584, 512, 28
    norm = 2 * H + 2 * H + 4 + (0 if fused else 4 * H)  # input or its normalized form, output; 1 / root mean square
    attention = 2 * q + 2 * 2 * kv + 2 * q + 4 * heads + 2 * q  # q, k, v, out, log-sum-exp, out as rows
    mlp = 2 * (3 if fused else 4) * I
    gradients, position = 2 * H + 2 * (1 if fused else 2) * I, 2 * 2 * 128  # cos and sin, once
    kept, again = activations(skeleton(B7, torch.bfloat16), 1000, 1, fused)
    last = 2 * H + 4 if fused else 4 * H + 2 * H
    assert kept == pytest.approx(1000 * (28 * 2 * H + last), rel=1e-4)
    assert again == pytest.approx(1000 * (2 * norm + attention + mlp + gradients + position), rel=1e-4)
    update = of(estimate(replace(CFG7, fused_layers=fused), B7, "vllm", 8, 80))
    assert update["activations and their gradients in one block"] == pytest.approx(32768 / 1000 * again)


def test_the_head_s_gradients_by_measurement():
    N, H, V = 8, 32, 3000
    hidden = torch.randn(N, H, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.bfloat16, requires_grad=True)
    with Live([hidden, weight]) as live:
        loss, _ = grpo_head(hidden, weight, torch.zeros(N, dtype=torch.long), adv=torch.ones(N), w=torch.ones(N))
        live.most = 0
        loss.backward()
    small = dict(hidden_size=H, intermediate_size=64, num_hidden_layers=1, vocab_size=V, tie_word_embeddings=True)
    cfg = replace(CFG7, micro_tokens=N, max_prompt=4, max_response=4, max_observation=4)
    fitted = estimate(cfg, Qwen2Config(**SMALL | small), "vllm", 8, 80)
    assert "largest in the backward pass of the head" in fitted.table()
    assert of(fitted)["the head's logits and gradients"] == pytest.approx(live.most, rel=0.02)


def test_the_head_s_logits_are_one_chunk_in_float32():
    assert inspect.signature(grpo_head).parameters["chunk"].default == fit.CHUNK
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=3000)
    cfg = replace(CFG7, micro_tokens=5000, max_prompt=4, max_response=4, max_observation=4)
    fitted = estimate(cfg, Qwen2Config(**SMALL | small), "vllm", 8, 80)
    assert "largest in the forward pass of the head" in fitted.table()
    wanted = 4 * 4096 * 3000 + 4 * 3000 * 32 + (2 + 4) * 5000 * 32  # logits, dW, hidden states and dX
    assert of(fitted)["the head's logits and gradients"] == wanted


# --- against two processes ----------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_two_real_ranks_use_the_estimated_memory(tmp_path):
    config = Qwen2Config(**SMALL | dict(vocab_size=301, intermediate_size=333, num_hidden_layers=3))  # odd: padded
    config.save_pretrained(tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "tests/ranks_fit.py", *[tmp_path] * 2]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    cfg = replace(CFG7, micro_tokens=256, max_prompt=50, max_response=50, max_observation=50, vllm="http://a:8000")
    fitted = estimate(cfg, config, "vllm", 2, 80)
    whole = sum(p.numel() for p in skeleton(config).parameters())
    assert whole / 2 < of(fitted)["policy (float32 shares)"] / 4 < whole / 2 * 1.01  # FSDP2 pads 301 rows to 302
    for rank in (0, 1):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        most = measured.pop("most")
        assert len(measured) == 4
        for name, bytes in measured.items():
            assert bytes == pytest.approx(of(fitted)[name], rel=0.01), (rank, name)
        there = sum(measured[name] for name in measured if "shares" in name and "gradients" not in name)
        assert 1 < fitted.update / (there + most) < 1.15, rank  # not all parts peak at the same time
