"""The world's scripted optimizer: an OpenAI-compatible server in the role of the LLM of §3.2.

    python -m world.optimizer --port 8001

It gets nothing but a prompt, App. E's or another proposer's (reflect.py). It reads the failed
responses there as text (how many searches, which queries, a sentence where a name belongs, an
answer that no passage contains), writes an analysis and proposes instructions made of the world's
clauses. As with an LLM, proposals vary in quality: some miss the point, some do harm, some are
right but in words that the policy has never read, and a few replies are malformed.
"""

import argparse
import hashlib
import random
import re

from plumbing.faults import one_line
from plumbing.servers import listen, serve_app
from world.clauses import CLAUSES, read_clauses, write_instruction

Reasons = dict[str, str]  # clause -> why an instruction needs it
HARM = ("memory", "verbose", "terse", "early", "whole")
# what its questions end in
OF_THE_WORLD = re.compile(r"\bof the (?:person|film|company|city|nation)\b", re.I)

NEVER_SEARCHES = "The agent answers from memory and never searches."
BROAD = (
    "One broad query mirrors the whole question and cannot find what lies behind the first fact."
)
STOPS_EARLY = "The agent stops searching before the last fact is found."
WITHOUT_BLOCKS = "I would rewrite the prompt with clearer steps, fewer words and more structure."
SENTENCE = "The answer is a sentence where a name was asked for."


def find_inside(tag: str, text: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)


def read_actions(actions: str) -> tuple[list[str], str, str]:
    """Returns the queries, all results, and the last answer ("" without one)."""
    answers = find_inside("answer", actions) or [""]
    results = " ".join(find_inside("information", actions))
    return find_inside("search", actions), results, answers[-1]


def diagnose(response: str) -> Reasons:
    """Returns {clause: reason to add it}, read from one failed response (question, actions and
    results as text)."""
    question, _, actions = response.partition("?")
    hops = question.count(" of ")
    queries, results, answer = read_actions(actions)
    thoughts = [thought.strip() for thought in find_inside("think", actions)]
    answer = answer.strip()
    lacking = {}
    if not queries:
        lacking["entity"] = NEVER_SEARCHES
    elif hops > 1 and any(q.count(" of ") > 1 for q in queries):
        lacking["entity"] = BROAD
    elif len(queries) < hops:
        lacking["cont"] = STOPS_EARLY
    if len(answer.split()) > 2:
        lacking["exact"] = SENTENCE
    if queries and not any(thoughts[1:]):
        lacking["state"] = (
            "Facts are taken from the results without noting them; look-alike passages get mixed up."
        )
    elif answer and answer not in results and len(answer.split()) <= 2:
        lacking["state"] = "The final answer is in none of the results."
    if len(queries) > 1 and not any(t.startswith("steps") for t in thoughts):
        lacking["plan"] = "The agent has no plan and loses the thread."
    return lacking


def diagnose_by_gold(response: str, golds: str) -> Reasons:
    """Returns the same for a question that is not the world's, from what was asked, found and said,
    and the right answers."""
    question, _, actions = response.partition("\n")
    queries, results, answer = read_actions(actions)
    right = [as_words(gold) for gold in golds.split(" or ")]
    if any(gold in as_words(answer) for gold in right):
        return {"exact": SENTENCE}
    if not queries:
        return {"entity": NEVER_SEARCHES}
    if any(gold in as_words(results) for gold in right):
        return {"state": "The right answer was found, and another one was given."}
    whole = as_words(question.partition(" ")[2])  # without "Question:"
    if whole in map(as_words, queries):
        return {"entity": BROAD}
    return {"cont": STOPS_EARLY}


def as_words(text: str) -> str:
    """Returns the words of a text in lower case, a space around each."""
    words = re.findall(r"\w+", text.lower())
    return f" {' '.join(words)} "


def revise(rng: random.Random, clauses: list[str], add: list[str]) -> str:
    """Returns an instruction with these clauses and the added ones, which replace those that they
    contradict."""
    slots = {CLAUSES[c].slot for c in add}
    kept = [c for c in clauses if CLAUSES[c].slot not in slots]
    n = rng.randint(0, 1)
    wordings = "any" if rng.random() < 0.3 else "taught"
    return write_instruction(rng, kept + add, n, wordings)


