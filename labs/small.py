"""A policy with a byte-level BPE tokenizer that a notebook trains in seconds, for what only real
tokens show."""

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, logging

from config import WORLD
from plumbing.files import read_jsonl

EOS = "<|endoftext|>"
# No message is encoded here, but a policy without a template is refused.
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def calls() -> list[str]:
    """Returns what the policy is taught to write: a search for each of the world's training
    questions."""
    return [f"<search> {row['question']} </search>" for row in read_jsonl(WORLD / "train.jsonl")]


def passages() -> list[str]:
    return [row["contents"].replace("\n", " ") for row in read_jsonl(WORLD / "corpus.jsonl")]


def tokenizer_of(texts: list[str]) -> Qwen2Tokenizer:
    """Returns a tokenizer that cuts text as Qwen2.5's does, with merges learned from these
    texts."""
    core = Qwen2Tokenizer().backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    bpe = json.loads(core.to_str())["model"]
    merges = [tuple(pair) for pair in bpe["merges"]]
    return Qwen2Tokenizer(vocab=bpe["vocab"], merges=merges, chat_template=TEMPLATE)


def train(folder: str | Path, steps: int) -> str:
    """Trains a policy of 0.1M parameters for `steps` to write `calls`, saves it in `folder` and
    returns that."""
    texts = calls()
    shown = [
        f"{call}\n\n<information> {p} </information>\n\n"
        for call, p in zip(texts, passages(), strict=False)
    ]
    tokenizer = tokenizer_of(shown)
    data = [tokenizer(text + EOS, add_special_tokens=False)["input_ids"] for text in texts]
    ids = torch.full((len(data), max(map(len, data))), tokenizer.eos_token_id)
    labels = torch.full_like(ids, -100)  # no loss on the padding
    for k, row in enumerate(data):
        ids[k, : len(row)] = labels[k, : len(row)] = torch.tensor(row)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            rows = torch.randint(len(data), (16,))
            model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
