"""LoRA: the policy's weights W are frozen, and small matrices A and B learn beside them: W + scale * B A.

The adapters are peft's, on every linear layer but the head. The policy keeps its class and its forward pass; what
changes is that a layer's `weight` is called `base_layer.weight`, and that `lora_A.default.weight` (rank, in) and
`lora_B.default.weight` (out, rank) stand beside it. peft is imported where adapters are made alone: it takes seconds.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


def add(model: Any, rank: int, alpha: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Freezes a model and puts adapters on it, in place, scaled by alpha / rank; returns it. Rank 0 adds none.

    A is random and B zero, so that the model computes what it did before. `dtype`: the adapters', whatever the model's.
    """
    if not rank:
        return model
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_config(rank, alpha), model)
    for name, p in model.named_parameters():
        if is_adapter(name):
            p.data = p.data.to(dtype)
    return model


def _config(rank: int, alpha: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules="all-linear")


def is_adapter(name: str) -> bool:
    """Returns whether this is the name of an A or a B."""
    return ".lora_" in name


def plain(name: str) -> str:
    """Returns a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def layers(model: Any) -> dict[str, Any]:
    """Returns the layers with an adapter, by the plain names of their weights; {} without LoRA."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


@contextlib.contextmanager
def off(model: Any) -> Iterator[None]:
    """Makes a policy compute as its first version, which it does exactly; a model without adapters stays as it is.

    Not by peft's `disable_adapters`: it also changes requires_grad, on which FSDP2 relies.
    """
    adapted = layers(model).values()
    for layer in adapted:
        layer.set_scale("default", 0)
    try:
        yield
    finally:
        for layer in adapted:
            layer.set_scale("default", 1)


def merged(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns W + scale * B A in float32."""
    return torch.addmm(W.float(), B.float(), A.float(), alpha=scale)


def export(adapters: Iterable[tuple[str, torch.Tensor]], rank: int, alpha: int, base: str, path: Path) -> None:
    """Writes (name, whole A or B) to a directory that peft and vLLM load on top of `base`, a path or id."""
    from safetensors.torch import save_file

    config = _config(rank, alpha)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(path)
    tensors = {f"base_model.model.{name.replace('.default', '')}": p.cpu() for name, p in adapters}
    save_file(tensors, path / "adapter_model.safetensors")
