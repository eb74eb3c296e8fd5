"""The policy's model: packed attention against single sequences, families of logits, refusals,
export."""

import json
import os
import re
import shutil
from datetime import datetime
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_model import STOP
from transformers import AutoModelForCausalLM

from config import WORLD
from engines.torch_engine import TorchEngine
from models.model import (
    blocks,
    empty,
    export,
    fill,
    forward_packed,
    load_config,
    load_model,
    load_policy,
    load_tokenizer,
    skeleton,
)
from models.packing import KeysOfPieces, Packing, packed_attention
from plumbing.chat import apply_template
from plumbing.faults import Fault

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


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("new", [1, 3])
def test_new_tokens_attend_to_the_cache_of_their_row(kv_heads, window, new):
    g = torch.Generator().manual_seed(0)
    # columns in use of each row, the new tokens' own included
    ends, width = torch.tensor([6, 20, 11]), 24
    q, k, v = (
        torch.randn(3, h, n, 8, generator=g)
        for h, n in ((4, new), (kv_heads, width), (kv_heads, width))
    )
    places = ends[:, None] - new + torch.arange(new)
    mask = (torch.arange(width) <= places[:, :, None])[:, None]
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    got, _ = packed_attention(module, q, k, v, mask, scaling=0.3, sliding_window=window)
    for row, end in enumerate(ends):
        whole = torch.zeros(4, end, 8, dtype=torch.float64)  # only the last queries are asked
        whole[:, -new:] = q[row]
        want = plain_attention(
            whole, k[row, :, :end].double(), v[row, :, :end].double(), 0.3, window or width
        )
        torch.testing.assert_close(
            got[row].transpose(0, 1).double(), want[:, -new:], atol=1e-6, rtol=0
        )


# a prompt of 7 with three tails, one of 12 with one
SHARED = Packing([7, 5, 30, 12, 1, 9], [-1, 0, 0, -1, 0, 3])


def unshared(packing):
    """Returns for each sequence of a packing, a prompt alone included, its places in the row."""
    rows = torch.arange(sum(packing.lengths)).split(packing.lengths)
    pairs = zip(packing.parents, rows, strict=True)
    return [torch.cat([rows[parent], own]) if parent >= 0 else own for parent, own in pairs]


