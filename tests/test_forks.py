"""The files of docs/forks.md and docs/objectives.md: each is short, and does what is said."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.model import load_tokenizer
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from tasks.questions import em, f1, load_questions

ROOT = Path(__file__).parent.parent
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("forks.md", "objectives.md"))
FILES = dict(re.findall(r"^```(?:jsonl|python) (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
[COMMAND] = re.findall(r"^```sh\npython inspo.py (.*?)\n```$", PAGE, re.M | re.S)
SCRIPTS = Path(__file__).parent / "forks"  # run in the copies
ENV = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"OMP_NUM_THREADS": "1"}
SMALL = "--T 2 --K_p 1 --K_e 1 --T_e 2 --D_B 2 --rounds 1 --save_every 3 --lr 1e-6 --G 2"


def forked(path: Path) -> Path:
    """Returns a copy of the project at `path`, with the page's files."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.split():
        if Path(name).parts[0] not in ("tests", "labs", "extras"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
    (path / "page" / "static").symlink_to(ROOT / "page" / "static")
    (path / "world" / "files").symlink_to(ROOT / "world" / "files")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def start(fork: Path, *argv: object) -> subprocess.Popen:
    env = ENV | {"PYTHONPATH": str(fork)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=fork, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def value(fork: Path, expression: str, code: str) -> object:
    """Returns the value of an expression in a copy of the project, where scripts of the page train nothing."""
    still = "import inspo, json\ninspo.train = lambda *args, **kwargs: None\n"
    return json.loads(finish(start(fork, "-c", f"{still}{code}\nprint(json.dumps({expression}))")))


# ---- the page


def test_a_fork_is_at_most_ten_lines_and_a_game_some_twenty():
    lines = {name: sum(bool(line.strip()) for line in text.splitlines()) for name, text in FILES.items()}
    scripts = {name: n for name, n in lines.items() if name.endswith(".py")}
    assert len(scripts) == 9 and scripts.pop("my_game.py") <= 20 and max(scripts.values()) <= 10


# ---- an objective, a pruning rule, a selection rule

TERMS = """
from types import SimpleNamespace as S
from my_objective import DAPO
part = [S(mask=[0, 1, 1, 1], advantage=2.0), S(mask=[1], advantage=-1.0)]
dapo = DAPO.__new__(DAPO)
dapo.cfg = S(eps=0.2)
x = dapo.terms(part, None)
"""


def test_dapo_weighs_every_token_alike_and_clips_higher(tmp_path):
    found = value(forked(tmp_path / "fork"), "[[*x['adv']], [*x['w']], x['eps_low'], x['eps_high']]", TERMS)
    assert found == [[2, 2, 2, -1], [0.25] * 4, 0.2, 0.28]


def test_another_surrogate_is_a_method_of_a_learner(tmp_path):
    surrogate = "CISPO.surrogate(None, logp=logp, rho=torch.tensor([1.5, 1.1]), adv=adv, w=adv).tolist()"
    setup = "import torch\nfrom my_surrogate import CISPO\nlogp, adv = torch.tensor([[-2.0, -3.0], [1.0, -1.0]])"
    assert value(forked(tmp_path / "fork"), surrogate, setup) == pytest.approx([-2.56, 3.3])


POPULATION = """
from my_pruning import Margin
P = Margin(0.2, 5)
for k, w in enumerate([0.1, 0.5, 0.45, 0.3, 0.41, 0.0, 0.39]):
    P.join(f"I{k}", None, 0).rewards = [w]
"""


def test_the_margin_keeps_those_near_the_best(tmp_path):
    left = (
        "[P.prune(P.ranked(), 5, 1) and sorted(P.ids), P.prune(P.ranked(), 1, 2) and P.ids, P.prune(P.ranked(), 1, 3)]"
    )
    assert value(forked(tmp_path / "fork"), left, POPULATION) == [[1, 2, 3, 4, 6], [1, 2, 4], []]


UCB = """
from my_selection import UCB
def p(tau_s, *rewards):
    P = UCB(tau_s, 5)
    for r in rewards:
        P.join("I", None, 0).rewards = r
    return P.probabilities().tolist()
tried = [0.5] * 5, [0.45], [0.1]
"""


def test_ucb_prefers_the_untried_then_the_highest_bound(tmp_path):
    cases = "[p(0.2, [], [], []), p(0.2, [0.9], [], []), p(0.2, *tried), p(0.01, *tried)]"
    start, untried, wide, narrow = value(forked(tmp_path / "fork"), cases, UCB)
    assert start == pytest.approx([1 / 3] * 3) and untried == [0, 0.5, 0.5]
    assert wide == [0, 1, 0] and narrow == [1, 0, 0]  # the second was drawn less often: its bonus is larger


# ---- one run of the world: its rewards, advantages, survivors, probabilities and calls


@pytest.fixture(scope="module")
def base_path(tiny_path, tmp_path_factory):
    """The tiny policy as a base model, whose chat template is the text itself, as the page says."""
    path = shutil.copytree(tiny_path, tmp_path_factory.mktemp("models") / "base")
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return str(path)


@pytest.fixture(scope="module")
def runs(base_path, tmp_path_factory):
    """(run of the world with forks of the algorithm, run of the page's own questions with its tool)."""
    path = tmp_path_factory.mktemp("runs")
    fork = forked(path / "fork")
    flags = shlex.split(f"{SMALL} --batch 8 --mini 8 --eval_n 12 --task my_reward:F1")
    world = start(fork, SCRIPTS / "together.py", "--out", path / "world", *flags)

    flags = shlex.split(COMMAND.replace("\\\n", " "))
    flags += ["--model", base_path, "--tools", "search,my_tool:count"]
    flags += shlex.split(f"{SMALL} --batch 2 --mini 2 --max_response 12 --max_prompt 2000")
    own = start(fork, SCRIPTS / "play.py", base_path, path / "play.json", "--out", path / "own", *flags)
    finish(world), finish(own)
    return path / "world", path / "own"


def metrics(path: Path) -> list[dict]:
    return read_jsonl(path / "metrics.jsonl")


def trajectories(path: Path, t: int) -> list[dict]:
    with gzip.open(path / "trajectories" / f"step-{t:06d}.jsonl.gz", "rt") as f:
        return [json.loads(line) for line in f]


@pytest.mark.slow
def test_f1_is_the_reward_and_em_stays_exact_match(runs):
    start, *steps = metrics(runs[0])
    for row in steps:
        taus = trajectories(runs[0], row["t"])
        assert [tau["reward"] for tau in taus] == [f1(tau["prediction"], tau["golds"]) for tau in taus]
        assert row["reward"] == row["f1"] == pytest.approx(sum(tau["reward"] for tau in taus) / len(taus))
        assert row["em"] == sum(em(tau["prediction"], tau["golds"]) for tau in taus) / len(taus)
    assert any(row["reward"] > row["em"] for row in steps)
    assert start["test/em"] < start["test/f1"] and start["test/em"] * 12 % 1 == 0  # of 12 questions: not a mean of F1
    scores = json.loads((runs[0] / "summary.json").read_text())["held_out"].values()
    assert all(score["em"] * 12 % 1 == 0 for score in scores)


@pytest.mark.slow
def test_opo_weighs_the_baseline_by_length(runs, tmp_path):
    groups: dict[tuple, list] = {}
    for t in (1, 2):
        for tau in trajectories(runs[0], t):
            groups.setdefault((t, tau["group"]), []).append(tau)
    for group in groups.values():
        baseline = sum(tau["action_tokens"] * tau["reward"] for tau in group) / sum(
            tau["action_tokens"] for tau in group
        )
        assert [tau["advantage"] for tau in group] == pytest.approx([tau["reward"] - baseline for tau in group])
    assert any(tau["advantage"] for group in groups.values() for tau in group)


@pytest.mark.slow
def test_all_questions_go_to_the_highest_bound(runs):
    for row in metrics(runs[0])[1:]:
        p = [x for x in row["p"].values() if x]
        assert p == pytest.approx([1 / len(p)] * len(p), abs=1e-4)


def calls(path: Path) -> list[tuple[int, str]]:
    return [(row["t"], row["call"]["prompt"]) for row in read_jsonl(path / "reflections.jsonl") if "call" in row]


@pytest.mark.slow
def test_the_optimizer_reads_what_was_dropped(runs):
    (t_0, _), (t_1, prompt) = calls(runs[0])
    assert (t_0, t_1) == (0, 1) and "<example>" in prompt
    started, pruned, *_ = read_jsonl(runs[0] / "population.jsonl")
    stayed = {I["id"] for I in pruned["P"]}
    r_bar = metrics(runs[0])[1]["r_bar"]
    want = [
        f"Dropped, reward {r_bar[str(I['id'])]:.2f}: {I['text']}"
        for I in started["P"]
        if str(I["id"]) in r_bar and I["id"] not in stayed
    ]
    assert want and prompt.split("</ins_6> tags.\n\n")[1] == "\n\n".join(want)


def test_the_papers_other_proposers_are_flags(tmp_path):
    """One evolution without a policy: what the optimizer reads."""
    fork = forked(tmp_path / "fork")
    paraphrase, history = (
        json.loads(finish(start(fork, SCRIPTS / "evolve.py", "--proposer", name))) for name in ("paraphrase", "history")
    )
    assert "Improve the above prompt." in paraphrase and "I search once." in paraphrase and "Who is" not in paraphrase
    assert re.search(r"<ins_0> I search once. </ins_0>\n<score_0> 25 </score_0>", history) and "Who is" not in history


# ---- tool, game, questions


@pytest.mark.slow
def test_a_new_tool_and_a_game_are_played(runs):
    got = json.loads((runs[1].parent / "play.json").read_text())
    before, after = got["prompt"].split("Tools, whose results come between <result> and </result>:\n")
    assert before == "Count.\n\n" and after == (
        "<count> text </count>: Counts the words of a text.\n  text: The words\n\nQuestion: How many words?\n"
    )
    assert got["stop"] == ["</search>", "</count>", "</answer>"]
    invalid = "That was neither a search nor a call of count nor an answer."
    assert invalid in got["invalid"] and "<count> text </count>" in got["invalid"]
    call, thought, answer = "Let me see. <count> one two three </count>", "Three?", "<answer> 3 </answer>"
    assert got["response"] == f"{call}\n\n<result>3</result>\n\n{thought}{got['invalid']}{answer}"
    assert got["sampled"] == call + thought + answer  # neither the result nor the message is trained on
    assert (got["counts"], got["prediction"]) == (1, "3")
    assert "cannot write </count>" in got["world"] and "\n" not in got["world"]

    assert got["guesses"] == [[["higher"], ["right"]], [["lower"], ["not a move (ValueError)"], None], [None]]
    assert got["ends"] == ["over", "answer", "answer"] and got["rewards"] == [1.0, 0.8, 0.0]


@pytest.mark.slow
def test_the_run_counts_the_new_tools_calls(runs):
    first, *_ = metrics(runs[1])
    assert {"test/searches", "test/count_calls"} <= set(first)


@pytest.mark.slow
def test_a_base_model_reads_plain_text_and_is_exported_with_its_template(runs):
    tokenizer = load_tokenizer(str(runs[1] / "policy"))
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False)
    assert asked == "Who?"


@pytest.mark.slow
def test_a_base_model_without_a_template_is_refused(base_path, tmp_path):
    path = shutil.copytree(base_path, tmp_path / "base")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(Fault, match="no chat template"):
        load_tokenizer(str(path))


@pytest.mark.slow
def test_your_own_questions_are_read_as_they_stand_on_the_page(runs, tmp_path):
    (tmp_path / "questions.jsonl").write_text(FILES["questions.jsonl"])
    vienna, trial = load_questions(tmp_path / "questions.jsonl")
    assert vienna.text == "Which river flows through Vienna?" and vienna.golds == ("Danube", "the Danube")
    asked = {tau["question"] for t in (1, 2) for tau in trajectories(runs[1], t)}
    assert asked == {vienna.id, trial.id}
    assert f"test/em/{vienna.source}" in metrics(runs[1])[0]
