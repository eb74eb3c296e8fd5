"""The step that extras/bench measures is that of a run, for the world's policy and for any other."""

import json
import sys

import pytest

from extras.bench import step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_searches_is_measured_of_any_policy(monkeypatch, capsys, tiny_path, dtype):
    given = ["--repeat", "1", "--model", tiny_path, "--preset", "world", "--dtype", dtype]
    given += "--batch 2 --mini 2 --G 2 --max_response 8".split()
    monkeypatch.setattr(sys, "argv", ["step.py", *given])
    step.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["context_tokens"] > 5 * 8
    assert min(found[k] for k in ("rollout_s", "update_s")) > 0
    assert found["start_to_end_of_first_step_s"] > found["rollout_s"] + found["update_s"]
