"""What the tests share: nothing is fetched, two threads, and the two policies: the world's and a tiny BPE one."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels run on the CPU

from config import WORLD
from training.model import load_policy

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    from tiny_model import make_tiny_model  # here: transformers takes seconds to import, and few tests need it

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(tiny_path):
    """A random policy with Qwen2.5's byte-level BPE: a tag is many tokens."""
    return load_policy(tiny_path, "cpu")


@pytest.fixture(scope="module")
def world():
    """The trained policy of the world, with its word-level tokenizer: a tag is one token."""
    return load_policy(str(WORLD / "policy"), "cpu")


@pytest.fixture(scope="module", params=["world", "tiny"])
def policy(request):
    return request.getfixturevalue(request.param)
