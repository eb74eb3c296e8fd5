"""A few steps of the embedded world, killed and resumed; JSON last.

    python -m extras.bench.resume --engine torch

The run prunes, evolves and saves on the way; --kill_at 0 lets it end in peace. With `--engine vllm` every step puts
vLLM to sleep, wakes it, sends it the weights and has it prove that it computes with them. `--lora_rank 8` trains
adapters, `--ranks 2` starts two processes. `--engine served` starts a `vllm serve` on the second of two cards, which
gets the weights over NCCL, and which the resumed run takes again. Exits with 1 and a line if a run fails, if a step is
missing or there twice, or if no gradient arrived.
"""

import contextlib
import json
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import torch

from config import PRESETS
from extras.bench.harness import BEST, ROOT, kill_tree, parser_of
from journal.directory import read_jsonl
from plumbing.faults import Fault, one_line

FLAGS = "--batch 8 --mini 4 --G 5 --K_p 1 --K_e 2 --T_e 5 --D_B 4 --eval_n 8 --save_every 1".split()


def play(command: list[str], run: Path, kill_at: int) -> str:
    """Runs the command, killing it once step `kill_at` is logged and a checkpoint, which is written during the next
    step, is there (0: never); prints and returns its output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    lines: list[str] = []

    def pass_on() -> None:  # at once: a part that hangs is killed, and its last line then tells where
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    while process.poll() is None:
        if kill_at and len(read_jsonl(run / "metrics.jsonl")) > kill_at and any(run.glob("checkpoints/step-*")):
            break
        time.sleep(0.02)
    code = process.poll()
    kill_tree(process)
    reader.join(10)
    if code:
        last = ([line.strip() for line in lines if line.strip()] or ["no output"])[-1]
        raise Fault(f"inspo.py ended with code {code}: {last}")
    if code == 0 and kill_at:
        raise Fault(f"it ended before it could be killed after step {kill_at}")
    return "".join(lines)


START = 100.0  # seconds that `vllm serve` may take, at most


@contextlib.contextmanager
def served(log: Path) -> Iterator[str]:
    """Yields the URL of a `vllm serve` of the world's policy on the second card; it takes weights over NCCL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = PRESETS["world"]
    flags = f"--host 127.0.0.1 --port {port} --max-model-len {world['max_prompt'] + world['max_response']}"
    flags += " --logprobs-mode processed_logprobs --enable-scale-out --enforce-eager"
    flags += """ --hf-overrides '{"head_dtype": "float32"}'"""
    flags += """ --dtype bfloat16 --gpu-memory-utilization 0.3 --weight-transfer-config '{"backend": "nccl"}'"""
    seen = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))) or ["0", "1"]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": seen[1]}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", world["model"], *shlex.split(flags)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + START
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > end:
                    last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                    raise Fault(f"vllm serve did not start: {last}")
                time.sleep(0.3)
            yield url
        finally:
            kill_tree(process)


def answers(url: str) -> bool:
    """Returns whether a server answers with a success."""
    try:
        return requests.get(url, timeout=1, proxies={"http": ""}).ok
    except requests.RequestException:
        return False


def describe(x: dict, cuda: bool) -> str:
    """The figures in a phrase."""
    killed = f", killed, resumed after step {x['resumed_after']}" if x["resumed_after"] else ""
    over = f" on {x['ranks']} ranks" * (x["ranks"] > 1) + f", LoRA {x['lora_rank']}" * bool(x["lora_rank"])
    line = f"{x['steps']} steps{over}{killed}; rollouts {x['rollout_s']:.2f} s, "
    line += f"update {x['update_s']:.2f} s a step; log-prob gap {x['logp_gap_max']:.1e} nat"
    if x["engine"] == "vllm":
        line += f"; {x['unproven'] or 'no'} weights without proof"
    if x["engine"] == "served":
        line += "; all weights over NCCL"
        line += " (all weights over NCCL take two cards)" * (cuda and x["cards"] < 2)
    return line


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=("torch", "vllm", "served"), default="torch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill_at", type=int, default=3, help="the step after which it is killed, from 2 on; 0: none")
    parser.add_argument("--lora_rank", type=int, default=0, help="of adapters; 0: all weights are trained")
    parser.add_argument("--ranks", type=int, default=1, help="processes, a card each")
    args = parser.parse_args()
    if args.kill_at == 1:
        raise Fault("--kill_at 1: a step's checkpoint follows its line of metrics, so none is there yet; from 2 on")
    cuda = args.device == "cuda"
    cards = torch.cuda.device_count() if cuda else 0
    if args.engine == "served" and cards < 2:
        raise Fault(f"--engine served: NCCL needs a card on each side, so two; here is {cards or 'none'}")

    with contextlib.ExitStack() as stack:
        tmp = stack.enter_context(tempfile.TemporaryDirectory())
        run, instruction = Path(tmp, "run"), Path(tmp, "instruction.txt")
        instruction.write_text(BEST)  # under it the first policy scores, so there are gradients
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        command = [sys.executable, *torchrun * (args.ranks > 1), "inspo.py", "--out", str(run), "--device", args.device]
        command += ["--instruction", str(instruction), *FLAGS, "--T", str(args.steps)]
        command += ["--lora_rank", str(args.lora_rank)] if args.lora_rank else []
        if args.engine == "served":
            command += ["--engine", "vllm", "--vllm", stack.enter_context(served(Path(tmp, "serve.log")))]
        else:
            command += ["--engine", args.engine]
        if args.kill_at:
            play(command, run, args.kill_at)
        text = play(command + ["--resume"] * bool(args.kill_at), run, 0)
        rows = read_jsonl(run / "metrics.jsonl")
    resumed = re.search(r"resumed after step (\d+)", text)
    unproven = re.search(r"(\d+) weights cannot be read back", text)
    if args.kill_at and not resumed:
        raise Fault("it was not resumed, but began anew")
    if [row["t"] for row in rows] != list(range(args.steps + 1)):
        raise Fault(f"metrics.jsonl has the steps {[row['t'] for row in rows]}, not 0 to {args.steps}")
    norms = [row["grad_norm"] for row in rows[1:]]
    if not max(norms) > 0 or not all(map(math.isfinite, norms)):
        raise Fault(f"the gradients' norms are {norms}")
    x = {name: getattr(args, name) for name in ("engine", "lora_rank", "ranks", "steps")} | {"cards": cards}
    x |= {"resumed_after": int(resumed[1]) if resumed else None, "unproven": int(unproven[1]) if unproven else 0}
    x |= {"logp_gap_max": max(row["logp_gap"] for row in rows[1:]), "grad_norm_max": max(norms)}
    x |= {f"{name}_s": statistics.median(row[f"time/{name}"] for row in rows[1:]) for name in ("rollout", "update")}
    print(json.dumps(x | {"line": describe(x, cuda), "missed": []}))


if __name__ == "__main__":
    with one_line():
        main()
