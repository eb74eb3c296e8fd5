"""Questions answered by searching, scored by exact match: the paper's task, and the default one.

Its parts: the search tool, a client of Search-R1's POST /retrieve; the questions, Search-R1's and
verl's parquet unchanged, or JSONL with the same fields; and the match of an answer (§2.1, §4).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from config import Config
from plumbing.batches import Batches
from plumbing.client import Client
from plumbing.faults import Fault, Outage, ToolDown, first_line
from plumbing.hub import fetch_file, find_on_disk
from plumbing.outside import clean, contents_of, without_secrets
from tasks.task import Question, Task, Trajectory, rng_of
from tasks.tools import Tool

# ---- questions

# Without the metadata, which holds HotpotQA's passages: most of Search-R1's 356 MB.
COLUMNS = "id question golden_answers data_source prompt reward_model extra_info".split()


def load_questions(path: str | Path, rows: bool = False) -> list[Question]:
    """Returns the questions of a .jsonl or .parquet file, or of one on the hub (§4); a Fault names
    file and row.

    An id that occurs twice (`train_0` of NQ and of HotpotQA in one file) becomes `{source}-{id}`.
    `rows`: the row of each, with all its columns, is its `data`, and it needs no gold answer.
    """
    questions = []
    for line, row in read_rows(path, None if rows else COLUMNS):
        try:
            questions.append(_read_question(row, line, rows))
        except ValueError as e:
            raise Fault(f"{path}:{line}: {e}") from None
    n = Counter(q.id for q in questions)
    return [replace(q, id=f"{q.source}-{q.id}") if n[q.id] > 1 else q for q in questions]


def read_rows(
    path: str | Path, columns: Collection[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a .jsonl or .parquet file, or of one on the hub, counted from 1: of a
    parquet those of `columns` that it has; None: all. Raises Fault, also where there is none."""
    file = fetch_file(str(path))
    if not file.is_file():
        raise Fault(f"{path}: no such file; check the path")
    if file.suffix == ".jsonl":
        yield from read_json_lines(file)
    elif file.suffix == ".parquet":
        yield from enumerate(read_parquet(file, columns), 1)
    else:
        raise Fault(f"{path}: neither .jsonl nor .parquet; write it as one of them")


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw)
            except ValueError as e:
                raise Fault(
                    f"{path}:{line}: invalid JSON ({e}); write one JSON object a line, in UTF-8"
                ) from None


def read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq  # here: few files are parquet

    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if not columns or name in columns]
            for batch in file.iter_batches(10_000, columns=names):
                yield from batch.to_pylist()
    except (OSError, ValueError) as e:  # pyarrow's, or text that is not UTF-8
        raise Fault(
            f"{path}: not a readable parquet file ({first_line(e)}); write it again"
        ) from None


def _read_question(row: object, line: int, keeps_row: bool) -> Question:
    """Returns the question in a row of either format; a ValueError says what is wrong and what to
    do."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object; write one JSON object a line")
    source = look_up(row, "data_source", default="data")
    id = look_up(row, "id", default=look_up(row, "extra_info", "index", default=f"{source}-{line}"))
    text = look_up(row, "question")
    asked = _find_question(row.get("prompt")) if text is None else text
    if not isinstance(asked, str) or not asked.strip():
        raise ValueError(
            "no question; fill `question`, or `prompt` with a text or messages of the system and the user"
        )
    golds = _find_golds(row)
    if not golds and not keeps_row:
        raise ValueError(
            "no gold answer; fill `golden_answers` or `reward_model.ground_truth` with a text or a list of texts"
        )
    id, source, asked, *golds = clean([str(id), str(source), asked.strip(), *golds])
    if text is not None and not asked.endswith(("?", "？", "؟")):
        asked += "?"  # as Search-R1 does
    return Question(id, asked, tuple(golds), source, row if keeps_row else None)


def _find_golds(row: object) -> list[str]:
    """Returns the gold answers of a row, Search-R1's or verl's ground truth; none if they are no
    texts."""
    truth = look_up(row, "reward_model", "ground_truth")
    golds = look_up(row, "golden_answers", default=look_up(truth, "target", default=truth))
    if isinstance(golds, str):
        golds = [golds]
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        return []
    return [gold.strip() for gold in golds if gold.strip()]


def look_up(row: object, *keys: str, default: Any = None) -> Any:
    """Returns `row[k1][k2]...`, or `default` where a key is absent or null."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return default if row is None else row


