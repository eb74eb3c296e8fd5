"""A few steps of the embedded world, killed and resumed; JSON last.

    python -m extras.bench.resume --engine torch

The run prunes, evolves and saves on the way; --kill_at 0 does not kill it. With `--engine vllm`
every step puts vLLM to sleep, wakes it, sends it the weights and has it prove that it computes with
them. `--lora_rank 8` trains adapters, `--ranks 2` starts two processes. `--engine served` starts a
`vllm serve` on the second of two cards, which gets the weights over NCCL, and which the resumed run
takes again. Exits with 1 and a line if a run fails, if a step is missing or there twice, or if no
gradient arrived.
"""

import contextlib
import json
import math
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import torch

from config import PRESETS
from extras.bench.harness import ROOT, kill_tree, parser_of, train_command, write_instruction
from plumbing.faults import Fault, one_line
from plumbing.files import read_jsonl

FLAGS = "--batch 8 --mini_batch 20 --G 5 --K_p 1 --K_e 2 --T_e 5 --D_B 4 --eval_n 8 --save_every 1".split()
START = 100.0  # seconds that `vllm serve` may take, at most


def play(command: list[str], run: Path, kill_at: int) -> None:
    """Runs the command, killing it once step `kill_at` is logged and a checkpoint, which is written
    during the next step, is there (0: never). Where it fails, exits with its code: its own last
    line says why."""
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        if (
            kill_at
            and len(read_jsonl(run / "metrics.jsonl")) > kill_at
            and any(run.glob("checkpoints/step-*"))
        ):
            break
        time.sleep(0.02)
    code = process.poll()
    kill_tree(process)
    if code:
        sys.exit(code)
    if code == 0 and kill_at:
        raise Fault(f"it ended before it could be killed after step {kill_at}")


@contextlib.contextmanager
def serve(log: Path) -> Iterator[str]:
    """Yields the URL of a `vllm serve` of the world's policy on the second card; it takes weights
    over NCCL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world, url = PRESETS["world"], f"http://127.0.0.1:{port}"
    flags = f"--host 127.0.0.1 --port {port} --max-model-len {world['max_prompt'] + world['max_response']}"
    flags += " --logprobs-mode processed_logprobs --enable-scale-out --enforce-eager"
    flags += """ --hf-overrides '{"head_dtype": "float32"}'"""
    flags += """ --dtype bfloat16 --gpu-memory-utilization 0.3 --weight-transfer-config '{"backend": "nccl"}'"""
    cards = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))) or ["0", "1"]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": cards[1]}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        world["model"],
        *shlex.split(flags),
    ]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env
        )
    try:
        end = time.monotonic() + START
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=1, proxies={"http": ""}).ok:
                    break
            if process.poll() is not None or time.monotonic() > end:
                last = (log.read_text("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
                raise Fault(f"vllm serve did not start: {last}")
            time.sleep(0.3)
        yield url
    finally:
        kill_tree(process)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--engine", choices=("torch", "vllm", "served"), default="torch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--kill_at", type=int, default=3, help="the step after which it is killed; 0: none"
    )
    parser.add_argument(
        "--lora_rank", type=int, default=0, help="rank of LoRA adapters; 0: train all weights"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with its own card")
    args = parser.parse_args()
    saved, before = 0, []
    with contextlib.ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, flags = tmp / "run", [*FLAGS, "--device", args.device, "--T", str(args.steps)]
        flags += ["--instruction", str(write_instruction(tmp)), "--lora_rank", str(args.lora_rank)]
        if args.engine == "served":
            os.environ["VLLM_URLS"] = stack.enter_context(serve(tmp / "serve.log"))
            flags += ["--engine", "extras.engines.vllm_server:VllmServer"]
        else:
            flags += ["--engine", args.engine]
        if args.kill_at:
            play(train_command(run, args.ranks, flags), run, args.kill_at)
            saved = max(int(path.name[5:11]) for path in run.glob("checkpoints/step-*"))
            before = read_jsonl(run / "metrics.jsonl")[: saved + 1]
        play(train_command(run, args.ranks, flags), run, 0)
        rows = read_jsonl(run / "metrics.jsonl")
    if rows[: len(before)] != before:
        raise Fault("it was not resumed, but started over")
    if [row["t"] for row in rows] != list(range(args.steps + 1)):
        raise Fault("a step is missing from metrics.jsonl, or there twice")
    norms = [row["grad_norm"] for row in rows[1:]]
    if not max(norms) > 0 or not all(map(math.isfinite, norms)):
        raise Fault(f"the gradients' norms are {norms}")
    x = vars(args) | {"resumed_after": saved}
    x |= {"logp_gap_max": max(row["logp_gap"] for row in rows[1:]), "grad_norm_max": max(norms)}
    x |= {
        f"{name}_s": statistics.median(row[f"time/{name}"] for row in rows[1:])
        for name in ("rollout", "update")
    }
    print(json.dumps(x))


if __name__ == "__main__":
    with one_line():
        main()
