"""On which device a run works, and which engine it samples with."""

import torch

from config import EngineKnobs
from engines.vllm_engine import check_vllm, vllm_installed
from plumbing.faults import Fault


def device_of(cfg: EngineKnobs) -> str:
    """Returns "cuda" or "cpu"."""
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Fault("--device cuda: torch finds no CUDA device here; leave it out, or choose cpu")
    return device


def choose_engine(cfg: EngineKnobs, device: str) -> tuple[str, str]:
    """Returns ("vllm" or "torch", why)."""
    if cfg.engine == "torch":
        return "torch", "as asked"
    if cfg.engine == "auto" and device == "cpu":
        return "torch", "no GPU"
    if cfg.engine == "auto" and not vllm_installed():
        return "torch", "vllm is not installed"
    check_vllm()
    return "vllm", "as asked" if cfg.engine == "vllm" else "a GPU, and vllm is installed"
