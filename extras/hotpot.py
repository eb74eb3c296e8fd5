"""HotpotQA's questions and the passages that come with them, in this project's formats
(docs/real.md).

    python extras/hotpot.py data/hotpotqa                        # fetches 0.4 GB from the Hugging Face hub, once

Reads the distractor setting as the hub has it, in parquet: each question with ten passages, two
that answer it and eight that look alike. All passages of all questions, each once, are a corpus
that one machine searches: OUT/corpus.jsonl. OUT/train.jsonl and OUT/test.jsonl have the questions.
"""

if not __package__:
    import root  # noqa: F401
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from extras.bench.harness import parser_of
from plumbing.faults import one_line
from plumbing.hub import fetch_file
from tasks.search_qa import read_parquet

HUB = "hf://datasets/hotpotqa/hotpot_qa@1908d6afbbead072334abe2965f91bd2709910ab/distractor"
TRAIN = [f"{HUB}/train-0000{k}-of-00002.parquet" for k in range(2)]
TEST = [f"{HUB}/validation-00000-of-00001.parquet"]
COLUMNS = ("id", "question", "answer", "context")


def convert(out: Path, files: dict[str, Sequence[str]]) -> Counter[str]:
    """Writes OUT/NAME.jsonl with the questions of each name's files, and OUT/corpus.jsonl; returns
    their rows."""
    out.mkdir(parents=True, exist_ok=True)
    # hashes of passages, which take a tenth of their memory
    rows, seen = Counter[str](), set[int]()
    with contextlib.ExitStack() as stack:
        to = {
            name: stack.enter_context(open(out / f".{name}.part", "w", encoding="utf-8"))
            for name in (*files, "corpus")
        }

        def write(name: str, **row: object) -> None:
            to[name].write(json.dumps(row, ensure_ascii=False) + "\n")
            rows[name] += 1

        for name, file in [(name, file) for name, some in files.items() for file in some]:
            for row in read_parquet(fetch_file(file), COLUMNS):
                question = {"id": row["id"], "question": row["question"]}
                write(name, **question, golden_answers=[row["answer"]], data_source="hotpotqa")
                context = row["context"]
                for title, sentences in zip(context["title"], context["sentences"], strict=True):
                    body = " ".join(sentence.strip() for sentence in sentences)
                    text = f'"{title.strip()}"\n{body}'
                    if any(sentences) and hash(text) not in seen:
                        seen.add(hash(text))
                        write("corpus", id=str(rows["corpus"]), contents=text)
    for name in to:  # together, in the end: what is there is whole
        (out / f".{name}.part").replace(out / f"{name}.jsonl")
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    args = parser.parse_args(argv)
    with one_line("extras/hotpot.py"):
        n = convert(args.out, {"train": TRAIN, "test": TEST})
        print(
            f"{args.out}: {n['train']:,} questions to train on, {n['test']:,} held out, {n['corpus']:,} passages"
        )


if __name__ == "__main__":
    main()
