"""Tokens in, tokens out: generation with a KV cache in plain torch.

`TorchEngine` runs any Hugging Face causal LM. It generates one turn for a batch of rows at a time; a row that has
ended leaves the batch, and the keys and values of its context stay for the next turn. It shares the trainer's
weights, so there is nothing to synchronise, and it is deterministic: the same calls give the same bits.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F


class RowCache:
    """Keys and values of every row, written at each row's own positions; stands in for transformers' Cache."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> two of (B, capacity, heads, dim)
        self.rows = self.positions = torch.empty(0)  # where the next update writes: (B, 1) and (B, T)
        self.width = 0  # columns in use

    def update(self, key, value, layer: int, *_, **__):
        """Write (B, heads, T, dim) at `positions`, return all columns in use as (B, heads, width, dim)."""
        if layer not in self.layers:
            B, heads, _, dim = key.shape
            self.layers[layer] = key.new_zeros(B, self.width, heads, dim), value.new_zeros(B, self.width, heads, dim)
        out = []
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            cached[self.rows, self.positions] = new.transpose(1, 2)
            out.append(cached[:, : self.width].transpose(1, 2))
        return out

    def get_seq_length(self, *_) -> int:
        return 0  # positions and mask are given to the model explicitly

    def grow(self, capacity: int) -> None:
        for i, pair in self.layers.items():
            self.layers[i] = tuple(F.pad(t, (0, 0, 0, 0, 0, max(0, capacity - t.shape[1]))) for t in pair)

    def take(self, rows: torch.Tensor) -> "RowCache":
        """A copy with these rows (repeats allowed)."""
        other = RowCache()
        other.layers = {i: (k[rows], v[rows]) for i, (k, v) in self.layers.items()}
        return other

    def put(self, rows: torch.Tensor, other: "RowCache", columns: slice) -> None:
        """Write `columns` of another cache's rows back into these rows."""
        for i, pair in self.layers.items():
            for mine, theirs in zip(pair, other.layers[i], strict=True):
                mine[rows, columns] = theirs[:, columns]


