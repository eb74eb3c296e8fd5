"""Whole runs of inspo.py over real servers: Algorithm 1's calendar, resume, faults, bad input, a
user's own data."""

import contextlib
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from json_server import ChatServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import export
import inspo
import reflect
from engines.vllm_engine import vllm_version
from grpo import Learner
from plumbing.files import read_jsonl
from plumbing.servers import Child
from reflect import Optimizer
from tasks import search_qa
from tasks.search_qa import load_questions
from tasks.task import draw_questions, rng_of

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One uninterrupted small run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    code, stdout, stderr = run_here("--out", out, *SMALL)
    assert code == 0, stderr
    return out, stdout


def test_a_run_prunes_and_evolves_at_its_steps_only(whole):
    events = [(e["t"], e["event"], len(e["P"])) for e in read_jsonl(whole[0] / "population.jsonl")]
    evolved = [t for t, event, _ in events if event == "evolve"]
    assert evolved == [3, 6]  # every K_e = 3 steps while t < T_e = 9: not at 9
    # an optimizer's reply may have faulty candidates
    assert events[0][:2] == (0, "start") and 5 <= events[0][2] <= 7
    sizes = {0: events[0][2]}  # after each step
    for t in range(1, 11):
        happened = {event: size for at, event, size in events if at == t}
        n = sizes[t] = sizes[t - 1]
        # K_p = 1: half of P leaves, also after T_e, until one is left
        assert ("prune" in happened) == (n > 1)
        if n > 1:
            assert happened["prune"] == n - n // 2
            sizes[t] = happened["prune"]
        if "evolve" in happened:  # after the pruning
            assert sizes[t] == 1 <= happened["evolve"] <= 7
            sizes[t] = happened["evolve"]
    assert max(sizes[6], sizes[3]) > 2 and events.index((3, "prune", 1)) < [
        e[:2] for e in events
    ].index((3, "evolve"))


def test_verification_questions_are_none_of_the_failures_shown(whole):
    train = {
        row["question"]: row["id"] for row in read_jsonl(ROOT / "world" / "files" / "train.jsonl")
    }
    rows = read_jsonl(whole[0] / "reflections.jsonl")
    rounds = {(r["t"], r["round"]): r for r in rows if "verified" in r}
    assert rounds
    for row in rows:
        if "call" in row and (row["t"], row["round"]) in rounds:
            shown = {
                train[q]
                for q in re.findall(r"Response: Question: (.*?\?)\n", row["call"]["prompt"])
            }
            verified_on = set(rounds[row["t"], row["round"]]["D_B"])
            assert shown and verified_on and not shown & verified_on


def test_a_run_leaves_what_it_promises(whole):
    out, stdout = whole
    names = {
        "config.json",
        "metrics.jsonl",
        "population.jsonl",
        "reflections.jsonl",
        "I_star.txt",
        "summary.json",
    }
    assert names | {"trajectories", "checkpoints", "policy", "report.html"} <= set(os.listdir(out))
    # chosen by the machine, kept for others
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    summary = json.loads((out / "summary.json").read_text())
    keys = "mode seed metrics tools start end held_out seconds I_star".split()
    assert not set(keys) - set(summary)
    assert (summary["metrics"], summary["tools"]) == (["em", "f1"], ["searches"])
    first = read_jsonl(out / "metrics.jsonl")[0]
    assert first["tools"] == summary["tools"]  # for whoever reads it before the end
    assert first.items() >= {f"test/{k}": v for k, v in summary["start"].items()}.items()
    rows = summary["held_out"]
    assert (
        rows["first policy, first instruction"] == summary["start"]
        and next(iter(rows.values())) == summary["end"]
    )
    assert (
        summary["I_star"] == (out / "I_star.txt").read_text().strip()
        and summary["I_star"] in stdout
    )
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if not head.returncode:  # a git checkout
        commit = summary["commit"].partition("+")[0]
        assert len(commit) >= 7 and head.stdout.startswith(commit)
    assert summary["training_rollouts"] == 10 * 2 * 2
    verified = [r for r in read_jsonl(out / "reflections.jsonl") if "verified" in r]
    assert summary["verification_rollouts"] == sum(
        (1 + len(r["verified"])) * len(r["D_B"]) for r in verified
    )
    assert not [p for p in out.rglob("*.tmp")]


def trajectories(path: Path, t: int) -> list[dict]:
    with gzip.open(path / "trajectories" / f"step-{t:06d}.jsonl.gz", "rt") as f:
        return [json.loads(line) for line in f]


