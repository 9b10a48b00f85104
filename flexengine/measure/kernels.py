"""Measurement of this machine's kernels: matrix products, attention, elementwise operations."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flexengine import kernels as available
from flexengine.activity import tick
from flexengine.codec.forms import make_form
from flexengine.kernels import Kernels
from flexengine.kernels.base import AttentionOptions, Compute
from flexengine.measure.links import WHAT, readable, stretches
from flexengine.measure.timing import Borrowed, beside, fill, room, seconds_per_call, timed, unnoticed
from flexengine.model.linear import Product
from flexengine.places import HOST, disks_of, lane_of
from flexengine.plan.hardware import Table
from flexengine.plan.sizes import PAGE_TOKENS
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel

ROWS = (1, 4, 16, 64, 256, 512)  # of activations
# (rows and columns of a matrix, bytes of all matrices and of a KV pool), for a CPU and a GPU. The bytes exceed the
# caches, as in jobs that stream weights.
SMALL, LARGE = (2048, 128 << 20), (8192, 1 << 30)
NARROW = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of weights for fp32 activations on a CPU
WIDTH = 2048  # columns for elementwise operations
PROMPTS, LENGTHS = (32, 128, 512), (64, 512, 2048)
HEADS, HEAD_DIM, SEQUENCES = 32, 64, 16
GROUP = 8  # queries per KV head; with this many, arithmetic, not memory, limits decode attention
SECONDS = 0.1  # for each figure
TURNS, QUICK_TURNS, WINDOW = 4, 2, 0.08  # turns alone and together; seconds of each
QUICK_ROWS, QUICK_SECONDS = (1, 64, 1024), 0.03  # rows of activations; seconds of each figure
BESIDE, MOVED = 32, 4 << 20  # rows of products, and bytes of transfers, that run at the same time


Calls = Callable[[int], object]  # does piece `number` of a lane's work, or computes product `number`


@torch.no_grad()
def measure_kernels(machine: Machine, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of `Hardware` about kernels, for activations of `dtype`.

    Takes about five seconds. Matrices and KV are allocated from the tiers, as in a job. The ledgers are unchanged
    afterwards.

    Raises:
        OutOfMemory: a tier has no free memory.
    """
    native = available.load()
    kernels = available.load_for(machine.compute)
    with unnoticed(machine):
        decode = _decode(machine, "device", kernels, dtype, LENGTHS)
        # A query takes 2 FLOP per element of KV. If memory was the limit, the true value is higher.
        flops = 2 * GROUP / dtype.itemsize
        vector = flops * _decode(machine, "device", kernels, dtype, LENGTHS[1:2], GROUP)[0][1]
        host = host_flops = 0.0
        if not machine.capacity.shared:
            host = _decode(machine, "host", native, dtype, LENGTHS[1:2])[0][1]
            host_flops = flops * _decode(machine, "host", native, dtype, LENGTHS[1:2], GROUP)[0][1]
        x, y = (fill(torch.empty(512, WIDTH, dtype=dtype, device=machine.compute), 1.0) for _ in range(2))

        def elementwise(_: int) -> object:  # a layer norm (1 in, 1 out), a residual (2, 1) and a GELU (1, 1)
            return functional.gelu(functional.layer_norm(x, (WIDTH,)) + y)

        return dict(
            products=_products(machine, dtype),
            prompt_attention=_prompts(machine, kernels, dtype),
            decode_attention=decode,
            elementwise=7.0 * x.nbytes / seconds_per_call(elementwise, SECONDS, machine),
            host_attention=host,
            vector_flops=vector,
            host_flops=host_flops,
        )


def _products(machine: Machine, dtype: torch.dtype) -> dict[str, Table]:
    """Return FLOP/s of products by dtype of the weights; only a CPU multiplies 16-bit weights by fp32 activations."""
    dtypes = NARROW if not machine.gpu and dtype == torch.float32 else (dtype,)
    numbers = (*ROWS, 2048) if machine.gpu else ROWS
    return {str(held).removeprefix("torch."): _product_rates(machine, dtype, held, numbers, SECONDS) for held in dtypes}


def _product_rates(
    machine: Machine, dtype: torch.dtype, held: torch.dtype, numbers: Sequence[int], seconds: float, form: str = "",
    compute: Compute | None = None,
) -> Table:  # fmt: skip
    """Return FLOP/s by rows. numbers: of rows. seconds: for each. Other arguments as in `products`."""
    with products(machine, dtype, held, form, compute) as product:
        works = [(rows, product(rows)) for rows in numbers]
        return tuple((float(rows), flop / seconds_per_call(call, seconds, machine)) for rows, (call, flop) in works)


