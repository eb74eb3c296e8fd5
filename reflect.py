"""The LLM-based optimizer O: prompts, client, strict parsing (§3.2, App. E).

Works with any OpenAI-compatible chat endpoint. A reply is never adopted whole: only complete `<ins_k>` blocks count, at
most as many as were asked for, and every candidate has to pass `check`.
"""

import functools
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from config import Config, evolves, scripted
from plumbing.client import Client, RequestFailed
from plumbing.faults import Fault, OptimizerDown
from plumbing.outside import clean, letters, plain, printable, wide, without_secrets
from plumbing.stop import may_stop

OPENAI = "https://api.openai.com/v1"
MAX_REPLY = 200_000  # characters of a reply that are read and kept
CONTROL = re.compile(r"<[|｜][^<>]{1,64}[|｜]>|</?s>|<(?:bos|eos|pad|unk|(?:start|end)_of_turn)>|\[/?INST\]")
RESULT = re.compile(r"<information>(.*?)</information>", re.S)

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
WITHOUT_GOLD = "<example>\nResponse: {response}\n</example>"  # of a task without right answers


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


def reflection_prompt(
    instruction: str, failures: Sequence[tuple[str, tuple[str, ...]]], n: int, budget: int,
    observations: Sequence[str] = ("information",),
) -> str:  # fmt: skip
    """Returns the prompt that asks for `n` candidates after `failures`: pairs of (question and response, golds).

    Each failure is cut to an equal share of `budget` tokens; `observations`: tags of what can be cut first.
    """
    shown = "\n".join(examples(failures, budget, observations))
    return REFLECTION.format(instruction=instruction, examples=shown, n=n)


def examples(
    failures: Sequence[tuple[str, tuple[str, ...]]], budget: int, observations: Sequence[str] = ("information",)
) -> list[str]:
    """Returns failures, (question and response, golds), as they stand in a prompt, in `budget` tokens together."""
    count, _ = token_counter()
    share = budget // max(1, len(failures))  # CHOICE-30
    return [
        (EXAMPLE if golds else WITHOUT_GOLD).format(
            response=shorten(text, share, count, observations), gold=" or ".join(golds)
        )
        for text, golds in failures
    ]


