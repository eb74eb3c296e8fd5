"""The methods of Table 1, turn by turn, from a scripted engine and search; supervision against
cross-entropy."""

import copy
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_inspo import ENV, finish, popen

from config import PRESETS, WORLD, Config
from engines import FinishedTurn
from extras import table1
from extras.engines.chat import Words
from extras.prompts import IN_WORLD
from extras.supervised import Demonstrated, gold_answers
from extras.table1 import METHODS, answer_of, config_of
from plumbing.files import read_jsonl
from tasks import Question
from tasks.search_qa import Search, SearchQA, em, load_questions

ROOT = Path(__file__).parents[2]
EMMA = Question("q0", "Who wrote Emma?", ("Jane Austen",), "nq", 1)
BORN = Question("q1", "Where was the author of Emma born?", ("Steventon",), "hotpotqa", 2)


class Tokenizer(Words):
    """Words, with an EOS that is left out where special tokens are."""

    def decode(self, ids, skip_special_tokens=False):
        text = super().decode(ids)
        return text.replace(" <|im_end|>", "") if skip_special_tokens else text


class Script:
    """An engine whose k-th batch of rows says what the k-th table holds for each row; it keeps what
    it was shown."""

    max_rows, lockstep = 512, True

    def __init__(self, *tables):
        self.words, self.tables, self.shown = Tokenizer(), list(tables), []

    def reset(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        self.shown.append({row: self.words.decode(ids) for row, ids in contexts.items()})
        self.max_new = max_new
        table = self.tables.pop(0)
        for row in contexts:
            ids = self.words(table[row])["input_ids"]
            yield FinishedTurn(row, ids, [0.0] * len(ids))


class Found(Search):
    """A search that finds the same documents for every query, or one that names the query; it keeps
    the queries."""

    def __init__(self, *documents):
        self.documents, self.asked = documents, []

    def submit(self, argument):
        self.asked.append(argument)
        done = Future()
        done.set_result(list(self.documents) or [f'"T"\nfound by {argument}'])
        return done


def played(method, engine, questions, search=None, **limits):
    """Returns the trajectories of a method of the table, played by a scripted engine."""
    agent = agent_of(METHODS[method], **limits)
    agent.search = agent.task.search = search or Found()
    agent.task.tools = [agent.search] if agent.task.tools else []
    agent.engine, agent.tokenizer, agent.instruction = engine, engine.words, "Answer. <answer>"
    return agent.play(questions)


def agent_of(kind, **settings):
    """Returns an agent of search QA that has not started."""
    return kind("http://here", model=Config().model, **settings)


@pytest.mark.parametrize(
    "method, replies, stops, answers",
    [
        ("direct", ["<answer> Jane Austen </answer>", " Bath. <|im_end|>"], ["answer"] * 2, ["Jane Austen", "Bath"]),
        ("grpo", ["<search> x </search>", "So <answer>Bath</answer>"], ["turns", "answer"], [None, "Bath"]),
    ],
)  # fmt: skip
def test_methods_without_tools_have_one_turn_whatever_it_calls(method, replies, stops, answers):
    engine = Script(dict(enumerate(replies)))
    taus = played(method, engine, [EMMA, BORN], max_turns=4)
    assert [tau.stop for tau in taus] == stops and [tau.prediction for tau in taus] == answers
    assert [(len(tau.turns), tau.served("search")) for tau in taus] == [(1, 0)] * 2
    assert engine.max_new == (32 if method == "direct" else 500)


def test_rag_searches_once_with_the_question_and_reads_the_passages():
    search, engine = (
        Found('"Emma"\nA novel by Jane Austen.'),
        Script({0: "Jane Austen.", 1: "Steventon"}),
    )
    taus = played("rag", engine, [EMMA, BORN], search)
    assert [tau.prediction for tau in taus] == ["Jane Austen", "Steventon"]
    assert [tau.turns[0].argument for tau in taus] == [EMMA.text, BORN.text]
    assert all(
        "Doc 1(Title: Emma) A novel by Jane Austen." in shown for shown in engine.shown[0].values()
    )
    assert [tau.served("search") for tau in taus] == [1, 1]


def test_ircot_retrieves_with_every_sentence_keeps_the_passages_and_ends_at_the_answer():
    engine = Script(
        {0: "Emma is by Jane Austen.", 1: "So the answer is: Bath."},
        {0: "So the answer is: Jane Austen."},
    )
    search = Found()
    taus = played("ircot", engine, [EMMA, BORN], search)
    assert search.asked == [EMMA.text, BORN.text, "Emma is by Jane Austen."]
    assert [(tau.prediction, tau.stop, tau.served("search")) for tau in taus] == [
        ("Jane Austen", "answer", 2),
        ("Bath", "answer", 1),
    ]
    again = engine.shown[1][0]
    assert f"found by {EMMA.text}" in again and "found by Emma is by" in again
    assert again.endswith("Thought: Emma is by Jane Austen.")
    # without an answer
    [tau] = played("ircot", Script(*[{0: f"Thought {k}."} for k in range(5)]), [EMMA])
    assert (tau.stop, tau.served("search")) == ("turns", 5)
    assert tau.prediction == "Thought 0. Thought 1. Thought 2. Thought 3. Thought 4"


def test_search_o1_reads_documents_apart_and_never_searches_a_query_twice():
    ask = "<|begin_search_query|> {} <|end_search_query|>"
    engine = Script(
        {0: f"Let me see. {ask.format('Emma novel')}", 1: "\\boxed{Bath}"},
        {0: "Nothing else. Final Information: It is by Austen."},
        {0: ask.format("Emma novel")},
        {0: "So \\boxed{\\text{Jane Austen}}"},
    )
    search = Found()
    taus = played("search_o1", engine, [EMMA, BORN], search)
    assert search.asked == ["Emma novel"]
    assert [(tau.prediction, tau.served("search")) for tau in taus] == [
        ("Jane Austen", 1),
        ("Bath", 0),
    ]
    assert "found by Emma novel" in engine.shown[1][0] and "Let me see." in engine.shown[1][0]
    assert (
        engine.shown[2][0]
        .rstrip()
        .endswith("<|begin_search_result|>It is by Austen.<|end_search_result|>")
    )
    assert "Nothing else" not in engine.shown[2][0]
    assert "Searched before" in engine.shown[3][0]


def test_the_loop_plays_the_instruction_of_the_agent_and_a_context_that_is_too_long_gets_no_turn():
    engine = Script({0: "<search>Emma</search>"}, {0: "<answer>Jane Austen</answer>"})
    [tau] = played("sft_reject", engine, [EMMA], Found('"Emma"\nby Jane Austen'))
    assert engine.shown[0][0].startswith("Answer. <answer>") and tau.prediction == "Jane Austen"
    [tau] = played(
        "rag", Script({0: "x"}), [EMMA], Found(*['"T"\n' + "long " * 50] * 3), max_prompt=60
    )
    assert (tau.stop, tau.prediction) == ("length", None)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a \\boxed{x} b \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("<answer> a </answer>.", "a"),
        ("the Answer is: b", "b"), ("Paris.", "Paris"), ("", ""),
    ],
)  # fmt: skip
def test_where_an_answer_is_looked_for(text, answer):
    assert answer_of(text) == answer


