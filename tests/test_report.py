"""Where the time of a run's steps went, on hand-computed cases."""

from journal.summary import count_seconds, measure_speed


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
    # demonstrations: nothing is sampled
    assert measure_speed([{"time/update": 1.0}]) == {}
