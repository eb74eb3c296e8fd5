"""A model behind any OpenAI-compatible chat endpoint, as an Engine: for evaluations, never for
training.

    python evaluate.py http://127.0.0.1:8001/v1 --engine extras.engines.chat:ChatEngine ...

Its weights and its tokens are elsewhere. Texts are therefore cut into words, which take the place
of token ids, so a limit in tokens is one in words here. A row is a conversation: the prompt is the
user's first message, a turn is the assistant's, and an observation is the user's next one. A policy
that was trained here saw its observations inside its own message, so evaluate it from its
directory.
"""

import os
import re
from typing import Any

from config import Config
from engines import Contexts, FinishedTurn, Turns
from extras.engines import RemoteEngine
from plumbing.client import Client, Reply, RequestFailed, read_reply
from plumbing.faults import EngineFault, Fault
from plumbing.outside import without_secrets

# how servers say that a conversation is too long
TOO_LONG = re.compile(
    r"HTTP 413|\btokens\b|context.?(?:length|size|window|limit)|too.?(?:long|large)", re.I
)


class Words:
    """A tokenizer without a model: a token is a word with the white space before it, and texts come
    back whole."""

    eos_token_id = -1
    all_special_tokens = ()
    added_tokens_decoder: dict = {}

    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": re.findall(r"\s*\S+|\s+$", text)}

    def decode(self, ids: list[Any], **_: object) -> str:
        return "".join(ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        """Returns the messages as they are, which the server's template gets as the user's first
        one."""
        return "\n\n".join(message["content"] for message in messages)


class ChatEngine(RemoteEngine):
    """An Engine that asks `url`/chat/completions, a request a turn; its samples depend on the
    server alone.

    The model of the configuration is URL or URL#NAME, of one of several models there; the key is
    OPENAI_API_KEY. Raises Fault if the server has no such model, EngineFault when it stops answering.
    """

    def __init__(self, cfg: Config, tokenizer: Any, stop: tuple[str, ...], retries: int = 4):
        if cfg.format != "tags":
            raise Fault(f"--format {cfg.format}: a chat endpoint renders its own template")
        url, _, name = cfg.model.partition("#")
        api_key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.url, self.tokenizer, self.stop = without_secrets(url), Words(), stop
        self.client = Client(url, 300, retries, api_key)
        self.once = Client(url, 300, 0, api_key)
        self.name = self.choose(name)
        super().__init__(32)

    def choose(self, name: str) -> str:
        """Returns the model to ask. Raises Fault if the server has another one; some list nothing,
        or other names."""

        def read_names(answer: Any) -> list[str]:
            return [str(model["id"]) for model in answer["data"]]

        try:
            served = self.once.ask("/models", None, read_names)
            names = ", ".join(served[:5]) or "no model"
            fault = (
                f"{self.url} has {names}{name and f', not {name}'}: choose one, as {self.url}#NAME"
            )
        except RequestFailed as e:
            served = []
            fault = f"{e}; start the server, or check the URL (it ends in /v1 as a rule)"
        if not name and len(served) == 1:
            return served[0]
        if name not in served and not (name and self.serves({"model": name})):
            raise Fault(fault)
        return name

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.messages: dict[int, list[dict]] = {}  # by row
        self.sent: dict[int, int] = {}  # words of a row's context that are in its messages

    def generate(self, contexts: Contexts, max_new: int, temperature: float) -> Turns:
        """As Engine, with 0 for every log-probability; a call waits up to 5 ms for a turn to
        finish."""
        for key, ids in contexts.items():
            messages = self.messages.setdefault(key, [])
            content = self.tokenizer.decode(ids[self.sent.get(key, 0) :]).strip()
            messages.append({"role": "user", "content": content})
            self.sent[key] = len(ids)
            body = {"model": self.name, "messages": list(messages), "temperature": temperature}
            body["max_tokens"] = max_new
            if self.stop:
                body["stop"] = list(self.stop[:4])  # OpenAI takes no more
            if temperature:
                body["seed"] = (self.seed + 1000003 * key + len(ids)) % 2**31
            self.start(self.ask, key, body)
        for turn in self.finished():
            text = self.tokenizer.decode(turn.ids)
            self.messages[turn.key].append({"role": "assistant", "content": text})
            self.sent[turn.key] += len(turn.ids)
            yield turn

    def ask(self, key: int, body: dict) -> FinishedTurn:
        """Returns the server's turn, the last one if it refuses this conversation alone; raises
        EngineFault."""
        try:
            reply, stop = self.client.ask("/chat/completions", body, read_reply), ""
        except RequestFailed as e:
            long = TOO_LONG.search(str(e))
            final = long or e.status in range(400, 500)
            if not final or not self.serves(body):
                raise EngineFault(str(e)) from None
            reply, stop = Reply(""), "length" if long else "refused"
        ids = self.tokenizer(self.closed(reply.text, reply.cut or stop != ""))["input_ids"]
        return FinishedTurn(key, ids, [0.0] * len(ids), stop)

    def serves(self, body: dict) -> bool:
        """Returns whether the server answers a greeting."""
        try:
            body = body | {"messages": [{"role": "user", "content": "Hi"}]}
            self.once.ask("/chat/completions", body, read_reply)
        except RequestFailed:
            return False
        return True

    def closed(self, text: str, cut: bool) -> str:
        """Returns a turn up to its first stop string, which some endpoints do not know as such.

        Others take it off: then it is that whose opening tag has no end, unless the turn was `cut` at
        a limit or by a filter.
        """
        for end in self.stop:
            head, found, _ = text.partition(end)
            text = head + found
        for end in self.stop:
            if end.startswith("</"):
                begin = end.replace("</", "<", 1)
            else:
                begin = end.replace("end", "begin", 1)
            if begin != end and not cut and text.count(begin) > text.count(end):
                return text + end
        return text

    def load(self, weights: object) -> None:
        raise EngineFault(
            f"{self.url}: weights cannot be sent to a chat endpoint; train with another engine"
        )
