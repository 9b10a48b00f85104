"""Timing of calls within a time budget, memory available for it, and detection of load from other programs."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import TypeVar

import psutil
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from flexengine.activity import RunningActivity, activity, message, tick
from flexengine.runtime.lane import Done, new_lane
from flexengine.system.limits import usable_memory
from flexengine.tier.machine import Machine
from flexengine.worker.regions import Regions

MIN_CALLS = 3  # minimum number of timed calls, if the budget allows
MAX_CALLS = 1000  # maximum number of timed calls
DISTURBED = 0.25  # cores; other programs may use this much before a message says so
SPOILED = 0.25  # share of the threads; rates that others disturbed by this much are measured again
AGAIN = "so measure again when the machine is idle (flexengine measure MODEL --again)"
NOTICED = 0.5  # seconds; shorter measurements are not checked, as CPU time is counted in 1/100 s
T = TypeVar("T")
BURST = 8  # calls queued on a GPU between two synchronisations, as a lane does


def seconds_per_call(
    call: Callable[[int], object],
    budget: float,
    machine: Machine | None = None,
    before: Callable[[], object] | None = None,
) -> float:
    """Return the median seconds of call(0), call(1), ... over about `budget` seconds. The first call warms up caches,
    compiled code and pages, and counts only if it takes the whole budget. machine: its GPU work, queued by the calls,
    is waited for; None for none. before: called before each call, on a GPU before each BURST of calls; its seconds do
    not count."""
    queued = machine is not None and machine.gpu
    number, times = 0, list[float]()
    began = time.perf_counter()
    while len(times) < MAX_CALLS:
        if before is not None:
            before()
            if machine is not None:  # what `before` queued on a GPU must have ended, too
                machine.synchronize()
        start = time.perf_counter()
        count = BURST if queued and number else 1
        for _ in range(count):
            call(number)
            number += 1
        if machine is not None:
            machine.synchronize()
        now = time.perf_counter()
        if number > count or now - began >= budget:
            times.append((now - start) / count)
        if now - began >= budget and (len(times) >= MIN_CALLS or now - began >= 2 * budget):
            break
    tick()
    return median(times)


def timed(call: Callable[[int], object], budget: float, machine: Machine, first: int = 0) -> tuple[float, int]:
    """Make calls with rising numbers from `first` on, for about `budget` seconds. Return the seconds, and how many."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < budget:
        call(first + count)
        count += 1
    machine.synchronize()
    seconds = time.perf_counter() - began
    tick()
    return seconds, count


def beside(call: Callable[[int], object], name: str, work: Callable[[], T]) -> tuple[float, T]:
    """Make calls in a lane of that name while this thread runs `work`. Return calls per second and work's result."""
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
    """Return the nearest seconds (least squares), in the order of rising work, that never fall. More work takes no less
    time, so falls are noise."""
    return [float(x) for x in isotonic_regression(seconds).x]


def room(machine: Machine, *tiers: str) -> int:
    """Return the bytes that a measurement may allocate: half of the bytes free in each tier, at most 1/4 of the RAM.

    If device and host share one memory and both are named, this is the size for each of them.
    """
    sizes = [usable_memory() // 4]
    for tier in tiers:
        ledger = machine.tier(tier).ledger
        if ledger.capacity is not None:
            sizes.append((ledger.capacity - ledger.used) // 2)
    if machine.gpu and tiers == ("device",):
        sizes = sizes[1:] or sizes
    shared = machine.capacity.shared and {"device", "host"} <= set(tiers)
    return min(sizes) // (2 if shared else 1)


class Borrowed(Regions):
    """Memory of a measurement. First the system gets what earlier measurements freed, which malloc would hold beside
    it."""

    def __init__(self, machine: Machine) -> None:
        machine.give_back()
        super().__init__(machine)


@contextmanager
def unnoticed(machine: Machine) -> Iterator[None]:
    """Restore the ledgers' peaks after the block, as peaks are reported for jobs only, and give its memory back."""
    ledgers = [tier.ledger for tier in machine.tiers.values()]
    peaks = [ledger.peak for ledger in ledgers]
    try:
        yield
    finally:
        for ledger, peak in zip(ledgers, peaks, strict=True):
            ledger.peak = max(peak, ledger.used)
        machine.give_back()


def measuring(what: str, once: str, seconds: str) -> AbstractContextManager[RunningActivity]:
    """Report the block as a measurement of a thing, once for this `once` (model or machine, for which its rates are
    stored), with its usual duration."""
    text = f"measuring {what}, for the plan, once for this {once} (about {seconds})"
    return activity("measuring", text, level=logging.INFO)


@contextmanager
def noticing(remedy: str = AGAIN) -> Iterator[list[float]]:
    """Report after the block if other programs used cores that this process needed. Yield a list, to which the number
    of these cores is then added if they are many (SPOILED). remedy: end of the message if they are many."""
    others, began, noticed = _others_seconds(), time.perf_counter(), list[float]()
    yield noticed
    if (seconds := time.perf_counter() - began) < NOTICED:
        return
    cores, threads = (_others_seconds() - others) / seconds, torch.get_num_threads()
    if (missing := cores - (psutil.cpu_count() or 1) + threads) > DISTURBED:
        noticed += [cores] if missing > SPOILED * threads else []
        message(
            f"other programs kept {cores:.1f} cores busy during the measurement; the measured rates may be too low,"
            f" {remedy if noticed else AGAIN}",
            logging.WARNING,
        )


def undisturbed(measure: Callable[[], T]) -> T:
    """Return what `measure` returns. It is called a second time if other programs used much of the cores during the
    first call (SPOILED)."""
    with noticing("so they are measured again now") as disturbed:
        found = measure()
    if disturbed:
        with noticing():
            found = measure()
    return found


def _others_seconds() -> float:
    machine, own = psutil.cpu_times(), os.times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return float(sum(machine) - getattr(machine, "guest", 0.0) - idle - own.user - own.system)


def fill(target: Tensor, scale: float = 0.02) -> Tensor:
    """Fill `target` with random numbers and return it.

    All pages must be written, since unwritten pages map to one zero page, which stays in the CPU's cache. Numbers
    repeat after 2^20 elements. uint8 tensors get bytes of which any two form an fp16 number from 0 to 1, as encoded
    weights hold scales between their codes.

    Args:
        target: contiguous.
        scale: standard deviation of the numbers.
    """
    flat = target.view(-1)
    generator = torch.Generator(flat.device).manual_seed(0)
    first = flat[: 1 << 20]  # written in place, as temporary tensors would leave holes between a model's weights
    if flat.dtype == torch.uint8:
        first.random_(0, 60, generator=generator)
    else:
        first.normal_(0.0, scale, generator=generator)
    for start in range(first.numel(), flat.numel(), 1 << 20):
        part = flat[start : start + (1 << 20)]
        part.copy_(first[: part.numel()])
    return target
