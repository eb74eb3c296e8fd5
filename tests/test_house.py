"""The rules of the house: the paper's lines, equations and the choices are marked where they act; who imports whom."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import inspo

ROOT = Path(__file__).parent.parent
ROOMS = (  # the paper's
    "inspo config data rollout tools grpo objectives variants population reflect evaluate baselines report faults"
    " outside selection rivals"
).split()
WINGS = "engines training harness kernels page retrieval evaluation world bench".split()
CODE = sorted([*ROOT.glob("*.py"), *(path for wing in WINGS for path in ROOT.glob(f"{wing}/*.py"))])

# ---- marks

IN_INSPO = {  # a line of Algorithm 1 -> what the marked line of code must do
    "L1": r"-> tuple\[Policy, Instruction\]:",
    "L2": r"P, B = .*first_population\(.*ReplayBuffer\(",
    "L3": r"for t in log\.steps\(",
    "L4": "",  # a heading
    "L5": r"drawn = P\.draw\(",
    "L6": r"taus = policy\.rollout\(",
    "L7": r"tau\.reward = reward\(tau\)",
    "L8": r"policy\.update\(t, taus\)",
    "L9": r"P\.attribute\(taus\)",
    "L10": r"if t % cfg\.K_p == 0 and len\(P\) > cfg\.N_parent:",
    "L11": r"ranked = P\.ranked\(\)",
    "L12": r"P\.prune\(ranked, cfg\.N_parent",
    "L14": "",  # a heading
    "L15": r"B\.add\(t, taus\)",
    "L16": r"if t % cfg\.K_e == 0 and t < cfg\.T_e",
    "L26": r"return policy, P\.best\(\)",
}
IN_EVOLVE = {
    "L17": r"P_parent = P\.ranked\(\)\[: cfg\.N_parent\]",
    "L18": r"if room == 0:",
    "L19": r"I_parent = P_parent\[",
    "L20": r"I_new = propose\(",
    "L21": r"verify\(.*I_new, D_B, log\)",
    "L23": r"P\.join\(",
}
EQUATIONS = {  # surrogate and rho are in the kernel and its twin, the average and the advantage in objectives.py
    "Eq.1": ["inspo.py"],
    "Eq.2": ["grpo.py", "kernels/rows_torch.py", "kernels/rows_triton.py", "objectives.py"],
    "Eq.3": ["kernels/rows_torch.py", "kernels/rows_triton.py", "objectives.py"],
    "Eq.4": ["population.py"],
    "Eq.5": ["inspo.py"],
    "Eq.6": ["population.py"],
}


def marks(path: Path) -> list[tuple[str, int]]:
    """Returns (mark, line number) of the marks in a file's comments: L5, Eq.3, CHOICE-7."""
    found = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                for mark in re.findall(r"Alg\.1 (L\d+)|(Eq\.\d+)|(CHOICE-\d+)", token.string):
                    found.append(("".join(mark), token.start[0]))
    return found


MARKS = {str(path.relative_to(ROOT)): marks(path) for path in CODE}


def places(mark: str) -> list[str]:
    """Returns the files that hold a mark, once for every time they do."""
    return [name for name, found in MARKS.items() for other, _ in found if other == mark]


@pytest.mark.parametrize("function, lines", [(inspo.inspo, IN_INSPO), (inspo.evolve, IN_EVOLVE)])
def test_the_marked_lines_do_what_the_paper_s_lines_say_in_its_order(function, lines):
    code, first = inspect.getsourcelines(function)
    mine = [(mark, n) for mark, n in MARKS["inspo.py"] if first <= n < first + len(code) and mark.startswith("L")]
    assert [mark for mark, _ in mine] == list(lines)
    for mark, n in mine:
        statement, _, _ = code[n - first].partition("#")
        if lines[mark]:
            assert re.search(lines[mark], statement), f"{mark}: {statement.strip()}"
        else:
            assert not statement.strip()


def test_every_line_of_algorithm_1_is_marked_once():
    # 13, 22, 24 and 25 are the ends of blocks.
    lines = [f"L{n}" for n in range(1, 27) if n not in (13, 22, 24, 25)]
    assert {line: places(line) for line in lines} == dict.fromkeys(lines, ["inspo.py"])
    assert sorted(lines) == sorted([*IN_INSPO, *IN_EVOLVE])


def test_algorithm_1_fits_on_a_screen_and_evolve_stands_right_below_it():
    assert len(inspect.getsourcelines(inspo.inspo)[0]) <= 60
    functions = [node.name for node in ast.parse((ROOT / "inspo.py").read_text()).body if hasattr(node, "name")]
    assert functions.index("evolve") == functions.index("inspo") + 1


def test_every_equation_is_marked_where_it_acts():
    assert {mark: places(mark) for mark in EQUATIONS} == EQUATIONS
    assert {mark for found in MARKS.values() for mark, _ in found if mark.startswith("Eq.")} == set(EQUATIONS)


