"""Several processes (torchrun, gloo, FSDP2) against one: equal updates, checkpoints for any number;
test_ranks_runs.py has whole runs."""

import copy
import json
import pickle
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from test_grpo import batch_of
from test_inspo import ENV, ROOT, finish, popen
from transformers import AutoModelForCausalLM

from config import WORLD, Config
from grpo import Learner, minibatches
from models.model import load_model

pytestmark = pytest.mark.ranks
ENV = ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CFG = Config(
    lr=1e-3,
    T=10,
    warmup=0.2,
    beta=0.1,
    temperature=0.9,
    micro_tokens=300,
    G=3,
    mini_batch=19,
    engine="torch",
)
LIMIT = 600  # seconds; enough on cores that are shared with others, and less than --patience


def torchrun(n: int, *argv: object) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={n}",
        *map(str, argv),
    ]
    return popen(command, ENV)


# ---- one update


@pytest.fixture(scope="module", params=[pytest.param("world", marks=pytest.mark.slow), "tiny"])
def path(request, tiny_path):
    """The directory of a policy whose embeddings are tied, as whole runs have it, too, and of one
    whose are not."""
    return str(WORLD / "policy") if request.param == "world" else tiny_path


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Returns a file of seven groups of three, in mini-batches of 19 trajectories, which ranks
    cannot share evenly, and of 2, fewer than there may be ranks."""
    taus = batch_of(7, seed=3)
    for tau in taus:
        tau.ids = [i % 600 for i in tau.ids]
        tau.advantage *= 3
    path = tmp_path_factory.mktemp("batches") / "b.pkl"
    path.write_bytes(pickle.dumps((CFG, minibatches(taus, CFG))))
    return path


# metrics of each update; weights by name, after the last update and before the first
Update = namedtuple("Update", "metrics weights first")


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alone(path, cfg, parts, updates=2):
    """Returns what one process computes, the model whole."""
    model = load_model(path)
    first, learner = weights_of(model), Learner(model, copy.deepcopy(model), cfg)
    return Update(
        [learner.update(t, parts) for t in range(1, updates + 1)], weights_of(model), first
    )


@pytest.fixture(scope="module")
def one(path, batches):
    return alone(path, *pickle.loads(batches.read_bytes()))


def together(n, path, out, program=("tests/ranks_learner.py",), **jobs):
    """Returns (metrics, weights) of each job of tests/ranks_learner.py, by its name, which n processes
    compute, each with its share of the model; OUT/NAME is the folder of a job."""
    for name in jobs:
        (out / name).mkdir(parents=True)
    words = [f"{job} --out {out / name}" for name, job in jobs.items()]
    code, _, stderr = finish(torchrun(n, *program, path, *words), LIMIT)
    assert code == 0, stderr
    found = {name: torch.load(out / name / "result.pt") for name in jobs}
    return {name: (x["metrics"], x["weights"]) for name, x in found.items()}


@pytest.fixture(scope="module")
def variants(batches, tmp_path_factory):
    """Files of the same mini-batches: a NaN in the first; a sequence a pass, because a shared prompt
    is rounded otherwise than each one's own, and other numbers of ranks cut other passes."""
    cfg, parts = pickle.loads(batches.read_bytes())
    folder = tmp_path_factory.mktemp("variants")
    (folder / "alone").write_bytes(pickle.dumps((replace(cfg, micro_tokens=1), parts)))
    parts[0][3].advantage = float("nan")
    (folder / "nan").write_bytes(pickle.dumps((cfg, parts)))
    return folder


@pytest.fixture(scope="module")
def results(path, batches, variants, tmp_path_factory):
    """What one, two and four processes compute, by their number: a start of torchrun each, which
    takes longer than all that it computes."""
    out = tmp_path_factory.mktemp("ranks")
    bf16 = f"{variants / 'alone'} --bf16"
    load = f"{batches} --load {out / '2' / 'plain' / 'dcp'}"
    two = {flag: f"{batches} --{flag}" for flag in ("recompute", "gather")}
    two |= {"plain": batches, "bf16": bf16, "nan": variants / "nan"}
    jobs = {2: two, 1: {"bf16": bf16, "load": load}, 4: {"plain": batches, "load": load}}
    return {n: together(n, path, out / str(n), **named) for n, named in jobs.items()}


