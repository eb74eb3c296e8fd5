"""Which families of models work: tiny ones of random weights, loaded or refused; a table, and its figures as JSON.

    python -m extras.bench.models                   # minutes; with .venv-vllm's Python vLLM is asked, too

Sequences are longer than sliding windows (16) and than the lengths from which scaled positions extend (32).
"""

import json
import tempfile

import torch
import transformers
from transformers import AutoModelForCausalLM

from config import PRESETS
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine, vllm_version
from extras.bench.harness import parser_of
from models import lora
from models.model import empty, export, fill, load_config, load_model, load_tokenizer, score, weights
from models.packing import Packing
from plumbing.faults import Fault, one_line

SHAPE = dict(
    vocab_size=675, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0,
    bos_token_id=1, eos_token_id=4,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_group=1,
           topk_group=1, n_routed_experts=4, first_k_dense_replace=1)  # fmt: skip
STATE = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 16, long_factor=[4.0] * 16)
SCALED = dict(factor=4.0, original_max_position_embeddings=32, rope_theta=1e4)
LLAMA_3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
KINDS = {  # settings -> transformers' classes
    "": (
        {},
        "Llama Qwen2 Qwen3 Gemma Phi Phi3 Olmo2 Granite Cohere Glm4 StableLm SmolLM3 GPT2 GPTNeoX OPT",
    ),
    ", windows": (WINDOW, "Qwen2 Phi3 Mistral Ministral Gemma2 Gemma3Text Cohere2 Olmo3 Starcoder2 Exaone4"),
    ", experts": (EXPERTS, "Mixtral Qwen2Moe Qwen3Moe Olmoe GraniteMoe GptOss"),
    ", latent attention": (EXPERTS | MLA, "DeepseekV3"),
    ", a state": (EXPERTS | STATE, "Mamba Bamba Jamba Qwen3Next"),
    ", a convolution": ({"layer_types": ["conv", "full_attention"]}, "Lfm2"),
    ", a state beside attention": (STATE | {"mamba_d_ssm": 128}, "FalconH1"),
    ", llama3": ({"rope_parameters": SCALED | LLAMA_3}, "Llama"),
    ", yarn": ({"rope_parameters": SCALED | {"rope_type": "yarn"}}, "Qwen3"),
    ", dynamic": ({"rope_parameters": SCALED | {"rope_type": "dynamic"}}, "Qwen3"),
    ", longrope": ({"rope_parameters": SCALED | LONG, "original_max_position_embeddings": 32}, "Phi3"),
}
FAMILIES = {f"{name}{kind}": (name, more) for kind, (more, names) in KINDS.items() for name in names.split()}
LENGTHS = [7, 100, 23, 128]
COLUMNS = "loaded", "packed", "trained", "greedy", "vLLM", "LoRA", "head", "copies"


def make(name: str, folder: str) -> None:
    """Writes the family's model, with the world's tokenizer."""
    family, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = load_tokenizer(PRESETS["world"]["model"])
    tokenizer.init_kwargs.pop("auto_map")  # it names nothing, and other families do not take it
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def logps(model: object, rows: list[torch.Tensor]) -> torch.Tensor:
    """Log-probs of the rows' tokens, packed."""
    lengths = [len(row) for row in rows]
    last = torch.tensor(lengths).cumsum(0) - 1
    where = torch.tensor([k for k in range(sum(lengths)) if k not in last])
    ids = torch.cat(rows)
    return score(model, ids, Packing(lengths), where, ids[where + 1], 1.0)[0]


def greedy(engine: object, contexts: dict) -> list[list[int]]:
    """A greedy turn of 20 tokens for each context."""
    engine.begin(0)
    turns = list(engine.generate(contexts, 20, 0.0))
    while len(turns) < len(contexts):
        turns += engine.generate({}, 20, 0.0)
    return [turn.ids for turn in sorted(turns)]


def measure(name: str, folder: str) -> dict:
    """The columns of a family; where it is refused, the first alone."""
    make(name, folder)
    try:
        model = load_model(folder)
    except Fault as e:
        return {"loaded": str(e).partition(": ")[2]}
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = [torch.randint(5, 675, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with torch.no_grad():
        alone = [own(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0] for row in rows]
    packed, trained = logps(model, rows), logps(model.train(), rows)
    model.eval()

    tokenizer, config = load_tokenizer(folder), load_config(folder)
    contexts = {k: row[:90].tolist() for k, row in enumerate(rows)}
    ours, ends = greedy(TorchEngine(model, tokenizer, ()), contexts), {"max_new_tokens": 20, "do_sample": False}
    theirs = [own.generate(torch.tensor([ids]), **ends)[0, len(ids) :].tolist() for ids in contexts.values()]
    copy = fill(empty(config, torch.float32, "cpu"), model)
    export(config, model, tokenizer, f"{folder}/out", torch.float32)
    again = load_model(f"{folder}/out")
    same = [torch.equal(logps(other, rows), packed) for other in (copy, again)]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    vllm = asked(folder, model, tokenizer, contexts, ours)
    try:
        adapters = lora.coverage(lora.add(copy, 4, 8)).partition(" of ")[0]
    except Fault as e:
        adapters = str(e)
    return {
        "loaded": "yes", "packed": f"{(packed - torch.cat(alone)).abs().max():.0e}",
        "trained": f"{(trained - packed).abs().max():.0e}", "greedy": "same" if ours == theirs else "differ",
        "vLLM": vllm, "LoRA": adapters, "head": "tied" if tied else "own",
        "copies": "same" if all(same) else "differ",
    }  # fmt: skip


def asked(folder: str, model: object, tokenizer: object, contexts: dict, ours: list) -> str:
    """Whether vLLM says what the torch engine says, or the line with which it starts not."""
    if not vllm_version():
        return "not run"
    engine = VllmEngine(folder, tokenizer, (), max_len=128, dtype="float32", memory=0.02, seed=0)
    try:
        engine.load(weights(model))
        return "same" if greedy(engine, contexts) == ours else "differ"
    except Fault as e:
        return str(e)
    finally:
        engine.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="names that begin so")
    only, rows = parser.parse_args().only, {}
    print("| |", " | ".join(COLUMNS), "|\n|" + "---|" * (len(COLUMNS) + 1))
    for name in FAMILIES:
        if name.startswith(only):
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = measure(name, folder)
            print(f"| {name} |", " | ".join(rows[name].get(column, "") for column in COLUMNS), "|", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    with one_line():
        main()
