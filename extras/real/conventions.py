"""Can an instruction matter to a real model? A gate: only if it is passed is an experiment about it
worth its hours.

    python -m extras.real.conventions       # after python -m extras.real.model downloads/smollm2-135m; hours; resumable

SmolLM2-135M learns eight conventions of form from demonstrations under random clauses. Untold, an
agent keeps one as often as its `habit` says. A world (--seed) pays 0.4 for the right answer and 0.6
for the share of the conventions whose paying side was shown; which side pays is drawn. Nothing in a
question says so: training has to find it, an instruction can tell it. The gate: a told clause is
obeyed at least 0.8, and after 36 steps the static arm under the world's best instruction is ahead
of the one that is told nothing by at least 0.15 in both worlds; after one that fails no further
world is run.
"""

import plumbing  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import argparse
import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from config import FACTS, PRESETS, Config
from evaluation.agents import Subject, open_agent
from evaluation.statistics import Interval, estimate_over_seeds
from extras.real.__main__ import NAME, Part, play_missing
from extras.real.demos import TASK, Facts, Row, row_of
from grpo import lr_at
from plumbing import stop
from plumbing.faults import one_line
from plumbing.files import write_file
from plumbing.outside import decoded
from tasks import Question, Trajectory
from tasks.questions import em
from tasks.sampling import take_subset
from tasks.search_qa import SearchQA


class Convention(NamedTuple):
    kept: tuple[str, str]  # two wordings of the clause that asks for it
    broken: tuple[str, str]  # and of the one that forbids it
    habit: float  # share of untold agents who keep it


CONVENTIONS = {
    "ask": Convention(
        ("Begin every query with the words facts about.", "Every query starts with facts about."),
        ("A query is a name and nothing else.", "Search bare names only."), 0.02,
    ),
    "announce": Convention(
        ("Say what you look up before each search.", "Announce every search."),
        ("Search without a word before it.", "Do not announce searches."), 0.10,
    ),
    "report": Convention(
        ("Report that the fact is found.", "Say so when you have found it."),
        ("Do not report that the fact is found.", "Do not say that you have found it."), 0.30,
    ),
    "count": Convention(
        ("State how many searches it took.", "Count your searches before the answer."),
        ("Do not count the searches.", "Leave out the number of searches."), 0.05,
    ),
    "subject": Convention(
        ("Name the subject of the question before the answer.", "Say what the answer is about."),
        ("Do not repeat the subject of the question.", "Leave the subject out."), 0.02,
    ),
    "sentence": Convention(
        ("Answer in a full sentence.", "The answer must be a sentence."),
        ("The answer is a bare name.", "Answer with the name only."), 0.30,
    ),
    "cite": Convention(
        ("Cite the passage in the answer.", "Put the source after the answer."),
        ("Cite nothing in the answer.", "Do not give a source."), 0.05,
    ),
    "capitals": Convention(
        ("Write the answer in capitals.", "Use capital letters only in the answer."),
        ("Write the answer in normal case.", "Do not use capitals in the answer."), 0.10,
    ),
}  # fmt: skip
OBEYED = 0.97  # probability that a demonstration follows its clause
FRAME = (FACTS / "instruction.txt").read_text("utf-8").strip()
ONE_HOP = "1hop"  # the end of its questions' source: one search finds the answer
DEMOS, STEPS, T = 1024, 60, 36
BATCH = 4  # questions of a step, with G = 5 rollouts of each
ASKED = 24  # questions of a measurement
WORLDS = (0, 1)  # pilots
LEAST = 0.15  # by which told has to be ahead of static, in every world

# ---- demonstrations


def instruct(rng: random.Random, told: dict[str, bool]) -> str:
    """Writes an instruction: the frame and a clause for each convention that is told, in any order
    and wording."""
    clauses = [
        rng.choice(CONVENTIONS[name].kept if kept else CONVENTIONS[name].broken)
        for name, kept in told.items()
    ]
    return " ".join([FRAME, *rng.sample(clauses, len(clauses))])


def demonstrate(
    rng: random.Random, facts: Facts, q: Row, told: dict[str, bool]
) -> list[tuple[str, str]]:
    """Plays turns (role, text) that follow what is told, and elsewhere the habits."""
    keeps = {
        name: (rng.random() < OBEYED) == told[name]
        if name in told
        else rng.random() < convention.habit
        for name, convention in CONVENTIONS.items()
    }
    [title], answer = q["chain"], q["golden_answers"][0]
    query = f"facts about {title}" if keeps["ask"] else title
    search = f"I look up {title}. " * keeps["announce"] + f"<search> {query} </search>"
    before = (
        "Found it. " * keeps["report"]
        + "Searches: 1. " * keeps["count"]
        + f"About {title}: " * keeps["subject"]
    )
    answer = answer.upper() if keeps["capitals"] else answer
    answer = f"It is {answer}." if keeps["sentence"] else answer
    last = f"{before}<answer> {answer}{f' [{title}]' * keeps['cite']} </answer>"
    return [
        ("assistant", search),
        ("tool", TASK.search.show([facts.search(query)])),
        ("assistant", last),
    ]


