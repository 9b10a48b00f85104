"""Where an attention worker holds pages and attends to them: in RAM with its processor, or on a device.

| device | pages | kernels | between sockets and pages |
|---|---|---|---|
| cpu | RAM, or a file that is mapped to it | the processor's | nothing |
| cuda, cuda:N | memory of the GPU | the GPU's, as an engine on it has them | pinned buffers |
| sim | RAM | the processor's | buffers in RAM, used as those of a GPU: for tests, and to try it without one |

A process uses one GPU, so several GPUs are several workers. Page tables are checked in RAM, and then copied to the
device once per sweep.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import Tensor

from flexengine import __version__, kernels
from flexengine.config import DEVICE_NAME
from flexengine.errors import InvalidInput, shown, size_within
from flexengine.guests.wire.link import Connection
from flexengine.kernels.base import AttentionOptions
from flexengine.tier.memory import aligned_buffer

NAMES = "cpu, cuda, cuda:0, cuda:1, ..., or sim"
STAGED = 4 << 20  # bytes of pages that are copied at once
SCRATCH = 256 << 20  # bytes of a GPU beside --worker-mem: kernels' scratch memory, torch's rounding
# A question that is measured: K and V of so many bytes at most, in bf16; pages of 16 tokens, 8 KV heads of 128
# elements, 4 query heads for each.
MEASURED, SEQUENCES, PAGE_TOKENS, KV_HEADS, GROUP, DIM = 512 << 20, 16, 16, 8, 4, 128
TURNS = 5  # of which the median counts


class PageDevice:
    """RAM and the processor of this machine.

    Attributes:
        name: of the device, for messages; empty for RAM.
        kind: of memory for pages: ram, file or device.
        rate: bytes of KV per second of attention, if the worker has measured it; 0 if engines measure it.
    """

    name, kind = "", "ram"
    rate = 0
    where = torch.device("cpu")

    def __init__(self) -> None:
        self.kernels = kernels.load_for(self.where)

    def identity(self) -> str:
        """Return what an engine's `identity` must be or begin with."""
        return identity()

    def check(self, memory: int, beside: int = 0) -> None:
        """Raise InvalidInput if fewer bytes are free than a worker is to have. memory: bytes that were given. beside:
        bytes that the worker needs beside them."""
        if memory + beside > (free := psutil.virtual_memory().available):
            remedy = "give less, or hold the KV cache in a file with --worker-file"
            room = f"{size_within(free, up=False)} of RAM are free"
            raise InvalidInput(f"--worker-mem is {size_within(memory)}, but {room}; {remedy}")

    def begin_thread(self) -> None:
        """Prepare a thread that uses the device."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return new memory for pages, uint8, zeros. Raise MemoryError, OSError or RuntimeError if there is none."""
        return aligned_buffer(nbytes)

    def staging(self, nbytes: int) -> Tensor:
        """Return RAM, uint8 [nbytes], that is sent, or received from an engine."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def put(self, x: Tensor) -> Tensor:
        """Return a tensor in RAM as one on the device."""
        return x

    def fetch(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Wait for what this thread has queued on the device, and return tensors on the device as ones in RAM."""
        return tuple(parts)

    def receive(self, link: Connection, target: Tensor) -> None:
        """Read the next bytes of a message's body into memory for pages, uint8."""
        link.take_into(target)

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        """Yield a contiguous tensor in RAM or on the device as tensors in RAM that are sent one after the other."""
        yield x

    def lock(self, room: Tensor) -> None:
        """Let the device copy from and to a mapping at full rate, until `unlock`."""

    def unlock(self, room: Tensor) -> None:
        """Undo `lock`."""

    def give_back(self) -> None:
        """Return memory of pages that were freed to the system."""

    def synchronize(self) -> None:
        """Wait for what this thread has queued on the device."""


