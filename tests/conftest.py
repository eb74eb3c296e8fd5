"""Shared by all tests: no downloads, two threads, and two policies, the world's and a tiny one with
a BPE tokenizer."""

import gc
import os
import signal
import time
from types import SimpleNamespace

import pytest
from json_server import json_servers

from config import WORLD
from plumbing.servers import Child

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
gc.disable()  # until all that stays is imported
# A script's background job ignores Ctrl-C, with nohup a hang-up, too, and so would the programs
# that the tests signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, lambda *_: None)  # ignored here, but not in programs that are started
# A suite that is killed tears its fixtures down, as after a Ctrl-C: they end the servers that they
# started.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        return  # its workers run the tests: torch takes seconds to import
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it runs on the CPU
    # one in each of two parallel workers
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


def pytest_collection_finish():
    """What is imported by now is not searched for garbage, which runs collect after each step."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()  # extension modules look for leaks as they leave


def load(path):
    # here: it imports transformers, which takes seconds, and few tests need it

    from models.model import load_model, load_tokenizer

    return load_model(path), load_tokenizer(path)


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory):
    """Runs that the tests start are not remembered in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def serve():
    """Starts HTTP servers with a script each (json_server.py); they stop with the test."""
    with json_servers() as start:
        yield start


@pytest.fixture(scope="session")
def retriever(tmp_path_factory):
    """The address of a search server with the world's passages."""
    log, corpus = tmp_path_factory.mktemp("server") / "log", str(WORLD / "corpus.jsonl")
    with Child(["-m", "retrieval_server", "--corpus", corpus], log) as child:
        yield child.url


@pytest.fixture
def waits(monkeypatch):
    """The seconds that clients would have waited before another attempt; they do not wait here."""
    waited = []
    stub = SimpleNamespace(sleep=waited.append, time=time.time)
    monkeypatch.setattr("urllib3.util.retry.time", stub)
    return waited


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(tiny_path):
    """A random policy with Qwen2.5's byte-level BPE: a tag is many tokens."""
    return load(tiny_path)


@pytest.fixture(scope="module")
def world():
    """The trained policy of the world, with its word-level tokenizer: a tag is one token."""
    return load(str(WORLD / "policy"))


@pytest.fixture(scope="module", params=["world", "tiny"])
def policy(request):
    return request.getfixturevalue(request.param)
