"""Algorithm 1 and its evolution, rule by rule, with a policy and an optimizer that read their
answers from tables."""

import contextlib
import itertools
import re
from functools import partial
from types import SimpleNamespace

import pytest

import inspo
from config import Config
from grpo import Learner
from log import Log
from plumbing.faults import Fault, OptimizerDown
from population import Population, ReplayBuffer
from reflect import Call
from run import Checkpoints
from tasks import Job, Question, Task, Trajectory
from tasks.task import draw_questions, rng_of

T_NOW = 9  # the step after which the tests of `evolve` evolve
# no candidate may lose one
TAGS = "<think></think><search></search><information></information><answer></answer>"
FIRST = f"Answer. {TAGS}"


class Exam(Task):
    """Questions with one gold answer each; the reward is 1 for saying it."""

    tools = ()
    instruction = FIRST

    def __init__(self, cfg: Config, train: dict[str, Question]):
        super().__init__(cfg)
        self.train = train

    def questions(self, split):
        return {"train": list(self.train.values())}[split]

    def reward(self, taus):
        return [float(tau.prediction == tau.question.golds[0]) for tau in taus]


class TablePolicy:
    """Under an instruction I it answers the first right[I] of the questions of each letter, and no
    other."""

    def __init__(self, right: dict[str, int]):
        self.right = right
        self.rollouts = []
        self.updates = []
        self.evaluations = []
        self.learner = object.__new__(Learner)  # for its rule of the advantages
        self.seconds = {"rollout": 0.0}

    def rollout(self, t, purpose, jobs, temperature=None):
        self.rollouts.append((t, purpose, jobs, temperature))
        return [self.play(job) for job in jobs]

    def evaluate(self, t, I, split):
        self.evaluations.append((t, I.text, split))
        return []

    def play(self, job: Job) -> Trajectory:
        tau = Trajectory(
            job.instruction_id,
            job.question,
            job.group,
            [],
            0,
            response=f"said under {job.instruction}",
        )
        tau.prediction = (
            job.question.golds[0]
            if int(job.question.id[1:]) < self.right[job.instruction]
            else "no idea"
        )
        return tau

    def update(self, t, taus):
        self.updates.append((t, taus, [(tau.reward, tau.advantage) for tau in taus]))
        return {"loss": float(t)}

    def measure_speed(self, taus):
        return {"time/update": 1.0}


class TableOptimizer:
    """Replies to its k-th call with these candidates, or raises what is there instead; then with
    nothing."""

    def __init__(self, *replies: list[str] | Exception):
        self.replies, self.prompts = replies, []

    def ask(self, prompt):
        k = len(self.prompts)
        self.prompts.append(prompt)
        reply = self.replies[k] if k < len(self.replies) else []
        if isinstance(reply, Exception):
            raise reply
        text = "\n".join(f"<ins_{i}> {text} </ins_{i}>" for i, text in enumerate(reply, 1))
        return Call(prompt, text, 1, 1, 0.0)


class Recorder:
    """A log that keeps (name, *arguments) of every call, and what it sees of P and B at that
    moment.

    A row that is written goes by what it tells: an event's name, or "call", "accepted", "verified".
    """

    def __init__(self, cfg=None):
        self.cfg, self.events, self.seen, self.samples = cfg, [], [], []
        self.run = SimpleNamespace(
            write_trajectories=lambda *sample: self.samples.append(sample), append=self.append
        )

    write_event, write_verification, write_trials = (
        Log.write_event,
        Log.write_verification,
        Log.write_trials,
    )
    print = track = lambda self, *args: None

    def __getattr__(self, name):
        return partial(self.record, name)

    def record(self, name, *args):
        self.events.append((name, *args))
        self.look(name)

    def append(self, name, row):
        told = {"call", "accepted", "verified", "scored"} & set(row)
        self.record(row["event"] if name == "population" else told.pop(), row)

    @contextlib.contextmanager
    def timing(self, phase):
        yield

    def look(self, name: str) -> None:
        """Keeps (name, weights, latest step in the buffer)."""
        if "P" in vars(self):
            self.seen.append(
                (
                    name,
                    {I.id: I.w for I in self.P.active},
                    max((e.t for e in self.B.items), default=0),
                )
            )

    def of(self, name: str) -> list[tuple]:
        """Returns the arguments of the calls with this name."""
        return [args for event, *args in self.events if event == name]

    def rows(self, name: str) -> list[dict]:
        """Returns the rows that tell this."""
        return [row for [row] in self.of(name)]


