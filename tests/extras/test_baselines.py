"""The methods of Table 1, turn by turn, from a scripted engine and search; supervision against cross-entropy."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_rollout import Found

from extras.baselines import METHODS, TRAINED, Agent, answer_of, config_of, direct, grpo, ircot, rag, search_o1, search_r1
from config import PRESETS, Config, parse
from tasks.questions import Question, em, load_questions
from engines import FinishedTurn
from engines.chat_engine import Words
from extras.prompts import IN_WORLD, PROSE
from extras.supervised import gold_answers
from grpo import Learner
from tasks.tools import make_tools

ROOT = Path(__file__).parent.parent
EMMA = Question("q0", "Who wrote Emma?", ("Jane Austen",), "nq", 1)
BORN = Question("q1", "Where was the author of Emma born?", ("Steventon",), "hotpotqa", 2)


class Script:
    """An engine whose k-th batch of rows says what the k-th table holds for each row; it keeps what it was shown."""

    max_rows, lockstep = 512, True

    def __init__(self, *tables):
        self.words, self.tables, self.shown = Words(), list(tables), []

    def begin(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        self.shown.append({row: self.words.decode(ids) for row, ids in contexts.items()})
        self.max_new = max_new
        table = self.tables.pop(0)
        for row in contexts:
            ids = self.words(table[row])["input_ids"]
            yield FinishedTurn(row, ids, [0.0] * len(ids))


def agent_of(engine, search=None, words=PROSE, **limits):
    return Agent(engine, engine.words, search or Found(), Config(**limits), words, "Answer. <answer>")


def test_every_row_of_table_1_has_a_name_and_those_that_train_a_command():
    assert list(METHODS) == "direct sft grpo ircot rag sft_reject search_o1 search_r1 inspo".split()
    assert set(TRAINED) < set(METHODS)
    for name, method in METHODS.items():
        stop = method.stop(Config(), PROSE)
        assert ("</search>" in stop) == (name in ("sft_reject", "search_r1", "inspo")) and 1 <= len(stop) <= 4


def test_direct_takes_the_answer_from_its_tags_or_the_whole_reply():
    engine = Script({0: "<answer> Jane Austen </answer>", 1: " Bath."})
    taus = direct(agent_of(engine), [EMMA, BORN])
    assert [tau.prediction for tau in taus] == ["Jane Austen", "Bath"]
    assert engine.max_new == 32 and [tau.served("search") for tau in taus] == [0, 0]


def test_grpo_without_tools_has_one_turn_whatever_it_calls():
    engine = Script({0: "<search> Emma </search>", 1: "<think>x</think> <answer>Bath</answer>"})
    taus = grpo(agent_of(engine, max_turns=4), [EMMA, BORN])
    assert [(tau.stop, tau.prediction, len(tau.turns)) for tau in taus] == [("turns", None, 1), ("answer", "Bath", 1)]


def test_rag_searches_once_with_the_question_and_reads_the_passages():
    search, engine = Found('"Emma"\nA novel by Jane Austen.'), Script({0: "Jane Austen.", 1: "Steventon"})
    taus = rag(agent_of(engine, search), [EMMA, BORN])
    assert [tau.prediction for tau in taus] == ["Jane Austen", "Steventon"]
    assert [tau.turns[0].argument for tau in taus] == [EMMA.text, BORN.text]
    assert all("Doc 1(Title: Emma) A novel by Jane Austen." in shown for shown in engine.shown[0].values())
    assert [tau.served("search") for tau in taus] == [1, 1]


def test_ircot_retrieves_with_every_sentence_keeps_the_passages_and_ends_at_the_answer():
    engine = Script({0: "Emma is by Jane Austen.", 1: "So the answer is: Bath."}, {0: "So the answer is: Jane Austen."})
    search = Echo()
    taus = ircot(agent_of(engine, search), [EMMA, BORN])
    assert search.asked == [EMMA.text, BORN.text, "Emma is by Jane Austen."]
    assert [(tau.prediction, tau.stop, tau.served("search")) for tau in taus] == [
        ("Jane Austen", "answer", 2), ("Bath", "answer", 1)
    ]  # fmt: skip
    again = engine.shown[1][0]
    assert f"found by {EMMA.text}" in again and "found by Emma is by" in again
    assert again.endswith("Thought: Emma is by Jane Austen.")


def test_ircot_without_an_answer_gives_all_thoughts_after_its_steps():
    engine = Script(*[{0: f"Thought {k}."} for k in range(5)])
    [tau] = ircot(agent_of(engine, Echo()), [EMMA])
    assert tau.stop == "turns" and tau.prediction == "Thought 0. Thought 1. Thought 2. Thought 3. Thought 4"
    assert tau.served("search") == 5


class Echo(Found):
    """Finds a passage that names the query, and keeps the queries."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def submit(self, argument):
        self.asked.append(argument)
        self.documents = [f'"T"\nfound by {argument}']
        return super().submit(argument)


