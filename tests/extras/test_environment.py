"""A class in TRL's `environment_factory` convention is a task: its rows, its tools, its reward, what is refused."""

import json
import re
import time

import pytest
from test_rollout import Script, roll

import inspo
from config import PRESETS, Config
from plumbing.faults import Fault
from tasks import Job, check_questions, load_task, reward


class Vault:
    """Three digits open it: nothing here knows of this project."""

    def __init__(self):
        self.opened = False

    def reset(self, *, code: str, hint: str = "", **row) -> str | None:
        self._code, self.tries = code, 0
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


class Attributed(Vault):
    """Keeps its reward in an attribute, as TRL's pages do."""

    get_reward = property(doc="none")  # raises AttributeError: hasattr is False
    reward = 0.25


class Forgetful(Vault):
    def reset(self, **row):
        super().reset(**row)
        return str(time.perf_counter())


class Later(Vault):
    """Begins and is scored by coroutines, and begins with content blocks."""

    async def reset(self, **row):
        hint = super().reset(**row)
        return [{"type": "text", "text": text} for text in (hint, "Be quick.")] if hint else None

    async def get_reward(self):
        return 0.75

    @property
    def broken(self):
        raise RuntimeError("a property is no tool")


class Picture(Vault):
    def reset(self, **row):
        super().reset(**row)
        return [{"type": "image", "image": "x.png"}]


class Unsure(Vault):
    def get_reward(self):
        return "good"


class Locked(Vault):
    def __init__(self, key):
        self.key = key


class Unpaid(Vault):
    get_reward = property(doc="none")


class Idle:
    def reset(self, **row):
        pass


class Undocumented(Idle):
    def poke(self, x: int):
        return x


@pytest.fixture
def rows(tmp_path):
    """The flags of a file of rows for Vault."""
    path = tmp_path / "rows.jsonl"
    prompt = [{"role": "system", "content": "You crack safes."}, {"role": "user", "content": "Open the vault."}]
    said = [{"prompt": prompt, "code": "123"}, {"question": "Open it.", "code": "441", "hint": "Two are the same."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in said))
    return {"train": str(path), "test": str(path)}


def test_an_environment_of_trl_is_a_task(tiny, rows):
    task = load_task(Config(task="test_environment:Vault", **rows))
    check_questions(task)
    first, second = task.questions("train")
    assert [tool.tag for tool in task.tools] == ["count", "dial"] and task.questions("valid") == []
    [message] = task.format.messages(task, "Go.", second)
    assert message["content"].startswith("Go.\n\nTools, ")
    assert "<dial> code </dial>: Dials a code." in message["content"]
    assert message["content"].endswith("\n\nOpen it.\n\nTwo are the same.\n")
    assert task.format.messages(task, "Go.", first)[0]["content"].endswith("\n\nYou crack safes.\n\nOpen the vault.\n")

    won = ["<dial>441</dial>", '<count>{"digit": 3, "below": true}</count>', "<dial>123</dial>", "<dial>123</dial>",
           "<answer>done</answer>"]  # fmt: skip
    lost = ["<dial>000</dial>", "<answer>done</answer>"]
    a, b = roll(Script(tiny[1], won, lost), tiny[1], task, [Job(0, "Go.", first, k) for k in range(2)])
    shown = [turn.result for turn in a.turns]
    assert shown[:3] == [["Nothing, 1 tries so far."], ["3"], ["It opens."]]
    assert shown[3] == ["dial failed: ValueError: It is open already."]
    assert b.turns[0].result == ["Nothing, 1 tries so far."]  # each episode has an object of its own
    reward(task, [a, b])
    assert (a.reward, b.reward) == (0.5, 0.0)


