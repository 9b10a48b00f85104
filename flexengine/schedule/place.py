"""Where things live: fractions become whole tensors, sequences and gpu_batches."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from flexengine.policy import TIERS, Split

_ORDER = ("disk", "host", "device")


def place(sizes: Sequence[int], split: Split) -> list[str]:
    """Home of each item, in order: its midpoint in the cumulative size picks disk, then host, then device.

    sizes: bytes (or counts) of the items; split: fractions (device, host, disk). FlexGen's rule (systems 1.3); realised
    fractions differ from the split by rounding to whole items, so memory is checked on what this returns.
    """
    device, host, disk = split
    edges = (disk, disk + host, 1.0 + 1e-9)
    last = "device" if device > 0 else "host" if host > 0 else "disk"
    allowed = [name if share > 0 else last for name, share in zip(_ORDER, (disk, host, device), strict=True)]
    total, before, homes = sum(sizes), 0, []
    for size in sizes:
        middle = (before + size / 2) / total if total else 0.5
        homes.append(allowed[bisect_right(edges, middle)])
        before += size
    return homes


@lru_cache(maxsize=1024)
def places(count: int, split: Split) -> Mapping[str, int]:
    """How many of so many items of one size place() puts on each tier that gets any. Kept, as place_groups() is."""
    homes = Counter(place([1] * count, split))
    return {tier: homes[tier] for tier in TIERS if homes[tier]}


@lru_cache(maxsize=256)
def place_groups(groups: tuple[tuple[int, ...], ...], split: Split) -> tuple[tuple[str, ...], ...]:
    """place() of each group in turn, making up for what rounding to whole items left of the groups before it.

    So the whole comes within about half an item of the split, where place() alone repeats one rounding error in every
    group: an OPT layer's tensors are 1/12 and 1/3 of it, and 27 % of each layer would be nothing or a third. Kept, for
    whoever searches a policy asks for the same placements over and over.
    """
    if max(split) == 1.0:
        home = TIERS[split.index(1.0)]
        return tuple((home,) * len(sizes) for sizes in groups)
    homes: list[tuple[str, ...]] = []
    owed = dict.fromkeys(TIERS, 0.0)  # what each should have got so far less what it got
    for sizes in groups:
        total = sum(sizes)
        for tier, share in zip(TIERS, split, strict=True):
            owed[tier] += share * total
        device, host, disk = (max(0.0, n) if share else 0.0 for n, share in zip(owed.values(), split, strict=True))
        whole = device + host + disk
        homes.append(tuple(place(sizes, (device / whole, host / whole, disk / whole) if whole else split)))
        for size, home in zip(sizes, homes[-1], strict=True):
            owed[home] -= size
    return tuple(homes)
