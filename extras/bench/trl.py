"""A step of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads; JSON last.

    OMP_NUM_THREADS=1 python -m extras.bench.trl            # and flags of inspo.py, such as --model smollm2-135m

Single turns of at most 48 tokens without a tool, the work that both can do, with the learning rate 0. Ours is a run
(extras/bench/step.py), TRL's follows it, so nothing else should want the machine. TRL stops at tokens: where </answer>
is not one, as it is in the world, its turns may be longer; the tokens of both are printed.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any

from config import Config, parse
from extras.bench.harness import BEST, parser_of, timed
from extras.bench.step import measure
from tasks import draw, load_task
from tasks.formats import encode
from tasks.questions import em
from tasks.tools import find_answer

ROWS = 40  # trajectories in a forward pass of TRL's, at most


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    texts = [c[0]["content"] for c in completions]
    return [float(em(find_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def train_with_trl(cfg: Config, steps: int) -> list[dict[str, float]]:
    """Returns seconds and tokens of each step of TRL's, on the questions that our run draws."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cfg.threads or 1)))
    task, n, rows = load_task(cfg), cfg.batch * cfg.G, []
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    ends = [encode(tokenizer, tag) for tag in task.format.stop(task)]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *(ids[0] for ids in ends if len(ids) == 1)]
    D = {q.id: q for q in task.questions("train")}
    asked = itertools.chain(*(draw(D, cfg.batch, cfg.seed, t) for t in range(1, steps + 1)))
    data = Dataset.from_list([{"prompt": task.prompt(BEST, q), "golds": q.golds} for q in asked])

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(self.row | {"update_s": time.perf_counter() - self.start - self.row["rollout_s"]})

    with tempfile.TemporaryDirectory() as out:
        micro = max(k for k in range(cfg.G, ROWS + 1, cfg.G) if n % k == 0)
        args = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=cfg.dtype == "bfloat16", gradient_checkpointing=False, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_strategy="no", max_steps=steps, num_generations=cfg.G,
            per_device_train_batch_size=micro, gradient_accumulation_steps=n // micro, temperature=1.0, top_k=0,
            max_completion_length=cfg.max_response, learning_rate=0.0, optim="adamw_torch_fused", beta=cfg.beta,
            epsilon=cfg.eps, loss_type="grpo", scale_rewards="group", shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(model, exact_match, args=args, train_dataset=data, processing_class=tokenizer)
        clock, generate = Clock(), trainer._generate

        def observe(prompts: Any) -> Any:
            result, seconds = timed(lambda: generate(prompts))
            clock.row = {"rollout_s": seconds, "response_tokens": sum(map(len, result[1])) / n}
            return result

        trainer._generate = observe
        trainer.add_callback(clock)
        trainer.train()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=4, help="steps after the first, which warms up")
    args, flags = parser.parse_known_args()
    flags = ["--tools", "none", "--max_response", "48", *flags]
    ours = measure(args.repeat, flags)
    rows = train_with_trl(parse(flags), args.repeat + 1)[1:]
    theirs = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result: dict[str, Any] = {}
    for name, x in theirs.items():
        result[name] = {"ours": ours[name], "trl": x, "ratio": x / ours[name]}
        print(f"{name:20} ours {ours[name]:8.2f}   TRL {x:8.2f}   TRL / ours {x / ours[name]:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
