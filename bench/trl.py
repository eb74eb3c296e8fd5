"""A step of GRPO here and with TRL's GRPOTrainer: same policy, prompts, reward and threads, in turn; JSON last.

Single turns of at most 48 tokens, which end with </answer>: the work that both can do. Each round generates for 24
questions, 5 times each, and takes one optimizer update in float32, with the learning rate 0, so that every round starts
from the same policy. A round of ours follows every round of TRL's, in the same process. Seconds are the CPU's, which
other programs on the machine disturb least; with one thread on an idle machine they are the clock's. `make bench-trl`
sets up an environment of its own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[0] = str(HERE)  # not this folder, where this file has TRL's name

from config import PRESETS, Config, read_instruction  # noqa: E402
from rollout import rollout  # noqa: E402
from tasks import Job, Question, Trajectory, reward  # noqa: E402
from tasks.questions import em  # noqa: E402
from tasks.search_qa import SearchQA  # noqa: E402
from tasks.tools import last_answer, stop_strings  # noqa: E402

CFG = Config(**PRESETS["world"] | {"tools": "none", "lr": 0.0})  # no tool, one turn
TASK = SearchQA(CFG)


class Ours:
    """The path of a run: TorchEngine samples from the trainer's model, then Learner updates it."""

    def __init__(self, questions: list[Question]):
        import copy

        from engines.torch_engine import TorchEngine
        from grpo import Learner
        from models.model import load_policy

        self.stop = stop_strings(TASK.tools)
        model, self.tokenizer = load_policy(CFG.model, "cpu", self.stop)
        self.engine = TorchEngine(model, self.tokenizer, self.stop, CFG.max_rows)
        self.learner = Learner(model, copy.deepcopy(model), CFG)
        text = read_instruction("instruction", CFG.instruction)
        self.jobs = [Job(None, text, q, group) for group, q in enumerate(questions) for _ in range(CFG.G)]

    def generate(self, k: int) -> list[Trajectory]:
        return rollout(self.engine, self.tokenizer, TASK, self.jobs, CFG, temperature=1.0, seed=k)

    def update(self, taus: list[Trajectory]) -> None:
        from grpo import minibatches

        reward(TASK, taus)
        self.learner.set_advantages(taus)
        self.engine.sleep()
        self.learner.update(1, minibatches(taus, CFG))


def exact_match(completions: list, golds: list, **_: object) -> list[float]:
    """TRL's reward function: the same exact match, of the last answer in each completion."""
    texts = [c[0]["content"] for c in completions]
    return [float(em(last_answer(text), gold)) for text, gold in zip(texts, golds, strict=True)]


def trl_trainer(ours: Ours, rounds: int, out: str):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(CFG.model)
    model = AutoModelForCausalLM.from_pretrained(CFG.model)  # float32, as its config says
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ours.stop))]
    args = GRPOConfig(
        output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_strategy="no", max_steps=rounds, per_device_train_batch_size=CFG.batch * CFG.G,
        num_generations=CFG.G, max_completion_length=CFG.max_response, temperature=1.0, top_k=0, top_p=1.0,
        learning_rate=0.0, weight_decay=CFG.weight_decay, max_grad_norm=CFG.max_grad_norm, optim="adamw_torch_fused",
        beta=CFG.beta, epsilon=CFG.eps, loss_type="grpo", scale_rewards="group", shuffle_dataset=False,
    )  # fmt: skip
    seen = {job.group: job for job in ours.jobs}.values()
    rows = [
        {
            "prompt": TASK.prompt(job.text, job.question),
            "golds": job.question.golds,
        }
        for job in seen
    ]
    return GRPOTrainer(
        model, exact_match, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )  # fmt: skip


def measure(rounds: int) -> dict:
    """Returns seconds of every round, by side and part, and the tokens that were sampled in each."""
    import torch
    from transformers import TrainerCallback

    ours = Ours(TASK.questions("train")[: CFG.batch])
    found: dict = {side: defaultdict(list) for side in ("ours", "trl")}

    with tempfile.TemporaryDirectory() as out:
        trainer = trl_trainer(ours, rounds + 1, out)
        generate = trainer._generate

        def timed(prompts):
            start = time.process_time()
            result = generate(prompts)
            found["trl"]["generation"].append(time.process_time() - start)
            found["trl"]["tokens"].append(sum(map(len, result[1])))
            assert result[0][:: CFG.G] == [tau.ids[: tau.prompt_tokens] for tau in first[:: CFG.G]], "other prompts"
            return result

        class InTurn(TrainerCallback):
            def on_step_begin(self, *_, **__):
                self.start = time.process_time()

            def on_step_end(self, args, state, *_, **__):
                found["trl"]["step"].append(time.process_time() - self.start)
                torch.set_grad_enabled(True)
                begin = time.process_time()
                taus = ours.generate(state.global_step)
                middle = time.process_time()
                ours.update(taus)
                end = time.process_time()
                found["ours"]["generation"].append(middle - begin)
                found["ours"]["step"].append(end - begin)
                found["ours"]["tokens"].append(sum(sum(tau.mask) for tau in taus))

        first = ours.generate(0)
        trainer._generate = timed
        trainer.add_callback(InTurn())
        trainer.train()
    for side in found.values():
        side["update"] = [step - part for step, part in zip(side["step"], side["generation"], strict=True)]
    return {side: {name: values[1:] for name, values in parts.items()} for side, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of each side, after one that warms up")
    rounds = parser.parse_args().rounds
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    found = measure(rounds)
    result: dict = {name: version(name) for name in ("trl", "transformers", "torch")}
    result |= {"threads": torch.get_num_threads(), "rounds": rounds}
    print("\nCPU seconds: median (least to most)")
    for part in ("generation", "update", "step"):
        row = f"{part:12}"
        for side, parts in found.items():
            x = parts[part]
            result[f"{side}_{part}_s"] = [round(f(x), 3) for f in (statistics.median, min, max)]
            row += f"{side:>6} {statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})  "
        ratios = [b / a for a, b in zip(found["ours"][part], found["trl"][part], strict=True)]
        result[f"{part}_ratio"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        print(f"{row} TRL / ours {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for side, parts in found.items():
        result[f"{side}_tokens"] = statistics.median(parts["tokens"])
    print(f"tokens a round: {result['ours_tokens']:.0f}, TRL {result['trl_tokens']:.0f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
