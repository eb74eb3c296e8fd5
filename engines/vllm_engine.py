"""vLLM inside the training process.

Every rank has its own `VllmEngine`. It receives the policy's weights tensor by tensor; the first
time it proves that it computes with them. Turns may be added while others run (`lockstep` is False).
It relies on internals of vLLM: reloading, packed weights (VERSION in engines/choose.py).
"""

import gc
import io
import itertools
import os
import sys
import warnings
from contextlib import redirect_stderr
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from engines import Contexts, FinishedTurn, Turns, watch_ends
from models.model import Weights
from plumbing.faults import EngineFault
from plumbing.stop import count_ranks

# rows that vLLM runs at once on a GPU; its default of 128 would queue a rank's 320 in 2.5 waves
MAX_SEQS = 512
MAX_BATCHED_TOKENS = 16384  # tokens of one of its forward passes on a GPU (its default: 2,048)
PROBES = 8  # rows and columns of a weight that `Proof` compares


class VllmEngine:
    """An Engine: vLLM in this process; its weights are uninitialized until `load`.

    `path`: directory or id of the policy; `stop`: strings that end a turn, as `turn_ends` do;
    `how`: as `settings`. Under torchrun all ranks construct their engines together, and call `load`
    together.
    """

    max_rows = sys.maxsize  # vLLM schedules rows by its memory
    lockstep = False

    def __init__(self, path: str, tokenizer: Any, stop: tuple[str, ...], **how: Any):
        engine_args = settings(path, **how)
        from vllm import EngineArgs
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.executor.abstract import Executor

        # vLLM's CPU worker replaces it for the whole process
        set_num_threads = torch.set_num_threads
        self.had_group = dist.is_initialized()
        with redirect_stderr(io.StringIO()):  # bars, a line for each graph
            vllm_config = EngineArgs(**engine_args).create_engine_config()
            self.core = InprocClient(vllm_config, Executor.get_class(vllm_config), log_stats=False)
        torch.set_num_threads = set_num_threads
        self.dtype, self.cuda = vllm_config.model_config.dtype, torch.cuda.is_available()
        self.ended = watch_ends(tokenizer, stop)
        self.requests = itertools.count()
        self.turns: dict[str, FinishedTurn] = {}  # those that are not finished yet, by request
        self.proven = False  # whether weights have been found to arrive
        self.asleep = 0  # bytes that it gives back asleep: torch goes on counting them
        self.reset(0)

    def reset(self, seed: int) -> None:
        """As Engine. On CUDA a row draws by `seed` and its context alone, though the rows that run
        together round its log-probs, and so may change a draw; on the CPU they also share its
        random numbers."""
        self.seed = seed
        # rows have no seeds of their own there (see `generate`), so ranks must differ
        if not self.cuda:
            torch.manual_seed(seed + (dist.get_rank() if self.had_group else 0))
        self.core.abort_requests(list(self.turns))
        self.turns.clear()

    def generate(self, contexts: Contexts, max_new: int, temperature: float) -> Turns:
        """As Engine; a call advances all running turns by one token.

        vLLM's core alone takes part. Its frontend would turn every token into text to look for stop
        strings, which took a third of the rollouts' time (docs/LOG.md, 2026-11-27).
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        for key, ids in contexts.items():
            # makes samples independent of timing; vLLM's CPU build crashes on it in chunked
            # prefills
            seed = hash((self.seed, key, len(ids))) % 2**63 if self.cuda else None
            params = SamplingParams(
                max_tokens=max_new,
                temperature=temperature,
                seed=seed,
                logprobs=0,  # the sampled token's only
                detokenize=False,
                ignore_eos=True,  # self.ended knows the policy's own ends
            )
            request = EngineCoreRequest(
                request_id=str(next(self.requests)),
                prompt_token_ids=ids,
                sampling_params=params,
                arrival_time=0,
                mm_features=None,
                pooling_params=None,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.turns[request.request_id] = FinishedTurn(key, [], [])
            self.core.add_request(request)
        if not self.turns:
            return

        # Some of the tokens end their turns, which vLLM must be told.
        finished, stopped = [], []
        for output in self.core.get_output().outputs:
            turn = self.turns.get(output.request_id)
            if turn is None:  # forgotten
                continue
            turn.ids.extend(output.new_token_ids)
            turn.logps.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.finished or self.ended(turn.ids):
                finished.append(self.turns.pop(output.request_id))
                if not output.finished:
                    stopped.append(output.request_id)
        self.core.abort_requests(stopped)
        yield from finished

    def sleep(self) -> None:
        """As Engine: frees weights and KV cache on a GPU; the CPU has no sleep mode."""
        self.reset(self.seed)
        if self.cuda:
            from vllm.device_allocator.cumem import CuMemAllocator

            self.asleep = CuMemAllocator.get_instance().get_current_usage()
        self.core.sleep(level=2)

    def load(self, weights: Weights) -> None:
        """As Engine; a tied head comes with the embedding.

        At its first call it raises EngineFault, naming the first of them, unless the engine's layers
        compute with all these weights.
        """
        self.reset(self.seed)
        asleep = self.core.is_sleeping()
        if asleep:
            self.wake("weights")
        [model] = self.core.collective_rpc("get_model")
        with torch.no_grad():
            proof = Proof(self.dtype)
            sent = weights if self.proven else proof.record(weights)
            self.core.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})
            rebuild_heads(model)
        if asleep:
            self.wake("kv_cache")
        if not self.core.reset_prefix_cache():
            raise EngineFault("vLLM could not drop the prefix cache of the old weights")
        if not self.proven:
            proof.check(model)
        self.proven = True

    def wake(self, part: str) -> None:
        """Takes back the memory of "weights" or "kv_cache"; raises torch's OutOfMemoryError where
        it is gone."""
        try:
            self.core.wake_up([part])
        except RuntimeError as e:  # of vLLM's own allocator
            if "out of memory" not in str(e):
                raise
            raise torch.OutOfMemoryError(f"vLLM's {part}: {e}") from None

    def close(self) -> None:
        from vllm.distributed import parallel_state

        if self.had_group:  # vLLM would destroy the trainer's process group along with its own
            parallel_state.destroy_distributed_environment = lambda: None
        self.core.shutdown()
        del self.core
        gc.collect()


def settings(path: str, *, max_len: int, dtype: str, memory: float, rows: int = MAX_SEQS) -> dict:
    """Returns vLLM's arguments for an engine in this process; call it before vllm is imported (it
    sets environment).

    `max_len`: tokens of the longest context and its turn; `memory`: share of the device's memory
    for vLLM; `rows`: how many will run at once, as far as is known.
    """
    cuda = torch.cuda.is_available()
    # FlashInfer's sampler, which needs a compiler on the machine, takes no rows that have a seed
    # and want log-probs.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        # the trainer's process group is not bound to a device
        VLLM_DISTRIBUTED_USE_SPLIT_GROUP="0",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM's own
    args = {
        "model": path,
        "dtype": dtype,
        "max_model_len": max_len,
        "gpu_memory_utilization": memory,
        "load_format": "dummy",  # `load` brings the weights
        "hf_overrides": {"head_dtype": "float32"},  # float32 logits, like the trainer's
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "enable_prefix_caching": True,
        "enable_sleep_mode": cuda,
        "enforce_eager": not cuda,
    }
    if cuda:
        args |= {
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "cudagraph_capture_sizes": graph_sizes(min(rows, MAX_SEQS)),
        }
    else:  # vLLM would take the whole process's memory, the trainer's included, off this share
        args["kv_cache_memory_bytes"] = int(memory * psutil.virtual_memory().total)
    if count_ranks() > 1:
        args["distributed_executor_backend"] = "external_launcher"
    return args


def graph_sizes(rows: int) -> list[int]:
    """Returns for how many rows vLLM captures a CUDA graph; others are padded to the next, by half
    at most. It would capture 51, twice."""
    sizes = [1, 2, 3]
    while sizes[-1] < rows:
        sizes.append(2 * sizes[-2])
    return sizes


def rebuild_heads(model: Any) -> None:
    """Packs the head's weights again after a load.

    vLLM 0.32 does not when the head is tied to the embedding, so on the CPU its packed copy would
    keep the old weights. A GPU packs nothing, and this does nothing.
    """
    # Cohere has no separate head
    head = model.lm_head if hasattr(model, "lm_head") else model.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


class Proof:
    """Compares the weights that an engine's layers compute with to those that it was sent.

    Unit vectors pushed through a layer return columns of its weight without rounding, whatever the
    kernel; so even in bfloat16, one small update makes a difference. Comparing parameters would
    prove nothing: kernels may compute with packed copies.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        # name -> [some columns, some rows] of a matrix, or [a vector]
        self.sent: dict[str, list[Tensor]] = {}

    def record(self, named: Weights) -> Weights:
        """Yields the weights on their way to the engine and remembers what `check` will compare."""
        for name, tensor in named:
            if tensor.ndim == 2:
                parts = [tensor[:, probed(tensor.shape[1])].T, tensor[probed(tensor.shape[0])]]
            else:
                parts = [torch.atleast_1d(tensor.clone())]
            self.sent[name] = [part.to(self.dtype).float() for part in parts]
            yield name, tensor

    @torch.inference_mode()
    def check(self, model: Any) -> None:
        """Raises EngineFault for the first layer that differs, was not sent, or was not found."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        device = next(model.parameters()).device
        # {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        packed = getattr(model, "packed_modules_mapping", {})
        unproven, head = dict.fromkeys(self.sent), "lm_head.weight"
        for path, module in model.named_modules():
            parent, _, last = path.rpartition(".")
            parameters = module.named_parameters(recurse=False)
            for kind, parameter in itertools.chain(parameters, module.named_buffers(recurse=False)):
                whole = f"{path}.{kind}" in self.sent  # some families have packed it themselves
                parts = [last] if whole else packed.get(last, [last])
                names = [f"{parent}.{part}.{kind}".lstrip(".") for part in parts]
                absent = {*names} - self.sent.keys()
                # a missing bias is no fault: vLLM creates biases of 0
                if absent and kind == "weight" and not isinstance(module, ParallelLMHead):
                    raise EngineFault(f"{min(absent)} was not sent to the engine")
                if absent or isinstance(module, ParallelLMHead):
                    continue
                wanted = [self.sent[name][0] for name in names]
                if isinstance(module, LinearBase) and kind == "weight":
                    got = module.quant_method.apply(
                        module, unit_vectors(module.input_size, self.dtype, device), None
                    )
                elif isinstance(module, VocabParallelEmbedding):
                    got = module(probed(wanted[0].shape[1]).to(device))
                    wanted = [self.sent[names[0]][1]]
                    head = head if head in self.sent else names[0]
                else:
                    got = torch.atleast_1d(parameter)
                sizes = [want.shape[-1] for want in wanted]
                if got.ndim == wanted[0].ndim and got.shape[-1] == sum(sizes):
                    for name, want, part in zip(names, wanted, got.split(sizes, -1), strict=True):
                        require_equal(name, want, part)
                        unproven.pop(name)
        if head in self.sent:
            columns, rows = self.sent[head]
            logits = model.compute_logits(unit_vectors(rows.shape[1], self.dtype, device))
            require_equal("lm_head.weight", columns, logits)
            unproven.pop(head, None)
        for name in unproven:  # renamed, split or packed in an unknown way
            raise EngineFault(f"{name} was sent and not found in the engine; take --engine torch")


def probed(n: int) -> Tensor:
    """Returns PROBES of the indices 0 to n - 1, evenly spaced, first and last included."""
    return torch.linspace(0, n - 1, PROBES).round().long()


def unit_vectors(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the unit vectors (PROBES, n) of the `probed` indices."""
    return torch.nn.functional.one_hot(probed(n), n).to(device, dtype)


def require_equal(name: str, want: Tensor, got: Tensor) -> None:
    """Raises EngineFault unless `got` is `want` up to the rounding of a float32 product."""
    want, got = want.to(got.device).float(), got.float()
    off = (got - want).abs().max().item()
    if not off <= 1e-6 * want.abs().max().item():  # a NaN differs, too
        raise EngineFault(
            f"{name} in the engine is not what was sent: {off:.2g} off, largest {want.abs().max():.2g}"
        )
