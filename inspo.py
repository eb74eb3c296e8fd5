"""INSPO: Instruction-Policy Co-Evolution (arXiv 2512.01945). This file is its Algorithm 1.

    python inspo.py                          # the embedded world, minutes on a laptop CPU
    python inspo.py --mode static            # the baseline: Search-R1, one fixed instruction
    python inspo.py --model path/or/hub-id --train q.jsonl --test q.jsonl --corpus c.jsonl

`# Alg.1 Lnn` and `# Eq.n` mark the paper's lines and equations, `# CHOICE-n` a decision where the paper is silent
(docs/choices.md lists them).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from plumbing import stop  # isort: skip  (first: from here on a Ctrl-C is one line)
from config import Config, parse, warnings
from plumbing.faults import Fault, OptimizerDown, one_line, together
from plumbing.servers import Servers
from plumbing.status import status
from population import Candidate, Experience, Instruction, Population, ReplayBuffer
from reflect import (
    Optimizer,
    candidates,
    connect,
    describe,
    endpoint,
    history_prompt,
    normalize,
    paraphrase_prompt,
    reflection_prompt,
)
from tasks import Job, Question, Task, check_questions, draw, first_instruction, load_task, reward, rng_of
from training.device import check_preset_device

if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from grpo import Learner
    from journal.log import Log
    from training.policy import Policy


def inspo(
    cfg: Config, task: Task, policy: Policy, optimizer: Optimizer | None, P: Population, log: Log
) -> tuple[Policy, Instruction]:  # Alg.1 L1
    """Trains `policy` on a task while its instructions, P, evolve; returns it with the best instruction."""
    D = {q.id: q for q in task.questions("train")}
    B = ReplayBuffer(cfg.buffer)
    first, stopped = log.restore(P, B)  # step 1; or the step to resume, and in which phase of it the run was stopped
    if not P.family:
        first_population(cfg, P, task, optimizer, log)  # Alg.1 L2
    log.begin()
    for t in range(first, cfg.T + 1):  # Alg.1 L3
        if not stopped:
            # Policy optimization with dynamic instructions                                      # Alg.1 L4
            log.begin_step(t)
            questions = draw(D, cfg.batch, cfg.seed, t)
            jobs = P.draw(rng_of(cfg.seed, t, "instructions"), questions, cfg.G)  # Alg.1 L5
            taus = policy.rollout(t, "rollout", jobs)  # Alg.1 L6
            reward(task, taus)  # Alg.1 L7
            policy.learner.set_advantages(taus)  # Eq.3
            update = policy.update(t, taus)  # Alg.1 L8 Eq.5
            P.attribute(taus)  # Alg.1 L9
            log.step(t, taus, P, update)
            if t % cfg.K_p == 0 and len(P) > cfg.N_parent:  # Alg.1 L10 CHOICE-4 CHOICE-5
                ranked = P.ranked()  # Alg.1 L11 CHOICE-16
                pruned = P.prune(ranked, cfg.N_parent, t)  # Alg.1 L12
                log.pruned(t, P, pruned)
            # Experience-driven instruction generation                                           # Alg.1 L14
            B.add(t, taus, task.shown)  # Alg.1 L15
        if stopped != "evaluate" and t % cfg.K_e == 0 and t < cfg.T_e and optimizer:  # Alg.1 L16 CHOICE-2
            evolve(cfg, t, P, B, task, policy, optimizer, D, log)

        stopped = ""
        evaluate_and_save(cfg, t, P, log)
    return policy, P.best()  # Alg.1 L26


def evaluate_and_save(cfg: Config, t: int, P: Population, log: Log) -> None:
    """Ends step t: evaluates every --eval_every steps, saves every --save_every, after an evaluation and in the end."""
    if evaluated := cfg.eval_every > 0 and t % cfg.eval_every == 0 and t < cfg.T:
        log.evaluate_step(t, P.best())
    log.end_step(t)
    if evaluated or t % cfg.save_every == 0 or t == cfg.T:
        log.save(t)


def evolve(
    cfg: Config, t: int, P: Population, B: ReplayBuffer, task: Task, policy: Policy, optimizer: Optimizer,
    D: dict[str, Question], log: Log,
) -> None:  # fmt: skip
    """Replaces P by its parents and verified revisions of them; without a revision P and W stay as they are."""
    P_parent = P.ranked()[: cfg.N_parent]  # Alg.1 L17
    P_new: list[Candidate] = []
    used = {normalize(I.text) for I in P_parent}
    shortfall = "too few revisions verified"
    for round in range(cfg.rounds):
        room = cfg.N_P - len(P_parent) - len(P_new)
        if room == 0:  # Alg.1 L18 CHOICE-6
            break
        rng = rng_of(cfg.seed, t, f"evolve {round}")
        I_parent = P_parent[rng.integers(len(P_parent))]  # Alg.1 L19
        tau_fail = B.failures(rng, cfg.failures, I_parent.id)
        D_B = [D[q] for q in B.questions(rng, cfg.D_B, tau_fail)]
        if not tau_fail or (cfg.D_B and not D_B):
            shortfall = "no failure to learn from" if not tau_fail else "no question left to verify on"
            break
        if limit := log.limit((1 + cfg.N_P - cfg.N_parent) * len(D_B) * cfg.gate_samples):
            shortfall = limit
            break
        try:
            I_new = propose(cfg, t, round, P, I_parent, tau_fail, used, task, optimizer, log)  # Alg.1 L20
        except OptimizerDown as e:
            shortfall = f"the optimizer gave no reply ({e})"
            break
        if not I_new:
            continue
        verified = verify(cfg, t, round, task, policy, I_parent, I_new, D_B, log)  # Alg.1 L21
        joining = P.admit(verified, min(room, cfg.top_n))
        P_new += joining
        log.verified(t, round, I_parent, D_B, verified, joining)
    joined = P.succeed(P_parent, P_new, t)  # Alg.1 L23
    log.evolved(t, P, P_parent, joined, shortfall)


def first_population(cfg: Config, P: Population, task: Task, optimizer: Optimizer | None, log: Log) -> None:
    """Fills P with P_0: the first instruction, up to N_P - 1 paraphrases of it from one call to the optimizer.

    An optimizer that does not even answer that one is a Fault: the run would be the static baseline.
    """
    I_0 = P.join(log.first, None, 0)
    if optimizer and cfg.N_P > 1:
        try:
            # CHOICE-22
            paraphrases = propose(cfg, 0, 0, P, I_0, [], {normalize(I_0.text)}, task, optimizer, log)
            for text in paraphrases[: cfg.N_P - 1]:
                P.join(text, I_0.id, 0)
        except OptimizerDown as e:
            remedy = "check OPENAI_BASE_URL, OPENAI_API_KEY and --optimizer_model, or choose --mode static"
            raise Fault(f"the optimizer gave no reply to its first call: {e}; {remedy}") from None
    log.started(P)


def propose(
    cfg: Config, t: int, round: int, P: Population, I_parent: Instruction, tau_fail: list[Experience], used: set[str],
    task: Task, optimizer: Optimizer, log: Log,
) -> list[str]:  # fmt: skip
    """Returns well-formed revisions of a parent by the optimizer, and adds them to `used`. Raises OptimizerDown."""
    n = cfg.N_P - cfg.N_parent  # CHOICE-24
    golds = [gold for e in tau_fail for gold in e.golds]
    prompt = prompt_of(cfg, P, I_parent, tau_fail, n, task)
    return ask(cfg, t, round, prompt, n, I_parent, golds, used, task, optimizer, log)


def ask(
    cfg: Config, t: int, round: int, prompt: str, n: int, I_parent: Instruction, golds: list[str], used: set[str],
    task: Task, optimizer: Optimizer, log: Log,
) -> list[str]:  # fmt: skip
    """Returns at most `n` well-formed instructions of the optimizer's reply to a prompt that shows these golds."""
    call = optimizer.ask(prompt, f"t{t} r{round}")
    log.call(t, round, I_parent, call)  # before anything else can fail: it has been paid for
    unfit = partial(task.format.unfit, task=task)
    accepted, rejected = candidates(call.reply, I_parent.text, used, golds, cfg.max_instruction, n, unfit)
    log.proposed(t, round, I_parent, call, list(accepted), rejected)
    return list(accepted.values())


