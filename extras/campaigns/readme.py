"""What the README says of the evidence, written from the committed rows between its two marks.

    python -m extras.campaigns.readme

`make paper`, `graded`, `wording` and `default` do so at their end, where their rows are those of results/.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from config import HERE
from evaluation.statistics import over_seeds
from extras.campaigns import graded, wording
from extras.campaigns.arms import ARMS, Row
from extras.campaigns.claims import ABSENT, CLAIMS, GIVEN, MEASURED, UNTOLD, Rows
from extras.campaigns.paper import canary_line, closing, parts, read, told
from extras.campaigns.seeds import share, two_valued
from journal.directory import read_jsonl
from page.read import many
from plumbing.faults import Fault, one_line

BEGIN, END = "<!-- evidence: extras/campaigns/readme.py writes this -->\n\n", "\n<!-- /evidence -->\n"


def evidence(default: Rows, rows: Rows, second_hand: Rows, drifting: Sequence[Row], worded: Sequence[Row]) -> str:
    """Returns the README's part: the default and its controls, how the world came to be, what the campaigns can say.

    `drifting`: the rows of the graded world; `worded`: of the campaign on wordings.
    """
    inspo = default["inspo"]
    start, steps = inspo[0]["evals"][0][1], inspo[0]["evals"][-1][0]
    head = f"held-out exact match after {steps} steps, from {start:.2f}"
    lines = [f"| {head} | by seed | above 0.5 | mean, 95 % | searches |", "|---" * 5 + "|"]
    for arm in ("inspo", "static", "frozen"):
        em = [row["em"] for row in default[arm]]
        mean = "" if two_valued(em) else f"{over_seeds(em):.2f}"
        searches = f"{np.mean([row['searches'] for row in default[arm]]):.1f}"
        cells = [f"{arm}: {ARMS[arm].what}", ", ".join(f"{x:.2f}" for x in em), f"{share(em)}", mean, searches]
        lines.append(f"| {' | '.join(cells)} |")
    alone = {
        name: [row["held_out"][name] for row in inspo]
        for name in ("trained policy, first instruction", "first policy, I_star")
    }
    policy, instruction = (f"{min(x):.2f} to {max(x):.2f}" for x in alone.values())
    world = closing(second_hand, rows)
    count = Counter(told(claim, rows).kind for claim in CLAIMS)
    kinds = ", ".join(
        f"{count[kind]} {'' if kind == UNTOLD else 'are '}{kind}"
        for kind in (MEASURED, GIVEN, UNTOLD, ABSENT) if count[kind]
    )  # fmt: skip
    guessing = share([row["em"] for which in (rows, second_hand) for row in which.get("guessing", ())])
    text = [
        "\n".join(lines),
        f"Neither gets there alone: INSPO's trained policies have {policy} under the first instruction, its"
        f" instructions {instruction} under the first policy ([runs](results/default.md)). {world}",
        f"[A campaign](results/paper.md) plays the paper's tables and figures in this world: of"
        f" {many(len(CLAIMS), 'claim')} {kinds}. {canary_line(parts(rows)[0])} An optimizer that guesses got there in"
        f" {guessing} runs.",
        by_drift(drifting),
        in_other_words(worded),
    ]
    return "\n\n".join(wrap(part) for part in text) + "\n"


def by_drift(rows: Sequence[Row]) -> str:
    """Returns what the graded world says of evolving along, first and after."""
    listed = lambda x: ", ".join(map(str, x))  # noqa: E731
    told = {
        rival: listed(f"{over_seeds(list(graded.gains(rows, rival, d, measure).values())):+.2f}" for d in graded.DRIFTS)
        for rival, measure in (("before", "equal rollouts"), ("after", "at its end"))
    }
    took = {arm: np.mean([row["rollouts"] for row in rows if row["arm"] == arm]) for arm in ("online", "after")}
    chooser = listed(f"{graded.built_in(d):.2f}" for d in graded.DRIFTS)
    return (
        "[A graded world](docs/graded.md), whose [plan](results/graded_plan.md) was committed before it ran, asks"
        " whether evolving along pays where the worth of a clause drifts with the policy's skill, by d from 0 to 1"
        f" ({len(graded.planned(rows))} of {graded.PLANNED} runs are in). At d ="
        f" {listed(f'{d:g}' for d in graded.DRIFTS)} evolving along gains {told['before']} over evolving first, where a"
        f" perfect chooser gains {chooser} by construction, and {told['after']} over evolving after, which took"
        f" {took['after'] / took['online']:.1f} times the rollouts."
    )


def in_other_words(rows: Sequence[Row]) -> str:
    """Returns what the campaign on wordings says of training under a population of them."""

    def both(em: Callable[[str], Sequence[float]]) -> str:
        return " and ".join(f"{np.mean(em(arm)):.2f}" for arm in ("one", "many"))

    taught = both(lambda arm: [wording.mean(row, "good, taught wordings") for row in rows if row["arm"] == arm])
    new = both(lambda arm: wording.under_new(rows, arm))
    lost = wording.unread(rows)
    read = both(lambda arm: wording.under_new(rows, arm, without=lost))
    found = wording.more_than_one(rows)["many"]
    seen = "they differ" if found.p < 0.05 else f"not told apart, where {found.visible:.2f} would have been seen"
    return (
        "Does a population make a policy robust to wording? [A campaign](results/wording.md) trains policies under one"
        " good instruction and under a population of its wordings. Told the same in words that neither has met, they"
        f" have {new} ({found.interval:+.2f}): {seen}. This world leaves little to see: no policy understands"
        f" {len(lost)} of the {len(wording.NEW)} new sentences; under the others"
        f" they have {read}, in taught words {taught}."
    )


def wrap(text: str, width: int = 120) -> str:
    """Returns a paragraph in lines of at most `width`; a table as it is."""
    if text.startswith("|"):
        return text
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def written(readme: str, part: str) -> str:
    """Returns the README with this part between its marks; Fault if a mark is missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise Fault(f"README.md needs one line {BEGIN.strip()} and one {END.strip()}")
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + part + END + rest.partition(END)[2]


def of_results(folder: Path = HERE / "results") -> str:
    """Returns the part that the committed rows give."""
    rows = [read(folder / f"{name}.jsonl") for name in ("default", "rows", "second_hand")]
    return evidence(*rows, *(read_jsonl(folder / f"{name}.jsonl") for name in ("graded", "wording")))


def main() -> None:
    path = HERE / "README.md"
    path.write_text(written(path.read_text(), of_results()))
    print(f"{path} says what results/ has")


if __name__ == "__main__":
    with one_line("extras.campaigns.readme"):
        main()
