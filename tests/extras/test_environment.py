"""A class in TRL's `environment_factory` convention is a task: its rows, its tools, its reward,
what is refused."""

import asyncio
import gc
import json
import time

import pytest
from test_rollout import Script, roll

import inspo
from config import PRESETS, Config
from extras.plugs.environment import task_of as environments
from plumbing.faults import Fault
from tasks import Job
from tasks.task import check_questions, load_task, set_rewards
from tasks.tools import Failure


class Vault:
    """Three digits open it: nothing here knows of this project."""

    def __init__(self):
        self.opened = False

    def reset(self, *, code: str, hint: str = "", **row) -> str | None:
        self._code, self.tries, self.opened = code, 0, False
        return hint or None

    def dial(self, code: str) -> str:
        """Dials a code.

        Args:
            code: Three digits

        Returns:
            What the door does.
        """
        if self.opened:
            raise ValueError("It is open already.")
        self.tries += 1
        self.opened = code == self._code
        return "It opens." if self.opened else f"Nothing, {self.tries} tries so far."

    async def count(self, digit: int, below: bool = False) -> int:
        """Counts a digit of the code.

        Args:
            digit: From 0 to 9
            below: Whether lower digits count, too
        """
        return sum(int(d) == digit or (below and int(d) < digit) for d in self._code)

    def get_reward(self) -> float:
        return 1.0 / self.tries if self.opened else 0.0


class Unpaid(Vault):
    get_reward = property(doc="none")  # raises AttributeError: hasattr is False


class Attributed(Unpaid):
    """Keeps its reward in an attribute, as TRL's pages do."""

    reward = 0.25


class Later(Vault):
    """Begins and is scored by coroutines, and begins with content blocks."""

    async def reset(self, **row):
        hint, self._loop = super().reset(**row), asyncio.get_running_loop()
        return [{"type": "text", "text": text} for text in (hint, "Be quick.")] if hint else None

    async def count(self, digit: int, below: bool = False) -> bool:
        return self._loop is asyncio.get_running_loop()  # whose clients it uses

    async def get_reward(self):
        return 0.75 * await self.count(0)


class Unsure(Vault):
    def get_reward(self):
        return "good"


class Locked(Vault):
    def __init__(self, key):
        self.key = key


class Idle:
    def reset(self, **row):
        pass


class Safe(Vault):
    """Owns its data: a seed sets the code."""

    def reset(self, seed=None, **kwargs) -> str:
        self._code, self.tries = f"{seed % 1000:03d}", 0
        return f"Safe number {seed}."


class Lone(Vault):
    def reset(self) -> str:
        return "The only safe."


SYSTEM, USER = (
    {"role": "system", "content": "You crack safes."},
    {"role": "user", "content": "Open the vault."},
)
ROWS = [
    {"prompt": [SYSTEM, USER], "code": "123"},
    {"question": "Open it.", "code": "441", "hint": "Two are the same."},
]


