"""Steps of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads; JSON
last.

    OMP_NUM_THREADS=1 python -m extras.bench.trl            # and flags of inspo.py, such as --model smollm2-135m
    python -m extras.bench.trl --shape Qwen/Qwen2.5-3B      # updates alone, on a GPU

Single turns of at most 48 tokens without a tool, the work that both can do, with the learning rate
0. Ours is a run (extras/bench/step.py), TRL's follows it, so nothing else should use the machine.
TRL stops at tokens: where </answer> is not one, as it is in the world, its turns may be longer; the
tokens of both are printed. With --agent both train on rollouts that search, which our loop plays
for TRL, too (its `rollout_func`): only their updates differ.

With --shape both update a random policy of this shape, with fewer layers on a smaller card, on the
trajectories of extras/bench/update.py and with the same rewards: one optimizer step of AdamW, a
reference, recomputed activations, on a GPU bfloat16 with float32 masters and Liger's layers for
both. TRL pads a group at a time; its reference is float32 under autocast, as it makes it.
tokens/s count the tokens of the trajectories, without padding.
"""

import argparse
import copy
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)

from config import PRESETS, Config, parse_flags
from evaluate import load_agent
from extras.bench.harness import BEST, parser_of, timed
from extras.bench.step import measure
from extras.bench.update import (
    TOY,
    begin_ranks,
    build_learner,
    draw,
    fit_layers,
    randomize,
    time_update,
)
from extras.fit import KNOWN
from plumbing.chat import turn_ends
from plumbing.faults import one_line
from tasks import Trajectory
from tasks.search_qa import em
from tasks.task import draw_questions, load_task
from tasks.tools import encode, find_answer

