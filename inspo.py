"""INSPO: Instruction-Policy Co-Evolution (arXiv 2512.01945). This file is its Algorithm 1.

    python inspo.py                          # the embedded world, minutes on a laptop CPU
    python inspo.py --mode static            # Search-R1 on it: one fixed instruction
    python inspo.py --model path/or/hub-id --train q.jsonl --test q.jsonl --corpus c.jsonl

GRPO trains the policy on multi-turn rollouts with a search tool. Every question is asked under an instruction that
is sampled from a population; the rewards that train the policy also weigh the instructions; weak ones are pruned;
an LLM reflects on fresh failures and proposes new ones, which join if they verify.

`# Alg.1 Lnn`, `# Eq.n` and `# CHOICE-n` mark where the paper's lines and our readings of it act (README has the list).
"""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import reflect
import report
from config import HERE, PRESETS, SEARCH_R1, Config, parse, scripted, warnings
from data import Question, em, load_questions
from grpo import advantages
from harness.directory import Ledger, Run, tracker
from harness.log import Session, rng
from harness.servers import Servers
from population import Experience, Instruction, Population, ReplayBuffer
from reflect import Optimizer, OptimizerDown, paid_calls, same, token_counter
from rollout import EngineFault, Search, SearchDown, Trajectory
from training.fit import estimate, shapes
from training.model import load_config, load_tokenizer
from training.ranks import Ranks, Team, follow
from training.worker import Worker, choose_engine


def reward(tau: Trajectory, q: Question) -> float:
    """r(tau): exact match of the response's last answer, 1 or 0 (§2.1)."""  # Alg.1 L7
    return em(tau.prediction, q.golds)  # Eq.1: its expectation is what the policy maximizes


def algorithm_1(s: Session, team: Team, start: int, after_step, save) -> None:
    """Steps start+1..T of Algorithm 1; `after_step(t, metrics, clock)` logs a step, `save(t)` keeps its state."""
    cfg, P, B = s.cfg, s.P, s.B
    for t in range(start + 1, cfg.T + 1):  # Alg.1 L3
        clock = [time.time()]

        # Policy optimization with dynamic instructions                                     # Alg.1 L4
        q = s.questions(t)
        I = P.sample(rng(cfg.seed, t, "instructions"), len(q))  # Alg.1 L5
        jobs = [(I[k].id, I[k].text, q[k], k) for k in range(len(q)) for _ in range(cfg.G)]
        try:
            taus = s.trajectories(jobs, t, "rollout")  # Alg.1 L6
        except (SearchDown, EngineFault, KeyboardInterrupt):
            save(t - 1)  # nothing of step t has happened yet
            raise
        clock.append(time.time())
        s.ledger.training_rollouts += len(taus)
        s.ledger.searches += sum(tau.served for tau in taus)

        per = cfg.mini * cfg.G  # CHOICE-10
        minibatches = [taus[k : k + per] for k in range(0, len(taus), per)]
        metrics = team.update(t, minibatches, advantages(taus))  # Alg.1 L8 Eq.5
        clock.append(time.time())

        rewards: dict[int, list[float]] = {}
        for tau in taus:
            rewards.setdefault(tau.instruction, []).append(tau.reward)
        P.attribute(rewards)  # Alg.1 L9

        if t % cfg.K_p == 0 and len(P) > cfg.N_parent:  # Alg.1 L10 CHOICE-4 CHOICE-5
            before = len(P)
            gone = P.prune(cfg.N_parent, t)  # Alg.1 L11 L12
            left = ", ".join(f"#{x.id} (w {x.w:.2f})" for x in gone)
            s.say(t, "prune", f"|P| {before} -> {len(P)}: {left} left")

        # Experience-driven instruction generation                                          # Alg.1 L14
        asked = {x.id: x for x in q}
        B.add([experience(t, tau, asked[tau.question]) for tau in taus])  # Alg.1 L15
        if t % cfg.K_e == 0 and t < cfg.T_e:  # Alg.1 L16 CHOICE-2
            evolve(s, t)
        clock.append(time.time())

        s.run.trajectories(t, [tau.record() for tau in taus])
        after_step(t, report.step_metrics(taus, asked, rewards, P, cfg.G) | metrics, clock)


def experience(t: int, tau: Trajectory, q: Question) -> Experience:
    text = f"Question: {q.text}\n{tau.response.strip()}"
    return Experience(t, tau.instruction, q.id, text, q.golds, tau.reward)


