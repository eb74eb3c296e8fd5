"""Trains a preset's policy at full size on fake CUDA tensors, and prints as JSON what happened.
Needs no card.

    python tests/fake_cuda/run.py GUARD RANKS CAPABILITY --model PRESET [other flags of inspo.py]

A fake tensor has shape, dtype and device, but no values: FakeTensorMode works these out for every
operation, and a fake process group answers for the other ranks. Policy and Learner are the real
ones, from their construction and a resume to an update and a save; what would need a hub, a card's
own kernels or a disk is replaced. GUARD is guard.cpp, compiled; CAPABILITY is the card's, as 9.0.
"""

import collections
import contextlib
import ctypes
import json
import re
import sys
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ctypes.CDLL(sys.argv[1])  # before torch asks, once, whether there is a CUDA
HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from liger_kernel.ops import rms_norm, rope, swiglu  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import config  # noqa: E402
import grpo  # noqa: E402
import training.policy as policy  # noqa: E402
from engines import choose  # noqa: E402
from extras.fit import estimate, shapes  # noqa: E402
from grpo import Learner  # noqa: E402
from kernels import rows_triton  # noqa: E402
from models import lora  # noqa: E402
from tasks import Question, Trajectory  # noqa: E402
from tasks.tools import Tags  # noqa: E402
from training import shards  # noqa: E402

OURS = {str(path) for part in ("*.py", "[!t]*/*.py", "training/*.py") for path in HERE.glob(part)}
LENGTH, PROMPT, TURN = 2272, 449, 161  # tokens of every trajectory
# of two, which share all of a prompt but its end: 4,096 fill a micro-batch
PAIR = 2 * LENGTH - (PROMPT - 1)


def on_card(x):
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


class Tracker(TorchDispatchMode):
    """Notes what every operation does to the card: memory, products of matrices, and when the host
    waits for it."""

    def __init__(self):
        super().__init__()
        # `ones`: how many action tokens the mask of the present micro-batch has
        self.phase, self.ones = "build", 0
        self.live = {}  # storage -> (a weak reference to it, its bytes)
        self.now = 0
        self.peak = collections.Counter()  # bytes by phase
        self.products = collections.Counter()  # multiplications by (device, dtype of the factors)
        self.attention = set()  # operations
        self.batches = collections.Counter()  # micro-batches by phase
        self.syncs = collections.Counter()  # by (phase, kind, line of ours)
        self.left = 0  # bytes that went from the card to the CPU
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP2 frees gathered weights so
            resize(storage, size)
            self.note(storage)

        torch.UntypedStorage.resize_ = resized

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its shares come next
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "device":
            return func(*args, **kwargs)
        if name in ("_local_scalar_dense", "nonzero") and on_card(args[0]):
            self.sync(name)
            if name == "nonzero":
                return torch.empty(self.ones, args[0].ndim, dtype=torch.long, device="cuda")
            return 0.0 if args[0].is_floating_point() else 0
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            source = args[name == "copy_"]
            here, there = on_card(source), on_card(outputs[0])
            goes_on = kwargs.get("non_blocking") or args[2:] == (True,)
            # CUDA copies no other memory so
            if here != there and not (goes_on and getattr(source, "pinned", False)):
                self.sync("copy to the card" if there else "copy to the CPU")
            self.left += outputs[0].nbytes if here and not there else 0
        if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            factor = args["add" in name]
            self.products[f"{factor.device.type} {factor.dtype}"] += (
                outputs[0].numel() * factor.shape[-1]
            )
        elif "attn" in name or "attention" in name:
            self.attention.add(name)
            self.products[f"{args[0].device.type} {args[0].dtype}"] += args[0].numel()
        for x in outputs:
            self.note(x.untyped_storage(), x)
        return out

    def note(self, storage, tensor=None):
        key = storage._cdata
        if key not in self.live:
            if not (on_card(tensor) and tensor.fake_mode is FAKE):
                return
            self.live[key] = weakref.ref(storage, lambda _: self.gone(key)), 0
        reference, before = self.live[key]
        self.live[key] = reference, storage.nbytes()
        self.now += storage.nbytes() - before
        self.peak[self.phase] = max(self.peak[self.phase], self.now)

    def gone(self, key):
        self.now -= self.live.pop(key)[1]

    def sync(self, kind):
        lines = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
        file, line = next((file, line) for file, line in lines if file in OURS)
        self.syncs[self.phase, kind, f"{Path(file).name}:{line}"] += 1


