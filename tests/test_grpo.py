"""The learner against Eq. 2 written out in float64, with autograd and every logit, a trajectory at
a time."""

import copy
import math
import re
from itertools import compress

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from found_search import Found
from test_inspo import SMALL, run_here
from test_rollout import Plain
from tiny_model import STOP

from config import Config
from engines.torch_engine import TorchEngine
from grpo import Learner, lr_at, minibatches
from models import lora
from models.packing import micro_batches
from plumbing.faults import EngineFault
from plumbing.files import read_jsonl
from rollout import rollout
from tasks import Job, Question, Trajectory
from training import policy
from training.policy import load_tensors

G = 3
EPS, BETA = 0.2, 0.1
QUESTION = Question("q", "Who?", ("x",), "s")


def settings_of(**settings):
    """At step 2 of 10 the learning rate is at its peak."""
    usual = dict(lr=1e-3, T=10, warmup=0.2, eps=EPS, beta=BETA, temperature=1.0, G=G, mini_batch=G)
    return Config(**usual | dict(micro_tokens=256) | settings)


def learner_of(policy, reference=None, **settings):
    """Returns a learner on a copy of the policy."""
    return Learner(copy.deepcopy(policy), copy.deepcopy(reference), settings_of(**settings))


def noisy(model, scale, seed=1):
    """Returns a copy of the model, all weights moved a little."""
    g, model = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


@pytest.fixture(scope="module")
def model(world):
    """The world's policy in float64, so that what differs is the mathematics."""
    return copy.deepcopy(world[0]).double()


@pytest.fixture(scope="module")
def reference(model):
    return noisy(model, 0.01)


