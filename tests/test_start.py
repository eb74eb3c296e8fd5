"""What a run finds out about its servers before it starts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from json_server import passages

import inspo
from config import WORLD, Config, parse_flags
from grpo import Learner
from models.model import load_tokenizer
from plumbing.faults import Fault
from plumbing.servers import Servers
from reflect import connect_optimizer, reflection_prompt
from tasks import Question
from tasks.search_qa import SEARCH_R1, Search, SearchQA, try_search
from training import policy
from training.policy import choose_for_machine
from world.optimizer import reply_to

ROOT = Path(__file__).parent.parent
QUESTIONS = [Question(str(k), f"Who is number {k}?", (f"Person {k}",), "x") for k in range(5)]


def test_gold_answers_in_passages_are_counted(serve):
    # "Person 1" is not in "Person 12", nor in "person".
    texts = {1: "A\nIt was the person 1!", 2: "A\nPerson, 2.", 3: "A\nPerson 12", 4: "A\nperson"}
    url = serve(passages(lambda query: [texts.get(int(query.split()[-1][:-1]), "A\nnothing")])).url
    line = try_search(Search(url, 3), QUESTIONS)
    assert line == "a gold answer was in the passages of 2 of 5 questions"


@pytest.mark.parametrize("found", [[], ["", " \n"]], ids=["none", "empty"])
def test_a_server_that_finds_nothing_ends_the_run_at_its_start(serve, found):
    with pytest.raises(Fault, match="found no passage for any of 5 questions: check its index"):
        try_search(Search(serve(passages(lambda query: found)).url, 3), QUESTIONS)


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
    assert choose_for_machine(replace(cfg, max_prompt=shortest), task)[1].engine == "torch"
    with pytest.raises(
        Fault, match=f"--max_prompt 10: .* are {shortest} tokens at least, .*; raise it"
    ):
        choose_for_machine(replace(cfg, max_prompt=10), task)
    with pytest.raises(Fault, match="it takes 1024 tokens at most; lower --max_prompt"):
        choose_for_machine(replace(cfg, max_prompt=1000), task)


def test_small_micro_batches_are_a_cpu_s_alone_unless_the_user_asks(monkeypatch):
    cfg = replace(parse_flags(["--mode", "static", "--engine", "torch"]), recompute=-1)
    task = SearchQA(cfg)
    monkeypatch.setattr(policy, "Ranks", lambda *args: None)

    def chosen(device, **asked):
        monkeypatch.setattr(policy, "device_of", lambda _: device)
        monkeypatch.setattr(policy, "dtype_of", lambda *args: "float32")
        _, found, _ = choose_for_machine(replace(cfg, **asked), task)
        return found.micro_tokens, found.recompute

    assert chosen("cpu") == (1024, 0)
    assert chosen("cpu", recompute=1) == (1024, 1)
    assert chosen("cpu", micro_tokens=300) == (300, 0)
    assert chosen("cuda") == (32768, 1)
    assert chosen("cuda", recompute=0, micro_tokens=8192) == (8192, 0)


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


@pytest.mark.slow
def test_the_world_s_optimizer_is_the_one_that_was_named_and_comes_back_when_it_was_killed(
    tmp_path,
):
    prompt = reflection_prompt(
        SEARCH_R1, [("Question: who?\n<answer> x </answer>", ("y",))], 6, 1000
    )
    guesses = reply_to(prompt, 3, guess=True)
    cfg = parse_flags(["--seed", "3", "--optimizer_model", "guessing"])
    with Servers(tmp_path / "log") as serve:
        optimizer = connect_optimizer(cfg, serve)
        assert optimizer.ask(prompt).reply == guesses != reply_to(prompt, 3)
        [child] = serve._running.values()
        child.stop()
        again = optimizer.ask(prompt)
        assert again.reply == guesses
    argv = []
    connect_optimizer(
        parse_flags(["--seed", "3"]), lambda *args: argv.extend(args) or "http://127.0.0.1:9"
    )
    assert argv == ["-m", "world.optimizer", "--seed", "3"]
