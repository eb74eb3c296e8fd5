"""INSPO: Instruction-Policy Co-Evolution (arXiv 2512.01945). This file is its Algorithm 1.

    python inspo.py                          # the embedded world, minutes on a laptop CPU
    python inspo.py --mode static            # the baseline: Search-R1, one fixed instruction
    python inspo.py --model path/or/hub-id --train q.jsonl --test q.jsonl --corpus c.jsonl
    torchrun --nproc_per_node=8 inspo.py --model qwen2.5-3b      # the paper's run: docs/gpus.md

`# Alg.1 Lnn` and `# Eq.n` mark the paper's lines and equations, `# CHOICE-n` a decision where the
paper is silent (docs/choices.md lists them).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config, Settings, check_settings, configure, find_endpoint, parse_flags
from plumbing import stop
from plumbing.faults import Fault, OptimizerDown, one_line
from plumbing.hub import check_model
from plumbing.servers import Servers
from population import Experience, Instruction, Population, RatedCandidate, ReplayBuffer
from reflect import (
    PROMPT_BUDGET,
    Optimizer,
    connect_optimizer,
    describe_optimizer,
    fold_words,
    history_prompt,
    paraphrase_prompt,
    read_candidates,
    reflection_prompt,
)
from tasks import Job, Question, Task, Trajectory
from tasks.task import (
    check_questions,
    choose_instruction,
    draw_questions,
    load_task,
    rng_of,
    set_rewards,
)

PAGE = "extras.page"  # draws the page of a finished run, where it is installed


if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from grpo import Learner
    from log import Log
    from run import Checkpoints
    from training.policy import Policy


def inspo(
    cfg: Config,
    task: Task,
    policy: Policy,
    evolution: Evolution,
    checkpoints: Checkpoints,
    log: Log,
) -> tuple[Policy, Instruction]:  # Alg.1 L1
    """Trains `policy` on a task while its instructions, P, evolve; returns it with the best
    instruction."""
    D, P, B = evolution.D, evolution.P, evolution.B
    # the first step to play; a resumed run comes with P and B filled, and skips L2
    start = checkpoints.restore()
    if not P.family:
        evolution.fill_population()  # Alg.1 L2
        # the first row of the final table, and the seconds that its rollouts took
        log.write_start(policy.evaluate(0, P.family[0], "test"), policy.seconds["rollout"])
        checkpoints.end_step(0)
    for t in range(start, cfg.T + 1):  # Alg.1 L3
        # Policy optimization with dynamic instructions                                      # Alg.1 L4
        # L5: questions q ~ D, each with an instruction
        questions = draw_questions(D, cfg.batch, cfg.seed, t)
        jobs = P.draw_jobs(rng_of(cfg.seed, t, "instructions"), questions, cfg.G)  # Alg.1 L5
        taus = policy.rollout(t, "rollout", jobs)  # Alg.1 L6
        with log.timing("reward"):
            set_rewards(task, taus)  # Alg.1 L7
        policy.learner.set_advantages(taus)  # Eq.3
        # Before the update: a fault of the task's own code (task.metrics, called by add_rollouts;
        # task.show, for L15) then leaves no step half recorded.
        log.add_rollouts(t, taus)
        texts = [task.show(tau) for tau in taus]
        metrics = policy.update(t, taus)  # Alg.1 L8 Eq.5
        P.update_weights(taus)  # Alg.1 L9
        log.add_update(metrics | policy.measure_speed(taus), P)
        if t % cfg.K_p == 0 and len(P) > cfg.N_parent:  # Alg.1 L10 CHOICE-4 CHOICE-5
            ranked = P.ranked()  # Alg.1 L11 CHOICE-16
            P.prune(ranked, cfg.N_parent, t)  # Alg.1 L12
            log.write_event(t, "prune", P)
        # Experience-driven instruction generation                                           # Alg.1 L14
        B.add(t, taus, texts)  # Alg.1 L15
        if t % cfg.K_e == 0 and t < cfg.T_e and evolution.optimizer:  # Alg.1 L16 CHOICE-2
            with log.timing("evolve"):
                evolution.evolve(t, policy)

        evaluated = cfg.eval_every > 0 and t % cfg.eval_every == 0
        if evaluated:
            with log.timing("evaluate"):
                # the last step's test questions are left to `compare`
                for split in ("valid", "test") if t < cfg.T else ("valid",):
                    log.add_evaluation(split, policy.evaluate(t, P.best(), split))
        log.end_step(t)
        checkpoints.end_step(t, evaluated)
    return policy, P.best()  # Alg.1 L26


class Evolution:
    """How instructions evolve: the population P, the replay buffer B, the training questions D, and
    the LLM-based optimizer that revises.

    For another way, subclass it and override `evolve`.
    """

    def __init__(
        self, cfg: Config, task: Task, optimizer: Optimizer | None, P: Population, log: Log
    ):
        self.cfg, self.task, self.P, self.log = cfg, task, P, log
        self.optimizer: Any = optimizer  # None: nothing evolves
        self.B = ReplayBuffer(cfg.buffer)  # that many trajectories
        self.D = {q.id: q for q in task.questions("train")}
        # step and round of the evolution under way; the first population is made at t = 0
        self.t = self.round = 0
        self.used = set[str]()  # normalized texts that it has had: a repetition is refused

    def fill_population(self) -> None:
        """Fills P with P_0: the first instruction, and N_P - 1 paraphrases of it that one call to
        the optimizer asks for.

        An optimizer that does not even answer that one is a Fault: the run would be the static
        baseline.
        """
        I_0 = self.P.join(self.task.instruction, None, 0)
        self.used = {fold_words(I_0.text)}
        try:
            if self.optimizer and self.cfg.N_P > 1:  # CHOICE-22
                for text in self.propose(I_0, [], self.cfg.N_P - 1):
                    self.P.join(text, I_0.id, 0)
        except OptimizerDown as e:
            raise Fault(
                f"the optimizer gave no reply to its first call: {e}; check OPENAI_BASE_URL, OPENAI_API_KEY and"
                " --optimizer_model, or choose --mode static"
            ) from None
        self.log.write_event(0, "start", self.P)

    def evolve(self, t: int, policy: Policy) -> None:
        """Replaces P by its parents and the revisions of them that join; if none does, P and W stay
        as they are."""
        cfg, P, B = self.cfg, self.P, self.B
        P_parent = P.ranked()[: cfg.N_parent]  # Alg.1 L17 CHOICE-26
        P_new = list[RatedCandidate]()
        # how many revisions a call asks for (L21's n is cfg.top_n): CHOICE-24
        n = cfg.N_P - cfg.N_parent
        self.t = t
        self.used = {fold_words(I.text) for I in P_parent}
        reason = ""  # why it ended before all rounds were played
        for round in range(cfg.rounds):  # Alg.1 L18 CHOICE-6
            # how many more may join
            room = cfg.N_P - len(P_parent) - len(P_new)
            if not room:
                break
            self.round = round

            # A parent, cfg.failures failures at most, and cfg.D_B other questions than theirs (0:
            # nothing is verified).
            rng = rng_of(cfg.seed, t, f"evolve {round}")
            I_parent = P_parent[rng.integers(len(P_parent))]  # Alg.1 L19
            tau_fail = B.choose_failures(rng, cfg.failures, I_parent.id)
            D_B = [self.D[id] for id in B.choose_question_ids(rng, cfg.D_B, tau_fail)]
            # cfg.D_B is |D_B|: with 0 an empty list is right
            if not tau_fail or (cfg.D_B and not D_B):
                reason = "no failure to learn from, or no question left to verify on"
                break

            # texts of revisions of the parent, of which the best join
            try:
                I_new = self.propose(I_parent, tau_fail, n)  # Alg.1 L20
            except OptimizerDown as e:
                reason = f"the optimizer gave no reply ({e})"
                break
            if I_new:
                tested = self.verify(policy, I_parent, I_new, D_B)  # Alg.1 L21
                joining = P.choose_joining(tested, min(room, cfg.top_n))
                P_new += joining
                self.log.write_verification(t, round, D_B, tested, joining)

        P.replace_by(P_parent, P_new, t)  # Alg.1 L23
        self.log.write_event(t, "evolve", P, reason)

    def propose(self, I_parent: Instruction, tau_fail: list[Experience], n: int) -> list[str]:
        """Returns at most `n` well-formed revisions of a parent by the optimizer, and adds them to
        `used`; paraphrases where there are no failures. Raises OptimizerDown."""
        golds = [gold for e in tau_fail for gold in e.golds]
        return self.ask(I_parent, self.prompt(I_parent, tau_fail, n), golds, n)

    def prompt(self, I_parent: Instruction, tau_fail: list[Experience], n: int) -> str:
        """Returns the prompt of the proposer (App. E): reflection on failures, or one of the
        paper's two ablations."""
        cfg = self.cfg
        if not tau_fail or cfg.proposer == "paraphrase":
            return paraphrase_prompt(I_parent.text, n)
        if cfg.proposer == "history":
            tried = [(I.text, I.w) for I in self.P.family if I.rewards]
            return history_prompt(sorted(tried, key=lambda pair: pair[1]), n)  # CHOICE-15
        failures = [(e.text, e.golds) for e in tau_fail]
        return reflection_prompt(I_parent.text, failures, n, PROMPT_BUDGET)

    def ask(self, I_parent: Instruction, prompt: str, golds: list[str], n: int) -> list[str]:
        """Returns at most `n` well-formed instructions of the optimizer's reply to a prompt that
        shows these golds."""
        call = self.optimizer.ask(prompt)
        row: dict[str, Any] = dict(t=self.t, round=self.round, parent=I_parent.id)
        # A row for the call, before its reply is read: it was billed. Another says what is accepted.
        self.log.run.append("reflections", row | {"call": vars(call)})
        accepted, rejected = read_candidates(
            call.reply,
            I_parent.text,
            self.used,
            golds,
            self.cfg.max_instruction,
            n,
            unfit=self.task.make_format().find_unfit,
        )
        # the keys of `accepted` are places in the reply
        row |= {"accepted": list(accepted), "rejected": rejected}
        self.log.run.append("reflections", row)
        return list(accepted.values())

    def verify(
        self, policy: Policy, I_parent: Instruction, I_new: list[str], D_B: list[Question]
    ) -> list[RatedCandidate]:
        """Returns the revisions, the highest mean reward on D_B first, each with its parent's
        rewards on the same questions."""
        # an instruction's id (None: it is not in P) and its text
        trials = [(I_parent.id, I_parent.text), *((None, text) for text in I_new)]
        # |D_B| trajectories of the parent, then as many of each revision
        taus = self.play(policy, f"verify {self.round}", trials, D_B)
        n = len(D_B)
        self.log.write_trials(self.t, self.round, I_parent.id, taus, n)

        # the parent is trial 0, so the revisions count from 1
        rewards = [tau.reward for tau in taus]
        tested = []
        for k, text in enumerate(I_new, 1):
            own = rewards[k * n : (k + 1) * n]
            tested.append(RatedCandidate(text, I_parent.id, own, rewards[:n]))
        # with --D_B 0 all have the mean 0 and keep the optimizer's order
        return sorted(tested, key=lambda c: -c.r)

    def play(
        self, policy: Policy, purpose: str, trials: list[Any], D_B: list[Question]
    ) -> list[Trajectory]:
        """Returns rollouts of D_B, with rewards: under the first instruction, then the next, and so
        on."""
        jobs = list[Job]()
        for id, text in trials:
            for q in D_B:
                jobs.append(Job(id, text, q, len(jobs)))  # a group of its own: CHOICE-13
        with self.log.timing("verify"):
            taus = policy.rollout(self.t, purpose, jobs)
            set_rewards(self.task, taus)
        return taus