class TorchEngine:
    """Sampling from a Hugging Face causal LM, with the protocol that `rollout` needs.

    `begin(seed)` starts a batch of new rows; `generate` starts a turn of rows and yields turns that have ended, here of
    all that it was given; `lockstep`: it wants all rows that go on in one call; `max_rows`: how many rows at once.
    `stop`: strings that end a turn and stay in it (a turn also ends with the tokenizer's EOS).
    """

    lockstep = True
    unproven = 0  # weights that it may have otherwise than they were sent

    def __init__(self, model, tokenizer, stop: tuple[str, ...], max_rows: int = 512):
        self.model, self.tokenizer, self.stop, self.max_rows = model, tokenizer, stop, max_rows
        self.device = next(model.parameters()).device
        self.head = model.get_output_embeddings()
        # A stop string can only be completed by a token whose text holds its last character: decode those alone.
        last = {s[-1] for s in stop}
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=False)
        self.may_stop = {i for i, text in enumerate(texts) if last & set(text)}
        self.tail = 4 * max(map(len, stop))  # tokens that surely cover a stop string
        self.begin(0)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, (name, tensor) at a time; for an engine whose model is not the trainer's own."""
        mine = dict(self.model.named_parameters())
        for name, tensor in weights:
            mine[name].copy_(tensor)

    def sleep(self) -> None:
        """Give back what only generation needs: the keys and values of the last rows."""
        self.begin(0)

    def close(self) -> None:
        self.sleep()

    def begin(self, seed: int) -> None:
        """Forget all rows; the samples that follow are a function of `seed` and the calls alone."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.cache: RowCache | None = None
        self.keys: list[int] = []  # row -> the caller's key
        self.known: dict[int, int] = {}  # key -> tokens of it that are cached

    def ended(self, ids: list[int]) -> bool:
        """Whether the newest of a turn's tokens ends the turn."""
        if ids[-1] == self.tokenizer.eos_token_id:
            return True
        if ids[-1] not in self.may_stop:
            return False
        text = self.tokenizer.decode(ids[-self.tail :], skip_special_tokens=False)
        return any(s in text for s in self.stop)

    @torch.inference_mode()
    def generate(
        self, contexts: dict[int, list[int]], max_new: int, temperature: float
    ) -> Iterator[tuple[int, list[int], list[float]]]:
        """Yield (key, ids, log-probs) as rows end: at a stop string, EOS or after `max_new` tokens.

        `contexts` holds each row's whole context; what an earlier call has cached of it is not computed again, and
        rows that are left out are forgotten. Log-probs are of the softmax at `temperature` (at 1 where it is 0).
        """
        if not contexts:
            return
        training = self.model.training
        self.model.eval()
        h = self._prefill(contexts, max_new)  # (B, H)
        cache, active = self.cache, list(range(len(self.keys)))
        ids: list[list[int]] = [[] for _ in active]
        logps: list[list[float]] = [[] for _ in active]
        lengths = torch.tensor([len(contexts[key]) for key in self.keys], device=self.device)
        first_column = int(lengths.min())
        while True:
            sampled, logp = self._sample(h, temperature)
            going = []  # positions within the batch of the rows that go on
            for b, (row, token, lp) in enumerate(zip(active, sampled.tolist(), logp.tolist(), strict=True)):
                if row < 0:
                    continue
                ids[row].append(token)
                logps[row].append(lp)
                if self.ended(ids[row]) or len(ids[row]) == max_new:
                    active[b] = -1  # stays in the batch, unread, until half of the rows have left
                    self.known[self.keys[row]] = int(lengths[b])
                    yield self.keys[row], ids[row], logps[row]
                else:
                    going.append(b)
            if not going:
                break
            if 2 * len(going) <= len(active):
                keep = torch.tensor(going, device=self.device)
                self._leave(cache, slice(first_column, int(lengths.max())))
                cache = cache.take(keep)
                active, lengths, sampled = [active[b] for b in going], lengths[keep], sampled[keep]
                self._rows = [self._rows[b] for b in going]
            h = self._forward(cache, sampled[:, None], lengths[:, None])[:, 0]
            lengths = lengths + 1
        self._leave(cache, slice(first_column, int(lengths.max())))
        self.model.train(training)

    def _leave(self, cache: RowCache, columns: slice) -> None:
        """Rows that leave the batch take their new columns home, where the next turn finds them."""
        if cache is not self.cache:
            self.cache.put(torch.tensor(self._rows, device=self.device), cache, columns)

    def _prefill(self, contexts: dict[int, list[int]], room: int) -> torch.Tensor:
        """Cache what is new in the contexts; return the last hidden state of each row, (B, H)."""
        keys = list(contexts)
        capacity = max(map(len, contexts.values())) + room
        if self.cache is None:  # equal prompts (a group's) are computed once
            prompts = list(dict.fromkeys(map(tuple, contexts.values())))
            copies = torch.tensor([prompts.index(tuple(ids)) for ids in contexts.values()], device=self.device)
            self.cache = RowCache()
            h = self._extend([0] * len(prompts), list(map(list, prompts)))[copies]
            self.cache = self.cache.take(copies)
        else:
            rows = torch.tensor([self.keys.index(key) for key in keys], device=self.device)
            self.cache = self.cache.take(rows)
            self.cache.grow(capacity)
            known = [self.known[key] for key in keys]
            h = self._extend(known, [contexts[key][n:] for key, n in zip(keys, known, strict=True)])
        self.cache.grow(capacity)
        self.keys, self._rows = keys, list(range(len(keys)))
        return h

    def _extend(self, known: list[int], new: list[list[int]]) -> torch.Tensor:
        """Run the tokens `new` of each row, the first at position `known`; padding is overwritten later."""
        width = max(map(len, new))
        ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in new], device=self.device)
        positions = torch.tensor(known, device=self.device)[:, None] + torch.arange(width, device=self.device)
        if self.cache.layers:
            self.cache.grow(int(positions.max()) + 1)
        h = self._forward(self.cache, ids, positions)
        ends = torch.tensor([len(row) - 1 for row in new], device=self.device)
        return h[torch.arange(len(new), device=self.device), ends]

    def _forward(self, cache: RowCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, T, H) of ids (B, T) at positions (B, T): each sees its row up to itself."""
        cache.rows = torch.arange(len(ids), device=self.device)[:, None]
        cache.positions, cache.width = positions, int(positions.max()) + 1
        seen = torch.arange(cache.width, device=self.device) <= positions[:, :, None]  # (B, T, width)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model.base_model(
                input_ids=ids, position_ids=positions, attention_mask=seen[:, None],
                past_key_values=cache, use_cache=True,
            ).last_hidden_state  # fmt: skip

    def _sample(self, h: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens (B,) and their log-probs (B,) from hidden states (B, H)."""
        logps = F.log_softmax(self.head(h).float() / (temperature or 1.0), dim=-1)
        if temperature:
            tokens = torch.multinomial(logps.exp(), 1, generator=self.generator)
        else:
            tokens = logps.argmax(-1, keepdim=True)
        return tokens[:, 0], logps.gather(1, tokens)[:, 0]
