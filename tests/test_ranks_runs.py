"""Whole runs of several processes: printed once, killed, resumed; test_ranks_faults.py has what ends
one."""

import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from test_inspo import ROOT, SMALL, children_of, finish, metrics, popen, wait_for_step
from test_ranks import ENV, LIMIT, torchrun
from transformers import AutoModelForCausalLM

from config import WORLD
from plumbing.files import read_jsonl

pytestmark = pytest.mark.ranks
SCORED = ["--eval_every", 4, "--valid", ""]  # evaluations on questions of --train set aside


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    code, stdout, stderr = finish(torchrun(2, "inspo.py", "--out", out, *SMALL, *SCORED), LIMIT)
    assert code == 0, stderr
    return out, stdout, stderr


def test_a_run_of_two_processes_prints_once_and_leaves_what_one_leaves(whole):
    out, stdout, stderr = whole
    assert stdout.count("inspo: world") == 1 and "2 x cpu, float32, torch engine" in stdout
    assert "Traceback" not in stderr and "warn" not in stderr.lower().replace("omp_num_threads", "")
    rows = metrics(out)
    assert [row["t"] for row in rows] == list(range(11)) and all(
        row["logp_gap"] < 1e-4 for row in rows[1:]
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["training_rollouts"] == 10 * 2 * 2
    AutoModelForCausalLM.from_pretrained(out / "policy")
    kept = [path.name for path in sorted((out / "checkpoints").iterdir())]
    scores = {row["t"]: row["valid/em"] for row in rows if "valid/em" in row}
    assert set(scores) == {4, 8}
    best = max(scores, key=lambda t: (scores[t], -t))  # the first of equals
    assert kept == sorted({f"step-{best:06d}", "step-000009", "step-000010"})


def test_a_killed_rank_ends_the_job_which_resumes_on_another_number_of_ranks(whole, tmp_path):
    out = tmp_path / "killed"
    process = torchrun(2, "inspo.py", "--out", out, *SMALL, *SCORED)
    wait_for_step(out, random.Random(5).randint(4, 7), process)
    [victim] = [
        pid
        for pid in children_of(process)
        if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(int(victim), signal.SIGKILL)
    code, _, _ = finish(process, LIMIT)
    assert code != 0
    assert not Path(f"/proc/{victim}").exists()
    saved = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert saved
    code, stdout, stderr = finish(
        torchrun(3, "inspo.py", "--out", out, *SMALL, *SCORED, "--resume"), LIMIT
    )
    assert code == 0, stderr
    assert f"resumed after step {int(saved[-1][5:])}" in stdout
    mine, theirs = metrics(out), metrics(whole[0])
    assert [row["t"] for row in mine] == [row["t"] for row in theirs]
    done = [row for row in mine if 0 < row["t"] <= int(saved[-1][5:])]
    assert len(done) >= 3
    for a, b in zip(done, theirs[1:], strict=False):
        for name in ("reward", "em", "searches", "w", "response_tokens"):
            assert a[name] == b[name], name  # the same trajectories
        for name in ("loss", "kl", "entropy", "grad_norm", "logp_gap"):
            assert a[name] == pytest.approx(b[name], abs=1e-4), name  # gloo adds in any order
    calls = [
        (row["t"], row["round"]) for row in read_jsonl(out / "reflections.jsonl") if "call" in row
    ]
    assert len(calls) == len(set(calls))


SLURM = {
    "scontrol": "printf '%s\\n' localhost localhost",  # both nodes are this machine
    "srun": """shift; trap 'kill $a $b' TERM; "$@" & a=$!; "$@" & b=$!
        wait -n; x=$?; [ $x = 0 ] || kill $a $b 2> /dev/null; wait $a; wait $b; exit $x""",
}


def descendants(pid: object) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return [*children, *(other for child in children for other in descendants(child))]


def test_a_slurm_job_that_is_queued_again_resumes(whole, tmp_path):
    """extras/launch/node.sbatch on two nodes: killed before its first checkpoint, then pre-empted, then
    left alone."""
    from plumbing.servers import Child

    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    out, server = (
        tmp_path / "r",
        ["-m", "retrieval_server", "--corpus", str(WORLD / "corpus.jsonl")],
    )
    job = dict(
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="1",
    )
    env = (
        ENV | job | {"PATH": f"{tmp_path}:{ENV['PATH']}", "PYTHON": sys.executable, "OUT": str(out)}
    )
    with Child(server, tmp_path / "log") as child:
        command = [
            "bash",
            str(ROOT / "extras" / "launch" / "node.sbatch"),
            *map(str, (*SMALL, *SCORED)),
            "--retriever",
        ]
        # of this machine, too, but not refused
        command += [child.url.replace("127.0.0.1", "0.0.0.0")]
        process = popen(command, env)
        wait_for_step(out, 0, process)
        for pid in (str(process.pid), *descendants(process.pid)):
            os.kill(int(pid), signal.SIGKILL)
        process.communicate(timeout=LIMIT)
        assert not list((out / "checkpoints").glob("step-*"))
        process = popen(command, env | {"SLURM_RESTART_COUNT": "1"})
        wait_for_step(out, 4, process)
        process.terminate()
        code, stdout, stderr = finish(process, LIMIT)
        assert (
            code != 0
            and "attempt 2, 2 nodes, head localhost:" in stdout
            and "resume from step" in stderr
        )
        code, stdout, stderr = finish(popen(command, env | {"SLURM_RESTART_COUNT": "2"}), LIMIT)
    assert code == 0 and re.search(r"resumed after step \d", stdout), stderr
    assert metrics(out) == metrics(whole[0])


def test_two_processes_evaluate_the_questions_that_there_are(tmp_path):
    """Too few to set some aside: none are for validation, and one rank has none to test."""
    lines = (WORLD / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:4]))
    (tmp_path / "one.jsonl").write_text(lines[4])
    flags = ["--train", tmp_path / "few.jsonl", "--test", tmp_path / "one.jsonl", "--eval_every", 1]
    flags += [*SMALL, "--corpus", WORLD / "corpus.jsonl", "--mode", "static", "--T", 2]
    out = tmp_path / "r"
    code, _, stderr = finish(torchrun(2, "inspo.py", "--out", out, *flags), LIMIT)
    assert code == 0, stderr
    _, first, _ = metrics(out)
    assert "test/em" in first and not any(name.startswith("valid/") for name in first)
