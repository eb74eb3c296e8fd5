"""Where extras/bench/colocated.py finds the time of rollouts, small and on the CPU.

.venv-vllm/bin/python -m pytest tests/extras/test_vllm_colocated.py
"""

import json
import sys

import pytest

pytest.importorskip("vllm")
from extras.bench import colocated


def test_all_the_time_of_a_rollout_has_a_part(monkeypatch, capsys):
    given = "colocated --rollouts --device cpu --groups 2 --turns 2 --sampled 6"
    monkeypatch.setattr(sys, "argv", given.split())
    colocated.main()
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    settings = found["settings"]
    plain = ["bare", "+ log-probs", "+ seeds", "+ stops"]
    assert list(settings) == [*plain, "our loop"]
    for row in settings.values():
        columns = colocated.COLUMNS[2:]
        passes = row["prefill"] + row["decode"]
        assert 0.8 * row["seconds"] < passes <= row["seconds"]
        parts = sum(row.get(name, 0.0) for name in columns[2:])
        assert parts == pytest.approx(row["seconds"])
        assert row["us"] == pytest.approx(1e6 * row["seconds"] / row["sampled"])
    # 10 rows of 2 turns; a turn's first token comes from a prefill. A prompt has 50 tokens, 83 are
    # read between the turns; vLLM caches whole blocks alone, on the CPU 128 tokens.
    bare = settings["bare"]
    assert bare["sampled"] == 10 * 2 * 6
    assert bare["decode_passes"] == 2 * 5
    assert bare["decode_tokens"] == 10 * 2 * 5
    assert bare["prefill_tokens"] == 10 * (50 + 50 + 6 + 83)
    ours = settings["our loop"]  # some of the tokens end a turn
    assert 0 < ours["sampled"] <= 10 * 2 * 6
    # the same prompts, the same texts between turns
    assert 10 * (50 + 50 + 1 + 83) <= ours["prefill_tokens"] <= bare["prefill_tokens"]
