"""A step of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads, in turn; JSON last.

    python -m extras.bench.trl            # after `pip install trl==1.16.0` in an environment of its own

Single turns of at most 48 tokens without a tool: the work that both can do. Each round generates for the preset's
questions, 24 of the world's or 8 real ones, 5 times each, and takes one optimizer update with the learning rate 0, so
that every round starts from the same policy. A round of ours follows every round of TRL's, in the same process. Turns
end with </answer> where that is one token, as in the world; elsewhere with EOS only, since TRL stops at tokens.

Both compute in the dtype of a run. In bfloat16 both keep float32 weights: ours are gathered in bfloat16 (FSDP2), and
the engine samples from a copy, with float32 logits; TRL's are cast at every use (torch's autocast), in generation too.

Seconds are the CPU's, of all threads, which other programs on the machine disturb least. Threads are OMP_NUM_THREADS;
without it 1 for the world's policy, 2 for another. Both sides of SmolLM2-135M take 11 GB; `--only ours` measures ours.
"""

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version

from config import PRESETS, Config, read_instruction
from extras.bench.harness import BEST, Player, add_policy, config_of, parser_of, timed
from plumbing.faults import one_line
from rollout import prompt_ids
from tasks.formats import encode
from tasks.questions import em
from tasks.tools import last_answer

WORLD = PRESETS["world"]
ROWS = 10  # trajectories in a forward pass of TRL's, for memory; all at once of the world's small policy
PARTS = ("generation", "update", "step", "clock")


class Ours(Player):
    """Single turns, which end where TRL can end them."""

    def __init__(self, cfg: Config):
        # With BEST a trajectory on the real facts has up to 160 tokens.
        world = cfg.train == WORLD["train"]
        super().__init__(cfg, read_instruction("instruction", cfg.instruction) if world else BEST)
        self.prompts = [prompt_ids(self.tokenizer, self.task, job.text, job.question) for job in self.jobs]
        ends = [encode(self.tokenizer, tag) for tag in self.engine.stop]
        self.ends = [ids[0] for ids in ends if len(ids) == 1]  # tokens that end a turn, like EOS
        if len(self.ends) < len(ends):
            self.ends, self.engine.stop = [], ()


class Rounds:
    """What every round took and sampled, by side: CPU seconds of its parts, the clock's, tokens."""

    def __init__(self):
        self.sides: dict[str, defaultdict[str, list[float]]] = {}

    def note(self, side: str, generation: float, step: float, clock: float, tokens: int) -> None:
        row = {"generation": generation, "update": step - generation, "step": step, "clock": clock, "tokens": tokens}
        for name, value in row.items():
            self.sides.setdefault(side, defaultdict(list))[name].append(value)
        print(side, "  ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)

    def play_ours(self, ours: Ours, t: int) -> None:
        taus, clock, cpu = timed(lambda: ours.rollout(t))
        _, more_clock, more_cpu = timed(lambda: ours.update(t, taus))
        self.note("ours", cpu, cpu + more_cpu, clock + more_clock, sum(sum(tau.mask) for tau in taus))


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    """TRL's reward function: the same exact match, of the last answer in each completion."""
    texts = [c[0]["content"] for c in completions]
    return [float(em(last_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def make_trainer(ours: Ours, rounds: int, out: str):
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
        weight_decay=0.01, max_grad_norm=cfg.max_grad_norm, optim="adamw_torch_fused", beta=cfg.beta,
        epsilon=cfg.eps, loss_type="grpo", scale_rewards="group", shuffle_dataset=False,
    )  # fmt: skip
    seen = {job.group: job for job in ours.jobs}.values()
    data = [{"prompt": ours.task.prompt(job.text, job.question), "golds": job.question.golds} for job in seen]
    return GRPOTrainer(
        model, exact_match, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )  # fmt: skip


def train_with_trl(ours: Ours, n: int, rounds: Rounds) -> None:
    """Plays n rounds of TRL's, each followed by one of ours."""
    import torch
    from transformers import TrainerCallback

    with tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(ours, n, out)
        generate = trainer._generate

        class InTurn(TrainerCallback):
            def on_step_begin(self, *_, **__):
                self.start = time.process_time(), time.perf_counter()

            def on_step_end(self, args, state, *_, **__):
                step, clock = time.process_time() - self.start[0], time.perf_counter() - self.start[1]
                rounds.note("trl", self.generation, step, clock, self.tokens)
                torch.set_grad_enabled(True)
                rounds.play_ours(ours, state.global_step)

        turns = InTurn()

        def observed(prompts):
            result, _, turns.generation = timed(lambda: generate(prompts))
            turns.tokens = sum(map(len, result[1]))
            assert result[0] == ours.prompts, "other prompts"
            return result

        trainer._generate = observed
        trainer.add_callback(turns)
        trainer.train()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of each side, after one that warms up")
    parser.add_argument("--only", choices=("ours",), help="one side, which takes half the memory and no TRL")
    add_policy(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    import torch

    cfg, rounds = config_of(args, tools="none", max_response=48), Rounds()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1 if cfg.model == WORLD["model"] else 2)))
    with contextlib.closing(Ours(cfg)) as ours:
        if args.only:
            for t in range(args.rounds + 1):
                rounds.play_ours(ours, t + 1)
        else:
            train_with_trl(ours, args.rounds + 1, rounds)
    result = {"model": cfg.model, "dtype": ours.dtype, "trajectories": len(ours.jobs), "rounds": args.rounds}
    result |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print("\nCPU seconds, and a step's by the clock: median (least to most)")
    columns = {f"{side}_{part}_s": rows[part][1:] for side, rows in rounds.sides.items() for part in PARTS}
    if not args.only:
        result["trl"] = version("trl")
        for part in PARTS:
            pairs = zip(columns[f"ours_{part}_s"], columns[f"trl_{part}_s"], strict=True)
            columns[f"{part}_ratio"] = [theirs / mine for mine, theirs in pairs]  # TRL / ours
    for name, values in columns.items():
        result[name] = [round(f(values), 3) for f in (statistics.median, min, max)]
        print(f"{name:20} {{:.3f}} ({{:.3f}} to {{:.3f}})".format(*result[name]))
    for side, rows in rounds.sides.items():
        tokens = result[f"{side}_tokens"] = statistics.median(rows["tokens"][1:])
        per = (sum(map(len, ours.prompts)) + tokens) / len(ours.jobs)
        result[f"{side}_tokens_per_trajectory"] = round(per, 1)
        print(f"{side}: {tokens:.0f} tokens sampled a round; a trajectory has {per:.1f} with its prompt")
    print(json.dumps(result))


if __name__ == "__main__":
    with one_line():
        main()
