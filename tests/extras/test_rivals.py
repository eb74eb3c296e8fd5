"""`--mode espl` and `--mode fst` (rivals.py), with policies and optimizers that read their answers from tables."""

import json
import math
import shutil

import numpy as np
import pytest
from test_algorithm import TAGS, Recorder, TableOptimizer, WatchedPolicy, questions
from test_inspo import SMALL, load_file, metrics, run_here

import inspo
from extras import rivals
from plumbing import stop
from config import MODES, SEARCH_R1, Config, parse
from tasks.questions import draw
from plumbing.faults import OptimizerDown
from journal.directory import read_jsonl
from extras.objectives import objective_of
from population import Experience, ReplayBuffer
from reflect import crossover_prompt, feedback_prompt, mutation_prompt
from extras.rivals import Front, Pool, instance_wins, mate, mixed
from rollout import Trajectory
from world.clauses import read
from world.optimizer import reply_to

ESPL = dict(rivals=3, N_P=100, K_e=1, T_e=100, objective="espl", batch=6, G=2, T=4, failures=2, instruction="")
FST = dict(N_P=3, K_e=2, T_e=100, groups="question", batch=4, G=6, T=5, D_B=3, failures=2, rounds=2, instruction="")


class FlakyPolicy(WatchedPolicy):
    """What it does not know it answers right every other time that it is asked under the same instruction."""

    def __init__(self, right):
        super().__init__(right)
        self.asked = {}

    def play(self, job):
        tau = super().play(job)
        if int(job.question.id[1:]) >= self.right[job.text]:
            key = job.text, job.question.id
            self.asked[key] = self.asked.get(key, 0) + 1
            tau.prediction = job.question.golds[0] if self.asked[key] % 2 else "no idea"
        return tau


def run(mode, right, *replies, restored=None, phase="", flaky=True, D=None, **knobs):
    """Returns (policy and instruction, policy, log, optimizer) of a whole run."""
    cfg = Config(mode=mode, **({"espl": ESPL, "fst": FST}[mode] | knobs))
    policy = (FlakyPolicy if flaky else WatchedPolicy)({SEARCH_R1: 0} | right)
    log, optimizer = Recorder(cfg.T, restored), TableOptimizer(*replies)
    log.t, log.phase, policy.log = 1 if phase else 0, phase, log
    result = getattr(rivals, mode)(cfg, policy, optimizer, D or questions("q", 6), log)
    return result, policy, log, optimizer


def names(n):
    return [f"child {k} {TAGS}" for k in range(n)]


def played(table):
    """Rewards by instruction and question, as trajectories."""
    D = questions("q", 9)
    return [Trajectory(j, D[q], 0, [], 0, reward=r) for j, row in table.items() for q, rs in row.items() for r in rs]


def pool(n, k=3):
    P = Pool(0.2, 5, k)
    for j in range(n):
        P.join(f"program {j}", None, j)
    return P


# ---- TrueSkill: the cases that the library's own tests publish


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([0.6, 0.4], [(29.396, 7.171), (20.604, 7.171)]),
        ([0.5, 0.5], [(25.000, 6.458)] * 2),
        ([0.509, 0.5], [(25.000, 6.458)] * 2),  # at most .01 apart is a draw
        ([0.9, 0.5, 0.1], [(31.675, 6.656), (25.000, 6.208), (18.325, 6.656)]),
        ([0.5, 0.5, 0.5], [(25.000, 5.698), (25.000, 5.695), (25.000, 5.698)]),
        ([0.9, 0.6, 0.3, 0.1], [(33.207, 6.348), (27.401, 5.787), (22.599, 5.787), (16.793, 6.348)]),
    ],
)
def test_ratings_are_trueskill_s(scores, expected):
    P = pool(len(scores))
    P.rate(dict(enumerate(scores)))
    for j, (mu, sigma) in enumerate(expected):
        assert P.rating(j) == pytest.approx((mu, sigma), abs=2e-3)


def test_ratings_come_from_the_problems_that_all_programs_played():
    P = pool(2)
    P.attribute(played({0: {"q0": [1, 0], "q1": [0, 0]}, 1: {"q0": [0, 0]}}))
    assert P.rating(0) == pytest.approx((29.396, 7.171), abs=2e-3) and P.family[0].w == 0.25
    assert [I.id for I in P.ranked()] == [0, 1] and P.best().id == 1  # the newest is the result
    P = pool(2)
    P.attribute(played({1: {"q0": [1]}}))
    assert P.rating(1) == (25, 25 / 3)  # alone nobody is rated


