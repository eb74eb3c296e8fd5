"""Random damage to run directories and checkpoints: a resumed run, an export and a loaded policy
end in a Fault or are right. FUZZ=100000 (`make fuzz`) tries 10^4 directories; without it a short
seed of each is part of `make test`."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from test_directory import checkpoints_of

from config import WORLD, Config, read_config
from evaluation.checkpoints import export_checkpoint
from journal.directory import RunDirectory
from models.model import load_model, load_policy
from page.html import write_page
from plumbing import checkpoint
from plumbing.faults import Fault
from population import Population, ReplayBuffer

N = int(os.environ.get("FUZZ", 0)) // 10
STEPS = (3, 6, 9)


def tensors(t: int) -> dict:
    return {
        "model": {"w": torch.full((16, 16), float(t))},
        "optimizer": {"lr": float(t), "betas": (0.9, 0.999)},
    }


def state(t: int) -> dict:
    I = {"id": 0, "text": "Search.", "parent": None, "born": 0, "rewards": [0.5]}
    item = {
        "t": t,
        "instruction": 0,
        "question": "q",
        "text": "x",
        "golds": ["a"],
        "reward": 0.0,
        "failed": True,
    }
    return {
        "population": {"family": [I], "active": [0]},
        "buffer": {"items": [item]},
        "ledger": {},
        "start": {"em": 0.1},
        "seconds": 1.0,
        "memory": {},
        "metrics": ["em"],
        "t": t,
        "ended": True,
    }


def save(run: RunDirectory, t: int, weights: dict) -> None:
    """Writes a checkpoint after step t."""
    checkpoints = checkpoints_of(run)
    checkpoints.last = state(t) | {"run": run.id}
    checkpoints.policy.t, checkpoints.policy.learner.state_dict = t, lambda: weights
    checkpoints.save()
    checkpoints.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's directory with everything that a resumed run reads, three checkpoints of it."""
    path = tmp_path_factory.mktemp("fuzz") / "r"
    run = RunDirectory.open(Config(out=str(path), keep=3), "x")
    for t in range(10):
        row = {
            "reward": 0.5,
            "w_best": 0.5,
            "searches": 1.0,
            "w": {"0": 0.5},
            "P": 1,
            "valid/em": t / 10,
        }
        run.append("metrics", {"t": t} | (row if t else {"test/em": 0.1, "metrics": ["em"]}))
        run.append(
            "population",
            {"t": t, "event": "prune", "text": "", "P": [{"id": 0, "parent": None, "born": 0}]},
        )
        run.append("reflections", {"t": t, "accepted": ["a"]})
        if t in STEPS:
            save(run, t, tensors(t))
    run.close()
    return path


def harm(rng: random.Random, root: Path, files: list[Path]) -> str:
    """Damages one file under `root`; returns how."""
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    how = rng.choice(
        ["cut", "empty", "flip", "flips", "noise", "swap", "remove", "insert", "directory"]
    )
    place = rng.randrange(len(content) + 1)
    if how == "cut":
        content = content[:place]
    elif how == "empty":
        content = bytearray()
    elif how in ("flip", "flips") and content:
        for _ in range(1 if how == "flip" else rng.randint(2, 40)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "noise":
        content[place : place + 256] = rng.randbytes(256)
    elif how == "swap":
        content = bytearray(rng.choice(files).read_bytes())
    elif how == "insert":
        lines = [b"[]", b"7", b'{"t": 2}', b'{"t": NaN}', b"[" * 9999]
        content[place:place] = rng.choice(
            [*(b"\n" + line + b"\n" for line in lines), b"\x00", b"\xff\xfe"]
        )
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how != "remove":
        path.write_bytes(content)
    return f"{how} {path.relative_to(root)}"


@contextlib.contextmanager
def right_or_refused(done):
    """What is done inside may end in a Fault of one line, and in nothing else."""
    try:
        yield
    except Fault as e:
        assert "\n" not in str(e), done
    except Exception as e:
        raise AssertionError(str(done)) from e


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.name != ".lock"]


