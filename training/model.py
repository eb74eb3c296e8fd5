"""The policy as Hugging Face stores it: loaded, cut into shards over the ranks (FSDP2), run on packed sequences.

A batch is one row: sequences lie one after another without padding, each with positions from 0, and attention keeps to
the sequence. Where there are several ranks, or a GPU, every rank holds a share of each parameter in float32 and
gathers a block at a time in the compute dtype.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from kernels import grpo_head, token_logprobs
from rollout import STOP

FLASH = importlib.util.find_spec("flash_attn") is not None


def packed_attention(module, query, key, value, attention_mask, scaling=None, lengths=None, **kwargs):
    """Causal attention of sequences of these `lengths`, one after another in (1, heads, T, dim) -> (1, T, heads, dim).

    Without `lengths` it is transformers' own SDPA, for generation.
    """
    if lengths is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = kwargs.get("sliding_window") or max(lengths)
    if FLASH and query.is_cuda:
        from flash_attn import flash_attn_varlen_func

        ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, dim)
        out = flash_attn_varlen_func(
            q, k, v, ends, ends, max(lengths), max(lengths), softmax_scale=scaling, causal=True,
            window_size=(window - 1, 0),
        )  # fmt: skip
        return out[None], None
    times = query.shape[1] // key.shape[1]
    gqa = {"enable_gqa": True} if times > 1 else {}
    parts = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        n = q.shape[2]
        how: dict = {"is_causal": True}
        if window < n:
            far = torch.arange(n, device=q.device)
            far = far[:, None] - far
            how = {"attn_mask": (far >= 0) & (far < window)}
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)  # no fast kernel takes mask and GQA
        parts.append(F.scaled_dot_product_attention(q, k, v, scale=scaling, **(how if window < n else how | gqa)))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def load_tokenizer(path: str):
    """The tokenizer of a policy; one line if it cannot be trained with."""
    from transformers import AutoTokenizer

    _quiet()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        sys.exit(f"--model {path}: no tokenizer can be loaded from it ({_first_line(e)}); check the path or id")
    if not tokenizer.chat_template:
        sys.exit(f"--model {path}: its tokenizer has no chat template; add one to tokenizer_config.json")
    for tag in STOP:
        ids = tokenizer(f"x {tag}", add_special_tokens=False)["input_ids"]
        if tag not in tokenizer.decode(ids, skip_special_tokens=False):
            sys.exit(f"--model {path}: its tokenizer cannot write {tag}, so no turn would end; choose another model")
    return tokenizer


def load_config(path: str):
    """The architecture of a policy, without its weights."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        sys.exit(f"--model {path}: no causal LM can be loaded from it ({_first_line(e)}); check the path or id")


def load_model(path: str):
    """A causal LM with its weights, float32 on the CPU; one line if the loss does not know its head."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    _quiet()
    AttentionInterface.register("packed", packed_attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="packed")
    except (OSError, ValueError) as e:
        sys.exit(f"--model {path}: no causal LM can be loaded from it ({_first_line(e)}); check the path or id")
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None or getattr(model.config, "final_logit_softcapping", None):
        sys.exit(f"--model {path}: its head has a bias or soft-capped logits, which the loss does not know")
    # Weights that lie unaligned in the file's memory give other last bits on the CPU than copies of them do.
    for p in model.parameters():
        p.data = p.data.clone()
    return model


def load_policy(path: str, device: str):
    """(model, tokenizer) on one device, whole."""
    tokenizer = load_tokenizer(path)
    return load_model(path).to(device), tokenizer


def skeleton(config, dtype=torch.float32):
    """The model of `config` on the meta device: shapes without memory."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("packed", packed_attention)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="packed")


def empty(config, dtype, device: str):
    """A whole model without values, for `fill`."""
    model = skeleton(config, dtype).to_empty(device=device)
    model.tie_weights()  # to_empty has made two of a weight that embedding and head share
    return model


def blocks(model) -> list[torch.nn.Module]:
    """The decoder layers: what FSDP gathers and activation checkpointing keeps, one at a time."""
    names = set(model._no_split_modules or ())
    found = [m for m in model.modules() if type(m).__name__ in names]
    return found or list(max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len))


def shard(model, device: str, *, compute=None, frozen: bool = False, offload: bool = False):
    """Cut a model from `skeleton` over all ranks, in place, with memory but without values (`fill` brings them).

    `compute`: dtype in which a block is gathered and run (None: the model's own). `frozen`: it is never trained, so
    what is gathered can go at once. `offload` keeps the shares in the CPU's memory.
    """
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    # By default FSDP would cast the log-probs that go into the loss as well.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    kwargs = dict(mesh=mesh, mp_policy=policy)
    if frozen:  # else FSDP keeps what is needed last, and first in the backward pass
        kwargs["reshard_after_forward"] = True
    if offload:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    for part in [*blocks(model), model]:  # the last: embedding, norm and head, which are needed together
        fully_shard(part, **kwargs)
        part.set_gradient_divide_factor(1.0)  # the loss has its denominator over all ranks: gradients add up
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum
    model.score = MethodType(_score, model)
    register_fsdp_forward_method(model, "score")
    return model.to_empty(device="cpu" if offload else device)


@torch.no_grad()
def fill(model, source):
    """`model` with the values of `source`, which rank 0 has whole on its CPU (None elsewhere), tensor by tensor."""
    theirs = dict(source.named_parameters()) | dict(source.named_buffers()) if source else {}
    for name, mine in [*model.named_parameters(), *model.named_buffers()]:
        sharded = isinstance(mine, DTensor)
        device = mine.device_mesh.device_type if sharded else mine.device
        if source:
            full = theirs[name].to(device, mine.dtype).contiguous()
        else:
            full = torch.empty(mine.shape, dtype=mine.dtype, device=device)
        if dist.is_initialized():
            dist.broadcast(full, 0)
        if sharded:
            full = distribute_tensor(full, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
            mine = mine.to_local()
        mine.copy_(full)
    return model


def weights(model) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face's name, whole tensor) of every parameter, one at a time; all ranks must ask together."""
    for name, p in model.named_parameters():
        yield name, (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def export(config, named: Iterable[tuple[str, torch.Tensor]], tokenizer, path: Path | None) -> None:
    """Write a plain Hugging Face directory, in the dtype of `config`; a rank without a path only takes part."""
    dtype = config.dtype or torch.float32
    state = {}
    for name, tensor in named:
        if path:
            state[name] = tensor.to("cpu", dtype, copy=True)
    if path:
        model = skeleton(config, dtype)
        model.load_state_dict(state, assign=True, strict=False)
        model.tie_weights()
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)


def score(model, *args, **loss):
    """`_score`; of a sharded model by the method through which FSDP gathers its parameters."""
    return model.score(*args, **loss) if hasattr(model, "score") else _score(model, *args, **loss)


def _score(model, ids, lengths: list[int], rows, targets, temperature, **loss):
    """The head's output (`grpo_head`, or `token_logprobs` without `loss`) for the tokens predicted at `rows`.

    ids (T,): sequences of these `lengths`, packed; rows (N,): positions in them; targets (N,).
    """
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
    hidden = model.base_model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, lengths=lengths
    ).last_hidden_state[0, rows]  # (N, H)
    weight = model.get_output_embeddings().weight
    if loss:
        return grpo_head(hidden, weight, targets, temperature=temperature, **loss)
    return token_logprobs(hidden, weight, targets, temperature)


def _quiet() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _first_line(e: Exception) -> str:
    return str(e).splitlines()[0]
