"""evaluate.py on the world's real policy and search server, on benchmarks' formats, on chat
endpoints, on bad input."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from json_server import json_servers

import ask
import evaluate
from config import HERE, PRESETS, Config
from evaluation import measure
from evaluation.agents import METHODS
from evaluation.compare import compare
from plumbing.faults import Fault, Outage
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


def cells_of(text):
    """The rows of a Markdown table, each a cell by its heading."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


# ---- the world


@pytest.fixture(scope="module")
def whole(tmp_path_factory, retriever):
    """A directory with an evaluation of two sets of 6 questions in chunks of 4, and what it
    printed."""
    out = tmp_path_factory.mktemp("evaluations") / "world"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CHUNK", 4)
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
    *shown, average = cells_of((out / "table.md").read_text())
    assert [cells[""] for cells in shown] == list(summary["benchmarks"]) == ["world", "valid"]
    for cells in shown:
        part = summary["benchmarks"][cells[""]]
        means = {
            "em": part["em"]["mean"],
            "f1": part["f1"]["mean"],
            "gold_recall": part["gold_recall"],
        }
        for key, mean in (
            means | {"searches": part["searches"], "answered": part["answered"]}
        ).items():
            assert mean == pytest.approx(
                np.mean([row[key] for row in rows if row["data"] == cells[""]])
            )
        numbers = [float(x) for x in re.findall(r"\d\.\d+", cells["EM, 95 %"])]
        assert numbers == pytest.approx(
            [part["em"][key] for key in ("mean", "low", "high")], abs=5e-4
        )
        assert float(cells["F1"]) == pytest.approx(part["f1"]["mean"], abs=5e-4)
        assert float(cells["gold recall"]) == pytest.approx(part["gold_recall"], abs=5e-4)
    assert summary["average"]["mean"] == pytest.approx(np.mean([row["em"] for row in rows]))
    assert average["EM, 95 %"].startswith(f"{summary['average']['mean']:.3f} [")


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
    assert not fault and "\nmine, inspo:" in text
    run(*flags, "--method", "search_r1", "--out", tmp_path / "first")
    for name, file in (("same", mine / "I_star.txt"), ("other", WORLD / "instruction.txt")):
        run(*flags, "--instruction", file, "--out", tmp_path / name)
    own, same, first, other = (
        read_jsonl(tmp_path / x / "results.jsonl") for x in ("own", "same", "first", "other")
    )
    assert own == same != first == other


def test_other_questions_go_into_a_folder_of_their_own(retriever, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (["test"], ["valid"], ["test", "valid"]):
        assert not run("world", "--n", 2, "--retriever", retriever, "--data", *data)[1]
    folders = [path.name for path in (tmp_path / "runs" / "evaluation").iterdir()]
    stem = "world-search_r1"
    assert sorted(folders) == [stem, f"{stem}-test-valid", f"{stem}-valid"]


# ---- at the command line


def test_progress_is_shown_within_a_chunk(retriever, tmp_path):
    reached, err, one = [], io.StringIO(), METHODS["search_r1"]

    def watched(player, questions):
        inner = player.progress
        return one.play(
            dataclasses.replace(player, progress=lambda n: reached.append(n) or inner(n)), questions
        )

    flags = [
        "world",
        "--data",
        "world",
        "--n",
        "9",
        "--retriever",
        retriever,
        "--out",
        str(tmp_path / "o"),
    ]
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        evaluate.main(flags, {"search_r1": one._replace(play=watched)})
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
    [cells] = cells_of(text)
    assert float(cells["finished"]) == pytest.approx(2 / 3, abs=1e-3) and "missing" in cells
    assert not any(word in text for word in ("EM", "F1", "hop", "gold", "searches"))


def test_an_evaluation_whose_judge_goes_away_can_be_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 1)
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
    for name in ("results.jsonl", "table.md"):
        assert (later / name).read_text() == (whole / name).read_text()


