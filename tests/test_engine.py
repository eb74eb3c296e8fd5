"""The torch engine against a plain forward pass over the whole context, and every engine against
the protocol."""

import inspect
import random
import re
import shutil

import pytest
import torch
from tiny_model import STOP
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engines import Engine, watch_ends
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine, graph_sizes
from models.model import export, load_config, load_model, load_tokenizer
from plumbing.chat import turn_ends

INSTRUCTION = (
    "Think in <think> </think>, search with <search> </search>, answer in <answer> </answer>."
)
QUESTIONS = [
    "What is the mayor of the city Pais Kranford?",
    "Who?",
    "Name the country of the birthplace of the director of the film Leglex Sougath?",
    "What is the capital of the nation Blaur Neia?",
    "Tell me the base of the producer of the film Kufix Kredith?",
]
# the question of each row: some come several times, as a group's do
KEYS = [0, 1, 2, 1, 3, 4, 2, 2, 3, 3, 4, 0]
GROUPS, DEALT = [k // 3 for k in range(12)], [k % 4 for k in range(12)]


@pytest.fixture
def engine(policy):
    return TorchEngine(*policy, STOP)


@pytest.fixture
def small(tiny):
    return TorchEngine(*tiny, STOP)


def prompt_ids(tokenizer, question):
    message = {"role": "user", "content": f"{INSTRUCTION}\n\nQuestion: {question}\n"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def contexts_of(tokenizer, keys=KEYS):
    return {row: prompt_ids(tokenizer, QUESTIONS[k]) for row, k in enumerate(keys)}


def shapes_of_forwards(model, monkeypatch):
    """A list that receives the shape (rows, tokens) of every forward pass from now on."""
    shapes, forward = [], model.base_model.forward

    def recorded(*args, **kw):
        shapes.append(tuple(kw["input_ids"].shape))
        return forward(*args, **kw)

    monkeypatch.setattr(model.base_model, "forward", recorded)
    return shapes


@torch.no_grad()
def plain_logprobs(model, context, ids, temperature):
    """Log-probs (tokens, V) of every token of a turn, from one forward pass over the whole, without
    a cache."""
    z = (
        model(torch.tensor([context + ids]), use_cache=False)
        .logits[0, len(context) - 1 : -1]
        .double()
    )
    return torch.log_softmax(z / (temperature or 1.0), -1)


def play(engine, tokens, monkeypatch):
    """Make `tokens` the likeliest next ones of every row, one after the other."""
    script = iter(tokens)

    def head(h):
        z = torch.zeros(len(h), engine.model.config.vocab_size)
        z[:, next(script)] = 100.0
        return z

    monkeypatch.setattr(engine, "head", head)


def spelled(tokenizer, text):
    """The ids of the text with one token a character, where the tokenizer has characters."""
    return [i for piece in text for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]


# ---- the cache


@pytest.mark.parametrize(
    "keys, rate, temperature", [(KEYS, 0.2, 0.0), (GROUPS, 0.02, 0.7), (DEALT, 0.2, 0.7)]
)
def test_cached_turns_equal_a_plain_forward_pass(
    policy, engine, keys, rate, temperature, monkeypatch
):
    model, tokenizer = policy
    coin = random.Random(1)
    # turns of very different length
    monkeypatch.setattr(engine, "ended", lambda ids: coin.random() < rate)
    shapes = shapes_of_forwards(model, monkeypatch)
    contexts = contexts_of(tokenizer, keys)
    if keys != KEYS:
        contexts = {row: contexts[row][: 12 + 6 * keys[row]] for row in contexts}
    for leaving in ({6}, {1, 3, 8}, {0, 2}, set()):
        answered = []
        for row, ids, logps, _ in engine.generate(contexts, 12, temperature):
            want = plain_logprobs(model, contexts[row], ids, temperature)
            of_sampled = want.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logps).double(), of_sampled, atol=1e-4, rtol=0)
            if temperature == 0:
                assert (of_sampled > want.amax(1) - 1e-5).all()  # greedy: no token is likelier
            assert len(ids) <= 12
            answered.append((row, ids))
        assert sorted(row for row, _ in answered) == sorted(contexts)
        assert rate < 0.1 or len({len(ids) for _, ids in answered}) > 2
        # The remaining rows receive observations of different lengths, and return in another order.
        contexts = {
            row: contexts[row] + ids + tokenizer("the city is " * (1 + row % 3))["input_ids"]
            for row, ids in answered
            if row not in leaving
        }
    assert ((4, 3) in shapes) == (keys == GROUPS)  # groups are rows as long as they share the cache
    decoding = {rows for rows, tokens in shapes if tokens == 1}
    # rows that had ended left the batch
    assert rate < 0.1 or len(decoding) > 3 and min(decoding) <= 2


