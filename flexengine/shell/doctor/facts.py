"""All facts of `flexengine doctor`, collected."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from flexengine import __version__
from flexengine.config import cache_root
from flexengine.places import MOST_DISKS
from flexengine.shell.cachedir.items import contents, hub_cache, hub_directory
from flexengine.shell.doctor import Failed, attempt
from flexengine.shell.doctor.machine import Cpu, Disk, MemoryFacts, cpu, disk, memory
from flexengine.shell.doctor.software import Compiler, Software, compilers, software

_TORCH_SECONDS, _MEASURE_SECONDS = 120, 900  # limits of the process that imports torch


@dataclass(frozen=True)
class CacheFacts:
    """The cache directory."""

    path: str
    bytes: int  # of its items
    by_kind: dict[str, int]  # bytes of each kind of item
    leftovers: int  # bytes of killed jobs' files that can be removed
    hub_path: str  # directory of downloads from the hub
    hub_bytes: int  # of the downloads
    problem: str  # why jobs cannot write to the cache; "" if they can


@dataclass(frozen=True)
class Facts:
    """Facts about machine and installation. Failed stands for facts that could not be found out."""

    cpu: Cpu | Failed
    memory: MemoryFacts | Failed
    disks: tuple[Disk | Failed, ...]
    software: Software | Failed
    compilers: tuple[Compiler, ...] | Failed
    cache: CacheFacts | Failed
    engine: dict[str, Any] | Failed  # facts that need torch, as `probe` prints them

    def part(self, name: str) -> dict[str, Any]:
        """Return a part of `engine`; {} if it is missing or failed."""
        value = self.engine.get(name) if isinstance(self.engine, dict) else None
        return value if isinstance(value, dict) and "error" not in value else {}

    @property
    def gpus(self) -> list[dict[str, Any]]:
        value = self.engine.get("gpus") if isinstance(self.engine, dict) else None
        return value if isinstance(value, list) else []

    def to_json(self) -> dict[str, Any]:
        """Return the facts as one JSON-able object."""
        values: dict[str, Any] = {"flexengine": __version__}
        for each in fields(self):
            part = getattr(self, each.name)
            if isinstance(part, tuple):
                values[each.name] = list(map(asdict, part))
            elif each.name == "engine" and isinstance(part, dict):
                values |= part
            else:
                values[each.name] = asdict(part)
        return values


def collect(offload: Sequence[Path] = (), measure: bool = False) -> Facts:
    """Return all facts.

    Args:
        offload: offload directories; default: the one in the cache.
        measure: measure the rates of the disks and the memory, which takes about ten seconds.
    """
    cached = attempt(cache_root)
    directories = list(offload) or ([] if isinstance(cached, Failed) else [cached / "offload"])
    hub = attempt(hub_directory)
    named = [("cache", cached), *(("offload", path) for path in directories), ("hub", hub), ("current", Path())]
    disks = tuple(attempt(partial(_disk, use, path)) for use, path in named if not isinstance(path, Failed))
    engine = attempt(lambda: _engine(directories, disks, measure))
    return Facts(attempt(cpu), attempt(memory), disks, attempt(software), attempt(compilers), attempt(_cache), engine)


def _disk(use: str, path: Path) -> Disk:
    try:
        return disk(use, path)
    except Exception as error:
        raise RuntimeError(f"the {use} directory cannot be examined: {error}") from error


def _cache() -> CacheFacts:
    root, (hub, downloads) = cache_root(), hub_cache()
    problem = _unwritable(root)
    by_kind: Counter[str] = Counter()
    garbage = 0
    try:
        items = contents(root).items
    except OSError as error:
        items, problem = [], problem or f"cannot be read: {error.strerror}"
    for item in items:
        by_kind[item.kind] += item.bytes
        garbage += item.bytes if item.kind == "leftovers" and not item.busy else 0
    return CacheFacts(str(root), by_kind.total(), dict(by_kind), garbage, str(hub), downloads, problem)


def _unwritable(root: Path) -> str:
    """Return why no file can be written to the cache, or to a folder in it; "" if files can be written."""
    from flexengine.tier.limits import nearest

    places = [root / name for name in ("prepared", "kernels", "hardware") if (root / name).exists()]
    for place in places or [nearest(root)]:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            return f"{place} cannot be written: {error.strerror or error}"
    return ""


def _engine(offload: Sequence[Path], disks: Sequence[Disk | Failed], measure: bool) -> dict[str, Any]:
    """Return the facts that need torch, from a process of their own. Raise RuntimeError if the process fails."""
    first = str(offload[0]) if offload else os.devnull
    request = json.dumps({"offload": first, "disks": _apart(disks), "measure": measure})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "flexengine.shell.doctor.probe", request],
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if measure else subprocess.PIPE,
        timeout=_MEASURE_SECONDS if measure else _TORCH_SECONDS,
    )
    if ran.returncode:
        lines = (ran.stderr or "").strip().splitlines() or ["see above"]
        how = f"signal {signal.Signals(-ran.returncode).name}" if ran.returncode < 0 else lines[-1]
        raise RuntimeError(f"torch and the kernels cannot be loaded: {how}")
    values: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return values


def _apart(disks: Sequence[Disk | Failed]) -> list[str]:
    """Return one writable directory for each disk, that of the offload directory first. Of those in RAM only the
    offload directory is taken, as RAM is no disk."""
    usable = [each for each in disks if isinstance(each, Disk) and each.writable and each.free]
    usable.sort(key=lambda each: each.use != "offload")
    by_device: dict[int, str] = {}
    for each in usable:
        if each.use == "offload" or not each.in_ram:
            by_device.setdefault(each.device, each.path)
    return list(by_device.values())[:MOST_DISKS]
