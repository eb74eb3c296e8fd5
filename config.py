"""Every knob of a run: its name, the paper's symbol, where it stands, its default. Default < preset < flag."""

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

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


def knob(default, doc: str):
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Config:
    """Defaults are the paper's 3B column (§4, App. B); sizes in tokens are the policy's tokens."""

    # what is run, on what
    mode: str = knob("inspo", "inspo, or static: Search-R1's baseline, one fixed instruction")
    model: str = knob("world", "a preset (world, qwen2.5-3b, qwen2.5-7b), a Hugging Face id or a local directory")
    train: str = knob("", "training questions, .jsonl or .parquet")
    test: str = knob("", "held-out questions, .jsonl or .parquet")
    corpus: str = knob("", "passages, .jsonl: the run serves them with BM25 (not with --retriever)")
    retriever: str = knob("", "URL of a running search server, http://host:port; more with commas, for when it fails")
    optimizer_model: str = knob("", "model name at OPENAI_BASE_URL; 'scripted' starts the world's own server")
    instruction: str = knob("", "file with the first instruction; empty: Search-R1's (App. F)")
    out: str = knob("", "directory of the run; empty: runs/<time>-<model>-<mode>")
    resume: bool = knob(False, "go on with the run in --out from its last checkpoint, on any number of ranks")
    device: str = knob("", "cpu or cuda; empty: cuda where there is one")
    tracker: str = knob("", "wandb or tensorboard, where installed, beside metrics.jsonl")
    seed: int = knob(0, "seed of everything random")

    # GRPO (Eq. 2 and 3, §2.2)
    T: int = knob(300, "T: training steps")
    batch: int = knob(512, "questions a step")
    mini: int = knob(256, "questions an optimizer update (CHOICE-10)")
    micro_tokens: int = knob(32768, "tokens a forward pass of a rank; changes speed and memory alone")
    G: int = knob(5, "G: trajectories a question")
    lr: float = knob(5e-7, "peak learning rate of AdamW; cosine")
    warmup: float = knob(0.1, "share of T in which lr rises")
    eps: float = knob(0.2, "epsilon of Eq. 2: the clip")
    beta: float = knob(0.001, "beta of Eq. 2: weight of the KL to the first policy; 0: no reference model")
    loss_agg: str = knob("trajectory", "trajectory: Eq. 2's average; token: verl's token mean (CHOICE-9)")
    tis: float = knob(0.0, "cap of a token's weight pi_old / pi_engine, for engines that round otherwise; 0: no weight")

    # rollouts (§2.1, App. B)
    temperature: float = knob(1.0, "sampling temperature of the policy (top_p is 1: the whole distribution)")
    max_turns: int = knob(4, "searches a trajectory may make, then one turn to answer (CHOICE-1)")
    max_response: int = knob(500, "tokens a turn of the policy")
    max_observation: int = knob(500, "tokens of an observation; cut inside its tag")
    max_prompt: int = knob(4096, "tokens a context may have when a turn starts; a longer one ends the trajectory")
    topk: int = knob(3, "passages a search returns")
    search_retries: int = knob(6, "times a search is repeated (0.5 s to 8 s apart) before the run stops resumably")
    max_rows: int = knob(512, "rows the torch engine generates at once; changes speed and memory alone")

    # where it runs (torchrun starts the ranks, one a GPU)
    engine: str = knob("auto", "auto: vllm on a GPU where it is installed, else torch; or vllm, or torch")
    vllm: str = knob("colocate", "colocate: vLLM in every rank, asleep while it trains; or URLs of `vllm serve`")
    vllm_memory: float = knob(0.5, "share of a GPU's memory that colocated vLLM may take: its weights and KV cache")
    recompute: int = knob(1, "1: a block's activations are computed again in the backward pass; 0: they are kept")
    offload_reference: bool = knob(False, "keep the reference model in the CPU's memory")
    patience: float = knob(30.0, "minutes that a rank waits for the others before the job ends")
    dry_run: bool = knob(False, "print the memory that --gpus of --gpu_mem would need, and stop")
    gpus: int = knob(8, "GPUs of --dry_run")
    gpu_mem: float = knob(80.0, "memory of each, in GB, of --dry_run")

    # the population of instructions (§3.1, Eq. 4 and 6)
    N_P: int = knob(7, "N_P: size of the population")
    N_parent: int = knob(1, "N_parent: survivors of pruning, parents of the next generation")
    tau_s: float = knob(0.2, "tau_s of Eq. 4: selection temperature")
    window: int = knob(5, "n of Eq. 6: steps in the moving average of the reward")
    K_p: int = knob(5, "K_p: steps between prunings")
    K_e: int = knob(15, "K_e: steps between evolutions")
    T_e: int = knob(150, "T_e: evolutions happen at steps below it (CHOICE-2)")

    # reflection (§3.2, App. B)
    failures: int = knob(4, "failed trajectories that the optimizer is shown")
    D_B: int = knob(200, "|D_B|: questions on which candidates are verified")
    top_n: int = knob(6, "n of Alg.1 L21: candidates that may join in one round")
    rounds: int = knob(5, "rounds of generate and verify in one evolution, at most (App. C)")
    optimizer_retries: int = knob(4, "times a call to the optimizer is repeated before the evolution is given up")
    buffer: int = knob(10240, "trajectories that the replay buffer keeps")
    max_instruction: int = knob(1500, "tokens of a candidate instruction, as the optimizer's tokens are counted")
    prompt_budget: int = knob(16000, "tokens of failures in a reflection prompt; longer ones are cut")

    # what is kept and measured
    eval_every: int = knob(100, "steps between evaluations on --test; 0: at start and end alone")
    eval_n: int = knob(0, "test questions an evaluation uses; 0: all")
    save_every: int = knob(25, "steps between checkpoints")
    keep: int = knob(2, "checkpoints that are kept, the newest ones; the one with the best --test score is too")


