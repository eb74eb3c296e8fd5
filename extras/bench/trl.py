"""A step of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads; JSON
last.

    OMP_NUM_THREADS=1 python -m extras.bench.trl            # and flags of inspo.py, such as --model smollm2-135m

Single turns of at most 48 tokens without a tool, the work that both can do, with the learning rate
0. Ours is a run (extras/bench/step.py), TRL's follows it, so nothing else should use the machine.
TRL stops at tokens: where </answer> is not one, as it is in the world, its turns may be longer; the
tokens of both are printed. With --agent both train on rollouts that search, which our loop plays
for TRL, too (its `rollout_func`): only their updates differ.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import Config, parse_flags
from extras.bench.harness import BEST, parser_of, timed
from extras.bench.step import measure
from plumbing.chat import turn_ends
from plumbing.servers import Servers
from rollout import Job, rollout
from tasks import Task
from tasks.formats import encode
from tasks.loading import load_task
from tasks.questions import em
from tasks.sampling import draw_questions
from tasks.tools import find_answer

ROWS = 40  # trajectories in a forward pass of TRL's, at most


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    texts = [c[0]["content"] for c in completions]
    return [float(em(find_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def make_player(cfg: Config, task: Task, serve: Servers) -> Callable[[list, Any], dict[str, list]]:
    """Returns TRL's `rollout_func`: trajectories of the first policy, whose observations are
    masked."""
    from engines.torch_engine import TorchEngine
    from models.model import load_policy

    task.start(serve)
    ends, asked = (
        task.make_format().stop_strings(),
        {str(task.prompt(BEST, q)): q for q in task.questions("train")},
    )
    model, tokenizer = load_policy(cfg.model, ends)
    engine = TorchEngine(model, tokenizer, ends)

    def play(prompts: list, trainer: Any) -> dict[str, list]:
        jobs = [Job(0, BEST, asked[str(prompt)], k // cfg.G) for k, prompt in enumerate(prompts)]
        taus = rollout(
            engine, tokenizer, task, jobs, cfg, temperature=1.0, seed=trainer.state.global_step
        )
        return {
            "prompt_ids": [tau.ids[: tau.prompt_tokens] for tau in taus],
            "completion_ids": [tau.ids[tau.prompt_tokens :] for tau in taus],
            "logprobs": [tau.logps[tau.prompt_tokens :] for tau in taus],
            "env_mask": [tau.mask[tau.prompt_tokens :] for tau in taus],
        }

    return play


def train_with_trl(cfg: Config, steps: int, agent: bool) -> list[dict[str, float]]:
    """Returns seconds and tokens of each step of TRL's, on the questions that our run draws."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task, n, rows = load_task(cfg), cfg.batch * cfg.G, []
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    ends = [encode(tokenizer, tag) for tag in task.make_format().stop_strings()]
    model.generation_config.eos_token_id = [
        *turn_ends(tokenizer),
        *(ids[0] for ids in ends if len(ids) == 1),
    ]
    D = {q.id: q for q in task.questions("train")}
    asked = itertools.chain(
        *(draw_questions(D, cfg.batch, cfg.seed, t) for t in range(1, steps + 1))
    )
    data = Dataset.from_list([{"prompt": task.prompt(BEST, q), "golds": q.golds} for q in asked])

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(
                self.row | {"update_s": time.perf_counter() - self.start - self.row["rollout_s"]}
            )

    with tempfile.TemporaryDirectory() as out, Servers(Path(out, "servers.log")) as serve:
        micro = max(k for k in range(cfg.G, ROWS + 1, cfg.G) if n % k == 0)
        args = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=cfg.dtype == "bfloat16",
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            max_steps=steps,
            num_generations=cfg.G,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=n // micro,
            temperature=1.0,
            top_k=0,
            max_completion_length=cfg.max_response,
            learning_rate=0.0,
            optim="adamw_torch_fused",
            beta=cfg.beta,
            epsilon=cfg.eps,
            loss_type="grpo",
            scale_rewards="group",
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model,
            exact_match,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            rollout_func=make_player(cfg, task, serve) if agent else None,
        )
        clock, generate = Clock(), trainer._generate

        def observe(prompts: Any) -> Any:
            result, seconds = timed(lambda: generate(prompts))
            sampled = map(sum, result[2]) if agent else map(len, result[1])
            clock.row = {"rollout_s": seconds, "response_tokens": sum(sampled) / n}
            return result

        trainer._generate = observe
        trainer.add_callback(clock)
        trainer.train()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--repeat", type=int, default=4, help="steps after the first, which warms up"
    )
    parser.add_argument("--agent", action="store_true", help="rollouts of several turns")
    args, flags = parser.parse_known_args()
    flags = [*([] if args.agent else ["--tools", "none", "--max_response", "48"]), *flags]
    ours = measure(args.repeat, flags)
    rows = train_with_trl(parse_flags(flags), args.repeat + 1, args.agent)[1:]
    theirs = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result: dict[str, Any] = {}
    for name, x in theirs.items():
        result[name] = {"ours": ours[name], "trl": x, "ratio": x / ours[name]}
        print(f"{name:20} ours {ours[name]:8.2f}   TRL {x:8.2f}   TRL / ours {x / ours[name]:.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
