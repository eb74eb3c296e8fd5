"""Every command that the README and the docs show: it exists, its flags do, and at a small size it
prints what a person can read. The list comes from the pages themselves, so a command that is new
has to say here how it is run small."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt

from plumbing.files import read_jsonl

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "world" / "files"
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {"tests", "results", "runs", "mutants"} & set(page.relative_to(ROOT).parts[:-1])
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    and page.name != "LOG.md"
)
# not ours to run
OTHERS = {"hf", "pip", "curl", "export", "cat", "tar", "vllm", "for", "done", "git", "uv"}
RUN = "--T 2 --K_p 1 --K_e 1 --T_e 2 --D_B 4 --rounds 1 --batch 4 --G 2 --mini_batch 8 --eval_n 8 --save_every 2"
# program -> the flags with which it is run small here; or where else that is done, or why nowhere
SMALL = {
    "inspo.py": RUN, "extras/selection.py": RUN, "extras/espl.py": RUN + " --buffer 8", "extras/fst.py": RUN,
    "extras/objectives.py": RUN, "extras/table1.py train": RUN.replace("--G 2", "--G 5"),
    "extras/cold_start.py": RUN, "extras/collect.py": "--least 0", "extras.real.demos": "--n 20",
    "extras/table1.py": "--n 4", "evaluate.py": "--n 4", "extras/compare.py": "", "ask.py": "", "export.py": "",
    "extras.page": "", "extras.bench.step": "--repeat 1",
    "extras.campaign default": f"--extra '{RUN}' --seeds 0",
}  # fmt: skip
ELSEWHERE = {
    "retrieval_server.py": "tests/test_retrieval_*.py", "world.optimizer": "tests/test_optimizer.py",
    "extras.world.warm_start": "tests/extras/test_warm_start.py", "extras/hotpot.py": "tests/extras/test_hotpot.py",
    "extras.real.model": "tests/extras/test_real.py", "extras.real": "tests/extras/test_real_run.py",
    "extras.campaign": "tests/extras/test_campaign.py", "extras.campaign real": "tests/extras/test_campaign.py",
    "labs": "tests/labs/test_labs.py", "marimo": "tests/labs/test_labs.py",
    "pytest": "itself", "ruff": "make lint", "mypy": "make lint", "pip": ".ci/run", "venv": "make setup",
    "extras.bench.mutants": "it runs these tests",
    "extras.bench.gpu": "it wants a GPU", "extras.bench.resume": "it wants a GPU",
    "extras.bench.update": "it wants a GPU",
    "kernels.bench": "tests/test_triton.py", "extras.fit": "tests/extras/test_fit.py",
    "extras/recipe.py": "tests/extras/test_recipe.py", "extras/published.py": "tests/extras/test_recipe.py",
    "extras/fork.py": "tests/extras/test_examples.py", "extras.adapters": "tests/extras/test_adapters.py",
}  # fmt: skip


class Shown(NamedTuple):
    page: str
    text: str  # as it stands on the page, on one line
    program: str  # a key of SMALL or of ELSEWHERE
    argv: tuple[str, ...]  # its arguments


def lines_of(page: Path) -> list[str]:
    """Returns the lines of a page's shell blocks, continued ones joined, and the commands in its
    prose."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    blocks = [
        t.content
        for t in tokens
        if t.type in ("fence", "code_block") and t.info.strip() in ("", "sh")
    ]
    prose = [
        child.content for t in tokens for child in t.children or [] if child.type == "code_inline"
    ]
    joined = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined] + [
        x for x in prose if re.match(r"(python|torchrun|make) \S", x)
    ]


