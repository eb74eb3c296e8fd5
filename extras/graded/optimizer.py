"""The graded world's optimizer: an OpenAI-compatible server in the role of the LLM of §3.2.

    python -m extras.graded.optimizer --port 8001      # then OPENAI_BASE_URL=http://127.0.0.1:8001/v1 for the runs

It gets nothing but a prompt (reflect.py) and reads it as text: the instruction in <ins_0>, and in the failures which
lines were filled in or left empty and what each paid. It knows the words of all clauses, but no world: what a clause is
worth it can only see in what lines paid. A revision has one to three edits; an edit adds a clause or takes one out.

The name of the model says who reflects: `graded-7` does, with 7 as its seed; `blind-7` makes random edits and reads no
failure. Both ask the same of a prompt without failures: random edits, one a candidate.
"""

import argparse
import hashlib
import random
import re
from collections import Counter

from extras.graded.form import FILLERS, OPTIONAL, WORDINGS, clauses
from plumbing.faults import one_line
from plumbing.servers import listen, serve
from world.optimizer import chat_app

POINTED = 0.6  # share of edits that follow from the failures, where they say anything; the others are guesses
MISHAP = 0.04  # share of replies without a candidate


def clause_of(line: int) -> str:
    return f"{'fill' if line in OPTIONAL else 'leave'}{line:02d}"


def diagnose(prompt: str) -> tuple[Counter[int], Counter[int]]:
    """Returns by line what failures say for doing otherwise there: points lost on it; and lines that paid nothing."""
    lost, idle = Counter[int](), Counter[int]()
    for line, _, paid in re.findall(r"f(\d\d) (empty|filled) ([+-]\d+\.\d\d)", prompt):
        if float(paid) < 0:
            lost[int(line)] += 1
        elif float(paid) == 0:
            idle[int(line)] += 1
    return lost, idle


def revise(
    rng: random.Random, has: list[str], allowed: list[str], lost: Counter[int], idle: Counter[int], n: int
) -> str:
    """Returns an instruction with n edits of the clauses it `has`.

    A pointed edit takes a line that loses points, or one that pays nothing, and has it done the other way: its clause
    comes in if it is not there, and goes if it is. A guess does so with any clause.
    """
    now = list(has)
    for _ in range(n):
        seen = lost if lost and (not idle or rng.random() < 0.6) else idle
        if seen and rng.random() < POINTED:
            clause = clause_of(rng.choices(list(seen), list(seen.values()))[0])
        else:
            clause = rng.choice(allowed)
        if clause in now:
            now.remove(clause)
        else:
            now.append(clause)
    rng.shuffle(now)
    return " ".join([*rng.sample(FILLERS, rng.randint(3, 6)), *now])


def reply_to(prompt: str, name: str) -> str:
    """Returns the reply to a prompt; it depends on the arguments alone. `name`: of the model, see above."""
    kind, _, rest = name.partition("-")
    seed, _, without = rest.partition(
        "-"
    )  # the rule that is right in the run's world: its clause is not in the inventory
    rng = random.Random(f"{seed} {hashlib.sha256(prompt.encode()).hexdigest()}")
    parent = re.search(r"<ins_0>(.*?)</ins_0>", prompt, re.S)
    asked = re.findall(r"(?:to|into) <ins_(\d+)>", prompt)
    if not parent or not asked:
        return "I can only improve a prompt that is given in <ins_0> </ins_0>."
    has, n = clauses(parent.group(1)), int(asked[-1])
    allowed = [clause for clause in WORDINGS if clause != f"rule{without}"]
    lost, idle = diagnose(prompt) if kind == "graded" else (Counter[int](), Counter[int]())
    if rng.random() < MISHAP:
        return "I would rewrite the prompt with clearer steps and fewer words."
    said = [f"{k}. Line f{line:02d} loses points." for k, (line, _) in enumerate(lost.most_common(3), 1)]
    failures = "</example>" in prompt
    edits = [rng.randint(1, 3) if failures else 1 for _ in range(n)]
    found = [revise(rng, has, allowed, lost, idle, k) for k in edits]
    return "\n".join([*said, *(f"<ins_{k}> {text} </ins_{k}>" for k, text in enumerate(found, 1))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    with one_line():
        serve(chat_app("the graded world's optimizer", reply_to), listen(args.host, args.port), args.child)


if __name__ == "__main__":
    main()
