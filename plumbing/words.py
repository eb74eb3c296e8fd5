"""What a word is: one idea for passages, queries, F1 and the texts of instructions."""

import re
import unicodedata

from plumbing.outside import plain

# Thai, Lao, Burmese, Khmer, Chinese and Japanese put no spaces between words: each sign counts as
# one. Korean's, too.
SIGNS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\ua4cf\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
# Vowel signs and the like, no \w. Not Latin's: "İ" in lower case has one.
MARKS = "".join(c for c in map(chr, range(0x483, 0x1D00)) if unicodedata.category(c)[0] == "M")
WORD = re.compile(rf"[^\W{SIGNS}]+(?:[{MARKS}]+[^\W{SIGNS}]*)*|(?=\w)[{SIGNS}][{MARKS}]*")


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case; stop words stay, nothing is stemmed."""
    return WORD.findall(plain(text).lower())


def cut_middle(text: str, keep: int) -> str:
    """Returns a text of which about `keep` characters are left, half of them from its end."""
    if len(text) <= keep:
        return text
    return f"{text[: keep // 2]} [...] {text[len(text) - keep // 2 :]}"
