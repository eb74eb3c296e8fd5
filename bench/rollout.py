"""Rollouts with vLLM while searches take their time (`make bench-rollout`); JSON last.

The same trajectories' worth of tokens three ways, one after another, again and again:
  ours    `rollout`: a row's next turn begins when its own search is back
  rounds  as Search-R1 runs them: all rows generate, then all queries are searched, then the next round
  raw     LLM.generate alone: for each trajectory one request with its prompt and observations as prompt, which
          generates as many tokens as the trajectory sampled; no tool, nothing to wait for
Every search takes `--latency` seconds more than the real server does. How long turns are (30 to 400 tokens, lognormal)
and how many searches a trajectory makes (0 to 3) is drawn beforehand, the same for all three; the policy is
a small one with random weights, which writes nothing of its own.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.step import BEST  # noqa: E402
from tools import Search  # noqa: E402

LONGEST = 400  # tokens of a turn


class Late(Search):
    """A search client whose answers come `latency` seconds later."""

    def __init__(self, search: Search, latency: float):
        self.search, self.latency = search, latency

    def submit(self, argument: str) -> Future:
        late: Future = Future()
        there = self.search.submit(argument)

        def hand_over(_):
            threading.Timer(self.latency, lambda: late.set_result(there.result())).start()

        there.add_done_callback(hand_over)
        return late if self.latency else there


class Rounds:
    """An engine that hands its turns over when all have ended, and waits for all searches."""

    lockstep = True

    def __init__(self, engine):
        self.engine, self.max_rows, self.begin = engine, engine.max_rows, engine.begin

    def generate(self, contexts, max_new, temperature):
        ended = list(self.engine.generate(contexts, max_new, temperature))
        while len(ended) < len(contexts):
            ended += self.engine.generate({}, max_new, temperature)
        yield from ended


def grow(path: str, layers: int) -> None:
    """More layers for the narrow model in `path`, so that a step costs little more with many rows than with few."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def raw(pipe, path: str, how: dict) -> None:
    """A process of its own, which does nothing while the other works: LLM.generate with the settings of our engine."""
    import torch

    threads = torch.get_num_threads()
    from engines.vllm_engine import settings

    arguments = settings(path, max_len=2048, dtype="float32", memory=0.1, seed=0) | {"load_format": "auto"}
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**arguments)
    torch.set_num_threads(threads)
    pipe.send("ready")
    while True:
        prompts, counts = pipe.recv()
        params = [SamplingParams(**how | {"max_tokens": n}) for n in counts]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        out = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in out] == counts
        pipe.send(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64, help="at once")
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 0.1, 0.5], help="seconds")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--layers", type=int, default=24, help="of the policy, 64 wide")
    args = parser.parse_args()

    import numpy as np
    import torch
    from tiny_model import make_tiny_model

    import engines.vllm_engine as vllm_engine
    from config import PRESETS, Config
    from data import load_questions
    from engines.vllm_engine import VllmEngine, sampling
    from harness.servers import Child
    from rollout import Job, rollout
    from training.model import load_policy, weights

    class Planned(VllmEngine):
        """Its turns are as long as their row's plan says, and end in a search, or an answer at the end of the plan.

        The tokens are sampled by the engine; only the last ones, the tag, are put in their place.
        """

        def begin(self, seed: int) -> None:
            super().begin(seed)
            self.turn = [0] * args.trajectories

        def add(self, key, ids, max_new, temperature):
            super().add(key, ids, self.plans[key][self.turn[key]], temperature)

        def generate(self, contexts, max_new, temperature):
            for key, ids, logps in super().generate(contexts, max_new, temperature):
                self.turn[key] += 1
                tag = self.tags[self.turn[key] == len(self.plans[key])]
                yield key, (ids[: -len(tag)] + tag)[-len(ids) :], logps

    cfg = Config(**PRESETS["world"] | {"max_response": LONGEST, "max_prompt": 2048 - LONGEST})
    temporary = tempfile.TemporaryDirectory()
    path = make_tiny_model(temporary.name)
    grow(path, args.layers)
    model, tokenizer = load_policy(path, "cpu")
    never = "no such words are written"  # looked for after every token, as the tags are
    # A turn is as long as its plan: EOS ends none.
    vllm_engine.sampling = lambda *of: sampling(*of) | {"stop_token_ids": []}
    engine = Planned(path, tokenizer, (never,), max_len=2048, dtype="float32", memory=0.1, seed=0)
    engine.load(weights(model))
    words = "<search> Who is the director of the film Gibax? </search>", "<answer> Gibax </answer>"
    engine.tags = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in words]
    dice = np.random.default_rng(0)
    searches = dice.integers(0, 4, args.trajectories)  # 1.5 on average
    engine.plans = [np.clip(dice.lognormal(4.2, 0.9, n + 1), 30, LONGEST).astype(int).tolist() for n in searches]
    jobs = [Job(0, BEST, q, k) for k, q in enumerate(load_questions(cfg.train)[: args.trajectories])]

    def play(how, search, seed):
        """(trajectories, tokens sampled a second)."""
        engine.engine.reset_prefix_cache()
        start = time.perf_counter()
        taus = rollout(how, tokenizer, [search], jobs, cfg, temperature=1.0, seed=seed)
        return taus, sum(sum(tau.mask) for tau in taus) / (time.perf_counter() - start)

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=raw, args=(theirs, path, vllm_engine.sampling(engine, 1, 1.0)), daemon=True
    )
    child.start()
    theirs.close()  # if it dies, that ends us too
    ours.recv()

    def generate(taus) -> float:
        """LLM.generate's tokens a second, for as many tokens."""
        prompts = [[i for i, m in zip(tau.ids, tau.mask, strict=True) if not m] for tau in taus]
        counts = [sum(tau.mask) for tau in taus]
        ours.send((prompts, counts))
        return sum(counts) / ours.recv()

    found: dict = {"threads": torch.get_num_threads(), "trajectories": args.trajectories, "rows": []}
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with tempfile.TemporaryDirectory() as tmp, Child(serve, f"{tmp}/log") as server:
        search = Search(server.url, cfg.topk)
        taus, _ = play(engine, search, 0)  # warm
        for latency in args.latency:
            speeds: dict[str, list[float]] = {"ours": [], "rounds": [], "raw": []}
            for k in range(args.repeat):
                taus, speed = play(engine, Late(search, latency), 1 + k)
                speeds["ours"].append(speed)
                speeds["raw"].append(generate(taus))
                speeds["rounds"].append(play(Rounds(engine), Late(search, latency), 1 + k)[1])
            row = {"latency_ms": round(1000 * latency)} | {k: round(statistics.median(v)) for k, v in speeds.items()}
            row |= {"of raw": round(row["ours"] / row["raw"], 2), "x rounds": round(row["ours"] / row["rounds"], 2)}
            found["rows"].append(row)
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    found["searches"] = round(sum(t.served("search") for t in taus) / len(taus), 2)
    found["tokens_sampled"] = round(sum(sum(t.mask) for t in taus) / len(taus), 1)
    found["tokens"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
