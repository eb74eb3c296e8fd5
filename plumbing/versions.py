"""Which code ran: the commit of this checkout, and the versions of what it stands on."""

import contextlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "triton", "vllm", "flash-attn", "liger-kernel", "peft")


def commit() -> str:
    """Returns the commit, with "+" where tracked files differ from it; "" outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def versions() -> dict[str, str]:
    """Returns the commit, Python's version and those of the packages that are installed."""
    found = {"inspo": commit(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
