"""INSPO: Instruction-Policy Co-Evolution (arXiv 2512.01945). This file is its Algorithm 1.

    python inspo.py                          # the embedded world, minutes on a laptop CPU
    python inspo.py --mode static            # the baseline: Search-R1, one fixed instruction
    python inspo.py --model path/or/hub-id --train q.jsonl --test q.jsonl --corpus c.jsonl

`# Alg.1 Lnn` and `# Eq.n` mark the paper's lines and equations, `# CHOICE-n` a decision where the paper is silent
(docs/choices.md lists them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import stop  # first: from here on a Ctrl-C is one line
from config import Config, first_instruction, parse
from data import Question, draw, em, rng
from faults import Fault, OptimizerDown, one_line
from harness.status import status
from objectives import objective_of, set_advantages
from population import Candidate, Experience, Instruction, Population, ReplayBuffer
from reflect import Optimizer, candidates, history_prompt, normalized, paraphrase_prompt, reflection_prompt
from rollout import Job, Trajectory
from selection import gate, population_of

if TYPE_CHECKING:  # torch takes seconds to import; --help does not wait for it
    from harness.log import Log
    from training.policy import Policy


def reward(tau: Trajectory) -> float:
    """Returns r(tau): exact match of the last answer, 1 or 0 (§2.1)."""
    return em(tau.prediction, tau.question.golds)


def inspo(
    cfg: Config, policy: Policy, optimizer: Optimizer | None, D: dict[str, Question], log: Log
) -> tuple[Policy, Instruction]:  # Alg.1 L1
    """Trains `policy` on the questions D while its instructions evolve; returns it with the best instruction."""
    P = population_of(cfg)
    P, B = log.restore(P) or (first_population(cfg, P, optimizer, log), ReplayBuffer(cfg.buffer))  # Alg.1 L2
    if log.phase == "evolve" and optimizer:  # the run was stopped inside this evolution: repeat it from its start
        evolve(cfg, log.t, P, B, policy, optimizer, D, log)
    for t in log.steps(P, B):  # Alg.1 L3
        # Policy optimization with dynamic instructions                                          # Alg.1 L4
        questions = draw(D, cfg.batch, cfg.seed, t)
        n = cfg.G if cfg.groups == "question" else 1  # instructions of a group; Algorithm 1 has one
        drawn = P.draw(rng(cfg.seed, t, "instructions"), questions, n)  # Alg.1 L5
        taus = policy.rollout(t, "rollout", jobs_of(drawn, n, cfg.G))  # Alg.1 L6
        for tau in taus:
            tau.reward = reward(tau)  # Alg.1 L7 Eq.1
        set_advantages(taus, objective_of(cfg), policy.memory)
        update = policy.update(t, taus)  # Alg.1 L8 Eq.5
        P.attribute(taus)  # Alg.1 L9
        log.step(t, taus, P, update)

        if t % cfg.K_p == 0 and len(P) > cfg.N_parent:  # Alg.1 L10 CHOICE-4 CHOICE-5
            ranked = P.ranked()  # Alg.1 L11 CHOICE-16
            pruned = P.prune(ranked, cfg.N_parent, t)  # Alg.1 L12
            log.pruned(t, P, pruned)

        # Experience-driven instruction generation                                               # Alg.1 L14
        B.add(t, taus)  # Alg.1 L15
        if t % cfg.K_e == 0 and t < cfg.T_e and optimizer:  # Alg.1 L16 CHOICE-2
            evolve(cfg, t, P, B, policy, optimizer, D, log)
    return policy, P.best()  # Alg.1 L26


def evolve(
    cfg: Config, t: int, P: Population, B: ReplayBuffer, policy: Policy, optimizer: Optimizer,
    D: dict[str, Question], log: Log,
) -> None:  # fmt: skip
    """Replaces P by its parents and verified revisions of them; without a revision P and W stay as they are."""
    P_parent = P.ranked()[: cfg.N_parent]  # Alg.1 L17
    P_new: list[Candidate] = []
    spare: list[Candidate] = []
    used = {normalized(I.text) for I in P_parent}
    shortfall = "too few candidates"
    for round in range(cfg.rounds):
        room = cfg.N_P - len(P_parent) - len(P_new)
        if room == 0:  # Alg.1 L18
            break
        dice = rng(cfg.seed, t, f"evolve {round}")
        I_parent = P_parent[dice.integers(len(P_parent))]  # Alg.1 L19
        tau_fail = B.failures(dice, cfg.failures, I_parent.id)
        D_B = [D[q] for q in B.questions(dice, cfg.D_B, tau_fail)]
        if not tau_fail or (cfg.D_B and not D_B):
            shortfall = "no failure to learn from" if not tau_fail else "no question left to verify on"
            break
        if limit := log.limit((1 + cfg.N_P - cfg.N_parent) * len(D_B) * cfg.gate_samples):
            shortfall = limit
            break
        try:
            I_new = propose(cfg, t, round, P, I_parent, tau_fail, used, optimizer, log)  # Alg.1 L20
        except OptimizerDown as e:
            shortfall = f"the optimizer gave no reply ({e})"
            break
        if not I_new:
            continue
        scored = verify(cfg, t, round, policy, I_parent, I_new, D_B, log)  # Alg.1 L21
        joining = [c for c in scored if c.bound >= c.r_parent][: min(room, cfg.top_n)]  # CHOICE-12
        P_new += joining
        spare += [c for c in scored if c not in joining and not c.worse]
        log.verified(t, round, I_parent, D_B, scored, joining)

    spare.sort(key=lambda c: c.r_parent - c.r)  # CHOICE-15
    P_new += spare[: cfg.N_P - len(P_parent) - len(P_new)]  # CHOICE-6
    if not P_new:  # CHOICE-26
        return log.not_evolved(t, P, shortfall)
    P.succeed(P_parent, t)
    joined = [P.join(c.text, c.parent, t, c.r) for c in P_new]  # Alg.1 L23
    log.evolved(t, P, P_parent, joined, shortfall)


def jobs_of(drawn: list[tuple[Question, Instruction]], n: int, G: int) -> list[Job]:
    """Returns G jobs for every `n` of the draws, a group of Eq. 3 each, in which those take turns."""
    turns = [(group, *drawn[n * group + g % n]) for group in range(len(drawn) // n) for g in range(G)]
    return [Job(I.id, I.text, q, group) for group, q, I in turns]


def first_population(cfg: Config, P: Population, optimizer: Optimizer | None, log: Log) -> Population:
    """Fills P and returns it as P_0: the first instruction, up to N_P - 1 paraphrases from one call to the optimizer.

    An optimizer that does not even answer that one is a Fault: the run would be the static baseline.
    """
    I_0 = P.join(first_instruction(cfg), None, 0)
    if optimizer and cfg.N_P > 1:
        try:
            paraphrases = propose(cfg, 0, 0, P, I_0, [], {normalized(I_0.text)}, optimizer, log)  # CHOICE-22
            for text in paraphrases[: cfg.N_P - 1]:
                P.join(text, I_0.id, 0)
        except OptimizerDown as e:
            remedy = "check OPENAI_BASE_URL, OPENAI_API_KEY and --optimizer_model, or choose --mode static"
            raise Fault(f"the optimizer gave no reply to its first call: {e}; {remedy}") from None
    log.started(P)
    return P


def propose(
    cfg: Config, t: int, round: int, P: Population, I_parent: Instruction, tau_fail: list[Experience], used: set[str],
    optimizer: Optimizer, log: Log,
) -> list[str]:  # fmt: skip
    """Returns well-formed revisions of a parent by the optimizer, and adds them to `used`. Raises OptimizerDown."""
    n = cfg.N_P - cfg.N_parent  # as many as `prompt_of` asks for
    golds = [gold for e in tau_fail for gold in e.golds]
    return ask(cfg, t, round, prompt_of(cfg, P, I_parent, tau_fail), n, I_parent, golds, used, optimizer, log)


def ask(
    cfg: Config, t: int, round: int, prompt: str, n: int, I_parent: Instruction, golds: list[str], used: set[str],
    optimizer: Optimizer, log: Log,
) -> list[str]:  # fmt: skip
    """Returns at most `n` well-formed instructions of the optimizer's reply to a prompt that shows these golds."""
    call = optimizer.ask(prompt, f"t{t} r{round}")
    log.call(t, round, I_parent, call)  # before anything else can fail: it has been paid for
    accepted, rejected = candidates(call.reply, I_parent.text, used, golds, cfg.max_instruction, n)
    log.proposed(t, round, I_parent, call, list(accepted), rejected)
    return list(accepted.values())


