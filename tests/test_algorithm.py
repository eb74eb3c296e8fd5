"""Algorithm 1 and its evolution, rule by rule, with a policy and an optimizer that read their answers from tables."""

import inspect
import itertools
import re

import pytest

import inspo
from config import SEARCH_R1, Config
from tasks.questions import Question, draw, rng
from plumbing.faults import Fault, OptimizerDown
from journal.log import Log
from inspo import evolve
from population import Population, ReplayBuffer
from reflect import Call, Optimizer
from rollout import Job, Trajectory
from training.policy import Policy

T_NOW = 9  # the step after which the tests of `evolve` evolve


class TablePolicy:
    """Under an instruction I it answers the first right[I] of the questions of each letter, and no other."""

    def __init__(self, right: dict[str, int]):
        self.right, self.rollouts, self.updates, self.memory = right, [], [], {}

    def rollout(self, t, purpose, jobs, temperature=None):
        inspect.signature(Policy.rollout).bind(self, t, purpose, jobs, temperature)
        self.rollouts.append((t, purpose, jobs, temperature))
        return [self.play(job) for job in jobs]

    def play(self, job: Job) -> Trajectory:
        tau = Trajectory(job.instruction, job.question, job.group, [], 0, response=f"said under {job.text}")
        knows = int(job.question.id[1:]) < self.right[job.text]
        tau.prediction = f"The {job.question.golds[0].upper()}." if knows else "no idea"
        return tau

    def update(self, t, taus):
        inspect.signature(Policy.update).bind(self, t, taus)
        self.updates.append((t, taus, [(tau.reward, tau.advantage) for tau in taus]))
        return {"loss": float(t)}


class TableOptimizer:
    """Replies to its k-th call with these candidates, or raises what is there instead; then with nothing."""

    def __init__(self, *replies: list[str] | Exception):
        self.replies, self.prompts, self.whens = replies, [], []

    def ask(self, prompt, when):
        inspect.signature(Optimizer.ask).bind(self, prompt, when)
        k = len(self.prompts)
        self.prompts.append(prompt)
        self.whens.append(when)
        reply = self.replies[k] if k < len(self.replies) else []
        if isinstance(reply, Exception):
            raise reply
        text = "\n".join(f"<ins_{i}> {text} </ins_{i}>" for i, text in enumerate(reply, 1))
        return Call(when, prompt, text, 1, 1, 0.0, False)


class Recorder:
    """A log of `T` steps. It keeps (name, *arguments) of every call, and what it sees of P and B at that moment."""

    def __init__(self, T: int = 0, restored: tuple | None = None):
        self.T, self.restored, self.events, self.seen = T, restored, [], []
        self.t, self.phase = 0, ""

    def restore(self, P):
        return self.restored

    def steps(self, P, B):
        self.P, self.B = P, B
        yield from range(1, self.T + 1)

    def limit(self, rollouts):
        """The last one is kept; this log has none."""
        self.rollouts = rollouts
        return ""

    def __getattr__(self, name):
        def record(*args):
            inspect.signature(getattr(Log, name)).bind(self, *args)
            self.events.append((name, *args))
            self.look(name)

        return record

    def look(self, name: str) -> None:
        """Keeps (name, weights, latest step in the buffer)."""
        if "P" in vars(self):  # `steps` has been called
            self.seen.append((name, {I.id: I.w for I in self.P.active}, max((e.t for e in self.B.items), default=0)))

    def of(self, name: str) -> list[tuple]:
        """Returns the arguments of the calls with this name."""
        return [args for event, *args in self.events if event == name]


def questions(letter: str, n: int) -> dict[str, Question]:
    return {
        f"{letter}{k}": Question(f"{letter}{k}", f"Which {letter}{k}?", (f"gold {letter}{k}",), "s") for k in range(n)
    }


# Four questions that are failed and shown, and ten that are left to verify on: right[I] / 10 is the mean reward of I.
FAILED, VERIFIED = questions("f", 4), questions("v", 10)


def replayed(*played: tuple[int, Question, int, float]) -> ReplayBuffer:
    """Returns a buffer with (step, question, instruction, reward), in the order of the steps."""
    B = ReplayBuffer(1000)
    for t, q, instruction, r in played:
        B.add(t, [Trajectory(instruction, q, 0, [], 0, reward=r, response=f"said by #{instruction}")])
    return B


BUFFER = [(T_NOW, q, 0, 0.0) for q in FAILED.values()] + [(T_NOW, q, 0, 1.0) for q in VERIFIED.values()]


