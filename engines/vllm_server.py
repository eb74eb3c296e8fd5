"""Tokens in, tokens out from one or more `vllm serve`, on this machine or others, with the protocol of `VllmEngine`.

Turns go to vLLM's own endpoint for token ids; weights come to the servers over NCCL, by vLLM's weight transfer.
"""

import contextlib
import queue
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import requests
import torch
import torch.distributed as dist

from engines.vllm_engine import VERSION, StaleWeights, check_vllm, sampling
from rollout import EngineFault
from training.model import load_config, skeleton


class EngineDown(EngineFault):
    """A vLLM server does not answer, or not as it should."""


class VllmServer:
    """One or more `vllm serve`, and the connection that brings them the weights.

    `urls`: the servers, with commas; a row stays with one of them, whose cache knows it. Every rank makes its own and
    calls `load` together with the others; rank 0 is the one that sends. SystemExit says how to start a server that is
    not as it should be, EngineDown comes when one stays away, StaleWeights when one was restarted behind our back.
    """

    max_rows = sys.maxsize
    lockstep = False
    tries, timeout = 5, 600.0  # of a request: how often; how many seconds for an answer
    backend = "nccl"

    def __init__(self, urls: str, tokenizer, stop: tuple[str, ...], *, model: str, max_len: int):
        check_vllm()
        self.urls = [url.strip().rstrip("/") for url in urls.split(",")]
        self.tokenizer, self.stop, self.loads = tokenizer, stop, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.begin(0)
        self.http = requests.Session()
        self.http.trust_env = False  # a proxy from the environment would be asked even for loopback
        configs = [self.inspect(url, model, max_len) for url in self.urls]
        rows = sum(config["scheduler_config"]["max_num_seqs"] for config in configs)
        self.http.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=rows))
        self.pool = ThreadPoolExecutor(rows)
        self.workers = [config["parallel_config"]["world_size"] for config in configs]
        self.source = Source(model, getattr(torch, configs[0]["model_config"]["dtype"].removeprefix("torch.")))
        self.unproven = len(self.source.parameters)  # a server's layers cannot be reached
        self.sender = self.connect()

    def inspect(self, url: str, model: str, max_len: int) -> dict:
        """The server's configuration; one line that says how to start it where it cannot be used."""
        place = urlsplit(url)
        command = (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host {place.hostname} --port {place.port} --dtype bfloat16 "
            f"--max-model-len {max_len} --logprobs-mode processed_logprobs --enable-scale-out "
            """--hf-overrides '{"head_dtype": "float32"}' """
            f"""--weight-transfer-config '{{"backend": "{self.backend}"}}'"""
        )
        try:
            found = self.ask(url, "/version")["version"]
            if not found.startswith(f"{VERSION}."):
                raise EngineDown(f"{url} is vLLM {found}, this is written for {VERSION}")
            config = self.ask(url, "/server_info?config_format=json")["vllm_config"]
            longest, mode = config["model_config"]["max_model_len"], config["model_config"]["logprobs_mode"]
            backend = (config["weight_transfer_config"] or {}).get("backend")
            if longest < max_len:
                raise EngineDown(f"{url} takes {longest} tokens, {max_len} are needed")
            if mode != "processed_logprobs":
                raise EngineDown(f"{url} has --logprobs-mode {mode}, which leaves the temperature out")
            if backend != self.backend:
                raise EngineDown(f"{url} has the weight transfer {backend}, not {self.backend}")
            self.ask(url, "/resume", {})  # a run that was killed may have left it paused
            self.turn(url, [self.tokenizer.eos_token_id], sampling(self, 1, 1.0))
        except EngineDown as e:
            sys.exit(f"--vllm {e}; start it with: {command}")
        return config

    def connect(self):
        """vLLM's sender of weights, after trainer and servers have met at a free port of this machine."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        addresses = {self.address(url) for url in self.urls}
        address = min(addresses, key=lambda a: a.startswith("127."))  # the one that all can see
        with socket.socket() as s:
            s.bind((address, 0))
            port = s.getsockname()[1]
        info = self.transfer_info()(
            rank=self.rank, master_address=address, master_port=port, world_size=1 + sum(self.workers)
        )
        try:
            if self.rank == 0:
                self.all("/shutdown_weight_transfer_engine")  # of a run before this
            return WeightTransferTrainerFactory.trainer_init(info, client=self, source=self.source)
        except Exception as e:
            sys.exit(f"--vllm {','.join(self.urls)}: no connection for the weights at {address}:{port} ({e})")

    @staticmethod
    def transfer_info():
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo

    @staticmethod
    def address(url: str) -> str:
        """The address of this machine on the way to the server (UDP: nothing is sent)."""
        with socket.socket(type=socket.SOCK_DGRAM) as s:
            s.connect((urlsplit(url).hostname, 9))
            return s.getsockname()[0]

    def begin(self, seed: int) -> None:
        """As VllmEngine's."""
        self.seed, self.running = seed, 0
        self.ended: queue.SimpleQueue = queue.SimpleQueue()  # turns of before are put into an older one

    def generate(
        self, contexts: dict[int, list[int]], max_new: int, temperature: float
    ) -> Iterator[tuple[int, list[int], list[float]]]:
        """As VllmEngine's; where nothing has ended it waits for a few milliseconds."""
        for key, ids in contexts.items():
            how = sampling(self, max_new, temperature) | {"seed": hash((self.seed, key, len(ids))) % 2**63}
            self.pool.submit(self.run, self.ended, key, ids, how)
            self.running += 1
        wait = 0.005
        while self.running:
            try:
                key, turn = self.ended.get(timeout=wait)
            except queue.Empty:
                return
            if isinstance(turn, Exception):
                raise turn
            self.running, wait = self.running - 1, 0
            yield key, *turn

    def run(self, ended: queue.SimpleQueue, key: int, ids: list[int], how: dict) -> None:
        try:
            ended.put((key, self.turn(self.urls[key % len(self.urls)], ids, how)))
        except Exception as e:  # reaches the caller through `generate`
            ended.put((key, e))

    def turn(self, url: str, ids: list[int], how: dict) -> tuple[list[int], list[float]]:
        answer = self.ask(url, "/inference/v1/generate", {"token_ids": ids, "sampling_params": how})["choices"][0]
        versions = {span["version"] for span in answer["weight_versions"]}
        if self.loads and versions != {str(self.loads)}:
            raise StaleWeights(f"{url} has weights {versions}, not those of load {self.loads}: was it restarted?")
        return answer["token_ids"], [token["logprob"] for token in answer["logprobs"]["content"]]

    def sleep(self) -> None:
        """The servers have their own devices."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As VllmEngine's, but without its proof."""
        self.begin(self.seed)
        self.barrier()
        self.loads += 1
        self.source.weights = weights
        fault = [None]
        try:
            if self.rank == 0:
                self.all("/pause")  # ends turns that somebody has forgotten: vLLM would crash if the weights left them
            self.sender.send_weights()
            if self.rank == 0 and not all(answer["success"] for answer in self.all("/reset_prefix_cache")):
                raise EngineDown(f"{','.join(self.urls)}: could not forget what the old weights have cached")
        except EngineDown as e:
            fault = [str(e)]
        for _ in weights:  # whatever became of rank 0: the others gather what is left, and must not wait for it
            pass
        if self.rank == 0:
            with contextlib.suppress(EngineDown):
                self.all("/resume")
        if dist.is_initialized():  # no rank's turns begin before; and all know
            dist.broadcast_object_list(fault, 0)
        if fault[0]:
            raise EngineDown(fault[0])

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    # What vLLM's sender asks of "the" server: every worker of every server has its own rank in the group.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        first = [init_info["rank_offset"] + sum(self.workers[:k]) for k in range(len(self.urls))]
        self.all("/init_weight_transfer_engine", *({"init_info": init_info | {"rank_offset": n}} for n in first))

    def start_weight_update(self) -> None:
        self.all("/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.all("/update_weights", *[{"update_info": update_info}] * len(self.urls))

    def finish_weight_update(self) -> None:
        self.all("/finish_weight_update", *[{"weight_version": str(self.loads)}] * len(self.urls))

    def all(self, path: str, *bodies: dict) -> list[dict]:
        """One request to every server at once, as they wait for each other; not tried again, as they count."""
        bodies = bodies or ({},) * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(lambda url, body: self.ask(url, path, body, tries=1), self.urls, bodies))

    def ask(self, url: str, path: str, body: dict | None = None, tries: int | None = None) -> dict:
        """The server's answer to a POST of `body`, or to a GET."""
        for attempt in range(tries or self.tries):
            time.sleep(0.25 * 2**attempt if attempt else 0)
            try:
                how = {"timeout": (5, self.timeout)}  # seconds to connect, to answer
                got = self.http.get(url + path, **how) if body is None else self.http.post(url + path, json=body, **how)
                if got.ok:
                    return got.json()
                fault = f"{got.status_code} {got.text[:300]}"
                if got.status_code < 500:
                    break
            except requests.ReadTimeout:
                fault = f"no answer within {self.timeout:.0f} s"
                break
            except requests.RequestException as e:
                fault = type(e).__name__
        raise EngineDown(f"{url}{path.partition('?')[0]}: {fault}")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.rank == 0:
            with ThreadPoolExecutor(1) as both:  # the two sides leave together; a server that is away has left
                both.submit(self.all, "/shutdown_weight_transfer_engine")
                self.sender.shutdown()


class Source:
    """vLLM's WeightSource: what will be sent, known beforehand, and the tensors one at a time."""

    def __init__(self, model: str, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ParamMeta

        shapes = skeleton(load_config(model)).named_parameters()
        self.dtype, self.weights = dtype, iter(())
        self.parameters = [ParamMeta(name, dtype, tuple(p.shape)) for name, p in shapes]

    def metadata(self) -> list:
        return self.parameters

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(self.dtype)) for name, tensor in self.weights)