def test_a_child_is_rated_by_its_parents_and_less_certain():
    P = pool(2)
    P.family[0].rating, P.family[1].rating = [30.0, 2.0], [20.0, 4.0]
    child = P.bear("mutation", [0], 5)
    assert (child.parent, child.other, child.born) == (0, None, 5)
    assert child.rating == pytest.approx([30, math.sqrt(4 + 1)])
    child = P.bear("crossover", [0, 1], 5)  # precisions 1/4 and 1/16
    assert (child.parent, child.other) == (0, 1)
    assert child.rating == pytest.approx([(30 / 4 + 20 / 16) / (5 / 16), math.sqrt(16 / 5 + 1)])


# ---- E-SPL: who plays, who mutates


def test_the_newest_and_some_of_the_latest_play_the_same_problems():
    P, D, seen = pool(9), list(questions("q", 6).values()), {}
    for seed in range(60):
        drawn = P.draw(np.random.default_rng(seed), D)
        assert len(drawn) == 6 and [q for q, _ in drawn] == [D[0]] * 3 + [D[1]] * 3
        first, second = [[I.id for _, I in drawn[k : k + 3]] for k in (0, 3)]
        assert first == second and first[0] == 8 and len(set(first)) == 3 and set(first[1:]) <= {4, 5, 6, 7}
        for j in first:
            seen[j] = seen.get(j, 0) + 1
    assert set(seen) == {4, 5, 6, 7, 8} and min(seen.values()) > 15
    assert P.probabilities()[-5:] == pytest.approx([1 / 6] * 4 + [1 / 3]) and P.probabilities().sum() == pytest.approx(
        1
    )
    assert [I.id for _, I in pool(1).draw(np.random.default_rng(0), D)] == [0] * 6 and pool(1).probabilities() == [1]
    assert [I.id for _, I in pool(2).draw(np.random.default_rng(0), D)] == [1, 0] * 3
    assert pool(2).probabilities() == pytest.approx([0.5, 0.5])