class Evolution:
    """`evolve` on a population with these weights, under a policy with these accuracies, with these replies."""

    def __init__(self, weights: dict[str, float], right: dict[str, int], *replies, buffer=BUFFER, **knobs):
        self.cfg = Config(**dict(N_P=4, N_parent=1, top_n=6, rounds=5, failures=4, D_B=10) | knobs)
        self.P = Population(self.cfg.tau_s, self.cfg.window)
        for text, w in weights.items():
            I = self.P.join(text, None, 0)
            I.rewards = [w]
        self.policy, self.optimizer, self.log = TablePolicy(right), TableOptimizer(*replies), Recorder()
        D, B = FAILED | VERIFIED, replayed(*buffer)
        evolve(self.cfg, T_NOW, self.P, B, self.policy, self.optimizer, D, self.log)

    @property
    def texts(self) -> list[str]:
        return [I.text for I in self.P.active]

    @property
    def joined(self) -> list[list[str]]:
        """What joined by its own merit, by round."""
        return [[c.text for c in joining] for *_, joining in self.log.of("verified")]

    @property
    def shortfall(self) -> str:
        [args] = self.log.of("evolved") or self.log.of("not_evolved")
        return args[-1]

    def shown(self, call: int = 0) -> list[str]:
        """The questions of the failures in a prompt, and who said what there."""
        return re.findall(r"Response: Question: Which (\w+)\?\n", self.optimizer.prompts[call])


def seed_that_draws(*parents: int, of: int) -> int:
    """Returns a seed with which the rounds revise these parents of `of`, by rank."""
    draws = lambda seed: [rng(seed, T_NOW, f"evolve {k}").integers(of) for k in range(len(parents))]  # noqa: E731
    return next(seed for seed in itertools.count() if draws(seed) == list(parents))


# --- the proposer (L20, App. E, Fig. 3) -----------------------------------------------------------------------------


def test_a_proposer_is_shown_failures_or_scores_or_the_parent_alone():
    right = {"old": 5, "weak": 1, "new": 5}
    prompts = {}
    for proposer in ("reflection", "history", "paraphrase"):
        e = Evolution({"weak": 0.125, "old": 0.5}, right, ["new"], N_P=2, proposer=proposer)
        prompts[proposer] = e.optimizer.prompts[0]
    shown = "<ins_0> weak </ins_0>\n<score_0> 12 </score_0>\n<ins_1> old </ins_1>\n<score_1> 50 </score_1>"
    assert prompts["history"].startswith(f"<history>\n{shown}\n</history>\n")  # the best stands last, as in OPRO
    assert "gold f" not in prompts["history"] and "Give 1 different but better" in prompts["history"]
    assert prompts["paraphrase"].startswith("<ins_0> old </ins_0>\n\nImprove the above prompt.")
    assert "it still gets the following examples wrong" in prompts["reflection"] and "gold f" in prompts["reflection"]


# --- verification: who joins (L21) --------------------------------------------------------------------------------


def test_a_candidate_joins_if_it_is_not_below_its_parent():
    e = Evolution({"old": 0.5}, {"old": 5, "above": 6, "equal": 5, "below": 4}, ["below", "equal", "above"], N_P=4)
    assert e.joined == [["above", "equal"]]
    assert e.texts == ["old", "above", "equal", "below"]
    assert [(I.parent, I.born, I.verified) for I in e.P.active[1:3]] == [(0, T_NOW, 0.6), (0, T_NOW, 0.5)]


def test_the_gate_is_the_parent_s_reward_on_the_same_questions_not_its_weight():
    e = Evolution({"old": 0.9}, {"old": 1, "new": 2}, ["new"], N_P=2)
    assert e.joined == [["new"]]
    e = Evolution({"old": 0.0}, {"old": 3, "new": 2}, ["new"], N_P=2)
    assert e.joined == [[]] * len(e.joined)


def test_the_best_candidates_join_first_and_equals_in_the_order_of_the_reply():
    right = {"old": 1, "c3": 3, "c7": 7, "c5": 5, "d5": 5}
    e = Evolution({"old": 0.1}, right, ["c3", "c5", "c7", "d5"], N_P=5)
    assert e.texts == ["old", "c7", "c5", "d5", "c3"]
    e = Evolution({"old": 0.1}, right, ["c5"], ["c3", "c7", "d5"], N_P=4)
    assert e.texts == ["old", "c5", "c7", "d5"]


def test_at_most_top_n_join_in_a_round():
    right = dict.fromkeys(["old", "a", "b", "c", "d", "e"], 5)
    e = Evolution({"old": 0.5}, right, ["a", "b", "c"], ["d", "e"], N_P=5, top_n=2)
    assert e.joined == [["a", "b"], ["d", "e"]]
    assert e.texts == ["old", "a", "b", "d", "e"]


