"""Small tokenizers with the chat templates of tests/extras/templates."""

from functools import cache
from pathlib import Path

from tiny_model import _train_tokenizer, make_tiny_model
from tokenizers import AddedToken
from transformers import AutoTokenizer

TEMPLATES = Path(__file__).parent / "templates"
QWEN_2_5 = ["<tool_call>", "</tool_call>"]  # tokens of their own, and no special ones
QWEN_3 = [*QWEN_2_5, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TOKENS = {"qwen2_5": QWEN_2_5, "qwen3": QWEN_3, "qwen3_5": QWEN_3}


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


def chat_model(path, name="qwen2_5"):
    """Writes the tiny policy with a chat template that calls tools, and the EOS that it ends turns
    with."""
    make_tiny_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template, tokenizer.eos_token = template(name), "<|im_end|>"
    tokenizer.save_pretrained(path)
    return str(path)
