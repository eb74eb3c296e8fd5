"""vLLM in this process, with a random policy of Qwen2.5-3B's shape: its memory against the
estimate; JSON last.

    python -m extras.bench.colocated

vLLM starts, gets the weights, plays rows, sleeps, wakes with other weights, plays again. Each load
is proven layer by layer. What vLLM takes of the GPU is compared with extras/fit.py's estimate;
asleep, CUDA graphs only. Weights are bfloat16, drawn on the device. Without a GPU the model is a
toy, and no memory is read.
"""

import json
import tempfile
from typing import Any

import torch
from transformers import Qwen2Config

from config import PRESETS, Config
from engines.vllm_engine import VllmEngine
from extras.bench.harness import parser_of, play_turns, timed
from extras.bench.update import TOY, randomize
from extras.fit import KNOWN, estimate
from models.model import empty, load_tokenizer, weights
from plumbing.faults import Fault, one_line

SMALL = TOY | {"num_attention_heads": 2}  # 32 wide, the least that vLLM takes on a CPU
ROWS, CONTEXT, NEW = 64, 512, 64  # tokens of the rows that show the memory
SPARE = 4e9  # bytes that neither weights nor vLLM get: a forward pass's room


def used(cuda: bool) -> float:
    """The GB of the GPU that are taken, by whomever; 0 without one."""
    if not cuda:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def find_missed(x: dict) -> list[str]:
    """Names the goals that the figures miss."""
    awake = max(x["awake_gb"], x["awake_again_gb"])
    missed = ["more than 10 % above the estimate awake"] * (awake > 1.1 * x["estimate_awake_gb"])
    return missed + ["more than 1 GB above the estimate asleep"] * (
        x["asleep_gb"] > 1 + x["estimate_asleep_gb"]
    )


def measure_memory(config: Qwen2Config, model: Any, cuda: bool) -> dict[str, Any]:
    """Returns what vLLM takes of the GPU, awake and asleep, and what was estimated."""
    tokenizer = load_tokenizer(PRESETS["world"]["model"])
    total = torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else 24.0
    before = used(cuda)  # the weights, with the CUDA context
    memory = (total - before - SPARE / 1e9) / total if cuda else 0.05
    cfg = Config(vllm="colocate", vllm_memory=memory, lora_rank=0)
    parts = [
        part
        for part in estimate(cfg, config, "vllm", 1, total).parts
        if part.name.startswith("vLLM")
    ]
    max_len = cfg.max_prompt + cfg.max_response if cuda else 1024
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = VllmEngine(folder, tokenizer, (), max_len=max_len, dtype="bfloat16", memory=memory)
    prompts = dict(enumerate(torch.randint(min(1000, config.vocab_size), (ROWS, CONTEXT)).tolist()))
    engine.load(weights(model))
    play_turns(engine, prompts, NEW, 1.0)
    x = {"parameters": sum(p.numel() for p in model.parameters()), "vllm_memory": memory}
    x["awake_gb"] = used(cuda) - before
    _, x["sleep_s"] = timed(engine.sleep)
    x["asleep_gb"] = used(cuda) - before
    randomize(model, 1)
    _, x["wake_s"] = timed(lambda: engine.load(weights(model)))
    play_turns(engine, prompts, NEW, 1.0)
    x["awake_again_gb"] = used(cuda) - before
    x["estimate_awake_gb"] = sum(part.rollout for part in parts) / 1e9
    x["estimate_asleep_gb"] = sum(part.update for part in parts) / 1e9
    engine.close()
    return x | {"missed": find_missed(x)}


<<<<<<< HEAD
# ---- where the time of rollouts goes


def make_tokenizer(size: int) -> Qwen2Tokenizer:
    """Returns a byte-level BPE of `size` tokens, of one to three characters as random text has
    them."""
    world = load_tokenizer(PRESETS["world"]["model"])
    special = list(dict.fromkeys(["<|endoftext|>", world.eos_token, "<|im_start|>", "<|im_end|>"]))
    printable = [chr(k) for k in range(33, 127)]
    random.Random(0).shuffle(printable)
    texts, merges = sorted(ByteLevel.alphabet()), []
    for before in [*printable, *(a + b for a in printable for b in printable)]:
        for character in printable:
            if len(texts) < size - len(special):
                texts.append(before + character)
                merges.append((before, character))
    vocabulary = {text: k for k, text in enumerate(texts)}
    template = world.chat_template
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, extra_special_tokens=special, chat_template=template
    )


