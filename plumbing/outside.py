"""Text from outside is data: passages, questions, replies of the optimizer, error pages.

`decoded` and `clean` take it in, `as_data` puts it into the policy's context, `printable` puts it on a terminal;
`letters` compares it, however it is spelled.
"""

from __future__ import annotations

import functools
import html
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can spell it, no encoder accepts it
SIMPLE_TAG = re.compile(r"</?[A-Za-z_][\w-]*>")
MARKUP = re.compile(r"[<\[{].+[>\]}]", re.S)
LATIN = re.compile(  # in a character's Unicode name: small capitals, strokes, circles, flags
    r"(?:LATIN(?: SMALL| CAPITAL)?|INDICATOR SYMBOL) LETTER (?:SMALL CAPITAL |DOTLESS )?([A-Z])(?: WITH .*)?$"
)
ALIKE = {"1": "i", "l": "i", "0": "o"}  # "I" and "O" in capitals
URL = re.compile(r"\w+://(?:(?!,\w+://)[^\s'\"<>()])*(?<![:;,.])")
USER = re.compile(r"[^\s/'\"@]*:[^\s/'\"@]*@")  # of what is no whole URL
JOINERS = "\u200c\u200d"  # invisible, but Persian, Hindi and emoji are written with them


def decoded(text: str | bytes, **options: Any) -> Any:
    """Returns what a JSON text says. Raises ValueError if it is none, also where Python gives up on its nesting."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deep") from None


def clean(value: Any, secrets: Collection[str] = ()) -> Any:
    """Returns decoded JSON, in which half surrogate pairs are U+FFFD and `secrets` are "[secret]" in every text."""

    def cleaned(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "[secret]")
        return SURROGATE.sub("\ufffd", text)

    return in_texts(value, cleaned)


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns decoded JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [in_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): in_texts(item, change) for key, item in value.items()}
    return value


def plain(text: str) -> str:
    """Returns a text in one spelling: compatibility forms (NFKC) and without invisible format characters."""
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


def letters(text: str, looks: bool = False) -> tuple[str, list[bool]]:
    """Returns a text's letters and digits alone, in one spelling, and for each place whether a word may begin there.

    The spelling has neither case nor accents, nor a code of HTML or of URLs. With `looks` it has one letter for all
    that look alike. A word may begin at every wide character: Chinese and Japanese have no blanks, and Korean particles
    follow their noun without one. The list has one more entry than the letters: the end.
    """
    text = plain(unquote(html.unescape(text)))
    spelling = unicodedata.normalize("NFKD", text if looks else text.casefold())
    found, begins, between = [], [], True
    for c in "".join(map(_latin, spelling)) if looks else spelling:
        if c.isalnum():
            found.append(c)
            begins.append(between or wide(c))
            between = wide(c)
        elif unicodedata.category(c) != "Mn":  # an accent
            between = True
    return "".join(found), [*begins, True]


def wide(c: str) -> bool:
    """Returns whether a character is as wide as it is high: an ideograph, a kana, the first letter of a syllable."""
    return unicodedata.east_asian_width(c) in "WF"


@functools.cache
def _latin(c: str) -> str:
    """Returns the Latin letter or digit that a character looks like in lower case or in capitals, else the character.

    Unicode's table says so, else the name of the character or of one that the table has beside it.
    """
    if c.isascii():
        return ALIKE.get(c.lower(), c.lower())
    from confusable_homoglyphs.confusables import confusables_data  # here: few programs compare letters

    for form in (c, c.upper()):
        alike = [form, *(row["c"] for row in confusables_data.get(form, ()))]
        alike = ["".join(x for x in same if unicodedata.category(x) != "Mn") for same in alike]
        found = [x for x in alike if x.isascii() and x.isalnum() and len(x) == 1]
        found += [m[1] for x in alike if len(x) == 1 and (m := LATIN.search(unicodedata.name(x, "")))]
        if found:
            return _latin(found[0])
    return c.casefold()


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


def without_secrets(text: str) -> str:
    """Returns a text in which URLs have lost `user:password@` and `?query`; one that is no URL loses everything."""
    return USER.sub("", URL.sub(lambda m: _without_secrets(m[0]), text))


def _without_secrets(url: str) -> str:
    try:
        place = urlsplit(url)
        place.port  # noqa: B018 (raises ValueError: "user:pass/word@host" has the port "pass")
    except ValueError:
        return url.partition("//")[0] + "//[...]"
    return f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"


def credentials(url: str) -> list[str]:
    """Returns what a URL says that nobody else should read: user, password and the values of its query."""
    try:
        place = urlsplit(url)
    except ValueError:
        return []
    said = [place.username, place.password, *(field.partition("=")[2] for field in place.query.split("&"))]
    return [form for x in said if x for form in (x, unquote(x))]


def at(url: str, path: str = "") -> str:
    """Returns the URL of a path below a base, which may have a query of its own."""
    try:
        base, below = urlsplit(url.strip()), urlsplit(path)
    except ValueError:  # whoever asks there says so
        return url + path
    query = "&".join(filter(None, (base.query, below.query)))
    return urlunsplit((base.scheme, base.netloc, base.path.rstrip("/") + below.path, query, ""))


def secrets_of(headers: Iterable[str]) -> tuple[str, ...]:
    """Returns the keys in the values of headers; short ones ("EMPTY") are no secret, and words of any text."""
    return tuple(word for value in headers for word in value.split() if len(word) >= 8)
