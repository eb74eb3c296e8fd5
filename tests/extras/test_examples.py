"""extras/examples/ and its launcher: each fork is short, is named on docs/forks.md, and does what
is said."""

import gzip
import json
import re
import shlex
import shutil

import pytest

import inspo
from config import HERE, Config, parse_flags
from extras import fork
from extras.examples.f1 import F1
from extras.examples.margin import Margin
from extras.examples.opo import OPO
from extras.examples.ucb import UCB
from plumbing.faults import Fault
from plumbing.files import read_jsonl
from population import Population
from tasks import Question, Trajectory
from tasks.search_qa import load_questions
from tasks.task import load_task
from training.policy import choose_for_machine

FILES = HERE / "extras" / "examples"
PAGE = (HERE / "docs" / "forks.md").read_text()
[COMMAND] = re.findall(r"^```sh\npython inspo.py (.*?)\n```$", PAGE, re.M | re.S)
SMALL = "--T 2 --K_p 1 --K_e 1 --T_e 2 --D_B 2 --rounds 1 --save_every 3 --lr 1e-6 --G 2"


def test_every_fork_is_short_and_its_command_loads():
    for path in FILES.glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 20 and f"`{path.stem}.py`" in PAGE, (
            f"docs/forks.md does not name {path.name}"
        )
        command = next(line for line in lines if line.strip().startswith("python "))
        _, program, *flags = shlex.split(command.replace(" NAME", " any"))
        if program == "inspo.py":
            load_task(parse_flags(flags))
        else:
            assert fork.load_parts(parse_flags(flags, fork.ForkConfig))


# ---- an objective, a surrogate, a pruning rule, a selection rule


def test_the_margin_keeps_those_near_the_best():
    P = Margin(Config())
    for k, w in enumerate([0.1, 0.5, 0.45, 0.3, 0.41, 0.0, 0.39]):
        P.join(f"I{k}", None, 0).rewards = [w]
    assert P.prune(P.ranked(), 5, 1) and sorted(P.ids) == [1, 2, 3, 4, 6]
    assert P.prune(P.ranked(), 1, 2) and P.ids == [1, 2, 4] and P.prune(P.ranked(), 1, 3) == []


@pytest.mark.parametrize(
    "tau_s, rewards, p",
    [
        (0.2, [[0.9], [], []], [0, 0.5, 0.5]),
        # the second was drawn less often: its bonus is larger
        (0.2, [[0.5] * 5, [0.45], [0.1]], [0, 1, 0]),
        (0.01, [[0.5] * 5, [0.45], [0.1]], [1, 0, 0]),
    ],
)  # fmt: skip
def test_ucb_prefers_the_untried_then_the_highest_bound(tau_s, rewards, p):
    P = UCB(Config(tau_s=tau_s))
    for some in rewards:
        P.join("I", None, 0).rewards = some
    assert P.probabilities().tolist() == pytest.approx(p)


