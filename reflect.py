"""The LLM-based optimizer O: prompts, client, strict parsing (§3.2, App. E).

Works with any OpenAI-compatible chat endpoint. A reply is never adopted as it comes: only complete `<ins_k>` blocks
count, and each candidate has to pass `check`.
"""

import email.utils
import functools
import hashlib
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import requests

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

EXAMPLE = "<example>\nResponse: {response}\nCorrect answer: {gold}\n</example>"


@functools.cache
def token_counter() -> tuple[Callable[[str], int], str]:
    """(count, how): tiktoken's o200k_base, or four characters a token where its file cannot be had."""
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("o200k_base")
        return lambda text: len(encoding.encode(text, disallowed_special=())), "tiktoken"
    except Exception:  # not installed, or its encodings cannot be downloaded
        return lambda text: len(text) // 4 + 1, "estimate: 4 characters a token"


def paraphrase_prompt(instruction: str, n: int) -> str:
    return PARAPHRASE.format(instruction=instruction, n=n)


def reflection_prompt(
    instruction: str, failures: list[tuple[str, tuple[str, ...]]], n: int, budget: int, count: Callable[[str], int]
) -> str:
    """The prompt with `failures` [(question and response, golds)], each cut to its share of `budget` tokens."""
    share = budget // max(1, len(failures))
    examples = [EXAMPLE.format(response=shorten(text, share, count), gold=" or ".join(g)) for text, g in failures]
    return REFLECTION.format(instruction=instruction, examples="\n".join(examples), n=n)


def shorten(text: str, budget: int, count: Callable[[str], int]) -> str:
    """Cut a failure to about `budget` tokens: the middle of every observation goes, then the middle of the text.

    The question, the actions and the end of the trajectory stay as long as anything else is left to cut.
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
    """The texts of a reply's complete `<ins_k>...</ins_k>` blocks, k >= 1, in order; nothing else is taken."""
    blocks = re.findall(r"<ins_([1-9]\d*)>((?:(?!</?ins_\d).)*)</ins_\1>", reply, re.S)
    return [text.strip() for _, text in blocks]


def check(candidate: str, parent: str, taken: set[str], golds: list[str], max_tokens: int, count) -> str:
    """Why a candidate cannot join ("" if it can); `taken` are the texts in use, as `same` writes them."""
    if not same(candidate):
        return "empty"
    if same(candidate) in taken:
        return "duplicate"
    if count(candidate) > max_tokens:
        return f"longer than {max_tokens} tokens"
    tag = r"</?[A-Za-z_][\w-]*>"
    if lost := sorted(set(re.findall(tag, parent)) - set(re.findall(tag, candidate))):
        return f"lost {lost[0]}"
    words = f" {same(candidate)} "
    for gold in golds:  # an answer that the parent already names ("Beijing" in Search-R1's) leaks nothing new
        if len(same(gold)) > 3 and f" {same(gold)} " in words and f" {same(gold)} " not in f" {same(parent)} ":
            return f"contains the gold answer {gold!r}"
    return ""


def same(text: str) -> str:
    """A text's words alone: two candidates with the same words are one candidate."""
    return " ".join(re.findall(r"\w+", text.lower()))


class OptimizerDown(Exception):
    """The optimizer gave no reply after all retries; training goes on without this evolution."""


@dataclass
class Optimizer:
    """Client of an OpenAI-compatible endpoint.

    `paid` maps the key of a call to its earlier reply: a resumed run takes it from there. Transient faults
    (connection, timeout, 429, 5xx) are retried with exponential back-off and jitter, honouring Retry-After.
    """

    url: str  # base, as in OPENAI_BASE_URL
    model: str
    api_key: str = ""
    timeout: float = 300
    retries: int = 4
    backoff: float = 1.0  # seconds, doubled at every retry
    paid: dict[str, dict] | None = None

    def ask(self, prompt: str, when: str) -> dict:
        """{"reply", "prompt_tokens", "completion_tokens", "seconds", "key", "paid_before"}; raises OptimizerDown.

        `when` tells calls with the same prompt apart (step and round).
        """
        key = f"{when} " + hashlib.sha256(f"{self.model}\n{prompt}".encode()).hexdigest()[:16]
        if self.paid and key in self.paid:
            return self.paid[key] | {"paid_before": True}
        start = time.time()
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        http = requests.Session()  # a proxy from the environment would be asked even for loopback
        http.trust_env = not re.match(r"https?://(localhost|127\.0\.0\.1|\[::1\])[:/]", self.url)
        fault, wait = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(max(wait, self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)))
                wait = 0.0
            try:
                answer = http.post(
                    f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=self.timeout
                )
                if answer.status_code == 200:
                    return self._read(answer, prompt, key, time.time() - start)
                fault = f"HTTP {answer.status_code}: {answer.text[:200].strip()}"
                if answer.status_code != 429 and answer.status_code < 500:
                    break  # asking again would not help
                wait = _retry_after(answer.headers.get("Retry-After", ""))
            except requests.RequestException as e:
                fault = type(e).__name__
            except (ValueError, KeyError, IndexError, TypeError) as e:
                fault = f"not a chat completion ({type(e).__name__})"
        raise OptimizerDown(f"{self.url}: {fault}")

    def _read(self, answer: requests.Response, prompt: str, key: str, seconds: float) -> dict:
        data = answer.json()
        reply = data["choices"][0]["message"]["content"] or ""
        if not isinstance(reply, str):
            raise TypeError("content is not text")
        usage = data.get("usage") if isinstance(data.get("usage"), dict) else {}
        return {
            "key": key,
            "reply": reply,
            "prompt_tokens": usage.get("prompt_tokens") or len(prompt) // 4,
            "completion_tokens": usage.get("completion_tokens") or len(reply) // 4,
            "seconds": round(seconds, 3),
            "paid_before": False,
        }


def propose(
    optimizer: Optimizer,
    when: str,
    parent: str,
    failures: list[tuple[str, tuple[str, ...]]],
    n: int,
    taken: set[str],
    *,
    budget: int,
    max_tokens: int,
) -> tuple[dict, list[str], list[dict]]:
    """Ask O for `n` candidates: by reflection on `failures` (text, golds), by paraphrase where there are none.

    Returns (call, accepted texts, [{"text", "reason"}] of the rejected); adds what it accepts to `taken`.
    Raises OptimizerDown.
    """
    count, _ = token_counter()
    prompt = reflection_prompt(parent, failures, n, budget, count) if failures else paraphrase_prompt(parent, n)
    call = optimizer.ask(prompt, when)
    golds = [gold for _, golds in failures for gold in golds]
    accepted, rejected = [], []
    for text in parse(call["reply"]):
        if reason := check(text, parent, taken, golds, max_tokens, count):
            rejected.append({"text": text, "reason": reason})
        else:
            accepted.append(text)
            taken.add(same(text))
    return call | {"prompt": prompt}, accepted, rejected


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for (a number or an HTTP date), at most a minute."""
    try:
        return min(60.0, max(0.0, float(value)))
    except ValueError:
        when = email.utils.parsedate_to_datetime(value).timestamp() if re.search(r"GMT$", value) else 0.0
        return min(60.0, max(0.0, when - time.time()))


def paid_calls(rows: list[dict]) -> dict[str, dict]:
    """Replies that an earlier process of this run has paid for, by key, from the rows of reflections.jsonl."""
    return {row["call"]["key"]: row["call"] for row in rows if "call" in row}
