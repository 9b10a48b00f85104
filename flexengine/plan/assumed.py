"""Rates assumed for a machine that has not been measured: round numbers of a small machine of its kind.

They serve jobs so short that measuring would take longer than a better policy could save.
"""

from collections.abc import Sequence

from flexengine.places import disks_of, place_of
from flexengine.plan.capacity import Capacity
from flexengine.plan.hardware import Hardware, Table

# Matrix products: (rows, FLOP per second).
_CPU: Table = ((1, 1.5e10), (8, 4e10), (64, 1.2e11), (512, 1.5e11))
_GPU: Table = ((1, 5e11), (64, 2e13), (1024, 6e13))
_GPU32: Table = ((1, 2.5e11), (64, 8e12), (1024, 1e13))  # twice the bytes, and no tensor cores
_LOST = 0.3  # seconds that computing and a disk's reads lose per second of the other: 0.2 to 0.5 were measured


def assumed(kind: str, capacity: Capacity, same_device: Sequence[tuple[str, str]] = ()) -> Hardware:
    """Return hardware with assumed rates.

    Args:
        kind: "cpu", "sim" or "cuda".
        capacity: bytes of each place.
        same_device: pairs of disks that share a device, and so its rate.
    """
    gpu = kind == "cuda"
    products = {"float16": _GPU, "float32": _GPU32} if gpu else {"float16": _CPU, "float32": _CPU}
    memory, link = (5e11, 1.2e10) if gpu else (1.5e10, 5e9)  # bytes per second
    lanes = [disk.lanes for disk in disks_of(capacity.places)]
    reads: list[str] = [read for read, _ in lanes]
    rates = [(lane, rate) for both in lanes for lane, rate in zip(both, (1.5e9, 7e8), strict=True)]
    disks: dict[str, Table] = {lane: ((1.0, rate),) for lane, rate in rates}
    talk: dict[str, dict[str, float]] = {}
    if not gpu:
        talk = {"device": dict.fromkeys(reads, _LOST), **{lane: {"device": _LOST} for lane in reads}}
    for a, b in (*same_device, *((b, a) for a, b in same_device)):
        for lane, other in zip(place_of(a).lanes, place_of(b).lanes, strict=True):
            talk.setdefault(lane, {})[other] = 1.0
    return Hardware(
        name=f"{kind}, assumed", kind=kind,
        device_bytes=capacity.device, host_bytes=capacity.host, disk_bytes=capacity.disk,
        more_disks=capacity.more_disks, links={"h2d": ((1.0, link),), "d2h": ((1.0, link),), **disks},
        checkpoint_read=((1.0, 1.5e9),), products=products,
        prompt_attention=((1.0, 5e12 if gpu else 5e10),), decode_attention=((1.0, memory),), elementwise=memory,
        host_attention=8e9, cell_seconds=3e-4, task_seconds=5e-5, sweep_seconds=1e-3, sequence_seconds=5e-5,
        crosstalk=talk,
    )  # fmt: skip