def evolve(s: Session, t: int) -> None:
    """A new generation: lines 17-23 of Algorithm 1. An optimizer that is down leaves the population as it is."""
    cfg, P, B = s.cfg, s.P, s.B
    P_parent = P.ranked()[: cfg.N_parent]  # Alg.1 L17
    P_new: list[tuple[str, int, float]] = []  # (text, parent, verified)
    spare: list[tuple[float, str, int, float]] = []  # scored, but short of the parent: (margin, text, parent, verified)
    taken = {same(I.text) for I in P_parent}
    note, r_parent = "", 0.0
    for round in range(cfg.rounds):
        places = cfg.N_P - len(P_parent) - len(P_new)
        if places == 0:  # Alg.1 L18
            break
        dice = rng(cfg.seed, t, f"evolve {round}")
        I_parent = P_parent[dice.integers(len(P_parent))]  # Alg.1 L19
        tau_fail = B.failures(dice, cfg.failures)
        D_B = B.questions(dice, cfg.D_B, {e.question for e in tau_fail})
        if not tau_fail or not D_B:
            note = "no failure to learn from" if not tau_fail else "no question left to verify on"
            break
        try:
            I_new = propose(s, t, round, I_parent, tau_fail, taken)  # Alg.1 L20
        except OptimizerDown as e:
            note = f"the optimizer gave no reply ({e})"
            break
        if not I_new:
            continue
        r_parent, *r = verify(s, t, round, [I_parent.text, *I_new], [s.train[k] for k in D_B])  # Alg.1 L21
        scored = sorted(zip(I_new, r, strict=True), key=lambda x: -x[1])
        joined = [(text, I_parent.id, v) for text, v in scored if v >= r_parent][: min(places, cfg.top_n)]
        P_new += joined
        spare += [(v - r_parent, text, I_parent.id, v) for text, v in scored if (text, I_parent.id, v) not in joined]
        row = {"t": t, "round": round, "parent": I_parent.id, "r_parent": r_parent, "D_B": D_B}
        verified = [{"text": x, "r": v, "joined": (x, I_parent.id, v) in joined} for x, v in scored]
        s.run.log("reflections", row | {"verified": verified})

    spare.sort(reverse=True)
    P_new += [(text, parent, v) for _, text, parent, v in spare][: cfg.N_P - len(P_parent) - len(P_new)]  # CHOICE-6
    if not P_new:
        s.say(t, "evolve", f"no new instruction: {note or 'no candidate was well formed'}; P stays as it is")
        return
    P.succeed(P_parent, t)
    came = [P.join(text, parent, t, v) for text, parent, v in P_new]  # Alg.1 L23
    text = f"parent {', '.join(f'#{I.id}' for I in P_parent)} ({r_parent:.2f} on D_B); {len(came)} came"
    if len(P) < cfg.N_P:
        text += f"; {cfg.N_P - len(P)} places stay empty: {note or 'too few candidates'}"
    for I in came:
        text += f"\n{'':18}#{I.id:<3d} {I.verified:.2f}  + {report.news(I.text, P.family[I.parent].text)}"
    s.say(t, "evolve", text)


def propose(s: Session, t: int, round: int, parent: Instruction, tau_fail: list[Experience], taken: set[str]):
    """Well-formed candidates of O for one parent; the call goes to reflections.jsonl before anything else happens."""
    cfg = s.cfg
    call, accepted, rejected = reflect.propose(
        s.optimizer, f"t{t} r{round}", parent.text, [(e.text, e.golds) for e in tau_fail], cfg.N_P - cfg.N_parent,
        taken, budget=cfg.prompt_budget, max_tokens=cfg.max_instruction,
    )  # fmt: skip
    s.ledger.optimizer_calls += 1
    s.ledger.optimizer_tokens += call["prompt_tokens"] + call["completion_tokens"]
    s.ledger.optimizer_seconds += call["seconds"]
    row = {"t": t, "round": round, "parent": parent.id}
    if not call["paid_before"]:
        s.run.log("reflections", row | {"call": call})
    s.run.log("reflections", row | {"accepted": accepted, "rejected": rejected})
    return accepted


def verify(s: Session, t: int, round: int, texts: list[str], D_B: list[Question]) -> list[float]:
    """Mean reward of each instruction on the same questions."""
    jobs = [(k, text, q, k * len(D_B) + i) for k, text in enumerate(texts) for i, q in enumerate(D_B)]
    taus = s.trajectories(jobs, t, f"verify {round}")
    s.ledger.verification_rollouts += len(taus)
    return [sum(tau.reward for tau in taus if tau.instruction == k) / len(D_B) for k in range(len(texts))]


# --------------------------------------------------------------------------------------------------------------------
# What surrounds the algorithm: parts are made, steps are logged and saved, the end is told.