def test_espl_mutates_after_every_step_but_the_last_and_ends_with_the_newest():
    children = names(3)
    right = {children[0]: 3, children[1]: 1, children[2]: 6}
    (policy, I), made, log, optimizer = run("espl", right, *[[c] for c in children])
    assert policy is made and I.text == children[2] and I.born == 3
    assert optimizer.whens == ["t1 r1", "t2 r1", "t3 r1"]
    assert [args[0] for args in log.of("joined")] == [1, 2, 3] and not log.of("pruned") and not log.of("verified")
    assert [(I.parent, I.born) for I in log.P.family] == [(None, 0), (0, 1), (1, 2), (1, 3)]  # of the batch's best
    for t, (at, purpose, jobs, _) in enumerate(made.rollouts, 1):
        assert (at, purpose) == (t, "rollout") and len(jobs) == 12 and len({job.group for job in jobs}) == 6
        programs = {job.instruction for job in jobs}
        assert t - 1 in programs and len(programs) == min(3, t)
        asked = draw(questions("q", 6), 6, 0, t)[: -(-6 // len(programs))]
        assert {job.question for job in jobs} == set(asked)
    [(_, _, scores), *_] = made.updates
    assert {a for _, a in scores} <= {0.5, -0.5, 0.0} and any(a for _, a in scores)  # r - mean, not divided


def test_a_mutation_is_shown_a_right_and_a_wrong_attempt_at_the_same_question():
    _, _, _, optimizer = run("espl", {}, T=2)
    [prompt] = optimizer.prompts
    assert f"<ins_0>\n{SEARCH_R1}\n</ins_0>" in prompt and prompt.count("<right>") == prompt.count("<example>") == 2
    first = draw(questions("q", 6), 6, 0, 1)[0].id
    assert prompt.count(f"Question: Which {first}?") == 2 and f"Correct answer: gold {first}" in prompt
    _, _, log, optimizer = run("espl", {}, T=2, flaky=False)  # always wrong or always right: nothing to compare
    assert not optimizer.prompts
    [(_, _, text, joined)] = log.of("joined")
    assert joined == [] and "nobody joined: no question that #0 got both right and wrong" in text


def test_the_queue_forgets_the_oldest():
    children = names(3)
    _, _, log, _ = run("espl", dict.fromkeys(children, 1), *[[c] for c in children], N_P=2)
    assert log.P.ids == [2, 3] and [I.left for I in log.P.family] == [2, 3, None, None]


def test_an_optimizer_that_is_down_or_writes_nonsense_costs_a_child():
    _, _, log, optimizer = run("espl", {}, OptimizerDown("503"), ["no tags"], ["x"], T=4)
    texts = [text for _, _, text, _ in log.of("joined")]
    assert "the optimizer gave no reply (503)" in texts[0] and "no well-formed candidate" in texts[1]
    assert len(log.P) == 1 and len(log.of("step")) == 4


def test_a_crossover_has_the_program_that_alone_won_most_and_two_parents():
    # q0, q1: only 0; q2: only 1; q3 .. q5: only 2; q6: 1 and 2 alike
    table = {0: {"q0": [1], "q1": [1]}, 1: {"q2": [1], "q6": [1]}, 2: {f"q{k}": [1] for k in (3, 4, 5, 6)}}
    table = {j: {q: row.get(q, [0]) for q in questions("q", 7)} for j, row in table.items()}
    other, wins = mate(table, 0)
    assert other == 2 and wins == {0: ["q0", "q1"], 1: ["q2"], 2: ["q3", "q4", "q5"]}
    assert mate({j: {"q0": [1]} for j in (0, 1)}, 0) is None  # nobody won alone
    assert mate({0: {"q0": [1]}, 1: {"q0": [0]}}, 0) is None and mate({0: {"q0": [1]}}, 0) is None

    P, B, log = pool(2), ReplayBuffer(100), Recorder()
    B.add(3, played({0: {"q0": [1, 1], "q1": [0, 0], "q2": [1, 0]}, 1: {"q0": [0, 0], "q1": [1, 1], "q2": [0, 0]}}))
    cfg, optimizer = Config(mode="espl", **ESPL | dict(crossover=1.0)), TableOptimizer(["crossed"], ["mutated"])
    rivals.offspring(cfg, 3, P, B, None, optimizer, questions("q", 9), log)
    assert "<other>\nprogram 1\n</other>" in optimizer.prompts[0] and "Which q0?" in optimizer.prompts[0]
    assert optimizer.whens == ["t3 r0", "t3 r1"] and "Which q2?" in optimizer.prompts[1]
    assert [(I.text, I.parent, I.other) for I in P.family[2:]] == [("crossed", 0, 1), ("mutated", 0, None)]
    Q = Pool(0.2, 5, 3)
    Q.load_state_dict(json.loads(json.dumps(P.state_dict())))
    assert Q.family == P.family and Q.ids == P.ids
    optimizer = TableOptimizer(["crossed"], ["mutated"])
    rivals.offspring(Config(mode="espl", **ESPL), 3, pool(2), B, None, optimizer, questions("q", 9), Recorder())
    assert optimizer.whens == ["t3 r1"]  # --crossover 0


def test_questions_answered_both_ways_are_found_in_the_order_of_the_step():
    rows = [
        Experience(1, 0, q, f"{q}{r}{k}", (), r) for k, (q, r) in enumerate([("b", 0), ("a", 1), ("b", 1), ("c", 0)])
    ]
    assert [(a.text, b.text) for a, b in mixed(rows)] == [("b12", "b00")]


@pytest.mark.parametrize("mode", ["espl", "fst"])
def test_a_run_that_was_stopped_inside_an_evolution_repeats_it_before_the_next_step(mode):
    P = pool(1) if mode == "espl" else front(1)
    P.family[0].text, B = SEARCH_R1, ReplayBuffer(1000)
    B.add(1, played({0: {f"q{k}": [1, 0] for k in range(6)}}))
    [child] = names(1)
    _, policy, log, optimizer = run(mode, {child: 6}, [child], restored=(P, B), phase="evolve", T=1)
    first = [name for name, *_ in log.events]
    assert first[:1] == (["call"] if mode == "espl" else ["scored"]) and first.index("joined") < first.index("step")
    assert optimizer.whens[0].startswith("t1 r") and log.P is P and "started" not in first


# ---- FST


def front(n):
    P = Front(0.2, 5)
    for j in range(n):
        P.join(f"prompt {j}", None, 0)
    return P


def test_the_pareto_front_by_hand():
    """A and B win questions of their own; what C wins A wins too; D wins only what everybody fails."""
    scores = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], float)
    assert instance_wins(scores).tolist() == [3, 2, 0, 0]
    assert instance_wins(np.array([[0.5, 0.0], [0.5, 0.0]])).tolist() == [0, 2]  # of equals one stays
    assert instance_wins(np.zeros((1, 3))).tolist() == [3]
    # Removal goes from the lowest mean up: C is covered by A and B together
    assert instance_wins(np.array([[1, 0, 1], [0, 1, 1], [0, 0, 1.0]])).tolist() == [2, 2, 0]


