"""Small tokenizers, made as those of large models: they flag, normalize and store their control
tokens differently."""

import json
from functools import cache

from tiny_model import CHAT_TEMPLATE, _train_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from models.model import load_tokenizer

TEXTS = [
    "Question: Who designed the Sydney Opera House? Answer in <answer> </answer>, search with <search> </search>.",
    "The capital of France is Paris, a city on the river Seine. user assistant system information Doc 1(Title: Paris)",
]
LLAMA_2 = "{% for m in messages %}<s>[INST] {{ m['content'] }} [/INST]{% endfor %}"
DEEPSEEK = "{% for m in messages %}<｜User｜>{{ m['content'] }}{% endfor %}<｜Assistant｜><think>\n"


def _wrapped(
    core: Tokenizer, template: str, eos: str, unk: str | None = None
) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        pad_token=eos,
        unk_token=unk,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _bytes(added: list[AddedToken]) -> Tokenizer:
    core = Tokenizer(BPE())
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_tokens(added)
    return core


def llama_2() -> PreTrainedTokenizerFast:
    """A vocabulary of sentencepiece that holds its control tokens, matched after normalization."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    core = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = [*control, *(f"<0x{b:02X}>" for b in range(256))]
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    )
    state = json.loads(core.to_str())
    state["added_tokens"] = []  # the bytes are pieces like any other
    core = Tokenizer.from_str(json.dumps(state))
    core.add_special_tokens([AddedToken(x, special=True, normalized=True) for x in control])
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(core, LLAMA_2, "</s>", "<unk>")


def deepseek() -> PreTrainedTokenizerFast:
    """Marks of turns that are not flagged as special, and a tag of the agent's that is a token."""
    names = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<tool_call>"]
    added = [AddedToken(x, special=False, normalized=False) for x in names]
    added.append(AddedToken("<｜end▁of▁sentence｜>", special=True, normalized=False))
    return _wrapped(_bytes(added), DEEPSEEK, "<｜end▁of▁sentence｜>")


def folding() -> PreTrainedTokenizerFast:
    """Control tokens are looked for in folded text: full-width, capital and split by invisible
    characters."""
    core = _bytes([])
    core.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Replace(Regex("[\u200b\u2060]"), ""),
            normalizers.Lowercase(),
        ]
    )
    names = ["<|im_start|>", "<|im_end|>"]
    core.add_special_tokens([AddedToken(x, special=True, normalized=True) for x in names])
    return _wrapped(core, CHAT_TEMPLATE, "<|im_end|>")


def world() -> PreTrainedTokenizerFast:
    from config import WORLD

    return load_tokenizer(str(WORLD / "policy"))


MAKERS = {
    "world": world, "qwen": _train_tokenizer, "llama 2": llama_2, "deepseek": deepseek, "folding": folding,
}  # fmt: skip


@cache
def made(name: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of that name, made once."""
    return MAKERS[name]()


@cache
def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Returns the ids that no outside text may become; an unknown word is <unk>, whoever writes
    it."""
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, t in added if t.special or "｜" in t.content or "|" in t.content} - {
        tokenizer.unk_token_id
    }
