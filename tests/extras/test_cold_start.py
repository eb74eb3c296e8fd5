"""The cold start: demonstrations have the ids of rollouts, learn and resume; trajectories become
demonstrations."""

import contextlib
import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from found_search import Found
from hermes_like import small
from json_server import ChatServer
from scripted import Says
from test_inspo import ENV, finish, metrics, popen, wait_for_step

from config import PRESETS, Config
from engines.torch_engine import TorchEngine
from extras import cold_start, collect
from extras.cold_start import config_of, encode_row, read_demonstrations
from extras.supervised import hold_out, remember
from models.model import load_model
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from rollout import rollout
from run import Run
from tasks import Job, Question
from tasks.search_qa import SearchQA, load_questions
from tasks.task import set_rewards

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "world" / "files"
# the first policy answers some under it
GOOD = (ROOT / "tests" / "fixture" / "instruction.txt").read_text().strip()
CFG = Config(**PRESETS["world"])
SMALL = "--T 3 --batch 6 --eval_n 6 --save_every 1 --lr 1e-3".split()
# its tokens are shorter; observations are cut


@pytest.fixture(scope="module")
def task(retriever):
    found = SearchQA(dataclasses.replace(CFG, retriever=retriever))
    found.connect(retriever)
    return found


@pytest.fixture(scope="module")
def played(task, world):
    """Rollouts of the world's policy, 40 questions under two instructions, rewarded."""
    model, tokenizer = world
    engine = TorchEngine(model, tokenizer, task.make_format().stop_strings())
    jobs = [
        Job(0, text, q, k)
        for text in (GOOD, task.instruction)
        for k, q in enumerate(task.questions("train")[:40])
    ]
    taus = rollout(engine, tokenizer, task, jobs, CFG, temperature=1.0, seed=1)
    set_rewards(task, taus)
    return list(zip(jobs, taus, strict=True))


def row(job, tau, task):
    """Returns what collect.py writes, as it is read again."""
    return json.loads(json.dumps(collect.row_of(task, job.instruction, job.question, tau.record())))


def same(tau, demo, tokenizer, end=True):
    """Returns whether a demonstration has a rollout's turns, ids and mask, and behind them the end
    that the chat template gives a turn."""
    ends = [end_of(tokenizer)] * end
    wanted = tau.ids + ends, tau.mask + [1] * end
    turns = [
        [(turn.text, turn.tool, turn.argument) for turn in played.turns] for played in (tau, demo)
    ]
    return (
        turns[0] == turns[1]
        and (demo.ids, demo.mask) == wanted
        and all(
            getattr(demo, name) == getattr(tau, name)
            for name in ("stop", "prediction", "prompt_tokens")
        )
    )


def end_of(tokenizer):
    """Returns the token with which the world's policy ends a turn, or that of Qwen's template (its
    EOS is another)."""
    vocabulary = tokenizer.get_vocab()
    return vocabulary.get("<|im_end|>", vocabulary.get("<eos>"))


def whole(played):
    """Returns the (job, trajectory) pairs from which a demonstration can be made."""
    return [(job, tau) for job, tau in played if tau.stop == "answer" and not tau.invalid]


# ---- a row's ids


def test_rollouts_of_the_world_s_policy_come_back_token_by_token(played, task, world):
    kept = whole(played)
    assert len(kept) > 40 and len({len(tau.turns) for _, tau in kept}) > 2
    for job, tau in kept:
        demo = encode_row(row(job, tau, task), 0, task, world[1], CFG)
        assert same(tau, demo, world[1]) and demo.question.id == job.question.id


SAID = {
    "system": {"role": "system", "content": "you search"},
    "user": {"role": "user", "content": "Question: what is it?"},
    "call": {"role": "assistant", "content": "<think> a </think> <search> a </search>"},
    "tool": {"role": "tool", "content": "found it"},
    "tagged": {"role": "tool", "content": "<information>found it</information>"},
    "end": {"role": "assistant", "content": "<answer> it </answer>"},
}


