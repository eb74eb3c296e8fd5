"""What chat endpoints reply: one reader for the optimizer, a judge and served models.

Servers differ in where they put thoughts, a refusal, an error and the price.
"""

import re
from typing import Any, NamedTuple

CLOSING = re.compile(r"</think>(?![`'\"][\s.,;:!?)])")  # a quoted one is mentioned
BLOCK = re.compile(r"<ins_([1-9]\d*)>((?:(?!</?ins_\d).)*)</ins_\1>", re.S)
TEXTS = ("text", "output_text")  # others are thoughts, references, images
CUT = "length max_tokens max_output_tokens model_length model_context_window_exceeded".split()
REFUSED = tuple(
    "content_filter refusal safety prohibited_content sensitive recitation blocklist guardrail".split()
)
# the server broke off: half a reply is none
BROKEN = "error abort network_error insufficient_system_resource".split()


class Reply(NamedTuple):
    text: str  # without the thoughts that the server tells apart
    cut: bool = False  # it ended at a limit
    refused: bool = False  # by the model, or by a filter


def read_reply(answer: Any) -> Reply:
    """Returns the reply that a chat completion holds.

    Raises LookupError, TypeError or ValueError, with what the server says, if there is none.
    """
    answer = {**answer}
    choice = {**(answer.get("choices") or [{}])[0]}
    ended = str(choice.get("finish_reason")).lower()
    error = answer.get("error") or choice.get("error")
    if not choice or ended in BROKEN:
        error = error or choice or answer
    if error:
        raise ValueError(error)
    cut, refused = ended in CUT, ended.startswith(REFUSED)
    message = dict[str, Any]()
    if choice.get("message") or not (cut or refused):  # else nothing may be left of it
        message = {**choice["message"]}
    text = message.get("content") or ""
    if isinstance(text, list):
        text = "".join(part["text"] for part in text if {**part}.get("type", "text") in TEXTS)
    if not isinstance(text, str):
        raise TypeError("content is not text")
    return Reply(text, cut, refused or bool(message.get("refusal")))


def usage_of(answer: Any) -> tuple[int, int]:
    """Returns the tokens of prompt and completion that an answer bills, whatever else it holds; 0:
    it does not say.

    Some servers count thoughts in the total alone.
    """
    try:
        usage = {**answer["usage"]}
    except (LookupError, TypeError):
        return 0, 0
    counts: Any = map(usage.get, ("prompt_tokens", "completion_tokens", "total_tokens"))
    prompt, completion, total = (
        int(n) if type(n) in (int, float) and 0 < n < 10**9 else 0 for n in counts
    )
    return prompt, max(completion, total - prompt)


def without_thoughts(text: str, part: re.Pattern[str], cut: bool = True) -> str:
    """Returns what follows a model's thoughts, which end at the last `</think>` that a `part` of an
    answer follows: remarks mention it, too, and so do parts.

    Templates that write `<think>` themselves leave a reply with the closing tag alone. Thoughts that
    no part follows, and those of a reply that was `cut`, are followed by nothing.
    """

    def blank(found: re.Match[str]) -> str:
        return "\0" * len(found[0])

    outside, start = part.sub(blank, text), 0
    for mark in CLOSING.finditer(outside, 0, outside.rfind("\0") + 1):
        start = mark.end()
    thinks = outside.lstrip().startswith("<think>") and (cut or "</think>" in outside)
    return "" if thinks and not start else text[start:]


def read_blocks(reply: str, cut: bool = True) -> list[str]:
    """Returns the texts of a reply's complete `<ins_k>...</ins_k>` blocks, k >= 1, in their order.

    What a reasoning model thinks before it answers holds drafts, which do not count. `cut`: the
    reply ended at a limit.
    """
    blocks = BLOCK.findall(without_thoughts(reply, BLOCK, cut))
    return ["\n".join(text.splitlines()).strip() for _, text in blocks]
