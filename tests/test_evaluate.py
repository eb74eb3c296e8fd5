"""evaluate.py on the world's real policy and search server, on benchmarks' formats, on chat
endpoints, on bad input."""

import contextlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from found_search import Game

import ask
import evaluate
from config import HERE, PRESETS, Config
from evaluate import estimate_mean
from plumbing.faults import Outage
from plumbing.files import read_jsonl
from tasks import Question
from tasks.search_qa import Search, em, f1, load_questions

WORLD = HERE / "world" / "files"


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
            "world", "--data", "test", "valid", "--n", 6, "--retriever", retriever, "--out", out
        )
    assert not fault
    return out, said


def test_an_evaluation_writes_one_json_one_table_and_a_line_a_question(whole, retriever):
    out, said = whole
    rows, summary = (
        read_jsonl(out / "results.jsonl"),
        json.loads((out / "summary.json").read_text()),
    )
    splits = [load_questions(WORLD / f"{split}.jsonl") for split in ("test", "valid")]
    questions = {q.id: q for split in splits for q in split}
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
    assert list(summary["benchmarks"]) == ["test", "valid"]
    for title, part in summary["benchmarks"].items():
        own = [row for row in rows if row["data"] == title]
        assert part["questions"] == len(own) == 6
        for name in ("f1", "em"):
            assert part[name] == estimate_mean([row[name] for row in own])
        for name in ("gold_recall", "searches", "answered", "sampled_tokens"):
            assert part[name] == pytest.approx(np.mean([row[name] for row in own]))
        [line] = [line for line in said.splitlines() if line.startswith(title)]
        x = part["em"]
        assert f"em {x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" in line
    assert summary["average"] == pytest.approx(np.mean([row["em"] for row in rows]))
    assert f"average           em {summary['average']:.3f}  temperature 0\n" in said


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


def test_an_evaluation_has_a_folder_by_its_name(retriever, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not run("world", "--n", 2, "--retriever", retriever)[1]
    assert [path.name for path in (tmp_path / "runs" / "evaluation").iterdir()] == ["world"]


# ---- at the command line


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


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "rolled"
    text, fault = run(*ROLLING, "--out", out)
    assert not fault
    return out, text


def test_another_task_is_measured_by_its_own_metrics_on_its_own_questions(rolled):
    out, text = rolled
    rows, summary = (
        read_jsonl(out / "results.jsonl"),
        json.loads((out / "summary.json").read_text()),
    )
    assert [(row["reached"], row["stop"], row["rolls"]) for row in rows] == [
        (1, "over", 1),
        (0, "turns", 1),
        (1, "over", 1),
    ]
    assert all(row["reward"] == -row["missing"] for row in rows)
    assert summary["metrics"] == ["reached", "missing"]
    assert summary["benchmarks"]["test"]["reached"]["mean"] == pytest.approx(2 / 3)
    assert "answered 0.667" in text and "missing" in text
    assert not any(word in text for word in ("em ", "f1", "gold", "searches"))


def test_an_evaluation_whose_judge_goes_away_can_be_started_again(rolled, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK", 1)
    out = tmp_path / "later"
    path = out / "results.jsonl"
    monkeypatch.setattr(Rolling, "down", property(lambda self: len(read_jsonl(path)) == 2))
    assert run(*ROLLING, "--out", out)[1] == "evaluate.py: the judge does not answer"
    assert len(read_jsonl(path)) == 2
    monkeypatch.setattr(Rolling, "down", False)
    assert not run(*ROLLING, "--out", out)[1]
    assert path.read_text() == (rolled[0] / "results.jsonl").read_text()


# ---- asking


def test_asking_plays_the_run_s_task_and_scores_what_it_knows(finished, retriever):
    known = load_questions(WORLD / "test.jsonl")[0]
    own = ["--run", finished, "--retriever", retriever]
    text, fault = run(*own, known.text.removesuffix("?"), main=ask.main)
    assert not fault and (finished / "I_star.txt").read_text() in text and '  search  "' in text
    [prediction] = re.findall("^  answer  (.*)$", text, re.M)
    assert f"  scored  em {em(prediction, known.golds):g}," in text
    assert run(*own, known.id, main=ask.main)[0] == text
    # longer than a file's name can be
    text, fault = run(*own, *["What is the", "color of the sky"] * 9, main=ask.main)
    assert not fault and "color of the sky?" in text
    assert "scored" not in text and "  answer  " in text


def test_asking_a_game_from_the_keyboard(finished, monkeypatch):
    typed, game = iter(["test-1", ""]), ["--run", finished, "--task", f"{__name__}:Rolling"]
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    text, fault = run(*game, main=ask.main)
    assert not fault
    assert text.rstrip().endswith("the end (over)\n  scored  reached 1, missing 0")
    _, fault = run(*game, "anything", main=ask.main)
    assert "is more than its text: give an id, such as test-1" in fault


# ---- other bad input


def test_each_fault_is_one_line_that_says_what_to_do(tmp_path, finished, monkeypatch):
    # a search server may run on this machine
    monkeypatch.setattr("tasks.search_qa.DEFAULT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    half = shutil.copytree(finished, tmp_path / "half", ignore=shutil.ignore_patterns("policy"))
    policy, gone = WORLD / "policy", tmp_path / "gone"
    for flags, words in (
        (["world", "--data", "test", "test"], "--data test: it has no questions"),
        (["world", "--data", "squad"], "squad: no such file"),
        (["world", "--data", "hotpotqa"], "hotpotqa/dev.jsonl: the hub cannot be reached"),
        ([half], "half holds no finished run: wait, resume it, or give a directory"),
        ([policy, "--data", WORLD / "test.jsonl"], "nothing to search: give --corpus"),
        ([policy], "--test is missing"),
        (["world", "--corpus", gone], "--corpus"),
        (["world", "--instruction", gone], "--instruction"),
        (["world", "--topk", 0], "--topk 0: should be greater"),
        (["runs/nothere"], "--model runs/nothere"),
        (["world", "--temprature", 1], "unrecognized arguments: --temprature"),
    ):
        _, fault = run(*flags, "--out", tmp_path / "o", "--n", 2)
        assert words in fault and fault.rstrip().count("\n") <= ("usage" in fault), fault
    for flags, words in (
        ([half, "x"], "half holds no finished run"),
        ([finished, "x", "--seed", -1], "--temperature and --seed: give numbers"),
        ([finished, "x", "--corpus", gone], "--corpus"),
    ):
        _, fault = run("--run", *flags, main=ask.main)
        assert words in fault.splitlines()[-1] and "Traceback" not in fault, fault


def test_a_directory_that_holds_an_evaluation_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    _, fault = run("world", "--n", 12, "--out", tmp_path)
    assert fault.startswith(f"evaluate.py: {tmp_path} has a summary.json") and "\n" not in fault
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
