"""The default, whole: a file of its own, so that a worker has it alone."""

import json

import pytest
from test_inspo import finish, start


@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path):
    """`make train`: neither the trained policy nor the evolved instruction gets there without the
    other."""
    code, stdout, stderr = finish(start("--out", tmp_path / "r"), timeout=3000)
    assert code == 0, stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    em = {name: row["em"] for name, row in summary["held_out"].items()}
    assert summary["start"]["em"] <= 0.1 and summary["end"]["em"] >= 0.8
    assert em["first policy, I_star"] <= 0.45 and em["trained policy, first instruction"] <= 0.5
    assert summary["start"]["searches"] < 1.1 and summary["end"]["searches"] > 1.7
    assert summary["verification_rollouts"] <= 0.19 * summary["training_rollouts"]
    assert len(summary["generations"]) >= 3
