"""extras/examples/ and its launcher: each fork is short, is named on docs/forks.md, and does what is said."""

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import inspo
from config import HERE, WORLD, parse
from extras import fork
from extras.examples.cispo import CISPO
from extras.examples.dapo import DAPO
from extras.examples.margin import Margin
from extras.examples.ucb import UCB
from models.model import load_tokenizer
from plumbing.faults import Fault, OptimizerDown
from plumbing.files import read_jsonl
from rollout import encode_prompt, rollout
from tasks import Job, Question, Trajectory, load_task
from tasks.formats import encode
from tasks.questions import em, f1, load_questions
from tasks.tools import explain_invalid_action, list_stop_strings

FILES = HERE / "extras" / "examples"
PAGE = (HERE / "docs" / "forks.md").read_text()
[COMMAND] = re.findall(r"^```sh\npython inspo.py (.*?)\n```$", PAGE, re.M | re.S)
SMALL = "--T 2 --K_p 1 --K_e 1 --T_e 2 --D_B 2 --rounds 1 --save_every 3 --lr 1e-6 --G 2"


def test_every_fork_is_at_most_twenty_lines_and_has_its_command_on_the_page():
    for path in FILES.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 20 and lines[2].startswith("python ")
        command, name = shlex.split(lines[2].replace(" NAME", " any")), f"`{path.stem}.py`"
        assert name in PAGE, f"docs/forks.md does not name {path.name}"
        if command[1] == "inspo.py":
            load_task(parse(command[2:]))
        else:
            assert fork.load_parts(parse(command[2:], fork.ForkConfig))


# ---- an objective, a surrogate, a pruning rule, a selection rule


def test_dapo_weighs_every_token_alike_and_clips_higher():
    part = [SimpleNamespace(mask=[0, 1, 1, 1], advantage=2.0), SimpleNamespace(mask=[1], advantage=-1.0)]
    dapo = DAPO.__new__(DAPO)
    dapo.cfg = SimpleNamespace(eps=0.2)
    x = dapo.terms(part, None)
    assert [[*x["adv"]], [*x["w"]], x["eps_low"], x["eps_high"]] == [[2, 2, 2, -1], [0.25] * 4, 0.2, 0.28]


def test_cispo_is_a_surrogate():
    logp, adv = torch.tensor([[-2.0, -3.0], [1.0, -1.0]])
    S = CISPO.surrogate(None, logp=logp, rho=torch.tensor([1.5, 1.1]), adv=adv, w=adv)
    assert S.tolist() == pytest.approx([-2.56, 3.3])


def test_the_margin_keeps_those_near_the_best():
    P = Margin(0.2, 5)
    for k, w in enumerate([0.1, 0.5, 0.45, 0.3, 0.41, 0.0, 0.39]):
        P.join(f"I{k}", None, 0).rewards = [w]
    assert P.prune(P.ranked(), 5, 1) and sorted(P.ids) == [1, 2, 3, 4, 6]
    assert P.prune(P.ranked(), 1, 2) and P.ids == [1, 2, 4] and P.prune(P.ranked(), 1, 3) == []


def test_ucb_prefers_the_untried_then_the_highest_bound():
    def p(tau_s, *rewards):
        P = UCB(tau_s, 5)
        for r in rewards:
            P.join("I", None, 0).rewards = r
        return P.probabilities().tolist()

    tried = [0.5] * 5, [0.45], [0.1]
    assert p(0.2, [], [], []) == pytest.approx([1 / 3] * 3) and p(0.2, [0.9], [], []) == [0, 0.5, 0.5]
    assert p(0.2, *tried) == [0, 1, 0]  # the second was drawn less often: its bonus is larger
    assert p(0.01, *tried) == [1, 0, 0]


# ---- the launcher


def test_parts_of_one_kind_become_one_class():
    names = "extras.examples.margin:Margin,extras.examples.ucb:UCB,extras.examples.opo:OPO"
    parts = fork.load_parts(parse(["--parts", names], fork.ForkConfig))
    P = parts["population"](SimpleNamespace(tau_s=0.5, window=7))
    assert isinstance(P, Margin) and isinstance(P, UCB) and (P.tau_s, P.window) == (0.5, 7)
    assert set(parts) == {"population", "learner"}


@pytest.mark.parametrize(
    "parts, says",
    [("tasks.search_qa:SearchQA", "extends neither"), ("no_such:X", "cannot be imported"), ("x", "module:name")],
)
def test_a_part_that_is_none_is_one_line(parts, says):
    with pytest.raises(SystemExit, match=f"^--parts {parts}: .*{says}"):
        fork.main(["--parts", parts])


