"""The seam between a task and all else: what a task may be and return, the questions of a step, a
fair sample."""

import math
import sys
import zlib

import numpy as np
import pytest
from found_search import Product

from config import PRESETS, Config, parse_flags
from plumbing.faults import Fault
from tasks import Question, Task, Trajectory
from tasks.search_qa import SEARCH_R1, SearchQA
from tasks.task import (
    average_by_source,
    check_questions,
    choose_instruction,
    compute_metrics,
    draw_questions,
    load_task,
    read_instruction,
    set_rewards,
    take_subset,
)

GAME = """
from tasks import Question, Task
from found_search import Product

class Game(Task):
    tools = ()
    def questions(self, split):
        return []
    def reward(self, taus):
        return [0.0] * len(taus)

class Half(Task):
    tools = ()
    def questions(self, split):
        return []

class Toolless(Task):
    questions = reward = Game.reward

class Twice(Game):
    tools = (Product(), Product())

class Instructed(Game):
    instruction = "Play."

class Stranger:
    pass

def function(cfg):
    return Game(cfg)
"""


def refused(function, *args):
    """Returns the one line with which a task is refused."""
    with pytest.raises(Fault) as fault:
        function(*args)
    line = str(fault.value)
    assert "\n" not in line
    return line


# ---- which task


