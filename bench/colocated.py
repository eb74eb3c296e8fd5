"""A random policy of Qwen2.5-3B's shape through vLLM in this process, beside its own weights; JSON last.

vLLM starts, gets the weights, plays rows, sleeps, wakes with other weights, plays again. Each load is proven layer by
layer. The GPU's free memory is read awake, asleep and awake again, and what vLLM takes of it stands beside
training/fit.py's estimate: asleep the CUDA graphs alone. Weights are bfloat16, drawn on the device. Without a GPU the
model is a toy, and no memory is read.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))  # ahead of bench/, where `kernels` is another file
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import Qwen2Config  # noqa: E402

from bench.update import TOY  # noqa: E402
from config import PRESETS, Config  # noqa: E402
from engines.vllm_engine import VllmEngine  # noqa: E402
from models.model import empty, load_tokenizer, weights  # noqa: E402
from plumbing.faults import Fault, one_line  # noqa: E402
from training.fit import KNOWN, RESERVE, estimate  # noqa: E402

SMALL = TOY | {"num_attention_heads": 2}  # 32 wide, the least that vLLM takes on a CPU
ROWS, PROMPT, TURN = 64, 512, 64  # tokens
WORDS = 1000  # of the vocabulary, from which prompts are drawn
SPARE = 4e9  # bytes that neither weights nor vLLM get: a forward pass's room besides


def draw(model, seed: int) -> None:
    """Gives a model random weights: matrices N(0, 0.02), norms 1, biases 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.02)
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)


def used(cuda: bool) -> float:
    """Returns the bytes of the GPU that are taken, by whomever; 0 without one."""
    if not cuda:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def play(engine: VllmEngine, prompts: list[list[int]]) -> float:
    """Returns the seconds of a turn for each prompt."""
    engine.begin(0)
    start, left = time.perf_counter(), len(prompts)
    contexts = dict(enumerate(prompts))
    while left:
        left -= sum(1 for _ in engine.generate(contexts, TURN, 1.0))
        contexts = {}
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cuda = parser.parse_args().device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise Fault("torch finds no GPU here; --device cpu tries it on a toy")
    config = Qwen2Config(**(KNOWN["Qwen/Qwen2.5-3B"] if cuda else SMALL), architectures=["Qwen2ForCausalLM"])
    tokenizer = load_tokenizer(PRESETS["world"]["model"], ())
    model = empty(config, torch.bfloat16, "cuda" if cuda else "cpu")
    draw(model, 0)
    total = float(torch.cuda.get_device_properties(0).total_memory) if cuda else 0.0
    found = {"weights": used(cuda)}  # with the CUDA context
    memory = (total - found["weights"] - SPARE) / total if cuda else 0.05
    cfg = replace(Config(), vllm="colocate", vllm_memory=memory, lora_rank=0)
    fit = estimate(cfg, config, "vllm", 1, (total or 24e9) / 1e9)
    parts = [part for part in fit.parts if part.name.startswith("vLLM")]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        start = time.perf_counter()
        engine = VllmEngine(
            folder, tokenizer, (), max_len=cfg.max_prompt + cfg.max_response if cuda else 1024, dtype="bfloat16",
            memory=memory, seed=0,
        )  # fmt: skip
    seconds["start"] = time.perf_counter() - start
    prompts = torch.randint(min(WORDS, config.vocab_size), (ROWS, PROMPT)).tolist()
    engine.load(weights(model))
    seconds["turns"] = play(engine, prompts)
    found["awake"] = used(cuda)
    start = time.perf_counter()
    engine.sleep()
    seconds["sleep"], found["asleep"] = time.perf_counter() - start, used(cuda)
    draw(model, 1)
    start = time.perf_counter()
    engine.load(weights(model))
    seconds["wake_and_load"] = time.perf_counter() - start
    seconds["turns_again"] = play(engine, prompts)
    found["awake_again"] = used(cuda)
    gb = {name: round(x / 1e9, 2) for name, x in found.items()}
    result = {"parameters": sum(p.numel() for p in model.parameters()), "unproven": engine.unproven, "rows": ROWS}
    result |= {"vllm_memory": round(memory, 3), "used_gb": gb, "reserve_gb": round(RESERVE * total / 1e9, 2)}
    result |= {f"{name}_s": round(x, 3) for name, x in seconds.items()}
    result["vllm_gb"] = {name: round(gb[name] - gb["weights"], 2) for name in ("awake", "asleep", "awake_again")}
    result["estimate_gb"] = {
        "awake": round(sum(part.rollout for part in parts) / 1e9, 2),
        "asleep": round(sum(part.update for part in parts) / 1e9, 2),
    }
    engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    with one_line():
        main()
