"""Passages -> vectors: encodes with one process per device, in place into a flat FAISS index file, resumably."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path

import faiss
import numpy as np
import torch
from tqdm import tqdm

from plumbing.faults import Fault, one_line
from retrieval.corpus import Corpus
from retrieval.encoder import Encoder

CHUNK = 1024  # passages encoded, written and marked as done together


def flat_header(n: int, d: int) -> bytes:
    """Returns the header of FAISS's flat inner-product index file; n vectors of d fp32 numbers follow it."""
    one = faiss.IndexFlatIP(d)
    one.add(np.zeros((1, d), dtype=np.float32))
    header = bytearray(faiss.serialize_index(one).tobytes()[: -4 * d])
    for at, current, value in ((8, 1, n), (len(header) - 8, d, n * d)):  # counts of vectors and of fp32 numbers
        if int.from_bytes(header[at : at + 8], "little") != current:
            raise Fault(f"faiss {faiss.__version__} writes flat indexes differently; install 1.15.1")
        header[at : at + 8] = value.to_bytes(8, "little")
    return bytes(header)


def vectors_of(path: Path, d: int) -> np.ndarray:
    """Returns the vectors of a flat index file, (N, d) fp32, memory-mapped."""
    return np.memmap(path, dtype="<f4", mode="r", offset=len(flat_header(1, d))).reshape(-1, d)


def _work(plan: dict, partial: str, device: str, threads: int, todo: list[int], claimed) -> None:
    """Encodes chunks of `todo`, as a process of its own; `claimed` counts those that any process has started."""
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()  # exit when `build` does
    torch.set_num_threads(threads)
    with one_line():
        corpus = Corpus(plan["corpus"])
        if corpus.digest != plan["digest"]:
            raise Fault(f"{corpus.path}: has changed since the build started")
        encoder = Encoder(plan["encoder"], plan["family"], plan["max_length"], device)
    d = encoder.dimension
    header = len(flat_header(1, d))
    vectors = os.open(f"{partial}/vectors.faiss", os.O_WRONLY)
    done = os.open(f"{partial}/done", os.O_WRONLY)
    while True:
        with claimed.get_lock():
            k = claimed.value
            claimed.value += 1
        if k >= len(todo):
            return
        first = todo[k] * CHUNK
        x = encoder.passages(list(corpus.texts(first, min(first + CHUNK, len(corpus)))))
        view, at = memoryview(np.ascontiguousarray(x)).cast("B"), header + 4 * d * first
        while view:  # a write may be partial
            written = os.pwrite(vectors, view, at)
            view, at = view[written:], at + written
        os.fsync(vectors)  # the vectors must reach the disk before the mark
        os.pwrite(done, b"\1", todo[k])


def encode(plan: dict, partial: Path, n: int, d: int, devices: list[str]) -> None:
    """Fills `partial/vectors.faiss` with one process per device; raises Fault if one of them ends early."""
    path, chunks = partial / "vectors.faiss", -(-n // CHUNK)
    if not (partial / "done").exists() or (partial / "done").stat().st_size != chunks:
        with open(path, "wb") as f:
            f.write(flat_header(n, d))
            f.truncate(len(flat_header(n, d)) + 4 * d * n)
            os.fsync(f.fileno())
        (partial / "done.tmp").write_bytes(bytes(chunks))
        os.replace(partial / "done.tmp", partial / "done")
    done = np.memmap(partial / "done", dtype=np.uint8, mode="r")
    todo = np.flatnonzero(done == 0).tolist()
    if not todo:
        return
    spawn = multiprocessing.get_context("spawn")
    claimed = spawn.Value("q", 0)
    threads = max(1, torch.get_num_threads() // len(devices))
    workers = [
        spawn.Process(target=_work, args=(plan, str(partial), device, threads, todo, claimed), daemon=True)
        for device in devices[: len(todo)]
    ]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process; workers inherit SIG_IGN
    for worker in workers:
        worker.start()
    signal.signal(signal.SIGINT, before)

    def passages_done() -> int:
        return min(n, int(done.sum()) * CHUNK)

    with tqdm(total=n, initial=passages_done(), desc="encoding", unit=" passages") as bar:
        while any(worker.exitcode is None for worker in workers):
            wait([worker.sentinel for worker in workers if worker.exitcode is None], timeout=0.5)
            if more := passages_done() - bar.n:
                bar.update(more)
            if any(worker.exitcode for worker in workers):
                break
        bar.update(passages_done() - bar.n)
    if not done.all():
        code = next((worker.exitcode for worker in workers if worker.exitcode), 0)
        for worker in workers:
            worker.terminate()
        raise Fault(
            f"an encoding process ended with code {code}; the encoded vectors are kept: "
            "run the same command again (with fewer --workers if memory ran out)"
        )
