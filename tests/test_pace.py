"""How fast a run says the machine was."""

from types import SimpleNamespace

import pytest
import torch

from tasks import Question, Trajectory
from training.policy import Policy


def tau(prompt, *turns):
    found = Trajectory(
        0, Question("q", "Who?"), 0, list(range(prompt)), prompt, [0] * prompt, [0.0] * prompt
    )
    for n in turns:
        found.act([1] * n, [-1.0] * n)
        found.observe([2] * 3)
    return found


def test_a_second_s_tokens_by_hand():
    policy = SimpleNamespace(
        seconds={"rollout": 3.0, "update": 0.5, "tools": 1.25},
        ranks=SimpleNamespace(device="cpu"),
        count_faults=lambda: 7,
        compute_mfu=lambda speed: {"speed": speed},
    )
    found = Policy.measure_speed(policy, [tau(10, 4, 6), tau(20, 5)])
    assert found["time/sampled_per_s"] == (4 + 6 + 5) / 3
    assert found["time/trained_per_s"] == (10 + 4 + 3 + 6 + 3 + 20 + 5 + 3) / 0.5
    assert (found["time/rollout"], found["time/update"], found["search/faults"]) == (3.0, 0.5, 7)
    assert found["time/tools"] == 1.25 and found["speed"] == found["time/trained_per_s"]
    assert 0.05 < found["time/peak_gb"] < 1000  # of this process, with torch in it


def test_memory_that_vllm_gives_back_asleep_is_not_counted(monkeypatch):
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 90e9)
    policy = SimpleNamespace(
        seconds={"rollout": 1.0, "update": 1.0, "tools": 0.0},
        ranks=SimpleNamespace(device="cuda"),
        count_faults=int,
        compute_mfu=lambda speed: {},
        engine=SimpleNamespace(asleep=60e9),
    )
    assert Policy.measure_speed(policy, [])["time/peak_gb"] == 30
    policy.engine = None  # torch's own engine gives nothing back
    assert Policy.measure_speed(policy, [])["time/peak_gb"] == 90


@pytest.mark.parametrize("card, dtype, mfu", [
    ("NVIDIA H100 80GB HBM3", "bfloat16", (6 * 700 + 4 * 300) * 1e9 / 989e12 / 4),
    ("NVIDIA H100 PCIe", "bfloat16", (6 * 700 + 4 * 300) * 1e9 / 756e12 / 4),
    ("NVIDIA A100-SXM4-80GB", "bfloat16", (6 * 700 + 4 * 300) * 1e9 / 312e12 / 4),
    ("Tesla T4", "bfloat16", None), ("NVIDIA A100-SXM4-80GB", "float32", None),
])  # fmt: skip
def test_mfu_counts_six_flops_a_trained_parameter_and_four_a_frozen_one(
    monkeypatch, card, dtype, mfu
):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: card)
    trained, frozen = torch.nn.Parameter(torch.zeros(700)), torch.nn.Parameter(torch.zeros(300))
    frozen.requires_grad_(False)
    model = SimpleNamespace(parameters=lambda: iter([trained, frozen]))
    ranks = SimpleNamespace(device="cuda", dtype=dtype, size=4)
    policy = SimpleNamespace(ranks=ranks, learner=SimpleNamespace(model=model))
    found = Policy.compute_mfu(policy, 1e9)
    assert found == ({} if mfu is None else {"time/mfu": pytest.approx(mfu)})
    ranks.device = "cpu"
    assert Policy.compute_mfu(policy, 1e9) == {}
