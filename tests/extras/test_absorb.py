"""Absorbing an instruction: the gradient is that of the reverse KL; who is told already learns nothing."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_inspo import finish

from config import PRESETS
from extras.absorb import AbsorbConfig, AbsorbLearner
from models.model import load_policy
from rollout import prompt_ids
from tasks import Question, Trajectory, load_task

ROOT = Path(__file__).parents[2]
QUESTION = Question("q", "what is the country of the birthplace of the director of the film ?", ("x",))


@pytest.fixture(scope="module")
def learner(world, tmp_path_factory):
    teacher = tmp_path_factory.mktemp("absorb") / "teacher.txt"
    teacher.write_text("Search one entity at a time. Answer with the exact name only.")
    cfg = AbsorbConfig(**PRESETS["world"] | {"teacher": str(teacher), "mode": "absorb"})
    return AbsorbLearner(*(copy.deepcopy(world[0]).double() for _ in range(2)), replace(cfg, beta=1e-12))


def begun(tokenizer) -> list[int]:
    return tokenizer("<think> </think> <search>", add_special_tokens=False)["input_ids"]


def one_token(learner, tokenizer, first: str) -> list[Trajectory]:
    """A trajectory for every token that could be the first of a query."""
    ids = prompt_ids(tokenizer, load_task(learner.cfg), first, QUESTION)
    out = []
    for y in range(len(tokenizer)):
        tau = Trajectory(0, QUESTION, 0, [], 0)
        tau.observe(ids)
        tau.prompt_tokens = len(ids)
        tau.observe(begun(tokenizer))
        tau.act([y], [0.0])
        out.append(tau)
    return out


def test_the_expected_gradient_is_that_of_the_reverse_kl(learner, world):
    _, tokenizer = world
    model, first = learner.model, "Search the whole question once."
    part = one_token(learner, tokenizer, first)
    share = [list(range(len(part)))]
    terms = learner.terms(part, share, 0, None)
    pi = np.exp(learner.score(part, share)[0])
    assert pi.sum() == pytest.approx(1)
    # The mean over equally weighted tokens becomes the expectation over what the policy samples.
    loss, _ = learner.loss(part, terms | {"adv": terms["adv"] * pi * len(pi)})
    model.zero_grad()
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}

    task, told = load_task(learner.cfg), Path(learner.cfg.teacher).read_text()
    log_pi, log_teacher = (
        model(torch.tensor([prompt_ids(tokenizer, task, text, QUESTION) + begun(tokenizer)]))
        .logits[0, -1]
        .log_softmax(-1)
        for text in (first, told)
    )
    model.zero_grad()
    kl = (log_pi.exp() * (log_pi - log_teacher.detach())).sum()
    kl.backward()
    assert kl.item() > 0.01
    for name, p in model.named_parameters():
        scale = max(1e-9, float(p.grad.abs().max()))
        assert float((got[name] - p.grad).abs().max()) < 1e-6 * scale + 1e-12, name


def test_the_teacher_reads_the_same_tokens_behind_its_own_prompt(learner, world):
    _, tokenizer = world
    tau = one_token(learner, tokenizer, "Search the whole question once.")[7]
    tau.observe([5, 6])
    tau.act([8], [-1.0])
    told = learner.told(tau)
    assert told.ids[told.prompt_tokens :] == tau.ids[tau.prompt_tokens :] == [*begun(tokenizer), 7, 5, 6, 8]
    assert told.mask[told.prompt_tokens :] == [0, 0, 0, 1, 0, 0, 1] and sum(told.mask) == 2
    assert "one entity" in tokenizer.decode(told.ids) and "whole question" not in tokenizer.decode(told.ids)
    assert len(told.ids) == len(told.mask) == len(told.logps)


def test_who_is_told_already_learns_nothing(learner, world):
    _, tokenizer = world
    part = one_token(learner, tokenizer, Path(learner.cfg.teacher).read_text())[:9]
    assert np.abs(learner.terms(part, [list(range(9))], 0, None)["adv"]).max() < 1e-9


@pytest.mark.parametrize("weights", ["start", "step"])
def test_the_teacher_stays_unless_it_has_this_step_s_weights(learner, world, weights):
    """After the policy has moved: log pi_ref(y | told) - log pi(y), or log pi(y | told) - log pi(y)."""
    _, tokenizer = world
    cfg = replace(learner.cfg, teacher_weights=weights)
    moved = AbsorbLearner(copy.deepcopy(learner.model), copy.deepcopy(learner.reference), cfg)
    with torch.no_grad():
        for p in moved.model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).double())
    part = one_token(learner, tokenizer, "Search the whole question once.")[:9]
    share = [list(range(9))]
    teacher = {"start": learner, "step": moved}[weights]
    told = teacher.score([teacher.told(tau) for tau in part], share)[0]
    adv = moved.terms(part, share, 0, None)["adv"]
    assert adv == pytest.approx(told - moved.score(part, share)[0], abs=1e-9)
    assert moved.model is not moved.reference and np.abs(adv).max() > 0.01


@pytest.mark.ranks
@pytest.mark.parametrize("weights", ["start", "step"])
def test_two_ranks_absorb_what_one_process_does(learner, world, tmp_path, weights):
    from test_ranks import CFG, LIMIT, torchrun, weights_of

    _, tokenizer = world
    path, part = str(ROOT / "world" / "files" / "policy"), one_token(learner, tokenizer, "Search the question.")[:24]
    cfg = AbsorbConfig(**vars(CFG) | {"model": path, "teacher": learner.cfg.teacher, "mode": "absorb"})
    cfg, parts = replace(cfg, teacher_weights=weights), [part[:12], part[12:]]
    (tmp_path / "b.pkl").write_bytes(pickle.dumps((cfg, parts)))
    whole = load_policy(path, "cpu")[0]
    alone = AbsorbLearner(whole, copy.deepcopy(whole), cfg)
    metrics = [alone.update(t, parts) for t in (1, 2)]
    guest = ["tests/extras/ranks_guest.py", "extras.absorb:AbsorbLearner"]
    process = torchrun(2, *guest, path, tmp_path / "b.pkl", tmp_path / "out")
    code, _, stderr = finish(process, LIMIT)
    assert code == 0, stderr
    found = torch.load(tmp_path / "out" / "result.pt")
    for mine, theirs in zip(found["metrics"], metrics, strict=True):  # the second has the weights of the first
        assert mine == pytest.approx(theirs, rel=5e-5, abs=1e-6)
    off = torch.cat([(w - found["weights"][name]).abs().flatten() for name, w in weights_of(whole).items()])
    assert (off > 1e-5).float().mean() < 2e-3  # Adam divides rounding by rounding where a gradient is almost 0


def test_faults_are_one_line():
    assert "--teacher is missing" in AbsorbConfig().check()
    assert "--beta 0 keeps no first policy" in AbsorbConfig(beta=0.0).check()
    assert "no such file" in replace(AbsorbConfig(), teacher="nowhere.txt").check()
