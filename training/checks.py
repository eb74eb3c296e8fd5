"""What can be known before a run starts: the device, the memory it needs, whether a prompt leaves room for a turn."""

import dataclasses

import torch

from config import Config, read_instruction
from engines.choose import choose_engine, without_cuda
from models import layers
from models.model import load_config, load_tokenizer
from plumbing.faults import Fault
from plumbing.status import status
from rollout import prompt_ids
from tasks import Task
from training.fit import shapes, with_room
from training.ranks import Ranks
from training.speed import CARDS
from training.speed import table as speed_table

WIDE = 896  # hidden units of a model whose step takes a CPU hours: the 0.5B's


def print_memory(cfg: Config) -> None:
    """Prints the memory that --gpus of --card would need, and a step's seconds; Fault if it does not fit."""
    config, gpu_mem = shapes(cfg.model), cfg.gpu_mem or CARDS[cfg.card].memory
    cfg, fit = with_room(cfg, config, "torch" if cfg.engine == "torch" else "vllm", cfg.gpus, gpu_mem)
    status("")
    print(fit.table(), flush=True)
    if fault := fit.fault():
        raise Fault(fault)
    print(f"\n{speed_table(cfg, config, fit.kv_tokens)}", flush=True)


def check(cfg: Config, ranks: Ranks, task: Task, instruction: str) -> tuple[str, str, Config]:
    """Returns ("vllm" or "torch", why), the engine to sample with, and `cfg` with --recompute decided; Fault if the run
    cannot work.

    It cannot with too little memory or too few positions, or where the first instruction leaves no room for a turn;
    nor without a readable --canary.
    """
    if cfg.canary:
        read_instruction("canary", cfg.canary)
    if ranks.device == "cpu" and not cfg.device and shapes(cfg.model).get_text_config().hidden_size >= WIDE:
        raise Fault(f"--model {cfg.model}: {without_cuda()}; mend that, or take hours with --device cpu")
    engine, why = choose_engine(cfg, ranks.device)
    if ranks.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        used = cfg if layers.installed() else dataclasses.replace(cfg, fused_layers=0)  # torch's layers keep more
        used, fit = with_room(used, shapes(cfg.model), engine, ranks.size, memory)
        if fault := fit.fault():
            raise Fault(fault)
        cfg = dataclasses.replace(cfg, recompute=used.recompute, micro_tokens=used.micro_tokens)
    longest = getattr(load_config(cfg.model), "max_position_embeddings", None)
    if longest and cfg.max_prompt + cfg.max_response > longest:
        raise Fault(f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response}: the model ends at {longest}")
    tokenizer = load_tokenizer(cfg.model)
    shortest = min(len(prompt_ids(tokenizer, task, instruction, q)) for q in task.questions("train")[:64])
    if shortest > cfg.max_prompt:
        raise Fault(
            f"--max_prompt {cfg.max_prompt}: the first instruction and a question are {shortest} tokens at least, so no"
            " turn could start; raise it"
        )
    return engine, why, dataclasses.replace(cfg, recompute=abs(cfg.recompute))
