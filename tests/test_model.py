"""The policy's own parts: packed attention against one sequence at a time, what cannot be trained, export."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from config import WORLD
from training.model import (
    blocks,
    empty,
    export,
    fill,
    load_config,
    load_model,
    load_tokenizer,
    packed_attention,
    score,
    weights,
)

LENGTHS = [7, 1, 30, 12, 30]


def plain_attention(q, k, v, scale, window):
    """Softmax attention of one sequence in float64, (heads, n, dim), every row written out."""
    heads, n, _ = q.shape
    out = torch.empty_like(q)
    for h in range(heads):
        kv = h * k.shape[0] // heads
        for i in range(n):
            first = max(0, i - window + 1)
            weights = torch.softmax(k[kv, first : i + 1] @ q[h, i] * scale, 0)
            out[h, i] = weights @ v[kv, first : i + 1]
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 5, 30, 1000])
def test_packed_attention_keeps_to_its_sequence(kv_heads, window):
    g = torch.Generator().manual_seed(0)
    T = sum(LENGTHS)
    q, k, v = (torch.randn(1, h, T, 8, generator=g, dtype=torch.float64) for h in (4, kv_heads, kv_heads))
    got, _ = packed_attention(None, q, k, v, None, scaling=0.3, lengths=LENGTHS, sliding_window=window)
    assert got.shape == (1, T, 4, 8)
    start = 0
    for n in LENGTHS:
        q1, k1, v1 = (x[0, :, start : start + n] for x in (q, k, v))
        want = plain_attention(q1, k1, v1, 0.3, window or T)
        torch.testing.assert_close(got[0, start : start + n].transpose(0, 1), want, atol=1e-12, rtol=0)
        start += n


def test_a_packed_batch_is_scored_as_its_sequences_are_alone(policy):
    model, _ = policy
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 600, (n,), generator=g) for n in LENGTHS]
    ids, ends = torch.cat(rows), torch.tensor(LENGTHS).cumsum(0)
    where = torch.tensor([i for i in range(len(ids)) if i + 1 not in ends])  # predicts the next of its sequence
    logp, _ = score(model, ids, LENGTHS, where, ids[where + 1], 0.8)
    want = []
    for row in rows:
        alone = torch.log_softmax(model(row[None], use_cache=False).logits[0].double() / 0.8, -1)
        want.append(alone[:-1].gather(1, row[1:, None])[:, 0])
    torch.testing.assert_close(logp.double(), torch.cat(want).detach(), atol=2e-5, rtol=0)


def test_there_is_a_block_for_every_layer(policy):
    model, _ = policy
    assert len(blocks(model)) == model.config.num_hidden_layers
    model_of_nobody = torch.nn.Module()
    model_of_nobody._no_split_modules = None
    model_of_nobody.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    assert blocks(model_of_nobody) == list(model_of_nobody.layers)


def test_an_exported_policy_is_the_policy(policy, tiny_path, tmp_path):
    model, tokenizer = policy
    path = tiny_path if model.config.hidden_size == 64 else WORLD / "policy"
    export(load_config(str(path)), weights(model), tokenizer, tmp_path / "p")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "p", dtype=torch.float32)
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert load_tokenizer(str(tmp_path / "p"))("<search>x")["input_ids"] == tokenizer("<search>x")["input_ids"]


def test_an_empty_model_filled_computes_as_its_source(policy, tiny_path):
    model, _ = policy
    path = tiny_path if model.config.hidden_size == 64 else str(WORLD / "policy")
    copy = fill(empty(load_config(path), torch.float32, "cpu"), load_model(path))
    ids = torch.arange(5, 40)[None]
    assert torch.equal(copy(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (copy.get_output_embeddings().weight is copy.get_input_embeddings().weight)


# ---- what cannot be trained is one line


@pytest.fixture
def changed(tiny_path, tmp_path):
    """A copy of the tiny policy with other entries in one of its JSON files; None removes one."""

    def make(name, **entries):
        path = shutil.copytree(tiny_path, tmp_path / "changed", dirs_exist_ok=True)
        if name == "chat_template.jinja":
            (path / name).unlink()
            return str(path)
        found = json.loads((path / name).read_text()) | entries
        (path / name).write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
        return str(path)

    return make


def refused(what, path):
    with pytest.raises(SystemExit) as stop:
        what(path)
    assert "\n" not in stop.value.code and path in stop.value.code
    return stop.value.code


def test_a_path_that_holds_no_model(tmp_path):
    assert "no causal LM" in refused(load_config, str(tmp_path))
    assert "no tokenizer" in refused(load_tokenizer, str(tmp_path))
    assert "no causal LM" in refused(load_model, str(tmp_path))


def test_a_model_without_a_chat_template(changed):
    assert "no chat template" in refused(load_tokenizer, changed("chat_template.jinja"))


def test_a_tokenizer_that_cannot_write_the_stop_strings(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "x": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template="{{ messages }}")
    tokenizer.save_pretrained(tmp_path)
    assert "cannot write </search>" in refused(load_tokenizer, str(tmp_path))


def test_a_model_whose_logits_are_capped(changed):
    assert "soft-capped" in refused(load_model, changed("config.json", final_logit_softcapping=30.0))
