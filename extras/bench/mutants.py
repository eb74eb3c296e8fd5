"""Mutation tests (`make mutants`): how many small faults do the tests notice, room by room?

A mutant is a module with one small fault: a comparison flipped, `and` for `or`, + for -, * for /, a
number one higher, a condition negated, a call dropped. A forked process imports it from memory, so
the checkout does not change, and runs those of the room's tests that call the function, except the
ones marked slow or ranks. Programs that a test starts run without the fault. A room's sample of at
most `--n` mutants is the same as long as its code is. Prints the mutants that no test noticed (some
are no faults: they compute the same) and the score.
"""

import ast
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path

import hypothesis.core  # noqa: F401  slow imports come once, before the forks
import pytest
from torch.distributed.checkpoint import state_dict  # noqa: F401
from torch.nn.attention import varlen  # noqa: F401
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

from extras.bench.harness import parser_of

ROOMS = {  # files; names of tests/test_*.py
    "inspo": (["inspo.py"], "algorithm one_step"),
    "rollout": (["rollout.py"], "rollout functions"),
    "grpo": (["grpo.py"], "terms grpo"),
    "population": (["population.py"], "population algorithm"),
    "reflect": (["reflect.py"], "reflect optimizer config"),
    "tasks": (
        ["tasks/__init__.py", "tasks/search_qa.py", "tasks/task.py"],
        "questions seam functions start rollout hub",
    ),
    "tools": (
        ["tasks/tools.py", "tasks/functions.py", "tasks/search_qa.py"],
        "tools functions seam reflect rollout start",
    ),
    "engines": (["engines/torch_engine.py"], "engine rollout"),
    "run": (["run.py"], "run resume"),
    "retrieval": (["retrieval_server.py"], "retrieval_server retrieval_dense"),
}
PLUMBING = {"main", "train", "describe", "how_to_resume"}  # arguments, and lines for a reader
OPTIONS = [
    "-x", "-m", "not slow and not ranks and not fake and not real and not gpu", "--basetemp=mutants",
    "--disable-plugin-autoload", "-p", "no:cacheprovider", "-p", "no:unraisableexception",
]  # fmt: skip
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


def mutate(node):
    """Yields (field, its new value)."""
    match node:
        case ast.Compare(ops=ops):
            yield "ops", [OTHER[type(op)]() for op in ops]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHER:
            yield "op", OTHER[type(op)]()
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(
            test, ast.Compare
        ):
            yield "test", ast.UnaryOp(ast.Not(), test)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", ast.UnaryOp(ast.Not(), operand)
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "value", value + 1
        case ast.Expr(value=ast.Call()):
            yield "value", ast.Constant(None)


def find_mutants(path):
    """Yields (path, name of the function, description, code of the module)."""
    module = ast.parse(Path(path).read_text("utf-8"))
    for function in ast.walk(module):
        if (
            isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and function.name not in PLUMBING
        ):
            for node in ast.walk(function):
                for field, value in mutate(node):
                    before, old = ast.unparse(node).partition("\n")[0], getattr(node, field)
                    setattr(node, field, value)
                    what = f"{path}:{node.lineno} {function.name}: {before}  ->  {ast.unparse(node)}".partition(
                        "\n"
                    )[0]
                    yield (
                        path,
                        function.name,
                        what,
                        compile(ast.fix_missing_locations(module), path, "exec"),
                    )
                    setattr(node, field, old)


def list_tests(paths, files):
    """Returns {(path, function): tests that call it}, the tests as keys; what a fixture calls, its
    whole file does."""
    tests, known = defaultdict(dict), {os.path.abspath(path): path for path in paths}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename in known and "PYTEST_CURRENT_TEST" in os.environ:
            test, _, phase = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
            tests[known[code.co_filename], code.co_name][
                test if phase == "(call)" else test.partition("::")[0]
            ] = None

    sys.setprofile(note)
    threading.setprofile(note)
    assert pytest.main([*OPTIONS, *files]) == 0, "the tests fail without a mutant"
    return tests


def survives(tests, path, code):
    if os.fork():
        return os.wait()[1] == 0
    # pytest tears down what the test has started
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 180, 10)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    SourceFileLoader.get_code = lambda loader, name, load=SourceFileLoader.get_code: (
        code if loader.path == os.path.abspath(path) else load(loader, name)
    )
    # whole files come last
    os._exit(pytest.main([*OPTIONS, *sorted(tests, key=lambda test: "::" not in test)]))


def measure(room, paths, names, n):
    """Prints the survivors of a room, and its score."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        reach = pool.apply(list_tests, (paths, [f"tests/test_{name}.py" for name in names.split()]))
    mutants = [mutant for path in paths for mutant in find_mutants(path)]
    # so the first of a larger sample are those of a smaller one
    random.Random(room).shuffle(mutants)
    sample = mutants[:n]
    survivors = [
        what
        for path, name, what, code in sample
        if not reach[path, name] or survives(reach[path, name], path, code)
    ]
    print(*survivors, sep="\n")
    print(
        f"| {room} | {len(sample)} of {len(mutants)} | {1 - len(survivors) / len(sample):.0%} |",
        flush=True,
    )


def main():
    parser = parser_of(__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=" ".join(ROOMS))
    parser.add_argument("--n", type=int, default=150, help="mutants to try in a room, at most")
    args = parser.parse_args()
    for room in args.rooms or ROOMS:
        measure(room, *ROOMS[room], args.n)


if __name__ == "__main__":
    main()
