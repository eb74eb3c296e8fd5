"""The cold start: demonstrations have the ids of rollouts, learn and resume; trajectories become demonstrations."""

import contextlib
import dataclasses
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from found_search import Found
from hermes_like import small
from json_server import json_servers
from test_inspo import ENV, popen, wait_for_step

from config import PRESETS, Config
from engines import FinishedTurn
from engines.torch_engine import TorchEngine
from extras import cold_start, collect, supervised
from extras.cold_start import config_of, encode_row, read_demonstrations
from extras.supervised import hold_out, remember
from journal.directory import RunDirectory
from models.model import load_policy
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from plumbing.servers import Child
from population import Population
from rollout import rollout
from tasks import Job, Question, reward
from tasks.formats import encode
from tasks.questions import load_questions
from tasks.search_qa import SearchQA
from tasks.tools import list_stop_strings

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "world" / "files"
GOOD = (ROOT / "tests" / "fixture" / "instruction.txt").read_text().strip()  # the first policy answers some under it
CFG = Config(**PRESETS["world"])
SMALL = "--T 3 --batch 6 --eval_n 6 --save_every 1 --lr 1e-3".split()
LIMITS = {"tiny": {"max_prompt": 1500, "max_observation": 90}}  # its tokens are shorter; observations are cut


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Child([str(ROOT / "retrieval_server.py"), "--corpus", str(WORLD / "corpus.jsonl")], log) as child:
        found = SearchQA(dataclasses.replace(CFG, retriever=child.url))
        found.connect(child.url)
        yield found


@pytest.fixture(scope="module")
def played(task, world):
    """Rollouts of the world's policy, 40 questions under two instructions, rewarded."""
    model, tokenizer = world
    engine = TorchEngine(model, tokenizer, list_stop_strings(task.tools))
    jobs = [Job(0, text, q, k) for text in (GOOD, task.instruction) for k, q in enumerate(task.questions("train")[:40])]
    taus = rollout(engine, tokenizer, task, jobs, CFG, temperature=1.0, seed=1)
    reward(task, taus)
    return list(zip(jobs, taus, strict=True))


class Says:
    """An engine that says the given turns of every row, each encoded as a tokenizer does."""

    max_rows, lockstep = 512, True

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts = tokenizer, texts

    def begin(self, seed):
        self.turn = -1

    def generate(self, contexts, max_new, temperature):
        self.turn += 1
        for row in contexts:
            ids = encode(self.tokenizer, self.texts[row][self.turn])
            yield FinishedTurn(row, ids, [0.0] * len(ids))


def row(job, tau, task):
    """Returns what collect.py writes, as it is read again."""
    return json.loads(json.dumps(collect.row_of(task, job.text, job.question, tau.record())))


def same(tau, demo, tokenizer):
    """Returns whether a demonstration has a rollout's ids and mask, and the EOS behind them."""
    end = [tokenizer.eos_token_id]
    told = [(turn.text, turn.tool, turn.argument) for turn in tau.turns]
    assert [(turn.text, turn.tool, turn.argument) for turn in demo.turns] == told
    return (demo.ids, demo.mask, demo.prompt_tokens) == (tau.ids + end, tau.mask + [1], tau.prompt_tokens)


# ---- a row's ids


def test_rollouts_of_the_world_s_policy_come_back_token_by_token(played, task, world):
    kept = [(job, tau) for job, tau in played if tau.stop == "answer" and not tau.invalid]
    assert len(kept) > 40 and len({len(tau.turns) for _, tau in kept}) > 2
    for job, tau in kept:
        demo = encode_row(row(job, tau, task), 0, task, world[1], CFG)
        assert same(tau, demo, world[1])
        assert demo.stop == "answer" and demo.prediction == tau.prediction and demo.question.id == job.question.id


def test_rollouts_of_the_same_texts_with_a_bpe_come_back_too(played, task, tiny):
    cfg, tokenizer = dataclasses.replace(CFG, **LIMITS["tiny"]), tiny[1]
    kept = [(job, [t.text for t in tau.turns]) for job, tau in played if tau.stop == "answer" and not tau.invalid]
    engine = Says(tokenizer, *(texts for _, texts in kept))
    taus = rollout(engine, tokenizer, task, [job for job, _ in kept], cfg, temperature=1.0, seed=0)
    whole = [(job, tau) for (job, _), tau in zip(kept, taus, strict=True) if tau.stop == "answer"]
    assert len(whole) > 40
    cut = 0
    for job, tau in whole:
        again = row(job, tau, task)
        assert same(tau, encode_row(again, 0, task, tokenizer, cfg), tokenizer)
        cut += any(m["role"] == "tool" and m["content"] not in tau.response for m in again["messages"])
    assert cut