def test_f1_is_the_reward_and_opo_weighs_the_baseline_by_length():
    # three of a group, of 1, 2 and 3 tokens, and one of another
    said = ["red", "red fish", "blue", "red"]
    question = Question("q", "Who?", ("red fish",))
    taus = [
        Trajectory(0, question, k // 3, [], 0, [0] + [1] * (k + 1), prediction=x)
        for k, x in enumerate(said)
    ]
    rewards = F1.reward(None, taus)
    assert rewards == pytest.approx([2 / 3, 1, 0, 2 / 3])
    for tau, r in zip(taus, rewards, strict=True):
        tau.reward = r
    OPO.set_advantages(None, taus)
    baseline = (2 / 3 * 1 + 1 * 2 + 0 * 3) / 6
    assert [tau.advantage for tau in taus] == pytest.approx(
        [2 / 3 - baseline, 1 - baseline, -baseline, 0]
    )


# ---- the launcher


def test_parts_of_one_kind_become_one_class():
    names = "extras.examples.margin:Margin,extras.examples.ucb:UCB,extras.examples.opo:OPO"
    parts = fork.load_parts(parse_flags(["--parts", names], fork.ForkConfig))
    P = parts["population"](Config(tau_s=0.5, window=7))
    assert isinstance(P, Margin) and isinstance(P, UCB) and (P.cfg.tau_s, P.cfg.window) == (0.5, 7)
    assert set(parts) == {"population", "learner"}


def test_a_part_that_is_none_is_one_line():
    with pytest.raises(SystemExit, match="^--parts tasks.search_qa:SearchQA: .*extends neither"):
        fork.main(["--parts", "tasks.search_qa:SearchQA"])


class Misspelt(Population):
    def probabilitys(self):
        raise AssertionError


def test_a_part_that_overrides_nothing_is_refused_beside_one_that_does():
    with pytest.raises(
        SystemExit, match="^Misspelt overrides no method of Population; the nearest is probabili"
    ):
        fork.main(["--parts", "extras.examples.ucb:UCB,test_examples:Misspelt"])


@pytest.mark.slow
def test_a_run_of_the_world_with_four_parts_is_theirs(tmp_path):
    parts = ",".join(
        f"extras.examples.{x}" for x in ("margin:Margin", "opo:OPO", "ucb:UCB", "reminded:Reminded")
    )
    flags = f"{SMALL} --batch 8 --eval_n 12 --tau_s 0.05 --seed 6 --task extras.examples.f1:F1 --parts {parts}"
    fork.main(["--out", str(tmp_path / "run"), *shlex.split(flags)])
    _, *steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any(row["reward"] == row["f1"] > row["em"] for row in steps)
    started, pruned, *_ = read_jsonl(tmp_path / "run" / "population.jsonl")
    # after one step w is r_bar
    r_bar = {id: steps[0]["w"][id] for id in steps[0]["n"]}
    stayed = {I["id"] for I in pruned["P"]}
    dropped = [I for I in started["P"] if str(I["id"]) in r_bar and I["id"] not in stayed]
    rows = read_jsonl(tmp_path / "run" / "reflections.jsonl")
    [_, prompt] = [row["call"]["prompt"] for row in rows if "call" in row]
    want = [f"Dropped, reward {r_bar[str(I['id'])]:.2f}: {I['text']}" for I in dropped]
    assert want and prompt.endswith("\n\n".join(want))


# ---- a tool, questions, a base model


@pytest.fixture(scope="module")
def base_path(tiny_path, tmp_path_factory):
    """The tiny policy as a base model, whose chat template is the text itself, as the page says."""
    path = shutil.copytree(tiny_path, tmp_path_factory.mktemp("models") / "base")
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return str(path)


def test_a_new_tool_is_explained_called_and_refused_where_its_tag_cannot_be_written():
    cfg = parse_flags(["--tools", "search,extras.examples.count:count"])
    task = load_task(cfg)
    [message] = task.make_format().messages("Count.", Question("q", "How many words?"))
    assert "\n<count> text </count>: Counts the words of a text.\n" in message["content"]
    assert task.make_format().stop_strings() == ("</search>", "</count>", "</answer>")
    assert task.tools[1].submit("one two three").result(60) == ["3"]
    with pytest.raises(Fault, match="cannot write </count>"):
        choose_for_machine(cfg, task)


@pytest.mark.slow
def test_a_base_model_trains_on_questions_of_your_own_with_the_new_tool(base_path, tmp_path):
    """The command of the page."""
    flags = shlex.split(COMMAND.replace("\\\n", " ")) + [
        "--model",
        base_path,
        "--out",
        str(tmp_path / "run"),
    ]
    inspo.main(flags + shlex.split(f"{SMALL} --batch 2 --max_response 12 --max_prompt 2000"))
    vienna, trial = load_questions(FILES / "questions.jsonl")
    with gzip.open(tmp_path / "run" / "trajectories" / "step-000001.jsonl.gz", "rt") as file:
        assert {json.loads(line)["question"] for line in file} == {vienna.id, trial.id}
    first, *_ = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert {"test/searches", "test/count_calls", f"test/em/{vienna.source}"} <= set(first)
