"""The computed seconds of a step against those that a card measured (docs/gpus.md)."""

from dataclasses import replace

import pytest

from config import CARDS, Config
from models.model import skeleton
from training import duration
from training.duration import flops_of, rollout_seconds, trajectory, update_seconds
from training.fit import shapes

B3 = skeleton(shapes("Qwen/Qwen2.5-3B"))
H200 = CARDS["h200"][1] * 1e12
# one micro-batch, as `extras.bench.update --micro` has it: one step of one mini-batch
ALONE = Config(batch=1, mini_batch=1, G=1)


@pytest.mark.parametrize(
    "tokens, recompute, measured",
    [
        (1005, 1, 0.447), (4065, 1, 0.501), (8160, 1, 0.477), (14500, 1, 0.818), (31900, 1, 1.766),
        (1005, 0, 0.443), (4065, 0, 0.467), (8160, 0, 0.427), (14500, 0, 0.711), (31900, 0, 1.509),
    ],
)  # fmt: skip
def test_a_micro_batch_of_3b_on_an_h200(tokens, recompute, measured, monkeypatch):
    """The rows that made the constants, 2026-11-27."""
    monkeypatch.setattr(duration, "trajectory", lambda cfg: (0, tokens))
    cfg = replace(ALONE, recompute=recompute, micro_tokens=tokens)
    assert update_seconds(cfg, B3, 1, H200) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "tokens, recompute, measured",
    [(1005, 0, 0.191), (8160, 0, 0.384), (1005, 1, 0.336), (8160, 1, 0.436), (31900, 1, 1.801)],
)
def test_a_micro_batch_with_gathered_weights(tokens, recompute, measured, monkeypatch):
    """Commit e1f24a3, later that day; the rows of 1,005 tokens made the constants."""
    monkeypatch.setattr(duration, "trajectory", lambda cfg: (0, tokens))
    cfg = replace(ALONE, recompute=recompute, micro_tokens=tokens, gather=1)
    assert update_seconds(cfg, B3, 1, H200) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "trajectories, tokens, knobs, measured",
    [
        (160, 2900, {"recompute": 0, "micro_tokens": 16384}, 24.9),  # a whole step
        (50, 2700, {"recompute": 1, "micro_tokens": 32768}, 50 * 2700 / 17400),
        (50, 2700, {"recompute": 0, "micro_tokens": 8192}, 50 * 2700 / 14800),
    ],
)
def test_updates_that_did_not_make_the_constants(
    trajectories, tokens, knobs, measured, monkeypatch
):
    """Commit e22737a on another H200: two mini-batches, the second of which is scored."""
    monkeypatch.setattr(duration, "trajectory", lambda cfg: (0, tokens))
    cfg = Config(batch=trajectories // 5, mini_batch=trajectories // 2, G=5, **knobs)
    assert update_seconds(cfg, B3, 1, H200) == pytest.approx(measured, rel=0.15)


def test_rollouts_of_160_rows_on_an_h200():
    """9.1 and 9.8 s were measured in a run, with 2,300 tokens read; a token costs what it cost
    there."""
    cfg = Config(batch=32, G=5, max_response=480)
    assert trajectory(cfg) == (600, 2300)
    assert rollout_seconds(cfg, B3, 1, H200) == pytest.approx(9.5, rel=0.1)


def test_eight_gpus_share_a_step_and_adapters_save_a_third_of_the_backward_pass():
    cfg = Config(micro_tokens=32768, recompute=0)
    one, eight = (update_seconds(cfg, B3, gpus, H200) for gpus in (1, 8))
    assert one == pytest.approx(8 * eight, rel=0.02)
    # forward, backward twice, reference, nine tenths of the log-probs under the old policy
    lora = update_seconds(replace(cfg, lora_rank=32), B3, 1, H200)
    assert lora == pytest.approx(one * 3.9 / 4.9)
    assert rollout_seconds(cfg, B3, 1, H200) == pytest.approx(8 * rollout_seconds(cfg, B3, 8, H200))


@pytest.mark.parametrize(
    "name, card",
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("h200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("48gb", "a100"), ("Tesla T4", "a100"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_name(name, card):
    assert flops_of(name) == CARDS[card][1] * 1e12


def test_the_words_of_a_dry_run():
    config = shapes("Qwen/Qwen2.5-3B")
    cfg = Config(tools="none", T=100, max_response=400)
    said = duration.describe_time(cfg, config, 8, "h100")
    seconds = sum(f(cfg, B3, 8, H200) for f in (rollout_seconds, update_seconds))
    assert (
        f"{100 * seconds / 3600:.1f} hours" in said and "samples 100 tokens and reads 300" in said
    )
    assert "hours" not in duration.describe_time(cfg, config, 8, "48gb")