def test_the_population_never_grows_beyond_N_P():
    right = dict.fromkeys(["old", "a", "b", "c", "d", "e"], 5)
    e = Evolution({"old": 0.5}, right, ["a"], ["b", "c", "d", "e"], N_P=3)
    assert e.joined == [["a"], ["b"]]
    assert e.texts == ["old", "a", "b"]


def test_rounds_follow_until_the_population_is_full():
    right = dict.fromkeys(["old", "a", "b", "c", "d"], 5)
    e = Evolution({"old": 0.5}, right, ["a"], ["b"], ["c"], ["d"], N_P=4)
    assert e.joined == [["a"], ["b"], ["c"]]
    assert e.optimizer.whens == ["t9 r0", "t9 r1", "t9 r2"]


def test_there_are_at_most_so_many_rounds_and_places_may_stay_empty():
    right = dict.fromkeys(["old", "a", "b", "c", "d"], 5)
    e = Evolution({"old": 0.5}, right, ["a"], ["b"], ["c"], ["d"], N_P=7, rounds=2)
    assert e.texts == ["old", "a", "b"] and len(e.optimizer.prompts) == 2
    assert e.shortfall == "too few candidates"


def test_a_round_without_a_well_formed_candidate_counts_and_the_next_follows():
    e = Evolution({"old": 0.5}, {"old": 5, "new": 5}, [], ["new"], N_P=2, rounds=2)
    assert e.texts == ["old", "new"]
    assert [purpose for _, purpose, *_ in e.policy.rollouts] == ["verify 1"]


def test_where_the_parents_fill_the_population_nobody_is_asked():
    e = Evolution({"a": 0.5, "b": 0.4}, {}, N_P=2, N_parent=2)
    assert not e.optimizer.prompts and e.P.probabilities()[0] > 0.5 and e.log.of("not_evolved")


def test_without_verification_every_candidate_joins_in_the_order_of_the_reply_and_nobody_is_asked():
    e = Evolution({"old": 0.5}, {"old": 5, "bad": 0, "good": 9}, ["bad", "good"], N_P=3, D_B=0)
    assert e.texts == ["old", "bad", "good"]
    assert all(not jobs for *_, jobs, _ in e.policy.rollouts)


# --- spare candidates fill what is left ---------------------------------------------------------------------------


def test_places_left_go_to_candidates_below_their_parent():
    e = Evolution({"old": 0.5}, {"old": 5, "good": 6, "near": 4, "far": 3}, ["far", "good"], ["near"], N_P=3)
    assert e.joined[0] == ["good"]
    assert e.texts == ["old", "good", "near"]


def test_no_candidate_significantly_worse_than_its_parent_fills_a_place():
    right = {"old": 9, "four lost": 5, "five lost": 4}
    e = Evolution({"old": 0.9}, right, ["five lost", "four lost"], N_P=4)
    assert e.texts == ["old", "four lost"]  # 4 of 4 is no proof at 5 %, 5 of 5 is
    e = Evolution({"old": 0.9}, right, ["five lost"], N_P=4)
    assert e.texts == ["old"] and e.log.of("not_evolved")


def test_the_smallest_loss_against_its_own_parent_fills_a_place_first():
    """Parents differ in how much they know: raw rewards of different rounds do not compare."""
    right = {"strong": 8, "weak": 3, "x": 5, "y": 2}
    seed = seed_that_draws(0, 1, of=2)
    e = Evolution({"strong": 0.8, "weak": 0.3}, right, ["x"], ["y"], N_parent=2, N_P=3, seed=seed)
    assert e.joined[:2] == [[], []]
    assert e.texts == ["strong", "weak", "y"]
    assert e.P.active[2].parent == 1 and e.P.active[2].verified == 0.2


def test_candidates_of_every_round_may_fill_a_place():
    right = {"old": 5, "near": 4, "far": 3}
    e = Evolution({"old": 0.5}, right, ["near"], ["far"], N_P=3)
    assert e.texts == ["old", "near", "far"]


def test_a_good_candidate_beyond_top_n_fills_a_place_before_worse_ones():
    right = {"old": 5, "a": 8, "b": 7, "c": 4}
    e = Evolution({"old": 0.5}, right, ["c", "b", "a"], N_P=4, top_n=1, rounds=1)
    assert e.joined[0] == ["a"] and e.texts == ["old", "a", "b", "c"]


# --- parents and what they are revised by (L17, L19, L20) ----------------------------------------------------------