class Speed(Task):
    """A task whose work is fixed: no turn calls or answers, and each is followed by `read` random
    tokens."""

    tools = [Calculator()]  # for its tags: random text never calls it
    words, prompt_tokens, read = 1000, 300, 500

    def questions(self, split: str) -> list[Question]:
        return []

    def reward(self, taus: Sequence[Trajectory]) -> list[float]:
        return [0.0] * len(taus)

    def make_format(self, tokenizer: Any = None) -> Tags:
        return Paced(self, tokenizer)


class Paced(Tags):
    """Random tokens as the prompt, and as what follows a turn that calls nothing."""

    task: Speed

    def encode_prompt(self, instruction: str, question: Question) -> list[int]:
        return draw_ids(question.id, self.task.words, self.task.prompt_tokens)

    def encode_reminder(self, action: Action) -> list[int]:
        return draw_ids(action.text[:50], self.task.words, self.task.read)


def draw_ids(seed: Any, words: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(words - 3), k=n)


class Clock:
    """Times vLLM's parts: seconds by name, without those of the parts within them; and each forward
    pass.

    `client`: of vLLM's core, in this process; `frontend`: vLLM's OutputProcessor.
    """

    def __init__(self, client: Any, frontend: Any):
        # without a device a thread's own time, as other processes take turns with it
        self.now = time.perf_counter if torch.cuda.is_available() else time.thread_time
        core = client.engine_core
        self.inner = [0.0]  # seconds of timed calls within the running ones, outermost first
        self.reset()
        self.wrap(client, "add_request", "add")
        self.wrap(frontend, "process_outputs", "text")
        self.wrap(core, "step_fn", "wait")
        self.wrap(core.scheduler, "schedule", "schedule")
        self.wrap(core.model_executor, "execute_model", "forward")
        self.wrap(core.model_executor, "sample_tokens", "sample")
        collect = core.scheduler.update_from_output

        def note(output: Any, *args: Any) -> Any:
            collected, now = collect(output, *args), self.now()
            rows, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
            if tokens:
                kind = "prefill" if tokens > rows else "decode"
                self.passes[kind] += now - self.last
                self.passes[f"{kind}_passes"] += 1
                self.passes[f"{kind}_tokens"] += tokens
                self.last = now
            return collected

        core.scheduler.update_from_output = note
        self.wrap(core.scheduler, "update_from_output", "collect")

    def reset(self) -> None:
        self.parts, self.passes = Counter(), Counter()
        self.began = self.last = self.now()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self.inner.append(0.0)
            began = self.now()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = self.now() - began
                self.parts[part] += seconds - self.inner.pop()
                self.inner[-1] += seconds

        setattr(owner, name, timed_call)

    def read(self, sampled: int) -> dict[str, Any]:
        """Returns the figures since `reset`."""
        seconds = self.now() - self.began
        parts = dict(self.parts) | {"ours": seconds - sum(self.parts.values())}
        row = {"seconds": seconds, "us": 1e6 * seconds / sampled, "sampled": sampled}
        return row | dict(self.passes) | parts


