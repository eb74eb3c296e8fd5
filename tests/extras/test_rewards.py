"""Rewards as TRL and verl write them: which form a function has, what it is given of a trajectory,
how several are summed; what is refused."""

import dataclasses
import gzip
import importlib
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from found_search import Found
from hermes_like import small
from scripted import Says
from test_rollout import ANSWER, ASKED, roll
from test_seam import refused

from config import Config
from inspo import train
from tasks import Job, Question, Task, Trajectory, Turn
from tasks.search_qa import Search
from tasks.task import check_questions, compute_metrics, load_task, set_rewards

GRADES = """
import asyncio, math
from decimal import Decimal
seen = []

def right(taus):
    return [float(tau.prediction == "x") for tau in taus]
right.passing_reward = 0.9

def word(completions, solution, **columns):
    seen.append(columns | {"completions": completions, "solution": solution})
    return [float(s in c[-1]["content"]) for c, s in zip(completions, solution)]

async def later(completions, **columns):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def even(prompts, completions, completion_ids, id):
    return [None if int(q) % 2 else 1.0 for q in id]

def never(completions, **_):
    return [None] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen.append((data_source, solution_str, ground_truth, extra_info))
    return {"score": float(ground_truth in solution_str), "acc": 7.0}

lock = asyncio.Lock()

async def awaited(solution_str, ground_truth):
    async with lock:
        await asyncio.sleep(0)
    return 1.0 * (str(ground_truth) in solution_str)

def emptied(completions, options, **_):
    return [float(some.pop()) for some in options]

def unscored(solution_str, ground_truth): return {"acc": 1.0}
def ragged(completions, **_): return [1.0, [2.0], 1.0, 1.0]
def few(completions, **_): return [1.0]
def pair(a, b): return []
def strict(solution_str, ground_truth, tolerance): return 1.0
def scalar(completions, **_): return 1.0
def texts(completions, **_): return ["0.5"] * len(completions)
def decimals(taus, /): return [Decimal("1.5")] * len(taus)
def nan(completions, **_): return [math.nan] * len(completions)
"""


@pytest.fixture
def grades(tmp_path, monkeypatch):
    (tmp_path / "grades_here.py").write_text(GRADES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "grades_here", raising=False)
    return importlib.import_module("grades_here")


ROW = {"solution": "x", "options": [1], "extra_info": {"options": [1]}}


class Asking(Task):
    """Questions with columns, whose own reward is not asked for."""

    def questions(self, split):
        return [Question(str(k), "Who?", ("x",), "quiz", dict(ROW)) for k in range(4)]

    def reward(self, taus):
        raise AssertionError


def task_with(spec, kind=Asking, **knobs):
    task = load_task(Config(reward=spec, tools="none", **knobs), kind)
    task.tokenizer = small("qwen2_5")
    return task


