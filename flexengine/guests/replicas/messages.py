"""Messages between the first engine and a replica, over `wire.link.Connection`.

| kind | from | body |
|---|---|---|
| OPEN | engine | ReplicaOptions; answered by DONE |
| LOAD | engine | ReplicaJob; the replica reads all weights; answered by DONE |
| BEGIN | engine | nothing; a sweep begins: passes of earlier ones end |
| HIDDEN | engine | HiddenInput, positions, hidden states |
| SLICE | engine | SliceInput, attention; answered by RESULT |
| RESULT | replica | SliceResult, q, k, v, then hidden states if they were requested, then sinks if there are any |
| DONE | replica | nothing |
| FAILED | replica | a dict: the error, which ends the job |

A body with tensors is a number of bytes (int64), then msgpack, then each tensor at a multiple of ALIGNED bytes.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexengine.guests.wire.link import Broken, pack, unpack
from flexengine.lossy import Lossy
from flexengine.policy import Policy

ALIGNED = 64
T = TypeVar("T")


class ReplicaKind(enum.IntEnum):
    """Kinds of messages. `wire.link` has kind 3."""

    OPEN, LOAD, BEGIN, HIDDEN, SLICE = 16, 17, 18, 19, 20
    RESULT, DONE, FAILED = 32, 33, 34


class ReplicaOptions(NamedTuple):
    """`EngineOptions` of a replica."""

    model: str | None
    device: str
    device_mem: int | None
    host_mem: int | None
    sharing: int
    dtype: str | None
    trust_remote_code: bool
    allow_symlinks: bool


class ReplicaJob(NamedTuple):
    """Weights and largest gpu_batches of a job."""

    lossy: Lossy
    policy: Policy


class HiddenInput(NamedTuple):
    """Hidden states that enter."""

    batch: int  # number of the gpu_batch


class SliceInput(NamedTuple):
    """A slice to compute."""

    batch: int  # number of the gpu_batch
    number: int  # of the slice: the layer up to whose attention it goes
    hidden: bool  # whether the result needs hidden states, as another engine computes the next slice


class SliceResult(NamedTuple):
    """Options of the attention that follows a slice, as in `model.forward.Attend`."""

    batch: int
    number: int
    scale: float
    softcap: float | None


class _Parts(NamedTuple):
    values: Any
    tensors: list[tuple[str, list[int]]]  # dtype and shape of each


def packed_tensors(values: Any, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the parts of a body: values, then tensors, which are copied to RAM if they are elsewhere."""
    head = pack(_Parts(values, [(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in tensors]))
    yield torch.tensor([len(head)])
    yield head
    done = 8 + len(head)
    for x in tensors:
        yield torch.zeros(-done % ALIGNED, dtype=torch.uint8)
        yield x.detach().cpu().contiguous()
        done += -done % ALIGNED + x.nbytes


def unpacked_tensors(body: Tensor, kind: type[T]) -> tuple[T, list[Tensor]]:
    """Return the values and tensors of a body. Raise Broken if it has others."""
    size = int(body[:8].view(torch.int64)) if len(body) >= 8 else -1
    if not 0 <= size <= len(body) - 8:
        raise Broken(f"a message of {len(body)} bytes has a head of {size} bytes")
    head = unpack(body[8 : 8 + size], _Parts)
    values, done, tensors = unpack(pack(head.values), kind), 8 + size, list[Tensor]()
    for name, shape in head.tensors:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise Broken(f"a message has a tensor of {name}")
        done += -done % ALIGNED
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        if min(shape, default=0) < 0 or len(body) < done + nbytes:
            raise Broken(f"a message of {len(body)} bytes has a tensor of {nbytes} bytes at {done}")
        tensors.append(body[done : done + nbytes].view(dtype).view(shape))
        done += nbytes
    return values, tensors
