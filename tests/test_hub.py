"""What a run fetches: files of the hub once, the search server that is there, OpenAI; and what it
says is missing."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from hub_server import hub_of
from huggingface_hub import constants

import evaluate
import inspo
from config import HERE, SEARCH_R1, WORLD, Config
from plumbing import hub
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from tasks import search_qa
from tasks.search_qa import SearchQA, load_questions

FILE = "datasets/own/set/train.jsonl"
LINE = '{"question": "who?", "golden_answers": ["x"]}\n'


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def hubs(monkeypatch, tmp_path):
    """Yields a hub with one data set, and a cache of its own that is empty."""
    put(tmp_path / "hub" / FILE, LINE)
    with hub_of(tmp_path / "hub") as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.out_of_reach.cache_clear()
        yield server
    hub.out_of_reach.cache_clear()


@pytest.mark.parametrize("at", ["", "@main", "@refs/pr/3", "@refs%2Fpr%2F3"])
def test_a_file_of_the_hub_is_fetched_once(hubs, monkeypatch, at):
    name = f"hf://datasets/own/set{at}/train.jsonl"
    assert hub.find_on_disk(name) is None
    assert [q.text for q in load_questions(name)] == ["who?"]
    assert hub.find_on_disk(name).read_text() == LINE and hubs.fetched() == [FILE]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what is there needs no hub
    assert load_questions(name)[0].golds == ("x",) and hubs.fetched() == [FILE]


def test_a_file_that_is_not_there_is_a_line(hubs):
    with pytest.raises(Fault, match="the hub does not give it [^\n]*give a file of your own"):
        load_questions("hf://datasets/own/set/nothing.jsonl")


def test_a_hub_out_of_reach_is_asked_once(hubs, monkeypatch):
    head = Mock(side_effect=requests.ConnectionError)
    monkeypatch.setattr(requests, "head", head)
    for file in "ab":
        with pytest.raises(
            Fault, match=f"/{file}: the hub cannot be reached .*{hubs.url}: ConnectionError"
        ):
            hub.fetch_file(f"hf://datasets/own/set/{file}")
    head.assert_called_once()


def test_evaluate_s_benchmarks_are_fetched_once(hubs, tmp_path):
    folder = tmp_path / "hub" / evaluate.HUB.removeprefix("hf://")
    put(folder / "nq/test.jsonl", LINE)
    put(folder / "musique/dev.jsonl", f"{LINE}\n")  # which has no test split
    for name in ("nq", "nq", "musique"):
        found = evaluate.collect_questions(SearchQA(Config()), [name], 0, 0)
        assert [q.source for q in found[name]] == [name]
    assert len(hubs.fetched()) == 2


# ---- what is searched


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Nothing listens where a search server is expected."""
    monkeypatch.setattr(search_qa, "DEFAULT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_server_on_the_usual_port_is_found_unless_a_flag_names_another(
    monkeypatch, elsewhere, serve
):
    usual = serve({"result": [[{"document": {"contents": "A\nb"}, "score": 1.0}]]})
    monkeypatch.setattr(search_qa, "DEFAULT", usual.url)
    assert search_qa.choose_source(Config()).retriever == usual.url
    given = Config(retriever="http://127.0.0.1:9"), Config(corpus=str(WORLD / "corpus.jsonl"))
    assert all(search_qa.choose_source(cfg) is cfg for cfg in given) and len(usual.requests) == 1
    other = serve((404, {}, "vllm serve has no /retrieve"))
    monkeypatch.setattr(search_qa, "DEFAULT", other.url)
    with pytest.raises(Fault, match="nothing to search"):
        search_qa.choose_source(Config())


def test_a_run_waits_for_its_server_as_long_as_its_corpus_takes(tmp_path):
    """Half a gigabyte took 50 s on this project's machine (docs/LOG.md), HotpotQA's passages are about
    as much."""
    with open(tmp_path / "passages.jsonl", "wb") as file:
        file.truncate(500_000_000)  # takes no disk
    serve = Mock(return_value="http://127.0.0.1:1")
    cfg = Config(corpus=str(tmp_path / "passages.jsonl"))
    assert search_qa.start_server(cfg, serve)[0] == "http://127.0.0.1:1"
    assert serve.call_args.args[2:] == ("--corpus", cfg.corpus)
    assert 300 < serve.call_args.kwargs["deadline"] < 1800


# ---- what is missing


def test_a_preset_says_what_is_missing(tmp_path, monkeypatch, capsys):
    """No hub is here, so it has no data."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        inspo.main(["--model", "qwen2.5-3b"])
    assert capsys.readouterr().out == "" and not (tmp_path / "runs").exists()
    assert stop.value.code.startswith(f"--train {SEARCH_R1}/train.parquet: the hub cannot")
    assert "\n" not in stop.value.code


PAPER = "--preset qwen2.5-3b --model own/policy"
SMALL = (
    "--T 1 --batch 4 --G 2 --eval_n 4 --max_prompt 480 --max_response 48 --max_observation 100 --N_P 2"
    " --keep 1 --engine torch --device cpu --optimizer_model scripted"
)


@pytest.mark.ranks
def test_the_paper_s_command_fetches_what_it_needs_once(tmp_path):
    """torchrun inspo.py --model PRESET: questions and model from a hub; they are the world's."""
    files = tmp_path / "hub"
    for name in ("train", "test"):
        rows = [row | {"data_source": "nq"} for row in read_jsonl(WORLD / f"{name}.jsonl")]
        put(path := files / "datasets/PeterJinGo/nq_hotpotqa_train" / f"{name}.parquet", "")
        pq.write_table(pa.Table.from_pylist(rows).drop("id"), path)
    (files / "own").mkdir()
    (files / "own" / "policy").symlink_to(WORLD / "policy")
    argv = ["-m", "torch.distributed.run", "--nproc_per_node=2", str(HERE / "inspo.py")]
    argv += f"{PAPER} {SMALL} --corpus {WORLD}/corpus.jsonl --out run".split()
    argv += ["--instruction", str(WORLD / "instruction.txt")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "HF_"))}
    env = kept | {"PYTHONPATH": str(HERE), "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    with hub_of(files) as served:
        env["HF_ENDPOINT"] = served.url
        subprocess.run([sys.executable, *argv], cwd=tmp_path, env=env, check=True)
        large = [path for path in served.fetched() if path.endswith((".parquet", ".safetensors"))]
        # questions to train and to test on, the policy
        assert len(large) == len(set(large)) == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "em/nq" in next(iter(summary["held_out"].values()))
