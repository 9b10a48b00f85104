"""Processor and memory: what the machine has, and what this process may use."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

# Names of instruction sets, by the flags of /proc/cpuinfo (x86: flags, ARM: Features).
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "i8mm": "I8MM",
    "bf16": "BF16",
}


@dataclass(frozen=True)
class Cpu:
    """The processor.

    Attributes:
        model: name of the product.
        machine: architecture, such as x86_64.
        cores: logical cores of the machine.
        usable: logical cores that this process may run on.
        quota: cores that the cgroups allow, which may be a fraction; None for no limit.
        features: instruction sets that speed up products.
    """

    model: str
    machine: str
    cores: int
    usable: int
    quota: float | None
    features: tuple[str, ...]

    @property
    def effective(self) -> float:
        """Return the cores that this process can keep busy."""
        return min(self.usable, self.quota or self.usable)


@dataclass(frozen=True)
class MemoryFacts:
    """RAM.

    Attributes:
        total: bytes of the machine.
        free: bytes that processes can still take.
        usable: bytes that this process can still take, within its cgroups.
        limit: bytes of the smallest limit of its cgroups; None if it is not below `total`.
        limit_used: bytes taken of this limit, without cached files; None without a limit.
        swap: bytes of swap.
        swap_used: bytes of swap in use.
        huge_pages: setting of transparent huge pages: always, madvise or never; None if there is none.
    """

    total: int
    free: int
    usable: int
    limit: int | None
    limit_used: int | None
    swap: int
    swap_used: int
    huge_pages: str | None


def cpu(root: Path = Path("/")) -> Cpu:
    """Return the processor. root: directory that holds proc/ and sys/."""
    from flexengine.tier.limits import cgroup_cores

    fields: dict[str, str] = {}
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    features = tuple(name for flag, name in _FEATURES.items() if flag in flags)
    model = fields.get("model name") or platform.processor() or platform.machine()
    usable = len(os.sched_getaffinity(0))
    return Cpu(model, platform.machine(), os.cpu_count() or usable, usable, cgroup_cores(root), features)


def memory(root: Path = Path("/")) -> MemoryFacts:
    """Return the RAM. root: directory that holds proc/ and sys/."""
    import psutil

    from flexengine.tier.limits import cgroup_memory, usable_memory

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, used = min(cgroup_memory(root), default=(None, None))
    if limit is None or limit >= ram.total:
        limit = used = None
    usable, pages = usable_memory(root), _huge_pages(root)
    return MemoryFacts(ram.total, ram.available, usable, limit, used, swap.total, swap.used, pages)


def _huge_pages(root: Path) -> str | None:
    try:
        words = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)
