"""The estimated activations against those that Liger's layers keep."""

import gc

import pytest
import test_layers
import torch
import transformers
from ranks_fit import Live
from test_model import SHAPES

from extras.fit import activations
from models.model import empty, skeleton
from models.packing import Packing
from training.shards import fuse

interpreter = test_layers.interpreter  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("name, recompute", [("Qwen2", 1), ("Qwen3", 0)])
def test_the_estimate_counts_what_liger_keeps(name, recompute):
    """Bytes that are alive after the forward pass, and at most until the end of the backward
    pass."""
    T, H, I = 4, SHAPES["hidden_size"], 128
    heads = SHAPES["num_attention_heads"]  # as many of keys: on a GPU float32 has no fewer
    # the gradient of few words is small
    sizes = dict(intermediate_size=I, num_key_value_heads=heads, vocab_size=8)
    config = getattr(transformers, f"{name}Config")(**SHAPES | sizes)
    model = empty(config, torch.float32, "cpu").train()
    fuse(model)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
        # FSDP2 frees them, too
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kept, again = activations(skeleton(config), T, recompute, fused=1)
    with Live([*model.parameters(), *model.buffers()]) as live:
        ids, packing = torch.zeros(1, T, dtype=torch.long), Packing([T])
        hidden = model.base_model(
            input_ids=ids, position_ids=packing.positions[None], use_cache=False, packing=packing
        ).last_hidden_state
        gc.collect()  # the interpreter holds on to the last kernel's arguments
        if not recompute:
            assert kept + hidden.nbytes == pytest.approx(live.now(), rel=1e-3)
        loss = hidden.sum()
        del hidden
        loss.backward()
    gradient = 4 * H * I  # of one matrix, which `activations` leaves to others
    assert kept + again + gradient == pytest.approx(live.most, rel=0.01)
