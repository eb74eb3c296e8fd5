"""Questions with their gold answers: reading them, and matching a prediction (§2.1, §4).

Reads Search-R1's and verl's parquet unchanged, and JSONL with the same fields.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from plumbing.faults import Fault, first_line
from plumbing.hub import fetch_file
from plumbing.outside import clean, decoded
from plumbing.words import SIGNS, compose, split_words
from tasks import Question

# Without the metadata, which holds HotpotQA's passages: most of Search-R1's 356 MB.
COLUMNS = "id question golden_answers data_source prompt reward_model extra_info".split()
JSON_TEXT = re.compile(r'\s*"?(\[[\s\\n]*["{]|\{[\s\\n]*")')  # an answer may be [0, 1]
# as Python, numpy and DuckDB print lists and sets; an answer may be {"a": 1}, too
PRINTED = re.compile(r"\[.*,.*\]|(array\()?[\[(\s]+['\"].*[\])]|\{'[^:]*\}", re.S)
PRINTED_MESSAGES = re.compile(r"\s*(array\()?[\[(]\s*\{\s*'")  # as Python prints them
RULES = ("system", "developer")  # whose messages say how to answer
ENDS = ("?", "？", "؟", ":", "：")  # of a question, or of a cue: "Answer:"
OTHER_SCRIPTS = re.compile(f"[\u0530-\u1cff{SIGNS}]")


def load_questions(path: str | Path, rows: bool = False) -> list[Question]:
    """Returns the questions of a .jsonl or .parquet file, or of one on the hub (§4); a Fault names
    file and row.

    An id that several sources share (`train_0` of NQ and of HotpotQA in one file) becomes
    `{source}-{id}`. `rows`: the row of each, with all its columns, is its `data`, and it needs no
    gold answer.
    """
    questions, notes = [], Counter[str]()
    for line, row in read_rows(path, None if rows else COLUMNS):
        try:
            question = _read_question(row, line, rows, notes)
        except ValueError as e:
            raise Fault(f"{path}:{line}: {e}") from None
        questions.append(replace(question, data=row) if rows else question)
        if not question.golds:
            notes["questions have no gold answer: they are measured by their reward"] += 1
        if any(map(PRINTED.fullmatch, question.golds)):
            notes["questions have a list as the text of one gold answer: write a JSON list"] += 1
    for note, count in notes.items():
        print(f"note: {path}: {count} {note}", flush=True)
    n = Counter(q.id for q in questions)
    questions = [replace(q, id=f"{q.source}-{q.id}") if n[q.id] > 1 else q for q in questions]
    [(id, most)] = Counter(q.id for q in questions).most_common(1)
    if most > 1:
        raise Fault(
            f"{path}: {most} questions have the id {id!r}, source included; make the ids unique"
        )
    return questions


def read_rows(
    path: str | Path, columns: Collection[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a .jsonl or .parquet file, or of one on the hub, counted from 1: of a
    parquet those of `columns` that it has; None: all. Raises Fault, also where there is none."""
    file = fetch_file(str(path))
    if not file.is_file():
        raise Fault(f"{path}: no such file; check the path")
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        rows: Iterator[tuple[int, Any]] = read_json_lines(file)
    elif suffix == ".parquet":
        rows = read_parquet(file, columns)
    else:
        raise Fault(f"{path}: neither .jsonl nor .parquet; write it as one of them")
    line = 0
    for line, row in rows:
        yield line, row
    if not line:
        raise Fault(f"{path}: no question in it; give a file with at least one row")


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield line, decoded(raw)
            except ValueError as e:
                raise Fault(
                    f"{path}:{line}: invalid JSON ({getattr(e, 'msg', e)}); write one JSON object a line,"
                    " in UTF-8"
                ) from None