def recipe_of(target: str, argv: list[str]) -> list[str]:
    """Returns what `make TARGET ARGS=...` would run, but for its setup."""
    given = [x for x in argv if "=" in x]
    # of a `make test-slow ARGS=...` that runs this
    env = os.environ | {"MAKEFLAGS": "", "ARGS": ""}
    done = subprocess.run(
        ["make", "-n", target, *given], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"make {target}: {done.stderr}"
    lines = done.stdout.splitlines()
    return [line for line in lines if re.match(r"(\w+=\S+ )?[\w./-]*python3? ", line)]


def parsed(page: str, line: str) -> list[Shown]:
    """Returns the commands of a line that are ours."""
    found = []
    for part in re.split(r"&&|;(?= )|\|", line):
        words = shlex.split(part, comments=True)
        while words and ("=" in words[0] or words[0] in ("do", "then", "command")):
            words.pop(0)
        if not words or words[0] in OTHERS:
            continue
        if words[0] == "make" and len(words) > 1:
            for recipe in recipe_of(words[1], words[2:]):
                found += parsed(page, recipe)
        elif words[0] == "torchrun":
            k = next(k for k, word in enumerate(words) if word.endswith(".py"))
            found.append(Shown(page, line, words[k], tuple(words[k + 1 :])))
        elif re.search(r"python3?$", words[0]) and len(words) > 1:
            k = 2 if words[1] == "-m" else 1
            name, argv = words[k], words[k + 1 :]
            if (first := f"{name} {argv[0]}" if argv else "") in SMALL:
                name, argv = first, argv[1:]
            found.append(Shown(page, line, name, tuple(argv)))
    return found


SHOWN = [
    command
    for page in PAGES
    for line in lines_of(page)
    for command in parsed(str(page.relative_to(ROOT)), line)
]


def test_the_pages_show_commands():
    assert {"README.md", "docs/real.md", "docs/selection.md"} <= {c.page for c in SHOWN}
    assert {"inspo.py", "evaluate.py", "extras/compare.py", "export.py", "pytest"} <= {
        c.program for c in SHOWN
    }


def file_of(program: str) -> Path | None:
    """Returns the file of a program; None if it is not ours."""
    script = program.split()[0]
    if script in ("pytest", "ruff", "mypy", "pip", "venv", "marimo"):
        return None
    path = ROOT / (script if script.endswith(".py") else script.replace(".", "/"))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("program", sorted({c.program for c in SHOWN}))
def test_a_program_that_is_shown_exists_and_is_run_small_somewhere(program):
    assert program in SMALL or program in ELSEWHERE, f"say how {program} is run small"
    assert file_of(program) is None or file_of(program).is_file()


@pytest.mark.slow  # --help of twenty programs, some of which import torch
@pytest.mark.parametrize("program", sorted({c.program for c in SHOWN if file_of(c.program)}))
def test_a_shown_flag_exists(program):
    for command in SHOWN:
        words = (*command.program.split()[1:], *command.argv)
        flags = {
            x.partition("=")[0]
            for x in words
            if command.program == program and re.match(r"--[a-z]", x)
        }
        assert not flags or flags <= flags_of(program) | {"--help"}, (
            f"{command.page}: {command.text}"
        )


def help_of(*argv: str) -> str:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True).stdout


@functools.cache
def flags_of(program: str) -> set[str]:
    """Returns the flags of a program's help."""
    script, *words = program.split()
    how = [script] if script.endswith(".py") else ["-m", script]
    words = ["train", "sft"] if words == ["train"] else []  # else of all that it does
    out = help_of(*how, *words, "--help")
    return set(re.findall(r"--[a-zA-Z][\w-]*", out))


# ---- run small


@pytest.fixture(scope="session")
def desk(tmp_path_factory):
    """A directory with what the pages' commands are given: a finished run, questions,
    evaluations."""
    desk = tmp_path_factory.mktemp("desk")
    for name in ("train", "test"):
        rows = [
            row | {"golden_answers": list(row["golden_answers"])}
            for row in read_jsonl(WORLD / f"{name}.jsonl")
        ]
        pq.write_table(pa.Table.from_pylist(rows), desk / f"{name}.parquet")
    (desk / "wiki.jsonl").symlink_to(WORLD / "corpus.jsonl")
    call(
        "inspo.py", [*RUN.split(), "--lora_rank", "4", "--eval_every", "1", "--out", desk / "NAME"]
    )
    call("extras/collect.py", [desk / "NAME", "--least", "0", "--out", desk / "demos.jsonl"])
    for name in "AB":
        call("evaluate.py", [desk / "NAME", "--n", 8, "--out", desk / f"evaluation-{name}"])
    return desk


