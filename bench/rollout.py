"""Rollouts with vLLM while searches take their time (`make bench-rollout`); JSON last.

The same trajectories' worth of tokens three ways, one after another, again and again:
  ours    `rollout`: a row's next turn begins when its own search is back
  rounds  as Search-R1 runs them: all rows generate, then all queries are searched, then the next round
  raw     LLM.generate alone: for each trajectory one request with its prompt and observations as prompt, which
          generates as many tokens as the trajectory sampled; no tool, no text, nothing to wait for
Every search takes `--latency` seconds more than the real server does.
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
sys.path.insert(0, str(HERE))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.step import BEST  # noqa: E402


class Late:
    """A search client whose answers come `latency` seconds later."""

    def __init__(self, search, latency: float):
        self.search, self.latency = search, latency

    def submit(self, query: str) -> Future:
        late: Future = Future()
        there = self.search.submit(query)

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


def raw(pipe, path: str, max_len: int) -> None:
    """A process of its own, which does nothing while the other works: LLM.generate with the settings of our engine."""
    import torch

    threads = torch.get_num_threads()
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_engine import settings

    llm = LLM(**settings(path, max_len=max_len, dtype="float32", memory=0.1, seed=0) | {"load_format": "auto"})
    torch.set_num_threads(threads)
    pipe.send("ready")
    while True:
        prompts, counts = pipe.recv()
        how = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, seed=k) for k, n in enumerate(counts)]
        llm.reset_prefix_cache()
        start = time.perf_counter()
        out = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], how, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in out] == counts
        pipe.send(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256, help="at once")
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 0.1, 0.5], help="seconds")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    args = parser.parse_args()

    import torch

    from config import PRESETS, Config
    from data import load_questions
    from policy import load_policy, weights
    from rollout import STOP, Search, rollout
    from servers import Child
    from vllm_engine import VllmEngine

    cfg = Config(**PRESETS["world"])
    model, tokenizer = load_policy(cfg.model, "cpu")
    limits = dict(max_turns=cfg.max_turns, max_response=cfg.max_response, max_observation=cfg.max_observation)
    limits |= dict(max_prompt=cfg.max_prompt, temperature=1.0)
    max_len = cfg.max_prompt + cfg.max_response + cfg.max_turns * cfg.max_observation
    engine = VllmEngine(cfg.model, tokenizer, STOP, max_len=max_len, dtype="float32", memory=0.1, seed=0)
    engine.load(weights(model))
    jobs = [(0, BEST, q, k) for k, q in enumerate(load_questions(cfg.train)[: args.trajectories])]

    def play(how, search, seed):
        """(trajectories, seconds)."""
        engine.engine.reset_prefix_cache()
        start = time.perf_counter()
        taus = rollout(how, tokenizer, search, jobs, **limits, seed=seed)
        return taus, time.perf_counter() - start

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=raw, args=(theirs, cfg.model, max_len), daemon=True)
    child.start()
    ours.recv()

    def generate(taus) -> float:
        """Seconds of LLM.generate for as many tokens."""
        prompts = [[i for i, m in zip(tau.ids, tau.mask, strict=True) if not m] for tau in taus]
        ours.send((prompts, [sum(tau.mask) for tau in taus]))
        return ours.recv()

    found: dict = {"threads": torch.get_num_threads(), "trajectories": args.trajectories, "rows": []}
    serve = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
    with tempfile.TemporaryDirectory() as tmp, Child(serve, f"{tmp}/log") as server:
        search = Search(server.url, cfg.topk)
        taus, _ = play(engine, search, 0)  # warm
        for latency in args.latency:
            speeds: dict[str, list[float]] = {"ours": [], "rounds": [], "raw": []}
            for k in range(args.repeat):
                taus, seconds = play(engine, Late(search, latency), 1 + k)
                speeds["ours"].append(sum(sum(t.mask) for t in taus) / seconds)
                speeds["raw"].append(sum(sum(t.mask) for t in taus) / generate(taus))
                also, seconds = play(Rounds(engine), Late(search, latency), 1 + k)
                speeds["rounds"].append(sum(sum(t.mask) for t in also) / seconds)
            row = {"latency_ms": round(1000 * latency)} | {k: round(statistics.median(v)) for k, v in speeds.items()}
            row |= {"of raw": round(row["ours"] / row["raw"], 2), "x rounds": round(row["ours"] / row["rounds"], 2)}
            found["rows"].append(row)
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    found["searches"] = round(sum(t.served for t in taus) / len(taus), 2)
    found["tokens_sampled"] = round(sum(sum(t.mask) for t in taus) / len(taus), 1)
    found["tokens"] = round(sum(len(t.ids) for t in taus) / len(taus), 1)
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
