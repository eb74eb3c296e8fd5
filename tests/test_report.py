"""The sentence at the end of a run, on hand-computed cases."""

import math

import pytest

from journal.summary import conclude, count_seconds, measure_speed, tell_speed

ROWS = [
    "first policy, first instruction",
    "trained policy, first instruction",
    "first policy, I_star",
]
ROWS += ["trained policy, I_star"]


def conclusion_of(means: dict[str, float], n: int) -> str:
    """Of questions that score 0 or 1."""
    return conclude(
        means, n, "em", {row: math.sqrt(mean * (1 - mean)) for row, mean in means.items()}
    )


@pytest.mark.parametrize(
    "scores, says",
    [
        (
            (0.01, 0.20, 0.08, 0.70),
            "EM +0.69; the policy alone has +0.19, the instruction alone +0.07: the pair",
        ),
        ((0.00, 0.30, 0.12, 0.70), "worth more"),  # 0.42 is 0.6 of the gain
        ((0.00, 0.30, 0.13, 0.70), "add up"),
        ((0.08, 0.25, 0.91, 0.93), "search over instructions"),
        ((0.10, 0.80, 0.20, 0.85), "training would"),
        ((0.30, 0.30, 0.30, 0.37), "EM +0.07: within noise on 300 questions (±0.08)"),
        ((0.50, 0.40, 0.40, 0.30), "EM -0.20: the run has done harm"),
        ((0.01, 0.20), "EM +0.19 under the first instruction"),
        ((0.20, 0.21), "within noise"),
        ((0.00, 0.00, 0.00, 0.00), "EM +0.00: within noise"),
    ],
)
def test_a_run_ends_with_whose_gain_it_is(scores, says):
    assert says in conclusion_of(dict(zip(ROWS, scores, strict=False)), 300)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_few_questions_show_no_gain_however_clear(n):
    """The sign test of n questions that all change has p = 2 / 2^n: 0.06 of 5, 0.03 of 6."""
    means = dict(zip(ROWS, (0.0, 1.0, 0.0, 1.0), strict=True))
    said = conclusion_of(means, n)
    assert "EM +1.00" in said and "all solved, but no gain is shown" in said
    assert "training would have been enough" in conclusion_of(means, 6)
    means = dict(zip(ROWS, (0.0, 0.05, 0.0, 0.05), strict=True))
    assert "within noise" in conclusion_of(means, 100) and "training would" in conclusion_of(
        means, 120
    )


@pytest.mark.parametrize(
    "scores, deviation, says",
    [
        (
            (-1.0, 0.0, -0.5, 2.5),
            1.5,
            "won +3.50; the policy alone has +1.00, the instruction alone +0.50: the pair",
        ),
        ((-1.0, 0.0, -0.5, 2.5), 30.0, "won +3.50: within noise on 300 questions"),
        ((0.30, 0.30, 0.30, 0.37), 0.1, "worth more"),  # nothing without the spread
        ((2.0, 1.0), 0.1, "won -1.00 under"),
    ],
)
def test_a_gain_of_any_metric_is_held_against_its_spread(scores, deviation, says):
    means = dict(zip(ROWS, scores, strict=False))
    assert says in conclude(means, 300, "won", dict.fromkeys(means, deviation))


def test_where_a_step_s_time_went_by_hand():
    steps = [
        {"t": 0, "test/em": 0.0},
        {"t": 1, "time/rollout": 6.0, "time/tools": 2.0, "time/update": 3.0, "time/reward": 1.0,
         "time/sampled_per_s": 100.0, "time/trained_per_s": 1000.0, "time/mfu": 0.3},
        {"t": 2, "time/rollout": 4.0, "time/tools": 0.0, "time/update": 3.0, "time/evolve": 3.0,
         "time/verify": 2.5, "time/sampled_per_s": 200.0, "time/trained_per_s": 3000.0, "time/mfu": 0.5},
    ]  # fmt: skip
    assert count_seconds(steps) == {
        "rollout": 8.0, "tools": 2.0, "reward": 1.0, "update": 6.0, "verify": 2.5, "evolve": 0.5, "evaluate": 0,
    }  # fmt: skip
    assert measure_speed(steps) == {"sampled_per_s": 150.0, "trained_per_s": 2000.0, "mfu": 0.4}
    said = tell_speed(steps)
    for part in (
        "150 tokens/s",
        "2,000 tokens/s",
        "MFU 0.40",
        "rollout 40%",
        "tools 10%",
        "update 30%",
    ):
        assert part in said
    assert "evaluate" not in said
    # demonstrations: nothing is sampled
    assert measure_speed([{"time/update": 1.0}]) == {} and "update 100%" in tell_speed(
        [{"time/update": 1.0}]
    )
