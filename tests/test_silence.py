"""What used to go wrong without a word: inputs that were read as something else."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import inspo
from config import PRESETS
from grpo import Learner
from journal.silence import Silence
from models.model import load_model
from plumbing.faults import Fault
from plumbing.replies import read_blocks
from tasks.loading import read_instruction
from tasks.questions import load_questions

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
    (lambda w: w.update({NAME: torch.zeros(5, 64)}), "up_proj"),
    (lambda w: w[NAME][2, 3].fill_(float("nan")), rf"not finite \(1, {NAME}\)"),
    (lambda w: w["model.norm.weight"].fill_(3e38), "its logits are not finite, since its weights are too large"),
])  # fmt: skip
def test_weights_that_are_not_the_model_s_are_refused_by_name(damaged, edit, what):
    with pytest.raises(Fault, match=what):
        load_model(damaged(edit))


# ---- an optimizer that has not stepped


def test_saving_before_the_first_step_leaves_the_optimizer_unstepped(tiny):
    from config import parse_flags

    model, _ = tiny
    learner = Learner(model, None, parse_flags(["--beta", "0"]))
    state = learner.state_dict()
    steps = [x["step"].item() for x in state["optimizer"]["state"].values()]
    assert steps and set(steps) == {0.0}
    assert {x["step"].item() for x in learner.optimizer.state.values()} == {0.0}
    learner.load_state_dict(state)
    assert {x["step"].item() for x in learner.optimizer.state.values()} == {0.0}


# ---- instructions


@pytest.mark.parametrize("text, clean", [
    ("\ufeffSearch first.", "Search first."), ("Sea\u00adrch\u200b first.", "Search first."),
    ("Search\u2060 first.\x85\x0c", "Search first."),
    ("One.\r\nTwo.\u2028Three.\x85Four.", "One.\nTwo.\nThree.\nFour."),
])  # fmt: skip
def test_invisible_characters_are_taken_out_and_line_ends_of_all_kinds_are_line_ends(
    tmp_path, text, clean
):
    (tmp_path / "i.txt").write_bytes(text.encode())
    assert read_instruction(str(tmp_path / "i.txt")) == clean


def test_control_characters_of_an_instruction_are_refused_at_the_start(tmp_path):
    (tmp_path / "i.txt").write_text("Search \x1b[31mfirst.")
    with pytest.raises(Fault, match=r"--instruction .*i\.txt: .*x1b"):
        read_instruction(str(tmp_path / "i.txt"))


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


# ---- questions


def read(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_questions(path)


@pytest.mark.parametrize("answers", [{"value": "Vienna", "aliases": ["Wien"]}, {"a": 1, "b": 2}])
def test_answers_in_a_dictionary_are_refused(tmp_path, answers):
    with pytest.raises(
        Fault, match=r"q\.jsonl:1: gold answers \{.* are neither a text nor a list of texts"
    ):
        read(tmp_path / "q.jsonl", {"question": "What?", "golden_answers": answers})


def test_ids_that_collide_with_their_source_before_them_are_refused(tmp_path):
    rows = [("1", "nq"), ("1", "hotpotqa"), ("nq-1", "popqa")]
    with pytest.raises(Fault, match="make the ids unique"):
        read(
            tmp_path / "q.jsonl",
            *[dict(id=i, question="What?", golden_answers="x", data_source=s) for i, s in rows],
        )


# ---- runs that come to nothing

FINE = {"valid_actions": 0.9, "answered": 0.8, "zero_variance_groups": 0.5, "searches/empty": 0.1}
MUTE = FINE | {"valid_actions": 0.0, "answered": 0.0, "zero_variance_groups": 1.0}


def heard(rows) -> list[tuple[int, str]]:
    """Returns (step, warning) of a run with these rows."""
    silence = Silence()
    return [(t, text) for t, row in enumerate(rows, 1) for text in silence.hear({"t": t} | row)]


@pytest.mark.parametrize("row, what", [
    (MUTE, "no turn called a tool or answered"), (FINE | {"answered": 0.0}, "no trajectory ended in an answer"),
    (FINE | {"searches/empty": 1.0}, "every result was empty"),
    (FINE | {"zero_variance_groups": 1.0}, "rewards of every group were alike"),
    (FINE | {"zero_variance_groups": 1.0, "failed": 0.4}, "rewards of every group were alike"),
    (FINE | {"zero_variance_groups": 1.0, "failed": 0.0}, "every rollout was right: the task is solved"),
])  # fmt: skip
def test_steps_that_come_to_nothing_are_warned_of_at_the_fifth(row, what):
    warnings = heard([FINE] * 3 + [row] * 22)
    assert [t for t, _ in warnings] == [3 + 5] and all(what in text for _, text in warnings)
    assert not heard(([row] * 4 + [FINE]) * 5)


def test_one_empty_tool_of_two_is_no_silence():
    assert not heard([FINE | {"searches/empty": 1.0, "calculations/empty": 0.0}] * 9)


MUTED, ALIKE = (
    FINE | {"answered": 0.0, "zero_variance_groups": 1.0},
    FINE | {"zero_variance_groups": 1.0},
)
BROKEN = FINE | {"forecast_calls/empty": 0.0, "forecast_calls/failed": 1.0}
QUIET = {name: x for name, x in FINE.items() if "/" not in name}  # nothing was called
RIGHT = ALIKE | {"failed": 0.0}
NONE, SAME, TOOL = "no trajectory ended", "every group were alike", "all forecast_calls failed"
DONE = "every rollout was right"


@pytest.mark.parametrize("rows, told, lasting", [
    ([MUTED, ALIKE] * 5, [(5, SAME)], [SAME]),  # one sign does not reset another
    ([ALIKE] + [MUTED] * 9, [(5, SAME), (6, NONE)], [SAME, NONE]),
    ([MUTED] * 9, [(5, NONE)], [NONE]),  # no answer: then all are alike, too
    ([MUTED] * 9 + [ALIKE], [(5, NONE), (10, SAME)], [SAME]),
    ([ALIKE, RIGHT] * 5, [(5, SAME)], [SAME]),  # few questions: all right, all wrong
    ([RIGHT] * 9, [(5, DONE)], [DONE]),
    ([BROKEN] * 9, [(5, TOOL)], [TOOL]),
    ([BROKEN, QUIET] * 5, [(9, TOOL)], [TOOL]),  # steps without a call say nothing of a tool
    ([BROKEN | {"zero_variance_groups": 1.0}] * 6, [(5, TOOL)], [TOOL]),  # which may be why
    (([BROKEN] * 4 + [BROKEN | {"forecast_calls/failed": 0.9}]) * 5, [], []),
    # another tool that does what it should
    ([BROKEN | {"adds/empty": 0.0}] * 6, [(5, TOOL)], [TOOL]),
    ([BROKEN] * 5 + [FINE | {"forecast_calls/empty": 0.0}] + [BROKEN] * 5, [(5, TOOL), (11, TOOL)], [TOOL]),
])  # fmt: skip
def test_signs_are_counted_apart_and_one_with_its_cause_is_not_told(rows, told, lasting):
    silence = Silence()
    for row in rows:
        silence.hear(row)
    ended = [text for _, _, text in silence.lasting()]
    assert [
        (t, next(x for x in (NONE, SAME, TOOL, DONE) if x in text)) for t, text in heard(rows)
    ] == told
    assert len(ended) == len(lasting) and all(any(x in text for text in ended) for x in lasting)


def evaluated(*pairs, metric="em"):
    """Rows of a run that evaluates every second step: (mean training reward, held-out score)."""
    rows = [{"metrics": [metric, "f1"], f"test/{metric}": 0.0}]
    for reward, score in pairs:
        rows += [
            FINE | {"reward": reward - 0.01},
            FINE | {"reward": reward + 0.01, f"valid/{metric}": score},
        ]
    return rows


@pytest.mark.parametrize("pairs, warned", [
    ([(0.1, 0.1), (0.2, 0.1), (0.3, 0.08), (0.4, 0.1), (0.5, 0.1)], True),
    ([(0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (0.4, 0.4), (0.5, 0.5)], False),  # the held-out score follows
    ([(0.1, 0.1), (0.2, 0.1), (0.3, 0.1), (0.4, 0.5), (0.5, 0.5)], False),  # late
    ([(0.5, 0.3), (0.55, 0.2), (0.5, 0.2), (0.55, 0.2), (0.5, 0.2)], False),  # the reward does not rise
    ([(0.8, 0.9), (0.85, 0.88), (0.9, 0.89), (0.95, 0.9), (0.95, 0.9)], False),  # both are at their end
    ([(-3.0, 0.5), (-2.0, 0.4), (-1.0, 0.4), (-0.5, 0.4)], True),  # any unit
])  # fmt: skip
def test_a_reward_that_the_held_out_score_does_not_follow_is_warned_of(pairs, warned):
    told = [text for _, text in heard(evaluated(*pairs, metric="won"))]
    assert len(told) == warned and all("for 3 evaluations in a row the training" in x for x in told)
    # the score of another metric is none
    assert not heard(evaluated(*pairs, metric="won")[1:])


def test_evolutions_without_a_candidate_are_counted_by_evolutions():
    refused, brought = FINE | {"candidates": 0}, FINE | {"candidates": 2}
    assert [t for t, _ in heard([refused, *[FINE] * 14] * 4)] == [31]
    assert not heard([refused, FINE, refused, brought, refused, FINE, refused])


def test_a_run_whose_policy_writes_no_tag_says_so(tmp_path, capsys):
    """The world's policy under random weights: it babbles."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(PRESETS["world"]["model"])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    model.save_pretrained(tmp_path / "babbler")
    AutoTokenizer.from_pretrained(PRESETS["world"]["model"]).save_pretrained(tmp_path / "babbler")
    small = "--T 6 --batch 1 --G 2 --eval_n 1 --eval_every 0 --max_response 4 --max_turns 1"
    flags = f"--max_prompt 900 --mode static --out {tmp_path}/run --save_every 9".split()
    world = [
        x
        for name in ("train", "valid", "test", "corpus")
        for x in (f"--{name}", PRESETS["world"][name])
    ]
    inspo.main(["--model", str(tmp_path / "babbler"), *world, *small.split(), *flags])
    out = capsys.readouterr().out
    assert out.count("WARNING") == 2 and "for 5 steps in a row no turn called a tool" in out
    assert "until the end, for 6 steps" in out.splitlines()[-2]