@pytest.mark.parametrize("packing", [SHARED, Packing(LENGTHS)], ids=["shared", "apart"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 5, 30, 1000])
def test_packed_tokens_attend_to_their_sequence_and_to_the_prompt_that_it_shares(
    kv_heads, window, packing
):
    g = torch.Generator().manual_seed(0)
    T = sum(packing.lengths)
    x = [
        torch.randn(1, h, T, 8, generator=g, dtype=torch.float64, requires_grad=True)
        for h in (4, kv_heads, kv_heads)
    ]
    y = [t.detach().clone().requires_grad_() for t in x]
    got, _ = packed_attention(None, *x, None, scaling=0.3, packing=packing, sliding_window=window)
    want = torch.empty(T, 4, 8, dtype=torch.float64)
    for places, n in zip(unshared(packing), packing.lengths, strict=True):
        alone = plain_attention(*(t[0][:, places] for t in y), 0.3, window or T)
        want[places[-n:]] = alone.transpose(0, 1)[-n:]
        assert packing.positions[places].tolist() == list(range(len(places)))
    torch.testing.assert_close(got[0], want, atol=1e-12, rtol=0)
    weights = torch.randn(want.shape, generator=g, dtype=torch.float64)
    for out in (got[0], want):
        (out * weights).sum().backward()
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-6), (torch.bfloat16, 0.0)], ids=str)
def test_keys_of_all_pieces_are_one_copy_whose_gradients_are_summed_in_float32(dtype, atol):
    """As the pieces joined one by one; in bfloat16 the sum of each token's gradients, rounded
    once."""
    g, T, K = (
        torch.Generator().manual_seed(0),
        sum(SHARED.lengths),
        sum(SHARED.lengths) + 3 * 7 + 12,
    )
    k, v = (torch.randn(T, 2, 8, generator=g).to(dtype).requires_grad_() for _ in range(2))
    with torch.no_grad():
        wanted = [torch.cat([x[places] for places in unshared(SHARED)]) for x in (k, v)]
    got = KeysOfPieces.apply(k, v, *SHARED.key_indices)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)) and len(got[0]) == K
    pushed = [torch.randn(K, 2, 8, generator=g).to(dtype) for _ in range(2)]
    torch.autograd.backward(got, pushed)
    for x, grad in zip((k, v), pushed, strict=True):
        sums = torch.zeros(T, 2, 8, dtype=torch.float64).index_add_(
            0, torch.cat(unshared(SHARED)), grad.double()
        )
        torch.testing.assert_close(x.grad, sums.to(dtype), atol=atol, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parents", [SHARED.parents, []])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 5, 1000])
def test_packed_attention_in_bf16_on_a_gpu(kv_heads, window, parents):
    g = torch.Generator().manual_seed(0)
    T = sum(SHARED.lengths)
    x = [
        torch.randn(1, h, T, 64, generator=g).bfloat16().requires_grad_()
        for h in (4, kv_heads, kv_heads)
    ]
    y = [t.detach().cuda().requires_grad_() for t in x]
    there, here = (Packing(SHARED.lengths, parents, device) for device in ("cpu", "cuda"))
    want, _ = packed_attention(
        None, *(t.double() for t in x), None, packing=there, sliding_window=window
    )
    got, _ = packed_attention(None, *y, None, packing=here, sliding_window=window)
    torch.testing.assert_close(got.cpu().double(), want, atol=0.02, rtol=0.02)
    want.square().sum().backward()
    got.float().square().sum().backward()
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(b.grad.cpu().float(), a.grad.float(), atol=0.2, rtol=0.05)


@pytest.mark.parametrize(
    "tied, published, computed, written",
    [
        (True, "bfloat16", "bfloat16", "bfloat16"),
        (True, "float32", "bfloat16", "float32"),
        (False, "bfloat16", "float32", "float32"),
    ],
)
def test_an_exported_policy_is_the_policy_in_the_digits_of_the_model_and_of_its_training(
    tiny_path, tmp_path, tied, published, computed, written
):
    path = str(WORLD / "policy") if tied else tiny_path
    model, tokenizer = load_policy(path)
    config = load_config(path)
    config.dtype = getattr(torch, published)
    skeleton(config, torch.float32)  # as FSDP2 and export.py make one first
    skeleton(config, torch.bfloat16)
    assert config.dtype == getattr(torch, published)
    export(config, model, tokenizer, tmp_path / "p", getattr(torch, computed))
    # in the dtype that config.json names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "p")
    assert {p.dtype for p in again.parameters()} == {getattr(torch, written)}
    for (name, p), (other, q) in zip(
        again.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p, q.to(p.dtype))
    assert (
        load_tokenizer(str(tmp_path / "p"))("<search>x")["input_ids"]
        == tokenizer("<search>x")["input_ids"]
    )


def test_an_empty_model_filled_computes_as_its_source(path):
    model = load_model(path)
    copy = fill(empty(load_config(path), torch.float32, "cpu"), model)
    ids = torch.arange(5, 40)[None]
    assert torch.equal(copy(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    for each in (model, copy):
        tied = each.get_output_embeddings().weight is each.get_input_embeddings().weight
        assert tied == model.config.tie_word_embeddings


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
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "Mistral": {"sliding_window": 8},  # shorter than the sequences
    "Gemma3Text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4Text": PER_LAYER,
    "Starcoder2": {"sliding_window": 8, "residual_dropout": 0.3},
    # dropout, as the published ones have
    "GPT2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "Mixtral": EXPERTS | {"router_jitter_noise": 0.5},
    "JetMoe": EXPERTS | {"kv_channels": 32},  # views what attention returns
    "DeepseekV3": MLA | EXPERTS,
    "HrmText": {},  # asks the cache whether it is empty
}
LOGITS, HIDDEN = (
    "its logits are not its hidden states times",
    "packed sequences change its hidden states",
)
REFUSED = {  # family -> settings, what the line says
    "Granite": ({"logits_scaling": 8.0}, LOGITS),
    "Cohere": ({"logit_scale": 0.0625}, LOGITS),
    "Gemma2": ({}, LOGITS),
    "NanoChat": ({}, LOGITS),
    "Phi": ({}, LOGITS),  # a bias
    "GptOss": (EXPERTS, HIDDEN),  # attention sinks
    "Bloom": ({"n_head": 2}, HIDDEN),  # positions as biases of the attention
    "Llama4Text": (EXPERTS, "no forward pass that can be packed"),
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


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_supported_family_is_scored_and_sampled_with_its_own_logits(family, tiny_path, tmp_path):
    path = make_family(family, SUPPORTED[family], tiny_path, tmp_path / family)
    model, tokenizer = load_model(path), load_tokenizer(path)
    own = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )

    rows = [
        torch.randint(5, 600, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
    ]
    where = torch.tensor(
        [i for i in range(sum(LENGTHS)) if i + 1 not in torch.tensor(LENGTHS).cumsum(0)]
    )
    ids = torch.cat(rows)
    want = torch.cat([own_logps(own, row, 0.7).gather(1, row[1:, None])[:, 0] for row in rows])
    for mode in (True, False):  # in training the policy is the one that sampled
        logp, _ = forward_packed(
            model.train(mode), ids, Packing(LENGTHS), where, ids[where + 1], 0.7
        )
        torch.testing.assert_close(logp.double(), want, atol=1e-4, rtol=0)
    assert want.std() > 0.2  # not all alike

    weights = dict(adv=torch.ones(len(where)), token_weight=torch.ones(len(where)))
    _, extras = forward_packed(model, ids, Packing(LENGTHS), where, ids[where + 1], 0.7, **weights)
    torch.testing.assert_close(extras["logp"].double(), want, atol=1e-4, rtol=0)

    export(load_config(path), model, tokenizer, tmp_path / "exported", torch.float32)
    again = load_model(str(tmp_path / "exported")).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())

    engine, context = TorchEngine(model, tokenizer, STOP), rows[2].tolist()
    for _, sampled, logps, _ in engine.generate(dict.fromkeys(range(4), context), 8, 0.7):
        turn = own_logps(own, torch.tensor(context + sampled), 0.7)[len(context) - 1 :]
        want = turn.gather(1, torch.tensor(sampled)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps).double(), want, atol=1e-4, rtol=0)


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
    tensors = load_file(file := path / "model.safetensors")
    save_file({name: edit(name, w) for name, w in tensors.items()}, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
MISTAKES = {  # what is brought -> what is done to a model, and what the line says
    "a clone without git lfs": (
        lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "no causal LM can be loaded"),
    "half a file": (
        lambda path: os.truncate(path / "model.safetensors", 50_000), "no causal LM can be loaded"),
    "a dtype that is none": (lambda path: edit_json(path / "config.json", dtype="fp16"), "no attribute 'fp16'"),
    "a setting of another type": (
        lambda path: edit_json(path / "config.json", max_position_embeddings=9.5), "expected int, got float"),
    "a last norm of zeros": (
        lambda path: edit_weights(path, lambda name, w: w * (name != "model.norm.weight")), LOGITS),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_with_a_mistake_is_refused_by_whatever_loads_it_first(
    mistake, tiny_path, tmp_path
):
    path = shutil.copytree(tiny_path, tmp_path / "model")
    change, says = MISTAKES[mistake]
    change(path)
    try:
        load_tokenizer(str(path))
        load_model(str(path))
    except Fault as fault:
        assert says in str(fault) and "\n" not in str(fault)
    else:
        pytest.fail("it loads")


@pytest.mark.parametrize("settings", [
    {"output_hidden_states": True}, {"use_cache": False},
    {"do_sample": False, "temperature": 0.1},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
])  # fmt: skip
def test_settings_that_change_no_policy_are_loaded_sampled_and_exported(
    settings, tiny_path, tmp_path
):
    path = shutil.copytree(tiny_path, tmp_path / "model")
    edit_json(path / "config.json", **settings)
    model, tokenizer = load_policy(str(path))
    assert list(TorchEngine(model, tokenizer, STOP).generate({0: [5, 6]}, 3, 1.0))
    export(load_config(str(path)), model, tokenizer, tmp_path / "exported", torch.float32)
    load_model(str(tmp_path / "exported"))


@pytest.mark.parametrize("family, settings", [
    ("Qwen2", {"max_position_embeddings": 64}), ("GPT2", {"n_positions": 64}),
    ("Gemma3", {"text_config": {"max_position_embeddings": 64}}),
])  # fmt: skip
def test_a_policy_ends_where_its_positions_do(family, settings, tmp_path):
    getattr(transformers, f"{family}Config")(**settings).save_pretrained(tmp_path)
    load_config(str(tmp_path), 64)
    assert "it ends at 64 tokens" in refused(load_config, str(tmp_path), 65)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma3Text"])
def test_a_narrow_copy_has_the_buffers_of_transformers_model_in_bfloat16(
    family, tiny_path, tmp_path
):
    path = make_family(family, SUPPORTED[family], tiny_path, tmp_path / family)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    narrow = fill(empty(load_config(path), torch.bfloat16, "cpu"), load_model(path))
    for (name, want), (other, got) in zip(own.named_buffers(), narrow.named_buffers(), strict=True):
        assert name == other and got.dtype == want.dtype
        assert torch.equal(got, want), name
    assert narrow.dtype == torch.bfloat16


QUANTIZED = {
    "bitsandbytes": {"load_in_4bit": True},
    "fp8": {},
    "awq": {"bits": 4},
    "gptq": {"bits": 4},
    "mxfp4": {},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_refused_whatever_is_installed_to_read_them(
    method, tiny_path, tmp_path
):
    path = shutil.copytree(tiny_path, tmp_path / method)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | QUANTIZED[method]
    (path / "config.json").write_text(json.dumps(config))
    assert "its weights are quantized" in refused(load_model, str(path))


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text"])
def test_the_probe_leaves_the_model_alone(family, tiny_path, tmp_path):
    model = load_model(make_family(family, SUPPORTED[family], tiny_path, tmp_path / family))
    assert {part.sliding_window for part in model.modules() if hasattr(part, "sliding_window")} <= {
        8,
        None,
    }
    assert model.config.sliding_window == 8 and not model.training
    assert model.config._attn_implementation == "packed" and not model.base_model._forward_hooks
    assert all(p.grad is None for p in model.parameters())


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


TEKKEN = {  # Mistral's format: a vocabulary of one byte
    "config": {
        "pattern": ".",
        "num_vocab_tokens": 1,
        "default_vocab_size": 9,
        "default_num_special_tokens": 8,
        "version": "v3",
    },
    "vocab": [{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}],
}


@pytest.mark.skipif(bool(find_spec("mistral_common")), reason="it is installed")
def test_a_tokenizer_that_needs_a_package_names_it(tmp_path):
    transformers.MistralConfig(vocab_size=300, num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(TEKKEN))
    assert "requires the mistral-common library" in refused(load_tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    "template, reason",
    [
        (None, "no chat template"),
        (
            "{{ raise_exception('Only system\nprompts!') }}",
            "its chat template fails (TemplateError: Only system)",
        ),
        (
            "{{ raise_exception('\nOnly system') }}",
            "its chat template fails (TemplateError: Only system)",
        ),
        ("{{ messages[0]['text'].strip() }}", "its chat template fails (UndefinedError: "),
    ],
)
def test_a_chat_template_that_cannot_ask_a_question(tiny_path, tmp_path, template, reason):
    assert reason in refused(load_tokenizer, changed(tiny_path, tmp_path, template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'].split('</think>')[-1] }}",  # thoughts
        "{{ messages[0]['content'] | striptags }}",
        "{{ messages[0]['content'] | e }}",
        "{{ messages[0]['content'][:30] }}",
    ],
)
def test_a_chat_template_that_changes_a_question(tiny_path, tmp_path, template):
    tokenizer = load_tokenizer(changed(tiny_path, tmp_path, template))
    message = {"role": "user", "content": "Write <think> a </think>. Question: which is it?"}
    assert "drops or changes part of the user's" in refused(apply_template, tokenizer, [message])


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


def test_a_chat_template_that_fails_on_some_message_is_named(tiny_path, tmp_path):
    odd = "{% if 'ß' in messages[0]['content'] %}{{ messages[0]['x']['y'] }}{% endif %}{{ messages[0]['content'] }}"
    tokenizer = load_tokenizer(changed(tiny_path, tmp_path, odd))
    message, system = (
        {"role": "user", "content": "Who?"},
        {"role": "system", "content": "Be brief."},
    )
    assert apply_template(tokenizer, [message]) == "Who?"
    assert "of the user's" in refused(apply_template, tokenizer, [system, message])
    line = refused(apply_template, tokenizer, [message | {"content": "Question: who wrote Fuß?\n"}])
    assert "fails (UndefinedError" in line
