"""The files and patches of docs/forks.md and docs/objectives.md: each applies as the project stands, and does what
is said."""

import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from json_server import json_servers
from transformers import AutoModelForCausalLM, MiniCPM3Config

from journal.directory import read_jsonl
from models.model import load_model, load_tokenizer
from plumbing import client
from plumbing.faults import Fault, Outage
from tasks import Question
from tasks.questions import em, f1, load_questions

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "forks.md").read_text() + (ROOT / "docs" / "objectives.md").read_text()
FORKS = dict(re.findall(r"^```diff (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
FILES = dict(re.findall(r"^```(?:jsonl|python) (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
[COMMAND] = re.findall(r"^```sh\npython inspo.py (.*?)\n```$", PAGE, re.M | re.S)
SCRIPTS = Path(__file__).parent / "forks"  # run in the copies
ROOMS = "engines journal kernels models page plumbing retrieval tasks training world".split()
ENV = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"OMP_NUM_THREADS": "1"}
SMALL = "--T 2 --K_p 1 --K_e 1 --T_e 2 --D_B 2 --rounds 1 --save_every 3 --lr 1e-6 --G 2"


def forked(path: Path, *names: str, moved: int = 0) -> Path:
    """Returns a copy of the project at `path`, every line `moved` down, with these patches."""
    for room in (".", *ROOMS):
        (path / room).mkdir(parents=True)
        for file in ROOT.glob(f"{room}/*.py"):
            (path / room / file.name).write_text("# moved\n" * moved + file.read_text())
    (path / "page" / "static").symlink_to(ROOT / "page" / "static")
    (path / "world" / "files").symlink_to(ROOT / "world" / "files")
    for name, text in FILES.items():
        (path / name).write_text(text)
    env = ENV | {"GIT_CEILING_DIRECTORIES": str(path.parent)}  # a repository around `path` would swallow the patch
    for name in names:
        done = subprocess.run(
            ["git", "apply", "-"], input=FORKS[name], cwd=path, env=env, capture_output=True, text=True
        )
        if done.returncode:
            pytest.fail(f"docs/forks.md: the patch `{name}` no longer applies: {done.stderr.strip()}", pytrace=False)
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


def value(fork: Path, expression: str, imports: str) -> object:
    """Returns the value of an expression in a copy of the project."""
    return json.loads(finish(start(fork, "-c", f"import json\n{imports}\nprint(json.dumps({expression}))")))


# ---- the page


@pytest.mark.parametrize("name", FORKS)
def test_a_patch_of_ten_lines_applies_where_lines_have_moved_and_leaves_python(name, tmp_path):
    for moved in (0, 57):
        fork = forked(tmp_path / f"fork{moved}", name, moved=moved)
        [file] = re.findall(r"^\+\+\+ b/(\S+)$", FORKS[name], re.M)
        text = (fork / file).read_text()
        compile(text, file, "exec")
        assert text != "# moved\n" * moved + (ROOT / file).read_text()
    assert len(re.findall(r"^\+(?!\+\+ )", FORKS[name], re.M)) <= 10


# ---- a judge, an objective, a prompt


def said(text):
    return {"choices": [{"message": {"content": text}}]}


def test_a_judge_scores_and_is_asked_again_after_prose(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(forked(tmp_path / "fork"))
    my_judge = importlib.import_module("my_judge")
    taus = [SimpleNamespace(question=Question("q", "Who?", ("Ann",)), prediction="Bea")]
    monkeypatch.setenv("JUDGE_MODEL", "m")
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    with json_servers() as start:
        judge = start(said("Quite good."), said("7"))
        monkeypatch.setenv("JUDGE_BASE_URL", f"{judge.url}/v1")
        assert my_judge.graded(taus) == [0.7]
        (path, _, body), _ = judge.requests
        request = json.loads(body)
        assert path == "/v1/chat/completions" and request["model"] == "m"
        assert all(word in request["messages"][1]["content"] for word in ("Who?", "Ann", "Bea"))
        monkeypatch.setenv("JUDGE_BASE_URL", start(said("Well done!")).url)
        with pytest.raises(Outage, match="a number"):
            my_judge.graded(taus)


TERMS = """
from types import SimpleNamespace as S
from grpo import Learner
part = [S(mask=[0, 1, 1, 1], advantage=2.0), S(mask=[1], advantage=-1.0)]
x = Learner.terms(S(cfg=S(eps=0.2)), part, None)
"""


def test_dapo_weighs_every_token_alike_and_clips_higher(tmp_path):
    found = value(forked(tmp_path / "fork", "dapo"), "[[*x['adv']], [*x['w']], x['eps_low'], x['eps_high']]", TERMS)
    assert found == [[2, 2, 2, -1], [0.25] * 4, 0.2, 0.28]


def test_another_surrogate_is_a_method_of_a_learner(tmp_path):
    surrogate = "my_objective.CISPO.surrogate(None, logp=logp, rho=torch.tensor([1.5, 1.1]), adv=adv, w=adv).tolist()"
    setup = "import torch, my_objective\nlogp, adv = torch.tensor([-2.0, -3.0]), torch.tensor([1.0, -1.0])"
    assert value(forked(tmp_path / "fork"), surrogate, setup) == pytest.approx([-2.56, 3.3])
    assert "--eps" in finish(start(tmp_path / "fork", "my_objective.py", "--help_all"))


def test_the_optimizer_is_asked_for_short_candidates(tmp_path):
    prompt = "reflection_prompt('Search.', [('Who?', ('Ann',))], 3, 500)"
    imports = "from reflect import reflection_prompt"
    ours, theirs = (
        value(forked(tmp_path / str(k), *names), prompt, imports) for k, names in enumerate([["concise"], []])
    )
    assert "80 words" in ours and "<ins_3>" in ours
    assert [line for line in ours.splitlines() if "80 words" not in line] == theirs.splitlines()


# ---- one run of the world: its rewards, advantages, survivors, probabilities and calls


@pytest.fixture(scope="module")
def base_path(tiny_path, tmp_path_factory):
    """The tiny policy as a base model: without a chat template."""
    path = shutil.copytree(tiny_path, tmp_path_factory.mktemp("models") / "base")
    (path / "chat_template.jinja").unlink()
    return str(path)


@pytest.fixture(scope="module")
def minicpm3_path(tmp_path_factory):
    """A random MiniCPM3 that divides its logits by 64 / 16."""
    path = tmp_path_factory.mktemp("models") / "minicpm3"
    config = MiniCPM3Config(
        vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        dim_model_base=16, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config.initializer_range = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def runs(base_path, minicpm3_path, tmp_path_factory):
    """(run of the world with forks of the algorithm, run of the page's own questions with those of agent and model)."""
    path = tmp_path_factory.mktemp("runs")
    fork = forked(path / "algorithm", "opo", "quarter", "ucb", "dropped")
    flags = shlex.split(f"{SMALL} --batch 8 --mini 8 --eval_n 12 --task my_reward:F1")
    world = start(fork, "inspo.py", "--out", path / "world", *flags)

    fork = forked(path / "agent", "base-model", "logit-scale")
    flags = shlex.split(COMMAND.replace("\\\n", " "))
    flags += ["--model", base_path, "--task", "my_tool:Counting"]
    flags += shlex.split(f"{SMALL} --batch 2 --mini 2 --max_response 12 --max_prompt 2000")
    own = start(fork, SCRIPTS / "play.py", base_path, minicpm3_path, path / "play.json", "--out", path / "own", *flags)
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


POPULATION = """
from population import Population
P = Population(0.2, 5)
for k, w in enumerate([0.1, 0.5, 0.45, 0.3, 0.41, 0.0, 0.39]):
    P.join(f"I{k}", None, 0).rewards = [w]
"""


def test_the_margin_keeps_those_near_the_best(tmp_path):
    left = (
        "[P.prune(P.ranked(), 5, 1) and sorted(P.ids), P.prune(P.ranked(), 1, 2) and P.ids, P.prune(P.ranked(), 1, 3)]"
    )
    assert value(forked(tmp_path / "fork", "margin"), left, POPULATION) == [[1, 2, 3, 4, 6], [1, 2, 4], []]


@pytest.mark.slow
def test_a_quarter_is_kept(runs, tmp_path):
    sizes = "[len(P) for t in (1, 2, 3) if P.prune(P.ranked(), 1, t) or True]"
    assert value(forked(tmp_path / "fork", "quarter"), sizes, POPULATION) == [2, 1, 1]
    pruned = {e["t"]: len(e["P"]) for e in read_jsonl(runs[0] / "population.jsonl") if e["event"] == "prune"}
    assert pruned[1] == 2


UCB = """
from population import Population
def p(tau_s, *rewards):
    P = Population(tau_s, 5)
    for r in rewards:
        P.join("I", None, 0).rewards = r
    return P.probabilities().tolist()
tried = [0.5] * 5, [0.45], [0.1]
"""


@pytest.mark.slow
def test_ucb_prefers_the_untried_then_the_highest_bound(runs, tmp_path):
    cases = "[p(0.2, [], [], []), p(0.2, [0.9], [], []), p(0.2, *tried), p(0.01, *tried)]"
    start, untried, wide, narrow = value(forked(tmp_path / "fork", "ucb"), cases, UCB)
    assert start == pytest.approx([1 / 3] * 3) and untried == [0, 0.5, 0.5]
    assert wide == [0, 1, 0] and narrow == [1, 0, 0]  # the second was drawn less often: its bonus is larger
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
        f"Tried and dropped, mean reward {r_bar[str(I['id'])]:.2f}: {I['text']}"
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


# ---- tool, questions, family of models


@pytest.mark.slow
def test_a_new_tool_a_base_model_and_another_family(runs, base_path, minicpm3_path):
    with pytest.raises(Fault, match="its logits are 0.25 times its head's output, not 1 times"):
        load_model(minicpm3_path)
    with pytest.raises(Fault, match="no chat template"):
        load_tokenizer(base_path)

    got = json.loads((runs[1].parent / "play.json").read_text())
    assert got["scale"] == 0.25
    assert got["prompt"] == "Count.\n\nQuestion: How many words?\n"
    assert got["stop"] == ["</search>", "</count>", "</answer>"]
    invalid = "That was neither a search nor a count nor an answer."
    assert invalid in got["invalid"] and "<count> text </count>" in got["invalid"]
    call, thought, answer = "Let me see. <count> one two three </count>", "Three?", "<answer> 3 </answer>"
    assert got["response"] == f"{call}\n\n<number>3</number>\n\n{thought}{got['invalid']}{answer}"
    assert got["sampled"] == call + thought + answer  # neither the result nor the message is trained on
    assert (got["counts"], got["prediction"]) == (1, "3")
    assert "cannot write </count>" in got["world"] and "\n" not in got["world"]


@pytest.mark.slow
def test_the_run_counts_the_new_tools_calls(runs):
    first, *_ = metrics(runs[1])
    assert {"test/searches", "test/counts"} <= set(first)


@pytest.mark.slow
def test_a_base_model_reads_plain_text_and_is_exported_with_its_template(runs):
    tokenizer = load_tokenizer(str(runs[1] / "policy"))
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False)
    assert asked == "Who?"


@pytest.mark.slow
def test_your_own_questions_are_read_as_they_stand_on_the_page(runs, tmp_path):
    (tmp_path / "questions.jsonl").write_text(FILES["questions.jsonl"])
    vienna, trial = load_questions(tmp_path / "questions.jsonl")
    assert vienna.text == "Which river flows through Vienna?" and vienna.golds == ("Danube", "the Danube")
    asked = {tau["question"] for t in (1, 2) for tau in trajectories(runs[1], t)}
    assert asked == {vienna.id, trial.id}
    assert f"test/em/{vienna.source}" in metrics(runs[1])[0]