class Kept(Checkpoints):
    """Checkpoints of a run; `restored`: (P, B) of the one that is resumed; `at`: the step to
    play."""

    def __init__(self, P: Population, B: ReplayBuffer, log: Recorder, restored=None, at=1):
        self.cfg, self.P, self.B, self.log, self.restored, self.at = (
            log.cfg,
            P,
            B,
            log,
            restored,
            at,
        )
        self.policy = SimpleNamespace(learner=SimpleNamespace(remembered={}))
        self.saving = None
        log.P, log.B = P, B

    def restore(self):
        for mine, theirs in zip((self.P, self.B), self.restored or (), strict=False):
            mine.load_state_dict(theirs.state_dict())
        return self.at

    def save(self):
        self.log.events.append(("save", self.state["t"]))
        self.log.look("save")


def questions(letter: str, n: int) -> dict[str, Question]:
    return {
        f"{letter}{k}": Question(f"{letter}{k}", f"Which {letter}{k}?", (f"gold {letter}{k}",))
        for k in range(n)
    }


# Four questions that are failed and shown, and ten that are left to verify on: right[I] / 10 is the
# mean reward of I.
FAILED, VERIFIED = questions("f", 4), questions("v", 10)


def replayed(*played: tuple[int, Question, int, float]) -> ReplayBuffer:
    """Returns a buffer with (step, question, instruction, reward), in the order of the steps."""
    B, task = ReplayBuffer(1000), Exam(Config(), {})
    for t, q, instruction, r in played:
        tau = Trajectory(
            instruction, q, 0, [], 0, reward=r, failed=r < 1, response=f"said by #{instruction}"
        )
        B.add(t, [tau], [task.show(tau)])
    return B


BUFFER = [(T_NOW, q, 0, 0.0) for q in FAILED.values()] + [
    (T_NOW, q, 0, 1.0) for q in VERIFIED.values()
]


class Evolved:
    """An evolution of a population with these weights, under a policy of these accuracies, with
    these replies."""

    def __init__(
        self,
        weights: dict[str, float],
        right: dict[str, int],
        *replies,
        buffer=BUFFER,
        task=Exam,
        config=Config,
        population=Population,
        **knobs,
    ):
        self.cfg = config(**dict(N_P=4, N_parent=1, top_n=6, rounds=5, failures=4, D_B=10) | knobs)
        self.policy, self.optimizer, self.log = (
            TablePolicy(right),
            TableOptimizer(*replies),
            Recorder(),
        )
        self.P = population(self.cfg)
        evolution = inspo.Evolution(
            self.cfg, task(self.cfg, FAILED | VERIFIED), self.optimizer, self.P, self.log
        )
        evolution.B = replayed(*buffer) if isinstance(buffer, list) else buffer
        for text, w in weights.items():
            self.P.join(text, None, 0).rewards = [] if w is None else [w]
        evolution.evolve(T_NOW, self.policy)

    @property
    def texts(self) -> list[str]:
        return [I.text for I in self.P.active]

    @property
    def joined(self) -> list[list[str]]:
        """What joined, by round."""
        return [
            [c["text"] for c in row["verified"] if c["joined"]] for row in self.log.rows("verified")
        ]

    @property
    def shortfall(self) -> str:
        [row] = self.log.rows("evolve")
        return row["text"]

    def shown(self, call: int = 0) -> list[str]:
        """The questions of the failures in a prompt."""
        return re.findall(r"Response: Question: Which (\w+)\?\n", self.optimizer.prompts[call])


