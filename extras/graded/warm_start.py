"""Trains the policy that the runs of the graded world start from: it follows clauses, and knows no world.

    python -m extras.graded.warm_start        # rebuilds extras/graded/files/policy, minutes on one core

Every demonstration has its own clauses: none to all. A number is written in a unit that is drawn for every line, or in
the one that a clause names. So the policy knows the units, and none better than another.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from extras.graded.form import EMPTY, FILLERS, LINES, OPTIONAL, RULES, START, WORDINGS, X, mark, part, random_form
from extras.world.tokenizer import CONTROL, TEMPLATE, WORD, save_tokenizer

POLICY = Path(__file__).parent / "files" / "policy"
TAGS = ["<answer>", "</answer>"]
Demo = tuple[list[str], str, list[str]]  # instruction's words, question, marks


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for every word of the world."""
    words = [
        *FILLERS,
        *WORDINGS,
        *WORDINGS.values(),
        EMPTY,
        *(mark(x, rule) for x in range(X) for rule in range(RULES)),
    ]
    words += ["that", "was", "neither", "nor", "an", "answer", "write", "or", ".", ","]
    words += [part(line, x) for line in range(LINES) for x in range(X)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*CONTROL, *TAGS, "Question:", *words]))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    core.add_tokens([AddedToken(t, normalized=False) for t in [*TAGS, "Question:"]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tiny_policy(vocab: int, width: int = 96, layers: int = 3) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, bos_token_id=None, eos_token_id=4,
            pad_token_id=0,
        )
    )  # fmt: skip


@torch.no_grad()
def begin_alike(model: Qwen2ForCausalLM, vocab: dict[str, int]) -> None:
    """Lets a line's words begin with a vector of the line in common, and its parts with those of their numbers.

    Training may change them as it likes. Without that it had not learnt by 19,200 demonstrations which clause is about
    which line.
    """
    table = model.get_input_embeddings().weight
    line_of, x_of = torch.randn(LINES, table.shape[1]) * 0.02, torch.randn(X, table.shape[1]) * 0.02
    for line in range(LINES):
        for x in range(X):
            table[vocab[part(line, x)]] += line_of[line] + x_of[x]
    for clause, other in WORDINGS.items():
        if not clause.startswith("rule"):
            for word in (clause, other):
                table[vocab[word]] += line_of[int(clause[-2:])]


def demo(rng: np.random.Generator, ruled: float = 0.5) -> Demo:
    """Returns a random instruction, a form, and the form filled in as it says; `ruled`: how often a rule is named."""
    every = [c for c in WORDINGS if not c.startswith("rule")]
    chosen = [every[k] for k in rng.permutation(len(every))[: int(rng.integers(16)) if rng.random() < 0.9 else None]]
    rule = int(rng.integers(RULES)) if rng.random() < ruled else None
    if rule is not None:
        chosen.append(f"rule{rule}")
    fillers = START.split() if rng.random() < 0.5 else [str(w) for w in rng.permutation(FILLERS)[: rng.integers(6)]]
    words = [c if rng.random() < 0.6 else WORDINGS[c] for c in chosen]
    words = [words[k] for k in rng.permutation(len(words))]
    form = random_form(rng)
    marks = []
    for line, x in form:
        fills = (line in OPTIONAL) == (f"fill{line:02d}" in chosen or f"leave{line:02d}" in chosen)
        k = int(rng.integers(RULES)) if rule is None else rule
        marks.append(mark(x, k) if fills else EMPTY)
    return [*fillers, *words] if rng.random() < 0.5 else [*words, *fillers], " ".join(part(*p) for p in form), marks


def batch_of(rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids (n, T) and a mask of what the policy writes (n, T)."""
    vocab = tokenizer.get_vocab()
    rows, starts = [], []
    for _ in range(n):
        words, question, marks = demo(rng)
        text = ["<|user|>", *words, "Question:", *question.split(), "<|assistant|>"]
        starts.append(len(text))
        rows.append([vocab[w] for w in [*text, "<answer>", *marks, "</answer>", "<eos>"]])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    place = torch.arange(width)
    return ids, (place >= torch.tensor(starts)[:, None]) & (place < torch.tensor([len(r) for r in rows])[:, None])


def train(demos: int, seed: int, batch: int = 64, width: int = 96, layers: int = 3, every: int = 0, watch=None):
    """Returns policy and tokenizer after as many demonstrations; `watch(model, seen)` is called `every` so many."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = build_tokenizer()
    model = tiny_policy(len(tokenizer), width, layers)
    begin_alike(model, tokenizer.get_vocab())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    peak = [(group, group["lr"]) for opt in (muon, adam) for group in opt.param_groups]
    steps = demos // batch
    for step in range(steps):
        ids, mask = batch_of(rng, tokenizer, batch)
        hidden = model.model(ids[:, :-1]).last_hidden_state
        kept = mask[:, 1:]
        loss = F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        share = step / steps
        factor = min(1.0, (step + 1) / 50) * (1.0 if share < 0.5 else max(0.02, 2 * (1 - share)))
        for group, lr in peak:
            group["lr"] = lr * factor
        muon.step()
        adam.step()
        model.zero_grad()
        if step % 50 == 0:
            print(f"{step * batch:7d} demonstrations, loss {loss.item():.3f}", flush=True)
        if watch and every and (step + 1) % every == 0:
            watch(model, (step + 1) * batch)
    return model.eval(), tokenizer


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demos", type=int, default=28_800, help="demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, default=POLICY, help="directory to write")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more could round differently
    start = time.monotonic()
    model, tokenizer = train(args.demos, args.seed, width=args.width, layers=args.layers)
    save(model, tokenizer, args.out)
    n = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: {n / 1e6:.2f}M parameters, {args.demos} demonstrations in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
