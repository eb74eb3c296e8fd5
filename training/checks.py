"""What can be known before a run starts: the device, the memory it needs, whether a prompt leaves
room for a turn."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from config import Config, read_cards
from engines.choose import choose_engine, device_of
from models import lora
from models.model import load_config, load_tokenizer, skeleton
from plumbing.faults import Fault
from plumbing.outside import without_secrets
from plumbing.stop import count_ranks
from tasks import Task
from training.duration import describe_time, flops_of
from training.fit import Place, decide, find_flags, shapes

WIDE = 896  # hidden units of a model whose step takes a CPU hours: the 0.5B's
CPU_TOKENS = 1024  # of a micro-batch there, unless --micro_tokens says otherwise


def print_memory(cfg: Config) -> None:
    """Prints the memory and the time that a run needs on the GPUs of --dry_run; Fault if they have
    too little memory."""
    gpus, card, memory = read_cards(cfg.dry_run) or (0, "", 0)
    config, engine = shapes(cfg.model), "torch" if cfg.engine == "torch" else "vllm"
    place = Place(config, engine, gpus, memory)
    fitted, fit = decide(cfg, place, flops_of(card))
    print(fit.table(), flush=True)
    if fit.fault():
        raise Fault(f"{fit.fault()}; {find_flags(cfg, place)}")
    size, most = disk(cfg, config)
    print(
        f"\n{describe_time(fitted, config, gpus, card)}\n"
        f"A checkpoint takes {size:.1f} GB of disk, the run at most {most:.0f}, and its trajectories.\n"
        f"Where {size:.1f} GB of the CPUs' memory are free for a copy, it is written while training goes on.",
        flush=True,
    )


def disk(cfg: Config, config: Any) -> tuple[float, float]:
    """Returns the GB of a checkpoint, and of all there are at once (the newest, the one that is
    being written, the best one if there are evaluations) with the policy.

    A checkpoint holds what is trained and AdamW's two moments, in float32; a tied head has a name
    of its own in it.
    """
    model = lora.add(skeleton(config, torch.bfloat16), cfg.lora_rank, cfg.lora_alpha)
    named = model.state_dict(keep_vars=True).values()
    weights = sum(p.numel() for p in named if p.requires_grad)
    size = (weights + 2 * model.num_parameters(only_trainable=True)) * 4 / 1e9
    ever = -(-cfg.T // min(cfg.save_every, cfg.eval_every or cfg.save_every)) + 1
    kept = min(cfg.keep + 1 + (cfg.eval_every > 0), ever)
    return size, kept * size + model.num_parameters() * 4 / 1e9


def check_disk(cfg: Config) -> None:
    """Raises Fault if a run's checkpoints will not fit where it writes; those that are there
    already count as room."""
    size, most = disk(cfg, shapes(cfg.model))
    out = Path(cfg.out or "runs").absolute()
    there = sum(file.stat().st_size for file in out.glob("checkpoints/**/*")) / 1e9
    place = next(path for path in (out, *out.parents) if path.exists())
    usage = shutil.disk_usage(place)
    free = usage.free / 1e9
    # /proc, for instance, has no size; whoever writes there is told so
    if usage.total and most > free + there:
        raise Fault(
            f"{place}: {free:.3g} GB are free, and checkpoints of {size:.3g} GB take {most - there:.3g} more at most:"
            " make room, choose another disk with --out, or lower --keep"
        )


def is_wide(model: str) -> bool:
    return bool(shapes(model).get_text_config().hidden_size >= WIDE)


def check_device(cfg: Config) -> None:
    """Raises Fault if a CPU that the user did not ask for would have to train a large model."""
    if not cfg.device and device_of(cfg) == "cpu" and is_wide(cfg.model):
        raise Fault(
            f"--model {cfg.model}: torch {torch.__version__} finds no CUDA device; fix that, or take weeks with"
            " --device cpu"
        )


def check_machine(cfg: Config, device: str, task: Task) -> Config:
    """Returns `cfg` with --engine and --recompute decided; Fault if the run cannot work.

    It cannot with too little memory or disk or too few positions, nor where the first instruction
    leaves no room for a turn.
    """
    check_device(cfg)
    engine = choose_engine(cfg, device)
    if engine == "torch" and cfg.vllm != "colocate":
        raise Fault(
            f"--vllm {without_secrets(cfg.vllm)}: the engine would be torch; add --engine vllm, or leave it out"
        )
    if device == "cpu" and cfg.micro_tokens == Config.micro_tokens and not is_wide(cfg.model):
        # a CPU has room for their activations
        cfg = replace(cfg, micro_tokens=CPU_TOKENS, recompute=max(0, cfg.recompute))
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        # torch's layers keep more than Liger's
        used = replace(
            cfg, fused_layers=cfg.fused_layers * bool(importlib.util.find_spec("liger_kernel"))
        )
        place = Place(shapes(cfg.model), engine, count_ranks(), memory)
        used, fit = decide(used, place, flops_of(torch.cuda.get_device_name()))
        if fit.fault():
            raise Fault(f"{fit.fault()}; {find_flags(used, place)}")
        if cfg.gather < 0 and not used.gather:
            print(f"note: {fit.notes[-1]}", flush=True)
        cfg = replace(
            cfg, recompute=used.recompute, micro_tokens=used.micro_tokens, gather=used.gather
        )
    load_config(cfg.model, cfg.longest)
    tokenizer = load_tokenizer(cfg.model, task.make_format().stop_strings())
    shortest = min(
        len(task.make_format(tokenizer).encode_prompt(task.instruction, q))
        for q in task.questions("train")[:64]
    )
    if shortest > cfg.max_prompt:
        raise Fault(
            f"--max_prompt {cfg.max_prompt}: the first instruction and a question are {shortest} tokens at least, so no"
            " turn could start; raise it"
        )
    check_disk(cfg)
    return replace(cfg, engine=engine, recompute=abs(cfg.recompute))
