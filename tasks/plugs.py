"""Code that a flag names: `module:name`, or a plug-in, which is known by a word."""

import importlib
import os
import sys
from typing import Any

from config import HERE
from plumbing.faults import Fault, first_line


def import_named(where: str, spec: str, kind: str) -> Any:
    """Returns the "class" or "function" of "module:name"; the working directory is searched last.
    Raises Fault."""
    module, _, name = spec.partition(":")
    parts = module.split(".")
    if not all(parts) or "/" in module or parts[-1] == "py" or not name:
        raise Fault(f"{where}: give it as module:name, for a {kind} in module.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target = getattr(importlib.import_module(module), name, None)
    except ImportError as e:
        itself = f"{module}.".startswith(f"{e.name}.")
        remedy = "run in the directory that it is in" if itself else "install what it imports"
        raise Fault(f"{where}: {module} cannot be imported ({first_line(e)}); {remedy}") from None
    if not callable(target) or isinstance(target, type) != (kind == "class"):
        file = getattr(sys.modules[module], "__file__", None)  # perhaps another of that name
        raise Fault(
            f"{where}: {name} is not a {kind} in {module} ({file}); give the module that it is in"
        )
    return target


def find_plug(word: str) -> Any:
    """Returns the plug-in that a flag's word asks for ("--format hermes"); None if there is none.

    A folder `plugs` in any folder of this project lists what it has in PLUGS. A folder with a run in
    it is passed over: it may be a stranger's.
    """
    for path in HERE.glob("*/plugs/__init__.py"):
        wing = path.parent.parent
        if not any(wing.rglob("config.json")):
            plugs = importlib.import_module(f"{wing.name}.plugs").PLUGS
            if word in plugs:
                module, _, name = plugs[word].partition(":")
                return getattr(importlib.import_module(module), name)
    return None
