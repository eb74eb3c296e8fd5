"""Questions in files, exact match and F1 on values computed by hand, search QA's splits, the
shipped fixture."""

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config import Config
from plumbing.faults import Fault
from plumbing.outside import plain
from plumbing.words import split_words
from tasks import Question, Trajectory, search_qa
from tasks.search_qa import SearchQA, em, f1, holds_gold, load_questions, normalize
from tasks.task import check_questions, compute_metrics, set_rewards

FIXTURE = Path(__file__).parent / "fixture"
ROW = {"id": "a", "question": "Who?", "golden_answers": ["X"], "data_source": "nq"}


def write(path: Path, *rows) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def fault(path) -> str:
    """Returns the one line with which loading `path` fails, after the path."""
    with pytest.raises(Fault) as caught:
        load_questions(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(path)) and "; " in message
    return message.removeprefix(str(path))


PROSE = [
    "The co-op's naïve café — “don't” stop_now, it’s 1914–1918 at 3.5 m² and ½ past noon; U.S.A.!",
    "Jørn Utzon, İzmir, Łódź, Đặng Thái Sơn, Ærø, straße, ﬁn, Apple™ №5 1,000.00 €5 x_1 __y__ a–b",
    "Война и мир, Ἰλιάς, β-carotene; soft\u00adhyphen, no\u00a0break, zero\u200bwidth, 3×4 ≤ 12… end",
]

# --- the reward


@pytest.mark.parametrize(
    "text, want",
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("an apple, a pear & the plum", "apple pear plum"),
        ("A.", ""),  # punctuation before articles
        ("t.h.e end", "end"),
        ("1914–1918", "1914–1918"),  # an en dash is no ASCII punctuation
    ],
)
def test_normalize(text, want):
    assert normalize(text) == want


@pytest.mark.parametrize(
    "prediction, golds, want",
    [
        ("the volga.", ("Danube", "Volga"), 1.0),  # any gold
        ("Brasilia", ("Brasília",), 0.0),  # accents count
        ("  ", ("A",), 0.0),  # "A" normalizes to nothing too; saying nothing is still wrong
        ("a", ("A",), 1.0),
        (None, ("Volga",), 0.0),
    ],
)
def test_em(prediction, golds, want):
    assert em(prediction, golds) == want
    if want:
        assert f1(prediction, golds) == 1.0


