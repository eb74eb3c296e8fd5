"""Whether this machine has the GPU that a model needs; torch is imported only for a model that needs one."""

from config import PRESETS, Config
from plumbing.faults import Fault

WIDE = 896  # hidden units of a model whose step takes a CPU hours: the 0.5B's


def check_preset_device(cfg: Config) -> None:
    """`check_device` for the presets, whose sizes are known before anything is fetched or imported."""
    if cfg.model in {preset["model"] for name, preset in PRESETS.items() if name.startswith("qwen")}:
        check_device(cfg)


def check_device(cfg: Config) -> None:
    """Raises Fault if a CPU that the user did not ask for would have to train a large model."""
    from engines.choose import device_of, without_cuda
    from training.fit import shapes

    if not cfg.device and device_of(cfg) == "cpu" and shapes(cfg.model).get_text_config().hidden_size >= WIDE:
        raise Fault(f"--model {cfg.model}: {without_cuda()}; fix that, or take weeks with --device cpu")
