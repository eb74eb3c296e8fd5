"""A policy that can play the number game."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from extras.tasks.guess import Guess
from extras.world.tokenizer import TEMPLATE, WORD, save_tokenizer

NUMBERS = range(18, 43)  # what the player below guesses
CONTROL = ["<pad>", "<unk>", "<|user|>", "<|assistant|>", "<eos>"]
TAGS = [f"<{slash}{tag}>" for tag in ("guess", "reply", "answer") for slash in ("", "/")]


def make_player(path: Path) -> str:
    """Writes a policy that guesses numbers without looking at the replies, and now and then gives
    up.

    Its blocks add nothing at first, so that a token's logits depend on the token before it alone:
    the embeddings are one-hot, and the head holds the log-odds of what follows each of them.
    """
    words = [*CONTROL, *TAGS, *map(str, range(65)), *". , ? :".split(), "none"]
    split = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    text = f"{Guess.instruction} Which number from to is hidden Question right higher lower Halve the range each time"
    vocab = {
        word: k
        for k, word in enumerate(
            dict.fromkeys([*words, *(w for w, _ in split.pre_tokenize_str(text))])
        )
    }
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = split
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    core.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    n = -(-len(vocab) // 4) * 4
    config = Qwen2Config(
        vocab_size=n,
        hidden_size=n,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        eos_token_id=vocab["<eos>"],
        pad_token_id=vocab["<pad>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    logits = torch.full((n, n), -6.0)  # of the next token (row) after a token (column)
    logits[vocab["<guess>"]] = 2.0
    logits[vocab["<answer>"]] = -1.0
    for number in NUMBERS:
        logits[vocab[str(number)], vocab["<guess>"]] = 4.0
        logits[:, vocab[str(number)]] = -6.0
        logits[vocab["</guess>"], vocab[str(number)]] = 6.0
    logits[vocab["none"], vocab["<answer>"]] = 6.0
    logits[vocab["</answer>"], vocab["none"]] = 6.0
    with torch.no_grad():
        # no weights are whole numbers, as those of a broken copy would be
        model.model.embed_tokens.weight.copy_(torch.eye(n) / 2)
        # the norm before it makes a one-hot vector sqrt(n) long
        model.lm_head.weight.copy_(logits / n**0.5)
        model.model.layers[0].self_attn.o_proj.weight.fill_(1e-9)
        model.model.layers[0].mlp.down_proj.weight.fill_(1e-9)
    model.save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return str(path)
