"""The step that extras/bench measures is that of a run, for the world's policy and for any
other."""

import json
import sys
from importlib.util import find_spec

import pytest

from extras.bench import paced, step, trl


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
def test_the_work_of_a_paced_step_is_fixed(monkeypatch, capsys):
    given = "--shape toy --repeat 1 --batch 2 --G 2 --max_response 4 --max_observation 32 --engine torch"
    monkeypatch.setattr(sys, "argv", ["paced.py", *given.split()])
    paced.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    # five turns, four reminders, a prompt
    tokens = found["response_tokens"], found["context_tokens"]
    assert tokens == pytest.approx((5 * 4, 300 + 5 * 4 + 4 * 32), rel=0.05)  # EOS is drawn at times
    assert min(found[k] for k in ("rollout_s", "update_s")) > 0


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
