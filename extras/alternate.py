"""The loop that INSPO's relatives share: GRPO under a population, which a rule of their own changes now and then."""

from collections.abc import Callable

from config import Config
from inspo import evaluate_and_save
from journal.log import Log
from population import Instruction, Population, ReplayBuffer
from reflect import Optimizer
from tasks import Question, Task, draw, reward, rng_of
from training.policy import Policy


def begin(P: Population, B: ReplayBuffer, log: Log) -> tuple[int, str]:
    """Restores a run, or starts it with the first instruction alone; returns the step to take and where in it."""
    first, stopped = log.restore(P, B)
    if not P.family:
        P.join(log.first, None, 0)
        log.started(P)
    log.begin()
    return first, stopped


def alternate(
    cfg: Config, task: Task, policy: Policy, optimizer: Optimizer | None, P: Population, log: Log,
    evolve: Callable[[int, ReplayBuffer, dict[str, Question], Optimizer], None],
) -> tuple[Policy, Instruction]:  # fmt: skip
    """Trains `policy` while evolve(t, B, D, optimizer) changes P every K_e steps; returns it with the best of P."""
    D = {q.id: q for q in task.questions("train")}
    B = ReplayBuffer(cfg.buffer)
    first, stopped = begin(P, B, log)
    for t in range(first, cfg.T + 1):
        if not stopped:
            log.begin_step(t)
            questions = draw(D, cfg.batch, cfg.seed, t)
            taus = policy.rollout(t, "rollout", P.draw(rng_of(cfg.seed, t, "instructions"), questions, cfg.G))
            reward(task, taus)
            policy.learner.set_advantages(taus)
            update = policy.update(t, taus)
            P.attribute(taus)
            log.step(t, taus, P, update)
            B.add(t, taus, task.shown)
        # After the last step nobody would play what is new.
        if stopped != "evaluate" and t % cfg.K_e == 0 and t < min(cfg.T, cfg.T_e) and optimizer:
            evolve(t, B, D, optimizer)

        stopped = ""
        evaluate_and_save(cfg, t, P, log)
    return policy, P.best()