def read_parquet(
    path: Path, columns: Collection[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq  # here: few files are parquet

    line = 0
    try:
        with pq.ParquetFile(path) as file:
            fields = [f for f in file.schema_arrow if columns is None or f.name in columns]
            names = [f.name for f in fields]
            if len({*names}) < len(names):
                raise ValueError("two columns have one name")
            as_json = [f.name for f in fields if str(f.type) == "extension<arrow.json>"]
            for batch in file.iter_batches(10_000, columns=names):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    for name in as_json:
                        if row[name] is not None:
                            row[name] = decoded(row[name])
                    line += 1
                    yield line, row
    # pyarrow's, text that is not UTF-8, a date beyond Python's, a key that is there twice
    except (OSError, ValueError, OverflowError, KeyError) as e:
        raise Fault(
            f"{path}: not a readable parquet file ({first_line(e)}); write it again"
        ) from None


def _read_question(row: object, line: int, bare: bool, notes: Counter[str]) -> Question:
    """Returns the question in a row of either format; a ValueError says what is wrong and what to
    do. `bare`: it may have no gold answer that can be read. `notes` counts what is worth one."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object; write one JSON object a line")
    # whose it is, and what it asks
    source = str(look_up(row, "data_source", default="data"))
    id = str(
        look_up(row, "id", default=look_up(row, "extra_info", "index", default=f"{source}-{line}"))
    )
    text = look_up(row, "question")
    from_prompt = text is None
    if from_prompt:
        text = _find_question(look_up(row, "prompt"), notes)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            "no question; fill `question`, or `prompt` with texts, the last one the user's"
        )

    # the right answers, as texts
    golds = list[str]()
    try:
        golds = _find_golds(row)
    except ValueError:
        if not bare:
            raise

    # as data
    id, source, text, *golds = clean([id, source, text.strip(), *golds])
    # as Search-R1 does; but a prompt may end with a statement
    if not text.endswith(ENDS) and (text[-1:].isalnum() or not from_prompt):
        text += "?"
    return Question(id, text, tuple(golds), source)


def _find_golds(row: object) -> list[str]:
    """Returns the gold answers of a row: Search-R1's, or verl's ground truth."""
    truth = look_up(row, "reward_model", "ground_truth", default=())
    golds = look_up(row, "golden_answers", default=look_up(truth, "target", default=truth))
    if isinstance(golds, str):
        texts = unpacked(golds)
        golds = texts if isinstance(texts, list) and isinstance(texts[0], str) else [golds]
    if not isinstance(golds, list | tuple) or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(
            f"gold answers {golds!r:.80} are neither a text nor a list of texts; write them so"
        )
    golds = [gold.strip() for gold in golds if gold.strip()]
    if not golds:
        raise ValueError("no gold answer; fill `golden_answers` or `reward_model.ground_truth`")
    return golds


def look_up(row: object, *keys: str, default: Any = None) -> Any:
    """Returns `row[k1][k2]...`, or `default` where a key is absent or null. Objects may be JSON
    texts."""
    for key in keys:
        row = unpacked(row)
        row = row.get(key) if isinstance(row, dict) else None
    return default if row is None else row


def unpacked(value: object) -> Any:
    """Returns what a JSON text of an object, or of a list of texts or objects, says: exports write
    columns so."""
    if isinstance(value, str) and JSON_TEXT.match(value):
        with suppress(ValueError):
            return unpacked(decoded(value))  # it may be written twice
    return value


def _find_question(prompt: object, notes: Counter[str]) -> str | None:
    """Returns what a prompt asks: its text, or all that its messages say; None if it is no text, or
    the user does not speak last.

    In the place of a template that says how to answer, as Search-R1's does, a run has its
    instruction: what is asked follows its last `Question:`.
    """
    prompt = unpacked(prompt)
    if isinstance(prompt, str) or not isinstance(prompt, Iterable):
        prompt = [{"role": "user", "content": prompt}]
    said, in_template = list[tuple[str, str]](), False
    for message in prompt:
        role, text = look_up(message, "role"), look_up(message, "content")
        if isinstance(text, list):  # content parts
            parts = [look_up(part, "text") for part in text]
            text = "\n".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(text, str) or PRINTED_MESSAGES.match(text):
            return None
        before, _, asked = text.rpartition("Question:")
        if role == "user" and (not before.strip() or "<answer>" in before):
            text = asked
        said.append((str(role), text.strip()))
        in_template = in_template or "<answer>" in (text if role in RULES else before)
    if not said or said[-1][0] != "user" or not said[-1][1]:
        return None

    if in_template and any(role in RULES for role, _ in said):
        notes["questions have a system message, which the run's instruction replaces"] += 1
        said = [(role, text) for role, text in said if role not in RULES]
    # in a conversation, who says it
    roles = {role for role, _ in said}.difference(RULES)
    texts = [text if role in RULES or len(roles) == 1 else f"{role}: {text}" for role, text in said]
    return "\n\n".join(filter(None, texts))


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
    """Returns the normalized text split at blanks, and into words where its script is not like
    Latin."""
    tokens = []
    for token in normalize(compose(text)).split():
        tokens += split_words(token) if OTHER_SCRIPTS.search(token) else [token]
    return tokens
