"""Setting up a run on rank 0: its questions, directory, servers, policy, optimizer and log."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import stop
from config import HERE, PRESETS, Config, evolves, first_instruction, read_instruction, scripted, warnings
from data import Question, load_questions, normalize, rng
from faults import DiskFault, EngineFault, Fault, Outage, ToolDown
from harness.directory import RunDirectory
from harness.log import Log
from harness.screen import Screen
from harness.servers import Servers
from harness.status import status
from outside import without_password
from reflect import Optimizer, paid_calls, token_counter
from rollout import prompt_ids
from tools import Search
from training import layers
from training.fit import estimate, shapes
from training.model import load_config, load_tokenizer
from training.policy import Policy
from training.ranks import Ranks
from training.speed import CARDS
from training.speed import table as speed_table
from training.worker import choose_engine


class Parts(NamedTuple):
    """What Algorithm 1 is given."""

    policy: Policy
    optimizer: Optimizer | None
    D: dict[str, Question]
    log: Log


def device_of(cfg: Config) -> str:
    """Returns "cuda" or "cpu"."""
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Fault("--device cuda: torch finds no CUDA device here; leave it out, or choose cpu")
    return device


def print_memory(cfg: Config) -> None:
    """Prints the memory that --gpus of --card would need, and a step's seconds; Fault if it does not fit."""
    config, gpu_mem = shapes(cfg.model), cfg.gpu_mem or CARDS[cfg.card].memory
    fit = estimate(cfg, config, "torch" if cfg.engine == "torch" else "vllm", cfg.gpus, gpu_mem)
    print(fit.table(), flush=True)
    if fault := fit.fault():
        raise Fault(fault)
    print(f"\n{speed_table(cfg, config, fit.kv_tokens)}", flush=True)