@pytest.mark.parametrize("text", PROSE)
def test_f1_of_latin_text_is_squad_s_and_a_word_of_the_search_is_a_run_of_letters(text):
    part = text[: len(text) // 2] + " more"
    prediction, gold = normalize(text).split(), normalize(part).split()
    common = sum((Counter(prediction) & Counter(gold)).values())
    assert f1(text, [part]) == 2 * common / (len(prediction) + len(gold)) > 0
    assert split_words(text) == re.findall(r"\w+", plain(text).lower())


def test_a_gold_stands_in_passages_word_by_word():
    assert holds_gold(['"Emma" is by', "Jane Austen."], ["else", "Jane Austen"])
    for passages, gold in (([], "!"), (["Emmas"], "Emma"), (["Austen, Jane"], "Jane Austen")):
        assert not holds_gold(passages, [gold])


@pytest.mark.parametrize(
    "prediction, golds, want",
    [
        ("Duke of Wellington", ("Arthur Wellesley Duke of Wellington",), 0.75),  # 3/3, 3/5
        ("Paris Paris", ("Paris France",), 0.5),  # a token matches once
        ("red fox", ("blue whale", "red wolf", "red fox cub"), 0.8),  # the best gold
        ("the", ("Seine",), 0.0),
        (None, ("Seine",), 0.0),
    ],
)
def test_f1(prediction, golds, want):
    assert f1(prediction, golds) == pytest.approx(want)


def test_search_qa_rewards_the_exact_match_and_measures_f1_beside_it():
    q, task = Question("q", "Who?", ("Utzon", "Jørn Utzon")), SearchQA(Config())
    taus = [Trajectory(0, q, 0, [], 0, prediction=p) for p in ("the  jørn Utzon!", "Jørn", None)]
    set_rewards(task, taus)
    assert [(tau.reward, tau.failed) for tau in taus] == [(1.0, False), (0.0, True), (0.0, True)]
    found = compute_metrics(task, taus)
    assert found == [
        {"em": 1.0, "f1": 1.0},
        {"em": 0.0, "f1": pytest.approx(2 / 3)},
        {"em": 0.0, "f1": 0.0},
    ]
    assert list(found[0]) == ["em", "f1"]  # the first one chooses the best checkpoint


# --- files


def test_rows_with_question_and_golden_answers(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        ROW | {"id": 7, "question": "  who wrote Hamlet ", "golden_answers": " Shakespeare "},
        "",
        {"question": "Where\ud800？", "golden_answers": ["here", "", "there"]},
        ROW | {"golden_answers": None} | search_r1("Question: no", "X"),
    )
    assert load_questions(path) == [
        Question("7", "who wrote Hamlet?", ("Shakespeare",), "nq"),
        Question("data-3", "Where\ufffd？", ("here", "there"), "data"),
        Question("a", "Who?", ("X",), "nq"),
    ]


def search_r1(prompt, target, **more):
    reward_model = {"style": "rule", "ground_truth": {"target": target}}
    return {"data_source": "nq", "prompt": prompt, "reward_model": reward_model, **more}


TEMPLATE = (
    "Answer the given question. Question: is it so? Then <answer> Beijing </answer>. Question: "
)


def messages(*said):
    """Returns messages of "role: text"."""
    pairs = [text.partition(": ") for text in said]
    return [{"role": role, "content": text} for role, _, text in pairs]


PROMPTS = [  # prompt, what is asked
    # Search-R1's
    (messages(f"user: {TEMPLATE}who wrote Hamlet?\n"), "who wrote Hamlet?"),
    ("Question: who painted it?", "who painted it?"),
    # verl's of the same rows
    (messages("system: You are helpful.", f"user: {TEMPLATE}who wrote it?"), "who wrote it?"),
    (messages("system: Think. <answer> x </answer>", "user: Question: who?"), "who?"),
    # what the question needs
    (messages("system: Reply with a year.", "user: When was it?"), "Reply with a year.\n\nWhen was it?"),
    ("The mill of Oldwater.\nQuestion: when did it burn?", "The mill of Oldwater.\nQuestion: when did it burn?"),
    ("Name a mill. Put it in \\boxed{}.", "Name a mill. Put it in \\boxed{}."),
]  # fmt: skip


@pytest.mark.parametrize("prompt, asked", PROMPTS)
def test_all_of_a_prompt_is_asked_but_for_a_template(tmp_path, prompt, asked):
    row = search_r1(prompt, ["x"], extra_info={"index": 0})
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "q.parquet")
    for path in (write(tmp_path / "q.jsonl", row), tmp_path / "q.parquet"):
        assert load_questions(path) == [Question("0", asked, ("x",), "nq")]


CHAT = [{"role": "user", "content": "Question: who wrote it?"}]


@pytest.mark.parametrize(
    "row, golds",
    [  # verl's ground truth
        ({"reward_model": {"ground_truth": "42"}}, ("42",)),
        ({"reward_model": {"ground_truth": {"target": ["42", "x"], "style": 1}}}, ("42", "x")),
    ],
)
def test_golds_and_prompts_are_lists_objects_or_texts(tmp_path, row, golds):
    path = write(tmp_path / "q.jsonl", row | {"prompt": CHAT, "extra_info": {"index": 8}})
    assert load_questions(path) == [Question("8", "who wrote it?", golds)]


@pytest.mark.parametrize(
    "row, golds",
    [
        ({"prompt": CHAT, "solution": "42"}, ()),  # TRL's
        ({"prompt": CHAT, "reward_model": {"ground_truth": {"numbers": [3, 8], "target": 24}}}, ()),  # verl's
        ({"prompt": CHAT, "reward_model": {"ground_truth": "42"}}, ("42",)),
    ],
)  # fmt: skip
def test_a_row_that_a_reward_of_its_own_scores_needs_no_gold_answer(tmp_path, row, golds):
    path = write(tmp_path / "q.jsonl", row)
    [q] = load_questions(path, rows=True)
    assert (q.text, q.golds, q.data) == ("who wrote it?", golds, row)
    if not golds:
        assert "gold answer" in fault(path)


