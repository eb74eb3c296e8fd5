"""A run that is stopped at its n-th call of policy, optimizer or judge, for every n, and resumed:
the same files.

Log, directory and Algorithm 1 are the real ones. The policy is a number that every update moves, so
that hundreds of runs take seconds; tests/test_stop.py and test_ranks_runs.py do the same to real ones.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import statistics
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import WORLD, Config
from inspo import Evolution, compare, inspo
from log import Log
from models.model import load_tokenizer
from plumbing import stop
from plumbing.faults import Fault, Outage
from plumbing.files import read_jsonl
from population import Population
from reflect import Call
from run import Checkpoints, Run, open_run, step_of
from tasks import Question, Task, Trajectory, Turn
from training import policy
from training.ranks import Ranks

QUESTIONS = [
    Question(f"q{k}", f"Which {k}?", source=f"s{k // 7}", data=f"right {k}") for k in range(20)
]
FIRST = "Think in <think> </think>, answer in <answer> </answer>."
CFG = Config(
    batch=4,
    mini_batch=8,
    G=2,
    T=7,
    K_p=1,
    K_e=2,
    T_e=6,
    D_B=3,
    N_P=3,
    rounds=2,
    eval_every=2,
    save_every=3,
    failures=2,
    keep=2,
)
TOKENIZER = load_tokenizer(str(WORLD / "policy"))
AWAY = "the judge at http://judge:1 does not answer"


class Calls:
    """Counts the calls of a run, and raises `fault` in the n-th."""

    def __init__(self, n: int = 0, fault: BaseException | None = None):
        self.n, self.fault, self.names = n, fault, []

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self.n:
            raise self.fault

    def look(self, place: str) -> None:
        """Is told of places besides calls, at which a process may be killed."""


class Judged(Task):
    """Its rewards, -1 or 3, come from a judge that may be away; nobody has gold answers."""

    tools = ()
    instruction = FIRST
    passing_reward = 3.0

    def __init__(self, cfg, calls):
        super().__init__(cfg)
        self.calls, self.asked = calls, ""

    def questions(self, split):
        return {"train": QUESTIONS, "valid": QUESTIONS[:3], "test": QUESTIONS[5:10]}[split]

    def reward(self, taus):
        self.calls(f"{self.asked} judge")
        return [3.0 if tau.prediction == tau.question.data else -1.0 for tau in taus]

    def metrics(self, tau):
        return {"mark": tau.reward / 2, "letters": float(len(tau.response))}


class Policy:
    """One number; what it answers depends on it, on the question, the instruction and the purpose.
    It saves itself as the real one does."""

    tokenizer = TOKENIZER
    ranks_ready = shared = synced = True
    sleep, evaluate, load = lambda self: None, policy.Policy.evaluate, policy.Policy.load

    def __init__(self, calls: Calls, task: Judged):
        self.calls = calls
        self.task = task
        self.cfg = task.cfg
        self.t = 0
        self.ranks = Ranks("cpu", 1)
        self.seconds = {"rollout": 0.0}
        self.w = torch.ones((), dtype=torch.float64)
        self.learner = SimpleNamespace(
            remembered={},
            set_advantages=self.set_advantages,
            model=torch.nn.Linear(1, 1),
            state_dict=lambda: {"model.w": self.w},
        )

    @property
    def weight(self) -> float:
        return float(self.w)

    def set_advantages(self, taus):
        memory = self.learner.remembered
        for tau in taus:
            tau.advantage = tau.reward - memory.get(tau.question.id, 0.0)
            memory[tau.question.id] = tau.reward

    def rollout(self, t, purpose, jobs, temperature=None):
        self.task.asked = f"{t} {purpose}"
        self.calls(self.task.asked)
        taus = []
        for k, job in enumerate(jobs):
            bits = hashlib.sha256(
                f"{self.weight} {t} {purpose} {k} {job.instruction} {job.question.id}".encode()
            ).digest()
            answer = job.question.data if bits[0] < 100 else "nothing"
            tau = Trajectory(
                job.instruction_id, job.question, job.group, [1, 2], 1, [0, 1], [0.0, -1.0]
            )
            tau.turns, tau.stop, tau.response, tau.prediction = (
                [Turn(answer)],
                "answer",
                answer,
                answer,
            )
            taus.append(tau)
        return taus

    def update(self, t, taus):
        self.t = t
        self.calls.look(f"{t} update")
        self.w += t * sum(tau.advantage * tau.group for tau in taus) + 1
        return {"loss": self.weight, "kl": 0.0}

    def measure_speed(self, taus):
        return {"time/rollout": 0.1, "time/update": 0.1}

    def save(self, path):
        self.calls.look(f"write {path.name}")
        policy.Policy.save(self, path)
        wait([self.written])
        self.calls.look(f"wrote {path.name}")

    def export(self, path):
        (path / "weights").write_text(str(self.weight))

    def reset(self):
        self.w.fill_(1.0)
        self.t = -1


class Optimizer:
    """Answers with the parent and a sentence of its own."""

    def __init__(self, calls: Calls):
        self.calls = calls

    def ask(self, prompt):
        t = self.calls.names[-1].split()[0].lstrip("t") if self.calls.names else "0"
        self.calls(f"{t} ask")
        parent = prompt.split("<ins_0>")[1].split("</ins_0>")[0].strip()
        mark = hashlib.sha256(prompt.encode()).hexdigest()[:6]
        reply = "\n".join(f"<ins_{k}>{parent} Hint {mark} {k}.</ins_{k}>" for k in (1, 2, 3))
        return Call(prompt, reply, 10, 20, 0.5)


def play(
    out: Path, calls: Calls, config=CFG, population=Population, evolution=Evolution, **knobs
) -> None:
    """A run in this process, or the rest of one, as inspo.train plays it."""
    cfg = replace(config, out=str(out), resume=(out / "config.json").exists(), **knobs)
    task = Judged(cfg, calls)
    with stop.listening(), open_run(cfg) as run:
        policy, optimizer = Policy(calls, task), Optimizer(calls)
        log = Log(cfg, run, task, time.perf_counter())
        evolving = evolution(cfg, task, optimizer, population(cfg), log)
        checkpoints = Checkpoints(cfg, run, policy, evolving.P, evolving.B)
        with checkpoints.save_on_failure():
            _, I_star = inspo(cfg, task, policy, evolving, checkpoints, log)
            checkpoints.export(I_star)
            compare(cfg.T, policy, evolving.P.family[0], I_star, log)
            log.finish(evolving.P, I_star)


def left(out: Path) -> dict[str, object]:
    rows = {
        name: read_jsonl(out / f"{name}.jsonl") for name in ("metrics", "population", "reflections")
    }
    rows["metrics"] = [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in rows["metrics"]
    ]
    rows["summary"] = json.loads((out / "summary.json").read_text()) | {"seconds": 0}
    return rows | {name: (out / name).read_text() for name in ("I_star.txt", "policy/weights")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(files, names of all calls, directory, standard output) of a run that nobody stops."""
    out, calls = tmp_path_factory.mktemp("runs") / "whole", Calls()
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        play(out, calls)
    return left(out), calls.names, out, stdout.getvalue()


