"""The real model passes through its doors: vLLM, LoRA, plain transformers, demonstrations.

`make test-real` fetches the model first. Everything is small: a question a step, two steps, turns
of 24 tokens.
"""

import gzip
import json
import random
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from found_search import Found
from test_cold_start import Says, same
from test_inspo import run_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import export
from config import FACTS, PRESETS, SMOLLM, Config
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine, vllm_version
from extras.cold_start import encode_row
from models.model import load_policy, weights
from plumbing.files import read_jsonl
from rollout import rollout
from tasks import Job, Question
from tasks.search_qa import SearchQA, em
from tasks.tools import encode

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (SMOLLM / "source.json").is_file(), reason=f"{SMOLLM} holds no model: make test-real"
    ),
]
SMALL = dict(max_turns=1, max_response=24, temperature=0.5)
CFG = Config(**PRESETS["smollm2-135m"] | SMALL)
FLAGS = [
    "--model",
    "smollm2-135m",
    "--task",
    f"{Path(__file__).stem}:Shown",
    "--mode",
    "static",
    "--dtype",
    "float32",
]
FLAGS += (
    "--T 2 --batch 1 --G 2 --eval_n 2 --max_turns 1 --max_response 24 --temperature 0.5".split()
)
INSTRUCTION = "Search, then answer."
ASKED = ("train-1", "train-732")  # on Aydūn and Kujang-ŭp; ŭ is two tokens
SHOWN = (
    "<search> Lima </search>\n\n<information>Doc 1(Title: Lima) Lima is a city in Peru.</information>\n\n"
    "<search> Peru </search>\n\n<information>Doc 1(Title: Peru) The currency of Peru is the sol.</information>\n\n"
    "<answer> sol </answer>"
)


class Shown(SearchQA):
    """Shows a conversation before each question: without a cold start the model searches only where
    it saw how.

    Every letter of a response is worth a little, so that hardly two trajectories have the same
    reward.
    """

    def prompt(self, instruction, question):
        first = Question("shown", "Which currency is used in Lima?")
        asked, then = (super(Shown, self).prompt(instruction, q) for q in (first, question))
        return [*asked, {"role": "assistant", "content": SHOWN}, *then]

    def reward(self, taus):
        return [em(tau.prediction, tau.question.golds) + len(tau.response) / 1000 for tau in taus]


TASK = Shown(CFG)
STOP = TASK.make_format().stop_strings()


@pytest.fixture(scope="module")
def real():
    """(model, tokenizer)"""
    return load_policy(str(SMOLLM))


def train(folder, lora_rank):
    """Returns the directory of a run with adapters of this rank; 0: without."""
    asked = [row for row in read_jsonl(FACTS / "train.jsonl") if row["id"] in ASKED]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "instruction.txt").write_text(INSTRUCTION)
    flags = [*FLAGS, "--out", str(folder / "run"), "--lora_rank", str(lora_rank)]
    flags += ["--train", str(folder / "train.jsonl")]
    flags += ["--instruction", str(folder / "instruction.txt")]
    for name in ("valid", "test", "corpus"):
        flags += [f"--{name}", str(FACTS / f"{name}.jsonl")]
    code, _, stderr = run_here(*flags)
    assert code == 0, stderr
    return folder / "run"


# rows of a run's last evaluation, which is greedy
TRAINED = "test-trained_policy-first_instruction"


