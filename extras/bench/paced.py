"""Steps of a policy with random weights, whose work is fixed; JSON last.

    python -m extras.bench.paced --shape qwen2.5-3b --batch 32 --mini_batch 80       # and flags of inspo.py

Such a policy hardly ever answers: every turn has --max_response sampled tokens, and after each of
--max_turns it reads --max_observation random ones. extras/bench/step.py says what is measured. Loading it
compares packed with single sequences, on a GPU where a layer's kernels need one.
"""

import json
import random
import tempfile

import torch
from transformers import AutoModelForCausalLM

from config import PRESETS
from extras.bench.harness import parser_of
from extras.bench.step import measure
from extras.bench.update import SHAPES
from extras.tasks.calculator import Calculator
from models.model import load_tokenizer
from plumbing.faults import one_line
from tasks import Question, Task
from tasks.tools import Tags

FLAGS = (
    "--task extras.bench.paced:Paced --format extras.bench.paced:Turns --max_response 120".split()
)


def draw(seed: str, n: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=n)


class Turns(Tags):
    """Prompts and what follows a turn are random tokens."""

    def encode_prompt(self, instruction, question):
        return draw(question.id, 300)

    def encode_reminder(self, action):
        return draw(action.text, self.task.cfg.max_observation)


class Sum(Calculator):
    tag = "search"  # which the tokenizer can write


class Paced(Task):
    tools = [Sum()]  # without one an episode is a single turn
    rng = random.Random(0)

    def questions(self, split):
        return [Question(f"{split} {k}", "Which?") for k in range(256)]

    def reward(self, taus):
        return [float(self.rng.random() < 0.5) for _ in taus]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b")
    parser.add_argument("--repeat", type=int, default=2, help="steps after the first")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(SHAPES[args.shape], dtype=torch.bfloat16)
        model.save_pretrained(folder)
        load_tokenizer(PRESETS["world"]["model"]).save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        print(json.dumps(measure(args.repeat, ["--model", folder, *FLAGS, *flags])))


if __name__ == "__main__":
    with one_line():
        main()
