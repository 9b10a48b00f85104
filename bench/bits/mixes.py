"""Mixed bits in the engine: the formats that each measure of harm chooses for a budget, and other uses of its bytes."""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "measured"  # the measure of the engine
Harms = Sequence[dict[str, float]]  # by layer and format


@dataclass(frozen=True)
class Choice:
    """Switches to measure.

    Attributes:
        name: where the formats come from.
        bits: average bits of the layers whose bytes are the budget.
        budget: most bytes of all weights.
        lossy: the switches.
    """

    name: str
    bits: float
    budget: int
    lossy: Any


def random_harms(harms: Harms, seed: int) -> Harms:
    """Return harms whose order of layers is random; each format keeps its mean."""
    draw = random.Random(seed)
    factors = [draw.random() for _ in harms]
    means = {b: statistics.fmean(layer[b] for layer in harms) for b in harms[0]}
    return [{b: factor * mean for b, mean in means.items()} for factor in factors]


def layer_bytes(sizes: Sequence[Any], bits: float) -> int:
    """Return the bytes of all layers at `bits` on average, between those of formats of whole bits."""
    by_bits = {int(b.removeprefix("int")): sum(layer[b] for layer in sizes) for b in ("int3", "int4", "int8")}
    low = max(b for b in by_bits if b <= bits)
    high = min(b for b in by_bits if b >= bits)
    share = (bits - low) / (high - low) if high > low else 0.0
    return int(by_bits[low] + share * (by_bits[high] - by_bits[low]))


def first_layers(sizes: Sequence[Any], budget: int) -> tuple[str, ...]:
    """Return formats in which as many first layers as fit have twice the bits, or one more: int8 instead of int4, or
    int4 instead of int3."""
    low, high = ("int4", "int8") if sum(layer["int4"] for layer in sizes) <= budget else ("int3", "int4")
    count = 0
    while count < len(sizes) and _bytes(sizes, low, high, count + 1) <= budget:
        count += 1
    return (high,) * count + (low,) * (len(sizes) - count)


def _bytes(sizes: Sequence[Any], low: str, high: str, count: int) -> int:
    return sum(layer[high if j < count else low] for j, layer in enumerate(sizes))


def choices(bits: Any, harms: Mapping[str, Harms], averages: Sequence[float], seeds: int) -> Iterator[Choice]:
    """Yield the choices of each budget.

    Args:
        bits: flexengine.guests.bits.Bits of the model.
        harms: by measure.
        averages: bits of the layers on average.
        seeds: number of random choices.
    """
    from flexengine.lossy import BUNDLED, Lossy
    from flexengine.plan.lp import Option, adabits

    rand = {f"random {seed}": random_harms(harms[OURS], seed) for seed in range(seeds)}
    for average in averages:
        room = layer_bytes(bits.layers, average)
        for name, harm in (*harms.items(), *rand.items()):
            options = [{b: Option(nbytes, harm[j].get(b or "", 0.0)) for b, nbytes in sizes.items()}
                       for j, sizes in enumerate(bits.layers)]  # fmt: skip
            found = adabits(options, room)
            yield Choice(name, average, room + bits.rest, Lossy(weights=found, calibrate=BUNDLED))
        found = first_layers(bits.layers, room)
        yield Choice("first layers", average, room + bits.rest, Lossy(weights=found, calibrate=BUNDLED))
