"""evaluate.py on the world's real policy and search server, on benchmarks' formats, on chat
endpoints, on bad input."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from json_server import json_servers

import ask
import evaluate
from config import HERE, PRESETS, Config
from engines.chat_engine import ChatEngine, Words
from evaluate import estimate_mean
from plumbing.faults import EngineFault, Fault, Outage
from plumbing.files import read_jsonl
from plumbing.servers import Child
from tasks import Question
from tasks.search_qa import Search, em, f1, load_questions
from tasks.task import Game

WORLD = HERE / "world" / "files"


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Child(["-m", "retrieval_server", "--corpus", str(WORLD / "corpus.jsonl")], log) as child:
        yield child.url


@pytest.fixture
def servers():
    with json_servers() as start:
        yield start


def run(*flags, main=evaluate.main):
    """Returns (what it prints, its line of fault)."""
    out, err, fault = io.StringIO(), io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(flag) for flag in flags])
        except SystemExit as e:
            fault = str(e.code) if isinstance(e.code, str) else err.getvalue()
    return out.getvalue(), fault


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- the world


@pytest.fixture(scope="module")
def whole(tmp_path_factory, retriever):
    """A directory with an evaluation of two sets of 6 questions in chunks of 4, and what it
    printed."""
    out = tmp_path_factory.mktemp("evaluations") / "world"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "CHUNK", 4)
        said, fault = run(
            "world", "--data", "world", "valid", "--n", 6, "--retriever", retriever, "--out", out
        )
    assert not fault
    return out, said


def test_an_evaluation_writes_one_json_one_table_and_a_line_a_question(whole, retriever):
    out, said = whole
    rows, summary = (
        read_jsonl(out / "results.jsonl"),
        json.loads((out / "summary.json").read_text()),
    )
    questions = {
        q.id: q for split in ("test", "valid") for q in load_questions(WORLD / f"{split}.jsonl")
    }
    search = Search(retriever, 3)
    assert len(rows) == 12 == len({row["id"] for row in rows})
    for row in rows:
        q = questions[row["id"]]
        assert row["reward"] == row["em"] == em(row["prediction"], q.golds)
        assert row["f1"] == f1(row["prediction"], q.golds)
        # the first policy searches the whole question once
        passages = " ".join(search.submit(q.text).result())
        assert row["searches"] == 1
        assert row["gold_recall"] == float(any(gold in passages for gold in q.golds))
    assert list(summary["benchmarks"]) == ["world", "valid"]
    for title, part in summary["benchmarks"].items():
        own = [row for row in rows if row["data"] == title]
        assert part["questions"] == len(own) == 6
        [line] = [line for line in said.splitlines() if line.startswith(title)]
        for name in ("f1", "em"):
            x = part[name]
            assert x == estimate_mean([row[name] for row in own])
            assert f"{name} {x['mean']:.3f}" in line
        assert f"em {x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" in line
        for name in ("gold_recall", "searches", "answered", "sampled_tokens"):
            assert part[name] == pytest.approx(np.mean([row[name] for row in own]))
            assert f"{name} {part[name]:.3f}" in line
    average = summary["average"]
    assert average["mean"] == pytest.approx(np.mean([row["em"] for row in rows]))
    parts = [part["em"] for part in summary["benchmarks"].values()]
    below = np.hypot(*(x["mean"] - x["low"] for x in parts)) / 2
    assert average["low"] == pytest.approx(average["mean"] - below)
    assert f"average           em {average['mean']:.3f} [{average['low']:.3f}, " in said


def test_an_interval_is_wilson_s_of_zeros_and_ones_and_the_normal_one_of_other_values():
    def numbers(x):
        return list(estimate_mean(x).values())

    assert numbers([1] * 7 + [0] * 3) == pytest.approx([0.7, 0.39677, 0.89221], abs=1e-4)
    # no right answer in Bamboogle is no proof of an accuracy of 0
    assert numbers([0] * 125) == pytest.approx([0, 0, 1.96**2 / (125 + 1.96**2)], abs=1e-9)
    half = 1.96 * np.sqrt(0.1 / 5)
    assert numbers([0.2, 0.4, 0.6, 0.8, 1.0]) == pytest.approx([0.6, 0.6 - half, 0.6 + half])
    assert numbers([0.5]) == [0.5, -np.inf, np.inf]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's directory as inspo.py leaves it."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(Config(**PRESETS["world"]).__dict__))
    shutil.copytree(WORLD / "policy", path / "policy")
    (path / "I_star.txt").write_text(
        "Use <search> </search> and <answer> </answer>. Give just the name as answer.\n"
    )
    return path


def test_a_run_is_measured_under_its_I_star_and_another_instruction_can_replace_it(
    finished, retriever, tmp_path
):
    mine = shutil.copytree(finished, tmp_path / "mine")
    flags = [mine, "--n", 4, "--retriever", retriever]
    text, fault = run(*flags, "--out", tmp_path / "own")
    assert not fault and text.endswith(f"{tmp_path / 'own'}: summary.json, results.jsonl\n")
    for name, file in (("same", mine / "I_star.txt"), ("other", WORLD / "instruction.txt")):
        run(*flags, "--instruction", file, "--out", tmp_path / name)
    own, same, other = (
        read_jsonl(tmp_path / x / "results.jsonl") for x in ("own", "same", "other")
    )
    assert own == same != other


def test_other_questions_go_into_a_folder_of_their_own(retriever, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (["test"], ["valid"], ["test", "valid"]):
        assert not run("world", "--n", 2, "--retriever", retriever, "--data", *data)[1]
    folders = [path.name for path in (tmp_path / "runs" / "evaluation").iterdir()]
    assert sorted(folders) == ["world", "world-test-valid", "world-valid"]


# ---- at the command line


def test_progress_is_shown_within_a_chunk(retriever, tmp_path):
    err = io.StringIO()
    flags = ["--data", "world", "--n", "9", "--retriever", retriever, "--out", str(tmp_path / "o")]
    with pytest.MonkeyPatch.context() as patch:
        reached, update = [], evaluate.tqdm.update
        patch.setattr(
            evaluate.tqdm, "update", lambda bar, n: (update(bar, n), reached.append(bar.n))
        )
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            evaluate.main(["world", *flags])
    assert reached == sorted(reached) and {*reached} == {*range(1, 10)}  # one chunk
    assert re.findall(r"world: +(\d+%)", err.getvalue())[-1] == "100%"


@pytest.mark.parametrize("program", ["evaluate.py", "ask.py"])
def test_help_waits_for_neither_torch_nor_scipy(program):
    command = [sys.executable, "-X", "importtime", program, "--help"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "--temperature" in done.stdout
    assert "config" in imported and not imported & {"torch", "scipy", "transformers", "rich"}


# ---- another task


class Rolling(Game):
    """Ends an episode at the sum of its question, whose state is what is missing.

    The world's first policy writes all words of the question: a goal of 1 is reached, 99 is not.
    """

    tag, noun, argument, plural, result_tag = "search", "a roll", "number", "rolls", "information"
    down, names = False, ("reached", "missing")

    def questions(self, split):
        text = load_questions(WORLD / f"{split}.jsonl")[0].text
        return [
            Question(f"{split}-{goal}", text, data=goal)
            for goal in (1, 99, 2)[: {"test": 3, "train": 1}.get(split, 0)]
        ]

    def reset(self, question):
        return question.data

    def step(self, tau, move):
        tau.state = max(0, tau.state - len(move.split()))
        if not tau.state:
            tau.stop = "over"
        return f"{tau.question.data - tau.state} of {tau.question.data}"

    def reward(self, taus):
        if self.down:
            raise Outage("the judge does not answer")
        return [-tau.state for tau in taus]

    def metrics(self, tau):
        return dict(zip(self.names, (float(tau.state == 0), tau.state), strict=True))


ROLLING = ["world", "--task", f"{__name__}:Rolling"]


def test_another_task_is_measured_by_its_own_metrics_on_its_own_questions(tmp_path):
    text, fault = run(*ROLLING, "--out", tmp_path / "o")
    rows, summary = (
        read_jsonl(tmp_path / "o/results.jsonl"),
        json.loads((tmp_path / "o/summary.json").read_text()),
    )
    assert not fault
    assert [row["reached"] for row in rows] == [1, 0, 1] and [row["stop"] for row in rows] == [
        "over",
        "turns",
        "over",
    ]
    assert all(row["reward"] == -row["missing"] for row in rows) and [
        row["rolls"] for row in rows
    ] == [1, 1, 1]
    assert (summary["metrics"], summary["tools"]) == (["reached", "missing"], ["rolls"])
    assert (
        summary["benchmarks"]["test"]["reached"]["mean"]
        == pytest.approx(2 / 3)
        == summary["average"]["mean"]
    )
    assert "answered 0.667" in text and "missing" in text
    assert not any(word in text for word in ("em ", "f1", "gold", "searches"))


def test_an_evaluation_whose_judge_goes_away_can_be_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK", 1)
    whole, later = tmp_path / "whole", tmp_path / "later"
    run(*ROLLING, "--out", whole)
    monkeypatch.setattr(
        Rolling, "down", property(lambda self: len(read_jsonl(later / "results.jsonl")) == 2)
    )
    _, fault = run(*ROLLING, "--out", later)
    assert (
        fault == "evaluate.py: the judge does not answer"
        and len(read_jsonl(later / "results.jsonl")) == 2
    )
    monkeypatch.setattr(Rolling, "down", False)
    assert not run(*ROLLING, "--out", later)[1]
    assert (later / "results.jsonl").read_text() == (whole / "results.jsonl").read_text()


# ---- asking


def alike(taus):
    return [0.0 for _ in taus]


def test_asking_plays_the_run_s_task_and_scores_what_it_knows(finished, retriever):
    known = load_questions(WORLD / "test.jsonl")[0]
    own = ["--run", finished, "--retriever", retriever]
    text, fault = run(*own, known.text.removesuffix("?"), main=ask.main)
    assert not fault and (finished / "I_star.txt").read_text() in text and '  search  "' in text
    [prediction] = re.findall("^  answer  (.*)$", text, re.M)
    assert f"  scored  em {em(prediction, known.golds):g}," in text
    assert run(*own, known.id, main=ask.main)[0] == text
    for flags in [], ["--reward", f"{__name__}:alike"]:
        text, fault = run(*own, *flags, "What is the", "color of the sky", main=ask.main)
        assert not fault and "color of the sky?" in text
        assert "scored" not in text and "  answer  " in text
    # longer than a file's name can be
    text, fault = run(*own, "Who wrote the book of the color of the sky and " * 9, main=ask.main)
    assert not fault and "color of the sky" in text


def test_asking_a_game_from_the_keyboard(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "game")
    rewrite(
        tmp_path / "game" / "config.json",
        '"task": "tasks.search_qa:SearchQA"',
        f'"task": "{__name__}:Rolling"',
    )
    typed = iter(["anything", "test-1", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    text, fault = run("--run", tmp_path / "game", "--task", f"{__name__}:Rolling", main=ask.main)
    assert not fault and "is more than its text: give the id of one, such as test-1" in text
    assert (
        text.rstrip().endswith("the end (over)\n  scored  reached 1, missing 0")
        and " of 1\n" in text
    )


# ---- other bad input


def test_each_fault_is_one_line_that_says_what_to_do(
    tmp_path, finished, whole, servers, tiny_path, monkeypatch
):
    # a search server may run on this machine
    monkeypatch.setattr("tasks.search_qa.DEFAULT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(finished, tmp_path / "half", ignore=shutil.ignore_patterns("I_star.txt"))
    shutil.copytree(tiny_path, tmp_path / "mixed")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(WORLD / "policy" / name, tmp_path / "mixed")
    policy, corpus = WORLD / "policy", ["--data", "world", "--corpus", WORLD / "corpus.jsonl"]
    gone = servers(MODELS)
    gone.stop()
    for flags, words in (
        (["world", "--data", "world", "world"], "--data world: there is a world already"),
        (["world", "--data", "squad"], "squad: no such file"),
        (
            ["world", "--data", "hotpotqa"],
            "hf://datasets/RUC-NLPIR/FlashRAG_datasets/hotpotqa/dev.jsonl: the hub cannot be reached",
        ),
        ([*ROLLING, "--data", "valid"], f"--data valid: {__name__}:Rolling has no such questions"),
        ([*ROLLING, "--data", "nq"], "asks its own questions: give test, valid, train"),
        ([tmp_path / "half"], "half has not finished: wait, resume it, or give a directory"),
        ([policy, "--data", "world"], "nothing to search: give --corpus"),
        ([policy], "--test is missing"),
        (["world", "--corpus", tmp_path / "gone"], "--corpus"),
        (["world", "--instruction", tmp_path / "gone"], "--instruction"),
        (["world", "--topk", 0], "--topk 0: must be at least 1"),
        (["world", "--task", "nothing"], "--task nothing: give it as module:"),
        ([tmp_path / "nothing"], "nothing is no directory; as a model of the hub: --model "),
        (["runs/nothere"], "runs/nothere is no directory; as a model of the hub: --model "),
        ([tmp_path / "mixed", *corpus], "and its model 600: use the model's own"),
        ([gone.url, *corpus], "start the server, or check the URL"),
    ):
        out, fault = run(*flags, "--out", tmp_path / "o", "--n", 2)
        assert words in fault and fault.startswith("evaluate.py: ") and fault.count("\n") == 0, (
            fault
        )
    shutil.copytree(finished, tmp_path / "lost", ignore=shutil.ignore_patterns("policy"))
    for flags, words in (
        ([tmp_path / "half", "x"], "half has not finished"),
        ([tmp_path / "lost", "x"], "lost has not finished"),
        (["runs/nothere", "x"], "--run runs/nothere: no such directory"),
        ([finished, "x", "--temperature", "nan"], "--temperature and --seed: give finite numbers"),
        ([finished, "x", "--seed", -1], "--temperature and --seed: give finite numbers"),
        ([finished, "x", "--topk", 0], "--topk 0: must be at least 1"),
        ([finished, "x", "--corpus", tmp_path / "gone"], "--corpus"),
    ):
        _, fault = run("--run", *flags, main=ask.main)
        assert words in fault.splitlines()[-1] and "Traceback" not in fault, fault
    assert "name a run with --run" in run(finished, "x", main=ask.main)[1]
    text, fault = run("--run", finished, "--corpus", WORLD / "corpus.jsonl", " ", main=ask.main)
    assert not fault and text.endswith("the question is empty\n")


def searching(handler):
    """Answers as a search server does; what it says of itself is the server's `about`."""
    path, _, body = handler.server.requests[-1]
    hit = {"document": {"id": "1", "contents": '"T"\ntext'}, "score": 1.0}
    hits = (
        {"result": [[hit]] * len(json.loads(body)["queries"])}
        if path == "/retrieve"
        else handler.server.about
    )
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(json.dumps(hits).encode())