def task_of(name, path, rows=ROWS, **files):
    """Returns the task of an environment of this file; --train and --test are a file with these
    rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(
        Config(
            task=f"test_environment:{name}", **dict.fromkeys(("train", "test"), str(path)) | files
        )
    )


def play(tiny, task, *turns):
    """Returns the scored trajectories of the first question, a list of turns for each."""
    jobs = [Job(0, "Go.", task.questions("train")[0], k) for k in range(len(turns))]
    taus = roll(Script(tiny[1], *turns), tiny[1], task, jobs)
    set_rewards(task, taus)
    return taus


def test_an_environment_of_trl_is_a_task(tiny, tmp_path):
    task = task_of("Vault", tmp_path / "rows.jsonl")
    check_questions(task)
    first, second = task.questions("train")
    assert [tool.tag for tool in task.tools] == ["count", "dial"] and task.questions("valid") == []
    [message] = task.make_format().messages("Go.", second)
    assert message["content"].startswith("Go.\n\nTools, ")
    assert "<dial> code </dial>: Dials a code." in message["content"]
    assert message["content"].endswith("\n\nOpen it.Two are the same.\n")  # as TRL appends
    assert (
        task.make_format()
        .messages("Go.", first)[0]["content"]
        .endswith("\n\nYou crack safes.\n\nOpen the vault.\n")
    )

    won = ["<dial>441</dial>", '<count>{"digit": 3, "below": true}</count>', "<dial>123</dial>", "<dial>123</dial>",
           "<answer>done</answer>"]  # fmt: skip
    a, b = play(tiny, task, won, ["<dial>000</dial>", "<answer>done</answer>"])
    shown = [turn.result for turn in a.turns]
    assert shown[:3] == [["Nothing, 1 tries so far."], ["3"], ["It opens."]]
    assert shown[3] == [str({"error": "It is open already."})]
    # each episode has an object of its own
    assert b.turns[0].result == ["Nothing, 1 tries so far."]
    assert (a.reward, b.reward) == (0.5, 0.0)


@pytest.mark.slow
def test_a_run_trains_on_an_environment_whose_reward_is_an_attribute(tmp_path, tiny_path):
    """It has no validation questions, and is evaluated in training."""
    cfg = task_of("Attributed", tmp_path / "rows.jsonl").cfg
    flags = (
        f"--model {tiny_path} --mode static --T 2 --eval_every 1 --batch 2 --G 2 --max_response 8"
    )
    flags += " --max_prompt 900"
    files = ["--task", cfg.task, "--train", cfg.train, "--test", cfg.test]
    inspo.main([*flags.split(), *files, "--out", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"] == ["reward"] and summary["tools"] == ["count_calls", "dial_calls"]
    assert summary["end"]["reward"] == summary["end"]["reward/rows"] == 0.25
    _, row, _ = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert row["test/reward"] == 0.25 and not any(name.startswith("valid/") for name in row)


def test_resets_and_rewards_are_awaited_and_content_blocks_read(tiny, tmp_path):
    task = task_of("Later", tmp_path / "rows.jsonl")
    first, second = task.questions("train")
    assert task.prompt("Go.", first)[0]["content"] == "Go.\n\nYou crack safes.\n\nOpen the vault.\n"
    assert (
        task.prompt("Go.", second)[0]["content"] == "Go.\n\nOpen it.Two are the same.\nBe quick.\n"
    )
    [tau] = play(tiny, task, ['<count>{"digit": 1}</count>', "<answer>done</answer>"])
    assert (tau.turns[0].result, tau.reward) == (["True"], 0.75)
    assert [tool.tag for tool in task.tools] == ["count", "dial"]


@pytest.mark.parametrize(
    "name, says",
    [
        ("Idle", "it has no method to call"), ("Locked", "it cannot be made .*'key'"),
        ("Unpaid", "no reward; define get_reward"),
        ("Lone", r"reset\(\) does not take the row of question train-1 .*'prompt'"),
        ("Unsure", ".*of question train-1 is 'good'; return a finite number"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_played_is_refused(tiny, tmp_path, name, says):
    with pytest.raises(Fault, match=f"^(--task test_environment:{name}: )?{says}"):
        play(tiny, task_of(name, tmp_path / "rows.jsonl"), ["<answer>done</answer>"])


@pytest.mark.parametrize(
    "row",
    [
        {"code": "1"}, {"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ],
)  # fmt: skip
def test_a_row_without_a_text_to_ask_is_one_line(tmp_path, row):
    task = task_of("Vault", tmp_path / "rows.jsonl", [ROWS[0], row], test="rows.csv")
    with pytest.raises(Fault, match="rows.jsonl:2: nothing is asked that is text; fill `prompt`"):
        task.questions("train")
    with pytest.raises(Fault, match="--test rows.csv: no such file"):
        task.questions("test")


class Counted(Vault):
    """A session of a server that has few: each holds one until it is closed."""

    made = open = 0

    def __init__(self):
        super().__init__()
        kind = type(self)
        kind.made, kind.open = kind.made + 1, kind.open + 1

    def wait(self) -> str:
        """Takes too long."""
        time.sleep(3)
        return "late"

    def close(self) -> None:
        type(self).open -= 1


def test_environments_are_made_once_reset_often_and_closed(tiny, tmp_path):
    task = task_of("Counted", tmp_path / "rows.jsonl")
    assert [tool.tag for tool in task.tools] == ["count", "dial", "wait"]  # close is the program's
    for _ in range(4):
        a, b = play(
            tiny,
            task,
            ["<dial>123</dial>", "<answer>x</answer>"],
            ["<dial>000</dial>", "<answer>x</answer>"],
        )
        assert (a.turns[0].result, b.turns[0].result) == (
            ["It opens."],
            ["Nothing, 1 tries so far."],
        )
    assert (Counted.made, Counted.open) == (2, 2)
    task.tools[2].timeout = 0.2
    [late] = play(tiny, task, ["<wait></wait>", "<answer>x</answer>"])
    # it may still be at it
    assert late.turns[0].result == ["wait took longer than 0.2 s"] and Counted.open == 1
    assert (late.stop, len(late.turns)) == ("over", 1)
    del task
    gc.collect()
    assert Counted.open == 0


def test_an_environment_that_owns_its_data_gets_seeds_which_a_group_shares(tmp_path):
    # a preset's questions are not asked
    world = dict(train=PRESETS["world"]["train"], test=PRESETS["world"]["test"])
    task = load_task(Config(task="test_environment:Safe", **world))
    check_questions(task)
    train, test = (task.questions(split) for split in ("train", "test"))
    assert (len(train), len(task.questions("valid")), len(test)) == (1000, 0, 100)
    seeds = [q.data["seed"] for q in train + test]
    assert len(set(seeds)) == 1100 and seeds[:2] == [0, 1]
    assert task.prompt("Go.", train[7])[0]["content"] == "Go.\n\nSafe number 7.\n"
    assert task.reset(train[7])._code == task.reset(train[7])._code == "007"
    with pytest.raises(Fault, match="--train is missing"):
        load_task(Config(task="test_environment:Vault", **world)).questions("train")
    rows = [{"prompt": "Open it.", "seed": 3}]
    [q] = task_of("Safe", tmp_path / "q.jsonl", rows).questions("train")
    assert q.text == "Open it." and q.data["seed"] == 3  # files beat seeds


class Coding:
    """As TRL 1.16's page has them: the rows only route, and each `reset` says what is asked."""

    def reset(self, **row) -> str:
        assert "environment" not in row
        self.ran = 0
        return "Fix the failing test."

    def run(self, code: str) -> str:
        """Run code and return its output.

        Args:
            code: The code to run
        """
        self.ran += 1
        return f"ran {code}"

    def get_reward(self) -> float:
        return float(self.ran)