def test_equal_prompts_are_computed_once_and_a_known_context_never_again(
    policy, engine, monkeypatch
):
    model, tokenizer = policy
    contexts = contexts_of(tokenizer)
    shapes = shapes_of_forwards(model, monkeypatch)
    turn = {row: ids for row, ids, *_ in engine.generate(contexts, 4, 1.0)}
    assert shapes[0] == (len(set(KEYS)), max(map(len, contexts.values())))
    shapes.clear()
    new = tokenizer("the mayor")["input_ids"]
    list(engine.generate({row: contexts[row] + turn[row] + new for row in (5, 2)}, 4, 1.0))
    assert shapes[0] == (2, 1 + len(new))  # the last sampled token had not been read yet


@pytest.mark.parametrize("forget", [lambda engine: engine.load(iter(())), TorchEngine.sleep])
def test_new_weights_and_sleep_forget_all_rows(policy, engine, forget, monkeypatch):
    shapes, contexts = shapes_of_forwards(policy[0], monkeypatch), contexts_of(policy[1])
    for _ in range(2):
        shapes.clear()
        list(engine.generate(contexts, 2, 1.0))
        assert shapes[0] == (len(set(KEYS)), max(map(len, contexts.values())))
        forget(engine)


# ---- randomness


def two_turns(engine, tokenizer, seed):
    """Everything that two turns yield, in order."""
    engine.reset(seed)
    contexts = contexts_of(tokenizer)
    first = list(engine.generate(contexts, 8, 1.0))
    again = {row: contexts[row] + ids + [9] for row, ids, *_ in first}
    return first, list(engine.generate(again, 8, 1.0))


def test_a_seed_gives_the_same_bits_and_another_seed_other_samples(tiny, small):
    a = two_turns(small, tiny[1], seed=7)
    torch.randn(3)  # torch's global generator plays no part
    assert two_turns(small, tiny[1], seed=7) == a
    other = two_turns(small, tiny[1], seed=8)
    assert [ids for _, ids, *_ in other[0]] != [ids for _, ids, *_ in a[0]]


def test_rows_of_one_prompt_are_sampled_independently_and_temperature_0_needs_no_seed(tiny, small):
    contexts = contexts_of(tiny[1], [0] * 8)
    assert len({tuple(ids) for _, ids, *_ in small.generate(contexts, 12, 1.0)}) > 4
    greedy = []
    for seed in (1, 2):
        small.reset(seed)
        greedy.append(list(small.generate(contexts, 8, 0.0)))
    assert greedy[0] == greedy[1] and len({tuple(ids) for _, ids, *_ in greedy[0]}) == 1


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(world, temperature):
    model, tokenizer = world
    started = tokenizer("<think></think><search>director of")["input_ids"]
    context, n = prompt_ids(tokenizer, "Who?") + started, 3000
    engine = TorchEngine(model, tokenizer, STOP)
    engine.reset(3)
    turns = engine.generate(dict.fromkeys(range(n), context), 1, temperature)
    drawn = torch.tensor([ids[0] for _, ids, *_ in turns])
    p = plain_logprobs(model, context, [0], temperature)[0].exp()
    off = (torch.bincount(drawn, minlength=len(p)) / n - p).abs()
    likely = n * p > 20
    assert likely.sum() >= 2 and (off < 4.5 * (p * (1 - p) / n).sqrt())[likely].all()


# ---- the end of a turn


@pytest.mark.parametrize("end", [*STOP, ""], ids=[*STOP, "EOS"])
def test_a_stop_string_or_eos_ends_the_turn_and_stays_in_it(policy, engine, end, monkeypatch):
    tokenizer = policy[1]
    ids = spelled(tokenizer, "what is ") + tokenizer(end or tokenizer.eos_token)["input_ids"]
    play(engine, ids + spelled(tokenizer, " and more"), monkeypatch)
    [(row, got, logps, _)] = engine.generate({3: tokenizer("Who?")["input_ids"]}, 100, 0.0)
    assert (row, got, len(logps)) == (3, ids, len(ids))
    assert got[-1] == tokenizer.eos_token_id if not end else tokenizer.decode(got).endswith(end)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = "{% for m in messages %}<|start_header_id|>{{ m.role }}\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