def taus(task, *answers, G=2):
    """Trajectories in groups of G, each of one turn."""
    return [
        Trajectory(0, q, k // G, [1, 2], 1, turns=[Turn(f"It is {x}.")], prediction=x, response=x)
        for k, (x, q) in enumerate(zip(answers, task.questions("train"), strict=True))
    ]


@pytest.mark.parametrize(
    "spec, rewards, failed",
    [
        ("grades_here:right", [1, 0, 0, 1], [False, True, True, False]),
        ("grades_here:word", [1, 0, 0, 1], [False, True, True, False]),
        ("2*grades_here:decimals", [3, 3, 3, 3], [False] * 4),
        ("grades_here:compute_score", [1, 0, 0, 1], [False, True, True, False]),
        ("grades_here:awaited", [1, 0, 0, 1], [False, True, True, False]),
        ("grades_here:emptied", [1, 1, 1, 1], [False] * 4),
        ("grades_here:word,0.25*grades_here:later", [1.5, 0.5, 0.5, 1.5], [False, True, True, False]),
        ("2*grades_here:right, -1*grades_here:word", [1, 0, 0, 1], [False, True, True, False]),
        # what does not apply is not summed; a right answer earns 0.9 as `right` says
        ("grades_here:right, 0.5 * grades_here:even", [1.5, 0, 0.5, 1], [False, True, True, False]),
    ],
)  # fmt: skip
def test_each_form_scores_and_several_are_summed_by_weight(grades, spec, rewards, failed):
    task = task_with(spec)
    played = taus(task, "x", "y", "z", "x")
    for tau in played:
        tau.question.data["reward_model"] = {"ground_truth": "x"}
    for _ in range(2):  # a step after the other: no function changes the rows
        set_rewards(task, played)
        assert [tau.reward for tau in played] == rewards
        assert [tau.failed for tau in played] == failed


def test_a_trajectory_without_a_reward_moves_nothing(grades, capsys):
    task = task_with("grades_here:even")
    played = taus(task, *"xxxx")
    set_rewards(task, played)  # 1 of 2 in each group is scored
    assert [tau.reward for tau in played] == [1.0] * 4 and not any(tau.failed for tau in played)
    played = taus(task, *"xxxx")
    for tau in played[2:]:
        tau.question = Question("1", "Who?", ("x",))  # a group that is not scored at all
    set_rewards(task, played)
    assert [tau.reward for tau in played] == [1.0] * 4 and "3 of 4" in capsys.readouterr().out
    task = task_with("grades_here:never")
    set_rewards(task, played := taus(task, *"xy", "z", "x"))
    assert [tau.reward for tau in played] == [0.0] * 4 and not any(tau.failed for tau in played)


@pytest.mark.parametrize(
    "spec, says",
    [("half*grades_here:right", "half is no"), ("nan*grades_here:right", "nan is no"),
     ("grades_here.py:right", "give it as module:name"), ("grades_here:pair", "f(completions, **columns)"),
     ("grades_here:right,grades_here:strict", "f(completions, **columns)")],
)  # fmt: skip
def test_a_sum_that_cannot_be_read_is_refused(grades, spec, says):
    assert says in refused(task_with, spec)


@pytest.mark.parametrize(
    "name, says",
    [
        ("scalar", "returned 1.0 for 4"),
        ("nan", "is nan; return a finite number"),
        ("texts", "is '0.5'; return a"),
        ("unscored", "question 0 is {'acc': 1.0}; return a"),
        ("ragged", "question 1 is [2.0]; return a"),
        ("few", "returned [1.0] for 4"),
    ],
)
def test_what_is_no_number_for_each_is_refused(grades, name, says):
    task = task_with(f"grades_here:{name}")
    assert says in refused(set_rewards, task, taus(task, *"xyzx"))


def test_a_column_that_the_questions_lack_is_named_before_anything_is_loaded(grades):
    class Bare(Asking):
        def questions(self, split):
            return [Question("7", "Who?", ("x",))]

    said = refused(task_with("grades_here:word", Bare).questions, "train")
    assert "grades_here:word" in said and "solution" in said and "question 7 has question" in said


# ---- what a function is given

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Utzon"}}\n</tool_call>'
TURNS = {
    "tags": ("<think>Hm.</think> A<search> Utzon </search>", "Hm.", f"<think>.</think> {ANSWER}"),
    "hermes": (f"<think>Hm.</think> A{CALL}<|im_end|>", f"<think>.</think> {ANSWER}<|im_end|>"),
}
DOCUMENTS = ['"Opera"\nBy Utzon.', "Rhine\nA river."]


@pytest.fixture(params=["tags", "hermes"])
def played(request, grades):
    """A trajectory with a search, its task, and a tokenizer."""
    cfg = Config(reward="grades_here:even", format=request.param)
    task, tokenizer = load_task(cfg), small("qwen2_5")
    task.tools, task.tokenizer = [Found(*DOCUMENTS)], tokenizer
    [tau] = roll(
        Says(tokenizer, TURNS[request.param]), tokenizer, task, [Job(7, "Answer.", ASKED, 3)]
    )
    return task, tau, tokenizer


def test_completions_are_the_turns_and_the_results_as_messages(played):
    task, tau, tokenizer = played
    given = task.completed([tau])
    [messages] = given["completions"]
    texts = [text.removesuffix("<|im_end|>") for text in TURNS[task.cfg.format]]
    said = [message for message in messages if message["role"] == "assistant"]
    assert [message["content"] for message in said] == texts
    assert [message["role"] for message in messages[:3]] == ["assistant", "tool", "assistant"]
    assert messages[1]["content"] == Search.show(task.tools[0], DOCUMENTS)
    function = {"name": "search", "arguments": {"query": "Utzon"}}
    assert said[0]["tool_calls"] == [{"type": "function", "function": function}]
    assert not any("tool_calls" in message for message in said[1:])
    assert given["prompts"] == [[{"role": "user", "content": tau.question.text}]]
    assert given["completion_ids"] == [tau.ids[tau.prompt_tokens :]]
    assert given["golden_answers"] == [["Jørn Utzon"]] and given["id"] == ["q-0"]


def test_solution_str_is_all_that_follows_the_prompt_without_special_tokens(played):
    task, tau, tokenizer = played
    given = task.solved(tau)
    after = tau.ids[tau.prompt_tokens :]
    words = tokenizer.decode(after, skip_special_tokens=True).split()
    roles = ["user", "assistant"] if task.cfg.format == "hermes" else []
    assert given["solution_str"].split() == [word for word in words if word not in roles]
    assert "By Utzon." in given["solution_str"] and "<|im_end|>" not in given["solution_str"]
    # a prompt, the turns, and the one result
    assert given["extra_info"] == {"num_turns": 1 + len(tau.turns) + 1}
    assert given["ground_truth"] == ["Jørn Utzon"] and given["data_source"] == "fixture"


def test_the_columns_of_a_file_reach_trl_s_and_verl_s_functions(grades, tmp_path):
    rows = [
        {"id": str(k), "question": "Who?", "golden_answers": ["x"], "solution": x, "extra_info": {"index": k},
         "data_source": "quiz", "reward_model": {"style": "rule", "ground_truth": {"target": ["x"]}}}
        for k, x in enumerate("xy")
    ]  # fmt: skip
    file = tmp_path / "q.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    files = dict.fromkeys(("train", "valid", "test"), str(file))
    task = task_with("grades_here:word,grades_here:compute_score", None, **files)
    check_questions(task)
    [tau] = [Trajectory(0, task.questions("train")[1], 0, [], 0, turns=[Turn("y")], response="y")]
    with pytest.raises(TypeError):  # a dictionary is not in a text: it arrived as it is
        set_rewards(task, [tau])
    columns, (source, text, truth, info) = grades.seen
    assert columns["solution"] == ["y"] and columns["reward_model"] == [rows[1]["reward_model"]]
    assert (source, text, truth) == ("quiz", "y", {"target": ["x"]}) and info["index"] == 1
    # without such a function a question carries no row
    assert load_task(Config(**files)).questions("train")[1].data is None


def test_rows_without_gold_answers_are_scored_and_measured_by_the_reward(grades, tmp_path):
    """As TRL's data sets have them."""
    rows = [{"prompt": [{"role": "user", "content": f"Who is {x}?"}], "solution": x} for x in "xy"]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = dict.fromkeys(("train", "valid", "test"), str(file))
    task = task_with("grades_here:word", None, **files)
    check_questions(task)
    played = [
        Trajectory(0, q, 0, [], 0, turns=[Turn("It is x.")], prediction="x", response="x")
        for q in task.questions("train")
    ]
    set_rewards(task, played)
    assert [tau.reward for tau in played] == [1.0, 0.0]
    assert compute_metrics(task, played) == [{"reward": 1.0}, {"reward": 0.0}]
    assert "no gold answer" in refused(load_task(Config(**files)).questions, "train")


TRLS = """
from trl.rewards import *
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

repetition = get_repetition_penalty_reward(ngram_size=2)
overlong = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=20)
"""


@pytest.mark.slow
def test_trl_s_own_rewards_score_as_in_trl(played, tmp_path, monkeypatch):
    rewards = pytest.importorskip("trl.rewards")
    (tmp_path / "trls_here.py").write_text(TRLS)
    task, tau, tokenizer = played
    spec = "trl.rewards:think_format_reward,10*trls_here:repetition,100*trls_here:overlong"
    scored = load_task(Config(reward=spec, format=task.cfg.format))
    scored.tools, scored.tokenizer = task.tools, tokenizer
    other = dataclasses.replace(tau, turns=[Turn("No thoughts.")], ids=[*range(9)], prompt_tokens=0)
    ids = [tau.ids[tau.prompt_tokens :], other.ids]
    first = [[{"role": "assistant", "content": t.turns[0].text}] for t in (tau, other)]
    parts = [
        rewards.think_format_reward(first),
        rewards.get_repetition_penalty_reward(ngram_size=2)(ids),
        rewards.get_soft_overlong_punishment(30, 20)(ids),
    ]
    assert all(len(set(part)) == 2 for part in parts)
    expected = [a + 10 * b + 100 * c for a, b, c in zip(*parts, strict=True)]
    assert scored.reward([tau, other]) == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_trains_on_trl_s_and_verl_s_forms(grades, tmp_path, capsys):
    spec = "grades_here:later,grades_here:awaited"
    small = dict(T=1, batch=2, G=2, eval_n=4, mode="static")
    train(preset="world", reward=spec, out=str(tmp_path / "run"), **small)
    assert "reward: grades_here:later (TRL's, on messages) + grades_here:awaited (verl's)" in (
        capsys.readouterr().out
    )
    [file] = (tmp_path / "run" / "trajectories").glob("step*")
    assert {json.loads(line)["reward"] for line in gzip.open(file)} == {2.0}
