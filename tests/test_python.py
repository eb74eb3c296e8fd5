"""`train` and `load` in a caller's process: objects for names, faults, interrupts, one call after
another."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_inspo import ENV, ROOT, SMALL, metrics

import inspo
from config import WORLD, Config, configure, parse_flags
from evaluate import load_agent
from grpo import Learner
from plumbing import stop
from plumbing.faults import Fault
from population import Population
from reflect import Optimizer
from run import Run
from tasks import Question, Task, Trajectory
from tasks.search_qa import SearchQA
from tasks.task import load_task
from training.policy import Policy

FLAGS = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
KINDS = {f.name: type(f.default) for f in fields(Config)}
SETTINGS = {name: kind(FLAGS[f"--{name}"]) for name, kind in KINDS.items() if f"--{name}" in FLAGS}
SETTINGS |= dict(T=4, T_e=4, save_every=2, eval_every=2)
TINY = dict(preset="world", mode="static", T=1, batch=2, G=2, eval_n=2, max_response=4)
PLAYED = Trajectory(0, Question("q", "word?"), 0, [], 1)
HANDLERS = [signal.getsignal(number) for number in stop.SIGNALS]


class Echo(Task):
    """Says the word; made with a prize, as an object may be."""

    instruction = "Say the word, inside <answer> and </answer>."

    def __init__(self, cfg, prize=1.0):
        super().__init__(cfg)
        self.prize = prize

    def questions(self, split):
        return [Question(f"{split} {k}", f"word {k}") for k in range(3)]

    def reward(self, taus):
        return [self.prize * bool(tau.prediction) for tau in taus]


class Made(Echo):
    """An object knows its run's configuration once it is in one."""

    def __init__(self, prize):
        Task.__init__(self)
        self.prize = prize


def test_what_an_evaluation_in_training_finds_is_shown(tmp_path, capsys):
    result = inspo.train(task=Echo, **TINY | dict(T=2, eval_every=1), out=str(tmp_path / "run"))
    lines = capsys.readouterr().out.splitlines()
    row, last = [r for r in metrics(result.path) if "valid/reward" in r]
    assert last["t"] == 2 and "test/reward" not in last  # which the summary has
    for split in ("valid", "test"):
        shown = f"{split}/reward {row[f'{split}/reward']:.3g}"
        assert [line for line in lines if line.startswith("step") and shown in line]


class Unvalidated(Echo):
    """Has no validation questions, and a reward of none cannot be computed."""

    def questions(self, split):
        return [] if split == "valid" else super().questions(split)

    def reward(self, taus):
        best = max(len(tau.response) for tau in taus)
        return [len(tau.response) / best for tau in taus]


@pytest.mark.slow
def test_a_run_evaluates_the_questions_that_there_are_resumed_too(tmp_path):
    settings = TINY | dict(T=3, T_e=3, eval_every=1, save_every=1, keep=9, out=tmp_path / "run")
    settings |= dict(mode="inspo", K_e=1, D_B=0, task=Unvalidated)
    run, _, summary = inspo.train(**settings)
    first, *steps = rows = metrics(run)
    measured = {name for name in first if name.startswith("test/")}
    for row in steps[:-1]:
        assert {name for name in row if name.startswith(("valid/", "test/"))} >= measured > set()
        assert not any(name.startswith("valid/") for name in row)
    assert summary["questions"] == 2

    # what was stopped before the second evaluation makes it when it goes on
    for t in (2, 3):
        shutil.rmtree(run / f"checkpoints/step-{t:06d}")
    inspo.train(**settings, resume=True)
    assert metrics(run) == rows


README = (ROOT / "README.md").read_text()
TASK, CALL = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.slow
def test_the_page_shows_what_runs_as_a_script_and_in_a_notebook(tmp_path):
    """In a folder of the user's, with the README's task; only the sizes are made smaller. In a
    notebook the class is defined above."""
    [page] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    (tmp_path / "alliteration.py").write_text(TASK)
    assert page.startswith(CALL)
    page = page.replace("T=60", "T=1, batch=2")
    notebook = TASK + page.removeprefix("from alliteration import Alliteration\n")
    env = ENV | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", page + notebook]
    subprocess.run(argv, cwd=tmp_path, env=env, check=True)
    runs = sorted((tmp_path / "runs").iterdir())
    assert [json.loads((run / "config.json").read_text())["task"] for run in runs] == [
        "alliteration:Alliteration",
        "__main__:Alliteration",
    ]


@pytest.mark.slow
def test_the_readme_s_command_teaches_its_task_with_names_for_answers(tmp_path, monkeypatch):
    """What a person would call right: two names of the world's, which differ, with one initial."""
    (tmp_path / "alliteration.py").write_text(TASK)
    [argv] = re.findall("    python inspo.py (--task alliteration:.*)", README)
    argv = f"{ROOT / 'inspo.py'} {argv} --out run".split()
    subprocess.run([sys.executable, *argv], cwd=tmp_path, check=True)
    titles = re.findall(r'"contents": "\\"(\w+) (\w+)', (WORLD / "corpus.jsonl").read_text())
    names = {name.lower() for title in titles for name in title}
    monkeypatch.syspath_prepend(tmp_path)
    with load_agent(tmp_path / "run") as agent:
        played = agent.play(agent.task.questions("test"))
    assert len(played) == 10 and agent.task.reward(played) == [1.0] * 10
    for tau in played:
        first, second = tau.prediction.lower().split()
        assert {first, second} <= names and first != second and first[0] == second[0]


