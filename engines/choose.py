"""Which engine a run samples with."""

from config import EngineKnobs
from engines.vllm_engine import check_vllm, vllm_installed


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
