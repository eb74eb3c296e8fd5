"""Serves the page of runs on 127.0.0.1; a page that is open reloads when the runs have written more."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from page.html import build
from plumbing.faults import Fault
from plumbing.servers import listen

NAMES = ("metrics.jsonl", "population.jsonl", "reflections.jsonl", "summary.json")
TIMEOUT = 30.0  # seconds in which a reader has to send or take a piece of data


def stamp(paths: Sequence[Path]) -> str:
    """Returns a word that changes whenever the runs write something that their page shows."""
    found = hashlib.sha256()
    for path in paths:
        for name in NAMES:
            with contextlib.suppress(OSError):
                stat = (path / name).stat()
                found.update(f"{path}/{name} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    return found.hexdigest()[:16]


class Pages:
    """The page of these runs, rebuilt when someone asks for it and the runs have gone on."""

    def __init__(self, paths: Sequence[Path], **options: Any):
        self.paths, self.options = paths, options
        self.lock = threading.Lock()
        self.made, self.text = "", b""

    def page(self) -> bytes:
        with self.lock:
            if (now := stamp(self.paths)) != self.made:
                self.text, self.made = build(self.paths, live=now, **self.options).encode(), now
            return self.text


def server(paths: Sequence[Path], port: int, **options: Any) -> ThreadingHTTPServer:
    """Returns a server of GET / and GET /stamp that listens on 127.0.0.1; Fault if it cannot, or there is no run."""
    pages = Pages(paths, **options)
    pages.page()

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT

        def do_GET(self) -> None:
            # A name that points here is no reason to answer: another site's script may have asked for it.
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                return self.answer(403, b"ask for http://127.0.0.1 itself", "text/plain")
            if self.path in ("/", "/index.html"):
                try:
                    return self.answer(200, pages.page(), "text/html; charset=utf-8")
                except Fault as e:
                    return self.answer(503, str(e).encode(), "text/plain; charset=utf-8")
            if self.path == "/stamp":
                return self.answer(200, stamp(paths).encode(), "text/plain")
            return self.answer(404, b"there is / and /stamp", "text/plain")

        def answer(self, code: int, body: bytes, kind: str) -> None:
            with contextlib.suppress(OSError):  # a reader that has gone away, or takes too long
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", port), Handler, bind_and_activate=False)
    found.socket.close()
    found.socket = listen("127.0.0.1", port)
    found.server_address = found.socket.getsockname()
    return found


def serve(paths: Sequence[Path], port: int, **options: Any) -> None:
    """Serves until interrupted."""
    with server(paths, port, **options) as found:
        print(
            f"http://127.0.0.1:{found.server_address[1]} shows {', '.join(map(str, paths))}; Ctrl-C ends it", flush=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            found.serve_forever()