def test_a_method_is_measured_by_evaluate_and_plays_search_qa_alone(tmp_path, capsys, retriever):
    flags = ["world", "--n", "4", "--retriever", retriever, "--method"]
    table1.main([*flags, "rag", "--out", str(tmp_path / "rag")])
    golds = {q.id: q.golds for q in load_questions(WORLD / "test.jsonl")}
    rows = read_jsonl(tmp_path / "rag" / "results.jsonl")
    assert [row["em"] for row in rows] == [em(row["prediction"], golds[row["id"]]) for row in rows]
    assert [row["searches"] for row in rows] == [1] * 4
    capsys.readouterr()
    table1.main([*flags, "direct", "--out", str(tmp_path / "direct")])
    assert "gold_recall 0.000" in capsys.readouterr().out
    game = "rag", "--task", "extras.tasks.guess:Guess", "--out", str(tmp_path / "o")
    with pytest.raises(SystemExit, match="--method RAG: it plays only search QA"):
        table1.main(["world", "--method", *game])


# ---- training


def test_a_demonstration_s_gradient_is_that_of_the_cross_entropy_of_its_reply(world, tmp_path):
    model, tokenizer = world
    cfg = config_of("sft", ["--out", str(tmp_path / "run")])
    D = [
        Question("a", "Name the base of it?", ("Trebak",), "s"),
        Question("b", "What is the?", ("a b",), "s"),
    ]
    task = SearchQA(cfg)
    task.instruction = IN_WORLD.direct
    taus = gold_answers(task, SimpleNamespace(tokenizer=tokenizer), D)
    assert [tau.response for tau in taus] == [
        f"<think></think><answer>{g}</answer>" for g in ("Trebak", "a b")
    ]
    learner = Demonstrated(model, None, cfg)
    loss, _ = learner.loss(taus, slice(None), learner.make_loss_inputs(taus, None))
    (found,) = torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)
    wide, losses = copy.deepcopy(model).double(), []
    for tau in taus:
        ids, mask = torch.tensor(tau.ids), torch.tensor(tau.mask[1:]).bool()
        logits = wide(input_ids=ids[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits[mask], ids[1:][mask], reduction="none"))
    W = wide.model.layers[0].mlp.up_proj.weight
    (wanted,) = torch.autograd.grad(torch.cat(losses).mean(), W)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5 * wanted.abs().max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "grpo", "sft_reject"])
def test_a_method_that_trains_runs_to_its_end(method, tmp_path):
    """Under the fixture's instruction the first policy answers some questions, so that there is
    something to keep."""
    flags = "--T 2 --batch 6 --G 4 --eval_n 3 --save_every 1".split()
    if method == "sft_reject":
        flags += ["--instruction", str(ROOT / "tests" / "fixture" / "instruction.txt")]
    flags += ["--out"]
    command = [sys.executable, "extras/table1.py", "train", method, *flags]
    code, _, stderr = finish(popen([*command, str(tmp_path / "run")], ENV), 900)
    assert code == 0, stderr
    end = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert end["steps"] == 2 and 0 <= end["end"]["em"] <= 1
    if method == "sft_reject":
        kept = read_jsonl(tmp_path / "run" / "successes.jsonl")
        golds = {q.id: q.golds for q in load_questions(PRESETS["world"]["train"])}
        assert kept and all(em(row["said"], golds[row["q"]]) for row in kept)
