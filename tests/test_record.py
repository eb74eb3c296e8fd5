"""What a run or an evaluation is, by content: every part that changes is named, and nothing else
is."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest

from config import HERE, PRESETS, Config
from journal.directory import RunDirectory
from journal.record import (
    BLOCK,
    BLOCKS,
    describe,
    describe_model,
    describe_run,
    differences,
    digest,
    digest_file,
)
from page.curves import SEED
from plumbing.faults import Fault
from tasks import Question
from tasks.loading import load_task

FILES = HERE / "world" / "files"


def double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number
    """
    return 2 * x


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Returns a function that describes a task of files in `tmp_path`, with a reward of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judge_of_record.py").write_text(
        "def score(taus):\n    return [1.0 for _ in taus]\n"
    )
    (tmp_path / "c.jsonl").write_text((FILES / "corpus.jsonl").read_text())
    cfg = Config(
        corpus=str(tmp_path / "c.jsonl"),
        tools=f"search,{__name__}:double",
        reward="judge_of_record:score",
    )
    questions = [
        Question("1", "Who?", ("he",)),
        Question("2", "What?", ("that", "this"), data={"row": 3}),
    ]

    def made(questions=questions, instruction="Search.", weights="w"):
        task = load_task(cfg)
        task.check()
        return {"lr": 0.1, "content": describe(task, {"test": questions}, instruction, weights)}

    made.questions = questions
    return made


def test_each_part_that_changes_is_named_and_nothing_else(record, tmp_path, monkeypatch):
    first, (one, two) = record(), record.questions
    assert differences(first, record()) == {}
    named = lambda **changed: list(differences(first, record(**changed)))  # noqa: E731
    assert named(questions=[one, Question("2", "What?", ("this",), data={"row": 3})]) == [
        "golds of test"
    ]
    assert named(questions=[one, Question("2", "What?", two.golds, data={"row": 4})]) == [
        "questions of test"
    ]
    # rows are paired by their place
    assert named(questions=[two, one]) == ["questions of test", "golds of test"]
    assert named(instruction="Find.") == ["instruction text"] and named(weights="v") == ["weights"]
    (tmp_path / "c.jsonl").write_text((tmp_path / "c.jsonl").read_text().replace("Karon", "Maron"))
    (tmp_path / "judge_of_record.py").write_text(
        "def score(taus):\n    return [0.3 for _ in taus]\n"
    )
    assert named() == ["passages", "code of judge_of_record"]
    assert {"code of tasks.search_qa", f"code of {__name__}", "words of double"} <= set(
        differences(first, {"lr": 0.1, "content": {}})
    )
    monkeypatch.setattr(double, "__doc__", double.__doc__.replace("Doubles", "Triples"))
    assert named() == ["passages", "words of double", "code of judge_of_record"]