def test_parents_are_the_best_by_weight_and_the_others_leave():
    right = dict.fromkeys(["a", "b", "c", "new"], 5)
    e = Evolution({"a": 0.2, "b": 0.9, "c": 0.6}, right, ["new"], N_parent=2, N_P=3)
    assert e.texts == ["b", "c", "new"]
    assert [(I.text, I.left) for I in e.P.family] == [("a", T_NOW), ("b", None), ("c", None), ("new", None)]
    [(t, P, parents, joined, _)] = e.log.of("evolved")
    assert (t, P, [I.text for I in parents], [I.text for I in joined]) == (T_NOW, e.P, ["b", "c"], ["new"])


def test_every_round_draws_one_of_the_parents_to_revise():
    right = dict.fromkeys(["strong", "weak", "c0", "c1", "c2"], 5)
    seed = seed_that_draws(1, 0, 1, of=2)
    e = Evolution({"strong": 0.8, "weak": 0.3}, right, ["c0"], ["c1"], ["c2"], N_parent=2, N_P=5, seed=seed)
    for k, parent in enumerate(("weak", "strong", "weak")):
        assert f"<ins_0>\n{parent}\n</ins_0>" in e.optimizer.prompts[k]
        verified = {job.text for job in e.policy.rollouts[k][2]}
        assert verified == {parent, f"c{k}"}
    assert [I.parent for I in e.P.active[2:]] == [1, 0, 1]
    drawn = {int(rng(seed, T_NOW, "evolve 0").integers(2)) for seed in range(20)}
    assert drawn == {0, 1}


def test_no_text_is_proposed_twice_whoever_its_parent_is():
    """Neither a parent's own text nor a candidate of an earlier round, however it is punctuated."""
    right = dict.fromkeys(["strong", "weak", "new", "other"], 5)
    seed = seed_that_draws(0, 1, of=2)
    replies = ["WEAK!", "Strong.", "new"], ["new.", "other"]
    e = Evolution({"strong": 0.8, "weak": 0.3}, right, *replies, N_parent=2, N_P=4, seed=seed)
    assert e.texts == ["strong", "weak", "new", "other"]
    rejected = [[row["k"] for row in rejected] for *_, rejected in e.log.of("proposed")]
    assert rejected == [[1, 2], [1]]


def test_a_pruned_or_replaced_instruction_may_be_proposed_again():
    e = Evolution({"a": 0.5, "b": 0.1}, {"a": 5, "b": 6}, ["b"], N_P=2)
    assert e.texts == ["a", "b"] and [I.id for I in e.P.active] == [0, 2]


def test_the_optimizer_is_asked_for_a_full_generation_after_the_failures():
    e = Evolution({"old": 0.5}, {"old": 5, "new": 5}, ["new"], N_P=7, N_parent=1, rounds=1)
    [prompt] = e.optimizer.prompts
    assert "giving 6 different but better candidates" in prompt
    assert sorted(e.shown()) == ["f0", "f1", "f2", "f3"]
    assert "Correct answer: gold f2" in prompt and "said by #0" in prompt


def test_the_parent_s_own_failures_are_shown_first():
    played = [
        (7, FAILED["f0"], 0, 0.0),
        (8, FAILED["f1"], 0, 0.0),
        (9, FAILED["f2"], 1, 0.0),
        (9, FAILED["f3"], 1, 0.0),
    ]
    played += [(6, q, 0, 1.0) for q in VERIFIED.values()]
    right = {"a": 5, "b": 5, "new": 5}
    e = Evolution(
        {"a": 0.9, "b": 0.1}, right, ["new"], buffer=sorted(played, key=lambda row: row[0]), failures=3, N_P=2
    )
    assert e.shown()[:2] == ["f1", "f0"] and e.shown()[2] in ("f2", "f3")


def test_a_candidate_that_gives_an_answer_away_is_rejected():
    e = Evolution({"old": 0.5}, {"old": 5, "new": 5}, ["it is gold f1", "new"], N_P=3)
    assert e.texts == ["old", "new"]
    [(*_, accepted, rejected), *_] = e.log.of("proposed")
    assert accepted == [2] and rejected[0]["reason"] == "contains the gold answer 'gold f1'"


def test_no_more_candidates_are_verified_than_were_asked_for():
    many = [f"new {k}" for k in range(500)]
    e = Evolution({"old": 0.5}, {"old": 5} | dict.fromkeys(many, 4), many, N_P=4, rounds=1, D_B=10)
    [(*_, accepted, rejected)] = e.log.of("proposed")
    assert accepted == [1, 2, 3] and [row["k"] for row in rejected] == [4]
    [(_, _, _, _, scored, _)] = e.log.of("verified")
    assert len(scored) == 3 and e.log.rollouts == (1 + 3) * 10


