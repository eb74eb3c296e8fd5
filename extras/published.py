"""Our evaluations beside Table 1: its rows of Search-R1 and INSPO, with intervals over seeds.

    python extras/published.py runs/recipe/evaluation --model qwen2.5-3b

The folder has evaluate.py's --out of every arm, seed and temperature, named ARM-SEED-tTEMPERATURE
(static-0-t1), as extras/recipe.py writes them. With one seed the interval of a difference is over
questions. docs/real.md says what counts as reproduced.
"""

if not __package__:
    import root  # noqa: F401
import json
from pathlib import Path

import numpy as np

from config import HERE
from extras import compare
from extras.bench.harness import parser_of
from extras.compare import Arm, Evaluation, Interval
from plumbing.faults import Fault, one_line

PUBLISHED = HERE / "docs" / "results" / "rows" / "published.json"
IN_PAPER = {"static": "search_r1", "inspo": "inspo"}  # our arms -> Table 1's methods


def read_arms(folder: Path) -> dict[tuple[str, float], Arm]:
    """Returns the evaluations of each arm at each temperature, a seed each. Raises Fault where a
    seed is missing."""
    found: dict[tuple[str, float], dict[str, Evaluation]] = {}
    for path in sorted(folder.glob("*-*-t*"), reverse=True):  # static first
        arm, seed, _ = path.name.rsplit("-", 2)
        evaluation = compare.read_evaluation(path)
        found.setdefault((arm, evaluation.setting["temperature"]), {})[seed] = evaluation
    if not found:
        raise Fault(f"{folder}: no evaluation ARM-SEED-tTEMPERATURE is in it (extras/recipe.py)")
    for (arm, temperature), by_seed in found.items():
        missing = set().union(*found.values()) - by_seed.keys()
        if missing:
            raise Fault(
                f"{folder}: {arm} at temperature {temperature:g} lacks seed {min(missing)}, which others have"
            )
    return {key: [*by_seed.values()] for key, by_seed in found.items()}


def judge(found: Interval, claim: float) -> str:
    """Says whether a gain was reproduced, by the rule of docs/real.md."""
    if found.low > 0:
        return "reproduced" if found.high >= claim else "partly reproduced"
    return "not reproduced" if found.high < claim / 2 else "undecided: add seeds"


def make_table(folder: Path, model: str = "") -> str:
    """Returns the Markdown table, and with several seeds a verdict for each temperature."""
    arms = read_arms(folder)
    every = sum(arms.values(), [])
    compare.check_alike(every)
    data = [*every[0].values]
    paper = json.loads(PUBLISHED.read_bytes())["paper"]
    rows, verdicts = [], []

    def add(what: str, temperature: str, cells: list[str], seeds: str = "") -> None:
        row = {"EM": what, "temperature": temperature, "seeds": seeds}
        rows.append(row | dict(zip([*data, "average"], cells, strict=True)))

    said: dict[str, dict[str, float]] = {}  # arm -> what is published, by set of questions
    if model in paper:
        for arm, method in IN_PAPER.items():
            said[arm] = dict(zip(paper["columns"], paper[model][method], strict=True))
            cells = [f"{said[arm][x]:.3f}" if x in said[arm] else "" for x in [*data, "average"]]
            add(f"{arm}, published", paper["temperature"][method], cells)
    for (arm, temperature), some in arms.items():
        means = np.array([[e.values[name].mean() for name in data] for e in some])  # (seeds, sets)
        average = compare.estimate_over_seeds(means.mean(1))
        cells = [f"{x:.3f}" for x in means.mean(0)]
        add(arm, f"{temperature:g}", [*cells, f"{average}"], str(len(some)))
        first = arms.get(("static", temperature))
        if not first or arm == "static":
            continue
        sets = [*([name] for name in data), data]
        found = [compare.compare_arms(some, first, names)[1].interval for names in sets]
        cells = [f"{x.mean:+.3f}" for x in found[:-1]]
        add(f"{arm} less static", f"{temperature:g}", [*cells, f"{found[-1]:+}"], str(len(some)))
        if arm in said and len(some) > 1:
            claim = said[arm]["average"] - said["static"]["average"]
            verdict = f"the published gain, {claim:+.3f}, is {judge(found[-1], claim)}"
            verdicts.append(f"\nAt temperature {temperature:g} {verdict}.")
    return compare.format_table(rows) + "".join(verdicts)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "extras/published.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="", help="qwen2.5-3b or qwen2.5-7b: whose figures")
    args = parser.parse_args(argv)
    with one_line("extras/published.py"):
        print(make_table(args.folder, args.model))


if __name__ == "__main__":
    main()