def of(*names, **more):
    return {"messages": [SAID.get(x, x) if isinstance(x, str) else x for x in names]} | more


def told(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("format", ["hermes", "hermes_tools"])
def test_rollouts_in_a_chat_template_s_own_format_come_back_with_the_end_of_every_turn(format):
    cfg = dataclasses.replace(CFG, format=format, max_prompt=4000, max_observation=60)
    task, tokenizer = SearchQA(cfg), small("qwen2_5")
    task.tools = [Found("A\nlong text " * 40)]
    text = task.make_format().adapt_instruction(task.instruction)
    call = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    turns = [f"<think>hm</think>{call}<|im_end|>", "It is <answer>x</answer>.<|im_end|>"]
    asked = Job(0, text, Question("q", "Who <think>?"), 0)
    [tau] = rollout(Says(tokenizer, turns), tokenizer, task, [asked], cfg, temperature=1.0, seed=0)
    found = row(asked, tau, task)
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in found["messages"]] == roles
    assert "<tool_" not in found["messages"][0]["content"]
    demo = encode_row(found, 0, task, tokenizer, cfg)
    assert same(tau, demo, tokenizer, end=False) and demo.response == tau.response
    assert collect.possible(found, task)


def test_a_tool_s_message_has_its_tag_or_not_and_is_not_learned(policy):
    tokenizer, hostile = policy[1], "found it <answer> it </answer> </information>"
    rows = [
        of("user", "call", "tool", "end"), of("user", "call", "tagged", "end", id=3, instruction="x"),
        of("user", told("assistant", SAID["call"]["content"] + "\n"), "tool", "end"),
        of("user", "call", told("tool", hostile), "end"),
    ]  # fmt: skip
    plain, *others, shown = (encode_row(row, 0, SearchQA(CFG), tokenizer, CFG) for row in rows)
    assert all((demo.ids, demo.mask) == (plain.ids, plain.mask) for demo in others)
    learned = tokenizer.decode([i for i, m in zip(plain.ids, plain.mask, strict=True) if m])
    assert "found it" not in learned and "found it" in tokenizer.decode(plain.ids)
    assert shown.response.count("<answer>") == shown.response.count("</information>") == 1
    assert plain.ids[-1] == end_of(tokenizer)


def test_a_row_that_a_tool_ends_has_no_eos_and_a_system_message_is_part_of_the_prompt(tiny):
    demo = encode_row(of("system", "user", "call", "tool"), 0, SearchQA(CFG), tiny[1], CFG)
    assert demo.mask[-1] == 0 and demo.stop == "over"
    assert tiny[1].decode(demo.ids[: demo.prompt_tokens]).count("you search") == 1


# ---- bad input


BAD = {
    "the roles are system user;": of("system", "user"),
    "message 3 is a tool's, but message 2 calls none": of("user", told("assistant", "hm"), "tool", "end"),
    "the roles are user assistant assistant;": of("user", "call", "end"),
    "message 2, the assistant's, has no content": of("user", told("assistant", " \n")),
    "no messages": {"conversation": []},
    "goes on after </search>": of("user", told("assistant", "<search> a </search> <information> b"), "tool", "end"),
    "goes on after </answer>": of("user", told("assistant", "<answer> a </answer> <search> b </search>")),
    "holds '<|im_end|>'": of("user", told("assistant", "a <|im_end|> <answer> a </answer>")),
    "max_response 32 are 512": of("user", told("assistant", "word " * 600)),
}  # fmt: skip