@contextmanager
def products(
    machine: Machine, dtype: torch.dtype, held: torch.dtype, form: str = "", compute: Compute | None = None
) -> Iterator[Callable[[int], tuple[Calls, float]]]:
    """Yield a function that returns products for a number of rows of activations, of `dtype`, and the FLOP of one;
    they cycle through matrices, of dtype `held`, that exceed the caches. form: format of encoded matrices, "" for plain
    ones. compute: as in `Kernels.product`."""
    width, working = LARGE if machine.gpu else SMALL
    unit = max(16, make_form(form, 256, 256).block_columns) if form else 16
    width = max(unit, min(width, int((room(machine, "device") / held.itemsize) ** 0.5)) // unit * unit)
    packed = make_form(form, width, width) if form else None
    size = width * width * held.itemsize if packed is None else packed.nbytes
    count = max(1, min(working, room(machine, "device")) // size)
    product = Product(dtype, compute)
    with Borrowed(machine) as regions:
        home = regions.take("device", count * size, WHAT, held)
        weights = fill(machine.device.view(home)).view(count, *((width, width) if packed is None else (size,)))

        def work(rows: int) -> tuple[Calls, float]:
            x = fill(torch.empty(rows, width, dtype=dtype, device=machine.compute), 1.0)
            return lambda i: product(x, weights[i % count], None, packed), 2.0 * rows * width * width

        yield work


def _prompts(machine: Machine, kernels: Kernels, dtype: torch.dtype) -> Table:
    """Return FLOP/s of causal attention: 2 per multiply-add, in q @ k and in weights @ v, of visible pairs."""
    points = []
    for tokens in PROMPTS:
        tick()
        shape = (1, tokens, HEADS, HEAD_DIM)
        q, k, v = (fill(torch.empty(shape, dtype=dtype, device=machine.compute), 1.0) for _ in range(3))

        def call(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            return kernels.attend_prompt(q, k, v, AttentionOptions(HEAD_DIM**-0.5))

        flop = 4.0 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
        points.append((float(tokens), flop / seconds_per_call(call, SECONDS, machine)))
    return tuple(points)


def _decode(
    machine: Machine, tier: str, kernels: Kernels, dtype: torch.dtype, lengths: Sequence[int], group: int = 1
) -> Table:
    """Return the bytes of KV per second of decode attention by tokens of each of SEQUENCES sequences, whose pages are
    at random places of a pool in a tier. group: queries per KV head."""
    working = min((LARGE if machine.gpu else SMALL)[1], room(machine, tier))
    one = 2 * PAGE_TOKENS * HEAD_DIM * dtype.itemsize
    heads = max(1, min(HEADS // group, working // one))
    page = heads * one
    pages = max(1, working // page)
    generator = torch.Generator().manual_seed(0)
    with Borrowed(machine) as regions:
        pool = fill(machine.tier(tier).view(regions.take(tier, pages * page, WHAT, dtype)))
        pool = pool.view(pages, 2, heads, PAGE_TOKENS, HEAD_DIM)
        q = fill(torch.empty(SEQUENCES, group * heads, HEAD_DIM, dtype=dtype, device=pool.device), 1.0)
        points, options = [], AttentionOptions(HEAD_DIM**-0.5)
        for length in lengths:
            tables = torch.randint(pages, (8, SEQUENCES, length // PAGE_TOKENS), generator=generator, dtype=torch.int32)
            tables, held = tables.to(pool.device), torch.full((SEQUENCES,), length, dtype=torch.int32).to(pool.device)

            def call(i: int, tables: Tensor = tables, held: Tensor = held) -> object:
                return kernels.decode_attention(q, pool, tables[i % len(tables)], held, options)

            seconds = seconds_per_call(call, SECONDS, machine)
            points.append((float(length), SEQUENCES * length * page / PAGE_TOKENS / seconds))
        return tuple(points)


@torch.no_grad()
def measure_crosstalk(
    machine: Machine, checkpoint: Sequence[Path] = (), quick: bool = False
) -> dict[str, dict[str, float]]:
    """Return `Hardware.crosstalk` between compute and the transfers that the CPU does at the same time, and between
    the reads of two disks, whose directories may lie on one device, and between reads and writes of one disk.

    The transfers beside compute are reads of the checkpoint and of further disks, writes and, if the CPU is the compute
    device, h2d. Let a be the factor by which the first of two lanes slows down while the second works, and b the factor
    by which the second slows down. Then c seconds of work of the first, alone, and d seconds of the second end together
    after max(d + c a (1 - 1/b), c + d b (1 - 1/a)) seconds.

    Args:
        quick: leave out further disks, and writes.
    """
    crosstalk: dict[str, dict[str, float]] = {}
    reads = [disk.lanes[0] for disk in disks_of(machine.tiers)]
    links = reads if machine.gpu else [*reads, "h2d"]
    with unnoticed(machine), readable(machine, checkpoint, quick) as files:
        own = [] if machine.no_offload else [disk.lanes for disk in disks_of(machine.tiers)]
        links += [write for _, write in own]
        all_pairs = [*(("device", link) for link in links), *combinations(reads, 2), *own]
        few = [("device", link) for link in links if link == "h2d" or (link == reads[0] and files)]
        for lane, other in few if quick else all_pairs:
            a, b = _slowdowns(machine, (lane, other), files, quick)
            crosstalk.setdefault(other, {})[lane] = min(1.0, max(0.0, a * (1 - 1 / b)))
            crosstalk.setdefault(lane, {})[other] = min(1.0, max(0.0, b * (1 - 1 / a)))
    return crosstalk


def _slowdowns(machine: Machine, lanes: tuple[str, str], files: Mapping[Path, int], quick: bool) -> tuple[float, float]:
    """Return the factors by which two lanes slow down if both work at the same time. Turns alone and together
    alternate. The memory is free again afterwards. quick: make few short turns."""
    count, window = (QUICK_TURNS, WINDOW / 2) if quick else (TURNS, WINDOW)
    turns = list[tuple[float, ...]]()
    with _work(machine, lanes[0], files) as first, _work(machine, lanes[1], files) as second:

        def rate() -> float:
            def call(number: int) -> None:
                first(number)
                machine.synchronize()

            seconds, count = timed(call, window, machine)
            return count / seconds

        for _ in range(count):
            tick()
            alone = rate(), beside(second, WHAT, lambda: time.sleep(window))[0]
            turns.append((*alone, *beside(second, WHAT, rate)))
    one, other, other_beside, one_beside = map(median, zip(*turns, strict=True))
    return one / one_beside, other / other_beside


@contextmanager
def _work(machine: Machine, lane: str, files: Mapping[Path, int]) -> Iterator[Calls]:
    if lane == "device":
        dtype = torch.bfloat16 if machine.gpu else torch.float32
        with products(machine, dtype, torch.bfloat16) as product:
            yield product(BESIDE)[0]
        return
    disk = lane_of(lane).place
    staged, place = disk is not None and not machine.capacity.shared, disk or HOST
    size = (
        min(MOVED, room(machine, "device", "host"), room(machine, place), max(files.values(), default=MOVED))
        // ALIGN
        * ALIGN
    )
    size = size or ALIGN
    with Borrowed(machine) as regions:
        tier = "host" if staged else "device"
        target = fill(machine.tier(tier).view(regions.take(tier, size, WHAT, torch.bfloat16, reads=True)))
        if lane == "disk_read":
            stream = stretches(machine, files, size)
            yield lambda i: machine.disk.load_all([(next(stream), target)])
        else:
            count, source = max(1, min(32, room(machine, place) // size)), machine.tier(place)
            home = regions.take(place, count * size, WHAT, torch.bfloat16)
            parts = [home.part(i * size, size) for i in range(count)]
            if lane_of(lane).way == "write":
                yield lambda i: source.store(target, parts[i % count])
                return
            for part in parts:
                source.store(target, part)
            yield lambda i: source.load_all([(parts[i % count], target)])


@torch.no_grad()
def measure_forms(machine: Machine, opened: OpenModel, known: Iterable[str] = ()) -> dict[str, Table]:
    """Return FLOP/s of products with the model's encoded weights, by format as in `Hardware.products`.

    Args:
        known: formats to leave out.
    """
    compute: Compute | None = opened.skeleton.product.compute
    by, names = f" by {compute}" if compute else "", {form.packed.name for form in opened.forms.values()}
    return {
        name + by: quick_products(machine, opened.dtype, torch.uint8, name, compute)
        for name in sorted(names)
        if name + by not in known
    }


def quick_products(
    machine: Machine, dtype: torch.dtype, held: torch.dtype, form: str = "", compute: Compute | None = None
) -> Table:
    """Return FLOP/s of products by QUICK_ROWS, in a moment for each. Arguments as in `products`."""
    return _product_rates(machine, dtype, held, QUICK_ROWS, QUICK_SECONDS, form, compute)