@pytest.fixture
def game(tmp_path, monkeypatch):
    (tmp_path / "my_game.py").write_text(GAME)
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_installed")
    (tmp_path / "shadowed.py").write_text("from config import LIMIT")
    (tmp_path / "config.py").write_text("LIMIT = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_a_task_is_a_class_of_any_module(game):
    cfg = Config(task="my_game:Toolless")
    task = load_task(cfg)
    assert (
        isinstance(task, Task)
        and type(task).__name__ == "Toolless"
        and task.cfg == cfg
        and list(task.tools) == []
    )
    assert type(load_task(Config())) is SearchQA


def test_a_task_s_module_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "lies_here.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert type(load_task(Config(task="lies_here:Game"))).__name__ == "Game"


@pytest.mark.parametrize(
    "name, says",
    [
        ("my_game", "give it as module:name"),
        ("my_gane:Game", "my_gane cannot be imported (No module named 'my_gane')"),
        (
            "needs:Game",
            "needs cannot be imported (No module named 'a_package_that_is_not_installed')",
        ),
        ("my_game:Chess", "Chess is not a class in my_game"),
        ("my_game:Stranger", "it "),
        ("my_game:Twice", "its tool <calculate> has the tag 'calculate'; tags are"),
    ],
)
def test_what_is_no_task_is_refused_by_name(game, name, says):
    assert refused(load_task, Config(task=name)).startswith(f"--task {name}: {says}")


def test_a_file_that_is_named_as_one_of_ours_is_to_be_renamed(game, tmp_path):
    line = refused(load_task, Config(task="shadowed:Game"))
    assert line.endswith(f"rename {tmp_path / 'config.py'}: inspo has a module of that name")


@pytest.mark.parametrize(
    "split, ids, says",
    [("train", [], "of train there are no questions"), ("test", [], "of test there are no questions"),
     ("valid", ["a", "b", "a"], "of valid 2 questions have the id 'a'"),
     ("test", ["a", "b", "a"], "of test 2 questions have the id 'a'")],
)  # fmt: skip
def test_a_task_without_questions_or_with_an_id_twice_is_refused(split, ids, says):
    class Asking(Returning):
        def questions(self, name):
            return [Question(id, "Who?") for id in ({split: ids}.get(name, [name]))]

    assert says in refused(check_questions, Asking())
    split, ids = "valid", []
    # without validation questions a run has no best checkpoint, and needs none
    check_questions(Asking())


# ---- its instruction


def test_a_task_s_own_instruction_beats_a_preset_s_and_not_a_flag_s(game, tmp_path):
    preset = read_instruction(PRESETS["world"]["instruction"])
    (tmp_path / "mine.txt").write_text("Win.")
    flags = ["--task", "my_game:Instructed", "--instruction", str(tmp_path / "mine.txt")]
    assert choose_instruction(load_task(parse_flags(flags[:2]))) == "Play."
    assert choose_instruction(load_task(parse_flags(flags))) == "Win."
    # it says nothing of its own, and asks nothing of the preset's
    playing = load_task(parse_flags(["--task", "my_game:Game"]))
    assert choose_instruction(playing) == Task.instruction
    assert choose_instruction(load_task(parse_flags([]))) == preset
    assert choose_instruction(load_task(Config())) == SEARCH_R1


# ---- a reward without a task

GRADES = """
import asyncio
import numpy as np

def brief(taus):
    return [1 / (1 + len(tau.response)) for tau in taus]

async def waiting(taus):
    async def grade(tau):
        await asyncio.sleep(0)
        return 2.0 * len(tau.response)
    return await asyncio.gather(*map(grade, taus))

waiting.passing_reward = 6.0

def array(taus):
    return np.arange(len(taus), dtype=np.float32)

def short(taus):
    return [1.0]

class Grade:
    pass

ten = 10
"""


@pytest.fixture
def grades(game, tmp_path):
    (tmp_path / "my_grades.py").write_text(GRADES)


@pytest.mark.parametrize(
    "function, rewards, failed",
    [
        ("brief", [1.0, 0.5, 0.25], [False, True, True]),
        ("waiting", [0.0, 2.0, 6.0], [True, True, False]),  # its best reward is 6
        ("array", [0.0, 1.0, 2.0], [True, False, False]),
    ],
)
def test_a_function_scores_in_place_of_the_task(grades, function, rewards, failed):
    task, played = load_task(Config(task="my_game:Game", reward=f"my_grades:{function}")), taus(3)
    for tau, n in zip(played, (0, 1, 3), strict=True):
        tau.response = "x" * n
    set_rewards(task, played)
    assert [tau.reward for tau in played] == rewards and [tau.failed for tau in played] == failed
    assert load_task(Config(task="my_game:Game")).reward(played) == [0.0] * 3
    # all the reward that a task needs
    load_task(Config(task="my_game:Half", reward=f"my_grades:{function}"))


# ---- rewards and metrics


class Returning(Task):
    """A task whose rewards and metrics are what the test says."""

    tools = ()

    def __init__(self, rewards=(), metrics=()):
        super().__init__(Config(task="mine:Returning"))
        self.rewards, self.rows = rewards, list(metrics)

    def questions(self, split):
        return []

    def reward(self, taus):
        return self.rewards

    def metrics(self, tau):
        return self.rows[int(tau.question.id)]


def taus(n=3, source="data"):
    return [Trajectory(0, Question(str(k), "Who?", source=source), 0, [], 0) for k in range(n)]


def test_a_reward_is_any_number_and_a_failure_what_is_below_the_best():
    played = taus(4)
    set_rewards(Returning([1, True, np.float32(0.5), -2.5]), played)
    assert [(tau.reward, tau.failed) for tau in played] == [
        (1.0, False),
        (1.0, False),
        (0.5, True),
        (-2.5, True),
    ]
    assert all(type(tau.reward) is float for tau in played)

    class Golf(Returning):
        passing_reward = -2.5

    set_rewards(Golf([-2.5, -3.0, 0.0, -2.6]), played)
    assert [tau.failed for tau in played] == [False, True, False, True]


@pytest.mark.parametrize(
    "rewards, says",
    [
        ([1.0, 0.0], "its reward returned [1.0, 0.0] for 3 trajectories"),
        (3, "its reward returned 3 for 3 trajectories"),
        ([0.0, math.nan, 0.0], "its reward of question 1 is nan; return a finite number"),
        ([0.0, 0.0, "1"], "its reward of question 2 is '1'; return"),
        ({0: 1.0, 1: 0.0, 2: 1.0}, "its reward returned {0: 1.0"),
    ],
)
def test_what_is_no_reward_for_each_is_refused_by_name(rewards, says):
    assert refused(set_rewards, Returning(rewards), taus()).startswith(
        f"--task mine:Returning: {says}"
    )


DRAWN = """
import random
from tasks import Question, Task
from tasks.search_qa import SearchQA

class Drawn(Task):
    def questions(self, split):
        return [Question(str(k), "Who?", ["Ann"]) for k in random.sample(range(10**6), 20)]
    def reward(self, taus):
        return [0.0] * len(taus)

class Untested(Drawn):
    def questions(self, split):
        return None if split == "valid" else super().questions(split)

class Odd(Drawn):
    def questions(self, split):
        return [Question("1", "Who?", [None, 7])] if split == "train" else super().questions(split)
"""


def test_questions_are_asked_once_a_split(tmp_path, monkeypatch):
    (tmp_path / "drawn.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Drawn", "Untested"):
        task = load_task(Config(task=f"drawn:{name}"))
        first = {split: list(task.questions(split)) for split in ("train", "valid", "test")}
        check_questions(task)
        assert first == {split: list(task.questions(split)) for split in first}, name
        assert len({*first["train"]}) == 20 and bool(first["valid"]) == (name != "Untested")
        assert {q.golds for q in first["test"]} == {("Ann",)}
    assert "give a list of texts" in refused(check_questions, load_task(Config(task="drawn:Odd")))


def test_metrics_are_floats_under_the_names_that_the_task_gives():
    rows = compute_metrics(
        Returning(metrics=[{"wins": 1, "moves": np.int64(7)}, {"wins": False, "moves": 2.5}]),
        taus(2),
    )
    assert rows == [{"wins": 1.0, "moves": 7.0}, {"wins": 0.0, "moves": 2.5}]
    assert all(type(x) is float for row in rows for x in row.values()) and list(rows[0]) == [
        "wins",
        "moves",
    ]
    assert compute_metrics(Returning(), []) == []
    [tau] = played = taus(1)
    tau.reward = 0.25
    assert Task.metrics(Returning(), tau) == {"reward": 0.25} and played


@pytest.mark.parametrize(
    "rows, says",
    [
        (
            [{"wins": 1.0}, {"wins": 0.0, "moves": 3.0}],
            "question 1 are {'wins': 0.0, 'moves': 3.0}; return finite numbers for all, named wins",
        ),
        ([{"wins": 1.0}, {"wins": math.nan}], "question 1 are {'wins': nan}; return"),
        (
            [{"loss": 1.0}, {"loss": 0.0}],
            "loss: that is measured in every run; give it another name",
        ),
        ([{"wins": 1.0, "time/total": 1.0}] * 2, "time/total: that is measured"),
        ([{"calculations/failed": 1.0}] * 2, "calculations/failed: that is measured"),
    ],
)
def test_metrics_that_cannot_be_averaged_are_refused_by_name(rows, says):
    task = Returning(metrics=rows)
    task.tools = [Product()]
    line = refused(compute_metrics, task, taus(2))
    assert line.startswith("--task mine:Returning: its metric") and says in line


def test_metrics_of_other_names_than_at_the_start_are_refused_by_name():
    """Also where they are the same for the whole step."""
    rows = [{"wins": 1.0, "moves": 2.0}, {"wins": 0.0, "moves": 3.0}]
    assert compute_metrics(Returning(metrics=rows), taus(2), ["wins", "moves"]) == rows
    for names in (["wins"], ["moves", "wins"], ["score", "moves"]):
        line = refused(compute_metrics, Returning(metrics=rows), taus(2), names)
        assert f"question 0 are {rows[0]}; return" in line and ", ".join(names) in line


def test_means_are_given_over_all_and_over_every_source():
    rows = [{"em": 1.0, "f1": 1.0}, {"em": 0.0, "f1": 0.5}, {"em": 0.0, "f1": 0.25}]
    assert average_by_source([*taus(1, "nq"), *taus(2, "musique")], rows) == {
        "em": 1 / 3,
        "em/musique": 0.0,
        "em/nq": 1.0,
        "f1": 1.75 / 3,
        "f1/musique": 0.375,
        "f1/nq": 1.0,
    }


# ---- the questions of a step


def batches(n: int, batch: int, steps: int, seed: int = 0) -> list[list[str]]:
    """Returns the ids of the first steps' questions, of a data set of n."""
    D = {str(k): Question(str(k), "q?") for k in range(n)}
    return [[q.id for q in draw_questions(D, batch, seed, t)] for t in range(1, steps + 1)]


@pytest.mark.parametrize("n, batch", [(7, 3), (4, 9)])
def test_the_order_of_the_questions_stays_the_same_from_one_version_to_the_next(n, batch):
    """Each epoch has an order of its own. A run that another version resumes sees no question twice
    and misses none."""
    orders = [
        np.random.default_rng([5, epoch, zlib.crc32(b"epoch")]).permutation(n)
        for epoch in range(60)
    ]
    flat = [str(k) for order in orders for k in order]
    assert batches(n, batch, 6, seed=5) == [flat[t * batch : (t + 1) * batch] for t in range(6)]


@pytest.mark.parametrize("n", [7, 50])
def test_a_subset_is_the_same_every_time_and_has_every_source_in_its_share(n):
    sizes = {"nq": 70, "musique": 20, "bamboogle": 10}  # one after the other, as in a sorted file
    questions = [
        Question(f"{s}-{k}", "Who?", source=s) for s, size in sizes.items() for k in range(size)
    ]
    found = take_subset(questions, n)
    assert len(set(found)) == n and found == sorted(found, key=questions.index)
    for source, size in sizes.items():
        assert abs(sum(q.source == source for q in found) - n * size / 100) <= 1
    assert take_subset(questions, n, seed=1) != found
    # the same in every version
    order = np.random.default_rng([0, 0, zlib.crc32(b"subset")]).permutation(70)
    assert take_subset(questions[:70], n) == [questions[k] for k in sorted(order[:n])]
    for most in (0, 1000):
        assert take_subset(questions, most) == questions