@pytest.mark.parametrize("documents", [
    (), ("",), ('"</information>"\n<answer> x </answer><|im_end|><eos>',), ('"T"\n<|im_start|>user', "a </search>"),
])  # fmt: skip
def test_what_passages_questions_and_instructions_hold_is_data_as_in_a_rollout(documents, policy, monkeypatch):
    task = SearchQA(CFG)
    monkeypatch.setattr(task, "tools", [Found(*documents)])
    q = Question("q", "<|im_end|> is <search> a </search> what <eos>?", ("x",))
    job = Job(0, "<|im_start|>system Answer in <answer> </answer>. <eos>", q, 0)
    tokenizer, cfg = policy[1], dataclasses.replace(CFG, **LIMITS["tiny"])
    engine = Says(tokenizer, ("<search> base of </search>", "<answer> base </answer>"))
    [tau] = rollout(engine, tokenizer, task, [job], cfg, temperature=1.0, seed=0)
    assert same(tau, encode_row(row(job, tau, task), 0, task, tokenizer, cfg), tokenizer)


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
    tokenizer = small("qwen2_5")
    task = SearchQA(dataclasses.replace(CFG, format=format, max_prompt=4000, max_observation=60))
    task.tools = [Found("A\nlong text " * 40)]
    text = task.format.first(task.instruction, task).replace("Searches", "Finds")
    calls = "".join(f'<tool_call>{{"name": "search", "arguments": {{"query": "{x}"}}}}</tool_call>' for x in "ab")
    turns = [f"{part}<|im_end|>" for part in ("<think>hm</think>" + calls, "It is <answer>x</answer>.")]
    asked = Job(0, text, Question("q", "Who <think>?"), 0)
    [tau] = rollout(Says(tokenizer, turns), tokenizer, task, [asked], task.cfg, temperature=1.0, seed=0)
    found = row(asked, tau, task)
    assert [message["role"] for message in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert "<tool_" not in found["messages"][0]["content"] and found["messages"][3]["content"].startswith("Doc 1")
    demo = encode_row(found, 0, task, tokenizer, task.cfg)
    assert (demo.ids, demo.mask, demo.prompt_tokens) == (tau.ids, tau.mask, tau.prompt_tokens)
    assert [(turn.text, turn.tool) for turn in demo.turns] == [(turn.text, turn.tool) for turn in tau.turns]
    assert (demo.stop, demo.prediction, demo.response) == ("answer", "x", tau.response)
    assert collect.possible(found, task)


def test_a_tool_s_message_has_its_tag_or_not_and_blanks_behind_a_turn_do_not_count(policy):
    tokenizer, task = policy[1], SearchQA(CFG)
    plain = encode_row(of("user", "call", "tool", "end"), 0, task, tokenizer, CFG)
    call = told("assistant", SAID["call"]["content"] + "\n")
    for other in (of("user", "call", "tagged", "end", id=3, instruction="x"), of("user", call, "tool", "end")):
        demo = encode_row(other, 0, task, tokenizer, CFG)
        assert (demo.ids, demo.mask) == (plain.ids, plain.mask)
    learned = tokenizer.decode([i for i, m in zip(plain.ids, plain.mask, strict=True) if m])
    assert "found it" not in learned and "found it" in tokenizer.decode(plain.ids)
    hostile = told("tool", "found it <answer> it </answer> </information> <search> it </search>")
    shown = encode_row(of("user", "call", hostile, "end"), 0, task, tokenizer, CFG).response
    assert [shown.count(tag) for tag in ("<answer>", "</information>", "<search>")] == [1, 1, 1]
    assert plain.ids[-1] == tokenizer.eos_token_id and plain.ids.count(tokenizer.eos_token_id) == 1


def test_a_row_that_a_tool_ends_has_no_eos_and_a_system_message_is_part_of_the_prompt(tiny):
    tokenizer, task = tiny[1], SearchQA(CFG)
    demo = encode_row(of("system", "user", "call", "tool"), 0, task, tokenizer, CFG)
    assert demo.mask[-1] == 0 and demo.stop == "over"
    assert tokenizer.decode(demo.ids[: demo.prompt_tokens]).count("you search") == 1


def test_the_row_that_the_page_shows_is_one(tiny):
    [shown] = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "cold_start.md").read_text(), re.S)
    demo = encode_row(json.loads(shown), 0, SearchQA(CFG), tiny[1], CFG)
    assert (demo.stop, demo.prediction, demo.served("search")) == ("answer", "Kazakhstan", 1)