PRESETS: dict[str, dict] = {
    "world": dict(
        model=str(WORLD / "policy"), train=str(WORLD / "train.jsonl"), test=str(WORLD / "test.jsonl"),
        corpus=str(WORLD / "corpus.jsonl"), instruction=str(WORLD / "instruction.txt"), optimizer_model="scripted",
        T=60, batch=24, mini=24, micro_tokens=4096, lr=1e-4, max_response=48, max_observation=100, max_prompt=480,
        K_p=3, K_e=9, T_e=40, D_B=48, buffer=960, max_instruction=120, eval_every=0, save_every=9, recompute=0,
        vllm_memory=0.05,
    ),
    "qwen2.5-3b": dict(model="Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": dict(model="Qwen/Qwen2.5-7B", lr=3e-7, max_turns=6),
}  # fmt: skip


def parse(argv: list[str] | None = None) -> Config:
    """Flags -> Config; a fault is one line and exit code 2, before anything is loaded."""
    parser = argparse.ArgumentParser("inspo.py", allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter)
    parser.description = "INSPO: train a search agent while its instruction evolves (arXiv 2512.01945)."
    parser.usage = "inspo.py [--flag value ...]"
    first = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes speaks for all
    parser.error = lambda why: parser.exit(2, f"inspo.py: {why} (inspo.py --help lists the flags)\n" if first else None)
    for f in dataclasses.fields(Config):
        kind = {"action": "store_true"} if f.type is bool else {"type": f.type, "metavar": f.type.__name__}
        doc = f.metadata["doc"] + ("" if f.type is bool or f.default == "" else f" [{f.default}]")
        parser.add_argument(f"--{f.name}", default=None, help=doc.replace("%", "%%"), **kind)
    flags = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    preset = PRESETS.get(flags.get("model", Config.model), {})
    if preset:
        flags.pop("model", None)
    if flags.get("mode") == "static":  # one instruction, no population: the rest of Algorithm 1 then does nothing
        preset = preset | {"N_P": 1, "N_parent": 1, "T_e": 0}
    cfg = Config(**preset | flags)
    if fault := wrong(cfg):
        parser.error(fault)
    return cfg


def wrong(cfg: Config) -> str:
    """What makes a configuration impossible, in one line; "" if nothing does."""
    if cfg.mode not in ("inspo", "static"):
        return f"--mode {cfg.mode}: choose inspo or static"
    if cfg.loss_agg not in ("trajectory", "token"):
        return f"--loss_agg {cfg.loss_agg}: choose trajectory or token"
    if cfg.tracker not in ("", "wandb", "tensorboard"):
        return f"--tracker {cfg.tracker}: choose wandb or tensorboard"
    if cfg.device not in ("", "cpu", "cuda"):
        return f"--device {cfg.device}: choose cpu or cuda"
    at_least_1 = (
        "T", "batch", "mini", "micro_tokens", "max_turns", "max_response", "max_observation", "max_prompt", "topk",
        "max_rows", "N_P", "N_parent", "window", "K_p", "K_e", "failures", "D_B", "top_n", "rounds", "buffer",
        "max_instruction", "prompt_budget", "save_every", "keep", "gpus",
    )  # fmt: skip
    for name in at_least_1:
        if getattr(cfg, name) < 1:
            return f"--{name} {getattr(cfg, name)}: must be at least 1"
    for name in ("eval_every", "eval_n", "T_e", "beta", "seed", "search_retries", "optimizer_retries", "tis"):
        if not getattr(cfg, name) >= 0:  # nan, too
            return f"--{name} {getattr(cfg, name)}: must not be negative"
    for name in ("lr", "temperature", "tau_s", "eps", "patience", "gpu_mem"):
        if not getattr(cfg, name) > 0:
            return f"--{name} {getattr(cfg, name)}: must be above 0"
    if not 0 <= cfg.warmup < 1:
        return f"--warmup {cfg.warmup}: a share of T, from 0 to below 1"
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
    if cfg.recompute not in (0, 1):
        return f"--recompute {cfg.recompute}: choose 0 or 1"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.mini * cfg.G < ranks:
        return f"{ranks} ranks for {cfg.mini * cfg.G} trajectories an update: start fewer, or raise --mini"
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
    if cfg.dry_run:
        return ""  # what follows is not looked at
    for name in ("train", "test"):
        if not getattr(cfg, name):
            return f"--{name} is missing: give a .jsonl or .parquet file of questions"
    if not cfg.corpus and not cfg.retriever:
        return "nothing to search: give --corpus (passages) or --retriever (URL of a running server)"
    if cfg.mode == "inspo" and not (cfg.optimizer_model and (scripted(cfg) or os.environ.get("OPENAI_BASE_URL"))):
        return "no optimizer: set OPENAI_BASE_URL and --optimizer_model, or choose --mode static"
    for name in ("train", "test", "corpus", "instruction"):
        path = getattr(cfg, name)
        if path and not (name == "corpus" and cfg.retriever) and not Path(path).is_file():
            return f"--{name} {path}: no such file"
    return ""


def scripted(cfg: Config) -> bool:
    """Whether the run starts the world's scripted optimizer instead of calling OPENAI_BASE_URL."""
    return cfg.optimizer_model == "scripted"


def warnings(cfg: Config) -> list[str]:
    """What is possible but hardly meant."""
    out = []
    if cfg.mode == "inspo" and cfg.K_e % cfg.K_p:
        out.append(f"K_e {cfg.K_e} is not a multiple of K_p {cfg.K_p}: pruning and evolution drift against each other")
    return out