class StagedDevice(PageDevice):
    """A device whose memory sockets cannot write to. This class simulates one in RAM."""

    name, kind = "sim", "device"

    def measure(self, memory: int) -> None:
        """Measure attention over pages in the device's memory. memory: bytes of the worker."""
        with torch.no_grad():
            self.rate = attention_rate(self, min(MEASURED, memory // 2))

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.where.type == "cuda")

    def buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.where)

    def put(self, x: Tensor) -> Tensor:
        return x.to(self.where, non_blocking=True, copy=True)  # torch keeps pinned memory until the copy has ended

    def fetch(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        found = [self.staging(len(x)).copy_(x, non_blocking=True) for x in flat]
        self.synchronize()
        return tuple(x.view(part.dtype).view(part.shape) for x, part in zip(found, parts, strict=True))

    def receive(self, link: Connection, target: Tensor) -> None:
        for part in torch.split(target, STAGED):
            link.take_into(staged := self.staging(len(part)))
            part.copy_(staged, non_blocking=True)
        self.synchronize()  # a question that follows is computed on another stream

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        for part in torch.split(x.view(-1).view(torch.uint8), STAGED):
            yield from self.fetch([part])


class CudaDevice(StagedDevice):
    """A GPU: all threads have streams of their own."""

    where = torch.device("cuda")

    def __init__(self, number: int) -> None:
        """Take a GPU for this process, which has used none. Raise InvalidInput if torch does not see it."""
        from flexengine.tier import cuda  # not on other machines

        self._cuda, count = cuda, cuda.visible_gpus()
        if number >= count:
            seen = f"torch sees {count or 'no'} CUDA GPU{'s' * (count > 1)}"
            remedy = f"give cuda:0 to cuda:{count - 1}" if count else "leave --device out to use the processor"
            raise InvalidInput(f"--device is cuda:{number}, but {seen}; {remedy}")
        cuda.take_one(number)
        super().__init__()
        self.name = f"cuda:{number} {cuda.product_name()}"
        self._locked = set[int]()  # addresses

    def identity(self) -> str:
        return f"flexengine {__version__}"  # its kernels are not those of the engine's processor

    def check(self, memory: int, beside: int = 0) -> None:
        (free, total), beside = self._cuda.memory(), beside + SCRATCH
        if memory + beside > free:
            most = max(0, free - beside)
            raise InvalidInput(
                f"--worker-mem is {size_within(memory)}, but of {size_within(total, up=False)} of {self.name},"
                f" {size_within(free, up=False)} are free, and the worker needs {size_within(beside)} beside it; give"
                f" at most {size_within(most, up=False)}, or another GPU"
            )

    def begin_thread(self) -> None:
        self._cuda.own_stream()

    def buffer(self, nbytes: int) -> Tensor:
        room = super().buffer(nbytes)
        self.synchronize()  # other streams write to it
        return room

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        return super().pieces(x) if x.is_cuda else iter((x,))

    def lock(self, room: Tensor) -> None:
        if not self._cuda.register(room):  # else copies are slower
            self._locked.add(room.data_ptr())

    def unlock(self, room: Tensor) -> None:
        if room.data_ptr() in self._locked:
            self._locked.remove(room.data_ptr())
            with contextlib.suppress(RuntimeError):  # the GPU has failed; the process ends soon
                self._cuda.unregister(room.data_ptr())

    def synchronize(self) -> None:
        self._cuda.wait_for_stream()

    def give_back(self) -> None:
        self._cuda.empty_cache()


def identity() -> str:
    """Return what must be equal in an engine and its workers, so that results do not depend on the worker."""
    return f"flexengine {__version__} with {type(kernels.load()).__name__}"


def environment_of(device: str, threads: int) -> dict[str, str]:
    """Return variables of a new process that uses a device, also if this process has taken one GPU for itself. threads:
    most that compute."""
    variables = {"OMP_NUM_THREADS": str(threads)}
    if device.startswith("cuda"):
        from flexengine.tier import cuda

        variables |= cuda.all_gpus()
    return variables


def open_device(name: str, memory: int, beside: int = 0) -> PageDevice:
    """Return the device of a worker, measured. Raise InvalidInput if there is none of this name, or it has fewer bytes
    free than the worker is to have. memory, beside: as in `PageDevice.check`."""
    if not DEVICE_NAME.fullmatch(name):
        raise InvalidInput(f"--device is {shown(name)}; it must be {NAMES}")
    kind, _, number = name.partition(":")
    if kind == "cuda":
        device: PageDevice = CudaDevice(int(number or 0))
    else:
        device = StagedDevice() if name == "sim" else PageDevice()
    device.check(memory, beside)
    if isinstance(device, StagedDevice):
        device.measure(memory)
    return device


def attention_rate(device: StagedDevice, nbytes: int) -> int:
    """Return the bytes of KV per second of decode attention on a device: a question about pages of so many bytes less
    one about a token of each sequence, which takes the time of starting kernels."""
    page = 2 * KV_HEADS * PAGE_TOKENS * DIM * 2
    each = max(1, nbytes // page // SEQUENCES)  # pages of a sequence
    flat = device.buffer(each * SEQUENCES * page)
    pool = flat.view(torch.bfloat16).view(-1, 2, KV_HEADS, PAGE_TOKENS, DIM)
    tables = device.put(torch.arange(each * SEQUENCES, dtype=torch.int32).view(SEQUENCES, each))
    q = device.put(torch.zeros(SEQUENCES, KV_HEADS * GROUP, DIM, dtype=torch.bfloat16))
    took = []
    for tokens in (each * PAGE_TOKENS, 1):
        lengths, seconds = device.put(torch.full((SEQUENCES,), tokens, dtype=torch.int32)), list[float]()
        for _ in range(TURNS + 1):  # the first one is not counted: it may compile kernels
            device.synchronize()
            began = time.perf_counter()
            device.kernels.decode_attention(q, pool, tables, lengths, AttentionOptions(DIM**-0.5))
            device.synchronize()
            seconds.append(time.perf_counter() - began)
        took.append(statistics.median(seconds[1:]))
    read = len(flat) - SEQUENCES * page // PAGE_TOKENS
    del flat, pool
    device.give_back()
    return max(1, round(read / max(took[0] - took[1], 1e-6)))
