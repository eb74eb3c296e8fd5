"""Generation with a KV cache in plain torch.

`TorchEngine` runs any Hugging Face causal LM. It generates one turn for a batch of rows at a time;
a finished row leaves the batch, and the keys and values of its context stay cached for its next
turn. It can share the trainer's model, so that nothing has to be synchronized, and it is
deterministic: the same calls return the same bits.

A model that has other layers than attention generates by engines/hybrid.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines import Contexts, FinishedTurn, Turns, watch_ends
from models.model import Weights, make_head


class RowCache:
    """Keys and values of contexts; implements transformers' Cache.

    A row holds one context, each token in the column of its position. Or M contexts with the same
    prompt share a row: the prompt stands once, and after it a token of each in turn, so that
    attention reads a prompt's keys only once. Slot b M + m is context m of row b.
    """

    is_initialized = True  # read by some of transformers' models (HRM), as of its own caches

    def __init__(self, shared: Tensor, M: int = 1, capacity: int = 1):
        """shared: how many tokens the contexts of each row have in common, (B,), 0 where a row is
        one context's.

        capacity: how many columns they will need.
        """
        # layer -> keys and values (B, heads, width, dim)
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        # where the layers of the next forward pass write: rows (B, 1) and columns (B, T)
        self.rows = self.columns = torch.empty(0)
        self.width = 0  # columns in use
        self.M, self.shared = M, shared
        # how far a column is past the prompt of its row, and the contexts of a row, 0 to M - 1
        past = torch.arange(capacity, device=shared.device) - shared[:, None, None]
        members = torch.arange(M, device=shared.device)[:, None]
        # (B, M, capacity): a context reads the prompt's columns (past < 0) and, behind them, every
        # M-th: its own
        self.readable = (past < 0) | (past % M == members)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes (B, heads, T, dim) at `columns`; returns the columns in use, (B, heads, width,
        dim)."""
        if layer not in self.layers:
            B, heads, *_ = key.shape
            self.layers[layer] = tuple(
                x.new_zeros(B, heads, self.width, x.shape[-1]) for x in (key, value)
            )
        keys, values = self.layers[layer]
        keys[self.rows, :, self.columns] = key.transpose(1, 2)
        values[self.rows, :, self.columns] = value.transpose(1, 2)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def get_seq_length(self, *args: Any) -> int:
        return 0  # the model gets positions and mask explicitly

    def place(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Returns the columns (n, T) of tokens at positions, (n, T) or (T,), of n slots."""
        shared = self.shared[slots // self.M, None]
        past = positions - shared
        # behind the prompt token i of context m is in column shared + i * M + m
        return torch.where(past < 0, positions, shared + past * self.M + slots[:, None] % self.M)

    def copy(
        self, slots: Tensor, capacity: int, shared: Tensor | None = None, M: int = 1
    ) -> "RowCache":
        """Returns a cache with a row for each of these slots; one may be named twice.

        With `shared` M contexts that begin with these tokens will share each row.
        """
        # where the n slots' tokens at positions 0, 1, ... stand here: rows (n, 1, 1) and columns (n,
        # 1, capacity)
        rows = (slots // self.M)[:, None, None]
        columns = self.place(slots, torch.arange(capacity, device=slots.device))[:, None]

        def gather(x: Tensor) -> Tensor:
            _, H, width, _ = x.shape
            heads = rows * H + torch.arange(H, device=x.device)[:, None]
            # F.embedding as a fast gather: entry (row, head, column) of x is number (row * H + head) *
            # width + column of the flattened x. Columns that x does not have are written before they
            # are read: until then they hold its last, which is finite. x[rows, heads, columns] would
            # take three times as long.
            return F.embedding(heads * width + columns.clamp(max=width - 1), x.flatten(0, 2))

        other = RowCache(torch.zeros_like(slots) if shared is None else shared, M, capacity)
        other.layers = {i: tuple(map(gather, pair)) for i, pair in self.layers.items()}
        return other

    def write(self, slots: Tensor, other: "RowCache", positions: Tensor) -> None:
        """Copies the tokens at `positions` (n, T) of the n rows of another cache to these n
        slots."""
        rows, columns = (slots // self.M)[:, None], self.place(slots, positions)
        others = torch.arange(len(slots), device=slots.device)[:, None]
        for i, pair in self.layers.items():
            for mine, theirs in zip(pair, other.layers[i], strict=True):
                mine[rows, :, columns] = theirs[others, :, positions]


class TorchEngine:
    """An Engine that samples from a Hugging Face causal LM, in lockstep.

    `stop`: strings that end a turn, besides EOS.
    """

    lockstep = True
    max_rows = 512

    def __init__(self, model: Any, tokenizer: Any, stop: tuple[str, ...]):
        self.model = model
        self.ended = watch_ends(tokenizer, stop)  # a turn's ids -> whether the last one ends it
        self.device = next(model.parameters()).device
        self.head = make_head(model)  # hidden states (B, H) -> float32 logits (B, V)
        self.reset(0)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """As Engine; an engine that shares the trainer's model needs no `load`."""
        self.reset(0)
        state = self.model.state_dict()
        for name, tensor in weights:
            state[name].copy_(tensor)
        self.head = make_head(self.model)

    def sleep(self) -> None:
        """Drops the cached keys and values."""
        self.reset(0)

    close = sleep

    def reset(self, seed: int) -> None:
        """As Engine; the samples that follow depend on nothing but `seed` and the calls."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.cache = RowCache(torch.zeros(0))
        self.order: list[int] = []  # slot of `cache` -> the caller's key
        self.cached: dict[int, int] = {}  # key -> how many tokens of its context are cached

    @torch.inference_mode()
    def generate(self, contexts: Contexts, max_new: int, temperature: float) -> Turns:
        """As Engine: yields all turns before it returns, and forgets the rows that `contexts` leaves
        out."""
        if not contexts:
            return
        self.model.eval()
        if self.model.row_kind != "shared":
            from engines.hybrid import generate_hybrid

            yield from generate_hybrid(self, contexts, max_new, temperature)
            return
        h = self._prefill(contexts, max_new)  # (B, H)

        # A turn for each slot of `self.cache`. While the batch shrinks, `cache` holds the contexts that
        # it still has; slots[k] is the slot in `self.cache` of its context k.
        cache = self.cache
        slots = torch.arange(len(self.order), device=self.device)
        turns = [FinishedTurn(key, [], []) for key in self.order]
        finished = set()  # slots
        # How many tokens each context has. `starts`: before the turn, by slot, never changed. `lengths`:
        # those that a forward pass has seen, by k; the same until then.
        starts = lengths = self._tensor([len(contexts[key]) for key in self.order])
        capacity = int(starts.max()) + max_new
        while True:
            # the next token of each context; what a finished one samples is ignored
            sampled, logp = self._sample(h, temperature)
            unfinished = []
            samples = zip(slots.tolist(), sampled.tolist(), logp.tolist(), strict=True)
            for k, (slot, token, lp) in enumerate(samples):
                if slot in finished:
                    continue
                turn = turns[slot]
                turn.ids.append(token)
                turn.logps.append(lp)
                if self.ended(turn.ids) or len(turn.ids) == max_new:
                    finished.add(slot)
                    # all but the last token, which no forward pass has seen
                    self.cached[turn.key] = int(lengths[k])
                    yield turn
                else:
                    unfinished.append(k)

            # Once half of the contexts have finished, the batch goes on without them, in a cache of its
            # own: all keys and values that are new return to `self.cache`, for the next turn.
            if 2 * len(unfinished) <= len(lengths):
                if cache is not self.cache:
                    longest = max(len(turn.ids) for turn in turns)
                    added = torch.arange(longest - 1, device=self.device)
                    # what lies past a turn's end is overwritten before it is read
                    self.cache.write(slots, cache, starts[slots, None] + added)
                if not unfinished:
                    break
                keep = self._tensor(unfinished)
                cache = cache.copy(keep, capacity)
                slots = slots[keep]
                lengths = lengths[keep]
                sampled = sampled[keep]

            # one new token of each context: M of a row
            tokens, positions = sampled.view(-1, cache.M), lengths.view(-1, cache.M)
            h = self._forward(cache, tokens, positions).flatten(0, 1)
            lengths = lengths + 1

    def _prefill(self, contexts: Contexts, max_new: int) -> Tensor:
        """Caches the uncached part of every context; returns the last hidden state of each row, (B,
        H)."""
        order = list(contexts)
        if self.order:  # the next turns of episodes
            starts = [self.cached[key] for key in order]
            uncached = [contexts[key][n:] for key, n in zip(order, starts, strict=True)]
            kept = self._tensor([self.order.index(key) for key in order])
            self.cache = self.cache.copy(kept, max(starts) + max(map(len, uncached)) + max_new)
            self.order = order
            return self._extend(starts, uncached)

        # a new batch: equal prompts, those of a group, are computed once
        self.order = order
        prompts = list(dict.fromkeys(map(tuple, contexts.values())))
        prompt_of = self._tensor([prompts.index(tuple(ids)) for ids in contexts.values()])
        lengths = self._tensor(list(map(len, prompts)))
        longest = max(map(len, prompts))
        # its one readable column broadcasts over the width
        self.cache = RowCache(torch.zeros_like(lengths))
        h = self._extend([0] * len(prompts), prompts)[prompt_of]

        # M contexts share a row where groups of one size follow one another (the k-th context has
        # prompt k // M) and prompts are at least as long as a turn: behind them M times as many columns
        # are read. Otherwise a row has one context.
        M = len(prompt_of) // len(prompts)
        if max_new > longest or prompt_of.tolist() != [k // M for k in range(len(prompt_of))]:
            M = 1
        self.cache = self.cache.copy(
            prompt_of[::M], longest + M * max_new, lengths[prompt_of[::M]], M
        )
        return h

    def _extend(self, starts: list[int], uncached: list) -> Tensor:
        """Runs the uncached tokens of each row, the first at position `starts`; returns the last
        hidden states, (B, H)."""
        width = max(map(len, uncached))
        # Later tokens overwrite the padding in the cache.
        ids = self._tensor([[*row] + [row[-1]] * (width - len(row)) for row in uncached])
        positions = self._tensor(starts)[:, None] + torch.arange(width, device=self.device)
        h = self._forward(self.cache, ids, positions)
        ends = self._tensor([len(row) - 1 for row in uncached])
        return h[torch.arange(len(uncached), device=self.device), ends]

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _forward(self, cache: RowCache, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns hidden states (B, T, H) of ids (B, T) at positions (B, T); attention is causal
        within a context."""
        # where `cache.update` writes these tokens, of which a row may have one for each of its M contexts
        cache.rows = torch.arange(len(ids), device=self.device)[:, None]
        slots = torch.arange(len(ids) * cache.M, device=self.device)
        cache.columns = cache.place(slots, positions.view(len(slots), -1)).view_as(positions)
        cache.width = int(cache.columns.max()) + 1
        # a token attends to the columns up to its own that are its context's: (B, T, width)
        causal = torch.arange(cache.width, device=self.device) <= cache.columns[:, :, None]
        mask = causal & cache.readable[..., : cache.width]
        return self.model.base_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _sample(self, h: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns next tokens (B,) and their log-probabilities (B,) from hidden states (B, H)."""
        logps = F.log_softmax(self.head(h) / (temperature or 1.0), dim=-1)
        if temperature:
            # One uniform number a row, inverted through the CDF: multinomial draws one per word of
            # the vocabulary.
            cdf = logps.double().exp().cumsum(-1)
            u = cdf.new_empty(len(h), 1).uniform_(generator=self.generator)
            tokens = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
            tokens.clamp_(max=cdf.shape[1] - 1)
        else:
            tokens = logps.argmax(-1, keepdim=True)
        return tokens[:, 0], logps.gather(1, tokens)[:, 0]
