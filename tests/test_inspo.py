"""Whole runs of inspo.py over real servers: Algorithm 1's calendar, resume, faults, bad input, a
user's own data."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from json_server import ChatServer
from transformers import AutoModelForCausalLM

import export
import inspo
import reflect
from engines.choose import vllm_version
from grpo import Learner
from plumbing.files import read_jsonl
from reflect import Optimizer

ROOT = Path(__file__).parent.parent
FIXTURE = Path(__file__).parent / "fixture"
FILES = ROOT / "world" / "files"
SMALL = "--batch 2 --G 2 --T 10 --K_p 1 --K_e 3 --T_e 9 --D_B 4 --eval_n 3 --save_every 3 --rounds 2".split()
SEED = 6  # the first policy scores in the first step
SMALL += ["--instruction", str(FIXTURE / "instruction.txt"), "--seed", str(SEED)]
# tests share their cores with the servers
ENV = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def popen(argv: list[str], env: dict) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, stdout=pipe, stderr=pipe, text=True, env=env, cwd=ROOT, start_new_session=True
    )


def start(*flags: object, env: dict | None = None) -> subprocess.Popen:
    return popen([sys.executable, str(ROOT / "inspo.py"), *map(str, flags)], env or ENV)


def run_here(*flags: object) -> tuple[int | str, str, str]:
    """(exit code or message, stdout, stderr) of inspo.main in this process, which saves importing
    torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            inspo.main(list(map(str, flags)))
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()


def finish(process: subprocess.Popen, timeout: float = 300) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            # torchrun's ranks too: every process here leads its own group
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl without those that tell time."""
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in read_jsonl(path / "metrics.jsonl")
    ]


def wait_for_step(path: Path, t: int, process: subprocess.Popen) -> None:
    deadline = time.time() + 400
    while time.time() < deadline and process.poll() is None:
        if len(read_jsonl(path / "metrics.jsonl")) > t:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {t} was not reached: {finish(process)[2]}")


def children_of(process: subprocess.Popen) -> list[str]:
    return (
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    )


def play(out: Path, *flags: object) -> tuple[Path, str]:
    """One uninterrupted small run: its directory, and what it printed."""
    code, stdout, stderr = run_here("--out", out, *SMALL, *flags)
    assert code == 0, stderr
    return out, stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Of four steps, the third of which evolves."""
    return play(tmp_path_factory.mktemp("runs") / "short", "--T", 4, "--T_e", 4)


def test_a_run_leaves_what_it_promises(short):
    out, stdout = short
    files = "config.json metrics.jsonl population.jsonl reflections.jsonl I_star.txt summary.json report.html"
    assert {*files.split(), "trajectories", "checkpoints", "policy"} <= set(os.listdir(out))
    # chosen by the machine, kept for others
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["metrics"], summary["tools"]) == (["em", "f1"], ["searches"])
    first = read_jsonl(out / "metrics.jsonl")[0]
    assert first.items() >= {f"test/{k}": v for k, v in summary["start"].items()}.items()
    rows = summary["held_out"]
    assert rows["first policy, first instruction"] == summary["start"]
    assert next(iter(rows.values())) == summary["end"]
    assert summary["I_star"] == (out / "I_star.txt").read_text().strip()
    assert summary["I_star"] in stdout
    assert re.search(r"\d threads, 1 x cpu, float32, torch engine", stdout.splitlines()[0])
    assert summary["training_rollouts"] == 4 * 2 * 2
    verified = [r for r in read_jsonl(out / "reflections.jsonl") if "verified" in r]
    counted = sum((1 + len(r["verified"])) * len(r["D_B"]) for r in verified)
    assert summary["verification_rollouts"] == counted > 0
    # the table at the end
    for name, row in rows.items():
        wanted = [*name.split(), *(f"{row[k]:.3f}" for k in ("em", "f1", "searches"))]
        assert wanted in [line.split() for line in stdout.splitlines()], name
    assert stdout.splitlines()[-1] == f"page: {out}/report.html"


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_it_is_bit_identical(whole, tmp_path):
    out, rng = tmp_path / "killed", random.Random()
    for t in range(0, 10, 2):
        resume = ["--resume"] if (out / "config.json").exists() else []
        process = start("--out", out, *SMALL, *resume)
        wait_for_step(out, t, process)
        time.sleep(rng.uniform(0, 2))
        process.kill()
        process.communicate()
    code, stdout, stderr = finish(start("--out", out, *SMALL, "--resume"))
    assert code == 0, stderr
    assert metrics(out) == metrics(whole[0])
    for name in ("population.jsonl", "I_star.txt", "policy/model.safetensors"):
        assert (out / name).read_bytes() == (whole[0] / name).read_bytes(), name