class Grid:
    def reset(self, size: int = 3, **row) -> str:
        self.size, self.at = size, 0
        return f"Reach tile {size}."

    def move(self, steps: int) -> int:
        """Move, and return where you are.

        Args:
            steps: How far
        """
        self.at += steps
        return self.at

    def get_reward(self) -> float:
        return -1.0 if self.at == self.size else 0.0


Both = environments({"coding": Coding, "game": Grid})
ROUTED = [{"environment": "coding"}, {"environment": "game", "size": 2, "prompt": "Play. "}]


def test_rows_name_their_environment(tiny, tmp_path):
    task = task_of("Both", tmp_path / "rows.jsonl", ROUTED)
    check_questions(task)
    assert [tool.tag for tool in task.tools] == ["run", "move"]
    coding, game = task.questions("train")
    asked = [task.make_format().messages("Go.", q)[-1]["content"] for q in (coding, game)]
    assert "Fix the failing test." in asked[0] and "Play.Reach tile 2." in asked[1]
    assert all("Run code" in text and "where you are" in text for text in asked)


def test_each_episode_is_played_and_scored_by_its_own(tiny, tmp_path):
    task = task_of("Both", tmp_path / "rows.jsonl", ROUTED)
    coding, game = task.questions("train")
    jobs = [Job(0, "Go.", q, k) for k, q in enumerate((coding, game, coding))]
    turns = [
        ["<run>1 + 1</run>", '<move>{"steps": 1}</move>', "<answer>x</answer>"],
        ['<move>{"steps": 2}</move>', "<answer>x</answer>"],
        ["<answer>x</answer>"],
    ]
    taus = roll(Script(tiny[1], *turns), tiny[1], task, jobs)
    set_rewards(task, taus)
    assert [tau.reward for tau in taus] == [1.0, -1.0, 0.0]
    assert taus[0].turns[0].result == ["ran 1 + 1"] and taus[1].turns[0].result == ["2"]
    assert isinstance(taus[0].turns[1].result, Failure)  # another's tool
    assert sorted(type(episode).__name__ for episode in task.idle) == ["Coding", "Grid"]


@pytest.mark.parametrize(
    "row", [{"environment": "chess"}, {"prompt": "Play."}],
)  # fmt: skip
def test_a_row_of_no_environment_is_one_line(tmp_path, row):
    task = task_of("Both", tmp_path / "rows.jsonl", [row])
    with pytest.raises(Fault, match=r"^--train .*rows\.jsonl:1"):
        task.questions("train")


def test_two_environments_with_a_tool_of_one_name_are_refused(tmp_path):
    with pytest.raises(Fault, match="its tool <count> has the tag"):
        task_of("Alike", tmp_path / "rows.jsonl", ROUTED)


Alike = environments({"a": Vault, "b": Counted})