def start_population(s: Session, first: str) -> None:
    """P_0: the first instruction, and N_P - 1 variations asked of the optimizer once."""  # Alg.1 L2
    parent = s.P.join(first, None, 0)
    if s.cfg.N_P > 1 and s.optimizer:
        try:
            for text in propose(s, 0, 0, parent, [], {same(first)})[: s.cfg.N_P - 1]:
                s.P.join(text, parent.id, 0)
        except OptimizerDown as e:
            s.bar.write(f"the optimizer gave no reply ({e}): the first instruction starts alone")
    s.say(0, "start", f"|P| {len(s.P)}: the first instruction and {len(s.P) - 1} variations")


def main(argv: list[str] | None = None) -> None:
    started = time.time()
    cfg = parse(argv)
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if cfg.dry_run:
        return will_it_fit(cfg, "torch" if cfg.engine == "torch" else "vllm", cfg.gpus, cfg.gpu_mem, tell=print)
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no CUDA device here; leave it out, or choose cpu")
    ranks = Ranks(device, cfg.patience)
    make = partial(Worker, cfg, ranks)
    if ranks.rank:
        return follow(ranks, make)
    name = next((k for k, v in PRESETS.items() if v["model"] == cfg.model), Path(cfg.model).name)
    train, test = load_questions(cfg.train), load_questions(cfg.test)
    first = Path(cfg.instruction).read_text().strip() if cfg.instruction else SEARCH_R1
    if not first:
        sys.exit(f"--instruction {cfg.instruction}: the file is empty")
    if ranks.nodes > 1 and (not cfg.retriever or "//127." in cfg.retriever or "//localhost" in cfg.retriever):
        sys.exit(f"{ranks.nodes} nodes: give --retriever with an address that all of them can reach")
    engine, why = choose_engine(cfg, device)
    if device == "cuda":
        will_it_fit(cfg, engine, ranks.size, torch.cuda.get_device_properties(0).total_memory / 1e9)
    positions = getattr(load_config(cfg.model), "max_position_embeddings", None) or math.inf
    if cfg.max_prompt + cfg.max_response > positions:
        sys.exit(f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response}: the model ends at {positions}")
    load_tokenizer(cfg.model)  # what is wrong with it is said before weights are loaded
    run = Run(cfg, name)
    try:
        with contextlib.ExitStack() as stack:
            team = Team(ranks, engine, make)
            stack.callback(team.dismiss)
            n = sum(p.numel() for p in team.worker.learner.model.parameters())
            on = device if ranks.size == 1 else f"{ranks.size} x {device}"
            what = f"{name} ({n / 1e6:,.2f}M parameters, {on}, {engine} engine: {why})"
            go(cfg, run, team, what, {q.id: q for q in train}, test, first, stack, started)
    except SystemExit:
        run.discard_if_empty()
        raise
    except SearchDown as e:
        sys.exit(f"\nthe search server does not answer ({e}); nothing was scored without it\n{run.how_to_resume()}")
    except EngineFault as e:
        sys.exit(f"\n{e}; nothing was trained on it\n{run.how_to_resume()}")
    except KeyboardInterrupt:
        sys.exit(f"\nstopped\n{run.how_to_resume()}")


def will_it_fit(cfg: Config, engine: str, gpus: int, gpu_mem: float, tell=lambda table: None) -> None:
    fit = estimate(cfg, shapes(cfg.model), engine, gpus, gpu_mem)
    tell(fit.table())
    if fault := fit.fault():
        sys.exit(fault)


