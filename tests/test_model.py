"""The policy's model: packed attention against single sequences, families of logits, refusals,
export."""

import json
import re
import shutil
import sys
from datetime import datetime
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_model import STOP
from transformers import AutoModelForCausalLM

from config import WORLD
from engines.torch_engine import TorchEngine
from kernels import flash
from models.model import (
    empty,
    export,
    fill,
    forward_packed,
    load_config,
    load_model,
    load_tokenizer,
    skeleton,
)
from models.packing import KeysOfPieces, Packing, packed_attention
from plumbing.chat import apply_template
from plumbing.faults import Fault
from training.shards import blocks

LENGTHS = [7, 1, 30, 12, 30]


def plain_attention(q, k, v, scale, window):
    """Softmax attention of one sequence in float64, (heads, n, dim), every row written out."""
    heads, n, _ = q.shape
    rows = []
    for h in range(heads):
        kv = h * k.shape[0] // heads
        for i in range(n):
            first = max(0, i - window + 1)
            weights = torch.softmax(k[kv, first : i + 1] @ q[h, i] * scale, 0)
            rows.append(weights @ v[kv, first : i + 1])
    return torch.stack(rows).view(heads, n, -1)


# a prompt of 7 with three tails, one of 12 with one
SHARED = Packing([7, 5, 30, 12, 1, 9], [-1, 0, 0, -1, 0, 3])


def unshared(packing):
    """Returns for each sequence of a packing, a prompt alone included, its places in the row."""
    rows = torch.arange(sum(packing.lengths)).split(packing.lengths)
    pairs = zip(packing.parents, rows, strict=True)
    return [torch.cat([rows[parent], own]) if parent >= 0 else own for parent, own in pairs]


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [
    ("cpu", torch.float64, 1e-13),
    pytest.param("cuda", torch.bfloat16, 0.02, marks=[ON_A_GPU, pytest.mark.gpu], id="on_a_gpu"),
    pytest.param(None, torch.bfloat16, 0.02, id="FlashAttention-4"),
]


class OnCard(torch.Tensor):
    is_cuda = True


def ragged_attention(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size
):
    """What flash_attn.cute documents: the last query of a sequence stands at its last key."""
    left, right = window_size
    q, k, v = (x.as_subclass(torch.Tensor).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    pieces = [ends.diff().tolist() for ends in (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)]
    outputs = []
    for own, keys, values in zip(*map(torch.split, (q, k, v), pieces), strict=True):
        n = len(keys)
        assert len(own) <= max_seqlen_q and n <= max_seqlen_k
        distance = torch.arange(n - len(own), n)[:, None] - torch.arange(n)
        seen = (distance >= -right) & (distance <= (n if left is None else left))
        scores = torch.einsum("qhd,khd->hqk", own, keys) * softmax_scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).bfloat16(), None


def install_flash_attention_4(monkeypatch, capability, installed=True):
    """A stand-in, on a card of this capability."""
    find = flash.find_flash_attention_4.__wrapped__  # without its cache
    monkeypatch.setattr(flash, "find_flash_attention_4", find)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cute = SimpleNamespace(flash_attn_varlen_func=ragged_attention)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(flash, "version", lambda _: installed or version("not installed"))


@pytest.mark.parametrize(
    "capability, installed, taken",
    [((9, 0), True, True), ((10, 0), True, True), ((9, 0), False, False), ((8, 9), True, False)],
)
def test_flash_attention_4_is_taken_where_it_is_installed_and_the_card_has_it(
    capability, installed, taken, monkeypatch
):
    install_flash_attention_4(monkeypatch, capability, installed)
    assert flash.find_flash_attention_4() == (ragged_attention if taken else None)


@pytest.mark.parametrize("device, dtype, off", PLACES)
@pytest.mark.parametrize("parents", [[-1, 0, 0, -1, 0, 3], []], ids=["shared", "apart"])
@pytest.mark.parametrize("kv_heads, window", [(4, None), (2, 5), (2, 30), (1, 1000)])
def test_packed_attention_is_to_a_sequence_and_to_the_prompt_that_it_shares(
    kv_heads, window, parents, device, dtype, off, monkeypatch
):
    kind, packing = torch.Tensor, Packing(SHARED.lengths, parents, device or "cpu")
    if device is None:
        install_flash_attention_4(monkeypatch, (9, 0))
        kind = OnCard
    T, heads, g = sum(packing.lengths), (4, kv_heads, kv_heads), torch.Generator().manual_seed(0)
    x = [torch.randn(1, h, T, 32, generator=g).to(device, dtype) for h in heads]
    x = [t.as_subclass(kind).requires_grad_() for t in x]
    y = [t.detach().cpu().double().requires_grad_() for t in x]
    got, _ = packed_attention(None, *x, None, scaling=0.3, packing=packing, sliding_window=window)
    want = torch.empty(T, 4, 32, dtype=torch.float64)
    for places, n in zip(unshared(packing), packing.lengths, strict=True):
        alone = plain_attention(*(t[0][:, places] for t in y), 0.3, window or T)
        want[places[-n:]] = alone.transpose(0, 1)[-n:]
        assert packing.positions[places].tolist() == list(range(len(places)))
    torch.testing.assert_close(got[0].cpu().double(), want, atol=off, rtol=off)
    weights = torch.randn(want.shape, generator=g).double()
    (got[0].cpu().double() * weights).sum().backward()
    (want * weights).sum().backward()
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, atol=10 * off, rtol=2.5 * off)