def seed_that_draws(*parents: int, of: int) -> int:
    """Returns a seed with which the rounds revise these parents of `of`, by rank."""

    def draws(seed: int) -> list[int]:
        return [rng_of(seed, T_NOW, f"evolve {k}").integers(of) for k in range(len(parents))]

    return next(seed for seed in itertools.count() if draws(seed) == list(parents))


# --- the proposer (L20, App. E, Fig. 3)
# -----------------------------------------------------------------------------


def test_a_proposer_is_shown_failures_or_scores_or_the_parent_alone():
    right = {"old": 5, "weak": 1, "new": 5}
    prompts = {}
    for proposer in ("reflection", "history", "paraphrase"):
        # one was never sampled
        weights = {"weak": 0.125, "young": None, "old": 0.5}
        e = Evolved(weights, right, ["new"], N_P=2, proposer=proposer)
        prompts[proposer] = e.optimizer.prompts[0]
    shown = "<ins_0> weak </ins_0>\n<score_0> 12 </score_0>\n<ins_1> old </ins_1>\n<score_1> 50 </score_1>"
    # the best stands last, as in OPRO
    assert prompts["history"].startswith(f"<history>\n{shown}\n</history>\n")
    assert (
        "gold f" not in prompts["history"] and "Give 1 different but better" in prompts["history"]
    )
    assert prompts["paraphrase"].startswith("<ins_0> old </ins_0>\n\nImprove the above prompt.")
    assert (
        "it still gets the following examples wrong" in prompts["reflection"]
        and "gold f" in prompts["reflection"]
    )


def test_a_long_failure_is_cut_in_the_prompt(monkeypatch):
    monkeypatch.setattr(inspo, "PROMPT_BUDGET", 500)
    B = replayed(*BUFFER)
    tau = Trajectory(0, FAILED["f0"], 0, [], 0, reward=-1.0, response="7 " * 6000, failed=True)
    B.add(T_NOW, [tau], [tau.response])
    e = Evolved({"old": 0.5}, {"old": 5}, buffer=B, failures=1, rounds=1)
    [prompt] = e.optimizer.prompts
    assert 2000 < len(prompt) < 5000 and "7 [...] 7" in " ".join(prompt.split())


# --- verification: who joins (L21)
# --------------------------------------------------------------------------------


RIGHT = {"old": 5, "a": 5, "b": 6, "c": 7, "d": 5, "e": 4, "f": 0}


@pytest.mark.parametrize(
    "replies, knobs, joined, asked",
    [
        # the best first, equals in the order of the reply, none below the parent; places may stay
        # empty after all rounds
        (["eacbd"], dict(N_P=6), ["cbad"], 5),
        (["e", "f"], dict(rounds=2), ["", ""], 2),
        # top_n a round, never more than N_P
        (["abc", "de"], dict(N_P=4, top_n=2), ["cb", "d"], 2),
        (["a", "bcd"], dict(N_P=3), ["a", "c"], 2),
        # no more than `rounds`, and one without a candidate counts
        (["a", "b", "c"], dict(N_P=7, rounds=2), ["a", "b"], 2),
        (["", "a", "b"], dict(N_P=7, rounds=2), ["a"], 2),
        # without verification in the order of the reply
        (["fb"], dict(N_P=3, D_B=0), ["fb"], 1),
        # without the gate the best of a round, however much worse than their parent
        (["efa"], dict(N_P=4, top_n=2, rounds=1, gate=0), ["ae"], 1),
        (["aa", "", "f"], dict(N_P=5, rounds=3, gate=0), ["a", "f"], 3),
    ],
)
def test_who_joins(replies, knobs, joined, asked):
    e = Evolved({"old": 0.9}, RIGHT, *map(list, replies), **knobs)
    assert e.joined == list(map(list, joined)) and e.texts == ["old", *"".join(joined)]
    calls = [(row["t"], row["round"]) for row in e.log.rows("call")]
    assert calls == [(T_NOW, k) for k in range(asked)] and len(e.optimizer.prompts) == asked
    of = {I.text: (I.parent, I.born, I.verified) for I in e.P.active[1:]}
    D_B = knobs.get("D_B", 10)
    assert of == {text: (0, T_NOW, RIGHT[text] / 10 if D_B else 0) for text in "".join(joined)}
    assert all(bool(jobs) == bool(D_B) for *_, jobs, _ in e.policy.rollouts)


