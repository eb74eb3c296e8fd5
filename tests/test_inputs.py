"""What used to go wrong without a word: inputs that were read as something else."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import parse_flags
from grpo import Learner
from models.model import load_model
from plumbing.faults import Fault
from reflect import read_blocks

# ---- weights


@pytest.fixture
def damaged(tiny_path, tmp_path):
    """A function that changes the weights of a copy of the tiny policy, and returns its
    directory."""

    def change(edit) -> str:
        path = shutil.copytree(tiny_path, tmp_path / "policy")
        weights = load_file(path / "model.safetensors")
        edit(weights)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return str(path)

    return change


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("edit, what", [
    (lambda w: w.pop(NAME), rf"missing \(1, {NAME}\)"),
    (lambda w: w.update(extra=torch.zeros(3)), r"unexpected \(1, extra\)"),
    (lambda w: w.update({NAME: torch.zeros(5, 64)}), "no causal LM can be loaded"),
    (lambda w: w[NAME][2, 3].fill_(float("nan")), "or are not finite"),
    (lambda w: w["model.norm.weight"].fill_(3e38), "or are not finite"),
])  # fmt: skip
def test_weights_that_are_not_the_model_s_are_refused_by_name(damaged, edit, what):
    with pytest.raises(Fault, match=what):
        load_model(damaged(edit))


# ---- an optimizer that has not stepped


def test_saving_before_the_first_step_leaves_the_optimizer_unstepped(tiny):
    model, _ = tiny
    learner = Learner(model, None, parse_flags(["--beta", "0"]))
    state = learner.state_dict()
    steps = [x.item() for name, x in state.items() if name.endswith(".step")]
    assert steps and set(steps) == {0.0}
    assert {x["step"].item() for x in learner.optimizer.state.values()} == {0.0}


# ---- thoughts of a reasoning model

FINAL = "<ins_1>Use <think> and </think>, then <answer> </answer>.</ins_1>"
DRAFT = "<ins_1>draft with <think> </think></ins_1> too short"


@pytest.mark.parametrize("reply", [
    f"<think>Perhaps {DRAFT}</think>\n{FINAL}", f"Perhaps {DRAFT}\n</think>\n\n{FINAL}", FINAL,
    f"The tags lack <think>.\n{FINAL}",
    f"{FINAL}\nIt names <think> and </think>.", f"It forgets <think> and </think>.\n{FINAL}",
])  # fmt: skip
def test_drafts_in_thoughts_are_no_candidates(reply):
    assert read_blocks(reply) == [FINAL[7:-8]]
