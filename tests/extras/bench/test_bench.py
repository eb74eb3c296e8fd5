"""The step that extras/bench measures is that of a run, for the world's policy and for any
other."""

import json
import sys
from importlib.util import find_spec

import pytest

from extras.bench import step, trl


@pytest.mark.slow
def test_a_step_with_searches_is_measured_of_any_policy(monkeypatch, capsys, tiny_path):
    given = ["--repeat", "1", "--model", tiny_path, "--preset", "world", "--dtype", "bfloat16"]
    given += "--batch 2 --G 2 --max_response 8".split()
    monkeypatch.setattr(sys, "argv", ["step.py", *given])
    step.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["context_tokens"] > 5 * 8
    assert min(found[k] for k in ("rollout_s", "update_s")) > 0
    assert found["start_to_end_of_first_step_s"] > found["rollout_s"] + found["update_s"]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed")
def test_both_sides_take_steps_of_single_turns_on_the_same_questions(
    monkeypatch, capsys, tiny_path
):
    given = ["--repeat", "1", "--model", tiny_path, "--preset", "world", "--batch", "4"]
    monkeypatch.setattr(sys, "argv", ["trl.py", *given])
    trl.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("rollout_s", "update_s", "response_tokens"):
        assert (
            found[name]["ratio"] == found[name]["trl"] / found[name]["ours"]
            and found[name]["ours"] > 0
        )
    # a random policy hardly ever ends a turn: EOS is drawn now and then
    tokens = found["response_tokens"]
    assert 40 < tokens["ours"] <= 48 and tokens["trl"] == pytest.approx(tokens["ours"], abs=3)
