"""`train` and `load` in a caller's process: objects for names, faults, interrupts, one call after
another."""

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

import ask
import inspo
from config import WORLD, Config, configure, parse_flags
from evaluate import load_agent
from grpo import Learner
from plumbing import stop, threads
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from population import Population
from reflect import Optimizer
from run import Run
from tasks import Question, Task, Trajectory
from tasks.search_qa import SearchQA
from tasks.task import load_task
from training.policy import Policy

FLAGS = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
SETTINGS = {
    f.name: type(f.default)(FLAGS[f"--{f.name}"]) for f in fields(Config) if f"--{f.name}" in FLAGS
}
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
    row, last = [r for r in read_jsonl(result.path / "metrics.jsonl") if "valid/reward" in r]
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


# own files: how many questions each has
FEW = {
    "too few to set some aside": {"train": 4, "test": 2},
    "one in each": {"train": 1, "test": 1, "valid": 1},
}


@pytest.mark.parametrize("case", ["a task", *FEW])
def test_a_run_evaluates_the_questions_that_there_are_resumed_too(tmp_path, case):
    settings = TINY | dict(T=3, eval_every=1, save_every=1, keep=9, out=str(tmp_path / "run"))
    settings |= dict(mode="inspo", K_e=1, T_e=3, D_B=0) | dict(task=Unvalidated)
    if case in FEW:
        files = {name: str(WORLD / name) for name in ("corpus.jsonl", "instruction.txt")}
        settings |= {name.partition(".")[0]: path for name, path in files.items()}
        settings |= dict(task="tasks.search_qa:SearchQA", valid="", D_B=4, max_response=16)
    for split, n in FEW.get(case, {}).items():
        lines = (WORLD / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines[:n]))
        settings[split] = str(tmp_path / f"{split}.jsonl")
    splits = FEW.get(case, {"test": 3})
    run, summary = inspo.train(**settings)[::2]
    first, *steps = rows = metrics(run)
    for row in steps[:-1]:
        assert ("valid/reward" in row or "valid/em" in row) == ("valid" in splits)
        evaluated = {name.split("/")[0] for name in row if name.startswith(("valid/", "test/"))}
        assert evaluated == splits.keys() - {"train"}
        assert row.keys() >= {name for name in first if name.startswith("test/")}
    assert summary["questions"] == min(splits["test"], 2)

    # what was stopped before the second evaluation makes it when it goes on
    for t in (2, 3):
        shutil.rmtree(run / f"checkpoints/step-{t:06d}")
    inspo.train(**settings, resume=True)
    assert metrics(run) == rows


