"""The LLM-based optimizer O: prompts, client, strict parsing (§3.2, App. E).

Works with any OpenAI-compatible chat endpoint. A reply is never adopted whole: only complete
`<ins_k>` blocks count, at most as many as were asked for, and `find_flaw` must find nothing in a
candidate.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from config import Config, evolves, find_endpoint, scripted
from plumbing.client import Client, read_reply, without_thoughts
from plumbing.faults import OptimizerDown, Outage
from plumbing.files import Row
from plumbing.outside import plain, printable, without_secrets
from plumbing.stop import may_stop
from plumbing.words import WORD, cut_middle, split_words

# <ins_k> with its own end and no other such tag inside
BLOCK = re.compile(r"<ins_([1-9]\d*)>((?:(?!</?ins_\d).)*)</ins_\1>", re.S)
QUESTION = re.compile(r"^\W*question\s*:", re.I | re.M)
CONTROL = re.compile(
    r"<[|｜][^<>]{1,64}[|｜]>|</?s>|<(?:bos|eos|pad|unk|(?:start|end)_of_turn)>|\[/?INST\]"
)
# texts of question and response, each with its golds
Failures = Sequence[tuple[str, tuple[str, ...]]]
ESCAPED = re.compile(r'\\n(?![a-z])|\\"')  # no LaTeX, such as \nu
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
TAG = re.compile(r"</?\w+>")
ANSWER_IS = re.compile(r"\banswers? .*?\b(?:is|are|was|were) (.*)")  # of words in lower case

# App. E, word for word; {n} stands for its N. (The paraphrase prompt has "6" there, which is N_P -
# 1.)
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


def count_tokens(text: str) -> int:
    """Returns about how many tokens a text is: 4 characters each."""
    return len(text) // 4 + 1


def paraphrase_prompt(instruction: str, n: int) -> str:
    """Returns the prompt that asks for `n` paraphrases of an instruction."""
    return PARAPHRASE.format(instruction=instruction, n=n)


def history_prompt(scored: Sequence[tuple[str, float]], n: int) -> str:
    """Returns the prompt that asks for `n` candidates better than the `scored` ones: (instruction,
    mean reward)."""
    pairs = []
    for k, (text, w) in enumerate(scored):
        pairs.append(f"<ins_{k}> {text} </ins_{k}>\n<score_{k}> {100 * w:.0f} </score_{k}>")
    return HISTORY.format(history="\n".join(pairs), n=n)


PROMPT_BUDGET = 16_000  # tokens of failures in a prompt


def reflection_prompt(instruction: str, failures: Failures, n: int, budget: int) -> str:
    """Returns the prompt that asks for `n` candidates after `failures`: pairs of (question and
    response, golds), which get `budget` tokens together."""
    shown = "\n".join(format_examples(failures, budget))
    return REFLECTION.format(instruction=instruction, examples=shown, n=n)


def format_examples(failures: Failures, budget: int) -> list[str]:
    """Returns failures, (question and response, golds), as they stand in a prompt. Each is cut to
    an equal share of `budget` tokens: it loses its middle."""
    share = budget // max(1, len(failures))  # CHOICE-30
    examples = []
    for text, golds in failures:  # CHOICE-36
        form = EXAMPLE if golds else WITHOUT_GOLD
        response = shorten(text, share)
        examples.append(form.format(response=response, gold=" or ".join(golds)))
    return examples


def shorten(text: str, budget: int) -> str:
    """Returns a text without so much of its middle that it is `budget` tokens."""
    return cut_middle(text, 4 * budget - 10)  # 7 are the mark of a cut, 3 are spare


def read_blocks(reply: str) -> list[str]:
    """Returns the texts of a reply's complete `<ins_k>...</ins_k>` blocks, k >= 1, in their order.

    What a reasoning model thinks before it answers holds drafts, which do not count.
    """
    blocks = BLOCK.findall(without_thoughts(reply, BLOCK))
    return ["\n".join(text.splitlines()).strip() for _, text in blocks]


def read_candidates(
    reply: str,
    parent: str,
    used: set[str],
    golds: Sequence[str],
    max_tokens: int,
    n: int,
    unfit: Callable[[str, str], str],
) -> tuple[dict[int, str], list[Row]]:
    """Returns the first `n` of a reply's candidates in which `find_flaw` finds none, {k: text}, and
    the others, {"k", "reason"}.

    k counts the reply's blocks from 1. Adds the accepted texts, normalized, to `used`.
    """
    accepted: dict[int, str] = {}
    rejected = []
    for k, text in enumerate(read_blocks(reply), 1):
        if len(accepted) == n:
            reason = f"{n} were asked for: neither this nor any after it is read"
            rejected.append({"k": k, "reason": reason})
            break
        flaw = find_flaw(text, parent, used, golds, max_tokens, unfit)
        if flaw:
            rejected.append({"k": k, "reason": flaw})
        else:
            accepted[k] = text
            used.add(fold_words(text))
    return accepted, rejected


def find_flaw(
    candidate: str,
    parent: str,
    used: set[str],
    golds: Iterable[str],
    max_tokens: int,
    unfit: Callable[[str, str], str],
) -> str:
    """Returns why a candidate cannot join, or ""; `used` holds the normalized texts of the parents
    and of what was proposed in this evolution.

    `unfit(candidate, parent)` says why the policy could not act under it, or "" (Tags.find_unfit).
    Everything else may change: other tags, another example of an answer, other words.
    """
    # faults of the text as a whole
    folded = fold_words(candidate)
    if not folded:
        return "empty"
    if folded in used:  # CHOICE-28
        return "duplicate"
    if count_tokens(candidate) > max_tokens:  # CHOICE-27
        return f"longer than {max_tokens} tokens"
    missed = unfit(candidate, parent)
    if missed:
        return missed

    # characters and tokens that no instruction has
    text = candidate.replace("\r\n", "\n")
    if printable(text) != text:
        return "holds control characters"
    if ESCAPED.search(candidate) and not ESCAPED.search(parent):
        return "holds escapes, as JSON has them"
    text = plain(candidate)
    old = plain(parent)
    added = set(CONTROL.findall(text)) - set(CONTROL.findall(old))
    if added:
        return f"holds the control token {min(added)}"

    # a question or an answer that the parent does not have: CHOICE-35
    if len(QUESTION.findall(text)) > len(QUESTION.findall(old)):
        return "asks a question of its own"
    for gold in golds:
        # "Beijing" is in Search-R1's instruction already
        if gives_away(candidate, gold) and not _mentions(parent, gold):
            return f"contains the gold answer {gold!r}"
    return ""


def gives_away(candidate: str, gold: str) -> bool:
    """Returns whether a candidate gives an answer away.

    A name of several words does so anywhere. One word, or a phrase in lower case, is in any prompt
    (the paper's have "Evidence", and "Munich" as an illustration): it does so only as the answer,
    between the tags or in a sentence.
    """
    if not _mentions(candidate, gold):
        return False
    # its words that are not in lower case; one with a hyphen counts as one
    names = [word for word in WORD.findall(plain(gold).replace("-", "")) if not word.islower()]
    text = plain(candidate)
    if len(names) > 1 or any(_mentions(answer, gold) for answer in ANSWER.findall(text)):
        return True
    for sentence in re.split(r"[.!?\n]", TAG.sub(" ", text)):
        words = fold_words(sentence)
        said = ANSWER_IS.search(words)
        if words.endswith(f"answer {fold_words(gold)}") or (said and _mentions(said[1], gold)):
            return True
    return False


def _mentions(text: str, answer: str) -> bool:
    """Returns whether a text has an answer's words in a row; short ones ("a", "yes", "two") are in
    any prompt."""
    words = fold_words(answer)
    shortest = 4 if words.isascii() else 3
    return len(words) >= shortest and f" {words} " in f" {fold_words(text)} "


def fold_words(text: str) -> str:
    """Returns a text's words in lower case, without punctuation; candidates with the same words are
    duplicates."""
    return " ".join(split_words(plain(text)))


@dataclass(frozen=True)
class Call:
    """One call to the optimizer and its reply, as logged in reflections.jsonl."""

    prompt: str
    reply: str
    prompt_tokens: int  # as the endpoint counts them; estimated where it does not
    completion_tokens: int
    seconds: float  # retries included
    cut: bool = False  # it ended at the endpoint's limit


class Optimizer:
    """Client of an OpenAI-compatible chat endpoint; plumbing/client.py says what it retries.

    `url` is the base, as in OPENAI_BASE_URL.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str = "",
        timeout: float = 300,
        retries: int = 4,
        restart: Callable[[], object] = lambda: None,
    ):
        self.url, self.model = url, model
        self.restart = restart  # starts this run's own server again if it has died
        self._client = Client(url, timeout, retries, api_key)

    def ask(self, prompt: str) -> Call:
        """Returns the call with its reply; raises OptimizerDown."""
        began = time.perf_counter()
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}

        try:
            with may_stop():
                self.restart()
                # a POST, repeated while the endpoint does not answer
                reply = self._client.ask("/chat/completions", body, read_reply)
        except Outage as e:
            raise OptimizerDown(str(e)) from None
        return Call(
            prompt=prompt,
            reply=reply.text,
            prompt_tokens=reply.prompt_tokens or len(prompt) // 4,
            completion_tokens=reply.completion_tokens or len(reply.text) // 4,
            seconds=round(time.perf_counter() - began, 3),
            cut=reply.cut,
        )


def connect_optimizer(cfg: Config, serve: Callable[..., str]) -> Optimizer | None:
    """Returns the client of `find_endpoint`, or of the world's scripted optimizer; None in mode
    static.

    `serve` runs a program as a server.
    """
    if not evolves(cfg):
        return None

    def start() -> str:
        """Returns the URL of the scripted optimizer, which is started unless it is running; "": this
        run has no server of its own."""
        if not scripted(cfg):
            return ""
        control = ["--guess"] if cfg.optimizer_model == "guessing" else []
        return serve("-m", "world.optimizer", "--seed", str(cfg.seed), *control) + "/v1"

    url, key = find_endpoint(cfg)  # "" of the scripted one
    return Optimizer(url or start(), cfg.optimizer_model, key, restart=start)


def describe_optimizer(optimizer: Optimizer | None) -> str:
    """Returns which model answers where."""
    return f"{optimizer.model} at {without_secrets(optimizer.url)}" if optimizer else "none"
