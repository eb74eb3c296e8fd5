"""evaluate.py on the world's real policy and search server, on benchmarks' formats, on chat endpoints, on bad input."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from json_server import json_servers

import ask
import evaluate
from config import HERE, PRESETS, Config
from engines.chat_engine import ChatEngine, Words
from evaluation import benchmarks, measure
from evaluation.agents import METHODS
from evaluation.compare import compare
from plumbing.faults import EngineFault, Fault, Outage
from plumbing.files import read_jsonl
from plumbing.servers import Child
from tasks import Question
from tasks.game import Game
from tasks.questions import em, f1, load_questions
from tasks.search import Search

WORLD = HERE / "world" / "files"


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Child([str(HERE / "retrieval_server.py"), "--corpus", str(WORLD / "corpus.jsonl")], log) as child:
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
    """A directory with an evaluation of 10 questions in chunks of 4, and what it printed."""
    out = tmp_path_factory.mktemp("evaluations") / "world"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CHUNK", 4)
        said, fault = run("world", "--data", "world", "--n", 10, "--retriever", retriever, "--out", out)
    assert not fault
    return out, said


def test_an_evaluation_writes_one_json_one_table_and_a_line_a_question(whole, retriever):
    out, said = whole
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock", "results.jsonl", "summary.json", "table.md"
    ]  # fmt: skip
    rows, found = read_jsonl(out / "results.jsonl"), json.loads((out / "summary.json").read_text())
    questions, search = {q.id: q for q in load_questions(WORLD / "test.jsonl")}, Search(retriever, 3)
    assert len(rows) == 10 == len({row["id"] for row in rows})
    for row in rows:
        q = questions[row["id"]]
        assert (row["em"], row["f1"]) == (em(row["prediction"], q.golds), f1(row["prediction"], q.golds))
        assert row["reward"] == row["em"]
        passages = " ".join(search.submit(q.text).result())  # the first policy searches the whole question once
        assert row["searches"] == 1 and row["gold_found"] == float(any(gold in passages for gold in q.golds))
    part = found["benchmarks"]["world"]
    for key in ("em", "f1"):
        assert part[key]["mean"] == pytest.approx(np.mean([row[key] for row in rows]))
    for key, name in (("searches", "searches"), ("answered", "answered"), ("gold_found", "gold_recall")):
        assert part[name] == pytest.approx(np.mean([row[key] for row in rows]))
    head, line = ([cell.strip() for cell in said.splitlines()[k].split("|")] for k in (-5, -3))
    shown = dict(zip(head, line, strict=True))
    low, high = part["em"]["low"], part["em"]["high"]
    assert shown["EM, 95 %"] == f"{part['em']['mean']:.3f} [{low:.3f}, {high:.3f}]"
    assert shown["F1"] == f"{part['f1']['mean']:.3f}" and (out / "table.md").read_text() in said


@pytest.mark.parametrize("cut", [3, 6, 10])
def test_an_evaluation_that_was_cut_off_ends_as_any_other(whole, retriever, tmp_path, monkeypatch, cut):
    out, said = tmp_path / "again", whole[1]
    shutil.copytree(whole[0], out)
    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(lines[:cut]) + lines[cut][:20] if cut < 10 else "".join(lines))
    monkeypatch.setattr(measure, "CHUNK", 4)
    played = []
    one = METHODS["search_r1"]
    methods = {"search_r1": one._replace(play=lambda a, qs: played.append(len(qs)) or one.play(a, qs))}
    again, fault = run(
        "world", "--data", "world", "--n", 10, "--retriever", retriever, "--out", out,
        main=lambda flags: evaluate.main(flags, methods),
    )  # fmt: skip
    assert not fault and (out / "results.jsonl").read_text() == "".join(lines)
    assert played == {3: [4, 4, 2], 6: [4, 2], 10: []}[cut]
    assert again.partition(" rows are from")[0] == {3: again, 6: "4 of 10", 10: "10 of 10"}[cut]
    table = said[said.index("|") : said.index(str(whole[0]))]
    assert table in again and (out / "table.md").read_text() == (whole[0] / "table.md").read_text()


def test_from_a_damaged_row_on_questions_are_played_again(monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 2)
    some = [Question(str(k), "Who?", ("x",)) for k in range(6)]
    rows = [{"data": "d", "id": q.id} for q in some]
    del rows[2]
    assert [number for _, number, _ in measure.cut_chunks(rows, {"d": some})] == [1, 2] and len(rows) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's directory as inspo.py leaves it."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(Config(**PRESETS["world"]).__dict__))
    shutil.copytree(WORLD / "policy", path / "policy")
    (path / "I_star.txt").write_text("Use <search> </search> and <answer> </answer>. Give just the name as answer.\n")
    return path


def test_a_run_is_measured_under_its_I_star_and_another_instruction_can_replace_it(finished, retriever, tmp_path):
    said, fault = run(finished, "--n", 4, "--retriever", retriever, "--out", tmp_path / "own")
    assert not fault and "\nmine, inspo:" in said
    flags = [finished, "--n", 4, "--retriever", retriever]
    run(*flags, "--method", "search_r1", "--out", tmp_path / "first")
    for name, file in (("same", finished / "I_star.txt"), ("other", WORLD / "instruction.txt")):
        run(*flags, "--instruction", file, "--out", tmp_path / name)
    own, same, first, other = (read_jsonl(tmp_path / x / "results.jsonl") for x in ("own", "same", "first", "other"))
    assert own == same != first == other


def cells_of(text):
    """Returns the cells of every Markdown table in a text: of each row (heading, cell)."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    heads = [k - 1 for k, line in enumerate(lines) if set(line) == {"---"}]
    ends = [*heads[1:], len(lines)]
    for head, end in zip(heads, ends, strict=True):
        assert len({len(line) for line in lines[head:end]}) == 1, "rows of one width"
    spans = zip(heads, ends, strict=True)
    return [[list(zip(lines[h], line, strict=True)) for line in lines[h + 2 : end]] for h, end in spans]


