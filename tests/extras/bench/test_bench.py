"""The steps that bench/ measures are those of a run, for the world's policy and for any other."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from test_inspo import ENV, ROOT

from extras.bench import step, trl
from extras.bench.harness import BEST, add_policy, config_of
from plumbing.faults import Fault


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_policy(parser)
    return parser.parse_args(given)


@pytest.fixture
def ours():
    made = []

    def make(*given: str) -> trl.Ours:
        made.append(trl.Ours(config_of(flags(*given), tools="none", max_response=48)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("dtype, gap", [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_a_round_is_a_step_of_a_run_that_moves_no_weight(ours, tiny_path, dtype, gap):
    one = ours("--model", tiny_path, "--preset", "world", "--dtype", dtype)
    learner = one.policy.learner
    before = [p.detach().clone() for p in learner.model.parameters()]
    taus = one.rollout(1)
    update = one.update(1, taus)
    assert one.dtype == dtype and learner.sharded == (dtype == "bfloat16")
    assert len(taus) == 24 * 5 and all(tau.stop == "turns" and len(tau.turns) == 1 for tau in taus)
    assert 0 < update["logp_gap"] < gap and update["lr"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_turns_end_where_trl_can_end_them(ours, tiny_path):
    """The tiny policy writes </answer> in many tokens, the world's in one."""
    tiny, world = ours("--model", tiny_path, "--preset", "world"), ours()
    assert tiny.ends == [] and tiny.engine.stop == ()
    assert world.tokenizer.convert_ids_to_tokens(world.ends) == ["</answer>"]
    assert world.engine.stop == ("</answer>",)


def test_a_step_on_the_real_facts_has_forty_trajectories_under_the_long_instruction(ours, tiny_path):
    one = ours("--model", tiny_path, "--preset", "smollm2-135m")
    assert len(one.jobs) == 40 and "facts" in one.cfg.train and one.cfg.lr == 0
    assert {job.text for job in one.jobs} == {BEST}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_searches_is_measured_of_any_policy(monkeypatch, capsys, tiny_path, dtype):
    sizes = dict(batch=2, mini=2, G=2, max_response=8)
    monkeypatch.setattr(step, "config_of", lambda args: replace(config_of(args), **sizes))
    given = ["--repeat", "1", "--model", tiny_path, "--preset", "world", "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", ["step.py", *given])
    step.main()
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["model"] == tiny_path and found["dtype"] == dtype and found["trajectories"] == 4
    assert found["tokens_per_trajectory"] > 5 * 8 and f" {found['tokens_per_trajectory']}\n" in out
    assert min(found[k] for k in ("rollout_s", "rollout_cpu_s", "update_s", "update_cpu_s")) > 0


@pytest.mark.parametrize("script, given, says", [
    (step, "--model nowhere --preset world", "nowhere"), (step, "--repeat 0", "--repeat"),
    (trl, "--model nowhere --preset world", "nowhere"), (trl, "--rounds 0", "--rounds"),
    (trl, "--dtype float16", "float16"), (trl, "--preset nowhere", "nowhere"),
])  # fmt: skip
def test_what_cannot_be_measured_is_named(monkeypatch, capsys, script, given, says):
    monkeypatch.setattr(sys, "argv", ["bench", *given.split()])
    with pytest.raises((Fault, SystemExit)) as e:
        script.main()
    assert says in f"{e.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_side_alone_needs_no_trl(monkeypatch, capsys, tiny_path, dtype):
    sizes = dict(batch=2, mini=2, G=2, max_response=8)
    monkeypatch.setattr(trl, "config_of", lambda args, **changes: replace(config_of(args, **changes), **sizes))
    given = ["--only", "ours", "--rounds", "1", "--model", tiny_path, "--preset", "world", "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", ["trl.py", *given])
    trl.main()
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["dtype"] == dtype and found["trajectories"] == 4 and found["ours_step_s"][0] > 0
    assert 4 < found["ours_tokens"] <= 4 * 8 and not {"trl", "trl_step_s", "step_ratio"} & {*found}
    assert sum(line.startswith("ours generation") for line in out.splitlines()) == 2  # the warm-up's, too


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed")
def test_beside_trl_both_sides_do_the_same_work(tiny_path):
    command = [sys.executable, "-m", "extras.bench.trl", "--rounds", "1", "--model", tiny_path, "--preset", "world"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == tiny_path and found["dtype"] == "float32" and found["trajectories"] == 24 * 5
    both = [found[f"{side}_tokens_per_trajectory"] for side in ("ours", "trl")]
    assert both[0] == pytest.approx(both[1], abs=3) and str(both[0]) in done.stdout  # EOS is drawn now and then
    for side in ("ours", "trl"):
        median = {part: found[f"{side}_{part}_s"][0] for part in ("generation", "update", "step", "clock")}
        assert min(median.values()) > 0
        assert median["step"] == pytest.approx(median["generation"] + median["update"], abs=0.01)