def test_everything_is_measured_in_the_task_s_own_metrics(whole):
    files, _, out, stdout = whole
    rows, summary = files["metrics"], files["summary"]
    assert rows[0]["metrics"] == summary["metrics"] == ["mark", "letters"]
    valid = {row["t"]: row["valid/mark"] for row in rows if "valid/mark" in row}
    assert valid.keys() == {row["t"] for row in rows if "test/letters/s0" in row} - {0} == {2, 4, 6}
    assert all(row["mark"] == row["reward"] / 2 for row in rows[1:])
    assert step_of(Run(out).best()) == max(valid, key=lambda t: (valid[t], -t))
    for name, means in summary["held_out"].items():
        file = f"test-{name.replace(', ', '-').replace(' ', '_')}.jsonl.gz"
        with gzip.open(out / "trajectories" / file, "rt") as f:
            kept = [json.loads(line) for line in f]
        for column, marks in {
            "mark": [row["metrics"]["mark"] for row in kept],
            "mark/s1": [row["metrics"]["mark"] for row in kept if row["source"] == "s1"],
        }.items():
            assert means[column] == pytest.approx(statistics.fmean(marks))
        cells = [name, *(f"{means[k]:.3f}" for k in ("mark", "letters"))]
        assert " ".join(cells) in re.sub(" +", " ", stdout)
    assert not re.search(r"\b(EM|F1|em|f1|searches)\b", stdout)
    # nobody has gold answers
    prompts = [row["call"]["prompt"] for row in files["reflections"] if "call" in row]
    assert any("Response: Question: Which" in prompt for prompt in prompts)
    assert not any("Correct answer" in prompt for prompt in prompts)


