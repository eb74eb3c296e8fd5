"""The simulation of the graded world: points by hand, limits, and the campaign's 15 cells."""

import numpy as np
import pytest

from extras import drift
from extras.drift import (
    ARMS,
    BASE,
    BOTH,
    DRIFTS,
    EARLY,
    EITHER,
    HARMFUL,
    LATE,
    LINES,
    evolve,
    points,
    published,
    worth,
)

RIGHT, WRONG = np.ones((1, LINES), bool), np.zeros((1, LINES), bool)


def lines(*roles):
    return " ".join(str(k) for role in roles for k in range(role.start, role.stop))


@pytest.mark.parametrize("d", DRIFTS)
def test_points_by_hand(d):
    untold = points(set(), RIGHT, d)  # base lines right: 4; early ones filled in, right: d each
    assert untold.sum() == pytest.approx(4 + 4 * d) and points(
        set(), WRONG, d
    ).sum() == pytest.approx(-4 * d)
    late = points(set(range(LATE.start, LATE.stop)), RIGHT, d) - untold
    assert late[0, LATE].tolist() == [1] * 4 and late.sum() == 4  # 1 - d + d
    assert points({0}, WRONG, d)[0, 0] == pytest.approx(1 - 2 * d)
    assert points({EARLY.start}, WRONG, d)[0, EARLY.start] == pytest.approx(1 - d)
    for told, gain in (
        ({HARMFUL.start}, -1),
        ({BOTH.start}, -0.5),
        ({BOTH.start, BOTH.start + 1}, 2),
        ({EITHER.start}, 1),
        ({EITHER.start, EITHER.start + 1}, 0),
        ({7, 8, 21, 24}, 0),
        ({BASE.start}, -1),
        ({25}, -4 - 8 * d),
    ):
        assert (points(told, RIGHT, d) - untold).sum() == pytest.approx(gain), told


def test_a_perfect_chooser_gains_what_the_campaign_said_by_not_keeping_what_paid_before_training():
    for d, gain in zip(DRIFTS, (0.0, 0.0, 0.4), strict=True):
        guess = 0.25  # the skill of a policy that guesses among four units
        late = [LATE] if 1 - d + d * (2 * guess - 1) > 0 else []
        then = worth(lines(EARLY, BOTH, *late) + f" {EITHER.start}", d)
        now = max(
            worth(lines(LATE, BOTH, *early) + f" {EITHER.start}", d) for early in ([], [EARLY])
        )
        assert now - then == pytest.approx(gain)
        # 4 base, 4 late, 2 and 1 of the pairs
        assert now == pytest.approx(0.2 + 0.05 * (11 + 4 * max(d, 1 - d)))


def test_a_policy_that_knows_the_unit_and_evolves_for_long_ends_near_the_best_instruction():
    found = [evolve(k, 1.0, [1.0] * 400, evolutions=79)[0] for k in range(4)]
    # one line short, and the pair that pays only together
    assert min(found) >= 0.8 and max(found) <= 0.95 + 1e-9
    # never right: late lines cost
    assert np.mean([evolve(k, 1.0, [0.0] * 50)[0] for k in range(4)]) < 0.6


def test_a_run_counts_its_rollouts():
    _, rollouts = evolve(0, 0.0, [0.5] * 10, evolutions=0)
    assert rollouts == 10 * 24 * 5
    _, more = evolve(0, 0.0, [0.5] * 10, evolutions=1)
    assert (
        24 * 2 <= more - rollouts <= 24 * 7
        and evolve(0, 0.0, [0.5] * 10, 1, verify=0)[1] == rollouts
    )


@pytest.mark.slow
def test_all_15_cells_of_the_campaign_are_predicted():
    cells = {(arm, d): published(arm, d) for arm in ARMS for d in DRIFTS if published(arm, d)}
    assert len(cells) == 15 and {len(rewards) for rewards in cells.values()} == {12}
    miss = [
        np.mean([evolve(k, d, **ARMS[arm])[0] for k in range(16)]) - np.mean(cells[arm, d])
        for arm, d in cells
    ]
    # 16 runs: errors of .017, of 12 worlds .02
    assert max(map(abs, miss)) < 0.07 and np.mean(np.abs(miss)) < 0.03


def test_the_table_and_the_figure(tmp_path, capsys):
    drift.main(["--runs", "2", "--figure", str(tmp_path / "drift.png")])
    out = capsys.readouterr().out
    assert (
        out.count("(0.") == 15
        and "online" in out
        and (tmp_path / "drift.png").stat().st_size > 5000
    )
