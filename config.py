"""Every knob of a run: its name, the paper's symbol, its place in the paper, its default. Default < preset < flag."""

import argparse
import dataclasses
import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from faults import Fault
from objectives import OBJECTIVES
from outside import decoded

# Threads that wait for each other spin only for a moment (LOG.md): as fast alone, twice as fast beside other programs.
# libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
HERE = Path(__file__).parent
WORLD = HERE / "world" / "files"

# The instruction of Search-R1, which the paper starts from (App. F).
SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> "
    "query </search> and it will return the top searched results between <information> and </information>. You can "
    "search as many times as your want. If you find no further external knowledge needed, you can directly provide "
    "the answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
)


def knob(default: Any, doc: str, section: str = "") -> Any:
    """Returns a field of Config; `section` begins a group of flags in --help."""
    return dataclasses.field(default=default, metadata={"doc": doc, "section": section})


@dataclass(frozen=True)
class Config:
    """Defaults are the paper's 3B column (§4, App. B); sizes in tokens are the policy's tokens."""

    mode: str = knob(
        "inspo",
        "inspo; prompt: the same, the policy frozen; static: Search-R1's baseline, one fixed instruction; espl, fst: "
        "its nearest relatives (docs/selection.md)",
        "the run",
    )
    model: str = knob("world", "a preset (world, qwen2.5-0.5b to -7b), a Hugging Face id or a local directory")
    train: str = knob("", "training questions, .jsonl or .parquet")
    valid: str = knob("", "questions that choose the best checkpoint; empty: some of --train are set aside")
    valid_n: int = knob(500, "questions set aside from --train without --valid, at most a tenth of it")
    test: str = knob("", "held-out questions, for reports alone")
    corpus: str = knob("", "passages, .jsonl: the run serves them with BM25 (unless --retriever is given)")
    retriever: str = knob("", "URL of a running search server, http://host:port; several with commas, for fail-over")
    tools: str = knob("search", "what the agent can call, with commas: search, calculator; none: GRPO without tools")
    optimizer_model: str = knob("", "model name at OPENAI_BASE_URL; scripted: the world's own; guessing: its control")
    instruction: str = knob("", "file with the first instruction; empty: Search-R1's (App. F)")
    out: str = knob("", "directory of the run; empty: runs/<time>-<model>-<mode>")
    resume: bool = knob(
        False, "resume the run in --out, with the flags it had, from its last checkpoint, on any number of ranks"
    )
    device: str = knob("", "cpu or cuda; empty: cuda if there is one")
    tracker: str = knob("", "wandb or tensorboard, if installed, beside metrics.jsonl")
    seed: int = knob(0, "seed of everything random")

    T: int = knob(300, "T: training steps", "GRPO (Eq. 2 and 3, §2.2)")
    batch: int = knob(512, "questions a step")
    mini: int = knob(256, "questions an optimizer update ")
    micro_tokens: int = knob(32768, "tokens a forward pass of a rank; affects speed and memory alone")
    G: int = knob(5, "G: trajectories a question")
    lr: float = knob(5e-7, "peak learning rate of AdamW; cosine. 0 freezes the policy")
    warmup: float = knob(0.1, "share of T in which lr rises")
    adam_beta1: float = knob(0.9, "AdamW: decay of the mean gradient")
    adam_beta2: float = knob(0.999, "AdamW: decay of the mean squared gradient")
    adam_eps: float = knob(1e-8, "AdamW: epsilon")
    weight_decay: float = knob(0.01, "AdamW: weight decay")
    max_grad_norm: float = knob(1.0, "gradients are clipped to this norm")
    objective: str = knob("grpo", "what the policy is trained towards: grpo is Eq. 2 and 3; docs/objectives.md has all")
    eps: float = knob(0.2, "epsilon of Eq. 2: the clip, where --objective has none of its own")
    beta: float = knob(0.001, "beta of Eq. 2: weight of the KL to the first policy; 0: no reference model")
    loss_agg: str = knob(
        "trajectory", "trajectory: Eq. 2's average; token: verl's token mean; where --objective has none of its own"
    )
    lora_rank: int = knob(
        0, "rank of LoRA adapters on all linear layers but the head; 0: train all weights. Adapters want a larger --lr"
    )
    lora_alpha: int = knob(32, "LoRA's scale is this / --lora_rank")
    tis: float = knob(0.0, "truncated importance sampling: weight tokens by min(pi_old / pi_engine, this); 0 disables")

    groups: str = knob(
        "pair", "pair: trajectories of an instruction and question are compared; question: of a question under any"
    )

    temperature: float = knob(
        1.0, "sampling temperature of the policy (top_p is 1: the whole distribution)", "rollouts (§2.1, App. B)"
    )
    max_turns: int = knob(4, "turns that may call a tool; one turn to answer follows")
    max_response: int = knob(500, "tokens a turn of the policy")
    max_observation: int = knob(500, "tokens an observation; a longer one is cut inside its tag")
    max_prompt: int = knob(4096, "tokens of context with which a turn may start; more end the trajectory")
    topk: int = knob(3, "passages a search returns")
    search_retries: int = knob(6, "times a search is repeated, with growing pauses, before the run stops resumably")
    max_rows: int = knob(512, "rows the torch engine generates at once; affects speed and memory alone")

    engine: str = knob(
        "auto",
        "auto: vllm on a GPU if it is installed, else torch; or vllm, or torch",
        "where it runs (torchrun: a rank a GPU)",
    )
    vllm: str = knob("colocate", "colocate: vLLM in every rank, asleep during updates; or URLs of `vllm serve`")
    vllm_memory: float = knob(0.5, "share of a GPU's memory for colocated vLLM: its weights, activations and KV cache")
    recompute: int = knob(1, "1: recompute a block's activations in the backward pass; 0: keep them")
    fused_layers: int = knob(1, "1: on a GPU, RMSNorm, rotary embedding and SwiGLU are Liger's kernels; 0: torch's")
    offload_reference: bool = knob(False, "keep the reference model in CPU memory")
    patience: float = knob(30.0, "minutes that a rank waits for the others before the job ends")
    dry_run: bool = knob(False, "print the memory that --gpus of --card would need and a step's seconds, and stop")
    gpus: int = knob(8, "GPUs of --dry_run")
    card: str = knob("h100", "which GPUs, of --dry_run: h100, h200, a100 or rtx4090")
    gpu_mem: float = knob(0.0, "memory of each, in GB, of --dry_run; 0: the card's")

    N_P: int = knob(7, "N_P: size of the population", "the population (§3.1, Eq. 4 and 6)")
    N_parent: int = knob(1, "N_parent: survivors of pruning, parents of the next generation")
    tau_s: float = knob(0.2, "tau_s of Eq. 4: selection temperature")
    window: int = knob(5, "n of Eq. 6: steps in the moving average of the reward")
    K_p: int = knob(5, "K_p: steps between prunings; more than T: none (Fig. 3)")
    K_e: int = knob(15, "K_e: steps between evolutions")
    T_e: int = knob(150, "T_e: evolutions happen at steps below it")
    rank: str = knob(
        "paper", "paper; paired: rivals share questions, and a test prunes those behind for certain (docs/selection.md)"
    )
    rivals: int = knob(2, "instructions that share a question with --rank paired, or with --mode espl; 0: all")

    proposer: str = knob(
        "reflection",
        "what the optimizer is shown: reflection; paraphrase or history: Fig. 3",
        "reflection (§3.2, App. B)",
    )
    failures: int = knob(4, "failed trajectories shown to the optimizer")
    D_B: int = knob(200, "|D_B|: questions on which candidates are verified; 0: they join unverified (Fig. 3)")
    gate: str = knob(
        "paper", "who joins: paper: mean reward on D_B at least the parent's; lower_bound: hardly below it for certain"
    )
    gate_samples: int = knob(1, "rollouts a question of D_B, for parent and candidates alike")
    crossover: float = knob(0.0, "probability of a child of several parents in a step of --mode espl")
    top_n: int = knob(6, "n of Alg.1 L21: candidates that may join in one round")
    rounds: int = knob(5, "rounds of generate and verify in one evolution, at most (App. C)")
    max_optimizer_tokens: int = knob(0, "tokens to and from the optimizer after which it is not asked; 0: no limit")
    max_overhead: float = knob(
        0.0, "verification rollouts, as a share of the training rollouts so far, at which evolution pauses; 0: no limit"
    )
    optimizer_retries: int = knob(4, "times a call to the optimizer is repeated before the evolution is given up")
    buffer: int = knob(10240, "trajectories in the replay buffer")
    max_instruction: int = knob(1500, "tokens of a candidate instruction, counted with the optimizer's tokenizer")
    prompt_budget: int = knob(16000, "tokens of failures in a reflection prompt; longer ones are cut")

    eval_every: int = knob(
        100,
        "steps between evaluations on --valid and --test; 0: --test at start and end alone",
        "what is kept and measured",
    )
    eval_n: int = knob(0, "questions of an evaluation, a fixed sample with every source in its share; 0: all")
    token_rows: int = knob(10, "trajectories a step, in whole groups, stored with the data of their tokens; 0: none")
    token_limit: int = knob(2000, "action tokens stored of such a trajectory; the page says how many are missing")
    compare: int = knob(24, "questions of a verification or final evaluation whose trajectories are stored; 0: none")
    canary: str = knob("", "file with an instruction to score at every evaluation; does training keep its meaning?")
    save_every: int = knob(25, "steps between checkpoints")
    keep: int = knob(2, "newest checkpoints to keep; the best on --valid is kept too")