def compare(T: int, policy: Policy, I_0: Instruction, I_star: Instruction, log: Log) -> None:
    """Evaluates the trained and the first policy under I_0 and I_star, except the first one under
    I_0, with which a run begins."""
    log.add_result("trained policy, first instruction", policy.evaluate(T, I_0, "test"))
    if I_star.text != I_0.text:
        log.add_result("trained policy, I_star", policy.evaluate(T, I_star, "test"))
        policy.reset()
        log.add_result("first policy, I_star", policy.evaluate(T, I_star, "test"))


def describe_parts(learner: Any, population: Any, evolution: Any) -> str:
    """Returns a line about the classes of a run that are not the usual ones. Raises Fault for one
    that is none of its kind, or overrides nothing."""
    from grpo import Learner

    told = []
    for part, kind in ((learner, Learner), (population, Population), (evolution, Evolution)):
        if isinstance(part, type) and part is not kind:
            told.append(f"{part.__qualname__} ({', '.join(list_overrides(part, kind))})")
    return f"parts: {', '.join(told)}" if told else ""


def list_overrides(part: type, kind: type) -> list[str]:
    """Returns the methods of its `kind` that a class overrides. Raises Fault if that is none."""
    if not issubclass(part, kind):
        raise Fault(f"{part.__qualname__} does not extend {kind.__name__}")
    known = [*(name for name in dir(kind) if not name.startswith("__")), "__init__"]
    changed = [name for name in known if getattr(part, name) is not getattr(kind, name)]
    if not changed:
        others = set(dir(part)) - set(dir(kind))
        alike = [difflib.get_close_matches(name, known, 1, cutoff=0)[0] for name in others]
        nearest = f"; the nearest is {alike[0]}" if alike else ""
        raise Fault(f"{part.__qualname__} overrides no method of {kind.__name__}{nearest}")
    return changed