def test_a_run_trains_on_an_environment(tmp_path, tiny_path, rows):
    flags = f"--model {tiny_path} --mode static --T 1 --batch 2 --mini 2 --G 2 --max_response 8 --max_prompt 900"
    files = [x for split, path in rows.items() for x in (f"--{split}", path)]
    inspo.main([*flags.split(), "--task", "test_environment:Attributed", *files, "--out", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"] == ["reward"] and summary["tools"] == ["count_calls", "dial_calls"]
    assert summary["end"]["reward"] == summary["end"]["reward/rows"] == 0.25


def play_first(tiny, task):
    job = Job(0, "Go.", task.questions("train")[0], 0)
    return roll(Script(tiny[1], ["<answer>done</answer>"]), tiny[1], task, [job])


def test_an_attribute_is_its_reward_and_without_any_it_is_refused(tiny, rows):
    for name, want in (("Attributed", 0.25), ("Unpaid", None)):
        task = load_task(Config(task=f"test_environment:{name}", **rows))
        [tau] = play_first(tiny, task)
        if want is None:
            with pytest.raises(Fault, match="define get_reward"):
                reward(task, [tau])
        else:
            reward(task, [tau])
            assert tau.reward == want


@pytest.mark.parametrize(
    "name, says", [("Idle", "it has no method to call"), ("Undocumented", "its method poke: Cannot generate")]
)
def test_an_environment_that_cannot_be_played_is_refused(rows, name, says):
    with pytest.raises(Fault, match=re.escape(f"--task test_environment:{name}: {says}")):
        load_task(Config(task=f"test_environment:{name}", **rows))


def test_a_reset_that_forgets_is_refused(tiny, rows):
    task = load_task(Config(task="test_environment:Forgetful", **rows))
    with pytest.raises(Fault, match="reset\\(\\) returned two texts for question train-1"):
        play_first(tiny, task)


def test_resets_and_rewards_are_awaited_and_content_blocks_read(tiny, rows):
    task = load_task(Config(task="test_environment:Later", **rows))
    first, second = task.questions("train")
    assert task.prompt("Go.", first)[0]["content"] == "Go.\n\nYou crack safes.\n\nOpen the vault.\n"
    assert task.prompt("Go.", second)[0]["content"] == "Go.\n\nOpen it.\n\nTwo are the same.\nBe quick.\n"
    [tau] = play_first(tiny, task)
    reward(task, [tau])
    assert tau.reward == 0.75 and [tool.tag for tool in task.tools] == ["count", "dial"]


def test_what_is_no_text_or_no_number_is_refused_in_one_line(tiny, rows):
    where = "--task test_environment:"
    with pytest.raises(Fault, match=f"{where}Picture: reset\\(\\) of question train-1 does not return a text"):
        play_first(tiny, load_task(Config(task="test_environment:Picture", **rows)))
    task = load_task(Config(task="test_environment:Unsure", **rows))
    with pytest.raises(Fault, match="of question train-1 is 'good'; return a finite number"):
        reward(task, play_first(tiny, task))
    with pytest.raises(Fault, match=f"{where}Locked: it cannot be made .*'key'"):
        load_task(Config(task="test_environment:Locked", **rows))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user"}]}, {"prompt": 3}, {"prompt": ["x"]}, {"question": ["x"]}, [1], {"prompt": " "},
        {"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, {"prompt": {"content": "x"}},
        {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ],
)  # fmt: skip
def test_a_row_without_a_text_to_ask_is_one_line(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task(Config(task="test_environment:Vault", train=f"{tmp_path}/rows.jsonl"))
    with pytest.raises(Fault, match="rows.jsonl:1: nothing is asked that is text; fill `prompt`"):
        task.questions("train")


def test_the_content_blocks_of_a_row_are_read(tmp_path):
    blocks = [{"type": "text", "text": "Open"}, {"type": "text", "text": "it."}]
    row = {"prompt": [{"role": "user", "content": blocks}], "code": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task(Config(task="test_environment:Vault", train=f"{tmp_path}/rows.jsonl"))
    assert [q.text for q in task.questions("train")] == ["Open\nit."]


def test_a_row_that_reset_does_not_take_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Open."}\n')
    task = load_task(Config(task="test_environment:Vault", train=f"{tmp_path}/rows.jsonl"))
    with pytest.raises(Fault, match="does not take the row of question train-1 .*'code'"):
        task.prompt("Go.", task.questions("train")[0])


def test_rows_that_ask_nothing_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Open.", "code": "1"}\n{"code": "1"}\n')
    task = load_task(Config(task="test_environment:Vault", train=f"{tmp_path}/rows.jsonl", test="rows.csv"))
    for split, says in (("train", "rows.jsonl:2: nothing is asked"), ("test", "--test rows.csv: give a .jsonl")):
        with pytest.raises(Fault, match=says):
            task.questions(split)


class Safe(Vault):
    """Owns its data: a seed sets the code."""

    def reset(self, seed=None, **kwargs) -> str:
        self._code, self.tries = f"{seed % 1000:03d}", 0
        return f"Safe number {seed}."


class Lone(Vault):
    def reset(self) -> str:
        self._code, self.tries = "123", 0
        return "The only safe."


def test_an_environment_that_owns_its_data_gets_seeds_which_a_group_shares():
    task = load_task(Config(task="test_environment:Safe"))
    check_questions(task)
    train, test = (task.questions(split) for split in ("train", "test"))
    assert (len(train), len(task.questions("valid")), len(test)) == (1000, 0, 100)
    seeds = [q.data["seed"] for q in train + test]
    assert len(set(seeds)) == 1100 and seeds[:2] == [0, 1]
    assert task.prompt("Go.", train[7])[0]["content"] == "Go.\n\nSafe number 7.\n"
    assert task.reset(train[7])._code == task.reset(train[7])._code == "007"
    lone = load_task(Config(task="test_environment:Lone"))
    assert lone.prompt("Go.", lone.questions("test")[0])[0]["content"] == "Go.\n\nThe only safe.\n"
    world = dict(train=PRESETS["world"]["train"], test=PRESETS["world"]["test"])  # a preset's questions are not asked
    assert load_task(Config(task="test_environment:Safe", **world)).questions("test")[0].source == "seeds"
    with pytest.raises(Fault, match="--train"):
        load_task(Config(task="test_environment:Vault")).questions("train")


def test_files_beat_seeds(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "Open it.", "seed": 3}))
    [q] = load_task(Config(task="test_environment:Safe", train=str(tmp_path / "q.jsonl"))).questions("train")
    assert q.text == "Open it." and q.data["seed"] == 3