@pytest.mark.parametrize(
    "names, words",
    [
        (("stop", "x"), "a figure called stop"),
        (("id", "x"), "called id"),
        (("gold_recall", "x"), "called gold_recall"),
    ],
)
def test_a_metric_cannot_take_the_name_of_another_figure(tmp_path, monkeypatch, names, words):
    monkeypatch.setattr(Rolling, "names", names)
    _, fault = run(*ROLLING, "--out", tmp_path / "o")
    assert (
        fault.startswith("evaluate.py: --task ")
        and words in fault
        and not read_jsonl(tmp_path / "o/results.jsonl")
    )


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
    policy = WORLD / "policy"
    corpus = ["--data", "world", "--corpus", WORLD / "corpus.jsonl"]
    for flags, words in (
        (["world", "--data", "world", "world"], "--data world: there is a world already"),
        (["world", "--data", "squad"], "squad: no such file"),
        (
            ["world", "--data", "hotpotqa"],
            "hf://datasets/RUC-NLPIR/FlashRAG_datasets/hotpotqa/dev.jsonl: the hub cannot be reached",
        ),
        ([*ROLLING, "--data", "valid"], f"--data valid: {__name__}:Rolling has no such questions"),
        ([*ROLLING, "--data", "nq"], "asks its own questions: give test, valid, train"),
        (
            [tmp_path / "half"],
            "has no I_star.txt, so it has not finished: wait, resume it, or give a directory",
        ),
        (
            [policy, "--method", "inspo", "--data", "world"],
            "has no I_star.txt to play under; give an instruction",
        ),
        ([policy, "--data", "world"], "nothing to search: give --corpus"),
        ([policy], "--test is missing"),
        (["world", "--corpus", tmp_path / "gone"], "--corpus"),
        (["world", "--instruction", tmp_path / "gone"], "--instruction"),
        (["world", "--topk", 0], "--topk 0: must be at least 1"),
        (["world", "--task", "nothing"], "--task nothing: give it as module:"),
        ([tmp_path / "nothing"], "nothing is no directory; as a model of the hub: --model "),
        (["runs/nothere"], "runs/nothere is no directory; as a model of the hub: --model "),
        ([tmp_path / "mixed", *corpus], "and its model 600: use the model's own"),
        (["http://127.0.0.1:9/v1", *corpus], "name its engine, --engine module:Class"),
        (
            ["--compare", tmp_path / "x", tmp_path / "y"],
            "x: no finished evaluation of this version",
        ),
    ):
        out, fault = run(
            *flags, *([] if flags[0] == "--compare" else ["--out", tmp_path / "o", "--n", 2])
        )
        assert words in fault and fault.startswith("evaluate.py: ") and fault.count("\n") == 0, (
            fault
        )
    assert "give WHAT to evaluate" in run()[1]
    shutil.copytree(finished, tmp_path / "lost", ignore=shutil.ignore_patterns("policy"))
    for flags, words in (
        ([tmp_path, "x"], f"{tmp_path} holds no finished run"),
        ([tmp_path / "half", "x"], "has no I_star.txt, so it has not finished"),
        ([tmp_path / "lost", "x"], "has no policy/, so it has not finished"),
        (["runs/nothere", "x"], "--run runs/nothere: no such directory"),
        ([finished, "x", "--temperature", "nan"], "--temperature nan: give a number"),
        ([finished, "x", "--seed", -1], "--seed -1: give a number"),
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


def test_two_evaluations_at_once_do_not_write_into_one_directory(tmp_path, retriever):
    code = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
    code += "print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    _, fault = run(
        "world", "--data", "world", "--n", 10, "--retriever", retriever, "--out", tmp_path
    )
    other.communicate("")
    assert "another process writes to" in fault and fault.count("\n") == 0


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_a_directory_that_holds_an_evaluation_or_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    _, fault = run("world", "--n", 12, "--out", tmp_path)
    assert fault.startswith(f"evaluate.py: {tmp_path} has a {name}") and "\n" not in fault
    assert [path.name for path in tmp_path.iterdir()] == [name]


# ---- comparing


def evaluation(path: Path, metric="em", golds=("x",), setting=None, **by_data):
    rows = [
        {"data": name, "id": f"{name}-{k}", "golds": golds, metric: x}
        for name, some in by_data.items()
        for k, x in enumerate(some)
    ]
    sizes = {name: len(some) for name, some in by_data.items()}
    summary = {
        "setting": {"task": "tasks.search_qa:SearchQA"} | (setting or {}),
        "metrics": [metric],
        "benchmarks": {name: {"questions": n} for name, n in sizes.items()},
    }
    write_jsonl(path / "results.jsonl", rows)
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_compare_two_greedy_runs(tmp_path):
    a = evaluation(tmp_path / "base", nq=[0] * 8 + [1] + [1] * 5 + [0] * 6)
    b = evaluation(tmp_path / "new", nq=[1] * 8 + [0] + [1] * 5 + [0] * 6)
    [row] = cells_of(compare([a, b]))
    assert (row[""], row["benchmark"], row["questions"], row["EM"]) == (
        "new",
        "nq",
        "20",
        "0.650, 0.300",
    )
    assert row["difference over questions, 95 %"].startswith("+0.350 [")
    assert row["p"] == "0.039"  # McNemar's: 8 that only one has right, 1 that only the other has
    # the questions are paired by their ids, not by their places in a file
    results = tmp_path / "new" / "results.jsonl"
    rows = results.read_text().splitlines(keepends=True)
    results.write_text("".join(rows[8:] + rows[:8]))
    assert cells_of(compare([a, b])) == [row]
    # one seed says nothing of others
    assert row["p over seeds"] == row["difference over seeds, 95 %"] == ""
    [same] = cells_of(compare([a, a]))
    assert same["p"] == "1.000" and "nan" not in str(same)
    [odd] = cells_of(compare([a, str(shutil.copytree(tmp_path / "new", tmp_path / "n|w"))]))
    assert odd[""] == "n/w" and odd | {"": ""} == row | {"": ""}
    b = evaluation(tmp_path / "b", "miles", nq=[1.5, 1, 9])
    [row] = cells_of(compare([evaluation(tmp_path / "a", "miles", nq=[0.5, 2, 7]), b]))
    assert row["miles"] == "3.833, 3.167" and row["difference over questions, 95 %"].startswith(
        "+0.667 ["
    )


