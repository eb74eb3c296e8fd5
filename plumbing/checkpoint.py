"""The files of a checkpoint: the shares of torch.distributed.checkpoint, a mark (state.pt), and a
digest of every file, without which it is none.

It may come from somebody else: what is pickled in it is read by allowlist, so that no
code in it runs.
"""

import io
import json
import pickle
import warnings
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from plumbing.faults import CheckpointFault, DiskFault, first_line
from plumbing.outside import decoded

DIGESTS = "digests.json"
TYPES = {  # module -> all that torch.distributed.checkpoint pickles into .metadata
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
}
# one process saves checkpoints without a group
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def save(state: dict[str, Any], path: Path, rank: int, group: Any) -> dict[str, str]:
    """Writes this rank's shares of a state, in a process without a group all of it; returns the
    digests of its files. Raises DiskFault."""
    try:
        dcp.save(state, checkpoint_id=str(path), no_dist=group is None, process_group=group)
        files = [*path.glob(f"__{rank}_*")]
        if rank == 0:
            files.append(path / ".metadata")
        return {file.name: digest(file) for file in files}
    except (CheckpointException, OSError) as e:
        raise DiskFault(f"cannot write {path} ({reason(e)})") from None


def complete(path: Path, mark: dict[str, Any], digests: dict[str, str]) -> None:
    """Adds the mark and the digests to the shares of all ranks."""
    content = io.BytesIO()  # on a full disk torch would not raise OSError
    torch.save(mark, content)
    (path / "state.pt").write_bytes(content.getvalue())
    digests = digests | {"state.pt": digest(path / "state.pt")}
    (path / DIGESTS).write_text(json.dumps(digests, indent=1), "utf-8")


def load(state: dict[str, Any], path: Path, alone: bool) -> None:
    """Fills the tensors of `state` with the shares under `path`; raises CheckpointFault."""
    try:
        reader = _Reader(str(path))
        # first: torch would log what is raised there, twice, with a traceback
        reader.read_metadata()
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=alone)
    # a damaged pickle raises anything; torch's is no Exception
    except (Exception, CheckpointException) as e:
        raise CheckpointFault(f"{path} cannot be loaded ({reason(e)})") from None


def digest(path: Path) -> str:
    """Returns a file's CRC-32, in hexadecimal digits: it notices damage, and costs a fifth of a
    cryptographic hash."""
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def damage(path: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """Returns what is wrong with this rank's share of a checkpoint's files; [] if they are as they
    were written."""
    try:
        digests = decoded((path / DIGESTS).read_bytes())
        if not {"state.pt", ".metadata"} <= set(digests) or any("/" in name for name in digests):
            raise ValueError
    except (OSError, ValueError, TypeError):
        return [f"{DIGESTS} is missing or damaged"]
    faults = []
    for name, value in sorted(digests.items())[rank::ranks]:
        try:
            if digest(path / name) != value:
                faults.append(f"{name} is damaged")
        except OSError as e:
            faults.append(f"{name} cannot be read: {e.strerror}")
    return faults


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in TYPES.get(module, "").split():
            return super().find_class(module, name)
        if module.startswith("pathlib") and name == "PosixPath":  # where the writer put it
            return PurePosixPath
        raise pickle.UnpicklingError(
            f"its .metadata wants to call {module}.{name}: it is not a checkpoint of ours"
        )


class _Reader(FileSystemReader):
    """Reads .metadata by allowlist; torch's own would unpickle, and so run, whatever is in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            metadata = _Unpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("its .metadata is something else")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(
                    f"its .metadata names a file elsewhere: {info.relative_path}"
                )
        return metadata


class _Planner(DefaultLoadPlanner):
    """Reads what is not a tensor, such as a learning rate, with torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # only what is harmless passes
        plain.seek(0)
        super().load_bytes(read_item, plain)


def reason(e: BaseException) -> str:
    """Returns an exception in a few words: of a CheckpointException, the first failure's."""
    if isinstance(e, CheckpointException):
        e = next(iter(e.failures.values()))[0]
    if isinstance(e, OSError) and e.strerror:
        return e.strerror
    return f"{type(e).__name__}: {first_line(e)}"[:200]