def test_seconds_add_up_over_all_resumes_of_a_run(tmp_path):
    """Every process counts from its own start, and goes on from what the last row of a step
    says."""
    with pytest.raises(Fault):
        play(tmp_path / "r", Calls(30, stop.Stopped("stopped")))
    last = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    # of a step that a killed process has done
    with open(tmp_path / "r" / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.write(json.dumps({"t": last["t"] + 1, "time/total": last["time/total"] + 1000}) + "\n")
    began = time.perf_counter()
    play(tmp_path / "r", Calls())
    seconds = json.loads((tmp_path / "r" / "summary.json").read_text())["seconds"]
    # it is rounded
    assert 0 <= seconds + 0.05 - last["time/total"] - 1000 <= time.perf_counter() - began + 0.1


# ---- every death

# Steps 1 and 2 prune and evolve, and step 2 is evaluated; step 3 is the last one.
STEPS = dict(
    batch=2,
    mini_batch=4,
    T=3,
    K_p=1,
    T_e=3,
    K_e=1,
    D_B=2,
    N_P=3,
    rounds=1,
    eval_every=2,
    save_every=9,
    seed=4,
)


class Deaths(Calls):
    """Plays runs, and keeps the directory that each death leaves: a kill at any place, or a fault
    in the n-th call."""

    def __init__(self, folder: Path, **kind):
        self.folder, self.kind, self.out = folder, kind, folder / "run"
        self.found: dict[str, tuple[str, Path]] = {}
        self.watched = False

    def live(self, source: Path | None, n: int = 0, fault: BaseException | None = None) -> None:
        """Plays the rest of the run in `source`."""
        super().__init__(n, fault)
        shutil.rmtree(self.out, ignore_errors=True)
        if source:
            shutil.copytree(source, self.out)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            play(self.out, self, **self.kind)

    def __call__(self, name: str) -> None:
        self.look(name)
        super().__call__(name)

    def look(self, place: str) -> None:
        if self.watched and self.out.exists():
            self.keep(f"killed at {place}")

    def keep(self, death: str) -> None:
        """Copies the directory, if none is known with the same rows and checkpoints."""
        files = sorted([*self.out.glob("*.jsonl"), *self.out.glob("checkpoints/**/*")])
        texts = [file.read_bytes() if file.suffix in (".jsonl", ".pt") else b"" for file in files]
        key = hashlib.sha256(b"".join([*map(bytes, files), *texts])).hexdigest()
        if key not in self.found:
            copy = shutil.copytree(self.out, self.folder / f"{time.monotonic_ns()}")
            self.found[key] = death, copy


def deaths_of(tmp_path, monkeypatch, **kind) -> Deaths:
    """Returns the Deaths of runs in which no clock and no thread makes a difference."""
    monkeypatch.setattr("log.perf_counter", lambda: 0.0)
    monkeypatch.setattr(Run, "write_trajectories", lambda *args: None)
    monkeypatch.setattr("run.ThreadPoolExecutor", Inline)
    deaths = Deaths(tmp_path, **kind)

    def watched(function):
        def call(*args):
            done = function(*args)
            deaths.look(f"{function.__name__} {args[1]}")
            return done

        return call

    monkeypatch.setattr(Run, "append", watched(Run.append))
    monkeypatch.setattr("os.replace", watched(os.replace))
    return deaths


class Inline:
    """A thread that has always done its work already."""

    def __init__(self, threads: int):
        pass

    def submit(self, function, *args) -> Future:
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def shutdown(self, wait):
        pass


def check_deaths(deaths: Deaths, every: int) -> None:
    """Asserts that after a death, of which one in `every` is tried, a run leaves what it leaves
    undisturbed."""
    deaths.watched = True
    deaths.live(None)
    deaths.watched, whole = False, left(deaths.out)
    for n, name in enumerate(deaths.names.copy(), 1):
        # a judge is asked right after rollouts
        stops = [stop.Stopped("stopped"), KeyboardInterrupt()]
        for fault in [Outage(AWAY)] if "judge" in name else stops:
            with contextlib.suppress(SystemExit, Fault, KeyboardInterrupt):
                deaths.live(None, n, fault)
            if deaths.out.exists():
                deaths.keep(f"{fault!r} at {name}")
    found = list(deaths.found.values())
    assert len(found) > 20
    for death, source in found[every // 2 :: every]:
        deaths.live(source)
        assert left(deaths.out) == whole, death


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_after_any_death_a_run_ends_the_same(tmp_path, monkeypatch, every):
    check_deaths(deaths_of(tmp_path, monkeypatch, **STEPS), every)


def test_without_room_for_a_copy_training_waits_until_a_checkpoint_is_written(
    tmp_path, monkeypatch
):
    """What is written is no copy then: a slow disk would get the weights of a later step."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mine = Policy(Calls(), Judged(CFG, Calls()))
    mine.learner.model = torch.nn.Linear(10, 80, bias=False)
    slow = threading.Event()
    monkeypatch.setattr(policy.dcp, "save", lambda *_, **__: slow.wait(60))
    # 4 on this node,
    mine.ranks = SimpleNamespace(
        rank=0, size=8, broadcast=lambda x=None: x, gather=lambda x: [x], grouped=False, saves=None
    )
    # and so half of the bytes of 800 weights and of a file
    whole = 12 * 800 * (1 + 1 / policy.FILES)
    for free, copied in ((0.55 * whole / 0.8, True), (0.45 * whole / 0.8, False)):
        monkeypatch.setattr(
            policy.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free)
        )
        slow.clear() if copied else slow.set()
        policy.Policy.save(mine, tmp_path / f"step-{copied}")
        assert mine.written.done() is not copied
        slow.set()
        mine.written.result()
