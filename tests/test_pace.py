"""How fast a run says the machine was, and the trace of a step."""

import gzip
import json

import pytest
from test_inspo import run_here

from config import parse
from journal.directory import read_jsonl
from journal.pace import Trace, pace
from plumbing.faults import DiskFault
from tasks import Question, Trajectory


def tau(prompt, *turns):
    found = Trajectory(0, Question("q", "Who?"), 0, list(range(prompt)), prompt, [0] * prompt, [0.0] * prompt)
    for n in turns:
        found.act([1] * n, [-1.0] * n)
        found.observe([2] * 3)
    return found


def test_a_second_s_tokens_by_hand():
    found = pace([tau(10, 4, 6), tau(20, 5)], {"rollout": 3.0, "update": 0.5})
    assert found["time/sampled_per_s"] == (4 + 6 + 5) / 3
    assert found["time/trained_per_s"] == (10 + 4 + 3 + 6 + 3 + 20 + 5 + 3) / 0.5
    assert 0.05 < found["time/peak_gb"] < 1000  # of this process, with torch in it
    assert set(pace([tau(10, 4)], {"rollout": 0.0})) == {"time/peak_gb"}  # nothing was played, nothing updated


def test_a_run_has_its_pace_and_the_trace_that_was_asked_for(tmp_path):
    flags = "--mode static --T 2 --batch 2 --mini 2 --G 2 --eval_n 2 --profile 2".split()
    code, stdout, stderr = run_here(*flags, "--out", tmp_path / "run")
    assert code == 0, stderr
    [trace] = (tmp_path / "run").glob("trace*")
    assert str(trace) in stdout
    events = json.loads(gzip.open(trace).read())["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::mm" in names and any("Backward" in str(name) for name in names)  # of rollouts, and of the update
    for row in read_jsonl(tmp_path / "run/metrics.jsonl")[1:]:
        assert row["time/sampled_per_s"] > 0 and row["time/trained_per_s"] > 0 and row["time/peak_gb"] > 0.05


def test_a_step_that_there_is_not_cannot_be_traced(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--T", "2", "--profile", "3"])
    assert "--profile 3" in str(end.value) + capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_a_line(tmp_path):
    trace = Trace(1, tmp_path / "gone")
    trace.begin(1)
    with pytest.raises(DiskFault, match="cannot write .*gone/trace-000001.json.gz .No such file"):
        trace.end()
