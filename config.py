"""Every knob of a run: its name, the paper's symbol, its place in the paper, its default. Default <
preset < flag.

Each concern has a dataclass of its own, and a room is given the one it needs: `rollout` takes
RolloutKnobs, whatever else a Config holds. A Config is all of them, so that a run has one flat set
of names.
"""

import argparse
import difflib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from plumbing.faults import Fault
from plumbing.flags import Parser, add_flags
from plumbing.flags import knob as knob  # programs with knobs of their own take it from here
from plumbing.flags import out_of_range as out_of_range
from plumbing.outside import without_secrets
from plumbing.stop import count_ranks, leads
from plumbing.threads import choose_threads, use_threads
from plumbing.trust import check_origin

Settings = dict[str, Any]  # values of knobs by name
HERE = Path(__file__).parent
WORLD = HERE / "world" / "files"
FACTS = HERE / "tasks" / "facts"
SMOLLM = HERE / "downloads" / "smollm2-135m"  # not in runs/, whose newest folder is the newest run
SMOLLM_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class RunKnobs:
    """the run"""

    mode: str = knob(
        "inspo",
        "inspo; or static: Search-R1's baseline, one fixed instruction",
        of=("inspo", "static"),
    )
    model: str = knob(
        "world",
        "a preset (world, smollm2-135m, qwen2.5-0.5b to -7b), Hugging Face id or local folder",
    )
    instruction: str = knob(
        "", "file with the first instruction; empty: the task's own (Search-R1's, App. F)"
    )
    optimizer_model: str = knob(
        "",
        "model name at OPENAI_BASE_URL; empty: gpt-5, at OpenAI; scripted: the world's own; guessing:"
        " its control",
    )
    out: str = knob("", "directory of the run; empty: runs/<time>-<model>-<mode>")
    resume: bool = knob(
        False,
        "resume the run in --out, with the flags it had, from its last checkpoint, on any number of ranks",
    )
    seed: int = knob(0, "seed of everything random")

    def find_fault(self) -> str:
        return "--resume: say which run with --out" if self.resume and not self.out else ""


@dataclass(frozen=True)
class TaskKnobs:
    """the task"""

    task: str = knob(
        "tasks.search_qa:SearchQA", "what is asked, called and scored: module:Class (docs/tasks.md)"
    )
    reward: str = knob(
        "",
        "a function that scores in place of the task: module:function (docs/tasks.md)",
        more=True,
    )
    train: str = knob(
        "",
        "training questions, .jsonl or .parquet, or one on the hub: hf://datasets/OWNER/NAME/FILE",
    )
    valid: str = knob(
        "", "questions that choose the best checkpoint; empty: some of --train are set aside"
    )
    test: str = knob("", "held-out questions, used only in reports")
    corpus: str = knob(
        "", "passages, .jsonl: the run serves them with BM25 (unless --retriever is given)"
    )
    retriever: str = knob(
        "",
        "URL of a search server, or several with commas; empty, without --corpus: the one on port 8000",
    )
    tools: str = knob(
        "search",
        "the agent's tools, comma-separated: search, calculator, module:function, mcp:URL-or-command; none: no tools",
    )
    format: str = knob(
        "tags",
        "how calls are written: tags, the paper's; hermes: JSON, in the model's chat template; hermes_tools:"
        " likewise, and the tools' descriptions evolve, too; or module:Class",
        more=True,
    )
    topk: int = knob(3, "passages a search returns", least=1)

    def find_fault(self) -> str:
        if not self.retriever and self.topk > 100:
            return f"--topk {self.topk}: the search server returns 100 passages at most"
        return ""


