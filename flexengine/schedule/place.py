"""Where things live: fractions become whole tensors, sequences and gpu_batches."""

from collections.abc import Sequence

from flexengine.policy import Split

_ORDER = ("disk", "host", "device")


def place(sizes: Sequence[int], split: Split) -> list[str]:
    """Home of each item, in order: its midpoint in the cumulative size picks disk, then host, then device.

    sizes: bytes (or counts) of the items; split: fractions (device, host, disk). FlexGen's rule (systems 1.3); realised
    fractions differ from the split by rounding to whole items, so memory is checked on what this returns.
    """
    device, host, disk = split
    edges = (disk, disk + host, 1.0 + 1e-9)
    allowed = [name for name, share in zip(_ORDER, (disk, host, device), strict=True) if share > 0]
    total, before, homes = sum(sizes), 0, []
    for size in sizes:
        middle = (before + size / 2) / total if total else 0.5
        home = next(name for name, edge in zip(_ORDER, edges, strict=True) if middle < edge)
        homes.append(home if home in allowed else allowed[-1])
        before += size
    return homes