def test_an_evolution_that_has_reached_a_limit_asks_nobody_and_says_so(monkeypatch):
    monkeypatch.setattr(Recorder, "limit", lambda self, rollouts: "--max_overhead 0.1: enough")
    e = Evolution({"old": 0.5}, {"old": 5}, ["new"], N_P=3)
    assert e.optimizer.prompts == [] and e.texts == ["old"] and e.shortfall == "--max_overhead 0.1: enough"


# --- the verification rollouts ------------------------------------------------------------------------------------


def test_parent_and_candidates_answer_the_same_questions_once_each_at_the_run_s_temperature():
    e = Evolution({"old": 0.5}, dict.fromkeys(["old", "a", "b"], 5), ["a", "b"], N_P=3)
    [(t, purpose, jobs, temperature)] = e.policy.rollouts
    assert (t, purpose, temperature) == (T_NOW, "verify 0", None)
    asked = sorted((job.text, job.question.id) for job in jobs)
    assert asked == sorted((text, v) for text in ("old", "a", "b") for v in VERIFIED)
    assert len({job.group for job in jobs}) == len(jobs)  # none of them is a repetition of another
    assert {job.text: job.instruction for job in jobs} == {"old": 0, "a": 1, "b": 2}


def test_the_questions_of_the_failures_shown_are_not_verified_on():
    e = Evolution({"old": 0.5}, dict.fromkeys(["old", "a", "b"], 5), ["a"], ["b"], failures=2, D_B=12, N_P=3)
    for k in (0, 1):
        verified_on = {job.question.id for job in e.policy.rollouts[k][2]}
        assert len(e.shown(k)) == 2 and len(verified_on) == 12
        assert verified_on == set(FAILED | VERIFIED) - set(e.shown(k))


def test_D_B_limits_the_questions_verified_on():
    e = Evolution({"old": 0.5}, dict.fromkeys(["old", "a"], 10), ["a"], D_B=3, N_P=2)
    [(_, _, parent, D_B, scored, joining)] = e.log.of("verified")
    assert len(D_B) == 3 and {job.question for job in e.policy.rollouts[0][2]} == set(D_B)
    assert parent.text == "old" and scored == joining and scored[0].r == scored[0].r_parent == 1.0


def test_the_reward_of_verification_is_that_of_training(monkeypatch):
    monkeypatch.setattr(inspo, "reward", lambda tau: 0.75 if tau.prediction == "no idea" else 0.25)
    e = Evolution({"old": 0.5}, {"old": 10, "new": 0}, ["new"], N_P=2)
    assert e.joined == [["new"]] and e.P.active[1].verified == 0.75


# --- nothing new --------------------------------------------------------------------------------------------------


def assert_untouched(e: Evolution) -> None:
    assert e.texts == ["a", "b"] and [I.w for I in e.P.active] == [0.5, 0.25]
    assert [I.left for I in e.P.family] == [None, None]
    assert not e.log.of("evolved") and len(e.log.of("not_evolved")) == 1


BOTH = {"a": 0.5, "b": 0.25}


def test_without_a_reply_P_and_its_weights_stay_as_they_are():
    e = Evolution(BOTH, {}, OptimizerDown("503 for an hour"), N_P=4)
    assert_untouched(e)
    assert e.shortfall == "the optimizer gave no reply (503 for an hour)"
    assert len(e.optimizer.prompts) == 1 and not e.policy.rollouts  # not asked again in this evolution


def test_what_joined_before_the_optimizer_fell_silent_stays():
    right = {"a": 5, "new": 6, "near": 4}
    e = Evolution(BOTH, right, ["near", "new"], OptimizerDown("time-out"), N_P=4)
    assert e.texts == ["a", "new", "near"] and [I.w for I in e.P.active] == [0.0] * 3
    assert e.shortfall == "the optimizer gave no reply (time-out)" and len(e.optimizer.prompts) == 2


def test_without_a_failure_there_is_nothing_to_learn_from():
    e = Evolution(BOTH, {}, ["new"], buffer=[(T_NOW, q, 0, 1.0) for q in VERIFIED.values()])
    assert_untouched(e)
    assert e.shortfall == "no failure to learn from" and not e.optimizer.prompts


def test_without_a_question_left_to_verify_on_nobody_is_asked():
    e = Evolution(BOTH, {}, ["new"], buffer=[(T_NOW, q, 0, 0.0) for q in FAILED.values()])
    assert_untouched(e)
    assert e.shortfall == "no question left to verify on" and not e.optimizer.prompts


def test_without_a_well_formed_candidate_P_stays_as_it_is():
    e = Evolution(BOTH, {}, ["a"], ["A."], N_P=4, rounds=3)
    assert_untouched(e)
    assert e.shortfall == "too few candidates" and len(e.optimizer.prompts) == 3 and not e.policy.rollouts


