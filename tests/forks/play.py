"""Run in a forked copy: plays a scripted trajectory with the page's tool and a base model, and loads a MiniCPM3.

    python play.py BASE_MODEL MINICPM3 RESULT [flags of inspo.py]

Writes what came of it to RESULT, as JSON, and then does the run: one process, since imports take seconds.
"""

import json
import sys
from pathlib import Path

import inspo
from config import WORLD, parse
from models.model import load_model, load_tokenizer, logit_scale
from plumbing.faults import Fault
from rollout import prompt_ids, rollout
from tasks import Job, Question, load_task
from tasks.formats import encode
from tasks.tools import invalid_action, stop_strings

TURNS = ["Let me see. <count> one two three </count>", "Three?", "<answer> 3 </answer>"]


class Script:
    """An engine that plays the turns of one row."""

    max_rows, lockstep, unproven = 512, True, 0

    def __init__(self, tokenizer):
        self.tokenizer, self.turns = tokenizer, iter(TURNS)

    def begin(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        for row in contexts:
            ids = encode(self.tokenizer, next(self.turns))
            yield row, ids, [0.0] * len(ids)


base, minicpm3, result, *flags = sys.argv[1:]
cfg = parse(["--task", "my_tool:Counting"])
task = load_task(cfg)
tools = task.tools
tokenizer = load_tokenizer(base, stop_strings(tools))
question = Question("q", "How many words?", ("3",), "s")
[tau] = rollout(Script(tokenizer), tokenizer, task, [Job(0, "Count.", question, 0)], cfg, temperature=0, seed=0)
try:
    load_tokenizer(str(WORLD / "policy"), stop_strings(tools))
    refusal = ""
except Fault as e:
    refusal = str(e)
Path(result).write_text(
    json.dumps(
        {
            "stop": stop_strings(tools),
            "invalid": invalid_action(tools),
            "prompt": tokenizer.decode(prompt_ids(tokenizer, task, "Count.", question)),
            "response": tau.response,
            "prediction": tau.prediction,
            "counts": tau.served("count"),
            "sampled": tokenizer.decode([i for i, m in zip(tau.ids, tau.mask, strict=True) if m]),
            "world": refusal,
            "scale": logit_scale(load_model(minicpm3).config),
        }
    )
)
inspo.main(flags)