def play_plainly(
    engine: VllmEngine,
    frontend: Any,
    task: Speed,
    prompts: list[list[int]],
    turns: int,
    params: dict[str, Any],
    seeds: bool,
) -> int:
    """Plays trajectories with vLLM's core and frontend alone, as its LLMEngine does; returns how
    many tokens were sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    params = params | {"output_kind": RequestOutputKind.FINAL_ONLY}
    core, ids, played, sampled = engine.core, [list(ids) for ids in prompts], Counter(), 0
    engine.reset(0)

    def add(k: int) -> None:
        own = {"seed": hash((k, len(ids[k]))) % 2**63} if seeds else {}
        request = EngineCoreRequest(
            request_id=f"{k} {played[k]}",
            external_req_id=str(k),
            prompt_token_ids=ids[k],
            sampling_params=SamplingParams(**params, **own),
            arrival_time=0,
            mm_features=None,
            pooling_params=None,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        frontend.add_request(request, None)
        core.add_request(request)

    for k in range(len(ids)):
        add(k)
    while frontend.has_unfinished_requests():
        done = frontend.process_outputs(core.get_output().outputs)
        core.abort_requests(done.reqs_to_abort)
        for request in done.request_outputs:
            k, turn = int(request.request_id), list(request.outputs[0].token_ids)
            played[k], sampled = played[k] + 1, sampled + len(turn)
            ids[k] += turn + draw_ids(k, task.words, task.read)
            if played[k] < turns:
                add(k)
    return sampled


def play_ours(engine: VllmEngine, tokenizer: Any, task: Speed, groups: int, cfg: Config) -> int:
    """Plays the task's trajectories in our loop; returns how many tokens were sampled."""
    questions = [Question(id=str(k // 5), text="") for k in range(5 * groups)]
    jobs = [Job(None, "", question, k // 5) for k, question in enumerate(questions)]
    taus = rollout(engine, tokenizer, task, jobs, cfg, temperature=1.0, seed=0)
    return sum(sum(tau.mask) for tau in taus)


COLUMNS = ("seconds", "us", "prefill", "decode", "wait", "schedule", "forward", "sample", "collect",
           "text", "add", "ours")  # fmt: skip


def measure_rollouts(
    config: Qwen2Config, model: Any, cuda: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the seconds of each part of rollouts, under each of our settings; prints them as they
    come."""
    # a task of fixed work, whose lengths are divided for a toy, and an engine that plays it
    size = 1 if cuda else 6
    sampled = args.sampled or TURN // size
    cfg = Config(max_response=sampled, max_turns=args.turns - 1, max_prompt=4096)
    task = Speed(cfg)
    task.words, task.prompt_tokens, task.read = config.vocab_size, PROMPT // size, READ // size
    tokenizer = make_tokenizer(config.vocab_size)
    stop = task.make_format().stop_strings()
    max_len, memory = (4096 + READ, 0.3) if cuda else (1024, 0.05)
    engine = start(config, tokenizer, stop, memory, max_len)
    engine.load(weights(model))
    from vllm.v1.engine.output_processor import OutputProcessor

    frontend = OutputProcessor(tokenizer, log_stats=False)
    clock = Clock(engine.core, frontend)

    # one more of our settings at a time
    bare = {"max_tokens": sampled, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
    logprobs = bare | {"logprobs": 0, "flat_logprobs": True}
    stops = logprobs | {"detokenize": True, "skip_special_tokens": False}
    stops |= {"stop": list(stop), "include_stop_str_in_output": True}
    settings = {
        "bare": (bare, False),
        "+ log-probs": (logprobs, False),
        "+ seeds": (logprobs, cuda),
        "+ stops": (stops, cuda),
    }

    # the first passes compile
    prompts = [draw_ids(k // 5, task.words, task.prompt_tokens) for k in range(5 * args.groups)]
    play_plainly(engine, frontend, task, prompts, 2, stops | {"max_tokens": 4}, cuda)
    rows = dict[str, Any]()
    print(" " * 12 + "".join(f"{name:>9}" for name in COLUMNS))
    for name in (*settings, "our loop"):
        if not engine.core.reset_prefix_cache():
            raise Fault("rows are still running")
        clock.reset()
        if name in settings:
            n = play_plainly(engine, frontend, task, prompts, args.turns, *settings[name])
        else:
            n = play_ours(engine, tokenizer, task, args.groups, cfg)
        row = rows[name] = clock.read(n)
        figures = "".join(f"{row.get(column, 0):9.2f}" for column in COLUMNS)
        print(f"{name:12}{figures}", flush=True)
    engine.close()
    return {"settings": rows}


=======
>>>>>>> main
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise Fault("torch finds no GPU here; --device cpu tries it on a toy")
    config = Qwen2Config(
        **(KNOWN["Qwen/Qwen2.5-3B"] if cuda else SMALL), architectures=["Qwen2ForCausalLM"]
    )
    model = empty(config, torch.bfloat16, "cuda" if cuda else "cpu")
    randomize(model, 0)
    print(json.dumps(measure_memory(config, model, cuda)))


if __name__ == "__main__":
    with one_line():
        main()