def test_parquet_reads_as_jsonl_does_and_its_metadata_are_not_read(tmp_path):
    """HotpotQA's passages are there: here they could not even be read."""
    rows = [json.loads(line) for line in (FIXTURE / "train.jsonl").open(encoding="utf-8")]
    context = pa.array([b"\xff"] * len(rows)).view(pa.string())
    table = pa.Table.from_pylist(rows).append_column("metadata", context)
    pq.write_table(table, tmp_path / "q.parquet")
    assert load_questions(tmp_path / "q.parquet") == load_questions(FIXTURE / "train.jsonl")


ANSWERED = [*CHAT, {"role": "assistant", "content": "Ada"}]


@pytest.mark.parametrize(
    "row, want",
    [
        ("{'id': 1}", "invalid JSON (Expecting property name enclosed in double quotes"),
        ("[1]", "not a JSON object; write"),
        (ROW | {"question": " \n"}, "no question; fill `question`, or `prompt`"),
        (search_r1(ANSWERED, "x"), "no question; fill"),
        (search_r1("Question: who?", []), "no gold answer; fill `golden_answers` or"),
        (ROW | {"golden_answers": " "}, "no gold answer; fill"),
    ],
)
def test_a_faulty_row_is_named(tmp_path, row, want):
    assert fault(write(tmp_path / "q.jsonl", ROW | {"id": "z"}, "", row)).startswith(f":3: {want}")


def test_an_id_that_two_sources_share_gets_the_source_and_one_that_stays_twice_is_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", ROW, ROW | {"data_source": "hotpotqa"}, ROW | {"id": "b"})
    assert [q.id for q in load_questions(path)] == ["nq-a", "hotpotqa-a", "b"]
    more = {"data_source": "hotpotqa"}, {"id": "nq-a", "data_source": "popqa"}
    path = str(write(tmp_path / "q.jsonl", ROW, *(ROW | other for other in more)))
    with pytest.raises(Fault, match="2 questions have the id 'nq-a'"):
        check_questions(SearchQA(Config(train=str(FIXTURE / "train.jsonl"), test=path)))


def test_a_faulty_file_is_named(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(json.dumps(ROW).encode() + b'\n{"question": "caf\xe9"}\n')
    assert fault(tmp_path / "q.jsonl").startswith(":2: invalid JSON ('utf-8' codec can't decode")
    assert fault(tmp_path / "none.jsonl") == ": no such file; check the path"
    assert fault(write(tmp_path / "q.csv", ROW)).startswith(": neither .jsonl nor .parquet; ")
    path = write(tmp_path / "q.parquet", ROW)
    assert fault(path).startswith(": not a readable parquet file (")
    pq.write_table(pa.table({"question": ["Who?"], "golden_answers": [[]]}), path)
    assert fault(path).startswith(":1: no gold answer; fill")


# --- what a run trains on, chooses its checkpoint by, and reports on


def split(monkeypatch, n=40, **knobs):
    """Returns the ids of the questions of train, valid and test."""
    ids = {"train": range(n), "valid": [-1, -2], "test": [-3]}
    files = {name: [Question(k, "Who?") for k in ids[name]] for name in ids}
    monkeypatch.setattr(search_qa, "load_questions", files.get)
    task = SearchQA(Config(train="train", test="test", **knobs))
    return [[int(q.id) for q in task.questions(name)] for name in ids]


def test_validation_questions_are_those_of_valid(monkeypatch):
    assert split(monkeypatch, valid="valid") == [[*range(40)], [-1, -2], [-3]]


def test_without_valid_a_tenth_of_the_training_questions_at_most_500_are_set_aside(monkeypatch):
    train, chosen, _ = split(monkeypatch)
    # in their order, and none is trained on
    assert sorted(train + chosen) == [*range(40)] and len(chosen) == 4
    assert (train, chosen) == (sorted(train), sorted(chosen))
    assert split(monkeypatch)[1] == chosen  # a resumed run sets the same ones aside
    assert any(split(monkeypatch, seed=seed)[1] != chosen for seed in (1, 2))
    for n, sizes in ((9, [9, 0, 1]), (6000, [5500, 500, 1])):
        assert [len(part) for part in split(monkeypatch, n)] == sizes
