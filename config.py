"""Every knob of a run: its name, the paper's symbol, its place in the paper, its default. Default <
preset < flag.

Each concern has a dataclass of its own, and a room is given the one it needs: `rollout` takes
RolloutKnobs, whatever else a Config holds. A Config is all of them, so that a run has one flat set
of names.
"""

import difflib
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from plumbing.faults import Fault, tell_torchrun
from plumbing.stop import count_ranks, leads
from plumbing.threads import choose_threads, use_threads
from plumbing.trust import check_origin

Settings = dict[str, Any]  # values of knobs by name
HERE = Path(__file__).parent
WORLD = HERE / "world" / "files"
FACTS = HERE / "tasks" / "facts"
SMOLLM = HERE / "downloads" / "smollm2-135m"  # not in runs/, whose newest folder is the newest run
SMOLLM_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Bit = Annotated[int, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Knobs:
    """A dataclass of knobs: annotations are their bounds, docstrings their help."""

    __pydantic_config__ = ConfigDict(
        use_attribute_docstrings=True, extra="forbid", allow_inf_nan=False
    )


@dataclass(frozen=True)
class RunKnobs(Knobs):
    """the run"""

    mode: Literal["inspo", "static"] = "inspo"
    """inspo; or static: Search-R1's baseline, one fixed instruction"""
    model: str = "world"
    """a preset (world, smollm2-135m, qwen2.5-0.5b to -7b), a Hugging Face id or a local folder"""
    instruction: str = ""
    """file with the first instruction; empty: the task's own (Search-R1's, App. F)"""
    optimizer_model: str = ""
    """model name at OPENAI_BASE_URL; empty: gpt-5, at OpenAI; scripted: the world's own;
    guessing: its control"""
    out: str = ""
    """directory of the run; empty: runs/<time>-<model>-<mode>"""
    resume: bool = False
    """resume the run in --out, with the flags it had, from its last checkpoint, on any number
    of ranks"""
    seed: Natural = 0
    """seed of everything random"""

    def find_fault(self) -> str:
        return "--resume: say which run with --out" if self.resume and not self.out else ""


@dataclass(frozen=True)
class TaskKnobs(Knobs):
    """the task"""

    task: str = "tasks.search_qa:SearchQA"
    """what is asked, called and scored: module:Class (docs/tasks.md)"""
    reward: str = ""
    """a function that scores in place of the task: module:function (docs/tasks.md)"""
    train: str = ""
    """training questions, .jsonl or .parquet, or one on the hub: hf://datasets/OWNER/NAME/FILE"""
    valid: str = ""
    """questions that choose the best checkpoint; empty: some of --train are set aside"""
    test: str = ""
    """held-out questions, used only in reports"""
    corpus: str = ""
    """passages, .jsonl: the run serves them with BM25 (unless --retriever is given)"""
    retriever: str = ""
    """URL of a search server; empty, without --corpus: the one on port 8000"""
    tools: str = "search"
    """the agent's tools, comma-separated: search, calculator, module:function,
    mcp:URL-or-command; none: no tools"""
    format: str = "tags"
    """how calls are written: tags, the paper's; hermes: as the model's chat template does;
    hermes_tools: likewise, and the tools' descriptions evolve too; or module:Class"""
    topk: Annotated[int, Field(ge=1, le=100)] = 3
    """passages a search returns"""


@dataclass(frozen=True)
class RolloutKnobs(Knobs):
    """rollouts (§2.1, App. B)"""

    temperature: Positive = 1.0
    """sampling temperature of the policy (top_p is 1: the whole distribution)"""
    max_turns: Count = 4
    """turns that may call a tool; one turn to answer follows"""
    max_response: Count = 500
    """tokens per turn of the policy"""
    max_observation: Annotated[int, Field(ge=32)] = 500
    """tokens per observation; a longer one is cut inside its tag"""
    max_prompt: Count = 4096
    """tokens of context with which a turn may start: a result that leaves no room is cut, and
    the next turn is the last"""

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory whose last turn is complete."""
        return self.max_prompt + self.max_response


@dataclass(frozen=True)
class GRPOKnobs(RolloutKnobs):
    """GRPO (Eq. 2 and 3, §2.2)"""

    T: Count = 300
    """T: training steps"""
    batch: Count = 512
    """questions per step"""
    mini_batch: Count = 256
    """trajectories per optimizer update"""
    G: Annotated[int, Field(ge=2)] = 5
    """G: trajectories per question, the group of Eq. 3"""
    lr: NonNegative = 5e-7
    """peak learning rate of AdamW, of a cosine schedule; 0 freezes the policy; --lora_rank raises
    the default"""
    eps: Positive = 0.2
    """epsilon of Eq. 2: the clip"""
    beta: NonNegative = 0.001
    """beta of Eq. 2: weight of the KL to the first policy; 0: no reference model"""
    lora_rank: Natural = 0
    """rank of LoRA adapters on all linear layers but the head; 0: train all weights"""
    lora_alpha: Count = 32
    """LoRA's scale is this / --lora_rank"""
    dither: Bit = 1
    """1: a policy in bfloat16 takes steps that are smaller than its grid (CHOICE-33); 0: they
    round away"""
    micro_tokens: Count = 32768
    """tokens per forward pass on a rank (1024 on a CPU); affects only speed and memory"""
    gather: Bit = 0
    """1: gather weights and reduce gradients once an optimizer step; 0: block by block, in less
    memory"""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """share of T over which lr rises"""

    def find_fault(self) -> str:
        step, ranks = self.batch * self.G, count_ranks()
        if self.mini_batch > step:
            return f"--mini_batch {self.mini_batch}: a step has {step} trajectories (--batch {self.batch} x --G)"
        if self.mini_batch < ranks:
            return f"{ranks} ranks for --mini_batch {self.mini_batch}: start fewer, or raise it"
        return ""


@dataclass(frozen=True)
class PopulationKnobs(Knobs):
    """the population (§3.1, Eq. 4 and 6)"""

    N_P: Count = 7
    """N_P: size of the population"""
    N_parent: Count = 1
    """N_parent: survivors of pruning, parents of the next generation"""
    tau_s: Positive = 0.2
    """tau_s of Eq. 4: selection temperature"""
    window: Count = 5
    """n of Eq. 6: steps in the moving average of the reward"""
    K_p: Count = 5
    """K_p: steps between prunings; more than T: none (Fig. 3)"""
    K_e: Count = 15
    """K_e: steps between evolutions"""
    T_e: Natural = 150
    """T_e: evolutions happen at steps below it"""

    def find_fault(self) -> str:
        if self.N_parent > self.N_P:
            return f"--N_parent {self.N_parent} is more than --N_P {self.N_P}: parents are a part of the population"
        return ""


@dataclass(frozen=True)
class ReflectionKnobs(Knobs):
    """reflection (§3.2, App. B)"""

    proposer: Literal["reflection", "paraphrase", "history"] = "reflection"
    """what the optimizer is shown: reflection; paraphrase or history: Fig. 3"""
    failures: Count = 4
    """failed trajectories shown to the optimizer"""
    D_B: Natural = 200
    """|D_B|: questions on which candidates are verified; 0: they join unverified (Fig. 3)"""
    gate: Bit = 1
    """1: candidates whose reward on D_B is below their parent's do not join; 0: a round's best
    join (CHOICE-12)"""
    rounds: Count = 5
    """rounds of generate and verify in one evolution, at most (App. C)"""
    top_n: Count = 6
    """n of Alg.1 L21: candidates that may join in one round"""
    buffer: Count = 10240
    """trajectories in the replay buffer"""
    max_instruction: Count = 1500
    """tokens, 4 characters each, of a candidate instruction"""


@dataclass(frozen=True)
class EngineKnobs(Knobs):
    """where it runs (torchrun: one rank per GPU)"""

    device: Literal["", "cpu", "cuda"] = ""
    """cpu or cuda; empty: cuda if there is one"""
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16|)$")] = ""
    """precision of the policy's computation; weights and sums stay float32. Empty: bfloat16
    where it is faster"""
    threads: Natural = 0
    """CPU threads, at most: a run takes one per core that is idle when it starts, and keeps
    that number when resumed; 0: no limit"""
    engine: Annotated[str, Field(pattern="^(auto|vllm|torch|.*:.*)$")] = "auto"
    """auto: vllm on a GPU if it is installed, else torch; or vllm, torch, or module:Class
    (docs/gpus.md)"""
    vllm_memory: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """share of a GPU's memory for colocated vLLM: its weights, activations and KV cache"""
    recompute: Annotated[int, Field(ge=-1, le=1)] = -1
    """1: recompute a block's activations in the backward pass; 0: keep them; -1: 1 on a GPU, 0
    on a CPU"""
    fused_layers: Bit = 1
    """1: on a GPU, RMSNorm, rotary embedding and SwiGLU are Liger's kernels; 0: torch's"""
    patience: Positive = 30.0
    """minutes that a rank waits for the others before the job ends"""