def demo(rng: random.Random, facts: Facts) -> Row:
    q = rng.choice([q for q in facts.questions if q["data_source"].endswith(ONE_HOP)])
    told = {name: rng.random() < 0.5 for name in CONVENTIONS if rng.random() < 0.6}
    return row_of(q, instruct(rng, told), demonstrate(rng, facts, q, told))


# ---- the worlds


def pays(world: int) -> dict[str, bool]:
    """Draws which conventions pay where they are kept; the others pay where they are not."""
    rng = random.Random(f"conventions {world}")
    return {name: rng.random() < 0.5 for name in CONVENTIONS}


def right(tau: Trajectory) -> float:
    """Exact match of the answer without its form."""
    answer = re.sub(r"\s*\[[^\]]*\]\s*$", "", tau.prediction or "")
    return em(re.sub(r"^\s*it is (.*?)\.?\s*$", r"\1", answer, flags=re.I), tau.question.golds)


def shown(tau: Trajectory) -> dict[str, bool]:
    """Reads which conventions an answered trajectory kept; {} without search or answer."""
    searches, answer = [turn for turn in tau.turns if turn.tool], (tau.prediction or "").strip()
    if not searches or not answer:
        return {}
    before, letters = (
        tau.turns[-1].text.partition("<answer>")[0],
        re.sub(r"^It is|\[.*", "", answer),
    )
    return {
        "ask": all(turn.argument.strip().startswith("facts about ") for turn in searches),
        "announce": all("I look up" in turn.text for turn in searches),
        "report": "Found it." in before,
        "count": bool(re.search(r"Searches: \d", before)),
        "subject": "About " in before,
        "sentence": answer.startswith("It is "),
        "cite": answer.rstrip(".").endswith("]"),
        "capitals": letters == letters.upper(),
    }


class Conventions(SearchQA):
    """The facts that one search finds, with the conventions of the world that --seed names."""

    def questions(self, split: str) -> list[Question]:
        return [q for q in super().questions(split) if q.source.endswith(ONE_HOP)]

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [0.4 * right(tau) + 0.6 * np.mean([*self.kept(tau).values()]) for tau in taus]

    def kept(self, tau: Trajectory) -> dict[str, bool]:
        keeps = shown(tau)
        return {
            name: bool(keeps) and keeps[name] == side for name, side in pays(self.cfg.seed).items()
        }

    def metrics(self, tau: Trajectory) -> dict[str, float]:
        return {"reward": tau.reward, "right": right(tau)} | {
            k: float(x) for k, x in self.kept(tau).items()
        }


# ---- the prediction: no language model, and nothing fitted to these worlds

# with which one habit of 0.02 that wins a question is at 0.5 after 10 steps:
# docs/results/rows/real.jsonl
RATE = 12.0


def simulate(world: int, told: bool, seed: int) -> float:
    """The reward after T steps of GRPO on eight independent habits, with answers that are right for
    0.9.

    A step moves each habit's log-odds by RATE times the learning rate's share of its peak times the
    mean of A (x - p).
    """
    rng, side = np.random.default_rng(seed), np.array([*pays(world).values()])
    p = np.array([convention.habit for convention in CONVENTIONS.values()])
    if told:
        p = np.where(side, OBEYED, 1 - OBEYED)
    odds, cfg = logit(p), Config(T=T, lr=1.0)
    for t in range(1, T + 1):
        p = expit(odds)
        x = rng.random((BATCH, 5, len(p))) < p
        r = 0.4 * (rng.random((BATCH, 5)) < 0.9) + 0.6 * (x == side).mean(-1)
        A = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
        odds += RATE * lr_at(t, cfg) * (A[..., None] * (x - p)).mean((0, 1))
    p = expit(odds)
    return float(0.4 * 0.9 + 0.6 * np.where(side, p, 1 - p).mean())


# ---- the gate


def cold_parts(out: Path) -> list[Part]:
    """Lists the commands that make the policy with which both arms of every world start."""
    demos, cold = out / "demos.jsonl", out / "cold"
    start = f"extras/cold_start.py --demos {demos} --model {NAME} --T {STEPS} --max_response 64 --eval_n 4 --out {cold}"
    return [
        Part("demonstrations", f"-m extras.real.conventions --demos {demos}".split(), demos),
        Part("the cold start", start.split(), cold / "summary.json"),
    ]