def rewrite(path, old, new):
    text = path.read_bytes()
    assert old.encode() in text
    path.write_bytes(text.replace(old.encode(), new.encode()))


def test_a_served_model_is_known_by_its_address_without_the_password(
    servers, retriever, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1\n")  # of a file
    chat = servers(MODELS, said("<answer> x </answer>"))
    url = chat.url.replace("//", "//user:password9@")
    flags = [url, "--data", "world", "--n", 1, "--retriever", retriever, "--out", tmp_path / "o"]
    assert not run(*flags)[1]
    text = (tmp_path / "o" / "summary.json").read_text()
    assert "password9" not in text and json.loads(
        text, parse_constant=lambda x: pytest.fail(f"{x} is no JSON")
    )


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_directory_that_holds_an_evaluation_or_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    _, fault = run("world", "--n", 12, "--out", tmp_path)
    assert fault.startswith(f"evaluate.py: {tmp_path} has a {name}") and "\n" not in fault
    assert [path.name for path in tmp_path.iterdir()] == [name]


# ---- a chat endpoint


def said(text):
    return {"choices": [{"message": {"content": text}}]}


MODELS = {"data": [{"id": "qwen"}]}


def test_a_chat_endpoint_plays_the_loop_with_observations_as_messages(servers, retriever, tmp_path):
    chat = servers(
        MODELS,
        said("I search. <search> Krevux Babith"),
        said("<answer> Trebak Faisticorp </answer>"),
    )
    write_jsonl(
        tmp_path / "q.jsonl", [json.loads((WORLD / "test.jsonl").read_text().splitlines()[0])]
    )
    flags = ["--data", tmp_path / "q.jsonl", "--retriever", retriever, "--out", tmp_path / "o"]
    _, fault = run(chat.url + "/v1", *flags)
    [row] = read_jsonl(tmp_path / "o" / "results.jsonl")
    assert not fault and (row["em"], row["searches"]) == (1.0, 1)
    first, second = (json.loads(body) for _, _, body in chat.requests[1:])
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    # the endpoint cuts stop strings
    assert second["messages"][1]["content"].endswith(" Krevux Babith</search>")
    assert second["messages"][2]["content"].startswith("<information>Doc 1(Title:")
    assert first["model"] == "qwen" and first["stop"] == ["</search>", "</answer>"]
    assert first["temperature"] == 0 and "seed" not in first


def test_words_come_back_whole_and_answers_that_are_no_chat_end_the_evaluation(servers):
    words = Words()
    for text in ("a b\n\n<x>c</x>  ", " leading", "", "tab\tand\u00a0more\n"):
        assert words.decode(words(text)["input_ids"]) == text
    engine = ChatEngine(servers(MODELS, {"choices": []}).url, "", words, ("</answer>",), retries=0)
    with pytest.raises(EngineFault, match="malformed answer"):
        while True:
            list(
                engine.generate(
                    {0: words("hello")["input_ids"]} if not engine.running else {}, 5, 0.0
                )
            )
    engine.close()


def turns_of(engine, texts, temperature=0.0):
    """Plays one turn of each row; returns (text, why the row ended) by row."""
    contexts, ended = {k: engine.tokenizer(text)["input_ids"] for k, text in enumerate(texts)}, {}
    engine.begin(0)
    while len(ended) < len(texts):
        for turn in engine.generate(contexts, 50, temperature):
            ended[turn.key] = engine.tokenizer.decode(turn.ids), turn.stop
        contexts = {}
    return ended


def chatting(servers, answer, name="qwen", models=MODELS, retries=0):
    """Returns an engine whose server says answer(body) to each completion, and the bodies of what
    was asked."""
    asked = []

    def respond(handler):
        if handler.command == "POST":
            asked.append(json.loads(handler.body))
        return answer(asked[-1]) if handler.command == "POST" else models

    return ChatEngine(
        servers(respond).url, name, Words(), ("</search>", "</answer>"), retries=retries
    ), asked


LONG = "a very long question " * 20
TOO_LONG = [
    (
        400,
        "This model's maximum context length is 128 tokens. However, your prompt contains at least 129 input tokens",
    ),
    (
        400,
        "'max_tokens' or 'max_completion_tokens' is too large: 50. This model's maximum context length is 128",
    ),
    (413, "Payload Too Large"),
    (500, "Context size has been exceeded."),
]
FILTERED = [
    (
        400,
        "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
    ),
    (403, "Your chosen model requires moderation and your input was flagged"),
    (422, "the input cannot be processed: please stop"),
]


@pytest.mark.parametrize("status, words, stop", [(*row, "length") for row in TOO_LONG] + [
    (*row, "refused") for row in FILTERED
])  # fmt: skip
def test_one_conversation_that_a_server_refuses_ends_and_the_others_go_on(
    servers, status, words, stop
):
    def answer(body):
        if len(body["messages"][0]["content"]) > 128:
            return status, {}, json.dumps({"error": {"message": words}})
        return said("<answer> Bern </answer>")

    engine, asked = chatting(servers, answer)
    bern = ("<answer> Bern </answer>", "")
    assert turns_of(engine, ["Short", LONG, "Hi", LONG]) == {
        0: bern,
        1: ("", stop),
        2: bern,
        3: ("", stop),
    }
    assert turns_of(engine, [LONG]) == {0: ("", stop)}  # also where no other is played
    assert turns_of(engine, ["Short"]) == {0: bern}
    assert {"max_tokens", "stop"} <= asked[-1].keys()
    engine.close()


@pytest.mark.parametrize("text, ended, turn", [
    ("<search> who", "stop", "<search> who</search>"), ("<answer> x", "eos", "<answer> x</answer>"),
    ("<search> who", "length", "<search> who"), ("<answer> x", "MAX_TOKENS", "<answer> x"),
    ("<answer> x </answer> and", "length", "<answer> x </answer>"),
])  # fmt: skip
def test_a_turn_that_was_cut_at_a_limit_neither_calls_nor_answers(servers, text, ended, turn):
    reply = {"choices": [{"message": {"content": text}, "finish_reason": ended}]}
    engine, _ = chatting(servers, lambda body: reply)
    assert turns_of(engine, ["Who?"]) == {0: (turn, "")}
    engine.close()


@pytest.mark.parametrize(
    "message", [{"content": "<answer> I"}, {"content": None, "refusal": "I cannot."}]
)
def test_a_reply_that_was_filtered_ends_its_conversation(servers, message):
    ended = "stop" if message.get("refusal") else "content_filter"
    filtered = {"choices": [{"message": message, "finish_reason": ended}]}
    engine, _ = chatting(servers, lambda body: filtered if "bad" in str(body) else said("A"))
    assert turns_of(engine, ["bad", "good"]) == {
        0: (message["content"] or "", "refused"),
        1: ("A", ""),
    }
    engine.close()


def test_replies_that_are_reasoning_alone_are_told_once(servers, capfd):
    """vLLM's --reasoning-parser where the model does not think: content is null."""
    hidden = {
        "choices": [{"message": {"content": None, "reasoning": "A"}, "finish_reason": "stop"}]
    }
    engine, _ = chatting(servers, lambda body: hidden)
    assert turns_of(engine, ["Who?"] * 3) == dict.fromkeys(range(3), ("", ""))
    assert capfd.readouterr().out.count("qwen replies without a text") == 1
    engine.close()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_server_that_refuses_everything_ends_the_evaluation(servers, status):
    engine, _ = chatting(servers, lambda body: (status, {}, "context length: 0 tokens"))
    with pytest.raises(EngineFault, match=f"HTTP {status}: context length"):
        turns_of(engine, ["Who?"])
    engine.close()


def test_refused_conversations_are_counted(servers, retriever, tmp_path):
    """One of four: its row is there, and it counts as wrong."""
    write_jsonl(
        tmp_path / "q.jsonl",
        [
            {
                "id": str(k),
                "question": f"Who is {LONG if k == 2 else 'it'}?",
                "golden_answers": ["x"],
            }
            for k in range(4)
        ],
    )

    def answer(handler):
        if handler.command == "GET":
            return MODELS
        return (
            (400, {}, "content policy")
            if LONG[:40].encode() in handler.body
            else said("<answer> x </answer>")
        )

    flags = [
        servers(answer).url,
        "--data",
        tmp_path / "q.jsonl",
        "--retriever",
        retriever,
        "--out",
        tmp_path / "o",
    ]
    assert not run(*flags)[1]
    rows = read_jsonl(tmp_path / "o" / "results.jsonl")
    assert [(row["stop"], row["em"], row["answered"]) for row in rows] == [
        ("refused", 0.0, 0.0) if row["id"] == "2" else ("answer", 1.0, 1.0) for row in rows
    ] and len(rows) == 4


@pytest.mark.parametrize(
    "models",
    [
        {"object": "list", "data": []},
        MODELS,
        [{"id": "qwen"}],
        (500, {}, "no cache"),
        (404, {}, "no such"),
    ],
)
def test_a_model_that_a_server_does_not_list_is_tried(servers, models):
    """`transformers serve DIR` lists the hub's cache alone; others answer a bare list, or
    nothing."""
    engine, asked = chatting(servers, lambda body: said("A"), "/models/policy", models)
    assert turns_of(engine, ["Who?"]) == {0: ("A", "")} and asked[-1]["model"] == "/models/policy"
    engine.close()
    for name in ("/models/policy", ""):
        if name or models is not MODELS:
            with pytest.raises(Fault, match="--served_model|start the server"):
                chatting(servers, lambda body: (404, {}, "no such model"), name, models)


# of text that is ASCII
ANOTHER_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
READS = r"""
import locale, pathlib, sys
from evaluate import find_subject
from plumbing.faults import one_line
from plumbing.files import read_jsonl, write_file
assert locale.getpreferredencoding(False) != "utf-8", locale.getpreferredencoding(False)
with one_line():
    folder = pathlib.Path(sys.argv[1])
    assert find_subject(sys.argv[1]).I_star == "Write \u201canswer\u201d: \u5317\u4eac"
    write_file(folder / "x.jsonl", '{"text": "\u201c\u5317"}')
    assert read_jsonl(folder / "x.jsonl") == [{"text": "\u201c\u5317"}]
    print("printed: \u201c")
"""


def test_an_instruction_is_read_as_utf_8_in_any_locale(tmp_path):
    (tmp_path / "I_star.txt").write_text("Write \u201canswer\u201d: \u5317\u4eac\n", "utf-8")
    env = os.environ | ANOTHER_LOCALE
    command = [sys.executable, "-c", READS, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "printed: \\u201c\n"), done.stderr
