"""A policy that is computed in bfloat16 on a CPU: weights stay float32, engine and trainer agree, a
run resumes."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_lora import made_up, policy_of
from transformers import LlamaConfig

import inspo
from config import WORLD, Config
from engines import choose
from engines.choose import dtype_of
from engines.torch_engine import TorchEngine
from models import model as models
from models.model import empty, fill, load_config, load_model, load_tokenizer, weights
from plumbing.files import read_jsonl
from training.shards import choose_dither_seed

SMALL = "--mode static --dtype bfloat16 --T 2 --batch 2 --G 2 --eval_n 2 --save_every 1 --keep 9 --seed 6"


def steps(run) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


@pytest.fixture(scope="module", params=["", pytest.param("--lora_rank 8", marks=pytest.mark.slow)])
def flags(request, retriever):
    return [*SMALL.split(), *request.param.split(), "--retriever", retriever]


@pytest.fixture(scope="module")
def run(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("bf16") / "run"
    inspo.main([*flags, "--out", str(out)])
    return out


def test_engine_and_trainer_agree_within_bfloat16(run):
    gaps = [row["logp_gap"] for row in steps(run)[1:]]
    # float32 has 2e-7, one rounded logit 1e-2
    assert len(gaps) == 2 and all(1e-6 < gap < 5e-3 for gap in gaps)


@pytest.mark.parametrize("flags", [""], indirect=True)
def test_small_updates_are_kept_in_float32(run):
    first, saved = load_file(WORLD / "policy" / "model.safetensors"), {}
    for file in (run / "checkpoints" / "step-000002").glob("*.safetensors"):
        saved |= load_file(file)
    moved = lost = 0
    for name, w in first.items():
        last = saved[f"model.{name}"]
        d = (last - w.float()).abs()
        moved += int((d > 0).sum())
        # Half a unit in the last place of bfloat16, at least: bfloat16 weights would not have taken
        # a smaller change.
        lost += int(((d > 0) & (d < w.float().abs() * 2**-9)).sum())
        assert last.dtype == torch.float32
    assert lost > 0.1 * moved > 1000


def on_the_grid(*shape: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(*shape, bias=False)
    drawn = torch.randn(*shape[::-1], generator=torch.Generator().manual_seed(1)) * 0.02
    layer.weight.data = drawn.bfloat16().float()
    return layer


def dither(layer, seed):
    layer.weight.data = models.dither(layer.weight.data, torch.Generator().manual_seed(seed))
    return layer


def test_a_dithered_weight_rounds_to_what_it_was():
    layer = on_the_grid(512, 512)
    layer.weight.data[0] = 0.0
    layer.weight.data[1] = 0.1  # not on the grid
    layer.weight.data[2] = 2.0**-6  # below it the grid is twice as fine
    before = layer.weight.detach().clone()
    after = dither(layer, 3).weight.detach()
    assert torch.equal(after.bfloat16(), before.bfloat16()) and torch.equal(after[:2], before[:2])
    spacing = 2.0 ** (before[3:].abs().log2().floor() - 7)
    place = (after[3:] - before[3:]) / spacing  # evenly from -1/2 to 1/2
    assert (place.abs() <= 0.5).all() and place.mean().abs() < 0.004
    assert (place * before[3:].sign()).mean().abs() < 0.004  # neither towards 0 nor away from it
    assert place.square().mean() == pytest.approx(1 / 12, rel=0.02)
    small = [dither(on_the_grid(8, 8), seed).weight for seed in (3, 3, 4)]
    assert torch.equal(small[0], small[1]) and not torch.equal(small[1], small[2])


@pytest.mark.parametrize("knobs, dtype, seed", [
    ({}, "bfloat16", 5), ({}, "float32", None), ({"dither": 0}, "bfloat16", None), ({"lora_rank": 4}, "bfloat16", None),
])  # fmt: skip
def test_weights_in_training_are_dithered_in_bfloat16(knobs, dtype, seed):
    assert choose_dither_seed(Config(seed=5, **knobs), SimpleNamespace(dtype=dtype)) == seed


@pytest.mark.parametrize(
    "rank, lr, batch", [(0, 5e-6, 6), pytest.param(32, 1e-4, 24, marks=pytest.mark.slow)]
)
def test_an_update_in_bfloat16_moves_the_policy_as_one_in_float32_does(
    tiny_path, tmp_path, rank, lr, batch
):
    """From a policy that is published in bfloat16, at a learning rate below the spacing of its
    weights."""
    model, tokenizer = load_model(tiny_path), load_tokenizer(tiny_path)
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    knobs = dict(lr=lr, micro_tokens=10**6, batch=batch, mini_batch=3 * batch, G=4, beta=1e-3)
    gained = {}
    for dtype in ("float32", "bfloat16"):
        policy = policy_of(tmp_path, dtype, lora_rank=rank, **knobs)
        learner, taus = policy.learner, made_up(batch, seed=3)
        learner.max_gap = float("inf")
        A = torch.tensor([tau.advantage for tau in taus for m in tau.mask if m])
        before = learner.score_tokens(taus)[0]
        policy.update(1, taus)
        gained[dtype] = float(A.numpy() @ (learner.score_tokens(taus)[0] - before))
        policy.close()
    assert gained["float32"] > 0
    assert gained["bfloat16"] == pytest.approx(gained["float32"], rel=0.15 if rank else 0.3), gained


def test_a_run_in_bfloat16_resumes_to_the_bit(run, flags, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    for name in ("checkpoints/step-000002", "policy"):
        shutil.rmtree(out / name)
    (out / "summary.json").unlink()
    inspo.main([*flags, "--out", str(out), "--resume"])
    assert steps(out) == steps(run)
    name = "policy/model.safetensors"
    assert (out / name).read_bytes() == (run / name).read_bytes()


def test_a_forward_pass_leaves_the_weights_as_they_are_trained(tiny_path):
    """FSDP keeps the root gathered after it, in bfloat16."""
    policy = policy_of(tiny_path, "bfloat16")
    before = {name: w.clone() for name, w in weights(policy.learner.model)}
    policy.learner.score_tokens(made_up(2))
    after = dict(weights(policy.learner.model))
    policy.close()
    assert {w.dtype for w in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], w) for name, w in before.items())


@pytest.fixture
def half(tiny_path):
    """A bfloat16 engine, and the float32 model that it has its weights from."""
    model, tokenizer = load_model(tiny_path), load_tokenizer(tiny_path)
    narrow = fill(empty(load_config(tiny_path), torch.bfloat16, "cpu"), model)
    return TorchEngine(narrow, tokenizer, ("</answer>",)), model


def test_a_bfloat16_engine_has_float32_logits_of_the_newest_weights(half):
    engine, model = half
    h = torch.randn(9, model.config.hidden_size).bfloat16()
    before, weight = engine.head(h), engine.model.get_output_embeddings().weight
    # rounded to bfloat16: 1e-2 and more
    assert weight.dtype == torch.bfloat16
    assert (before - h.double() @ weight.double().T).abs().max() < 1e-4
    engine.load((name, 2 * p.detach()) for name, p in model.named_parameters())
    assert torch.equal(engine.head(h), 2 * before)


SAPPHIRE, COOPER = (
    {"cpu_name": "Intel", "amx_bf16": amx, "avx512_bf16": True} for amx in (True, False)
)
GENOA, MILAN = (
    {"cpu_name": "AMD EPYC", "amx_bf16": False, "avx512_bf16": half} for half in (True, False)
)


@pytest.mark.parametrize("cpu, hidden, capability, asked, dtype", [
    (SAPPHIRE, 576, None, "", "bfloat16"), (SAPPHIRE, 128, None, "", "float32"), (COOPER, 576, None, "", "float32"),
    (GENOA, 576, None, "", "bfloat16"), (MILAN, 576, None, "", "float32"), (SAPPHIRE, 576, None, "float32", "float32"),
    (COOPER, 576, (8, 9), "", "bfloat16"), (COOPER, 576, (8, 9), "float32", "float32"),
    (COOPER, 576, (7, 5), "", "float32"),
])  # fmt: skip
def test_bfloat16_is_chosen_where_it_is_faster(
    monkeypatch, tmp_path, cpu, hidden, capability, asked, dtype
):
    LlamaConfig(hidden_size=hidden, num_attention_heads=8).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    device = "cuda" if capability else "cpu"
    assert dtype_of(Config(model=str(tmp_path), dtype=asked), device) == dtype


def test_a_gpu_that_is_too_old_for_bfloat16_samples_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(choose, "vllm_version", lambda: "0.32.0")
    assert choose.choose_engine(Config(), "cuda") == "torch"