def test_a_question_s_rollouts_go_round_the_prompts():
    P, D = front(3), list(questions("q", 4).values())
    drawn = P.draw(np.random.default_rng(0), D, 6)
    assert [q for q, _ in drawn] == [q for q in D for _ in range(6)]
    for k in range(4):
        ids = [I.id for _, I in drawn[6 * k : 6 * k + 6]]
        assert sorted(ids) == [0, 0, 1, 1, 2, 2] and ids[:3] == ids[3:]
    starts = {P.draw(np.random.default_rng(s), D, 5)[0][1].id for s in range(20)}
    assert starts == {0, 1, 2} and P.probabilities() == pytest.approx([1 / 3] * 3)


def test_fst_trains_a_question_s_prompts_as_one_group_and_evolves_every_K_e_steps():
    good, bad = names(2)
    _, policy, log, optimizer = run("fst", {good: 6, bad: 0}, [good], [bad], flaky=False, T=5)
    assert [args[0] for args in log.of("joined")] == [2, 4] and [I.text for I in log.P.active][-1] == good
    last = policy.rollouts[-1][2]
    for group in range(4):
        mine = [job for job in last if job.group == group]
        assert len(mine) == 6 and len({job.question for job in mine}) == 1
        assert {job.text for job in mine} == {I.text for I in log.P.active}
    assert objective_of(Config(objective=MODES["fst"]["objective"])).kind == "cispo"


def test_a_revision_passes_if_it_is_strictly_better_on_what_was_shown_and_joins_if_it_wins():
    good, same = names(2)
    _, policy, log, optimizer = run("fst", {good: 6, same: 0}, [same], [good], flaky=False, T=3)
    assert optimizer.whens == ["t2 r0", "t2 r1"] and all("gold q" in prompt for prompt in optimizer.prompts)
    [first, second] = log.of("verified")
    assert first[-1] == [] and [c.text for c in second[-1]] == [good]  # a tie does not pass
    [(_, texts, D_B), (_, passed, again)] = log.of("scored")
    assert texts == [SEARCH_R1] and passed == [good] and D_B == again and len(D_B) == 3
    shown = {q.id for q in first[3]}
    assert shown and not shown & {q.id for q in D_B}  # nothing is chosen by what was shown
    assert log.P.ids == [1] and log.P.family[0].left == 2  # the first prompt wins nothing that the new one does not
    assert log.P.family[1].verified == 1.0 and log.P.family[1].parent == 0


def test_at_most_N_P_prompts_stay_and_without_a_new_one_all_do():
    good = names(3)
    right = {good[0]: 6, good[1]: 6, good[2]: 6}
    _, _, log, _ = run("fst", right, [good[0]], [good[1]], [good[2]], flaky=False, T=3, rounds=3, N_P=2)
    assert len(log.P) <= 2
    _, _, log, _ = run("fst", {}, OptimizerDown("503"), T=3)
    [(_, _, text, joined)] = log.of("joined")
    assert log.P.ids == [0] and joined == [] and "the optimizer gave no reply (503)" in text
    _, _, log, optimizer = run("fst", {SEARCH_R1: 6}, ["x"], flaky=False, T=3)
    assert not optimizer.prompts and "no failure to learn from" in log.of("joined")[0][2]


def test_a_limit_on_what_evolution_spends_holds_for_the_relatives(monkeypatch):
    monkeypatch.setattr(Recorder, "limit", lambda self, rollouts: "--max_overhead 0.1: enough")
    for mode in ("espl", "fst"):
        _, policy, log, optimizer = run(mode, {}, ["x"], T=3)
        assert not optimizer.prompts and {purpose for _, purpose, *_ in policy.rollouts} == {"rollout"}
        assert "enough" in log.of("joined")[0][2]


