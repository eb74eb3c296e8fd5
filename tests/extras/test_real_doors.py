"""The real model's vocabulary, and its turns in vLLM. `make test-real` fetches the model first."""

import pytest
import torch

from config import PRESETS, SMOLLM, Config
from engines.choose import vllm_version
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine
from models.model import load_model, load_tokenizer, weights
from tasks import Question
from tasks.search_qa import SearchQA
from tasks.tools import encode

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (SMOLLM / "source.json").is_file(), reason=f"{SMOLLM} holds no model: make test-real"
    ),
]
SMALL = dict(max_turns=1, max_response=24, temperature=0.5)
CFG = Config(**PRESETS["smollm2-135m"] | SMALL)
INSTRUCTION = "Search, then answer."
ASKED = ("train-1", "train-732")  # on Aydūn and Kujang-ŭp; ŭ is two tokens
SHOWN = (
    "<search> Lima </search>\n\n<information>Doc 1(Title: Lima) Lima is a city in Peru.</information>\n\n"
    "<search> Peru </search>\n\n<information>Doc 1(Title: Peru) The currency of Peru is the sol.</information>\n\n"
    "<answer> sol </answer>"
)


class Shown(SearchQA):
    """Shows a conversation before each question: without a cold start the model searches only where
    it saw how."""

    def prompt(self, instruction, question):
        first = Question("shown", "Which currency is used in Lima?")
        asked, then = (super(Shown, self).prompt(instruction, q) for q in (first, question))
        return [*asked, {"role": "assistant", "content": SHOWN}, *then]


TASK = Shown(CFG)
STOP = TASK.make_format().stop_strings()


@pytest.fixture(scope="module")
def real():
    """(model, tokenizer)"""
    return load_model(str(SMOLLM)), load_tokenizer(str(SMOLLM))


def agree(model, context, mine, theirs):
    """Asserts that two greedy turns are the same, up to a place where two tokens are equally likely
    to rounding."""
    if mine != theirs:
        k = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        assert k is not None, (mine, theirs)  # one goes on where the other ends
        logps = torch.log_softmax(model(torch.tensor([context + mine[:k]])).logits[0, -1], -1)
        assert abs(logps[mine[k]] - logps[theirs[k]]) < 1e-3, (mine, theirs)


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
