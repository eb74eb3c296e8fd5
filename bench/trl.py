"""A step of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads, in turn; JSON last.

Single turns of at most 48 tokens without a tool: the work that both can do. Each round generates for the preset's
questions, 24 of the world's or 8 real ones, 5 times each, and takes one optimizer update with the learning rate 0, so
that every round starts from the same policy. A round of ours follows every round of TRL's, in the same process. Turns
end with </answer> where that is one token, as in the world; elsewhere with EOS alone, since TRL stops at tokens.

`--turns` plays the preset's whole agent instead, with its search server, under an instruction that searches. TRL's
own loop of tools takes calls in a chat template's format, JSON, which the world's policy cannot write: so our loop of
turns reads the tags and calls the search on both sides, and TRL generates every turn with its own
`_generate_single_turn`, from the whole context, as its loop does, and learns from the masked trajectories as it does
from its own.

Both compute in the dtype of a run. In bfloat16 both keep float32 weights: ours are gathered in bfloat16 (FSDP2), and
the engine samples from a copy, with float32 logits; TRL's are cast at every use (torch's autocast), in generation too.

Seconds are the CPU's, of all threads, which other programs on the machine disturb least; with one thread on an idle
machine they are the clock's. Threads are OMP_NUM_THREADS; without it 1 for the world's policy, 2 for another. Both
sides of SmolLM2-135M take 11 GB; --only measures one. `make bench-trl` sets up an environment of its own.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[0] = str(HERE)  # not this folder, where this file has TRL's name
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.step import BEST, add_policy, config  # noqa: E402
from config import PRESETS, Config, read_instruction  # noqa: E402
from engines import FinishedTurn  # noqa: E402
from plumbing.faults import one_line  # noqa: E402
from plumbing.servers import Child  # noqa: E402
from rollout import prompt_ids, rollout  # noqa: E402
from tasks import Job, Trajectory, reward  # noqa: E402
from tasks.formats import encode  # noqa: E402
from tasks.questions import em  # noqa: E402
from tasks.search_qa import SearchQA  # noqa: E402
from tasks.tools import last_answer  # noqa: E402

WORLD = PRESETS["world"]
ROWS = 10  # trajectories in a forward pass of TRL's, for memory; all at once of the world's small policy


class Ours:
    """The path of a run: its Policy plays and is updated, in the dtype that the run would choose."""

    def __init__(self, cfg: Config, server: str = ""):
        """`server`: of searches; without one it plays single turns."""
        from engines.choose import dtype_of
        from training.policy import Policy
        from training.ranks import Ranks

        self.cfg, self.task, self.dtype, self.turns = cfg, SearchQA(cfg), dtype_of(cfg, "cpu"), bool(server)
        if server:
            self.task.connect(server)
        self.policy = Policy(cfg, Ranks("cpu", cfg.patience, self.dtype), "torch", self.task)
        questions = self.task.questions("train")[: cfg.batch]
        # With BEST a trajectory on the real facts has up to 160 tokens.
        text = BEST
        if cfg.train == WORLD["train"] and not self.turns:
            text = read_instruction("instruction", cfg.instruction)
        self.jobs = [Job(None, text, q, group) for group, q in enumerate(questions) for _ in range(cfg.G)]
        engine, tokenizer = self.policy.worker.engine, self.policy.worker.tokenizer
        self.prompts = [prompt_ids(tokenizer, self.task, job.text, job.question) for job in self.jobs]
        ends = [encode(tokenizer, tag) for tag in engine.stop]
        self.ends = [ids[0] for ids in ends if len(ids) == 1]  # tokens that end a turn, beside EOS
        if len(self.ends) < len(ends):
            self.ends, engine.stop = [], ()

    def generate(self, t: int) -> list[Trajectory]:
        return self.policy.rollout(t, "rollout", self.jobs)

    def update(self, t: int, taus: list[Trajectory]) -> dict[str, float]:
        reward(self.task, taus)
        self.policy.learner.set_advantages(taus)
        return self.policy.update(t, taus)


class Turns:
    """An Engine: TRL's generation of single turns, for our loop of turns, which starts all those of a round at once."""

    max_rows, lockstep, unproven = sys.maxsize, True, 0

    def __init__(self, trainer):
        self.trainer = trainer

    def begin(self, seed: int) -> None:
        pass

    def generate(self, contexts: dict[int, list[int]], max_new: int, temperature: float) -> Iterator[FinishedTurn]:
        found, _ = self.trainer._generate_single_turn(list(contexts.values()), None, {}, 1)
        for key, ids in zip(contexts, found, strict=True):
            yield FinishedTurn(key, ids, [0.0] * len(ids))  # TRL takes its own log-probs, as it does in single turns


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    """TRL's reward function: the same exact match, of the last answer in each completion."""
    texts = [c[0]["content"] for c in completions]
    return [float(em(last_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def trl_trainer(ours: Ours, rounds: int, out: str):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    cfg, n = ours.cfg, len(ours.jobs)
    rows = n if cfg.model == WORLD["model"] else math.gcd(n, ROWS)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ours.ends]
    args = GRPOConfig(
        output_dir=out, use_cpu=True, bf16=ours.dtype == "bfloat16", gradient_checkpointing=False, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_strategy="no", max_steps=rounds,
        per_device_train_batch_size=rows, gradient_accumulation_steps=n // rows, num_generations=cfg.G,
        max_completion_length=cfg.max_response, temperature=1.0, top_k=0, top_p=1.0, learning_rate=0.0,
        weight_decay=cfg.weight_decay, max_grad_norm=cfg.max_grad_norm, optim="adamw_torch_fused", beta=cfg.beta,
        epsilon=cfg.eps, loss_type="grpo", scale_rewards="group", shuffle_dataset=False,
    )  # fmt: skip
    seen = {job.group: job for job in ours.jobs}.values()
    data = [{"prompt": ours.task.prompt(job.text, job.question), "golds": job.question.golds} for job in seen]
    return GRPOTrainer(
        model, exact_match, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )  # fmt: skip


def measure(ours: Ours, rounds: int, sides: list[str]) -> dict[str, dict[str, list[float]]]:
    """Returns and prints what every round took and sampled, by side: CPU seconds of its parts, the clock's, tokens."""
    found: dict = {side: defaultdict(list) for side in sides}

    def note(side: str, start: tuple[float, float], generation: float, tokens: int) -> None:
        step, clock = (b - a for a, b in zip(start, now(), strict=True))
        row = {"generation": generation, "update": step - generation, "step": step, "clock": clock, "tokens": tokens}
        for name, value in row.items():
            found[side][name].append(value)
        print(side, "  ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)

    def our_round(t: int) -> None:
        start = now()
        taus = ours.generate(t)
        generation = time.process_time() - start[0]
        ours.update(t, taus)
        note("ours", start, generation, sum(sum(tau.mask) for tau in taus))

    if "trl" in sides:
        if "ours" not in sides:
            ours.policy.close()  # drops its weights,
            gc.collect()  # which refer to themselves
        trl_rounds(ours, rounds + 1, note, our_round if "ours" in sides else lambda t: None)
    else:
        for t in range(1, rounds + 2):
            our_round(t)
    if "ours" in sides:
        ours.policy.close()
    return {side: {name: values[1:] for name, values in parts.items()} for side, parts in found.items()}


def now() -> tuple[float, float]:
    """Returns the seconds of the CPU and of the clock."""
    return time.process_time(), time.monotonic()


def trl_rounds(ours: Ours, rounds: int, note: Callable[..., None], our_round: Callable[[int], None]) -> None:
    """Trains with TRL; calls `note` after every round, then `our_round`."""
    import torch
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as out:
        trainer = trl_trainer(ours, rounds, out)
        generate = trainer._generate

        class InTurn(TrainerCallback):
            def on_step_begin(self, *_, **__):
                self.start = now()

            def on_step_end(self, args, state, *_, **__):
                note("trl", self.start, self.generation, self.tokens)
                torch.set_grad_enabled(True)
                our_round(state.global_step)

        turns = InTurn()

        def timed(prompts):
            start = time.process_time()
            result = agents() if ours.turns else generate(prompts)
            turns.generation = time.process_time() - start
            turns.tokens = sum(map(sum, result[2])) if ours.turns else sum(map(len, result[1]))
            assert result[0] == ours.prompts, "other prompts"
            return result

        def agents():
            """What `_generate` returns, of trajectories of several turns."""
            engine, tokenizer = Turns(trainer), ours.policy.worker.tokenizer
            taus = rollout(engine, tokenizer, ours.task, ours.jobs, ours.cfg, temperature=1.0, seed=0)
            tails = [tau.ids[tau.prompt_tokens :] for tau in taus]
            masks = [tau.mask[tau.prompt_tokens :] for tau in taus]
            said = [[{"role": "assistant", "content": tau.response}] for tau in taus]
            return ours.prompts, tails, masks, said, None, {}, None, []

        trainer._generate = timed
        trainer.add_callback(turns)
        trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="of each side, after one that warms up")
    parser.add_argument("--turns", action="store_true", help="the preset's agent, which searches, not single turns")
    parser.add_argument("--only", choices=("ours", "trl"), help="one side, which takes half the memory")
    add_policy(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    import torch

    single = {} if args.turns else {"tools": "none", "max_response": 48}
    cfg, rounds = config(args, **single), args.rounds

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1 if cfg.model == WORLD["model"] else 2)))
    with contextlib.ExitStack() as stack:
        server = ""
        if args.turns:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
            serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
            server = stack.enter_context(Child(serve, log)).url
        ours = Ours(cfg, server)
        found, n = measure(ours, rounds, [args.only] if args.only else ["ours", "trl"]), len(ours.jobs)
    packages = ("transformers", "torch", *(("trl",) if "trl" in found else ()))
    result: dict = {name: version(name) for name in packages}
    cpu = torch.cpu.get_capabilities()
    result |= {"model": cfg.model, "dtype": ours.dtype, "amx": cpu.get("amx_bf16", False), "trajectories": n}
    result |= {"turns": args.turns, "threads": torch.get_num_threads(), "rounds": rounds}
    print(f"\n{n} trajectories a round, {ours.dtype}, threads: {result['threads']}, "
          f"a CPU {'with' if result['amx'] else 'without'} AMX")  # fmt: skip
    print("CPU seconds, and a step's by the clock: median (least to most)")
    for part in ("generation", "update", "step", "clock"):
        row = f"{part:12}"
        for side, parts in found.items():
            x = parts[part]
            result[f"{side}_{part}_s"] = [round(f(x), 3) for f in (statistics.median, min, max)]
            row += f"{side:>6} {statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})  "
        if not args.only:
            ratios = [b / a for a, b in zip(found["ours"][part], found["trl"][part], strict=True)]
            result[f"{part}_ratio"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
            row += f" TRL / ours {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(row)
    for side, parts in found.items():
        tokens = result[f"{side}_tokens"] = statistics.median(parts["tokens"])
        mean = result[f"{side}_tokens_per_trajectory"] = round((sum(map(len, ours.prompts)) + tokens) / n, 1)
        print(f"{side}: {tokens:.0f} tokens sampled a round; a trajectory has {mean} with its prompt"
              + " and without observations" * args.turns)  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    with one_line():
        main()
