"""The Hugging Face hub: whether it can be reached, and files of its data sets, named as in its own
file system.

    hf://datasets/OWNER/NAME/PATH              or, at one revision, hf://datasets/OWNER/NAME@REVISION/PATH

HF_ENDPOINT names another hub, HF_HOME the folder that keeps what was fetched, HF_HUB_OFFLINE=1
fetches nothing.
"""

import functools
import re
from pathlib import Path
from typing import Any

from plumbing.faults import Fault, first_line

NAMED = re.compile(
    r"hf://datasets/(?P<repo_id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.-]+))?/(?P<filename>.+)"
)
MODEL = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # anything else is a path


def find_on_disk(path: str) -> Path | None:
    """Returns the file of that path or hub's name if it is on this disk, else None."""
    name = NAMED.fullmatch(path.replace("%2F", "/"))
    if not name:
        return Path(path) if Path(path).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(**name.groupdict("main"), repo_type="dataset")
    return Path(cached) if isinstance(cached, str) else None


def fetch_file(path: str) -> Path:
    """Returns the file of a path or a hub's name, which is fetched once; raises Fault where it
    cannot be.

    A fetched file stays and is not asked for again, even if the hub has another version by then.
    """
    name = NAMED.fullmatch(path.replace("%2F", "/"))
    on_disk = find_on_disk(path)
    if on_disk or not name:
        return on_disk or Path(path)
    from huggingface_hub import hf_hub_download

    reason = out_of_reach()
    if not reason:
        try:
            parts: Any = name.groupdict("main")
            return Path(hf_hub_download(**parts, repo_type="dataset"))
        except Exception as e:  # a name that is not there, a broken connection, a full disk
            reason = f"the hub does not give it ({first_line(e)})"
    raise Fault(f"{path}: {reason}; run this where it can be reached, or give a file of your own")


def check_model(path: str) -> None:
    """Raises Fault where a model is not on this disk, and is none of the hub or the hub cannot be
    reached."""
    from huggingface_hub import constants

    if Path(path, "config.json").is_file():
        return
    if Path(path).is_dir() or not MODEL.fullmatch(path):
        raise Fault(
            f"--model {path}: no causal LM can be loaded from it (no config.json there); check the path or id"
        )
    cached = Path(constants.HF_HUB_CACHE, f"models--{path.replace('/', '--')}")
    reason = "" if cached.is_dir() else out_of_reach()
    if reason:
        raise Fault(f"--model {path}: {reason}; run this where it can be reached, or give a folder")


@functools.cache
def out_of_reach() -> str:
    """Returns why the hub cannot be reached, "" if it can. One attempt, where its own library makes
    six for a file."""
    import requests
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the hub cannot be reached (HF_HUB_OFFLINE is set)"
    try:
        requests.head(constants.ENDPOINT, timeout=30)
    except requests.RequestException as e:
        return f"the hub cannot be reached ({constants.ENDPOINT}: {type(e).__name__})"
    return ""