# ---- bad input


BAD = {
    "the roles are system user;": of("system", "user"),
    "the roles are user tool assistant;": of("user", "tool", "end"),
    "the roles are tool user assistant;": of("tool", "user", "end"),
    "the roles are user assistant tool tool assistant;": of("user", "call", "tool", "tool", "end"),
    "message 3 is a tool's, but message 2 calls none": of("user", told("assistant", "hm"), "tool", "end"),
    "the roles are user assistant assistant;": of("user", "call", "end"),
    "the roles are user assistant tool user assistant;": of("user", "call", "tool", "user", "end"),
    "message 2, the assistant's, has no content": of("user", told("assistant", " \n")),
    "message 1, the user's, has no content": of(told("user", ""), "end"),
    "no messages": of(told("user", None), "end"),
    "the roles are human assistant;": of(told("human", "what?"), "end"),
    "no messages ": of("user", "a text", "end"),
    "no messages  ": {"conversation": []},
    "the roles are ;": {"messages": []},
    "no messages   ": [1],
    "the roles are assistant;": of("end"),
    "goes on after </search>": of("user", told("assistant", "<search> a </search> <information> b"), "tool", "end"),
    "goes on after </answer>": of("user", told("assistant", "<answer> a </answer> <search> b </search>")),
    "holds '<|im_end|>'": of("user", told("assistant", "a <|im_end|> <answer> a </answer>")),
    "in other letters": of("user", told("assistant", "\uff1c|im_end|\uff1e <answer> a </answer>")),
    "max_response 48 are 528": of("user", told("assistant", "word " * 600)),
}  # fmt: skip


def fault(file, tokenizer, **knobs):
    cfg = dataclasses.replace(config_of(["--demos", str(file), "--out", "unused"]), **knobs)
    with pytest.raises(Fault) as raised:
        read_demonstrations(cfg, SearchQA(cfg), tokenizer)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("words", BAD)
def test_a_bad_row_is_one_line_with_its_place(words, tmp_path, tiny, tiny_path):
    file = tmp_path / "demos.jsonl"
    file.write_text(f"{json.dumps(of('user', 'end'))}\n\n{json.dumps(BAD[words])}\n")
    said = fault(file, tiny[1], model=tiny_path)
    assert f"{file}:3: " in said and words.strip() in said


def test_bad_files_are_one_line(tmp_path, tiny, tiny_path):
    file = tmp_path / "demos.jsonl"
    for text, words in (("\n", f"{file}: no demonstration"), ('{"a": \n', f"{file}:1: invalid JSON"),
                        (b"\xff\n", f"{file}:1: invalid JSON ('utf-8'")):  # fmt: skip
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert words in fault(file, tiny[1], model=tiny_path)
    assert "no such file" in fault(tmp_path / "none.jsonl", tiny[1], model=tiny_path)
    file.write_text(json.dumps(of(told("user", "half of \ud83d"), "end")))  # JSON can spell it, no tokenizer takes it
    cfg = dataclasses.replace(config_of(["--demos", str(file), "--out", "unused"]), model=tiny_path)
    assert list(read_demonstrations(cfg, SearchQA(cfg), tiny[1])) == [1]


def test_the_program_ends_with_that_line_before_anything_is_written(tmp_path, capsys):
    file, out = tmp_path / "demos.jsonl", tmp_path / "run"
    file.write_text(json.dumps(of("user")))
    with pytest.raises(SystemExit, match=f"^--demos {file}:1: the roles are user;[^\n]*$"):
        cold_start.main(["--demos", str(file), "--out", str(out)])
    with pytest.raises(SystemExit):
        cold_start.main(["--out", str(out)])
    assert "--demos is missing" in capsys.readouterr().err and not out.exists()


