"""How long a call takes, within a budget; what of a machine may be used meanwhile, and whether others used it."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

import psutil
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from flexengine.runtime.lane import Done, new_lane
from flexengine.tier.limits import usable_memory
from flexengine.tier.machine import Machine

LEAST = 3  # calls that count, if the budget allows
MOST = 1000
DISTURBED = 0.25  # cores; what other programs may take without being mentioned
NOTICED = 0.5  # seconds from which on that can be told: processor time is counted in hundredths
T = TypeVar("T")
BURST = 8  # calls queued on a GPU between two waits, as a lane does


def seconds_per_call(
    call: Callable[[int], object],
    budget: float,
    machine: Machine | None = None,
) -> float:
    """Seconds of call(0), call(1), ... over about `budget` seconds: what is typical, as a job meets good and bad
    moments alike.

    The first call warms up caches, compiled code and pages, and counts only if it takes the whole budget. machine: what
    the calls queue on its GPU is waited for.
    """
    queued = machine is not None and machine.kind == "cuda"
    settle = machine.synchronize if machine is not None else _nothing
    number, found = 0, list[float]()
    began = time.perf_counter()
    while len(found) < MOST:
        start = time.perf_counter()
        count = BURST if queued and number else 1
        for _ in range(count):
            call(number)
            number += 1
        settle()
        now = time.perf_counter()
        if number > count or now - began >= budget:
            found.append((now - start) / count)
        if now - began >= budget and (len(found) >= LEAST or now - began >= 2 * budget):
            break
    return median(found)


def beside(call: Callable[[int], object], name: str, work: Callable[[], T]) -> tuple[float, T]:
    """Calls per second, call(0), call(1), ..., in a lane while this thread does `work`, and what that returned."""
    over, done, rates = Done(), Done(), list[float]()

    def calls() -> None:
        began, number = time.perf_counter(), 0
        while not number or not over.ended:
            call(number)
            number += 1
        rates.append(number / (time.perf_counter() - began))

    lane = new_lane("thread", name)
    try:
        lane.submit(calls, (), done)
        result = work()
    finally:
        over.set()
        lane.close()
    done.wait()
    return rates[0], result


def without_falls(seconds: Sequence[float]) -> list[float]:
    """Return the nearest seconds (least squares) that never fall. More work takes no less time, so falls are noise.

    Args:
        seconds: in the order of rising work.
    """
    return [float(x) for x in isotonic_regression(seconds).x]


def _nothing() -> None:
    pass


def room(machine: Machine, *tiers: str) -> int:
    """Bytes that measuring may take of these memories together: half of what is left, a quarter of the RAM there is."""
    sizes = [usable_memory() // 4]
    for tier in tiers:
        ledger = machine.tier(tier).ledger
        if ledger.capacity is not None:
            sizes.append((ledger.capacity - ledger.used) // 2)
    if machine.kind == "cuda" and tiers == ("device",):
        sizes = sizes[1:] or sizes
    shared = machine.capacity.shared and {"device", "host"} <= set(tiers)
    return min(sizes) // (2 if shared else 1)


@contextmanager
def unnoticed(machine: Machine) -> Iterator[None]:
    """The ledgers' peaks, which tell of jobs, are afterwards what they were."""
    ledgers = [machine.tier(tier).ledger for tier in ("device", "host", "disk")]
    peaks = [ledger.peak for ledger in ledgers]
    try:
        yield
    finally:
        for ledger, peak in zip(ledgers, peaks, strict=True):
            ledger.peak = max(peak, ledger.used)


@contextmanager
def noticing(say: Callable[[str], None]) -> Iterator[None]:
    """Says afterwards if other programs took processor time that this one wanted."""
    others, began = _others_seconds(), time.perf_counter()
    yield
    if (seconds := time.perf_counter() - began) < NOTICED:
        return
    cores = (_others_seconds() - others) / seconds
    if cores > (psutil.cpu_count() or 1) - torch.get_num_threads() + DISTURBED:
        say(f"other programs kept {cores:.1f} cores busy meanwhile; the machine will be taken for a slower one")


def _others_seconds() -> float:
    """Processor seconds that other programs have used so far."""
    machine, own = psutil.cpu_times(), os.times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return float(sum(machine) - getattr(machine, "guest", 0.0) - idle - own.user - own.system)


def fill(target: Tensor, scale: float = 0.02) -> Tensor:
    """Normal numbers, some of them repeated: pages nobody wrote to are all one page, which stays in the cache. Bytes
    are such that any two of them, as fp16, are from 0 to 1: the scales of encoded weights lie among their codes."""
    flat = target.view(-1)
    generator = torch.Generator().manual_seed(0)
    count = min(flat.numel(), 1 << 20)
    if flat.dtype == torch.uint8:
        block = torch.randint(0, 60, (count,), dtype=torch.uint8, generator=generator).to(flat.device)
    else:
        block = (torch.randn(count, generator=generator) * scale).to(flat.device, flat.dtype)
    for at in range(0, flat.numel(), 1 << 20):
        part = flat[at : at + (1 << 20)]
        part.copy_(block[: part.numel()])
    return target
