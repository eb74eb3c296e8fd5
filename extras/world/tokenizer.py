"""A word-level tokenizer that covers every text of the world; loads through AutoTokenizer."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from extras.world.demos import SEARCH
from extras.world.facts import NAMES, OPENINGS, RELATIONS
from tasks.tools import explain_invalid_action
from world.clauses import CLAUSES, FILLERS, FRAMES

CONTROL = ["<pad>", "<unk>", "<|user|>", "<|assistant|>", "<eos>"]
TAGS = [
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")
]
# one token each: the context stays short
PHRASES = ["Question:", *(f"Doc {k}(Title:" for k in range(1, 6))]
WORD = r"\w+|[^\w\s]"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer of lower-cased words and punctuation; a tag, `Question:` and `Doc
    1(Title:` are one token."""
    signs = "a with and of the it is steps ( ) . , ? : ' !"
    texts = [*FRAMES, *FILLERS, *OPENINGS, explain_invalid_action([SEARCH]), signs]
    texts += [wording for c in CLAUSES.values() for wording in c.taught + c.unseen]
    texts += [*RELATIONS, *NAMES] + [
        word for pools in NAMES.values() for pool in pools for word in pool
    ]
    text = re.sub("|".join(map(re.escape, TAGS)), " ", " ".join(texts)).lower()
    vocab = {token: i for i, token in enumerate(CONTROL + TAGS + PHRASES)}
    for word in re.findall(WORD, text):
        vocab.setdefault(word, len(vocab))
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    core.add_tokens([AddedToken(t, normalized=False) for t in TAGS + PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves the tokenizer so that AutoTokenizer loads it with a Qwen2 model.

    transformers 5 loads every tokenizer next to a `qwen2` config as Qwen2's byte-level BPE,
    whatever tokenizer.json holds; only an `auto_map` of nulls makes it read `tokenizer_class`
    instead.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) | {"auto_map": {"AutoTokenizer": [None, None]}}
    path.write_text(json.dumps(config, indent=1) + "\n", "utf-8")
