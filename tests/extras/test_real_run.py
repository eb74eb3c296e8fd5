"""`make real`: its commands can be parsed, parts are skipped, resumed and stopped, its table has
what they measured."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from config import HERE, parse_flags
from extras.real import __main__ as real
from extras.real.__main__ import Part
from plumbing.faults import Fault

SLOW = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\n"
)
SLOW += "print('it runs', flush=True); time.sleep(600)"


def test_every_part_is_a_command_with_flags_that_exist(tmp_path):
    from extras.cold_start import config_of

    (tmp_path / "demos.jsonl").write_text("{}")
    _, demos, cold, run, *rest = real.parts(tmp_path, False, "scripted", 3)
    learned = config_of(cold.argv[1:])
    assert (
        learned.demos == demos.argv[-1] == str(demos.leaves)
        and learned.T == real.STEPS
        and learned.seed == 3
    )
    cfg, preset = parse_flags(run.argv[1:]), parse_flags(["--model", real.NAME])
    assert cfg.model == f"{learned.out}/policy" and cfg.seed == 3
    assert (cfg.T, cfg.corpus, cfg.N_P, cfg.lr) == (preset.T, preset.corpus, preset.N_P, preset.lr)
    # so that the cold start's table is about the run's first one
    assert learned.instruction == cfg.instruction
    assert [part.argv[1] for part in rest] == [real.NAME, real.NAME, cfg.out]


def test_a_part_that_has_left_nothing_is_named(tmp_path):
    fails = Part("the thing", ["-c", "import sys; sys.exit(3)"], tmp_path / "a")
    with pytest.raises(Fault, match="the thing: .* ended with 3.*resumes"):
        real.play(fails)
    real.play(
        Part("the thing", ["-c", f"open({str(tmp_path / 'b' / 'c')!r}, 'w')"], tmp_path / "b" / "c")
    )


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_was_begun_is_resumed(tmp_path, monkeypatch, begun):
    asked = []
    child = SimpleNamespace(wait=lambda: 0)
    monkeypatch.setattr(real.subprocess, "Popen", lambda argv, cwd: asked.append(argv[1:]) or child)
    command = ["inspo.py", "--out", str(tmp_path)]
    if begun:
        (tmp_path / "config.json").touch()
    real.play(Part("INSPO", command, tmp_path))
    assert asked == [[*command, *["--resume"] * begun]]


def test_a_request_to_stop_reaches_the_part_and_ends_in_a_line(tmp_path):
    program = (
        "from extras.real import __main__ as real\n"
        f"real.parts = lambda *_: [real.Part('x', ['-c', {SLOW!r}], real.Path({str(tmp_path / 'x')!r}))]\n"
        f"real.main(['--out', {str(tmp_path / 'out')!r}])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    while child.stdout.readline() != "it runs\n":  # the command is shown before
        pass
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=100)
    assert (
        "saved" in out
        and child.returncode
        and "stopped by SIGTERM" in err
        and "Traceback" not in err
    )


def test_the_table_has_a_row_for_all_that_was_measured(tmp_path):
    came = {"em": 0.0, "searches": 0.1}
    learned = {"first policy, first instruction": {"em": 0.12, "searches": 1.0}}
    trained = {"trained policy, best instruction": {"em": 0.9, "searches": 2.1}}
    benchmark = {"benchmarks": {"facts": {"questions": 5, "em": {"mean": 0.2}, "searches": 1}}}
    written = {
        "cold": {"questions": 24, "held_out": {"first policy, first instruction": came}},
        "inspo": {"questions": 100, "held_out": learned | trained},
        "evaluation/direct": benchmark, "evaluation/rag": benchmark,
        "evaluation/trained-direct": {"benchmarks": {"facts": {"questions": 5, "em": {"mean": 0.3}, "searches": 0}}},
    }  # fmt: skip
    for name, summary in written.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    assert real.table(tmp_path).splitlines()[2:] == [
        "| as it comes, closed book (`direct`) | 0.20 | 1.00 | 5 |",
        "| as it comes, one search with the question (`rag`) | 0.20 | 1.00 | 5 |",
        "| as it comes, the agent's loop, first instruction | 0.00 | 0.10 | 24 |",
        "| after the cold start, first instruction | 0.12 | 1.00 | 100 |",
        "| trained by INSPO, best instruction | 0.90 | 2.10 | 100 |",
        "| trained by INSPO, closed book (`direct`) | 0.30 | 0.00 | 5 |",
    ]