def stored(run, name):
    with gzip.open(run / "trajectories" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def agree(model, context, mine, theirs):
    """Asserts that two greedy turns are the same, up to a place where two tokens are equally likely
    to rounding."""
    if mine != theirs:
        k = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        assert k is not None, (mine, theirs)  # one goes on where the other ends
        logps = torch.log_softmax(model(torch.tensor([context + mine[:k]])).logits[0, -1], -1)
        assert abs(logps[mine[k]] - logps[theirs[k]]) < 1e-3, (mine, theirs)


# ---- what a run leaves, in plain transformers


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_plain_transformers_say_what_the_trained_policy_said(lora_rank, tmp_path):
    run = train(tmp_path, lora_rank)
    export.main([str(run), "--out", str(tmp_path / "exported")])
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        kept = [(path / name).read_bytes() for path in (tmp_path / "exported", run / "policy")]
        assert kept[0] == kept[1], name
    tokenizer = AutoTokenizer.from_pretrained(run / "policy")
    models = [AutoModelForCausalLM.from_pretrained(run / "policy", dtype=torch.float32)]
    engine = TorchEngine(*load_policy(str(run / "policy")), STOP)
    known = {q.id: q for q in TASK.questions("test")}
    for row in stored(run, TRAINED):
        messages = TASK.prompt(INSTRUCTION, known[row["question"]])
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        context = given["input_ids"][0].tolist()
        engine.reset(0)
        [turn] = engine.generate({0: context}, CFG.max_response, 0.0)
        assert tokenizer.decode(turn.ids) == row["turns"][0]["text"]
        for model in models:
            [said] = model.generate(**given, max_new_tokens=len(turn.ids), do_sample=False).tolist()
            agree(models[0], context, turn.ids, said[len(context) :])


# ---- tokens in, tokens out


@pytest.mark.parametrize("end", STOP)
def test_a_turn_ends_at_its_stop_string_whatever_the_last_token_holds_besides(real, end):
    engine, tokenizer = TorchEngine(*real, STOP), real[1]
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    before = encode(tokenizer, f"<think> ŭ </think> {end[:-1]}")
    ending = {i for i, text in enumerate(texts) if text.startswith(">")}
    assert {texts[i] for i in ending} > {">", ">.", "></", '>"', ">>"}  # merges of the vocabulary
    ended = {i for i in range(len(texts)) if engine.ended([*before, i])}
    assert ended == ending | {tokenizer.eos_token_id}


class Passages(Found):
    """The search of the demonstrations."""

    def __init__(self, facts):
        self.facts = facts

    def submit(self, argument):
        future = Future()
        future.set_result([self.facts.search(argument)])
        return future


def test_demonstrations_have_the_ids_of_a_rollout(real):
    # not above: vLLM does not start where BM25's numba is imported
    from extras.real.demos import Facts, demo

    facts, rng, tokenizer = Facts(), random.Random(0), real[1]
    cfg = Config(**PRESETS["smollm2-135m"])
    task = SearchQA(cfg)
    task.tools = [Passages(facts)]
    questions = {row["id"]: Question(row["id"], row["question"]) for row in facts.questions}
    rows = [demo(rng, facts) for _ in range(40)]
    texts = [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in rows]
    jobs = [Job(0, row["instruction"], questions[row["id"]], k) for k, row in enumerate(rows)]
    taus = rollout(Says(tokenizer, *texts), tokenizer, task, jobs, cfg, temperature=1.0, seed=0)
    assert {len(tau.turns) for tau in taus} >= {2, 3} and not all(
        tau.response.isascii() for tau in taus
    )
    for k, (row, tau) in enumerate(zip(rows, taus, strict=True)):
        assert tau.stop == "answer" and same(
            tau, encode_row(row, k, task, tokenizer, cfg), tokenizer
        )


# ---- vLLM


@pytest.mark.skipif(not vllm_version(), reason="vLLM is not installed here: make test-real")
def test_vllm_says_what_the_torch_engine_says(real):
    model, tokenizer = real
    length = CFG.max_prompt + CFG.max_response
    vllm = VllmEngine(str(SMOLLM), tokenizer, STOP, max_len=length, dtype="float32", memory=0.03)
    try:
        vllm.load(weights(model))
        twin = TorchEngine(model, tokenizer, STOP)
        questions = [q for q in TASK.questions("train") if q.id in ASKED] + TASK.questions("test")[
            :2
        ]
        contexts = {
            k: TASK.make_format(tokenizer).encode_prompt(INSTRUCTION, q)
            for k, q in enumerate(questions)
        }
        texts = []
        for _ in range(2):
            mine, theirs = turns(vllm, contexts), turns(twin, contexts)
            for key, (_, ids, logps, _) in mine.items():
                agree(model, contexts[key], ids, theirs[key].ids)
                if ids == theirs[key].ids:
                    torch.testing.assert_close(logps, theirs[key].logps, atol=1e-4, rtol=0)
                texts.append(tokenizer.decode(ids))
            assert sum(ids == theirs[key].ids for key, ids, *_ in mine.values()) >= len(mine) - 1
            found = "\n\n<information>Doc 1(Title: Kujang-ŭp) It is a place in North Korea.</information>\n\n"
            contexts = {
                key: contexts[key] + theirs[key].ids + encode(tokenizer, found) for key in contexts
            }
        # and did not run on to the last token
        assert any(text.endswith("</search>") for text in texts[:4])
    finally:
        vllm.close()


def turns(engine, contexts):
    """Returns the greedy turns of all rows, by key."""
    engine.reset(0)
    ended = list(engine.generate(contexts, CFG.max_response, 0.0))
    while len(ended) < len(contexts):
        ended += engine.generate({}, CFG.max_response, 0.0)
    return {turn.key: turn for turn in ended}
