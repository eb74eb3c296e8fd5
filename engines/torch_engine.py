"""Generation with a KV cache in plain torch.

`TorchEngine` runs any Hugging Face causal LM. It generates one turn for a batch of rows at a time; a finished row
leaves the batch, and the keys and values of its context stay cached for its next turn. It can share the trainer's
model, so that nothing has to be synchronized, and it is deterministic: the same calls return the same bits.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engines import FinishedTurn
from kernels import head_logits
from models.model import logit_scale


class RowCache:
    """Keys and values of all rows, each written at its row's own positions; implements transformers' Cache."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> two of (B, heads, capacity, dim)
        self.rows = self.positions = torch.empty(0)  # where the next `update` writes: (B, 1) and (B, T)
        self.width = 0  # columns in use

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes (B, heads, T, dim) at `positions`; returns the columns in use, (B, heads, width, dim)."""
        if layer not in self.layers:
            B, heads, _, dim = key.shape
            shape = (B, heads, self.width, dim)
            self.layers[layer] = key.new_zeros(shape), value.new_zeros(shape)
        keys, values = self.layers[layer]
        keys[self.rows, :, self.positions] = key.transpose(1, 2)
        values[self.rows, :, self.positions] = value.transpose(1, 2)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, *args: Any) -> int:
        return 0  # the model gets positions and mask explicitly

    def select(self, rows: torch.Tensor, columns: int, capacity: int = 0) -> "RowCache":
        """Returns a copy of the first `columns` of these rows, with room for `capacity`; a row may be named twice."""

        def copy(x: torch.Tensor) -> torch.Tensor:
            copied = x.new_zeros(len(rows), x.shape[1], max(capacity, x.shape[2]), x.shape[3])
            torch.index_select(x[:, :, :columns], 0, rows, out=copied[:, :, :columns])
            return copied

        other = RowCache()
        other.layers = {i: (copy(keys), copy(values)) for i, (keys, values) in self.layers.items()}
        return other

    def write(self, rows: torch.Tensor, other: "RowCache", columns: slice) -> None:
        """Copies `columns` of all rows of `other` into these rows."""
        for i, pair in self.layers.items():
            for mine, theirs in zip(pair, other.layers[i], strict=True):
                mine[rows, :, columns] = theirs[:, :, columns]


class TorchEngine:
    """An Engine that samples from a Hugging Face causal LM, in lockstep.

    `stop`: strings that end a turn, as the tokenizer's EOS does; `max_rows`: rows of one batch.
    """

    lockstep = True
    unproven = 0  # `load` copies into the parameters that the forward pass reads

    def __init__(self, model: Any, tokenizer: Any, stop: tuple[str, ...], max_rows: int = 512):
        self.model, self.tokenizer, self.stop, self.max_rows = model, tokenizer, stop, max_rows
        self.device: torch.device = next(model.parameters()).device
        self.widen()
        self.scale = logit_scale(model.config)
        # Only a token whose text contains the last character of a stop string can complete it: decode after those.
        last = {s[-1] for s in stop}
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=False)
        self.may_stop = {i for i, text in enumerate(texts) if last & set(text)}
        self.tail = 4 * max(map(len, stop), default=0)  # a character has at most 4 bytes, a token at least 1
        self.begin(0)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As Engine; an engine that shares the trainer's model needs no `load`."""
        self.begin(0)
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self.widen()

    def widen(self) -> None:
        """Makes the head, whose logits are float32: rounded to bf16, log-probs would be off by 0.012 nat on average.

        A GPU sums bf16 products in float32; elsewhere the weight itself is widened, here once and not for every token.
        """
        weight = self.model.get_output_embeddings().weight.detach()
        self.head = partial(head_logits, weight=weight if weight.is_cuda else weight.float())

    def sleep(self) -> None:
        """Drops the cached keys and values."""
        self.begin(0)

    close = sleep

    def begin(self, seed: int) -> None:
        """As Engine; the samples that follow depend on nothing but `seed` and the calls."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.cache = RowCache()
        self.keys: list[int] = []  # row of `cache` -> the caller's key
        self._rows: list[int] = []  # position in the batch -> row of `cache`
        self.cached: dict[int, int] = {}  # key -> how many tokens of its context are cached

    def ended(self, ids: list[int]) -> bool:
        """Returns whether the last of a turn's tokens so far ends the turn."""
        if ids[-1] == self.tokenizer.eos_token_id:
            return True
        if ids[-1] not in self.may_stop:
            return False
        text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=False)
        return any(s in text for s in self.stop)

    @torch.inference_mode()
    def generate(self, contexts: dict[int, list[int]], max_new: int, temperature: float) -> Iterator[FinishedTurn]:
        """As Engine: yields every turn before it ends, and forgets the rows that `contexts` leaves out."""
        if not contexts:
            return
        training = self.model.training
        self.model.eval()
        h = self._prefill(contexts, max_new)  # (B, H)
        cache, active = self.cache, list(range(len(self.keys)))  # active: the row at each position of the batch
        ids: list[list[int]] = [[] for _ in active]
        logps: list[list[float]] = [[] for _ in active]
        lengths = torch.tensor([len(contexts[key]) for key in self.keys], device=self.device)
        first_column = int(lengths.min())
        while True:
            sampled, logp = self._sample(h, temperature)
            unfinished = []  # positions in the batch
            for b, (row, token, lp) in enumerate(zip(active, sampled.tolist(), logp.tolist(), strict=True)):
                if row < 0:
                    continue
                ids[row].append(token)
                logps[row].append(lp)
                if self.ended(ids[row]) or len(ids[row]) == max_new:
                    active[b] = -1  # computed but ignored until half of the batch has finished
                    self.cached[self.keys[row]] = int(lengths[b])
                    yield FinishedTurn(self.keys[row], ids[row], logps[row])
                else:
                    unfinished.append(b)
            if not unfinished:
                break
            if 2 * len(unfinished) <= len(active):
                keep = torch.tensor(unfinished, device=self.device)
                self._write_back(cache, slice(first_column, int(lengths.max())))
                cache = cache.select(keep, int(lengths.max()))
                active, lengths, sampled = [active[b] for b in unfinished], lengths[keep], sampled[keep]
                self._rows = [self._rows[b] for b in unfinished]
            h = self._forward(cache, sampled[:, None], lengths[:, None])[:, 0]
            lengths = lengths + 1
        self._write_back(cache, slice(first_column, int(lengths.max())))
        self.model.train(training)

    def _write_back(self, cache: RowCache, columns: slice) -> None:
        """Copies new columns from the batch's cache into the one that the next turn starts from."""
        if cache is not self.cache:
            self.cache.write(torch.tensor(self._rows, device=self.device), cache, columns)

    def _prefill(self, contexts: dict[int, list[int]], room: int) -> torch.Tensor:
        """Caches the uncached part of every context; returns the last hidden state of each row, (B, H)."""
        keys = list(contexts)
        if not self.cache.layers:  # a new batch: compute equal prompts (those of a group) once
            prompts = list(dict.fromkeys(map(tuple, contexts.values())))
            copies = torch.tensor([prompts.index(tuple(ids)) for ids in contexts.values()], device=self.device)
            h = self._extend([0] * len(prompts), list(map(list, prompts)))[copies]
            width = max(map(len, prompts))
            self.cache = self.cache.select(copies, width, width + room)
        else:
            rows = torch.tensor([self.keys.index(key) for key in keys], device=self.device)
            starts = [self.cached[key] for key in keys]
            new = [contexts[key][n:] for key, n in zip(keys, starts, strict=True)]
            self.cache = self.cache.select(rows, max(starts), max(starts) + max(map(len, new)) + room)
            h = self._extend(starts, new)
        self.keys, self._rows = keys, list(range(len(keys)))
        return h

    def _extend(self, starts: list[int], new: list[list[int]]) -> torch.Tensor:
        """Runs the `new` tokens of each row, the first at position `starts`; returns the last hidden states, (B, H)."""
        width = max(map(len, new))
        # Later tokens overwrite the padding in the cache.
        ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in new], device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        h = self._forward(self.cache, ids, positions)
        ends = torch.tensor([len(row) - 1 for row in new], device=self.device)
        return h[torch.arange(len(new), device=self.device), ends]

    def _forward(self, cache: RowCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns hidden states (B, T, H) of ids (B, T) at positions (B, T); attention is causal within each row."""
        cache.rows = torch.arange(len(ids), device=self.device)[:, None]
        cache.positions, cache.width = positions, int(positions.max()) + 1
        visible = torch.arange(cache.width, device=self.device) <= positions[:, :, None]  # (B, T, width)
        hidden: torch.Tensor = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=visible[:, None],
            past_key_values=cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        return hidden

    def _sample(self, h: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns next tokens (B,) and their log-probabilities (B,) from hidden states (B, H)."""
        logps = F.log_softmax(self.head(h) / ((temperature or 1.0) / self.scale), dim=-1)
        if temperature:
            # One uniform number a row, looked up in the distribution function: multinomial draws one a word.
            total = logps.double().exp().cumsum(-1)
            u = torch.rand(len(h), 1, generator=self.generator, dtype=torch.float64, device=self.device) * total[:, -1:]
            tokens = torch.searchsorted(total, u, right=True).clamp_(max=total.shape[1] - 1)
        else:
            tokens = logps.argmax(-1, keepdim=True)
        return tokens[:, 0], logps.gather(1, tokens)[:, 0]