# ---- one run of the world: its rewards, advantages, probabilities and calls; one of the page's own questions


@pytest.fixture(scope="module")
def base_path(tiny_path, tmp_path_factory):
    """The tiny policy as a base model, whose chat template is the text itself, as the page says."""
    path = shutil.copytree(tiny_path, tmp_path_factory.mktemp("models") / "base")
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return str(path)


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "world"
    parts = ",".join(f"extras.examples.{x}" for x in ("margin:Margin", "opo:OPO", "ucb:UCB", "reminded:Reminded"))
    flags = f"{SMALL} --batch 8 --mini 8 --eval_n 12 --tau_s 0.05 --seed 6 --task extras.examples.f1:F1 --parts {parts}"
    fork.main(["--out", str(out), *shlex.split(flags)])
    return out


@pytest.fixture(scope="module")
def own(base_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "own"
    flags = shlex.split(COMMAND.replace("\\\n", " ")) + ["--model", base_path, "--out", str(out)]
    inspo.main(flags + shlex.split(f"{SMALL} --batch 2 --mini 2 --max_response 12 --max_prompt 2000"))
    return out


def metrics(path: Path) -> list[dict]:
    return read_jsonl(path / "metrics.jsonl")


def trajectories(path: Path, t: int) -> list[dict]:
    with gzip.open(path / "trajectories" / f"step-{t:06d}.jsonl.gz", "rt") as f:
        return [json.loads(line) for line in f]


@pytest.mark.slow
def test_f1_is_the_reward_and_em_stays_exact_match(forked):
    start, *steps = metrics(forked)
    for row in steps:
        taus = trajectories(forked, row["t"])
        assert [tau["reward"] for tau in taus] == [f1(tau["prediction"], tau["golds"]) for tau in taus]
        assert row["reward"] == row["f1"] == pytest.approx(sum(tau["reward"] for tau in taus) / len(taus))
        assert row["em"] == sum(em(tau["prediction"], tau["golds"]) for tau in taus) / len(taus)
    assert any(row["reward"] > row["em"] for row in steps)
    assert start["test/em"] < start["test/f1"] and start["test/em"] * 12 % 1 == 0  # of 12 questions: not a mean of F1
    scores = json.loads((forked / "summary.json").read_text())["held_out"].values()
    assert all(score["em"] * 12 % 1 == 0 for score in scores)


@pytest.mark.slow
def test_opo_weighs_the_baseline_by_length(forked):
    groups: dict[tuple, list] = {}
    for t in (1, 2):
        for tau in trajectories(forked, t):
            groups.setdefault((t, tau["group"]), []).append(tau)
    for group in groups.values():
        r, n = zip(*((tau["reward"], tau["action_tokens"]) for tau in group), strict=True)
        baseline = sum(a * b for a, b in zip(r, n, strict=True)) / sum(n)
        assert [tau["advantage"] for tau in group] == pytest.approx([x - baseline for x in r])
    assert any(tau["advantage"] for group in groups.values() for tau in group)


@pytest.mark.slow
def test_all_questions_go_to_the_highest_bound(forked):
    for row in metrics(forked)[1:]:
        p = [x for x in row["p"].values() if x]
        assert p == pytest.approx([1 / len(p)] * len(p), abs=1e-4)


@pytest.mark.slow
def test_the_margin_prunes_and_the_optimizer_reads_what_was_dropped(forked):
    calls = [(row["t"], row["call"]["prompt"]) for row in read_jsonl(forked / "reflections.jsonl") if "call" in row]
    (t_0, _), (t_1, prompt) = calls
    assert (t_0, t_1) == (0, 1) and "<example>" in prompt
    started, pruned, *_ = read_jsonl(forked / "population.jsonl")
    stayed = {I["id"] for I in pruned["P"]}
    r_bar = metrics(forked)[1]["r_bar"]
    w = {I["id"]: r_bar.get(str(I["id"]), 0.0) for I in started["P"]}
    assert stayed == {j for j in w if w[j] >= max(w.values()) - 0.1}
    want = [
        f"Dropped, reward {w[I['id']]:.2f}: {I['text']}"
        for I in started["P"]
        if str(I["id"]) in r_bar and I["id"] not in stayed
    ]
    assert want and prompt.split("</ins_6> tags.\n\n")[1] == "\n\n".join(want)


@pytest.mark.slow
def test_a_fork_resumes_with_its_own_parts_alone(forked):
    with pytest.raises(SystemExit):  # argparse's, after the line
        parse(["--out", str(forked), "--resume"])
    with pytest.raises(SystemExit, match="was started with --parts .*, not extras.examples.ucb:UCB"):
        fork.main(["--out", str(forked), "--resume", "--parts", "extras.examples.ucb:UCB"])


@pytest.mark.parametrize(
    "name, shown",
    [
        ("paraphrase", "I search once. </ins_0>(.|\n)*Improve the above prompt."),
        ("history", r"<ins_0> I search once. </ins_0>\n<score_0> 25 </score_0>"),
    ],
)
def test_the_papers_other_proposers_are_flags(name, shown):
    """One evolution without a policy: what the optimizer reads."""
    prompts = []

    def ask(prompt, when):
        prompts.append(prompt)
        raise OptimizerDown("enough")

    cfg = parse(["--proposer", name])
    log = SimpleNamespace(evolved=lambda *_: None)
    evolution = inspo.Evolution(cfg, load_task(cfg), SimpleNamespace(ask=ask), inspo.population_of(cfg), log)
    evolution.P.join("I search once.", None, 0).rewards = [0.25]
    evolution.D = {k: Question(k, f"Who is {k}?", ("x",), "s") for k in "abcdefgh"}
    taus = [Trajectory(0, q, 0, [], 0, response="<answer> y </answer>", failed=True) for q in evolution.D.values()]
    evolution.B.add(1, taus, evolution.task.shown)
    evolution.evolve(1, None)
    [prompt] = prompts
    assert re.search(shown, prompt) and "Who is" not in prompt


# ---- a tool, questions, a base model


class Script:
    """An engine that plays the turns of one row."""

    max_rows, lockstep, unproven = 512, True, 0

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns = tokenizer, iter(turns)

    def begin(self, seed):
        pass

    def generate(self, contexts, max_new, temperature):
        for row in contexts:
            ids = encode(self.tokenizer, next(self.turns))
            yield row, ids, [0.0] * len(ids)


def test_a_new_tool_is_played(base_path):
    cfg = parse(["--tools", "search,extras.examples.count:count"])
    task = load_task(cfg)
    tokenizer = load_tokenizer(base_path, list_stop_strings(task.tools))
    question = Question("q", "How many words?", ("3",), "s")
    prompt = tokenizer.decode(encode_prompt(tokenizer, task, "Count.", question))
    before, after = prompt.split("Tools, whose results come between <result> and </result>:\n")
    assert before == "Count.\n\n" and after == (
        "<count> text </count>: Counts the words of a text.\n  text: The words\n\nQuestion: How many words?\n"
    )
    assert list_stop_strings(task.tools) == ("</search>", "</count>", "</answer>")
    invalid = explain_invalid_action(task.tools)
    assert "That was neither a search nor a call of count nor an answer." in invalid
    turns = call, thought, answer = "Let me see. <count> one two three </count>", "Three?", "<answer> 3 </answer>"
    jobs = [Job(0, "Count.", question, 0)]
    [tau] = rollout(Script(tokenizer, *turns), tokenizer, task, jobs, cfg, temperature=0, seed=0)
    assert tau.response == f"{call}\n\n<result>3</result>\n\n{thought}{invalid}{answer}"
    sampled = [i for i, m in zip(tau.ids, tau.mask, strict=True) if m]
    assert tokenizer.decode(sampled) == call + thought + answer  # neither the result nor the message is trained on
    assert (tau.served("count"), tau.prediction) == (1, "3")
    with pytest.raises(Fault, match="cannot write </count>"):
        load_tokenizer(str(WORLD / "policy"), list_stop_strings(task.tools))


@pytest.mark.slow
def test_the_run_counts_the_new_tools_calls(own):
    first, *_ = metrics(own)
    assert {"test/searches", "test/count_calls"} <= set(first)


@pytest.mark.slow
def test_a_base_model_reads_plain_text_and_is_exported_with_its_template(own):
    tokenizer = load_tokenizer(str(own / "policy"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False) == "Who?"


def test_a_base_model_without_a_template_is_refused(base_path, tmp_path):
    path = shutil.copytree(base_path, tmp_path / "base")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(Fault, match="no chat template"):
        load_tokenizer(str(path))


@pytest.mark.slow
def test_your_own_questions_are_read_as_they_stand_in_the_file(own):
    vienna, trial = load_questions(FILES / "questions.jsonl")
    assert vienna.text == "Which river flows through Vienna?" and vienna.golds == ("Danube", "the Danube")
    asked = {tau["question"] for t in (1, 2) for tau in trajectories(own, t)}
    assert asked == {vienna.id, trial.id}
    assert f"test/em/{vienna.source}" in metrics(own)[0]