@dataclass(frozen=True)
class KeepKnobs(Knobs):
    """what is kept and measured"""

    eval_every: Natural = 100
    """steps between evaluations on --valid and --test; 0: only --test, at the start and the end"""
    eval_n: Natural = 0
    """questions of an evaluation, a fixed sample in which every source has its share; 0: all"""
    save_every: Count = 25
    """steps between checkpoints"""
    keep: Count = 2
    """newest checkpoints to keep; the best on --valid is kept too"""
    tracker: Literal["", "wandb", "trackio", "tensorboard"] = ""
    """also log to wandb, trackio or tensorboard, if installed"""

    def find_fault(self) -> str:
        if self.tracker and not importlib.util.find_spec(self.tracker):
            return f"--tracker {self.tracker}: not installed; pip install {self.tracker}, or leave it out"
        return ""


@dataclass(frozen=True)
class Config(
    KeepKnobs,
    EngineKnobs,
    ReflectionKnobs,
    PopulationKnobs,
    GRPOKnobs,
    RolloutKnobs,
    TaskKnobs,
    RunKnobs,
):
    """All knobs. Defaults are the paper's 3B column (§4, App. B); sizes in tokens are the policy's
    tokens."""

    def find_fault(self) -> str:
        """Returns what makes this configuration impossible, in one line; "" if nothing does. Every
        class has its own part of it."""
        if self.engine != "torch" and self.temperature > 2:
            return f"--temperature {self.temperature}: vLLM takes 2 at most (--engine torch: any)"
        return ""


