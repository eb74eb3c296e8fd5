"""E-SPL and FST (extras/espl.py, extras/fst.py), with policies and optimizers that read their
answers from tables."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from test_algorithm import (
    FIRST,
    TAGS,
    Exam,
    Kept,
    Recorder,
    TableOptimizer,
    WatchedPolicy,
    questions,
)
from test_resume import CFG, STEPS, check_deaths, deaths_of

import inspo
from config import PRESETS, build, validate
from extras import espl, fst
from extras.espl import ESPLConfig, Pool, mate
from extras.fst import Front, FSTConfig, instance_wins
from extras.objectives import ObjectiveLearner
from plumbing.faults import Fault
from population import ReplayBuffer
from tasks import Trajectory
from tasks.task import draw_questions

ESPL = ESPLConfig(N_P=100, K_e=1, T_e=100, objective="espl", batch=6, G=2, T=4, failures=2)
FST = FSTConfig(
    N_P=3, K_e=2, T_e=100, objective="cispo_cap", batch=4, G=6, T=5, D_B=3, failures=2, rounds=2
)
SCRIPTS = {"espl": (espl.ESPL, Pool, ESPL), "fst": (fst.GEPA, Front, FST)}


class FlakyPolicy(WatchedPolicy):
    """What it does not know it answers right every other time that it is asked under the same
    instruction."""

    def __init__(self, right):
        super().__init__(right)
        self.asked = {}

    def play(self, job):
        tau = super().play(job)
        if int(job.question.id[1:]) >= self.right[job.instruction]:
            key = job.instruction, job.question.id
            self.asked[key] = self.asked.get(key, 0) + 1
            tau.prediction = job.question.golds[0] if self.asked[key] % 2 else "no idea"
        return tau


def run(name, right, *replies, restored=None, at=1, policy=FlakyPolicy, **knobs):
    """Returns (policy and instruction, policy, log, optimizer) of a whole run."""
    kind, population, usual = SCRIPTS[name]
    cfg = type(usual)(**vars(usual) | knobs)
    policy = policy({FIRST: 0} | right)
    policy.learner = object.__new__(ObjectiveLearner)  # for its rule of the advantages
    policy.learner.cfg, policy.learner.remembered = cfg, {}
    log, optimizer, task = Recorder(cfg), TableOptimizer(*replies), Exam(cfg, questions("q", 6))
    log.task = task
    policy.log, evolution = log, kind(cfg, task, optimizer, population(cfg), log)
    checkpoints = Kept(evolution.P, evolution.B, log, restored, at)
    return inspo.inspo(cfg, task, policy, evolution, checkpoints, log), policy, log, optimizer


def names(n):
    return [f"child {k} {TAGS}" for k in range(n)]


def played(table):
    """Rewards by instruction and question, as trajectories."""
    D = questions("q", 9)
    rows = [(j, q, r) for j, row in table.items() for q, rewards in row.items() for r in rewards]
    return [Trajectory(j, D[q], 0, [], 0, reward=r, failed=r < 1) for j, q, r in rows]


def shown(tau):
    return f"Question: {tau.question.text}"


def step_of(table):
    """The same as step 3 in the replay buffer."""
    B = ReplayBuffer(100)
    B.add(3, played(table), map(shown, played(table)))
    return B


def programs(n, P=None):
    """Returns a population of n programs, E-SPL's or another."""
    P = Pool(ESPL) if P is None else P
    for j in range(n):
        P.join(f"program {j}", None, 0)
    return P


# ---- TrueSkill: the cases that the library's own tests publish


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([0.6, 0.4], [(29.396, 7.171), (20.604, 7.171)]),
        ([0.509, 0.5], [(25.000, 6.458)] * 2),  # at most .01 apart is a draw
        ([0.9, 0.5, 0.1], [(31.675, 6.656), (25.000, 6.208), (18.325, 6.656)]),
        (
            [0.9, 0.6, 0.3, 0.1],
            [(33.207, 6.348), (27.401, 5.787), (22.599, 5.787), (16.793, 6.348)],
        ),
    ],
)
def test_ratings_are_trueskill_s(scores, expected):
    P = programs(len(scores))
    P.rate(dict(enumerate(scores)))
    for j, (mu, sigma) in enumerate(expected):
        assert P.ratings[j] == pytest.approx((mu, sigma), abs=2e-3)


def test_ratings_come_from_the_problems_that_all_programs_played():
    P, alone = programs(2), programs(2)
    P.update_weights(played({0: {"q0": [1, 0], "q1": [0, 0]}, 1: {"q0": [0, 0]}}))
    assert P.ratings[0] == pytest.approx((29.396, 7.171), abs=2e-3) and P.family[0].w == 0.25
    assert [I.id for I in P.ranked()] == [0, 1] and P.best().id == 1  # the newest is the result
    alone.update_weights(played({1: {"q0": [1]}}))
    assert alone.ratings == [(25, 25 / 3)] * 2  # alone nobody is rated