def test_keys_of_all_pieces_are_one_copy_whose_gradients_are_summed_in_float32():
    """As the pieces joined one by one; of each token's bfloat16 gradients the sum, rounded once."""
    g, places = torch.Generator().manual_seed(0), torch.cat(unshared(SHARED))
    k, v = (torch.randn(sum(SHARED.lengths), 2, 8, generator=g).bfloat16() for _ in range(2))
    got = KeysOfPieces.apply(k.requires_grad_(), v.requires_grad_(), *SHARED.key_indices)
    pushed = [torch.randn(len(places), 2, 8, generator=g).bfloat16() for _ in range(2)]
    torch.autograd.backward(got, pushed)
    for x, copy, grad in zip((k, v), got, pushed, strict=True):
        assert torch.equal(copy, x[places])
        sums = torch.zeros(x.shape, dtype=torch.float64).index_add_(0, places, grad.double())
        assert torch.equal(x.grad, sums.bfloat16())


@pytest.mark.parametrize(
    "tied, published, computed, written",
    [(True, "bfloat16", "bfloat16", "bfloat16"), (False, "bfloat16", "float32", "float32")],
)
def test_an_exported_policy_is_the_policy_in_the_digits_of_the_model_and_of_its_training(
    tiny_path, tmp_path, tied, published, computed, written
):
    path = str(WORLD / "policy") if tied else tiny_path
    model, tokenizer = load_model(path), load_tokenizer(path)
    config = load_config(path)
    config.dtype = getattr(torch, published)
    skeleton(config, torch.float32)  # as FSDP2 and export.py make one first
    export(config, model, tokenizer, tmp_path / "p", getattr(torch, computed))
    # in the dtype that config.json names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "p").state_dict()
    for name, p in model.state_dict().items():
        assert again[name].dtype == getattr(torch, written)
        assert torch.equal(again[name], p.to(again[name].dtype)), name
    written = load_tokenizer(str(tmp_path / "p"))
    assert written("<search>x").input_ids == tokenizer("<search>x").input_ids


# ---- families of models: supported exactly, or refused in one line


SHAPES = dict(
    vocab_size=600,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2)
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 16.0,
        "original_max_position_embeddings": 32}  # fmt: skip
PER_LAYER = dict(vocab_size_per_layer_input=600, hidden_size_per_layer_input=16, sliding_window=8)
MLA = {  # values narrower than keys; and a buffer that is part of the weights
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32,
    "v_head_dim": 24, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
}  # fmt: skip
SUPPORTED = {  # family -> settings
    "Qwen3": {},
    "Llama": {},
    "Mistral": {"sliding_window": 8},  # shorter than the sequences
    "Gemma3Text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4Text": PER_LAYER,
    # dropout, as the published ones have
    "GPT2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "Mixtral": EXPERTS | {"router_jitter_noise": 0.5},
    "JetMoe": EXPERTS | {"kv_channels": 32},  # views what attention returns
    "DeepseekV3": MLA | EXPERTS,
    "HrmText": {},  # asks the cache whether it is empty
}
LOGITS, HIDDEN = (
    "its logits are not its hidden states times",
    "training would change its hidden states",
)
REFUSED = {  # family -> settings, what the line says
    "Granite": ({"logits_scaling": 8.0}, LOGITS),
    "Gemma2": ({}, LOGITS),  # a soft cap
    "Phi": ({}, LOGITS),  # a bias
    "GptOss": (EXPERTS, HIDDEN),  # attention sinks
    "Llama4Text": (EXPERTS, "no forward pass that can be trained"),
    "GPTNeo": ({"attention_types": [[["global", "local"], 1]]}, "no causal LM can be loaded"),
    "Phi3": (
        {"rope_parameters": LONG | {"rope_theta": 1e4}, "original_max_position_embeddings": 32},
        HIDDEN,
    ),
}