def test_every_choice_is_listed_and_marked_in_the_file_that_its_row_names():
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (ROOT / "docs" / "choices.md").read_text(), re.M)
    listed = {f"CHOICE-{n}": sorted(re.split(r", ", where.replace("`", ""))) for n, where in rows}
    assert [int(n) for n, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 26
    marked = sorted({mark for found in MARKS.values() for mark, _ in found if mark.startswith("CHOICE-")})
    assert {mark: sorted(set(places(mark))) for mark in marked} == listed


# ---- arrows


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in CODE}


def imports(path: Path, lazy: bool = True) -> set[str]:
    """Returns what a module imports when it runs; not `lazy`: when it is imported. Own modules by their full names."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            found.update({f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES) or {node.module})
    return found


def own(path: Path, lazy: bool = True) -> set[str]:
    return imports(path, lazy) & set(MODULES)


def of_wing(wing: str) -> list[Path]:
    return [path for path in CODE if path.parent == ROOT / wing]


def test_every_room_and_wing_is_there():
    assert all(room in MODULES for room in ROOMS) and all(of_wing(wing) for wing in WINGS)


def test_imports_at_module_level_form_no_cycle():
    """Importing a.b imports a first."""
    arrows = {}
    for name, path in MODULES.items():
        parents = {x.rpartition(".")[0] for x in own(path, lazy=False)} & set(MODULES)
        arrows[name] = (own(path, lazy=False) | parents) - {name}
    left = dict(arrows)
    while leaves := [name for name, needs in left.items() if not needs & set(left)]:
        for name in leaves:
            del left[name]
    assert not left, f"a cycle among {sorted(left)}"


def test_no_wing_imports_inspo():
    for path in CODE:
        if path.parent != ROOT:
            assert "inspo" not in own(path), path


FACES = {  # what a room knows of the wings
    "inspo": {"plumbing.status", "journal.start", "training.ranks", "training.worker"},  # in `main`
    "rollout": {"engines"},
    "tools": {"plumbing.client"},
    "reflect": {"plumbing.client"},
    "grpo": {"models.lora", "models.model"},
    "report": {"page.html", "page.serve"},
    "baselines": {"engines", "extras.prompts", "extras.supervised"},
    "evaluate": {f"evaluation.{name}" for name in ("benchmarks", "compare", "models", "statistics")}
    | {"journal.directory"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_wings_through_their_faces_alone(room):
    assert {name for name in own(MODULES[room]) if name.split(".")[0] in WINGS} == FACES.get(room, set())


def test_population_reflect_and_objectives_stand_beside_each_other_and_without_torch():
    apart = {"population", "reflect", "objectives"}
    assert not own(MODULES["variants"])
    for room in apart:
        assert not imports(MODULES[room]) & {"torch", "torch.distributed", "transformers"}
        assert not own(MODULES[room]) & apart
    code = "import sys, population, reflect, objectives; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_other_rules_of_selection_know_the_population_alone_and_only_main_knows_the_relatives():
    assert own(MODULES["selection"]) == {"population"} and not imports(MODULES["selection"]) & {"torch"}
    assert [room for room in ROOMS if "rivals" in own(MODULES[room])] == ["inspo"]
    assert "rivals" not in own(MODULES["inspo"], lazy=False)


def test_engines_and_the_loader_of_models_do_not_know_the_agent():
    for path in of_wing("engines"):
        assert not own(path) & {"rollout", "tools", "population", "grpo"}, path
    assert own(MODULES["models.model"]) == {"faults", "kernels", "models.lora"}
    assert not own(MODULES["models.lora"])


def test_kernels_retrieval_and_world_stand_alone():
    for path in of_wing("kernels"):
        assert own(path) <= {name for name in MODULES if name.startswith("kernels")}, path
    for path in of_wing("retrieval"):
        assert own(path) <= {name for name in MODULES if name.startswith("retrieval.")} | {"faults"}, path
    for path in of_wing("world"):
        assert not own(path) & {"population", "reflect", "objectives", "grpo", "report"}, path


def test_the_page_is_made_from_files_without_torch():
    for path in [*of_wing("page"), MODULES["report"]]:
        allowed = {name for name in MODULES if name.split(".")[0] == "page"} | {"faults", "outside", "plumbing.servers"}
        assert own(path) <= allowed, path
    code = "import sys, report; assert not {'torch', 'numpy', 'requests'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- the project


def test_the_project_stands_alone():
    """No file mentions the folder beside the project."""
    beside = re.compile(r"\.\./" + "shared|" + "shared/" + "(design|paper|prototypes|hooks)")
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            x for x in subfolders if not x.startswith((".venv", ".git")) and x not in ("runs", "__pycache__")
        ]
        for name in names:
            if name.endswith((".py", ".md", ".txt", ".toml", ".yml", ".yaml", ".sh", ".tex")) or name == "Makefile":
                text = Path(folder, name).read_text(errors="ignore")
                assert not beside.search(text), f"{folder}/{name}"