def prompt_of(cfg: Config, P: Population, I_parent: Instruction, tau_fail: list[Experience]) -> str:
    """Returns the prompt of the proposer (App. E): reflection on failures, or one of the paper's two ablations."""
    n = cfg.N_P - cfg.N_parent  # CHOICE-24
    if cfg.proposer == "history" and tau_fail:
        scored = [(I.text, I.w) for I in P.family if I.rewards]
        return history_prompt(sorted(scored, key=lambda pair: pair[1]), n)
    if cfg.proposer == "reflection" and tau_fail:
        return reflection_prompt(I_parent.text, [(e.text, e.golds) for e in tau_fail], n, cfg.prompt_budget)
    return paraphrase_prompt(I_parent.text, n)


def verify(
    cfg: Config, t: int, round: int, policy: Policy, I_parent: Instruction, I_new: list[str], D_B: list[Question],
    log: Log,
) -> list[Candidate]:  # fmt: skip
    """Returns the revisions by falling mean reward on D_B, each compared with its parent on the same questions."""
    texts, m = [I_parent.text, *I_new], cfg.gate_samples
    plays = [(k, text, q, k * len(D_B) + i) for k, text in enumerate(texts) for i, q in enumerate(D_B)]
    taus = policy.rollout(t, f"verify {round}", [Job(*play) for play in plays for _ in range(m)])  # CHOICE-13
    for tau in taus:
        tau.reward = reward(tau)
    log.played(t, round, I_parent, taus)
    n = max(1, len(D_B))  # --D_B 0 asks nothing: every candidate joins, in the optimizer's order
    means = [sum(tau.reward for tau in taus[i : i + m]) / m for i in range(0, len(taus), m)]  # by text, by question
    r_parent, *r_new = (means[k * len(D_B) : (k + 1) * len(D_B)] for k in range(len(texts)))
    scored = [
        Candidate(text, I_parent.id, sum(r) / n, sum(r_parent) / n, *gate(r, r_parent, cfg.gate))
        for text, r in zip(I_new, r_new, strict=True)
    ]
    return sorted(scored, key=lambda c: -c.r)


def main(argv: list[str] | None = None) -> None:
    """Trains with INSPO, or with a relative of it, as the flags say."""
    cfg = parse(argv)
    if cfg.mode not in ("espl", "fst"):
        return train(cfg, inspo)
    import rivals

    train(cfg, {"espl": rivals.espl, "fst": rivals.fst}[cfg.mode])


def train(cfg: Config, algorithm: Callable[..., tuple[Policy, Instruction]]) -> None:
    """Runs `inspo`, or a baseline of its signature, on rank 0; other ranks do what its `policy` asks of them."""
    with one_line(), stop.listening():
        status("importing torch")
        from harness.start import device_of, prepare, print_memory
        from training.ranks import Ranks
        from training.worker import worker_loop

        if cfg.dry_run:
            return print_memory(cfg)
        ranks = Ranks(device_of(cfg), cfg.patience)
        with ranks.fail_at_once():
            if ranks.rank:
                return worker_loop(cfg, ranks)
            with prepare(cfg, ranks) as (policy, optimizer, D, log):
                policy, I_star = algorithm(cfg, policy, optimizer, D, log)
                log.finish(I_star)


if __name__ == "__main__":
    main()