def prompt_of(
    cfg: Config, P: Population, I_parent: Instruction, tau_fail: list[Experience], n: int, task: Task
) -> str:
    """Returns the prompt of the proposer (App. E): reflection on failures, or one of the paper's two ablations."""
    if cfg.proposer == "history" and tau_fail:
        tried = [(I.text, I.w) for I in P.family if I.rewards]
        return history_prompt(sorted(tried, key=lambda pair: pair[1]), n)  # CHOICE-15
    if cfg.proposer == "reflection" and tau_fail:
        failures, observations = [(e.text, e.golds) for e in tau_fail], task.format.results(task.tools)
        return reflection_prompt(I_parent.text, failures, n, cfg.prompt_budget, observations)
    return paraphrase_prompt(I_parent.text, n)


def verify(
    cfg: Config, t: int, round: int, task: Task, policy: Policy, I_parent: Instruction, I_new: list[str],
    D_B: list[Question], log: Log,
) -> list[Candidate]:  # fmt: skip
    """Returns the revisions by falling mean reward on D_B, each beside its parent on the same questions."""
    texts, m = [I_parent.text, *I_new], cfg.gate_samples
    plays = [(I_parent.id if k == 0 else None, text, q) for k, text in enumerate(texts) for q in D_B]
    jobs = [Job(*play, group) for group, play in enumerate(plays) for _ in range(m)]  # CHOICE-13
    taus = policy.rollout(t, f"verify {round}", jobs)
    reward(task, taus)
    log.played(t, round, I_parent, taus)
    means = [sum(tau.reward for tau in taus[i : i + m]) / m for i in range(0, len(taus), m)]  # by text, by question
    r_parent, *r_new = (means[k * len(D_B) : (k + 1) * len(D_B)] for k in range(len(texts)))
    verified = [Candidate(I, I_parent.id, r, r_parent) for I, r in zip(I_new, r_new, strict=True)]
    return sorted(verified, key=lambda c: -c.r)  # --D_B 0 asks nothing: all join, in the optimizer's order


