"""Shared by the tests of retrieval: corpora, a server in a thread, refusals."""

import contextlib
import json
import random
import threading
import time

import pytest
import requests
import uvicorn

from plumbing.faults import Fault
from plumbing.servers import listen
from retrieval_server import make_app

SYLLABLES = "ka lo mi ra ten vor sel dun bri cha pol ves nor gat il um".split()
KINDS = "painter river film mountain city composer novel bridge island play".split()


def write_corpus(path, rows, newline="\n"):
    path.write_text("".join(json.dumps(row) + newline for row in rows), newline="")
    return str(path)


def make_corpus(path, n=50, seed=0):
    """Writes n passages "p0", "p1", ... about places; returns the path."""
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        one, two, place = ("".join(draw.choices(SYLLABLES, k=3)).title() for _ in "123")
        title = f"{one} {two}"
        text = f"{title} is a {draw.choice(KINDS)} in {place} , known since {draw.randint(1500, 2020)} ."
        rows.append({"id": f"p{i}", "contents": f'"{title}"\n{text}'})
    return write_corpus(path, rows)


def refusal(call, *args, **more):
    """Returns the one line with which the call is refused: the problem, then what to do."""
    with pytest.raises(Fault) as refused:
        call(*args, **more)
    message = str(refused.value)
    assert "\n" not in message and ";" in message, message
    return message


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def serving(index, corpus):
    """Serves index and corpus on a real socket, in a thread, 3 passages a query; yields the URL."""
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(corpus, index, 3), log_level="warning"))
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        until(lambda: requests.get(url + "/health", timeout=60).ok)
        yield url
    finally:
        server.should_exit = True
        thread.join(10)