def test_search_o1_reads_documents_apart_and_never_searches_a_query_twice():
    ask = "<|begin_search_query|> {} <|end_search_query|>"
    engine = Script(
        {0: f"Let me see. {ask.format('Emma novel')}", 1: "\\boxed{Bath}"},
        {0: "Nothing else. Final Information: It is by Austen."},
        {0: ask.format("Emma novel")},
        {0: "So \\boxed{\\text{Jane Austen}}"},
    )
    search = Echo()
    taus = search_o1(agent_of(engine, search), [EMMA, BORN])
    assert search.asked == ["Emma novel"]
    assert [(tau.prediction, tau.served("search")) for tau in taus] == [("Jane Austen", 1), ("Bath", 0)]
    assert "found by Emma novel" in engine.shown[1][0] and "Let me see." in engine.shown[1][0]
    assert engine.shown[2][0].rstrip().endswith("<|begin_search_result|>It is by Austen.<|end_search_result|>")
    assert "Nothing else" not in engine.shown[2][0]
    assert "Searched before" in engine.shown[3][0]


@pytest.mark.parametrize("question, limit", [(EMMA, 5), (BORN, 10)])
def test_search_o1_has_5_searches_for_one_hop_and_10_for_more(question, limit):
    turns = []
    for k in range(limit + 1):
        turns += [{0: f"<|begin_search_query|>{k}<|end_search_query|>"}] + ([{0: "note"}] if k < limit else [])
    [tau] = search_o1(agent_of(Script(*turns), Echo(), max_prompt=10**6), [question])
    assert (tau.served("search"), tau.stop) == (limit, "turns")


def test_the_loop_plays_the_instruction_of_the_agent():
    engine = Script({0: "<search>Emma</search>"}, {0: "<answer>Jane Austen</answer>"})
    [tau] = search_r1(agent_of(engine, Found('"Emma"\nby Jane Austen')), [EMMA])
    assert engine.shown[0][0].startswith("Answer. <answer>") and tau.prediction == "Jane Austen"


def test_a_context_that_is_too_long_gets_no_turn():
    taus = rag(agent_of(Script({0: "x"}), Found(*['"T"\n' + "long " * 50] * 3), max_prompt=60), [EMMA])
    assert (taus[0].stop, taus[0].prediction) == ("length", None)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a \\boxed{x} b \\boxed{y}", "y"), ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("<answer> a </answer>.", "a"),
        ("So the answer is: Paris.", "Paris"), ("the Answer is: b", "b"), ("Paris.", "Paris"), ("", ""),
    ],
)  # fmt: skip
def test_where_an_answer_is_looked_for(text, answer):
    assert answer_of(text) == answer


# ---- training


def test_the_flags_of_the_methods_that_train(tmp_path):
    flags = ["--out", str(tmp_path / "run")]
    grpo_cfg, sft, reject = (config_of(name, flags) for name in ("grpo", "sft", "sft_reject"))
    assert (grpo_cfg.mode, grpo_cfg.tools) == ("static", "none") and sft.tools == "none" and reject.tools == "search"
    assert {sft.mode, reject.mode} == {"supervised"} and (sft.beta, sft.loss_agg, sft.mini) == (0, "token", sft.batch)
    assert config_of("search_r1", flags).mode == "static" and config_of("inspo", flags) == parse(flags)
    assert make_tools(grpo_cfg, Found()) == []
    assert (tmp_path / "run.instruction.txt").read_text().strip() == IN_WORLD.direct


class FakeWorker:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


class FakePolicy:
    def __init__(self, tokenizer):
        self.worker = FakeWorker(tokenizer)


def test_a_demonstration_s_gradient_is_that_of_the_cross_entropy_of_its_reply(world):
    model, tokenizer = world
    cfg = dataclasses.replace(Config(**PRESETS["world"]), beta=0.0, loss_agg="token", tools="none", mini=2)
    D = {
        "a": Question("a", "Name the base of it?", ("Trebak",), "s"),
        "b": Question("b", "What is the?", ("a b",), "s"),
    }
    taus = gold_answers(cfg, FakePolicy(tokenizer), D, IN_WORLD.direct)
    assert [tau.response for tau in taus] == [f"<think></think><answer>{g}</answer>" for g in ("Trebak", "a b")]
    learner = Learner(model, None, cfg)
    loss, _ = learner.loss(taus, learner.plan(taus))
    loss.backward()
    found = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    total, n = 0.0, 0
    for tau in taus:
        ids = torch.tensor([tau.ids])
        logits = model(input_ids=ids).logits[0, :-1].float()
        mask = torch.tensor(tau.mask[1:]).bool()
        total = total + F.cross_entropy(logits[mask], ids[0, 1:][mask], reduction="sum")
        n += int(mask.sum())
    (total / n).backward()
    wanted = model.model.layers[0].mlp.up_proj.weight.grad
    assert torch.allclose(found, wanted, atol=1e-6 * wanted.abs().max() + 1e-7)
    model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "grpo", "sft_reject"])
def test_a_method_that_trains_runs_to_its_end(method, tmp_path):
    """Under the fixture's instruction the first policy answers some questions, so that there is something to keep."""
    flags = ["--instruction", str(ROOT / "tests" / "fixture" / "instruction.txt")] if method == "sft_reject" else []
    flags += "--T 2 --batch 6 --mini 6 --G 4 --eval_n 3".split()
    command = [sys.executable, "baselines.py", method, *flags, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    end = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert end["steps"] == 2 and 0 <= end["em_best"] <= 1
    if method == "sft_reject":
        kept = [json.loads(line) for line in (tmp_path / "run" / "successes.jsonl").read_text().splitlines()]
        golds = {q.id: q.golds for q in load_questions(PRESETS["world"]["train"])}
        assert kept and all(em(row["said"], golds[row["q"]]) for row in kept)