# What config.json has besides the knobs.
ABOUT: Settings = {"program": "inspo.py", "commit": "unknown", "id": ""}
# Knobs of earlier versions, which a run's config.json may still have, and what there is instead.
REMOVED = {
    "mini": "counted questions: give --mini_batch, which counts trajectories (--mini x --G)",
    "dry_run": "is a program of its own (docs/gpus.md)",
    "vllm": "is an engine of its own, which --engine names (docs/gpus.md)",
    "max_optimizer_tokens": "is gone: summary.json says what was used",
    "max_grad_norm": "is gone: gradients are clipped to a norm of 1 (MAX_GRAD_NORM in grpo.py)",
    "max_rows": "is gone: the torch engine plays 512 rows at once (TorchEngine.max_rows)",
    "offload_reference": "is gone: --lora_rank needs no second model for the reference",
    "prompt_budget": "is gone: failures have 16,000 tokens of a prompt (PROMPT_BUDGET in reflect.py)",
    "search_retries": "is gone: a search is repeated 6 times (RETRIES in tasks/search_qa.py)",
    "optimizer_retries": "is gone: a call to the optimizer is repeated 4 times",
}
HELP = """

INSPO: train a search agent while its instruction evolves (arXiv 2512.01945).
Without flags: the embedded world. [default; the paper's, where the world's differs]
--preset NAME: the preset whose other settings apply to a --model of another name or folder."""
PARTS = ("preset", "learner", "population", "evolution")  # what else train() takes by name
OTHERS_SAY = {"learning_rate": "lr", "epsilon": "eps"}
C = TypeVar("C", bound=Config)

DATA = ("valid", "test", "corpus", "instruction")  # what goes with a preset's --train


