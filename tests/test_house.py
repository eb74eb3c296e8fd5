"""The house's rules: the paper's lines and equations are all marked, the import arrows hold, no room is too large."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = sorted(p for p in ROOT.glob("*.py"))
CODE = CORE + sorted(ROOT.glob("kernels/*.py"))

ARROWS = {  # who may import whom, of the project's own modules
    "inspo": {"config", "data", "fit", "grpo", "policy", "population", "ranks", "reflect", "report", "rollout", "run"}
    | {"servers", "session", "worker"},
    "session": {"config", "data", "population", "reflect", "rollout", "run"},
    "report": {"data", "population", "rollout", "run"},
    "worker": {"config", "engine", "grpo", "policy", "ranks", "rollout", "vllm_engine"}
    | {"vllm_server"},
    "ranks": {"rollout"},
    "grpo": {"policy", "rollout"},
    "policy": {"kernels", "rollout"},
    "fit": {"config", "policy"},
    "vllm_engine": {"rollout"},
    "vllm_server": {"policy", "rollout", "vllm_engine"},
    "rollout": {"data"},
    "run": {"config"},
    "ask": {"config", "data", "engine", "policy", "rollout", "servers"},
    "export": {"config", "policy", "population", "run"},
    "retrieval_server": {"retrieval", "servers"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def tags() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in CODE:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = line.partition("# ")[2] if "# " in line else ""
            for tag in re.findall(r"Alg\.1 (?:L\d+ ?)+|Eq\.\d|CHOICE-\d+", comment):
                lines = re.findall(r"L\d+", tag)
                for name in [f"Alg.1 {x}" for x in lines] or [tag]:
                    found.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{number}")
    return found


def test_every_line_of_algorithm_1_is_marked_once():
    # 13, 22, 24 and 25 are the ends of blocks
    lines = [f"Alg.1 L{n}" for n in range(1, 27) if n not in (13, 22, 24, 25)]
    found = tags()
    assert {name: len(found.get(name, [])) for name in lines} == dict.fromkeys(lines, 1)


def test_every_equation_and_every_choice_is_marked_once():
    names = [f"Eq.{n}" for n in range(1, 7)] + [f"CHOICE-{n}" for n in range(1, 12)]
    found = tags()
    # the kernel and its twin hold one half of Eq. 2 and 3 (surrogate, rho), grpo.py the other (average, A)
    thrice = {"Eq.2": 3, "Eq.3": 3}
    assert {name: len(found.get(name, [])) for name in names} == dict.fromkeys(names, 1) | thrice


def test_the_readme_index_points_at_the_marks():
    readme = (ROOT / "README.md").read_text()
    for name, places in tags().items():
        label = name.replace("Alg.1 ", "")
        row = re.search(rf"^\| {re.escape(label)} \|.*$", readme, re.M)
        assert row, f"README has no row for {name}"
        for place in places:
            assert f"`{place.split(':')[0]}`" in row.group(0), f"README: {name} is in {place}"


def test_imports_follow_the_arrows():
    own = {p.stem for p in CORE} | {"kernels", "retrieval", "world", "tests", "bench"}
    for path in CORE:
        assert imports(path) & own <= ARROWS.get(path.stem, set()), path.name
    for path in ROOT.glob("world/*.py"):
        assert imports(path) & own <= {"world", "rollout", "servers"}, path.name
    for path in ROOT.glob("retrieval/*.py"):
        assert imports(path) & own <= {"retrieval"}, path.name
    assert not imports(ROOT / "population.py") & {"torch", "transformers", "reflect"}
    assert not imports(ROOT / "reflect.py") & {"torch", "transformers", "population"}


def test_rooms_are_small():
    rooms = [*CODE, *ROOT.glob("retrieval/*.py"), *ROOT.glob("bench/*.py")]
    sizes = {path: len(path.read_text().splitlines()) for path in rooms}
    assert max(sizes.values()) <= 350, sizes
    apart = {"retrieval_server", "vllm_engine", "vllm_server", "fit", "export"}  # read when they are needed
    assert sum(sizes[path] for path in CORE if path.stem not in apart) <= 2900


def test_the_project_stands_alone():
    for path in ROOT.rglob("*"):
        elsewhere = any(part.startswith(".venv") or part == "runs" for part in path.parts)
        if path.suffix in (".py", ".md", ".txt", ".toml") and not elsewhere:
            assert "../" + "shared" not in path.read_text(errors="ignore"), path