EOS, END = "<|endoftext|>", "<|im_end|>"
# model -> template, EOS, eos_token_id of generation_config.json (None: none, in config.json neither),
# what ends a turn
ENDS = {
    "Qwen 2.5": (CHATML, END, [END, EOS], [END, EOS]),
    "Qwen 2.5, base": (CHATML, EOS, EOS, [END, EOS]),
    "Gemma 3, template alone": (GEMMA, "<eos>", None, ["<end_of_turn>", "<eos>"]),
    "Llama 3.1": (LLAMA, "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
                  ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_turn_is_the_same_for_engines_and_for_whoever_loads_an_exported_policy(
    name, tiny_path, tmp_path
):
    template, eos, declared, ends = ENDS[name]
    path = shutil.copytree(tiny_path, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    special = sorted({*re.findall(r"<\|?\w+\|?>", template), *ends})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    tokenizer.save_pretrained(path)
    id_of, model = tokenizer.convert_tokens_to_ids, AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = declared and id_of(declared)
    model.save_pretrained(path)
    if not declared:
        (path / "generation_config.json").unlink()
    tokenizer, model = load_tokenizer(str(path)), load_model(str(path))
    assert turn_ends(tokenizer) == tuple(id_of(ends))
    engine = TorchEngine(model, tokenizer, STOP)
    assert [i for i in range(len(tokenizer)) if engine.ended([i])] == sorted(id_of(ends))
    export(load_config(str(path)), model, tokenizer, tmp_path / "exported", torch.float32)
    assert turn_ends(load_tokenizer(str(tmp_path / "exported"))) == tuple(id_of(ends))
    served = GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id
    assert (served if isinstance(served, list) else [served]) == id_of(ends)


def test_a_turn_ends_with_the_first_token_that_completes_any_stop_string(tiny):
    tokenizer, draw, inside = tiny[1], random.Random(0), 0
    plain = [i for i in range(3, len(tokenizer)) if tokenizer.decode([i]).isascii()]
    for _ in range(100):
        ids = draw.choices(plain, k=40)
        texts = [tokenizer.decode(ids[:k]) for k in range(1, 41)]
        at = draw.randrange(len(texts[-1]) - 8)
        stop = texts[-1][at : at + draw.randint(1, 8)]
        ended = watch_ends(tokenizer, (stop, "never" * 3))
        want = [stop in text for text in texts].index(True)
        assert [ended(ids[:k]) for k in range(1, want + 2)] == [False] * want + [True]
        inside += not texts[want].endswith(stop)
    assert inside > 10  # a token often contains more than the end of the stop string


@pytest.mark.parametrize("rows", [1, 5, 120, 512])
def test_a_graph_of_vllm_s_is_at_most_half_larger_than_its_rows(rows):
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] <= 512 and len(sizes) < 20
    for n in range(1, rows + 1):
        assert min(size for size in sizes if size >= n) <= 1.5 * n


def test_only_the_turn_itself_is_searched_for_stop_strings(tiny, small, monkeypatch):
    told = spelled(tiny[1], "<search> who </search>")
    seen = len(told) - 4  # all but `rch>`
    play(small, told[seen:] + spelled(tiny[1], " > and more"), monkeypatch)
    [(_, ids, *_)] = small.generate({0: told[:seen]}, 9, 0.0)
    assert len(ids) == 9


# ---- the protocol


def test_a_model_in_training_generates_without_dropout(tiny, small):
    model, tokenizer = tiny
    for training in (True, False):
        model.train(training)
        small.reset(0)
        for _ in small.generate(contexts_of(tokenizer), 3, 1.0):
            assert not model.training
    assert list(small.generate({}, 5, 1.0)) == []


@pytest.mark.parametrize("engine", [TorchEngine, VllmEngine])
def test_an_engine_implements_the_protocol(engine):
    methods = {name for name, member in vars(Engine).items() if inspect.isfunction(member)}
    methods -= {name for name in methods if name.startswith("_")}
    assert methods == {"reset", "generate", "load", "sleep", "close"}
    for name in methods:
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (Engine, engine))
        assert [(p.name, p.default) for p in theirs.parameters.values()] == [
            (p.name, p.default) for p in ours.parameters.values()
        ], name
