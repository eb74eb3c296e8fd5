"""Trains the policy that a run starts from: a tiny Qwen2, taught by demonstrations to follow its
instruction.

    python -m extras.world.warm_start       # rebuilds world/files/ from nothing: under 4 minutes on two cores

It never sees the world of the run, only other worlds that share no name with it, and never a
demonstration of the best combination of clauses. It is also the supervised (SFT) baseline.
"""

import plumbing  # noqa: F401  # isort: skip  (first: from here on a Ctrl-C is one line)
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from config import WORLD
from extras.bench.harness import parser_of
from extras.world.demos import TASK, demo
from extras.world.facts import MINI, World, questions, the_world
from extras.world.tokenizer import build_tokenizer, save_tokenizer
from tasks import Question
from world.clauses import START

N_WORLDS = 300
# loss weight of the tokens that decide what the agent does next: a tag, the first word of a query
DECIDE = 8.0
OTHER = 0.1  # loss weight of tokens that the agent did not write: they teach copying, too
COPY, ONE, THREE = 0.06, 0.14, 0.22  # share of the tokens after which each lesson ends


def tiny_policy(vocab: int) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            bos_token_id=None,
            eos_token_id=4,
            pad_token_id=0,
        )
    )


def lessons(rng: random.Random, worlds: list[World], tokenizer, total: int, batch: int):
    """Yields (share done, batch [(ids, weights)] of about `batch` tokens) in three lessons: copy,
    one hop, all hops."""
    given = 0
    agent_end = [tokenizer.eos_token_id]
    decisions = set(tokenizer.convert_tokens_to_ids(["<think>", "<search>", "<answer>"]))
    query = tokenizer.convert_tokens_to_ids("<search>")
    while given < total:
        share = given / total
        # repeat a random string: attention has to learn to copy before anything else
        if share < COPY:
            rows = []
            for _ in range(batch // 50):
                x = [rng.randrange(20, len(tokenizer)) for _ in range(24)]
                y = [rng.randrange(20, len(tokenizer)) for _ in range(rng.randint(0, 3))]
                rows.append((x + y + x, [0.0] * (25 + len(y)) + [1.0] * 23))
            batches = [rows]
        else:
            hops, k = (
                ([1, 1, 1, 2], 1 if share < ONE else 3) if share < THREE else ([1, 2, 2, 3], 3)
            )
            rows = []
            for _ in range(10 * batch // 130):
                instruction, question, parts = demo(rng, worlds, hops, k)
                ids = TASK.make_format(tokenizer).encode_prompt(instruction, Question("", question))
                weights = [OTHER] * len(ids)
                texts = tokenizer([text for text, _ in parts], add_special_tokens=False)[
                    "input_ids"
                ]
                for (_, by_agent), part in zip(parts, texts, strict=True):
                    ids += part
                    before = [0, *part]
                    decides = [
                        t in decisions or last == query
                        for last, t in zip(before, part, strict=False)
                    ]
                    weights += [(DECIDE if d else 1.0) if by_agent else OTHER for d in decides]
                rows.append((ids + agent_end, weights + [1.0]))
            rows.sort(key=lambda row: len(row[0]))
            batches, current = [], []
            for row in rows:
                if current and len(row[0]) * (len(current) + 1) > batch:
                    batches.append(current)
                    current = []
                current.append(row)
            batches.append(current)
            rng.shuffle(batches)
        for rows in batches:
            given += sum(len(ids) for ids, _ in rows)
            yield min(1.0, given / total), rows


def train(tokens: int, seed: int, batch: int = 3200) -> tuple[Qwen2ForCausalLM, object]:
    """Returns the policy and its tokenizer after `tokens` tokens of demonstrations."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    world = the_world()
    avoid = frozenset(name for names in world.names.values() for name in names)
    worlds = [World(rng, MINI, avoid) for _ in range(N_WORLDS)]
    tokenizer = build_tokenizer()
    model = tiny_policy(len(tokenizer))
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    # In this project's prototype AdamW alone had not learnt to copy after 1M tokens; Muon on the
    # matrices had.
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    peak = [(group, group["lr"]) for opt in (muon, adam) for group in opt.param_groups]

    for step, (share, rows) in enumerate(lessons(rng, worlds, tokenizer, tokens, batch)):
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in rows])[:, 1:]
        hidden = model.model(ids[:, :-1]).last_hidden_state
        kept = weights > 0
        loss = (
            F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
            @ weights[kept]
        )
        loss = loss / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        factor = min(1.0, (step + 1) / 50) * (1.0 if share < 0.5 else max(0.02, 2 * (1 - share)))
        for group, lr in peak:
            group["lr"] = lr * factor
        muon.step()
        adam.step()
        model.zero_grad()
        if step % 100 == 0:
            print(f"{share:4.0%}  loss {loss.item():.3f}", flush=True)
    return model.eval(), tokenizer


def write_files(folder: Path) -> None:
    """Writes instruction.txt, corpus.jsonl, train.jsonl and test.jsonl of the world."""
    world = the_world()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "instruction.txt").write_text(START + "\n", "utf-8")
    train = questions(world, "train", {1: 500, 2: 600, 3: 500})
    tables = {
        "corpus": [{"id": str(i), "contents": p} for i, p in enumerate(world.passages)],
        "train": train,
        "valid": questions(world, "valid", {1: 30, 2: 60, 3: 60}, without=train),
        "test": questions(world, "test", {1: 60, 2: 120, 3: 120}),
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=3_000_000, help="tokens of demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WORLD, help="directory to write")
    args = parser.parse_args()
    torch.set_num_threads(2)  # whatever the machine has: more could round differently
    write_files(args.out)
    model, tokenizer = train(args.tokens, args.seed)
    model.save_pretrained(args.out / "policy")
    save_tokenizer(tokenizer, args.out / "policy")
    print(f"{args.out / 'policy'}: {args.tokens:,} tokens of demonstrations")


if __name__ == "__main__":
    main()