def list_data(folder: Path) -> dict[str, str]:
    """Returns the files of a preset's folder, by their flags."""
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", *DATA)}
    return files | {"instruction": str(folder / "instruction.txt")}


# Search-R1's questions, from the Hugging Face hub: 169,615 of NQ and HotpotQA to train on, and the
# 51,713 of the paper's seven benchmarks, of which an evaluation asks a sample.
SEARCH_R1 = "hf://datasets/PeterJinGo/nq_hotpotqa_train@b7d80abfee334a7a91cb377544f09180d58b34f6"
NQ_HOTPOTQA: Settings = dict(
    train=f"{SEARCH_R1}/train.parquet", test=f"{SEARCH_R1}/test.parquet", eval_n=2000
)
ONE_GPU: Settings = dict(lr=1e-6, batch=128, mini_batch=320, recompute=1, gather=1) | NQ_HOTPOTQA
# When the reward of the large ones rises, from others' runs: docs/real.md.
PRESETS: dict[str, Settings] = {
    "world": dict(
        model=str(WORLD / "policy"), **list_data(WORLD), optimizer_model="scripted",
        T=66, batch=16, mini_batch=80, lr=1e-3, max_response=32, window=10,
        max_observation=100, max_prompt=480, K_e=10, T_e=40, D_B=48, rounds=1, buffer=640, max_instruction=120,
        eval_every=0, save_every=10, vllm_memory=0.05, recompute=0, threads=2,
    ),
    # A chat model and real facts for a machine without a GPU: `make real` fetches it, or the hub gives
    # it.
    "smollm2-135m": dict(
        model=str(SMOLLM) if SMOLLM.is_dir() else SMOLLM_HUB, **list_data(FACTS), topk=1,
        optimizer_model="scripted", T=16, batch=8, mini_batch=40,
        lr=2e-5, max_turns=3, max_response=48, max_observation=112, max_prompt=1024, N_P=4, K_p=4,
        K_e=4, T_e=12, D_B=16, rounds=1, buffer=320, max_instruction=200, eval_every=0, eval_n=100, save_every=4,
        vllm_memory=0.2, recompute=0, gather=1,
    ),
    # Not in the paper: for one GPU of 24 GB, which trains all of the first and LoRA adapters of the
    # second.
    "qwen2.5-0.5b": dict(model="Qwen/Qwen2.5-0.5B", **ONE_GPU),
    "qwen2.5-1.5b": dict(model="Qwen/Qwen2.5-1.5B", **ONE_GPU),
    # The paper's, which replicate its precision, too; for eight GPUs of 80 GB.
    "qwen2.5-3b": dict(
        model="Qwen/Qwen2.5-3B", dither=0, vllm_memory=0.8, recompute=0, micro_tokens=8192, gather=1, **NQ_HOTPOTQA,
    ),
    "qwen2.5-7b": dict(
        model="Qwen/Qwen2.5-7B", lr=3e-7, dither=0, max_turns=6, vllm_memory=0.75, recompute=0, micro_tokens=8192,
        **NQ_HOTPOTQA,
    ),
}  # fmt: skip
OPENAI = "https://api.openai.com/v1"
OPTIMIZER = "gpt-5"  # of OpenAI, where a run names neither a model nor another endpoint: CHOICE-38
LORA_LR = {
    "world": 3e-3
}  # found by trial (docs/LOG.md); elsewhere ten times the rate of whole weights
# one instruction: the rest of Algorithm 1 then does nothing
STATIC: Settings = dict(N_P=1, N_parent=1, T_e=0)


def preset_of(model: str) -> str:
    """Returns the name of the preset whose model this is; else the last part of its path or id."""
    for name, preset in PRESETS.items():
        if preset["model"] == model:
            return name
    return Path(model).name