@pytest.mark.parametrize("family", SUPPORTED)
def test_blocks_have_all_weights_whose_names_have_a_layer_s_number(family):
    model = skeleton(getattr(transformers, f"{family}Config")(**SHAPES | SUPPORTED[family]))
    within = {id(p) for block in blocks(model) for p in block.parameters()}
    for name, p in model.named_parameters():
        assert (id(p) in within) == bool(re.search(r"\.\d+\.", name)), name


def make_family(family, settings, tiny_path, path):
    """A policy with random weights, large enough that its log-probs differ, and the tiny policy's
    tokenizer."""
    shutil.copytree(tiny_path, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = getattr(transformers, f"{family}Config")(**SHAPES | settings)
    config.initializer_range = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, p in model.named_parameters():
            if name.endswith("bias"):  # or all are 0
                torch.nn.init.normal_(p, std=0.2)
        model.save_pretrained(path)
    return str(path)


@torch.no_grad()
def own_logps(model, ids, temperature):
    """Log-probs (T - 1, V) of the tokens after each of ids (T,), from the model's own logits."""
    return torch.log_softmax(
        model(ids[None], use_cache=False).logits[0, :-1].double() / temperature, -1
    )


COMMON = {"Qwen3", "Gemma3Text", "GPT2"}


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=[] if x in COMMON else pytest.mark.slow) for x in SUPPORTED]
)
def test_a_supported_family_is_scored_and_sampled_with_its_own_logits(family, tiny_path, tmp_path):
    path = make_family(family, SUPPORTED[family], tiny_path, tmp_path / family)
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert model.config._attn_implementation == "packed" and not model.training
    own = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )

    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 600, (n,), generator=g) for n in LENGTHS]
    ends = torch.tensor(LENGTHS).cumsum(0)
    where = torch.tensor([i for i in range(sum(LENGTHS)) if i + 1 not in ends])
    ids = torch.cat(rows)
    want = torch.cat([own_logps(own, row, 0.7).gather(1, row[1:, None])[:, 0] for row in rows])
    assert want.std() > 0.2  # not all alike
    given = model, ids, Packing(LENGTHS), where, ids[where + 1], 0.7
    for mode in (True, False):  # in training the policy is the one that sampled
        model.train(mode)
        logp, _ = forward_packed(*given)
        torch.testing.assert_close(logp.double(), want, atol=1e-4, rtol=0)
    ones = torch.ones(len(where))
    _, extras = forward_packed(*given, adv=ones, token_weight=ones)
    torch.testing.assert_close(extras["logp"].double(), want, atol=1e-4, rtol=0)

    export(load_config(path), model, tokenizer, tmp_path / "exported", torch.float32)
    again = load_model(str(tmp_path / "exported")).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())

    engine, context = TorchEngine(model, tokenizer, STOP), rows[2].tolist()
    contexts = dict.fromkeys(range(4), context)
    for _ in range(2):  # turns
        for row, sampled, logps, _ in [*engine.generate(contexts, 8, 0.7)]:
            turn = own_logps(own, torch.tensor(contexts[row] + sampled), 0.7)[-len(sampled) :]
            want = turn.gather(1, torch.tensor(sampled)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logps).double(), want, atol=1e-4, rtol=0)
            contexts[row] = contexts[row] + sampled + [7, 8, 9][row % 2 :]


@pytest.mark.parametrize("family", REFUSED)
def test_an_unsupported_family_is_refused(family, tiny_path, tmp_path):
    settings, reason = REFUSED[family]
    line = refused(load_model, make_family(family, settings, tiny_path, tmp_path / family))
    assert re.search(reason, line), line


def test_positions_that_depend_on_the_longest_sequence_are_right_up_to_where_they_do(
    tiny_path, tmp_path
):
    path = make_family("Phi3", REFUSED["Phi3"][0], tiny_path, tmp_path / "phi")
    load_model(path, 32)
    assert "positions that depend" in refused(load_model, path, 33)


