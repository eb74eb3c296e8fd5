"""Run in a copy of the project: plays the page's tool and game with a base model, turn by turn.

    python play.py BASE_MODEL RESULT [flags of inspo.py]

Writes what came of it to RESULT, as JSON, and then does the run: one process, since imports take seconds.
"""

import json
import sys
from pathlib import Path

import inspo
from config import WORLD, parse
from models.model import load_tokenizer
from plumbing.faults import Fault
from rollout import encode_prompt, rollout
from tasks import Job, Question, load_task
from tasks.formats import encode
from tasks.tools import explain_invalid_action, list_stop_strings


class Script:
    """An engine that plays the turns of one row."""

    max_rows, lockstep, unproven = 512, True, 0

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns = tokenizer, iter(turns)

    def begin(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        for row in contexts:
            ids = encode(self.tokenizer, next(self.turns))
            yield row, ids, [0.0] * len(ids)


def play(task, question, *turns):
    job, engine = Job(0, "Count.", question, 0), Script(tokenizer, *turns)
    [tau] = rollout(engine, tokenizer, task, [job], cfg, temperature=0, seed=0)
    return tau


base, result, *flags = sys.argv[1:]
cfg = parse(["--tools", "search,my_tool:count"])
task, game = load_task(cfg), load_task(parse(["--task", "my_game:Guess"]))
tokenizer = load_tokenizer(base, list_stop_strings(task.tools))
question = Question("q", "How many words?", ("3",), "s")
tau = play(task, question, "Let me see. <count> one two three </count>", "Three?", "<answer> 3 </answer>")
hidden = next(q for q in game.questions("train") if q.id == "20-5")
guesses = [
    play(game, hidden, *(f"<move> {x} </move>" for x in moves), "<answer> none </answer>")
    for moves in ((22, 25), (27, "x"), ())
]
try:
    load_tokenizer(str(WORLD / "policy"), list_stop_strings(task.tools))
    refusal = ""
except Fault as e:
    refusal = str(e)
Path(result).write_text(
    json.dumps(
        {
            "stop": list_stop_strings(task.tools),
            "invalid": explain_invalid_action(task.tools),
            "prompt": tokenizer.decode(encode_prompt(tokenizer, task, "Count.", question)),
            "response": tau.response,
            "prediction": tau.prediction,
            "counts": tau.served("count"),
            "sampled": tokenizer.decode([i for i, m in zip(tau.ids, tau.mask, strict=True) if m]),
            "world": refusal,
            "guesses": [[turn.result for turn in tau.turns] for tau in guesses],
            "ends": [tau.stop for tau in guesses],
            "rewards": game.reward(guesses),
        }
    )
)
inspo.main(flags)
