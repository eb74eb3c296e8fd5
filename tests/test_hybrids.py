"""Models whose layers are not all attention, with random weights: trained one trajectory a row, as
Hugging Face computes them."""

import copy
import pickle

import pytest
import torch
from test_grpo import batch_of, eq2, logprobs, settings_of
from test_inspo import metrics, run_here
from test_model import EXPERTS, make_family, own_logps
from test_ranks import CFG, alone, same, together
from tiny_model import STOP
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from config import WORLD
from engines.torch_engine import TorchEngine
from grpo import Learner, minibatches
from models import lora
from models.model import adapted_layers, is_adapter, load_model, load_tokenizer, weights
from plumbing.faults import Fault

DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
ROUTED = EXPERTS | dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2)
FAMILIES = {  # family -> settings
    "Qwen3_5Text": DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3Next": DELTA | ROUTED | {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
    },
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 128},  # both in each layer
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(x, marks=[] if x in ("Qwen3_5Text", "Lfm2") else pytest.mark.slow)
        for x in FAMILIES
    ],
)
def family(request, tiny_path, tmp_path_factory):
    """Returns the path of a random policy, and Hugging Face's own model of it."""
    name = request.param
    path = make_family(name, FAMILIES[name], tiny_path, tmp_path_factory.mktemp("models") / name)
    own = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return path, own


def made_up(groups):
    """Returns groups of three random trajectories with one prompt each."""
    taus = batch_of(groups)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
    return taus


def adapted(path):
    """Returns a policy with adapters that change what it computes."""
    model, g = lora.add(load_model(path), 4, 8), torch.Generator().manual_seed(1)
    for layer in adapted_layers(model).values():
        layer.lora_B.data = 0.05 * torch.randn(layer.lora_B.shape, generator=g)
    return model


@pytest.mark.parametrize("way", ["plain", "recomputed", "lora"])
def test_an_update_is_eq_2_with_its_own_logits(family, way):
    path, own = family
    model = adapted(path) if way == "lora" else load_model(path)
    assert model.row_kind == "single"
    if way == "lora":
        own = copy.deepcopy(own)
        own.load_state_dict(dict(weights(model)), strict=False)
    if way == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rank = 4 if way == "lora" else 0
    cfg = settings_of(beta=0.0, temperature=0.7, mini_batch=6, lora_rank=rank, lora_alpha=8)
    learner, taus = Learner(model, None, cfg), made_up(2)

    want = torch.cat([logprobs(own, tau, 0.7) for tau in taus])
    assert want.std() > 0.5
    torch.testing.assert_close(
        torch.from_numpy(learner.score_tokens(taus)[0]).float(), want, atol=1e-5, rtol=1e-5
    )

    # one denominator: the mean over six trajectories, each in a micro-batch of its own
    loss, *_ = eq2(own, None, taus, None, 0.7, 0.0)
    names = [name for name, _ in own.named_parameters()]
    dW = dict(zip(names, torch.autograd.grad(loss, list(own.parameters())), strict=True))
    sums = learner.backward(taus, None)
    assert sums["loss"] == pytest.approx(loss.item(), abs=1e-5)
    layers, found = adapted_layers(model), {}
    for name, p in model.named_parameters():
        if not is_adapter(name):
            found[name] = p.grad, dW[name]
    if way == "lora":
        found.clear()
        for name, layer in layers.items():
            A, B, scale = layer.lora_A, layer.lora_B, layer.scale
            found[f"{name} A"] = A.grad, scale * B.T @ dW[name]
            found[f"{name} B"] = B.grad, scale * dW[name] @ A.T
    assert len(found) > 10
    for name, (got, wanted) in found.items():
        off = (got - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert off < 1e-5, (name, off)


def test_a_turn_is_sampled_as_a_pass_over_its_whole_context_has_it(family):
    path, own = family
    tokenizer = load_tokenizer(path)
    engine, g = TorchEngine(load_model(path), tokenizer, STOP), torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 600, (n,), generator=g).tolist() for n in (3, 70, 70)]
    contexts = {row: prompts[row // 2] for row in range(6)}
    for temperature in (0.7, 0.0):  # a turn each
        for row, sampled, logps, _ in [*engine.generate(contexts, 8, temperature)]:
            ids = contexts[row] + sampled
            turn = own_logps(own, torch.tensor(ids), temperature or 1.0)[-len(sampled) :]
            want = turn.gather(1, torch.tensor(sampled)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logps).double(), want, atol=2e-5, rtol=2e-5)
            assert temperature or torch.equal(turn.max(1).values, want)
            contexts[row] = ids + [7, 8, 9][row % 2 :]
    engine.reset(0)
    again = [*engine.generate(contexts, 8, 0.7)]
    engine.reset(0)
    assert [*engine.generate(contexts, 8, 0.7)] == again


def test_a_cache_that_the_torch_engine_cannot_keep_is_refused(tiny_path, tmp_path):
    path = make_family("Mamba2", {"num_heads": 8, "head_dim": 16}, tiny_path, tmp_path / "m")
    model = load_model(path)
    assert model.row_kind == "single"
    engine = TorchEngine(model, load_tokenizer(path), STOP)
    with pytest.raises(
        Fault, match="^--engine torch: mamba2 leaves no states in its cache; take vllm$"
    ):
        [*engine.generate({0: [5, 6]}, 8, 0.0)]


def mark(monkeypatch, taken=torch.float32):
    """Makes Qwen 3.5's torch fallbacks honour where sequences begin, as the kernels do, and take one
    dtype alone."""
    module = modeling_qwen3_5
    chunk, conv = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn

    def delta_rule(query, key, value, g, beta, cu_seqlens=None, **kwargs):
        assert query.dtype == taken
        if cu_seqlens is None:
            return chunk(query, key, value, g=g, beta=beta, **kwargs)
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (query, key, value, g, beta)), strict=True)
        outs = [chunk(q, k, v, g=d, beta=b, **kwargs)[0] for q, k, v, d, b in parts]
        return torch.cat(outs, 1), None

    def convolution(x, weight, bias=None, activation=None, seq_idx=None, **kwargs):
        if seq_idx is None:
            return conv(x, weight, bias, activation)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([conv(part, weight, bias, activation) for part in x.split(lengths, 2)], 2)

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", delta_rule)
    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)


