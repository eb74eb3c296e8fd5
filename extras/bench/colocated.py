"""vLLM in this process, with a random policy of Qwen2.5-3B's shape: its memory against the estimate; JSON last.

    python -m extras.bench.colocated

vLLM starts, gets the weights, plays rows, sleeps, wakes with other weights, plays again. Each load is proven layer by
layer. What vLLM takes of the GPU is compared with training/fit.py's estimate; asleep, CUDA graphs only. Weights are
bfloat16, drawn on the device. Without a GPU the model is a toy, and no memory is read.
"""

import json
import tempfile
from dataclasses import replace

import torch
from transformers import Qwen2Config

from config import PRESETS, Config
from engines.vllm_engine import VllmEngine
from extras.bench.harness import parser_of, timed
from extras.bench.update import TOY, randomize
from models.model import empty, load_tokenizer, weights
from plumbing.faults import Fault, one_line
from training.fit import KNOWN, estimate

SMALL = TOY | {"num_attention_heads": 2}  # 32 wide, the least that vLLM takes on a CPU
ROWS, PROMPT, TURN = 64, 512, 64  # tokens
SPARE = 4e9  # bytes that neither weights nor vLLM get: a forward pass's room


def used(cuda: bool) -> float:
    """The GB of the GPU that are taken, by whomever; 0 without one."""
    if not cuda:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def play(engine: VllmEngine, prompts: list[list[int]]) -> None:
    """Plays a turn for each prompt."""
    engine.begin(0)
    left, contexts = len(prompts), dict(enumerate(prompts))
    while left:
        left -= sum(1 for _ in engine.generate(contexts, TURN, 1.0))
        contexts = {}


def judge(x: dict, cuda: bool) -> dict:
    """Returns the figures in a phrase, and which goals they miss."""
    line = f"{x['parameters'] / 1e6:,.1f}M parameters: asleep in {x['sleep_s']:.2g} s"
    line += f", awake with other weights in {x['wake_s']:.2g} s"
    if not cuda:
        return {"line": line, "missed": []}
    took, estimated = x["vllm_gb"], x["estimate_gb"]
    line += f"; vLLM takes {took['awake']:.1f} GB, estimated {estimated['awake']:.1f}, asleep {took['asleep']:.1f}"
    line += f", estimated {estimated['asleep']:.1f}, then {took['awake_again']:.1f}"
    missed = ["more than 10 % above the estimate awake"] * (max(took.values()) > 1.1 * estimated["awake"])
    missed += ["more than 1 GB above the estimate asleep"] * (took["asleep"] > 1 + estimated["asleep"])
    return {"line": line, "missed": missed}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cuda = parser.parse_args().device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise Fault("torch finds no GPU here; --device cpu tries it on a toy")
    config = Qwen2Config(**(KNOWN["Qwen/Qwen2.5-3B"] if cuda else SMALL), architectures=["Qwen2ForCausalLM"])
    tokenizer = load_tokenizer(PRESETS["world"]["model"], ())
    model = empty(config, torch.bfloat16, "cuda" if cuda else "cpu")
    randomize(model, 0)
    total = torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else 24.0
    before = used(cuda)  # the weights, with the CUDA context
    memory = (total - before - SPARE / 1e9) / total if cuda else 0.05
    cfg = replace(Config(), vllm="colocate", vllm_memory=memory, lora_rank=0)
    parts = [part for part in estimate(cfg, config, "vllm", 1, total).parts if part.name.startswith("vLLM")]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        max_len = cfg.max_prompt + cfg.max_response if cuda else 1024
        engine = VllmEngine(folder, tokenizer, (), max_len=max_len, dtype="bfloat16", memory=memory, seed=0)
    prompts = torch.randint(min(1000, config.vocab_size), (ROWS, PROMPT)).tolist()
    engine.load(weights(model))
    play(engine, prompts)
    gb = {"awake": used(cuda)}
    _, sleep_s, _ = timed(engine.sleep)
    gb["asleep"] = used(cuda)
    randomize(model, 1)
    _, wake_s, _ = timed(lambda: engine.load(weights(model)))
    play(engine, prompts)
    gb["awake_again"] = used(cuda)
    x = {"parameters": sum(p.numel() for p in model.parameters()), "unproven": engine.unproven, "sleep_s": sleep_s}
    x |= {"wake_s": wake_s, "vllm_memory": memory, "vllm_gb": {name: taken - before for name, taken in gb.items()}}
    x["estimate_gb"] = {"awake": sum(p.rollout for p in parts) / 1e9, "asleep": sum(p.update for p in parts) / 1e9}
    engine.close()
    print(json.dumps(x | judge(x, cuda)))


if __name__ == "__main__":
    with one_line():
        main()