def parse_flags(argv: list[str] | None = None, kind: type[C] = Config, **changes: Any) -> C:  # type: ignore[assignment]
    """Returns what `configure` makes of the flags; a fault is one line and exit code 2, before
    anything is loaded."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words:
        show_help(kind, PRESETS["world"] | {"model": "world"} | changes)
        sys.exit(0)
    try:
        return configure(kind, changes, **read_flags(words, kind))
    except Fault as e:
        if leads():
            text = f"{program_of(kind)}: {e}"
            tell_torchrun(text)
            print(text, file=sys.stderr)
        else:  # torchrun ends all as soon as one has failed: rank 0 speaks first
            time.sleep(30)
        sys.exit(2)


def read_flags(words: list[str], kind: type[Config]) -> Settings:
    """Returns the values of `--flag value` and `--flag=value`. A flag that is true or false may
    stand alone; None: another does."""
    given: Settings = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            is_switch = isinstance(getattr(kind, name, None), bool)
            given[name] = value if equals else is_switch or None
        elif given and not isinstance(given[name], str):
            given[name] = word
        else:
            raise Fault(f"{word}: which flag is it for? (--help lists them)")
    return given


def list_docs(kind: type[Config]) -> dict[str, str]:
    """Returns the help of each knob: its docstring, which only the class that defines it knows."""
    docs = {}
    for concern in reversed(kind.__mro__):
        for name, field in vars(concern).get("__pydantic_fields__", {}).items():
            if field.description:
                docs[name] = " ".join(field.description.split())
    return docs


def show_help(kind: type[Config], shown: Settings) -> None:
    """Prints the flags by their concerns. `shown`: what applies where no flag is given."""
    print(f"{program_of(kind)} [--flag value ...]{HELP}")
    docs = list_docs(kind)
    for concern in reversed(kind.__mro__):
        # a knob that a subclass defines anew stays in its first place
        own = [name for name in vars(concern).get("__annotations__", ()) if name in docs]
        if own:
            print(f"\n{concern.__doc__}:")
        for name in own:
            paper = getattr(kind, name)
            defaults = dict.fromkeys([str(shown.get(name, paper)), str(paper)])
            text = "; ".join(filter(None, defaults)).replace(f"{HERE}/", "")
            print(f"  --{name:20} {docs.pop(name)} [{text}]".removesuffix(" []"))


def configure(
    kind: type[C] = Config,  # type: ignore[assignment]
    changes: Mapping[str, Any] = {},
    /,
    preset: str = "",
    **given: Any,
) -> C:
    """Returns the `kind` of Config with the settings that are given, over those of their preset.
    Raises Fault.

    `changes`: what a program changes in every preset.
    """
    if preset not in ("", *PRESETS):
        raise Fault(f"--preset {preset}: choose {', '.join(PRESETS)}")
    given = check_settings(kind, given)
    named = preset or given.get("model", kind.model)
    settings = dict(PRESETS.get(named, {}))
    train, unused = given.get("train", settings.get("train")), []
    if settings.get("train") not in (train, os.path.abspath(train or "")):
        for name in DATA:
            if settings.pop(name, "") and name not in given:
                unused.append(name)
    settings |= changes
    if given.get("mode") == "static":
        settings |= STATIC
    if given.get("model") in PRESETS:
        given["model"] = PRESETS[given["model"]]["model"]
    if given.get("lora_rank"):
        settings["lr"] = LORA_LR.get(named, float(f"{10 * settings.get('lr', kind.lr):.6g}"))
    if given.get("resume") and given.get("out"):
        run = Path(given["out"])
        settings = asdict(read_config(run, kind, resume=True))
        check_origin(run, settings, given)
    cfg = kind(**settings | given)
    if "mini_batch" not in given:  # a preset's is for a preset's step
        cfg = replace(cfg, mini_batch=min(cfg.mini_batch, cfg.batch * cfg.G))
    if evolves(cfg) and not cfg.optimizer_model and not os.environ.get("OPENAI_BASE_URL"):
        cfg = replace(cfg, optimizer_model=OPTIMIZER)
    validate(cfg)
    if not cfg.resume:
        if unused and leads():
            names = ", ".join(unused)
            print(f"note: --train is not the preset's, so its {names} are not used", flush=True)
        cfg = replace(cfg, threads=choose_threads(cfg.threads))
    use_threads(cfg.threads)
    return cfg


def check_settings(kind: type[Config], given: Settings) -> Settings:
    """Returns what is given, as flags or from Python, in the types of the knobs. Raises Fault."""
    settings = dict(given)
    for name, value in given.items():
        if name in REMOVED:
            raise Fault(f"--{name} {REMOVED[name]}")
        if name not in kind.__dataclass_fields__:
            known = {n.lower(): n for n in (*kind.__dataclass_fields__, *PARTS)} | OTHERS_SAY
            [alike] = difflib.get_close_matches(name.lower(), known, 1, cutoff=0)
            raise Fault(f"--{name}: there is no such setting; the nearest is {known[alike]}")
        if isinstance(value, os.PathLike):
            settings[name] = os.fspath(value)
        elif name == "task" and not isinstance(value, str):
            owner = value if isinstance(value, type) else type(value)
            settings[name] = f"{owner.__module__}:{owner.__qualname__}"
    cfg = build(kind, settings)
    return {name: getattr(cfg, name) for name in given}


def build(kind: type[C], settings: Settings, place: str = "") -> C:
    """Returns the knobs with these values. Raises Fault for the first that is out of its range."""
    try:
        return kind(**settings)
    except ValidationError as e:
        wrong = e.errors()[0]
        allowed = wrong["msg"].removeprefix("Input ")
        raise Fault(f"{place}--{wrong['loc'][0]} {wrong['input']}: {allowed}") from None


def program_of(kind: type[Config]) -> str:
    """Returns the script whose flags these are; one with knobs of its own has a subclass of Config
    for them."""
    return "inspo.py" if kind is Config else os.path.relpath(inspect.getfile(kind), HERE)


def read_config(run: Path, kind: type[C] = Config, resume: bool = False) -> C:  # type: ignore[assignment]
    """Returns the Config of the run in a directory; raises Fault.

    Reading another program's run as a plain Config leaves out the knobs that only that program
    knows; to `resume` it takes the program that started it.
    """
    path = run / "config.json"
    if not path.is_file():
        raise Fault(f"{run} holds no run (no config.json)")
    content = json.loads(path.read_bytes())
    about, own = ABOUT | content, program_of(kind)
    if resume and about["program"] != own:
        raise Fault(
            f"--resume: {run} was started by {about['program']}, not {own}: resume it with that"
        )
    names = kind.__dataclass_fields__
    differing = {*names, *ABOUT} ^ about.keys()
    if about["program"] != own:
        differing &= {*names}
    elif not resume:
        differing -= {*REMOVED}
    for name in sorted(differing):
        raise Fault(
            f"{path} was written by another version of {about['program']} (commit {about['commit']}; only one of the"
            f" two has --{name}): use that version"
        )
    settings = {name: content[name] for name in names}
    if about["program"] != own:
        del settings["mode"]  # that program may have a mode of its own
    return build(kind, settings, f"{path}: ")


def validate(cfg: Config) -> None:
    """Raises Fault if the values do not go together."""
    for concern in reversed(type(cfg).__mro__):
        if "find_fault" in vars(concern):  # not inherited, to be asked twice
            fault = vars(concern)["find_fault"](cfg)
            if fault:
                raise Fault(fault)


def evolves(cfg: Config) -> bool:
    """Returns whether instructions change, which takes an optimizer."""
    return cfg.mode != "static" and (cfg.N_P > 1 or cfg.T_e > 0)


def scripted(cfg: RunKnobs) -> bool:
    """Returns whether the run starts the world's own optimizer instead of calling
    OPENAI_BASE_URL."""
    return cfg.optimizer_model in ("scripted", "guessing")


def find_endpoint(cfg: Config) -> tuple[str, str]:
    """Returns URL and key of the optimizer: OPENAI_BASE_URL's, else OpenAI's; both "" if the run
    calls neither.

    Raises Fault if none can be called.
    """
    if not evolves(cfg) or scripted(cfg):
        return "", ""
    url, key = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "").strip()
    if not (cfg.optimizer_model and (url or key)):
        openai = "OPENAI_API_KEY to take OpenAI's, or OPENAI_BASE_URL and --optimizer_model"
        missing = "--optimizer_model to a model of OPENAI_BASE_URL" if url else openai
        raise Fault(f"no optimizer: set {missing}, or choose --mode static")
    return url or OPENAI, key