def load_data(cfg: Config) -> tuple[list[Question], list[Question], list[Question]]:
    """Returns the questions to train on, to choose the best checkpoint by, and to report on."""
    train, test = load_questions(cfg.train), load_questions(cfg.test)
    if cfg.valid:
        return train, load_questions(cfg.valid), test
    chosen = rng(cfg.seed, 0, "valid").permutation(len(train))[: min(cfg.valid_n, len(train) // 10)]  # CHOICE-25
    aside = set(chosen.tolist())
    return [q for k, q in enumerate(train) if k not in aside], [train[k] for k in sorted(aside)], test


@contextlib.contextmanager
def prepare(cfg: Config, ranks: Ranks) -> Iterator[Parts]:
    """Yields the parts of a run and closes them after it; an outage becomes a Fault that says how to resume."""
    status("reading the questions")
    name = next((k for k, v in PRESETS.items() if v["model"] == cfg.model), Path(cfg.model).name)
    train, valid, test = load_data(cfg)
    first_instruction(cfg)
    if cfg.canary:
        read_instruction("canary", cfg.canary)
    if ranks.nodes > 1 and (not cfg.retriever or "//127." in cfg.retriever or "//localhost" in cfg.retriever):
        raise Fault(f"{ranks.nodes} nodes: give --retriever with an address that all of them can reach")
    engine, why = choose_engine(cfg, ranks.device)
    if ranks.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        used = cfg if layers.installed() else dataclasses.replace(cfg, fused_layers=0)  # torch's layers keep more
        if fault := estimate(used, shapes(cfg.model), engine, ranks.size, memory).fault():
            raise Fault(fault)
    longest = getattr(load_config(cfg.model), "max_position_embeddings", None)
    if longest and cfg.max_prompt + cfg.max_response > longest:
        raise Fault(f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response}: the model ends at {longest}")
    check_prompt(load_tokenizer(cfg.model), train[:64], cfg)  # before a server is started
    run = RunDirectory.open(cfg, name)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(run.close)
            stack.callback(status, "")
            serve = stack.enter_context(Servers(run.path / "servers.log"))
            status("starting the search server" if not cfg.retriever else "calling the search server")
            search = connect_search(cfg, serve)
            answers = try_search(search, train[:64], cfg) if cfg.tools != "none" else ""
            optimizer = connect_optimizer(cfg, serve, run)
            status("loading the policy")
            policy = Policy(cfg, ranks, engine, search)
            stack.callback(policy.close)
            status("")
            screen = stack.enter_context(Screen(cfg.T))
            log = Log(cfg, run, policy, test, valid, screen, began=psutil.Process().create_time())
            n = policy.worker.parameters()
            fused = f"fused layers: {policy.worker.layers}\n" if policy.worker.layers else ""
            lora = f", {policy.worker.parameters(trained=True) / 1e6:,.2f}M of LoRA trained" if cfg.lora_rank else ""
            device = ranks.device if ranks.size == 1 else f"{ranks.size} x {ranks.device}"
            log.note(
                f"INSPO, mode {cfg.mode}: {name} ({n / 1e6:,.2f}M parameters{lora}, {device}, {engine} engine: {why}) "
                f"on {len(train)} questions, {len(test)} held out\n"
                f"{fused}"
                f"search: {describe_search(cfg, search, answers)}\n"
                f"optimizer: {describe(optimizer)}\n"
                f"{cfg.T} steps of {cfg.batch} questions x {cfg.G}, seed {cfg.seed}; everything goes to {run.path}"
            )
            for line in warnings(cfg):
                log.note(f"note: {line}")
            with stop.hold():
                try:
                    yield Parts(policy, optimizer, {q.id: q for q in train}, log)
                except DiskFault:  # a checkpoint would not fit either
                    raise
                except (Outage, stop.Stopped):
                    log.rescue()
                    raise
                stop.over()
    except ToolDown as e:
        raise Fault(
            f"\nthe search server does not answer ({e}); nothing was scored without it\n{run.how_to_resume()}"
        ) from None
    except EngineFault as e:
        raise Fault(f"\n{e}; nothing was trained on it\n{run.how_to_resume()}") from None
    except DiskFault as e:
        raise Fault(f"\n{e}; nothing that was saved is lost\nmake room and {run.how_to_resume()}") from None
    except stop.Stopped as e:
        run.discard_if_empty()
        if not run.path.exists():
            raise
        raise Fault(f"\n{e}\n{run.how_to_resume()}") from None
    except Fault:
        run.discard_if_empty()
        raise


def check_prompt(tokenizer: Any, questions: list[Question], cfg: Config) -> None:
    """Raises Fault if the first instruction leaves no room for any of some questions: nothing would be sampled."""
    shortest = min(len(prompt_ids(tokenizer, first_instruction(cfg), q.text)) for q in questions)
    if shortest > cfg.max_prompt:
        raise Fault(
            f"--max_prompt {cfg.max_prompt}: the first instruction and a question are {shortest} tokens at least, so no"
            " turn could start; raise it"
        )


def connect_search(cfg: Config, serve: Servers) -> Search:
    """Returns the client of --retriever, or of a server over --corpus that this run starts and restarts;
    with --tools none one that nobody asks."""
    if cfg.tools == "none":
        return Search("", cfg.topk)
    if not cfg.retriever:
        own = partial(serve, str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus)
        return Search(own(), cfg.topk, retries=cfg.search_retries, revive=own)
    try:
        Search(cfg.retriever, cfg.topk, retries=0).submit("is anyone there").result()
    except ToolDown as e:
        raise Fault(f"--retriever {e}; start the server, or serve --corpus with --retriever ''") from None
    return Search(cfg.retriever, cfg.topk, retries=cfg.search_retries)


def describe_search(cfg: Config, search: Search, answers: str) -> str:
    """Returns where the run searches, and how that server answered."""
    if cfg.tools == "none":
        return "none (--tools none)"
    own = f"{search.urls[0]} (BM25 over {cfg.corpus}, started by this run)"
    return f"{without_password(cfg.retriever) or own}\n        {answers}"


def try_search(search: Search, questions: list[Question], cfg: Config) -> str:
    """Returns how fast and how well the server answers some questions, in words; Fault if it finds nothing at all."""
    began = time.time()
    try:
        found = [future.result() for future in [search.submit(q.text) for q in questions]]
    except ToolDown as e:
        raise Fault(f"the search server does not answer ({e}); check --retriever, and --topk {cfg.topk}") from None
    seconds, n = time.time() - began, len(questions)
    if not any(text.strip() for passages in found for text in passages):
        raise Fault(
            f"{search.urls[0]} found no passage for any of {n} questions: check its index, and that it answers as"
            " Search-R1's server does"
        )
    texts = [f" {normalize(' '.join(passages))} " for passages in found]
    hits = sum(
        any(f" {normalize(gold)} " in text for gold in q.golds) for q, text in zip(questions, texts, strict=True)
    )
    rows = cfg.batch * cfg.G
    return (
        f"{n} questions took {seconds:.2f} s, so a step's {rows:,} trajectories wait"
        f" {seconds / n * rows:,.1f} s if each searches once, {seconds / n * rows * cfg.max_turns:,.1f} s at most;"
        f" a gold answer was in the passages of {hits}"
        + (": nearly none; check that index, corpus and questions belong together" if hits < n / 20 else "")
    )


def connect_optimizer(cfg: Config, serve: Servers, run: RunDirectory) -> Optimizer | None:
    """Returns the client of OPENAI_BASE_URL, or of the world's scripted optimizer; None in mode static."""
    if not evolves(cfg):
        return None
    paid = paid_calls(run.rows("reflections"))
    if scripted(cfg):
        guess = ["--guess"] if cfg.optimizer_model == "guessing" else []

        def own() -> str:
            return serve("-m", "world.optimizer", "--seed", str(cfg.seed), *guess) + "/v1"

        return Optimizer(own(), cfg.optimizer_model, retries=cfg.optimizer_retries, paid=paid, revive=own)
    url, key = os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", "").strip()
    return Optimizer(url, cfg.optimizer_model, key, retries=cfg.optimizer_retries, paid=paid)


def describe(optimizer: Optimizer | None) -> str:
    return (
        f"{optimizer.model} at {without_password(optimizer.url)} (tokens: {token_counter()[1]})"
        if optimizer
        else "none"
    )