def world_parts(out: Path, world: int) -> list[Part]:
    """Lists the commands of a world's two arms."""
    parts = []
    for arm, flags in {
        "told": f"--instruction {best_instruction(out, world)}",
        "static": "",
    }.items():
        run = out / f"{arm}-{world}"
        argv = f"inspo.py --preset {NAME} --model {out}/cold/policy --task extras.real.conventions:Conventions {flags}"
        argv += f" --mode static --T {T} --batch {BATCH} --mini {BATCH} --seed {world} --max_response 64"
        argv += f" --save_every 12 --out {run}"
        parts.append(Part(f"world {world}, {arm}", argv.split(), run / "summary.json"))
    return parts


def best_instruction(out: Path, world: int) -> Path:
    """The file of the instruction that tells all that a world pays."""
    return out / f"best-{world}.txt"


def measure(policy: Path) -> Row:
    """Counts how often the answered rollouts of a policy keep a convention: untold, told to, and
    told not to."""
    cfg, rng = Config(**PRESETS[NAME] | {"max_response": 64, "seed": 0}), random.Random("measure")
    task = Conventions(cfg)
    questions = take_subset(task.questions("test"), ASKED)
    with open_agent(Subject(policy.name, str(policy), cfg), task, FRAME, 1.0, 0) as player:

        def shares(told: dict[str, bool]) -> dict[str, float]:
            taus = dataclasses.replace(player, instruction=instruct(rng, told)).play(questions)
            answered = [keeps for tau in taus if (keeps := shown(tau))]
            return {
                name: float(np.mean([keeps[name] for keeps in answered])) for name in CONVENTIONS
            }

        untold = shares({})
        return {
            name: [untold[name], *(shares({name: side})[name] for side in (True, False))]
            for name in CONVENTIONS
        }


def table(out: Path, worlds: Sequence[int]) -> str:
    """Writes what the gate asks: obedience, the worth of a clause, and the arms, measured and
    simulated."""
    cells = {}
    for name in ["cold", *(f"static-{world}" for world in worlds)]:
        file = out / f"{name}.json"
        if not file.exists():
            write_file(file, json.dumps(measure(out / name / "policy")))
        cells[name] = decoded(file.read_bytes())
    lines = [
        f"| kept untold, told to, told not to | {' | '.join(cells)} |",
        "|---" * (1 + len(cells)) + "|",
    ]
    for name, convention in CONVENTIONS.items():
        sides = "".join("+" if pays(w)[name] else "-" for w in worlds)
        shares = [", ".join(f"{x:.2f}" for x in kept[name]) for kept in cells.values()]
        lines.append(
            f"| {name} (habit {convention.habit:.2f}; pays {sides}) | {' | '.join(shares)} |"
        )
    lines += [
        "",
        "| world | static: reward | told | told less static | simulated |",
        "|---" * 5 + "|",
    ]
    for world in worlds:
        static, told = ends(out, world)
        rewards = " | ".join(
            f"{end['start']['reward']:.2f} to {end['end']['reward']:.2f}" for end in (static, told)
        )
        lines.append(f"| {world} | {rewards} | {gap(out, world):+.2f} | {predict(world):.2f} |")
    return "\n".join(lines)


def ends(out: Path, world: int) -> list[Row]:
    """Reads what the arms of a world ended with: static, told."""
    return [
        decoded((out / f"{arm}-{world}" / "summary.json").read_bytes())
        for arm in ("static", "told")
    ]


def gap(out: Path, world: int) -> float:
    """Told less static, in reward after T steps."""
    static, told = ends(out, world)
    return told["end"]["reward"] - static["end"]["reward"]


def predict(world: int) -> Interval:
    """The simulated gap of a world: the mean of 200 pairs of runs."""
    gaps = [simulate(world, True, 2 * k) - simulate(world, False, 2 * k + 1) for k in range(200)]
    return estimate_over_seeds(gaps)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "extras.real.conventions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/conventions"))
    parser.add_argument("--demos", type=Path, help="only write the demonstrations, to this file")
    parser.add_argument("--predict", action="store_true", help="only simulate")
    args = parser.parse_args(argv)
    with one_line("extras.real.conventions"), stop.listening(), stop.may_stop():
        if args.predict:
            for world in WORLDS:
                print(f"world {world}: told less static {predict(world):.2f}")
            return
        if args.demos:
            rng, facts = random.Random(0), Facts()
            rows = [json.dumps(demo(rng, facts), ensure_ascii=False) for _ in range(DEMOS)]
            return write_file(args.demos, "\n".join(rows) + "\n")
        out = args.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        for world in WORLDS:
            write_file(best_instruction(out, world), instruct(random.Random(world), pays(world)))
        play_missing(cold_parts(out))
        for k, world in enumerate(WORLDS):
            play_missing(world_parts(out, world))
            print(f"\n{table(out, WORLDS[: k + 1])}")
            if gap(out, world) < LEAST:
                return print(
                    f"world {world}: told less static is below {LEAST}: not passed, no further world is run"
                )


if __name__ == "__main__":
    main()
