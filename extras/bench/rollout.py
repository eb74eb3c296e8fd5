"""Rollouts with vLLM while searches take time, against synchronous rounds and raw generation; JSON last.

    python -m extras.bench.rollout        # where vLLM is installed

Generates the same numbers of tokens in three ways, in turns:
  ours    `rollout`: a row's next turn begins when its own search returns
  rounds  like Search-R1: all rows generate, then all queries are searched, then the next round begins
  raw     LLM.generate only: one request per trajectory, whose prompt is the trajectory's prompt and observations, and
          which generates as many tokens as the trajectory sampled; no tool, no waiting
Every search takes `--latency` seconds longer than the real server. The lengths of turns (30 to 400 tokens, lognormal)
and the number of searches per trajectory (0 to 3) are drawn beforehand and the same for all three. The policy is small,
with random weights, and writes no action of its own.
"""

import json
import multiprocessing
import statistics
import tempfile
import threading
from concurrent.futures import Future

from extras.bench.harness import BEST, parser_of, search_server, timed
from plumbing.faults import one_line
from tasks.search import Search

LONGEST = 400  # tokens per turn


class Late(Search):
    """A search client that delays every result by `latency` seconds."""

    def __init__(self, search: Search, latency: float):
        self.search, self.latency = search, latency

    def submit(self, argument: str) -> Future:
        delayed: Future = Future()
        result = self.search.submit(argument)

        def start_timer(_):
            threading.Timer(self.latency, lambda: delayed.set_result(result.result())).start()

        result.add_done_callback(start_timer)
        return delayed if self.latency else result


class Rounds:
    """An engine that returns turns only once all have ended, and waits for all searches."""

    lockstep = True

    def __init__(self, engine):
        self.engine, self.max_rows, self.begin = engine, engine.max_rows, engine.begin

    def generate(self, contexts, max_new, temperature):
        ended = list(self.engine.generate(contexts, max_new, temperature))
        while len(ended) < len(contexts):
            ended += self.engine.generate({}, max_new, temperature)
        yield from ended


def grow(source: str, folder: str, layers: int) -> str:
    """Writes a random policy like a narrow one, but deep: its step costs little more with many rows than with few."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    config.max_position_embeddings = 2048
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def raw(pipe, path: str, sampling_params: dict) -> None:
    """Serves LLM.generate, with our engine's settings, in a process of its own that idles while the other works."""
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
        params = [SamplingParams(**sampling_params | {"max_tokens": n}) for n in counts]
        llm.reset_prefix_cache()
        inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        out, seconds, _ = timed(lambda: llm.generate(inputs, params, use_tqdm=False))  # noqa: B023
        assert [len(o.outputs[0].token_ids) for o in out] == counts
        pipe.send(seconds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trajectories", type=int, default=64, help="played at once")
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 0.1, 0.5], help="seconds")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--layers", type=int, default=24, help="of the policy, which is narrow")
    args = parser.parse_args()

    import numpy as np
    import torch

    import engines.vllm_engine as vllm_engine
    from config import PRESETS, Config
    from engines.vllm_engine import VllmEngine, sampling
    from models.model import load_policy, weights
    from rollout import rollout
    from tasks import Job
    from tasks.search_qa import SearchQA

    class Planned(VllmEngine):
        """Ends each turn at the length in its row's plan, with a search, or with an answer at the end of the plan.

        The engine samples the tokens; only the last ones are replaced by the tag.
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
    task = SearchQA(cfg)
    temporary = tempfile.TemporaryDirectory()
    path = grow(cfg.model, temporary.name, args.layers)
    model, tokenizer = load_policy(path, "cpu")
    never = "no such words are written"  # a stop string, checked after every token like the tags of a run
    # EOS must not end a turn before its planned length.
    vllm_engine.sampling = lambda *given: sampling(*given) | {"stop_token_ids": []}
    engine = Planned(path, tokenizer, (never,), max_len=2048, dtype="float32", memory=0.1, seed=0)
    engine.load(weights(model))
    words = "<search> Who is the director of the film Gibax? </search>", "<answer> Gibax </answer>"
    engine.tags = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in words]
    rng = np.random.default_rng(0)
    searches = rng.integers(0, 4, args.trajectories)  # 1.5 on average
    engine.plans = [np.clip(rng.lognormal(4.2, 0.9, n + 1), 30, LONGEST).astype(int).tolist() for n in searches]
    jobs = [Job(None, BEST, q, k) for k, q in enumerate(task.questions("train")[: args.trajectories])]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=raw, args=(theirs, path, vllm_engine.sampling(engine, 1, 1.0)), daemon=True).start()
    theirs.close()  # so that recv() fails, instead of waiting forever, if the child dies
    ours.recv()

    def play(engine_or_rounds, latency, seed):
        """Returns the trajectories and the tokens sampled per second."""
        engine.engine.reset_prefix_cache()
        task.tools = [Late(task.search, latency)]
        taus, seconds, _ = timed(
            lambda: rollout(engine_or_rounds, tokenizer, task, jobs, cfg, temperature=1.0, seed=seed)
        )
        return taus, sum(sum(tau.mask) for tau in taus) / seconds

    def generate(taus) -> float:
        """Returns the tokens per second of LLM.generate for the same numbers of tokens."""
        counts = [sum(tau.mask) for tau in taus]
        ours.send(([[i for i, m in zip(tau.ids, tau.mask, strict=True) if not m] for tau in taus], counts))
        return sum(counts) / ours.recv()

    rows = []
    with search_server(cfg.corpus) as url:
        task.connect(url)
        taus, _ = play(engine, 0.0, 0)  # warms up
        for latency in args.latency:
            speeds: dict[str, list[float]] = {"ours": [], "rounds": [], "raw": []}
            for k in range(args.repeat):
                taus, speed = play(engine, latency, 1 + k)
                speeds["ours"].append(speed)
                speeds["raw"].append(generate(taus))
                speeds["rounds"].append(play(Rounds(engine), latency, 1 + k)[1])
            row = {"latency_ms": round(1000 * latency)} | {k: round(statistics.median(v)) for k, v in speeds.items()}
            rows.append(row | {"of raw": row["ours"] / row["raw"], "x rounds": row["ours"] / row["rounds"]})
            print("  ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    engine.close()
    tokens = sum(sum(tau.mask) for tau in taus) / len(taus)
    result = {"threads": torch.get_num_threads(), "trajectories": args.trajectories, "tokens_sampled": tokens}
    print(json.dumps(result | {"rows": rows}))


if __name__ == "__main__":
    with one_line():
        main()