def test_where_every_candidate_is_significantly_worse_P_stays_as_it_is():
    e = Evolution(BOTH, {"a": 10, "bad": 0}, ["bad"])
    assert_untouched(e)
    assert len(e.policy.rollouts) == 1


def test_the_weights_restart_where_something_joined():
    e = Evolution(BOTH, {"a": 5, "new": 5}, ["new"], N_P=4)
    assert e.texts == ["a", "new"] and [I.rewards for I in e.P.active] == [[], []]


def test_a_call_is_logged_before_its_reply_is_read():
    e = Evolution({"old": 0.5}, {"old": 5, "new": 5}, ["new"], N_P=2)
    names = [name for name, *_ in e.log.events]
    assert names == ["call", "proposed", "played", "verified", "evolved"]
    [(t, round, parent, call)] = e.log.of("call")
    assert (t, round, parent.text, call.reply) == (T_NOW, 0, "old", "<ins_1> new </ins_1>")


# --- the first population (L2) ------------------------------------------------------------------------------------


def first(optimizer, N_P=4):
    log = Recorder()
    return inspo.first_population(Config(N_P=N_P, instruction=""), Population(0.2, 5), optimizer, log), log


TAGS = "<think></think><search></search><information></information><answer></answer>"  # no candidate may lose one


def test_the_first_population_is_the_first_instruction_and_its_paraphrases():
    optimizer = TableOptimizer([f"{k} {TAGS}" for k in "abcde"])
    P, log = first(optimizer)
    assert [I.text for I in P.active] == [SEARCH_R1, *(f"{k} {TAGS}" for k in "abc")]
    assert [(I.parent, I.born, I.w) for I in P.active] == [(None, 0, 0.0)] + [(0, 0, 0.0)] * 3
    [prompt] = optimizer.prompts
    assert "Improve the above prompt.\nGive 3 different candidates." in prompt and "wrong" not in prompt
    assert log.of("started") == [[P]] and len(log.of("call")) == 1


def test_a_paraphrase_must_differ_from_the_first_instruction_and_keep_its_tags():
    P, _ = first(TableOptimizer([SEARCH_R1.upper(), "no tags", f"a {TAGS}", f"A! {TAGS}"]))
    assert [I.text for I in P.active] == [SEARCH_R1, f"a {TAGS}"]


def test_a_population_of_two_starts_with_one_paraphrase():
    P, _ = first(TableOptimizer([f"a {TAGS}", f"b {TAGS}"]), N_P=2)
    assert [I.text for I in P.active] == [SEARCH_R1, f"a {TAGS}"]


def test_an_optimizer_that_does_not_answer_its_first_call_ends_the_run_at_its_start():
    with pytest.raises(Fault, match="no reply to its first call: refused; check OPENAI_BASE_URL, .* or choose --mode"):
        first(TableOptimizer(OptimizerDown("refused")))


def test_the_first_instruction_starts_alone_if_nobody_paraphrases_it():
    for optimizer, N_P in [(None, 4), (TableOptimizer(["x"]), 1)]:
        P, log = first(optimizer, N_P)
        assert [I.text for I in P.active] == [SEARCH_R1] and log.of("started")
        assert not optimizer or not optimizer.prompts


# --- the loop -----------------------------------------------------------------------------------------------------


class WatchedPolicy(TablePolicy):
    """Lets the log look whenever it is called."""

    def rollout(self, t, purpose, *args):
        self.log.look(purpose)
        return super().rollout(t, purpose, *args)

    def update(self, t, taus):
        self.log.look("update")
        return super().update(t, taus)


def run(right, *replies, restored=None, static=False, D=None, **knobs):
    """Returns (result of `inspo`, its policy, its log, its optimizer); right by default 0."""
    usual = dict(N_P=3, N_parent=1, batch=4, G=2, T=3, K_p=100, K_e=100, T_e=100, D_B=2, failures=1)
    cfg = Config(**usual | knobs)
    right = {SEARCH_R1: 0} | right
    policy, log = WatchedPolicy(right), Recorder(cfg.T, restored)
    policy.log = log
    optimizer = None if static else TableOptimizer(*replies)
    result = inspo.inspo(cfg, policy, optimizer, D or questions("q", 6), log)
    return result, policy, log, optimizer


def restored(*texts):
    """Returns (P, B) of a run with these instructions."""
    P = Population(0.2, 5)
    for text in texts:
        P.join(text, None, 0)
    return P, ReplayBuffer(1000)


