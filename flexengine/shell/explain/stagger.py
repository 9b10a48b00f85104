"""Engines that share attention workers: their pace, and the numbers of engines and workers that pay.

Several engines on one pool of workers run the fixed order (`bench/stagger/orders.py`). With k gpu_batches each, R
engines have n = k R gpu_batches in flight. A slice of a gpu_batch takes t_m seconds, its attention t_a on the whole
pool. The seconds per layer of all gpu_batches are

    period = max(n t_a, n t_m / R, t_m + t_a)

The workers are busy, or the devices are, or each gpu_batch waits for nothing but its own slice and attention. All
engines are like the one of the plan, with a device, links and RAM of their own.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from flexengine.places import MOST_ENGINES, MOST_WORKERS, workers_of
from flexengine.plan import guest
from flexengine.plan.cost import Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import count, digits, duration
from flexengine.plan.hardware import Hardware
from flexengine.plan.workload import Workload
from flexengine.policy import HEADS, ORDERS, REQUESTS, ROTATIONAL
from flexengine.shell.explain.links import NEGLIGIBLE, WorkerLinks, span, token_bytes

ROUNDING = 1e-9  # relative; of quotients that are whole numbers


@dataclass(frozen=True)
class Pace:
    """Seconds per layer of one engine, and of the workers for this engine."""

    device: float  # of the device, for all gpu_batches of the engine: k t_m
    pool: float  # of the workers, for all gpu_batches of the engine: k t_a
    turn: float  # from a slice of a gpu_batch to its next slice, if the gpu_batch waits for no other: t_m + t_a

    @staticmethod
    def of(model: ModelFacts, links: WorkerLinks, workers: int) -> "Pace":
        """Return the pace with a number of workers like those of a plan, which divide all work evenly.

        If streamed weights arrive more slowly than the device computes, `device` is the seconds of loading: an engine
        loads a layer once for all its gpu_batches. `turn` has the products of the slice alone, as the other gpu_batches
        also wait for the weights. The workers are busy with transfers if these take longer than attention.

        With partition `requests`, a worker answers for whole gpu_batches, so with more workers no answer comes sooner
        until each has less than one. With the others every worker handles each question, so handling is not divided.
        """
        asked = max(1.0, links.asked / workers) if links.partition == REQUESTS else links.asked  # questions to a worker
        attending = links.handling * asked + links.reading * links.workers / workers
        moving = _moving(model, links, workers)
        turn = links.computing / links.batches + (moving + attending) / asked
        return Pace(links.working, max(moving, attending), turn)

    def period(self, engines: int = 1) -> float:
        """Return the seconds per layer of all gpu_batches of a number of engines."""
        return max(self.device, engines * self.pool, self.turn)

    @property
    def steady(self) -> bool:
        """Whether the device of a single engine waits for no worker, or for less than `NEGLIGIBLE` of the time."""
        return self.period() <= (1 + NEGLIGIBLE) * self.device

    @property
    def engines(self) -> int:
        """The most engines that are all as fast as if the workers served none but them, up to `MOST_ENGINES`. More
        engines make the workers the bottleneck; 0 if a single one does."""
        return min(MOST_ENGINES, int((1 + NEGLIGIBLE) * max(self.device, self.turn) / self.pool))


def _moving(model: ModelFacts, links: WorkerLinks, workers: int) -> float:
    """Return the seconds of transfers of each worker, per layer."""
    return links.moving * token_bytes(model, links.partition, workers) / workers / (links.token_bytes / links.workers)


def best(paces: Mapping[int, Pace], room: float, prices: tuple[float, float]) -> tuple[int, int]:
    """Return the numbers of engines and workers with most slices per second and price, or the fewest that have less by
    at most `NEGLIGIBLE`.

    Args:
        paces: by number of workers.
        room: engines whose KV cache a single worker holds.
        prices: of an engine and of a worker, in one currency.
    """

    def value(numbers: tuple[int, int]) -> float:
        engines, workers = numbers
        return engines / (paces[workers].period(engines) * (engines * prices[0] + workers * prices[1]))

    pairs = product(range(1, MOST_ENGINES + 1), paces)
    values = {pair: value(pair) for pair in pairs if pair[0] <= room * pair[1] * (1 + ROUNDING)}
    most = max(values.values()) * (1 - NEGLIGIBLE)
    return min((numbers for numbers, found in values.items() if found >= most), key=sum)


@dataclass(frozen=True)
class Bargain:
    """The numbers of engines and workers with most tokens per second and price."""

    engines: int
    workers: int
    tok_s: float  # tokens per second of all engines in mean decode sweeps
    price: float  # of all engines and workers
    gain: float  # tokens per second and price, relative to those of the plan's engine and workers


@dataclass(frozen=True)
class EngineSharing:
    """Engines and workers that fit each other, for a plan with attention workers."""

    # t_m, of the device for one gpu_batch; of loading its part of the weights if that takes longer
    slice_seconds: float
    # attention_seconds, transfer_seconds: t_a of one gpu_batch on a single worker, and of its transfers, both
    # ways
    attention_seconds: float
    transfer_seconds: float
    batches: float  # gpu_batches of the engine in a mean sweep
    enough: int  # the fewest gpu_batches of this size with which the device or the workers are always busy
    workers: int
    engines: int  # `Pace.engines` with these workers
    held: int | None  # engines whose KV cache the free memory of these workers holds; None for no limit
    # the fewest workers that hold the KV cache of this engine, and with which its device is always busy; None if
    # no number of workers does
    fewest: int | None
    bargain: Bargain | None  # the best numbers for the money; None without prices

    @staticmethod
    def of(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> "EngineSharing | None":
        """Return the numbers for a prediction; None if workers attend to nothing."""
        links = WorkerLinks.of(model, hardware, prediction)
        if links is None or hardware.filed:  # a file is slower than the others, and takes only what they cannot hold
            return None
        numbers = (w for w in range(1, MOST_WORKERS + 1) if links.partition != HEADS or model.kv_heads % w == 0)
        paces = {workers: Pace.of(model, links, workers) for workers in numbers}
        now, room = paces[links.workers], _room(hardware, prediction)
        large = (w for w in paces if room * w * (1 + ROUNDING) >= links.workers)
        # (t_m + t_a) / max(t_m, t_a), and one gpu_batch if weights arrive more slowly than that.
        turns = links.batches * now.turn / max(links.computing, now.pool)
        enough = 1 if now.turn <= links.loading else math.ceil(turns * (1 - ROUNDING))
        return EngineSharing(
            slice_seconds=now.device / links.batches,
            attention_seconds=links.handling + links.reading * links.workers / links.asked,
            transfer_seconds=_moving(model, links, 1) / links.asked, batches=links.batches,
            enough=enough, workers=links.workers, engines=now.engines,
            held=None if room == math.inf else int(room), fewest=next((w for w in large if paces[w].steady), None),
            bargain=_bargain(hardware, links, paces, room / links.workers, len(model.layers)),
        )  # fmt: skip


def _room(hardware: Hardware, prediction: Prediction) -> float:
    """Return how often the KV cache that a plan has at workers fits their memory."""
    used = {worker: prediction.layout.total(worker) for worker in workers_of(hardware.places)}
    limits = hardware.capacity.limits
    fits = (limit / nbytes for worker, nbytes in used.items() if nbytes and (limit := limits[worker]) is not None)
    return max(1.0, min(fits, default=math.inf))


def _bargain(
    hardware: Hardware, links: WorkerLinks, paces: Mapping[int, Pace], room: float, layers: int
) -> Bargain | None:
    """Return the best numbers for the money; None without prices. room: engines whose KV cache one worker holds."""
    engine, total = hardware.price(False), hardware.price(True)
    if not total:
        return None
    worker = (total - engine) / len(hardware.workers)

    def numbers(engines: int, workers: int) -> tuple[float, float]:
        tok_s = engines * links.sequences / (layers * paces[workers].period(engines))
        return tok_s, engines * engine + workers * worker

    engines, workers = best(paces, room, (engine, worker))
    (tok_s, price), (before, paid) = numbers(engines, workers), numbers(1, links.workers)
    return Bargain(engines, workers, tok_s, price, tok_s / price / (before / paid))


def sharing_words(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> list[str]:
    """Return lines on engines and workers that fit each other; [] if there are no workers."""
    if hardware.engines > 1:
        return turn_words(model, hardware, prediction)
    s = EngineSharing.of(model, hardware, prediction)
    if s is None:
        return []
    lines = [
        f"a slice of a gpu_batch takes {duration(s.slice_seconds)}; on one worker its attention takes"
        f" {duration(s.attention_seconds)}, its transfers {duration(s.transfer_seconds)}; {_batches(s.enough)}"
        f" {'is' if s.enough == 1 else 'are'} enough, a mean sweep has {s.batches:.3g}",
        f"{_engines(s)}; {_fewest(s)}",
    ]
    if (b := s.bargain) is not None:
        engines, workers = count(b.engines, "engine", "engines"), count(b.workers, "worker", "workers")
        lines.append(
            f"best for the money: {engines} and {workers} decode {digits(b.tok_s)} tok/s at a price of"
            f" {digits(b.price)}, {digits(b.gain)}x the tok/s per unit of price"
        )
    return [f"            {line}" for line in lines]


def turn_words(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> list[str]:
    """Return lines on engines that take turns on slices; [] if workers attend to nothing."""
    links, policy = WorkerLinks.of(model, hardware, prediction), prediction.policy
    if links is None:
        return []
    turns, engines = guest("turns"), hardware.engines
    seconds = turns.periods(model, hardware, policy, max(links.moving, links.attending), links.away)
    other = next(order for order in ORDERS if order != policy.order)
    batches = count(turns.in_flight(policy, hardware), "gpu_batch", "gpu_batches")
    return [
        f"            {engines} engines take turns, order {policy.order}: slice j of gpu_batch k is computed on engine"
        f" {'(j + k)' if policy.order == ROTATIONAL else 'k'} mod {engines}",
        f"            a layer of {batches} takes {duration(seconds[policy.order])}, in {other} order"
        f" {duration(seconds[other])}",
    ]


def _batches(number: float) -> str:
    return f"{number:.3g} {'gpu_batch' if number == 1 else 'gpu_batches'}"


def _engines(s: EngineSharing) -> str:
    pool = f"{s.workers} workers {'have' if s.engines else 'are'}"
    if s.workers == 1:
        pool = f"the worker {'has' if s.engines else 'is'}"
    if not s.engines:
        return f"{pool} too slow for this engine"
    engines = f"{MOST_ENGINES} engines or more" if s.engines == MOST_ENGINES else count(s.engines, "engine", "engines")
    held = "" if s.held is None or s.held >= s.engines else f", and memory for {s.held}"
    return f"{pool} time for {engines} like this one ({_batches(s.engines * s.batches)}){held}"


def _fewest(s: EngineSharing) -> str:
    if s.fewest is None:
        return "with no number of workers is its device always busy"
    workers = count(s.fewest, "worker", "workers")
    return f"with {workers} its device is always busy" if s.fewest > s.workers else (f"this engine needs {workers}")


def as_json(model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction) -> dict[str, Any]:
    """Return `WorkerLinks`, the lengths of prompts at which workers pay, and `EngineSharing`; {} without workers."""
    links, sharing = WorkerLinks.of(model, hardware, prediction), EngineSharing.of(model, hardware, prediction)
    if links is None:
        return {}
    more = {"meanwhile": links.meanwhile, "longest": links.longest, "hides": links.hides}
    pays = span(model, hardware, workload, prediction.policy)
    values = {"workers": asdict(links) | more | {"pays": pays}}
    return values if sharing is None else values | {"sharing": asdict(sharing)}