NUMBER = r"[+-]?[\d,]+(\.\d+)?(e-\d+)?"
CELL = re.compile(rf"({NUMBER}( \[{NUMBER}, {NUMBER}\])?(, {NUMBER})*)?")


@pytest.fixture(scope="module")
def several(tmp_path_factory, retriever):
    """What evaluate.py prints of two sets under two policies, and of their comparison; where it writes."""
    folder, said = tmp_path_factory.mktemp("several"), []
    flags = ["world", "--data", "world", "valid", "--retriever", retriever]
    (folder / "entity.txt").write_text("Look up each entity. Use <search> </search> and <answer> </answer>.")
    for name, more in (("one", [3]), ("two", [3, "--instruction", folder / "entity.txt"]), ("single", [1])):
        said.append(run(*flags, "--out", folder / name, "--n", *more)[0])
    said.append(run("--compare", folder / "one", folder / "two", folder / "one")[0])
    return folder, said


def test_a_person_can_read_what_is_printed(several):
    for text in several[1]:
        assert not re.search(r"\w+\(\w+=|\bnan\b|\binf\b|None|Traceback|<class|\{|np\.", text), text
        assert max(map(len, text.splitlines())) <= 200
        [table] = cells_of(text)
        for row in table:
            names = [x for head, x in row if head in ("", "benchmark")]
            assert all(re.fullmatch("[a-z]+", x) for x in names)
            for _, cell in row[len(names) :]:
                assert CELL.fullmatch(cell), (cell, text)