def read(x):
    """Returns what Python reads from a fake tensor: zeros."""
    if on_card(x):
        TRACKER.sync("read")
    return np.zeros(tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))


def pack(batch, device, pack=grpo.pack):
    TRACKER.ones = sum(sum(tau.mask) for tau in batch)
    TRACKER.batches[TRACKER.phase] += 1
    return pack(batch, device)


grpo.pack = pack


class Watched(Learner):
    """Tells the tracker what is being done."""

    def score_tokens(self, *args):
        with phase("score"):
            return super().score_tokens(*args)

    def step(self, *args):
        with phase("step"):
            return super().step(*args)


@contextlib.contextmanager
def phase(name):
    before, TRACKER.phase = TRACKER.phase, name
    TRACKER.peak[name] = max(TRACKER.peak[name], TRACKER.now)
    yield
    TRACKER.phase = before


class Nothing:
    """A stream, an event or a kernel: does nothing when it is called, indexed or entered, nor do
    its methods."""

    device_type, device_index, stream_id = 1, 0, 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


def pin(x):
    x.pinned = True
    return x


def pretend(ranks, capability):
    """Replaces what only a card has: torch.cuda's calls into the driver, and the Triton kernels."""
    major, minor = map(int, capability.split("."))
    card = SimpleNamespace(
        multi_processor_count=132, major=major, minor=minor, total_memory=80 * 10**9, name="fake"
    )
    calls = dict(
        current_device=lambda: 0,
        _exchange_device=lambda k: 0,
        _maybe_exchange_device=lambda k: 0,
        device_count=lambda: ranks,
        get_device_properties=lambda *_: card,
        current_stream=lambda *_: Nothing(),
        stream=lambda _: contextlib.nullcontext(),
        Stream=Nothing,
        Event=Nothing,
    )
    for name, call in calls.items():
        setattr(torch.cuda, name, call)
    torch.Tensor.pin_memory, F.scaled_dot_product_attention = pin, sdpa
    torch.Generator = lambda device="cpu", generator=torch.Generator: generator()
    FakeTensor.numpy, FakeTensor.tolist = read, lambda x: read(x).tolist()
    for module in (rows_triton, rms_norm, rope, swiglu):
        for name, value in vars(module).items():
            if hasattr(value, "run") and hasattr(value, "warmup"):  # a kernel, jitted
                setattr(module, name, Nothing())


def sdpa(
    q,
    k,
    v,
    mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    math=F.scaled_dot_product_attention,
):
    """Computes float32 as CUDA does: where heads share keys, by matrices (T, T)."""
    if q.shape[1] != k.shape[1]:
        return math(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]


