"""The population of instructions (§3.1, Eq. 4 and 6, Alg. 1 L5, L9-13, L17) and the replay buffer
(§3.2)."""

import io
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from config import Config
from population import Experience, Population, RatedCandidate, ReplayBuffer, mean_rewards
from tasks import Question, Trajectory


def played(rewards):
    """Trajectories with these rewards, by the id of their instruction."""
    question = Question("q", "Who?", ("x",), "s")
    return [Trajectory(j, question, 0, [], 0, reward=r) for j, row in rewards.items() for r in row]


def population(*rewards, tau_s=0.2, window=5):
    """Returns instructions I0, I1, ... with these weights; None: not sampled yet."""
    P = Population(Config(tau_s=tau_s, window=window))
    for k, r in enumerate(rewards):
        P.join(f"I{k}", None if k == 0 else 0, 0)
        if r is not None:
            P.update_weights(played({k: [r]}))
    return P


def rng(seed=0):
    return np.random.default_rng(seed)


def weights(P):
    return [I.w for I in P.active]


# --- Eq. 4
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights, tau_s, p",
    [
        ((0.5, 0.3, 0.0), 0.2, [math.exp(2.5), math.exp(1.5), 1.0]),
        ((None,) * 7, 0.2, [1] * 7),  # nobody has been sampled yet
        ((1.0, 0.0), 1e-4, [1, 0]),  # without overflow
    ],
)
def test_selection_probabilities_are_the_softmax_of_the_weights_over_tau_s(weights, tau_s, p):
    want = [x / sum(p) for x in p]
    assert population(*weights, tau_s=tau_s).probabilities() == pytest.approx(want, rel=1e-12)


def test_only_the_active_instructions_have_a_probability():
    P = population(0.4, 0.1, 0.2)
    P.prune(P.ranked(), 1, t=5)  # I1 leaves
    e = [math.exp(0.4 / 0.2), math.exp(0.2 / 0.2)]
    assert P.probabilities() == pytest.approx([x / sum(e) for x in e])


def test_sampling_follows_the_probabilities():
    P = population(0.5, 0.4, 0.2, 0.0)
    n = 20_000
    drawn = Counter(I.id for I in P.sample(rng(), n))
    expected = n * P.probabilities()
    chi2 = sum((drawn[k] - expected[k]) ** 2 / expected[k] for k in range(4))
    assert chi2 < 16.27  # the 99.9 % quantile at 3 degrees of freedom
    drawn = population(0.2, 0.2).sample(rng(), 512)
    same_as_next = sum(a.id == b.id for a, b in zip(drawn, drawn[1:], strict=False))
    assert 200 < same_as_next < 312  # independently: 256 +- 5 standard deviations


# --- Eq. 6
# --------------------------------------------------------------------------------------------------------


def test_the_weight_is_the_mean_of_the_steps_r_bar_whatever_their_numbers_of_trajectories():
    P = population(None)
    P.update_weights(played({0: [1, 1, 1, 1, 1, 0, 0, 0, 1, 0]}))  # two questions of G = 5
    assert P.family[0].rewards == [pytest.approx(0.6)] == [pytest.approx(w) for w in weights(P)]
    P.update_weights(played({0: [0] * 2}))
    assert weights(P) == [pytest.approx((0.6 + 0) / 2)]


def test_the_weight_is_a_moving_average_over_the_last_n_steps():
    P = population(None, window=3)
    seen = []
    for r in (0.1, 0.4, 0.1, 0.7, 1.0):
        P.update_weights(played({0: [r]}))
        seen += weights(P)
    by_hand = [
        0.1,
        (0.1 + 0.4) / 2,
        (0.1 + 0.4 + 0.1) / 3,
        (0.4 + 0.1 + 0.7) / 3,
        (0.1 + 0.7 + 1.0) / 3,
    ]
    assert seen == pytest.approx(by_hand)


def test_an_instruction_that_was_not_sampled_keeps_its_window():
    P = population(None, None, window=2)
    P.update_weights(played({0: [0.2], 1: [0.8]}))
    for _ in range(5):
        P.update_weights(played({0: [1.0]}))
    assert weights(P) == [pytest.approx(1.0), pytest.approx(0.8)]


def test_r_bar_is_a_mean_per_instruction():
    assert mean_rewards(played({4: [1, 0, 0.5], 2: [1, 1]})) == {4: pytest.approx(0.5), 2: 1.0}
    assert mean_rewards([]) == {}
    assert mean_rewards(played({None: [1.0]})) == {}  # of a text that is in no population


