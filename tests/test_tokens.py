"""What an update notes of the tokens that it sees, against float64 by hand; the texts of tokens;
who is watched."""

import copy
import json
import math

import pytest
import torch
from test_grpo import EPS, batch_of, learner_of, logprobs, noisy

from journal.tokens import short, show_mask, token_data
from tasks import Question, Trajectory
from tasks.sampling import space_evenly


@pytest.fixture(scope="module")
def model(world):
    return copy.deepcopy(world[0]).double()


def distributions(model, tau):
    """Returns log pi(. | y_<t) before each action token, (actions, V)."""
    z = model(torch.tensor([tau.ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(z, -1)[torch.tensor(tau.mask[1:]).bool()]


@torch.no_grad()
def test_a_watched_trajectory_has_what_the_update_saw_of_its_tokens(model):
    reference = noisy(model, 0.01)
    learner = learner_of(model, reference, lr=0.02, micro_tokens=128)
    taus = batch_of(2)
    first, second = taus[1], taus[4]  # one of each mini-batch
    first.watched = second.watched = True
    old = {id(tau): logprobs(model, tau) for tau in (first, second)}
    seen = []
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(copy.deepcopy(learner.model))
    )
    with torch.enable_grad():
        learner.update(2, [taus[:3], taus[3:]])
    hook.remove()
    for tau, policy in ((first, seen[0]), (second, seen[1])):
        p = distributions(policy, tau)
        logp, ref = logprobs(policy, tau), logprobs(reference, tau)
        ratio = (logp - old[id(tau)]).exp()
        wanted = {
            "logp": old[id(tau)], "ratio": ratio, "entropy": -(p.exp() * p).sum(-1),
            "kl": (ref - logp).exp() - (ref - logp) - 1,
            "clipped": (torch.minimum(ratio * tau.advantage, ratio.clamp(1 - EPS, 1 + EPS) * tau.advantage)
                        < ratio * tau.advantage).double(),
        }  # fmt: skip
        assert set(tau.tokens) == set(wanted)
        for name, values in wanted.items():
            assert len(tau.tokens[name]) == sum(tau.mask)
            torch.testing.assert_close(
                torch.tensor(tau.tokens[name]).double(), values, atol=1e-5, rtol=1e-4
            )
    assert set(first.tokens["ratio"]) == {1.0} and set(first.tokens["clipped"]) == {0.0}
    assert 1.0 in second.tokens["clipped"]  # else the last line of `wanted` has tested nothing
    assert not any(tau.tokens for tau in taus if not tau.watched)


@pytest.mark.parametrize(
    "name, text",
    [
        ("world", "<think> the director </think> <answer> paris </answer>"),
        ("tiny", "Jørn 🙂🙂 x 🙂"),
    ],
)
def test_the_texts_of_tokens_add_up_to_each_turn_s_text(name, text, request):
    """The first of two turns ends within its last letter, if several tokens make that."""
    tokenizer = request.getfixturevalue(name)[1]
    prompt, ids = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in ("Who? ", text))
    pieces = [(0, prompt), (1, ids[:-1]), (0, prompt), (1, ids)]
    mask = [m for m, piece in pieces for _ in piece]
    tau = Trajectory(
        0, Question("q", "Who?"), 0, [i for _, piece in pieces for i in piece], len(prompt), mask
    )
    tau.logps = [0.0] * len(mask)
    texts = token_data(tau, tokenizer, 1000)["text"]
    for turn in (texts[: len(ids) - 1], texts[len(ids) - 1 :]):
        assert "".join(turn).strip() == tokenizer.decode(ids[: len(turn)]).strip()
    assert name == "world" or texts.count("🙂") == 5 and "" in texts  # of several tokens each


def test_the_data_of_tokens_say_how_many_there_were(tiny):
    tokenizer, tau = tiny[1], batch_of(1)[0]
    n = sum(tau.mask)
    tau.tokens = {
        "logp": [-0.123456] * (n - 1) + [math.nan],
        "ratio": [1.0, -1e-9, 123456.0] + [math.inf] * (n - 3),
    }
    whole = token_data(tau, tokenizer, 1000)
    assert whole["n"] == n == len(whole["text"]) == sum(whole["turns"])
    assert whole["logp"][-1] is None
    assert whole["engine"] == [short(x) for x, m in zip(tau.logps, tau.mask, strict=True) if m]
    cut = token_data(tau, tokenizer, 3)
    assert cut["n"] == n and all(
        len(cut[name]) == 3 for name in ("text", "engine", "logp", "ratio")
    )
    assert cut["logp"] == [-0.1235] * 3
    assert cut["ratio"] == [1, 0, 123500]
    assert cut["turns"] == whole["turns"]
    json.dumps(whole, allow_nan=False)


def test_a_mask_is_shown_a_line_for_each_run_of_tokens(tiny):
    tokenizer, tau = tiny[1], Trajectory(0, Question("q", "Who?"), 0, [], 1)
    for sampled, text in [(0, "Who? "), (1, "a\nb"), (0, " x" * 200), (1, "c")]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tau.ids, tau.mask = tau.ids + ids, tau.mask + [sampled] * len(ids)
    first, act, read, last = show_mask(tau, tokenizer, width=20).split("\n")
    assert (first, act, last) == ("    Who? ", r"  | a\nb", "  | c")
    assert read == "     x x x x x [...]  x x x x x"
    tau.mask = [k % 2 for k in range(len(tau.ids))]
    assert len(show_mask(tau, tokenizer).split("\n")) == 20 < len(tau.ids)


@pytest.mark.parametrize(
    "n, k, places", [(10, 0, []), (10, 3, [0, 3, 6]), (3, 10, [0, 1, 2]), (7, 7, list(range(7)))]
)
def test_a_sample_is_spread_evenly(n, k, places):
    assert space_evenly(n, k) == places