def test_a_step_is_taken_in_the_order_of_algorithm_1():
    """One instruction knows everything, one nothing, so that weights differ; prune and evolve in step 1."""
    before = restored("all", "none")
    right = {"all": 6, "none": 0, "new": 6}
    _, policy, log, _ = run(right, ["new"], restored=before, T=1, K_p=1, K_e=1, N_P=2, batch=6, G=2)
    fresh, learned = {0: 0.0, 1: 0.0}, {0: 1.0, 1: 0.0}
    assert log.seen == [
        ("rollout", fresh, 0),
        ("update", fresh, 0),
        ("step", learned, 0),  # attributed, and nobody has left yet
        ("pruned", {0: 1.0}, 0),
        ("call", {0: 1.0}, 1),  # the optimizer reads failures of this very step
        ("proposed", {0: 1.0}, 1),
        ("verify 0", {0: 1.0}, 1),
        ("played", {0: 1.0}, 1),
        ("verified", {0: 1.0}, 1),
        ("evolved", {0: 0.0, 2: 0.0}, 1),
    ]
    [(t, taus, P, update)] = log.of("step")
    [(_, trained, _)] = policy.updates
    assert (t, P, update) == (1, before[0], {"loss": 1.0}) and taus is trained


def test_a_run_that_was_stopped_inside_an_evolution_repeats_it_before_the_next_step():
    P, B = restored("all", "none")
    before = Recorder(1, (P, B))
    knobs = dict(N_P=2, N_parent=1, batch=6, G=2, T=2, K_p=1, K_e=1, T_e=100, D_B=2, failures=1)
    cfg, D = Config(**knobs), questions("q", 6)
    policy, log = WatchedPolicy({"all": 6, "none": 0, "new": 6, "x": 0, SEARCH_R1: 0}), before
    policy.log, log.t, log.phase = log, 1, "evolve"
    B.add(1, [Trajectory(0, q, 0, [], 0, reward=0.0) for q in D.values()])
    inspo.inspo(cfg, policy, TableOptimizer(["new"], ["x"]), D, log)
    first = [(name, args[0]) for name, *args in log.events[:5]]
    assert first == [("call", 1), ("proposed", 1), ("played", 1), ("verified", 1), ("evolved", 1)]
    assert [purpose for _, purpose, *_ in policy.rollouts][:2] == ["verify 0", "rollout"]


def test_every_question_is_played_G_times_under_one_instruction():
    cfg = dict(batch=4, G=3, T=2, seed=5)
    D = questions("q", 6)
    P, B = restored("a", "b", "c")
    _, policy, _, _ = run({"a": 0, "b": 0, "c": 0}, restored=(P, B), D=D, **cfg)
    for t, (at, purpose, jobs, temperature) in enumerate(policy.rollouts, 1):
        assert (at, purpose, temperature) == (t, "rollout", None)
        assert [job.group for job in jobs] == [k for k in range(4) for _ in range(3)]
        asked = draw(D, 4, 5, t)
        drawn = P.sample(rng(5, t, "instructions"), 4)  # all weights stay 0: P is as it was
        for job in jobs:
            assert job.question == asked[job.group]
            assert (job.instruction, job.text) == (drawn[job.group].id, drawn[job.group].text)


def test_groups_of_a_question_compare_rollouts_under_instructions_of_their_own():
    """Under "all" every answer is right, under "none" no answer: with pairs nobody stands out in a group."""
    P, B = restored("all", "none")
    right = {"all": 6, "none": 0}
    common = dict(batch=6, G=4, T=1, seed=1)
    _, policy, _, _ = run(right, restored=(P, B), groups="question", **common)
    [(_, _, jobs, _)] = policy.rollouts
    drawn = restored("all", "none")[0].sample(rng(1, 1, "instructions"), 24)
    assert [job.text for job in jobs] == [I.text for I in drawn]
    assert [job.group for job in jobs] == [k for k in range(6) for _ in range(4)]
    assert all(len({job.question for job in jobs if job.group == k}) == 1 for k in range(6))
    [(_, taus, scores)] = policy.updates
    mixed = [k for k in range(6) if len({job.text for job in jobs if job.group == k}) == 2]
    assert mixed
    for job, (r, a) in zip(jobs, scores, strict=True):
        assert r == (job.text == "all")
        assert (a > 0) == (r == 1 and job.group in mixed) and (a < 0) == (r == 0 and job.group in mixed)
    _, policy, _, _ = run(right, restored=restored("all", "none"), **common)
    assert all(a == 0 for _, a in policy.updates[0][2])