def reply_to(prompt: str, seed: int, guess: bool = False) -> str:
    """Returns the reply to a prompt (reflect.py); it depends only on the arguments.

    It reads text, whatever the prompt: the instruction in <ins_0>, another one to cross it with in
    <other>, failures as examples, and how many candidates are asked for.

    `guess`: a control that proposes clauses at random and never looks at the failures.
    """
    rng = random.Random(f"{seed} {hashlib.sha256(prompt.encode()).hexdigest()}")
    parent = re.search(r"<ins_0>(.*?)</ins_0>", prompt, re.S)
    numbers = re.findall(r"(?:to|into) <ins_(\d+)>", prompt)
    if not parent or not numbers:
        return "I can only improve a prompt that is given in <ins_0> </ins_0>."
    text, candidates = propose(rng, prompt, parent[1].strip(), int(numbers[-1]), guess)
    # malformed replies: none of the candidates, one of them twice, a tag lost
    mishap, n = rng.random(), len(candidates)
    if mishap < 0.05:
        return f"{text}\n{WITHOUT_BLOCKS}"
    if mishap < 0.12:
        candidates[rng.randrange(n)] = candidates[rng.randrange(n)]
    if mishap < 0.20 or rng.random() < 0.1:
        k = rng.randrange(n)
        candidates[k] = candidates[k].replace(rng.choice(["</answer>", "<search>", "</think>"]), "")
    blocks = [f"<ins_{k}>\n{c}\n</ins_{k}>" for k, c in enumerate(candidates, 1)]
    return "\n\n".join([text, *blocks])


def propose(
    rng: random.Random, prompt: str, instruction: str, n: int, guess: bool
) -> tuple[str, list[str]]:
    """Returns an analysis and `n` candidates."""
    clauses = read_clauses(instruction)
    other = re.search(r"<other>(.*?)</other>", prompt, re.S)
    failures = re.findall(r"Response: (.*?)\nCorrect answer: (.*?)\n</example>", prompt, re.S)
    candidates = []
    if other:
        lacks = [c for c in read_clauses(other[1]) if c not in clauses]
        for _ in range(n):
            candidates.append(revise(rng, clauses, lacks))
        return "The first one lacks what the other says beyond it.", candidates
    if failures:
        reasons, votes = analyze([] if guess else failures, clauses)
        for _ in range(n):
            candidates.append(revise(rng, clauses, [choose_clause(rng, votes, guess)]))
        numbered = [f"{k}. {why}" for k, why in enumerate(reasons.values(), 1)]
        return "\n".join(numbered) or "The reasons are not clear.", candidates
    for _ in range(n):
        candidates.append(write_instruction(rng, clauses, rng.randint(0, 2)))
    return "Here are other wordings of the prompt.", candidates


def analyze(failures: list[tuple[str, str]], clauses: list[str]) -> tuple[Reasons, list[str]]:
    """Returns the reasons to add clauses, by clause, and a vote for a clause from every failure
    that shows its lack."""
    reasons: Reasons = {}
    votes: list[str] = []
    for response, golds in failures:
        ours = OF_THE_WORLD.search(response.partition("?")[0])
        symptoms = diagnose(response) if ours else diagnose_by_gold(response, golds)
        for clause, why in symptoms.items():
            if clause not in clauses:
                reasons[clause] = why
                votes.append(clause)
    return reasons, votes


def choose_clause(rng: random.Random, votes: list[str], guess: bool) -> str:
    """Returns the clause that a candidate adds: to the point, a guess, or one that does harm."""
    luck = 0.55 if guess else rng.random()
    if luck < 0.55 and votes:
        return rng.choice(votes)
    return rng.choice(list(CLAUSES) if luck < 0.80 else HARM)


def make_app(seed: int, guess: bool = False):
    """Returns an OpenAI-compatible chat endpoint that replies to the last message."""
    from fastapi import FastAPI

    app = FastAPI(title="the world's scripted optimizer")

    @app.post("/v1/chat/completions")
    def complete(request: dict) -> dict:
        prompt = request["messages"][-1]["content"] if request["messages"] else ""
        reply = reply_to(prompt, seed, guess)
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(reply) // 4}
        message = {"role": "assistant", "content": reply}
        return {
            "model": request["model"],
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": usage,
        }

    return app


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--guess", action="store_true", help="propose at random, without reading the failures"
    )
    parser.add_argument("--child", action="store_true", help="exit when standard input ends")
    args = parser.parse_args()
    with one_line():
        serve_app(make_app(args.seed, args.guess), listen("127.0.0.1", args.port), args.child)


if __name__ == "__main__":
    main()
