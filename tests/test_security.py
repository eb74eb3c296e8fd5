"""What a model's folder, a server's address and a process of ours must not do or show."""

import json
import os
import shutil
from pathlib import Path

import pytest

from config import HERE, WORLD
from models.model import load_config, load_model, load_tokenizer, skeleton
from plumbing.faults import Fault
from plumbing.servers import Child
from retrieval.encoder import Encoder

# ---- a folder's own code


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """Makes a copy of the world's policy whose own code writes a file; whoever is asked whether to run it says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    path = shutil.copytree(WORLD / "policy", tmp_path / "policy")
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")

    def make(name, **changes):
        found = json.loads((path / name).read_text()) | changes
        (path / name).write_text(json.dumps(found))
        return str(path)

    yield make
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model, Encoder])
def test_an_unknown_family_s_code_is_not_run(with_code, load):
    with_code("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    auto_map = {name: "own.Own" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    path = with_code("config.json", model_type="unheard", auto_map=auto_map)
    with pytest.raises(Fault, match="code of its own") as fault:
        load(path)
    assert path in str(fault.value) and "\n" not in str(fault.value)


@pytest.mark.parametrize("load", [load_model, lambda path: skeleton(load_config(path))])
def test_a_known_family_s_code_for_a_causal_lm_is_not_run(with_code, load):
    path = with_code("config.json", model_type="t5", auto_map={"AutoModelForCausalLM": "own.Own"})
    with pytest.raises(Fault, match="code of its own"):
        load(path)


def test_a_known_family_needs_no_code(with_code):
    path = with_code("config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert load_model(path).config.model_type == load_config(str(WORLD / "policy")).model_type


# ---- the environment of what we start


def test_a_server_that_we_start_does_not_see_our_keys(tmp_path, monkeypatch):
    secrets = ("OPENAI_API_KEY", "JUDGE_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy")
    for name in secrets:
        monkeypatch.setenv(name, "s3cr3t-of-mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    search = [str(HERE / "retrieval_server.py"), "--corpus", str(WORLD / "corpus.jsonl")]
    for server in (["-m", "world.optimizer"], search):
        with Child(server, tmp_path / "log") as child:
            seen = dict(
                line.split("=", 1)
                for line in Path(f"/proc/{child._process.pid}/environ").read_text().split("\0") if "=" in line
            )  # fmt: skip
        assert "s3cr3t-of-mine" not in seen.values()
        assert seen["PATH"] == os.environ["PATH"] and seen["CUDA_VISIBLE_DEVICES"] == "7"
