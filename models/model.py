"""The policy's Hugging Face model: load it, fill it with weights, score packed sequences with it."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from kernels import grpo_head, head_logits, token_logprobs
from models.packing import Packing, packed_attention, prefer_onednn
from plumbing.chat import turn_ends
from plumbing.faults import Fault
from plumbing.hub import check_model

Weights = Iterator[tuple[str, Tensor]]  # (Hugging Face name, whole tensor)
PART = 2**18  # weights that are dithered at a time: they stay in a CPU's cache


@contextmanager
def loading(path: str, what: str) -> Iterator[None]:
    """Turns what transformers raises inside into a Fault: a damaged directory can raise anything."""
    try:
        yield
    except Exception as e:
        said = " ".join(str(e).split())[:200]
        raise Fault(
            f"--model {path}: no {what} can be loaded from it ({type(e).__name__}: {said}); check the path or id"
        ) from e


def load_tokenizer(path: str) -> Any:
    """Returns the tokenizer of a policy; raises Fault where there is none, or no chat template."""
    from transformers import AutoTokenizer

    load_config(path)
    with loading(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise Fault(
            f"--model {path}: its tokenizer has no chat template; add one to tokenizer_config.json"
        )
    turn_ends(tokenizer)  # raises Fault where the template fails
    return tokenizer


def load_config(path: str, longest: int = 0) -> Any:
    """Returns the Hugging Face config of a policy, without its weights; raises Fault where there is
    none, or none that can be trained on sequences of `longest` tokens.

    It has no dropout and no noise: the policy in training is the one that sampled.
    """
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_model(path)
    with loading(path, "causal LM"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None):  # an export would carry it, too
        raise Fault(f"--model {path}: its weights are quantized; choose the model in bfloat16")
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most and longest > most:
        raise Fault(
            f"--model {path}: it takes {most} tokens at most; lower --max_prompt + --max_response, now {longest}"
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, float) and re.search("drop|jitter", name):
            setattr(text, name, 0.0)
    return config


def speed_up(model: Any) -> None:
    """Lets oneDNN compute a model's linear layers where it is faster, in place."""
    if prefer_onednn():
        from models.linear import Linear

        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def load_model(path: str, longest: int = 0) -> Any:
    """Returns a causal LM with its weights, float32 on the CPU; raises Fault if `forward_packed`
    would be wrong for it.

    `longest`: tokens of the longest sequence; 0: as many as the model takes.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("packed", packed_attention)
    config = load_config(path, longest)
    with loading(path, "causal LM"):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation="packed",
            output_loading_info=True,
            trust_remote_code=False,
        )
    # transformers fills what is missing with random numbers
    for what in ("missing", "unexpected"):
        if names := loaded[f"{what}_keys"]:
            raise Fault(
                f"--model {path}: weights are {what} ({len(names)}, {min(names)}); use a complete copy"
            )
    # Memory-mapped weights may be unaligned, and the CPU then rounds matmuls differently. Copy
    # them, so that resumed runs are bit-identical.
    for p in model.parameters():
        p.data = p.data.clone()
    speed_up(model)
    longest = longest or getattr(config.get_text_config(), "max_position_embeddings", 0) or 1
    with loading(path, "forward pass that can be trained"):
        try:
            reason = probe(model, longest)
        except Exception:
            if not torch.cuda.is_available():
                raise
            # some layers' kernels know no CPU and no float32
            model.set_attn_implementation("packed")
            card = copy.deepcopy(model).to("cuda", torch.bfloat16)
            reason = probe(card, longest)
            model.row_kind = card.row_kind
    if reason:
        raise Fault(f"--model {path}: {reason}")
    model.forward_packed = MethodType(forward_packed, model)
    return model


@torch.no_grad()
def probe(model: Any, longest: int) -> str:
    """Finds out what a row of `forward_packed` may hold, `model.row_kind`: "shared": sequences that
    share prompts; "whole": sequences that do not (layers other than attention are told where each
    begins); "single": one sequence (they cannot be told). Returns why it would be wrong all the same,
    "" if it is right.

    The model's own logits of two short sequences, each alone, have to be its head's weight times its
    hidden states; and these have to be the same in training, in a row with the last token of a
    sequence of `longest`.
    """
    head, states = model.get_output_embeddings(), list[Tensor]()

    def magnify(module: Any, args: Any, output: Any) -> Any:
        """Adds the same states at a size that makes logits of up to 1000: a soft cap hardly bends
        small ones."""
        h = output.last_hidden_state
        states.append(h[0])
        output.last_hidden_state = torch.cat([h, 1000 / head(h).abs().max() * h], 1)
        return output

    # alone, with eager attention, every family's reference: it knows soft caps and sinks
    last = len(model.get_input_embeddings().weight) - 1
    device = head.weight.device
    sequences = torch.linspace(0, last, 11, device=device).long().split([4, 7])
    model.set_attn_implementation("eager")
    with model.base_model.register_forward_hook(magnify):
        logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    model.set_attn_implementation("packed")
    for h, own in zip(states, logits, strict=True):
        small, large = own.chunk(2)
        wanted = h @ head.weight.T
        if not (_close(small, wanted) and _close(large, 1000 / wanted.abs().max() * wanted)):
            return (
                "its logits are not its hidden states times its head's weight, as the loss takes them:"
                " they have a constant, a bias or a soft cap, or are not finite"
            )

    # in training: both in a row, unmarked and marked; each in a row of its own; row_kind is set to
    # each in turn
    model.train()
    for model.row_kind, rows in (
        ("shared", [sequences]),
        ("whole", [sequences]),
        ("single", zip(sequences)),
    ):
        found = []
        try:
            for row in rows:
                packing = Packing([*map(len, row), 1], device=device)
                packing.positions[-1] = longest - 1
                found.append(hidden_states(model, torch.cat([*row, row[0][:1]]), packing)[:-1])
        except ValueError:
            if model.row_kind == "whole":  # a layer cannot keep marked sequences apart
                continue
            raise
        if _close(torch.cat(found), torch.cat(states)):
            model.eval()
            return ""
    return (
        f"training would change its hidden states: {model.config.model_type} has more than causal"
        " attention, or positions that depend on the longest sequence"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    """Returns whether a equals b to 0.1 % of the largest entry, in bfloat16 5 %; False where either
    has a NaN."""
    off = 1e-3 if a.dtype == torch.float32 else 0.05
    return bool((a - b).abs().max() <= off * b.abs().max())


def make_head(model: Any) -> Callable[[Tensor], Tensor]:
    """Returns the head for sampling: hidden (N, d) -> float32 logits (N, V).

    Rounded to bf16, log-probs would be off by 0.012 nat on average. A GPU sums bf16 products in
    float32; elsewhere the weight itself is widened, here once and not for every token.
    """
    weight = model.get_output_embeddings().weight.detach()
    return partial(head_logits, weight=weight if weight.is_cuda else weight.float())


def skeleton(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the model of `config` on the meta device: shapes without memory."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("packed", packed_attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # it writes dtype into the config that it is given
            dtype=dtype,
            attn_implementation="packed",
            trust_remote_code=False,
        )
    speed_up(model)
    model.row_kind = "shared"  # until `fill` knows
    return model


def empty(config: Any, dtype: torch.dtype, device: str) -> Any:
    """Returns a whole model with uninitialized weights, for `fill`."""
    return materialize(skeleton(config, dtype), device)


def materialize(model: Any, device: str) -> Any:
    """Gives a model from `skeleton` memory on the device."""
    model.to_empty(device=device)
    model.tie_weights()  # to_empty separates tied weights
    return model


def defer_sync(model: Any, held: bool) -> None:
    """Lets the next backward pass leave blocks gathered and add up their gradients unreduced, in
    float32. The first pass that is not held reduces the sum and frees the blocks."""
    model.set_requires_gradient_sync(not held)
    model.set_reshard_after_backward(not held)


def reshard(model: Any) -> None:
    """Frees what forward passes without a backward pass have left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def dither(W: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a float32 tensor; entries that bfloat16 holds exactly are moved, evenly over all that
    rounds to them.

    A published model lies on bfloat16's grid, whose spacing is a hundred times a step of AdamW or
    more. Computed in bfloat16 it would not move until its steps have added up to half of that.
    Dithered, it is the same policy to the bit, and each step takes its share of the weights to the
    next value: on average, all of it takes effect. A model that was published in float32 needs
    none. In one published in float16, whose grid is eight times finer, only the eighth that
    bfloat16 also holds is moved.
    """
    dithered = W.clone()
    for part in dithered.view(-1).split(PART):
        # whose upper half is bfloat16; a carry to the next value is right, too
        bits = part.view(torch.int32)
        noise = torch.empty_like(bits).random_(1 - 2**15, 2**15, generator=generator)
        bits += noise.mul_((bits & 0xFFFF == 0) & (part != 0))
    return dithered


@torch.no_grad()
def fill(model: Any, source: Any, seed: int | None = None) -> Any:
    """Copies the weights of `source` into `model`, one tensor at a time; returns `model`.

    Rank 0 has `source`, whole and on its CPU; the other ranks pass None. With a `seed` weights are
    dithered, on the device of `model`.
    """
    rows = [source and source.row_kind]
    if dist.is_initialized():
        dist.broadcast_object_list(rows, 0)
    [model.row_kind] = rows
    values = dict(source.named_parameters()) | dict(source.named_buffers()) if source else {}
    generator: torch.Generator | None = None
    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        sharded = isinstance(target, DTensor)
        device = target.device_mesh.device_type if sharded else target.device
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
        if source:
            full.copy_(values[name])
        if source and seed is not None and isinstance(target, torch.nn.Parameter):
            generator = generator or torch.Generator(device).manual_seed(seed)
            full = dither(full, generator)
        if dist.is_initialized():
            dist.broadcast(full, 0)
        if sharded:
            full = distribute_tensor(
                full, target.device_mesh, target.placements, src_data_rank=None
            ).to_local()
            target = target.to_local()
        target.copy_(full)
    return model


@torch.no_grad()
def weights(model: Any) -> Weights:
    """Yields (Hugging Face name, whole tensor) of the policy as it computes, adapters merged into
    their weights, and of the buffers that are weights, too.

    One tensor at a time; all ranks must iterate together.
    """
    reshard(model)  # what is gathered is in bfloat16
    adapted = adapted_layers(model)
    for name, p in named_weights(model):
        if layer := adapted.get(name):
            yield name, layer.merge(*map(whole, (p, layer.lora_A, layer.lora_B)))
        elif not is_adapter(name):
            yield name, whole(p)


def is_adapter(name: str) -> bool:
    """Returns whether this is the name of an A or a B."""
    return ".lora_" in name


def adapted_layers(model: Any) -> dict[str, Any]:
    """Returns the layers with adapters (models/lora.py), by the names of their weights."""
    return {
        f"{name}.weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")
    }


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Makes a policy compute as its first version, which it does exactly; a model without adapters
    stays as it is."""
    for layer in adapted_layers(model).values():
        layer.off = True
    try:
        yield
    finally:
        for layer in adapted_layers(model).values():
            layer.off = False


def named_weights(model: Any) -> Weights:
    """Yields what a model's files hold, by name: parameters, of tied ones the first, and buffers."""
    kept = model.state_dict().keys()
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def export(
    config: Any, model: Any, tokenizer: Any, path: Path | None, computed: torch.dtype
) -> None:
    """Writes a plain Hugging Face directory in the dtype of `config`, or in a wider one in which it
    was `computed`.

    All ranks call this together; only the one with a `path` writes.
    """
    # bfloat16 has no room for the small steps of a training in float32: what is written would be
    # another policy.
    dtype = torch.promote_types(config.dtype or torch.float32, computed)
    plain = skeleton(config, dtype)
    state, described = {}, dict(plain.named_parameters())
    for name, tensor in weights(model):
        if path:
            state[name] = tensor.to("cpu", described.get(name, tensor).dtype, copy=True)
    if path:
        plain.generation_config.eos_token_id = list(turn_ends(tokenizer))
        plain.save_pretrained(path, state_dict=state)
        tokenizer.save_pretrained(path)


def forward_packed(
    model: Any,
    ids: Tensor,
    packing: Packing,
    predicting: Tensor,
    targets: Tensor,
    temperature: float,
    **terms: Any,
) -> Any:
    """Returns `grpo_head`'s result for these `terms`; without them, `token_logprobs`'.

    ids (T,): the row of a `packing`; predicting (N,): where it has the tokens whose next ones,
    targets (N,), are scored.
    """
    hidden = hidden_states(model, ids, packing)[predicting]  # (N, H)
    weight = model.get_output_embeddings().weight
    if terms:
        return grpo_head(hidden, weight, targets, temperature=temperature, **terms)
    return token_logprobs(hidden, weight, targets, temperature)


def hidden_states(model: Any, ids: Tensor, packing: Packing) -> Tensor:
    """Returns the last hidden states (T, H) of a row ids (T,)."""
    marks = {}  # where sequences begin, for layers that are no attention
    if model.row_kind == "whole":
        sequence_of = (packing.positions == 0).cumsum(0, dtype=torch.int32)
        marks = {"cu_seq_lens_q": packing.query_ends, "seq_idx": sequence_of[None]}
    out = model.base_model(
        input_ids=ids[None],
        position_ids=packing.positions[None],
        use_cache=False,
        packing=packing,
        **marks,
    )
    return out.last_hidden_state[0]