def _find_question(prompt: Any) -> str | None:
    """Returns what a prompt asks: a text, or messages of the system and the user; None if it is
    neither.

    In the place of a template that says how to answer, as Search-R1's does, a run has its
    instruction: what is asked follows its last `Question:`.
    """
    rules = ""
    match prompt:
        case str(text) | [{"role": "user", "content": str(text)}]:
            pass
        case [{"role": "system", "content": str(rules)}, {"role": "user", "content": str(text)}]:
            pass
        case _:
            return None
    before, _, asked = text.rpartition("Question:")
    if "<answer>" in rules + before:
        return asked
    return f"{rules}\n\n{text if before.strip() else asked.strip()}"


# ---- the match of an answer


def normalize(text: str) -> str:
    """Returns text in lower case, without ASCII punctuation, articles and extra spaces, in SQuAD's
    order (§4)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def em(prediction: str | None, golds: Iterable[str]) -> float:
    """Returns r_EM of §2.1: 1.0 if the normalized prediction equals any normalized gold, else
    0.0."""
    # a blank would equal the gold "A", whose article is dropped
    if prediction is None or not prediction.strip():
        return 0.0
    return float(normalize(prediction) in {normalize(gold) for gold in golds})


def f1(prediction: str | None, golds: Iterable[str]) -> float:
    """Returns the best token F1 over the golds, in [0, 1]; reported beside EM."""
    if prediction is None or not prediction.strip():
        return 0.0
    best, a = 0.0, _tokens(prediction)
    for gold in golds:
        b = _tokens(gold)
        if a and b:
            score = 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))
        else:
            score = float(a == b)
        best = max(best, score)
    return best


def holds_gold(passages: Iterable[str], golds: Iterable[str]) -> bool:
    """Returns whether some gold's tokens stand in a row in the passages."""
    text = f" {' '.join(_tokens(' '.join(passages)))} "
    return any(f" {' '.join(tokens)} " in text for tokens in map(_tokens, golds) if tokens)


def _tokens(text: str) -> list[str]:
    return normalize(text).split()


# ---- the search

# where retrieval_server.py and Search-R1's own listen unless told otherwise
DEFAULT = "http://127.0.0.1:8000"
RETRIES = 6  # of a search, over a minute, before the run stops (resumable)


class Search(Tool):
    """Client of Search-R1's POST /retrieve: queries in, passages out.

    One thread sends what has queued up since its last request, at most 256 queries, as one request:
    batches form under load, and a lone query leaves at once. Where the server stays away
    (plumbing/client.py says what is retried), the futures raise ToolDown.
    """

    tag, noun, argument = "search", "a search", "query"
    plural, result_tag = "searches", "information"
    description = "Searches a collection of passages and returns those that match the query best."

    def __init__(self, url: str, topk: int, timeout: float = 30, retries: int = RETRIES):
        self.topk, self.timeout, self.retries = topk, timeout, retries
        self.connect(url)
        self._batches = Batches(self._retrieve, 256)

    def connect(self, url: str, restart: Callable[[], object] | None = None) -> None:
        """Searches at another server from now on; `restart` starts one of this run's own again if it
        has died."""
        self.url, self._restart = url, restart
        self._client = Client(url, self.timeout, self.retries)

    def submit(self, argument: str) -> Future[list[str]]:
        """Returns a Future of the passages' `contents`, best first."""
        return self._batches.submit(argument)

    def show(self, result: list[str]) -> str:
        """Returns the passages as the policy reads them (App. F); each is `"Title"\\ntext`."""
        shown = []
        for k, contents in enumerate(result, 1):
            title, _, text = contents.partition("\n")
            title = re.sub('^"(.*)"$', r"\1", title.strip())
            shown.append(f"Doc {k}(Title: {title}) {text.strip()}")
        return "\n".join(shown)

    def _retrieve(self, queries: list[str]) -> dict[str, list[str]]:
        def read(answer: Any) -> dict[str, list[str]]:
            passages = {}
            for query, hits in zip(queries, answer["result"], strict=True):
                best = [hit.get("document", hit) for hit in hits[: self.topk]]
                passages[query] = [contents_of(document) for document in best]
            return passages

        body = {"queries": queries, "topk": self.topk, "return_scores": True}
        for _ in range(2 if self._restart else 1):  # this run's own may die while it is asked
            try:
                if self._restart:
                    self._restart()
                return self._client.ask("/retrieve", body, read)
            except Outage as e:
                fault = e
        raise ToolDown(f"the search server gives no usable answer ({fault})") from fault


def choose_source(cfg: Config) -> Config:
    """Returns `cfg` with what to search if it names neither --retriever nor --corpus; raises Fault
    if there is nothing.

    That is the server on port 8000 of this machine, if one answers there.
    """
    if cfg.corpus and not cfg.retriever and not Path(cfg.corpus).is_file():
        raise Fault(f"--corpus {cfg.corpus}: no such file; check the path")
    if cfg.corpus or cfg.retriever:
        return cfg
    if probe(DEFAULT, cfg.topk):
        raise Fault(
            f"nothing to search: give --corpus (passages) or --retriever (URL of a running server), or start one at"
            f" {DEFAULT} (docs/retrieval.md)"
        )
    return replace(cfg, retriever=DEFAULT)


