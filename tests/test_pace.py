"""How fast a run says the machine was."""

from types import SimpleNamespace

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
        seconds={"rollout": 3.0, "update": 0.5, "tools": 1.25}, ranks=SimpleNamespace(device="cpu")
    )
    found = Policy.measure_speed(policy, [tau(10, 4, 6), tau(20, 5)])
    assert found["time/sampled_per_s"] == (4 + 6 + 5) / 3
    assert found["time/trained_per_s"] == (10 + 4 + 3 + 6 + 3 + 20 + 5 + 3) / 0.5
    assert (found["time/rollout"], found["time/update"]) == (3.0, 0.5)
    assert found["time/tools"] == 1.25
    assert 0.05 < found["time/peak_gb"] < 1000  # of this process, with torch in it