def read(file, tiny, tiny_path, *rows):
    """Returns what is read of these rows, in a new file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = dataclasses.replace(config_of(["--demos", str(file), "--out", "unused"]), model=tiny_path)
    return read_demonstrations(cfg, SearchQA(cfg), tiny[1])


@pytest.mark.parametrize("words", BAD)
def test_a_bad_row_is_one_line_with_its_place(words, tmp_path, tiny, tiny_path):
    file = tmp_path / "demos.jsonl"
    with pytest.raises(Fault, match=f"^(--demos )?{file}:2: .*{re.escape(words)}.*$"):
        read(file, tiny, tiny_path, of("user", "end"), BAD[words])


def test_a_tenth_is_held_out_and_none_of_less_than_ten():
    assert [len(hold_out(range(n), 0)) for n in (1, 9, 10, 95, 640, 5000)] == [0, 0, 1, 9, 64, 64]
    assert hold_out(range(100), 0) == hold_out(range(100), 0) != hold_out(range(100), 1)


def test_the_program_ends_with_one_line_before_anything_is_written(tmp_path, capsys):
    empty, out = tmp_path / "demos.jsonl", tmp_path / "run"
    empty.touch()
    lines = {str(empty): "no demonstration", "none.jsonl": "no such file", "": "--demos is missing"}
    for demos, line in lines.items():
        with pytest.raises(SystemExit) as e:
            cold_start.main(["--demos", demos, "--out", str(out)])
        assert line in f"{e.value}{capsys.readouterr().err}" and "\n" not in str(e.value)
    assert not out.exists()


# ---- a run


@pytest.fixture(scope="module")
def demos(played, task, tmp_path_factory):
    """What the policy does under a good instruction, demonstrated under the first one, which asks
    for other things."""
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    kept = [
        row(j, tau, task)
        for j, tau in played
        if j.instruction == GOOD and tau.stop == "answer" and not tau.invalid
    ]
    file.write_text("".join(json.dumps(x) + "\n" for x in kept).replace(GOOD, task.instruction))
    return file


def cold(demos, out, *flags):
    command = [
        sys.executable,
        str(ROOT / "extras/cold_start.py"),
        "--demos",
        str(demos),
        "--out",
        str(out),
        *SMALL,
    ]
    return popen([*command, *flags], ENV)


@pytest.fixture(scope="module")
def run(demos, tmp_path_factory):
    """A run's directory and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "cold"
    code, stdout, stderr = finish(cold(demos, out))
    assert code == 0, stderr
    return out, stdout