def probe(url: str, topk: int) -> BaseException | None:
    """Asks a search server; returns why it does not answer, None if it does."""
    return Search(url, topk, retries=0).submit("is anyone there").exception()


def start_server(cfg: Config, serve: Callable[..., str]) -> tuple[str, Callable[[], object] | None]:
    """Returns the URL of --retriever, which answers, or of a BM25 server over --corpus and what
    restarts that."""
    if cfg.retriever:
        fault = probe(cfg.retriever, cfg.topk)
        if fault:
            raise Fault(
                f"--retriever: {fault}; start it (at http://...), or serve --corpus with --retriever ''"
            )
        return cfg.retriever, None
    # a slow core makes BM25 of 1 MB of passages a second (docs/LOG.md)
    deadline = 60 + Path(cfg.corpus).stat().st_size / 1e6
    own = partial(serve, "-m", "retrieval_server", "--corpus", cfg.corpus, deadline=deadline)
    return own(), own


def try_search(search: Search, questions: Sequence[Question]) -> str:
    """Returns how well the server answers some questions, in words; Fault if it finds nothing at
    all."""
    futures = [search.submit(q.text) for q in questions]
    results = [future.result() for future in futures]
    if not any(text.strip() for passages in results for text in passages):
        raise Fault(
            f"{without_secrets(search.url)} found no passage for any of {len(questions)} questions: check its index,"
            " and that it answers as Search-R1's server does"
        )
    hits = sum(holds_gold(found, q.golds) for found, q in zip(results, questions, strict=True))
    return f"a gold answer was in the passages of {hits} of {len(questions)} questions"


# ---- the task

SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> "
    "query </search> and it will return the top searched results between <information> and </information>. You can "
    "search as many times as your want. If you find no further external knowledge needed, you can directly provide "
    "the answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
)

WITHOUT_SEARCH = (  # whatever other tools there are: every prompt describes those
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. If you find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
)


class SearchQA(Task):
    """Reads --train, --valid and --test, and searches --corpus or --retriever."""

    instruction: str = SEARCH_R1  # what the paper starts from (App. F)
    keeps_rows = False  # whether a question's `data` is its row

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.search = Search("", cfg.topk)
        if cfg.tools not in ("search", "none"):
            raise Fault(f"--tools {cfg.tools}: choose search, none, calculator or module:function")
        self.tools = [self.search]
        if cfg.tools == "none":
            self.tools, self.instruction = [], WITHOUT_SEARCH
        self.takes_preset = self.instruction == SEARCH_R1

    def connect(self, address: str) -> None:
        """Searches at this URL."""
        self.search.connect(address)

    def address(self) -> str:
        return self.search.url

    def check(self) -> None:
        if self.search in self.tools:
            self.cfg = choose_source(self.cfg)

    def start(self, serve: Callable[..., str]) -> str:
        if self.search not in self.tools:
            return super().start(serve) or "tools: none"
        url, restart = start_server(self.cfg, serve)
        self.search.connect(url, restart)
        where = f"search: {without_secrets(url)}"
        if not self.cfg.retriever:
            where += f" (BM25 over {self.cfg.corpus}, started by this run)"
        # an evaluation needs none
        questions = self.questions("train")[:64] if find_on_disk(self.cfg.train) else []
        if questions:
            where += f"\n        {try_search(self.search, questions)}"
        return f"{where}\n{super().start(serve)}".strip()

    def load(self, path: str) -> list[Question]:
        """Returns the questions of a file, one of the task's or of --data. Raises Fault."""
        return load_questions(path, self.keeps_rows)

    def questions(self, split: str) -> list[Question]:
        cfg = self.cfg
        flag = "train" if split == "valid" and not cfg.valid else split
        file = getattr(cfg, flag)
        if not file:
            raise Fault(f"--{flag} is missing: give a .jsonl or .parquet file of questions")
        try:
            every = self.load(file)
        except Fault as e:
            raise Fault(f"--{flag} {e}") from None
        if cfg.valid or split == "test":
            return every
        n = min(500, len(every) // 10)
        aside = set(rng_of(cfg.seed, 0, "valid").permutation(len(every))[:n].tolist())  # CHOICE-25
        return [q for k, q in enumerate(every) if (k in aside) == (split == "valid")]

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [em(tau.prediction, tau.question.golds) for tau in taus]  # Eq.1

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        if not tau.question.golds:  # of rows that --reward scores
            return super().metrics(tau)
        return {
            "em": em(tau.prediction, tau.question.golds),
            "f1": f1(tau.prediction, tau.question.golds),
        }
