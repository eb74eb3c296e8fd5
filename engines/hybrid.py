"""Generation by the torch engine with a model that has other layers than attention: transformers'
cache keeps their states, and a context is computed anew for each of its turns."""

from typing import Any

from transformers import DynamicCache

from engines import Contexts, FinishedTurn, Turns
from plumbing.faults import Fault


def generate_hybrid(engine: Any, contexts: Contexts, max_new: int, temperature: float) -> Turns:
    """As `TorchEngine.generate`, a row at a time: this cache takes no rows of several lengths."""
    for key, context in contexts.items():
        turn, cache = FinishedTurn(key, [], []), DynamicCache(config=engine.model.config)
        ids = engine._tensor([context])
        positions = engine._tensor([range(len(context))])
        for _ in range(max_new):
            out = engine.model.base_model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            )
            if not cache.has_previous_state():
                raise Fault(
                    f"--engine torch: {engine.model.config.model_type} leaves no states in its cache; take vllm"
                )
            sampled, logp = engine._sample(out.last_hidden_state[:, -1], temperature)
            turn.ids.append(int(sampled))
            turn.logps.append(float(logp))
            if engine.ended(turn.ids):
                break
            ids, positions = sampled[None], positions[:, -1:] + 1
        yield turn