def test_kernels_that_are_told_where_sequences_begin_get_packed_rows(
    tiny_path, tmp_path, monkeypatch
):
    settings = FAMILIES["Qwen3_5Text"]
    path = make_family("Qwen3_5Text", settings, tiny_path, tmp_path / "q")
    alone, conv = load_model(path), modeling_qwen3_5.causal_conv1d_fn

    def refuse(*args, seq_idx=None, **kwargs):
        """As transformers 5.20 does without the kernel."""
        if seq_idx is None:
            return conv(*args, **kwargs)
        raise ValueError

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", refuse)
    assert load_model(path).row_kind == "single"
    mark(monkeypatch)
    model = load_model(path)
    assert (alone.row_kind, model.row_kind) == ("single", "whole")
    cfg, taus = settings_of(beta=0.0, mini_batch=6, micro_tokens=150), made_up(2)
    packed = [len(batch) for batch, _ in Learner(model, None, cfg).take_share(taus)]
    assert max(packed) > 1
    for each in alone, model:
        Learner(each, None, cfg).backward(taus, None)
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert (p.grad - q.grad).norm() / p.grad.norm().clamp(min=1e-3) < 1e-5, name


def test_kernels_that_take_no_float32_are_tried_on_the_card(tiny_path, tmp_path, monkeypatch):
    """The card is the CPU here."""
    path = make_family("Qwen3_5Text", FAMILIES["Qwen3_5Text"], tiny_path, tmp_path / "q")
    mark(monkeypatch, torch.bfloat16)
    with pytest.raises(Fault, match="no forward pass that can be trained"):
        load_model(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cast = lambda self, device, dtype: self.bfloat16()  # noqa: E731
    monkeypatch.setattr(modeling_qwen3_5.Qwen3_5ForCausalLM, "to", cast)
    model = load_model(path)
    assert (model.row_kind, model.dtype) == ("whole", torch.float32)
    assert model.config._attn_implementation == "packed" and not model.base_model._forward_hooks


@pytest.mark.ranks
def test_two_processes_compute_what_one_does_and_export_it(family, tmp_path):
    path, _ = family
    parts = minibatches(made_up(4), CFG)
    (tmp_path / "batches").write_bytes(pickle.dumps((CFG, parts)))
    job = f"{tmp_path / 'batches'} --recompute"
    metrics, trained = together(2, path, tmp_path, whole=job)["whole"]
    same(metrics, trained, alone(path, CFG, parts))
    again = load_model(str(tmp_path / "whole" / "policy")).state_dict()
    assert all(torch.equal(again[name], W) for name, W in trained.items())


@pytest.mark.slow
def test_a_run_trains_one_and_says_how(tiny_path, tmp_path):
    settings = FAMILIES["Qwen3_5Text"] | {"max_position_embeddings": 2048}
    path = make_family("Qwen3_5Text", settings, tiny_path, tmp_path / "q")
    data = [
        x
        for name in ("train", "valid", "test", "corpus")
        for x in (f"--{name}", WORLD / f"{name}.jsonl")
    ]
    few = "--mode static --T 2 --batch 1 --G 2 --eval_n 1".split()
    few += "--max_prompt 1500 --max_response 60 --max_observation 60".split()
    instruction = "--instruction", WORLD / "instruction.txt"
    code, out, err = run_here("--model", path, *data, *instruction, *few, "--out", tmp_path / "run")
    assert code == 0, err
    assert "one trajectory a row" in out
    rows = metrics(tmp_path / "run")
    assert [row["t"] for row in rows] == [0, 1, 2] and rows[1]["logp_gap"] < 1e-4
