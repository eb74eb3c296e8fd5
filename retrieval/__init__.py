"""The search server (server.py), and its parts: passages on disk, encoders, indexes and their build."""

import argparse

FAMILIES = {  # of encoders: query prefix, passage prefix, pooling
    "e5": ("query: ", "passage: ", "mean"),  # arXiv 2212.03533
    "e5-instruct": (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
        "",
        "mean",
    ),
    # arXiv 2309.07597, English v1.5
    "bge": ("Represent this sentence for searching relevant passages: ", "", "cls"),
    "cls": ("", "", "cls"),  # BGE-M3 and others
    "plain": ("", "", "mean"),
    "own": ("", "", "mean"),  # or what its files for sentence-transformers say
}


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program over passages; without a usage text its errors are one line."""
    parser = argparse.ArgumentParser(
        description=doc,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--corpus",
        required=True,
        help='JSONL: {"id", "contents"} or {"id", "title", "text"} a line',
    )
    parser.add_argument(
        "--family",
        default="",
        choices=["", *FAMILIES],
        help="prefixes and pooling (from its files and name)",
    )
    return parser
