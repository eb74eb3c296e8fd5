"""What a run or an evaluation is: its settings and, as "content", a digest of everything that they
name."""

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config import HERE, Config
from plumbing.client import Client, RequestFailed
from plumbing.files import Row
from plumbing.hub import commit_of
from plumbing.outside import without_secrets
from tasks import Question, Task
from tasks.tools import WORDS

# a file is read in at most so many blocks: one of more than 256 MiB is sampled
BLOCK, BLOCKS = 1 << 20, 256
# knobs that name files: their content counts
PATHS = ("train", "valid", "test", "corpus", "instruction", "model")
# Knobs that a resumed run may change: they affect where and how fast it runs, not what it computes.
FREE = {
    "out", "resume", "device", "tracker", "retriever", "keep", "save_every", "search_retries", "optimizer_retries",
    "engine", "vllm", "vllm_memory", "recompute", "offload_reference", "patience", "micro_tokens", "max_rows",
    "gather",    "fused_layers", "id",
    "threads",  # but with another number sums may be rounded differently
}  # fmt: skip


def with_absolute_paths(cfg: Config) -> Row:
    """Returns the knobs for config.json, which is read from other directories too."""
    knobs = asdict(cfg)
    paths = {name: Path(knobs[name]) for name in PATHS if knobs[name]}
    return knobs | {name: str(path.absolute()) for name, path in paths.items() if path.exists()}


def describe_run(task: Task, *parts: object) -> Row:
    """Returns the content of a run. Where --train is cut by --seed, both parts are one set: seeds
    do not differ. `parts`: classes and functions in place of the usual ones."""
    train = sorted([*task.questions("train"), *task.questions("valid")], key=lambda q: q.id)
    questions = {"train or valid": train, "test": task.questions("test")}
    own = [getattr(part, "func", part) for part in parts]  # of a partial
    # by which each step draws
    order = {"order of train": digest([q.id for q in task.questions("train")])}
    names = [getattr(part, "__qualname__", type(part).__qualname__) for part in own]
    order["classes given to train"] = ", ".join(names)
    return describe(task, questions, task.instruction, describe_model(task.cfg.model), own) | order


def describe(
    task: Task,
    questions: Mapping[str, Sequence[Question]],
    instruction: str,
    weights: str,
    parts: Sequence[Any] = (),
) -> Row:
    """Returns by name, for `differences`: what is asked, under which instruction, of which model,
    with what code."""
    used = [
        *type(task).__mro__,
        type(task.make_format()),
        *(getattr(tool, "function", tool) for tool in task.tools),
        *parts,
    ]
    named = re.findall(r"[\w.]+(?=:)", f"{task.cfg.task},{task.cfg.reward}")
    modules = {x.__module__ for x in used} | {*named}
    about = {"weights": weights, "instruction text": instruction, "passages": describe_corpus(task)}
    for name, some in questions.items():
        about[f"questions of {name}"] = digest([vars(q) | {"golds": ()} for q in some])
        about[f"golds of {name}"] = digest([q.golds for q in some])
    for tool in task.tools:
        words = [getattr(tool, word, "") for word in (*WORDS, "description", "schema")]
        about[f"words of {tool.tag}"] = digest(words)
    for name, file in sorted(find_code(modules).items()):
        about[f"code of {name}"] = digest_file(file)
    return about


def find_code(modules: Collection[str]) -> dict[str, Path]:
    """Returns the files of modules, and of what is imported from the same folders outside of this
    project."""
    # texts of thousands: a Path of each takes longer than the rest of a run's start
    installed = re.compile(f"site-packages|dist-packages|{re.escape(str(HERE))}/")
    code, outside, folders = dict[str, Path](), dict[str, str](), list[str]()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        if not installed.search(file):
            outside[name] = file
        if name in modules:
            code[name] = Path(file)
            if name in outside:
                folders.append(f"{code[name].parents[name.count('.')]}/")
    for name, file in outside.items():
        if file.startswith(tuple(folders)):
            code[name] = Path(file)
    return code


def describe_model(path: str) -> str:
    """Returns the digests of a folder's files; of a model of the hub the commit, of one behind a
    URL only the name."""
    if "://" in path:
        return without_secrets(path)
    if Path(path).is_dir():
        files = sorted(
            file for file in Path(path).glob("[!.]*") if file.is_file() and file.suffix != ".md"
        )
        return ", ".join(f"{file.name} {digest_file(file)}" for file in files)
    return f"{path} {commit_of(path)}"


def describe_corpus(task: Task) -> str | None:
    """Returns the digest of --corpus, or what a search server says of its own; of one that says
    nothing, its URL.

    "" where nothing is searched, None where the server does not answer.
    """
    if not any(hasattr(tool, "url") for tool in task.tools):  # as tasks.search.Search has
        return ""
    if not task.cfg.retriever:
        return digest_file(Path(task.cfg.corpus))
    try:
        client = Client(task.cfg.retriever, timeout=30, retries=0)
        return client.ask("/health", None, lambda answer: str(answer["corpus"]))
    except RequestFailed as e:
        return None if e.status == 0 else without_secrets(task.cfg.retriever)


def digest(value: Any) -> str:
    """Returns a digest of plain data. Sets are sorted and objects lose their address: another
    process agrees."""

    def stable(x: Any) -> Any:
        if isinstance(x, (set, frozenset)):
            return sorted(map(repr, x))
        return re.sub(r" at 0x\w+", "", repr(x))

    text = json.dumps(value, default=stable, skipkeys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """Returns a digest of a file: of all of it, or of its size and BLOCKS blocks spread over it,
    and says so."""
    size = path.stat().st_size
    stride = max(BLOCK, size // BLOCKS)
    sha = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for place in (*range(0, size, stride), max(0, size - BLOCK)):
            file.seek(place)
            sha.update(file.read(BLOCK))
    return sha.hexdigest()[:16] + (f" (a sample of {size:,} bytes)" if stride > BLOCK else "")


def differences(one: Row, other: Row, aside: Iterable[str] = ()) -> dict[str, str]:
    """Says by name what differs between two records: "T 40, not 80" of settings, "other golds of
    test" of content.

    Paths of files do not count, nor what is None because it could not be known.
    """
    a, b = (record | record.get("content", {}) for record in (one, other))
    names = [name for name in a | b if name not in (*PATHS, "content", *aside)]
    pairs = {name: (a.get(name, ""), b.get(name, "")) for name in names}
    return {
        name: f"{name} {x!s:.60}, not {y!s:.60}" if name in one else f"other {name}"
        for name, (x, y) in pairs.items()
        if x != y and None not in (x, y)
    }