def test_a_child_is_rated_by_its_parents_and_less_certain():
    P = programs(2)
    P.ratings = [(30.0, 2.0), (20.0, 4.0)]
    child = P.bear("mutation", [0], 5)
    assert (child.parent, child.born) == (0, 5)
    assert P.ratings[2] == pytest.approx([30, math.sqrt(4 + 1)])
    P.bear("crossover", [0, 1], 5)  # precisions 1/4 and 1/16
    assert P.ratings[3] == pytest.approx([(30 / 4 + 20 / 16) / (5 / 16), math.sqrt(16 / 5 + 1)])


# ---- E-SPL: who plays, who mutates


def test_the_newest_and_some_of_the_latest_play_the_same_problems():
    P, D, seen = programs(9), list(questions("q", 6).values()), Counter()
    for seed in range(60):
        jobs = P.draw_jobs(np.random.default_rng(seed), D, 2)
        ids = [job.instruction_id for job in jobs[:6:2]]
        assert ids[0] == 8 and len(set(ids)) == 3 and set(ids[1:]) <= {4, 5, 6, 7}
        expected = [(D[k // 3], j, k) for k, j in enumerate(ids * 2) for _ in range(2)]
        assert [(job.question, job.instruction_id, job.group) for job in jobs] == expected
        seen.update(ids)
    assert set(seen) == {4, 5, 6, 7, 8} and min(seen.values()) > 15
    assert P.probabilities().tolist() == pytest.approx([0] * 4 + [1 / 6] * 4 + [1 / 3])
    jobs = programs(2).draw_jobs(np.random.default_rng(0), D, 1)
    assert [job.instruction_id for job in jobs] == [1, 0] * 3


def test_espl_mutates_after_every_step_but_the_last_and_ends_with_the_newest():
    children = names(3)
    right = {children[0]: 3, children[1]: 1, children[2]: 6}
    (policy, I), made, log, optimizer = run("espl", right, *[[c] for c in children])
    assert policy is made and I.text == children[2] and I.born == 3
    assert [(row["t"], row["round"]) for row in log.rows("call")] == [(1, 1), (2, 1), (3, 1)]
    assert (
        [row["t"] for row in log.rows("evolve")] == [1, 2, 3]
        and not log.of("prune")
        and not log.of("verified")
    )
    # of the batch's best
    assert [(I.parent, I.born) for I in log.P.family] == [(None, 0), (0, 1), (1, 2), (1, 3)]
    for t, (at, purpose, jobs, _) in enumerate(made.rollouts, 1):
        ids = {job.instruction_id for job in jobs}
        assert (
            (at, purpose, len(jobs)) == (t, "rollout", 12)
            and t - 1 in ids
            and len(ids) == min(3, t)
        )
        assert {job.question for job in jobs} == set(
            draw_questions(questions("q", 6), 6, 0, t)[: -(-6 // len(ids))]
        )
    [(_, _, scores), *_] = made.updates
    # r - mean, not divided
    assert {a for _, a in scores} <= {0.5, -0.5, 0.0} and any(a for _, a in scores)


def test_a_mutation_is_shown_a_right_and_a_wrong_attempt_at_the_same_question():
    _, _, _, optimizer = run("espl", {}, T=2)
    [prompt] = optimizer.prompts
    assert (
        f"<ins_0>\n{FIRST}\n</ins_0>" in prompt
        and prompt.count("<right>") == prompt.count("<example>") == 2
    )
    first = draw_questions(questions("q", 6), 6, 0, 1)[0].id
    assert (
        prompt.count(f"Question: Which {first}?") == 2 and f"Correct answer: gold {first}" in prompt
    )
    # never both: nothing to compare
    _, _, log, optimizer = run("espl", {}, T=2, policy=WatchedPolicy)
    assert not optimizer.prompts
    [row] = log.rows("evolve")
    assert (
        len(row["P"]) == 1
        and "none joined: no question that #0 got both right and wrong" in row["text"]
    )


def test_the_queue_forgets_the_oldest():
    children = names(3)
    _, _, log, _ = run("espl", dict.fromkeys(children, 1), *[[c] for c in children], N_P=2)
    assert log.P.ids == [2, 3] and [I.left for I in log.P.family] == [2, 3, None, None]


def test_a_crossover_has_the_program_that_alone_won_most():
    # q0, q1: only 0; q2: only 1; q3 .. q5: only 2; q6: 1 and 2 alike
    right = {0: ["q0", "q1"], 1: ["q2", "q6"], 2: ["q3", "q4", "q5", "q6"]}
    table = {j: {q: [q in row] for q in questions("q", 7)} for j, row in right.items()}
    assert mate(step_of(table).items, 0) == (2, {0: ["q0", "q1"], 1: ["q2"], 2: ["q3", "q4", "q5"]})
    table = {0: {"q0": [1]}, 1: {"q0": [0]}}
    assert mate(step_of(table).items, 0) is None  # one of them won nothing alone


def test_a_crossover_has_two_parents_and_comes_before_the_mutation():
    table = {
        0: {"q0": [1, 1], "q1": [0, 0], "q2": [1, 0]},
        1: {"q0": [0, 0], "q1": [1, 1], "q2": [0, 0]},
    }
    for crossover, whens in ((0.0, [(3, 1)]), (1.0, [(3, 0), (3, 1)])):
        optimizer, cfg = (
            TableOptimizer(["crossed"], ["mutated"]),
            ESPLConfig(**vars(ESPL) | dict(crossover=crossover)),
        )
        P, log = programs(2), Recorder()
        evolution = espl.ESPL(cfg, Exam(cfg, questions("q", 9)), optimizer, P, log)
        evolution.B = step_of(table)
        evolution.evolve(3, None)
        assert [(row["t"], row["round"]) for row in log.rows("call")] == whens
    assert (
        "<other>\nprogram 1\n</other>" in optimizer.prompts[0]
        and "Which q0?" in optimizer.prompts[0]
    )
    assert "Which q2?" in optimizer.prompts[1]
    assert [(I.text, I.parent) for I in P.family[2:]] == [("crossed", 0), ("mutated", 0)]
    Q = programs(0)
    Q.load_state_dict(json.loads(json.dumps(P.state_dict())))
    assert (Q.family, Q.ids, Q.ratings) == (P.family, P.ids, P.ratings)


# ---- FST


def test_the_pareto_front_by_hand():
    """A and B win questions of their own; what C wins A wins too; D wins only what everybody
    fails."""
    rewards = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], float)
    assert instance_wins(rewards).tolist() == [3, 2, 0, 0]
    # of equals one stays
    assert instance_wins(np.array([[0.5, 0.0], [0.5, 0.0]])).tolist() == [0, 2]
    assert instance_wins(np.zeros((1, 3))).tolist() == [3]
    # Removal goes from the lowest mean up: C is covered by A and B together
    assert instance_wins(np.array([[1, 0, 1], [0, 1, 1], [0, 0, 1.0]])).tolist() == [2, 2, 0]


def test_a_question_s_rollouts_go_round_the_prompts():
    P, D = programs(3, Front(FST)), list(questions("q", 4).values())
    jobs = P.draw_jobs(np.random.default_rng(0), D, 6)
    assert [(job.question, job.group) for job in jobs] == [
        (q, k) for k, q in enumerate(D) for _ in range(6)
    ]
    for k in range(0, 24, 6):
        ids = [job.instruction_id for job in jobs[k : k + 6]]
        assert sorted(ids[:3]) == [0, 1, 2] and ids[:3] == ids[3:]
    starts = {
        P.draw_jobs(np.random.default_rng(seed), D, 5)[0].instruction_id for seed in range(20)
    }
    assert starts == {0, 1, 2} and P.probabilities() == pytest.approx([1 / 3] * 3)


def test_a_revision_passes_if_it_is_strictly_better_on_what_was_shown_and_joins_if_it_wins():
    good, same = names(2)
    _, policy, log, optimizer = run(
        "fst", {good: 6, same: 0}, [same], [good], policy=WatchedPolicy, T=3
    )
    # after every second step, but not after the last
    assert [(row["t"], row["round"]) for row in log.rows("call")] == [(2, 0), (2, 1)]
    assert all("gold q" in prompt for prompt in optimizer.prompts)
    [first, second] = log.rows("verified")
    passes = [[(c["text"], c["joined"]) for c in row["verified"]] for row in (first, second)]
    assert passes == [[(same, False)], [(good, True)]]  # a tie does not pass
    front, passed = log.rows("scored")
    assert front["scored"] == [FIRST] and passed["scored"] == [good] and len(front["D_B"]) == 3
    assert front["D_B"] == passed["D_B"] and [front["rollouts"], passed["rollouts"]] == [3, 3]
    tried = set(first["D_B"])
    assert tried and not tried & set(front["D_B"])  # nothing is chosen by what was shown
    # the first prompt wins nothing that the new one does not
    assert log.P.ids == [1] and log.P.family[0].left == 2
    assert log.P.family[1].verified == 1.0 and log.P.family[1].parent == 0


# ---- flags and prompts


@pytest.mark.parametrize(
    "kind, flags, says",
    [
        (ESPLConfig, dict(crossover=1.5), "--crossover 1.5: should be less"),
        (ESPLConfig, dict(buffer=10), "--buffer 10: E-SPL learns from whole steps"),
        (FSTConfig, dict(D_B=0), "--D_B 0: FST chooses prompts by what they win"),
    ],
)
def test_an_impossible_flag_is_one_line(kind, flags, says):
    with pytest.raises(Fault, match=says):
        validate(build(kind, PRESETS["world"] | flags))


KINDS = {  # of runs whose evolutions are their own; E-SPL's D_B asks nothing
    "espl": (ESPLConfig, Pool, espl.ESPL, dict(D_B=0, crossover=0.5, rivals=2, G=4, seed=1)),
    "fst": (FSTConfig, Front, fst.GEPA, dict(N_P=2, D_B=3, batch=6, rounds=2, failures=1, seed=10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_after_any_death_a_run_ends_the_same(tmp_path, monkeypatch, name):
    config, population, evolution, knobs = KINDS[name]
    cfg = config(**vars(CFG) | STEPS | knobs | dict(mode=name))
    check_deaths(
        deaths_of(tmp_path, monkeypatch, config=cfg, population=population, evolution=evolution), 1
    )