def test_the_figures_printed_are_those_of_the_json_beside_them(several):
    for name, text in zip(("one", "two", "single"), several[1], strict=False):
        file = several[0] / name / "summary.json"
        found = json.loads(file.read_text(), parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
        [table] = cells_of(text)
        figures = found["benchmarks"] | {"average": {"em": found["average"], "questions": found["average"]["n"]}}
        assert [row[0][1] for row in table] == list(figures) == ["world", "valid", "average"]
        for row in table:
            part, shown = figures[row[0][1]], dict(row)
            mean, low, high = map(float, re.findall(r"-?\d+\.\d+", shown["EM, 95 %"]))
            assert (mean, low, high) == tuple(pytest.approx(part["em"][k], abs=5e-4) for k in ("mean", "low", "high"))
            assert int(shown["questions"]) == part["questions"] and low <= mean <= high and low < high
            if row[0][1] != "average":
                assert float(shown["F1"]) == pytest.approx(part["f1"]["mean"], abs=5e-4)
                for head in ("answered", "searches", "gold recall"):
                    assert float(shown[head]) == pytest.approx(part[head.replace(" ", "_")], abs=5e-3)


# ---- at the command line


def test_progress_is_shown_within_a_chunk(retriever, tmp_path):
    reached, err = [], io.StringIO()
    one = METHODS["search_r1"]

    def watched(player, questions):
        inner = player.progress
        return one.play(dataclasses.replace(player, progress=lambda n: reached.append(n) or inner(n)), questions)

    flags = ["world", "--data", "world", "--n", "9", "--retriever", retriever, "--out", str(tmp_path / "o")]
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        evaluate.main(flags, {"search_r1": one._replace(play=watched)})
    assert reached == sorted(reached) and {*reached} == {*range(1, 10)}  # one chunk
    assert re.findall(r"world: +(\d+%)", err.getvalue())[-1] == "100%"


@pytest.mark.parametrize("program", ["evaluate.py", "ask.py"])
def test_help_waits_for_neither_torch_nor_scipy(program):
    command = [sys.executable, "-X", "importtime", program, "--help"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "--temperature" in done.stdout
    assert "config" in imported and not imported & {"torch", "scipy", "transformers", "rich"}


MOMENTS = [0.05, 0.4, *(pytest.param(t, marks=pytest.mark.slow) for t in np.arange(0.8, 6.5, 0.3))]


@pytest.mark.parametrize("seconds", MOMENTS)
def test_a_ctrl_c_ends_an_evaluation_in_one_line_at_any_moment(tmp_path, seconds):
    """Counted from the first moment at which Python listens."""
    command = [sys.executable, "-X", "importtime", "evaluate.py", "world", "--data", "world", "--out"]
    command.append(str(tmp_path / "o"))
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.endswith("plumbing.stop\n"):
            break
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    lines = [line for line in process.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1 and "stopped by SIGINT" in lines[0] and process.returncode == 1, lines


# ---- another task


class Rolling(Game):
    """Ends an episode at the sum of its question, whose state is what is missing.

    The world's first policy writes all words of the question: a goal of 1 is reached, 99 is not.
    """

    tag, noun, argument, plural, result_tag = "search", "a roll", "number", "rolls", "information"
    down, names = False, ("reached", "missing")

    def questions(self, split):
        text = load_questions(WORLD / f"{split}.jsonl")[0].text
        return [Question(f"{split}-{goal}", text, data=goal) for goal in (1, 99, 2)[: {"test": 3, "train": 1}[split]]]

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
    said, fault = run(*ROLLING, "--out", tmp_path / "o")
    assert not fault
    rows = read_jsonl(tmp_path / "o" / "results.jsonl")
    found = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert [row["reached"] for row in rows] == [1, 0, 1] and [row["stop"] for row in rows] == ["over", "turns", "over"]
    assert all(row["reward"] == -row["missing"] for row in rows) and [row["rolls"] for row in rows] == [1, 1, 1]
    assert (found["metrics"], found["tools"]) == (["reached", "missing"], ["rolls"])
    assert found["benchmarks"]["test"]["reached"]["mean"] == pytest.approx(2 / 3) == found["average"]["mean"]
    assert "reached, 95 % | missing | finished" in said
    assert not any(word in said for word in ("EM", "F1", "hop", "gold", "searches"))
    _, fault = run(*ROLLING, "--data", "nq", "--out", tmp_path / "p")
    assert fault.startswith("evaluate.py: --data nq: ") and "give test, valid, train" in fault


def test_an_evaluation_whose_judge_goes_away_keeps_its_rows_and_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 1)
    whole, later = tmp_path / "whole", tmp_path / "later"
    run(*ROLLING, "--out", whole)
    graded = Rolling.reward
    monkeypatch.setattr(Rolling, "down", property(lambda self: len(read_jsonl(later / "results.jsonl")) == 2))
    _, fault = run(*ROLLING, "--out", later)
    assert fault.startswith("evaluate.py: the judge does not answer; 2 of 3 rows are kept") and fault.count("\n") == 0
    monkeypatch.setattr(Rolling, "down", False)
    assert not run(*ROLLING, "--out", later)[1] and Rolling.reward is graded
    for name in ("results.jsonl", "table.md"):
        assert (later / name).read_text() == (whole / name).read_text()


@pytest.mark.parametrize("names, words", [(("tokens", "x"), "a figure called tokens"), (("id", "x"), "called id")])
def test_a_metric_cannot_take_the_name_of_another_figure(tmp_path, monkeypatch, names, words):
    monkeypatch.setattr(Rolling, "names", names)
    _, fault = run(*ROLLING, "--out", tmp_path / "o")
    assert fault.startswith("evaluate.py: --task ") and words in fault and not read_jsonl(tmp_path / "o/results.jsonl")


# ---- asking


def test_asking_plays_the_run_s_task_and_scores_what_it_knows(finished, retriever, tmp_path, monkeypatch):
    known = load_questions(WORLD / "test.jsonl")[0]
    own = ["--run", finished, "--retriever", retriever]
    said, fault = run(*own, known.text.removesuffix("?"), main=ask.main)
    assert not fault and (finished / "I_star.txt").read_text() in said and '  search  "' in said
    [row] = [row for row in map(str.split, said.splitlines()) if row[:1] == ["scored"]]
    prediction = next(line for line in said.splitlines() if line.startswith("  answer  ")).removeprefix("  answer  ")
    assert row[1:3] == ["em", f"{em(prediction, known.golds):g},"]
    assert run(*own, known.id, main=ask.main)[0] == said
    said, fault = run(*own, "What is the color of the sky", main=ask.main)
    assert not fault and "scored" not in said and "  answer  " in said
    _, fault = run("--run", tmp_path, "x", main=ask.main)
    assert fault.startswith(f"ask.py: {tmp_path} holds no finished run") and fault.count("\n") == 0

    game = tmp_path / "game"
    shutil.copytree(finished, game)
    config = json.loads((game / "config.json").read_text())
    (game / "config.json").write_text(json.dumps(config | {"task": f"{__name__}:Rolling"}))
    typed = iter(["anything", "test-1", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    said, fault = run("--run", game, "--task", f"{__name__}:Rolling", main=ask.main)
    assert not fault and "is more than its text: give the id of one, such as test-1" in said
    assert said.rstrip().endswith("the end (over)\n  scored  reached 1, missing 0") and " of 1\n" in said


# ---- the benchmarks' files


def test_flashrag_s_files_by_split(tmp_path, capsys):
    def row(k, **more):
        return {"id": f"dev_{k}", "question": f"who is {k}", "golden_answers": ["x"]} | more

    write_jsonl(tmp_path / "musique" / "dev.jsonl", [row(0)])
    write_jsonl(tmp_path / "musique" / "train.jsonl", [row(9)])
    write_jsonl(tmp_path / "nq" / "test.jsonl", [row(0)])
    write_jsonl(tmp_path / "nq" / "dev.jsonl", [row(1), row(2)])
    found = {name: benchmarks.load(name, tmp_path) for name in ("musique", "nq")}
    assert [(q.id, q.source) for q in found["musique"]] == [("dev_0", "musique")]
    assert [q.text for q in found["nq"]] == ["who is 0?"]  # test comes before dev
    assert "note: nq: 1 questions, its published test split has 3,610" in capsys.readouterr().out
    write_jsonl(tmp_path / "bamboogle" / "test.jsonl", [row(k) for k in range(125)])
    assert len(benchmarks.load("bamboogle", tmp_path)) == 125 and capsys.readouterr().out == ""


def test_search_r1_s_merged_parquet_holds_every_set(tmp_path):
    rows = [
        {
            "data_source": source, "prompt": [{"role": "user", "content": "Answer. Question: who?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["x", "y"]}}, "extra_info": {"index": k},
        }
        for k, source in enumerate(["nq", "popqa", "nq"])
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    assert [(q.text, q.golds, q.source) for q in benchmarks.load("nq", tmp_path)] == [("who?", ("x", "y"), "nq")] * 2
    assert benchmarks.load("triviaqa", tmp_path) == []
    _, fault = run("world", "--data", "triviaqa", "--data_dir", tmp_path, "--out", tmp_path / "o")
    assert fault.startswith("evaluate.py: --data triviaqa: ") and "no such questions" in fault


def test_a_missing_file_out_of_the_hub_s_reach_is_one_line_with_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, fault = run("world", "--data", "hotpotqa", "--data_dir", tmp_path, "--out", tmp_path / "o")
    assert fault.startswith(f"evaluate.py: no {tmp_path}/hotpotqa/dev.jsonl, and hf://datasets/RUC-NLPIR/FlashRAG_datas")
    assert "the hub cannot be reached" in fault and fault.count("\n") == 0


# ---- other bad input


def test_each_fault_is_one_line_that_says_what_to_do(tmp_path, finished, monkeypatch):
    monkeypatch.setattr("tasks.search.DEFAULT", "http://127.0.0.1:9")  # a search server may run on this machine
    unfinished = tmp_path / "half"
    shutil.copytree(finished, unfinished)
    (unfinished / "I_star.txt").unlink()
    policy = WORLD / "policy"
    for flags, words in (
        (["world", "--data", "world", "world"], "--data world: there is a world already"),
        (["world", "--data", "squad"], "squad: no such .jsonl or .parquet file"),
        ([unfinished], "has no I_star.txt, so it has not finished: resume it, or give a directory that"),
        ([policy, "--method", "inspo", "--data", "world"], "has no I_star.txt to play under; give an instruction"),
        ([policy, "--data", "world"], "nothing to search: give --corpus"),
        ([policy], "--test is missing"),
        (["world", "--corpus", tmp_path / "gone"], "--corpus"),
        (["world", "--instruction", tmp_path / "gone"], "--instruction"),
        (["world", "--topk", 0], "--topk 0: must be at least 1"),
        (["world", "--task", "nothing"], "--task nothing: give it as module:"),
        ([tmp_path / "nothing", "--data", "world", "--corpus", WORLD / "corpus.jsonl"], "nothing: "),
        (["--compare", tmp_path / "x", tmp_path / "y"], "x: no finished evaluation is in it"),
    ):
        out, fault = run(*flags, *([] if flags[0] == "--compare" else ["--out", tmp_path / "o", "--n", 2]))
        assert words in fault and fault.startswith("evaluate.py: ") and fault.count("\n") == 0, fault
    assert "give WHAT to evaluate" in run()[1]


def test_another_setting_in_the_same_directory_is_refused(whole):
    _, fault = run("world", "--data", "world", "--n", 12, "--out", whole[0])
    assert fault == f"evaluate.py: {whole[0]} was started with n 10, not 12: choose another --out"


def finding(handler):
    """Answers as a search server of another kind does, which says nothing of itself."""
    path, _, body = handler.server.requests[-1]
    about = getattr(handler.server, "about", {})
    handler.send_response(200 if path == "/retrieve" or about else 404)
    handler.end_headers()
    if path == "/health" and about:
        handler.wfile.write(json.dumps(about).encode())
    if path == "/retrieve":
        hits = [{"document": {"id": "1", "contents": '"T"\ntext'}, "score": 1.0}]
        handler.wfile.write(json.dumps({"result": [hits] * len(json.loads(body)["queries"])}).encode())


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def another_weight(mine):
    weights = bytearray((mine / "model" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (mine / "model" / "model.safetensors").write_bytes(weights)


CHANGES = {  # what is replaced behind the same command line -> how, and what the line calls it
    "data": (lambda mine, server: rewrite(mine / "q.jsonl", "Krevux", "Brevux"), "questions of q"),
    "gold answers": (lambda mine, server: rewrite(mine / "q.jsonl", "Faisticorp", "Paisticorp"), "golds of q"),
    "instruction": (lambda mine, server: rewrite(mine / "i.txt", "entity", "name"), "instruction text"),
    "weights": (lambda mine, server: another_weight(mine), "weights"),
    "corpus": (lambda mine, server: rewrite(mine / "c.jsonl", "Karon", "Maron"), "passages"),
    "server's corpus": (lambda mine, server: server.about.update(corpus="34cd"), "passages"),
    "reward": (lambda mine, server: rewrite(mine / "judge_of_rows.py", "1.0", "0.3"), "code of judge_of_rows"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_rows_of_what_has_been_replaced_are_not_shown_as_those_of_its_successor(servers, tmp_path, what, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "mine")
    server, mine, (change, words) = servers(finding), tmp_path / "mine", CHANGES[what]
    shutil.copytree(WORLD / "policy", mine / "model")
    (mine / "c.jsonl").write_text((WORLD / "corpus.jsonl").read_text())
    (mine / "q.jsonl").write_text("".join((WORLD / "test.jsonl").read_text().splitlines(keepends=True)[:2]))
    (mine / "i.txt").write_text("Look up each entity. Use <search> </search> and <answer> </answer>.")
    flags = [mine / "model", "--data", mine / "q.jsonl", "--instruction", mine / "i.txt", "--out", tmp_path / "o"]
    flags += ["--max_response", 40, "--max_observation", 100]
    if what == "reward":
        (mine / "judge_of_rows.py").write_text("def score(taus):\n    return [1.0 for _ in taus]\n")
        flags += ["--reward", "judge_of_rows:score"]
    if what == "server's corpus":
        server.about = {"status": "ok", "corpus": "12ab"}
    flags += ["--corpus", mine / "c.jsonl"] if what == "corpus" else ["--retriever", server.url]
    assert not run(*flags)[1]
    rows, table = (tmp_path / "o" / "results.jsonl").read_bytes(), (tmp_path / "o" / "table.md").read_text()
    said, fault = run(*flags)  # the same again: nothing is played
    assert not fault and table in said and "search: " not in said
    assert said.startswith(f"2 of 2 rows are from an earlier call; remove {tmp_path / 'o'} to play them again\n")
    change(mine, server)
    said, fault = run(*flags)
    assert fault.startswith(f"evaluate.py: {tmp_path / 'o'} was started with other {words}: ") and not said
    assert fault.endswith(": choose another --out")
    assert (tmp_path / "o" / "results.jsonl").read_bytes() == rows


def test_rows_of_another_commit_are_named_as_long_as_they_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "commit", lambda: "abc1234")
    assert not run(*ROLLING, "--out", tmp_path / "o")[1]
    monkeypatch.setattr(measure, "commit", lambda: "def5678+12ab34cd")
    for _ in range(2):
        text, fault = run(*ROLLING, "--out", tmp_path / "o")
        assert not fault and "3 of 3 rows are from an earlier call (commit abc1234, not def5678+12ab34cd); " in text


def test_a_served_model_is_known_by_its_address_without_the_password(servers, retriever, tmp_path):
    model = {"id": "qwen", "root": "/models/step-100", "created": 1}
    chat = servers({"data": [model]}, said("<answer> x </answer>"))
    url = chat.url.replace("//", "//user:password9@")
    flags = [url, "--data", "world", "--n", 1, "--retriever", retriever, "--out", tmp_path / "o"]
    assert not run(*flags)[1] and "password9" not in (tmp_path / "o" / "summary.json").read_text()
    assert not run(*flags)[1]
    assert "was started with other weights" in run(*flags, "--served_model", "other")[1]


def test_a_run_that_was_made_anew_with_other_knobs_is_another(finished, retriever, tmp_path):
    shutil.copytree(finished, tmp_path / "mine")
    flags = [tmp_path / "mine", "--n", 1, "--retriever", retriever, "--out", tmp_path / "o"]
    assert not run(*flags)[1]
    rewrite(tmp_path / "mine" / "config.json", '"max_turns": 4', '"max_turns": 2')
    assert "was started with max_turns 4, not 2: choose another --out" in run(*flags)[1]


def test_two_evaluations_at_once_do_not_write_into_one_directory(whole, retriever):
    code = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
    code += "print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(whole[0] / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    _, fault = run("world", "--data", "world", "--n", 10, "--retriever", retriever, "--out", whole[0])
    other.communicate("")
    assert "another process writes to" in fault and fault.count("\n") == 0


@pytest.mark.parametrize("text", ["{", "[" * 5000, "[]", '{"em_best": 0.9}', '{"setting": 3}'])
def test_a_directory_that_holds_something_else_is_refused(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    _, fault = run("world", "--n", 12, "--out", tmp_path)
    assert fault == f"evaluate.py: {tmp_path / 'summary.json'} is no evaluation's, or damaged: choose another --out"
    assert (tmp_path / "summary.json").read_text() == text


def test_a_tokenizer_that_is_too_large_for_its_model_is_refused(tmp_path, tiny_path):
    shutil.copytree(tiny_path, tmp_path / "mixed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WORLD / "policy" / name, tmp_path / "mixed" / name)
    shutil.copy(WORLD / "policy" / "chat_template.jinja", tmp_path / "mixed" / "chat_template.jinja")
    corpus = ["--data", "world", "--corpus", WORLD / "corpus.jsonl"]
    _, fault = run(tmp_path / "mixed", *corpus, "--n", 2, "--out", tmp_path / "o")
    assert "its tokenizer has 675 tokens and its model 600: use the model's own" in fault, fault


# ---- a chat endpoint


def said(text):
    return {"choices": [{"message": {"content": text}}]}


MODELS = {"data": [{"id": "qwen"}]}


def test_a_chat_endpoint_plays_the_loop_with_observations_as_messages(servers, retriever, tmp_path):
    chat = servers(MODELS, said("I search. <search> Krevux Babith"), said("<answer> Trebak Faisticorp </answer>"))
    rows = [json.loads((WORLD / "test.jsonl").read_text().splitlines()[0])]
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    out = tmp_path / "o"
    _, fault = run(chat.url + "/v1", "--data", path, "--retriever", retriever, "--out", out)
    assert not fault
    [row] = read_jsonl(out / "results.jsonl")
    assert (row["em"], row["searches"]) == (1.0, 1)
    bodies = [json.loads(body) for _, _, body in chat.requests[1:]]
    assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert (
        bodies[1]["messages"][1]["content"] == "I search. <search> Krevux Babith</search>"
    )  # the endpoint cuts stop strings
    assert bodies[1]["messages"][2]["content"].startswith("<information>Doc 1(Title:")
    assert bodies[0]["model"] == "qwen" and bodies[0]["stop"] == ["</search>", "</answer>"]
    assert bodies[0]["temperature"] == 0 and "seed" not in bodies[0]


def test_a_server_of_another_model_and_one_that_is_not_there_are_refused_in_a_line(servers, tmp_path):
    chat = servers(MODELS)
    flags = [chat.url, "--data", "world", "--corpus", WORLD / "corpus.jsonl", "--n", 2, "--out", tmp_path / "o"]
    _, fault = run(*flags, "--served_model", "llama")
    assert fault == f"evaluate.py: --served_model: {chat.url} has qwen: not llama"
    chat.stop()
    _, fault = run(*flags)
    assert "start the server, or check the URL" in fault and fault.count("\n") == 0


def test_words_come_back_whole_and_answers_that_are_no_chat_end_the_evaluation(servers):
    words = Words()
    for text in ("a b\n\n<x>c</x>  ", " leading", "", "tab\tand\u00a0more\n"):
        assert words.decode(words(text)["input_ids"]) == text
    engine = ChatEngine(servers(MODELS, {"choices": []}).url, "", words, ("</answer>",), retries=0)
    with pytest.raises(EngineFault, match="malformed answer"):
        while True:
            list(engine.generate({0: words("hello")["input_ids"]} if not engine.turns.running else {}, 5, 0.0))
    engine.close()


# ---- comparing


def evaluation(path: Path, metric="em", **by_data):
    rows = [
        {"data": name, "id": f"{name}-{k}", metric: float(x), "chunk": 0, "sample": 0}
        for name, values in by_data.items()
        for k, x in enumerate(values)
    ]
    sizes = {name: len(values) for name, values in by_data.items()}
    summary = {
        "setting": {"task": "tasks.search_qa:SearchQA",
                    "content": {f"questions of {name}": n for name, n in sizes.items()}}, "metrics": [metric],
        "benchmarks": {name: {"questions": n} for name, n in sizes.items()},
    }  # fmt: skip
    write_jsonl(path / "results.jsonl", rows)
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_compare_two_greedy_runs(tmp_path):
    a = evaluation(tmp_path / "base", nq=[0] * 8 + [1] + [1] * 5 + [0] * 6)
    b = evaluation(tmp_path / "new", nq=[1] * 8 + [0] + [1] * 5 + [0] * 6)
    row = next(line for line in compare([a, b]).splitlines() if line.startswith("| new"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["new", "nq", "20", "0.650, 0.300"]
    assert cells[4].startswith("+0.350 [") and cells[5:7] == ["0.039", "8, 1"]
    assert cells[7:9] == ["", ""]  # one seed says nothing of others
    same, best = (
        compare([a, a]),
        compare([evaluation(tmp_path / "x", nq=[0, 0, 0]), evaluation(tmp_path / "y", nq=[1] * 3)]),
    )
    assert "| +0.000 [-0." in same and "| 1.000 | 0, 0 |" in same and "nan" not in same
    assert "| 0.250 | 3, 0 |" in best  # three questions prove nothing, however clear
    for line in (same + best).splitlines():
        assert len(line) <= 200 and "inf" not in line


def test_compare_seeds_as_a_level_of_their_own_with_holm_over_the_arms(tmp_path):
    def arm(name, *seeds):
        return ",".join(
            evaluation(tmp_path / f"{name}{k}", nq=[1] * n + [0] * (20 - n), popqa=[1] * n + [0] * (20 - n))
            for k, n in enumerate(seeds)
        )

    text = compare([arm("base", 4, 5, 6), arm("good", 14, 15, 16), arm("same", 5, 6, 4)])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    good = {line[1]: line for line in lines if line[0].startswith("good")}
    assert list(good) == ["nq", "popqa", "average"] and good["average"][3] == "0.750, 0.250"
    half = 2.776445 * np.hypot(0.05, 0.05) / np.sqrt(3)
    assert good["average"][7] == f"+0.500 [{0.5 - half:+.3f}, {0.5 + half:+.3f}]"
    assert good["nq"][6] == ""  # McNemar's test is for single runs
    assert "Holm's p over the 2 comparisons: good0 and 2 more" in text and "same0 and 2 more 1.000" in text


def test_compare_refuses_other_questions_metrics_and_what_has_not_finished(tmp_path):
    a, b = evaluation(tmp_path / "a", nq=[1, 0, 1]), evaluation(tmp_path / "b", nq=[1, 0])
    with pytest.raises(Fault, match="a and .*b differ in the questions of nq: evaluate both"):
        compare([a, b])
    with pytest.raises(Fault, match="b and .*c differ in the questions of popqa"):
        compare([b, evaluation(tmp_path / "c", nq=[1, 0], popqa=[1])])
    evaluation(tmp_path / "b", "miles", nq=[1, 0, 1])
    for arms in ([a, b], [f"{a},{b}", a]):
        with pytest.raises(Fault, match="a and .*b measure em of .* and miles of .*: compare evaluations of one task"):
            compare(arms)
    for name in ("results.jsonl", "summary.json"):
        evaluation(tmp_path / "b", nq=[1, 0, 1])
        (tmp_path / "b" / name).write_text((tmp_path / "b" / name).read_text()[:90])
        with pytest.raises(Fault, match="b: no finished evaluation is in it"):
            compare([a, b])


def test_compare_by_another_metric_that_is_no_right_or_wrong(tmp_path):
    a = evaluation(tmp_path / "a", "miles", test=[0.5, 2, 7])
    arms = [a, evaluation(tmp_path / "b", "miles", test=[1.5, 1, 9])]
    head, _, row = compare(arms).splitlines()[2:5]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert head.split("|")[4].strip() == "miles" and cells[3] == "3.833, 3.167"
    assert cells[4].startswith("+0.667 [") and cells[6] == ""  # McNemar's test is for right and wrong


def test_evaluations_of_other_questions_or_golds_under_the_same_ids_are_not_compared(retriever, tmp_path):
    """Rows without an id are called data-1, data-2, ... in every file."""
    rows = [json.loads(line) for line in (WORLD / "test.jsonl").read_text().splitlines()[:4]]
    rows = [{"question": row["question"], "golden_answers": row["golden_answers"]} for row in rows]
    other_golds = [rows[0], rows[1] | {"golden_answers": ["x"]}]
    sets = {"one": rows[:2], "same": rows[:2], "other": rows[2:], "golds": other_golds}
    for name, some in sets.items():
        path = write_jsonl(tmp_path / name / "q.jsonl", some)
        more = ["--max_turns", 2] if name == "same" else []
        assert not run("world", "--data", path, "--retriever", retriever, "--out", tmp_path / f"{name}-out", *more)[1]
    one, *others = (str(tmp_path / f"{name}-out") for name in sets)
    ids = [[row["id"] for row in read_jsonl(Path(out) / "results.jsonl")] for out in (one, *others)]
    assert ids == [["data-1", "data-2"]] * 4
    text, fault = run("--compare", one, others[0])
    assert not fault and "Not all of these were made with the same max_turns: " in text
    for out, words in zip(others[1:], ("questions of q", "golds of q"), strict=True):
        text, fault = run("--compare", one, out)
        assert fault.startswith("evaluate.py: --compare: ") and f"differ in the {words}: evaluate both" in fault
        assert not text and fault.count("\n") == 0