# --- pruning
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "N_parent, sizes", [(1, [7, 4, 2, 1, 1]), (2, [7, 4, 2, 2]), (3, [7, 4, 3, 3])]
)
def test_pruning_drops_the_bottom_half_but_never_below_N_parent(N_parent, sizes):
    P = population(0.1, 0.7, 0.3, 0.2, 0.6, 0.5, 0.4)
    seen = [len(P)]
    while len(seen) < len(sizes):
        dropped = P.prune(P.ranked(), N_parent, t=5)
        assert len(dropped) == seen[-1] - len(P)
        seen.append(len(P))
    assert seen == sizes


def test_the_instructions_of_lowest_weight_leave():
    P = population(0.1, 0.7, 0.3, 0.2, 0.6, 0.5, 0.4)
    assert sorted(I.id for I in P.prune(P.ranked(), 1, t=5)) == [0, 2, 3]
    assert [I.id for I in P.active] == [1, 4, 5, 6]
    assert sorted(I.id for I in P.prune(P.ranked(), 1, t=10)) == [5, 6]
    # the family keeps everyone
    assert [I.left for I in P.family] == [5, None, 5, 5, None, 10, 10]


def test_ties_keep_the_parents_then_who_joined_first():
    P = population(0.5, 0.5, 0.5, 0.5)
    assert sorted(I.id for I in P.prune(P.ranked(), 1, t=5)) == [2, 3]
    P.replace_by([P.family[1]], [revision("child", 1)], t=15)
    # the parent is older and has no better weight
    assert [I.text for I in P.prune(P.ranked(), 1, t=20)] == ["child"]
    assert P.best().id == 1


def test_pruning_goes_by_the_ranking_it_is_given():
    P = population(0.1, 0.7, 0.3, 0.2)
    assert [I.id for I in P.prune(P.ranked()[::-1], 1, t=5)] == [2, 1]
    assert P.ids == [0, 3]


# --- who joins, and succession
# ------------------------------------------------------------------------------------


def revision(text, parent=0, r=(0.5,), r_parent=(0.5,)):
    return RatedCandidate(text, parent, list(r), list(r_parent))


def test_none_below_its_parent_is_admitted_and_no_more_than_there_is_room_for():
    above, equal, below = (
        revision(name, 0, [r], [0.5]) for name, r in (("a", 0.75), ("b", 0.5), ("c", 0.25))
    )
    # parents differ: what counts is a candidate's own
    of_another = revision("d", 1, [0.125], [0.0])
    verified = [above, equal, below, of_another]
    P = population(0.9, 0.1)
    assert P.choose_joining(verified, 4) == [above, equal, of_another]
    assert P.choose_joining(verified, 2) == [above, equal] and P.choose_joining([below], 4) == []


def test_after_an_evolution_the_parents_stay_and_all_weights_are_zero():
    P = population(0.2, 0.9, 0.4, 0.6)
    P.replace_by(P.ranked()[:2], [revision(f"new {k}", parent=1) for k in range(3)], t=15)
    assert [I.id for I in P.active] == [1, 3, 4, 5, 6]
    assert [(I.id, I.left) for I in P.family if I.left] == [(0, 15), (2, 15)]
    assert weights(P) == [0.0] * 5
    assert P.probabilities() == pytest.approx([1 / 5] * 5)
    assert [(I.text, I.parent, I.born, I.verified, I.left) for I in P.active[2:]] == [
        (f"new {k}", 1, 15, 0.5, None) for k in range(3)
    ]


def test_right_after_an_evolution_the_best_instruction_is_the_parent():
    P = population(0.2, 0.4, 0.9)
    P.replace_by([P.family[2]], [revision("new", 2, [1.0])], t=15)
    assert P.best().id == 2
    # from then on weights decide, and old rewards do not come back
    P.update_weights(played({2: [0.3], 3: [0.4]}))
    assert weights(P) == [pytest.approx(0.3), pytest.approx(0.4)] and P.best().id == 3


# --- state
# --------------------------------------------------------------------------------------------------------


def test_a_population_restored_from_json_continues_identically():
    P = population(0.1, 0.7, 0.3, 0.2)
    P.prune(P.ranked(), 1, t=5)
    P.replace_by(P.ranked()[:1], [revision("new", 1, [0.25])], t=15)
    P.update_weights(played({1: [0.5, 0.25], 4: [1.0]}))
    Q = Population(Config())
    Q.load_state_dict(json.loads(json.dumps(P.state_dict())))
    assert Q.family == P.family and Q.ids == P.ids
    for X in (P, Q):
        X.update_weights(played({1: [0.0]}))
        X.join("newer", 1, 16)
    assert (Q.probabilities() == P.probabilities()).all()  # to the last bit
    assert Q.state_dict() == P.state_dict()


# --- the replay buffer
# --------------------------------------------------------------------------------------------