def population_of(cfg: Config) -> Population:
    """Returns an empty population that follows Eq. 4 and 6."""
    return Population(cfg.tau_s, cfg.window)


def main(argv: list[str] | None = None) -> None:
    train(parse(argv))


def train(
    cfg: Config,
    algorithm: Callable[..., tuple[Policy, Instruction]] = inspo,
    population: Callable[..., Population] = population_of,
    learner: type[Learner] | None = None,
) -> None:
    """Starts what a run needs and trains with `algorithm` on rank 0; other ranks do what its policy asks of them."""
    with one_line():
        task = load_task(cfg)
        first = first_instruction(task)
        leads = os.environ.get("RANK", "0") == "0"
        if leads and not cfg.dry_run:
            status("reading the questions")
            together(lambda: check_questions(task), task.check, lambda: endpoint(cfg), lambda: check_preset_device(cfg))
        status("importing torch")
        import torch

        from engines.choose import device_of, dtype_of
        from grpo import Learner
        from journal.directory import RunDirectory
        from journal.log import Log
        from journal.screen import Screen
        from training.checks import check, print_memory
        from training.policy import Policy, worker_loop
        from training.ranks import Ranks

        learner = learner or Learner
        if cfg.dry_run:
            return print_memory(cfg)
        torch.set_num_threads(cfg.threads)
        device = device_of(cfg)
        ranks = Ranks(device, cfg.patience, dtype_of(cfg, device) if leads else "")
        with stop.listening(), ranks.fail_at_once(), contextlib.ExitStack() as stack:
            if ranks.rank:
                return worker_loop(cfg, ranks, learner)
            with stop.may_stop():
                engine, why, fitted = check(cfg, ranks, task, first)
                run = stack.enter_context(RunDirectory.opened(cfg))
                serve = stack.enter_context(Servers(run.path / "servers.log"))
                status("starting servers")
                tools = task.start(serve)
                optimizer = connect(cfg, serve, run.rows("reflections"))
                status("loading the policy")
                policy = stack.enter_context(contextlib.closing(Policy(fitted, ranks, engine, task, learner)))
                status("")
            screen = stack.enter_context(Screen(cfg.T, [tool.plural for tool in task.tools]))
            log = Log(cfg, run, policy, task, first, screen)
            log.introduce(f"{engine} engine: {why}", tools, describe(optimizer), warnings(cfg))
            with log.rescued():
                policy, I_star = algorithm(cfg, task, policy, optimizer, population(cfg), log)
                log.finish(I_star)


if __name__ == "__main__":
    main()