def squad(text: str) -> str:
    """SQuAD's normalization, written again."""
    words = re.sub(r"[^\w\s]|_", "", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def test_rewards_advantages_and_r_bar_follow_from_the_trajectories(whole):
    """§2.1, Eq. 3 and the mean of Alg.1 L9, from the files of the run alone."""
    seen = set()
    golds = {
        row["id"]: row["golden_answers"] for row in read_jsonl(ROOT / "world/files/train.jsonl")
    }
    rows = {row["t"]: row for row in read_jsonl(whole[0] / "metrics.jsonl")}
    for t in range(1, 11):
        taus = trajectories(whole[0], t)
        for tau in taus:
            answers = re.findall(
                r"<answer>(.*?)</answer>", "".join(turn["text"] for turn in tau["turns"])
            )
            right = bool(answers) and squad(answers[-1]) in {
                squad(gold) for gold in golds[tau["question"]]
            }
            assert tau["reward"] == float(right) and tau["failed"] is not right
        for group in {tau["group"] for tau in taus}:
            pair = [tau for tau in taus if tau["group"] == group]
            a, b = [tau["reward"] for tau in pair]
            # G = 2: std = |a - b| / sqrt(2)
            for tau, r, other in zip(pair, (a, b), (b, a), strict=True):
                assert tau["advantage"] == pytest.approx(
                    math.copysign(0.5**0.5, r - other) if a != b else 0, abs=1e-5
                )
            seen.add(a + b)
        assert rows[t]["reward"] == rows[t]["em"] == sum(tau["reward"] for tau in taus) / len(taus)
    assert seen == {0, 1, 2}  # groups without a right answer, with one, and with two


def test_weights_probabilities_and_draws_follow_from_the_rewards(whole):
    """Eq. 6 and 4 and Alg.1 L5, from metrics.jsonl and the trajectories; the weights are those
    before anyone leaves."""
    events = {
        (e["t"], e["event"]): [I["id"] for I in e["P"]]
        for e in read_jsonl(whole[0] / "population.jsonl")
    }
    D = {q.id: q for q in load_questions(ROOT / "world/files/train.jsonl")}
    active, history = events[0, "start"], {}
    w = dict.fromkeys(active, 0.0)
    for row in read_jsonl(whole[0] / "metrics.jsonl")[1:]:
        t = row["t"]
        p = np.exp([w[j] / 0.2 for j in active])
        drawn = rng_of(SEED, t, "instructions").choice(len(active), size=2, p=p / p.sum())
        taus = trajectories(whole[0], t)
        assert [tau["instruction"] for tau in taus] == [active[k] for k in drawn for _ in range(2)]
        assert [tau["question"] for tau in taus] == [
            q.id for q in draw_questions(D, 2, SEED, t) for _ in range(2)
        ]
        for j in set(drawn):
            r = [tau["reward"] for tau in taus if tau["instruction"] == active[j]]
            history.setdefault(active[j], []).append(sum(r) / len(r))
        w = {j: float(np.mean(history[j][-5:])) if j in history else 0.0 for j in active}
        assert row["w"] == pytest.approx({str(j): x for j, x in w.items()}, abs=1e-4)
        p = np.exp([w[j] / 0.2 for j in active])
        assert list(row["p"].values()) == pytest.approx(p / p.sum(), abs=1e-4)
        if (t, "prune") in events:
            kept = sorted(active, key=lambda j: -w[j])[: max(1, len(active) - len(active) // 2)]
            assert set(events[t, "prune"]) == set(kept)
            active = events[t, "prune"]
        if (t, "evolve") in events and len(events[t, "evolve"]) > 1:
            assert events[t, "evolve"][0] == max(active, key=lambda j: w[j])
            active, history = events[t, "evolve"], {}
        w = {j: w[j] if j in history else 0.0 for j in active}
    assert max(row["w_best"] for row in read_jsonl(whole[0] / "metrics.jsonl")[1:]) > 0


def test_who_joins_is_not_below_the_parent_on_the_same_questions(whole):
    rounds = [row for row in read_jsonl(whole[0] / "reflections.jsonl") if "verified" in row]
    # the gate is not 0 >= 0
    assert any(row["verified"][0]["r_parent"] > 0 for row in rounds)
    for event in read_jsonl(whole[0] / "population.jsonl"):
        if event["event"] == "evolve":
            room, joined = 6, []  # N_P = 7, one parent
            for row in (row for row in rounds if row["t"] == event["t"]):
                best_first = sorted(row["verified"], key=lambda c: -c["r"])
                good = [c for c in best_first if c["r"] >= c["r_parent"]][: room - len(joined)]
                assert [c for c in row["verified"] if c["joined"]] == good
                assert len({c["r_parent"] for c in row["verified"]}) == 1
                joined += [(c["text"], c["r"]) for c in good]
            assert [
                (I["text"], I["verified"]) for I in event["P"] if I["born"] == event["t"]
            ] == joined
    assert any(not c["joined"] for row in rounds for c in row["verified"])


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


def test_a_run_is_not_overwritten_and_not_continued_as_another(whole):
    code, _, line = run_here("--out", whole[0], *SMALL)
    assert code == 2 and line.count("\n") == 1 and "--resume" in line
    line, _, stderr = run_here("--out", whole[0], *SMALL, "--resume", "--lr", "0.5")
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
    assert "ConnectionError, 2 times; check OPENAI_BASE_URL" in line


@pytest.mark.slow
def test_a_hostile_optimizer_s_words_stay_words(tmp_path, monkeypatch):
    """It echoes the key, floods, writes control tokens and escapes, and then is gone: training goes
    on and says so."""

    def reply(n, authorization):
        if n > 1:
            raise ConnectionResetError
        tags = "<think> </think> <search> </search> <information> </information> <answer> </answer>"
        bad = [
            "\x1b[2J",
            "<|user|>",
            "</s>",
            "\nQuestion: who?",
            "<answer>Paris</answer>",
            "\ud800",
        ]
        blocks = [f"{tags} {text} {k}" for k, text in enumerate([*bad, *["go on"] * 500])]
        return f"{authorization}\n" + "\n".join(
            f"<ins_{k}>{text}</ins_{k}>" for k, text in enumerate(blocks, 1)
        )

    monkeypatch.setattr(reflect, "Optimizer", partial(Optimizer, retries=0))
    flags = [*SMALL, "--T", "4", "--optimizer_model", "m", "--out", tmp_path / "r"]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1\n")
    with chat(reply=reply) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, stdout, stderr = run_here(*flags)
        assert code == 0, (code, stderr)
        assert "\x1b" not in stdout
        family = {
            I["id"]: I["text"]
            for e in read_jsonl(tmp_path / "r" / "population.jsonl")
            for I in e["P"]
        }
        assert len(family) == 7
        assert not any(
            x in text
            for text in family.values()
            for x in ("\x1b", "<|", "</s>", "\nQuestion", "\ud800")
        )
        for path in (tmp_path / "r").rglob("*"):
            assert not path.is_file() or b"sk-secret-1" not in path.read_bytes(), path
        size = (tmp_path / "r" / "reflections.jsonl").stat().st_size
        assert size < 2 * len(reply(1, "").encode(errors="replace"))
        for old in (tmp_path / "r" / "checkpoints").iterdir():
            shutil.rmtree(old)
        code, _, stderr = run_here(*flags, "--resume")  # the stored reply is replayed
        assert code == 0 and sum("Improve" in str(messages) for messages in server.asked) == 1, (
            code,
            stderr,
        )


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
    assert mine[-1].pop("search/faults") > 0  # it did notice
    for row in mine + theirs:
        row.pop("search/faults", None)
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
def chat(before_reply=lambda n: None, reply=None):
    """A real endpoint, not ours, that answers App. E's prompts with the parent and one sentence
    more.

    `before_reply(n)` is called before its n-th reply, `reply(n, authorization)` writes another.
    """

    def answer(messages):
        n = len(server.requests)
        before_reply(n)
        if reply:
            return reply(n, server.requests[-1][1]["Authorization"])
        prompt = messages[0]["content"]
        parent = re.search(r"<ins_0>(.*?)</ins_0>", prompt, re.S).group(1).strip()
        most = int(re.search(r"to <ins_(\d+)>", prompt).group(1))
        blocks = [
            f"<ins_{k}>{parent} Hint {n}.{k}: search twice.</ins_{k}>" for k in range(1, most + 1)
        ]
        return "Reasons.\n" + "\n".join(blocks)

    with ChatServer(answer) as server:
        yield server


def test_own_data_own_model_and_any_chat_endpoint_through_the_same_command(tmp_path, monkeypatch):
    """Real English, a byte-level BPE tokenizer, untied random weights: nothing in the core knows
    the world."""
    from tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "model")
    flags = [
        "--model",
        tmp_path / "model",
        "--optimizer_model",
        "some-model",
        "--out",
        tmp_path / "r",
    ]
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
    turns = [
        turn
        for tau in trajectories(tmp_path / "r", 1)
        for turn in tau["response"].split("That was neither ")[1:]
    ]
    assert turns and all(
        text.startswith("a search nor a calculation nor an answer.") for text in turns
    )
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


def script(*argv: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, env=ENV, cwd=ROOT
    )


@pytest.mark.slow
def test_ask_shows_the_agent_at_work(whole):
    question = read_jsonl(ROOT / "world/files/test.jsonl")[0]["question"]
    done = script("ask.py", "--run", whole[0], question)
    assert done.returncode == 0, done.stderr
    assert "<search>" in done.stdout and "\n  search  " in done.stdout and "answer  " in done.stdout
    # it is folded
    assert " ".join((whole[0] / "I_star.txt").read_text().split()) in " ".join(done.stdout.split())
    done = script("ask.py", "--run", "/no")
    assert done.returncode == 1 and done.stderr == "ask.py: --run /no: no such directory\n"


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def test_export_writes_a_checkpoint_as_hugging_face_stores_models(whole, tmp_path, capsys):
    export.main([str(whole[0]), "--out", str(tmp_path / "newest")])
    mine, final = weights_of(tmp_path / "newest"), weights_of(whole[0] / "policy")
    assert mine.keys() == final.keys() and all(
        torch.equal(mine[name], final[name]) for name in final
    )
    assert (tmp_path / "newest" / "I_star.txt").read_text() == (whole[0] / "I_star.txt").read_text()
    export.main([str(whole[0]), "--step", "9", "--out", str(tmp_path / "nine")])
    earlier = weights_of(tmp_path / "nine")
    assert any(not torch.equal(earlier[name], final[name]) for name in final)  # step 10 moved it
    assert "step 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--step", "4"], "has no checkpoint of step 4; it has: 9, 10"),
        (["--best"], "in training); it has: 9, 10"),
        (["--out", "HERE"], "exists already; remove it, or choose another with --out"),
        (["--out", "/proc/x"], "cannot write /proc/x"),
    ],
)
def test_export_says_in_one_line_what_it_cannot_do(whole, tmp_path, flags, says):
    with pytest.raises(SystemExit) as stop:
        export.main([str(whole[0]), *[str(tmp_path) if flag == "HERE" else flag for flag in flags]])
    assert (
        says in stop.value.code
        and stop.value.code.startswith("export.py: ")
        and "\n" not in stop.value.code
    )
    with pytest.raises(SystemExit, match="holds no run"):
        export.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        export.main([str(whole[0]), "--step", "9", "--best"])


