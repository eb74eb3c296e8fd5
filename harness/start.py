"""Setting up a run on rank 0: its questions, directory, servers, policy, optimizer and log."""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from config import HERE, PRESETS, Config, first_instruction, read_instruction, scripted, warnings
from data import Question, load_questions, normalize, rng
from faults import EngineFault, Fault, Outage, ToolDown
from harness.directory import RunDirectory
from harness.log import Log
from harness.screen import Screen
from harness.servers import Servers
from reflect import Optimizer, paid_calls, token_counter
from tools import Search
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
        if fault := estimate(cfg, shapes(cfg.model), engine, ranks.size, memory).fault():
            raise Fault(fault)
    longest = getattr(load_config(cfg.model), "max_position_embeddings", None)
    if longest and cfg.max_prompt + cfg.max_response > longest:
        raise Fault(f"--max_prompt {cfg.max_prompt} + --max_response {cfg.max_response}: the model ends at {longest}")
    load_tokenizer(cfg.model)  # its faults are found before a server is started
    run = RunDirectory(cfg, name)
    try:
        with contextlib.ExitStack() as stack:
            serve = stack.enter_context(Servers(run.path / "servers.log"))
            search = connect_search(cfg, serve)
            answers = try_search(search, train[:64], cfg)
            optimizer = connect_optimizer(cfg, serve, run)
            policy = Policy(cfg, ranks, engine, search)
            stack.callback(policy.close)
            screen = stack.enter_context(Screen(cfg.T))
            log = Log(cfg, run, policy, test, valid, screen, began=psutil.Process().create_time())
            n = policy.worker.parameters()
            layers = f"fused layers: {policy.worker.layers}\n" if policy.worker.layers else ""
            lora = f", {policy.worker.parameters(trained=True) / 1e6:,.2f}M of LoRA trained" if cfg.lora_rank else ""
            device = ranks.device if ranks.size == 1 else f"{ranks.size} x {ranks.device}"
            log.note(
                f"INSPO, mode {cfg.mode}: {name} ({n / 1e6:,.2f}M parameters{lora}, {device}, {engine} engine: {why}) "
                f"on {len(train)} questions, {len(test)} held out\n"
                f"{layers}"
                f"search: {cfg.retriever or f'{search.urls[0]} (BM25 over {cfg.corpus}, started by this run)'}\n"
                f"        {answers}\n"
                f"optimizer: {describe(optimizer)}\n"
                f"{cfg.T} steps of {cfg.batch} questions x {cfg.G}, seed {cfg.seed}; everything goes to {run.path}"
            )
            for line in warnings(cfg):
                log.note(f"note: {line}")
            try:
                yield Parts(policy, optimizer, {q.id: q for q in train}, log)
            except (Outage, KeyboardInterrupt):
                log.rescue()
                raise
    except ToolDown as e:
        raise Fault(
            f"\nthe search server does not answer ({e}); nothing was scored without it\n{run.how_to_resume()}"
        ) from None
    except EngineFault as e:
        raise Fault(f"\n{e}; nothing was trained on it\n{run.how_to_resume()}") from None
    except KeyboardInterrupt:
        raise Fault(f"\nstopped\n{run.how_to_resume()}") from None
    except Fault:
        run.discard_if_empty()
        raise


def connect_search(cfg: Config, serve: Servers) -> Search:
    """Returns the client of --retriever, or of a server over --corpus that this run starts and restarts."""
    if not cfg.retriever:
        own = partial(serve, str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus)
        return Search(own(), cfg.topk, retries=cfg.search_retries, revive=own)
    try:
        Search(cfg.retriever, cfg.topk, retries=0).submit("is anyone there").result()
    except ToolDown as e:
        raise Fault(f"--retriever {e}; start the server, or leave it out and give --corpus") from None
    return Search(cfg.retriever, cfg.topk, retries=cfg.search_retries)


def try_search(search: Search, questions: list[Question], cfg: Config) -> str:
    """Returns how fast and how well the server answers some questions, in words; Fault if it finds nothing at all."""
    began = time.time()
    try:
        found = [future.result() for future in [search.submit(q.text) for q in questions]]
    except ToolDown as e:
        raise Fault(f"the search server does not answer ({e})") from None
    seconds, n = time.time() - began, len(questions)
    if not any(found):
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
    )


def connect_optimizer(cfg: Config, serve: Servers, run: RunDirectory) -> Optimizer | None:
    """Returns the client of OPENAI_BASE_URL, or of the world's scripted optimizer; None in mode static."""
    if cfg.mode != "inspo":
        return None
    if scripted(cfg):
        guess = ["--guess"] if cfg.optimizer_model == "guessing" else []
        url, key = serve("-m", "world.optimizer", "--seed", str(cfg.seed), *guess) + "/v1", ""
    else:
        url, key = os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", "")
    paid = paid_calls(run.rows("reflections"))
    return Optimizer(url, cfg.optimizer_model, key, retries=cfg.optimizer_retries, paid=paid)


def describe(optimizer: Optimizer | None) -> str:
    return f"{optimizer.model} at {optimizer.url} (tokens: {token_counter()[1]})" if optimizer else "none"
