"""Text from outside is data: passages, questions, replies of the optimizer, error pages.

`clean` takes it in, `escape_markup` puts it into the policy's context, `printable` puts it
on a terminal.
"""

import functools
import json
import re
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

# half a character: JSON can spell it, no encoder accepts it
SURROGATE = re.compile("[\ud800-\udfff]")
# control characters but line ends and tabs, and those of bidirectional text
UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SIMPLE_TAG = re.compile(r"</?[A-Za-z_][\w-]*>")
MARKUP = re.compile(r"[<\[{].+[>\]}]", re.S)
# of a URL, or of what should have been one
USER = re.compile(r"(?<=//)[^\s/'\"]*@|[^\s/'\"@]+:[^\s/'\"@]*@")
QUERY = re.compile(
    r"(://(?:(?!,\w+://)[^\s'\"<>()?#])*)[?#](?:(?!,\w+://)[^\s'\"<>()])*(?<![:;,.])"
)


def finite(value: Any) -> Any:
    """Returns JSON data with None for every nan and infinity: JSON has no word for them, and
    browsers refuse them."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def clean(value: Any) -> Any:
    """Returns decoded JSON, in which half surrogate pairs are U+FFFD."""
    return map_texts(value, partial(SURROGATE.sub, "\ufffd"))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns decoded JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    return value


def plain(text: str) -> str:
    """Returns a text in one spelling: compatibility forms (NFKC) and without invisible format
    characters."""
    if text.isascii():
        return text
    return "".join(
        c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf"
    )


@functools.lru_cache(maxsize=16)
def match_markup(
    tokenizer: Any, tags: tuple[str, ...] = (), simple: bool = False
) -> re.Pattern[str]:
    """Returns a pattern of what outside text must not spell: control tokens of the policy, and the
    agent's `tags`.

    A control token is one that was added to the vocabulary and is special, or looks like markup:
    some models leave `<|fim_prefix|>` or the mark of a user's turn unflagged. `simple` lets
    unflagged tags such as <think> pass.
    """
    spelled = {text.strip() for text in tokenizer.all_special_tokens}
    for tag in tags:
        spelled |= {f"<{tag}>", f"</{tag}>"}
    for token in tokenizer.added_tokens_decoder.values():
        passes = simple and SIMPLE_TAG.fullmatch(token.content)
        # special, or markup that does not pass
        if token.special or MARKUP.fullmatch(token.content) and not passes:
            spelled.add(token.content.strip())
    longest_first = sorted(spelled - {""}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.IGNORECASE)


def escape_markup(text: str, pattern: re.Pattern[str]) -> str:
    """Returns the text with a blank behind the first character of everything that `pattern` finds:
    `< |im_end|>`.

    Any other text is returned unchanged, so its tokens are those it always had.
    """

    def escape(found: re.Match[str]) -> str:
        markup = found[0]
        return f"{markup[0]} {markup[1:]}" if len(markup) > 1 else ""

    folded = plain(text)
    if pattern.search(folded):
        text = folded  # a tokenizer may fold it likewise before it looks for its tokens
    # what is left may spell another
    while pattern.search(text):
        text = pattern.sub(escape, text)
    return text


def printable(text: str) -> str:
    """Returns the text for a terminal: what moves a cursor or turns letters round is an escape
    (`\\x1b`)."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_secrets(text: str) -> str:
    """Returns a text whose URLs have lost `user:password@` and `?query`."""
    return QUERY.sub(r"\1", USER.sub("", text))


def join_url(url: str, path: str = "") -> str:
    """Returns the URL of a path below a base, which may be that URL already."""
    return url.strip().rstrip("/").removesuffix(path) + path


def contents_of(row: Any) -> str:
    """Returns the `contents` of a passage, or what they would be from its `text` and its `title`, if
    it has one. Raises LookupError or TypeError."""
    if "contents" in row:
        contents = row["contents"]
    else:
        title = (row["title"] if "title" in row else "") or ""
        contents = '"' + title + '"\n' + row["text"]
    if not isinstance(contents, str):
        raise TypeError("its contents are not text")
    return contents