@pytest.mark.parametrize("file", ["state.pt", "shard-00001-model-00001-of-00007.safetensors"])
def test_an_export_of_a_checkpoint_that_is_not_whole_is_one_line_and_no_directory(
    whole, tmp_path, file
):
    run = shutil.copytree(whole[0], tmp_path / "r")
    (run / "checkpoints" / "step-000010" / file).unlink()
    with pytest.raises(SystemExit) as stop:
        export.main([str(run), "--out", str(tmp_path / "to")])
    assert "step-000010" in stop.value.code and "\n" not in stop.value.code
    assert not (tmp_path / "to").exists()


def test_an_export_that_is_stopped_leaves_nothing(whole, tmp_path, monkeypatch):
    """A Ctrl-C between its weights and its instruction."""
    interrupt = lambda path: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    monkeypatch.setattr("models.model.load_tokenizer", interrupt)
    with pytest.raises(SystemExit, match="stopped by SIGINT"):
        export.main([str(whole[0]), "--out", str(tmp_path / "a" / "b")])
    assert list((tmp_path / "a").iterdir()) == []
    monkeypatch.undo()
    export.main([str(whole[0]), "--out", str(tmp_path / "a" / "b")])
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"] and weights_of(
        tmp_path / "a" / "b"
    )


def test_the_best_checkpoint_is_the_best_on_valid_never_on_test(whole, tmp_path):
    """From rows as a run writes them: step 9 is best on --valid, step 10 on --test."""
    shutil.copytree(whole[0], tmp_path / "r")
    rows = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    rows[9] |= {"valid/em": 0.5, "test/em": 0.1}
    rows[10] |= {"valid/em": 0.4, "test/em": 0.9}
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export.main([str(tmp_path / "r"), "--best", "--out", str(tmp_path / "best")])
    best, nine = weights_of(tmp_path / "best"), tmp_path / "nine"
    export.main([str(tmp_path / "r"), "--step", "9", "--out", str(nine)])
    assert all(torch.equal(p, best[name]) for name, p in weights_of(nine).items())