PRESETS: dict[str, dict[str, Any]] = {
    "world": dict(
        model=str(WORLD / "policy"), train=str(WORLD / "train.jsonl"), valid=str(WORLD / "valid.jsonl"),
        test=str(WORLD / "test.jsonl"), corpus=str(WORLD / "corpus.jsonl"), instruction=str(WORLD / "instruction.txt"),
        optimizer_model="scripted", T=80, batch=24, mini=24, micro_tokens=1024, lr=1e-3, max_response=48,
        max_observation=100, max_prompt=480, K_p=5, K_e=10, T_e=40, D_B=48, rounds=1, buffer=960, max_instruction=120,
        eval_every=0, save_every=10, recompute=0, vllm_memory=0.05,
    ),
    # Not in the paper: for one GPU of 24 GB, which trains all of the first and LoRA adapters of the second.
    "qwen2.5-0.5b": dict(model="Qwen/Qwen2.5-0.5B", lr=1e-6, batch=128, mini=64, eval_n=2000),
    "qwen2.5-1.5b": dict(model="Qwen/Qwen2.5-1.5B", lr=1e-6, batch=128, mini=64, eval_n=2000),
    "qwen2.5-3b": dict(model="Qwen/Qwen2.5-3B", eval_n=2000, vllm_memory=0.8),
    "qwen2.5-7b": dict(model="Qwen/Qwen2.5-7B", lr=3e-7, max_turns=6, eval_n=2000, vllm_memory=0.75),
}  # fmt: skip