def test_the_gate_is_the_parent_s_reward_on_the_same_questions_not_its_weight():
    e = Evolved({"old": 0.9}, {"old": 1, "new": 2}, ["new"], N_P=2)
    assert e.joined == [["new"]]
    e = Evolved({"old": 0.0}, {"old": 3, "new": 2}, ["new"], N_P=2)
    assert e.joined == [[]] and e.texts == ["old"]


def test_where_the_parents_fill_the_population_nobody_is_asked():
    e = Evolved({"a": 0.5, "b": 0.4}, {}, N_P=2, N_parent=2)
    assert not e.optimizer.prompts and e.P.probabilities()[0] > 0.5


# --- parents and what they are revised by (L17, L19, L20)
# ----------------------------------------------------------


def test_parents_are_the_best_by_weight_and_the_others_leave():
    right = dict.fromkeys(["a", "b", "c", "new"], 5)
    e = Evolved({"a": 0.2, "b": 0.9, "c": 0.6}, right, ["new"], N_parent=2, N_P=3)
    assert e.texts == ["b", "c", "new"] and e.shortfall == ""
    assert [I.left for I in e.P.family] == [T_NOW, None, None, None]
    [row] = e.log.rows("evolve")
    assert row["t"] == T_NOW and [I["text"] for I in row["P"]] == e.texts


