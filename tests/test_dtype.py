"""A policy that is computed in bfloat16 on a CPU: weights stay float32, engine and trainer agree, a
run resumes."""

import gc
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_grpo import batch_of

import inspo
from config import WORLD, Config, parse_flags
from engines import choose
from engines.choose import dtype_of
from engines.torch_engine import TorchEngine
from evaluate import open_engine
from models import model as models
from models.model import empty, fill, load_config, load_policy, weights
from plumbing.files import read_jsonl
from plumbing.servers import Child
from tasks.task import load_task
from training.policy import Policy, choose_dither_seed, load_first_policy
from training.ranks import Ranks

SMALL = "--mode static --dtype bfloat16 --T 2 --batch 2 --G 2 --eval_n 2 --save_every 1 --keep 9 --seed 6"


def steps(run) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The search server of all runs."""
    command = ["-m", "retrieval_server", "--corpus", str(WORLD / "corpus.jsonl")]
    with Child(command, tmp_path_factory.mktemp("server") / "log") as child:
        yield child.url


@pytest.fixture(scope="module", params=["", "--lora_rank 8"])
def flags(request, server):
    return [*SMALL.split(), *request.param.split(), "--retriever", server]


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
def test_small_updates_are_kept_in_float32(run, tmp_path):
    first = load_file(parse_flags([]).model + "/model.safetensors")
    saved = {}
    for file in (run / "checkpoints" / "step-000002").glob("*.safetensors"):
        saved |= load_file(file)
    last = {name: saved[f"model.{name}"] for name in first}
    assert {w.dtype for w in last.values()} == {torch.float32}
    moved = {name: (last[name] - w.float()).abs() for name, w in first.items()}
    # Half a unit in the last place of bfloat16, at least: bfloat16 weights would not have taken a
    # smaller change.
    lost = {name: (d > 0) & (d < first[name].float().abs() * 2**-9) for name, d in moved.items()}
    assert (
        sum(int(x.sum()) for x in lost.values())
        > 0.1 * sum(int((d > 0).sum()) for d in moved.values())
        > 1000
    )


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
    layer.weight.data[3] = torch.linspace(0.01, 0.02, 512).half()  # an eighth on the grid
    before = layer.weight.detach().clone()
    after = dither(layer, 3).weight.detach()
    assert torch.equal(after.bfloat16(), before.bfloat16()) and torch.equal(after[:2], before[:2])
    moved = after[3] != before[3]
    assert torch.equal(moved, before[3] == before[3].bfloat16().float()) and 32 < moved.sum() < 128
    spacing = 2.0 ** (before[4:].abs().log2().floor() - 7)
    place = (after[4:] - before[4:]) / spacing  # evenly from -1/2 to 1/2
    assert (place.abs() <= 0.5).all() and place.mean().abs() < 0.004
    assert (place * before[4:].sign()).mean().abs() < 0.004  # neither towards 0 nor away from it
    assert place.square().mean() == pytest.approx(1 / 12, rel=0.02)
    assert torch.equal(dither(on_the_grid(8, 8), 3).weight, dither(on_the_grid(8, 8), 3).weight)
    assert not torch.equal(dither(on_the_grid(8, 8), 3).weight, dither(on_the_grid(8, 8), 4).weight)


@pytest.mark.parametrize("knobs, dtype, seed", [
    ({}, "bfloat16", 5), ({}, "float32", None), ({"dither": 0}, "bfloat16", None), ({"lora_rank": 4}, "bfloat16", None),
])  # fmt: skip
def test_weights_in_training_are_dithered_in_bfloat16(knobs, dtype, seed):
    assert choose_dither_seed(Config(seed=5, **knobs), SimpleNamespace(dtype=dtype)) == seed


def test_of_a_small_step_all_arrives_on_average():
    step = 1e-6 * torch.randn(512, 512, generator=torch.Generator().manual_seed(2)).sign()

    def arrived(layer):
        before = layer.weight.detach().bfloat16().double()
        return ((layer.weight.detach() + step).bfloat16().double() - before).mul(
            step.sign()
        ).mean().item() / 1e-6

    assert arrived(on_the_grid(512, 512)) < 0.3
    assert arrived(dither(on_the_grid(512, 512), 3)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "path, rank, lr, batch",
    [("world", 0, 5e-6, 6), ("tiny", 0, 5e-6, 6), ("tiny", 32, 1e-4, 24)],
    indirect=["path"],
)
def test_an_update_in_bfloat16_moves_the_policy_as_one_in_float32_does(
    path, tmp_path, rank, lr, batch
):
    """From a policy that is published in bfloat16, at a learning rate below the spacing of its
    weights."""
    model, tokenizer = load_policy(path)
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    gained = {}
    for dtype in ("float32", "bfloat16"):
        cfg = Config(
            model=str(tmp_path),
            lr=lr,
            warmup=0.0,
            engine="torch",
            micro_tokens=10**6,
            batch=batch,
            mini_batch=3 * batch,
            G=4,
            lora_rank=rank,
        )
        policy = Policy(cfg, Ranks("cpu", 1, dtype), load_task(cfg))
        learner, taus = policy.learner, batch_of(batch, seed=3)
        learner.max_gap = float("inf")
        for tau in taus:
            tau.ids = [i % len(tokenizer) for i in tau.ids]
        A = torch.tensor([tau.advantage for tau in taus for m in tau.mask if m])
        before = learner.logprobs(taus)[0]
        policy.update(1, taus)
        gained[dtype] = float(A.numpy() @ (learner.logprobs(taus)[0] - before))
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


def test_a_forward_pass_leaves_the_weights_as_they_are_trained(tiny_path, monkeypatch):
    """FSDP keeps the root gathered after it, in bfloat16; and of the first policy nothing is
    kept."""
    first = weakref.WeakSet()

    def note(*args):
        first.add(model := load_first_policy(*args))
        return model

    monkeypatch.setattr("training.policy.load_first_policy", note)
    cfg = Config(model=str(tiny_path), engine="torch")
    gc.disable()
    try:
        policy = Policy(cfg, Ranks("cpu", 1, "bfloat16"), load_task(cfg))
        assert not first
    finally:
        gc.enable()
    before = {name: w.clone() for name, w in weights(policy.learner.model)}
    taus = batch_of(2)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
    policy.learner.logprobs(taus)
    after = dict(weights(policy.learner.model))
    policy.close()
    assert {w.dtype for w in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], w) for name, w in before.items())


def test_a_bfloat16_engine_samples_with_float32_logits(path):
    model, tokenizer = load_policy(path)
    half = fill(empty(load_config(path), torch.bfloat16, "cpu"), model)
    engine = TorchEngine(half, tokenizer, ("</answer>",))
    head, weight, errors = engine.head, half.get_output_embeddings().weight, []

    def watched(h):
        errors.append((head(h) - h.double() @ weight.double().T).abs().max().item())
        return head(h)

    engine.head = watched
    ids = tokenizer("Which lake is the deepest?", add_special_tokens=False)["input_ids"]
    list(engine.generate({0: ids}, 6, 1.0))
    # rounded to bfloat16: 1e-2 and more
    assert weight.dtype == torch.bfloat16 and errors and max(errors) < 1e-4


def test_new_weights_reach_the_head_of_a_bfloat16_engine(tiny_path):
    model, tokenizer = load_policy(tiny_path)
    half = fill(empty(load_config(tiny_path), torch.bfloat16, "cpu"), model)
    engine, h = (
        TorchEngine(half, tokenizer, ("</answer>",)),
        torch.ones(1, model.config.hidden_size).bfloat16(),
    )
    before = engine.head(h)
    engine.load((name, 2 * p.detach()) for name, p in model.named_parameters())
    assert torch.equal(engine.head(h), 2 * before)


SAPPHIRE, COOPER = (
    {"cpu_name": "Intel", "amx_bf16": amx, "avx512_bf16": True} for amx in (True, False)
)
GENOA, MILAN = (
    {"cpu_name": "AMD EPYC", "amx_bf16": False, "avx512_bf16": half} for half in (True, False)
)


@pytest.mark.parametrize("cpu, hidden, device, asked, dtype", [
    (SAPPHIRE, 576, "cpu", "", "bfloat16"), (SAPPHIRE, 128, "cpu", "", "float32"), (COOPER, 576, "cpu", "", "float32"),
    (GENOA, 576, "cpu", "", "bfloat16"), (GENOA, 128, "cpu", "", "float32"), (MILAN, 576, "cpu", "", "float32"),
    ({}, 576, "cpu", "", "float32"),
    (COOPER, 576, "cuda", "", "bfloat16"), (SAPPHIRE, 576, "cpu", "float32", "float32"),
    (COOPER, 128, "cpu", "bfloat16", "bfloat16"), (COOPER, 128, "cuda", "float32", "float32"),
    (COOPER, 576, "T4", "", "float32"), (COOPER, 576, "T4", "float32", "float32"), (COOPER, 576, "L4", "", "bfloat16"),
])  # fmt: skip
def test_bfloat16_is_chosen_where_it_is_faster(
    monkeypatch, tmp_path, cpu, hidden, device, asked, dtype
):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=hidden, num_attention_heads=8).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    capability = {"T4": (7, 5), "L4": (8, 9), "cuda": (9, 0)}.get(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    device = "cuda" if capability else "cpu"
    assert dtype_of(Config(model=str(tmp_path), dtype=asked), device) == dtype


def test_a_gpu_that_is_too_old_for_bfloat16_samples_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(choose, "vllm_version", lambda: "0.32.0")
    assert choose.choose_engine(Config(), "cuda") == "torch"


@pytest.mark.parametrize(
    "capability, dtype, computed",
    [
        ((9, 0), "", "bfloat16"),
        ((9, 0), "float32", "float32"),
        ((7, 5), "", "float32"),
        ((7, 5), "bfloat16", "float32"),
    ],
)
def test_an_evaluation_computes_in_what_the_card_and_the_run_have(
    monkeypatch, capability, dtype, computed
):
    moved, copied = [], []
    model = SimpleNamespace(
        to=moved.append, get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(3, 1))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("models.model.load_policy", lambda *_: (model, "abc"))
    monkeypatch.setattr("models.model.load_config", lambda *_: None)
    monkeypatch.setattr("models.model.empty", lambda _, dtype, device: copied.append(dtype))
    monkeypatch.setattr("models.model.fill", lambda copy, model: model)
    monkeypatch.setattr("engines.torch_engine.TorchEngine", lambda *_: None)
    cfg = Config(engine="torch", dtype=dtype)
    open_engine("path", cfg, ())
    assert moved == ["cuda"]
    # `load_policy` loads float32
    assert copied == ([torch.bfloat16] if computed == "bfloat16" else [])