def shorten(
    text: str, budget: int, count: Callable[[str], int], observations: Sequence[str] = ("information",)
) -> str:
    """Returns a failure cut to about `budget` tokens, by `count`.

    It cuts the middle of each observation first, whose tags are named, then the middle of the text: the question, the
    actions and the end of the trajectory stay as long as possible.
    """
    tags = "|".join(map(re.escape, observations))
    for keep in (2000, 1000, 500, 250, 100, 40, 0) if tags else ():
        if count(text) <= budget:
            return text
        cut = lambda m, keep=keep: f"<{m[1]}>{_middle_out(m[2], keep)}</{m[1]}>"  # noqa: E731
        text = re.sub(rf"<({tags})>(.*?)</\1>", cut, text, flags=re.S)
    while count(text) > budget and len(text) > 80:
        text = _middle_out(text, len(text) * 3 // 4)
    return text


def _middle_out(text: str, keep: int) -> str:
    return text if len(text) <= keep else f"{text[: keep // 2]} [...] {text[len(text) - keep // 2 :]}"


def parse(reply: str) -> list[str]:
    """Returns the texts of a reply's complete `<ins_k>...</ins_k>` blocks, k >= 1, in their order.

    What a reasoning model thinks before it answers holds drafts, which do not count.
    """
    blocks = re.findall(r"<ins_([1-9]\d*)>((?:(?!</?ins_\d).)*)</ins_\1>", reply[_end_of_thoughts(reply) :], re.S)
    return [text.strip() for _, text in blocks]


def _end_of_thoughts(reply: str) -> int:
    """Returns where a reply's leading thoughts end: at a </think> outside of blocks, whose <think> begins the reply.

    Templates that write <think> themselves leave a reply that has only its end.
    """
    inside, opened = "", False
    leading = reply.lstrip().startswith("<think>")
    for m in re.finditer(r"<(/?)(think|ins_\d+)>", reply):
        closes, tag = m.groups()
        if tag != "think":
            inside = "" if closes else tag
        elif not inside and closes:
            return m.end() if leading or not opened else 0
        elif not inside:
            opened = True
    return 0


def candidates(
    reply: str, parent: str, used: set[str], golds: Iterable[str], max_tokens: int, n: int,
    unfit: Callable[[str, str], str],
) -> tuple[dict[int, str], list[dict[str, Any]]]:  # fmt: skip
    """Returns the first `n` of a reply's candidates that pass `check`, {k: text}, and the others, {"k", "reason"}.

    k counts the reply's blocks from 1. `unfit` returns why the policy could not act under a candidate of a parent, or
    "". Adds the accepted texts, normalized, to `used`.
    """
    count, _ = token_counter()
    golds = list(golds)
    accepted: dict[int, str] = {}
    rejected: list[dict[str, Any]] = []
    for k, text in enumerate(parse(reply), 1):
        if len(accepted) == n:
            rejected.append({"k": k, "reason": f"{n} were asked for: neither this nor any after it is read"})
            break
        if reason := check(text, parent, used, golds, max_tokens, count, unfit):
            rejected.append({"k": k, "reason": reason})
        else:
            accepted[k] = text
            used.add(normalized(text))
    return accepted, rejected


def check(
    candidate: str, parent: str, used: set[str], golds: Iterable[str], max_tokens: int, count: Callable[[str], int],
    unfit: Callable[[str, str], str],
) -> str:  # fmt: skip
    """Returns why a candidate cannot join, or ""; `used` holds the normalized texts of the instructions in use.

    What it must keep of its parent, so that the policy can act, `unfit` knows. Everything else is its own to say: other
    tags, another example of an answer, other words.
    """
    words = normalized(candidate)
    if not words:
        return "empty"
    if words in used:  # CHOICE-28
        return "duplicate"
    if count(candidate) > max_tokens:  # CHOICE-27
        return f"longer than {max_tokens} tokens"
    if reason := unfit(candidate, parent):
        return reason
    if printable(candidate.replace("\r\n", "\n")) != candidate.replace("\r\n", "\n"):
        return "holds control characters"
    if new := sorted(set(CONTROL.findall(plain(candidate))) - set(CONTROL.findall(plain(parent)))):
        return f"holds the control token {new[0]}"
    if _questions(candidate) > _questions(parent):
        return "asks a question of its own"
    for inside in set(RESULT.findall(candidate)) - set(RESULT.findall(parent)):
        if len(normalized(inside).split()) > 5:
            return "holds a search result of its own"
    for looks in (False, True):
        said, known = letters(candidate, looks), letters(parent, looks)
        for gold in golds:
            # An answer that the parent names already ("Beijing" in Search-R1's instruction) is no new leak.
            if any(_names(form, *said) and not _names(form, *known) for form in _forms(gold, looks)):
                return f"contains the gold answer {gold!r}"
    return ""


def _questions(text: str) -> int:
    return len(re.findall(r"^\W*question\s*:", plain(text), re.I | re.M))


def _forms(gold: str, looks: bool) -> Iterator[str]:
    """Yields a gold answer as `letters`, with its last names first, too ("Austen, Jane"), and backwards if it is long.

    Yields nothing for a short one: "a", "yes" and "two" are words of any prompt. Two ideographs are a name.
    """
    answer, _ = letters(gold, looks)
    if len(answer) <= 3 and sum(map(wide, answer)) < 2:
        return
    words = gold.split()
    for k in range(len(words) if len(words) <= 5 else 1):
        yield letters(" ".join(words[k:] + words[:k]), looks)[0]
    if len(answer) >= 6:
        yield answer[::-1]


def _names(answer: str, text: str, begins: list[bool]) -> bool:
    """Returns whether an answer is in a text, both as `letters`: as words, or, if it is long, anywhere.

    Where a word begins is all that counts of spaces and punctuation: "R-o m_e" and "Romes" name "Rome".
    """
    at = text.find(answer)
    while at >= 0:
        end = at + len(answer)
        plural = next((n for n in (1, 2) if text[end : end + n] == "es"[-n:] and begins[end + n]), 0)
        if len(answer) >= 10 or (begins[at] and (begins[end] or plural)):
            return True
        at = text.find(answer, at + 1)
    return False


def normalized(text: str) -> str:
    """Returns a text's words in lower case, without punctuation; candidates with the same words are duplicates."""
    return " ".join(re.findall(r"\w+", plain(text).lower()))


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
    cut: bool = False  # it ended at a limit: the endpoint's, or MAX_REPLY


class Optimizer:
    """Client of an OpenAI-compatible chat endpoint; plumbing/client.py says what it retries.

    `url` is the base, as in OPENAI_BASE_URL. `paid` maps keys to the calls that an earlier process of this run has
    logged (`paid_calls`): they are not paid for again.
    """

    def __init__(
        self, url: str, model: str, api_key: str = "", timeout: float = 300, retries: int = 4, backoff: float = 1.0,
        paid: dict[str, Call] | None = None, revive: Callable[[], str] = lambda: "",
    ):  # fmt: skip
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
            return replace(self.paid[key], prompt=prompt, paid_before=True)
        start = time.perf_counter()
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        try:
            with may_stop():
                reply, cut, usage = self._client.post("/chat/completions", body, _read_completion)
        except RequestFailed as e:
            raise OptimizerDown(str(e)) from e
        return Call(
            key=key,
            prompt=prompt,
            reply=reply[:MAX_REPLY],
            prompt_tokens=_tokens(usage.get("prompt_tokens"), prompt),
            completion_tokens=_tokens(usage.get("completion_tokens"), reply),
            seconds=round(time.perf_counter() - start, 3),
            paid_before=False,
            cut=cut or len(reply) > MAX_REPLY,
        )


def _read_completion(answer: Any) -> tuple[str, bool, dict[str, Any]]:
    choice = answer["choices"][0]
    reply = choice["message"]["content"] or ""
    if not isinstance(reply, str):
        raise TypeError("content is not text")
    usage = answer.get("usage")
    return reply, choice.get("finish_reason") == "length", usage if isinstance(usage, dict) else {}


def _tokens(counted: Any, text: str) -> int:
    return counted if type(counted) is int and 0 < counted < 10**9 else len(text) // 4


def paid_calls(rows: Iterable[Any]) -> dict[str, Call]:
    """Returns the calls that an earlier process of this run has paid for, by key, from rows of reflections.jsonl.

    They are checked as a reply is when it arrives; a row that no process wrote like this is as good as absent.
    """
    paid = {}
    for row in rows:
        call = row.get("call") if isinstance(row, dict) else None
        if not isinstance(call, dict) or not all(isinstance(call.get(x), str) for x in ("key", "prompt", "reply")):
            continue
        seconds, reply = call.get("seconds"), clean(call["reply"])[:MAX_REPLY]
        paid[call["key"]] = Call(
            key=call["key"],
            prompt=call["prompt"],
            reply=reply,
            prompt_tokens=_tokens(call.get("prompt_tokens"), call["prompt"]),
            completion_tokens=_tokens(call.get("completion_tokens"), reply),
            seconds=seconds if isinstance(seconds, (int, float)) and 0 <= seconds < math.inf else 0.0,
            paid_before=True,
            cut=call.get("cut") is True,
        )
    return paid


def endpoint(cfg: Config) -> tuple[str, str]:
    """Returns URL and key of the optimizer: OPENAI_BASE_URL's, else OpenAI's; "" if the run calls none of them.

    Raises Fault if none can be called.
    """
    if not evolves(cfg) or scripted(cfg):
        return "", ""
    url, key = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "").strip()
    if not (cfg.optimizer_model and (url or key)):
        raise Fault(
            "no optimizer: set OPENAI_API_KEY to take OpenAI's, or OPENAI_BASE_URL and --optimizer_model, or choose"
            " --mode static"
        )
    if url and not url.startswith(("http://", "https://")):
        raise Fault(f"OPENAI_BASE_URL {without_secrets(url)}: begin it with http:// or https://")
    return url or OPENAI, key


def connect(
    cfg: Config, serve: Callable[..., str], rows: Iterable[Any]
) -> Optimizer | None:
    """Returns the client of `endpoint`, or of the world's scripted optimizer; None in mode static.

    `serve` runs a program as a server; `rows`: of reflections.jsonl, whose calls have been paid for.
    """
    if not evolves(cfg):
        return None
    paid = paid_calls(rows)
    if scripted(cfg):
        control = ["--guess"] if cfg.optimizer_model == "guessing" else []

        def own() -> str:
            return serve("-m", "world.optimizer", "--seed", str(cfg.seed), *control) + "/v1"

        return Optimizer(own(), cfg.optimizer_model, retries=cfg.optimizer_retries, paid=paid, revive=own)
    url, key = endpoint(cfg)
    return Optimizer(url, cfg.optimizer_model, key, retries=cfg.optimizer_retries, paid=paid)


def describe(optimizer: Optimizer | None) -> str:
    """Returns the optimizer in words."""
    if not optimizer:
        return "none"
    return f"{optimizer.model} at {without_secrets(optimizer.url)} (tokens: {token_counter()[1]})"