def resume(path: Path) -> int | None:
    """What a resumed run reads, in its order; returns the step that it would resume from, None for
    the start."""
    read_config(path)
    run = RunDirectory.open(Config(out=str(path), resume=True, keep=3), "x")
    try:
        found = run.rewind(lambda text: None)
        if not found:
            return None
        loaded = tensors(0)
        checkpoint.load(loaded, found[0], alone=True)
        P, B = Population(Config()), ReplayBuffer(9)
        P.load_state_dict(found[1]["population"])
        B.load_state_dict(found[1]["buffer"])
        t = found[1]["t"]
        assert torch.equal(loaded["model"]["w"], tensors(t)["model"]["w"])
        assert loaded["optimizer"] == tensors(t)["optimizer"]
        assert P.family[0].text == "Search." and B.items[0].t == t
        assert all(row["t"] <= t for row in run.rows("metrics"))
        run.append("metrics", {"t": t + 1})
        save(run, t + 1, tensors(t + 1))
        return t
    finally:
        run.close()


def damaged_directories(whole: Path, tmp_path: Path, seeds: range) -> dict[str, int]:
    ends: dict[str, int] = {}
    for seed in seeds:
        rng, path = random.Random(seed), tmp_path / "r"
        shutil.copytree(whole, path)
        done = [harm(rng, path, files_of(path)) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
        if rng.random() < 0.1:
            victim = rng.choice(list((path / "checkpoints").iterdir()))
            shutil.rmtree(victim)
            victim.mkdir()
            done.append(f"emptied {victim.name}")
        end = "a fault"
        with right_or_refused((seed, done)):
            end = f"resumed from {resume(path)}"
        ends[end] = ends.get(end, 0) + 1
        shutil.rmtree(path)
    return ends


def test_a_damaged_run_directory_resumes_right_or_says_why_not(whole, tmp_path):
    ends = damaged_directories(whole, tmp_path, range(N or 20))
    print(ends)
    assert {"a fault", "resumed from 9", "resumed from 6"} <= set(ends), ends


def harmed(whole: Path, path: Path, seed: int) -> str:
    shutil.copytree(whole, path)
    return harm(random.Random(seed), path, files_of(path))


@pytest.mark.skipif(not N, reason="make fuzz")
def test_the_page_of_a_damaged_run_is_written_or_refused(whole, tmp_path):
    for seed in range(N // 100):
        done = harmed(whole, tmp_path / "r", seed)
        with right_or_refused((seed, done)):
            write_page([tmp_path / "r"], tmp_path / "page.html")
        shutil.rmtree(tmp_path / "r")


@pytest.mark.skipif(not N, reason="make fuzz")
def test_a_damaged_run_is_exported_right_or_refused(tmp_path, capsys):
    """A run of the world that has not trained: its checkpoint holds the weights of
    world/files/policy."""
    model, path = load_model(str(WORLD / "policy")), tmp_path / "whole"
    run = RunDirectory.open(Config(out=str(path), model=str(WORLD / "policy"), lr=0.0), "x")
    weights = {"model": dict(model.state_dict())}
    save(run, 3, weights)
    run.close()
    faults = 0
    for seed in range(N // 100):
        done = harmed(path, tmp_path / "r", seed)
        faults += 1
        with right_or_refused((seed, done)):
            export_checkpoint(tmp_path / "r", tmp_path / "to")
            exported = load_model(str(tmp_path / "to")).state_dict()
            assert all(torch.equal(exported[name], w) for name, w in weights["model"].items())
            faults -= 1
        shutil.rmtree(tmp_path / "r")
        shutil.rmtree(tmp_path / "to", ignore_errors=True)
    assert faults


def test_a_damaged_policy_is_loaded_or_refused(tmp_path):
    """A bit that flips in a weight is not noticed there: a Hugging Face directory has no
    digests."""
    for seed in range(N // 50 or 4):
        done = harmed(WORLD / "policy", tmp_path / "p", seed)
        with right_or_refused((seed, done)):
            load_policy(str(tmp_path / "p"), ("</search>",))
        shutil.rmtree(tmp_path / "p")


def test_config_json_is_read_right_or_refused(whole, tmp_path):
    rng, content = random.Random(0), (whole / "config.json").read_text()
    for _ in range(N or 100):
        knobs = json.loads(content)
        knobs[rng.choice(list(knobs))] = rng.choice(
            [None, [], {}, "x", 1.5, True, -1, 10**400, "NaN"]
        )
        (tmp_path / "config.json").write_text(json.dumps(knobs))
        with right_or_refused(knobs):
            assert isinstance(read_config(tmp_path), Config)