# of text that is ASCII
ANOTHER_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
READS = r"""
import locale, pathlib, sys
from evaluation.agents import find_subject
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


def test_a_difference_of_em_between_a_few_seeds_stays_within_one(tmp_path):
    def arm(name, *seeds):
        return ",".join(
            evaluation(tmp_path / f"{name}{k}", nq=[1] * n + [0] * (20 - n))
            for k, n in enumerate(seeds)
        )

    [row] = cells_of(compare([arm("base", 1, 5), arm("good", 12, 19)]))
    spread = np.hypot(0.35, 0.2) / 2  # standard errors 0.175 and 0.1
    assert 0.625 + 4.3 * spread > 1  # with at most 2 degrees of freedom
    shown = row["difference over seeds, 95 %"]
    assert (
        shown.startswith("+0.625 [")
        and shown.endswith(", +1.000]")
        and float(shown.split("[")[1].split(",")[0]) < 0
    )


def test_compare_seeds_as_a_level_of_their_own_with_holm_over_the_arms(tmp_path):
    def arm(name, *seeds):
        return ",".join(
            evaluation(
                tmp_path / f"{name}{k}", nq=[1] * n + [0] * (20 - n), popqa=[1] * n + [0] * (20 - n)
            )
            for k, n in enumerate(seeds)
        )

    text = compare([arm("base", 4, 5, 6), arm("good", 14, 15, 16), arm("same", 5, 6, 4)])
    good = {row["benchmark"]: row for row in cells_of(text) if row[""].startswith("good")}
    assert list(good) == ["nq", "popqa", "average"] and good["average"]["EM"] == "0.750, 0.250"
    half = 2.776445 * np.hypot(0.05, 0.05) / np.sqrt(3)
    assert (
        good["average"]["difference over seeds, 95 %"]
        == f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]"
    )
    assert (
        "Holm's p over the 2 comparisons: good0 and 2 more" in text
        and "same0 and 2 more 1.000" in text
    )


def test_compare_refuses_other_questions_metrics_and_what_has_not_finished(tmp_path):
    a, b = evaluation(tmp_path / "a", nq=[1, 0, 1]), evaluation(tmp_path / "b", nq=[1, 0])
    c = evaluation(tmp_path / "c", nq=[1, 0], popqa=[1])
    golds = evaluation(tmp_path / "golds", golds=("y",), nq=[1, 0, 1])
    miles = evaluation(tmp_path / "miles", "miles", nq=[1, 0, 1])
    for arms, words in (
        ([a, b], "a and .*b differ in questions or gold answers: evaluate both"),
        ([b, c], "b and .*c differ in questions"),
        ([a, golds], "differ in questions or gold"),
        (
            [a, miles],
            "a and .*miles measure em of .* and miles of .*: compare evaluations of one task",
        ),
        ([f"{a},{miles}", a], "measure em of"),
        ([a, f"{a},{a}"], "a and 1 more: one of them is there twice"),
        ([a], "two evaluations or more"),
    ):
        with pytest.raises(Fault, match=words):
            compare(arms)
    four = evaluation(tmp_path / "four", setting={"max_turns": 4}, nq=[1, 0, 1])
    assert "max_turns" in compare([a, four]) and "max_turns" not in compare([a, a])
    for name in ("results.jsonl", "summary.json"):
        shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
        (tmp_path / "b" / name).write_text((tmp_path / "b" / name).read_text()[:90])
        with pytest.raises(Fault, match="b: no finished evaluation of this version"):
            compare([a, b])


@pytest.mark.parametrize(
    "rows, change",
    [
        ([1, 0], {"benchmarks": {}}),
        ([], {}),
        ([1, float("nan")], {}),
        ([1, float("inf")], {}),
        ([1, None], {}),
        ([1, 0], {"metrics": []}),
        ([1, 0], {"metrics": ["f1"]}),
        ([1, 0], {"setting": []}),
        ([1, 0], {"benchmarks": {"nq": {"questions": 3}}}),  # one in progress
    ],
)
def test_what_is_no_whole_evaluation_is_compared_with_nothing(tmp_path, rows, change):
    odd, good = (
        evaluation(tmp_path / name, nq=nq) for name, nq in (("odd", rows), ("good", [1, 0]))
    )
    summary = tmp_path / "odd" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | change))
    for arms in ([odd, good], [good, odd], [odd, odd]):
        with pytest.raises(Fault, match="odd: no finished evaluation of this version"):
            compare(arms)