def test_what_is_imported_from_the_user_s_folder_is_part_of_it_and_no_other_folder_is(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "graded_by.py": "from scale_of import HALF\nimport parts_of.deep, numpy\ndef score(taus): return [HALF]",
        "scale_of.py": "HALF = 0.5", "parts_of/__init__.py": "", "parts_of/deep.py": "x = 1",
        "lib/site-packages/bought_of.py": "", "unused_of.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "lib" / "site-packages")
    importlib.import_module("bought_of")
    task = load_task(Config(reward="graded_by:score", tools="none"))
    first = describe(task, {}, "", "")
    own = {f"code of {name}" for name in ("graded_by", "scale_of", "parts_of", "parts_of.deep")}
    ours = ("code of tasks", "code of extras")
    code = {name for name in first if name.startswith("code of")}
    assert {name for name in code if not name.startswith(ours)} == own
    for name in ("scale_of.py", "parts_of/deep.py"):
        (tmp_path / name).write_text("HALF = x = 0.7")
    assert set(differences(first, describe(task, {}, "", ""))) == {
        "code of scale_of",
        "code of parts_of.deep",
    }


def test_the_order_of_the_questions_to_train_on_is_part_of_a_run(tmp_path, capsys):
    rows = [{"id": f"q{k}", "question": "Who?", "golden_answers": ["he"]} for k in range(60)]
    swapped = [rows[1], rows[0], *rows[2:]]

    def record(some, **knobs):
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        files = dict.fromkeys(("train", "test"), str(tmp_path / "q.jsonl"))
        return describe_run(
            load_task(Config(**PRESETS["world"] | files | {"tools": "none"} | knobs))
        )

    first, valid = record(rows), {"valid": ""}
    assert record(rows) == first
    for other in (swapped, rows[::-1]):
        assert {"order of train"} <= set(
            differences({"content": first}, {"content": record(other)})
        )
    cut, reseeded = record(rows, **valid), record(rows, seed=1, **valid)
    # two seeds are one group of a page
    assert set(differences({"content": cut}, {"content": reseeded}, SEED)) == set()
    out = tmp_path / "r"
    RunDirectory.open(Config(out=str(out)), "x", first).close()
    with pytest.raises(Fault, match=f"^--resume: {out} was started with other "):
        reopened(out, record(rows[::-1]))
    older = tmp_path / "older"
    RunDirectory.open(
        Config(out=str(older)), "x", {x: y for x, y in first.items() if x != "order of train"}
    ).close()
    reopened(older, first)
    assert "other order of train" in capsys.readouterr().out


def test_settings_have_both_values_and_paths_of_files_do_not_count():
    one = {"T": 40, "train": "a.jsonl", "content": {"weights": "1", "passages": None}}
    other = {"T": 80, "train": "b.jsonl", "content": {"weights": "2", "passages": "x"}}
    assert differences(one, other) == {"T": "T 40, not 80", "weights": "other weights"}
    assert differences(one, other, {"T"}) == {"weights": "other weights"}


def test_a_large_file_is_sampled_and_says_so(tmp_path):
    large, small = tmp_path / "large", tmp_path / "small"
    with open(large, "wb") as f:
        f.truncate(14 << 30)  # sparse
    began = time.thread_time()
    first = digest_file(large)
    assert time.thread_time() - began < 3 and first.endswith(f" (a sample of {14 << 30:,} bytes)")
    for place in (0, (14 << 30) - 1):
        with open(large, "r+b") as f:
            f.seek(place)
            f.write(b"x")
        first, before = digest_file(large), first
        assert first != before
    with open(large, "ab") as f:
        f.write(b"\0")
    assert digest_file(large) != first
    small.write_bytes(bytes(3 * BLOCK + 5))
    whole = digest_file(small)
    assert "sample" not in whole and BLOCKS > 3
    for place in (0, BLOCK, 2 * BLOCK + 77, 3 * BLOCK + 4):
        content = bytearray(3 * BLOCK + 5)
        content[place] = 1
        small.write_bytes(content)
        assert digest_file(small) != whole


def test_another_process_has_the_same_digest_of_sets_and_objects():
    code = "from journal.record import digest; print(digest([set('abcdefghijklmn'), object(), {(1, 2): 3}]))"
    env = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, env=env, capture_output=True, text=True
    )
    assert done.stdout == digest([set("nmlkjihgfedcba"), object(), {(1, 2): 3}]) + "\n" and digest(
        [1]
    ) != digest([2])


def test_a_model_is_its_files_or_its_name_without_the_password(tmp_path, monkeypatch):
    assert "model.safetensors " in describe_model(str(FILES / "policy"))
    assert describe_model("http://me:password9@host/v1") == "http://host/v1"
    # tests/test_hub.py has a hub
    cached = "/cache/models--owner--name/snapshots/c0ffee/config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: cached)
    assert describe_model("owner/name") == "owner/name c0ffee"


def reopened(path, content, **knobs):
    RunDirectory.open(Config(out=str(path), resume=True, **knobs), "x", content).close()


def test_a_run_is_resumed_on_the_same_questions_golds_and_weights_alone(tmp_path, capsys):
    out = tmp_path / "r"
    content = {"questions of test": "1", "golds of test": "2", "weights": "3", "code of judge": "4",
               "passages": "5", "words of search": "6", "instruction text": "7"}  # fmt: skip
    RunDirectory.open(Config(out=str(out)), "x", content).close()
    reopened(out, content, train="moved.jsonl")
    assert capsys.readouterr().out == ""
    for name in ("questions of test", "golds of test", "weights"):
        with pytest.raises(Fault, match=f"^--resume: {out} was started with other {name}$"):
            reopened(out, content | {name: "x"})
    with pytest.raises(Fault, match=f"^--resume: {out} was started with --tools search, not none$"):
        reopened(out, content, tools="none")
    noted = ("code of judge", "passages", "words of search", "instruction text")
    reopened(out, content | dict.fromkeys(noted, "x"))
    notes = sorted(f"note: {out} was started with other {name}" for name in noted)
    assert sorted(capsys.readouterr().out.splitlines()) == notes
