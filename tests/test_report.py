"""The sentence at the end of a run, on hand-computed cases."""

import pytest

from page.verdict import conclusion

ROWS = ["first policy, first instruction", "trained policy, first instruction", "first policy, I_star"]
ROWS += ["trained policy, I_star"]


@pytest.mark.parametrize(
    "scores, says",
    [
        ((0.01, 0.20, 0.08, 0.70), "EM +0.69; the policy alone has +0.19, the instruction alone +0.07: the pair"),
        ((0.00, 0.30, 0.12, 0.70), "worth more"),  # 0.42 is 0.6 of the gain
        ((0.00, 0.30, 0.13, 0.70), "the parts add up"),
        ((0.08, 0.25, 0.91, 0.93), "a search over instructions would have been enough"),
        ((0.10, 0.80, 0.20, 0.85), "training would have been enough"),
        ((0.30, 0.30, 0.30, 0.37), "nothing gained that 300 questions could show (two standard errors are 0.08)"),
        ((0.50, 0.40, 0.40, 0.30), "EM -0.20: the run has done harm"),
        ((0.01, 0.20), "EM +0.19 under the first instruction, by training alone"),
        ((0.20, 0.21), "EM +0.01: nothing gained"),
        ((0.00, 0.00, 0.00, 0.00), "EM +0.00: nothing gained"),
    ],
)
def test_a_run_ends_with_whose_gain_it_is(scores, says):
    em = dict(zip(ROWS, scores, strict=False))
    assert says in conclusion(em, 300)
