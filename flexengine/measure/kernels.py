"""How fast this machine's kernels are: matrix products, attention, what is done element by element."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from flexengine import kernels as available
from flexengine.kernels import Kernels
from flexengine.measure.links import WHAT, readable, stretches
from flexengine.measure.overhead import cell_seconds, sweep_seconds, task_seconds
from flexengine.measure.timing import beside, fill, room, seconds_per_call, unnoticed
from flexengine.model.linear import Product
from flexengine.plan.hardware import Table
from flexengine.plan.sizes import PAGE_TOKENS
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions

ROWS = (1, 4, 16, 64, 256, 512)  # of activations
# Rows and columns of matrices; bytes of all, and of a KV pool: more than caches hold, as when weights are streamed.
SMALL, LARGE = (2048, 128 << 20), (8192, 1 << 30)
NARROW = (torch.float32, torch.float16, torch.bfloat16)
WIDTH = 2048  # of what is done element by element
PROMPTS, LENGTHS = (32, 128, 512), (64, 512, 2048)
HEADS, HEAD_DIM, SEQUENCES = 32, 64, 16
GROUP = 8  # queries per KV head, where computing rather than reading limits decode attention
SECONDS = 0.1  # for each figure
TURNS, WINDOW = 4, 0.08  # alone and together, seconds each
BESIDE, MOVED = 32, 4 << 20  # rows of products, bytes of transfers that slow each other


@dataclass(frozen=True)
class KernelRates:
    """Fields of `Hardware` of these names."""

    products: Mapping[str, Table]
    prompt_attention: Table
    decode_attention: Table
    elementwise: float
    host_attention: float
    vector_flops: float
    host_flops: float
    cell_seconds: float
    task_seconds: float
    sweep_seconds: float
    sequence_seconds: float


@torch.no_grad()
def measure_kernels(machine: Machine, dtype: torch.dtype) -> KernelRates:
    """Rates of the kernels where activations are of `dtype`. Takes about five seconds; the ledgers stay as they were.

    Matrices and KV lie in the device tier, in memory of the kind the engine takes. Raises OutOfMemory if there is none.
    """
    native = available.load()
    kernels = available.load_for(machine.compute)
    with unnoticed(machine):
        decode = _decode(machine, "device", kernels, dtype, LENGTHS)
        vector = _vector_flops(_decode(machine, "device", kernels, dtype, LENGTHS[1:2], GROUP), dtype)
        host = host_flops = 0.0
        if not machine.capacity.shared:
            host = _decode(machine, "host", native, dtype, LENGTHS[1:2])[0][1]
            host_flops = _vector_flops(_decode(machine, "host", native, dtype, LENGTHS[1:2], GROUP), dtype)
        sweep, sequence = sweep_seconds(machine, dtype)
        return KernelRates(
            _products(machine, dtype), _prompts(machine, kernels, dtype), decode, _elementwise(machine, dtype),
            host, vector, host_flops, cell_seconds(machine, dtype), task_seconds(machine), sweep, sequence,
        )  # fmt: skip


def _products(machine: Machine, dtype: torch.dtype) -> dict[str, Table]:
    """By dtype that matrices are held in: 16-bit ones meet fp32 activations on a CPU only."""
    on_cpu = machine.compute.type == "cpu"
    dtypes = NARROW if on_cpu and dtype == torch.float32 else (dtype,)
    found = {}
    for held in dtypes:
        with products(machine, dtype, held) as product:
            table = []
            for rows in ROWS if on_cpu else (*ROWS, 2048):
                work = product(rows)
                seconds = seconds_per_call(work.call, SECONDS, machine)
                table.append((float(rows), work.flop / seconds))
            found[str(held).removeprefix("torch.")] = tuple(table)
    return found


@dataclass(frozen=True)
class Work:
    """call(i): the i-th product; flop: of each."""

    call: Callable[[int], object]
    flop: float


@contextmanager
def products(machine: Machine, dtype: torch.dtype, held: torch.dtype) -> Iterator[Callable[[int], Work]]:
    """Products of so many rows with one after the other of a set of matrices that no cache holds."""
    width, working = SMALL if machine.compute.type == "cpu" else LARGE
    width = min(width, int((room(machine, "device") / held.itemsize) ** 0.5) // 16 * 16)
    size = width * width * held.itemsize
    count = max(1, min(working, room(machine, "device")) // size)
    regions, product = Regions(machine), Product(dtype)
    try:
        home = regions.take("device", count * size, WHAT, held)
        weights = fill(machine.device.view(home)).view(count, width, width)

        def work(rows: int) -> Work:
            x = fill(torch.empty(rows, width, dtype=dtype, device=machine.compute), 1.0)
            return Work(lambda i: product(x, weights[i % count]), 2.0 * rows * width * width)

        yield work
    finally:
        regions.free()


def _prompts(machine: Machine, kernels: Kernels, dtype: torch.dtype) -> Table:
    """FLOP/s of causal attention: 2 a multiply-add, in q @ k and in weights @ v, of the pairs that are seen."""
    found = []
    for tokens in PROMPTS:
        shape = (1, tokens, HEADS, HEAD_DIM)
        q, k, v = (fill(torch.empty(shape, dtype=dtype, device=machine.compute), 1.0) for _ in range(3))

        def call(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            return kernels.attend_prompt(q, k, v, HEAD_DIM**-0.5)

        flop = 4.0 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
        found.append((float(tokens), flop / seconds_per_call(call, SECONDS, machine)))
    return tuple(found)


def _vector_flops(decode: Table, dtype: torch.dtype) -> float:
    """`Hardware.vector_flops` from bytes of KV per second with GROUP queries per KV head: 2 FLOP for each of them and
    element. Memory may have been the limit, so it is at least that much."""
    return decode[0][1] / dtype.itemsize * 2 * GROUP


def _decode(
    machine: Machine, tier: str, kernels: Kernels, dtype: torch.dtype, lengths: Sequence[int], group: int = 1
) -> Table:
    """Bytes of KV per second, of SEQUENCES sequences of each length with `group` queries per KV head; their pages lie
    anywhere in a pool of `tier`."""
    working = min(SMALL[1] if machine.compute.type == "cpu" else LARGE[1], room(machine, tier))
    one = 2 * PAGE_TOKENS * HEAD_DIM * dtype.itemsize
    heads = max(1, min(HEADS // group, working // one))
    page = heads * one
    pages = max(1, working // page)
    regions, generator = Regions(machine), torch.Generator().manual_seed(0)
    try:
        pool = fill(machine.tier(tier).view(regions.take(tier, pages * page, WHAT, dtype)))
        pool = pool.view(pages, 2, heads, PAGE_TOKENS, HEAD_DIM)
        q = fill(torch.empty(SEQUENCES, group * heads, HEAD_DIM, dtype=dtype, device=pool.device), 1.0)
        found = []
        for length in lengths:
            tables = torch.randint(pages, (8, SEQUENCES, length // PAGE_TOKENS), generator=generator, dtype=torch.int32)
            tables, held = tables.to(pool.device), torch.full((SEQUENCES,), length, dtype=torch.int32).to(pool.device)

            def call(i: int, tables: Tensor = tables, held: Tensor = held) -> object:
                return kernels.decode(q, pool, tables[i % len(tables)], held, HEAD_DIM**-0.5)

            seconds = seconds_per_call(call, SECONDS, machine)
            found.append((float(length), SEQUENCES * length * page / PAGE_TOKENS / seconds))
        return tuple(found)
    finally:
        regions.free()


def _elementwise(machine: Machine, dtype: torch.dtype) -> float:
    """Bytes read and written per second: a layer norm (one in, one out), a residual (two, one), a GELU (one, one)."""
    x, y = (fill(torch.empty(512, WIDTH, dtype=dtype, device=machine.compute), 1.0) for _ in range(2))

    def call(_: int) -> object:
        return functional.gelu(functional.layer_norm(x, (WIDTH,)) + y)

    return 7.0 * x.nbytes / seconds_per_call(call, SECONDS, machine)


@torch.no_grad()
def measure_crosstalk(machine: Machine, checkpoint: Sequence[Path] = ()) -> dict[str, dict[str, float]]:
    """`Hardware.crosstalk` between computing and what the CPU does beside it: reading the checkpoint and, where the
    host's memory is copied by the CPU too, h2d.

    With a, how many times slower products get beside transfers, and b, transfers beside products: products that take c
    alone and transfers that take d end together after max(d + c a (1 - 1/b), c + d b (1 - 1/a)).
    """
    found: dict[str, dict[str, float]] = {}
    with unnoticed(machine), readable(machine, checkpoint) as files:
        for lane in ("disk_read", "h2d") if machine.compute.type == "cpu" else ("disk_read",):
            a, b = _slowdowns(machine, lane, files)
            found.setdefault(lane, {})["device"] = min(1.0, max(0.0, a * (1 - 1 / b)))
            found.setdefault("device", {})[lane] = min(1.0, max(0.0, b * (1 - 1 / a)))
    return found


def _slowdowns(machine: Machine, lane: str, files: Mapping[Path, int]) -> tuple[float, float]:
    """How many times slower products, and transfers, get beside the other. Alone and together take turns."""
    on_cpu = machine.compute.type == "cpu"
    dtype, held = (torch.float32 if on_cpu else torch.bfloat16), torch.bfloat16
    rates: dict[str, list[float]] = {name: [] for name in ("product", "transfer", "product beside", "transfer beside")}
    with products(machine, dtype, held) as product, _transfers(machine, lane, files) as transfer:
        call = product(BESIDE).call
        for _ in range(TURNS):
            rates["product"].append(_rate(call, machine.synchronize, WINDOW))
            rates["transfer"].append(beside(transfer, lane, lambda: time.sleep(WINDOW))[0])
            slowed, together = beside(transfer, lane, lambda: _rate(call, machine.synchronize, WINDOW))
            rates["transfer beside"].append(slowed)
            rates["product beside"].append(together)
    middle = {name: median(found) for name, found in rates.items()}
    return middle["product"] / middle["product beside"], middle["transfer"] / middle["transfer beside"]


def _rate(call: Callable[[int], object], settle: Callable[[], None], seconds: float) -> float:
    """Calls per second, over so many seconds and at least one call."""
    began, number = time.perf_counter(), 0
    while not number or time.perf_counter() - began < seconds:
        call(number)
        settle()
        number += 1
    return number / (time.perf_counter() - began)


@contextmanager
def _transfers(machine: Machine, lane: str, files: Mapping[Path, int]) -> Iterator[Callable[[int], object]]:
    """Transfers of a lane, of MOVED bytes where there is room."""
    staged = lane == "disk_read" and not machine.capacity.shared
    size = min(MOVED, room(machine, "device", "host"), max(files.values())) // ALIGN * ALIGN or ALIGN
    regions = Regions(machine)
    try:
        tier = "host" if staged else "device"
        near = fill(machine.tier(tier).view(regions.take(tier, size, WHAT, torch.bfloat16)))
        if lane == "disk_read":
            stream = stretches(machine, files, size)
            yield lambda i: machine.disk.load_all([(next(stream), near)])
        else:
            count = max(1, min(32, room(machine, "host") // size))
            home = regions.take("host", count * size, WHAT, torch.bfloat16)
            fill(machine.host.view(home))
            yield lambda i: machine.host.load_all([(home.part(i % count * size, size), near)])
    finally:
        regions.free()