NEVER = 1_000_000  # more steps than any run has
MODES: dict[str, dict[str, Any]] = {  # what a mode changes of a preset; a flag wins
    "static": dict(N_P=1, N_parent=1, T_e=0),  # one instruction: the rest of Algorithm 1 then does nothing
    "prompt": dict(lr=0.0),
    "espl": dict(N_P=100, K_e=1, T_e=NEVER, K_p=NEVER, rivals=3, D_B=0, objective="espl"),
    "fst": dict(N_P=4, K_e=6, T_e=NEVER, K_p=NEVER, rounds=4, groups="question", objective="cispo_cap"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        first = os.environ.get("RANK", "0") == "0"  # under torchrun one process speaks for all
        self.exit(2, f"inspo.py: {message} (inspo.py --help lists the flags)\n" if first else None)


def parse(argv: list[str] | None = None) -> Config:
    """Returns the Config of the flags; a fault is one line and exit code 2, before anything is loaded."""
    parser = Parser(
        "inspo.py", usage="inspo.py [--flag value ...]", allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.description = (
        "INSPO: train a search agent while its instruction evolves (arXiv 2512.01945).\n"
        "Without flags: the embedded world. [default; the paper's, where the world's differs]"
    )
    group = parser.add_argument_group()
    for f in dataclasses.fields(Config):
        if f.metadata["section"]:
            group = parser.add_argument_group(f.metadata["section"])
        kind: dict[str, Any] = {"action": "store_true"}
        if f.type is not bool:
            kind = {"type": f.type, "metavar": getattr(f.type, "__name__", "")}
        group.add_argument(f"--{f.name}", default=None, help=_help(f).replace("%", "%%"), **kind)
    flags = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    named = flags.get("model", Config.model)
    preset = PRESETS.get(named, {})
    if preset and "model" in flags:
        flags["model"] = preset["model"]
    preset = preset | MODES.get(flags.get("mode", ""), {})
    try:
        resumed = flags.get("resume") and flags.get("out")
        cfg = dataclasses.replace(read_config(Path(flags["out"])), **flags) if resumed else Config(**preset | flags)
    except Fault as e:
        parser.error(str(e))
    if fault := validate(cfg):
        parser.error(fault)
    return cfg


def read_config(run: Path) -> Config:
    """Returns the Config of the run in a directory; raises Fault."""
    path = run / "config.json"
    if not path.is_file():
        raise Fault(f"{run} holds no run (no config.json)")
    try:
        knobs = decoded(path.read_text())
        types = {f.name: f.type for f in dataclasses.fields(Config)}
        for name, value in knobs.items():
            if type(value) is not types[name] and (types[name], type(value)) != (float, int):
                raise ValueError(f"{name} is {value!r}")
    except (OSError, ValueError, LookupError, AttributeError) as e:
        raise Fault(f"{path} is damaged ({type(e).__name__}: {e}): restore it from a copy") from None
    return Config(**knobs)


def holds_a_run(path: str) -> str:
    return f"{path} holds a run already: continue it with --resume, or choose another --out"


def _help(f: dataclasses.Field[Any]) -> str:
    """Returns a flag's line in --help, with the defaults of `python inspo.py` and of the paper."""
    doc: str = f.metadata["doc"]
    default = PRESETS["world"].get(f.name, f.default)
    if f.name == "model" or isinstance(default, bool) or default == "":
        return doc
    shown = os.path.relpath(default, HERE) if str(default).startswith(str(HERE)) else default
    paper = f"; {f.default}" if f.default not in (default, "") else ""
    return f"{doc} [{shown}{paper}]"


def first_instruction(cfg: Config) -> str:
    """Returns the instruction that evolution starts from."""
    return read_instruction("instruction", cfg.instruction) if cfg.instruction else SEARCH_R1


def read_instruction(knob: str, path: str) -> str:
    """Returns the instruction in a file; Fault if it is empty."""
    try:
        text = Path(path).read_text("utf-8").strip()
    except ValueError:
        raise Fault(f"--{knob} {path}: not UTF-8; write it as UTF-8") from None
    if not text:
        raise Fault(f"--{knob} {path}: the file is empty")
    return text


def validate(cfg: Config) -> str:
    """Returns what makes a configuration impossible, in one line; "" if nothing does."""
    if cfg.mode not in ("inspo", *MODES):
        return f"--mode {cfg.mode}: choose inspo, {', '.join(MODES)}"
    for name, values in (("rank", ("paper", "paired")), ("gate", ("paper", "lower_bound"))):
        if getattr(cfg, name) not in values:
            return f"--{name} {getattr(cfg, name)}: choose {' or '.join(values)}"
        if getattr(cfg, name) != "paper" and cfg.mode not in ("inspo", "prompt"):
            return (
                f"--{name} {getattr(cfg, name)}: it is a rule of Algorithm 1, which --mode {cfg.mode} does not follow"
            )
    if cfg.mode == "prompt" and cfg.lr:
        return f"--lr {cfg.lr}: --mode prompt freezes the policy; leave it out"
    if cfg.rank == "paired" and cfg.groups != "pair":
        return f"--groups {cfg.groups}: --rank paired compares whole groups of a question and instruction; leave it out"
    if cfg.mode == "espl" and cfg.groups != "pair":
        return f"--groups {cfg.groups}: --mode espl compares within a program; leave it out"
    if cfg.rivals != Config.rivals and cfg.rank != "paired" and cfg.mode != "espl":
        return f"--rivals {cfg.rivals}: only --rank paired and --mode espl ask a question under several; leave it out"
    if cfg.rivals == 1:
        return "--rivals 1: one instruction alone is compared with nobody; 2 or more, or 0 for all"
    if cfg.mode == "fst" and cfg.D_B < 1:
        return f"--D_B {cfg.D_B}: --mode fst chooses prompts by what they win on D_B; 1 at least"
    if cfg.gate == "lower_bound" and cfg.D_B < 2:
        return f"--D_B {cfg.D_B}: --gate lower_bound needs at least 2 questions"
    if not 0 <= cfg.crossover <= 1:
        return f"--crossover {cfg.crossover}: a probability, from 0 to 1"
    if cfg.crossover and cfg.mode != "espl":
        return f"--crossover {cfg.crossover}: only --mode espl crosses instructions; leave it out"
    if cfg.mode in ("espl", "fst") and cfg.buffer < cfg.batch * cfg.G:
        return f"--buffer {cfg.buffer}: --mode {cfg.mode} learns from whole steps of {cfg.batch * cfg.G} trajectories"
    if cfg.loss_agg not in ("trajectory", "token"):
        return f"--loss_agg {cfg.loss_agg}: choose trajectory or token"
    if cfg.groups not in ("pair", "question"):
        return f"--groups {cfg.groups}: choose pair or question"
    if cfg.objective not in OBJECTIVES:
        return f"--objective {cfg.objective}: choose {', '.join(OBJECTIVES)}"
    own = OBJECTIVES[cfg.objective]
    for name, taken in (("eps", own.clip), ("loss_agg", own.weight), ("tis", own.tis)):
        if taken and getattr(cfg, name) != getattr(Config, name):
            return f"--{name} {getattr(cfg, name)}: --objective {cfg.objective} has its own; leave it out"
    if cfg.proposer not in ("reflection", "paraphrase", "history"):
        return f"--proposer {cfg.proposer}: choose reflection, paraphrase or history"
    if cfg.tracker not in ("", "wandb", "tensorboard"):
        return f"--tracker {cfg.tracker}: choose wandb or tensorboard"
    if cfg.device not in ("", "cpu", "cuda"):
        return f"--device {cfg.device}: choose cpu or cuda"
    at_least_1 = (
        "T", "batch", "mini", "micro_tokens", "max_turns", "max_response", "max_observation", "max_prompt", "topk",
        "max_rows", "N_P", "N_parent", "window", "K_p", "K_e", "failures", "top_n", "rounds", "buffer",
        "max_instruction", "prompt_budget", "gate_samples", "save_every", "keep", "gpus", "lora_alpha",
    )  # fmt: skip
    for name in at_least_1:
        if getattr(cfg, name) < 1:
            return f"--{name} {getattr(cfg, name)}: must be at least 1"
    at_least_0 = (
        "lr", "eval_every", "eval_n", "T_e", "beta", "seed", "search_retries", "optimizer_retries", "tis",
        "weight_decay", "valid_n", "lora_rank", "gpu_mem", "D_B", "max_optimizer_tokens", "max_overhead", "rivals",
        "token_rows", "token_limit", "compare",
    )  # fmt: skip
    for f in dataclasses.fields(cfg):
        if isinstance(value := getattr(cfg, f.name), float) and not math.isfinite(value):
            return f"--{f.name} {value}: must be a finite number"
    for name in at_least_0:
        if getattr(cfg, name) < 0:
            return f"--{name} {getattr(cfg, name)}: must not be negative"
    for name in ("temperature", "tau_s", "eps", "patience", "adam_eps", "max_grad_norm"):
        if not getattr(cfg, name) > 0:
            return f"--{name} {getattr(cfg, name)}: must be above 0"
    if not 0 <= cfg.warmup < 1:
        return f"--warmup {cfg.warmup}: a share of T, from 0 to below 1"
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            return f"--{name} {getattr(cfg, name)}: from 0 to below 1"
    if cfg.card not in ("h100", "h200", "a100", "rtx4090"):
        return f"--card {cfg.card}: choose h100, h200, a100 or rtx4090"
    if cfg.engine not in ("auto", "vllm", "torch"):
        return f"--engine {cfg.engine}: choose auto, vllm or torch"
    if cfg.engine != "torch" and cfg.temperature > 2:
        return f"--temperature {cfg.temperature}: vLLM takes 2 at most (--engine torch any)"
    if cfg.vllm != "colocate" and not cfg.vllm.startswith(("http://", "https://")):
        return f"--vllm {cfg.vllm}: choose colocate, or give the URL of a server, http://host:port"
    if cfg.vllm != "colocate" and cfg.engine == "torch":
        return f"--vllm {cfg.vllm}: it is not used with --engine torch"
    if not 0 < cfg.vllm_memory < 1:
        return f"--vllm_memory {cfg.vllm_memory}: a share of the GPU's memory, between 0 and 1"
    for name in ("recompute", "fused_layers"):
        if getattr(cfg, name) not in (0, 1):
            return f"--{name} {getattr(cfg, name)}: choose 0 or 1"
    if cfg.offload_reference and cfg.lora_rank:
        return "--offload_reference: with --lora_rank the reference is the policy, its adapters off; leave it out"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.mini * cfg.G < ranks:
        return f"{ranks} ranks for {cfg.mini * cfg.G} trajectories an update: start fewer, or raise --mini"
    if not cfg.retriever and cfg.topk > 100:
        return f"--topk {cfg.topk}: the search server returns 100 passages at most"
    if cfg.max_observation < 32:
        return f"--max_observation {cfg.max_observation}: must be at least 32, or its closing tag does not fit"
    if cfg.G < 2:
        return f"--G {cfg.G}: an advantage needs a group of at least 2 trajectories (Eq. 3)"
    if cfg.N_parent > cfg.N_P:
        return f"--N_parent {cfg.N_parent} is more than --N_P {cfg.N_P}: parents are a part of the population"
    if cfg.batch % cfg.mini:
        return f"--batch {cfg.batch} is not a multiple of --mini {cfg.mini}: every update needs as many questions"
    if cfg.resume and not cfg.out:
        return "--resume: say which run with --out"
    if cfg.tracker and not importlib.util.find_spec(cfg.tracker):
        return f"--tracker {cfg.tracker}: not installed; pip install {cfg.tracker}, or leave it out"
    if cfg.dry_run or os.environ.get("RANK", "0") != "0":
        return ""  # rank 0 alone reads data and calls the optimizer; other nodes may have neither
    for name in ("train", "test"):
        if not getattr(cfg, name):
            return f"--{name} is missing: give a .jsonl or .parquet file of questions"
    if not cfg.corpus and not cfg.retriever and cfg.tools != "none":
        return "nothing to search: give --corpus (passages) or --retriever (URL of a running server)"
    if evolves(cfg) and not (cfg.optimizer_model and (scripted(cfg) or os.environ.get("OPENAI_BASE_URL"))):
        return "no optimizer: set OPENAI_BASE_URL and --optimizer_model, or choose --mode static"
    url = os.environ.get("OPENAI_BASE_URL", "http://")
    if evolves(cfg) and not scripted(cfg) and not url.startswith(("http://", "https://")):
        return f"OPENAI_BASE_URL {url}: begin it with http:// or https://"
    for name in ("train", "valid", "test", "corpus", "instruction", "canary"):
        path = getattr(cfg, name)
        if path and not (name == "corpus" and cfg.retriever) and not Path(path).is_file():
            return f"--{name} {path}: no such file"
    if cfg.out and not cfg.resume and Path(cfg.out, "config.json").exists():
        return holds_a_run(cfg.out)
    return ""


def evolves(cfg: Config) -> bool:
    """Returns whether instructions change, which takes an optimizer."""
    return cfg.mode not in ("static", "supervised")


def scripted(cfg: Config) -> bool:
    """Returns whether the run starts an optimizer of the world's instead of calling OPENAI_BASE_URL."""
    return cfg.optimizer_model in ("scripted", "guessing")


def warnings(cfg: Config) -> list[str]:
    """Returns a line for each setting that is possible but hardly intended."""
    out = []
    if cfg.mode in ("inspo", "prompt") and cfg.K_e % cfg.K_p:
        out.append(f"K_e {cfg.K_e} is not a multiple of K_p {cfg.K_p}: pruning and evolution drift against each other")
    if cfg.objective == "consistent" and cfg.rank != "paired" and cfg.mode != "espl":
        out.append("--objective consistent is grpo here: no question has several instructions; --rank paired asks so")
    return out