def same(found, weights, one, close=5e-5):
    """Asserts that several processes computed what one did, in float32.

    The metrics agree to `close` of their size (2.5e-5 was seen). The weights agree to 1e-5, after
    two steps that move them by up to 1e-3 each, but for one in a thousand: where a gradient is
    almost 0, Adam divides rounding by rounding (3e-5 was seen).
    """
    for mine, theirs in zip(found, one.metrics[-len(found) :], strict=True):
        assert mine == pytest.approx(theirs, rel=close, abs=1e-6)
    assert set(weights) == set(one.weights)
    off = torch.cat([(w - one.weights[name]).abs().flatten() for name, w in weights.items()])
    assert (off > 1e-5).float().mean() < 1e-3 and off.max() < 2e-4, (off > 1e-5).sum()
    assert max((w - one.first[name]).abs().max().item() for name, w in weights.items()) > 1e-3


def test_several_processes_compute_what_one_does(results, one):
    first, second = one.metrics
    assert first["grad_norm"] > 0.5 and second["clip_fraction"] > 0 and second["kl"] > 1e-3
    for n in (2, 4):
        same(*results[n]["plain"], one)


@pytest.mark.parametrize("flag", ["recompute", "gather"])
def test_recomputing_and_gathering_change_nothing(results, one, flag):
    same(*results[2][flag], one)


def test_all_processes_skip_a_step_of_which_one_has_a_nan(path, variants, results):
    found, weights = results[2]["nan"]
    assert [row["skipped_updates"] for row in found] == [1, 1]
    same(found, weights, alone(path, *pickle.loads((variants / "nan").read_bytes())))


def test_in_bf16_two_agree_with_one_within_its_rounding(results, one):
    """In the first update, and not its KL: Adam's first steps magnify rounding."""
    (mine, _), _ = results[2]["bf16"]
    (theirs, _), _ = results[1]["bf16"]
    # Rounding moves tokens over the clip; CPUs round their products otherwise; a loss was off by
    # 0.16.
    for name, coarse in {"loss": 0.25, "entropy": 0.1, "grad_norm": 0.25}.items():
        assert mine[name] == pytest.approx(theirs[name], rel=0.02, abs=1e-3), name
        assert mine[name] == pytest.approx(one.metrics[0][name], rel=coarse, abs=2e-3), name
    assert mine["grad_norm"] != pytest.approx(one.metrics[0]["grad_norm"], rel=1e-6)  # it was bf16


@pytest.mark.parametrize("n", [1, 4])
def test_a_checkpoint_of_two_is_loaded_by_any_number(results, one, n):
    found, weights = results[n]["load"]
    assert len(found) == 1
    same(found, weights, one)


def exchanged(parts):
    """Returns the mini-batches with the advantages of two trajectories exchanged, in the same
    group."""
    parts = copy.deepcopy(parts)
    a, b = parts[0][:2]
    a.advantage, b.advantage = b.advantage, a.advantage
    return parts


def test_policy_update_gives_every_trajectory_its_advantage_on_every_rank(path, batches, tmp_path):
    """The way of a run: rank 0 broadcasts the trajectories, and each worker takes its share of
    them."""
    cfg, parts = pickle.loads(batches.read_bytes())
    cfg = replace(cfg, model=path, max_prompt=480, max_response=48)
    learner = Learner(load_model(path), None, replace(cfg, beta=0.0))
    # an engine that agrees with the trainer, or the workers refuse the update
    for tau in (taus := sum(parts, [])):
        logps = iter(learner.score_tokens([tau])[0].tolist())
        tau.logps = [next(logps) if sampled else 0.0 for sampled in tau.mask]
    (tmp_path / "taus.pkl").write_bytes(pickle.dumps((cfg, taus)))
    code, _, stderr = finish(
        torchrun(3, "tests/ranks_policy.py", tmp_path / "taus.pkl", tmp_path), LIMIT
    )
    assert code == 0, stderr
    assert (tmp_path / "full").read_text() == "File too large"
    found = [json.loads((tmp_path / "metrics.json").read_text())]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    want = alone(path, cfg, parts, updates=1)
    same(found, weights_of(model), want)
    with pytest.raises(AssertionError):
        same(found, weights_of(model), alone(path, cfg, exchanged(parts), updates=1))
