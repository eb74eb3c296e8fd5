"""extras/launch/: what one starts first, as far as this machine can run it. tests/test_ranks_runs.py has
node.sbatch's nodes."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from test_inspo import ENV, ROOT, finish, popen, wait_for_step

LAUNCH = ROOT / "extras" / "launch"
TINY = "--T 3 --batch 2 --G 2 --eval_n 3 --save_every 1 --D_B 2 --K_e 2 --T_e 2".split()


@pytest.mark.parametrize("name", ["speedrun.sh", "node.sbatch"])
def test_the_scripts_are_bash_and_say_what_was_not_run(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", LAUNCH / name], check=True)
    assert "# Not run on a " in (LAUNCH / name).read_text() and os.access(LAUNCH / name, os.X_OK)


def project(path: Path) -> Path:
    """Returns a folder in which speedrun.sh finds the project, and leaves its runs."""
    launch = path / "extras" / "launch"
    launch.mkdir(parents=True)
    shutil.copy(LAUNCH / "speedrun.sh", launch)
    for name in ("inspo.py", ".venv", "requirements", "requirements.txt"):
        (path / name).symlink_to(ROOT / name)
    for name in ("hotpot.py", "page", "__init__.py"):
        (path / "extras" / name).symlink_to(ROOT / "extras" / name)
    return launch / "speedrun.sh"


@pytest.mark.parametrize(
    "programs, env, says",
    [
        ({}, {}, "no NVIDIA driver"),
        ({"nvidia-smi": ":"}, {}, "set OPENAI_API_KEY"),
        ({"nvidia-smi": ":", "uv": "exit 1"}, {"OPENAI_API_KEY": "k"}, "install failed"),
        (
            {"nvidia-smi": ":", "uv": "mkdir -p .venv-gpu", "make": "exit 2"},
            {"OPENAI_API_KEY": "k"},
            "card failed",
        ),
    ],
)
def test_a_machine_that_lacks_something_is_told_in_a_line(tmp_path, programs, env, says):
    script = project(tmp_path)
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)} | env
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("speedrun: ") and says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ranks
def test_a_speedrun_of_the_world_resumes_and_is_safe_to_run_twice(tmp_path):
    command = ["bash", str(project(tmp_path)), "world", "2", *TINY]
    run = tmp_path / "runs" / "speedrun-world"
    process = popen(command, ENV)
    wait_for_step(run, 1, process)
    os.killpg(process.pid, signal.SIGTERM)
    finish(process)
    code, stdout, stderr = finish(popen(command, ENV))
    assert (
        code == 0
        and "resumed " in stdout
        and f"== training: {run.relative_to(tmp_path)}/summary.json, " in stdout
    )
    assert (run / "report.html").is_file()
    code, stdout, stderr = finish(popen(command, ENV))
    assert code == 0 and [line.split(":")[0][3:] for line in stdout.splitlines()] == [
        "install",
        "training",
        "page",
    ]


@pytest.mark.slow
def test_the_notebook_s_cells_run_on_a_cpu(tiny_path, tmp_path, monkeypatch, capfd):
    """The same cells, with fewer steps, and a small model in place of the one that is fetched."""
    model = shutil.copytree(tiny_path, tmp_path / "model")
    monkeypatch.chdir(ROOT)
    flags = " ".join([*TINY, "--max_prompt", "900"])
    for name, value in (("RUNS", tmp_path), ("MODEL", model), ("FLAGS", flags)):
        monkeypatch.setenv(name, str(value))
    scope: dict = {}
    for cell in json.loads((LAUNCH / "t4.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
    for name in ("world", "cold", "facts"):
        assert (tmp_path / name / "summary.json").is_file()
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
    assert "step   1  reward" in capfd.readouterr().out
