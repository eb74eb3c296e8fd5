"""The order of the house: who imports whom, the guests' wings, and the paper's marks."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE = {"tests", "runs", "mutants"}
ENV = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"OMP_NUM_THREADS": "1"}


@cache
def code() -> list[Path]:
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    return [
        path for path in found if path.parts[0] not in OUTSIDE and not path.parts[0].startswith(".")
    ]


def room(path: Path) -> str:
    """A file at the root is a room of its own; a folder is one room."""
    return path.parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


@cache
def imported(path: Path) -> list[str]:
    """What a file imports: wherever the import stands, also in a function or for types alone."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def arrows(room: Callable[[Path], str] = room) -> dict[str, set[str]]:
    """Who imports whom, by room."""
    known = {
        path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", "."): path
        for path in code()
    }
    out: dict[str, set[str]] = {room(path): set() for path in code()}
    for path in code():
        for name in imported(path):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and room(known[name]) != room(path):
                out[room(path)].add(room(known[name]))
    return out


def floor(name: str, above: tuple[str, ...] = ()) -> int:
    """One above the highest room that it imports; fails on a circle."""
    assert name not in above, f"circle: {' -> '.join([*above[above.index(name) :], name])}"
    return 1 + max((floor(other, (*above, name)) for other in arrows()[name]), default=0)


def test_arrows_point_downward():
    assert max(floor(name) for name in arrows()) <= 9


def test_no_two_modules_of_extras_import_each_other():
    """Also not over a third one."""
    modules = {name: others for name, others in arrows(str).items() if name.startswith("extras/")}
    TopologicalSorter(modules).prepare()


def test_nothing_outside_the_wings_imports_a_guest():
    assert [name for name, others in arrows().items() if others & {"extras", "labs"}] == []


GUEST = re.compile(r"\b(extras|labs)[./]\w|[\"'](extras|labs)[\"']")


@cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    with (ROOT / path).open("rb") as file:
        return list(tokenize.tokenize(file.readline))


def guests_named(path: Path) -> list[str]:
    """The strings and comments of a file that name a guest: a module, or a file of one."""
    code_alone = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    return [
        token.string
        for token in tokens(path)
        if token.type not in code_alone and GUEST.search(token.string)
    ]


@pytest.mark.parametrize(
    "path", [path for path in code() if path.parts[0] not in ("extras", "labs")], ids=str
)
def test_no_text_of_the_core_names_a_guest_but_main_its_page(path):
    page = ['"extras.page"'] if path == Path("inspo.py") else []
    assert guests_named(path) == page


def test_the_readme_names_the_size_of_what_a_run_imports():
    """Statements, docstrings not counted, of every module that an import from inspo.py reaches."""
    reached, todo, size = set(), {"inspo.py"}, 0
    while todo:
        reached |= todo
        todo = set().union(*(arrows(str)[name] for name in todo)) - reached
    for name in reached:
        for node in ast.walk(tree(Path(name))):
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            size += isinstance(node, ast.stmt) and not text
    said = re.search(r"some ([\d,]+) statements of Python", (ROOT / "README.md").read_text())
    assert int(said[1].replace(",", "")) == pytest.approx(size, rel=0.05)


def test_the_cellar_knows_nothing_of_what_stands_on_it():
    assert arrows()["plumbing"] == set()


# ---- the ratchet


# Tokens of every room, without comments and docstrings. A number may only fall: what a change adds to one room, it
# takes from another, whose number falls as much.
MOST = {
    "ask.py": 453,
    "config.py": 3056,
    "engines": 5117,
    "evaluate.py": 2674,
    "export.py": 620,
    "extras": 64198,
    "grpo.py": 2424,
    "inspo.py": 2720,
    "kernels": 5929,
    "labs": 15793,
    "log.py": 2639,
    "models": 5792,
    "plumbing": 5040,
    "population.py": 1538,
    "reflect.py": 1482,
    "retrieval_server.py": 2499,
    "rollout.py": 1107,
    "run.py": 2152,
    "tasks": 7875,
    "tests": 169770,
    "training": 4785,
    "world": 2061,
}
SILENT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
)  # fmt: skip


def count_tokens(path: Path) -> int:
    """Returns the tokens of a file, without comments and docstrings."""
    texts = {
        (node.lineno, node.end_lineno)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
    }
    size = 0
    with (ROOT / path).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            text = token.type == tokenize.STRING and (token.start[0], token.end[0]) in texts
            size += token.type not in SILENT and not text
    return size


def test_no_room_grows():
    sizes = dict.fromkeys(MOST, 0)
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    for path in [*code(), *tests]:
        sizes[room(path)] = sizes.get(room(path), 0) + count_tokens(path)
    assert {name: size for name, size in sizes.items() if size > MOST.get(name, 0)} == {}


# ---- the wings can go


@pytest.fixture(scope="module")
def without_the_wings(tmp_path_factory) -> Path:
    """A copy of the project without its guests, its page and their tests."""
    copy = tmp_path_factory.mktemp("copies") / "inspo"
    away = shutil.ignore_patterns(
        ".*", "runs", "downloads", "mutants", "extras", "labs", "__pycache__"
    )
    shutil.copytree(ROOT, copy, ignore=away)
    return copy


def run(copy: Path, *argv: str, seconds: float = 600) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=copy, env=ENV, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_needs_no_guest_and_no_page(without_the_wings):
    flags = "--T 2 --batch 4 --G 2 --K_p 1 --K_e 1 --T_e 2 --D_B 4 --rounds 1 --eval_n 4 --out runs/alone"
    out = run(without_the_wings, "inspo.py", *flags.split())
    assert "I_star" in out and not (without_the_wings / "runs" / "alone" / "report.html").exists()
    assert "no page: No module named 'extras'" in out


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/*.py")), ids=lambda path: path.name)
def test_the_core_s_tests_import_no_guest(path):
    found = imported(path.relative_to(ROOT))
    assert not {name.split(".")[0] for name in found} & {"extras", "labs"}


# ---- marks of the paper


@cache
def marks(path: Path) -> list[str]:
    """The marks in a file's comments, in their order: L5, Eq.3, CHOICE-7."""
    comments = [token.string for token in tokens(path) if token.type == tokenize.COMMENT]
    return re.findall(r"(?<=Alg\.1 )L\d+|Eq\.\d+|CHOICE-\d+", "\n".join(comments))


def test_algorithm_1_stands_in_one_file_once_and_in_its_order():
    # those are the ends of blocks
    lines = [f"L{n}" for n in range(1, 27) if n not in (13, 22, 24, 25)]
    assert [
        mark
        for path in code()
        for mark in marks(path)
        if mark in lines and path != Path("inspo.py")
    ] == []
    found = [mark for mark in marks(Path("inspo.py")) if mark in lines]
    body = [mark for mark in lines if mark != "L26" and int(mark[1:]) < 17]
    evolution = [mark for mark in lines if 17 <= int(mark[1:]) <= 23]
    assert found == [*body, "L26", *evolution]


def test_every_equation_is_marked_somewhere():
    found = {mark for path in code() if path.parts[0] != "extras" for mark in marks(path)}
    assert {mark for mark in found if mark.startswith("Eq.")} == {f"Eq.{n}" for n in range(1, 7)}


def test_every_choice_that_the_code_marks_is_listed_and_the_other_way_round():
    marked = {mark for path in code() for mark in marks(path) if mark.startswith("CHOICE-")}
    listed = re.findall(r"^(\d+)\. ", (ROOT / "docs" / "choices.md").read_text(), re.M)
    assert marked == {f"CHOICE-{n}" for n in listed}
