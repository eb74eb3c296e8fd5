"""How fast a machine is with SmolLM2-135M-Instruct, so that `make real` can say what it will take."""

import time
from collections.abc import Callable
from typing import NamedTuple

from config import PRESETS, SMOLLM, Config
from plumbing.threads import use_idle_cores

NAME = "smollm2-135m"


class Pace(NamedTuple):
    """How fast this machine is with the model."""

    dtype: str
    threads: int
    learning: float  # seconds a token
    sampling: float


def pace() -> Pace:
    """Returns what is measured in half a minute."""
    use_idle_cores()
    import torch

    from engines.choose import device_of, dtype_of
    from engines.torch_engine import TorchEngine
    from models.model import load_policy
    from models.packing import Packing

    cfg = Config(**PRESETS[NAME] | {"model": str(SMOLLM)})
    device = device_of(cfg)
    dtype = dtype_of(cfg, device)
    model, tokenizer = load_policy(str(SMOLLM), device)
    model.to(getattr(torch, dtype))
    ids, packing = (torch.arange(1024, device=device) % len(tokenizer))[None], Packing([256] * 4, device=device)
    positions = packing.positions[None]
    engine = TorchEngine(model, tokenizer, ("</answer>",))

    def learn() -> None:
        h = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, packing=packing).last_hidden_state
        h.float().square().mean().backward()

    def sample() -> None:
        engine.begin(0)
        list(engine.generate({k: list(range(100, 200)) for k in range(40)}, 16, 1.0))

    return Pace(dtype, torch.get_num_threads(), seconds(learn) / 1024, seconds(sample) / (40 * 16))


def seconds(work: Callable[[], None]) -> float:
    """Returns how long work takes, the second time."""
    work()
    start = time.monotonic()
    work()
    return time.monotonic() - start
