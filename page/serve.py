"""Serves the page of runs on 127.0.0.1; a page that is open reloads when the runs have written
more."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from page.html import build_page
from plumbing.faults import Fault

NAMES = ("metrics.jsonl", "population.jsonl", "reflections.jsonl", "summary.json")


def stamp_files(paths: Sequence[Path]) -> str:
    """A word that changes whenever the runs write something that their page shows."""
    parts = []
    for file in (path / name for path in paths for name in NAMES):
        if file.exists():
            parts.append(f"{file.stat().st_mtime_ns}-{file.stat().st_size}")
    return "-".join(parts)


def make_app(paths: Sequence[Path]) -> Any:
    """Answers GET / with the page, made anew when the runs have written more, and GET /stamp.
    Raises Fault."""
    from fastapi import FastAPI, Request  # here: a page in a file does without
    from fastapi.middleware.trustedhost import TrustedHostMiddleware
    from fastapi.responses import HTMLResponse, PlainTextResponse

    @lru_cache(1)
    def build_once(now: str) -> str:
        return build_page(paths, now)

    build_once(stamp_files(paths))
    pages = FastAPI(openapi_url=None)
    # A host name that resolves to this machine is no reason to answer: another site's script may
    # have asked for it.
    pages.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @pages.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(build_once(stamp_files(paths)), headers={"Cache-Control": "no-store"})

    @pages.get("/stamp")
    def state() -> PlainTextResponse:
        return PlainTextResponse(stamp_files(paths), headers={"Cache-Control": "no-store"})

    @pages.exception_handler(Fault)
    def unreadable(_: Request, fault: Fault) -> PlainTextResponse:
        return PlainTextResponse(str(fault), 503)

    return pages
