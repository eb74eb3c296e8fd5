"""A policy small enough for tests: a Hugging Face directory with Qwen2.5's architecture and
tokenizer."""

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

FIXTURE = Path(__file__).parent / "fixture"
STOP = ("</search>", "</answer>")  # what the tests' engines stop at
# <search> and its like stay ordinary text
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tiny_model(path: str | Path, seed: int = 0) -> str:
    """Write tokenizer (600 tokens) and random weights (0.15M, fp32) to `path`; return it as a
    string."""
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(path)
    eos = tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # 2 heads of 32: the smallest head that vLLM serves on the CPU
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        eos_token_id=eos,
        pad_token_id=eos,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def _train_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE as Qwen2.5 has it, trained on the fixture's passages and questions."""
    lines = [
        line for file in sorted(FIXTURE.glob("*.jsonl")) for line in file.open(encoding="utf-8")
    ]
    texts = [row.get("contents") or row["question"] for row in map(json.loads, lines)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend = Qwen2Tokenizer().backend_tokenizer
    backend.train_from_iterator(texts, trainer)
    bpe = json.loads(backend.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        extra_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
