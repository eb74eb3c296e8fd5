"""Generation by one or more `vllm serve`, on this machine or others.

    VLLM_URLS=http://a:8000,http://b:8000 python inspo.py --engine extras.engines.vllm_server:VllmServer ...

Turns go to vLLM's endpoint for token ids; weights reach the servers over NCCL, with vLLM's weight
transfer. Their layers are out of reach; all that can be seen of a load is that a server's answers
change.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, repeat
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from config import Config
from engines import Contexts, FinishedTurn, Turns
from engines.choose import VERSION
from engines.vllm_engine import probed
from extras.engines import RemoteEngine
from models.model import Weights, load_config, named_weights, skeleton
from plumbing.chat import turn_ends
from plumbing.client import Client
from plumbing.faults import EngineFault, Fault, Outage
from plumbing.outside import join_url, without_secrets

# Mean change of a weight after which a server that answers as before has not taken it: in bfloat16
# 1e-8 shows (docs/LOG.md).
SHOWS = 1e-5


class VllmServer(RemoteEngine):
    """An Engine: one or more `vllm serve`, and the connection that brings them the weights.

    `urls`: the servers, separated by commas (VLLM_URLS, where it is empty); a row stays with one
    server, which has cached its context. Every rank constructs its own and calls `load` together
    with the others; rank 0 sends.
    Raises Fault with the command to start a server that is unsuitable, Outage when one stops
    answering, EngineFault when one was restarted.
    """

    retries, timeout = 4, 600.0  # of a request; seconds to wait for its answer
    backend = "nccl"

    def __init__(self, cfg: Config, tokenizer: Any, stop: tuple[str, ...], urls: str = ""):
        urls = urls or os.environ.get("VLLM_URLS", "")
        if not urls:
            raise Fault("VLLM_URLS: give the servers, as http://a:8000,http://b:8000")
        self.model = cfg.model
        self.urls = [join_url(url) for url in urls.split(",")]
        self.where = without_secrets(",".join(self.urls))
        self.tokenizer, self.stop, self.loads = tokenizer, stop, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.clients = {url: Client(url, self.timeout, self.retries) for url in self.urls}
        self.once = {url: Client(url, self.timeout, 0) for url in self.urls}
        configs = [self.inspect(url, cfg.longest) for url in self.urls]
        super().__init__(sum(config["scheduler_config"]["max_num_seqs"] for config in configs))
        parallel = [config["parallel_config"] for config in configs]
        self.workers = [of["world_size"] * of["data_parallel_size"] for of in parallel]
        self.source = WeightSource(
            cfg.model, getattr(torch, configs[0]["model_config"]["dtype"].removeprefix("torch."))
        )
        self.sender = self.connect()
        # What the servers said at first, or when they last said anything else, and a sample of the
        # weights then.
        self.answers = self.probe()
        self.known: Tensor | None = None

    def inspect(self, url: str, max_len: int) -> dict:
        """Returns a server's configuration; raises Fault with the command that starts a suitable
        one."""
        place = urlsplit(url)
        command = (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self.model} --host {place.hostname} --port {place.port} "
            f"--dtype bfloat16 --max-model-len {max_len} --logprobs-mode processed_logprobs --enable-scale-out "
            f"""--hf-overrides '{{"head_dtype": "float32"}}' """
            f"""--weight-transfer-config '{{"backend": "{self.backend}"}}'"""
        )
        try:
            version = self.request(url, "/version")["version"]
            if not version.startswith(f"{VERSION}."):
                raise Outage(f"{url} is vLLM {version}, this is written for {VERSION}")
            config = self.request(url, "/server_info?config_format=json")["vllm_config"]
            longest = config["model_config"]["max_model_len"]
            mode = config["model_config"]["logprobs_mode"]
            backend = (config["weight_transfer_config"] or {}).get("backend")
            if longest < max_len:
                raise Outage(f"{url} takes {longest} tokens, {max_len} are needed")
            if mode != "processed_logprobs":
                raise Outage(f"{url} has --logprobs-mode {mode}, which leaves the temperature out")
            if backend != self.backend:
                raise Outage(f"{url} has the weight transfer {backend}, not {self.backend}")
            self.request(url, "/resume", {})  # a killed run may have left it paused
            self.generate_turn(0, url, [self.tokenizer.eos_token_id], sampling(self, 1, 1.0))
        except Outage as e:
            raise Fault(without_secrets(f"VLLM_URLS: {e}; start it with: {command}")) from e
        return config

    def connect(self) -> Any:
        """Returns vLLM's sender of weights, once trainer and servers have met at a free port of
        this machine."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        addresses = []  # this machine's, on the routes to the servers
        for url in self.urls:
            with socket.socket(type=socket.SOCK_DGRAM) as s:  # UDP: connecting sends nothing
                s.connect((urlsplit(url).hostname, 9))
                addresses.append(s.getsockname()[0])
        # loopback only if all servers are on this machine
        address = min(addresses, key=lambda a: a.startswith("127."))
        with socket.socket() as s:
            s.bind((address, 0))
            port = s.getsockname()[1]
        info = self.transfer_info()(
            rank=self.rank,
            master_address=address,
            master_port=port,
            world_size=1 + sum(self.workers),
        )
        try:
            if self.rank == 0:
                # left over from an earlier run
                self.request_all("/shutdown_weight_transfer_engine")
            return WeightTransferTrainerFactory.trainer_init(info, client=self, source=self.source)
        except Exception as e:
            raise Fault(
                f"VLLM_URLS {self.where}: no connection for the weights at {address}:{port} ({e})"
            ) from e

    @staticmethod
    def transfer_info() -> Any:
        """Returns the class of vLLM's arguments for the sender."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo

    def generate(self, contexts: Contexts, max_new: int, temperature: float) -> Turns:
        """As Engine; a call waits up to 5 ms for a turn to finish."""
        for key, ids in contexts.items():
            seed = hash((self.seed, key, len(ids))) % 2**63
            sampling_params = sampling(self, max_new, temperature) | {"seed": seed}
            self.start(
                self.generate_turn, key, self.urls[key % len(self.urls)], ids, sampling_params
            )
        yield from self.finished()

    def generate_turn(
        self, key: int, url: str, ids: list[int], sampling_params: dict
    ) -> FinishedTurn:
        """Returns a turn of row `key` from one of the servers."""
        body = {"token_ids": ids, "sampling_params": sampling_params}
        answer = self.request(url, "/inference/v1/generate", body)["choices"][0]
        versions = {span["version"] for span in answer["weight_versions"]}
        if self.loads and versions != {str(self.loads)}:
            raise EngineFault(
                f"{without_secrets(url)} has weights {versions}, not those of load {self.loads}: was it"
                " restarted?"
            )
        return FinishedTurn(
            key, answer["token_ids"], [token["logprob"] for token in answer["logprobs"]["content"]]
        )

    def load(self, weights: Weights) -> None:
        """As Engine; raises EngineFault for a server that goes on answering as it did before.

        Nothing compares the weights themselves, as `Proof` does.
        """
        self.reset(self.seed)
        if dist.is_initialized():
            dist.barrier()
        self.loads += 1
        fault: list[Outage | None] = [None]
        try:
            if self.rank == 0:
                # ends forgotten turns: vLLM would crash if their weights changed
                self.request_all("/pause")
            self.source.weights = weights
            # vLLM reads them in streams of its own, which do not wait for the optimizer
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.sender.send_weights()
            if self.rank == 0 and not all(
                answer["success"] for answer in self.request_all("/reset_prefix_cache")
            ):
                raise Outage(f"{self.where}: could not drop the prefix cache of the old weights")
        except Outage as e:
            fault = [e]
        # after a fault on rank 0, the other ranks still wait for it to gather the rest
        for _ in weights:
            pass
        if self.rank == 0:
            try:
                self.request_all("/resume")
                if not fault[0]:
                    self.require_another_answer()
            except Outage as e:
                fault = [fault[0] or e]
        if dist.is_initialized():  # no rank starts a turn earlier, and all raise the fault
            dist.broadcast_object_list(fault, 0)
        if fault[0]:
            raise fault[0]

    def probe(self) -> list[FinishedTurn]:
        """Returns what each server says to the same few tokens, with the same seed: ids and
        log-probabilities."""
        ids = probed(len(self.tokenizer)).tolist()
        params = sampling(self, 16, 1.0) | {"seed": 0, "stop": [], "stop_token_ids": []}
        return [self.generate_turn(0, url, ids, params) for url in self.urls]

    def require_another_answer(self) -> None:
        """Raises EngineFault if a server answers as it did with weights that were clearly others
        than those just sent."""
        answers, sent, known = self.probe(), torch.cat(self.source.sample), self.known
        ours = zip(self.urls, answers, self.answers, strict=True)
        same = [url for url, now, then in ours if now == then]
        # at first its own files may hold the same weights
        if same and known is not None and (sent - known).abs().mean() > SHOWS:
            raise EngineFault(
                f"{without_secrets(same[0])} answers as before, after load {self.loads}: it has not taken the weights"
            )
        if not same or known is None:
            self.answers, self.known = answers, sent

    # vLLM's sender calls these on "the" server. Every worker of every server has its own rank in
    # the transfer group.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        offsets = [init_info["rank_offset"] + sum(self.workers[:k]) for k in range(len(self.urls))]
        bodies = [{"init_info": init_info | {"rank_offset": offset}} for offset in offsets]
        self.request_all("/init_weight_transfer_engine", *bodies)

    def start_weight_update(self) -> None:
        self.request_all("/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.request_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.request_all("/finish_weight_update", {"weight_version": str(self.loads)})

    def request_all(self, path: str, *bodies: dict) -> list:
        """Returns the answers of all servers to simultaneous requests, with one body for all or one
        for each.

        The servers wait for each other, hence simultaneous; they count requests, hence no retries.
        """
        with ThreadPoolExecutor(len(self.urls)) as pool:
            sent = cycle(bodies or [{}])
            return [*pool.map(self.request, self.urls, repeat(path), sent, repeat(self.once))]

    def request(
        self,
        url: str,
        path: str,
        body: dict | None = None,
        clients: dict[str, Client] | None = None,
    ) -> Any:
        """Returns a server's answer to a POST of `body`, or to a GET; raises Outage after the last
        attempt."""
        return (clients or self.clients)[url].ask(path, body, dict)

    def close(self) -> None:
        super().close()
        if self.rank == 0:
            # both sides must shut down at once; ignore servers that are gone
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.request_all, "/shutdown_weight_transfer_engine")
                self.sender.shutdown()


def sampling(engine: Any, max_new: int, temperature: float) -> dict:
    """Returns vLLM's sampling parameters for a turn."""
    return {
        "max_tokens": max_new,
        "temperature": temperature,
        "logprobs": 0,  # the sampled token's only
        "flat_logprobs": True,  # a list of floats
        "stop": list(engine.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,  # what vLLM takes for it
        "stop_token_ids": list(turn_ends(engine.tokenizer)),
    }


class WeightSource:
    """Implements vLLM's WeightSource: the metadata of all weights beforehand, then the tensors one
    at a time."""

    def __init__(self, model: str, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ParamMeta

        shapes = named_weights(skeleton(load_config(model)))
        self.dtype = dtype
        self.weights: Weights = iter(())
        self.sample: list[Tensor] = []  # some of each tensor that was yielded last
        self.parameters = [ParamMeta(name, dtype, tuple(p.shape)) for name, p in shapes]

    def metadata(self) -> list[Any]:
        return self.parameters

    def __iter__(self) -> Weights:
        self.sample = []
        for name, tensor in self.weights:
            self.sample.append(tensor.detach().flatten()[::1009].float().cpu())
            yield name, tensor.to(self.dtype)
