"""The LLM-based optimizer O: prompts, client, strict parsing (§3.2, App. E).

Works with any OpenAI-compatible chat endpoint. A reply is never adopted whole: only complete `<ins_k>` blocks count,
and every candidate has to pass `check`.
"""

import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from faults import OptimizerDown
from harness.client import Client, RequestFailed
from stop import may_stop

# App. E, word for word; {n} stands for its N. (The paraphrase prompt has "6" there, which is N_P - 1.)
PARAPHRASE = """<ins_0> {instruction} </ins_0>

Improve the above prompt.
Give {n} different candidates.
Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.
For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.
List the instruction candidates in <ins_1>...</ins_1> to <ins_{n}>...</ins_{n}> tags."""

REFLECTION = """The initial prompt is:

<ins_0>
{instruction}
</ins_0>

However, it still gets the following examples wrong:

{examples}

Analyze the reasons behind these mistakes and why the prompt could have gotten these examples wrong.
Now take the reasons into account. Revise and improve the initial prompt by giving {n} different but better candidates.
Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.
For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.
List the instruction candidates in <ins_1>...</ins_1> to <ins_{n}>...</ins_{n}> tags."""

HISTORY = """<history>
{history}
</history>

Based on the above “instruction: score” history for instructions with their scores, where the score ranges from 0 to \
100, analyze what components can lead to better performance.
Give {n} different but better candidates. Make it concise and effective. Be creative and diverse in your suggestions.
Make sure you include the same XML tags <>...</> as the original prompt in your improved prompts.
For each XML tag, include both the beginning and ending tags, such as <answer>...</answer>.
List the instruction candidates in <ins_1>...</ins_1> to <ins_{n}>...</ins_{n}> tags."""

EXAMPLE = "<example>\nResponse: {response}\nCorrect answer: {gold}\n</example>"


@functools.cache
def token_counter() -> tuple[Callable[[str], int], str]:
    """Returns a function that counts the tokens of a text, and its name.

    It is tiktoken's o200k_base, or an estimate if tiktoken or its file is missing.
    """
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("o200k_base")
        return lambda text: len(encoding.encode(text, disallowed_special=())), "tiktoken"
    except Exception:  # not installed, or its encodings cannot be downloaded
        return lambda text: len(text) // 4 + 1, "estimate: 4 characters a token"


def paraphrase_prompt(instruction: str, n: int) -> str:
    """Returns the prompt that asks for `n` paraphrases of an instruction."""
    return PARAPHRASE.format(instruction=instruction, n=n)


def history_prompt(scored: Sequence[tuple[str, float]], n: int) -> str:
    """Returns the prompt that asks for `n` candidates better than the `scored` ones: (instruction, mean reward)."""
    line = "<ins_{0}> {1} </ins_{0}>\n<score_{0}> {2:.0f} </score_{0}>"
    lines = [line.format(k, text, 100 * w) for k, (text, w) in enumerate(scored)]
    return HISTORY.format(history="\n".join(lines), n=n)


def reflection_prompt(instruction: str, failures: Sequence[tuple[str, tuple[str, ...]]], n: int, budget: int) -> str:
    """Returns the prompt that asks for `n` candidates after `failures`: pairs of (question and response, golds).

    Each failure is cut to an equal share of `budget` tokens.
    """
    count, _ = token_counter()
    share = budget // max(1, len(failures))
    examples = [EXAMPLE.format(response=shorten(text, share, count), gold=" or ".join(g)) for text, g in failures]
    return REFLECTION.format(instruction=instruction, examples="\n".join(examples), n=n)