def go(cfg: Config, run: Run, team: Team, what: str, train, test, first: str, stack, started: float) -> None:
    """A whole run in `run`, from servers to summary; `stack` closes what is opened here."""  # Alg.1 L1
    track = tracker(cfg.tracker, run.path, cfg)
    checkpoint, state = run.rewind() if cfg.resume else (None, {})
    serve = stack.enter_context(Servers(run.path / "servers.log"))
    if cfg.retriever:
        try:
            Search(cfg.retriever, cfg.topk, retries=0).submit("is anyone there").result()
        except SearchDown as e:
            sys.exit(f"--retriever {e}; start the server, or leave it out and give --corpus")
        search = Search(cfg.retriever, cfg.topk, retries=cfg.search_retries)
    else:
        own = partial(serve, str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus)
        search = Search(own(), cfg.topk, retries=cfg.search_retries, revive=own)
    optimizer = None
    if cfg.mode == "inspo":
        if scripted(cfg):
            url, key = serve("-m", "world.optimizer", "--seed", str(cfg.seed)) + "/v1", ""
        else:
            url, key = os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", "")
        optimizer = Optimizer(url, cfg.optimizer_model, key, retries=cfg.optimizer_retries)
        optimizer.paid = paid_calls(run.rows("reflections"))

    team.worker.search = search
    bar = stack.enter_context(tqdm(total=cfg.T, unit="step", dynamic_ncols=True, smoothing=0.1, disable=None))
    P, B, roll = Population(cfg.tau_s, cfg.window), ReplayBuffer(cfg.buffer), partial(team.rollout, search)
    s = Session(cfg, run, train, test, roll, reward, optimizer, P, B, bar)

    _, counted = token_counter()
    bar.write(
        f"INSPO, mode {cfg.mode}: {what} on {len(train)} questions, {len(test)} held out\n"
        f"search: {cfg.retriever or f'{search.urls[0]} (BM25 over {cfg.corpus}, started by this run)'}\n"
        f"optimizer: {f'{cfg.optimizer_model} at {optimizer.url} (tokens: {counted})' if optimizer else 'none'}\n"
        f"{cfg.T} steps of {cfg.batch} questions x {cfg.G}, seed {cfg.seed}; everything goes to {run.path}"
    )
    for line in warnings(cfg):
        bar.write(f"note: {line}")

    if state:
        s.P.load_state_dict(state["population"])
        s.B.load_state_dict(state["buffer"])
        s.ledger = Ledger(**state["ledger"])
        team.ask("load", checkpoint.absolute())
        em_start = state["start"]
        bar.update(state["t"])
        bar.write(f"resumed after step {state['t']}")
    else:
        start_population(s, first)
        em_start = s.evaluate(first, 0)
        run.log("metrics", {"t": 0} | {f"test/{k}": v for k, v in em_start.items()})
    if unproven := team.worker.engine.unproven:
        bar.write(f"note: {unproven} weights cannot be found again in the engine: its log-probs alone are checked")
    told = f"EM {em_start['em']:.3f}, {em_start['searches']:.2f} searches"
    bar.write(f"held-out questions, first policy, first instruction: {told}")
    spent = state.get("seconds", 0.0)

    def save(t: int) -> None:
        parts = {"population": s.P.state_dict(), "buffer": s.B.state_dict(), "ledger": asdict(s.ledger)}
        parts |= {"start": em_start, "seconds": spent + time.time() - started}
        run.checkpoint(t, partial(team.ask, "save"), parts)

    def after_step(t: int, metrics: dict, clock: list[float]) -> None:
        parts = zip(("rollout", "update", "evolve"), clock, clock[1:], strict=False)
        metrics |= {f"time/{part}": end - begin for part, begin, end in parts}
        metrics |= {"time/total": spent + time.time() - started, "search/faults": sum(team.ask("faults"))}
        if cfg.eval_every and t % cfg.eval_every == 0 and t < cfg.T:
            metrics |= {f"test/{k}": v for k, v in s.evaluate(s.P.best().text, t).items()}
        run.log("metrics", {"t": t} | metrics)
        track({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, t)
        line = (
            f"reward {metrics['reward']:.2f}  searches {metrics['searches']:.2f}  KL {metrics['kl']:.4f}  "
            f"|P| {len(s.P)}  best w {s.P.best().w:.2f}  {clock[-1] - clock[0]:.1f} s/step"
        )
        bar.set_postfix_str(line)
        bar.update()
        if bar.disable and t % max(1, cfg.T // 20) == 0:  # no terminal, no bar: a line now and then
            print(f"step {t:3d}  {line}", flush=True)
        if t % cfg.save_every == 0 or t == cfg.T or "test/em" in metrics:
            save(t)

    algorithm_1(s, team, state.get("t", 0), after_step, save)

    I_star = s.P.best()  # Alg.1 L26
    run.write("I_star.txt", I_star.text + "\n")
    team.ask("export", run.path.absolute() / "policy")
    rows = {"trained policy, first instruction": (end := s.evaluate(first, cfg.T))}
    rows["first policy, first instruction"] = em_start
    if I_star.text != first:
        rows = {"trained policy, I_star": (end := s.evaluate(I_star.text, cfg.T))} | rows
        team.ask("back_to_first_policy")
        rows["first policy, I_star"] = s.evaluate(I_star.text, cfg.T)
    summary = {  # other programs may rely on these keys
        "mode": cfg.mode, "seed": cfg.seed, "steps": cfg.T, "em_start": em_start["em"], "em_best": end["em"],
        "searches_start": em_start["searches"], "searches_end": end["searches"],
        "seconds": round(spent + time.time() - started, 1), "held_out": rows,
        "overhead_inference": round(s.ledger.overhead_inference(), 4), "ledger": asdict(s.ledger),
        "generations": report.lineage(s.P, I_star), "I_star": I_star.text,
    }  # fmt: skip
    run.write("summary.json", json.dumps(summary, indent=1))
    pictures = report.draw(run.path)
    bar.close()
    print(report.ending(summary, rows, pictures, run.path))


if __name__ == "__main__":
    main()