def call(program: str, argv: list[object], text: str = "") -> None:
    """Runs a program. Fails if it does, or prints what is nothing for a person."""
    script, *words = program.split()
    how = [script] if script.endswith(".py") else ["-m", script]
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI")} | {
        "OMP_NUM_THREADS": "1"
    }
    line = [sys.executable, *how, *words, *map(str, argv)]
    done = subprocess.run(
        line, cwd=ROOT, env=env, capture_output=True, text=True, input=text, timeout=900
    )
    assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    for text in [*done.stdout.splitlines(), *done.stderr.splitlines()]:
        assert not UNREADABLE.search(text), f"{line}: {text}"


UNREADABLE = re.compile(  # Python's own notation, what is no number, tracebacks
    r"\b[A-Z]\w*\([a-z_]+=|<[\w.]+ object at|\{'|\['|dtype=|\bnp\.|\btensor\(|\barray\("
    r"|\b(?:nan|inf|NaN)\b|[\w:=,(] ?None\b|Traceback|Warning:"
)


SWAPS = [  # of words in a shown command, for what there is at the desk
    (r"\.\.\.|--serve|--(?:retriever|optimizer_model|seed|out) \S+|--model (?:[Ss]moll|\S*[Qq]wen)\S*", ""),
    (r"--data(?: (?!--)\S+)+", "--data test valid"),
    (r"(?:\$e/|\S*/evaluation/)\S*(?:A|static)\S*", "DESK/evaluation-A"),
    (r"\$e/\S*|\S*/evaluation/\S*", "DESK/evaluation-B"),
    (r"runs/\S*/policy", "DESK/NAME/policy"), (r"runs/\S*", "DESK/NAME"), ("NAME", "dr_grpo"),
    # a chat endpoint: the world's policy plays
    (r"(?:Qwen/|smollm)\S*", "world"), (r"http://\S*", "world --n 4"),
    (r"(?:data/hotpotqa/)(\S*)", rf"{WORLD}/\1"), ("questions.jsonl", f"{WORLD}/test.jsonl"),
    ("passages.jsonl", f"{WORLD}/corpus.jsonl"), (r"(?:\S*/)?([^/\s]*\.parquet|demos\.jsonl)", r"DESK/\1"),
]  # fmt: skip
PLACES = {"--runs": "runs", "--results": "results", "--out": "out", "--picture": "picture.png"}


def smaller(command: Shown, desk: Path, out: Path) -> list[str]:
    """Returns the arguments of a shown command, its own where they can be had here, with flags that
    make it small."""
    line = " ".join(command.argv)
    for shown, here in SWAPS:
        line = re.sub(rf"(?<!\S)(?:{shown})(?!\S)", here, line)
    argv = line.replace("DESK", str(desk)).split()
    argv += [
        x
        for flag, name in PLACES.items()
        if flag in flags_of(command.program)
        for x in (flag, str(out / name))
    ]
    argv += ["--run", str(desk / "NAME")] * (command.program == "ask.py" and "--run" not in argv)
    # a large preset's has none: it takes a running server
    if "--train" in argv and "--corpus" not in argv:
        argv += ["--corpus", str(WORLD / "corpus.jsonl")]
    # a real model's preset, a small policy's positions
    argv += ["--max_prompt", "900"] * ("--preset" in argv)
    return argv + shlex.split(SMALL[command.program])


SMALLER = {}  # of each program the command with most flags
for command in sorted(SHOWN, key=lambda c: -len(c.argv)):
    if command.program in SMALL:
        SMALLER.setdefault(command.program, command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", SMALLER.values(), ids=lambda c: f"{c.program} {' '.join(c.argv)}"[:100]
)
def test_a_shown_command_prints_what_a_person_can_read(command, desk, tmp_path):
    call(
        command.program,
        smaller(command, desk, tmp_path),
        "What is the capital of the nation Bai?\n",
    )
    for file in tmp_path.rglob("*.md"):
        assert not UNREADABLE.search(file.read_text()), file.name
