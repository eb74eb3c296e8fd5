"""HotpotQA's questions and the passages that come with them, in this project's formats (docs/tonight.md).

    python extras/hotpot.py data/hotpotqa                        # fetches 0.4 GB from the Hugging Face hub, once
    python extras/hotpot.py data/hotpotqa --train hotpot_train_v1.1.json --test hotpot_dev_distractor_v1.json

Reads the distractor setting, as the hub has it (parquet) or as hotpotqa.github.io has it (JSON): each question beside
ten passages, two that answer it and eight that look alike. All passages of all questions, each once, are a corpus that
one machine searches: OUT/corpus.jsonl. OUT/train.jsonl and OUT/test.jsonl have the questions.
"""

from __future__ import annotations

if not __package__:
    import root  # noqa: F401
import argparse
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from plumbing.faults import Fault, one_line
from plumbing.hub import fetched
from plumbing.outside import decoded
from plumbing.parquet import parquet_rows

HUB = "hf://datasets/hotpotqa/hotpot_qa@1908d6afbbead072334abe2965f91bd2709910ab/distractor"
TRAIN = [f"{HUB}/train-0000{k}-of-00002.parquet" for k in range(2)]
TEST = [f"{HUB}/validation-00000-of-00001.parquet"]
COLUMNS = ("id", "question", "answer", "type", "level", "context")
Passage = tuple[str, str]  # title, text
Row = dict[str, Any]


def rows(path: Path) -> Iterator[object]:
    """Yields the rows of a file of either format; raises Fault if it is neither."""
    if path.suffix == ".parquet":
        import pyarrow as pa

        try:
            yield from parquet_rows(path, COLUMNS)
        except (OSError, pa.ArrowException) as e:
            raise Fault(f"{path}: not a readable parquet file ({str(e).splitlines()[0]}); fetch it again") from None
        return
    try:
        found = decoded(path.read_bytes())
    except OSError as e:
        raise Fault(f"{path}: {e.strerror}; check the path") from None
    except ValueError as e:
        raise Fault(f"{path}: no JSON ({getattr(e, 'msg', e)}); fetch it again") from None
    if not isinstance(found, list):
        raise Fault(f"{path}: no list of questions; give HotpotQA's distractor file, .json or .parquet")
    yield from found


def read(row: object) -> tuple[Row, list[Passage]]:
    """Returns the question and the passages of a row; a ValueError says what it lacks."""
    if not isinstance(row, dict):
        raise ValueError("no object")
    id = row.get("_id", row.get("id"))  # the official file's, the hub's
    if absent := [key for key in ("question", "answer") if not isinstance(row.get(key), str) or not row[key].strip()]:
        raise ValueError(f"no {absent[0]}")
    if not isinstance(id, str):
        raise ValueError("no id")
    pairs: Any = row.get("context")  # [[title, [sentence, ...]], ...], or the hub's two columns
    try:
        if isinstance(pairs, dict):
            pairs = zip(pairs["title"], pairs["sentences"], strict=True)
        passages = [(title.strip(), " ".join(s.strip() for s in sentences).strip()) for title, sentences in pairs]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ValueError("no context of titles and their sentences") from None
    question = {"id": id, "question": row["question"], "golden_answers": [row["answer"]], "data_source": "hotpotqa"}
    try:
        json.dumps([question, passages], ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can spell half a character
        raise ValueError("half of a surrogate pair") from None
    return question | {"metadata": {key: row.get(key) for key in ("type", "level")}}, [p for p in passages if p[1]]


def convert(out: Path, files: dict[str, Sequence[str]]) -> Counter[str]:
    """Writes OUT/NAME.jsonl with the questions of each name's files, and OUT/corpus.jsonl; returns their rows.

    Raises Fault, which names file and row; OUT is then as it was.
    """
    here = {name: [fetched(file) for file in some] for name, some in files.items()}
    rows_of: Counter[str] = Counter()
    seen: set[bytes] = set()  # digests of passages, which take a tenth of their memory
    with replacing([out / f"{name}.jsonl" for name in (*files, "corpus")]) as to:

        def put(name: str, row: Row) -> None:
            to[out / f"{name}.jsonl"].write(json.dumps(row, ensure_ascii=False) + "\n")
            rows_of[name] += 1

        for name, some in here.items():
            for question, passages in all_of(some):
                put(name, question)
                for title, text in passages:
                    digest = hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=12).digest()
                    if digest not in seen:
                        put("corpus", {"id": str(rows_of["corpus"]), "contents": f'"{title}"\n{text}'})
                        seen.add(digest)
    return rows_of


@contextlib.contextmanager
def replacing(paths: Sequence[Path]) -> Iterator[dict[Path, TextIO]]:
    """Yields files to write that replace those of `paths` together, in the end; raises Fault where they cannot."""
    parts = {path: path.with_name(f".{path.name}.part") for path in paths}
    try:
        with contextlib.ExitStack() as stack:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            yield {path: stack.enter_context(open(part, "w", encoding="utf-8")) for path, part in parts.items()}
        for path, part in parts.items():
            part.replace(path)
    except OSError as e:
        raise Fault(f"cannot write {paths[0].parent} ({e.strerror or e}); make room, or choose another one") from None
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):  # in its place by now, or there is no such folder
                part.unlink()


def all_of(files: Sequence[Path]) -> Iterator[tuple[Row, list[Passage]]]:
    for file in files:
        for number, row in enumerate(rows(file), 1):
            try:
                yield read(row)
            except ValueError as e:
                raise Fault(f"{file}:{number}: {e}; give HotpotQA's distractor file, .json or .parquet") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--train", nargs="+", default=TRAIN, help="files of training questions; default: the hub's")
    parser.add_argument("--test", nargs="+", default=TEST, help="files of held-out questions; default: the hub's")
    args = parser.parse_args(argv)
    with one_line("extras/hotpot.py"):
        n = convert(args.out, {"train": args.train, "test": args.test})
        print(f"{args.out}: {n['train']:,} questions to train on, {n['test']:,} held out, {n['corpus']:,} passages")


if __name__ == "__main__":
    main()
