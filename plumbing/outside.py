"""Text from outside is data: passages, questions, replies of the optimizer, error pages.

`decoded` and `clean` take it in, `as_data` puts it into the policy's context, `printable` puts it on a terminal;
`letters` compares it, however it is spelled.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can spell it, no encoder accepts it
SIMPLE_TAG = re.compile(r"</?[A-Za-z_][\w-]*>")
MARKUP = re.compile(r"[<\[{].+[>\]}]", re.S)
LOOK_ALIKE = str.maketrans(  # lower-case letters that look like a Latin one, in either case
    "авекмнорстухіјѕһԁԛԝ" + "αβεζηικμνορτυχ" + "ıłøđɑɡ", "abekmhopctyxijshdqw" + "abezhikmnoptyx" + "ilodag"
)  # fmt: skip
JOINERS = "\u200c\u200d"  # invisible, but Persian, Hindi and emoji are written with them


def decoded(text: str | bytes, **options: Any) -> Any:
    """Returns what a JSON text says. Raises ValueError if it is none, also where Python gives up on its nesting."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deep") from None


def clean(value: Any, secrets: Collection[str] = ()) -> Any:
    """Returns decoded JSON, in which half surrogate pairs are U+FFFD and `secrets` are "[secret]" in every text."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "[secret]")
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [clean(item, secrets) for item in value]
    if isinstance(value, dict):
        return {clean(key, secrets): clean(item, secrets) for key, item in value.items()}
    return value


def plain(text: str) -> str:
    """Returns a text in one spelling: compatibility forms (NFKC) and without invisible format characters."""
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


def letters(text: str) -> tuple[str, list[bool]]:
    """Returns a text's letters and digits alone, in one spelling, and for each place whether a word may begin there.

    The spelling has neither case nor accents, and one letter for all that look alike. The list has one more entry than
    the letters: the end.
    """
    spelling = unicodedata.normalize("NFKD", plain(text).casefold()).translate(LOOK_ALIKE)
    found, begins, between = [], [], True
    for c in spelling:
        if c.isalnum():
            found.append(c)
            begins.append(between)
            between = False
        elif unicodedata.category(c) != "Mn":  # an accent
            between = True
    return "".join(found), [*begins, True]


@functools.lru_cache(maxsize=16)
def control(tokenizer: Tokenizer, tags: tuple[str, ...] = (), simple: bool = False) -> re.Pattern[str]:
    """Returns a pattern of what outside text must not spell: control tokens of the policy, and the agent's `tags`.

    A control token is one that was added to the vocabulary and is special, or looks like markup: some models leave
    `<|fim_prefix|>` or the mark of a user's turn unflagged. `simple` lets unflagged tags such as <think> pass.
    """
    special = set(tokenizer.all_special_tokens)
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if MARKUP.fullmatch(token.content)}
    if simple:
        marked = {text for text in marked if not SIMPLE_TAG.fullmatch(text)}
    spelled = {text.strip() for text in special | marked} | {f"<{slash}{tag}>" for tag in tags for slash in ("", "/")}
    longest_first = sorted((text for text in spelled if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.IGNORECASE)


def as_data(text: str, pattern: re.Pattern[str]) -> str:
    """Returns the text with a blank behind the first character of everything that `pattern` finds: `< |im_end|>`.

    Any other text is returned unchanged, so its tokens are those it always had.
    """
    if (folded := plain(text)) != text and pattern.search(folded):
        text = folded  # a tokenizer may fold it likewise before it looks for its tokens
    while pattern.search(text):
        text = pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}" if len(m[0]) > 1 else "", text)
    return text


def printable(text: str) -> str:
    """Returns the text for a terminal: control characters are escapes (`\\x1b`), but for line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() or _harmless(c) else _escape(c) for c in text)


def _harmless(c: str) -> bool:
    return c in JOINERS or unicodedata.category(c) in ("Zs", "Cn", "Co")


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode()


def without_password(text: str) -> str:
    """Returns a text in which URLs have lost `user:password@`."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def secrets_of(headers: Iterable[str]) -> tuple[str, ...]:
    """Returns the keys in the values of headers; short ones ("EMPTY") are no secret, and words of any text."""
    return tuple(word for value in headers for word in value.split() if len(word) >= 8)
