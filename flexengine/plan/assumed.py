"""What is assumed of a machine before it has been measured: round numbers of a small one of its kind.

Good enough for a job so short that measuring would take longer than any choice could save.
"""

from flexengine.places import is_disk
from flexengine.plan.capacity import Capacity
from flexengine.plan.hardware import Hardware, Table

_CORE: Table = ((1, 1.5e10), (8, 4e10), (64, 1.2e11), (512, 1.5e11))
# Computing and reading slow each other where both take the same cores: 0.2 to 0.5 were measured.
_TALK = 0.3
_GPU: Table = ((1, 5e11), (64, 2e13), (1024, 6e13))
_GPU32: Table = ((1, 2.5e11), (64, 8e12), (1024, 1e13))  # twice the bytes, and no tensor cores


def assumed(kind: str, capacity: Capacity) -> Hardware:
    """Hardware of kind cpu, sim or cuda with these capacities and rates that nobody measured."""
    gpu = kind == "cuda"
    products = {"float16": _GPU, "float32": _GPU32} if gpu else {"float16": _CORE, "float32": _CORE}
    memory, link = (5e11, 1.2e10) if gpu else (1.5e10, 5e9)
    names = filter(is_disk, capacity.places)
    disks = {f"{disk}_{way}": ((1.0, rate),) for disk in names for way, rate in (("read", 1.5e9), ("write", 7e8))}
    reads = [lane for lane in disks if lane.endswith("read")]
    return Hardware(
        name=f"{kind}, assumed", kind=kind,
        device_bytes=capacity.device, host_bytes=capacity.host, disk_bytes=capacity.disk,
        more_disks=capacity.more_disks, links={"h2d": ((1.0, link),), "d2h": ((1.0, link),), **disks},
        checkpoint_read=((1.0, 1.5e9),), products=products,
        prompt_attention=((1.0, 5e12 if gpu else 5e10),), decode_attention=((1.0, memory),), elementwise=memory,
        host_attention=8e9, cell_seconds=3e-4, task_seconds=5e-5, sweep_seconds=1e-3, sequence_seconds=5e-5,
        crosstalk={} if gpu else {"device": dict.fromkeys(reads, _TALK), **{lane: {"device": _TALK} for lane in reads}},
    )  # fmt: skip