def tau(question, reward=0.0, instruction=0, response="response"):
    q = Question(question, f"{question}?", ("gold", "or this"), "s")
    return Trajectory(instruction, q, 0, [], 0, reward=reward, response=response, failed=reward < 1)


def words(tau):
    return f"{tau.question.text} {tau.response}"


def buffer(*steps, capacity=1000):
    """Returns a buffer after steps 1, 2, ... with these trajectories."""
    B = ReplayBuffer(capacity)
    for t, taus in enumerate(steps, 1):
        B.add(t, taus, map(words, taus))
    return B


def named(failures):
    return [e.question_id for e in failures]


def test_the_buffer_keeps_the_latest_trajectories_up_to_its_capacity():
    B = buffer(*[[tau(f"q{t}a"), tau(f"q{t}b")] for t in range(1, 5)], capacity=5)
    assert named(B.items) == ["q2b", "q3a", "q3b", "q4a", "q4b"]
    B.add(9, [tau(f"r{k}") for k in range(8)], ["r"] * 8)  # a step of more than the capacity
    assert named(B.items) == ["r3", "r4", "r5", "r6", "r7"]


def test_failures_under_the_parent_come_first_then_the_latest_step_s_then_the_lowest_rewards():
    older = [tau(f"own{k}", instruction=4) for k in range(2)]
    newer = [tau(f"r{r}", r, instruction=5) for r in (0.5, 0.0, 0.75, 1.0)]
    both = [tau("own0", 1.0, 4, "right"), tau("own0", 0.0, 5, "theirs")]
    B = buffer(older, newer, both)
    for seed in range(10):
        shown = B.choose_failures(rng(seed), 4, 4)
        assert {*named(shown[:2])} == {"own0", "own1"} and named(shown[2:]) == ["r0.0", "r0.5"]
        assert "own0? response" in [e.text for e in shown]
        shown = B.choose_failures(rng(seed), 9, 5)
        assert named(shown) == ["own0", "r0.0", "r0.5", "r0.75", "own1"]
        assert shown[0] == Experience(
            3, 5, "own0", "own0? theirs", ("gold", "or this"), 0.0, failed=True
        )
        assert named(B.choose_failures(rng(seed), 2, 99)) == ["own0", "r0.0"]  # the parent has none


def test_no_question_is_shown_twice_among_the_failures():
    B = buffer([tau("s")], [], [tau("q", response=str(k)) for k in range(50)] + [tau("r")])
    shown = [B.choose_failures(rng(seed), 4, 0) for seed in range(20)]
    assert all(sorted(named(three)) == ["q", "r", "s"] for three in shown)
    # which one is drawn
    assert len({e.text for three in shown for e in three if e.question_id == "q"}) > 5
    assert B.choose_failures(rng(3), 4, 0) == shown[3]


def test_a_success_is_never_shown_as_a_failure():
    judged = [tau("poor", 3.0), tau("good", -1.0)]  # what a failure is, the task says
    judged[0].failed, judged[1].failed = True, False
    assert named(buffer(judged).choose_failures(rng(), 4, 0)) == ["poor"]
    assert ReplayBuffer(10).choose_failures(rng(), 4, 0) == []


def test_verification_questions_are_distinct_latest_first_and_at_most_n():
    B = buffer(
        *[[tau(f"q{t}-{k % 4}", reward=float(k % 3 == 0)) for k in range(12)] for t in (1, 2, 3)]
    )
    D_B = B.choose_question_ids(rng(), 6, shown=[])
    assert len(D_B) == len(set(D_B)) == 6
    assert {q[:2] for q in D_B[:4]} == {"q3"}  # successes and failures alike
    assert {q[:2] for q in D_B[4:]} == {"q2"}
    assert len(B.choose_question_ids(rng(), 100, shown=[])) == 12
    assert B.choose_question_ids(rng(), 6, shown=[]) == D_B
    shown = B.choose_failures(rng(), 4, 0)
    assert {*B.choose_question_ids(rng(), 100, shown)} == {e.question_id for e in B.items} - {
        *named(shown)
    }
    assert any(B.choose_question_ids(rng(seed), 6, shown=[]) != D_B for seed in range(1, 5))


def test_a_buffer_restored_from_a_mark_gives_the_same_failures_and_questions():
    B = buffer(*[[tau(f"q{t}{k}", float(k == 0), k, "é\n☃") for k in range(5)] for t in (1, 2)])
    C = ReplayBuffer(1000)
    torch.save(B.state_dict(), mark := io.BytesIO())
    mark.seek(0)
    C.load_state_dict(torch.load(mark, weights_only=True))
    assert C.items == B.items
    assert C.choose_failures(rng(3), 4, 2) == B.choose_failures(rng(3), 4, 2)
    assert C.choose_question_ids(rng(3), 4, []) == B.choose_question_ids(rng(3), 4, [])