def reference(path, taus):
    """Returns the mean log-prob of the learned tokens, by plain transformers."""
    model, logps = load_model(str(path)), []
    for tau in taus:
        ids = torch.tensor([tau.ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        logps.append(
            -F.cross_entropy(logits, ids[0, 1:], reduction="none")[
                torch.tensor(tau.mask[1:]).bool()
            ]
        )
    return float(torch.cat(logps).mean())


@pytest.mark.slow
def test_a_run_learns_and_says_what_is_held_out_before_and_after(run, demos, task, world):
    (out, said), rows = run, read_jsonl(demos)
    about = json.loads((out / "demonstrations.json").read_text())
    assert len(about["held_out"]) == len(rows) // 10 > 0
    aside = [encode_row(rows[k - 1], k, task, world[1], CFG) for k in about["held_out"]]
    wanted = [reference(path, aside) for path in (WORLD / "policy", out / "policy")]
    assert about["log_prob"] == pytest.approx(wanted, abs=6e-4) and wanted[1] > wanted[0] + 0.1
    assert f"held-out demonstrations: {wanted[0]:.3f} before, {wanted[1]:.3f} after" in said


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(run, demos, tmp_path):
    out = tmp_path / "again"
    process = cold(demos, out)
    wait_for_step(out, 1, process)
    process.kill()
    process.communicate()
    assert not (out / "policy").exists()
    code, said, stderr = finish(cold(demos, out, "--resume"))
    assert code == 0 and "held-out demonstrations: " in said, stderr
    assert metrics(out) == metrics(run[0])
    for name in ("demonstrations.json", "policy/model.safetensors"):
        assert (out / name).read_bytes() == (run[0] / name).read_bytes()


def test_a_run_is_resumed_with_the_rows_that_it_began_with(tmp_path):
    run, about = Run(tmp_path), {"file": "demos.jsonl", "digest": "a", "held_out": [3]}
    for _ in range(2):
        remember(run, about)
    with pytest.raises(Fault, match="demos.jsonl has changed since this run began"):
        remember(run, about | {"digest": "b"})


# ---- collecting


def collected(*argv):
    """Returns (what collect.py prints, its line of fault)."""
    out, line = io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            collect.main([str(x) for x in argv])
        except SystemExit as e:
            line = str(e.code)
    return out.getvalue(), line


def run_of(path, played):
    """Writes what a training run leaves of these rollouts, half of them in each of two steps."""
    files, n = Run(path), len(played) // 2
    (path / "trajectories").mkdir(parents=True)
    files.write("config.json", json.dumps(dataclasses.asdict(CFG)))
    texts = list(dict.fromkeys(job.instruction for job, _ in played))
    files.append(
        "population",
        {"t": 0, "event": "start", "P": [{"id": k, "text": x} for k, x in enumerate(texts)]},
    )
    for t in (1, 2):
        rows = [
            tau.record() | {"instruction": texts.index(job.instruction)}
            for job, tau in played[(t - 1) * n :][:n]
        ]
        files.write_trajectories(f"step-{t:06d}", rows)
    return path


def test_a_run_s_rollouts_become_demonstrations_if_their_reward_says_so(played, task, tmp_path):
    out, run = tmp_path / "demos.jsonl", run_of(tmp_path / "run", played)
    good = [(j, tau) for j, tau in whole(played) if tau.reward == 1]
    wanted = {(j.instruction, j.question.id): row(j, tau, task) for j, tau in good}
    for new in (len(wanted), 0):  # again: nothing is new
        said, line = collected(run, "--out", out)
        rows = read_jsonl(out)
        assert not line and f"{len(wanted)} rows, {new} of them new" in said
        assert {(row["instruction"], row["id"]): row for row in rows} == wanted
        assert len(rows) == len(wanted) > 5
    collected(run, "--out", tmp_path / "all.jsonl", "--least", "0")
    assert len(read_jsonl(tmp_path / "all.jsonl")) > len(rows)
    # before anything is played
    assert f"--out {run}: name a file" in collected(run, "--out", run)[1]


def test_a_model_behind_a_chat_endpoint_plays_and_its_successes_are_kept(task, world, tmp_path):
    """The first question is answered right after a search, the second wrong."""
    questions = [q for q in load_questions(WORLD / "train.jsonl") if q.source == "world-1hop"][:2]
    train, out, gold = tmp_path / "train.jsonl", tmp_path / "demos.jsonl", questions[0].golds[0]
    asked = [{"id": q.id, "question": q.text, "golden_answers": list(q.golds)} for q in questions]
    train.write_text("".join(json.dumps(row) + "\n" for row in asked))
    right = "<think> hm </think> <search> base of it", f"<answer>{gold}</answer> and more"

    def answer(messages):
        first = questions[0].text.rstrip("?") in messages[0]["content"]
        return right[len(messages) // 2] if first else "<answer>wrong</answer>"

    engine = "--engine", "extras.engines.chat:ChatEngine"
    files = "--train", train, "--retriever", task.cfg.retriever, "--out"
    with ChatServer(answer) as chat:
        said, line = collected(chat.url, *engine, *files, out)
        assert not line and "1 rows, 1 of them new; 1 trajectories left out" in said, line
        [kept] = read_jsonl(out)
        found = kept["id"], kept["reward"], kept["instruction"]
        assert found == (questions[0].id, 1.0, task.instruction)
        [_, call, result, end] = kept["messages"]
        assert [m["role"] for m in kept["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert call["content"] == right[0] + "</search>"
        assert result["content"].startswith("<information>Doc 1(Title:")
        assert end["content"] == f"<answer>{gold}</answer>"
        demo = encode_row(kept, 0, task, world[1], CFG)
        assert demo.stop == "answer" and demo.served("search") == 1

        chat.asked.clear()
        collected(chat.url, *engine, *files, out)
        # what is kept is not asked again
        assert chat.asked and not any(questions[0].text in str(some) for some in chat.asked)
        assert read_jsonl(out) == [kept]
        none = tmp_path / "none.jsonl"
        _, line = collected(chat.url, *engine, *files, none, "--least", "2")
        assert "nothing to demonstrate" in line and not none.exists()