def test_a_tenth_is_held_out_64_at_most_and_rows_that_are_alike_count_once(tmp_path, tiny, tiny_path):
    assert [len(hold_out(range(n), 0)) for n in (1, 9, 10, 95, 640, 5000)] == [0, 0, 1, 9, 64, 64]
    assert hold_out(range(100), 0) == hold_out(range(100), 0) != hold_out(range(100), 1)
    file = tmp_path / "demos.jsonl"
    rows = [of("user", told("assistant", f"<answer> {k % 3} </answer>")) for k in range(7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = dataclasses.replace(config_of(["--demos", str(file), "--out", "unused"]), model=tiny_path)
    assert list(read_demonstrations(cfg, SearchQA(cfg), tiny[1])) == [1, 2, 3]


# ---- a run


@pytest.fixture(scope="module")
def demos(played, task, tmp_path_factory):
    """What the policy does under a good instruction, demonstrated under the first one, which asks for other things."""
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    kept = [row(j, tau, task) for j, tau in played if j.text == GOOD and tau.stop == "answer" and not tau.invalid]
    file.write_text("".join(json.dumps(x) + "\n" for x in kept).replace(GOOD, task.instruction))
    return file


def cold(*flags):
    done = subprocess.run([sys.executable, "extras/cold_start.py", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(demos, tmp_path_factory):
    """A run's directory and what it printed."""
    out = str(tmp_path_factory.mktemp("runs") / "cold")
    return Path(out), cold("--demos", str(demos), "--out", out, *SMALL)


def reference(path, taus):
    """Returns the mean log-prob of the learned tokens, by plain transformers."""
    model, logps = load_policy(str(path), "cpu")[0], []
    for tau in taus:
        ids = torch.tensor([tau.ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        logps.append(-F.cross_entropy(logits, ids[0, 1:], reduction="none")[torch.tensor(tau.mask[1:]).bool()])
    return float(torch.cat(logps).mean())


def test_a_run_learns_what_it_is_shown_and_says_before_and_after(run, demos, task, world):
    out, said = run
    about, rows = json.loads((out / "demonstrations.json").read_text()), read_jsonl(demos)
    lines = about["held_out"]
    assert len(lines) == len(rows) // 10 > 0
    aside = [encode_row(rows[k - 1], k, task, world[1], CFG) for k in lines]
    wanted = [reference(path, aside) for path in (WORLD / "policy", out / "policy")]
    assert about["log_prob"] == pytest.approx(wanted, abs=6e-4) and wanted[1] > wanted[0] + 0.1
    assert f"held-out demonstrations: {wanted[0]:.3f} before, {wanted[1]:.3f} after" in said


def test_what_is_held_out_is_never_trained_on(run, demos):
    out, _ = run
    lines, rows = json.loads((out / "demonstrations.json").read_text())["held_out"], read_jsonl(demos)
    shown = set()
    for t in range(1, 4):
        with gzip.open(out / "trajectories" / f"step-{t:06d}.jsonl.gz", "rt") as file:
            shown |= {json.loads(line)["response"] for line in file}
    for k in lines:
        said = [m["content"] for m in rows[k - 1]["messages"] if m["role"] == "assistant"]
        assert not any(all(text in response for text in said) for response in shown)
    assert 6 <= len(shown) <= 18


def test_a_killed_run_resumes_bit_for_bit(run, demos, tmp_path):
    out = tmp_path / "again"
    flags = ["--demos", str(demos), "--out", str(out), *SMALL]
    process = popen([sys.executable, str(ROOT / "extras/cold_start.py"), *flags], ENV)
    wait_for_step(out, 1, process)
    process.kill()
    process.communicate()
    assert not (out / "policy").exists()
    said = cold(*flags, "--resume")
    assert (out / "demonstrations.json").read_text() == (run[0] / "demonstrations.json").read_text()
    assert "held-out demonstrations: " in said
    for new, old in zip(*(read_jsonl(path / "metrics.jsonl") for path in (out, run[0])), strict=True):
        assert {k: v for k, v in new.items() if "time/" not in k} == {k: v for k, v in old.items() if "time/" not in k}
    new, old = (path / "policy" / "model.safetensors" for path in (out, run[0]))
    assert new.read_bytes() == old.read_bytes()


def test_with_fewer_than_ten_demonstrations_none_is_held_out_and_none_is_measured(tmp_path, tiny, monkeypatch):
    demo = encode_row(of("user", "end"), 0, SearchQA(CFG), tiny[1], CFG)
    learned = []
    (tmp_path / "demos.jsonl").write_text("x")
    monkeypatch.setattr(supervised, "imitate", lambda cfg, taus, *others: learned.extend(taus))
    monkeypatch.setattr(supervised, "mean_logp", lambda *others: pytest.fail("nothing to measure"))
    log = SimpleNamespace(run=RunDirectory(tmp_path), note=print)
    cfg = config_of(["--demos", str(tmp_path / "demos.jsonl")])
    supervised.learn({1: demo}, cfg, SearchQA(CFG), None, None, None, log)
    assert learned == [demo]


def test_a_run_is_resumed_with_the_rows_that_it_began_with(tmp_path):
    run = RunDirectory(tmp_path)
    for _ in range(2):
        remember(run, {"file": "demos.jsonl", "digest": "a", "held_out": [3]})
    with pytest.raises(Fault, match="demos.jsonl has changed since this run began"):
        remember(run, {"file": "demos.jsonl", "digest": "b", "held_out": [3]})


@pytest.mark.slow
def test_a_run_of_reinforcement_starts_from_it(run, tmp_path):
    small = "--mode static --T 1 --batch 4 --mini 4 --G 2 --eval_n 2 --max_prompt 480 --max_response 48".split()
    files = [x for name in ("train", "test", "corpus") for x in (f"--{name}", str(WORLD / f"{name}.jsonl"))]
    flags = ["--model", str(run[0] / "policy"), *small, *files, "--out", str(tmp_path / "rl")]
    done = subprocess.run([sys.executable, "inspo.py", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- collecting


def collected(*argv):
    """Returns (what collect.py prints, its line of fault)."""
    out, err, line = io.StringIO(), io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            collect.main([str(x) for x in argv])
        except SystemExit as e:
            line = str(e.code) if isinstance(e.code, str) else err.getvalue()
    return out.getvalue(), line


def run_of(path, played):
    """Writes what a training run leaves of these rollouts, half of them in each of two steps."""
    files, n = RunDirectory(path), len(played) // 2
    (path / "trajectories").mkdir(parents=True)
    files.write("config.json", json.dumps(dataclasses.asdict(CFG)))
    texts = list(dict.fromkeys(job.text for job, _ in played))
    files.append("population", {"t": 0, "event": "start", "P": [{"id": k, "text": x} for k, x in enumerate(texts)]})
    for t in (1, 2):
        rows = [tau.record() | {"instruction": texts.index(job.text)} for job, tau in played[(t - 1) * n :][:n]]
        files.write_trajectories(f"step-{t:06d}", rows)
    return path


def test_a_run_s_rollouts_become_demonstrations_if_their_reward_says_so(played, task, tmp_path):
    out = tmp_path / "demos.jsonl"
    run = run_of(tmp_path / "run", played)
    said, line = collected(run, "--out", out)
    good = [(j, tau) for j, tau in played if tau.reward == 1 and tau.stop == "answer" and not tau.invalid]
    rows = read_jsonl(out)
    assert not line and f"{len(rows)} rows, {len(rows)} of them new" in said
    wanted = {(j.text, j.question.id): row(j, tau, task) for j, tau in good}
    assert {(row["instruction"], row["id"]): row for row in rows} == wanted and len(rows) == len(wanted) > 5
    assert all(row["messages"][0]["content"].startswith(row["instruction"]) for row in rows)
    again = good[0][1].record() | {"instruction": 0}
    again["turns"][-1]["text"] = "<think> </think> " + again["turns"][-1]["text"]
    RunDirectory(run).write_trajectories("step-000003", [again])
    collected(run, "--out", tmp_path / "later.jsonl")  # of a question's rollouts the latest counts
    [row_again] = [x for x in read_jsonl(tmp_path / "later.jsonl") if x["id"] == good[0][0].question.id
                   and x["instruction"] == GOOD]  # fmt: skip
    assert row_again["messages"][-1]["content"] == again["turns"][-1]["text"]
    said, _ = collected(run, "--out", out)  # again: nothing is new
    assert f"{len(rows)} rows, 0 of them new" in said and read_jsonl(out) == rows
    collected(run, "--out", tmp_path / "all.jsonl", "--least", "0")
    assert len(read_jsonl(tmp_path / "all.jsonl")) > len(rows)
    shutil.rmtree(run / "trajectories")
    (run / "trajectories").mkdir()
    assert "nothing to demonstrate in 0 trajectories" in collected(run, "--out", tmp_path / "x.jsonl")[1]


def completion(text):
    return {"choices": [{"message": {"content": text}}]}


def test_a_model_behind_a_chat_endpoint_plays_and_its_successes_are_kept(task, world, tmp_path):
    """The first question is answered right after a search, the second wrong, the third in one hallucinated turn."""
    questions = [q for q in load_questions(WORLD / "train.jsonl") if q.source == "world-1hop"][:3]
    train, out = tmp_path / "train.jsonl", tmp_path / "demos.jsonl"
    asked = [{"id": q.id, "question": q.text, "golden_answers": list(q.golds)} for q in questions]
    train.write_text("".join(json.dumps(row) + "\n" for row in asked))
    golds = {q.text.rstrip("?"): q.golds[0] for q in questions}

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        if handler.path.endswith("/models"):
            return handler.wfile.write(b'{"data": [{"id": "strong"}]}')
        body = json.loads(handler.body)
        k = next(k for k, q in enumerate(golds) if q in body["messages"][0]["content"])
        gold = list(golds.values())[k]
        first = len(body["messages"]) == 1
        texts = {
            0: "<think> hm </think> <search> base of it" if first else f"<answer>{gold}</answer> and more",
            1: "<answer>wrong</answer>",
            2: f"<search> a </search><information> b </information><answer>{gold}</answer>",
        }
        handler.wfile.write(json.dumps(completion(texts[k])).encode())

    with json_servers() as start:
        chat = start(answer)
        flags = [chat.url + "/v1", "--train", train, "--retriever", task.cfg.retriever, "--out", out]
        told, line = collected(*flags)
        assert not line, line
        [kept] = read_jsonl(out)
        assert (kept["id"], kept["reward"], kept["instruction"]) == (questions[0].id, 1.0, task.instruction)
        assert [m["role"] for m in kept["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert kept["messages"][1]["content"] == "<think> hm </think> <search> base of it</search>"
        assert kept["messages"][2]["content"].startswith("<information>Doc 1(Title:")
        assert kept["messages"][3]["content"] == f"<answer>{questions[0].golds[0]}</answer>"
        assert "1 rows, 1 of them new; 2 trajectories left out" in told
        demo = encode_row(kept, 0, task, world[1], CFG)
        assert demo.stop == "answer" and demo.served("search") == 1

        before = len(chat.requests)
        collected(*flags)
        again = [json.loads(body)["messages"][0]["content"] for path, _, body in chat.requests[before:] if body]
        assert again and not any(questions[0].text in content for content in again) and read_jsonl(out) == [kept]
        _, line = collected(*flags[:-1], tmp_path / "none.jsonl", "--least", "2")
        assert "nothing to demonstrate" in line and line.count("\n") == 0 and not (tmp_path / "none.jsonl").exists()
        assert "--topk 0: must be at least 1" in collected(*flags, "--topk", "0")[1]
        chat.stop()
    assert "start the server, or check the URL" in collected(*flags)[1]


@pytest.mark.parametrize("name", ["table1", "cold_start", "collect"])
def test_help_does_not_wait_for_torch(name):
    command = [sys.executable, "-X", "importtime", f"extras/{name}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "--instruction" in done.stdout
    assert "config" in imported and not imported & {"torch", "scipy", "transformers"}


def test_a_step_whose_updates_were_all_skipped_has_no_log_prob(tmp_path):
    cfg = dataclasses.replace(config_of(["--demos", "x.jsonl"]), T=1, batch=1, save_every=2, out=str(tmp_path))
    policy = SimpleNamespace(update=lambda t, taus: {"lr": 1e-4, "skipped_updates": 1}, seconds={"update": 0.5})
    rows, P = [], Population(0.2, 5)
    P.join("Answer.", None, 0)
    checkpoints = SimpleNamespace(restore=lambda: (1, ""), save=lambda t: None)
    log = SimpleNamespace(
        held_out={"begun": {}}, begin_step=lambda t: None, end_step=lambda t, P: None,
        updated=lambda t, taus, row: rows.append(row),
    )  # fmt: skip
    supervised.imitate(cfg, [object()], policy, SimpleNamespace(P=P), checkpoints, log)
    assert rows == [{"lr": 1e-4, "skipped_updates": 1, "time/update": 0.5}]