README = (ROOT / "README.md").read_text()
[TASK] = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_page_shows_what_runs(tmp_path):
    """As a script, in a folder of the user's, with the README's task; only the sizes are made
    smaller. Then as a notebook, where the class is defined above."""
    [page] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    assert len((ROOT / "docs" / "python.md").read_text().splitlines()) <= 60
    (tmp_path / "alliteration.py").write_text(TASK)
    page = page.replace("T=40", "T=1, batch=2")
    notebook = TASK + page.removeprefix("from alliteration import Alliteration\n")
    env = ENV | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", page + notebook],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "runs").iterdir())
    assert [json.loads((run / "config.json").read_text())["task"] for run in runs] == [
        "alliteration:Alliteration",
        "__main__:Alliteration",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_readme_s_command_teaches_its_task_with_names_for_answers(tmp_path, monkeypatch, seed):
    """What a person would call right: two names of the world's, which differ, with one initial."""
    (tmp_path / "alliteration.py").write_text(TASK)
    [argv] = re.findall("    python inspo.py (--task alliteration:.*)", README)
    argv = f"{ROOT / 'inspo.py'} {argv} --out run --seed {seed}".split()
    subprocess.run([sys.executable, *argv], cwd=tmp_path, env=ENV, check=True)
    corpus = read_jsonl(ROOT / "world" / "files" / "corpus.jsonl")
    names = {
        name
        for row in corpus
        for name in re.findall(r"\w+", row["contents"].splitlines()[0].lower())
    }
    monkeypatch.syspath_prepend(tmp_path)
    with load_agent(tmp_path / "run") as agent:
        played = agent.play(agent.task.questions("test"))
    assert len(played) == 10 and agent.task.reward(played) == [1.0] * 10
    for tau in played:
        first, second = tau.prediction.lower().split()
        assert {first, second} <= names and first != second and first[0] == second[0]


# ---- settings


def test_settings_are_those_of_the_flags():
    """Whatever the program: presets, the rates of LoRA, what --mode static changes."""
    for flags in (
        "",
        "--mode static --T 7",
        "--model smollm2-135m --lr 1e-4",
        "--lora_rank 8",
        "--preset world --model m",
        "--preset world --model m --lora_rank 4 --N_P 3",
    ):
        words = flags.split()
        pairs = zip(words[::2], words[1::2], strict=True)
        types = {f.name: type(f.default) for f in fields(Config)} | {"preset": str}
        given = {name[2:]: types[name[2:]](value) for name, value in pairs}
        assert configure(**given) == parse_flags(words)
    exact = configure(T=np.int64(3), lr=1, out=Path("a") / "b", temperature=np.float32(0.5))
    assert (exact.T, exact.lr, exact.out, exact.temperature) == (3, 1.0, "a/b", 0.5)
    assert all(type(getattr(exact, f.name)) is type(f.default) for f in fields(exact))


class Misspelt(Learner):
    def set_advantage(self, taus):
        raise AssertionError


class Idle(inspo.Evolution):
    """Has a method of its own, which nothing calls."""

    def fill(self):
        raise AssertionError


REFUSED = {
    "a name with a letter too few": (dict(lora_rnk=8), "--lora_rnk: .*nearest is lora_rank"),
    "one in another case": (dict(t=3), "--t: .*nearest is T$"),
    "one of train's own": (dict(learnr=Learner), "--learnr: .*nearest is learner"),
    "another's name": (dict(learning_rate=1e-5), "--learning_rate: .*nearest is lr$"),
    "another's shorter name": (dict(epsilon=0.1), "--epsilon: .*nearest is eps$"),
    "a word of two": (dict(batch_size=8), "--batch_size: .*nearest is batch$"),
    "half of a name": (dict(optimizer="x"), "--optimizer: .*nearest is optimizer_model$"),
    "a name and a word": (dict(model_name="x"), "--model_name: .*nearest is model$"),
    "a learner of another kind": (dict(learner=Population), "Population does not extend Learner"),
    "a population of another kind": (
        dict(population=Learner),
        "Learner does not extend Population",
    ),
    "an evolution of another kind": (dict(evolution=Echo), "Echo does not extend Evolution"),
    "a method that is misspelt": (
        dict(learner=Misspelt),
        "Misspelt overrides no method of Learner; the nearest is set_advantages$",
    ),
    "the same, inherited": (
        dict(learner=type("Mine", (Misspelt,), {})),
        "Mine overrides no method of Learner; the nearest is set_advantages$",
    ),
    "a method of its own alone": (
        dict(evolution=Idle),
        "Idle overrides no method of Evolution; the nearest is fill_population$",
    ),
    "a class that changes nothing": (
        dict(population=type("Same", (Population,), {"__doc__": "None."})),
        "Same overrides no method of Population$",
    ),
    "a preset": (dict(preset="wrld"), "--preset wrld: choose world, "),
    "text for a number": (dict(T="many"), "--T many: should be a valid integer"),
    "a fraction": (dict(T=2.5), "--T 2.5: should be a valid integer"),
    "a number for a truth": (dict(resume=2), "--resume 2: should be a valid boolean"),
    "nothing": (dict(out=None), "--out None: should be a valid string"),
    "a list": (dict(tools=["search"]), "--tools \\['search'\\]: should be a valid string"),
    "a value out of range": (dict(T=0), "--T 0: should be greater than or equal to 1"),
    "a value below what is itself too small": (
        dict(eps=-1.0),
        "--eps -1.0: should be greater than 0",
    ),
    "a choice": (dict(mode="statik"), "--mode statik: should be 'inspo' or 'static'"),
    "a run that is none": (dict(out="nowhere", resume=True), "nowhere holds no run"),
    "a task that is none": (dict(task=3), "--task builtins:int: it neither extends"),
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


def test_all_that_is_missing_is_one_fault(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Fault) as e:
        inspo.train(model="no/such/model")
    assert [
        line
        for line in ("--train", "--test", "search", "--model", "optimizer")
        if line not in str(e.value)
    ] == []


# ---- objects in place of names


def test_a_task_is_a_class_an_object_or_a_name():
    cfg = configure(model="world", mode="static")
    kept = Echo(Config(), prize=0.5)
    for given, prize in ((Echo, 1.0), (kept, 0.5)):
        task = load_task(cfg, given)
        assert type(task) is Echo and (task.prize, task.cfg) == (prize, cfg)
        assert configure(task=given).task == f"{__name__}:Echo"
    assert kept.cfg == Config()  # a run gets a copy
    made = Made("a prize")
    assert (load_task(cfg, made).cfg, load_task(cfg, made).prize) == (cfg, "a prize")
    assert type(load_task(cfg, cfg.task)) is SearchQA
    scored = load_task(configure(model="world", reward=f"{__name__}:seven"), kept)
    assert scored.reward([PLAYED]) == [7.0] and isinstance(scored, Echo) and scored.prize == 0.5


def seven(taus):
    return [7.0 for _ in taus]


class Counted(Learner):
    updates = 0

    def update(self, *args):
        type(self).updates += 1
        return super().update(*args)


class Wide(Population):
    made: list = []

    def __init__(self, *args):
        super().__init__(*args)
        self.made.append(args)


def other_algorithm(_, *parts):
    return inspo.inspo(*parts)


class Bare(inspo.Evolution):
    begun: list = []

    def fill_population(self):
        self.begun.append(self.cfg)
        super().fill_population()


def test_a_run_uses_the_callers_classes_and_returns_what_it_leaves(tmp_path, capsys):
    parts = dict(learner=Counted, population=Wide, evolution=Bare)
    result = inspo.train(
        task=Echo(Config(), prize=2.0), **parts, **TINY, out=tmp_path / "r", seed=np.int64(3)
    )
    assert result.path == tmp_path / "r" and result.path.is_absolute()
    assert (
        result.instruction == (result.path / "I_star.txt").read_text().strip() == Echo.instruction
    )
    assert (
        result.summary == json.loads((result.path / "summary.json").read_text())
        and result.summary["seed"] == 3
    )
    assert (
        Counted.updates == 1
        and [(cfg.seed, cfg.T) for [cfg] in Wide.made] == [(3, 1)]
        and len(Bare.begun) == 1
    )
    assert json.loads((result.path / "config.json").read_text())["task"] == f"{__name__}:Echo"
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("parts: ")]
    assert line == "parts: Counted (update), Wide (__init__), Bare (fill_population)"


@pytest.mark.parametrize(
    "parts",
    [
        dict(learner=Counted), dict(evolution=Bare), dict(population=lambda cfg: Wide(cfg)),
        dict(algorithm=partial(other_algorithm, ())),
    ],
)  # fmt: skip
def test_a_run_resumes_with_classes_of_its_own(tmp_path, parts):
    given = TINY | dict(task=Echo, out=tmp_path / "r")
    first = inspo.train(**given, **parts)
    assert inspo.train(**given, **parts, resume=True).instruction == first.instruction


def test_a_class_of_a_function_is_trained_and_loaded_by_the_class_alone(tmp_path):
    class Local(Echo):
        pass

    path = inspo.train(task=Local, **TINY, out=str(tmp_path / "r")).path
    with pytest.raises(Fault, match="<locals>.Local is not a class in test_python"):
        load_agent(path)
    with load_agent(path, task=Local, temperature=0.5, max_turns=1) as agent:
        assert agent.task.cfg.max_turns == 1 and agent.instruction == Echo.instruction
        known, new = agent.ask("test 1"), agent.ask("another word")
        assert (
            known.question == Question("test 1", "word 1") and new.question.text == "another word"
        )
        assert [tau.stop for tau in agent.play(agent.task.questions("test"))] and known.turns
    with pytest.raises(Fault, match="^--max_turn: .*nearest is max_turns"):
        load_agent(path, task=Local, max_turn=1)


def test_an_agent_answers_as_ask_py_does_and_its_servers_end_with_it(tmp_path, capsys):
    result = inspo.train(**SETTINGS | dict(T=1, mode="static", K_p=9), out=tmp_path / "r")
    q = SearchQA(configure()).questions("test")[0]
    agent = load_agent(result.path)
    url = agent.task.search.url
    tau = agent.ask(q.id)
    ask.main(["--run", str(result.path), q.id])
    said = capsys.readouterr().out
    assert f"asked   {q.text}" in said and (tau.prediction or "the end") in said
    agent.close()
    with pytest.raises(OSError):
        __import__("requests").get(f"{url}/health", timeout=5)


# ---- one call after another


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return inspo.train(**SETTINGS, out=tmp_path_factory.mktemp("runs") / "whole").path


def same(one: Path, other: Path) -> None:
    """As they are written by an undisturbed run, to the bit; but paid calls stay paid."""
    assert metrics(one) == metrics(other)
    for name in ("population.jsonl", "I_star.txt", "policy/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_second_call_computes_the_same_and_leaves_no_thread(whole, tmp_path):
    before = {thread.name for thread in threading.enumerate()}
    began = time.perf_counter()
    result = inspo.train(**SETTINGS, out=tmp_path / "again")
    # of this call, not of the process
    assert result.summary["seconds"] <= time.perf_counter() - began + 0.1
    same(result.path, whole)
    left = {
        thread for thread in threading.enumerate() if thread.name not in before | {"tqdm_monitor"}
    }
    # of a search, idle
    assert all(thread.daemon and "_send_batches" in thread.name for thread in left), left
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


def test_a_second_call_has_the_threads_it_asks_for(monkeypatch):
    monkeypatch.setattr(threads, "_chosen", "")
    monkeypatch.setattr(threads, "count_idle_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [configure(threads=n).threads for n in (1, 3, 2)] == [1, 3, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # now the user's
    assert configure(threads=1).threads == 4


def test_after_a_call_that_failed_another_one_works(tmp_path, monkeypatch):
    """In bfloat16, with a process group, in every place from where the ranks have met."""
    wide = TINY | dict(task=Echo, dtype="bfloat16")

    def fail(*args, **kwargs):
        raise Fault("it does not work today")

    for k, (owner, name) in enumerate(
        [
            (Run, "open"),
            (Echo, "start"),
            (Learner, "__init__"),
            (Policy, "rollout"),
            (Learner, "update"),
        ]
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(Fault, match="it does not work today"):
                inspo.train(**wide, out=tmp_path / f"r{k}")
        assert not torch.distributed.is_initialized()
    assert inspo.train(**wide, out=tmp_path / "r").summary["steps"] == 1


# ---- an interrupt


MOMENTS = {  # the call in which Ctrl-C comes
    "rollout": (Policy, "rollout", 3), "update": (Learner, "loss", 3), "optimizer": (Optimizer, "ask", 2),
    "evaluation": (Policy, "evaluate", 2), "save": (Policy, "save", 1), "export": (Policy, "export", 1),
    "start": (SearchQA, "start", 1), "comparison": (Policy, "evaluate", 4),
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


def test_in_a_notebook_whose_thread_has_a_loop_an_async_reward_is_awaited():
    import asyncio

    cfg = configure(model="world", reward=f"{__name__}:later")

    async def cell():
        return load_task(cfg, Echo).reward([PLAYED, PLAYED])

    assert asyncio.run(cell()) == [0.25, 0.25]
    assert load_task(cfg, Echo).reward([PLAYED]) == [0.25]


async def later(taus):
    return [0.25 for _ in taus]