# ---- flags and prompts


def test_modes_are_presets_that_flags_overrule():
    espl, fst, prompt = (parse(["--mode", mode]) for mode in ("espl", "fst", "prompt"))
    assert (espl.N_P, espl.K_e, espl.rivals, espl.objective, espl.D_B) == (100, 1, 3, "espl", 0)
    assert (fst.N_P, fst.K_e, fst.groups, fst.objective) == (4, 6, "question", "cispo_cap")
    assert prompt.lr == 0 and prompt.N_P == 7 and parse(["--mode", "fst", "--N_P", "8"]).N_P == 8
    assert espl.T_e > espl.T and fst.T_e > fst.T


def test_the_scripted_optimizer_answers_every_prompt():
    I = f"Search one entity at a time. {TAGS}"
    failure = (
        "Question: Who is the father of the mother of Ann?\n<search> the father of the mother of Ann </search>",
        ("Bo",),
    )
    prompts = [
        feedback_prompt(I, [failure], 4000),
        mutation_prompt(I, [("right one", *failure)], 4000),
        crossover_prompt(I, f"State the fact found after each search. {TAGS}", ["Who?"], ["Where?"]),
    ]
    for prompt in prompts:
        replies = [reply_to(prompt, seed) for seed in range(12)]
        assert sum("<ins_1>" in reply for reply in replies) >= 9 and not any("<ins_2>" in reply for reply in replies)
    assert any("state" in read(reply_to(prompts[2], seed)) for seed in range(5))  # taken over from the other
    shown = mutation_prompt(I, [("a" * 9000, "b" * 9000, ("g",))] * 2, 1000)
    assert len(shown) < 6000 and shown.count("<right>") == 2


# ---- whole runs


SIZES = [*SMALL, "--batch", "6", "--mini", "6", "--G", "4", "--T", "6", "--save_every", "2", "--D_B", "6"]
RUNS = {
    "espl": ["--mode", "espl", "--crossover", "1", "--K_e", "1", "--T_e", "9"],
    "fst": ["--mode", "fst", "--K_e", "2", "--T_e", "9"],
    "paired": ["--rank", "paired", "--gate", "lower_bound", "--gate_samples", "2", "--K_p", "1", "--K_e", "3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_stopped_inside_an_evolution_and_resumed_it_is_bit_identical_and_everything_is_counted(
    name, tmp_path, monkeypatch
):
    flags = [*SIZES, *RUNS[name]]
    code, _, stderr = run_here("--out", tmp_path / "whole", *flags)
    assert code == 0, (code, stderr)
    verify, calls = inspo.verify, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise stop.Stopped("stopped by a test")
        return verify(*args)

    for module in (inspo, rivals):
        monkeypatch.setattr(module, "verify", interrupted)
    asked = rivals.ask

    def ask(*args):
        found = asked(*args)
        if args[1] == 3 and args[2] == 1 and name == "espl" and not calls:  # paid for, and then stopped
            calls.append(args)
            raise stop.Stopped("stopped by a test")
        return found

    monkeypatch.setattr(rivals, "ask", ask)
    out = tmp_path / "stopped"
    code, _, _ = run_here("--out", out, *flags)
    assert "--resume" in str(code) and any(path.name.endswith("unfinished") for path in (out / "checkpoints").iterdir())
    monkeypatch.undo()
    code, _, stderr = run_here("--out", out, *flags, "--resume")
    assert code == 0, (code, stderr)
    assert metrics(out) == metrics(tmp_path / "whole")
    weights = [load_file(tmp_path / x / "policy/model.safetensors") for x in ("whole", "stopped")]
    assert all(np.array_equal(p.numpy(), weights[1][k].numpy()) for k, p in weights[0].items())
    keys = [row["call"]["key"] for row in read_jsonl(out / "reflections.jsonl") if "call" in row]
    assert keys and len(keys) == len(set(keys))
    for path in (out, tmp_path / "whole"):
        ledger = json.loads((path / "summary.json").read_text())["ledger"]
        rows = read_jsonl(path / "reflections.jsonl")
        assert ledger["verification_rollouts"] == sum(row.get("rollouts", 0) for row in rows)
        assert ledger["optimizer_calls"] == len(keys) and ledger["training_rollouts"] == 6 * 6 * 4
        shutil.rmtree(path / "checkpoints")
