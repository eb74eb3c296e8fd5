"""The page of a run, or of several side by side: one HTML file that opens from disk, or is served
while they run.

    python report.py runs/<name>                     # writes runs/<name>/report.html
    python report.py runs/<name> --serve             # keeps the page fresh on 127.0.0.1 while the run goes on
    python report.py runs/a runs/b --out both.html   # curves overlaid; seeds of one setting in a band

The directory page/ has its parts: what is read, what is concluded, and the HTML, style and scripts
as files.
"""

import argparse
import signal
from pathlib import Path

from page.html import write_page
from page.serve import make_app
from plumbing.faults import one_line
from plumbing.servers import listen, serve_app


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "report.py", description="Writes one HTML page that explains runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs, finished or not")
    parser.add_argument(
        "--out",
        type=Path,
        help="the page [report.html in the run; for several runs, in this folder]",
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page on 127.0.0.1 and follow the runs"
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port of --serve [8080]; 0: any free one"
    )
    args = parser.parse_args(argv)
    with one_line("report.py"):
        if args.serve:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save
            app = make_app(args.runs)
            return serve_app(app, listen("127.0.0.1", args.port), child=False)
        out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
        write_page(args.runs, out)
        print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")


if __name__ == "__main__":
    main()
