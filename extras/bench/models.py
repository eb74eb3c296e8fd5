"""Which families of models work: small ones of random weights are loaded or refused, and compared
with transformers'.

    python -m extras.bench.models       # minutes; .venv-vllm's Python asks vLLM, too

Sequences are longer than sliding windows (16) and than the lengths from which scaled positions
extend (32). `packed` is the largest difference of a log-prob between rows packed, in the mode of
training, and each alone; `greedy` compares the torch engine with `generate`, `copies` what ranks
and an export hold.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM

from config import PRESETS
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine, vllm_version
from extras.bench.harness import parser_of, play_turns
from models import lora
from models.model import (
    empty,
    export,
    fill,
    forward_packed,
    load_config,
    load_model,
    load_tokenizer,
    weights,
)
from models.packing import Packing
from plumbing.faults import Fault, one_line

SHAPE = dict(
    vocab_size=675,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=32,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=4,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LATENT = dict(
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    n_group=1,
    topk_group=1,
    n_routed_experts=4,
    first_k_dense_replace=1,
)
STATE = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
SCALED = dict(
    factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=1e4,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    short_factor=[1.0] * 16,
    long_factor=[4.0] * 16,
)
KINDS = {  # settings, transformers' classes
    "": (
        {},
        "Llama Qwen2 Qwen3 Gemma Phi Phi3 Olmo Olmo2 Granite Cohere Glm4 StableLm SmolLM3 GPT2 GPTNeoX OPT"
        " Apertus Arcee Ernie4_5 HunYuanDenseV1 SeedOss Helium HyperCLOVAX Jais2 Persimmon GPTBigCode GPTJ HrmText"
        " BioGpt BitNet DiffLlama Doge Fuyu Glm Ministral3",
    ),
    ", windows": (
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
        "Qwen2 Phi3 Mistral Ministral Gemma2 Gemma3Text Cohere2 Olmo3 Starcoder2 Exaone4 Cwm",
    ),
    ", experts": (
        EXPERTS,
        "Mixtral Qwen2Moe Qwen3Moe Olmoe GraniteMoe GptOss JetMoe Phimoe AriaText Cohere2Moe"
        " ExaoneMoe FlexOlmo GraniteMoeShared HunYuanMoEV1 HYV3 Laguna MiniMaxM2",
    ),
    ", an embedding a layer": (
        {"vocab_size_per_layer_input": 675, "hidden_size_per_layer_input": 16},
        "Gemma4Text",
    ),
    ", latent attention": (
        EXPERTS | LATENT,
        "DeepseekV3 DeepseekV2 Glm4Moe Glm4MoeLite LongcatFlash SolarOpen",
    ),
    ", a state": (EXPERTS | STATE, "Mamba Bamba Jamba Qwen3Next"),
    ", a state and attention": (STATE | {"mamba_d_ssm": 128}, "FalconH1"),
    ", a convolution": ({"layer_types": ["conv", "full_attention"]}, "Lfm2"),
    **{
        f", {rule}": (
            {
                "rope_parameters": SCALED | {"rope_type": rule},
                "original_max_position_embeddings": 32,
            },
            name,
        )
        for rule, name in {
            "llama3": "Llama",
            "yarn": "Qwen3",
            "dynamic": "Qwen3",
            "longrope": "Phi3",
        }.items()
    },
}
LENGTHS = [7, 100, 23, 128]
COLUMNS = "loaded", "packed", "greedy", "vLLM", "LoRA", "head", "copies"


def make(family: str, settings: dict, folder: str) -> None:
    """Writes the family's model, with the world's tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = load_tokenizer(PRESETS["world"]["model"])
    tokenizer.init_kwargs.pop("auto_map")  # it names nothing, which other families do not take
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def measure(folder: str) -> list[str]:
    """The columns of a model; where it is refused, the first alone."""
    try:
        model = load_model(folder)
    except Fault as e:
        return [str(e).partition(": ")[2]]
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    own = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(5, 675, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    # after a row's last token: the next row's first one
    following, rows = ids.roll(-1), ids.split(LENGTHS)

    def logps(model: object) -> torch.Tensor:
        places = torch.arange(len(ids))
        return forward_packed(model.train(), ids, Packing(LENGTHS), places, following, 1.0)[0]

    packed, logits = logps(model), torch.cat([own(row[None]).logits[0] for row in rows])
    alone = logits.log_softmax(-1).gather(1, following[:, None])[:, 0]

    contexts = {k: row[:90].tolist() for k, row in enumerate(rows)}
    ours = greedy(TorchEngine(model, tokenizer, ()), contexts)
    how = {"max_new_tokens": 20, "do_sample": False}
    wanted = [
        own.generate(torch.tensor([row]), **how)[0, len(row) :].tolist()
        for row in contexts.values()
    ]
    copy = fill(empty(config, torch.float32, "cpu"), model)
    export(config, model, tokenizer, f"{folder}/out", torch.float32)
    equal = [torch.equal(logps(other), packed) for other in (copy, load_model(f"{folder}/out"))]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight

    def vllm() -> str:
        engine = VllmEngine(folder, tokenizer, (), max_len=128, dtype="float32", memory=0.02)
        with contextlib.closing(engine):
            engine.load(weights(model))
            return same(greedy(engine, contexts) == ours)

    return [
        "yes",
        f"{(packed - alone).abs().max():.0e}",
        same(ours == wanted),
        or_line(vllm) if vllm_version() else "not run",
        or_line(lambda: lora.coverage(lora.add(copy, 4, 8)).partition(" of ")[0]),
        "tied" if tied else "own",
        same(all(equal)),
    ]


def greedy(engine: object, contexts: dict) -> list[list[int]]:
    return [turn.ids for turn in play_turns(engine, contexts, 20, 0.0)]


def same(equal: bool) -> str:
    return "same" if equal else "DIFFER"


def or_line(get: Callable[[], str]) -> str:
    """What it returns, or the line with which it is refused, by vLLM in words of its own."""
    try:
        return get()
    except Exception as e:
        return " ".join(str(e).split())[:200]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="names that begin so")
    only, table = parser.parse_args().only, {}
    print("| |", " | ".join(COLUMNS), "|\n|" + "---|" * (len(COLUMNS) + 1))
    for kind, (settings, families) in KINDS.items():
        for family in families.split():
            if (name := family + kind).startswith(only):
                with tempfile.TemporaryDirectory() as folder:
                    make(family, settings, folder)
                    table[name] = measure(folder)
                print(f"| {name} |", " | ".join(table[name]), "|", flush=True)
    print(json.dumps(table))


if __name__ == "__main__":
    with one_line():
        main()
