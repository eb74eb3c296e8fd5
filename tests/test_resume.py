"""A run that is stopped at its n-th call of the policy or the optimizer, for every n, and resumed: the same files.

Log, directory and Algorithm 1 are the real ones. The policy is a number that every update moves, so that hundreds of
runs take seconds; tests/test_stop.py and bench/chaos.py do the same to real ones.
"""

import hashlib
import io
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from plumbing import stop
from config import WORLD, Config
from tasks.questions import Question
from plumbing.faults import ToolDown
from journal.directory import RunDirectory, read_jsonl
from journal.log import Log
from journal.screen import Screen
from inspo import inspo
from reflect import Call, paid_calls
from rollout import Trajectory, Turn
from training import checkpoint
from models.model import load_tokenizer

D = {f"q{k}": Question(f"q{k}", f"Which {k}?", (f"gold {k}",), "s") for k in range(20)}
CFG = Config(
    batch=4, mini=4, G=2, T=7, K_p=1, K_e=2, T_e=6, D_B=3, N_P=3, rounds=2, eval_every=3, save_every=3, failures=2,
    instruction=str(Path(__file__).parent / "fixture" / "instruction.txt"), keep=2,
)  # fmt: skip

TOKENIZER = load_tokenizer(str(WORLD / "policy"))


class Calls:
    """Counts the calls of a run, and raises `fault` in the n-th."""

    def __init__(self, n: int = 0, fault: BaseException | None = None):
        self.n, self.fault, self.names = n, fault, []

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self.n:
            raise self.fault


class Policy:
    """One number; what it answers depends on it, on the question, the instruction and the purpose."""

    def __init__(self, calls: Calls):
        self.calls, self.weight, self.t, self.seconds = calls, 1.0, 0, defaultdict(float)
        search = SimpleNamespace(tag="search", plural="searches")
        self.worker = SimpleNamespace(tools=[search], engine=SimpleNamespace(unproven=0), tokenizer=TOKENIZER)
        self.memory = {}

    def rollout(self, t, purpose, jobs, temperature=None):
        self.calls(f"{t} {purpose}")
        self.seconds[purpose.split()[0]] += 0.1
        taus = []
        for k, job in enumerate(jobs):
            bits = hashlib.sha256(f"{self.weight} {t} {purpose} {k} {job.text} {job.question.id}".encode()).digest()
            answer = job.question.golds[0] if bits[0] < 100 else "nothing"
            tau = Trajectory(job.instruction, job.question, job.group, [1, 2], 1, [0, 1], [0.0, -1.0])
            tau.turns, tau.stop, tau.response, tau.prediction = [Turn(answer)], "answer", answer, answer
            taus.append(tau)
        return taus

    def update(self, t, taus):
        self.t = t
        self.weight += t * sum(tau.advantage * tau.group for tau in taus) + 1
        self.seconds["update"] += 0.1
        return {"loss": self.weight, "kl": 0.0}

    def save(self, path):
        return checkpoint.save({"w": self.weight}, path, 0, alone=True)

    def damage(self, path):
        return checkpoint.damage(path)

    def load(self, path, t):
        state = {"w": 0.0}
        checkpoint.load(state, path, alone=True)
        self.weight, self.t = state["w"], t

    def export(self, path):
        (path / "weights").write_text(str(self.weight))

    def reset(self):
        self.weight = 1.0

    def faults(self):
        return 0


class Optimizer:
    """Answers with the parent and a sentence of its own, unless a call has been paid for."""

    def __init__(self, calls: Calls, paid: dict):
        self.calls, self.paid = calls, paid

    def ask(self, prompt, when):
        if when in self.paid:
            return replace(self.paid[when], paid_before=True)
        self.calls(f"{when} ask")
        parent = prompt.split("<ins_0>")[1].split("</ins_0>")[0].strip()
        reply = "\n".join(f"<ins_{k}>{parent} Hint {when} {k}.</ins_{k}>" for k in (1, 2, 3))
        return Call(when, prompt, reply, 10, 20, 0.5, False)


def play(out: Path, calls: Calls, resume: bool) -> None:
    """A run in this process, ended as journal.start.prepare ends one."""
    run = RunDirectory.open(replace(CFG, out=str(out), resume=resume), "x")
    policy, optimizer = Policy(calls), Optimizer(calls, paid_calls(run.rows("reflections")))
    screen = Screen(CFG.T, Console(file=io.StringIO()))
    test = list(D.values())[:5]
    log = Log(replace(CFG, out=str(out), resume=resume), run, policy, test, test, screen, began=0.0)
    try:
        _, I_star = inspo(log.cfg, policy, optimizer, D, log)
        log.finish(I_star)
    except (stop.Stopped, ToolDown):
        log.rescue()
        raise
    finally:
        run.close()


def left(out: Path) -> dict[str, object]:
    rows = {name: read_jsonl(out / f"{name}.jsonl") for name in ("metrics", "population", "reflections")}
    rows["metrics"] = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows["metrics"]]
    rows["calls"] = sorted(row["call"]["key"] for row in rows["reflections"] if "call" in row)
    rows["reflections"] = [row for row in rows["reflections"] if "call" not in row]
    return rows | {name: (out / name).read_text() for name in ("I_star.txt", "policy/weights")}


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    monkeypatch.setattr("report.write", lambda runs, out: out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(files, names of all calls) of a run that nobody stops."""
    out, calls = tmp_path_factory.mktemp("runs") / "whole", Calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("report.write", lambda runs, out: out)
        play(out, calls, resume=False)
    return left(out), calls.names


def test_the_run_has_every_phase(whole):
    names = {name.split(" ", 1)[1].split()[0] for name in whole[1]}
    assert names == {"rollout", "verify", "evaluate", "r0", "r1"} or names == {"rollout", "verify", "evaluate", "r0"}
    assert any(row["event"] == "evolve" and len(row["P"]) > 1 for row in whole[0]["population"])


@pytest.mark.parametrize("fault", [stop.Stopped("stopped"), ToolDown("away")], ids=["stopped", "outage"])
def test_stopped_at_any_call_and_resumed_a_run_leaves_the_same(whole, tmp_path, fault):
    files, names = whole
    for n in range(1, len(names) + 1):
        out = tmp_path / f"r{n}"
        with pytest.raises(type(fault)):
            play(out, Calls(n, fault), resume=False)
        last = RunDirectory(out).checkpoints()
        done = int(names[n - 1].split()[0].lstrip("t")) - 1  # steps that were complete; no more than one is repeated
        assert done < 1 or (last and int(last[-1].name.split("-")[1]) >= done), names[n - 1]
        again = Calls()
        play(out, again, resume=True)
        assert left(out) == files, names[n - 1]
        assert len(again.names) <= len(names) - n + 3, names[n - 1]  # what was done is not done again


def test_stopped_at_every_call_again_and_again_a_run_still_ends_the_same(whole, tmp_path):
    """Each process dies at its second call or third, so that resumed steps are stopped too."""
    out, ended, n = tmp_path / "r", False, 0
    while not ended and n < 200:
        n += 1
        try:
            play(out, Calls(5 + n % 3, stop.Stopped("stopped")), resume=n > 1)
            ended = True
        except stop.Stopped:
            pass
    assert ended and n > 3 and left(out) == whole[0]