@dataclass(frozen=True)
class RolloutKnobs:
    """rollouts (§2.1, App. B)"""

    temperature: float = knob(
        1.0, "sampling temperature of the policy (top_p is 1: the whole distribution)", above=0
    )
    max_turns: int = knob(4, "turns that may call a tool; one turn to answer follows", least=1)
    max_response: int = knob(500, "tokens per turn of the policy", least=1)
    max_observation: int = knob(
        500, "tokens per observation; a longer one is cut inside its tag", least=32
    )
    max_prompt: int = knob(
        4096,
        "tokens of context with which a turn may start: a result that leaves no room is cut, and one turn follows",
        least=1,
    )

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory whose last turn is complete."""
        return self.max_prompt + self.max_response


@dataclass(frozen=True)
class GRPOKnobs(RolloutKnobs):
    """GRPO (Eq. 2 and 3, §2.2)"""

    T: int = knob(300, "T: training steps", least=1)
    batch: int = knob(512, "questions per step", least=1)
    mini_batch: int = knob(256, "trajectories per optimizer update", least=1)
    G: int = knob(5, "G: trajectories per question, the group of Eq. 3", least=2)
    lr: float = knob(
        5e-7, "peak learning rate of AdamW; cosine. 0 freezes the policy; adapters get more"
    )
    eps: float = knob(0.2, "epsilon of Eq. 2: the clip", above=0)
    beta: float = knob(
        0.001, "beta of Eq. 2: weight of the KL to the first policy; 0: no reference model"
    )
    lora_rank: int = knob(
        0, "rank of LoRA adapters on all linear layers but the head; 0: train all weights"
    )
    lora_alpha: int = knob(32, "LoRA's scale is this / --lora_rank", least=1, more=True)
    dither: int = knob(
        1,
        "1: a policy in bfloat16 takes steps that are smaller than its grid (CHOICE-33); 0: they round away",
        of=(0, 1),
        more=True,
    )
    micro_tokens: int = knob(
        32768,
        "tokens per forward pass on a rank (1024 on a CPU); affects only speed and memory",
        least=1,
        more=True,
    )
    gather: int = knob(
        0,
        "1: gather weights and reduce gradients once an optimizer step; 0: block by block, in less memory",
        of=(0, 1),
        more=True,
    )
    warmup: float = knob(0.1, "share of T in which lr rises", below=1, more=True)

    def find_fault(self) -> str:
        step, ranks = self.batch * self.G, count_ranks()
        if self.mini_batch > step:
            return f"--mini_batch {self.mini_batch}: a step has {step} trajectories (--batch {self.batch} x --G)"
        if self.mini_batch < ranks:
            return f"{ranks} ranks for --mini_batch {self.mini_batch}: start fewer, or raise it"
        return ""


@dataclass(frozen=True)
class PopulationKnobs:
    """the population (§3.1, Eq. 4 and 6)"""

    N_P: int = knob(7, "N_P: size of the population", least=1)
    N_parent: int = knob(
        1, "N_parent: survivors of pruning, parents of the next generation", least=1
    )
    tau_s: float = knob(0.2, "tau_s of Eq. 4: selection temperature", above=0)
    window: int = knob(5, "n of Eq. 6: steps in the moving average of the reward", least=1)
    K_p: int = knob(5, "K_p: steps between prunings; more than T: none (Fig. 3)", least=1)
    K_e: int = knob(15, "K_e: steps between evolutions", least=1)
    T_e: int = knob(150, "T_e: evolutions happen at steps below it")

    def find_fault(self) -> str:
        if self.N_parent > self.N_P:
            return f"--N_parent {self.N_parent} is more than --N_P {self.N_P}: parents are a part of the population"
        return ""


@dataclass(frozen=True)
class ReflectionKnobs:
    """reflection (§3.2, App. B)"""

    proposer: str = knob(
        "reflection",
        "what the optimizer is shown: reflection; paraphrase or history: Fig. 3",
        of=("reflection", "paraphrase", "history"),
    )
    failures: int = knob(4, "failed trajectories shown to the optimizer", least=1)
    D_B: int = knob(
        200, "|D_B|: questions on which candidates are verified; 0: they join unverified (Fig. 3)"
    )
    gate: int = knob(
        1,
        "1: of a round's best candidates those join that are not below their parent on D_B; 0: the best (CHOICE-12)",
        of=(0, 1),
        more=True,
    )
    rounds: int = knob(
        5, "rounds of generate and verify in one evolution, at most (App. C)", least=1
    )
    top_n: int = knob(
        6, "n of Alg.1 L21: candidates that may join in one round", least=1, more=True
    )
    buffer: int = knob(10240, "trajectories in the replay buffer", least=1, more=True)
    max_instruction: int = knob(
        1500, "tokens, 4 characters each, of a candidate instruction", least=1, more=True
    )
    max_optimizer_tokens: int = knob(
        0, "tokens to and from the optimizer after which it is not called; 0: no limit"
    )


@dataclass(frozen=True)
class EngineKnobs:
    """where it runs (torchrun: one rank per GPU)"""

    device: str = knob(
        "", "cpu or cuda; empty: cuda if there is one", of=("", "cpu", "cuda"), more=True
    )
    dtype: str = knob(
        "",
        "precision of the policy's computation; weights and sums stay float32. Empty: bfloat16 where it is faster",
        of=("", "float32", "bfloat16"),
        more=True,
    )
    threads: int = knob(
        0,
        "CPU threads, at most: a run takes one per core that is idle when it starts, and keeps that number when"
        " resumed; 0: no limit",
        more=True,
    )
    engine: str = knob(
        "auto",
        "auto: vllm on a GPU if it is installed, else torch; or vllm, torch, or module:Class (docs/gpus.md)",
    )
    vllm_memory: float = knob(
        0.5,
        "share of a GPU's memory for colocated vLLM: its weights, activations and KV cache",
        above=0,
        below=1,
    )
    recompute: int = knob(
        -1,
        "1: recompute a block's activations in the backward pass; 0: keep them; -1: 1 on a GPU, 0 on a CPU",
        of=(-1, 0, 1),
        more=True,
    )
    fused_layers: int = knob(
        1,
        "1: on a GPU, RMSNorm, rotary embedding and SwiGLU are Liger's kernels; 0: torch's",
        of=(0, 1),
        more=True,
    )
    patience: float = knob(
        30.0, "minutes that a rank waits for the others before the job ends", above=0, more=True
    )

    def find_fault(self) -> str:
        if self.engine not in ("auto", "vllm", "torch") and ":" not in self.engine:
            return f"--engine {self.engine}: choose auto, vllm, torch or a module:Class"
        return ""


@dataclass(frozen=True)
class KeepKnobs:
    """what is kept and measured"""

    eval_every: int = knob(
        100,
        "steps between evaluations on --valid and --test; 0: only --test, at the start and the end",
    )
    eval_n: int = knob(
        0, "questions of an evaluation, a fixed sample with every source in its share; 0: all"
    )
    save_every: int = knob(25, "steps between checkpoints", least=1)
    keep: int = knob(
        2, "newest checkpoints to keep; the best on --valid is kept too", least=1, more=True
    )
    tracker: str = knob(
        "",
        "also log to wandb, trackio or tensorboard, if installed",
        of=("", "wandb", "trackio", "tensorboard"),
    )

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
            return f"--temperature {self.temperature}: vLLM takes 2 at most (--engine torch any)"
        if not leads():
            return ""  # only rank 0 reads files; other nodes may lack them
        if self.instruction and not Path(self.instruction).is_file():
            return f"--instruction {self.instruction}: no such file"
        if self.out and not self.resume and Path(self.out, "config.json").exists():
            return holds_a_run(self.out)
        return ""


# What config.json has besides the knobs.
ABOUT: Settings = {"program": "inspo.py", "commit": "unknown", "id": "", "content": {}}
# Knobs of earlier versions, which a run's config.json may still have, and what there is instead.
REMOVED = {
    "mini": "counted questions, --mini_batch counts trajectories",
    "dry_run": "is a program of its own (docs/gpus.md)",
    "vllm": "is an engine of its own, which --engine names (docs/gpus.md)",
    "max_grad_norm": "is gone: gradients are clipped to a norm of 1 (MAX_GRAD_NORM in grpo.py)",
    "max_rows": "is gone: the torch engine plays 512 rows at once (TorchEngine.max_rows)",
    "offload_reference": "is gone: --lora_rank needs no second model for the reference",
    "prompt_budget": "is gone: failures have 16,000 tokens of a prompt (PROMPT_BUDGET in reflect.py)",
    "search_retries": "is gone: a search is repeated 6 times (RETRIES in tasks/search_qa.py)",
    "optimizer_retries": "is gone: a call to the optimizer is repeated 4 times",
}
C = TypeVar("C", bound=Config)
# What a knob of a type takes from Python.
TYPES: dict[Any, Any] = {bool: bool, int: Integral, float: Real, str: (str, os.PathLike)}

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
# When the reward of the large ones rises, from others' runs: docs/real.md.
PRESETS: dict[str, Settings] = {
    "world": dict(
        model=str(WORLD / "policy"), **list_data(WORLD), optimizer_model="scripted",
        T=80, batch=24, mini_batch=120, lr=1e-3, max_response=48,
        max_observation=100, max_prompt=480, K_p=5, K_e=10, T_e=40, D_B=48, rounds=1, buffer=960, max_instruction=120,
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
    "qwen2.5-0.5b": dict(
        model="Qwen/Qwen2.5-0.5B", lr=1e-6, batch=128, mini_batch=320, recompute=1, gather=1, **NQ_HOTPOTQA,
    ),
    "qwen2.5-1.5b": dict(
        model="Qwen/Qwen2.5-1.5B", lr=1e-6, batch=128, mini_batch=320, recompute=1, gather=1, **NQ_HOTPOTQA,
    ),
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
OPTIMIZER = "gpt-5"  # of OpenAI, where a run names neither a model nor another endpoint
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
    anything is loaded.

    --help has the flags that most runs need, --help_all has all.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = Parser(
        program_of(kind),
        usage="%(prog)s [--flag value ...]",
        description="INSPO: train a search agent while its instruction evolves (arXiv 2512.01945).\n"
        "Without flags: the embedded world. [default; the paper's, where the world's differs]",
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--help_all", action="help", help="also show the flags that few runs need")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="the preset whose other settings apply to a --model of another name or folder",
    )
    add_flags(parser, kind, PRESETS["world"] | changes, everything="--help_all" in words)
    for name in REMOVED:
        kind_of = float if name == "mini" else str
        parser.add_argument(f"--{name}", nargs="?", type=kind_of, const=1, help=argparse.SUPPRESS)
    try:
        return configure(kind, changes, **vars(parser.parse_args(words)))
    except Fault as e:
        parser.error(str(e))


def configure(kind: type[C] = Config, changes: Mapping[str, Any] = {}, /, **given: Any) -> C:  # type: ignore[assignment]
    """Returns the `kind` of Config with the settings that are given, over those of their preset.
    Raises Fault.

    `changes`: what a program changes in every preset.
    """
    given = check_settings(kind, given)
    named = given.pop("preset", given.get("model", kind.model))
    preset = dict(PRESETS.get(named, {}))
    train, unused = given.get("train", preset.get("train")), []
    if preset.get("train") not in (train, os.path.abspath(train or "")):
        for name in DATA:
            if preset.pop(name, "") and name not in given:
                unused.append(name)
    preset |= changes
    if given.get("mode") == "static":
        preset |= STATIC
    if given.get("model") in PRESETS:
        given["model"] = PRESETS[given["model"]]["model"]
    if given.get("lora_rank", 0) > 0:
        preset["lr"] = LORA_LR.get(named, float(f"{10 * preset.get('lr', kind.lr):.6g}"))
    settings = preset
    if given.get("resume") and given.get("out"):
        run = Path(given["out"])
        settings = asdict(read_config(run, kind, resume=True))
        check_origin(run, settings, given)
    cfg = kind(**settings | given)
    if "mini_batch" not in given:  # a preset's is for a preset's step
        cfg = replace(cfg, mini_batch=min(cfg.mini_batch, cfg.batch * cfg.G))
    if evolves(cfg) and not cfg.optimizer_model and not os.environ.get("OPENAI_BASE_URL"):
        cfg = replace(cfg, optimizer_model=OPTIMIZER)
    fault = validate(cfg)
    if fault:
        raise Fault(fault)
    if not cfg.resume:
        if unused and leads():
            names = ", ".join(unused)
            print(f"note: --train is not the preset's, so its {names} are not used", flush=True)
        cfg = replace(cfg, threads=choose_threads(cfg.threads))
    use_threads(cfg.threads)
    return cfg


def check_settings(kind: type[Config], given: Settings) -> Settings:
    """Returns what is given from Python as knobs have it: in their types, a task's class or object
    as module:Class.

    Raises Fault.
    """
    types: Settings = {f.name: f.type for f in fields(kind)} | {"preset": str}
    settings = {}
    for name, value in given.items():
        if name in REMOVED:
            raise Fault(describe_removed(name, value, given.get("G", kind.G)))
        if name not in types:
            words = f" {name.replace('_', ' ')} "
            said = [f.name for f in fields(kind) if words in f" {f.metadata['doc']} "]
            others = *types, "learner", "population", "evolution"
            known = {other.lower(): other for other in others}
            least = 0.65 if said else 0.0  # a name as close as that counts more than a text
            alike = difflib.get_close_matches(name.lower(), known, 1, cutoff=least)
            nearest = known[alike[0]] if alike else said[0]
            raise Fault(
                f"{name}: there is no such setting; the nearest is {nearest} (docs/python.md)"
            )
        if name == "task" and not isinstance(value, str):
            owner = value if isinstance(value, type) else type(value)
            value = f"{owner.__module__}:{owner.__qualname__}"
        wanted = types[name]
        is_flag = isinstance(value, bool)  # in Python an int, too
        if not isinstance(value, TYPES[wanted]) or is_flag != (wanted is bool):
            given_type = type(value).__name__
            raise Fault(f"{name}: give a value of type {wanted.__name__}, not {given_type}")
        settings[name] = wanted(value)
    if settings.get("preset", "world") not in PRESETS:
        raise Fault(f"preset {settings['preset']!r:.40}: choose {', '.join(PRESETS)}")
    return settings


def describe_removed(name: str, value: float, G: int) -> str:
    """Returns the line about a knob of earlier versions."""
    line = f"--{name} {REMOVED[name]}"
    if name == "mini":
        line += f": give --mini_batch {value * G:g} for --mini {value:g} with --G {G}"
    return line


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
    try:
        content = {**json.loads(path.read_bytes())}
        # a run of an earlier version is read, not resumed
        if "mini" in content and not resume:
            content["mini_batch"] = content["mini"] * content.get("G", 0)
    except (OSError, ValueError, TypeError) as e:
        raise Fault(
            f"{path} is damaged ({type(e).__name__}: {e}): restore it from a copy"
        ) from None
    program, commit, *_ = (content.pop(name, default) for name, default in ABOUT.items())
    own = program_of(kind)
    if resume and program != own:
        raise Fault(f"--resume: {run} was started by {program}, not {own}: resume it with that")
    names = [f.name for f in fields(kind)]
    known = names if resume else [*names, *REMOVED]
    differing = [name for name in content if name not in known and program == own]
    differing += [name for name in names if name not in content]
    if differing:
        raise Fault(
            f"{path} is of another version of {program} (commit {commit}; only one of the two has --{differing[0]}):"
            " use that one"
        )
    try:
        return kind(**check_settings(kind, {name: content[name] for name in names}))
    except Fault as e:
        raise Fault(f"{path} is damaged ({e}): restore it from a copy") from None


def holds_a_run(path: str) -> str:
    return f"{path} holds a run already: continue it with --resume, or choose another --out"


def validate(cfg: Config) -> str:
    """Returns what makes a configuration impossible, in one line; "" if nothing does."""
    fault = out_of_range(cfg, vars(cfg))
    for concern in reversed(type(cfg).__mro__):
        if not fault and "find_fault" in vars(concern):  # not inherited, to be asked twice
            fault = vars(concern)["find_fault"](cfg)
    return fault


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
    if url and not url.startswith(("http://", "https://")):
        raise Fault(f"OPENAI_BASE_URL {without_secrets(url)}: begin it with http:// or https://")
    return url or OPENAI, key