class Result(NamedTuple):
    """What a run leaves: its directory, the best instruction, and summary.json."""

    path: Path
    instruction: str
    summary: dict[str, Any]


def prepare(given: Config | None, settings: Settings) -> tuple[Config, Task]:
    """Returns the configuration and the task of a run. Raises Fault for what can be
    known to be missing before torch is imported: questions, the task's own needs, the model, the
    optimizer."""
    cfg = (
        replace(given, **check_settings(type(given), settings)) if given else configure(**settings)
    )
    task = load_task(cfg, settings.get("task"))
    task.instruction = choose_instruction(task)

    if stop.leads():
        check_questions(task)
        task.check()
        check_model(cfg.model)
        find_endpoint(cfg)
    return cfg, task


def train(
    cfg: Config | None = None,
    learner: type[Learner] | None = None,
    population: Callable[[Any], Population] = Population,
    evolution: type[Evolution] = Evolution,
    algorithm: Callable[..., tuple[Policy, Instruction]] = inspo,
    **settings: Any,
) -> Result | None:
    """Trains as the settings say, named as the flags are, or a whole `cfg` (docs/python.md). Raises
    Fault.

    `task`, among them, may be a class or an object. `algorithm` runs on rank 0; on the others None
    is returned. Signals stop the run where the caller has entered `stop.listening`.
    """
    began = time.perf_counter()
    with stop.may_stop():
        cfg, task = prepare(cfg, settings)
        # here: torch takes seconds to import
        from log import Log
        from run import Checkpoints, open_run
        from training.policy import Policy, choose_for_machine, follow

        # `fitted`: cfg with what this machine decides, such as the engine
        cfg, fitted, ranks = choose_for_machine(cfg, task)
    with ranks.fail_at_once(), contextlib.ExitStack() as stack:
        if ranks.rank:
            follow(ranks, task, learner)
            return None
        with stop.may_stop():
            told = describe_parts(learner, population, evolution)
            run = stack.enter_context(open_run(cfg))
            serve = stack.enter_context(Servers(run.path / "servers.log"))
            tools = task.start(serve)
            optimizer = connect_optimizer(cfg, serve)
            ranks.broadcast((fitted, task.address()))
            policy = stack.enter_context(contextlib.closing(Policy(fitted, ranks, task, learner)))
        log = Log(cfg, run, task, began)
        policy.progress = log.show_progress
        log.introduce(policy.describe(), tools, f"optimizer: {describe_optimizer(optimizer)}", told)
        evolving = evolution(cfg, task, optimizer, population(cfg), log)
        checkpoints = Checkpoints(cfg, run, policy, evolving.P, evolving.B)
        with checkpoints.save_on_failure():
            policy, I_star = algorithm(cfg, task, policy, evolving, checkpoints, log)
            checkpoints.export(I_star)
            compare(cfg.T, policy, evolving.P.family[0], I_star, log)
            summary = log.finish(evolving.P, I_star)
    return Result(run.path.absolute(), I_star.text, summary)


def main(
    argv: list[str] | None = None, kind: type[Config] = Config, /, *parts: Any, **changes: Any
) -> None:
    """Trains by the flags of `kind`, with these `parts` of `train` and `changes` in every
    preset."""
    with one_line(), stop.listening():
        result = train(parse_flags(argv, kind, **changes), *parts)
        if result:
            show_page(result.path)


def show_page(run: Path) -> None:
    """Writes the page of a run, which is complete without it."""
    try:
        print("page:", importlib.import_module(PAGE).write_page([run], run / "report.html"))
    except (ModuleNotFoundError, Fault) as e:
        print(f"no page: {e}")


if __name__ == "__main__":
    main()