def test_a_run_is_not_overwritten_and_not_continued_as_another(short):
    line, _, stderr = run_here("--out", short[0], *SMALL)
    assert stderr == "" and "\n" not in line and "--resume" in line
    line, _, stderr = run_here("--out", short[0], "--resume", "--lr", "0.5")
    assert stderr == "" and "\n" not in line and "--lr" in line


@pytest.mark.slow
def test_an_optimizer_that_nobody_can_reach_ends_the_run_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(reflect, "Optimizer", partial(Optimizer, retries=1))
    flags = [*SMALL, "--T", "4", "--optimizer_model", "nobody"]
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    line, _, stderr = run_here("--out", tmp_path / "r", *flags)
    assert stderr == "" and "\n" not in line and not (tmp_path / "r").exists()
    assert line.startswith(
        "the optimizer gave no reply to its first call: http://127.0.0.1:9/v1/chat/completions: "
    )
    assert "Connection refused; check OPENAI_BASE_URL" in line


@pytest.mark.slow
def test_our_own_retriever_is_restarted_when_it_dies(whole, tmp_path):
    out = tmp_path / "r"
    process = start("--out", out, *SMALL)
    wait_for_step(out, 2, process)
    for pid in children_of(process):
        if b"retrieval_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
    code, _, stderr = finish(process)
    assert code == 0, stderr
    mine, theirs = metrics(out), metrics(whole[0])
    assert mine == theirs  # and nothing was scored without its results


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process(tmp_path):
    out = tmp_path / "r"
    process = start("--out", out, *SMALL, "--T", "500")
    wait_for_step(out, 1, process)
    children = children_of(process)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 1 and "--resume" in stderr and "Traceback" not in stderr
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def chat():
    """A real endpoint, not ours, that answers App. E's prompts with the parent and one sentence
    more."""

    def answer(messages):
        n = len(server.requests)
        prompt = messages[0]["content"]
        parent = re.search(r"<ins_0>(.*?)</ins_0>", prompt, re.S).group(1).strip()
        most = int(re.search(r"to <ins_(\d+)>", prompt).group(1))
        blocks = [
            f"<ins_{k}>{parent} Hint {n}.{k}: search twice.</ins_{k}>" for k in range(1, most + 1)
        ]
        return "Reasons.\n" + "\n".join(blocks)

    with ChatServer(answer) as server:
        yield server


@pytest.mark.slow
def test_own_data_own_model_and_any_chat_endpoint_through_the_same_command(tmp_path, monkeypatch):
    """Real English, a byte-level BPE tokenizer, untied random weights: nothing in the core knows
    the world."""
    from tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--optimizer_model", "some-model"]
    flags += ["--out", tmp_path / "r"]
    for name in ("train", "test", "corpus"):
        flags += [f"--{name}", FIXTURE / f"{name}.jsonl"]
    flags += "--T 2 --batch 4 --mini_batch 4 --G 2 --K_p 1 --K_e 1 --T_e 2 --D_B 3 --max_response 24".split()
    flags += "--max_prompt 900 --rounds 1 --max_observation 120 --failures 2 --eval_n 2 --save_every 1".split()
    flags += ["--tools", "search,calculator", "--device", "cpu"]
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with chat() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, _, stderr = run_here(*flags)
    assert code == 0, (code, stderr)
    rows = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [row["t"] for row in rows] == [0, 1, 2] and rows[-1]["logp_gap"] < 1e-4
    assert "test/searches" in rows[0] and "test/calculations" in rows[0]
    (path, headers, body), second = server.requests  # P_0, and the evolution at t = 1
    assert path == second[0] == "/v1/chat/completions" and headers["Authorization"] == "Bearer k"
    assert json.loads(body)["model"] == "some-model"
    assert "Answer the given question." in server.asked[0][0]["content"]  # Search-R1's (App. F)
    assert "<information>" in server.asked[1][0]["content"]
    family = {I["id"]: I for e in read_jsonl(tmp_path / "r" / "population.jsonl") for I in e["P"]}
    assert any("Hint 2." in I["text"] and I["verified"] is not None for I in family.values())