def edit_json(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def edit_weights(path, edit):
    weights = load_file(file := path / "model.safetensors")
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


def without_up(weights):
    del weights[UP]


MISTAKES = {  # what is brought -> what is done to a model, and what the line says
    "a clone without git lfs": (
        lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "no causal LM can be loaded"),
    "quantized weights": (
        lambda path: edit_json(path / "config.json", quantization_config={"quant_method": "awq", "bits": 4}),
        "its weights are quantized"),
    "a setting of another type": (
        lambda path: edit_json(path / "config.json", max_position_embeddings=9.5), "expected int, got float"),
    "a weight too few": (lambda path: edit_weights(path, without_up), rf"missing \(1, {UP}\)"),
    "a weight too many": (
        lambda path: edit_weights(path, lambda w: w.update(extra=torch.zeros(3))), r"unexpected \(1, extra\)"),
    "a weight of another shape": (
        lambda path: edit_weights(path, lambda w: w.update({UP: torch.zeros(5, 64)})), "no causal LM can be loaded"),
    "a weight that is no number": (
        lambda path: edit_weights(path, lambda w: w[UP][2, 3].fill_(float("nan"))), "or are not finite"),
    "a last norm of zeros": (
        lambda path: edit_weights(path, lambda w: w["model.norm.weight"].zero_()), LOGITS),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_with_a_mistake_is_refused_by_whatever_loads_it_first(
    mistake, tiny_path, tmp_path
):
    path = shutil.copytree(tiny_path, tmp_path / "model")
    change, says = MISTAKES[mistake]
    change(path)
    assert re.search(
        says, refused(lambda path: (load_tokenizer(path), load_model(path)), str(path))
    )


@pytest.mark.parametrize("family, settings", [
    ("GPT2", {"n_positions": 64}), ("Gemma3", {"text_config": {"max_position_embeddings": 64}}),
])  # fmt: skip
def test_a_policy_ends_where_its_positions_do(family, settings, tmp_path):
    getattr(transformers, f"{family}Config")(**settings).save_pretrained(tmp_path)
    load_config(str(tmp_path), 64)
    assert "it takes 64 tokens at most" in refused(load_config, str(tmp_path), 65)


def test_a_narrow_copy_has_the_buffers_of_transformers_model_in_bfloat16(tiny_path, tmp_path):
    path = make_family("Gemma3Text", SUPPORTED["Gemma3Text"], tiny_path, tmp_path / "gemma")
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    narrow = fill(empty(load_config(path), torch.bfloat16, "cpu"), load_model(path))
    assert narrow.dtype == torch.bfloat16
    for (name, want), (other, got) in zip(own.named_buffers(), narrow.named_buffers(), strict=True):
        assert name == other and got.dtype == want.dtype and torch.equal(got, want), name


# ---- what cannot be trained is refused in one line


def changed(tiny_path, tmp_path, template):
    """A copy of the tiny policy with another chat template, or with none."""
    path = shutil.copytree(tiny_path, tmp_path / "changed")
    (path / "chat_template.jinja").unlink()
    if template:
        (path / "chat_template.jinja").write_text(template)
    return str(path)


def refused(function, path, *args):
    """The line with which function(path, *args) refuses a model."""
    with pytest.raises(Fault) as fault:
        function(path, *args)
    line = str(fault.value)
    assert "\n" not in line and line.startswith(f"--model {getattr(path, 'name_or_path', path)}: ")
    return line


@pytest.mark.parametrize("load", [load_config, load_model, load_tokenizer])
def test_a_path_that_holds_no_model(tmp_path, load):
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        assert "no causal LM" in refused(load, str(path))


def test_a_tokenizer_without_a_chat_template(tiny_path, tmp_path):
    assert "no chat template" in refused(load_tokenizer, changed(tiny_path, tmp_path, None))


LLAMA_3_2 = """\
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "Today Date: " + date_string + "\n" + messages[0]["content"] | trim }}"""


def test_a_chat_template_s_clock_stands_still(tiny_path, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(changed(tiny_path, tmp_path, LLAMA_3_2))
    message = {"role": "user", "content": " a "}
    for year in (2025, 2026):
        clock = SimpleNamespace(now=lambda year=year: datetime(year, 1, 2))
        monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", clock)
        assert apply_template(tokenizer, [message]) == "Today Date: 26 Jul 2024\na"
        # the danger is real
        assert f"02 Jan {year}" in tokenizer.apply_chat_template([message], tokenize=False)


def test_a_chat_template_that_fails_or_drops_a_message_is_named(tiny_path, tmp_path):
    odd = "{% if 'ß' in messages[0]['content'] %}{{ messages[0]['x']['y'] }}{% endif %}{{ messages[0]['content'] }}"
    tokenizer = load_tokenizer(changed(tiny_path, tmp_path, odd))
    user, system = {"role": "user", "content": "Fuß?"}, {"role": "system", "content": "Be brief."}
    assert "fails (UndefinedError" in refused(apply_template, tokenizer, [user])
    assert "of the user's message" in refused(apply_template, tokenizer, [system, user])