def test_the_last_screen_shows_metrics_winner_and_cost(whole):
    out, stdout = whole
    summary = json.loads((out / "summary.json").read_text())
    for name, row in summary["held_out"].items():
        wanted = [name, f"{row['em']:.3f}", f"{row['f1']:.3f}", f"{row['searches']:.3f}"]
        assert any(line.split() == " ".join(wanted).split() for line in stdout.splitlines()), name
    assert set(summary["held_out"]) >= {
        "trained policy, first instruction",
        "first policy, first instruction",
    }
    assert " -> ".join(f"#{j}" for j in summary["generations"]) in stdout
    assert stdout.splitlines()[-1] == f"see it: {out}/report.html"
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_a_run_stores_what_its_page_shows(whole):
    """The same questions under several instructions, and how fast it was."""
    out, _ = whole
    for row in trajectories(out, 1):
        assert row["question_text"].endswith("?") and row["source"].startswith("world-")
    names = {path.name for path in (out / "trajectories").iterdir()}
    verified = [row for row in read_jsonl(out / "reflections.jsonl") if "verified" in row]
    assert {f"verify-{row['t']:06d}-{row['round']}.jsonl.gz" for row in verified} <= names
    held_out = [name for name in names if name.startswith("test-")]
    assert len(held_out) == len(json.loads((out / "summary.json").read_text())["held_out"])
    row = read_jsonl(out / "metrics.jsonl")[5]
    assert (
        row["time/sampled_per_s"] > 0
        and row["time/trained_per_s"] > 0
        and row["time/peak_gb"] > 0.05
    )
    assert sum(row["n"].values()) == 4 and set(row["n"]) <= set(row["w"])
    sources = [name for name in row if name.startswith("em/")]
    assert sources and min(row[name] for name in sources) <= row["em"] <= max(
        row[name] for name in sources
    )