def test_every_round_draws_one_of_the_parents_to_revise_after_its_own_failures():
    right = dict.fromkeys(["strong", "weak", "c0", "c1", "c2"], 5)
    seed = seed_that_draws(1, 0, 1, of=2)
    buffer = [(7, q, 0, 1.0) for q in VERIFIED.values()]
    buffer += [(8 + k // 2, q, k // 2, 0.0) for k, q in enumerate(FAILED.values())]
    knobs = dict(N_parent=2, N_P=5, seed=seed, failures=2, buffer=buffer)
    e = Evolved({"strong": 0.8, "weak": 0.3}, right, ["c0"], ["c1"], ["c2"], **knobs)
    weak, strong = ("weak", ["f2", "f3"]), ("strong", ["f0", "f1"])
    for k, (parent, failed) in enumerate([weak, strong, weak]):
        assert f"<ins_0>\n{parent}\n</ins_0>" in e.optimizer.prompts[k]
        assert sorted(e.shown(k)) == failed
        assert {job.instruction for job in e.policy.rollouts[k][2]} == {parent, f"c{k}"}
    assert [I.parent for I in e.P.active[2:]] == [1, 0, 1]


def test_no_text_is_proposed_twice_whoever_its_parent_is():
    """Neither a parent's own text nor a candidate of an earlier round, however it is punctuated;
    one that leaves may come back."""
    right = dict.fromkeys(["strong", "weak", "gone", "new", "other"], 5)
    seed = seed_that_draws(0, 1, of=2)
    replies = ["WEAK!", "Strong.", "new"], ["new.", "gone"]
    weights = {"strong": 0.8, "weak": 0.3, "gone": 0.1}
    e = Evolved(weights, right, *replies, N_parent=2, N_P=4, seed=seed)
    assert e.texts == ["strong", "weak", "new", "gone"] and e.P.ids == [0, 1, 3, 4]
    rejected = [[c["k"] for c in row["rejected"]] for row in e.log.rows("accepted")]
    assert rejected == [[1, 2], [1]]


def test_the_optimizer_is_asked_for_a_full_generation_after_the_failures():
    e = Evolved({"old": 0.5}, {"old": 5, "new": 5}, ["new"], N_P=7, N_parent=1, rounds=1)
    [prompt] = e.optimizer.prompts
    assert "giving 6 different but better candidates" in prompt
    assert sorted(e.shown()) == ["f0", "f1", "f2", "f3"]
    assert "Correct answer: gold f2" in prompt and "said by #0" in prompt


def test_a_candidate_that_gives_an_answer_away_is_rejected():
    e = Evolved({"old": 0.5}, {"old": 5, "new": 5}, ["the answer is gold f1", "new"], N_P=3)
    assert e.texts == ["old", "new"] and e.log.rows("accepted")[0]["accepted"] == [2]


def test_no_more_candidates_are_verified_than_were_asked_for():
    many = [f"new {k}" for k in range(500)]
    e = Evolved({"old": 0.5}, {"old": 5} | dict.fromkeys(many, 4), many, N_P=4, rounds=1)
    [row] = e.log.rows("verified")
    assert len(row["verified"]) == 3 and row["rollouts"] == (1 + 3) * 10
    assert len(e.policy.rollouts[0][2]) == (1 + 3) * 10


# --- the verification rollouts
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("D_B", [3, 12])
def test_parent_and_candidates_answer_the_same_questions_once_each_none_of_the_failures(D_B):
    e = Evolved({"old": 0.5}, RIGHT, ["a", "b"], N_P=3, D_B=D_B, failures=2)
    [(t, purpose, jobs, temperature)] = e.policy.rollouts
    assert (t, purpose, temperature) == (T_NOW, "verify 0", None)
    [row] = e.log.rows("verified")
    left = set(FAILED | VERIFIED) - set(e.shown())
    assert len(left) == 12 and len(row["D_B"]) == D_B and set(row["D_B"]) <= left
    asked = sorted((job.instruction, job.question.id) for job in jobs)
    assert asked == sorted((text, v) for text in ("old", "a", "b") for v in row["D_B"])
    assert len({job.group for job in jobs}) == len(jobs)  # none of them is a repetition of another
    # candidates are in no P
    assert {job.instruction: job.instruction_id for job in jobs} == {"old": 0, "a": None, "b": None}


# --- nothing new
# --------------------------------------------------------------------------------------------------

BOTH = {"a": 0.5, "b": 0.25}
KNOWN = [(T_NOW, q, 0, 1.0) for q in VERIFIED.values()]
LOST = [(T_NOW, q, 0, 0.0) for q in FAILED.values()]
NOTHING = "no failure to learn from, or no question left to verify on"


@pytest.mark.parametrize(
    "replies, knobs, shortfall, calls, verifications",
    [
        (
            [OptimizerDown("503 for an hour"), ["new"]],
            {},
            "the optimizer gave no reply (503 for an hour)",
            1,
            0,
        ),
        ([["new"]], dict(buffer=KNOWN), NOTHING, 0, 0),
        ([["new"]], dict(buffer=LOST), NOTHING, 0, 0),
        # below their parent
        ([["near"], ["bad"]], dict(rounds=2), "", 2, 2),
    ],
)
def test_without_anything_new_P_and_its_weights_stay_as_they_are(
    replies, knobs, shortfall, calls, verifications
):
    e = Evolved(BOTH, {"a": 5, "near": 4, "bad": 0}, *replies, **knobs)
    assert e.texts == ["a", "b"] and [I.w for I in e.P.active] == [0.5, 0.25]
    assert [I.left for I in e.P.family] == [None, None] and len(e.log.rows("evolve")) == 1
    assert e.shortfall == shortfall
    assert (len(e.optimizer.prompts), len(e.policy.rollouts)) == (calls, verifications)


def test_what_joined_before_the_optimizer_fell_silent_stays_and_the_weights_restart():
    e = Evolved(
        BOTH, {"a": 5, "new": 6, "near": 4}, ["near", "new"], OptimizerDown("time-out"), N_P=4
    )
    assert e.texts == ["a", "new"] and [I.rewards for I in e.P.active] == [[], []]
    assert e.shortfall == "the optimizer gave no reply (time-out)" and len(e.optimizer.prompts) == 2


def test_a_call_is_logged_before_its_reply_is_read():
    e = Evolved({"old": 0.5}, {"old": 5, "new": 5}, ["new"], N_P=2)
    names = [name for name, *_ in e.log.events]
    assert names == ["call", "accepted", "verified", "evolve"]
    when = {"t": T_NOW, "round": 0, "parent": 0}
    [call], [reply], [verified] = map(e.log.rows, ("call", "accepted", "verified"))
    assert call["call"]["reply"] == "<ins_1> new </ins_1>"
    assert reply == when | {"accepted": [1], "rejected": []}
    assert all(row.items() >= when.items() for row in (call, verified))
    [(name, sample)] = e.log.samples
    assert name == f"verify-{T_NOW:06d}-0" and len(sample) == 20
    assert [row["candidate"] for row in sample] == [0] * 10 + [1] * 10


# --- the first population (L2)
# ------------------------------------------------------------------------------------


def first(optimizer, N_P=4, **knobs):
    cfg, log = Config(N_P=N_P, **knobs), Recorder()
    evolution = inspo.Evolution(cfg, Exam(cfg, {}), optimizer, Population(cfg), log)
    evolution.fill_population()
    return evolution.P, log


@pytest.mark.parametrize(
    "reply, knobs, joined",
    [
        ([f"{k} {TAGS}" for k in "abcde"], {}, "abc"),
        ([f"{k} {TAGS}" for k in "abcde"], dict(N_parent=2), "abc"),  # however many there will be
        ([f"{k} {TAGS}" for k in "ab"], dict(N_P=2), "a"),
        # one must differ from the first instruction, and keep its tags
        ([FIRST.upper(), "no tags", f"a {TAGS}", f"A! {TAGS}"], {}, "a"),
    ],
)
def test_the_first_population_is_the_first_instruction_and_its_paraphrases(reply, knobs, joined):
    P, log = first(optimizer := TableOptimizer(reply), **knobs)
    assert [I.text for I in P.active] == [FIRST, *(f"{k} {TAGS}" for k in joined)]
    assert [(I.parent, I.born, I.w) for I in P.active] == [
        (None, 0, 0.0),
        *[(0, 0, 0.0)] * len(joined),
    ]
    [prompt], [start], [call] = optimizer.prompts, log.rows("start"), log.rows("call")
    assert f"Improve the above prompt.\nGive {P.cfg.N_P - 1} different candidates." in prompt
    assert [I["text"] for I in start["P"]] == [I.text for I in P.active] and call["t"] == 0


def test_an_optimizer_that_does_not_answer_its_first_call_ends_the_run_at_its_start():
    with pytest.raises(
        Fault,
        match="no reply to its first call: refused; check OPENAI_BASE_URL, .* or choose --mode",
    ):
        first(TableOptimizer(OptimizerDown("refused")))


def test_the_first_instruction_starts_alone_if_nobody_paraphrases_it():
    for optimizer, N_P in [(None, 4), (TableOptimizer(["x"]), 1)]:
        P, log = first(optimizer, N_P)
        assert [I.text for I in P.active] == [FIRST] and log.of("start")
        assert not optimizer or not optimizer.prompts


# --- the loop
# -----------------------------------------------------------------------------------------------------


class WatchedPolicy(TablePolicy):
    """Lets the log look whenever it is called."""

    def rollout(self, t, purpose, *args):
        self.log.look(purpose)
        return super().rollout(t, purpose, *args)

    def update(self, t, taus):
        self.log.look("update")
        return super().update(t, taus)


def run(
    right,
    *replies,
    restored=None,
    at=1,
    static=False,
    D=None,
    task=Exam,
    config=Config,
    population=Population,
    **knobs,
):
    """Returns (result of `inspo`, its policy, its log, its optimizer); right by default 0."""
    usual = dict(N_P=3, N_parent=1, batch=4, G=2, T=3, K_p=100, K_e=100, T_e=100, D_B=2, failures=1)
    cfg, D = config(**usual | knobs), D or questions("q", 6)
    policy, log = WatchedPolicy({FIRST: 0} | right), Recorder(cfg)
    policy.log, optimizer = log, None if static else TableOptimizer(*replies)
    evolution = inspo.Evolution(cfg, task := task(cfg, D), optimizer, population(cfg), log)
    checkpoints = Kept(evolution.P, evolution.B, log, restored, at)
    return inspo.inspo(cfg, task, policy, evolution, checkpoints, log), policy, log, optimizer


def restored(*texts):
    """Returns (P, B) of a run with these instructions."""
    P = Population(Config())
    for text in texts:
        P.join(text, None, 0)
    return P, ReplayBuffer(1000)


def test_a_step_is_taken_in_the_order_of_algorithm_1():
    """One instruction knows everything, one nothing, so that weights differ; prune and evolve in
    step 1."""
    right = {"all": 6, "none": 0, "new": 6}
    _, policy, log, _ = run(
        right, ["new"], restored=restored("all", "none"), T=1, K_p=1, K_e=1, N_P=2, batch=6
    )
    fresh, learned = {0: 0.0, 1: 0.0}, {0: 1.0, 1: 0.0}
    assert log.seen == [
        ("rollout", fresh, 0),
        ("add_rollouts", fresh, 0),
        ("update", fresh, 0),
        ("add_update", learned, 0),  # attributed, and nobody has left yet
        ("prune", {0: 1.0}, 0),
        ("call", {0: 1.0}, 1),  # the optimizer reads failures of this very step
        ("accepted", {0: 1.0}, 1),
        ("verify 0", {0: 1.0}, 1),
        ("verified", {0: 1.0}, 1),
        ("evolve", {0: 0.0, 2: 0.0}, 1),
        ("end_step", {0: 0.0, 2: 0.0}, 1),
        ("save", {0: 0.0, 2: 0.0}, 1),
    ]
    [(t, taus)] = log.of("add_rollouts")
    [(_, trained, _)] = policy.updates
    assert t == 1 and taus is trained
    [(metrics, P)] = log.of("add_update")
    assert metrics.items() >= {"loss": 1.0, "time/update": 1.0}.items() and P is log.P


def test_every_question_is_played_G_times_under_one_instruction():
    D, before = questions("q", 6), restored("a", "b", "c")
    _, policy, _, _ = run({"a": 0, "b": 0, "c": 0}, restored=before, D=D, batch=4, G=3, T=2, seed=5)
    for t, (at, purpose, jobs, temperature) in enumerate(policy.rollouts, 1):
        assert (at, purpose, temperature) == (t, "rollout", None)
        asked = draw_questions(D, 4, 5, t)
        drawn = before[0].sample(rng_of(5, t, "instructions"), 4)  # all weights stay 0
        want = [(drawn[k].id, drawn[k].text, asked[k], k) for k in range(4) for _ in range(3)]
        found = [(job.instruction_id, job.instruction, job.question, job.group) for job in jobs]
        assert found == want


def test_the_task_s_rewards_failures_and_words_reach_update_weights_and_buffer():
    class Judged(Exam):
        def reward(self, taus):
            return [0.5, 0.25] * (len(taus) // 2)

        def failed(self, tau):
            return tau.reward < 0.3

        def show(self, tau):
            return f"as the judge saw {tau.question.id}"

    _, policy, log, _ = run({}, static=True, N_P=1, T=1, task=Judged)
    [(_, taus, scored)] = policy.updates
    # distance to the mean, in units of the unbiased standard deviation
    A = 0.125 / (0.25 * 0.5**0.5)
    assert scored == [(0.5, pytest.approx(A, rel=1e-4)), (0.25, pytest.approx(-A, rel=1e-4))] * 4
    assert log.P.active[0].w == pytest.approx(0.375)
    assert [(e.reward, e.failed) for e in log.B.items] == [(0.5, False), (0.25, True)] * 4
    assert [e.text for e in log.B.items] == [f"as the judge saw {tau.question.id}" for tau in taus]


def steps_of(log, name):
    return [args[0] for args in log.of(name)]


def test_pruning_and_evolution_keep_their_schedule():
    names = [f"{k} {TAGS}" for k in range(40)]
    replies = [names[k : k + 3] for k in range(0, 40, 3)]
    knobs = dict(T=14, K_p=2, K_e=4, T_e=12, N_P=4, N_parent=1, D_B=2)
    _, _, log, _ = run(dict.fromkeys(names, 0), *replies, **knobs)
    sizes = [(name, len(weights)) for name, weights, _ in log.seen if name in ("prune", "evolve")]
    generation = [("prune", 2), ("prune", 1), ("evolve", 4)]
    assert sizes == [*generation, *generation, *generation[:2]]
    # not at 14: |P| = N_parent; an evolution not at 12: t < T_e
    assert [row["t"] for row in log.rows("prune")] == [2, 4, 6, 8, 10, 12]
    assert [row["t"] for row in log.rows("evolve")] == [4, 8]
    assert {row["t"] for row in log.rows("call")} == {0, 4, 8}
    assert steps_of(log, "add_rollouts") == list(range(1, 15))
    # before a step that evolves, and in the end
    assert steps_of(log, "save") == [3, 7, 14]


def test_evaluations_and_checkpoints_keep_theirs():
    _, policy, log, _ = run({FIRST: 2}, static=True, N_P=1, T=12, eval_every=4, save_every=5)
    first, *others = policy.evaluations
    assert first == (0, FIRST, "test")  # at T `compare` does
    both = [(t, FIRST, split) for t in (4, 8) for split in ("valid", "test")]
    assert others == [*both, (12, FIRST, "valid")]
    assert [split for split, _ in log.of("add_evaluation")] == [*["valid", "test"] * 2, "valid"]
    assert steps_of(log, "save") == [4, 5, 8, 10, 12] and steps_of(log, "end_step") == list(
        range(1, 13)
    )
    _, _, log, _ = run({}, static=True, N_P=1, T=3, eval_every=0)
    assert not log.of("add_evaluation") and steps_of(log, "save") == [3]
    _, policy, _, _ = run({}, static=True, N_P=1, T=3, eval_every=1)
    assert [t for t, _, split in policy.evaluations if split == "valid"] == [1, 2, 3]


def test_both_policies_are_compared_under_both_instructions():
    policy, log, P = TablePolicy({}), Recorder(), restored("old", "new")[0]
    policy.reset = lambda: policy.evaluations.append("reset")
    inspo.compare(7, policy, *P.active, log)
    assert policy.evaluations == [
        (7, "old", "test"),
        (7, "new", "test"),
        "reset",
        (7, "new", "test"),
    ]
    settings = [
        "trained policy, first instruction",
        "trained policy, I_star",
        "first policy, I_star",
    ]
    assert [setting for setting, _ in log.of("add_result")] == settings


def test_the_result_is_the_policy_and_the_instruction_of_greatest_weight():
    right = {"worst": 0, "best": 6, "middle": 3}
    (policy, I), made, log, _ = run(
        right, restored=restored("worst", "best", "middle"), T=8, batch=6
    )
    assert policy is made and I.text == "best" and I.w == 1.0
    assert I.w == max(J.w for J in log.P.active) and len({J.w for J in log.P.active}) == 3


def test_static_mode_trains_one_instruction_and_never_evolves():
    calendar = {"start", "write_start", "add_rollouts", "add_update", "end_step", "save"}
    (_, I), policy, log, _ = run({}, static=True, N_P=1, T=6, K_p=1, K_e=1, buffer=5)
    assert I.text == FIRST and {name for name, *_ in log.events} == calendar
    assert {purpose for _, purpose, *_ in policy.rollouts} == {"rollout"}
    assert len(log.B.items) == 5


def test_a_restored_run_continues_with_its_own_population_and_buffer():
    _, policy, log, optimizer = run({"a": 0, "b": 0}, ["x"], restored=restored("a", "b"), T=1)
    assert (
        [I.text for I in log.P.active] == ["a", "b"]
        and not optimizer.prompts
        and not log.of("start")
    )
    assert len(log.B.items) == 8 and {job.instruction for job in policy.rollouts[0][2]} <= {
        "a",
        "b",
    }
    _, _, log, _ = run({"a": 0}, restored=restored("a"), at=3, T=4)
    assert steps_of(log, "add_rollouts") == [3, 4]