def shorten(text: str, budget: int, count: Callable[[str], int]) -> str:
    """Returns a failure cut to about `budget` tokens, by `count`.

    It cuts the middle of each observation first, then the middle of the text: the question, the actions and the end of
    the trajectory stay as long as possible.
    """
    for keep in (2000, 1000, 500, 250, 100, 40, 0):
        if count(text) <= budget:
            return text
        cut = lambda m, keep=keep: f"<information>{_middle_out(m.group(1), keep)}</information>"  # noqa: E731
        text = re.sub(r"<information>(.*?)</information>", cut, text, flags=re.S)
    while count(text) > budget and len(text) > 80:
        text = _middle_out(text, len(text) * 3 // 4)
    return text


def _middle_out(text: str, keep: int) -> str:
    return text if len(text) <= keep else f"{text[: keep // 2]} [...] {text[len(text) - keep // 2 :]}"


def parse(reply: str) -> list[str]:
    """Returns the texts of a reply's complete `<ins_k>...</ins_k>` blocks, k >= 1, in their order."""
    blocks = re.findall(r"<ins_([1-9]\d*)>((?:(?!</?ins_\d).)*)</ins_\1>", reply, re.S)
    return [text.strip() for _, text in blocks]


def candidates(
    reply: str, parent: str, used: set[str], golds: Iterable[str], max_tokens: int
) -> tuple[list[str], list[dict[str, str]]]:
    """Returns a reply's candidates that pass `check`, and the others as {"text", "reason"}.

    Adds the accepted texts, normalized, to `used`.
    """
    count, _ = token_counter()
    golds = list(golds)
    accepted: list[str] = []
    rejected: list[dict[str, str]] = []
    for text in parse(reply):
        if reason := check(text, parent, used, golds, max_tokens, count):
            rejected.append({"text": text, "reason": reason})
        else:
            accepted.append(text)
            used.add(normalized(text))
    return accepted, rejected


def check(
    candidate: str, parent: str, used: set[str], golds: Iterable[str], max_tokens: int, count: Callable[[str], int]
) -> str:
    """Returns why a candidate cannot join, or ""; `used` holds the normalized texts of the instructions in use."""
    words = normalized(candidate)
    if not words:
        return "empty"
    if words in used:
        return "duplicate"
    if count(candidate) > max_tokens:
        return f"longer than {max_tokens} tokens"
    tag = r"</?[A-Za-z_][\w-]*>"
    if lost := sorted(set(re.findall(tag, parent)) - set(re.findall(tag, candidate))):
        return f"lost {lost[0]}"
    for gold in golds:
        answer = normalized(gold)
        if len(answer) <= 3:  # "a", "yes" and "two" are words of any prompt
            continue
        # An answer that the parent names already ("Beijing" in Search-R1's instruction) is no new leak.
        if f" {answer} " in f" {words} " and f" {answer} " not in f" {normalized(parent)} ":
            return f"contains the gold answer {gold!r}"
    return ""


def normalized(text: str) -> str:
    """Returns a text's words in lower case, without punctuation; candidates with the same words are duplicates."""
    return " ".join(re.findall(r"\w+", text.lower()))


@dataclass(frozen=True)
class Call:
    """One call to the optimizer and its reply, as logged in reflections.jsonl."""

    key: str  # a resumed run looks the call up by this
    prompt: str
    reply: str
    prompt_tokens: int  # as the endpoint counts them; estimated where it does not
    completion_tokens: int
    seconds: float  # retries included
    paid_before: bool  # the reply comes from an earlier process of this run


class Optimizer:
    """Client of an OpenAI-compatible chat endpoint; harness/client.py says what it retries.

    `url` is the base, as in OPENAI_BASE_URL. `paid` maps keys to the calls that an earlier process of this run has
    logged (`paid_calls`): they are not paid for again. `revive` restarts a server of the run's own (see Client).
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str = "",
        timeout: float = 300,
        retries: int = 4,
        backoff: float = 1.0,
        paid: dict[str, dict[str, Any]] | None = None,
        revive: Callable[[], str] = lambda: "",
    ):
        self.url, self.model, self.paid = url, model, paid or {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = Client(
            [url], timeout=timeout, retries=retries, backoff=backoff, expects="a chat completion", headers=headers,
            proxies=True, retry_malformed=True, revive=revive,
        )  # fmt: skip

    def ask(self, prompt: str, when: str) -> Call:
        """Returns the call with its reply. `when` tells calls with the same prompt apart. Raises OptimizerDown."""
        key = f"{when} " + hashlib.sha256(f"{self.model}\n{prompt}".encode()).hexdigest()[:16]
        if key in self.paid:
            return Call(**self.paid[key] | {"prompt": prompt, "paid_before": True})
        start = time.time()
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        try:
            with may_stop():
                reply, usage = self._client.post("/chat/completions", body, _read_completion)
        except RequestFailed as e:
            raise OptimizerDown(str(e)) from e
        return Call(
            key=key,
            prompt=prompt,
            reply=reply,
            prompt_tokens=_tokens(usage.get("prompt_tokens"), prompt),
            completion_tokens=_tokens(usage.get("completion_tokens"), reply),
            seconds=round(time.time() - start, 3),
            paid_before=False,
        )


def _read_completion(answer: Any) -> tuple[str, dict[str, Any]]:
    reply = answer["choices"][0]["message"]["content"] or ""
    if not isinstance(reply, str):
        raise TypeError("content is not text")
    usage = answer.get("usage")
    return reply, usage if isinstance(usage, dict) else {}


def _tokens(counted: Any, text: str) -> int:
    return counted if isinstance(counted, int) and counted else len(text) // 4


def paid_calls(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the calls that an earlier process of this run has paid for, by key, from rows of reflections.jsonl."""
    return {row["call"]["key"]: row["call"] for row in rows if "call" in row}