# ---- faults and options of a whole run


@pytest.mark.slow
def test_a_search_server_that_dies_during_an_evolution_ends_the_run_resumably(
    tmp_path, monkeypatch
):
    """The optimizer's endpoint stops the search server, so the verification of its candidates
    cannot be played."""
    server = ["-m", "retrieval_server", "--corpus", str(ROOT / "world/files/corpus.jsonl")]
    monkeypatch.setattr(search_qa, "RETRIES", 0)
    flags = [*SMALL, "--optimizer_model", "m", "--out", tmp_path / "r"]
    with (
        Child(server, tmp_path / "log") as child,
        chat(lambda n: child.stop() if n == 2 else None) as endpoint,
    ):
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        said, _, _ = run_here(*flags, "--retriever", child.url)
        first, last = said.strip().splitlines()
        assert "no usable answer" in first and "--resume" in last
        code, _, stderr = run_here(*flags, "--retriever", "", "--resume")
        assert code == 0, (code, stderr)
        whole_calls = [
            row["call"]["key"]
            for row in read_jsonl(tmp_path / "r" / "reflections.jsonl")
            if "call" in row
        ]
        assert len(whole_calls) == len(set(whole_calls)) == len(endpoint.requests)
        assert sum(key.startswith("t3 r0") for key in whole_calls) == 1  # not asked again
    assert [row["t"] for row in metrics(tmp_path / "r")] == list(range(11))


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


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """(directory, standard output) of a run that neither learns nor can write its page."""
    out = tmp_path_factory.mktemp("runs") / "frozen"
    (out / ".report.html.tmp").mkdir(parents=True)  # where it would be written first
    code, stdout, stderr = run_here(*SMALL, *"--T 2 --mode static --lr 0 --out".split(), out)
    assert code == 0, (code, stderr)
    return out, stdout


def test_a_run_is_complete_without_its_page(frozen):
    out, stdout = frozen
    assert f"no page: cannot write {out}/report.html" in stdout
    assert (out / "summary.json").exists() and not (out / "report.html").exists()


def test_a_learning_rate_of_0_freezes_the_policy(frozen):
    first, last = (
        load_file(path / "model.safetensors") for path in (FILES / "policy", frozen[0] / "policy")
    )
    assert last and all(torch.equal(first[name], last[name]) for name in last)
    # there was something to learn
    assert any(row["grad_norm"] > 0 for row in metrics(frozen[0])[1:])


@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path):
    """`make train`: neither the trained policy nor the evolved instruction gets there without the
    other."""
    code, stdout, stderr = finish(start("--out", tmp_path / "r", "--seed", "1"), timeout=3000)
    assert code == 0, stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    em = {name: row["em"] for name, row in summary["held_out"].items()}
    assert summary["start"]["em"] <= 0.1 and summary["end"]["em"] >= 0.8
    assert em["first policy, I_star"] <= 0.45 and em["trained policy, first instruction"] <= 0.5
    assert summary["start"]["searches"] < 1.1 and summary["end"]["searches"] > 1.7
    assert summary["verification_rollouts"] <= 0.15 * summary["training_rollouts"]
    assert len(summary["generations"]) >= 3
