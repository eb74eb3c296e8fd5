"""What an evaluation is of, by content: rows of one identity may stand in one table, others never."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from config import TaskKnobs
from evaluation.agents import Subject
from plumbing.client import Client, RequestFailed
from plumbing.faults import Fault, ToolDown
from plumbing.outside import without_secrets
from tasks import Question, Task
from tasks.search import Search
from tasks.search_qa import SearchQA

PROBES = 8  # questions of each set by whose passages a search server is known that says nothing of itself
SAID = ("id", "root", "parent", "owned_by", "max_model_len", "meta")  # that a server says of a model, without the time
Row = dict[str, Any]


def identity(
    chosen: Subject, task: Task, instruction: str, questions: Mapping[str, Sequence[Question]], served: str
) -> Row:
    """Returns what decides the rows besides the knobs: questions, instruction, weights, passages. Raises Fault.

    `served`: the model to ask at a URL.
    """
    return {
        "questions": {title: digest(map(_content, some)) for title, some in questions.items()},
        "instruction": instruction,
        "model": model_at(chosen.weights, served),
        "passages": passages(task.cfg, questions) if isinstance(task, SearchQA) and task.tools else {},
    }


def model_at(weights: str, served: str) -> Row:
    """Returns the digest of a directory, the commit of a model on the hub, or what a server says of its model."""
    if weights.startswith(("http://", "https://")):
        from engines.chat_engine import ChatEngine, Words

        key = os.environ.get("OPENAI_API_KEY", "")
        with closing(ChatEngine(weights, served, Words(), (), api_key=key)) as engine:
            return {"url": without_secrets(weights)} | {k: engine.said[k] for k in SAID if k in engine.said}
    if Path(weights).is_dir():
        files = [path for path in sorted(Path(weights).iterdir()) if path.is_file() and path.name[0] != "."]
        return {path.name: digest(blocks(path)) for path in files if path.suffix != ".md"}
    from huggingface_hub import try_to_load_from_cache

    from models.model import load_config

    try:
        load_config(weights)
    except Fault as e:
        raise Fault(str(e).removeprefix("--model ")) from None
    return {"id": weights, "commit": Path(str(try_to_load_from_cache(weights, "config.json"))).parent.name}


def passages(cfg: TaskKnobs, questions: Mapping[str, Sequence[Question]]) -> Row:
    """Returns the digest of --corpus, or what --retriever says of its index; else of what it finds."""
    if not cfg.retriever:
        return {"corpus": digest(blocks(Path(cfg.corpus)))}
    client = Client(cfg.retriever.split(","), timeout=30, retries=0)
    try:
        return client.ask("/health", None, lambda answer: {key: answer[key] for key in ("passages", "index", "corpus")})
    except RequestFailed:  # a server of another kind
        search = Search(cfg.retriever, cfg.topk, retries=0)
    try:
        asked = [search.submit(q.text) for some in questions.values() for q in some[:PROBES]]
        return {"finds": digest(json.dumps(future.result()).encode() for future in asked)}
    except ToolDown as e:
        raise Fault(f"--retriever: {e}; start it, or serve --corpus with --retriever ''") from None


def digest(parts: Iterable[bytes]) -> str:
    """Returns 16 hexadecimal digits that tell some bytes from others."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            yield block


def _content(q: Question) -> bytes:
    return json.dumps([q.id, q.text, q.golds, q.source, q.hops, q.data], default=repr).encode()
