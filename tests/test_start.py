"""What a run finds out about its servers before it starts."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from json_server import passages
from transformers import Qwen2Config

import inspo
from config import WORLD, Config, parse_flags
from engines.vllm_engine import VllmEngine
from grpo import Learner
from models.model import load_tokenizer
from plumbing.faults import Fault
from plumbing.servers import Servers
from reflect import Optimizer, connect_optimizer, describe_optimizer, reflection_prompt
from tasks import Question
from tasks.search_qa import SEARCH_R1, Search, SearchQA, try_search
from training import checks, fit
from training.checks import check_device, check_disk, check_machine, disk
from world.optimizer import reply_to

QWEN = Qwen2Config(  # 0.5B's, with 2 of its 24 blocks
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=2,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
ROOT = Path(__file__).parent.parent
QUESTIONS = [Question(str(k), f"Who is number {k}?", (f"Person {k}",), "x") for k in range(5)]


def test_searches_are_timed_and_gold_answers_counted(serve):
    # "Person 1" is not in "Person 12", nor in "person".
    texts = {1: "A\nIt was the person 1!", 2: "A\nPerson, 2.", 3: "A\nPerson 12", 4: "A\nperson"}
    url = serve(passages(lambda query: [texts.get(int(query.split()[-1][:-1]), "A\nnothing")])).url
    line = try_search(Search(url, 3), QUESTIONS)
    seconds, thousand = map(
        float, re.search(r"5 questions took (.*) s, 1,000 searches .* take (.*) s;", line).groups()
    )
    assert thousand == pytest.approx(200 * seconds, abs=1.1) and line.endswith(
        "in the passages of 2 of them"
    )


class Usage:
    def __init__(self, free):
        self.free, self.total = free, 1e15


@pytest.mark.parametrize("rank, trained", [(0, 165_960_320), (8, 366_592)])
def test_checkpoints_that_will_not_fit_are_refused_before_the_run(
    monkeypatch, tmp_path, rank, trained
):
    """All weights, or rank times in + out of 2 blocks' 7 matrices; with two moments, 12 bytes
    each."""
    assert rank == 0 or trained == 2 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    cfg = Config(model="Qwen/Qwen2.5-0.5B", lora_rank=rank, keep=2, out=str(tmp_path / "a/run"))
    size, most = disk(cfg, QWEN)
    policy = 4 * (165_960_320 + trained * (rank > 0))
    whole = 12 * trained + 4 * 896 * 151936 * (rank == 0)  # the tied head stands in it twice
    assert size == pytest.approx(whole / 1e9)
    # two newest, one that is being written, the best
    assert most == pytest.approx((4 * whole + policy) / 1e9)
    monkeypatch.setattr(checks, "shapes", lambda _: QWEN)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(most * 1e9 - 1))
    with pytest.raises(Fault, match=f"{tmp_path}: .*--keep") as e:
        check_disk(cfg)
    assert "\n" not in str(e.value)
    (tmp_path / "a/run/checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "a/run/checkpoints/step-000001/x").write_bytes(b"xx")
    check_disk(cfg)  # what a resumed run has written is room
    # nothing is the best
    assert disk(replace(cfg, eval_every=0), QWEN)[1] == pytest.approx(most - size)
    # two are all it ever writes
    assert disk(replace(cfg, T=25, save_every=25, eval_every=0), QWEN)[1] < most - size


@pytest.mark.parametrize("found", [[], ["", " \n"]], ids=["none", "empty"])
def test_a_server_that_finds_nothing_ends_the_run_at_its_start(serve, found):
    with pytest.raises(Fault, match="found no passage for any of 5 questions: check its index"):
        try_search(Search(serve(passages(lambda query: found)).url, 3), QUESTIONS)


def test_a_server_whose_passages_hold_nearly_no_gold_answer_is_suspicious(serve):
    url = serve(passages(lambda query: ["A\nPerson 1" if "number 1?" in query else "A\nx"])).url
    assert "nearly none" not in try_search(Search(url, 3), QUESTIONS)  # a fifth
    line = try_search(Search(serve(passages(lambda query: ["A\nx"])).url, 3), QUESTIONS * 5)
    assert "in the passages of 0 of them: nearly none" in line


def test_a_refused_topk_is_named(serve):
    with pytest.raises(Fault, match=r"/retrieve: HTTP 422: too many"):
        try_search(Search(serve((422, {}, "too many")).url, 1000), QUESTIONS)


@pytest.mark.parametrize(
    "reply", [{"results": [[]]}, {"result": [[{"content": "x"}]]}, {"result": []}]
)
def test_a_server_with_other_field_names_ends_the_run_at_its_start(serve, reply):
    url = serve(reply).url
    with pytest.raises(
        Fault, match=rf"--retriever: .*{url}/retrieve: malformed answer \((Key|Value)Error"
    ):
        SearchQA(Config(retriever=url)).start(None)


def test_an_instruction_that_leaves_no_room_for_a_turn_ends_the_run_at_its_start(monkeypatch):
    cfg = parse_flags(["--mode", "static"])
    task, tokenizer = SearchQA(cfg), load_tokenizer(str(WORLD / "policy"))
    shortest = min(
        len(task.make_format(tokenizer).encode_prompt(task.instruction, q))
        for q in task.questions("train")[:64]
    )
    assert check_machine(replace(cfg, max_prompt=shortest), "cpu", task).engine == "torch"
    with pytest.raises(
        Fault, match=f"--max_prompt 10: .* are {shortest} tokens at least, .*; raise it"
    ):
        check_machine(replace(cfg, max_prompt=10), "cpu", task)
    with pytest.raises(Fault, match="it ends at 1024 tokens; lower --max_prompt"):
        check_machine(replace(cfg, max_prompt=1000), "cpu", task)


def test_small_micro_batches_are_a_cpu_s_alone_unless_the_user_asks(monkeypatch, capsys):
    cfg = parse_flags(["--mode", "static", "--engine", "torch"])
    task = SearchQA(cfg)

    def decided(device, **asked):
        given = replace(cfg, **asked)
        found = check_machine(given, device, task)
        return found.micro_tokens, found.recompute

    assert decided("cpu") == (1024, 0)
    assert decided("cpu", recompute=1) == (1024, 1)
    assert decided("cpu", micro_tokens=300) == (300, 1)
    card = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    assert decided("cuda")[0] == 32768
    assert "--gather" not in capsys.readouterr().out
    monkeypatch.setattr(fit, "SURE", 0.0)  # as if nothing had room
    decided("cuda", gather=0)
    assert "--gather" not in capsys.readouterr().out
    decided("cuda")
    assert capsys.readouterr().out.count("--gather") == 1


def test_a_large_model_is_not_trained_on_a_cpu_that_nobody_asked_for():
    """Where torch finds no CUDA; --device cpu goes on, to the next thing that is missing."""
    cfg = replace(parse_flags([]), model="Qwen/Qwen2.5-0.5B")
    with pytest.raises(Fault, match="^--model Qwen/Qwen2.5-0.5B: .*CUDA.*--device cpu"):
        check_device(cfg)
    check_device(replace(cfg, device="cpu"))
    check_device(parse_flags([]))
    with pytest.raises(Fault, match="the hub cannot be reached|no causal LM can be loaded"):
        check_machine(replace(cfg, device="cpu"), "cpu", SearchQA(cfg))


@pytest.mark.ranks
def test_under_torchrun_the_list_of_what_is_missing_comes_last_and_has_the_gpu(tmp_path):
    """The paper's command on a machine without a hub, passages, a key or a GPU."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        ROOT / "inspo.py",
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")} | {
        "HF_HUB_OFFLINE": "1"
    }
    done = subprocess.run(
        [*command, "--model", "qwen2.5-3b"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr.split("Root Cause")[1]
    *_, last = done.stderr.split("traceback : ")
    for missing in ("--model", "--train", "--test", "search", "optimizer"):
        assert missing in last, last
    assert "CUDA" in last and last.startswith("6 things")


def test_a_full_gpu_is_told_in_one_line_that_names_a_remedy(monkeypatch, tmp_path):
    def update(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."
        )

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(SystemExit) as ended:
        flags = (
            f"--mode static --tools none --T 1 --batch 2 --G 2 --eval_n 2 --out {tmp_path / 'run'}"
        )
        inspo.main(flags.split())
    line = str(ended.value).strip().splitlines()[0]
    assert re.match(
        "update: CUDA out of memory; resume with .*--recompute 1.*--micro_tokens", line
    ), line


def test_a_gpu_that_is_full_when_vllm_wakes_is_out_of_memory():
    def wake_up(parts):
        raise RuntimeError(f"CUDA Error: {reason} at cumem_allocator.cpp:62")

    engine = SimpleNamespace(core=SimpleNamespace(wake_up=wake_up))
    for reason, fault in ("out of memory", torch.OutOfMemoryError), ("unknown error", RuntimeError):
        with pytest.raises(RuntimeError) as e:
            VllmEngine.wake(engine, "weights")
        assert e.type is fault and reason in str(e.value)


def test_servers_of_vllm_are_not_left_out_without_a_word():
    cfg = parse_flags(["--vllm", "http://ann:Geheim42@127.0.0.1:9"])
    with pytest.raises(Fault, match="the engine would be torch; add --engine vllm") as e:
        check_machine(replace(cfg, device="cpu"), "cpu", SearchQA(cfg))
    assert "Geheim" not in str(e.value)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:8000", "http://localhost:8000"])
def test_two_nodes_need_a_search_server_that_both_can_reach(monkeypatch, url):
    cfg = parse_flags(["--mode", "static", "--retriever", url])
    SearchQA(cfg).check()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(
        Fault, match="2 nodes: give --retriever with an address that all of them can reach"
    ):
        SearchQA(cfg).check()
    SearchQA(replace(cfg, retriever="http://node-0:8000")).check()
    SearchQA(replace(cfg, tools="none")).check()


def test_the_world_s_optimizer_is_the_one_that_was_named_and_comes_back_when_it_was_killed(
    tmp_path,
):
    prompt = reflection_prompt(
        SEARCH_R1, [("Question: who?\n<answer> x </answer>", ("y",))], 6, 1000
    )
    guesses = reply_to(prompt, 3, guess=True)
    cfg = parse_flags(["--seed", "3", "--optimizer_model", "guessing"])
    with Servers(tmp_path / "log") as serve:
        optimizer = connect_optimizer(cfg, serve, [])
        assert optimizer.ask(prompt).reply == guesses != reply_to(prompt, 3)
        [child] = serve._running.values()
        child.stop()
        again = optimizer.ask(prompt)
        assert again.reply == guesses
    argv = []
    connect_optimizer(
        parse_flags(["--seed", "3"]), lambda *args: argv.extend(args) or "http://127.0.0.1:9", []
    )
    assert argv == ["-m", "world.optimizer", "--seed", "3"]


def test_no_password_in_a_url_is_shown():
    assert describe_optimizer(Optimizer("http://me:pass@host/v1", "m")).startswith(
        "m at http://host/v1 "
    )