# ---- settings


@pytest.mark.parametrize(
    "flags", ["--mode static --T 7", "--model smollm2-135m --lora_rank 8 --lr 1e-4"]
)
def test_settings_are_those_of_the_flags(flags):
    """Whatever the program: presets, the rates of LoRA, what --mode static changes."""
    words = flags.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    given = {name[2:]: KINDS[name[2:]](value) for name, value in pairs}
    assert configure(**given) == parse_flags(words)
    exact = configure(T=np.int64(3), lr=1, out=Path("a") / "b", temperature=np.float32(0.5))
    assert (exact.T, exact.lr, exact.out, exact.temperature) == (3, 1.0, "a/b", 0.5)


class Misspelt(Learner):
    def set_advantage(self, taus):
        raise AssertionError


REFUSED = {
    "a name with a letter too few": (dict(lora_rnk=8), "--lora_rnk: .*nearest is lora_rank"),
    "one of train's own": (dict(learnr=Learner), "--learnr: .*nearest is learner"),
    "another's name": (dict(learning_rate=1e-5), "--learning_rate: .*nearest is lr$"),
    "a learner of another kind": (dict(learner=Population), "Population does not extend Learner"),
    "a method that is misspelt": (
        dict(learner=type("Mine", (Misspelt,), {})),
        "Mine overrides no method of Learner; the nearest is set_advantages$",
    ),
    "a class that changes nothing": (
        dict(population=type("Same", (Population,), {})),
        "Same overrides no method of Population",
    ),
    "a preset": (dict(preset="wrld"), "--preset wrld: choose world, "),
    "text for a number": (dict(T="many"), "--T many: should be a valid integer"),
    "a fraction": (dict(T=2.5), "--T 2.5: should be a valid integer"),
    "a list": (dict(tools=["search"]), "--tools \\['search'\\]: should be a valid string"),
    "a value out of range": (dict(T=0), "--T 0: should be greater than or equal to 1"),
    "a choice": (dict(mode="statik"), "--mode statik: should be 'inspo' or 'static'"),
    "a run that is none": (dict(out="nowhere", resume=True), "nowhere holds no run"),
    "a class that is no task": (dict(task=dict), "--task builtins:dict: it neither extends"),
    "a name of nothing": (
        dict(task="nowhere:Task"),
        "--task nowhere:Task: nowhere cannot be imported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_a_fault_of_one_line(case):
    settings, says = REFUSED[case]
    with pytest.raises(Fault, match=f"^{says}") as e:
        inspo.train(**dict(mode="static") | settings)
    assert "\n" not in str(e.value) and HANDLERS == [
        signal.getsignal(number) for number in stop.SIGNALS
    ]


def test_what_is_missing_is_a_fault():
    with pytest.raises(Fault, match="^--train no/such.jsonl: no such file"):
        inspo.train(model="world", mode="static", train="no/such.jsonl")


# ---- objects in place of names


def test_a_task_is_a_class_an_object_or_a_name():
    cfg = configure(model="world", mode="static")
    kept, made = Echo(Config(), prize=0.5), Made("a prize")
    for given, kind, prize in ((Echo, Echo, 1.0), (kept, Echo, 0.5), (made, Made, "a prize")):
        task = load_task(cfg, given)
        assert type(task) is kind and (task.prize, task.cfg) == (prize, cfg)
        assert configure(task=given).task == f"{__name__}:{kind.__name__}"
    assert kept.cfg == Config()  # a run gets a copy
    assert type(load_task(cfg, cfg.task)) is SearchQA


def test_in_a_notebook_whose_thread_has_a_loop_an_async_reward_is_awaited():
    task = load_task(configure(model="world", reward=f"{__name__}:later"), Echo)

    async def cell():
        return task.reward([PLAYED])

    assert asyncio.run(cell()) == task.reward([PLAYED]) == [0.25]


async def later(taus):
    return [0.25 for _ in taus]


USED = []


class Counted(Learner):
    def update(self, *args):
        USED.append("update")
        return super().update(*args)


class Wide(Population):
    def __init__(self, *args):
        super().__init__(*args)
        USED.append("population")


def other_algorithm(_, *parts):
    return inspo.inspo(*parts)


class Bare(inspo.Evolution):
    def fill_population(self):
        USED.append("evolution")
        super().fill_population()


def test_a_run_uses_the_callers_classes_resumed_too_and_returns_what_it_leaves(tmp_path, capsys):
    parts = dict(learner=Counted, population=Wide, evolution=Bare)
    parts |= dict(task=Echo(Config(), prize=2.0), algorithm=partial(other_algorithm, ()))
    given = TINY | dict(out=tmp_path / "r", seed=3)
    path, instruction, summary = inspo.train(**parts, **given)
    assert path == tmp_path / "r" and path.is_absolute()
    assert instruction == (path / "I_star.txt").read_text().strip() == Echo.instruction
    assert summary == json.loads((path / "summary.json").read_text()) and summary["seed"] == 3
    assert sorted(USED) == ["evolution", "population", "update"]
    assert json.loads((path / "config.json").read_text())["task"] == f"{__name__}:Echo"
    told = "parts: Counted (update), Wide (__init__), Bare (fill_population)"
    assert told in capsys.readouterr().out
    parts["population"] = lambda cfg: Wide(cfg)
    assert inspo.train(**parts, **given, resume=True).instruction == instruction


def test_a_class_of_a_function_is_trained_and_loaded_by_the_class_alone(tmp_path):
    class Local(Echo):
        pass

    path = inspo.train(task=Local, **TINY, out=str(tmp_path / "r")).path
    with pytest.raises(Fault, match="<locals>.Local is not a class in test_python"):
        load_agent(path)
    with load_agent(path, task=Local, temperature=0.5, max_turns=1) as agent:
        assert agent.task.cfg.max_turns == 1 and agent.instruction == Echo.instruction
        known, new = agent.ask("test 1"), agent.ask("another word")
        assert known.question == Question("test 1", "word 1") and known.turns
        assert new.question.text == "another word"
        assert len(agent.play(agent.task.questions("test"))) == 3
    with pytest.raises(Fault, match="^--max_turn: .*nearest is max_turns"):
        load_agent(path, task=Local, max_turn=1)


# ---- one call after another


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return inspo.train(**SETTINGS, out=tmp_path_factory.mktemp("runs") / "whole").path


def same(one: Path, other: Path) -> None:
    """As they are written by an undisturbed run, to the bit; but paid calls stay paid."""
    assert metrics(one) == metrics(other)
    for name in ("population.jsonl", "I_star.txt", "policy/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_second_call_computes_the_same_and_leaves_no_thread(tmp_path):
    before = {thread.name for thread in threading.enumerate()} | {"tqdm_monitor"}
    given = TINY | dict(task=Unvalidated, T=2, lr=1e-2)
    first = inspo.train(**given, out=tmp_path / "first").path
    began = time.perf_counter()
    again, _, summary = inspo.train(**given, out=tmp_path / "again")
    # of this call, not of the process
    assert summary["seconds"] <= time.perf_counter() - began + 0.1
    same(again, first)
    assert {thread.name for thread in threading.enumerate()} <= before
    assert HANDLERS == [signal.getsignal(number) for number in stop.SIGNALS]


def test_a_call_from_another_thread_works_and_installs_no_handler(tmp_path):
    seen, done = [], []

    def watched(*args):
        seen.append([signal.getsignal(number) for number in stop.SIGNALS])
        return inspo.inspo(*args)

    def work():
        done.append(inspo.train(task=Echo, algorithm=watched, **TINY, out=tmp_path / "r"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [HANDLERS] and done[0].path == tmp_path / "r"


@pytest.mark.slow
def test_after_a_call_that_failed_another_one_works(tmp_path, monkeypatch):
    """In bfloat16, with a process group, from before and from after the ranks have met."""
    wide = TINY | dict(task=Echo, dtype="bfloat16")

    def fail(*args, **kwargs):
        raise Fault("it does not work today")

    for k, (owner, name) in enumerate([(Run, "open"), (Learner, "__init__"), (Learner, "update")]):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(Fault, match="it does not work today"):
                inspo.train(**wide, out=tmp_path / f"r{k}")
        assert not torch.distributed.is_initialized()
    assert inspo.train(**wide, out=tmp_path / "r").summary["steps"] == 1


# ---- an interrupt


MOMENTS = {  # the call in which Ctrl-C comes
    "rollout": (Policy, "rollout", 3), "update": (Learner, "loss", 3), "optimizer": (Optimizer, "ask", 2),
    "save": (Policy, "save", 1), "start": (SearchQA, "start", 1), "comparison": (Policy, "evaluate", 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_a_run_that_resumes(whole, tmp_path, monkeypatch, capfd, moment):
    owner, name, n = MOMENTS[moment]
    inner, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(name)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, method)
        with pytest.raises(KeyboardInterrupt):
            inspo.train(**SETTINGS, out=tmp_path / "r")
    saved_again = moment == "save"  # by the rescue
    assert len(calls) == n + saved_again and not multiprocessing_children()
    again = (tmp_path / "r" / "config.json").exists()
    assert (
        again
        == (moment != "start")
        == (f"--out {tmp_path / 'r'} --resume" in capfd.readouterr().err)
    )
    same(inspo.train(**SETTINGS, out=tmp_path / "r", resume=again).path, whole)


def multiprocessing_children() -> list[str]:
    """Servers that this process has left behind."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()