def test_the_update_gets_the_reward_of_every_prediction():
    _, policy, _, _ = run({SEARCH_R1: 3}, static=True, N_P=1, T=1, batch=6)
    [(_, taus, scored)] = policy.updates
    known = [float(tau.question.id in ("q0", "q1", "q2")) for tau in taus]
    assert [r for r, _ in scored] == known and sum(known) == 6 and len(taus) == 12


def test_the_reward_is_the_exact_match_of_the_last_answer():
    tau = Trajectory(0, Question("q", "Who?", ("Utzon", "Jørn Utzon"), "s"), 0, [], 0)
    for prediction, r in [("the  jørn Utzon!", 1.0), ("Jørn", 0.0), ("", 0.0), (None, 0.0)]:
        tau.prediction = prediction
        assert inspo.reward(tau) == r


def test_another_reward_function_reaches_the_advantages_the_weights_and_the_buffer(monkeypatch):
    values = itertools.cycle([0.5, 0.25])
    monkeypatch.setattr(inspo, "reward", lambda tau: next(values))
    _, policy, log, _ = run({}, static=True, N_P=1, T=1)
    [(_, _, scored)] = policy.updates
    A = 0.125 / (0.25 * 0.5**0.5)  # distance to the mean, in units of the unbiased standard deviation
    assert scored == [(0.5, pytest.approx(A, rel=1e-4)), (0.25, pytest.approx(-A, rel=1e-4))] * 4
    assert log.P.active[0].w == pytest.approx(0.375)
    assert [e.reward for e in log.B.items] == [0.5, 0.25] * 4


def steps_of(log, name):
    return [args[0] for args in log.of(name)]


def test_pruning_and_evolution_keep_their_schedule():
    names = [f"{k} {TAGS}" for k in range(40)]
    replies = [names[k : k + 3] for k in range(0, 40, 3)]
    knobs = dict(T=14, K_p=2, K_e=4, T_e=12, N_P=4, N_parent=1, D_B=2)
    _, _, log, _ = run(dict.fromkeys(names, 0), *replies, **knobs)
    sizes = [(name, len(weights)) for name, weights, _ in log.seen if name in ("pruned", "evolved")]
    generation = [("pruned", 2), ("pruned", 1), ("evolved", 4)]
    assert sizes == [*generation, *generation, *generation[:2]]
    assert steps_of(log, "pruned") == [2, 4, 6, 8, 10, 12]  # not at 14: |P| = N_parent
    assert steps_of(log, "evolved") == [4, 8]  # not at 12: t < T_e
    assert steps_of(log, "step") == list(range(1, 15))
    assert sorted({I.left for I in log.P.family} - {None}) == [2, 4, 6, 8, 10, 12]
    for _, P, dropped in log.of("pruned"):
        assert P is log.P and dropped and not any(I in P.active for I in dropped)


def test_after_T_e_the_optimizer_is_not_asked():
    _, _, log, optimizer = run({}, T=6, K_e=2, T_e=4)
    assert optimizer.whens[0] == "t0 r0" and {when.split()[0] for when in optimizer.whens[1:]} == {"t2"}


def test_the_result_is_the_policy_and_the_instruction_of_greatest_weight():
    P, B = restored("worst", "best", "middle")
    (policy, I), made, log, _ = run({"worst": 0, "best": 6, "middle": 3}, restored=(P, B), T=8, batch=6)
    assert policy is made and I.text == "best" and I.w == 1.0
    assert I.w == max(J.w for J in P.active) and len({J.w for J in P.active}) == 3


def test_static_mode_trains_one_instruction_and_never_evolves():
    (_, I), policy, log, _ = run({}, static=True, N_P=1, N_parent=1, T=6, K_p=1, K_e=1, T_e=0)
    assert I.text == SEARCH_R1 and {name for name, *_ in log.events} == {"started", "step"}
    assert {purpose for _, purpose, *_ in policy.rollouts} == {"rollout"}
    _, _, log, _ = run({}, static=True, N_P=1, T=6, K_p=1, K_e=1, T_e=100)  # whatever T_e is
    assert {name for name, *_ in log.events} == {"started", "step"}


def test_a_restored_run_continues_with_its_own_population_and_buffer():
    P, B = restored("a", "b")
    _, policy, log, optimizer = run({"a": 0, "b": 0}, ["x"], restored=(P, B), T=1)
    assert log.P is P and log.B is B and not optimizer.prompts and not log.of("started")
    assert len(B.items) == 8 and {job.text for job in policy.rollouts[0][2]} <= {"a", "b"}


def test_a_new_run_starts_with_an_empty_buffer_of_its_capacity():
    _, _, log, _ = run({}, static=True, N_P=1, T=3, buffer=5)
    assert log.B.capacity == 5 and len(log.B.items) == 5
