"""What ends a run of several processes: a fault, which is said once, a signal, a server that is
away."""

import re
import signal

import pytest
from test_inspo import ROOT, SMALL, finish, wait_for_step
from test_ranks import ENV, LIMIT, torchrun

from config import WORLD
from run import read_state

pytestmark = pytest.mark.ranks


def test_a_rank_that_raises_in_a_reduction_ends_the_job_at_once(tmp_path):
    out = tmp_path / "r"
    process = torchrun(2, "tests/ranks_raise.py", "--out", out, *SMALL)
    code, stdout, stderr = finish(process, LIMIT)
    assert code != 0 and stderr.count("MemoryError: out of memory, say") == 1, stderr
    assert "inspo: world" in stdout


MISSING = """
import os
import random
if os.environ["RANK"] == "1":
    raise ImportError("\\nnot on this rank")
from tasks.search_qa import SearchQA
"""


def test_what_only_one_rank_misses_ends_the_others(tmp_path, monkeypatch):
    """At once while they start; torchrun kills one that already waits in torch for a process group,
    half a minute later."""
    (tmp_path / "missing.py").write_text(MISSING)
    monkeypatch.setitem(ENV, "PYTHONPATH", f"{ROOT}:{tmp_path}")
    process = torchrun(2, "inspo.py", "--task", "missing:SearchQA", "--out", tmp_path / "r")
    code, _, stderr = finish(process, LIMIT)
    assert code != 0 and "missing cannot be imported (not on this rank)" in stderr


def test_a_slow_optimizer_ends_no_run_of_several_ranks():
    code, _, stderr = finish(torchrun(2, "tests/ranks_slow.py"), LIMIT)
    assert code == 0, stderr


def test_a_signal_saves_and_ends_every_rank(tmp_path):
    out, number = tmp_path / "r", signal.SIGTERM
    process = torchrun(2, "inspo.py", "--out", out, *SMALL, "--T", 500, "--save_every", 500)
    wait_for_step(out, 3, process)
    process.send_signal(number)
    code, _, stderr = finish(process, LIMIT)
    assert code != 0 and stderr.count(f"stopped by {number.name}") == 1 and "--resume" in stderr
    t = int(re.search(r"resume from step (\d+)", stderr).group(1))
    *_, saved = sorted((out / "checkpoints").glob("step-*"))
    assert t >= 3 and saved.name.startswith(f"step-{t:06d}") and read_state(saved)["t"] == t
    # torchrun has a traceback of its own
    frames = re.findall(r'^ *File "(.*?)", line', stderr, re.M)
    assert not [frame for frame in frames if frame.startswith(str(ROOT)) and "/.venv/" not in frame]


def test_a_search_server_that_stays_away_ends_all_ranks_resumably(tmp_path):
    from plumbing.servers import Child

    out = tmp_path / "r"
    server = ["-m", "retrieval_server", "--corpus", str(WORLD / "corpus.jsonl")]
    with Child(server, tmp_path / "log") as child:
        process = torchrun(2, "inspo.py", "--out", out, *SMALL, "--retriever", child.url)
        wait_for_step(out, 4, process)
    code, _, stderr = finish(process, LIMIT)
    ours = stderr.split("torch/distributed/elastic")[0]  # torchrun says it again, last
    assert code != 0 and ours.count("no usable answer") == 1 and ours.count("--resume") == 1
    assert "Traceback" not in ours


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--no_such_flag", "1"], "--no_such_flag: there is no such setting"),
        (["--mini_batch", "1"], "2 ranks for --mini_batch 1: "),
        # only rank 0 looks
        (["--train", "/no.jsonl"], "--train /no.jsonl: no such file"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input_is_reported_once_whatever_the_number_of_ranks(tmp_path, flags, says):
    code, stdout, stderr = finish(torchrun(2, "inspo.py", "--out", tmp_path / "r", *flags), LIMIT)
    assert code != 0 and stderr.split("torch/distributed/elastic")[0].count(says) == 1, stderr
    assert all(line.startswith("note: ") for line in stdout.splitlines())
    assert not (tmp_path / "r").exists()
