"""vLLM in this process, with a random policy of Qwen2.5-3B's shape: its memory against the
estimate; JSON last.

    python -m extras.bench.colocated

vLLM starts, gets the weights, plays rows, sleeps, wakes with other weights, plays again. Each load
is proven layer by layer. What vLLM takes of the GPU is compared with extras/fit.py's estimate;
asleep, CUDA graphs only. Weights are bfloat16, drawn on the device. Without a GPU the model is a
toy, and no memory is read.
"""

import json
import tempfile
from typing import Any

import torch
from transformers import Qwen2Config

from config import PRESETS, Config
from engines.vllm_engine import VllmEngine
from extras.bench.harness import parser_of, play_turns, timed
from extras.bench.update import TOY, randomize
from extras.fit import KNOWN, estimate
from models.model import empty, load_tokenizer, weights
from plumbing.faults import Fault, one_line

SMALL = TOY | {"num_attention_heads": 2}  # 32 wide, the least that vLLM takes on a CPU
ROWS, CONTEXT, NEW = 64, 512, 64  # tokens of the rows that show the memory
SPARE = 4e9  # bytes that neither weights nor vLLM get: a forward pass's room


def used(cuda: bool) -> float:
    """The GB of the GPU that are taken, by whomever; 0 without one."""
    if not cuda:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def find_missed(x: dict) -> list[str]:
    """Names the goals that the figures miss."""
    awake = max(x["awake_gb"], x["awake_again_gb"])
    missed = ["more than 10 % above the estimate awake"] * (awake > 1.1 * x["estimate_awake_gb"])
    return missed + ["more than 1 GB above the estimate asleep"] * (
        x["asleep_gb"] > 1 + x["estimate_asleep_gb"]
    )


def measure_memory(config: Qwen2Config, model: Any, cuda: bool) -> dict[str, Any]:
    """Returns what vLLM takes of the GPU, awake and asleep, and what was estimated."""
    tokenizer = load_tokenizer(PRESETS["world"]["model"])
    total = torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else 24.0
    before = used(cuda)  # the weights, with the CUDA context
    memory = (total - before - SPARE / 1e9) / total if cuda else 0.05
    cfg = Config(vllm="colocate", vllm_memory=memory, lora_rank=0)
    parts = [
        part
        for part in estimate(cfg, config, "vllm", 1, total).parts
        if part.name.startswith("vLLM")
    ]
    max_len = cfg.max_prompt + cfg.max_response if cuda else 1024
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = VllmEngine(folder, tokenizer, (), max_len=max_len, dtype="bfloat16", memory=memory)
    prompts = dict(enumerate(torch.randint(min(1000, config.vocab_size), (ROWS, CONTEXT)).tolist()))
    engine.load(weights(model))
    play_turns(engine, prompts, NEW, 1.0)
    x = {"parameters": sum(p.numel() for p in model.parameters()), "vllm_memory": memory}
    x["awake_gb"] = used(cuda) - before
    _, x["sleep_s"] = timed(engine.sleep)
    x["asleep_gb"] = used(cuda) - before
    randomize(model, 1)
    _, x["wake_s"] = timed(lambda: engine.load(weights(model)))
    play_turns(engine, prompts, NEW, 1.0)
    x["awake_again_gb"] = used(cuda) - before
    x["estimate_awake_gb"] = sum(part.rollout for part in parts) / 1e9
    x["estimate_asleep_gb"] = sum(part.update for part in parts) / 1e9
    engine.close()
    return x | {"missed": find_missed(x)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise Fault("torch finds no GPU here; --device cpu tries it on a toy")
    config = Qwen2Config(
        **(KNOWN["Qwen/Qwen2.5-3B"] if cuda else SMALL), architectures=["Qwen2ForCausalLM"]
    )
    model = empty(config, torch.bfloat16, "cuda" if cuda else "cpu")
    randomize(model, 0)
    print(json.dumps(measure_memory(config, model, cuda)))


if __name__ == "__main__":
    with one_line():
        main()