OWN = "--train FILES/train.jsonl --test FILES/test.jsonl --corpus FILES/corpus.jsonl --mode static".split()
BAD = [
    (["--model", "/no/such/model", *OWN], "--model /no/such/model: no causal LM"),
    ([*OWN, "--valid", "", "--instruction", "", "--train", "BADROW"], "bad.jsonl:2"),
    (["--corpus", "BADROW"], "bad.jsonl, row "),
    (["--out", "/proc/none"], "/proc/none"),
    (["--retriever", "http://127.0.0.1:9"], "--retriever"),
    (["--out", "FILE"], "cannot write"),
    (["--resume", "--out", "EMPTY"], "holds no run"),
    (["--tracker", "wandb"], "not installed"),
    (["--instruction", "FILE"], "is empty"),
    (["--tools", "search,telescope"], "--tools search,telescope: choose"),
]
BAD.append((["--tools", "search,calculator"], "its tokenizer cannot write </calculate>"))
if not vllm_version():
    BAD.append((["--engine", "vllm"], "--engine vllm needs vLLM 0.32, found none: pip install"))
if not torch.cuda.is_available():
    BAD.append((["--device", "cuda"], "no CUDA device"))


@pytest.mark.parametrize("flags, says", BAD, ids=[" ".join(f[:2]) for f, _ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, flags, says):
    row = json.dumps({"id": "1", "contents": '"A"\nb', "question": "q", "golden_answers": ["a"]})
    (tmp_path / "bad.jsonl").write_text(row + "\n{oops\n")
    (tmp_path / "file").write_text("")
    paths = {"BADROW": "bad.jsonl", "FILE": "file", "EMPTY": "empty"}
    flags = [str(tmp_path / paths[flag]) if flag in paths else flag for flag in flags]
    flags = [flag.replace("FILES", str(FIXTURE)) for flag in flags]
    out = [] if "--out" in flags else ["--out", tmp_path / "r"]
    code, stdout, stderr = run_here(*SMALL, *flags, *out)
    # sys.exit(text) prints the text to stderr and exits with 1
    line = stderr if code == 2 else str(code)
    assert code != 0 and says in line and stdout == ""
    assert line.strip().count("\n") == 0 and (code == 2 or stderr == "")
    assert not (tmp_path / "r").exists()


def test_a_fault_is_printed_to_stderr_with_exit_code_1():
    own = [flag.replace("FILES", str(FIXTURE)) for flag in OWN] + [
        "--valid",
        "",
        "--instruction",
        "",
    ]
    code, stdout, stderr = finish(
        start(*own, "--train", FIXTURE / "corpus.jsonl", "--out", "/tmp/never")
    )
    assert (code, stdout, stderr.count("\n")) == (
        1,
        "",
        1,
    ) and "corpus.jsonl:1: no question" in stderr


# ---- what one does with a run


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def test_export_writes_a_checkpoint_as_hugging_face_stores_models(short, tmp_path, capsys):
    export.main([str(short[0]), "--out", str(tmp_path / "newest")])
    mine, final = weights_of(tmp_path / "newest"), weights_of(short[0] / "policy")
    assert mine.keys() == final.keys() and all(
        torch.equal(mine[name], final[name]) for name in final
    )
    assert (tmp_path / "newest" / "I_star.txt").read_text() == (short[0] / "I_star.txt").read_text()
    export.main([str(short[0]), "--step", "3", "--out", str(tmp_path / "third")])
    earlier = weights_of(tmp_path / "third")
    assert any(not torch.equal(earlier[name], final[name]) for name in final)  # step 4 moved it
    assert "step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--step", "2"], "has no such checkpoint; it has: 3, 4"),
        (["--best"], "has no such checkpoint; it has: 3, 4 (--eval_every"),
        (["--out", "HERE"], "exists already; remove it, or choose another with --out"),
        (["--out", "/proc/x"], "cannot write /proc/x"),
    ],
)
def test_export_says_in_one_line_what_it_cannot_do(short, tmp_path, flags, says):
    with pytest.raises(SystemExit) as stop:
        export.main([str(short[0]), *(str(tmp_path) if x == "HERE" else x for x in flags)])
    assert says in stop.value.code and "\n" not in stop.value.code


# ---- faults and options of a whole run


@pytest.mark.slow
def test_an_engine_that_samples_from_another_policy_stops_the_run_before_it_trains(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(Learner.MAX_GAP, "float32", -1.0)  # no engine is that close
    code, stdout, stderr = run_here(*SMALL, "--mode", "static", "--out", tmp_path / "r")
    assert "log-probs of engine and trainer differ by" in code
    assert "--resume" in code.splitlines()[-1]
    monkeypatch.undo()
    code, _, _ = run_here(
        *SMALL, "--mode", "static", "--out", tmp_path / "r", "--resume", "--T", 10
    )
    assert code == 0 and [row["t"] for row in metrics(tmp_path / "r")] == list(range(11))
