"""When flash-attn computes attention: a small case decides; the switch itself needs a GPU."""

import pytest
import torch
from transformers import Qwen2Config

from models import flash
from models.packing import packed_attention

CONFIG = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def switch(monkeypatch):
    """Lets flash-attn 3 be what `with_` says; returns the names that are active."""
    active = []

    def with_(compute, capability=9, only=""):
        def attend(*args, **kwargs):
            if active and only not in active[0]:
                raise RuntimeError("not this one")
            out, _ = packed_attention(*args, **kwargs)
            return (compute(out) if active else out), None

        def activate(name):
            if compute is ImportError:
                raise ImportError("No module named 'flash_attn_interface'")
            active.append(name)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(flash, "packed_attention", attend)
        monkeypatch.setattr(flash.attention, "activate_flash_attention_impl", activate)
        monkeypatch.setattr(flash.attention, "current_flash_attention_impl", lambda: next(iter(active), None))
        monkeypatch.setattr(flash.attention, "restore_flash_attention_impl", active.clear)
        return flash.choose(CONFIG, "cpu"), active

    return with_


@pytest.mark.parametrize("capability, name", [(9, "FA3"), (10, "FA4")])
def test_one_that_agrees_is_taken(switch, capability, name):
    assert switch(lambda out: out * 1.001, capability) == (name, [name])


def test_on_hopper_the_second_is_tried_where_the_first_refuses(switch):
    said, active = switch(lambda out: out, only="FA4")
    assert (said, active) == ("FA4", ["FA4"])


def test_none_is_sought_for_other_cards_and_none_is_missed(switch):
    assert switch(lambda out: out, 8) == switch(ImportError) == (flash.OWN, [])


def refuse(out):
    raise RuntimeError("FA3 does not take GQA\nand more")


@pytest.mark.parametrize(
    "compute, why",
    [
        (refuse, "FA3 does not take GQA"),
        (lambda out: out * 1.05, "off"),
        (lambda out: out.masked_fill(torch.arange(out.shape[1])[:, None, None] == 433, torch.nan), "off"),
        (lambda out: out.detach() + 0 * out, "off"),  # forward right, gradients zero
    ],
    ids=["refuses", "wrong", "NaN in the last token", "wrong gradients"],
)
def test_one_that_differs_is_not(switch, compute, why):
    said, active = switch(compute)
    assert said.startswith(f"{flash.OWN}, not FA3: ") and why in said and "\n" not in said and not active


def test_the_case_has_the_model_s_heads_and_window():
    out, dq, dk, dv = flash.small_case(CONFIG, "cpu")
    assert out.shape == (1, 434, 4, 16) and dq.shape == (1, 4, 434, 16) and dk.shape == dv.shape == (1, 2, 434, 16)
    windowed = Qwen2Config(**CONFIG.to_dict() | {"sliding_window": 64, "use_sliding_window": True})
    narrow = flash.small_case(windowed, "cpu")[0]
    assert torch.equal(out[0, :40], narrow[0, :40]) and not torch.equal(out[0, 100:240], narrow[0, 100:240])
