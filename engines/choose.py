"""On which device a run works, in which precision, and which engine it samples with."""

from typing import Literal

import torch

from config import Config, EngineKnobs
from engines.vllm_engine import check_vllm, vllm_version
from models.linear import amd_has
from models.model import load_config
from plumbing.faults import Fault

NARROW = 256  # a model of fewer hidden units gains nothing from bfloat16 on a CPU


def device_of(cfg: EngineKnobs) -> str:
    """Returns "cuda" or "cpu"."""
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Fault(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; leave it out, or choose cpu"
        )
    return device


def check_gpu(cfg: Config) -> None:
    """Raises Fault if a CPU that the user did not ask for would have to train a large preset."""
    if not cfg.device and device_of(cfg) == "cpu":
        raise Fault(
            f"--model {cfg.model}: torch {torch.__version__} finds no CUDA device; fix that, or take weeks with"
            " --device cpu"
        )


def explain_too_old(device: str) -> str:
    """Says why a GPU cannot compute in bfloat16; "" if it can. (torch's is_bf16_supported also
    counts emulation.)"""
    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (8, 0)
    return f"this GPU's compute capability is {major}.{minor}, 8.0 is needed" if major < 8 else ""


def dtype_of(cfg: Config, device: str) -> Literal["bfloat16", "float32"]:
    """Returns "bfloat16" or "float32", in which blocks are computed.

    GPUs compute in bfloat16 unless they are too old for it. CPUs with AMX multiply bfloat16 several
    times as fast as float32, AMD's with AVX512-BF16 twice as fast; Intel's with AVX512-BF16 alone
    are slower at it (docs/LOG.md, 2026-11-24).
    """
    too_old = explain_too_old(device)
    if cfg.dtype == "bfloat16" and too_old:
        raise Fault(f"--dtype bfloat16: {too_old}; leave it out")
    if cfg.dtype:
        return cfg.dtype
    if device == "cuda":
        return "float32" if too_old else "bfloat16"
    fast = torch.cpu.get_capabilities().get("amx_bf16", False) or amd_has("avx512_bf16")
    if fast and load_config(cfg.model).get_text_config().hidden_size >= NARROW:
        return "bfloat16"
    return "float32"


def choose_engine(cfg: EngineKnobs, device: str) -> str:
    """Returns "vllm" or "torch", or the engine's module:Class."""
    if cfg.engine == "torch" or ":" in cfg.engine:
        return cfg.engine
    if cfg.engine == "auto" and (device == "cpu" or not vllm_version()):
        return "torch"
    # vLLM would sample in float16, which is not what the trainer computes
    too_old = explain_too_old(device)
    if too_old and cfg.engine == "vllm":
        raise Fault(f"--engine vllm: {too_old}; leave it out")
    if too_old:
        return "torch"
    check_vllm()
    return "vllm"