def policy_of(cfg, ranks):
    """Returns the real Policy of rank 0 among `ranks`."""
    policy.load_config = shards.load_config = shapes
    policy.load_tokenizer = lambda *args: None
    shards.skeleton, lora.add = outside(shards.skeleton), outside(lora.add)
    dist.device_mesh.init_device_mesh = outside(dist.device_mesh.init_device_mesh)
    # DTensor asks for an operation's shapes before it runs it
    shapes_of = "_propagate_tensor_meta_non_cached"
    setattr(ShardingPropagator, shapes_of, outside(getattr(ShardingPropagator, shapes_of)))

    def first_policy(cfg, ranks):
        model = shards.skeleton(shapes(cfg.model))
        lora.add(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed)
        return model.to_empty(device="cpu")

    policy.load_first_policy = first_policy
    policy.weights = lambda *args, **kwargs: iter(())
    # fake tensors are not written
    policy.HuggingFaceStorageWriter = Nothing
    policy.dcp.async_save = policy.dcp.save = lambda *args, **kwargs: None
    policy.load_tensors = lambda *args, **kwargs: None
    policy.make_engine = lambda *args: Nothing()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    group = SimpleNamespace(
        rank=0, size=ranks, device="cuda", dtype=cfg.dtype, grouped=True, saves=None
    )
    group.gather, group.thread = lambda answer, _=None: [answer], lambda: ThreadPoolExecutor(1)
    group.broadcast = lambda message: message
    task = SimpleNamespace(tools=[])
    task.make_format = lambda: Tags(task)
    return policy.Policy(cfg, group, task, Watched)


def outside(function):
    """Returns a function that makes tensors on the meta device as it is: modules cannot swap fake
    ones."""

    def call(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def trajectory(group):
    tau = Trajectory(
        0,
        Question("q", "Who?", ("x",)),
        group,
        [group] * PROMPT,
        PROMPT,
        [0] * PROMPT,
        [0.0] * PROMPT,
    )
    observation = (LENGTH - PROMPT - 3 * TURN) // 2
    for k in range(3):
        tau.act([5] * TURN, [-1.0] * TURN)
        tau.observe([5] * observation * (k < 2))
    tau.advantage = 0.5
    return tau


def dtypes(tensors):
    return sorted({str(x.dtype).removeprefix("torch.") for x in tensors})


FAKE, TRACKER = FakeTensorMode(allow_non_fake_inputs=True), Tracker()


def main():
    ranks = int(sys.argv[2])
    cfg = config.parse_flags(sys.argv[4:])
    pretend(ranks, sys.argv[3])
    choose.vllm_version, choose.check_vllm = lambda: True, lambda: None
    cfg = replace(cfg, dtype=choose.dtype_of(cfg, "cuda"), engine=choose.choose_engine(cfg, "cuda"))
    cfg = replace(cfg, recompute=abs(cfg.recompute))
    fit = estimate(cfg, shapes(cfg.model), cfg.engine, ranks, 80)
    # trajectories in one full micro-batch of every rank
    full = 2 * ranks * (cfg.micro_tokens // PAIR)
    cfg = replace(cfg, G=2, mini_batch=2 * full)  # two of these in a mini-batch
    with FAKE, TRACKER, torch.autograd.set_multithreading_enabled(False):
        trained = policy_of(cfg, ranks)
        with phase("resume"):
            trained.load(Path(), 0)
        taus = [trajectory(k // cfg.G) for k in range(3 * full)]
        # a mini-batch and a half: the second is scored before the first is learned from
        with phase("update"):
            trained.update(1, taus)
        with phase("save"):
            trained.save(Path())
        learner = trained.learner
        model, reference = learner.model, learner.reference
        weights = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for m in (model, reference) for p in m.parameters() if not p.requires_grad]
        states = [x for state in learner.optimizer.state.values() for x in state.values()]
        print(
            json.dumps(
                {
                    "devices": sorted(
                        {x.device.type for x in [*weights, *frozen, *model.buffers(), *states]}
                    ),
                    "trained": dtypes(weights),
                    "frozen": dtypes(frozen),
                    "optimizer": dtypes(states),
                    "engine": cfg.engine,
                    "attention": sorted(TRACKER.attention),
                    "products": TRACKER.products,
                    "bytes to the CPU a token": TRACKER.left / (len(taus) / 2 * PAIR / ranks),
                    "batches": TRACKER.batches,
                    "syncs": [[*key, n] for key, n in TRACKER.syncs.most_common()],
                    "peak": TRACKER.peak,
                    "estimate": sum(
                        part.update
                        for part in fit.parts
                        if not re.match("vLLM|torch engine", part.name)
                    ),
                }
            )
        )


if __name__ == "__main__":
    main()
