"""Questions in files, exact match and F1 on values computed by hand, search QA's splits, the
shipped fixture."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config import Config
from plumbing.faults import Fault
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
        ("Theatre of Athens", "theatre of athens"),  # an article only as a whole word
        ("U.S.A.", "usa"),
        ("A.", ""),  # punctuation before articles
        ("t.h.e end", "end"),
        ("JØRN Utzon", "jørn utzon"),
        ("1914–1918", "1914–1918"),  # an en dash is no ASCII punctuation
    ],
)
def test_normalize(text, want):
    assert normalize(text) == want


@pytest.mark.parametrize(
    "prediction, golds, want",
    [
        ("the Volga.", ("Volga",), 1.0),
        ("Volga", ("Danube", "The Volga"), 1.0),  # any gold
        ("brasília", ("Brasília",), 1.0),
        ("Brasilia", ("Brasília",), 0.0),  # accents count
        (" 日本 ", ("日本",), 1.0),
        ("  ", ("A",), 0.0),  # "A" normalizes to nothing too; saying nothing is still wrong
        ("a", ("A",), 1.0),
        (None, ("Volga",), 0.0),
        ("Volga", (), 0.0),
    ],
)
def test_em(prediction, golds, want):
    assert em(prediction, golds) == want
    if want:
        assert f1(prediction, golds) == 1.0


@pytest.mark.parametrize("text", PROSE)
def test_f1_of_latin_text_is_squad_s_and_a_word_of_the_search_is_a_run_of_letters_digits_and_underscores(
    text,
):
    prediction, gold = (
        normalize(part).split() for part in (text, text[: len(text) // 2] + " more")
    )
    common = sum((Counter(prediction) & Counter(gold)).values())
    want = 2 * common / (len(prediction) + len(gold))
    assert f1(text, [text[: len(text) // 2] + " more"]) == want > 0
    assert split_words(text) == re.findall(r"\w+", text.lower())
    for k in range(0x10000):  # whatever stands in it
        if (
            unicodedata.name(chr(k), "").startswith(
                ("LATIN", "GREEK", "CYRILLIC", "DIGIT", "MODIFIER")
            )
            or k < 0x300
        ):
            c = unicodedata.normalize("NFC", chr(k))
            assert split_words(f"a{c}b") == re.findall(r"\w+", f"a{c}b".lower()), hex(k)


def test_a_gold_stands_in_passages_word_by_word():
    assert holds_gold(['"Emma"\nEmma is a novel by', "Jane Austen."], ["Jane Austen"])
    for passages, golds in (([], ["!"]), (["Emmas"], ["Emma"]), (["x"], [])):
        assert not holds_gold(passages, golds)


@pytest.mark.parametrize(
    "prediction, golds, want",
    [
        ("the Volga River", ("Volga",), 2 / 3),  # precision 1/2, recall 1
        ("Duke of Wellington", ("Arthur Wellesley Duke of Wellington",), 0.75),  # 3/3, 3/5
        ("Paris Paris", ("Paris France",), 0.5),  # a token matches once
        ("red fox", ("blue whale", "red wolf", "red fox cub"), 0.8),  # the best gold
        ("the", ("Seine",), 0.0),
        (None, ("Seine",), 0.0),
        ("Seine", (), 0.0),
    ],
)
def test_f1(prediction, golds, want):
    assert f1(prediction, golds) == pytest.approx(want)


def test_search_qa_rewards_the_exact_match_and_measures_f1_beside_it():
    q, task = Question("q", "Who?", ("Utzon", "Jørn Utzon")), SearchQA(Config())
    taus = [
        Trajectory(0, q, 0, [], 0, prediction=p) for p in ("the  jørn Utzon!", "Jørn", "", None)
    ]
    set_rewards(task, taus)
    assert [(tau.reward, tau.failed) for tau in taus] == [
        (1.0, False),
        (0.0, True),
        (0.0, True),
        (0.0, True),
    ]
    two_thirds = pytest.approx(2 / 3)
    f1s = [1.0, two_thirds, 0.0, 0.0]
    assert compute_metrics(task, taus) == [
        {"em": tau.reward, "f1": x} for tau, x in zip(taus, f1s, strict=True)
    ]
    assert list(compute_metrics(task, taus)[0]) == [
        "em",
        "f1",
    ]  # the first one chooses the best checkpoint


# --- files


def test_rows_with_question_and_golden_answers(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        {
            "id": 7,
            "question": "  who wrote Hamlet ",
            "golden_answers": " Shakespeare ",
            "data_source": "nq",
        },
        "",
        {"question": "Where?", "golden_answers": ["here", "", "there"]},
    )
    assert load_questions(path) == [
        Question("7", "who wrote Hamlet?", ("Shakespeare",), "nq"),
        Question("data-3", "Where?", ("here", "there"), "data"),
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
    (messages("user: what is plain?"), "what is plain?"),
    # verl's of the same rows
    (messages("system: You are helpful.", f"user: {TEMPLATE}who wrote it?"), "who wrote it?"),
    (messages("system: Think. <answer> x </answer>", "user: who wrote it?"), "who wrote it?"),
    # what the question needs
    ("The mill of Oldwater.\nQuestion: when did it burn?", "The mill of Oldwater.\nQuestion: when did it burn?"),
    (messages("system: Reply with a year.", "user: When was it?"), "Reply with a year.\n\nWhen was it?"),
    # how it ends
    ("Name a mill. Put it in \\boxed{}.", "Name a mill. Put it in \\boxed{}."),
]  # fmt: skip


@pytest.mark.parametrize("prompt, asked", PROMPTS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_all_of_a_prompt_is_asked_but_for_a_template(tmp_path, prompt, asked, kind):
    row, path = search_r1(prompt, ["x"], extra_info={"index": 0}), tmp_path / f"q.{kind}"
    if kind == "jsonl":
        write(path, row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    assert load_questions(path) == [Question("0", asked, ("x",), "nq")]


def test_a_question_of_its_own_goes_before_a_prompt(tmp_path):
    more = {"question": "who wrote Hamlet", "golden_answers": None}
    row = search_r1(messages("system: Hi.", f"user: {TEMPLATE}?"), "Shakespeare", **more)
    [q] = load_questions(write(tmp_path / "q.jsonl", row))
    assert (q.text, q.golds) == ("who wrote Hamlet?", ("Shakespeare",))


CHAT = [{"role": "user", "content": "Question: who wrote it?"}]
SEEN = [{"type": "text", "text": "Question: who?"}, {"type": "image", "image": "a.png"}]


@pytest.mark.parametrize(
    "row, golds",
    [  # verl's ground truth
        ({"reward_model": {"ground_truth": "42"}}, ("42",)),
        ({"reward_model": {"ground_truth": ["42", "forty-two"]}}, ("42", "forty-two")),
        ({"reward_model": {"ground_truth": {"target": "42"}}}, ("42",)),
        ({"reward_model": {"ground_truth": {"target": ["42", "x"], "style": 1}}}, ("42", "x")),
        # JSON in a text
        ({"golden_answers": '["Jane Austen", "Austen"]'}, ("Jane Austen", "Austen")),
        ({"golden_answers": ' [ "Jos\\u00e9" ]'}, ("José",)),
        ({"reward_model": '{"ground_truth": {"target": ["x"]}, "style": "rule"}'}, ("x",)),
        ({"reward_model": {"ground_truth": '{"target": ["x", "y"]}'}}, ("x", "y")),
        ({"reward_model": {"ground_truth": {"target": '["x", "y"]'}}}, ("x", "y")),
        # answers that look like it
        ({"golden_answers": '"[0, 1]"'}, ('"[0, 1]"',)),
        ({"golden_answers": '"[x] marks the spot" she said'}, ('"[x] marks the spot" she said',)),
        ({"golden_answers": "[0, 1]"}, ("[0, 1]",)),
        ({"golden_answers": '{"a": 1}'}, ('{"a": 1}',)),
        ({"golden_answers": '[{"name": "f"}]'}, ('[{"name": "f"}]',)),
        ({"golden_answers": '["x" of "y"]'}, ('["x" of "y"]',)),
        ({"golden_answers": '"Heroes"'}, ('"Heroes"',)),
    ],
)
@pytest.mark.parametrize("prompt", [CHAT, json.dumps(CHAT), json.dumps(CHAT, indent=1)])
def test_golds_and_prompts_are_lists_objects_texts_or_their_json(tmp_path, row, golds, prompt):
    rows = [
        row | {"prompt": prompt, "extra_info": extra} for extra in ({"index": 7}, '{"index": 8}')
    ]
    questions = load_questions(write(tmp_path / "q.jsonl", *rows))
    assert [(q.id, q.text, q.golds) for q in questions] == [
        (id, "who wrote it?", golds) for id in ("7", "8")
    ]


@pytest.mark.parametrize(
    "row, golds",
    [
        ({"prompt": CHAT, "solution": "42"}, ()),  # TRL's
        ({"prompt": "who wrote it?", "answer": 42}, ()),
        ({"prompt": CHAT, "reward_model": {"ground_truth": {"numbers": [3, 8], "target": 24}}}, ()),  # verl's
        ({"prompt": CHAT, "reward_model": {"ground_truth": 42}}, ()),
        ({"prompt": CHAT, "golden_answers": []}, ()),
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
    pq.write_table(
        pa.Table.from_pylist(rows).append_column("metadata", context), tmp_path / "q.parquet"
    )
    assert load_questions(tmp_path / "q.parquet") == load_questions(FIXTURE / "train.jsonl")

    rows = [
        search_r1([{"role": "user", "content": f"Question: {i}"}], ["x", "y"]) for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    assert load_questions(tmp_path / "r.parquet")[2] == Question("nq-3", "2", ("x", "y"), "nq")


DEEP = '{"question": "Who?", "golden_answers": ' + '{"target":' * 700 + '"X"' + "}" * 701


@pytest.mark.parametrize(
    "row, want",
    [
        ("{'id': 1}", "invalid JSON (Expecting property name enclosed in double quotes"),
        ("[1]", "not a JSON object; write"),
        (ROW | {"question": None}, "no question; fill `question`, or `prompt`"),
        (ROW | {"question": " \n"}, "no question; fill"),
        (search_r1([{"role": "system", "content": "Question: who?"}], "x"), "no question; fill"),
        (search_r1([{"role": "user", "content": SEEN}], "x"), "no question; fill"),
        (search_r1([{"role": "user", "content": SEEN}, *CHAT], "x"), "no question; fill"),
        (search_r1([*CHAT, {"role": "assistant", "content": "Ada"}], "x"), "no question; fill"),
        (
            search_r1([*CHAT, {"role": "assistant", "content": "Ada"}, *CHAT], "x"),
            "no question; fill",
        ),
        (ROW | {"golden_answers": None}, "no gold answer; fill `golden_answers` or"),
        (ROW | {"golden_answers": " "}, "no gold answer; fill"),
        (ROW | {"golden_answers": ["x", 1990]}, "no gold answer; fill"),
        (ROW | {"golden_answers": 5}, "no gold answer; fill"),
        (ROW | {"golden_answers": {"target": [["X"]]}}, "no gold answer; fill"),
        (DEEP, "no gold answer; fill"),
        (search_r1("Question: who?", []), "no gold answer; fill"),
    ],
)
def test_a_faulty_row_is_named(tmp_path, row, want):
    assert fault(write(tmp_path / "q.jsonl", ROW | {"id": "z"}, "", row)).startswith(f":3: {want}")


def test_an_id_that_two_sources_share_gets_the_source_and_one_that_a_source_repeats_is_refused(
    tmp_path,
):
    path = write(tmp_path / "q.jsonl", ROW, ROW | {"data_source": "hotpotqa"}, ROW | {"id": "b"})
    assert [q.id for q in load_questions(path)] == ["nq-a", "hotpotqa-a", "b"]
    twice = [ROW, ROW | {"data_source": "hotpotqa"}, ROW | {"id": "nq-a", "data_source": "popqa"}]
    path = str(write(tmp_path / "q.jsonl", *twice))
    with pytest.raises(Fault, match="test 2 questions have the id 'nq-a'; make it unique"):
        check_questions(SearchQA(Config(train=str(FIXTURE / "train.jsonl"), test=path)))


def test_a_faulty_file_is_named(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(json.dumps(ROW).encode() + b'\n{"question": "caf\xe9"}\n')
    assert fault(tmp_path / "q.jsonl").startswith(":2: invalid JSON ('utf-8' codec can't decode")
    assert fault(tmp_path / "none.jsonl") == ": no such file; check the path"
    assert fault(write(tmp_path / "q.csv", ROW)).startswith(": neither .jsonl nor .parquet; ")


def test_a_parquet_s_text_that_is_not_utf_8_is_a_fault(tmp_path):
    value = pa.array([b"x\xff\xfe"]).view(pa.string())
    table = {"id": ["a"], "question": ["Who?"], "golden_answers": [["X"]]}
    for name in table:
        pq.write_table(pa.table(table | {name: value}), tmp_path / "q.parquet")
        assert fault(tmp_path / "q.parquet").startswith(": not a readable parquet file (")


def test_half_a_character_is_replaced(tmp_path):
    [q] = load_questions(
        write(tmp_path / "q.jsonl", '{"question": "Who\\ud800", "golden_answers": ["\\udc00X"]}')
    )
    assert (q.text, q.golds) == ("Who\ufffd?", ("\ufffdX",))


def test_a_faulty_parquet_is_named(tmp_path):
    assert fault(write(tmp_path / "text.parquet", ROW)).startswith(
        ": not a readable parquet file ("
    )
    table = pa.table({"question": ["Who?", "Why?"], "golden_answers": [["x"], []]})
    pq.write_table(table, tmp_path / "q.parquet")
    assert fault(tmp_path / "q.parquet").startswith(":2: no gold answer; fill")
    pq.write_table(pa.table({"text": ["Who?"]}), tmp_path / "r.parquet")
    assert "no question" in fault(tmp_path / "r.parquet")


# --- what a run trains on, chooses its checkpoint by, and reports on


def split(monkeypatch, n=40, **knobs):
    """Returns the ids of the questions of train, valid and test."""
    ids = {"train": [f"q{k}" for k in range(n)], "valid": ["v1", "v0"], "test": ["held out"]}
    files = {name: [Question(id, "Who?") for id in ids[name]] for name in ids}
    monkeypatch.setattr(search_qa, "load_questions", files.get)
    task = SearchQA(Config(train="train", test="test", **knobs))
    return [[q.id for q in task.questions(name)] for name in ids]


def test_validation_questions_are_those_of_valid(monkeypatch):
    assert split(monkeypatch, valid="valid") == [
        [f"q{k}" for k in range(40)],
        ["v1", "v0"],
        ["held out"],
    ]


def test_without_valid_a_tenth_of_the_training_questions_at_most_500_are_set_aside(monkeypatch):
    everyone = [f"q{k}" for k in range(40)]
    train, chosen, test = split(monkeypatch)
    assert len(chosen) == 4
    assert test == ["held out"]
    # in their order, and none is trained on
    assert train == [q for q in everyone if q not in chosen]
    assert chosen == [q for q in everyone if q in chosen]
    assert split(monkeypatch)[1] == chosen  # a resumed run sets the same ones aside
    assert any(split(monkeypatch, seed=seed)[1] != chosen for seed in (1, 2))
    for n, sizes in ((9, [9, 0, 1]), (6000, [5500, 500, 1])):
        assert [len(part) for part in split(monkeypatch, n)] == sizes


@pytest.mark.parametrize("mark", "?？؟")
def test_a_question_that_ends_as_its_script_does_stays_as_it_is(tmp_path, mark):
    row = {"question": f"who{mark}", "golden_answers": ["x"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row), "utf-8")
    [q] = load_questions(tmp_path / "q.jsonl")
    assert q.text == f"who{mark}"
