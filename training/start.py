"""What a run does before its first step, or why there will be none.

What is missing is told before anything is loaded, in the order in which it can be known:

1. each setting has a knob, a type and a value that it can have (config.py)
2. --task, --tools, --reward, --format and --instruction: what they name can be imported and read
3. the questions: there are some to train and to test on, each with an id of its own
4. the task's own needs: passages and an index to search, or a server
5. the model: it is on this disk, or the hub can be reached
6. the optimizer: there is an endpoint to call, and a key
7. the GPU, for a preset that takes a CPU weeks; 3 to 7 are one list, before torch is imported
8. device, precision and engine: this machine has what the flags ask for
9. memory: what trains and samples fits on each GPU, computed from shapes (training/fit.py)
10. positions and disk: a first prompt leaves room for a turn, and the checkpoints fit
"""

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from config import PRESETS, Config, Settings, check_settings, configure, find_endpoint
from plumbing.faults import together
from plumbing.hub import check_model
from plumbing.stop import leads
from tasks import Task
from tasks.task import check_questions, choose_instruction, load_task

if TYPE_CHECKING:
    from training.ranks import Ranks


def prepare(
    given: Config | None, settings: Settings
) -> "tuple[float, Config, Config, Task, Ranks] | None":
    """Checks all that a run needs, on rank 0, and joins the ranks. Raises Fault.

    Returns when it began, by `time.perf_counter`; the configuration to record; the same with
    --engine, --recompute and --micro_tokens decided; the task; and the ranks. For
    --dry_run it prints the memory and returns None. `settings` replace `given` ones, or a preset's.
    """
    began = time.perf_counter()
    cfg = (
        replace(given, **check_settings(type(given), settings)) if given else configure(**settings)
    )
    task = load_task(cfg, settings.get("task"))
    task.instruction = choose_instruction(task)
    if leads() and not cfg.dry_run:
        together(
            lambda: check_questions(task),
            task.check,
            lambda: check_model(cfg.model),
            lambda: find_endpoint(cfg),
            lambda: check_preset_device(cfg),
        )
    # in a thread: an interrupt would leave half of it, and no later call could train
    with ThreadPoolExecutor(1) as importer:
        needed = "training.checks" if cfg.dry_run else "training.policy"
        importer.submit(importlib.import_module, needed).result()
    import torch

    from engines.choose import device_of, dtype_of
    from training.checks import check_machine, print_memory
    from training.ranks import Ranks

    if cfg.dry_run:
        if leads():
            print_memory(cfg)
        return None
    if torch.get_num_threads() != cfg.threads:  # it was imported before the run was configured
        torch.set_num_threads(cfg.threads)
    fitted, device = cfg, device_of(cfg)
    if leads():
        # a resumed run and an export take the run's, on any machine
        cfg = replace(cfg, dtype=dtype_of(cfg, device))
        fitted = check_machine(cfg, device, task)
    return began, cfg, fitted, task, Ranks(device, cfg.patience, cfg.dtype)


def check_preset_device(cfg: Config) -> None:
    """Raises Fault for a large preset without a GPU; their sizes are known before anything is
    fetched or imported."""
    if cfg.model in {
        preset["model"] for name, preset in PRESETS.items() if name.startswith("qwen")
    }:
        from training.checks import check_device

        check_device(cfg)