ROWS = 40  # trajectories in a forward pass of TRL's, at most
GOAL = 1.5  # times TRL's tokens/s of an update, on a GPU
# TRL holds a float32 reference and, under autocast, a copy of the weights: more than our estimate
TRL_MEMORY = 1.3


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    texts = [c[0]["content"] for c in completions]
    return [float(em(find_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def as_trl(taus: Sequence[Trajectory]) -> dict[str, list]:
    """Returns trajectories as TRL's `rollout_func` gives them, observations masked."""
    return {
        "prompt_ids": [tau.ids[: tau.prompt_tokens] for tau in taus],
        "completion_ids": [tau.ids[tau.prompt_tokens :] for tau in taus],
        "logprobs": [tau.logps[tau.prompt_tokens :] for tau in taus],
        "env_mask": [tau.mask[tau.prompt_tokens :] for tau in taus],
    }


def train_with_trl(
    model: Any,
    tokenizer: Any,
    cfg: Config,
    rows: list[dict],
    reward: Any,
    play: Any,
    **settings: Any,
) -> list[dict[str, float]]:
    """Returns seconds, sampled tokens and the gradient's norm of each step of TRL's, cfg.batch
    `rows` of data a step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    n, steps = cfg.batch * cfg.G, []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - self.start
            steps.append(self.step | {"update_s": seconds - self.step["rollout_s"]})

        def on_log(self, *_: Any, logs: dict, **__: Any) -> None:
            if "grad_norm" in logs:
                steps[-1]["grad_norm"] = logs["grad_norm"]

    with tempfile.TemporaryDirectory() as out:
        micro = settings["per_device_train_batch_size"]
        args = GRPOConfig(
            output_dir=out,
            bf16=cfg.dtype == "bfloat16",
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=len(rows) // cfg.batch,
            num_generations=cfg.G,
            gradient_accumulation_steps=n // micro,
            temperature=1.0,
            top_k=0,
            learning_rate=0.0,
            optim="adamw_torch_fused",
            beta=cfg.beta,
            epsilon=cfg.eps,
            loss_type="grpo",
            scale_rewards="group",
            shuffle_dataset=False,
            **settings,
        )
        trainer = GRPOTrainer(
            model,
            reward,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            rollout_func=play,
        )
        clock, generate = Clock(), trainer._generate

        def observe(prompts: Any) -> Any:
            result, seconds = timed(lambda: generate(prompts))
            sampled = map(sum, result[2]) if play else map(len, result[1])
            clock.step = {"rollout_s": seconds, "response_tokens": sum(sampled) / n}
            return result

        trainer._generate = observe
        trainer.add_callback(clock)
        trainer.train()
    return steps


def steps_of_trl(cfg: Config, steps: int, agent: bool) -> list[dict[str, float]]:
    """Returns what TRL's steps took on the questions that our run draws."""
    task = load_task(cfg)
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
    rows = [{"prompt": task.prompt(BEST, q), "golds": q.golds} for q in asked]
    n = cfg.batch * cfg.G
    micro = max(k for k in range(cfg.G, ROWS + 1, cfg.G) if n % k == 0)
    settings = dict(
        use_cpu=True,
        max_completion_length=cfg.max_response,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
    )
    if not agent:
        return train_with_trl(model, tokenizer, cfg, rows, exact_match, None, **settings)
    asked = {str(task.prompt(BEST, q)): q for q in D.values()}
    with load_agent(cfg.model, **asdict(cfg) | {"temperature": 1.0}) as player:
        player.instruction = BEST

        def play(prompts: list, trainer: Any) -> dict[str, list]:
            player.seed = trainer.state.global_step
            return as_trl(player.play([asked[str(prompt)] for prompt in prompts]))

        return train_with_trl(model, tokenizer, cfg, rows, exact_match, play, **settings)


def compare_steps(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Returns our medians and TRL's of a whole step."""
    flags = [*([] if args.agent else ["--tools", "none", "--max_response", "48"]), *flags]
    ours = measure(args.repeat, flags)
    rows = steps_of_trl(parse_flags(flags), args.repeat + 1, args.agent)[1:]
    result: dict[str, Any] = {}
    for name in ("rollout_s", "response_tokens", "update_s"):
        x = statistics.median(row[name] for row in rows)
        result[name] = {"ours": ours[name], "trl": x, "ratio": x / ours[name]}
        print(f"{name:20} ours {ours[name]:8.2f}   TRL {x:8.2f}   TRL / ours {x / ours[name]:.2f}")
    return result


def update_here(config: Any, cfg: Config, device: str, data: list) -> list[dict[str, float]]:
    """Returns seconds and gradient's norm of each of our updates. Needs a process group."""
    learner, rows = build_learner(config, device, cfg), []
    for t, taus in enumerate(data, 1):
        learner.set_advantages(taus)
        update, seconds = time_update(learner, t, taus)
        rows.append({"update_s": seconds, "grad_norm": update["grad_norm"]})
    return rows


def update_with_trl(config: Any, cfg: Config, device: str, data: list) -> list[dict[str, float]]:
    """Returns seconds and gradient's norm of each of TRL's updates of the same policy."""
    from trl.trainer import grpo_trainer

    torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default, which our Ranks have changed
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    randomize(model, 0)
    tokenizer, steps = AutoTokenizer.from_pretrained(PRESETS["world"]["model"]), iter(data)

    def play(prompts: list, trainer: Any) -> dict[str, list]:
        return as_trl(next(steps))

    def reward(completions: list, **_: object) -> list[float]:
        return [tau.reward for tau in data[0]]  # those of every step

    rows = [{"prompt": f"{k}"} for k in range(cfg.batch * len(data))]
    settings = dict(
        use_cpu=device == "cpu",
        max_completion_length=10**6,
        gradient_checkpointing=True,
        per_device_train_batch_size=cfg.G,
        use_liger_kernel=device == "cuda",
    )
    # TRL reads its reference from where the policy was loaded
    with mock.patch.object(
        grpo_trainer, "create_model_from_path", lambda *_, **__: copy.deepcopy(model)
    ):
        return train_with_trl(model, tokenizer, cfg, rows, reward, play, **settings)


def choose_shape(shape: str, steps: int, questions: int) -> tuple[Any, Config]:
    """Returns the policy's config, of as many layers as a GPU has room for, and how it is
    updated."""
    toy = shape == "toy"
    cfg = Config(
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        batch=questions,
        mini_batch=5 * questions,
        G=5,
        T=steps,
        lr=0.0,
        micro_tokens=800 if toy else Config.micro_tokens,
    )
    config, _ = fit_layers(cfg, TOY if toy else KNOWN[shape], TRL_MEMORY)
    return config, cfg


def compare_updates(args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians of our updates and TRL's, the peak of each and the goals that are missed."""
    toy, cuda = args.shape == "toy", torch.cuda.is_available()
    device, questions = "cuda" if cuda else "cpu", args.trajectories // 5
    config, cfg = choose_shape(args.shape, args.repeat + 1, questions)
    rng, shrink = random.Random(0), 20 if toy else 1
    data = [draw(rng, 5 * questions, config.vocab_size, shrink) for _ in range(cfg.T)]
    for taus in data:
        for k, tau in enumerate(taus):
            tau.reward = float(k % cfg.G)

    x: dict[str, Any] = {"shape": args.shape, "layers": config.num_hidden_layers}
    begin_ranks(device)
    for name, run in ("ours", update_here), ("trl", update_with_trl):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rows = run(Qwen2Config(**config.to_dict()), cfg, device, data)
        for taus, row in zip(data, rows, strict=True):
            row["tokens_per_s"] = sum(len(tau.ids) for tau in taus) / row["update_s"]
            print(name, *(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        x[f"{name}_tokens_per_s"] = statistics.median(row["tokens_per_s"] for row in rows[1:])
        x[f"{name}_grad_norm"] = rows[-1]["grad_norm"]
        x[f"{name}_gb"] = torch.cuda.max_memory_allocated() / 1e9
        # the next one needs the memory, and TRL would train with our process group
        gc.collect()
        torch.cuda.empty_cache()
        if dist.is_initialized():
            dist.destroy_process_group()
    x["ratio"] = x["ours_tokens_per_s"] / x["trl_tokens_per_s"]
    slow = cuda and not toy and x["ratio"] < GOAL
    return x | {"missed": [f"{GOAL} times TRL's tokens/s"] * slow}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--repeat", type=int, default=4, help="steps after the first, which warms up"
    )
    parser.add_argument("--agent", action="store_true", help="rollouts of several turns")
    parser.add_argument("--shape", choices=(*KNOWN, "toy"), help="only updates, of this shape")
    parser.add_argument(
        "--trajectories", type=int, default=20, help="trajectories per update, in groups of 5"
    )
    args, flags = parser.parse_known_args()
    print(json.dumps(compare_updates(args) if args.shape else compare_steps(args, flags)))


if __name__ == "__main__":
    with one_line():
        main()
