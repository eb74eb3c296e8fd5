"""Mutation tests of the algorithm (`make mutants`): how many small faults in it do the tests notice?

mutmut plants one fault at a time in the functions below and runs the tests that reach it. Prints the score of every
module and the survivors as diffs. Exits with 1 if less than 90 % are noticed. pyproject.toml has mutmut's settings.
"""

import argparse
import os
import shutil
import sys
from collections import Counter

from _pytest.nodes import Node
from mutmut.__main__ import cli, collect_source_file_mutation_data
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

GOAL = 0.9
NAMES = {
    "inspo": "inspo compare " + " ".join(
        f"xǁEvolutionǁ{name}" for name in ("population", "begin", "evolve", "propose", "prompt", "ask", "verify")
    ),
    "grpo": "group_advantages xǁLearnerǁset_advantages xǁLearnerǁterms",
    "reflect": "parse read_candidates check _mentions normalize paraphrase_prompt history_prompt "
    "reflection_prompt format_examples shorten cut_middle",
    "tasks": "load_task check_questions reward measure _finite rng_of draw take_subset average_by_source",
    "tasks.questions": "normalize em f1 _token_f1 _read_question",
}
FUNCTIONS = ["population.*"]
FUNCTIONS += [
    f"{module}.{name if name.startswith('x') else f'x_{name}'}__mutmut_*"
    for module, names in NAMES.items()
    for name in names.split()
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-children", type=int, default=os.cpu_count(), help="faults that are tried at once")
    args = parser.parse_args()
    shutil.rmtree("mutants", ignore_errors=True)  # results of an earlier run
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take longer to load than most tests to run
    Node._nodeid = property(lambda node: node.nodeid)  # mutmut 3.8.0 reads a name that pytest 9.2 dropped
    cli(["run", *FUNCTIONS, "--max-children", str(args.max_children)], standalone_mode=False)

    survivors = []
    counts: dict[str, Counter[str]] = {}
    for data, name, _ in collect_source_file_mutation_data(mutant_names=FUNCTIONS)[0]:
        status = status_by_exit_code[data.exit_code_by_key[name]]
        counts.setdefault(name.partition(".")[0], Counter())[status] += 1
        if status not in ("killed", "timeout"):
            survivors.append(f"{name}: {status}\n{get_diff_for_mutant(name, path=data.path)}")
    print(*survivors, sep="\n")
    counts["all"] = sum(counts.values(), Counter())
    for module, count in counts.items():
        print(f"{module:12}{share(count):6.1%} of {count.total():4}:", ", ".join(f"{n} {s}" for s, n in count.items()))
    sys.exit(share(counts["all"]) < GOAL)


def share(count: Counter[str]) -> float:
    return (count["killed"] + count["timeout"]) / count.total()


if __name__ == "__main__":
    main()