def batch_of(groups, seed=0, longest=40):
    """Returns `groups` groups of G random trajectories with random advantages, of one to four
    turns, after a prompt of the group's."""
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    def tokens(n):
        return torch.randint(5, 675, (n,), generator=g).tolist()

    taus = []
    for group in range(groups):
        prompt = tokens(number(3, 12))
        for _ in range(G):
            tau = Trajectory(
                0,
                QUESTION,
                group,
                list(prompt),
                len(prompt),
                [0] * len(prompt),
                [0.0] * len(prompt),
            )
            for _ in range(number(1, 3)):
                n = number(1, longest // 4)
                tau.act(tokens(n), (-8 * torch.rand(n, generator=g)).tolist())
                tau.observe(tokens(number(1, longest // 4)))
            if number(0, 1):
                tau.act(tokens(2), [-1.0, -2.0])
            taus.append(tau)
    for tau in taus:
        tau.advantage = float(torch.randn((), generator=g))
    return taus


def scaled(taus, factor):
    """Returns copies of the trajectories with advantages of another size."""
    out = copy.deepcopy(taus)
    for tau in out:
        tau.advantage *= factor
    return out


# ---- Eq. 2 by hand


def logprobs(model, tau, temperature=1.0):
    """Returns log pi(y_t | y_<t) of a trajectory's action tokens, (actions,), from one plain
    forward pass."""
    z = model(torch.tensor([tau.ids]), use_cache=False).logits[0, :-1] / temperature  # (L-1, V)
    logp = torch.log_softmax(z, -1).gather(1, torch.tensor(tau.ids[1:])[:, None])[:, 0]
    return logp[torch.tensor(tau.mask[1:]).bool()]


def clipped(rho, A, logp):
    return torch.minimum(rho * A, rho.clamp(1 - EPS, 1 + EPS) * A)


def eq2(model, reference, taus, old=None, temperature=1.0, beta=BETA, surrogate=clipped):
    """Returns (loss, mean KL of a token, share of clipped tokens) of a mini-batch.

    `old`: id(tau) -> log-probs under pi_old; None: those of the policy itself.
    """
    terms, kls, clipped = [], [], []
    for tau in taus:
        logp = logprobs(model, tau, temperature)
        pi_old = logp.detach() if old is None else old[id(tau)]
        rho = torch.exp(logp - pi_old)
        S = surrogate(rho, tau.advantage, logp)
        kl = torch.zeros_like(logp)
        if beta:
            with torch.no_grad():
                ref = logprobs(reference, tau, temperature)
            kl = torch.exp(ref - logp) - (ref - logp) - 1
        terms.append(S - beta * kl)
        kls.append(kl.detach())
        clipped.append((S < rho * tau.advantage).double())
    # every group has G: the mean over groups of their means, and where a group is cut its share
    J = torch.stack([term.mean() for term in terms]).mean()
    return -J, torch.cat(kls).mean().item(), torch.cat(clipped).mean().item()


def gradient(loss, model):
    """Returns d loss / d theta as one vector."""
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])


def clip(g):
    """Returns the gradient as an optimizer step takes it: of norm 1 at most."""
    return g / max(1.0, g.norm().item() + 1e-6)


def gradients(learner, parts, expected=None, t=2):
    """Returns the gradient that each optimizer step of an update takes, and the update's metrics.

    `expected(k)` is evaluated on the policy before the k-th step; its values are a third result.
    """
    seen, wanted = [], []

    def before_step(*_):
        seen.append(torch.cat([p.grad.flatten().clone() for p in learner.model.parameters()]))
        if expected:
            with torch.enable_grad():
                wanted.append(expected(len(wanted)))

    hook = learner.optimizer.register_step_pre_hook(before_step)
    metrics = learner.update(t, parts)
    hook.remove()
    return seen, metrics, wanted


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("temperature, beta", [(1.0, BETA), (0.7, BETA), (1.0, 0.0)])
def test_an_on_policy_update_is_eq_2(model, reference, temperature, beta):
    taus = batch_of(4)
    assert len({sum(tau.mask) for tau in taus}) > 5  # so the two averages differ
    learner = learner_of(model, reference if beta else None, temperature=temperature, beta=beta)
    loss, kl, _ = eq2(learner.model, reference, taus, None, temperature, beta)
    want = gradient(loss, learner.model)
    [got], metrics, _ = gradients(learner, [taus])
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(want.norm().item(), rel=1e-5)
    assert metrics["clip_fraction"] == 0  # rho = 1
    assert error(got, clip(want)) < 1e-5
    if beta:
        assert metrics["kl"] == pytest.approx(kl, rel=1e-5) and kl > 0.01
        for p, frozen in zip(reference.parameters(), learner.reference.parameters(), strict=True):
            assert torch.equal(p, frozen) and frozen.grad is None  # it never learns
    else:
        assert "kl" not in metrics


def test_an_off_policy_update_is_eq_2_with_the_policy_before_the_step_as_old(model, reference):
    """In mini-batches of 7, 7 and 4 trajectories, of groups of 3: the first two cut one, and the
    last has its own denominator."""
    taus = batch_of(6)
    learner = learner_of(model, reference, mini_batch=7)
    parts = minibatches(taus, learner.cfg)
    assert [len(part) for part in parts] == [7, 7, 4]
    with torch.no_grad():
        old = {id(tau): logprobs(learner.model, tau) for tau in taus}

    def expected(k):
        loss, kl, clipped = eq2(learner.model, reference, parts[k], old)
        return loss.item(), gradient(loss, learner.model), clipped

    got, metrics, want = gradients(learner, parts, expected)
    assert len(got) == 3
    for k in range(3):
        assert error(got[k], clip(want[k][1])) < 1e-5
    losses, norms = zip(*((loss, g.norm().item()) for loss, g, _ in want), strict=True)
    assert metrics["loss"] == pytest.approx(sum(losses) / 3, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-5)
    assert want[0][2] == 0 and want[1][2] > 0.1  # the first update moved the policy: rho is clipped
    assert metrics["clip_fraction"] > 0.02
    # With the policy itself as old the second gradient would be another one.
    assert error(gradients(learner_of(model, reference), [parts[1]])[0][0], clip(want[1][1])) > 0.1


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_an_update_is_a_step_of_adamw(model, reference):
    learner, taus = learner_of(model, reference), batch_of(2)
    beta1, beta2, eps, decay = (0.9, 0.999, 1e-8, 0.01)
    want, m, v = flat(learner.model), 0.0, 0.0
    for k in (1, 2):  # with one step alone the betas would cancel out
        [g], metrics, _ = gradients(learner, [taus], t=k + 1)
        lr = metrics["lr"]
        assert lr == lr_at(k + 1, learner.cfg) > 5e-4
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        want = want * (1 - lr * decay) - lr * (m / (1 - beta1**k)) / (
            (v / (1 - beta2**k)).sqrt() + eps
        )
    torch.testing.assert_close(flat(learner.model), want, atol=1e-9, rtol=0)
    # nothing is left for the next update
    assert all(p.grad is None for p in learner.model.parameters())


def test_the_gradient_does_not_depend_on_micro_batches_nor_on_the_order(model, reference):
    taus = batch_of(6)
    results = []
    for micro_tokens, order in [(1, taus), (150, taus[5:] + taus[:5]), (10**6, taus[::-1])]:
        learner = learner_of(model, reference, micro_tokens=micro_tokens)
        [g], metrics, _ = gradients(learner, [order])
        results.append((g, metrics))
    for g, metrics in results[1:]:
        assert error(g, results[0][0]) < 1e-6
        assert metrics == pytest.approx(results[0][1], rel=1e-6)


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_threads_that_share_micro_batches_compute_the_same_bits(world, monkeypatch, rank):
    """With LoRA one thread alone computes: adapters are switched off for the reference."""
    policy, results = lora.add(copy.deepcopy(world[0]), rank, 8), []
    for threads in 1, 2:
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        settings = {"micro_tokens": 60, "mini_batch": 2 * G, "lora_rank": rank}
        learner = learner_of(policy, None if rank else world[0], **settings)
        assert learner.threads == (1 if rank else threads)
        metrics = [learner.update(t, minibatches(batch_of(3, seed=t), learner.cfg)) for t in (1, 2)]
        results.append((metrics, flat(learner.model)))
    (metrics, weights), (same_metrics, same_weights) = results
    assert metrics == same_metrics and torch.equal(weights, same_weights)


def cispo(rho, A, logp):
    return torch.clamp(rho, max=1.1).detach() * A * logp


class Other(Learner):
    """Trains towards CISPO's surrogate: no kernel."""

    def surrogate(self, logp, rho, adv, **_):
        return cispo(rho, adv, logp)


def test_another_surrogate_is_a_method_of_a_subclass(model, reference):
    """In both mini-batches, under the first of which rho is 1; averages, KL and pi_old stay Eq.
    2's."""
    taus = batch_of(6)
    parts = [taus[: 3 * G], taus[3 * G :]]
    learner = Other(copy.deepcopy(model), copy.deepcopy(reference), settings_of(micro_tokens=100))
    with torch.no_grad():
        old = {id(tau): logprobs(learner.model, tau) for tau in taus}

    def expected(k):
        loss, *_ = eq2(learner.model, reference, parts[k], old, surrogate=cispo)
        return loss.item(), gradient(loss, learner.model)

    got, metrics, want = gradients(learner, parts, expected)
    for k in range(2):
        assert error(got[k], clip(want[k][1])) < 1e-5
    assert metrics["loss"] == pytest.approx((want[0][0] + want[1][0]) / 2, abs=1e-5)


def test_a_trajectory_without_a_turn_counts_and_carries_no_gradient(model):
    taus = batch_of(2)
    # its prompt was too long
    none = Trajectory(0, QUESTION, 0, [5] * 30, 30, [0] * 30, [0.0] * 30, stop="length")
    none.advantage, taus = 1.0, scaled(taus, 0.01)
    alone = dict(micro_tokens=1, beta=0.0)  # it is a micro-batch of its own
    [got], metrics, _ = gradients(learner_of(model, **alone), [[none, *taus[1:]]])
    [want], without, _ = gradients(learner_of(model, **alone), [taus[1:]])
    assert metrics["grad_norm"] < 1 and without["grad_norm"] < 1  # nothing is clipped
    assert metrics["loss"] == pytest.approx(without["loss"] * 5 / 6, rel=1e-5)
    assert error(got, want * 5 / 6) < 1e-5


def test_a_stale_engine_is_refused_before_anything_has_changed(model, reference):
    taus = batch_of(4)
    parts = [taus[: 2 * G], taus[2 * G :]]
    learner, before = learner_of(model, reference), flat(model)
    # of the first mini-batch, which is what there is before the first step
    with torch.no_grad():
        trained = torch.cat([logprobs(model, tau) for tau in parts[0]])
    engine = [x for tau in parts[0] for x, m in zip(tau.logps, tau.mask, strict=True) if m]
    gap = (trained - torch.tensor(engine)).abs().mean().item()
    learner.max_gap = gap * 0.999
    with pytest.raises(EngineFault, match=f"differ by {gap:.3f} nats per token"):
        learner.update(2, parts)
    assert torch.equal(flat(learner.model), before) and not learner.optimizer.state
    assert all(p.grad is None for p in learner.model.parameters())
    learner.max_gap = gap * 1.001
    learner.update(2, parts)
    taus[0].logps[taus[0].mask.index(1)] = math.nan  # an engine that computes nonsense
    with pytest.raises(EngineFault):
        learner.update(3, parts)


def spoil(learner, how, part):
    """Makes the loss or a gradient of one mini-batch not finite, and nothing else of it."""
    if how == "an advantage":
        part[-1].advantage = math.nan
        return
    inner, bad = learner.loss, {id(tau) for tau in part}

    def loss(batch, *args):
        loss, extras = inner(batch, *args)
        if not {id(tau) for tau in batch} & bad:
            return loss, extras
        if how == "the loss":
            return loss + math.nan, extras  # whose gradient is finite
        weight = next(learner.model.parameters())  # d sqrt(w - w) = inf, of a loss that is finite
        return loss + (weight[0, 0] - weight[0, 0].detach()).sqrt(), extras

    learner.loss = loss


@pytest.mark.parametrize("how, bad", [("an advantage", 0), ("the loss", 1), ("a gradient", 0)])
def test_a_step_that_is_not_finite_is_skipped(model, reference, how, bad):
    """Of two mini-batches; what the other does is what it would do alone."""
    taus = batch_of(4)
    parts = [taus[: 2 * G], taus[2 * G :]]
    learner, other = (learner_of(model, reference, micro_tokens=60) for _ in range(2))
    want = other.update(2, [parts[1 - bad]])
    spoil(learner, how, parts[bad])
    metrics = learner.update(2, parts)
    assert want["skipped_updates"] == 0
    assert metrics == pytest.approx(want | {"skipped_updates": 1}, rel=1e-4)
    assert learner.remembered == ({} if bad == 0 else {"skipped": 1})
    torch.testing.assert_close(flat(learner.model), flat(other.model), atol=1e-6, rtol=0)
    assert {int(state["step"]) for state in learner.optimizer.state.values()} == {1}
    before = flat(learner.model)
    # nothing was stepped or measured
    assert learner.update(3, [parts[bad]]).keys() == {"lr", "skipped_updates"}
    assert learner.remembered == {"skipped": 1 + bad}
    assert torch.equal(flat(learner.model), before)


@pytest.mark.slow
def test_a_run_stops_after_several_skipped_steps_in_a_row_resumed_or_not(tmp_path, monkeypatch):
    inner, begun = Learner.update, []

    def update(self, t, minibatches):
        begun.append(t)
        for tau in minibatches[0] if t >= 2 else ():
            tau.advantage = math.nan
        return inner(self, t, minibatches)

    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(policy, "MAX_SKIPPED", 3)
    flags = ["--mode", "static", "--out", tmp_path / "r", *SMALL, "--save_every", "3"]
    for more in ([], ["--resume"]):  # from step 3, whose checkpoint knows of the two before
        code, _, _ = run_here(*(flags[:4] if more else flags), *more)
        assert re.fullmatch("\nstep 4: .* 3 optimizer steps in a row.*", str(code))
    assert begun == [1, 2, 3, 4, 4]
    rows = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [row.get("skipped_updates") for row in rows] == [None, 0, 1, 1]


# ---- batches and the learning rate


@pytest.mark.parametrize(
    "n, sizes", [(1, [1] * 18), (6, [6] * 3), (7, [7, 7, 4]), (17, [17, 1]), (18, [18])]
)
def test_a_step_is_cut_into_mini_batches_of_trajectories(n, sizes):
    taus = batch_of(6)
    parts = minibatches(taus, settings_of(mini_batch=n))
    assert [len(part) for part in parts] == sizes
    assert [tau for part in parts for tau in part] == taus


def tokens_of(batch):
    """Returns how many tokens a row of these trajectories has, which holds a group's prompt, but
    for its last, once."""
    prompts = {tau.group: tau.prompt_tokens - 1 for tau in batch}
    return sum(prompts.values()) + sum(len(tau.ids) - tau.prompt_tokens + 1 for tau in batch)


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("micro_tokens", [1, 200, 10**6])
def test_micro_batches_keep_to_their_size_and_lose_nothing(micro_tokens, ranks):
    taus = batch_of(6)
    batches = [[taus[k] for k in places] for places in micro_batches(taus, micro_tokens, ranks)]
    sizes = [tokens_of(batch) for batch in batches]
    for size, batch in zip(sizes, batches, strict=True):
        assert size <= micro_tokens or len(batch) == 1
    assert sorted(id(tau) for batch in batches for tau in batch) == sorted(map(id, taus))
    assert sizes == sorted(sizes, reverse=True)  # ranks take the batches in turn
    assert len(batches) % ranks == 0
    # as few as that takes
    least = min(len(taus), math.ceil(tokens_of(taus) / micro_tokens))
    assert len(batches) <= 1.5 * least + ranks


def test_the_learning_rate_rises_peaks_and_falls():
    rates = [lr_at(t, Config(lr=3e-4, T=10, warmup=0.3)) for t in range(1, 11)]
    fall = [1.5e-4 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 8)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, *fall])
    # no step has rate 0
    assert [lr_at(t, Config(lr=1.0, T=2, warmup=0.0)) for t in (1, 2)] == pytest.approx([1.0, 0.5])
    assert lr_at(30, Config(lr=5e-7, T=300, warmup=0.1)) == 5e-7  # App. B


