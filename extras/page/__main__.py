"""The page of a run, or of several side by side: one HTML file that opens from disk.

python -m extras.page runs/<name>                     # writes runs/<name>/report.html
python -m extras.page runs/a runs/b --out both.html   # curves overlaid; seeds of one setting in a band
"""

import argparse
from pathlib import Path

from extras.page.html import write_page
from plumbing.faults import one_line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m extras.page", description="Writes one HTML page that explains runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs, finished or not")
    parser.add_argument(
        "--out",
        type=Path,
        help="the page [report.html in the run; for several runs, in this folder]",
    )
    args = parser.parse_args(argv)
    with one_line("page"):
        out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
        write_page(args.runs, out)
        print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