# ---- engine and trainer


PASSAGES = ['"Pais Kranford"\nA city with country Blaur Neia and mayor Krinoun Lizais.'] * 2


@pytest.fixture(scope="module")
def sampled(world):
    """temperature -> trajectories that the engine has sampled with the world's policy."""
    model, tokenizer = world
    asked = [
        "What is the mayor of the city Pais Kranford?",
        "Name the base of the producer of the film Leglex?",
    ]
    jobs = [Job(0, "Search, then answer.", Question("q", asked[k % 2]), k % 2) for k in range(10)]
    cfg = Config(max_turns=2, max_response=30, max_observation=60, max_prompt=400)
    engine = TorchEngine(model, tokenizer, STOP)
    return {
        T: rollout(engine, tokenizer, Plain(Found(*PASSAGES)), jobs, cfg, temperature=T, seed=5)
        for T in (0.7, 1.0)
    }


def gap(world, taus, temperature, parts=1, lr=1e-3):
    learner = learner_of(world[0], world[0], temperature=temperature, lr=lr)
    size = len(taus) // parts
    for tau in taus:
        tau.advantage = 1.0
    return learner.update(2, [taus[k * size : (k + 1) * size] for k in range(parts)])["logp_gap"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_trainer_scores_what_the_engine_sampled_as_the_engine_did(world, sampled, temperature):
    taus = sampled[temperature]
    assert (
        sum(len(tau.turns) for tau in taus) > len(taus) and len({len(tau.ids) for tau in taus}) > 3
    )
    assert gap(world, taus, temperature) < 1e-4
    # Of several updates too: the gap is that of the policy that sampled, however far the first
    # update has moved it.
    assert gap(world, taus, temperature, parts=2, lr=0.05) < 1e-4


def test_a_stale_engine_shows_in_the_gap(world, sampled):
    assert gap(world, sampled[0.7], temperature=1.0) > 0.02
    assert gap((noisy(world[0], 0.02), None), sampled[1.0], 1.0) > 0.02
    off = copy.deepcopy(sampled[1.0])
    for k, tau in enumerate(off):
        tau.logps = [
            lp + (0.1 if k % 2 else -0.1) * m for lp, m in zip(tau.logps, tau.mask, strict=True)
        ]
    # a mean of sizes: signs do not cancel
    assert gap(world, off, 1.0) == pytest.approx(0.1, abs=1e-4)


# ---- resuming


def test_a_checkpoint_is_whole_though_a_parameter_never_had_a_gradient(world, tmp_path):
    """As an expert that no token was sent to; another process cannot know which these were."""

    def make() -> Learner:
        model = copy.deepcopy(world[0])
        model.unused = torch.nn.Linear(3, 2)
        return learner_of(model, beta=0.0)

    through, resumed = make(), make()
    through.update(1, [batch_of(2)])
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(through.state_dict(), storage_writer=writer, no_dist=True)
    load_tensors(resumed.state_dict(), tmp_path, alone=True)
    for learner in (through, resumed):
        learner.update(2, [batch_of(2)])
    for p, q in zip(through.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_gap_is_told(world, sampled):
    """Against numpy, over two micro-batches or more."""
    taus = copy.deepcopy(sampled[1.0])
    longest = max(len(tau.ids) for tau in taus)
    for tau in taus:
        tau.advantage = 1.0
        tau.logps = [lp - 0.1 * k / longest for k, lp in enumerate(tau.logps)]
    last = max(k for k, acted in enumerate(taus[3].mask) if acted)
    taus[3].logps[last] -= 2.0
    learner = learner_of(world[0], world[0], micro_tokens=128)
    trained = learner.score_tokens(taus)[0]
    engine = np.array([lp for tau in taus for lp in compress(tau.logps, tau.mask)])
    gap = abs(trained - engine).mean()
    assert learner.update(2, [taus])["logp_gap"] == pytest.approx(gap, rel=1e-3) and gap > 0.01
